"""Estimators that know the steps of a response: GRPO with process rewards, VinePPO, PRIME, GiGPO.

Functions of `step_ids` (0 = no step; the steps of a row are numbered upwards from 1, and the policy
tokens of a step are one run, tool replies aside) and of rewards per token. Rows must be unpacked,
except for VinePPO.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from rljax import batch as batches
from rljax.advantages.grouping import (
    choose,
    dense_ids,
    group_statistics,
    group_total,
    normalised,
    on_policy_tokens,
)
from rljax.advantages.groups import STDS, Std
from rljax.advantages.returns import discounted_sum
from rljax.batch import Batch
from rljax.contracts import contract


def _step_of(batch: Batch) -> jax.Array:
    """Step of each policy token, 0 elsewhere: [B, S]."""
    return jnp.where(batch.mask > 0, batch.step_ids, 0)


def _step_edges(steps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether a token is the first, and the last, of its step: steps [B, S] -> two bool [B, S]."""
    columns = jnp.arange(steps.shape[1], dtype=jnp.int32)

    def one_row(ids):
        low = jax.ops.segment_min(columns, ids, num_segments=ids.shape[0] + 1)[ids]
        high = jax.ops.segment_max(columns, ids, num_segments=ids.shape[0] + 1)[ids]
        return (columns == low) & (ids > 0), (columns == high) & (ids > 0)

    return jax.vmap(one_row)(steps)


def _step_sum(x: jax.Array, steps: jax.Array) -> jax.Array:
    """Sum of x over each token's own step, at every token of a step: [B, S] -> [B, S]."""

    def one_row(row, ids):
        return jax.ops.segment_sum(row, ids, num_segments=ids.shape[0] + 1)[ids]

    return jnp.where(steps > 0, jax.vmap(one_row)(jnp.where(steps > 0, x, 0.0), steps), 0.0)


@contract(reads=("process_rewards", "step_ids", "group"), token_rewards=True)
def group_process(batch: Batch, *, std: Std = "sample", eps: float = 1e-6) -> jax.Array:
    """A_t = sum of (r_j - mean) / (std + eps) over the steps j that end at t or later: [B, S].

    GRPO with process supervision, arXiv 2402.03300. The reward of a step is the sum of
    `process_rewards` over its tokens; mean and std run over all steps of all rows of the group.
    Tokens after the last step, rows without steps and groups of equal step rewards get 0.
    """
    batch.require("process_rewards", "step_ids", "group", by="group_process")
    choose("group_process(std)", std, STDS)
    steps = _step_of(batch)
    _, last = _step_edges(steps)
    rewards = _step_sum(jnp.where(batch.mask > 0, batch.process_rewards, 0.0), steps)
    # One element per step: its last token.
    ids = jnp.broadcast_to(dense_ids(batch.group)[:, None], last.shape)
    groups = group_statistics(rewards.ravel(), ids.ravel(), last.ravel())
    scaled = normalised(rewards.ravel(), groups, std=std, eps=eps).reshape(last.shape)
    return jax.lax.stop_gradient(discounted_sum(jnp.where(last, scaled, 0.0), batch, 1.0))


def _next_where(x: jax.Array, keep: jax.Array, batch: Batch) -> jax.Array:
    """x at the first token of `keep` at or after each token of the segment, else 0: [B, S]."""
    # y_t = x_t where kept, else y_{t+}.
    decay = jnp.where(keep, 0.0, 1.0).astype(x.dtype)
    return discounted_sum(jnp.where(keep, x, 0.0), batch, decay)


@contract(reads=("rewards", "values", "step_ids"))
def vineppo(batch: Batch) -> jax.Array:
    """A = r_k + V(s_{k+1}) - V(s_k) on the tokens of step k, gamma = lambda = 1: [B, S].

    VinePPO, arXiv 2410.01679. V(s_k), the mean reward of fresh completions that start where step k
    does, is `values` at the first token of the step, and 0 behind the last step. NaN there = not
    estimated: the next known one of the row stands in, and the rewards still to come where none is.
    Rewards after the last step belong to it.
    """
    batch.require("rewards", "values", "step_ids", by="vineppo")
    steps = _step_of(batch)
    first, _ = _step_edges(steps)
    to_come = discounted_sum(batch.rewards, batch, 1.0)
    known = first & ~jnp.isnan(batch.values)
    value = _next_where(jnp.where(known, batch.values, 0.0), known, batch)
    reached = _next_where(known.astype(value.dtype), known, batch) > 0
    # r_k is what of the rewards to come is gone at the next step, so that the sum telescopes to
    # R - V(s_1) whichever token a reward sits on.
    excess = jnp.where(first, jnp.where(reached, value, to_come) - to_come, 0.0)
    following = batches.next_policy_token(_next_where(excess, first, batch), batch)
    advantages = jnp.where(steps > 0, following - _step_sum(excess, steps), 0.0)
    return jax.lax.stop_gradient(advantages)


@contract(reads=("rewards", "process_rewards", "group"))
def prime(
    batch: Batch,
    *,
    process_coef: float = 5.0,
    outcome_coef: float = 5.0,
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
    keep = batch.mask > 0
    process = jnp.where(keep, batch.process_rewards, 0.0)
    if normalise:
        process = process / (jnp.max(jnp.abs(discounted_sum(process, batch, 1.0))) + 1e-6)
    ids = dense_ids(batch.group)
    live = jnp.any(keep, axis=1).astype(process.dtype)
    n = group_total(live, ids)
    others = jnp.maximum(n - 1, 1)

    def baseline(per_row):
        return (group_total(live * per_row, ids) / others)[:, None]

    factor = (n / others)[:, None]
    outcome = batches.row_sum(batch.rewards, batch)
    process = process * factor - baseline(batches.masked_mean(process, batch.mask, axis=1))
    outcome = outcome[:, None] * factor - baseline(outcome)
    mixed = process_coef * process + outcome_coef * outcome * batches.last_token(batch)
    returns = discounted_sum(jnp.where((n > 1)[:, None], mixed, 0.0), batch, 1.0)
    returns = batches.whiten(returns, batch.mask) if whiten else returns
    return jax.lax.stop_gradient(returns)


@contract(reads=("rewards", "group", "step_ids", "state_ids"))
def gigpo(
    batch: Batch,
    *,
    gamma: float = 0.95,
    omega: float = 1.0,
    std: Literal["sample", "population", "none"] = "sample",
    eps: float = 1e-6,
) -> jax.Array:
    """A = GRPO(total reward) + omega GRPO(return of the step among its anchor group): [B, S].

    GiGPO, arXiv 2505.10978, for agents of several turns. The steps of all rows of a group that
    start from the same state (`state_ids` at the step's first token) are one anchor group, and
    their returns sum_l gamma^(l-k) r_l are normalised in it. Anchors of one, and tokens of no step,
    get the first term alone.
    """
    batch.require("rewards", "group", "step_ids", "state_ids", by="gigpo")
    choose("gigpo(std)", std, STDS)
    scores, rows = batches.row_scores(batch), dense_ids(batch.group)
    episode = normalised(scores, group_statistics(scores, rows), std=std, eps=eps)
    steps = _step_of(batch)
    first, _ = _step_edges(steps)
    # Time passes where the next policy token opens a step, not from token to token.
    opens = batches.next_policy_token(first.astype(scores.dtype), batch)
    returns = discounted_sum(batch.rewards, batch, jnp.where(opens > 0, gamma, 1.0))
    states = jnp.where(first, batch.state_ids, 0).ravel()
    group = jnp.broadcast_to(rows[:, None], first.shape).ravel()
    anchors = dense_ids(states, group)
    groups = group_statistics(returns.ravel(), anchors, first.ravel())
    relative = normalised(returns.ravel(), groups, std=std, eps=eps).reshape(first.shape)
    step = _step_sum(jnp.where(first, relative, 0.0), steps)
    return on_policy_tokens(episode, batch) + jax.lax.stop_gradient(omega * step)
