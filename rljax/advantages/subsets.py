"""Estimators of the best of k samples, pass@k: means over all subsets of k rows of a group.

Functions of the rows' scores and groups, in closed form: no subset is drawn. Rows must be unpacked;
groups may have any ids, order and sizes. In a group of fewer than k rows k is their number. A group
of equal scores and a group of one get exactly 0. A row without policy tokens keeps its score
(`scores`) in the subsets. An episode of several rows (`episode`) counts once, by its total; all of
its rows get its advantage. Axes: B rows, N = B rows in the order of `_sorted_rows`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rljax import batch as batches
from rljax.advantages.grouping import (
    dense_ids,
    group_range,
    group_total,
    on_policy_tokens,
    running_total,
)
from rljax.advantages.groups import OF_SCORES
from rljax.batch import Batch
from rljax.contracts import NotNegative, contract
from rljax.errors import InputError


def _check_k(name: str, k: int, least: int, samples_per_prompt: int | None = None) -> None:
    """Raises InputError unless k is a whole number from `least` on, and at most the samples of a
    prompt where their number is known."""
    is_whole = isinstance(k, int) and not isinstance(k, bool)
    if is_whole and least <= k <= (k if samples_per_prompt is None else samples_per_prompt):
        return
    rule, allowed = f"a whole number from {least} on", 4
    if samples_per_prompt is not None:
        rule += f", at most batch.samples_per_prompt, {samples_per_prompt}"
        allowed = max(least, min(4, samples_per_prompt))
    raise InputError(f"{name}(k)", value=k, rule=rule, fix=f"{name}(k={allowed})")


class _Rows(NamedTuple):
    """The rows of a batch, sorted by group and score: [N] each."""

    index: jax.Array  # of the row in the batch
    ids: jax.Array  # of the groups
    scores: jax.Array
    counted: jax.Array  # 1 for the row that stands for its sequence, else 0
    rank: jax.Array  # of the row in its group: the number of counted rows up to it
    size: jax.Array  # counted rows of the group
    k: jax.Array  # rows of a subset


def _sorted_rows(batch: Batch, k: int, by: str) -> _Rows:
    batch.require("rewards", "group", by=by)
    scores, ids = batches.row_scores(batch), dense_ids(batch.group)
    counted = batches.first_of_sequence(batch)
    # The row that counts for a sequence stands before its other rows, which have its score.
    index = jnp.lexsort((~counted, scores, ids))
    scores, ids, counted = scores[index], ids[index], counted[index].astype(jnp.int32)
    size = group_total(counted, ids)
    rank = running_total(counted, ids)
    return _Rows(index, ids, scores, counted.astype(scores.dtype), rank, size, jnp.minimum(k, size))


def _ratio(rows: _Rows, rank: jax.Array, first: int, k: int) -> jax.Array:
    """Returns the product of (rank - t) / (size - t) over first <= t < k, each row's own k: [N].

    It is C(rank - first, k - first) / C(size - first, k - first); 0 where rank < k.
    """
    t = jnp.arange(first, k, dtype=jnp.int32)[:, None]
    rank, size, own_k = (x[None, :] for x in (rank, rows.size, rows.k))
    dtype = rows.scores.dtype
    factors = jnp.maximum(rank - t, 0).astype(dtype) / jnp.maximum(size - t, 1).astype(dtype)
    return jnp.prod(jnp.where(t < own_k, factors, 1), axis=0)


def _share_above(rows: _Rows, rank: jax.Array, k: int) -> jax.Array:
    """Returns C(rank - 2, k - 2) / C(size - 1, k - 1): of the subsets of a row, the share whose
    best row is the one of this rank, if that is above the row's own: [N]."""
    others = jnp.maximum(rows.size - 1, 1).astype(rows.scores.dtype)
    return (rows.k - 1) / others * _ratio(rows, rank, 2, k)


def _unsorted(values: jax.Array, rows: _Rows) -> jax.Array:
    return jnp.zeros_like(values).at[rows.index].set(values)


@contract(
    **OF_SCORES,
    check=lambda config, options: _check_k(
        "pass_at_k", options.get("k", 4), 1, config.batch.samples_per_prompt
    ),
)
def pass_at_k(batch: Batch, *, k: int = 4, eps: NotNegative = 1e-6) -> jax.Array:
    """A = (m - mean) / (std + eps), m the mean best score of the subsets of k with the row: [B, S].

    Pass@k training in its analytic form, arXiv 2508.10751; mean and std are those of the best score
    of all subsets of k rows of the group. Of n scores of 0 and 1, w of them 0: mean = 1 - C(w, k) /
    C(n, k), std = sqrt(mean (1 - mean)), m = 1 for a right row and 1 - C(w - 1, k - 1) /
    C(n - 1, k - 1) for a wrong one. The paper has these scores alone; m, mean and std of any others
    are used alike. k = 1 is GRPO with the population std. A group whose subsets all have the same
    best score gets 0. Raises InputError for k below 1, or above the samples of a prompt in a
    config.
    """
    _check_k("pass_at_k", k, 1)
    rows = _sorted_rows(batch, k, "pass_at_k")
    own = _ratio(rows, rows.rank, 1, k)
    is_best = rows.counted * own * rows.k / rows.size  # of the subsets, the share it is best in
    mean = group_total(is_best * rows.scores, rows.ids)
    variance = group_total(is_best * (rows.scores - mean) ** 2, rows.ids)
    above = rows.counted * _share_above(rows, rows.rank, k) * rows.scores
    above = running_total(above, rows.ids, reverse=True) - above
    # Equality of the scores themselves: the best score of a subset is at least the k-th lowest.
    low, high = group_range(rows.scores, rows.ids, (rows.counted > 0) & (rows.rank >= rows.k))
    advantages = (own * rows.scores + above - mean) / (jnp.sqrt(variance) + eps)
    return on_policy_tokens(_unsorted(jnp.where(low < high, advantages, 0.0), rows), batch)


@contract(
    **OF_SCORES,
    check=lambda config, options: _check_k(
        "pkpo", options.get("k", 4), 2, config.batch.samples_per_prompt
    ),
)
def pkpo(batch: Batch, *, k: int = 4) -> jax.Array:
    """A = k times what a row adds to the best score of k, mean over the subsets with it: [B, S].

    PKPO, arXiv 2505.15201: n s_i, where s_i is the paper's "leave one out minus one" (equation 33),
    so that the mean over the n rows of a group is an unbiased gradient of the expected best of k
    scores, whatever these are. A = k sum over r_j < r_i of C(j - 1, k - 2) / C(n - 1, k - 1)
    (r_i - r_j), j the rank of r_j from below. Of scores of 0 and 1, w of them 0: k C(w, k - 1) /
    C(n - 1, k - 1) for a right row, 0 for a wrong one. k = n is n times `best_of_group`; k = 1
    would be `rloo`. Raises InputError for k below 2, or above the samples of a prompt in a config.
    """
    _check_k("pkpo", k, 2)
    rows = _sorted_rows(batch, k, "pkpo")
    low, high = group_range(rows.scores, rows.ids, rows.counted > 0)
    scores = jnp.where(low < high, rows.scores - low, 0.0)  # so that the lowest is exactly 0
    below = rows.counted * _share_above(rows, rows.rank + 1, k)
    gain = scores * running_total(below, rows.ids) - running_total(below * scores, rows.ids)
    return on_policy_tokens(_unsorted(rows.k * gain, rows), batch)
