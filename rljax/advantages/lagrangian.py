"""The advantage of a reward under a constraint on a cost."""

import jax


def lagrangian(of_rewards: jax.Array, of_costs: jax.Array, multiplier: jax.Array) -> jax.Array:
    """(A_R - lambda A_C) / (1 + lambda): the advantage of the Lagrangian, scaled so that it stays
    bounded as lambda grows (Safe-RLHF, arXiv 2310.12773). A_R, A_C [B, S], lambda [] -> [B, S]."""
    return (of_rewards - multiplier * of_costs) / (1 + multiplier)
