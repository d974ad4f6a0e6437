"""Estimators that compare a row's score with the other samples of its prompt: GRPO and its family.

Functions of the rows' scores and groups. Rows must be unpacked; groups may have any ids, order and
sizes. A group of equal scores gets exactly 0, and so does a group of one unless `singleton="raw"`
gives it its own score. A row without policy tokens keeps its score (`scores`) in the baseline of
its group. An episode of several rows (`episode`) counts once, by its total; all of its rows get
its advantage.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from rljax import batch as batches
from rljax.advantages.grouping import (
    Groups,
    choose,
    dense_ids,
    deviation,
    group_range,
    group_statistics,
    group_total,
    normalised,
    on_policy_tokens,
)
from rljax.batch import Batch
from rljax.contracts import AboveZero, NotNegative, contract
from rljax.errors import InputError

Singleton = Literal["zero", "raw"]
Std = Literal["sample", "population", "none"]
STDS = ("sample", "population", "none")


def _scores(batch: Batch, by: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (score of each row's sequence [B], dense ids of the groups [B], whether a row is the
    one that counts for its sequence [B])."""
    batch.require("rewards", "group", by=by)
    return batches.row_scores(batch), dense_ids(batch.group), batches.first_of_sequence(batch)


def _alone(advantages: jax.Array, scores: jax.Array, groups: Groups, singleton: str, by: str):
    """Returns `advantages` with 0, or the raw score, in groups of one."""
    choose(f"{by}(singleton)", singleton, ("zero", "raw"))
    singleton_advantages = scores if singleton == "raw" else jnp.zeros_like(scores)
    return jnp.where(groups.size > 1, advantages, singleton_advantages)


# The contract of estimators that read one score of each sample.
OF_SCORES = dict(
    safe=True, reads=("rewards", "group"), fills=(), compares_samples=True, token_rewards=False
)


def _group_relative_reads(options: dict) -> tuple[str, ...]:
    return ("rewards", "group", *("finish_reason",) * options["exclude_truncated"])


@contract(**OF_SCORES | {"reads": _group_relative_reads})
def group_relative(
    batch: Batch,
    *,
    std: Std = "sample",
    eps: NotNegative = 1e-6,
    singleton: Singleton = "zero",
    exclude_truncated: bool = False,
    whiten: bool = False,
) -> jax.Array:
    """A = (score - mean of its group) / (std of its group + eps), on every policy token: [B, S].

    GRPO, arXiv 2402.03300. std: "sample" (n - 1), "population" (n), or "none" (Dr. GRPO,
    2503.20783). `exclude_truncated` leaves rows that a limit ended (LENGTH, TURNS, TIME) out of the
    mean and the std and gives them 0. `whiten` normalises over the policy tokens of the batch after
    that (AReaL's example; dead groups are shifted then).
    """
    scores, ids, counted = _scores(batch, "group_relative")
    choose("group_relative(std)", std, STDS)
    included = jnp.ones(scores.shape, bool)
    if exclude_truncated:
        batch.require("finish_reason", by="group_relative(exclude_truncated)")
        included = ~batches.truncated(batch)
    groups = group_statistics(scores, ids, included & counted)
    advantages = normalised(scores, groups, std=std, eps=eps)
    advantages = _alone(advantages, scores, groups, singleton, "group_relative")
    advantages = on_policy_tokens(jnp.where(included, advantages, 0.0), batch)
    return batches.whiten(advantages, batch.mask) if whiten else advantages


@contract(**OF_SCORES)
def rloo(batch: Batch, *, singleton: Singleton = "zero") -> jax.Array:
    """A_i = r_i - mean of the other rows of the group = (r_i - mean) k / (k - 1): [B, S].

    Leave-one-out REINFORCE, arXiv 2402.14740.
    """
    scores, ids, counted = _scores(batch, "rloo")
    groups = group_statistics(scores, ids, counted)
    factor = groups.size / jnp.maximum(groups.size - 1, 1)
    advantages = normalised(scores, groups, std="none", eps=0.0) * factor
    return on_policy_tokens(_alone(advantages, scores, groups, singleton, "rloo"), batch)


@contract(**OF_SCORES)
def reinforce_plus_plus_baseline(batch: Batch, *, singleton: Singleton = "zero") -> jax.Array:
    """score - mean of its group, on every policy token, whitened over the batch: [B, S].

    arXiv 2501.03262. A group of equal scores is 0 before the whitening, which may shift it.
    """
    by = "reinforce_plus_plus_baseline"
    scores, ids, counted = _scores(batch, by)
    groups = group_statistics(scores, ids, counted)
    centred = normalised(scores, groups, std="none", eps=0.0)
    centred = on_policy_tokens(_alone(centred, scores, groups, singleton, by), batch)
    return jax.lax.stop_gradient(batches.whiten(centred, batch.mask))


@contract(**OF_SCORES)
def opo(batch: Batch, *, singleton: Singleton = "zero") -> jax.Array:
    """A_i = r_i - sum_j l_j r_j / sum_j l_j over the group, l = policy tokens: [B, S].

    The baseline of least variance if the squared norm of a gradient grows with its length (OPO,
    arXiv 2505.23585). A group without any token takes the plain mean.
    """
    scores, ids, counted = _scores(batch, "opo")
    groups = group_statistics(scores, ids, counted)
    length = batches.sequence_sum(jnp.ones_like(batch.mask), batch).astype(scores.dtype)
    length = jnp.where(counted, length, 0.0)
    total = group_total(length, ids)
    weighted = group_total(length * scores, ids) / jnp.maximum(total, 1)
    advantages = scores - jnp.where(total > 0, weighted, groups.mean)
    advantages = jnp.where(groups.live, advantages, 0.0)
    return on_policy_tokens(_alone(advantages, scores, groups, singleton, "opo"), batch)


@contract(**OF_SCORES)
def gpg(
    batch: Batch,
    *,
    f_norm: AboveZero | Literal["std"] = 1.0,
    alpha: Literal["live", "nonzero"] = "live",
    singleton: Singleton = "zero",
) -> jax.Array:
    """A_i = alpha (r_i - mean of its group) / f_norm: [B, S] (GPG, arXiv 2504.02546).

    alpha makes up for rows without gradient. "live" (the paper): B / (B - M), M = rows of groups of
    equal scores. "nonzero" (verl): B / number of scores other than 0. f_norm "std" is the sample
    std of the group. A batch without any live group gets 0.
    """
    scores, ids, counted = _scores(batch, "gpg")
    choose("gpg(alpha)", alpha, ("live", "nonzero"))
    if isinstance(f_norm, str):
        choose("gpg(f_norm)", f_norm, ("std",))
    groups = group_statistics(scores, ids, counted)
    std = "sample" if f_norm == "std" else "none"
    centred = normalised(scores, groups, std=std, eps=1e-6)
    centred = _alone(centred, scores, groups, singleton, "gpg")
    trained = groups.live | ((groups.size == 1) & (singleton == "raw"))
    count = jnp.sum(counted & (trained if alpha == "live" else scores != 0))
    scale = jnp.sum(counted) / jnp.maximum(count, 1) / (1.0 if f_norm == "std" else f_norm)
    return on_policy_tokens(centred * scale.astype(scores.dtype), batch)


@contract(**OF_SCORES)
def maxrl(batch: Batch, *, eps: NotNegative = 1e-6) -> jax.Array:
    """A = (score - mean of its group) / (mean of its group + eps), on every policy token: [B, S].

    Maximum likelihood reinforcement learning, arXiv 2602.02710: prompts weigh 1 / their pass rate.
    With scores of 0 and 1, n samples of a prompt and eps = 0, the expected gradient is that of the
    sum over k < n of pass@k / k; it is that of the pass rate p for n = 2, and tends to that of
    log p. Scores are 0 or more. A group whose mean is not above 0 (no sample was right) gets 0, as
    does a group of equal scores. So does a group of one, whose score the paper's code divides by
    eps.
    """
    scores, ids, counted = _scores(batch, "maxrl")
    groups = group_statistics(scores, ids, counted)
    is_solved = groups.mean > 0
    centred = jnp.where(is_solved, normalised(scores, groups, std="none", eps=0.0), 0.0)
    return on_policy_tokens(centred / jnp.where(is_solved, groups.mean + eps, 1.0), batch)


@contract(**OF_SCORES)
def best_of_group(batch: Batch, *, std: Std = "none", eps: NotNegative = 1e-6) -> jax.Array:
    """A = best - second best score for the best row of each group, 0 for all others: [B, S].

    The pass@k variant of GRPO, arXiv 2503.19595; `std` divides by the group's std + eps. A tie for
    the best, an all-equal group and a group of one give 0.
    """
    scores, ids, counted = _scores(batch, "best_of_group")
    choose("best_of_group(std)", std, STDS)
    groups = group_statistics(scores, ids, counted)
    is_best = scores == group_range(scores, ids, counted)[1]
    best_count = group_total((is_best & counted).astype(scores.dtype), ids)
    is_unique_best = is_best & (best_count == 1) & (groups.size > 1)
    _, second = group_range(scores, ids, counted & ~is_best)
    gain = jnp.where(is_unique_best, scores, 0.0) - jnp.where(is_unique_best, second, 0.0)
    if std != "none":
        gain = gain / (deviation(groups, std) + eps)
    return on_policy_tokens(jnp.where(is_unique_best, gain, 0.0), batch)


@contract(**OF_SCORES)
def batch_normalised(batch: Batch, *, eps: NotNegative = 1e-8, ddof: int = 0) -> jax.Array:
    """A = (score - mean of its group) / (std of that difference over the batch + eps): [B, S].

    ScaleRL, arXiv 2510.13786. The std runs over the rows (divisor n - ddof) that have policy tokens
    and lie in a group of unequal scores.
    """
    scores, ids, counted = _scores(batch, "batch_normalised")
    groups = group_statistics(scores, ids, counted)
    centred = normalised(scores, groups, std="none", eps=0.0)
    live = counted & groups.live & jnp.any(batch.mask > 0, axis=1)
    variance = batches.masked_variance(centred, live.astype(scores.dtype), ddof=ddof)
    # One live row has no variance to divide by.
    scaled = centred / jnp.where(variance > 0, jnp.sqrt(variance) + eps, 1.0)
    return on_policy_tokens(scaled, batch)


@contract(**OF_SCORES | {"reads": ("reward_parts", "group")})
def gdpo(
    batch: Batch,
    *,
    weights: tuple[float, ...] = (),
    std: Std = "sample",
    eps: NotNegative = 1e-6,
    singleton: Singleton = "zero",
    whiten: bool = True,
) -> jax.Array:
    """sum_k w_k GRPO(part k of the reward), then whitened over all policy tokens: [B, S].

    GDPO, arXiv 2601.05242: each of the K columns of `reward_parts` is normalised in its group by
    itself, so that a part with small numbers is heard. No weights = 1 each. A part that is NaN does
    not apply to its row: it is left out of the group and adds 0. Raises InputError for another
    number of weights than K.
    """
    batch.require("reward_parts", "group", by="gdpo")
    choose("gdpo(std)", std, STDS)
    count = batch.reward_parts.shape[1]
    if weights and len(weights) != count:
        rule = f"one number for each of the {count} parts of the reward"
        raise InputError(
            "gdpo(weights)",
            value=weights,
            rule=rule,
            fix=f"weights={(1.0,) * count}, or leave weights out: all parts count alike",
        )
    ids, counted = dense_ids(batch.group), batches.first_of_sequence(batch)
    total = jnp.zeros((batch.rows,), batch.reward_parts.dtype)
    for k in range(count):
        part = batch.reward_parts[:, k]
        applies = ~jnp.isnan(part)
        part = jnp.where(applies, part, 0.0)
        groups = group_statistics(part, ids, applies & counted)
        part_advantages = normalised(part, groups, std=std, eps=eps)
        part_advantages = _alone(part_advantages, part, groups, singleton, "gdpo")
        part_advantages = jnp.where(applies, part_advantages, 0.0)
        total = total + (weights[k] if weights else 1.0) * part_advantages
    advantages = on_policy_tokens(total, batch)
    return batches.whiten(advantages, batch.mask) if whiten else advantages
