"""The path of attention that XLA compiles: some queries at a time, its backward pass written out.

The backward pass computes the scores again from queries, keys and the log-sum-exp of each softmax,
so nothing of size queries x columns is kept, and at most QUERY_BLOCK queries of a row meet its
columns at once. Products are heads-major, the queries of a kv head being the rows of one matrix:
XLA on CPU runs those as plain matrix products.

Axes: B rows, S tokens, N blocks (W of each packed row; a plain row is one), T tokens of a block, C
columns, H heads, K kv heads, R heads per kv head, c queries at a time, E head size of queries and
keys, F of values.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rljax.models.attention_paths import (
    MASKED,
    PackedPrefix,
    View,
    columns,
    columns_transposed,
    looked_for,
    pad_axis,
    prefix_blocks,
)
from rljax.models.remat import named_attention

# The most queries of a block at a time, one after the other in a loop where there are more than
# two; so many loops, each of which sees no columns after its own queries.
QUERY_BLOCK, PARTS = 128, 4


@dataclasses.dataclass(frozen=True)
class Rule:
    """Settings of the scores: cap(scale q.k) of the columns within the window (0: at any
    distance)."""

    scale: float
    window: int
    soft_cap: float


class _Span(NamedTuple):
    """A span of queries: `count` times `size`, from `first` on. Each time they see `reach` columns
    of their own block: those from `start` on or, where `start` is None, the last ones up to the
    queries."""

    first: int
    size: int
    count: int
    start: int | None
    reach: int


class _Columns(NamedTuple):
    """Columns that queries may see: where the id is the one that the query looks for, at a position
    not after the query's and within the window."""

    k: jax.Array  # [N, K, C, E]
    v: jax.Array  # [N, K, C, F]
    ids: jax.Array  # [N, C]
    positions: jax.Array  # [N, C]


class _Request(NamedTuple):
    """Inputs of both passes: parts of columns (a block's own, then its prefixes), for each part the
    ids that the queries look for, and the positions of the queries."""

    parts: list[_Columns]
    wanted: list[tuple[jax.Array, ...]]  # [N, T] each
    positions: jax.Array  # [N, T]
    spans: list[_Span]


def xla(
    q, k, v, segments, sinks, prefix: PackedPrefix | None, *, scale, window, soft_cap
) -> jax.Array:
    """Returns each query's softmax over its own segment and the prefix that it continues:
    q [B, S, H, E], k [B, S, K, E], v [B, S, K, F], segments [B, S] -> [B, S, H, F]."""
    return _attention(Rule(scale, window, soft_cap), q, k, v, sinks, segments, prefix)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(rule: Rule, q, k, v, sinks, segments, prefix):
    return _forward(rule, q, k, v, sinks, segments, prefix)[0]


def _forward(rule: Rule, q, k, v, sinks, segments, prefix):
    request = _request(rule, k, v, segments, prefix)
    heads = _by_heads(q, k.shape[2], request)
    sink = None if sinks is None else _of_heads(sinks, heads)
    output, log_sum = _softmax(rule, request, heads, sink, v.dtype)
    output, log_sum = named_attention(_by_tokens(output, q.shape[:2]), log_sum)
    return output, (q, k, v, sinks, segments, prefix, output, log_sum)


def _softmax(rule: Rule, request: _Request, heads, sink, dtype):
    """Computes the attention output of the queries [N, K, R, T, E], in `dtype`, and the log-sum-exp
    of their scores."""

    def some(_, first, span):
        _, keys, values, allowed = _seen(rule, request, first, span)
        queries = _cut(heads, 3, first, span.size)
        scores, _ = _scores(rule, queries, keys, allowed)
        top = jnp.max(scores, axis=-1)
        top = top if sink is None else jnp.maximum(top, sink)
        weights = jnp.exp(scores - top[..., None])
        total = jnp.sum(weights, axis=-1)
        total = total if sink is None else total + jnp.exp(sink - top)
        output = _product("gqc,gcf->gqf", weights, values) / total[..., None]
        return (), (output.astype(dtype), top + jnp.log(total))

    return _over(request.spans, some, ())[1]


def _backward(rule: Rule, residuals, gradient):
    """Computes the gradients, with p = exp(scores - log_sum): dv = p^T do, dscores = p (do.v -
    do.out)."""
    q, k, v, sinks, segments, prefix, output, log_sum = residuals
    request, dtype = _request(rule, k, v, segments, prefix), log_sum.dtype
    heads, output_gradient = (
        _by_heads(x, k.shape[2], request) for x in (q, gradient.astype(v.dtype))
    )
    mean = jnp.sum(gradient.astype(dtype) * output.astype(dtype), axis=-1, keepdims=True)
    mean = _by_heads(mean, k.shape[2], request)[..., 0]
    sums, dq = _gradients(rule, request, heads, output_gradient, mean, log_sum, q.dtype)
    dk, dv = (
        columns_transposed(parts, x, prefix)
        for parts, x in zip(zip(*sums, strict=True), (k, v), strict=True)
    )
    dsinks = None
    if sinks is not None:
        share = jnp.exp(_of_heads(sinks, heads) - log_sum) * mean
        dsinks = -jnp.sum(share, axis=(0, 3)).reshape(sinks.shape).astype(sinks.dtype)
    return _by_tokens(dq, q.shape[:2]), dk, dv, dsinks, None, None


def _gradients(rule: Rule, request: _Request, heads, output_gradient, mean, log_sum, dtype):
    """Returns (the gradients of each part's keys and values, those of the queries in `dtype`) for
    `output_gradient`, that of the output, and `mean` = do.out."""
    sum_dtype = log_sum.dtype

    def some(sums, first, span):
        start, keys, values, allowed = _seen(rule, request, first, span)
        queries, do = (_cut(x, 3, first, span.size) for x in (heads, output_gradient))
        one_sum, one_mean = (_cut(x, 3, first, span.size)[..., None] for x in (log_sum, mean))
        scores, slope = _scores(rule, queries, keys, allowed)
        weights = jnp.exp(scores - one_sum)
        dscores = weights * (_product("gqf,gcf->gqc", do, values) - one_mean) * slope
        dq = _product("gqc,gce->gqe", dscores, keys).astype(dtype)
        dk = _product("gqc,gqe->gce", dscores, queries)
        dv = _product("gqc,gqf->gcf", weights, do)
        return _added(sums, start, span.reach, dk, dv), dq

    zeros = [tuple(jnp.zeros(x.shape, sum_dtype) for x in (p.k, p.v)) for p in request.parts]
    return _over(request.spans, some, zeros)


_attention.defvjp(_forward, _backward)


# -- one chunk of columns, of several that a softmax is over


def xla_part(rule: Rule, q, k, v, view: View) -> tuple[jax.Array, jax.Array]:
    """Returns the softmax over these columns alone: q [B, H, T, E], k [B, K, C, E], v [B, K, C, F]
    -> what the queries read [B, H, T, F], and the log-sum-exp of their scores [B, H, T]."""
    request, heads = _chunk(rule, q, k, v, view)
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    return tuple(_flat(x) for x in _softmax(rule, request, heads, None, dtype))


def xla_part_gradients(rule: Rule, q, k, v, view: View, out, log_sum, gradient):
    """Returns the gradients of `xla_part` by q, k and v, as a part of a softmax with the output
    `out` [B, H, T, F] and the log-sum-exp `log_sum` [B, H, T], from `gradient` [B, H, T, F],
    that of the output."""
    request, heads = _chunk(rule, q, k, v, view)
    dtype = log_sum.dtype
    mean = jnp.sum(gradient.astype(dtype) * out.astype(dtype), axis=-1)
    output_gradient, mean, log_sum = (
        _grouped(x, heads) for x in (gradient.astype(v.dtype), mean, log_sum)
    )
    ((dk, dv),), dq = _gradients(rule, request, heads, output_gradient, mean, log_sum, dtype)
    return _flat(dq), dk, dv


def _chunk(rule: Rule, q, k, v, view: View) -> tuple[_Request, jax.Array]:
    """Returns the request of both passes and the queries [B, K, R, T, E]. T is a multiple of
    QUERY_BLOCK, or at most two parts that are not above it."""
    rows, kv_heads, count = k.shape[:3]
    tokens = q.shape[2]
    chunks = -(-tokens // QUERY_BLOCK)
    assert tokens % chunks == 0, tokens
    spans = [_Span(0, tokens // chunks, chunks, 0, count)]
    if view.positions is not None:
        positions, column_positions = view.positions
    else:
        offset = count if view.distance is None else view.distance
        positions = jnp.broadcast_to(offset + jnp.arange(tokens)[None, :], (rows, tokens))
        column_positions = jnp.broadcast_to(jnp.arange(count)[None, :], (rows, count))
        if view.distance == 0:
            spans = _spans(tokens, rule.window)
    part = _Columns(k, v, view.ids, column_positions)
    heads = q.reshape(rows, kv_heads, -1, *q.shape[2:])
    return _Request([part], [view.wanted], positions, spans), heads


def _grouped(x, heads) -> jax.Array:
    """Returns [B, H, ...] as [B, K, R, ...], grouped like `heads`."""
    return x.reshape(*heads.shape[:3], *x.shape[2:])


def _flat(x) -> jax.Array:
    """Returns [B, K, R, ...] as [B, H, ...]."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])


# -- what meets what


def _request(rule: Rule, k, v, segments, prefix: PackedPrefix | None) -> _Request:
    b, tokens = segments.shape
    blocks = 1 if prefix is None else prefix.blocks.shape[1]
    spans = _spans(tokens // blocks, rule.window)
    width = sum(span.size * span.count for span in spans)

    def flat(x):
        return pad_axis(x.reshape(b * blocks, -1), 1, width)

    ids = flat(segments)
    if prefix is None:
        positions = jnp.broadcast_to(jnp.arange(width)[None, :], ids.shape)
    else:
        positions = flat(prefix.positions)
    keys, values = (columns(x, prefix, width) for x in (k, v))
    parts, wanted = [_Columns(keys[0], values[0], ids, positions)], [(ids,)]
    if prefix is not None:

        def of_prefix(x):
            return flat(prefix_blocks(x, prefix))

        parts.append(_Columns(keys[1], values[1], of_prefix(segments), of_prefix(prefix.positions)))
        wanted.append((flat(looked_for(prefix)),))
    return _Request(parts, wanted, positions, spans)


def _spans(tokens: int, window: int) -> list[_Span]:
    """Cuts the queries of a block of so many tokens into spans, each with the columns that it may
    see."""
    chunks = -(-tokens // QUERY_BLOCK)
    size = -(-tokens // chunks)
    if chunks > 2 and window and 2 * (window + size) <= tokens:
        return [_Span(0, size, chunks, None, window + size - 1)]
    parts = chunks if chunks <= 2 else min(chunks // 2, PARTS)
    ends = [size * (chunks * i // parts) for i in range(parts + 1)]
    spans = []
    for first, end in zip(ends[:-1], ends[1:], strict=True):
        start = max(first - window + 1, 0) if window else 0
        spans.append(_Span(first, size, (end - first) // size, start, end - start))
    return spans


def _seen(rule: Rule, request: _Request, first, span: _Span):
    """Returns (start of their own columns, keys, values, [N, 1, 1, c, C] bool) of all columns that
    the queries from `first` on may see: own columns, then those of the prefixes' block."""
    start = span.start
    if start is None:
        start = jnp.maximum(first + span.size - span.reach, 0)
    block_columns = request.parts[0]

    def cut(x, axis):
        return _cut(x, axis, start, span.reach)

    reachable = _Columns(
        cut(block_columns.k, 2),
        cut(block_columns.v, 2),
        cut(block_columns.ids, 1),
        cut(block_columns.positions, 1),
    )
    parts = [reachable, *request.parts[1:]]
    allowed = [_allowed(rule, request, i, part, first, span) for i, part in enumerate(parts)]
    if len(parts) == 1:
        return start, reachable.k, reachable.v, allowed[0]
    keys, values = (jnp.concatenate(xs, axis=2) for xs in zip(*[p[:2] for p in parts], strict=True))
    return start, keys, values, jnp.concatenate(allowed, axis=-1)


def _added(sums, start, reach: int, dk, dv):
    """Returns `sums`, (keys, values) of each part, with the gradients of the columns of `_seen`
    added."""
    added = [tuple(_add(x, start, y[:, :, :reach]) for x, y in zip(sums[0], (dk, dv), strict=True))]
    for part in sums[1:]:
        added.append(tuple(x + y[:, :, reach:] for x, y in zip(part, (dk, dv), strict=True)))
    return added


def _allowed(rule: Rule, request: _Request, i: int, part: _Columns, first, span: _Span):
    """Returns the columns of part `i` that each query may see, [N, 1, 1, c, C] bool."""
    *wanted, positions = (
        _cut(x, 1, first, span.size) for x in (*request.wanted[i], request.positions)
    )
    distance = positions[:, :, None] - part.positions[:, None, :]
    matches = (_same(ids, part.ids) for ids in wanted)
    allowed = functools.reduce(jnp.logical_or, matches) & (distance >= 0)
    if rule.window:
        allowed &= distance < rule.window
    return allowed[:, None, None]


def _same(wanted, ids) -> jax.Array:
    """Returns where the wanted ids equal the columns' ids, [N, c, C] bool; the ids are [N, c] and
    [N, C], or pairs of them."""
    if ids.ndim == 2:
        return wanted[:, :, None] == ids[:, None, :]
    return jnp.all(wanted[:, :, None] == ids[:, None, :], axis=-1)


def _over(spans: list[_Span], step, carry):
    """Runs step(carry, first, span) -> (carry, arrays with the queries on axis 3) over all
    queries."""
    outs = []
    for span in spans:
        if span.count == 1:
            carry, output = step(carry, span.first, span)
        else:
            firsts = span.first + span.size * jnp.arange(span.count)
            carry, output = jax.lax.scan(lambda c, f, span=span: step(c, f, span), carry, firsts)
            output = jax.tree.map(_merged, output)
        outs.append(output)
    return carry, jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=3), *outs)


def _merged(x) -> jax.Array:
    """Merges the steps of a loop into the queries: [n, N, K, R, c, ...] -> [N, K, R, n c, ...]."""
    return jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], -1, *x.shape[5:])


# -- products, [N, K, R, c, .] against [N, K, C, .]


def _scores(rule: Rule, queries, keys, allowed):
    """Returns (scores, which are MASKED where a query may not look, and their slope by q.k)."""
    scores, slope = rule.scale * _product("gqe,gce->gqc", queries, keys), rule.scale
    if rule.soft_cap:
        bent = jnp.tanh(scores / rule.soft_cap)
        scores, slope = rule.soft_cap * bent, rule.scale * (1 - bent * bent)
    return jnp.where(allowed, scores, MASKED), slope


def _product(equation: str, x, y):
    """Multiplies one matrix per block and kv head, and sums in float32 or wider; x is cast to y's
    type."""
    n, kv_heads, c = x.shape[0], x.shape[1], x.shape[3]

    def flat(a):
        return a.reshape(n * kv_heads, -1, a.shape[-1])

    dtype = jnp.promote_types(y.dtype, jnp.float32)
    product = jnp.einsum(equation, flat(x.astype(y.dtype)), flat(y), preferred_element_type=dtype)
    if equation.endswith("gq" + equation[-1]):
        return product.reshape(*x.shape[:3], c, -1)
    return product.reshape(n, kv_heads, *product.shape[1:])


# -- layouts


def _by_heads(x, kv_heads: int, request: _Request) -> jax.Array:
    """Returns [B, S, H, E] as [N, K, R, T, E]."""
    n, width = request.positions.shape
    b, tokens, h, e = x.shape
    x = x.reshape(n, b * tokens // n, kv_heads, h // kv_heads, e)
    return pad_axis(x.transpose(0, 2, 3, 1, 4), 3, width)


def _by_tokens(x, rows: tuple[int, int]) -> jax.Array:
    """Returns [N, K, R, T, E] as [B, S, H, E]."""
    n, kv_heads, repeats, _, e = x.shape
    x = x[:, :, :, : rows[0] * rows[1] // n].transpose(0, 3, 1, 2, 4)
    return x.reshape(*rows, kv_heads * repeats, e)


def _of_heads(sinks, heads) -> jax.Array:
    """Returns sinks [H] as [1, K, R, 1], in the type of the scores."""
    dtype = jnp.promote_types(heads.dtype, jnp.float32)
    return sinks.astype(dtype).reshape(1, *heads.shape[1:3], 1)


def _cut(x, axis: int, start, size: int) -> jax.Array:
    if isinstance(start, int):
        return jax.lax.slice_in_dim(x, start, start + size, axis=axis)
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=axis)


def _add(sums, start, part) -> jax.Array:
    """Returns the sums with `part` added to their columns from `start` on."""
    size = part.shape[2]
    if size == sums.shape[2]:
        return sums + part
    return jax.lax.dynamic_update_slice_in_dim(
        sums, _cut(sums, 2, start, size) + part, start, axis=2
    )
