"""Runs in float16 and with bfloat16 weights: overflows are no faults, a resumed run goes on bit by
bit, and what presets learn is what they learn in float32."""

import math
import sys

import jax
import numpy as np
import pytest
from explained import unexplained
from preset_runs import preset_config
from tiny_run import flat_bytes, tiny_config

from rljax import setup as build
from rljax.setup import role_arrays
from rljax.tracking.trackers import open_tracking
from rljax.training import bad_batch, train
from rljax.training.health import narrowest_numbers
from rljax.training.loop import one_step
from rljax.training.run import Run

LOSS = '''
from rljax.losses.policy import ppo_clip

def times(policy, batch, *, factor):
    """ppo_clip, so large that its gradient times 2^16 leaves float16."""
    loss, metrics = ppo_clip(policy, batch)
    return factor * loss, metrics
'''


@pytest.fixture
def own_loss(tmp_path, monkeypatch):
    (tmp_path / "large_loss.py").write_text(LOSS)
    monkeypatch.syspath_prepend(tmp_path)
    yield "large_loss.times(factor=3e4)"
    sys.modules.pop("large_loss", None)


@pytest.mark.slow
def test_a_run_of_two_byte_numbers_overflows_learns_and_resumes_bitwise(own_loss, tmp_path):
    """Products in float16, weights in bfloat16, decoding in float32: the scale halves until a step
    can be taken; a checkpoint has scale and key, so that the same steps follow from it."""
    config = tiny_config(
        tmp_path / "run",
        model_settings__dtype="float16",
        model_settings__weight_dtype="bfloat16",
        model_settings__head_in_float32=False,
        sampler__dtype="float32",
        sft__steps=0,
        steps=30,
        model="decoder(layers=1, embed=32, mlp=32, heads=1, kv_heads=1, head_dim=32)",
        algorithm__policy_loss=own_loss,
        evaluate__every_steps=0,
        evaluate__prompts=0,
        export=False,
    )
    devices = jax.devices()[:1]
    with (
        Run(build.build(config, devices), tmp_path / "run") as run,
        open_tracking((), tmp_path / "run", {}) as tracking,
    ):
        run.start(tracking)
        rows = []
        while not rows or rows[-1]["overflow_steps"]:
            rows.append(one_step(run))
        run.save(tracking)
        run.checkpoints.wait()
        saved, step = flat_bytes(role_arrays(run.roles)), run.progress.step
        more = [one_step(run) for _ in range(2)]
        want = flat_bytes(role_arrays(run.roles))
        run.load(step)
        assert flat_bytes(role_arrays(run.roles)) == saved
        again = [one_step(run) for _ in range(2)]
        assert flat_bytes(role_arrays(run.roles)) == want
    overflows = sum(row["overflow_steps"] for row in rows)
    assert 2 <= overflows < 16 and rows[0]["overflow_steps"] == 2
    assert rows[-1]["loss_scale"] == 2.0**16 / 2.0**overflows
    state = run.roles["actor"].state
    assert int(state.step) == 2 * (len(rows) + 2) - overflows
    for row in (*rows, *more):
        assert row["skipped_steps"] == row["skipped_in_a_row"] == 0
        assert all(math.isfinite(x) for x in row.values() if isinstance(x, float))
        assert unexplained(row) == set()
    assert not bad_batch.kept_steps(tmp_path / "run") and not run.progress.faults.get(
        "skipped_steps"
    )
    for one, other in zip(more, again, strict=True):
        assert (one["loss"], one["grad_norm"]) == (other["loss"], other["grad_norm"])
    assert {str(x.dtype) for x in jax.tree.leaves(state.params)} == {"bfloat16"}
    assert narrowest_numbers(config, run.setup.model.mesh) == "float16"
    assert rows[0]["lr"] == 0 or rows[0]["lr"] <= more[-1]["lr"]


PRECISIONS = {
    "bfloat16": {"dtype": "bfloat16"},
    "rounded": {"dtype": "bfloat16", "weight_dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
}


def learned(folder, preset: str, seed: int, **settings) -> dict:
    """Mean reward of the last ten steps, held-out accuracy, mean mismatch, and steps not taken."""
    config = preset_config(preset, seed)
    for name, value in settings.items():
        setattr(config.model_settings, name, value)
    config.run_dir, config.trackers, config.export = str(folder), (), False
    rows = train(config, devices=jax.devices()[:1]).metrics.to_pylist()
    rows = [{name: x for name, x in row.items() if x is not None} for row in rows]
    return {
        "reward": float(np.mean([row["reward/mean"] for row in rows[-10:]])),
        "accuracy": [row["eval/accuracy"] for row in rows if "eval/accuracy" in row][-1],
        "mismatch": float(
            np.mean([r[k] for r in rows if (k := "mismatch/abs_logprob_diff_mean") in r])
        ),
        "skipped": sum(row.get("skipped_steps", 0.0) for row in rows),
    }


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["grpo", "ppo"])
def test_presets_learn_in_every_precision_what_they_learn_in_float32(tmp_path, preset):
    """Over three seeds (benchmarks/training_precision.py prints intervals); float16 has a fraction
    of the mismatch of bfloat16."""
    mismatch = dict.fromkeys(PRECISIONS, 0.0)
    for seed in range(3):
        exact = learned(tmp_path / f"float32 {seed}", preset, seed)
        for name, settings in PRECISIONS.items():
            found = learned(tmp_path / f"{name} {seed}", preset, seed, **settings)
            assert abs(found["reward"] - exact["reward"]) < 0.05, (name, seed)
            assert found["accuracy"] == exact["accuracy"] == 1.0
            assert found["skipped"] == 0
            mismatch[name] += found["mismatch"]
    assert 0 < mismatch["float16"] < mismatch["bfloat16"] / 4
