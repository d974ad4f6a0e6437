"""The recurrences written out, one row and one token at a time: what the others must equal.

They run in the inputs' own precision, float64 included.

Every implementation has these three functions with these arguments. Axes: B rows, S tokens. mask
[B, S] is above 0 where the policy chose the token; floats at mask 0 may be garbage. t+ is the next
token of the row with mask above 0; it counts only where its segment id is that of t. ids [B, S]
int32, or None where a row is one sequence; gamma [B, 1]; lam and decay [B, 1] or [B, S].
"""

import jax
import jax.numpy as jnp


def next_chosen(x, mask, ids) -> jax.Array:
    """x at t+, and 0 where there is none, at every t: [B, S]."""

    def token(later, inputs):
        x_later, id_later, any_later = later
        x_t, chosen, segment = inputs
        output = jnp.where(any_later & (id_later == segment), x_later, jnp.zeros_like(x_later))
        # A token that the policy did not choose passes on what it received.
        current = (x_t, segment, jnp.bool_(True))
        return tuple(jnp.where(chosen, a, b) for a, b in zip(current, later, strict=True)), output

    def row(*columns):
        start = (jnp.zeros_like(columns[0][0]), jnp.int32(0), jnp.bool_(False))
        return jax.lax.scan(token, start, columns, reverse=True)[1]

    ids = jnp.zeros_like(mask, jnp.int32) if ids is None else ids
    return jax.vmap(row)(x, mask > 0, ids)


def discounted_sum(x, decay, mask, ids) -> jax.Array:
    """y_t = x_t + decay_t y_{t+} where mask > 0, else 0: [B, S]."""
    # GAE without values: gamma is 1, and lambda the decay.
    return gae(x, jnp.zeros_like(x), mask, ids, jnp.ones_like(x[:, :1]), decay)[0]


def gae(rewards, values, mask, ids, gamma, lam) -> tuple[jax.Array, jax.Array]:
    """A_t = r_t + gamma (V_{t+} + lam_t A_{t+}) - V_t and A + V where mask > 0, else 0: [B, S]."""

    def token(later, inputs):
        advantage_later, id_later = later
        delta_t, decay_t, value_t, chosen, segment = inputs
        advantage = delta_t + jnp.where(id_later == segment, decay_t * advantage_later, 0.0)
        carry = (
            jnp.where(chosen, advantage, advantage_later),
            jnp.where(chosen, segment, id_later),
        )
        outputs = (jnp.where(chosen, advantage, 0.0), jnp.where(chosen, advantage + value_t, 0.0))
        return carry, outputs

    def row(*columns):
        start = (jnp.zeros_like(columns[0][0]), columns[-1][0])  # 0 is of any segment
        return jax.lax.scan(token, start, columns, reverse=True)[1]

    ids = jnp.zeros_like(mask, jnp.int32) if ids is None else ids
    delta = rewards + gamma * next_chosen(values, mask, ids) - values
    decay = jnp.broadcast_to(gamma * lam, delta.shape)
    return jax.vmap(row)(delta, decay, values, mask > 0, ids)
