"""From the token that a model reads to the token that an output describes (the Batch convention).

Axes: B rows, S tokens.
"""

import jax
import jax.numpy as jnp

from rljax.batch import Batch
from rljax.models.attention_paths import PackedPrefix


def preceding(x: jax.Array, batch: Batch) -> jax.Array:
    """Shifts values to the token behind each one, x [B, S, ...]; zeros at column 0 where
    `batch.previous` says nothing else."""
    if batch.previous is None:
        return jnp.pad(x[:, :-1], ((0, 0), (1, 0), *[(0, 0)] * (x.ndim - 2)))
    index = jnp.expand_dims(batch.previous, tuple(range(2, x.ndim)))
    return jnp.take_along_axis(x, index, axis=1)


def describing(x: jax.Array, batch: Batch) -> jax.Array:
    """Moves outputs about the tokens that follow each state [B, S], or precede each token where
    `batch.previous` says which, to the tokens that they describe: [B, S]."""
    return preceding(x, batch) if batch.previous is None else x


def prefix_of(batch: Batch) -> PackedPrefix | None:
    """Returns the prefixes that the segments of packed rows continue; None where there are none."""
    if batch.prefix_ids is None:
        return None
    return PackedPrefix(batch.prefix_ids, batch.prefix_blocks, batch.positions)
