"""The learning phases: one program over a mesh, equal verb by verb, on 1 and 8 devices, and to
TRL's trainers."""

import dataclasses
import glob
import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import golden, golden_cases
from toy import objective
from trl_runs import assert_final, trl_optimizer

from rljax import learn as update
from rljax.arrays import place
from rljax.batch import batch_from_rows
from rljax.components import resolve
from rljax.config import NAMESPACES, OptimizerConfig
from rljax.dataflows.algorithm import Algorithm
from rljax.dataflows.grpo import grpo
from rljax.dataflows.ppo import ppo
from rljax.learn import Steps
from rljax.learn.optimizers import make_optimizer
from rljax.losses import policy
from rljax.losses.kl import importance_corrected_kl
from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.huggingface import load_config, load_params
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


@pytest.fixture(scope="module")
def ppo_on_one(one_device):
    roles, metrics = ppo(host_batch(), KEY, recipe("gae(lam=0.95)", STEPS), **roles_on(one_device))
    return jax.device_get({k: roles[k].state.params for k in roles}), metrics


def assert_close(got, want, atol=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=atol, rtol=1e-5)


def test_eight_devices_give_the_parameters_of_one_after_a_ppo_step(ppo_on_one):
    """data=2, fsdp=2, tensor=2: actor and critic to 1e-5, and every metric."""
    mesh = make_mesh(2, 2, 2)
    roles, metrics = ppo(
        place(jax.device_get(host_batch()), mesh),
        KEY,
        recipe("gae(lam=0.95)", STEPS),
        **roles_on(mesh),
    )
    want, want_metrics = ppo_on_one
    assert_close(jax.device_get({k: roles[k].state.params for k in roles}), want)
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
def test_verb_by_verb_equals_the_program(ppo_on_one, one_device):
    """The same text without jit: what one debugs is what runs."""
    roles, metrics = ppo.page(
        host_batch(), KEY, recipe("gae(lam=0.95)", STEPS), **roles_on(one_device)
    )
    want, want_metrics = ppo_on_one
    assert_close({k: roles[k].state.params for k in want}, want)
    np.testing.assert_allclose(metrics["critic/vf_loss"], want_metrics["critic/vf_loss"], rtol=1e-4)


@pytest.mark.parametrize("page, advantage", [(grpo, "group_relative"), (ppo, "gae")])
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


def test_trained_roles_are_donated_and_frozen_ones_kept(one_device):
    roles = roles_on(one_device)
    del roles["critic"]
    old = jax.tree.leaves(roles["actor"].state.params)[0]
    frozen = jax.device_get(roles["reference"].params)
    grpo(host_batch(), KEY, recipe("group_relative", STEPS), **roles)
    assert old.is_deleted()
    assert_close(roles["reference"].params, frozen, atol=0)


# -- six steps of TRL's trainers
# ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trl_model(one_device):
    folder = golden("trl_traj", "model")
    return folder, Model(load_config(folder, remat="none"), one_device)


def follow(model, folder, meta, cases, to_batch, loss, reduction=update.token_mean):
    """Every recorded micro-batch through our update; compares losses, gradient norms and final
    weights."""
    optimizer = trl_optimizer(meta)
    state = start_training(model, load_params(folder, model), optimizer)
    step = jax.jit(
        lambda s, b: update.fit(
            s,
            b,
            objective(model, loss, reduction),
            optimizer=optimizer,
            steps=Steps(b.rows, b.rows),
        )
    )
    losses, norms = [], []
    for case in cases:
        state, metrics, _ = step(state, to_batch(case.inputs))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    np.testing.assert_allclose(
        losses, [float(c.outputs["loss"]) for c in cases], rtol=1e-4, atol=1e-5
    )
    return state, norms


def test_six_sft_steps_equal_trl(trl_model):
    folder, model = trl_model
    meta, cases = golden_cases("trl_traj", "sft.npz")

    def to_batch(x):
        labels, lengths = x["labels"], x["attention_mask"].sum(axis=1)
        mask = np.where(labels != -100, 1.0, 0.0).astype(np.float32)
        mask[:, 0] = 0
        mask = np.pad(mask, ((0, 0), (0, 16 - mask.shape[1])))  # one shape, one compile
        tokens = np.pad(x["input_ids"], ((0, 0), (0, 16 - labels.shape[1])))
        return batch_from_rows(
            jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths), jnp.asarray(mask)
        )

    loss = policy.negative_log_likelihood
    state, norms = follow(model, folder, meta, cases, to_batch, loss)
    assert_final("sft", model, state, norms)


def test_six_grpo_steps_equal_trl(trl_model):
    """TRL's "dapo" loss: clip 0.2/0.28, token mean, 0.04 k3, two passes over each batch."""
    folder, model = trl_model
    meta, cases = golden_cases("trl_traj", "grpo.npz")

    def to_batch(x):
        prompt, completion = x["prompt_mask"].sum(axis=1), x["completion_mask"].sum(axis=1)
        rows, columns = len(prompt), 24
        tokens = np.zeros((rows, columns), np.int32)
        fields = {k: np.zeros((rows, columns), np.float32) for k in ("mask", "old", "ref", "adv")}
        for i, (p, c) in enumerate(zip(prompt.astype(int), completion.astype(int), strict=True)):
            tokens[i, :p] = x["prompt_ids"][i][x["prompt_mask"][i] > 0]
            tokens[i, p : p + c] = x["completion_ids"][i, :c]
            fields["mask"][i, p : p + c] = 1
            fields["old"][i, p : p + c] = x["old_per_token_logps"][i, :c]
            fields["ref"][i, p : p + c] = x["ref_per_token_logps"][i, :c]
            fields["adv"][i, p : p + c] = x["advantages"][i]
        return batch_from_rows(
            jnp.asarray(tokens),
            jnp.asarray(prompt + completion),
            jnp.asarray(fields["mask"]),
            old_logprobs=jnp.asarray(fields["old"]),
            ref_logprobs=jnp.asarray(fields["ref"]),
            advantages=jnp.asarray(fields["adv"]),
        )

    def with_kl(now, b):
        loss, metrics = policy.ppo_clip(
            now, b, clip_low=meta["epsilon"], clip_high=meta["epsilon_high"], dual_clip=None
        )
        # TRL 1.16 weighs its KL by the ratio: algorithm.kl_importance here.
        kl = importance_corrected_kl(now.logprobs, b.ref_logprobs, b.old_logprobs, "k3")
        return loss + meta["beta"] * kl, metrics

    state, norms = follow(model, folder, meta, cases, to_batch, with_kl)
    assert_final("grpo", model, state, norms)


def test_six_rloo_steps_equal_trl(trl_model):
    """TRL's RLOO: PPO's clip on the product of a response's ratios, two passes over each batch."""
    folder, model = trl_model
    meta, cases = golden_cases("trl_traj", "rloo.npz")

    def to_batch(x):
        prompt, completion = x["prompt_mask"].sum(axis=1), x["completion_mask"].sum(axis=1)
        rows, columns = len(prompt), 24
        tokens = np.zeros((rows, columns), np.int32)
        fields = {k: np.zeros((rows, columns), np.float32) for k in ("mask", "old", "adv")}
        for i, (p, c) in enumerate(zip(prompt.astype(int), completion.astype(int), strict=True)):
            tokens[i, :p] = x["prompt_ids"][i][x["prompt_mask"][i] > 0]
            tokens[i, p : p + c] = x["completion_ids"][i, :c]
            fields["mask"][i, p : p + c] = 1
            fields["old"][i, p] = x["old_logps"][i]  # of the whole response: only the sum counts
            fields["adv"][i, p : p + c] = x["advantages"][i]
        return batch_from_rows(
            jnp.asarray(tokens),
            jnp.asarray(prompt + completion),
            jnp.asarray(fields["mask"]),
            old_logprobs=jnp.asarray(fields["old"]),
            advantages=jnp.asarray(fields["adv"]),
        )

    def loss(now, b):
        e = meta["epsilon"]
        return policy.gspo(now, b, clip_low=e, clip_high=e, length_normalized=False)

    reduction = update.seq_mean_token_mean
    state, norms = follow(model, folder, meta, cases, to_batch, loss, reduction)
    assert_final("rloo", model, state, norms)
