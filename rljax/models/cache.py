"""The cache of a layer: the keys and values of the tokens it has read, in slots; or, of a recurrent
layer, a state of one size (rljax.models.gated_delta, short_convolution).

The layout of a cache, writing to it, and which of its columns a call's queries see.

Token p of a slot lives in column p. A layer with a sliding window keeps the window alone: its
columns are a ring, and token p lives in column p mod T. What stands behind a slot's last token is
garbage that is overwritten before it is read.

Order "heads" is [B, K, T, E], "tokens" is [B, T, K, E]. On CPU the first is twice as fast to attend
to; on TPU a write per slot is in place in the second alone, and if E is whole lanes of 128. (Of
another E the compiler would hold the tokens in the lanes between programs, and turn the whole cache
around in a second copy at each.) So smaller heads share lanes there (`shared_lanes`: two of 64 are
stored as one of 128), and zeros fill up the rest. Order "pairs" is [B, T, 2 K, E], keys and values
of a head side by side: the pages that TPU's ragged paged attention reads, where it can say what a
layer asks. int8 keeps one float32 scale per token and head, which then shares its lanes with none.

Where slots share a pool of pages (rljax.models.cache_pages), layers without a window are made of
them; a call needs their table.

Axes: B slots, S tokens of one call, K kv heads, T columns, E size of a head (of keys or values).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rljax.errors import InputError
from rljax.mesh import BATCH_AXES, row_shards
from rljax.models import cache_pages, gated_delta, short_convolution
from rljax.models.attention_paths import LANES, pad_axis, paged_takes, whole_pages
from rljax.models.cache_pages import Pool, token_axis
from rljax.models.cache_ring import newest, put, take
from rljax.models.cache_tree import Nodes
from rljax.models.config import LayerKind, ModelConfig
from rljax.models.gated_delta import State

DTYPES = ("", "float32", "bfloat16", "float16", "int8")  # "" = what the model computes in


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The cache of one layer: (keys, values), both in one, or the one latent that both are
    made of."""

    parts: tuple[jax.Array, ...]
    scales: tuple[jax.Array, ...]  # of int8 parts, without the last axis; else ()
    order: str = dataclasses.field(metadata={"static": True})
    window: int = dataclasses.field(metadata={"static": True})  # of the layer; 0 = all
    # The pages of each slot [B, P] int32, where `parts` and `scales` are pages; None between calls.
    table: jax.Array | None = None
    pool: Pool | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def heads(self) -> int:
        """Number of heads of keys, and of values, as they are stored."""
        shape = self.parts[0].shape
        return {"heads": shape[1], "tokens": shape[2], "pairs": shape[2] // 2}[self.order]

    @property
    def columns(self) -> int:
        """Number of tokens of a slot; without their table, of a page."""
        tokens = self.parts[0].shape[token_axis(self.order)]
        return tokens if self.table is None else tokens * self.table.shape[1]

    @property
    def is_ring(self) -> bool:
        """Returns whether a token may have overwritten an older one."""
        return 0 < self.window == self.columns

    def arrays(self) -> tuple[jax.Array, ...]:
        """Returns all arrays of the cache: the parts, in the shape of its `order`, then the scales,
        without the last axis."""
        return self.parts + self.scales


def room(caches: list[Cache]) -> int:
    """Returns the number of tokens that a slot has room for: the columns of the layer that
    holds the most."""
    return max(layer_cache.columns for layer_cache in caches)


def order_for(mesh: Mesh) -> str:
    """Returns the order of the axes of a cache, "heads" or "tokens", that the mesh's
    devices read fastest."""
    return "tokens" if mesh.devices.flat[0].platform == "tpu" else "heads"


def pairs_for(config: ModelConfig, mesh: Mesh, dtype: str) -> bool:
    """Returns whether a layer's keys and values are stored as pairs: where the kernel that reads
    them runs, which has no sinks and no scales."""
    chunks = any(kind.chunk for kind in config.kinds)  # what that kernel does not know, either
    if config.latent or config.sinks or chunks or mesh.devices.flat[0].platform != "tpu":
        return False
    shards, (kv_heads, widths) = _shards(config, mesh), _stored(config, mesh, dtype)
    return paged_takes(config.heads // shards, kv_heads // shards, widths[0], dtype or config.dtype)


def _shards(config: ModelConfig, mesh: Mesh) -> int:
    """Returns the number of devices that the kv heads are split over."""
    return mesh.shape["tensor"] if config.kv_heads % mesh.shape["tensor"] == 0 else 1


def _order(config: ModelConfig, mesh: Mesh, dtype: str) -> str:
    order = order_for(mesh)
    return "pairs" if order == "tokens" and pairs_for(config, mesh, dtype) else order


def _room(config: ModelConfig, columns: int, window: int, order: str = "", rings=True) -> int:
    """Returns the number of columns of a slot in a layer that has room for so many tokens."""
    columns = whole_pages(columns) if order == "pairs" else columns
    # Batch-invariant attention reads keys in the order of their columns.
    if config.batch_invariant or not rings:
        return columns + (columns == window)
    return min(columns, window or columns)


def _widths(config: ModelConfig) -> tuple[int, tuple[int, ...]]:
    """Returns (the number of kv heads, the sizes of a head in every part)."""
    if config.latent:
        return 1, (config.latent.kv_rank + config.latent.rope_dim,)
    return config.kv_heads, (config.head_dim, config.head_dim)


def lanes_for(mesh: Mesh) -> int:
    """Returns the number that the stored size of a head is a multiple of."""
    return LANES if mesh.devices.flat[0].platform == "tpu" else 1


def _stored(config: ModelConfig, mesh: Mesh | None, dtype: str) -> tuple[int, tuple[int, ...]]:
    """Returns `_widths` as they are stored on a mesh: as many kv heads share lanes as fit and as a
    device has all of."""
    heads, widths = _widths(config)
    if mesh is None:
        return heads, widths
    lanes, shared_heads = lanes_for(mesh), 1
    if dtype != "int8" and not config.latent:
        shared_heads = math.gcd(max(1, lanes // widths[0]), heads // _shards(config, mesh))
    return heads // shared_heads, tuple(-(-shared_heads * w // lanes) * lanes for w in widths)


def slot_bytes(
    config: ModelConfig, columns: int, dtype: str = "", mesh: Mesh | None = None, rings=True
) -> int:
    """Returns the bytes that one slot of `columns` tokens takes, over all layers and devices;
    without a mesh, those of the numbers alone."""
    total_bytes = 0
    for kind in config.kinds:
        if kind.recurrent:
            total_bytes += _state_bytes(config)
            continue
        sizes = config.of(kind)
        order = _order(sizes, mesh, dtype) if mesh else ""
        tokens = _room(sizes, columns, kind.window, order, rings)
        total_bytes += tokens * _token_bytes(sizes, dtype, mesh)
    return total_bytes


def _empty_state(config: ModelConfig, rows: int) -> State:
    """Returns the state of a recurrent layer of so many rows that have read nothing."""
    if config.delta:
        return gated_delta.empty_state(config.delta, rows, config.dtype)
    return short_convolution.empty_state(config.short_conv, config.embed, rows, config.dtype)


def _state_bytes(config: ModelConfig) -> int:
    """Returns the bytes of the state of a recurrent layer in one slot, over all devices."""
    state = jax.eval_shape(lambda: _empty_state(config, 1))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))


def pool_bytes(config: ModelConfig, slots: int, columns: int, dtype: str, pool: Pool) -> int:
    """Returns the bytes of a pool's pages, and of the rings of so many slots, over all
    layers and devices."""
    total_bytes = 0
    for kind in config.kinds:
        if kind.recurrent:
            total_bytes += slots * _state_bytes(config)
            continue
        sizes, tokens = config.of(kind), pool.count * pool.page_tokens
        if kind.window:
            order = _order(sizes, pool.mesh, dtype)
            tokens = slots * _room(sizes, columns, kind.window, order)
        total_bytes += tokens * _token_bytes(sizes, dtype, pool.mesh)
    return total_bytes


def _token_bytes(config: ModelConfig, dtype: str, mesh: Mesh | None) -> int:
    """Returns the bytes of one token in one layer."""
    heads, widths = _stored(config, mesh, dtype)
    size = jnp.dtype(dtype or config.dtype).itemsize
    return heads * sum(width * size + (4 if dtype == "int8" else 0) for width in widths)


def _sharding(mesh: Mesh, shape: tuple[int, ...], order: str, pool: Pool | None) -> NamedSharding:
    """Splits slots, or pages, over the axes of rows, and kv heads over tensor, where they
    divide."""
    rows = BATCH_AXES if shape[0] % row_shards(mesh) == 0 else None
    rows = pool.rows if pool else rows
    kv_heads = {"heads": shape[1], "tokens": shape[2], "pairs": shape[2] // 2}[order]
    heads = "tensor" if kv_heads % mesh.shape["tensor"] == 0 else None
    spec = (rows, heads, None) if order == "heads" else (rows, None, heads)
    return NamedSharding(mesh, PartitionSpec(*spec))


def _state_sharding(mesh: Mesh, state: State) -> State:
    """Splits slots over the axes of rows, and heads or channels over tensor, where they divide."""

    def sharding(x, axis: int) -> NamedSharding:
        rows = BATCH_AXES if x.shape[0] % row_shards(mesh) == 0 else None
        heads = "tensor" if x.shape[axis] % mesh.shape["tensor"] == 0 else None
        return NamedSharding(mesh, PartitionSpec(rows, *[None] * (axis - 1), heads))

    memory = None if state.memory is None else sharding(state.memory, 1)
    return State(memory, tuple(sharding(x, 2) for x in state.recent))


def shardings(caches: list[Cache | State], mesh: Mesh) -> list:
    """Returns the sharding of every array of the caches."""
    return [
        _state_sharding(mesh, c)
        if isinstance(c, State)
        else jax.tree.map(lambda x, c=c: _sharding(mesh, x.shape, c.order, c.pool), c)
        for c in caches
    ]


def constrain(caches: list[Cache], mesh: Mesh) -> list[Cache]:
    """Keeps caches split as `shardings` says, inside a program. (On one device, too: arrays that
    differ in what they know of the mesh compile twice.)"""
    return jax.lax.with_sharding_constraint(caches, shardings(caches, mesh))


def empty(
    config: ModelConfig,
    mesh: Mesh,
    slots: int,
    columns: int,
    dtype: str = "",
    pool=None,
    rings=True,
):
    """Returns one empty cache per layer (inside a program), of pages where there is a Pool. Without
    rings a layer with a sliding window has all columns, too. Raises InputError for a `dtype` that
    keys and values cannot be held in."""
    check_dtype(config, dtype)
    caches = []
    for kind in config.kinds:
        if kind.recurrent:
            caches.append(_empty_state(config, slots))
            continue
        heads, widths = _stored(config.of(kind), mesh, dtype)
        order = _order(config.of(kind), mesh, dtype)
        capacity = _room(config, columns, kind.window, order, rings)
        paged = pool if pool and not kind.window else None
        rows = (paged.count, paged.page_tokens) if paged else (slots, capacity)
        parts = [jax.ShapeDtypeStruct((*rows, heads, width), config.dtype) for width in widths]
        # Zeros that are rounded are zeros. XLA computes that when it compiles, for seconds a layer.
        encode = functools.partial(_encode, dtype=dtype, order=order, window=kind.window)
        shapes = jax.eval_shape(encode, parts)
        layer_cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        caches.append(dataclasses.replace(layer_cache, pool=paged))
    return constrain(caches, mesh)


def with_table(caches: list[Cache], table: jax.Array | None) -> list[Cache]:
    """Returns the caches as a call needs them, those of pages with their table [B, P] int32;
    None takes it away."""
    return [
        dataclasses.replace(layer_cache, table=table) if layer_cache.pool else layer_cache
        for layer_cache in caches
    ]


def check_dtype(config: ModelConfig, dtype: str) -> None:
    """Raises InputError where keys and values of the model cannot be held in this type."""
    allowed, condition = DTYPES, ""
    if config.batch_invariant:
        allowed, condition = ("", "float32"), ", with model_settings.batch_invariant"
    if dtype not in allowed:
        rule = f"one of {', '.join(allowed)}{condition}"
        fix = "--config.sampler.kv_dtype='', the dtype of the model, or another of these"
        raise InputError("sampler kv_dtype", value=dtype, rule=rule, fix=fix)


def _encode(parts, dtype: str, order: str, window: int) -> Cache:
    """Returns parts [B, S, K, E] as a cache of S columns."""
    scales = ()
    if dtype == "int8":
        floats = [x.astype(jnp.float32) for x in parts]
        scales = tuple(jnp.max(jnp.abs(x), axis=-1) / 127 for x in floats)
        parts = [
            jnp.round(x / jnp.maximum(s, 1e-30)[..., None]).astype(jnp.int8)
            for x, s in zip(floats, scales, strict=True)
        ]
    elif dtype:
        parts = [x.astype(dtype) for x in parts]
    if order == "heads":
        parts = [x.swapaxes(1, 2) for x in parts]
        scales = tuple(x.swapaxes(1, 2) for x in scales)
    if order == "pairs":
        b, tokens, heads, width = parts[0].shape
        parts = [jnp.stack(parts, axis=3).reshape(b, tokens, 2 * heads, width)]
    return Cache(tuple(parts), tuple(scales), order, window)


def _as_stored(parts, heads: int, widths):
    """Returns parts [B, S, K, E] with so many heads, which share lanes, and with zeros up to their
    widths."""
    grouped = [x.reshape(*x.shape[:2], heads, -1) for x in parts]
    return [pad_axis(x, 3, width) for x, width in zip(grouped, widths, strict=True)]


def shared_lanes(q: jax.Array, kv_heads: int, cache: Cache):
    """Returns queries [B, S, H, E] for a cache whose kv heads share lanes, and a function that
    gives the [B, S, H, E] of its attention's output.

    Where kv heads 0 and 1 are stored as one, keys [k0 | k1] and values [v0 | v1], the queries of
    the first are [q | 0] and those of the second [0 | q]: q.k is what it was. The output
    is [out | .] and [. | out].
    """
    shared, heads, size = kv_heads // cache.heads, q.shape[2], q.shape[3]
    if shared == 1:
        return q, lambda out: out
    of_head = np.arange(heads) // (heads // kv_heads) % shared
    is_own_lane = (of_head[:, None] == np.arange(shared)).reshape(1, 1, heads, shared, 1)
    widened = jnp.where(is_own_lane, q[:, :, :, None], 0).reshape(*q.shape[:3], shared * size)

    def apart(output):
        output = output[..., : shared * size].reshape(*output.shape[:3], shared, size)
        return jnp.sum(jnp.where(is_own_lane, output, 0), axis=3)

    return widened, apart


def _like(cache: Cache, parts) -> Cache:
    """Returns parts [B, S, K, E] in the layout of `cache`."""
    dtype = str(cache.parts[0].dtype)
    widths = [x.shape[-1] for x in cache.parts]
    widths = widths * 2 if cache.order == "pairs" else widths
    parts = _as_stored(parts, cache.heads, widths)
    return _encode(parts, dtype, cache.order, cache.window)


def from_prompt(
    parts,
    lengths: jax.Array,
    config,
    mesh: Mesh,
    columns: int,
    dtype: str,
    kind: LayerKind,
    rings=True,
):
    """Returns the cache of right-padded prompts, with room for `columns` tokens:
    parts [B, S, K, E], lengths [B], of a layer of this kind; `parts` of a recurrent one is its
    state already. `rings` is as in `empty`. Raises InputError if a layer without a window gets more
    prompt columns than it has room for."""
    if kind.recurrent:
        return parts
    window = kind.window
    parts = _as_stored(parts, *_stored(config, mesh, dtype))
    cache = _encode(parts, dtype, _order(config, mesh, dtype), window)
    capacity, axis = _room(config, columns, window, rings=rings), token_axis(cache.order)
    tokens = cache.columns
    if tokens <= capacity:
        room = [(0, capacity - tokens if i == axis else 0) for i in range(4)]
        return jax.tree.map(lambda x: jnp.pad(x, room[: x.ndim]), cache)
    if not window:
        rule = f"at most the {columns} of the cache"
        fix = f"make the cache with {tokens} columns or more"
        raise InputError("prompt columns", value=tokens, rule=rule, fix=fix)
    kept_tokens = jnp.maximum(newest(lengths, capacity), 0)
    return jax.tree.map(lambda x: take(x, kept_tokens, axis), cache)


def remember(
    cache: Cache, parts, columns: jax.Array, counts: jax.Array | None, nodes: Nodes | None = None
):
    """Reads S more tokens: parts [B, S, K, E], the first of them token columns [B] of its slot, of
    which counts [B] are real (None: all); or the nodes of trees, into a cache without rings.

    Returns the new cache, what this call's queries look at (a Cache), and allowed [B, S, T'] bool,
    which of its columns each query sees.
    """
    tokens, new_cache = parts[0].shape[1], _like(cache, parts)
    if nodes is not None:
        assert not cache.is_ring and not cache.pool
        index = nodes.columns(cache.columns)
        cache = jax.tree.map(lambda c, x: put(c, x, index, cache.order), cache, new_cache)
        return cache, cache, nodes.allowed(cache.columns, cache.window)
    positions = columns[:, None] + jnp.arange(tokens)[None, :]
    if cache.pool:  # (A single query of pairs reads pages: rljax.models.attention.)
        distance = positions[:, :, None] - jnp.arange(cache.columns)[None, None, :]
        held_tokens = columns + (tokens if counts is None else counts)
        view = cache.order != "pairs" or tokens > 1
        return *cache_pages.remember(
            cache, new_cache, positions, held_tokens, view=view
        ), distance >= 0
    if cache.is_ring and tokens > 1:
        return _remember_in_ring(cache, new_cache, columns, counts, positions)
    index = positions % cache.columns if cache.is_ring else positions
    cache = jax.tree.map(lambda c, x: put(c, x, index, cache.order), cache, new_cache)
    if cache.is_ring:
        held_tokens = newest(columns + 1, cache.columns)
        return cache, cache, (held_tokens >= 0)[:, None, :]
    distance = positions[:, :, None] - jnp.arange(cache.columns)[None, None, :]
    allowed = distance >= 0
    return cache, cache, allowed & (distance < cache.window) if cache.window else allowed


def _remember_in_ring(cache: Cache, new_cache: Cache, columns, counts, positions):
    """`remember` in a ring: the tokens of a call may overwrite what its first ones still see, so
    queries look at both and the write comes after."""
    axis, tokens, width = token_axis(cache.order), positions.shape[1], cache.columns
    counts = jnp.full_like(columns, tokens) if counts is None else counts
    old_tokens = newest(columns, width)
    distance = positions[:, :, None] - old_tokens[:, None, :]
    allowed_old = (old_tokens >= 0)[:, None, :] & (distance < cache.window)
    offset = jnp.arange(tokens)[:, None] - jnp.arange(tokens)[None, :]
    allowed_new = jnp.broadcast_to(
        (offset >= 0) & (offset < cache.window), (len(columns), tokens, tokens)
    )
    view = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=axis), cache, new_cache)
    tokens_after = newest(columns + counts, width)
    fresh = tokens_after >= columns[:, None]
    index = jnp.clip(tokens_after - columns[:, None], 0, tokens - 1)

    def wrapped(old, new):
        shape = [fresh.shape[0] if i == 0 else width if i == axis else 1 for i in range(old.ndim)]
        return jnp.where(fresh.reshape(shape), take(new, index, axis), old)

    return (
        jax.tree.map(wrapped, cache, new_cache),
        view,
        jnp.concatenate([allowed_old, allowed_new], axis=2),
    )


def forget(cache: Cache, tokens: jax.Array, count: int = 1) -> Cache:
    """Puts zeros in the columns of token tokens [B] of each slot and of the next ones, `count` in
    all. In a ring only the first is cleared, as the others hold what is seen still; what is out of
    range is dropped. A state has no columns: it stays."""
    if isinstance(cache, State):
        return cache
    count = 1 if cache.is_ring else count
    index = tokens[:, None] + jnp.arange(count)[None, :]
    index = index % cache.columns if cache.is_ring else index

    def zero(x):
        axis = token_axis(cache.order)
        shape = [count if i == axis else size for i, size in enumerate(x.shape)]
        return put(x, jnp.zeros(shape, x.dtype), index, cache.order)

    return jax.tree.map(zero, cache)


def first_tokens(cache: Cache, counts: jax.Array) -> Cache:
    """Returns the cache after its first counts [B] tokens, zeros in what no later token sees. Those
    of a state have to be all that it has read."""
    if isinstance(cache, State):
        return cache
    held_tokens = (
        newest(counts, cache.columns) if cache.is_ring else jnp.arange(cache.columns)[None, :]
    )
    filled = (held_tokens >= 0) & (held_tokens < counts[:, None])
    if cache.window:
        filled &= held_tokens > (counts - cache.window)[:, None]
    axis = token_axis(cache.order)

    def keep(x):
        shape = [
            filled.shape[0] if i == 0 else x.shape[i] if i == axis else 1 for i in range(x.ndim)
        ]
        return jnp.where(filled.reshape(shape), x, 0)

    return jax.tree.map(keep, cache)


def take_rows(cache: Cache, slots: jax.Array, length: jax.Array) -> Cache:
    """Returns slots [M] of `cache`, of which `length` [M] tokens count, on one device; a slot out
    of range gives some row."""

    def pick(x):
        return jnp.take(x, slots, axis=0, mode="clip")

    if not cache.pool:
        return jax.tree.map(pick, cache)
    return cache_pages.side_by_side(dataclasses.replace(cache, table=pick(cache.table)), length)


def resized(cache: Cache, columns: int) -> Cache:
    """Returns a contiguous cache cut or filled with zeros to so many columns, which a state has
    not."""
    if isinstance(cache, State):
        return cache
    axis = token_axis(cache.order)

    def cut(x):
        return x[:, :columns] if axis == 1 else x[:, :, :columns]

    return jax.tree.map(lambda x: pad_axis(cut(x), axis, columns), cache)


def write_rows(
    cache: Cache, rows: Cache, slots: jax.Array, source: jax.Array, first=None, *, alone=False
) -> Cache:
    """Writes rows source [M] of `rows` into slots [M] of `cache`; a slot out of range is dropped.
    `rows` may have fewer columns; what is behind them stays garbage. Pages of the `first` [M]
    tokens are left as they are. `alone`: one device has all slots, so that they can be written one
    after the other, and what is dropped costs nothing."""
    if cache.pool:
        first = jnp.zeros_like(slots) if first is None else first
        return cache_pages.write_rows(cache, rows, slots, source, first)
    if alone and cache.order == "heads":
        return _write_one_by_one(cache, rows, slots, source)

    def put(old, new):
        picked = jnp.take(new, source, axis=0).astype(old.dtype)
        if picked.shape == (len(slots), *old.shape[1:]):
            return old.at[slots].set(picked, mode="drop")
        axis = token_axis(cache.order)
        head = (slice(None),) * (axis - 1) + (slice(0, new.shape[axis]),)
        return old.at[(slots, *head)].set(picked, mode="drop")

    return jax.tree.map(put, cache, rows)


def _write_one_by_one(cache: Cache, rows: Cache, slots: jax.Array, source: jax.Array) -> Cache:
    in_range = (slots >= 0) & (slots < cache.parts[0].shape[0])
    order = jnp.argsort(~in_range, stable=True)

    def one(i, cache):
        def put(old, new):
            row = jax.lax.dynamic_slice_in_dim(new, source[order[i]], 1).astype(old.dtype)
            start = (slots[order[i]],) + (0,) * (old.ndim - 1)
            return jax.lax.dynamic_update_slice(old, row, start)

        return jax.tree.map(put, cache, rows)

    return jax.lax.fori_loop(0, jnp.sum(in_range), one, cache)
