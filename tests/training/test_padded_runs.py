"""A run on meshes that divide neither its heads nor its vocabulary: the steps of one device, from
the first draw over a resume on another mesh to the exported folder."""

import numpy as np
import pytest
from tiny_run import metrics_rows, tiny_config, train_on

FIELDS = dict(steps=4, sft__steps=2, evaluate__every_steps=2, algorithm__kl_in_loss=0.01)


def assert_same_rows(folder, wanted_folder) -> None:
    rows, wanted_rows = metrics_rows(folder), metrics_rows(wanted_folder)
    assert [row["step"] for row in rows] == [row["step"] for row in wanted_rows]
    for row, wanted in zip(rows, wanted_rows, strict=True):
        assert row.keys() == wanted.keys()
        for name, value in wanted.items():
            if isinstance(value, float):
                np.testing.assert_allclose(row[name], value, rtol=5e-3, atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_a_run_goes_on_upon_another_mesh_as_on_one_device(tmp_path):
    """Three heads on tensor=8, then on fsdp=4 x tensor=2, as a run of eight chips is moved."""
    one, moved = tmp_path / "one", tmp_path / "moved"
    train_on(1, tiny_config(one, **FIELDS))
    begun = {**FIELDS, "steps": 2}
    train_on(8, tiny_config(moved, **begun, mesh__fsdp=1, mesh__tensor=8))
    other = dict(mesh__fsdp=4, mesh__tensor=2)
    other["checkpoint__allow_changed"] = ("mesh.fsdp", "mesh.tensor", "steps")
    train_on(8, tiny_config(moved, **FIELDS, **other))
    assert_same_rows(moved, one)
