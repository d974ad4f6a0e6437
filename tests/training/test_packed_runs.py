"""Packed learning in a run: one program for all lengths, fewer positions, the same numbers."""

import json

import numpy as np
import pytest
from tiny_run import tiny_config, train_on_one


def learned(folder, **fields) -> list[dict]:
    """The rows of a run of two steps of 256 samples, one optimizer step each."""
    config = tiny_config(
        folder,
        steps=2,
        sft__steps=0,
        evaluate__every_steps=0,
        algorithm__kl_in_loss=0.05,
        batch__prompts_per_step=16,
        batch__samples_per_prompt=16,
        batch__sequences_per_optimizer_step=256,
        checkpoint__every_steps=0,
        export=False,
        **fields,
    )
    train_on_one(config)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_packed_run_is_the_plain_one_in_fewer_positions(tmp_path):
    plain = learned(tmp_path / "plain", batch__packing=False)
    packed = learned(tmp_path / "packed")
    full = 256 * (8 + 7)
    for before, after in zip(plain, packed, strict=True):
        assert "positions" not in before and after["learning_programs"] == 1
        # 16 samples share a prompt of 7 tokens, and responses are shorter than 7.
        assert after["positions"] < 0.6 * full and after["positions_filled"] > 0.7
        for name in ("loss", "grad_norm", "kl_loss", "entropy", "reward/mean"):
            np.testing.assert_allclose(after[name], before[name], rtol=2e-3, atol=2e-5)
