"""Stochastic rounding: weights that are held in bfloat16 move by the small updates of float32.

Rounded to the nearest bfloat16, an update below 1/512 of a weight is lost at every step. Rounded at
random, up as often as the part that is cut off says, it is there on average (arXiv 2010.06192).
"""

import jax
import jax.numpy as jnp

from rljax.errors import InputError

HELD = ("float32", "bfloat16")  # how trained weights may be held


def stochastic_round(x: jax.Array, key: jax.Array) -> jax.Array:
    """Rounds float32 numbers x, of any shape, to bfloat16: to one of the two neighbours, so that
    the mean over keys is x. A bfloat16 number stays as it is, and so do infinities and NaN.

    The 16 bits that bfloat16 does not have are added to a random number of as many bits: the carry
    comes with the probability (x - lower) / (upper - lower).
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    high_bits = (bits + noise) & jnp.uint32(0xFFFF0000)
    rounded = jax.lax.bitcast_convert_type(high_bits, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def rounds(params) -> bool:
    """Returns whether any of the trained weights are held in bfloat16."""
    return any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(params))


def widened(tree):
    """Returns the arrays in float32 or wider: what an optimizer reads of weights and gradients."""
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


def rounded_like(new, old, key_data: jax.Array, step: jax.Array):
    """Returns the weights `new`, in float32 or wider, as `old` are held: bfloat16 ones rounded
    stochastically, by a key that follows from the role's own `key_data` [2] uint32, the optimizer
    step (a scalar), and the path of the array."""
    key = jax.random.fold_in(jax.random.wrap_key_data(key_data), step)
    leaves, structure = jax.tree.flatten(new)
    rounded = [
        stochastic_round(x, jax.random.fold_in(key, i)) if old_leaf.dtype == jnp.bfloat16 else x
        for i, (x, old_leaf) in enumerate(zip(leaves, jax.tree.leaves(old), strict=True))
    ]
    return structure.unflatten(rounded)


def check_trainable(params) -> None:
    """Raises InputError for trained weights that neither float32 nor a rounding holds."""
    dtypes = {str(x.dtype) for x in jax.tree.leaves(params)}
    if strange := sorted(dtypes - {*HELD, "float64"}):
        raise InputError(
            "trained weights",
            value=", ".join(strange),
            rule=f"held in {' or '.join(HELD)}",
            fix="model_settings.weight_dtype='float32'; model_settings.dtype says what products "
            "are computed in",
        )
