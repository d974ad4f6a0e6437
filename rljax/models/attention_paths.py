"""The paths of attention on one device: ways to compute the same numbers, and two to decode.

`reference` (plain, any float type), `cudnn`, the plain form that decoding shares with the first,
and `paged`, which decodes on TPU; attention_xla and attention_splash are modules of their own.
rljax.models.attention chooses.

One rule for all: row t attends to columns s <= t of its own segment, and s > t - window where
window > 0. Padding is segment 0, and attends to padding: every row has a column, so no softmax is
empty. `sinks` [H] is one more logit per head in the denominator that carries no value. Packed rows
(`PackedPrefix`): segments stay within a block, and a token sees the prefix that it continues, too.

Axes: B rows, S query tokens, T key tokens, H heads, K kv heads, R heads per kv head, E head size of
queries and keys, F head size of values. Token-major [B, S, H, E] unless said otherwise.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Large and finite: a softmax over nothing else would be uniform, not NaN, and so is its gradient.
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
LANES = 128  # of a TPU
# Paged: the most tokens of a block, the bytes of VMEM that keys and values in flight may take, and
# the queries of a block (each row's keys meet them all).
PAGE_TOKENS, PAGE_BYTES, PAGED_QUERIES = 512, 4 * 2**20, 8


class PackedPrefix(NamedTuple):
    """The prefixes that the tokens of packed rows continue (the fields of rljax.batch.Batch). Rows
    are W blocks of S / W tokens."""

    ids: jax.Array  # [B, S]: the segment that a token continues; 0 = none
    blocks: jax.Array  # [B, W]: the block of the row that holds the prefixes of each block
    positions: jax.Array  # [B, S]: in the sequence, the prefix included


class View(NamedTuple):
    """Visibility of a chunk of columns to queries: of those with one of the ids that a query looks
    for, at a position not after the query's and within the window."""

    wanted: tuple[jax.Array, ...]  # [B, T] each, or of two numbers [B, T, 2]
    ids: jax.Array  # [B, C], or [B, C, 2]
    # The number of positions that the first query is after the first column; None: all queries are
    # after all columns.
    distance: int | None = 0
    positions: tuple[jax.Array, jax.Array] | None = None  # [B, T], [B, C]; instead of a distance


def plain(
    q, k, v, allowed, sinks, *, scale, soft_cap, order="heads", k_scales=None, v_scales=None
) -> jax.Array:
    """Scores, soft cap, mask and softmax written out; k [B, K, T, E] and v [B, K, T, F] head-major,
    or [B, T, K, .] for order "tokens". k_scales and v_scales multiply keys and values, each without
    the last axis.

    scores = c tanh(scale q.k / c); weights = exp(scores) / (exp(sink) + sum_allowed exp(scores)).
    """
    b, s, h, e = q.shape
    axes = "bkt" if order == "heads" else "btk"
    kv_heads = k.shape[axes.index("k")]
    group = h // kv_heads
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    # The heads and queries that meet the same keys are the rows of one product: XLA on CPU hands
    # that to its fast library, and writes out, 4 times slower, one of more free axes.
    q = q.reshape(b, s, kv_heads, group, e).transpose(0, 2, 3, 1, 4)
    q = q.reshape(b, kv_heads, group * s, e)
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    if s == 1 and order == "heads":
        # A step's keys are the first operand, which is read as it is: the library packs the other
        # anew. Without the barrier XLA swaps them back.
        batch = ((3,), (3,)), ((0, 1), (0, 1))
        scores = jax.lax.dot_general(k, q, batch, preferred_element_type=dtype)
        scores = jax.lax.optimization_barrier(scores).swapaxes(2, 3)
    else:
        scores = jnp.einsum(f"bkne,{axes}e->bknt", q, k, preferred_element_type=dtype)
    scores = scores.reshape(b, kv_heads, group, s, -1)
    if k_scales is not None:
        scores = scores * _per_key(k_scales, order)
    scores = scale * scores
    if soft_cap:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(allowed[:, None, None], scores, MASKED)
    # The largest score only keeps exp in range: it cancels, and so has no gradient.
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    if sinks is None:
        weights = jnp.exp(scores - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
    else:
        sink = sinks.astype(dtype).reshape(1, kv_heads, group, 1, 1)
        top = jnp.maximum(top, jax.lax.stop_gradient(sink))
        weights = jnp.exp(scores - top)
        total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - top)
    weights = weights / total
    if v_scales is not None:
        weights = weights * _per_key(v_scales, order)
    weights = weights.reshape(b, kv_heads, group * s, -1).astype(v.dtype)
    output = jnp.einsum(f"bknt,{axes}f->bknf", weights, v)
    output = output.reshape(b, kv_heads, group, s, -1).transpose(0, 3, 1, 2, 4)
    return output.reshape(b, s, h, v.shape[-1]).astype(v.dtype)


def _per_key(scales: jax.Array, order: str) -> jax.Array:
    """Returns scales [B, K, T], or [B, T, K], in the shape that multiplies scores [B, K, R, S,
    T]."""
    scales = scales if order == "heads" else scales.swapaxes(1, 2)
    return scales[:, :, None, None, :]


def allowed_columns(row_segments, column_segments, rows, columns, window) -> jax.Array:
    """Returns the rule as [B, S, T] bool; `rows` [S] and `columns` [T] are positions in
    the packed row."""
    distance = rows[:, None] - columns[None, :]
    visible = distance >= 0
    if window:
        visible &= distance < window
    return (row_segments[:, :, None] == column_segments[:, None, :]) & visible[None]


def continued_columns(segments, prefix: PackedPrefix, window) -> jax.Array:
    """Returns the columns of the prefix that each token continues, the last `window` positions of
    them: [B, S, S] bool."""
    column = jnp.arange(segments.shape[1])
    blocks = prefix.blocks.shape[1]
    block = column // (segments.shape[1] // blocks)
    in_prefix_block = prefix.blocks[:, block][:, :, None] == block[None, None, :]
    allowed = in_prefix_block & (prefix.ids[:, :, None] == segments[:, None, :])
    allowed &= prefix.ids[:, :, None] > 0
    if window:
        distance = prefix.positions[:, :, None] - prefix.positions[:, None, :]
        allowed &= distance < window
    return allowed


def reference(q, k, v, segments, sinks, prefix, *, scale, window, soft_cap) -> jax.Array:
    """Computes all scores at once, in the inputs' own precision or float32:
    q [B, S, H, E], k [B, S, K, E], v [B, S, K, F], segments [B, S] -> [B, S, H, F]. The
    other paths must give the same."""
    column = jnp.arange(q.shape[1])
    allowed = allowed_columns(segments, segments, column, column, window)
    if prefix is not None:
        block = column // (q.shape[1] // prefix.blocks.shape[1])
        allowed &= (block[:, None] == block[None, :])[None]
        allowed |= continued_columns(segments, prefix, window)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    return plain(q, k, v, allowed, sinks, scale=scale, soft_cap=soft_cap)


def by_block(x, blocks: int, whole: int) -> jax.Array:
    """Returns x [B, S, K, E], in `blocks` blocks to a row, as [N, K, T, E], T
    filled up to `whole`."""
    b, tokens, *heads = x.shape
    return pad_axis(x.reshape(b * blocks, tokens // blocks, *heads).swapaxes(1, 2), 2, whole)


def prefix_blocks(x, prefix: PackedPrefix) -> jax.Array:
    """Returns x [B, S, ...] with the block of the prefixes in each block's place."""
    b, blocks = prefix.blocks.shape
    blocked = x.reshape(b, blocks, -1, *x.shape[2:])
    return jax.vmap(lambda row, chosen: row[chosen])(blocked, prefix.blocks).reshape(x.shape)


def looked_for(prefix: PackedPrefix) -> jax.Array:
    """Returns the id of the prefix that each token continues, [B, S]; one that nothing has for
    none, as padding is segment 0."""
    return jnp.where(prefix.ids > 0, prefix.ids, -1)


def columns(x, prefix: PackedPrefix | None, whole: int) -> list[jax.Array]:
    """Returns keys or values [B, S, K, E] as [N, K, T, E] of the blocks and, if there are any, of
    their prefixes' blocks."""
    if prefix is None:
        return [by_block(x, 1, whole)]
    return [by_block(y, prefix.blocks.shape[1], whole) for y in (x, prefix_blocks(x, prefix))]


def columns_transposed(parts, x, prefix: PackedPrefix | None) -> jax.Array:
    """Returns the gradient of keys or values x [B, S, K, E] from the gradients of what `columns`
    made of them, [N, K, T, E] each: a prefix sums over the blocks that read it."""
    width, dtype = parts[0].shape[2], parts[0].dtype
    struct = jax.ShapeDtypeStruct(x.shape, dtype)
    transpose = jax.linear_transpose(lambda x: columns(x, prefix, width), struct)
    return transpose([gradient.astype(dtype) for gradient in parts])[0].astype(x.dtype)


def cudnn(q, k, v, segments, sinks, prefix, *, scale, window, soft_cap) -> jax.Array:
    """Runs cuDNN's flash attention, with arguments and result of the shapes of `reference`;
    `rljax.models.attention` has checked that it can run the request.

    It needs equal head sizes and, for a gradient under a mask, an even number of tokens: zeros are
    appended to the shorter of E and F, and to the tokens.
    """
    assert sinks is None and not soft_cap and prefix is None
    tokens, value_size = q.shape[1], v.shape[-1]
    size = -(-max(q.shape[-1], value_size) // 8) * 8
    even = tokens + tokens % 2
    q, k, v = (pad_axis(pad_axis(x, 3, size), 1, even) for x in (q, k, v))
    segments = pad_axis(segments, 1, even)
    column = jnp.arange(even)
    allowed = allowed_columns(segments, segments, column, column, window)
    # The window is part of the mask: cuDNN's own sliding window excludes a mask beside it.
    output = jax.nn.dot_product_attention(
        q, k, v, mask=allowed[:, None], scale=scale, is_causal=True, implementation="cudnn"
    )
    return output[:, :tokens, :, :value_size]


def unpaired(pairs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values [B, T, K, E] of a cache that holds both, [B, T, 2 K, E]."""
    b, columns, heads, e = pairs.shape
    by_kind = pairs.reshape(b, columns, heads // 2, 2, e)
    return by_kind[:, :, :, 0], by_kind[:, :, :, 1]


def first_held(q, pairs, held, table=None, *, scale, soft_cap) -> jax.Array:
    """Returns the attention of one query a slot to its first held [B] tokens: q [B, H, E],
    pairs [B, T, 2 K, E], or pages [N, page, 2 K, E] and their table [B, P] -> [B, H, E]."""
    if table is not None:
        held = jnp.minimum(held, pairs.shape[1] * jnp.sum(table < len(pairs), axis=1))
        pairs = jnp.take(pairs, table, axis=0, mode="clip")
        pairs = pairs.reshape(len(table), -1, *pairs.shape[3:])
        filled = jnp.arange(pairs.shape[1])[None, :] < held[:, None]
        pairs = jnp.where(filled[..., None, None], pairs, 0)
    filled = jnp.arange(pairs.shape[1])[None, :] < held[:, None]
    options = dict(scale=scale, soft_cap=soft_cap, order="tokens")
    return plain(q[:, None], *unpaired(pairs), filled[:, None], None, **options)[:, 0]


def whole_pages(columns: int) -> int:
    """Returns the number of columns of a slot that has room for so many and is made of pages
    that are not small."""
    return columns + -columns % (LANES if columns > LANES else 16)


def page_tokens(columns: int) -> int:
    """Returns the number of tokens of a page where slots of `columns` are made of
    whole ones, else 0."""
    return next((t for t in range(PAGE_TOKENS, 15, -16) if columns % t == 0), 0)


def paged_takes(heads: int, kv_heads: int, size: int, dtype) -> bool:
    """Returns whether `paged` takes so many heads on a device, of this size, and caches of this
    type."""
    dtype = jnp.dtype(dtype)
    if size != LANES or dtype not in (jnp.bfloat16, jnp.float32):
        return False
    # Keys and values of a token are the sublanes of its tile, two to each where they have 2 bytes:
    # a part of a tile, or whole ones. Of several, each is a block, and so are its queries.
    sublanes = 2 * kv_heads * dtype.itemsize // 4
    if sublanes in (1, 2, 4, 8):
        return True
    return sublanes % 8 == 0 and heads // (sublanes // 8) % 8 == 0


def paged(q, pairs, held, table=None, *, scale, soft_cap) -> jax.Array:
    """Computes `first_held` by JAX's ragged paged attention for TPU: q [B, H, E], held [B] >= 1 ->
    [B, H, E]. Blocks of tokens behind those are not read."""
    # Imported here: Pallas takes a second to import, and only this path needs it.
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    arguments = paged_arguments(q, pairs, held, table)
    page, heads, e = arguments[1].shape[1:]
    pages = arguments[3].shape[1]
    room = PAGE_BYTES // (2 * page * heads * e * pairs.dtype.itemsize)  # two blocks are in flight
    return ragged_paged_attention(
        *arguments,
        sm_scale=scale,
        soft_cap=soft_cap or None,
        num_kv_pages_per_block=max(1, min(pages, PAGE_TOKENS // page, room)),
        num_queries_per_block=min(q.shape[0], PAGED_QUERIES),
    )


def paged_arguments(q, pairs, held, table=None):
    """Returns the kernel's arguments: queries, pages, tokens held, the pages of every slot, where
    each slot's queries begin, how many slots. Without a table a slot is a run of pages, so nothing
    is looked up; with one, a slot holds no more tokens than its pages do."""
    slots, held = len(q), held.astype(jnp.int32)
    if table is None:
        columns, *head = pairs.shape[1:]
        page = page_tokens(columns)
        table = jnp.arange(slots * (columns // page), dtype=jnp.int32).reshape(slots, -1)
        pairs = pairs.reshape(-1, page, *head)
    else:
        exists = table < len(pairs)
        room = pairs.shape[1] * jnp.sum(exists, axis=1, dtype=jnp.int32)
        held = jnp.clip(held, 1, jnp.maximum(room, 1))
        table = jnp.where(exists, table, 0)
    starts = jnp.arange(slots + 1, dtype=jnp.int32)
    return q, pairs, held, table, starts, jnp.full((1,), slots, jnp.int32)


def pad_axis(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Appends zeros to one axis, up to `size`: [..., n, ...] -> [..., size, ...]."""
    if x.shape[axis] == size:
        return x
    room = [(0, 0)] * x.ndim
    room[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, room)
