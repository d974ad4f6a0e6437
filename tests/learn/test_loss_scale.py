"""Dynamic loss scaling: torch's rule, gradients that float16 would lose, and steps whose scaled
gradient leaves its range."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from conftest import lanes
from test_update import ROWS, Bigram, objective
from test_update import batch as batch
from tiny_run import flat_bytes

from rljax import learn
from rljax.learn.fit import Beside
from rljax.learn.loss_scale import INITIAL, LossScale, new_loss_scale
from rljax.learn.objective import AuxiliaryObjective, Steps
from rljax.learn.state import new_train_state, optimizer_step
from rljax.losses import policy

STEPS = Steps(rows=ROWS, microbatch_rows=2)


@pytest.mark.parametrize("how", [(2.0, 0.5, 3), (4.0, 0.25, 1), (2.0, 0.5, 2000)])
def test_the_scale_is_that_of_torchs_grad_scaler(how):
    """torch._amp_update_scale_ is what GradScaler.update calls."""
    growth, backoff, interval = how
    bad = np.random.default_rng(0).random(60) < 0.2
    ours, theirs = new_loss_scale(), torch.tensor([INITIAL])
    tracker = torch.zeros(1, dtype=torch.int32)
    after = jax.jit(
        functools.partial(LossScale.after, growth=growth, backoff=backoff, interval=interval)
    )
    for one in bad:
        ours = after(ours, 1.0, jnp.asarray(not one), jnp.asarray(True))
        found = torch.tensor([float(one)])
        torch._amp_update_scale_(theirs, tracker, found, growth, backoff, interval)
        assert (float(ours.scale), int(ours.good_steps)) == (float(theirs), int(tracker))
    assert torch.amp.GradScaler("cpu")._init_scale == INITIAL
    left = after(ours, 1.0, jnp.asarray(False), jnp.asarray(False))  # no step was to be taken
    assert flat_bytes(left) == flat_bytes(ours)


def test_a_scale_that_would_leave_float32_stays():
    large = dataclasses.replace(new_loss_scale(), scale=jnp.float32(2.0**127))
    after = large.after(1.0, jnp.asarray(True), jnp.asarray(True), interval=1)
    assert float(after.scale) == 2.0**127 and int(after.good_steps) == 0


@pytest.mark.parametrize("whole_step", lanes([False], [True]))
@pytest.mark.parametrize("auxiliary", lanes([True], [False]))
@pytest.mark.parametrize("rows", lanes([2], [ROWS]))
def test_the_scale_changes_no_gradient_loss_or_metric_in_float32(
    batch, rows, auxiliary, whole_step
):
    """A power of two is exact: what is scaled and divided again is what it was, bit by bit."""
    params = jax.random.normal(jax.random.key(0), (12, 12))
    aim = objective(Bigram(), policy.ppo_clip, learn.token_mean)
    aim = dataclasses.replace(aim, whole_step=whole_step)
    if auxiliary:  # as the load-balance loss of experts

        def counted(params, part):
            return (model(params, part), jnp.sum(params**2))

        model, added = aim.model, AuxiliaryObjective(loss=lambda total: 0.125 * total)
        aim = dataclasses.replace(aim, model=counted, sums=True, auxiliary=added)
    run = jax.jit(lambda p, b, s: learn.loss_and_gradient(p, b, aim, rows, None, s)[:3])
    want = run(params, batch, None)
    assert flat_bytes(run(params, batch, jnp.float32(1024.0))) == flat_bytes(want)
    assert float(jnp.abs(want[1]).max()) > 1e-3


class HalfBigram(Bigram):
    """Its logits, and their gradient, pass through float16."""

    def logprobs(self, params, batch):
        return super().logprobs(params.astype(jnp.float16).astype(jnp.float32), batch)


def times(factor: float):
    def loss(policy_out, batch):
        value, metrics = policy.ppo_clip(policy_out, batch)
        return factor * value, {**metrics, "loss": value}

    return loss


def half(factor: float, beside: Beside | None = None):
    """(state, a program of one step of `factor` ppo_clip on a batch) with SGD behind clipping."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.sgd(optax.linear_schedule(1, 0, 9))
    )

    aim = objective(HalfBigram(), times(factor), learn.token_mean)
    params = jax.random.normal(jax.random.key(0), (12, 12))
    state = new_train_state(params, optimizer, scaled=True)

    def step(state, batch):
        how = dict(optimizer=optimizer, steps=STEPS, beside=beside)
        return learn.fit(state, batch, aim, **how)[:2]

    return state, jax.jit(step)


@pytest.mark.slow
def test_small_gradients_survive_float16(batch):
    """Of 1e-6 times the loss: most are below 6e-8, float16's least number."""
    params = jax.random.normal(jax.random.key(0), (12, 12))
    aim = objective(HalfBigram(), times(1e-6), learn.token_mean)
    how = (aim, 2, None)
    run = jax.jit(lambda scale: learn.loss_and_gradient(params, batch, *how, scale)[1])
    full = objective(Bigram(), times(1e-6), learn.token_mean)
    exact = jax.jit(lambda: learn.loss_and_gradient(params, batch, full, ROWS)[1])()
    np.testing.assert_allclose(run(jnp.float32(INITIAL)), exact, rtol=2e-2, atol=1e-11)
    large = jnp.abs(exact) > 1e-9
    assert float(jnp.mean((run(None) == 0)[large])) > 0.5


def test_a_step_that_overflows_changes_nothing_but_the_scale_and_is_no_failure(batch):
    """The gradient, times 2^16, is above 65504 until the scale has halved often enough; then the
    step is that of float32, clipped after the scale is gone."""
    state, step = half(100.0)
    before = flat_bytes((state.params, state.opt_state))
    overflows, scale = 0, INITIAL
    while True:
        state, metrics = step(state, batch)
        assert int(metrics["skipped_steps"]) == int(metrics["skipped_in_a_row"]) == 0
        if not int(metrics["overflow_steps"]):
            break
        overflows, scale = overflows + 1, scale / 2
        assert flat_bytes((state.params, state.opt_state)) == before
        assert (int(state.step), float(metrics["grad_norm"])) == (0, 0.0)
        assert float(metrics["loss_scale"]) == float(state.loss_scale.scale) == scale
    assert overflows >= 3 and int(state.loss_scale.overflows) == overflows
    assert int(state.step) == 1 and int(state.loss_scale.good_steps) == 1
    start, _ = half(100.0)
    moved = optax.tree.norm(jax.tree.map(jnp.subtract, state.params, start.params))
    np.testing.assert_allclose(moved, 1.0, rtol=1e-3)  # clip_norm, at the schedule's first rate
    assert float(metrics["grad_norm"]) > 5


@pytest.mark.slow
def test_rows_beside_a_batch_are_scaled_with_it(batch):
    aim = objective(HalfBigram(), times(1e-3), learn.token_mean)
    state, step = half(1.0, Beside(batch, aim, STEPS, "beside"))
    got, metrics = step(state, batch.replace(mask=jnp.zeros_like(batch.mask)))
    want, _ = half(1e-3)[1](state, batch)
    assert int(metrics["empty_steps"]) == 0
    np.testing.assert_allclose(got.params, want.params, rtol=1e-6)
    assert float(jnp.abs(got.params - state.params).max()) > 0


@pytest.mark.parametrize("loss, at, failed", [(1.0, 1.0, 1), (1.0, 2.0, 0), (np.nan, 2.0**16, 1)])
def test_what_a_lower_scale_cannot_cure_is_a_failure(loss, at, failed):
    """A loss that is not finite, or a gradient that overflows with a scale of 1."""
    optimizer = optax.adam(1e-2)
    state = new_train_state({"w": jnp.ones(3)}, optimizer, scaled=True)
    scale = dataclasses.replace(state.loss_scale, scale=jnp.float32(at))
    state = dataclasses.replace(state, precision={"loss_scale": scale})
    step = jax.jit(lambda s, g, x: optimizer_step(s, g, x, optimizer))
    good, bad = {"w": jnp.ones(3)}, {"w": jnp.array([1.0, np.inf, 1.0])}
    after, metrics = step(state, bad, loss)
    assert (int(after.skipped), int(after.skipped_in_a_row)) == (failed, failed)
    assert int(after.loss_scale.overflows) == 1 - failed
    assert float(metrics["loss"]) == (0.0 if failed else loss)
    assert flat_bytes((after.params, after.opt_state)) == flat_bytes(
        (state.params, state.opt_state)
    )
    again, _ = step(after, bad, np.nan)  # a streak goes on through overflows, and ends with a step
    assert int(again.skipped_in_a_row) == failed + 1
    assert int(step(again, good, 1.0)[0].skipped_in_a_row) == 0


def test_without_a_step_to_take_the_scale_stays(batch):
    state, step = half(1.0)
    after, metrics = step(state, batch.replace(mask=jnp.zeros_like(batch.mask)))
    assert flat_bytes(after) == flat_bytes(state) and int(metrics["empty_steps"]) == 1
