"""The fused log-prob on GPUs, by Triton kernels of Pallas.

One kernel describes tiles of logits, one makes their gradient. The products of the backward pass
with the whole hidden size D fit no registers: XLA (cuBLAS) makes them, a chunk of the vocabulary
at a time.

Checked by the interpreter and by lowering for CUDA: it has never run on a GPU. JAX 0.12 announces
the end of this backend of Pallas; `impl="xla"` needs none.

Axes: N rows, D embed, V vocabulary entries, C of them in one chunk; R x W logits of one tile, K of
D at a time.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from rljax.kernels.logprob.options import (
    LogprobOptions,
    Statistics,
    capped,
    head_gradient,
    hidden_gradient,
    logit_gradient,
    merged_tiles,
    vocab_size_of,
)
from rljax.kernels.logprob.xla import tiles, vocab_slice

R, W = 128, 128
K_BYTES = 128  # of a row of hidden states that are multiplied at once
SPLIT = 4096  # vocabulary entries that one program of the forward kernel walks
GRADIENT_BYTES = 64 << 20  # of the gradient at the logits that is held at once
NO_TOKEN = jnp.iinfo(jnp.int32).max


def fits(hidden: jax.Array, head: jax.Array) -> bool:
    """Returns whether the kernels can address hidden [N, D] and the head: Triton counts elements in
    32 bits."""
    return max(hidden.size, head.size, len(hidden) * W) < 2**31


def forward(
    hidden, head, targets, scale, options: LogprobOptions, *, interpret: bool = False
) -> Statistics:
    """Returns Statistics [N] of hidden [N, D] under the head at targets [N]; see
    options.Statistics."""
    rows, vocab = len(hidden), vocab_size_of(head, options)
    split = min(SPLIT, -(-vocab // W) * W)
    grid = (pl.cdiv(rows, R), pl.cdiv(vocab, split))
    dtypes = [jnp.float32] * 4 + [jnp.int32]
    parts = pl.pallas_call(
        functools.partial(_describe, options=options, split=split),
        grid=grid,
        out_shape=[jax.ShapeDtypeStruct((grid[1], rows), dtype) for dtype in dtypes],
        **_call_options(interpret),
        name="token_logprobs_statistics",
    )(scale.reshape(1), targets, hidden, head)
    stats = Statistics(*parts)
    stats = stats._replace(
        expected=stats.expected if options.entropy else None,
        best=stats.best if options.greedy else None,
    )
    starts = (jnp.arange(grid[1], dtype=jnp.int32) * split)[:, None]
    y = targets[None]
    in_part = (y >= starts) & (y < jnp.minimum(starts + split, vocab))
    return merged_tiles(stats, in_part)


def backward(
    hidden, head, targets, scale, top, log_sum, a, b, c, options: LogprobOptions, *, interpret=False
) -> tuple[jax.Array, jax.Array]:
    """Returns (d hidden [N, D], d head) of cotangents a, b, c [N]; see options.logit_gradient."""
    rows, vocab = len(hidden), vocab_size_of(head, options)
    axis, max_entries = (
        0 if options.vocab_first else 1,
        GRADIENT_BYTES // (rows * hidden.dtype.itemsize),
    )
    count, size = tiles(vocab, max(max_entries // W * W, W))

    def of_vocab(sums, j):
        start = jnp.minimum(j * size, vocab - size)
        w = vocab_slice(head, start, size, options)
        bounds = jnp.stack([start, j * size - start]).astype(jnp.int32)
        dz = pl.pallas_call(
            functools.partial(_differentiate, options=options),
            grid=(pl.cdiv(rows, R), pl.cdiv(size, W)),
            out_shape=jax.ShapeDtypeStruct((rows, size), hidden.dtype),
            **_call_options(interpret),
            name="token_logprobs_gradient",
        )(bounds, scale.reshape(1), targets, top, log_sum, a, b, c, hidden, w)
        of_vocab = head_gradient(dz, hidden, options)
        of_vocab += lax.dynamic_slice_in_dim(sums[1], start, size, axis)  # 0 but where they overlap
        of_head = lax.dynamic_update_slice_in_dim(sums[1], of_vocab, start, axis)
        return (sums[0] + hidden_gradient(dz, w, options), of_head), None

    zeros = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(head.shape, jnp.float32)
    (of_hidden, of_head), _ = lax.scan(of_vocab, zeros, jnp.arange(count))
    return of_hidden.astype(hidden.dtype), of_head


def _call_options(interpret: bool) -> dict:
    params = triton.CompilerParams(num_warps=8, num_stages=3)
    return dict(interpret=interpret, compiler_params=params)


# -- inside the kernels: every ref is a whole array


def _rows(i, count: int):
    """Returns (slice, [R] bool: which of its rows exist) of the i-th block of rows."""
    rows = pl.ds(i * R, R)
    return rows, i * R + jnp.arange(R) < count


def _raw_tile(hidden_ref, head_ref, rows, real_rows, start, options: LogprobOptions) -> jax.Array:
    """Returns hidden[rows] times W vocabulary entries from `start` on: [R, W] float32, 0 outside of
    the arrays."""
    depth, vocab = hidden_ref.shape[1], head_ref.shape[0 if options.vocab_first else 1]
    k = K_BYTES // hidden_ref.dtype.itemsize
    real_vocab = start + jnp.arange(W) < vocab

    def add(j, total):
        columns, in_depth = pl.ds(j * k, k), j * k + jnp.arange(k) < depth
        x = triton.load(
            hidden_ref.at[rows, columns], mask=real_rows[:, None] & in_depth[None, :], other=0.0
        )
        if options.vocab_first:
            block, mask = (pl.ds(start, W), columns), real_vocab[:, None] & in_depth[None, :]
        else:
            block, mask = (columns, pl.ds(start, W)), in_depth[:, None] & real_vocab[None, :]
        w = triton.load(head_ref.at[block], mask=mask, other=0.0)
        return total + lax.dot_general(
            x,
            w,
            (((1,), (1 if options.vocab_first else 0,)), ((), ())),
            precision=options.precision,
            preferred_element_type=jnp.float32,
        )

    return lax.fori_loop(0, pl.cdiv(depth, k), add, jnp.zeros((R, W), jnp.float32))


def _describe(
    scale_ref,
    targets_ref,
    hidden_ref,
    head_ref,
    top_ref,
    log_sum_ref,
    target_ref,
    expected_ref,
    best_ref,
    *,
    options: LogprobOptions,
    split: int,
):
    """Statistics of R rows over `split` vocabulary entries, running over tiles of W."""
    vocab = head_ref.shape[0 if options.vocab_first else 1]
    rows, real_rows = _rows(pl.program_id(0), hidden_ref.shape[0])
    y = triton.load(targets_ref.at[rows], mask=real_rows, other=-1)
    scale, start = scale_ref[0], pl.program_id(1) * split

    def of_tile(j, running):
        top, total, target, expected, best = running
        tile_start = start + j * W
        token_id = tile_start + lax.broadcasted_iota(jnp.int32, (R, W), 1)
        raw = _raw_tile(hidden_ref, head_ref, rows, real_rows, tile_start, options)
        z = jnp.where(token_id < vocab, capped(raw, options.soft_cap) * scale, -jnp.inf)
        tile_top = jnp.max(z, axis=1)
        new_top = jnp.maximum(top, tile_top)
        base = jnp.where(jnp.abs(new_top) < jnp.inf, new_top, 0.0)
        decay = jnp.where(top == -jnp.inf, 0.0, jnp.exp(top - base))
        e = jnp.exp(z - base[:, None])
        target += jnp.sum(jnp.where((token_id == y[:, None]) & (token_id < vocab), z, 0.0), axis=1)
        if options.entropy:  # sums of e (z - base); those of earlier tiles had another base
            shift = jnp.where(top == -jnp.inf, 0.0, top - base)
            tile = jnp.where(e > 0, e * (z - base[:, None]), 0.0)
            expected = decay * (expected + total * shift) + jnp.sum(tile, axis=1)
        if options.greedy:
            tile_best = jnp.min(jnp.where(z == tile_top[:, None], token_id, NO_TOKEN), axis=1)
            best = jnp.where(tile_top > top, tile_best, best)
        return new_top, total * decay + jnp.sum(e, axis=1), target, expected, best

    zero = jnp.zeros((R,), jnp.float32)
    lowest = jnp.full((R,), -jnp.inf, jnp.float32)
    count = pl.cdiv(jnp.minimum(split, vocab - start), W)
    top, total, target, expected, best = lax.fori_loop(
        0, count, of_tile, (lowest, zero, zero, zero, jnp.full((R,), NO_TOKEN, jnp.int32))
    )
    base = jnp.where(jnp.abs(top) < jnp.inf, top, 0.0)
    in_part = (y >= start) & (y < jnp.minimum(start + split, vocab))
    stats = base, jnp.log(total), jnp.where(in_part, target - base, 0.0), expected / total, best
    refs = top_ref, log_sum_ref, target_ref, expected_ref, best_ref
    for ref, value in zip(refs, stats, strict=True):
        triton.store(ref.at[pl.program_id(1), rows], value, mask=real_rows)


def _differentiate(
    bounds_ref,
    scale_ref,
    targets_ref,
    top_ref,
    log_sum_ref,
    a_ref,
    b_ref,
    c_ref,
    hidden_ref,
    head_ref,
    dz_ref,
    *,
    options: LogprobOptions,
):
    """Writes one tile of options.logit_gradient for a chunk of the vocabulary, with 0 for the
    entries that it shares with the chunk before. bounds: [first entry of the chunk, number of these
    shared entries]."""
    rows, real_rows = _rows(pl.program_id(0), hidden_ref.shape[0])
    vocab, start = dz_ref.shape[1], pl.program_id(1) * W
    y = triton.load(targets_ref.at[rows], mask=real_rows, other=-1) - bounds_ref[0] - start
    refs = top_ref, log_sum_ref, a_ref, b_ref, c_ref
    row = [triton.load(ref.at[rows], mask=real_rows, other=0.0) for ref in refs]
    raw = _raw_tile(hidden_ref, head_ref, rows, real_rows, start, options)
    dz = logit_gradient(raw, y, scale_ref[0], *row, options)
    token_id = start + lax.broadcasted_iota(jnp.int32, (R, W), 1)
    dz = jnp.where(token_id >= bounds_ref[1], dz, 0.0).astype(dz_ref.dtype)
    triton.store(dz_ref.at[rows, pl.ds(start, W)], dz, mask=real_rows[:, None] & (token_id < vocab))
