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

    parts = [cut(x) for x in rows]

    def one(i):
        return function(weights, *[x[i] for x in parts])

    leaves, form = jax.tree.flatten(jax.eval_shape(one, 0))
    real = [jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]

    def made(i):
        flat = [x.reshape(TILE, -1) for x in jax.tree.leaves(one(i))]
        # Side by side, so that what is read of them later changes nothing of the loop.
        joined = jnp.concatenate([x for x, good in zip(flat, real, strict=True) if good], axis=1)
        return [joined, *[x for x, good in zip(flat, real, strict=True) if not good]]

    def body(i, out):
        return [old.at[i].set(x) for old, x in zip(out, made(i), strict=True)]

    out = [jnp.zeros((tiles, *x.shape), x.dtype) for x in jax.eval_shape(made, 0)]
    out = jax.lax.fori_loop(0, _unknown(blocks), body, out)
    joined, *others = [x.reshape(-1, x.shape[-1])[:count] for x in out]
    widths = [math.prod(x.shape[axes:]) for x, good in zip(leaves, real, strict=True) if good]
    apart = iter(jnp.split(joined, np.cumsum(widths)[:-1], axis=1))
    others = iter(others)
    whole = [next(apart if good else others) for good in real]
    whole = [x.reshape(*lead, *like.shape[axes:]) for x, like in zip(whole, leaves, strict=True)]
    return jax.tree.unflatten(form, whole)


def _unknown(count: int) -> jax.Array:
    """`count`, which the compiler does not know: it takes a loop of one iteration apart."""
    return jax.lax.optimization_barrier(jnp.int32(count))
