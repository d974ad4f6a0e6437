"""Frozen weights in 8 or 4 bits: codes, and one scale per block of an input axis
(QLoRA, arXiv 2305.14314).

scale = max |w| of the block. int8: w = code scale / 127. nf4: w = LEVELS[code] scale.
"""

import jax
import jax.numpy as jnp
import numpy as np

# Quantiles of a standard normal, one of them exactly 0, over their largest (the paper's table).
LEVELS = np.array(
    """
    -1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635
    -0.18477343022823334 -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725
    0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941
    0.7229568362236023 1.0
    """.split(),
    np.float32,
)
KINDS = ("int8", "nf4")
DTYPES = {"int8": jnp.int8, "nf4": jnp.uint4}


def block_of(size: int) -> int:
    """Returns the largest divisor of `size` that is at most 64."""
    return next(b for b in range(min(size, 64), 0, -1) if size % b == 0)


def _blocks(x: jax.Array, axis: int, block: int) -> jax.Array:
    """Splits `axis` into (blocks, block)."""
    shape = x.shape[:axis] + (x.shape[axis] // block, block) + x.shape[axis + 1 :]
    return x.reshape(shape)


def quantise(w: jax.Array, kind: str, axis: int) -> tuple[jax.Array, jax.Array]:
    """Returns codes in the shape of w, and float32 scales in the same shape but for `axis`, which
    is divided by the block (`block_of`)."""
    blocks = _blocks(w.astype(jnp.float32), axis, block_of(w.shape[axis]))
    scales = jnp.max(jnp.abs(blocks), axis=axis + 1, keepdims=True)
    unit = blocks / jnp.where(scales > 0, scales, 1.0)
    if kind == "int8":
        codes = jnp.round(unit * 127)
    else:
        edges = (LEVELS[1:] + LEVELS[:-1]) / 2
        codes = sum((unit > edge).astype(jnp.int32) for edge in edges)
    return codes.reshape(w.shape).astype(DTYPES[kind]), jnp.squeeze(scales, axis + 1)


def dequantise(codes: jax.Array, scales: jax.Array, kind: str, axis: int, dtype) -> jax.Array:
    """Returns the weight that codes and scales stand for, in the shape of the codes."""
    values = (
        codes.astype(jnp.float32) / 127
        if kind == "int8"
        else jnp.asarray(LEVELS)[codes.astype(jnp.int32)]
    )
    blocks = _blocks(values, axis, codes.shape[axis] // scales.shape[axis])
    return (blocks * jnp.expand_dims(scales, axis + 1)).reshape(codes.shape).astype(dtype)
