"""The fused log-prob on TPU: `forward` and `backward` as three calls of Mosaic kernels.

Grids, blocks and declared cost of the three calls. The insides of the kernels are in
tpu_kernels.py, tile sizes in tpu_blocks.py.

The forward kernel walks the vocabulary for each block of rows and keeps running statistics per
lane. The backward has one kernel per gradient, and each recomputes its logits: 2 N D V FLOP
forward, twice 4 N D V backward, 10 in all. One kernel for both gradients would make it 8, but has
to add up one of them in HBM in float32: N D 4 bytes for each core behind the device, 134 MB at
N = 8192, D = 4096 on one core. This file holds 0 MB beside its results on v5e and v6e and 9 to 17
MB on v5p, where the plain form holds 4.2 to 21 GB (three sizes up to N = D = 8192, V = 256000,
2026-11-22: run benchmarks/logprob.py --tpu=v5e,v5p,v6e).

tokamax's linear_softmax_cross_entropy_loss (0.0.17, its Mosaic kernel) is that one kernel. It
returns the loss alone: no entropy, soft cap, temperature, most likely token or target in another
shard, a head of [D, V] only, and logits may not be -inf. Its gradient of the hidden states is that
float32 array. Compiled ahead of time in bfloat16 (2026-11-22) it holds, beside float32 results, 0
MB on v5e, and on v5p 67 MB at (N, D, V) = (4096, 2048, 128256) and 2,785 MB at (8192, 4096,
151936). So ours is used.

Axes: N rows, D embed, V vocabulary entries; a tile is R rows x W vocabulary entries; 128 lanes.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rljax.errors import InputError
from rljax.kernels.logprob.options import Options, Statistics
from rljax.kernels.logprob.tpu_blocks import (
    LANES,
    choose_blocks,
    forward_bytes,
    head_bytes,
    hidden_bytes,
    vmem_bytes,
)
from rljax.kernels.logprob.tpu_kernels import forward_kernel, head_kernel, hidden_kernel

F32 = jnp.float32


def forward(hidden, head, targets, scale, options: Options, *, interpret=False) -> Statistics:
    """Statistics of cap(hidden head) scale: hidden [N, D], head [D, V] or [V, D], targets [N].

    `scale` is a traced float32 scalar. Temporaries: 512 bytes a row, twice.
    """
    _check_dtype(hidden, head)
    n, depth = hidden.shape
    hidden, head, vocab = _padded(hidden, head, options)
    size = hidden.dtype.itemsize
    blocks = choose_blocks(forward_bytes, "rows", (n, depth, vocab), size, _budget())
    grid = (pl.cdiv(n, blocks.rows), pl.cdiv(vocab, blocks.vocab))
    row_of, vocab_of = (lambda i, j: i), (lambda i, j: j)
    statistics = pltpu.VMEM((blocks.rows, LANES), F32)
    out = pl.pallas_call(
        functools.partial(forward_kernel, options=options, vocab=vocab),
        grid=grid,
        in_specs=_specs(blocks, depth, options, row_of, vocab_of, stays="rows")[:-1],
        out_specs=pl.BlockSpec((blocks.rows, LANES), lambda i, j: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((grid[0] * blocks.rows, LANES), jnp.int32),
        scratch_shapes=[
            pltpu.VMEM(blocks, F32),
            *[statistics] * 4,
            pltpu.VMEM((blocks.rows, LANES), jnp.int32),
        ],
        compiler_params=_compiler_params(),
        cost_estimate=pl.CostEstimate(
            flops=2 * n * depth * vocab,
            transcendentals=n * vocab * (2 if options.soft_cap else 1),
            bytes_accessed=size * depth * (n + grid[0] * vocab) + 8 * LANES * n,
        ),
        interpret=interpret,
        name="token_logprobs_forward",
    )(_scalar(scale), _column(targets, grid[0] * blocks.rows), hidden, head)
    real = lambda lane: jax.lax.bitcast_convert_type(out[:n, lane], F32)  # noqa: E731
    return Statistics(
        top=real(0),
        log_sum=real(1),
        target=real(2),
        expected=real(3) if options.entropy else None,
        best=out[:n, 4] if options.greedy else None,
    )


def backward(
    hidden, head, targets, scale, top, log_sum, a, b, c, options: Options, *, interpret=False
):
    """Gradients of hidden and head where that of a logit is
    dz_v = (a 1[v = y] + p (b + c q)) scale cap', q = z_v - top - log_sum, p = exp(q).

    top, log_sum, a, b, c [N] float32; c is read only with options.entropy. Of the inputs' dtypes,
    added up in float32.
    """
    shape, head_shape = hidden.shape, head.shape
    hidden, head, vocab = _padded(hidden, head, options)
    scale = jnp.asarray(scale, F32)
    rows = jnp.stack([top, log_sum, a * scale, b * scale, c * scale], axis=-1).astype(F32)
    inputs = (_scalar(scale), targets, hidden, head, rows)
    shared = dict(options=options, vocab=vocab, rows=shape[0], interpret=interpret)
    hidden_gradient = _hidden_gradient(*inputs, **shared)[: shape[0]]
    head_gradient = _head_gradient(*inputs, **shared)
    return hidden_gradient, head_gradient[: head_shape[0], : head_shape[1]]


def _hidden_gradient(scale, targets, hidden, head, statistics, *, options, vocab, rows, interpret):
    """[N, D]: rows stay, the vocabulary streams by."""
    depth, size = hidden.shape[1], hidden.dtype.itemsize
    blocks = choose_blocks(hidden_bytes, "rows", (rows, depth, vocab), size, _budget())
    grid = (pl.cdiv(rows, blocks.rows), pl.cdiv(vocab, blocks.vocab))
    row_of, vocab_of = (lambda i, j: i), (lambda i, j: j)
    padded = grid[0] * blocks.rows
    return pl.pallas_call(
        functools.partial(hidden_kernel, options=options, vocab=vocab),
        grid=grid,
        in_specs=_specs(blocks, depth, options, row_of, vocab_of, stays="rows"),
        out_specs=pl.BlockSpec(
            (blocks.rows, depth), lambda i, j: (i, 0), pipeline_mode=pl.Buffered(1)
        ),
        out_shape=jax.ShapeDtypeStruct(hidden.shape, hidden.dtype),
        scratch_shapes=[
            pltpu.VMEM(blocks, F32),
            pltpu.VMEM(blocks, hidden.dtype),
            pltpu.VMEM((blocks.rows, depth), F32),
        ],
        compiler_params=_compiler_params(),
        cost_estimate=pl.CostEstimate(
            flops=4 * rows * depth * vocab,
            transcendentals=rows * vocab * (2 if options.soft_cap else 1),
            bytes_accessed=size * depth * (2 * rows + grid[0] * vocab) + 8 * LANES * rows,
        ),
        interpret=interpret,
        name="token_logprobs_hidden_gradient",
    )(scale, _column(targets, padded), hidden, head, _lanes(statistics, padded))


def _head_gradient(scale, targets, hidden, head, statistics, *, options, vocab, rows, interpret):
    """Like head: the vocabulary stays, rows stream by."""
    depth, size = hidden.shape[1], hidden.dtype.itemsize
    blocks = choose_blocks(head_bytes, "vocab", (rows, depth, vocab), size, _budget())
    grid = (pl.cdiv(vocab, blocks.vocab), pl.cdiv(rows, blocks.rows))
    row_of, vocab_of = (lambda j, i: i), (lambda j, i: j)
    padded = grid[1] * blocks.rows
    return pl.pallas_call(
        functools.partial(head_kernel, options=options, rows=rows),
        grid=grid,
        in_specs=_specs(blocks, depth, options, row_of, vocab_of, stays="vocab"),
        out_specs=_head_spec(blocks, depth, options, vocab_of, pl.Buffered(1)),
        out_shape=jax.ShapeDtypeStruct(head.shape, head.dtype),
        scratch_shapes=[
            pltpu.VMEM(blocks, F32),
            pltpu.VMEM(blocks, hidden.dtype),
            pltpu.VMEM((blocks.vocab, depth), F32),
        ],
        compiler_params=_compiler_params(),
        cost_estimate=pl.CostEstimate(
            flops=4 * rows * depth * vocab,
            transcendentals=rows * vocab * (2 if options.soft_cap else 1),
            bytes_accessed=size * depth * (2 * vocab + grid[0] * rows) + 8 * LANES * rows * grid[0],
        ),
        interpret=interpret,
        name="token_logprobs_head_gradient",
    )(scale, _column(targets, padded), hidden, head, _lanes(statistics, padded))


# -- arguments of the kernels


def _check_dtype(hidden, head) -> None:
    if hidden.dtype != head.dtype or hidden.dtype not in (jnp.bfloat16, jnp.float32):
        raise InputError(
            "the TPU kernel's hidden states and head",
            value=f"{hidden.dtype} and {head.dtype}",
            rule="both are bfloat16 or both are float32",
            fix="cast them, or use impl='xla'",
        )


def _padded(hidden, head, options: Options):
    """hidden and head with at least one register tile of rows and of the vocabulary, and V. Larger
    ragged sizes are masked inside of the kernels, without a copy."""
    axis = 0 if options.vocab_first else 1
    vocab, rows = head.shape[axis], hidden.shape[0]
    if rows < LANES:
        hidden = jnp.pad(hidden, ((0, -rows % 16), (0, 0)))
    if vocab < LANES:
        missing = [(0, 0), (0, 0)]
        missing[axis] = (0, LANES - vocab)
        head = jnp.pad(head, missing)
    return hidden, head, vocab


def _scalar(scale):
    """[1, 1]: two axes, so that a third in front, of vmap, is one that blocks may be made of."""
    return jnp.asarray(scale, F32).reshape(1, 1)


def _column(targets, rows: int):
    """[rows, 1] int32; rows that do not exist have no target."""
    padded = jnp.pad(targets.astype(jnp.int32), (0, rows - targets.size), constant_values=-1)
    return padded[:, None]


def _lanes(statistics, rows: int):
    """[N, 5] -> [rows, 128], one number a lane."""
    n, count = statistics.shape
    return jnp.pad(statistics, ((0, rows - n), (0, LANES - count)))


def _head_spec(blocks, depth: int, options: Options, vocab_of, mode=None):
    if options.vocab_first:
        shape, index = (blocks.vocab, depth), lambda *at: (vocab_of(*at), 0)
    else:
        shape, index = (depth, blocks.vocab), lambda *at: (0, vocab_of(*at))
    return pl.BlockSpec(shape, index, pipeline_mode=mode)


def _specs(blocks, depth: int, options: Options, row_of, vocab_of, *, stays: str) -> list:
    """The specs of scale, targets, hidden, head, statistics. What stays for a whole round of the
    inner grid axis has one buffer: the next round's copy is not worth a second one."""
    rows = lambda *at: (row_of(*at), 0)  # noqa: E731
    once = pl.Buffered(1)
    return [
        pl.BlockSpec(memory_space=pltpu.SMEM),
        pl.BlockSpec((blocks.rows, 1), rows),
        pl.BlockSpec((blocks.rows, depth), rows, pipeline_mode=once if stays == "rows" else None),
        _head_spec(blocks, depth, options, vocab_of, once if stays == "vocab" else None),
        pl.BlockSpec((blocks.rows, LANES), rows),
    ]


def _budget() -> int:
    """Bytes of tiles; the compiler needs the rest for what it keeps between instructions."""
    return vmem_bytes() * 13 // 16


def _compiler_params():
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_bytes() * 15 // 16
    )
