"""Batch-invariant computing: a token's numbers do not depend on what is computed beside it.

XLA sums in an order that depends on the shape of an array, so a token's log-prob differs in its
last bits between a decode step of 8 rows and the trainer's packed rows of 512. Here every token
goes through loops whose bodies are compiled for one shape: functions of rows, tile by tile
(rljax.kernels.row_tiles), and attention over blocks of keys in the order of their positions, in
which masked keys add exact zeros. Gradients are those of the ordinary functions.

Axes: B rows, S tokens, N tokens, T cached tokens, H heads, K kv heads, E head size of queries and
keys, F of values, C keys of a block.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from rljax.errors import InputError
from rljax.kernels.row_tiles import in_tiles, tiled
from rljax.models.attention_paths import MASKED, PackedPrefix

BLOCK = 64  # keys of a block of attention


def check(config, mesh) -> None:
    """Raises InputError where equal bits have not been shown: narrow types, several devices,
    another backend than CPU, images."""
    platform, setting = mesh.devices.flat[0].platform, "model_settings.batch_invariant"
    fix = "batch_invariant=False"
    if platform != "cpu" or mesh.size > 1:
        value = f"{mesh.size} {platform} device{'s' * (mesh.size > 1)}"
        raise InputError(setting, value=value, rule="it is for one CPU device", fix=fix)
    if config.dtype != "float32" or not config.head_in_float32:
        value = f"dtype={config.dtype!r}, head_in_float32={config.head_in_float32}"
        raise InputError(setting, value=value, rule="it is for float32", fix=fix)
    if config.head_dtype:
        raise InputError(setting, value=f"head_dtype={config.head_dtype!r}", rule="''", fix=fix)
    if any(kind.chunk for kind in config.kinds):
        raise InputError(setting, value=config.family, rule="not for chunked attention", fix=fix)
    if config.recurrent:
        rule = "not for recurrent layers, for which equal bits have not been shown"
        raise InputError(setting, value=config.family, rule=rule, fix=fix)
    if config.vision is not None:
        raise InputError(setting, value=config.family, rule="it is for text alone", fix=fix)


def of_module(apart: bool, module: nnx.Module, method: Callable, *rows: jax.Array):
    """Returns method(module, *rows), computed as `in_tiles` does."""
    if not apart:
        return method(module, *rows)
    graph, weights = nnx.split(module)
    return in_tiles(True, lambda w, *x: method(nnx.merge(graph, w), *x), weights, *rows)


# -- attention


def attended(store, q, row, start, first, last, *, scale, soft_cap, order) -> jax.Array:
    """Returns the attention of N queries q [N, H, E], each to positions first..last [N] of its
    sequence: [N, H, F].

    store = (keys, values, sinks): keys [B, K, T, E] and values [B, K, T, F] of order "heads",
    or [B, T, K, .] of "tokens". A query's keys stand in `row` [N] of it. start [N, 3]: position p
    is in column start[0] + p where p < start[1], else in start[2] + p - start[1].
    """
    _, values, sinks = store
    kv_heads, f = values.shape[1 if order == "heads" else 2], values.shape[-1]
    queries, h, e = q.shape
    q = q.reshape(queries, kv_heads, h // kv_heads, e)

    def taken(x, column):
        index = row[:, None], jnp.clip(column, 0, x.shape[2 if order == "heads" else 1] - 1)
        return x[index[0], :, index[1]] if order == "heads" else x[index]

    def one(j, carry):
        top, total, output = carry
        position = j * BLOCK + jnp.arange(BLOCK)[None, :]
        offset = position - start[:, 1:2]
        column = jnp.where(offset < 0, start[:, 0:1] + position, start[:, 2:3] + offset)
        k, v = (taken(x, column) for x in store[:2])
        scores = scale * jnp.einsum("nkre,ncke->nkrc", q, k)
        if soft_cap:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        sees = (position >= first[:, None]) & (position <= last[:, None])
        scores = jnp.where(sees[:, None, None], scores, MASKED)
        higher = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.where(sees[:, None, None], jnp.exp(scores - higher), 0.0)
        shrink = jnp.exp(top - higher)
        total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
        output = output * shrink + jnp.einsum("nkrc,nckf->nkrf", weights, v)
        return higher, total, output

    top = jnp.full((*q.shape[:3], 1), MASKED)
    total = jnp.zeros_like(top)
    if sinks is not None:
        top = jnp.broadcast_to(sinks.reshape(1, kv_heads, -1, 1), top.shape)
        total = jnp.ones_like(top)
    begin, end = jnp.min(first) // BLOCK, jnp.max(last) // BLOCK + 1
    carry = top, total, jnp.zeros((*q.shape[:3], f))
    _, total, output = jax.lax.fori_loop(begin, end, one, carry)
    # A row that sees nothing comes out finite.
    return (output / jnp.where(total > 0, total, 1.0)).reshape(queries, h, f)


def _each(q, k, v, sinks, row, start, first, last, **options) -> jax.Array:
    """Runs `attended` for q [B, S, H, E], row, first and last [B, S], start [B, S, 3]."""

    def one(store, q, *rest):
        return attended(store, q[0], *(x[0] for x in rest), **options)[None]

    return tiled(one, 2, (k, v, sinks), q, row, start, first, last)


def whole_rows(q, k, v, segments, sinks, prefix: PackedPrefix | None, *, scale, window, soft_cap):
    """Returns attention within whole rows, q [B, S, H, E] -> [B, S, H, F]; the rule is that of
    rljax.models.attention_paths. The tokens of a segment stand side by side."""
    b, s = segments.shape
    column = jnp.broadcast_to(jnp.arange(s)[None], (b, s))
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    segment_start = jax.lax.cummax(jnp.where(begins, column, 0), axis=1)
    prefix_tokens, prefix_start = jnp.zeros_like(segment_start), jnp.zeros_like(segment_start)
    if prefix is not None:
        # A segment ends with its block.
        width = s // prefix.blocks.shape[1]
        segment_start = jnp.maximum(segment_start, column - column % width)
        continues = prefix.ids > 0
        prefix_tokens = jnp.where(continues, prefix.positions - (column - segment_start), 0)
        block = prefix.blocks[:, jnp.arange(s) // width]
        in_prefix = (column // width)[:, None, :] == block[:, :, None]
        in_prefix &= segments[:, None, :] == prefix.ids[:, :, None]
        prefix_start = jnp.where(continues, jnp.argmax(in_prefix, axis=-1), 0)
    last = prefix_tokens + column - segment_start
    first = jnp.maximum(last - window + 1, 0) if window else jnp.zeros_like(last)
    row = jnp.broadcast_to(jnp.arange(b)[:, None], (b, s))
    start = jnp.stack([prefix_start, prefix_tokens, segment_start], axis=-1)
    options = dict(scale=scale, soft_cap=soft_cap, order="tokens")
    return _each(q, k, v, sinks, row, start, first, last, **options)


def cached(q, k, v, allowed, sinks, *, scale, soft_cap, order):
    """Returns attention of new tokens q [B, S, H, E] to a cache in which position p is column p,
    [B, S, H, F], as rljax.models.attention.attention_cached does."""
    b, s, columns = allowed.shape
    column = jnp.arange(columns)[None, None, :]
    last = jnp.max(jnp.where(allowed, column, -1), axis=-1)
    first = jnp.min(jnp.where(allowed, column, columns), axis=-1)
    row = jnp.broadcast_to(jnp.arange(b)[:, None], (b, s))
    start = jnp.zeros((b, s, 3), jnp.int32)
    return _each(
        q, k, v, sinks, row, start, first, last, scale=scale, soft_cap=soft_cap, order=order
    )
