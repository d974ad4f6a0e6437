"""Runs of a mixture of experts: the load-balance loss, router replay, and adapters of experts over
a base of codes, through checkpoints and the exported folder."""

import dataclasses
import json

import jax
import pytest
from tiny_run import metrics_rows, tiny_config, train_on_one

from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models.adapters import lora
from rljax.models.config import LoraConfig
from rljax.models.huggingface import load_config, load_params
from rljax.models.huggingface.peft import load_adapter
from rljax.models.model import Model

MODEL = (
    "decoder(layers=2, embed=32, mlp=48, heads=2, kv_heads=2, head_dim=16, experts=4, "
    "experts_per_token=2)"
)


def config_of(run_dir, **fields):
    small = dict(
        model=MODEL,
        steps=2,
        sft__steps=2,
        evaluate__every_steps=0,
        batch__epochs=2,
        sampler__router_replay=True,
        model_settings__router_aux_loss_coef=0.01,
        algorithm__kl_in_loss=0.01,
    )
    return tiny_config(run_dir, **(small | fields))


@pytest.mark.slow
def test_a_run_replays_routes_and_balances_the_load(tmp_path):
    """With two epochs, so that old log-probs have a pass of their own, and a reference."""
    train_on_one(config_of(tmp_path / "whole"))
    rows = metrics_rows(tmp_path / "whole")
    learned = [row for row in rows if "mismatch/mismatch_kl" in row]
    assert len(learned) == 2
    for row in learned:
        assert row["router_aux_loss"] > 1 and row["expert_load_max"] >= 1
        assert row["mismatch/mismatch_k3_kl"] < 1e-6
    assert sum("router_aux_loss" in row for row in rows) == 4  # the supervised steps have it, too


@pytest.mark.slow
def test_adapters_of_experts_over_codes_are_saved_and_merged(tmp_path):
    config = config_of(
        tmp_path / "run", lora__rank=2, lora__targets=("*_proj", "*.experts.*"), lora__base="int8"
    )
    train_on_one(config)
    assert metrics_rows(tmp_path / "run")[-1]["router_aux_loss"] > 1
    said = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert said["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    model = Model(load_config(tmp_path / "run" / "policy"), make_mesh(devices=jax.devices()[:1]))
    merged = load_params(tmp_path / "run" / "policy", model)
    wish = LoraConfig(2, 32.0, ("*_proj", "*.experts.*"), "float32")
    adapted = dataclasses.replace(model, config=dataclasses.replace(model.config, lora=wish))
    fresh = lora.attach(adapted, merged, jax.random.key(0))
    read = load_adapter(tmp_path / "run" / "adapter", adapted, fresh)
    assert float(abs(read["layers"]["0"]["mlp"]["adapters"]["down"]["lora_b"]).max()) > 0


def test_a_dense_model_has_no_routes(tmp_path):
    dense = tiny_config(tmp_path / "run", sampler__router_replay=True)
    with pytest.raises(InputError, match="sampler.router_replay"):
        train_on_one(dense)
