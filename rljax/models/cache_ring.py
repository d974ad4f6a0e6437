"""A ring: the columns of a layer with a sliding window, where token p lives in column p mod T.

Axes: B slots, T columns.
"""

import jax
import jax.numpy as jnp

from rljax.models.cache_pages import token_axis


def newest(total: jax.Array, columns: int) -> jax.Array:
    """Returns the token that a ring of T columns holds in each column after `total` [B] tokens:
    [B, T], below 0 where none."""
    last_token = total[:, None] - 1
    return last_token - (last_token - jnp.arange(columns)[None, :]) % columns


def take(x: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    """Returns x's tokens at index [B, T], row by row; `axis` is the one of tokens."""
    shape = [
        index.shape[0] if i == 0 else index.shape[1] if i == axis else 1 for i in range(x.ndim)
    ]
    return jnp.take_along_axis(x, index.reshape(shape), axis=axis)


def put(old: jax.Array, new: jax.Array, at: jax.Array, order: str) -> jax.Array:
    """Writes new's tokens into columns at [B, S] of `old`; what is out of range is dropped."""
    options = dict(mode="drop", unique_indices=True)
    if at.shape[1] == 1:
        rows, options["indices_are_sorted"] = jnp.arange(old.shape[0]), True
        if order == "heads":
            return old.at[rows, :, at[:, 0]].set(new[:, :, 0], **options)
        return old.at[rows, at[:, 0]].set(new[:, 0], **options)
    rows = jnp.arange(old.shape[0])[:, None]
    if order == "heads":
        return old.at[rows, :, at].set(new.swapaxes(1, 2), **options)
    return old.at[rows, at].set(new, **options)


def taken_back(before, after, columns: jax.Array, counts: jax.Array):
    """Returns the cache `after`, which has read tokens behind the first columns [B] of each slot,
    at most as many as a ring has columns, with only counts [B] of them; `before` is the cache
    from before they were read. (Where no token overwrites another, the rest stands behind the
    slot's last token.)"""
    if not after.is_ring:
        return after
    fresh = newest(columns + counts, after.columns) >= columns[:, None]
    axis = token_axis(after.order)

    def wrapped(old, new):
        shape = [x if i in (0, axis) else 1 for i, x in enumerate(old.shape)]
        return jnp.where(fresh.reshape(shape), new, old)

    return jax.tree.map(wrapped, before, after)
