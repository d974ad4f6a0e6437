"""Estimators that know the steps of a response: GRPO with process rewards, VinePPO, PRIME, GiGPO,
turns compared with the turns of siblings.

Functions of `step_ids` (0 = no step; the steps of a row are numbered upwards from 1, and the policy
tokens of a step are one run, tool replies aside; the steps of an episode of several rows are
numbered on) and of rewards per token. Rows must be unpacked, except for VinePPO.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from rljax import batch as batches
from rljax.advantages.grouping import (
    choose,
    dense_ids,
    group_range,
    group_statistics,
    group_total,
    normalised,
    on_policy_tokens,
)
from rljax.advantages.groups import STDS, Singleton, Std
from rljax.advantages.returns import discounted_sum, opens_turn
from rljax.batch import Batch
from rljax.contracts import NotNegative, Share, contract


def _step_of(batch: Batch) -> jax.Array:
    """Returns the step of each policy token, 0 elsewhere: [B, S]."""
    return jnp.where(batch.mask > 0, batch.step_ids, 0)


def _step_edges(steps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns whether a token is the first, and the last, of its step: steps [B, S] -> two bool [B,
    S]."""
    columns = jnp.arange(steps.shape[1], dtype=jnp.int32)

    def one_row(ids):
        low = jax.ops.segment_min(columns, ids, num_segments=ids.shape[0] + 1)[ids]
        high = jax.ops.segment_max(columns, ids, num_segments=ids.shape[0] + 1)[ids]
        return (columns == low) & (ids > 0), (columns == high) & (ids > 0)

    return jax.vmap(one_row)(steps)


def _step_sum(x: jax.Array, steps: jax.Array) -> jax.Array:
    """Returns the sum of x over each token's own step, at every token of a step: [B, S] -> [B,
    S]."""

    def one_row(row, ids):
        return jax.ops.segment_sum(row, ids, num_segments=ids.shape[0] + 1)[ids]

    return jnp.where(steps > 0, jax.vmap(one_row)(jnp.where(steps > 0, x, 0.0), steps), 0.0)


@contract(safe=True, reads=("process_rewards", "step_ids", "group"), fills=(), token_rewards=True)
def group_process(batch: Batch, *, std: Std = "sample", eps: NotNegative = 1e-6) -> jax.Array:
    """A_t = sum of (r_j - mean) / (std + eps) over the steps j that end at t or later: [B, S].

    GRPO with process supervision, arXiv 2402.03300. The reward of a step is the sum of
    `process_rewards` over its tokens; mean and std run over all steps of all rows of the group.
    Tokens after the last step, rows without steps and groups of equal step rewards get 0.
    """
    batch.require("process_rewards", "step_ids", "group", by="group_process")
    choose("group_process(std)", std, STDS)
    steps = _step_of(batch)
    _, is_last = _step_edges(steps)
    rewards = _step_sum(jnp.where(batch.mask > 0, batch.process_rewards, 0.0), steps)
    # The last token of a step is the one element that stands for it.
    ids = jnp.broadcast_to(dense_ids(batch.group)[:, None], is_last.shape)
    groups = group_statistics(rewards.ravel(), ids.ravel(), is_last.ravel())
    scaled = normalised(rewards.ravel(), groups, std=std, eps=eps).reshape(is_last.shape)
    return jax.lax.stop_gradient(discounted_sum(jnp.where(is_last, scaled, 0.0), batch, 1.0))


def _next_where(x: jax.Array, selected: jax.Array, batch: Batch) -> jax.Array:
    """Returns x at the first selected token at or after each token of the segment, else 0: [B,
    S]."""
    # The result is y_t = x_t at selected tokens, else y_{t+}.
    decay = jnp.where(selected, 0.0, 1.0).astype(x.dtype)
    return discounted_sum(jnp.where(selected, x, 0.0), batch, decay)


@contract(safe=True, reads=("rewards", "values", "step_ids"), fills=(), token_rewards=False)
def vineppo(batch: Batch) -> jax.Array:
    """A = r_k + V(s_{k+1}) - V(s_k) on the tokens of step k, gamma = lambda = 1: [B, S].

    VinePPO, arXiv 2410.01679. V(s_k), the mean reward of fresh completions that start where step k
    does, is `values` at the first token of the step, and 0 behind the last step. NaN there = not
    estimated: the next known one of the row stands in, and the rewards still to come where none is.
    Rewards after the last step belong to it.
    """
    batch.require("rewards", "values", "step_ids", by="vineppo")
    steps = _step_of(batch)
    is_first, _ = _step_edges(steps)
    to_come = discounted_sum(batch.rewards, batch, 1.0)
    is_estimated = is_first & ~jnp.isnan(batch.values)
    value = _next_where(jnp.where(is_estimated, batch.values, 0.0), is_estimated, batch)
    reached = _next_where(is_estimated.astype(value.dtype), is_estimated, batch) > 0
    # r_k is the part of the rewards to come that is gone at the next step, so that the sum
    # telescopes to R - V(s_1) whichever token a reward sits on.
    excess = jnp.where(is_first, jnp.where(reached, value, to_come) - to_come, 0.0)
    following = batches.next_policy_token(_next_where(excess, is_first, batch), batch)
    advantages = jnp.where(steps > 0, following - _step_sum(excess, steps), 0.0)
    return jax.lax.stop_gradient(advantages)


@contract(safe=True, reads=("rewards", "process_rewards", "group"), fills=(), token_rewards=False)
def prime(
    batch: Batch,
    *,
    process_coef: NotNegative = 5.0,
    outcome_coef: NotNegative = 5.0,
    normalise: bool = False,
    whiten: bool = True,
) -> jax.Array:
    """Leave-one-out of process and outcome rewards, summed from t on, whitened: [B, S].

    PRIME, arXiv 2502.01456, eq. of its advantage: with n rows in the group,
    process  r_t n/(n-1) - sum_j mean_t(r_j)/(n-1) on every token, r = `process_rewards`;
    outcome  R n/(n-1) - sum_j R_j/(n-1) on the last token, R = the row's reward.
    `normalise` divides r by max |sum of r from t on| + 1e-6 of the batch. Rows without policy
    tokens are left out. A group of one is undefined and gets 0 before whitening: configs need
    batch.samples_per_prompt >= 2.
    """
    batch.require("rewards", "process_rewards", "group", by="prime")
    is_policy = batch.mask > 0
    process = jnp.where(is_policy, batch.process_rewards, 0.0)
    if normalise:
        process = process / (jnp.max(jnp.abs(discounted_sum(process, batch, 1.0))) + 1e-6)
    ids = dense_ids(batch.group)
    length = batches.sequence_sum(jnp.ones_like(process), batch)
    live = (batches.first_of_sequence(batch) & (length > 0)).astype(process.dtype)
    n = group_total(live, ids)
    other_count = jnp.maximum(n - 1, 1)

    def baseline(per_row):
        return (group_total(live * per_row, ids) / other_count)[:, None]

    factor = (n / other_count)[:, None]
    outcome = batches.sequence_sum(batch.rewards, batch)
    means = batches.sequence_sum(process, batch) / jnp.maximum(length, 1)
    process = process * factor - baseline(means)
    outcome = outcome[:, None] * factor - baseline(outcome)
    mixed = process_coef * process + outcome_coef * outcome * batches.last_token(batch)
    returns = discounted_sum(jnp.where((n > 1)[:, None], mixed, 0.0), batch, 1.0)
    returns = batches.whiten(returns, batch.mask) if whiten else returns
    return jax.lax.stop_gradient(returns)


@contract(
    safe=True,
    reads=("rewards", "group", "step_ids", "state_ids"),
    fills=(),
    compares_samples=True,
    token_rewards=True,
)
def gigpo(
    batch: Batch,
    *,
    gamma: Share = 0.95,
    omega: NotNegative = 1.0,
    std: Literal["sample", "population", "none"] = "sample",
    eps: NotNegative = 1e-6,
) -> jax.Array:
    """A = GRPO(total reward) + omega GRPO(return of the step among its anchor group): [B, S].

    GiGPO, arXiv 2505.10978, for agents of several turns. The steps of all rows of a group that
    start from the same state (`state_ids` at the step's first token, 0 = none known) are one anchor
    group, and their returns sum_l gamma^(l-k) r_l are normalised in it. Anchors of one, steps
    without a state, and tokens of no step get the first term alone.
    """
    batch.require("rewards", "group", "step_ids", "state_ids", by="gigpo")
    choose("gigpo(std)", std, STDS)
    scores, rows = batches.row_scores(batch), dense_ids(batch.group)
    groups = group_statistics(scores, rows, batches.first_of_sequence(batch))
    episode = normalised(scores, groups, std=std, eps=eps)
    steps = _step_of(batch)
    is_first, _ = _step_edges(steps)
    returns = _turn_returns(batch.rewards, batch, gamma)
    anchored = is_first & (batch.state_ids > 0)
    anchors = _of_group(batch, jnp.where(anchored, batch.state_ids, 0))
    groups = group_statistics(returns.ravel(), anchors, anchored.ravel())
    relative = normalised(returns.ravel(), groups, std=std, eps=eps).reshape(is_first.shape)
    step = _step_sum(jnp.where(anchored, relative, 0.0), steps)
    return on_policy_tokens(episode, batch) + jax.lax.stop_gradient(omega * step)


def _turn_returns(x: jax.Array, batch: Batch, gamma: float) -> jax.Array:
    """Returns x summed from each token on, times gamma for every turn that opens on the way: [B,
    S]."""
    decay = jnp.where(opens_turn(batch), gamma, 1.0).astype(x.dtype)
    return discounted_sum(x, batch, decay)


def _of_group(batch: Batch, keys: jax.Array) -> jax.Array:
    """Returns dense ids of equal keys [B, S] within a group: [B S]."""
    group = jnp.broadcast_to(dense_ids(batch.group)[:, None], keys.shape)
    return dense_ids(keys.ravel(), group.ravel())


@contract(
    safe=True,
    reads=("rewards", "group", "step_ids"),
    fills=(),
    compares_samples=True,
    token_rewards=True,
)
def turn_leave_one_out(
    batch: Batch, *, gamma: Share = 1.0, singleton: Singleton = "zero"
) -> jax.Array:
    """A_k = G_k - mean over the siblings of their return from turn k on, on turn k's tokens:
    [B, S].

    G_k = sum_l gamma^(l-k) r_l over the turns l >= k. A sibling that has ended before turn k counts
    with 0: the baseline then holds nothing that the episode itself has decided, and the gradient is
    unbiased also where the policy decides when to stop. Each episode counts once. A group of one
    gets 0, or its G_k with `singleton="raw"`; equal returns of all siblings give exactly 0.
    """
    by = "turn_leave_one_out"
    batch.require("rewards", "group", "step_ids", by=by)
    choose(f"{by}(singleton)", singleton, ("zero", "raw"))
    steps = _step_of(batch)
    is_first, _ = _step_edges(steps)
    returns = _turn_returns(batch.rewards, batch, gamma)
    counted = batches.first_of_sequence(batch).astype(returns.dtype)
    n = group_total(counted, dense_ids(batch.group))[:, None]
    # The first token of a turn is the one element that stands for it.
    turns, is_turn = _of_group(batch, jnp.where(is_first, steps, 0)), is_first.ravel()
    value = jnp.where(is_turn, returns.ravel(), 0.0)
    total, reached, low, high = (
        x.reshape(is_first.shape)
        for x in (
            group_total(value, turns),
            group_total(is_turn.astype(value.dtype), turns),
            *group_range(value, turns, is_turn),
        )
    )
    sibling_mean = (total - returns) / jnp.maximum(n - 1, 1)
    equal = (low == high) & ((reached == n) | (low == 0))
    relative = jnp.where(equal, 0.0, returns - sibling_mean)
    singleton_value = returns if singleton == "raw" else jnp.zeros_like(returns)
    advantages = jnp.where(is_first, jnp.where(n > 1, relative, singleton_value), 0.0)
    return jax.lax.stop_gradient(_step_sum(advantages, steps))


@contract(
    safe=True,
    reads=("rewards", "group", "step_ids"),
    fills=(),
    compares_samples=True,
    token_rewards=True,
)
def turn_group(
    batch: Batch,
    *,
    gamma: Share = 1.0,
    std: Std = "sample",
    eps: NotNegative = 1e-6,
    singleton: Singleton = "zero",
) -> jax.Array:
    """A_k = sum_l gamma^(l-k) (r_l - mean) / (std + eps) over the turns l >= k: [B, S].

    Mean and std are those of turn l of the siblings that reached it (MT-GRPO, arXiv 2505.11821).
    Equal rewards give 0, and so does a turn that one sibling alone reaches, or its own reward with
    `singleton="raw"`.

    Biased where the policy decides when to stop (verl#7244): the mean of turn l is taken over those
    that went on to it, so going on is never credited with what turn l pays on average. The expected
    advantage of a decision to go on lacks E[r_l] for every turn l behind it; with "raw" it keeps
    the share of it that is the chance that no sibling reaches turn l. `turn_leave_one_out` has the
    same aim without the bias.
    """
    batch.require("rewards", "group", "step_ids", by="turn_group")
    choose("turn_group(std)", std, STDS)
    choose("turn_group(singleton)", singleton, ("zero", "raw"))
    steps = _step_of(batch)
    _, is_last = _step_edges(steps)
    rewards = _step_sum(batch.rewards, steps)
    turns = _of_group(batch, jnp.where(is_last, steps, 0))
    groups = group_statistics(rewards.ravel(), turns, is_last.ravel())
    scaled = normalised(rewards.ravel(), groups, std=std, eps=eps)
    if singleton == "raw":
        scaled = jnp.where(groups.size == 1, rewards.ravel(), scaled)
    scaled = scaled.reshape(is_last.shape)
    return jax.lax.stop_gradient(_turn_returns(jnp.where(is_last, scaled, 0.0), batch, gamma))
