"""Functions of rows in tiles of one shape, so that a row's numbers do not depend on how many rows
there are, or on its index among them.

XLA sums in an order that goes by the shape of an array: a product of one row with a weight differs
in its last bits between 8 rows and 512. A loop over tiles has a body compiled for one shape.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

TILE = 16  # rows


def with_gradient_of(exact: Callable, ordinary: Callable) -> Callable:
    """Returns a function with the value of `exact` and the gradient of `ordinary`, of the
    same arguments."""
    run = jax.custom_vjp(exact)
    run.defvjp(
        lambda *args: (exact(*args), args),
        lambda args, cotangent: jax.vjp(ordinary, *args)[1](cotangent),
    )
    return run


def in_tiles(apart: bool, function: Callable, weights, *rows: jax.Array, axes: int = 2):
    """Returns function(weights, *rows), which treats each row for itself; if `apart`, it is
    computed TILE rows at a time.

    Rows are indexed by the first `axes` axes of every array, of which a tile has the last alone.
    """
    if not apart:
        return function(weights, *rows)
    exact = functools.partial(tiled, function, axes)
    return with_gradient_of(exact, function)(weights, *rows)


def tiled(function: Callable, axes: int, weights, *rows: jax.Array):
    """Computes `in_tiles` without a gradient."""
    lead = rows[0].shape[:axes]
    count = math.prod(lead)
    # With a single tile each iteration would do the same, as the compiler sees: it takes the body
    # out of the loop, and compiles it together with what is around it.
    blocks, ones = -(-count // TILE), (1,) * (axes - 1)
    tiles = max(blocks, 2)

    def cut(x):
        flat = x.reshape(count, *x.shape[axes:])
        flat = jnp.pad(flat, ((0, tiles * TILE - count), *[(0, 0)] * (flat.ndim - 1)))
        return flat.reshape(tiles, *ones, TILE, *flat.shape[1:])

    cut_rows = [cut(x) for x in rows]

    def one(i):
        return function(weights, *[x[i] for x in cut_rows])

    leaves, structure = jax.tree.flatten(jax.eval_shape(one, 0))
    float_flags = [jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]

    def made(i):
        flat = [x.reshape(TILE, -1) for x in jax.tree.leaves(one(i))]
        # In one array, so that the loop does not depend on which of them are read later.
        floats = jnp.concatenate(
            [x for x, is_float in zip(flat, float_flags, strict=True) if is_float], axis=1
        )
        return [floats, *[x for x, is_float in zip(flat, float_flags, strict=True) if not is_float]]

    def body(i, buffers):
        return [old.at[i].set(x) for old, x in zip(buffers, made(i), strict=True)]

    buffers = [jnp.zeros((tiles, *x.shape), x.dtype) for x in jax.eval_shape(made, 0)]
    buffers = jax.lax.fori_loop(0, _unknown(blocks), body, buffers)
    floats, *non_floats = [x.reshape(-1, x.shape[-1])[:count] for x in buffers]
    widths = [
        math.prod(x.shape[axes:])
        for x, is_float in zip(leaves, float_flags, strict=True)
        if is_float
    ]
    split_floats = iter(jnp.split(floats, np.cumsum(widths)[:-1], axis=1))
    non_floats = iter(non_floats)
    outputs = [next(split_floats if is_float else non_floats) for is_float in float_flags]
    outputs = [
        x.reshape(*lead, *leaf.shape[axes:]) for x, leaf in zip(outputs, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, outputs)


def _unknown(count: int) -> jax.Array:
    """Returns `count` as a value that the compiler does not know: it would unroll a loop of one
    iteration."""
    return jax.lax.optimization_barrier(jnp.int32(count))
