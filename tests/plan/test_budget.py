"""A model that is too large for one device trains on eight: none of them holds all of it."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_run import metrics_rows, tiny_config

from rljax.errors import InputError
from rljax.plan import memory
from rljax.plan.compiled import make_plan
from rljax.training import train

MODEL = "decoder(layers=2, embed=256, mlp=1024, heads=8, kv_heads=8, head_dim=32)"


@pytest.mark.slow
def test_a_model_above_the_budget_of_one_device_trains_on_eight(tmp_path, monkeypatch):
    config = tiny_config(
        tmp_path / "run",
        model=MODEL,
        steps=2,
        sft__steps=0,
        mesh__fsdp=8,
        export=True,
        batch__sequences_per_optimizer_step=16,
        evaluate__every_steps=0,
    )
    spread = make_plan(config, jax.devices(), None, "8 x cpu", only=["learn"])
    (learn,) = spread.reports
    weights = 4 * spread.weights
    # Less than float32 weights and two moments, and more than an eighth of all by the compiler.
    budget = 2 * weights
    assert learn.total < budget < 3 * weights
    monkeypatch.setattr(memory, "available_bytes", lambda setup: budget)
    config.mesh.fsdp = 1
    with pytest.raises(InputError, match="this run needs .* per device"):
        train(config, devices=jax.devices()[:1])
    assert not (tmp_path / "run" / "policy").exists()
    config.mesh.fsdp = 8
    summary = train(config).summary
    assert summary["status"] == "finished" and len(metrics_rows(tmp_path / "run")) == 2
    trained = load_file(tmp_path / "run" / "policy" / "model.safetensors")
    assert sum(x.nbytes for x in trained.values()) == weights
    assert all(np.isfinite(x).all() for x in trained.values())
