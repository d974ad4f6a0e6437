"""Named random streams: a key of a run's own for every purpose, told apart by name."""

import zlib

import jax


def stream(key: jax.Array, name: str, step: int | jax.Array | None = None) -> jax.Array:
    """The key of the stream `name`, and of one step of it. Equal names give equal keys; streams of
    different names are independent. Works inside and outside a program."""
    key = jax.random.fold_in(key, zlib.crc32(name.encode()))
    return key if step is None else jax.random.fold_in(key, step)
