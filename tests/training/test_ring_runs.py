"""A run whose rows are split over context, in a ring: the steps of one device."""

import numpy as np
import pytest
from tiny_run import metrics_rows, tiny_config, train_on


def run(folder, devices: int, **fields) -> list[dict]:
    """The metrics of two steps of GRPO behind one of SFT."""
    config = tiny_config(
        folder,
        steps=2,
        sft__steps=1,
        evaluate__every_steps=0,
        checkpoint__every_steps=0,
        algorithm__kl_in_loss=0.01,
        **fields,
    )
    train_on(devices, config)
    return metrics_rows(folder)


@pytest.mark.slow
def test_steps_over_context_are_those_of_one_device(tmp_path):
    """Three heads over four devices: learning, log-probs and SFT all go round."""
    one = run(tmp_path / "one", 1)
    many = run(tmp_path / "many", 4, mesh__context=4)
    assert [row["step"] for row in one] == [row["step"] for row in many]
    for row, wanted in zip(many, one, strict=True):
        assert row.keys() == wanted.keys()
        for name, value in wanted.items():
            if isinstance(value, float):
                np.testing.assert_allclose(row[name], value, rtol=2e-3, atol=1e-5, err_msg=name)
