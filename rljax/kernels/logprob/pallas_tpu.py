"""The fused log-prob on TPU: `forward` and `backward` as three calls of Mosaic kernels.

Grids, blocks and declared cost of the three calls. The insides of the kernels are in
tpu_kernels.py, tile sizes in tpu_blocks.py.

The forward kernel walks the vocabulary for each block of rows and keeps running statistics per
lane. Backwards, one kernel makes both gradients from one tile of logits where the gradient of all
rows of hidden fits VMEM in float32: 2 N D V FLOP forward, 6 backward, 8 in all. Where it does not,
and on devices of two cores, which share rows or vocabulary but not a sum, each gradient has a
kernel and recomputes its logits, 10 in all. The passes that the MXU makes of them: 1, 3 or 6 for
logits (tpu_kernels.passes), 1 for a gradient.

This file holds 0 MB beside its results on v5e and v6e and 9 to 17 MB on v5p, where the plain form
holds 4.2 to 21 GB (three sizes up to N = D = 8192, V = 256000, 2026-11-22: run
benchmarks/logprob.py --tpu=v5e,v5p,v6e).

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
from rljax.kernels.logprob.options import LogprobOptions, Statistics
from rljax.kernels.logprob.tpu_blocks import (
    LANES,
    Sizes,
    both_bytes,
    choose_blocks,
    forward_bytes,
    head_bytes,
    hidden_bytes,
    vmem_bytes,
)
from rljax.kernels.logprob.tpu_kernels import (
    both_kernel,
    forward_kernel,
    head_kernel,
    hidden_kernel,
    passes,
)

F32 = jnp.float32


def forward(
    hidden, head, targets, scale, options: LogprobOptions, *, interpret=False
) -> Statistics:
    """Returns Statistics [N] of cap(hidden head) scale: hidden [N, D], head [D, V]
    or [V, D], targets [N].

    `scale` is a traced float32 scalar. Temporaries: 512 bytes a row, twice.
    """
    _check_dtype(hidden, head)
    n, depth = hidden.shape
    hidden, head, vocab = _padded(hidden, head, options)
    size = _sizes(hidden, head)
    blocks = choose_blocks(forward_bytes, "rows", (n, depth, vocab), size, _budget())
    grid = (pl.cdiv(n, blocks.rows), pl.cdiv(vocab, blocks.vocab))
    row_of, vocab_of = (lambda i, j: i), (lambda i, j: j)
    statistics = pltpu.VMEM((blocks.rows, LANES), F32)
    output = pl.pallas_call(
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
            bytes_accessed=depth * (size.hidden * n + size.head * grid[0] * vocab) + 8 * LANES * n,
        ),
        interpret=interpret,
        metadata=_multiplied(hidden, head, n * depth * vocab, gradients=0),
        name="token_logprobs_forward",
    )(_scalar(scale), _column(targets, grid[0] * blocks.rows), hidden, head)

    def real(lane):
        return jax.lax.bitcast_convert_type(output[:n, lane], F32)

    return Statistics(
        top=real(0),
        log_sum=real(1),
        target=real(2),
        expected=real(3) if options.entropy else None,
        best=output[:n, 4] if options.greedy else None,
    )


def backward(
    hidden, head, targets, scale, top, log_sum, a, b, c, options: LogprobOptions, *, interpret=False
):
    """Gradients of hidden and head where that of a logit is
    dz_v = (a 1[v = y] + p (b + c q)) scale cap', q = z_v - top - log_sum, p = exp(q).

    top, log_sum, a, b, c [N] float32; c is read only with options.entropy. Added up in float32;
    hidden's has its dtype, the head's is float32.
    """
    shape, head_shape = hidden.shape, head.shape
    hidden, head, vocab = _padded(hidden, head, options)
    scale = jnp.asarray(scale, F32)
    rows = jnp.stack([top, log_sum, a * scale, b * scale, c * scale], axis=-1).astype(F32)
    inputs = (_scalar(scale), targets, hidden, head, rows)
    shared = dict(options=options, vocab=vocab, rows=shape[0], interpret=interpret)
    sizes = (shape[0], shape[1], vocab), _sizes(hidden, head)
    bytes_of = functools.partial(both_bytes, shape[0])
    blocks = choose_blocks(bytes_of, "vocab", *sizes, _budget())
    one_core = options.cores == 1
    if one_core and not options.frozen_head and bytes_of(blocks, shape[1], sizes[1]) <= _budget():
        of_hidden, of_head = _both_gradients(*inputs, blocks=blocks, **shared)
    else:
        of_hidden, of_head = _hidden_gradient(*inputs, **shared), _head_gradient(*inputs, **shared)
    return of_hidden[: shape[0]], of_head[: head_shape[0], : head_shape[1]]


def _hidden_gradient(scale, targets, hidden, head, statistics, *, options, vocab, rows, interpret):
    """Returns the gradient of hidden [N, D]: rows stay in VMEM, the vocabulary streams by."""
    depth, size = hidden.shape[1], _sizes(hidden, head)
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
            pltpu.VMEM(blocks, jnp.bfloat16),
            pltpu.VMEM((blocks.rows, depth), F32),
        ],
        compiler_params=_compiler_params(),
        cost_estimate=_gradient_cost(
            options,
            rows * depth * vocab,
            4,
            rows * vocab,
            depth * (2 * size.hidden * rows + size.head * grid[0] * vocab) + 8 * LANES * rows,
        ),
        interpret=interpret,
        metadata=_multiplied(hidden, head, rows * depth * vocab, gradients=1),
        name="token_logprobs_hidden_gradient",
    )(scale, _column(targets, padded), hidden, head, _lanes(statistics, padded))


def _head_gradient(scale, targets, hidden, head, statistics, *, options, vocab, rows, interpret):
    """Returns the gradient of the head in float32: the vocabulary stays in VMEM, rows stream by."""
    depth, size = hidden.shape[1], _sizes(hidden, head)
    blocks = choose_blocks(head_bytes, "vocab", (rows, depth, vocab), size, _budget())
    grid = (pl.cdiv(vocab, blocks.vocab), pl.cdiv(rows, blocks.rows))
    row_of, vocab_of = (lambda j, i: i), (lambda j, i: j)
    padded = grid[1] * blocks.rows
    streamed = rows * grid[0]
    return pl.pallas_call(
        functools.partial(head_kernel, options=options, rows=rows),
        grid=grid,
        in_specs=_specs(blocks, depth, options, row_of, vocab_of, stays="vocab"),
        out_specs=_head_spec(blocks, depth, options, vocab_of, pl.Buffered(1)),
        out_shape=jax.ShapeDtypeStruct(head.shape, F32),
        scratch_shapes=[
            pltpu.VMEM(blocks, F32),
            pltpu.VMEM(blocks, jnp.bfloat16),
            pltpu.VMEM((blocks.vocab, depth), F32),
        ],
        compiler_params=_compiler_params(),
        cost_estimate=_gradient_cost(
            options,
            rows * depth * vocab,
            4,
            rows * vocab,
            depth * ((size.head + 4) * vocab + size.hidden * streamed) + 8 * LANES * streamed,
        ),
        interpret=interpret,
        metadata=_multiplied(hidden, head, rows * depth * vocab, gradients=1),
        name="token_logprobs_head_gradient",
    )(scale, _column(targets, padded), hidden, head, _lanes(statistics, padded))


def _both_gradients(
    scale, targets, hidden, head, statistics, *, blocks, options, vocab, rows, interpret
):
    """Returns the gradients of hidden [N, D] and of the head in float32, as _head_gradient does,
    with the sums of all rows of hidden's in VMEM. Its blocks are written in the last round of rows;
    before that round the index of its block stays the same."""
    depth, size = hidden.shape[1], _sizes(hidden, head)
    grid = (pl.cdiv(vocab, blocks.vocab), pl.cdiv(rows, blocks.rows))
    row_of, vocab_of = (lambda j, i: i), (lambda j, i: j)
    last_block, padded, streamed = grid[0] - 1, grid[1] * blocks.rows, rows * grid[0]
    single_buffer = pl.Buffered(1)
    hidden_spec = pl.BlockSpec(
        (blocks.rows, depth),
        lambda j, i: (jnp.where(j == last_block, i, 0), 0),
        pipeline_mode=single_buffer,
    )
    return pl.pallas_call(
        functools.partial(both_kernel, options=options, rows=rows, vocab=vocab),
        grid=grid,
        in_specs=_specs(blocks, depth, options, row_of, vocab_of, stays="vocab"),
        out_specs=(hidden_spec, _head_spec(blocks, depth, options, vocab_of, single_buffer)),
        out_shape=(
            jax.ShapeDtypeStruct(hidden.shape, hidden.dtype),
            jax.ShapeDtypeStruct(head.shape, F32),
        ),
        scratch_shapes=[
            pltpu.VMEM(blocks, F32),
            pltpu.VMEM(blocks, jnp.bfloat16),
            pltpu.VMEM((padded, depth), F32),
            pltpu.VMEM((blocks.vocab, depth), F32),
        ],
        compiler_params=_compiler_params("arbitrary"),
        cost_estimate=_gradient_cost(
            options,
            rows * depth * vocab,
            6,
            rows * vocab,
            depth * ((size.head + 4) * vocab + size.hidden * (rows + streamed))
            + 8 * LANES * streamed,
        ),
        interpret=interpret,
        metadata=_multiplied(hidden, head, rows * depth * vocab, gradients=2),
        name="token_logprobs_gradients",
    )(scale, _column(targets, padded), hidden, head, _lanes(statistics, padded))


def _gradient_cost(options: LogprobOptions, product: int, flops: int, logits: int, moved: int):
    transcendentals = logits * (2 if options.soft_cap else 1)
    return pl.CostEstimate(
        flops=flops * product, transcendentals=transcendentals, bytes_accessed=moved
    )


def _multiplied(hidden, head, product: int, *, gradients: int) -> dict[str, str]:
    """Returns the FLOPs that rljax.plan.flops reads beside the model's: those of all passes of the
    MXU, for one product that makes logits and so many gradients."""
    return {"mxu_flops": str(2 * product * (passes(hidden.dtype, head.dtype) + gradients))}


# -- arguments of the kernels


def _check_dtype(hidden, head) -> None:
    if {hidden.dtype, head.dtype} - {jnp.dtype(jnp.bfloat16), jnp.dtype(F32)}:
        raise InputError(
            "the TPU kernel's hidden states and head",
            value=f"{hidden.dtype} and {head.dtype}",
            rule="each is bfloat16 or float32",
            fix="cast them, or use impl='xla'",
        )


def _sizes(hidden, head) -> Sizes:
    return Sizes(hidden.dtype.itemsize, head.dtype.itemsize)


def _padded(hidden, head, options: LogprobOptions):
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
    """Returns the scale as [1, 1]: two axes, so that a third in front, of vmap, is one that blocks
    may be made of."""
    return jnp.asarray(scale, F32).reshape(1, 1)


def _column(targets, rows: int):
    """Returns the targets as [rows, 1] int32; rows that do not exist have no target."""
    padded = jnp.pad(targets.astype(jnp.int32), (0, rows - targets.size), constant_values=-1)
    return padded[:, None]


def _lanes(statistics, rows: int):
    """Returns statistics [N, 5] as [rows, 128], one number a lane."""
    n, count = statistics.shape
    return jnp.pad(statistics, ((0, rows - n), (0, LANES - count)))


def _head_spec(blocks, depth: int, options: LogprobOptions, vocab_of, mode=None):
    if options.vocab_first:
        shape, index = (blocks.vocab, depth), lambda *indices: (vocab_of(*indices), 0)
    else:
        shape, index = (depth, blocks.vocab), lambda *indices: (0, vocab_of(*indices))
    return pl.BlockSpec(shape, index, pipeline_mode=mode)


def _specs(blocks, depth: int, options: LogprobOptions, row_of, vocab_of, *, stays: str) -> list:
    """Returns the specs of scale, targets, hidden, head, statistics. The input that stays for a
    round of the inner grid axis has one buffer: the next round's copy is not worth a second."""

    def rows(*indices):
        return (row_of(*indices), 0)

    single_buffer = pl.Buffered(1)
    return [
        pl.BlockSpec(memory_space=pltpu.SMEM),
        pl.BlockSpec((blocks.rows, 1), rows),
        pl.BlockSpec(
            (blocks.rows, depth), rows, pipeline_mode=single_buffer if stays == "rows" else None
        ),
        _head_spec(blocks, depth, options, vocab_of, single_buffer if stays == "vocab" else None),
        pl.BlockSpec((blocks.rows, LANES), rows),
    ]


def _budget() -> int:
    """Returns the bytes that tiles may take; the compiler needs the rest of VMEM for values between
    instructions."""
    return vmem_bytes() * 13 // 16


def _compiler_params(outer: str = "parallel"):
    return pltpu.CompilerParams(
        dimension_semantics=(outer, "arbitrary"), vmem_limit_bytes=vmem_bytes() * 15 // 16
    )
