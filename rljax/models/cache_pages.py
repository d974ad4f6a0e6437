"""A layer's keys and values in pages: a pool that slots share, and a table that says which pages
are a slot's, in order (arXiv 2309.06180).

Token p of slot b lives in page table[b, p // page] at p % page. An entry that is no page of the
pool drops what is written and reads as zeros. Which slot has which page is the host's to say
(rljax.sampler.scheduler). Where slots are split over devices the pool is, too: a slot's pages are
on its own device, and tables count them from that device's first.

Axes: B slots, S tokens of one call, M pairs of a slot and a row, P pages of a slot, N pages of a
device. A page is [page, K, E], or [K, page, E] for order "heads", without E for scales.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from rljax.mesh import BATCH_AXES


@dataclasses.dataclass(frozen=True)
class Pool:
    """A pool of `count` pages of `page_tokens` tokens, on all devices together; it is split like
    the slots over `shards` of the mesh's rows."""

    page_tokens: int
    count: int
    shards: int
    mesh: Mesh

    @property
    def rows(self):
        """The mesh axes that the pages, and the slots, are split over."""
        return BATCH_AXES if self.shards > 1 else None

    def pages_for(self, tokens: int) -> int:
        """Returns the number of pages that hold so many tokens."""
        return -(-tokens // self.page_tokens)


def token_axis(order: str) -> int:
    """Returns the axis of tokens in a cache of this order."""
    return 2 if order == "heads" else 1


def on_each_device(pool: Pool, function, cache, *args, by_slot: bool):
    """Returns function(cache, first slot of this device, *args), a cache, with each device's own
    pages; args have a row for each slot, or are whole on every device."""
    if pool.shards == 1:
        return function(cache, 0, *args)
    rows = PartitionSpec(BATCH_AXES)

    def local(cache, *args):
        slots = cache.table.shape[0]
        return function(cache, jax.lax.axis_index(BATCH_AXES) * slots, *args)

    return jax.shard_map(
        local,
        mesh=pool.mesh,
        in_specs=(rows, *[rows if by_slot else PartitionSpec()] * len(args)),
        out_specs=rows,
        axis_names=set(BATCH_AXES),
    )(cache, *args)


def _each(cache, function, *other_caches):
    """Returns the cache with function(array, its counterparts) in place of every part and scale."""
    parts = tuple(map(function, cache.parts, *[other.parts for other in other_caches]))
    scales = tuple(map(function, cache.scales, *[other.scales for other in other_caches]))
    return dataclasses.replace(cache, parts=parts, scales=scales)


def side_by_side(cache, held: jax.Array):
    """Returns the slots' tokens in contiguous columns (on one device), with zeros behind the
    first held [B]: another slot may have left NaN there, which is NaN in a weighted sum even
    where it is masked."""
    axis, count, page = token_axis(cache.order), cache.parts[0].shape[0], cache.pool.page_tokens
    filled = jnp.repeat(cache.table < count, page, axis=1)
    filled &= jnp.arange(filled.shape[1])[None, :] < held[:, None]

    def gathered(pool):
        pages = jnp.take(pool, cache.table, axis=0, mode="clip")
        pages = jnp.moveaxis(pages, 1, axis)
        columns = pages.reshape(*pages.shape[:axis], -1, *pages.shape[axis + 2 :])
        shape = [columns.shape[i] if i in (0, axis) else 1 for i in range(columns.ndim)]
        return jnp.where(filled.reshape(shape), columns, 0)

    return dataclasses.replace(_each(cache, gathered), table=None, pool=None)


def written(cache, new, positions: jax.Array):
    """Writes new tokens, a contiguous Cache of S columns, at positions [B, S] of the slots
    of one device."""
    count, page = cache.parts[0].shape[0], cache.pool.page_tokens
    index = positions // page
    ids = jnp.take_along_axis(cache.table, index, axis=1, mode="fill", fill_value=count)
    fillers = jnp.arange(positions.size, dtype=ids.dtype).reshape(positions.shape)
    ids = jnp.where(ids < count, ids, count + fillers)  # all different, as is promised below
    offset, options = positions % page, dict(mode="drop", unique_indices=True)

    def put(pool, tokens):
        if cache.order == "heads":
            if positions.shape[1] == 1:
                return pool.at[ids[:, 0], :, offset[:, 0]].set(tokens[:, :, 0], **options)
            return pool.at[ids, :, offset].set(tokens.swapaxes(1, 2), **options)
        if positions.shape[1] == 1:
            return pool.at[ids[:, 0], offset[:, 0]].set(tokens[:, 0], **options)
        return pool.at[ids, offset].set(tokens, **options)

    return _each(cache, put, new)


def remember(cache, new, positions: jax.Array, held: jax.Array, *, view: bool):
    """Returns the cache after new tokens at positions [B, S], and what queries look at: the first
    held [B] tokens in contiguous columns, or the pages as they are."""
    pool = cache.pool
    cache = on_each_device(
        pool, lambda c, _, *a: written(c, *a), cache, new, positions, by_slot=True
    )
    if not view:
        return cache, cache

    def look(c, _, held):
        return side_by_side(c, held)

    return cache, on_each_device(pool, look, cache, held, by_slot=True)


def write_rows(cache, rows, slots: jax.Array, source: jax.Array, first: jax.Array):
    """Writes whole pages of rows source [M] of contiguous `rows` into the pages of slots [M], but
    for those of their first `first` [M] tokens, which others may share."""
    page, axis = cache.pool.page_tokens, token_axis(cache.order)

    def placed(cache, begin, rows, slots, source, first):
        slot_count, count = cache.table.shape[0], cache.parts[0].shape[0]
        columns = min(rows.columns, page * cache.table.shape[1])
        pages = -(-columns // page)
        index = slots - begin
        is_local = (index >= 0) & (index < slot_count)
        ids = cache.table[jnp.clip(index, 0, slot_count - 1), :pages]
        fresh = is_local[:, None] & (jnp.arange(pages)[None, :] >= (first // page)[:, None])
        ids = jnp.where(fresh, ids, count)

        def put(pool, values):
            values = jax.lax.slice_in_dim(values, 0, columns, axis=axis)
            values = jnp.take(values, source, axis=0)
            room = [(0, pages * page - columns if i == axis else 0) for i in range(values.ndim)]
            values = jnp.pad(values, room)
            values = values.reshape(*values.shape[:axis], pages, page, *values.shape[axis + 1 :])
            return pool.at[ids].set(jnp.moveaxis(values, axis, 1).astype(pool.dtype), mode="drop")

        return _each(cache, put, rows)

    return on_each_device(cache.pool, placed, cache, rows, slots, source, first, by_slot=False)
