"""Runs of a model with gated delta nets: log-probs of sampler and trainer, a critic, experts,
adapters, trajectories in flight, devices, the exported folder, and learning."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import assert_same_run, metrics_rows, summary, tiny_config, train_on, train_on_one

from rljax.batch import batch_from_rows
from rljax.config.flags import load_config_file
from rljax.mesh import make_mesh
from rljax.models.huggingface import load_config, load_params
from rljax.models.model import Model

SIZES = "embed=32, mlp=48, heads=2, kv_heads=2, head_dim=16, full_attention_interval=2"
MODEL, MIXED = f"decoder(layers=3, {SIZES})", f"decoder(layers=2, {SIZES}, experts=4)"


def config_of(run_dir, **fields):
    small = dict(model=MODEL, steps=2, sft__steps=0, evaluate__every_steps=0, batch__epochs=2)
    small |= dict(algorithm__kl_in_loss=0.01)
    return tiny_config(run_dir, **(small | fields))


def assert_no_mismatch(folder):
    """The trainer finds the log-probs that the sampler recorded."""
    rows = [row for row in metrics_rows(folder) if "mismatch/mismatch_kl" in row]
    assert len(rows) == 2
    assert all(row["mismatch/mismatch_k3_kl"] < 1e-7 for row in rows), rows


@pytest.mark.slow
def test_a_run_and_its_policy(tmp_path):
    """PPO with a critic and a reference; transformers computes what the exported policy does."""
    critic = dict(dataflow="ppo", algorithm__advantage="gae()")
    train_on_one(config_of(tmp_path / "run", **critic))
    assert_no_mismatch(tmp_path / "run")
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    folder = tmp_path / "run" / "policy"
    kind = json.loads((folder / "config.json").read_text())["architectures"]
    assert kind == ["Qwen3_5ForCausalLM"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    model = Model(load_config(folder), make_mesh(devices=jax.devices()[:1]))
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, 9)).astype(np.int32)
    batch = batch_from_rows(jnp.asarray(tokens), jnp.array([9]), jnp.ones((1, 9)))
    with torch.no_grad():
        want = theirs(torch.tensor(tokens).long()).logits.numpy()
    got = jax.jit(model.logits)(load_params(folder, model), batch)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        dict(model=MIXED, sampler__router_replay=True),
        dict(lora__rank=2),
        dict(rollouts__max_staleness=2, rollouts__clock="logical(1)"),
        dict(
            rollouts__max_staleness=2,
            rollouts__clock="logical(1)",
            sampler__page_tokens=4,
            sampler__loop="host",
        ),
        dict(batch__packing=False),
    ],
    ids=["experts", "adapters", "in flight", "in flight, pages", "not packed"],
)
def test_sampler_and_trainer_agree(fields, tmp_path):
    train_on_one(config_of(tmp_path / "run", **fields))
    if "rollouts__max_staleness" in fields:  # versions differ within a sample
        assert summary(tmp_path / "run")["steps"] >= 2
    else:
        assert_no_mismatch(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_several_devices_are_one(devices, tmp_path):
    """Each step's loss, with heads over two devices, and rows over two pairs of them."""
    train_on_one(config_of(tmp_path / "one"))
    train_on(devices, config_of(tmp_path / "several", mesh__tensor=2))
    got, want = (
        [row["loss"] for row in metrics_rows(tmp_path / name)] for name in ("several", "one")
    )
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-6)


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    """From its checkpoint of step 2, as a killed run leaves it."""
    fields = dict(steps=4, checkpoint__every_steps=2)
    train_on_one(config_of(tmp_path / "whole", **fields))
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for name in ("checkpoints/00000004", "policy"):
        shutil.rmtree(tmp_path / "cut" / name)
    (tmp_path / "cut" / "summary.json").unlink()
    train_on_one(config_of(tmp_path / "cut", **fields))
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns_to_count(seed, tmp_path):
    """The quickstart with every second layer a gated delta net."""
    config = load_config_file("quickstart:demo")
    config.model = config.model.replace("layers=2,", "layers=2, full_attention_interval=2,")
    config.run_dir, config.seed = str(tmp_path / "run"), seed
    config.checkpoint.every_steps = 0
    train_on_one(config)
    told = summary(tmp_path / "run")
    before, after = (told[f"accuracy_{when}"]["value"] for when in ("before", "after"))
    assert before < 0.45 and after > 0.55
