"""Six steps of TRL's DPO, KTO and reward trainers, replayed by our dataflows' own programs: losses,
gradient norms and final weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import golden, golden_cases
from trl_runs import COLUMNS, assert_final, trl_optimizer

from rljax.batch import batch_from_rows
from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.dataflows.algorithm import Algorithm
from rljax.dataflows.kto import kto
from rljax.dataflows.preference import preference
from rljax.dataflows.reward_model import reward_model
from rljax.learn import Steps, token_mean
from rljax.mesh import make_mesh
from rljax.models.huggingface import load_config, load_params
from rljax.models.model import Model
from rljax.roles import Actor, Reference, RewardModel, start_training

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(1, 1, 1, devices=jax.devices()[:1])


def load(mesh, folder: str, head: str = "lm"):
    path = golden("trl_traj", folder)
    model = Model(load_config(path, remat="none"), mesh, head)
    return model, load_params(path, model)


def recipe(rows: int, **stages) -> Algorithm:
    made = {name: resolve(text, NAMESPACES[name]) for name, text in stages.items()}
    return Algorithm(None, None, None, token_mean, Steps(rows, rows), **made)


def pairs_first(x: np.ndarray) -> np.ndarray:
    """TRL stacks chosen on rejected; an example is two rows that follow each other here."""
    half = len(x) // 2
    return np.stack([x[:half], x[half:]], axis=1).reshape(len(x), *x.shape[1:])


def batch_of(ids, attention, mask, **fields):
    pad = lambda x: np.pad(x, ((0, 0), (0, COLUMNS - x.shape[1])))  # noqa: E731
    return batch_from_rows(
        jnp.asarray(pad(ids), jnp.int32),
        jnp.asarray(attention.sum(axis=1)),
        jnp.asarray(pad(mask), jnp.float32),
        **fields,
    )


def followed(meta, cases, role, call):
    """(the role after all recorded batches, its losses compared; gradient norms)."""
    losses, norms = [], []
    for case in cases:
        role, metrics = call(role, case.inputs)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    want = [float(c.outputs["loss"]) for c in cases]
    np.testing.assert_allclose(losses, want, rtol=1e-4, atol=1e-5)
    return role, norms


def actor_and_reference(mesh, meta):
    model, params = load(mesh, "model")
    optimizer = trl_optimizer(meta)
    actor = Actor(start_training(model, params, optimizer), model, optimizer, 1.0)
    return actor, Reference(load(mesh, "model")[1], model, 1.0)


def test_six_dpo_steps_equal_trl(mesh):
    meta, cases = golden_cases("trl_traj", "dpo.npz")
    actor, reference = actor_and_reference(mesh, meta)
    text = f"dpo(beta={meta['beta']}, losses=({meta['loss_type']!r},))"
    cfg = recipe(len(cases[0].inputs["input_ids"]), preference_loss=text)

    def call(actor, x):
        names = ("input_ids", "attention_mask", "completion_mask")
        batch = batch_of(*(pairs_first(x[name]) for name in names))
        new, metrics = preference(batch, KEY, cfg, actor=actor, reference=reference)
        return new["actor"], metrics

    actor, norms = followed(meta, cases, actor, call)
    assert_final("dpo", actor.model, actor.state, norms)


def test_six_kto_steps_equal_trl(mesh):
    meta, cases = golden_cases("trl_traj", "kto.npz")
    actor, reference = actor_and_reference(mesh, meta)
    text = (
        f"{meta['loss_type']}(beta={meta['beta']}, desirable_weight={meta['desirable_weight']}, "
        f"undesirable_weight={meta['undesirable_weight']})"
    )
    cfg = recipe(len(cases[0].inputs["input_ids"]), preference_loss=text)

    def call(actor, x):
        label = jnp.where(jnp.asarray(x["label"]) > 0, 1.0, -1.0)
        own = batch_of(x["input_ids"], x["attention_mask"], x["completion_mask"], scores=label)
        names = ("KL_input_ids", "KL_attention_mask", "KL_completion_mask")
        other = batch_of(*(x[name] for name in names))
        other = other.replace(scores=jnp.zeros_like(label))
        both = jax.tree.map(lambda a, b: jnp.stack([a, b], 1).reshape(-1, *a.shape[1:]), own, other)
        new, metrics = kto(both, KEY, cfg, actor=actor, reference=reference)
        return new["actor"], metrics

    actor, norms = followed(meta, cases, actor, call)
    assert_final("kto", actor.model, actor.state, norms)


def test_six_reward_model_steps_equal_trl(mesh):
    meta, cases = golden_cases("trl_traj", "reward.npz")
    model, params = load(mesh, "reward_model", "scalar")
    optimizer = trl_optimizer(meta)
    role = RewardModel(start_training(model, params, optimizer), model, optimizer)
    center = meta.get("center_rewards_coefficient") or 0.0
    text = f"bradley_terry(center={center})"
    cfg = recipe(len(cases[0].inputs["input_ids"]), reward_loss=text)

    def call(role, x):
        ids, attention = (pairs_first(x[name]) for name in ("input_ids", "attention_mask"))
        batch = batch_of(ids, attention, attention)
        new, metrics = reward_model(batch, KEY, cfg, reward_model=role)
        return new["reward_model"], metrics

    role, norms = followed(meta, cases, role, call)
    assert_final("reward", role.model, role.state, norms)
