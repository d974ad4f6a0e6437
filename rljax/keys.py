"""Named random streams: a key of a run's own for every purpose, told apart by name."""

import zlib

import jax
import numpy as np


def root_key(seed: int) -> jax.Array:
    """Returns jax.random.key(seed), a scalar, without a program where that compiles three."""
    low = np.uint32(seed & 0xFFFFFFFF)  # all that jax.random.key reads of it
    if jax.config.jax_default_prng_impl == "threefry2x32":
        return jax.random.wrap_key_data(np.array([0, low], np.uint32), impl="threefry2x32")
    return jax.random.key(low)


def fold_in(key: jax.Array, number: int | jax.Array) -> jax.Array:
    """Returns jax.random.fold_in(key, number) of two scalars, by one small program for all
    Python numbers."""
    return _fold_in(key, number if isinstance(number, jax.Array) else np.uint32(number))


def stream(key: jax.Array, name: str, step: int | jax.Array | None = None) -> jax.Array:
    """Returns the key of the stream `name`, a scalar, or that of one step of it. Equal names give
    equal keys; streams of different names are independent. Works inside and outside a program."""
    key = fold_in(key, zlib.crc32(name.encode()))
    return key if step is None else fold_in(key, step)


_fold_in = jax.jit(jax.random.fold_in)
