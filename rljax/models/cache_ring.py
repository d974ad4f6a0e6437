"""A ring: the columns of a layer with a sliding window, where token p lives in column p mod T.

Axes: B slots, T columns.
"""

import jax
import jax.numpy as jnp

from rljax.models.cache_pages import token_axis


def newest(total: jax.Array, columns: int) -> jax.Array:
    """The token that a ring of T columns holds in each column after `total` [B] tokens: [B, T],
    below 0 where none."""
    last = total[:, None] - 1
    return last - (last - jnp.arange(columns)[None, :]) % columns


def take(x: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    """x's tokens at index [B, T], row by row."""
    shape = [
        index.shape[0] if i == 0 else index.shape[1] if i == axis else 1 for i in range(x.ndim)
    ]
    return jnp.take_along_axis(x, index.reshape(shape), axis=axis)


def taken_back(before, after, columns: jax.Array, counts: jax.Array):
    """`after` has read tokens behind the first columns [B] of each slot, at most as many as a ring
    has columns: the same with counts [B] of them, by what was there `before`. (Where no token
    overwrites another, the rest stands behind the slot's last token.)"""
    if not after.is_ring:
        return after
    fresh = newest(columns + counts, after.columns) >= columns[:, None]
    axis = token_axis(after.order)

    def turned(old, new):
        shape = [x if i in (0, axis) else 1 for i, x in enumerate(old.shape)]
        return jnp.where(fresh.reshape(shape), new, old)

    return jax.tree.map(turned, before, after)
