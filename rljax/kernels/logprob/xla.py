"""The fused log-prob in plain XLA, chunk by chunk: for CPU, and wherever no kernel fits.

A tile of logits is made, read and dropped; the backward pass makes it anew.

The tiles are walked by scans, with the last one begun early where they do not divide: what it
shares with the one before is masked. Temporaries are a few tiles, whatever N and V.

Axes: N rows, D embed, V vocabulary entries.
"""

import jax
import jax.numpy as jnp
from jax import lax

from rljax.kernels.logprob.options import (
    LogprobOptions,
    Statistics,
    gradient_dtype,
    head_gradient,
    hidden_gradient,
    logit_gradient,
    logits,
    merged_tiles,
    raw_logits,
    tile_statistics,
    vocab_size_of,
    wide_dtype,
)

ROWS, VOCAB = 1024, 2048  # of a tile: 8 MiB of float32 logits


def forward(hidden, head, targets, scale, options: LogprobOptions) -> Statistics:
    """Returns Statistics [N] of hidden [N, D] under the head at targets [N]; see
    options.Statistics."""
    rows, vocab = len(hidden), vocab_size_of(head, options)
    if rows <= ROWS and vocab <= VOCAB:
        return tile_statistics(logits(hidden, head, scale, options), targets, options)
    row_tiles, row_size = tiles(rows, ROWS)
    vocab_tiles, tile_size = tiles(vocab, VOCAB)

    def of_rows(i):
        start = jnp.minimum(i * row_size, rows - row_size)
        h, y = (lax.dynamic_slice_in_dim(x, start, row_size) for x in (hidden, targets))

        def of_vocab(_, j):
            vocab_start = jnp.minimum(j * tile_size, vocab - tile_size)
            z = logits(h, vocab_slice(head, vocab_start, tile_size, options), scale, options)
            fresh = j * tile_size - vocab_start  # the entries before were in the last tile
            if vocab % tile_size:
                z = jnp.where(jnp.arange(tile_size) >= fresh, z, -jnp.inf)
            stats = tile_statistics(z, y - vocab_start, options)
            if options.greedy:
                stats = stats._replace(best=stats.best + vocab_start)
            return None, (stats, (y - vocab_start >= fresh) & (y - vocab_start < tile_size))

        _, (parts, in_tile) = lax.scan(of_vocab, None, jnp.arange(vocab_tiles))
        return merged_tiles(parts, in_tile)

    stats = lax.map(of_rows, jnp.arange(row_tiles))
    overlap = row_tiles * row_size - rows

    def join(x):
        return jnp.concatenate([x[:-1].reshape(-1), x[-1, overlap:]])

    return jax.tree.map(join, stats)


def backward(
    hidden, head, targets, scale, top, log_sum, a, b, c, options: LogprobOptions
) -> tuple[jax.Array, jax.Array]:
    """Returns (d hidden [N, D], d head) of cotangents a, b, c [N]; see options.logit_gradient."""
    rows, vocab = len(hidden), vocab_size_of(head, options)
    row_tiles, row_size = tiles(rows, ROWS)
    vocab_tiles, tile_size = tiles(vocab, VOCAB)
    dtype, axis = wide_dtype(gradient_dtype(hidden, head)), 0 if options.vocab_first else 1

    def of_vocab(gradients, j):
        vocab_start = jnp.minimum(j * tile_size, vocab - tile_size)
        w = vocab_slice(head, vocab_start, tile_size, options)

        def of_rows(gradients, i):
            of_hidden, of_tile = gradients
            start = jnp.minimum(i * row_size, rows - row_size)

            def at(x):
                return lax.dynamic_slice_in_dim(x, start, row_size)

            h, (y, *row) = at(hidden), [at(x) for x in (targets, top, log_sum, a, b, c)]
            dz = logit_gradient(raw_logits(h, w, options), y - vocab_start, scale, *row, options)
            if rows % row_size:
                dz = jnp.where((jnp.arange(row_size) >= i * row_size - start)[:, None], dz, 0.0)
            if vocab % tile_size:
                dz = jnp.where(jnp.arange(tile_size)[None] >= j * tile_size - vocab_start, dz, 0.0)
            dz = dz.astype(gradient_dtype(h, w))
            sums = at(of_hidden) + hidden_gradient(dz, w, options)
            of_hidden = lax.dynamic_update_slice_in_dim(of_hidden, sums, start, 0)
            return (of_hidden, of_tile + head_gradient(dz, h, options)), None

        of_hidden, of_head = gradients
        zeros = jnp.zeros(w.shape, dtype)
        (of_hidden, of_tile), _ = lax.scan(of_rows, (of_hidden, zeros), jnp.arange(row_tiles))
        sums = lax.dynamic_slice_in_dim(of_head, vocab_start, tile_size, axis) + of_tile
        return (of_hidden, lax.dynamic_update_slice_in_dim(of_head, sums, vocab_start, axis)), None

    zeros = jnp.zeros(hidden.shape, dtype), jnp.zeros(head.shape, dtype)
    (of_hidden, of_head), _ = lax.scan(of_vocab, zeros, jnp.arange(vocab_tiles))
    return of_hidden.astype(hidden.dtype), of_head


def vocab_slice(head: jax.Array, first, count: int, options: LogprobOptions) -> jax.Array:
    """Returns `count` vocabulary entries of the head from `first` on, in its own layout:
    [D, count] or [count, D]."""
    return lax.dynamic_slice_in_dim(head, first, count, 0 if options.vocab_first else 1)


def tiles(length: int, most: int) -> tuple[int, int]:
    """Returns (how many, how long) of nearly even tiles, at most `most` long, that
    cover `length`."""
    size = -(-length // -(-length // most))
    return -(-length // size), size
