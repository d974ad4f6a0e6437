"""The learning phases: one program over a mesh, equal verb by verb, on 1 and 8 devices."""

import dataclasses
import functools
import glob
import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.arrays import place
from rljax.batch import batch_from_rows
from rljax.components import resolve
from rljax.config import NAMESPACES, OptimizerConfig
from rljax.dataflows.algorithm import Algorithm
from rljax.dataflows.grpo import grpo
from rljax.dataflows.ppo import ppo
from rljax.learn import Steps
from rljax.learn.optimizers import make_optimizer
from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.model import Model
from rljax.roles import Actor, Critic, Reference, start_training

CONFIG = decoder(16, layers=2, embed=16, mlp=32, heads=4, kv_heads=2, head_dim=8, init_std=0.3)
OPTIMIZER = make_optimizer(OptimizerConfig(lr=1e-2), 0)
ROWS, COLUMNS = 16, 10
KEY = jax.random.key(0)


def recipe(advantage: str, steps: Steps) -> Algorithm:
    return Algorithm(
        samples_per_prompt=4,
        advantage=resolve(advantage, NAMESPACES["advantage"]),
        policy_loss=resolve("ppo_clip", NAMESPACES["policy_loss"]),
        value_loss=resolve("squared_error", NAMESPACES["value_loss"]),
        reduction=resolve("token_mean", NAMESPACES["reduction"]),
        kl_in_reward=0.05,
        kl_in_loss=0.01,
        kl_estimator="k3",
        entropy_coef=0.01,
        steps=steps,
    )


def host_batch():
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, COLUMNS + 1, ROWS)
    column = np.arange(COLUMNS)[None]
    mask = ((column >= 3) & (column < lengths[:, None])).astype(np.float32)
    rewards = np.zeros((ROWS, COLUMNS), np.float32)
    rewards[np.arange(ROWS), lengths - 1] = rng.integers(0, 2, ROWS)
    return batch_from_rows(
        jnp.asarray(rng.integers(0, 16, (ROWS, COLUMNS)), jnp.int32),
        jnp.asarray(lengths),
        jnp.asarray(mask),
        rewards=jnp.asarray(rewards),
        group=jnp.repeat(jnp.arange(4, dtype=jnp.int32), 4),
        finish_reason=jnp.zeros(ROWS, jnp.int32),
        sampler_logprobs=jnp.asarray(mask * -2.0),
    )


def roles_on(mesh) -> dict:
    """Actor, critic and reference with the same numbers on any mesh."""
    one = Model(CONFIG, make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    made = {"actor": one, "critic": dataclasses.replace(one, head="scalar"), "reference": one}
    out = {}
    for i, (name, model) in enumerate(made.items()):
        params = jax.device_get(model.init(jax.random.key(i)))
        model = dataclasses.replace(model, mesh=mesh)
        params = jax.device_put(params, model.shardings())
        if name == "reference":
            out[name] = Reference(params, model, 1.0)
        else:
            state = start_training(model, params, OPTIMIZER)
            out[name] = (
                Actor(state, model, OPTIMIZER, 1.0)
                if name == "actor"
                else Critic(state, model, OPTIMIZER)
            )
    return out


@pytest.fixture(scope="module")
def one_device():
    return make_mesh(1, 1, 1, devices=jax.devices()[:1])


STEPS = Steps(rows=8, microbatch_rows=4, epochs=2)


GRPO, PPO = (grpo, "group_relative"), (ppo, "gae(lam=0.95)")


def read_by(page, roles: dict) -> dict:
    return {name: role for name, role in roles.items() if page is ppo or name != "critic"}


@functools.cache
def on_one(page, advantage):
    """What is trained, and metrics."""
    roles = read_by(page, roles_on(make_mesh(1, 1, 1, devices=jax.devices()[:1])))
    roles, metrics = page(host_batch(), KEY, recipe(advantage, STEPS), **roles)
    trained = {k: roles[k].state.params for k in roles if hasattr(roles[k], "state")}
    return jax.device_get(trained), jax.device_get(metrics)


def assert_close(got, want, atol=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=atol, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("page, advantage", [GRPO, pytest.param(*PPO, marks=pytest.mark.slow)])
def test_eight_devices_give_the_parameters_of_one_after_a_step(page, advantage):
    """data=2, fsdp=2, tensor=2: actor (and critic) to 1e-5, and every metric."""
    mesh = make_mesh(2, 2, 2)
    roles, metrics = page(
        place(jax.device_get(host_batch()), mesh),
        KEY,
        recipe(advantage, STEPS),
        **read_by(page, roles_on(mesh)),
    )
    want, want_metrics = on_one(page, advantage)
    assert set(want) == set(read_by(page, {"actor": 0, "critic": 0}))
    assert_close(jax.device_get({k: roles[k].state.params for k in want}), want)
    for name, value in want_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-3, atol=1e-4, err_msg=name)
    # Every weight still lies where it was put: no step re-lays it out.
    for leaf, sharding in zip(
        jax.tree.leaves(roles["actor"].state.params),
        jax.tree.leaves(roles["actor"].model.shardings()),
        strict=True,
    ):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


@pytest.mark.slow
def test_verb_by_verb_equals_the_program(one_device):
    """The same text without jit: what one debugs is what runs."""
    roles, metrics = ppo.page(
        host_batch(), KEY, recipe("gae(lam=0.95)", STEPS), **roles_on(one_device)
    )
    want, want_metrics = on_one(*PPO)
    assert_close({k: roles[k].state.params for k in want}, want)
    np.testing.assert_allclose(metrics["critic/vf_loss"], want_metrics["critic/vf_loss"], rtol=1e-4)


@pytest.mark.parametrize("page, advantage", [GRPO, pytest.param(*PPO, marks=pytest.mark.slow)])
def test_the_learning_phase_is_one_program(page, advantage, one_device, tmp_path):
    """The profiler sees exactly one execution: log-probs, advantages and all optimizer steps are in
    it."""
    roles = roles_on(one_device)
    if page is grpo:
        del roles["critic"]
    settings, batch = recipe(advantage, STEPS), host_batch()
    new, _ = page(batch, KEY, settings, **roles)
    roles |= new
    with jax.profiler.trace(str(tmp_path), create_perfetto_trace=True):
        new, metrics = page(batch, KEY, settings, **roles)
    path = glob.glob(str(tmp_path / "**" / "perfetto_trace.json.gz"), recursive=True)[0]
    events = json.loads(gzip.open(path).read())
    events = events["traceEvents"] if isinstance(events, dict) else events
    calls = [e for e in events if e.get("name", "").startswith("PjitFunction(")]
    # The profiler notes each call twice, the one inside the other: keep the outer ones.
    ends = [(e["ts"], e["ts"] + e["dur"]) for e in calls]
    outer = [
        e["name"]
        for e, (a, b) in zip(calls, ends, strict=True)
        if not any(c < a and b < d for c, d in ends)
    ]
    assert outer == [f"PjitFunction({page.__name__})"], outer
    assert int(new["actor"].state.step) == 8  # two calls of 2 epochs x 2 minibatches


@pytest.mark.slow
def test_trained_roles_are_donated_and_frozen_ones_kept(one_device):
    roles = roles_on(one_device)
    del roles["critic"]
    old = jax.tree.leaves(roles["actor"].state.params)[0]
    frozen = jax.device_get(roles["reference"].params)
    grpo(host_batch(), KEY, recipe("group_relative", STEPS), **roles)
    assert old.is_deleted()
    assert_close(roles["reference"].params, frozen, atol=0)
