"""Estimators from later rewards alone: GAE, VAPO, REINFORCE, ReMax, REINFORCE++.

Recursions over the policy tokens of a segment; rows may be packed. t+ is the next token the policy
chose in the same segment, or in the same episode, which may go on in another row: tool output,
forced text and padding are skipped, not steps of value 0.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from rljax import batch as batches
from rljax.advantages.grouping import choose
from rljax.batch import Batch, discounted_sum
from rljax.contracts import NotNegative, Share, contract
from rljax.kernels import gae as recurrences


def _gae_reads(options: dict) -> tuple[str, ...]:
    finish = ("finish_reason",) if options["bootstrap_truncated"] else ()
    turns = ("step_ids",) if options.get("time") == "turn" else ()
    return ("rewards", "values", *finish, *turns)


def _rewards(batch: Batch, gamma: float, bootstrap_truncated: bool, by: str) -> jax.Array:
    """Returns the rewards, plus gamma V at the end of truncated rows if `bootstrap_truncated`: [B,
    S].

    The value after the last token of a response that was cut off is not 0; the nearest estimate is
    the value of the last token itself.
    """
    batch.require("rewards", "values", by=by)
    if not bootstrap_truncated:
        return batch.rewards
    batch.require("finish_reason", by=f"{by}(bootstrap_truncated)")
    ends = batches.truncated(batch)[:, None] & (batches.last_token(batch) > 0)
    return jnp.where(ends, batch.rewards + gamma * batch.values, batch.rewards)


def opens_turn(batch: Batch) -> jax.Array:
    """Returns whether t+ is the first token of a turn (of another step than t): bool [B, S]."""
    steps = jnp.where(batch.mask > 0, batch.step_ids, 0)
    return batches.next_policy_token(steps, batch) != steps


def _gae(batch: Batch, rewards, gamma, lam) -> tuple[jax.Array, jax.Array]:
    """Returns (advantages, returns) of GAE. gamma and lam: numbers, or [B, S], read at t for the
    way from t to t+."""
    if batch.episode is None and jnp.ndim(gamma) == 0:
        return recurrences.gae(
            rewards, batch.values, batch.mask, gamma=gamma, lam=lam, segment_ids=batch.segment_ids
        )
    is_policy = batch.mask > 0
    rewards, values = (jnp.where(is_policy, x, 0.0) for x in (rewards, batch.values))
    delta = rewards + gamma * batches.next_policy_token(values, batch) - values
    advantages = discounted_sum(jnp.where(is_policy, delta, 0.0), batch, gamma * lam)
    return advantages, jnp.where(is_policy, advantages + values, 0.0)


@contract(safe=True, reads=_gae_reads, fills=("returns",), token_rewards=True)
def gae(
    batch: Batch,
    *,
    gamma: Share = 1.0,
    lam: Share = 1.0,
    whiten: bool = True,
    bootstrap_truncated: bool = False,
    time: Literal["token", "turn"] = "token",
):
    """delta_t = r_t + gamma V_{t+} - V_t; A_t = delta_t + gamma lam A_{t+}; returns = A + V.

    V and A are 0 after the last token (arXiv 1506.02438). `whiten` normalises the advantages (not
    the returns) over the whole batch. `bootstrap_truncated` puts V of the last token of the row,
    instead of 0, behind it where a limit ended it (LENGTH, TURNS, TIME). `time` "turn": gamma and
    lam count where t+ opens a turn and are 1 inside of turns, so that how far the critic looks does
    not depend on how many tokens a turn has. -> (advantages, returns), [B, S] each.
    """
    choose("gae(time)", time, ("token", "turn"))
    rewards = _rewards(batch, gamma, bootstrap_truncated, "gae")
    if time == "turn":
        batch.require("step_ids", by="gae(time='turn')")
        opens = opens_turn(batch)
        gamma, lam = (jnp.where(opens, x, 1.0).astype(rewards.dtype) for x in (gamma, lam))
    advantages, returns = _gae(batch, rewards, gamma, lam)
    if whiten:
        advantages = batches.whiten(advantages, batch.mask)
    return jax.lax.stop_gradient((advantages, returns))


@contract(safe=True, reads=_gae_reads, fills=("returns",), token_rewards=True)
def vapo_gae(
    batch: Batch,
    *,
    gamma: Share = 1.0,
    alpha: NotNegative = 0.05,
    lam_actor: Share | None = None,
    lam_critic: Share = 1.0,
    whiten: bool = True,
    bootstrap_truncated: bool = False,
):
    """GAE twice: advantages with lambda = clip(1 - 1/(alpha l), 0, 1), returns with lam_critic.

    l = policy tokens of the sequence (VAPO, arXiv 2504.05118). A number for `lam_actor` takes its
    place for every length: decoupled GAE (VC-PPO, 2503.01491). -> (advantages, returns), [B, S].
    """
    rewards = _rewards(batch, gamma, bootstrap_truncated, "vapo_gae")
    if lam_actor is None:
        length = jnp.maximum(batches.sequence_tokens(batch), 1)
        lam_actor = jnp.clip(1 - 1 / (alpha * length), 0.0, 1.0)
    advantages, _ = _gae(batch, rewards, gamma, lam_actor)
    _, returns = _gae(batch, rewards, gamma, lam_critic)
    if whiten:
        advantages = batches.whiten(advantages, batch.mask)
    return jax.lax.stop_gradient((advantages, returns))


@contract(safe=True, reads=("rewards",), fills=(), token_rewards=True)
def reinforce(
    batch: Batch,
    *,
    gamma: Share = 1.0,
    form: Literal["to_go", "sequence"] = "to_go",
    baseline: float | None = None,
) -> jax.Array:
    """A_t = G_t - b_t, G_t = r_t + gamma G_{t+}; `form` "sequence" puts the first G on all tokens.

    b = `baseline`; where that is None the batch's values, and 0 where it has none. Nothing is
    whitened. With a critic that learns on, `gae(lam=1, whiten=False)` gives the returns too.
    Returns [B, S].
    """
    batch.require("rewards", by="reinforce")
    choose("reinforce(form)", form, ("to_go", "sequence"))
    is_policy = batch.mask > 0
    result = discounted_sum(batch.rewards, batch, gamma)
    if form == "sequence":
        result = jnp.where(batches.first_token(batch), result, 0.0)
        per_sequence = batches.segment_sum(result, batch)
        if batch.episode is not None:
            per_sequence = jnp.broadcast_to(
                batches.sequence_sum(result, batch)[:, None], per_sequence.shape
            )
        result = per_sequence
    if baseline is not None:
        result = result - baseline
    elif batch.values is not None:
        result = result - jnp.where(is_policy, batch.values, 0.0)
    return jax.lax.stop_gradient(jnp.where(is_policy, result, 0.0))


@contract(safe=True, reads=("rewards", "values"), fills=(), token_rewards=True)
def remax(batch: Batch, *, gamma: Share = 1.0) -> jax.Array:
    """A_t = sum of gamma^(s-t) r_s from t on - gamma^(T-t) R(greedy response): [B, S] (ReMax, arXiv
    2310.10505; T is the last policy token of the sequence).

    The dataflow samples one greedy response per prompt, with the same limit of tokens, and puts its
    reward into `values` at every policy token of the prompt's rows. A truncated one counts as is.
    """
    batch.require("rewards", "values", by="remax")
    if gamma == 1.0:
        return reinforce(batch)
    is_last = batches.last_token(batch) > 0
    rewards = jnp.where(is_last, batch.rewards - batch.values, batch.rewards)
    return reinforce(batch.replace(rewards=rewards), gamma=gamma, baseline=0.0)


@contract(safe=True, reads=("rewards",), fills=(), token_rewards=True)
def reinforce_plus_plus(batch: Batch, *, gamma: Share = 1.0) -> jax.Array:
    """G_t = r_t + gamma G_{t+}, whitened over all policy tokens of the batch (arXiv 2501.03262).

    The rewards hold the KL penalty already; no groups are needed. Returns [B, S].
    """
    batch.require("rewards", by="reinforce_plus_plus")
    returns = discounted_sum(batch.rewards, batch, gamma)
    return jax.lax.stop_gradient(batches.whiten(returns, batch.mask))


def lagrangian(of_rewards: jax.Array, of_costs: jax.Array, multiplier: jax.Array) -> jax.Array:
    """Returns (A_R - lambda A_C) / (1 + lambda): the advantage of the Lagrangian, scaled so that it
    stays bounded as lambda grows (Safe-RLHF, arXiv 2310.12773). A_R, A_C [B, S], lambda [] -> [B,
    S]."""
    return (of_rewards - multiplier * of_costs) / (1 + multiplier)
