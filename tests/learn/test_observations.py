"""The cross-entropy of what the environment said beside the policy's loss (ECHO): its tokens, and
its gradient, however rows are cut, packed and split over devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes
from golden_checks.common import response_batch
from test_packed_learning import groups
from test_pretraining import CASES, DENSE, LR, actor_on

from rljax.arrays import place
from rljax.batch import Batch, observed_tokens
from rljax.errors import InputError
from rljax.learn import Steps, seq_mean_token_sum, token_mean
from rljax.learn.packing import Packing
from rljax.learn.state import DataParallel
from rljax.losses import policy
from rljax.mesh import make_mesh, row_shards

COEF = 0.3
SIZES = {**CASES, "shared prompts": ((1, 1), DENSE, 8, 4, "shared", DataParallel())}


def episodes(seed=0) -> Batch:
    """Rows of turns: what is chosen, and masked turns between; some end in a turn that was cut
    off, which has no number. Float fields hold NaN wherever the mask is 0."""
    batch = groups(seed, prompts=4, samples=4, dtype=np.float32)
    random, mask = np.random.default_rng(seed), np.asarray(batch.mask) > 0
    steps = np.zeros(mask.shape, np.int32)
    for row, chosen in enumerate(mask):
        number = 0
        for t in np.flatnonzero(chosen):
            number += not (t and chosen[t - 1])
            steps[row, t] = number
    bad = mask & (random.random(mask.shape) < 0.2)  # learned from no more, but a turn
    mask = mask & ~bad
    names = ("advantages", "old_logprobs", "ref_logprobs", "sampler_logprobs", "weights")
    fields = {name: jnp.where(mask, getattr(batch, name), jnp.nan) for name in names}
    return batch.replace(step_ids=jnp.asarray(steps), mask=jnp.float32(mask), **fields)


def observed_by_hand(batch: Batch) -> np.ndarray:
    """Tokens between the first and the last turn of a row, loop by loop."""
    steps, mask = np.asarray(batch.step_ids), np.asarray(batch.mask)
    observed = np.zeros(steps.shape, bool)
    for row, numbers in enumerate(steps):
        turns = np.flatnonzero(numbers)
        if len(turns) == 0 or not mask[row].any():
            continue
        for t in range(turns[0], turns[-1]):
            observed[row, t] = numbers[t] == 0
    return observed


def test_what_the_environment_said_stands_between_turns():
    steps = [
        [0, 0, 1, 1, 0, 0, 2, 0],  # the last token: a turn that was cut off, or nothing
        [0, 1, 0, 0, 0, 0, 0, 0],  # one turn: there is no answer to it
        [0, 1, 1, 0, 2, 0, 3, 3],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [0, 1, 0, 2, 2, 2, 2, 0],  # failed: no token is learned from
        [0, 1, 0, 2, 2, 2, 2, 0],  # the first turn is bad: it is masked, and still a turn
    ]
    mask = np.array(steps) > 0
    mask[4], mask[5, 1] = False, False
    batch = response_batch(mask, jnp.float32, step_ids=np.array(steps))
    want = np.zeros(mask.shape, bool)
    want[0, 4:6] = want[2, 3] = want[2, 5] = want[5, 2] = True
    np.testing.assert_array_equal(observed_tokens(batch), want)
    np.testing.assert_array_equal(observed_tokens(episodes()), observed_by_hand(episodes()))
    with pytest.raises(InputError, match="step_ids"):
        observed_tokens(batch.replace(step_ids=None))


def stepped(
    case: str, coef: float, batch: Batch, loss=policy.ppo_clip, reduction=token_mean, **options
):
    """(weights after one optimizer step, its metrics)."""
    sizes, config, rows, _, packed, spread = SIZES[case]
    mesh = make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
    packing = Packing(16, 4, row_shards(mesh), 4, False, mesh) if packed else None
    if packed == "shared":
        packing = dataclasses.replace(packing, shared=True)
    actor, batch = actor_on(mesh, config, spread), place(jax.device_get(batch), mesh)
    steps = Steps(batch.rows, rows, packing=packing)

    def step(actor, batch, coef=0.0):
        how = dict(steps=steps, reduction=reduction, observation_coef=coef, **options)
        return actor.update(batch, loss, **how)

    coefs = [jnp.float32(coef)] if coef else []  # traced, or known to be 0
    actor, metrics = jax.jit(step)(actor, batch, *coefs)
    return jax.device_get(actor.state.params), jax.device_get(metrics)


def likelihood(config, batch: Batch) -> tuple[float, dict]:
    """The mean of -log pi over the observed tokens, by hand, and its gradient."""
    actor = actor_on(make_mesh(1, 1, 1, devices=jax.devices()[:1]), config)
    observed = observed_by_hand(batch)
    bare = Batch(batch.tokens, batch.segment_ids, batch.positions, batch.mask)

    def mean(own):
        weights = dataclasses.replace(actor.state, params=own).weights
        logprobs, _ = actor.model.logprobs(weights, bare, 1.0)
        return -jnp.sum(jnp.where(observed, logprobs, 0.0)) / observed.sum()

    loss, gradient = jax.jit(jax.value_and_grad(mean))(actor.state.params)
    return float(loss), jax.device_get(gradient)


def assert_adds(without, with_it, gradient, coef):
    change = jax.tree.map(lambda a, b: (a - b) / LR, without, with_it)
    for got, want in zip(jax.tree.leaves(change), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(got, coef * want, rtol=2e-4, atol=4e-6)
    assert max(np.abs(x).max() for x in jax.tree.leaves(gradient)) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("case", lanes(["microbatches"], [c for c in SIZES if c != "microbatches"]))
def test_the_gradient_changes_by_the_coefficient_times_that_of_the_observations(case):
    batch = episodes()
    loss, gradient = likelihood(SIZES[case][1], batch)
    without, metrics = stepped(case, 0.0, batch)
    assert "observation_loss" not in metrics
    with_it, more = stepped(case, COEF, batch)
    assert float(more["observation_loss"]) == pytest.approx(loss, rel=1e-5)
    assert float(more["loss"]) == pytest.approx(float(metrics["loss"]) + COEF * loss, rel=1e-4)
    assert float(more["entropy"]) == pytest.approx(float(metrics["entropy"]), rel=1e-5)
    assert_adds(without, with_it, gradient, COEF)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["own log-probs", "whole step"])
def test_the_observations_are_a_mean_of_tokens_whatever_the_policys_loss(how):
    """With another reduction and old log-probs of the update's own pass, and with a loss that reads
    the whole step at once."""
    batch = episodes(2)
    loss, gradient = likelihood(DENSE, batch)
    if how == "own log-probs":
        options = dict(reduction=seq_mean_token_sum, on_policy=lambda batch: {})
    else:
        options = dict(loss=functools.partial(policy.ppo_high_entropy, fraction=0.5))
    without, _ = stepped("microbatches", 0.0, batch, **options)
    with_it, more = stepped("microbatches", COEF, batch, **options)
    assert float(more["observation_loss"]) == pytest.approx(loss, rel=1e-5)
    assert_adds(without, with_it, gradient, COEF)


@pytest.mark.slow
def test_without_observations_nothing_is_added():
    batch = episodes()
    silent = batch.replace(step_ids=jnp.where(batch.mask > 0, 1, 0) * 0)
    without, _ = stepped("whole", 0.0, silent)
    with_it, more = stepped("whole", COEF, silent)
    assert float(more["observation_loss"]) == 0
    for a, b in zip(jax.tree.leaves(without), jax.tree.leaves(with_it), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    with pytest.raises(InputError, match="step_ids"):
        stepped("whole", COEF, batch.replace(step_ids=None))
