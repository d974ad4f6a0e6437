"""A pre-training loss beside the policy's (PPO-ptx, CHORD): the gradient changes by the coefficient
times that of the examples, however rows are cut, packed and split over devices."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import lanes
from test_packed_learning import groups

from rljax.arrays import place
from rljax.batch import Batch
from rljax.errors import InputError
from rljax.learn import Steps, token_mean
from rljax.learn.packing import Packing
from rljax.learn.state import DataParallel
from rljax.losses import policy
from rljax.mesh import make_mesh, row_shards
from rljax.models.builtin import decoder
from rljax.models.config import LoraConfig
from rljax.models.model import Model
from rljax.models.trees import merged
from rljax.roles import Actor, Pretraining, start_training

LR = 0.5
DENSE = decoder(12, layers=1, embed=16, mlp=32, heads=2, kv_heads=2, head_dim=8, init_std=0.3)
ADAPTED = dataclasses.replace(DENSE, lora=LoraConfig(2, 4.0, ("q_proj", "v_proj"), "float32"))
# mesh, model, rows of a microbatch of the policy's and of the examples, packed, spread
CASES = {
    "whole": ((1, 1), DENSE, 16, 8, False, DataParallel()),
    "packed microbatches": ((1, 2), DENSE, 8, 4, True, DataParallel()),
    "microbatches": ((1, 1), DENSE, 4, 2, False, DataParallel()),
    "replicas": ((2, 2), DENSE, 8, 4, False, DataParallel(sum_once=True)),
    "replicas, packed": ((2, 2), DENSE, 8, 4, True, DataParallel(sum_once=True)),
    "adapters": ((1, 2), ADAPTED, 8, 4, False, DataParallel()),
}


def examples(seed=1) -> Batch:
    """8 demonstrations of unequal length, prompts masked."""
    return dataclasses.replace(
        groups(seed, prompts=4, samples=2, dtype=np.float32),
        **dict.fromkeys(
            (
                "group",
                "advantages",
                "old_logprobs",
                "sampler_logprobs",
                "ref_logprobs",
                "weights",
                "values",
                "returns",
                "sum_pi_squared",
                "rewards",
                "process_rewards",
                "scores",
            )
        ),
    )


def actor_on(mesh, config=DENSE, spread=None) -> Actor:
    one = Model(config, make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    model, optimizer = dataclasses.replace(one, mesh=mesh), optax.sgd(LR)
    params = jax.device_get(one.init(jax.random.key(3)))
    own, base = model.split(params)
    if base:  # a fresh adapter is off, and its first half then has no gradient
        own = jax.tree.map(lambda x: x + 0.1 * np.sin(np.arange(x.size)).reshape(x.shape), own)
        params = merged(jax.tree.map(np.float32, own), base)
    state = start_training(
        model, jax.device_put(params, model.shardings()), optimizer, spread=spread or DataParallel()
    )
    return Actor(state, model, optimizer)


def stepped(case: str, coef: float, **fields) -> tuple[dict, dict]:
    """(weights after one optimizer step, its metrics)."""
    sizes, config, rows, more_rows, packed, spread = CASES[case]
    mesh = make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
    batch, beside = groups(0, prompts=4, samples=4, dtype=np.float32), examples()
    packing = Packing(16, 4, row_shards(mesh), 4, False, mesh) if packed else None
    actor = actor_on(mesh, config, spread)
    batch, beside = (place(jax.device_get(x), mesh) for x in (batch, beside))
    more_steps = Steps(beside.rows, more_rows, packing=packing)
    pretraining = Pretraining(beside, coef, more_steps, **fields)
    steps = Steps(batch.rows, rows, packing=packing)

    @jax.jit
    def step(actor, batch, pretraining):
        return actor.update(
            batch,
            policy.ppo_clip,
            steps=steps,
            reduction=token_mean,
            pretraining=pretraining if coef else None,
        )

    actor, metrics = step(actor, batch, pretraining)
    return jax.device_get(actor.state.params), jax.device_get(metrics)


def likelihood(config) -> tuple[float, dict]:
    """The mean of -log pi over the target tokens, by hand, and its gradient."""
    actor = actor_on(make_mesh(1, 1, 1, devices=jax.devices()[:1]), config)
    batch = examples()

    def mean(own):
        logprobs, _ = actor.model.logprobs(
            dataclasses.replace(actor.state, params=own).weights, batch, 1.0
        )
        return -jnp.sum(jnp.where(batch.mask > 0, logprobs, 0.0)) / jnp.sum(batch.mask)

    loss, gradient = jax.jit(jax.value_and_grad(mean))(actor.state.params)
    return float(loss), jax.device_get(gradient)


@pytest.mark.slow
@pytest.mark.parametrize("case", lanes(["microbatches"], [c for c in CASES if c != "microbatches"]))
def test_the_gradient_changes_by_the_coefficient_times_that_of_the_examples(case):
    loss, gradient = likelihood(CASES[case][1])
    without, metrics = stepped(case, 0.0)
    assert "pretraining_loss" not in metrics
    coef = 3.0 if case == "whole" else 0.25
    with_it, more = stepped(case, coef)
    assert float(more["pretraining_loss"]) == pytest.approx(loss, rel=1e-5)
    assert float(more["loss"]) == pytest.approx(float(metrics["loss"]) + coef * loss, rel=1e-4)
    change = jax.tree.map(lambda a, b: (a - b) / LR, without, with_it)
    for got, want in zip(jax.tree.leaves(change), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(got, coef * want, rtol=2e-4, atol=4e-6)
    assert max(np.abs(x).max() for x in jax.tree.leaves(gradient)) > 0.01


@pytest.mark.slow
def test_every_optimizer_step_takes_its_part_of_the_examples():
    """Two steps of a batch are two batches of a step."""
    actor = actor_on(make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    batch, beside = groups(0, prompts=4, samples=4, dtype=np.float32), examples()
    how = dict(reduction=token_mean)
    names = dict(static_argnums=2, static_argnames=("steps", "reduction"))
    update = jax.jit(Actor.update, **names)

    def after(actor, rows, more):
        part = Pretraining(more, 0.5, Steps(4, 4))
        return update(actor, rows, policy.ppo_clip, steps=Steps(8, 8), pretraining=part, **how)[0]

    whole = after(actor, batch, beside)

    def half(x, i):
        return jax.tree.map(lambda a: a.reshape(2, -1, *a.shape[1:])[i], x)

    single = actor
    for i in range(2):
        single = after(single, half(batch, i), half(beside, i))
    for a, b in zip(jax.tree.leaves(whole.state), jax.tree.leaves(single.state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match="2 optimizer steps of 4 rows"):
        after(actor, batch, half(beside, 0))


@pytest.mark.slow
def test_a_step_without_policy_tokens_takes_the_gradient_of_the_examples_alone():
    actor = actor_on(make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    batch, beside = groups(0, prompts=4, samples=4, dtype=np.float32), examples()

    # Whatever the policy's part would be without tokens: not even NaN reaches the weights.
    def spoilt(policy, batch):
        return (policy.logprobs * jnp.nan, {})

    step = jax.jit(
        lambda actor, batch, part: actor.update(
            batch, spoilt, steps=Steps(16, 16), reduction=token_mean, pretraining=part
        )
    )
    none = batch.replace(mask=jnp.zeros_like(batch.mask))
    after, metrics = step(actor, none, Pretraining(beside, 0.5, Steps(8, 8)))
    loss, gradient = likelihood(DENSE)
    assert float(metrics["empty_steps"]) == 0 and int(after.state.step) == 1
    assert float(metrics["loss"]) == pytest.approx(0.5 * loss, rel=1e-5)
    change = jax.tree.map(lambda a, b: (a - b) / LR, actor.state.params, after.state.params)
    for got, want in zip(jax.tree.leaves(change), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(got, 0.5 * want, rtol=2e-4, atol=4e-6)
    bare = beside.replace(mask=jnp.zeros_like(beside.mask))
    after, metrics = step(actor, none, Pretraining(bare, 0.5, Steps(8, 8)))
    assert float(metrics["empty_steps"]) == 1 and int(after.state.step) == 0


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_a_mixed_coefficient_is_a_share_of_the_objective(packed):
    """CHORD: (1 - mu) x the batch's loss + mu x that of the examples, of chord_phi."""
    mu, case = 0.3, "packed microbatches" if packed else "microbatches"
    without, metrics = stepped(case, 0.0)
    with_it, more = stepped(case, mu, mixed=True, loss=policy.chord_phi)
    actor = actor_on(make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    batch = examples()

    def weighted(own):
        weights = dataclasses.replace(actor.state, params=own).weights
        logprobs, _ = actor.model.logprobs(weights, batch, 1.0)
        p = jnp.exp(logprobs)
        # The gradient of sum -sg(p (1 - p)) log p is that of sum (p^2 / 2 - p).
        antiderivative = jnp.where(batch.mask > 0, p * p / 2 - p, 0.0)
        value = jnp.where(batch.mask > 0, -p * (1 - p) * logprobs, 0.0)
        tokens = jnp.sum(batch.mask)
        return jnp.sum(antiderivative) / tokens, jnp.sum(value) / tokens

    (_, loss), gradient = jax.jit(jax.value_and_grad(weighted, has_aux=True))(actor.state.params)
    want_loss = (1 - mu) * float(metrics["loss"]) + mu * float(loss)
    assert float(more["loss"]) == pytest.approx(want_loss, rel=1e-4)
    assert float(more["pretraining_loss"]) == pytest.approx(likelihood(DENSE)[0], rel=1e-5)
    assert float(more["pretraining_coef"]) == pytest.approx(mu)
    start = jax.device_get(actor.state.params)
    trees = (start, without, with_it, jax.device_get(gradient))
    for before, plain, mixed, of_examples in zip(*map(jax.tree.leaves, trees), strict=True):
        want = (1 - mu) * (before - plain) / LR + mu * of_examples
        np.testing.assert_allclose((before - mixed) / LR, want, rtol=2e-4, atol=6e-6)


def test_the_coefficient_of_the_examples_is_the_published_schedule():
    """Trinity-RFT's and ms-swift's: a line up to the peak, a cosine down to the valley, and then
    the valley."""
    peak, valley, warmup, decay = 0.9, 0.05, 6, 20

    def published(step):
        if step < warmup:
            return step / warmup * peak
        if step >= warmup + decay:
            return valley
        falling = 0.5 * (1 + math.cos(math.pi * (step - warmup) / decay))
        return (peak - valley) * falling + valley

    steps = dict(warmup_steps=warmup, schedule_steps=decay)
    cosine = f"cosine(final={valley / peak})"
    role = Pretraining(examples(), peak, Steps(8, 8), schedule=cosine, **steps)
    for step in range(40):
        found = float(jax.jit(lambda role, step: role.coefficient(step))(role, jnp.int32(step)))
        assert found == pytest.approx(published(step), abs=1e-6), step
    constant = Pretraining(examples(), peak, Steps(8, 8))
    for step in (0, 9):
        assert float(constant.coefficient(jnp.int32(step))) == pytest.approx(peak)


@pytest.mark.slow
def test_the_schedule_counts_optimizer_steps():
    """The second batch has the coefficient of the steps that the first one took."""
    actor = actor_on(make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    batch, beside = groups(0, prompts=4, samples=4, dtype=np.float32), examples()
    part = Pretraining(beside, 0.8, Steps(4, 4), schedule="linear()", schedule_steps=8)

    @jax.jit
    def step(actor, batch, part):
        how = dict(steps=Steps(8, 8), reduction=token_mean, pretraining=part)
        return actor.update(batch, policy.ppo_clip, **how)

    for want in (0.8, 0.6, 0.4):
        actor, metrics = step(actor, batch, part)
        assert float(metrics["pretraining_coef"]) == pytest.approx(want, rel=1e-5)
