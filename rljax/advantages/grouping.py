"""Statistics of groups of rows (or of steps): dense ids, means, deviations, ranges, in O(N).

Axes: N elements.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rljax.batch import Batch, dense_ids
from rljax.errors import InputError

__all__ = [
    "Groups",
    "choose",
    "dense_ids",
    "deviation",
    "group_range",
    "group_statistics",
    "group_total",
    "normalised",
    "on_policy_tokens",
    "running_total",
]


class Groups(NamedTuple):
    """Statistics of every element's own group, over the elements that count, [N] each."""

    mean: jax.Array
    squares: jax.Array  # sum of squared deviations from the mean
    size: jax.Array  # elements that count, in the dtype of the values
    live: jax.Array  # bool: at least two different values


def choose(what: str, value: str, allowed: tuple[str, ...]) -> str:
    """Returns `value`, an option that is one of a few texts. Raises InputError
    unless it is allowed."""
    if value not in allowed:
        raise InputError(what, value=value, fix=f"write one of {', '.join(map(repr, allowed))}")
    return value


def group_total(x: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the sum of x over the group of each element: x [N] or [N, S], dense ids [N] -> the
    shape of x."""
    return jax.ops.segment_sum(x, ids, num_segments=ids.shape[0])[ids]


def running_total(x: jax.Array, ids: jax.Array, *, reverse: bool = False) -> jax.Array:
    """Returns the sum of x over the elements of its group up to each one, itself included, or from
    it on if `reverse`: x [N], ids [N] in ascending order -> [N]. No other group enters a sum."""

    def join(left, right):
        return right[0] + jnp.where(left[1] == right[1], left[0], 0), right[1]

    return jax.lax.associative_scan(join, (x, ids), reverse=reverse)[0]


def group_range(x: jax.Array, ids: jax.Array, keep: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the least and the greatest x of each element's group over keep (inf and -inf where
    none is): x [N], ids [N], keep bool [N] -> [N], [N]."""
    n = ids.shape[0]
    low = jax.ops.segment_min(jnp.where(keep, x, jnp.inf), ids, num_segments=n)[ids]
    high = jax.ops.segment_max(jnp.where(keep, x, -jnp.inf), ids, num_segments=n)[ids]
    return low, high


def group_statistics(values: jax.Array, ids: jax.Array, keep: jax.Array | None = None) -> Groups:
    """Returns the statistics of each element's group: values [N], dense ids [N], keep bool [N] ->
    Groups."""
    keep = jnp.ones(values.shape, bool) if keep is None else keep
    values = jnp.where(keep, values, 0.0)
    size = group_total(keep.astype(values.dtype), ids)
    mean = group_total(values, ids) / jnp.maximum(size, 1)
    # Deviations are taken before squaring: sum(x^2) - n mean^2 loses all digits near 0.
    squares = group_total(jnp.where(keep, values - mean, 0.0) ** 2, ids)
    low, high = group_range(values, ids, keep)
    # Equality of the values themselves: the mean of equal values may be off by a rounding, and
    # 1e-17 / 1e-6 is not 0.
    return Groups(mean, squares, size, low < high)


def deviation(groups: Groups, std: str) -> jax.Array:
    """Returns the standard deviation of each group, [N]: "sample" divides by n - 1, "population" by
    n."""
    divisor = groups.size - 1 if std == "sample" else groups.size
    return jnp.sqrt(groups.squares / jnp.maximum(divisor, 1))


def normalised(values: jax.Array, groups: Groups, *, std: str, eps: float) -> jax.Array:
    """Returns (values [N] - mean) / (std + eps), or without the std for "none"; exactly 0 in a
    group of equal values: [N]."""
    centred = values - groups.mean
    if std != "none":
        centred = centred / (deviation(groups, std) + eps)
    return jnp.where(groups.live, centred, 0.0)


def on_policy_tokens(advantages: jax.Array, batch: Batch) -> jax.Array:
    """Returns the one value of each row at every policy token of the row, a constant: [B] -> [B,
    S]."""
    return jax.lax.stop_gradient(jnp.where(batch.mask > 0, advantages[:, None], 0.0))
