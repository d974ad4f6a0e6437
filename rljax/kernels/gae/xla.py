"""The recurrences in XLA: a scan over tokens for CPU, log2(S) doublings of whole rows for
accelerators.

Takes the arguments of rljax.kernels.gae.reference. The platform that a program is compiled for
decides between the two.

Why these two: on a CPU an unrolled or an associative scan is slower than a plain one
(benchmarks/gae.py). For a v5e at 512 x 8192 GAE by jax.lax.associative_scan took 90 s to compile,
by the doublings 10 s (2026-11-22, two busy cores).
"""

import jax
import jax.numpy as jnp

NO_ID = -(2**31)  # the id where no token was chosen


def next_chosen(x, mask, ids) -> jax.Array:
    """x at t+, and 0 where there is none, at every t: [B, S]."""
    return jax.lax.platform_dependent(x, mask, ids, cpu=gathered_next, default=doubled_next)


def discounted_sum(x, decay, mask, ids) -> jax.Array:
    """y_t = x_t + decay_t y_{t+} where mask > 0, else 0: [B, S]."""
    return jax.lax.platform_dependent(x, decay, mask, ids, cpu=scan_sum, default=doubled_sum)


def gae(rewards, values, mask, ids, gamma, lam) -> tuple[jax.Array, jax.Array]:
    """A_t = r_t + gamma (V_{t+} + lam_t A_{t+}) - V_t and A + V where mask > 0, else 0: [B, S]."""
    arrays = (rewards, values, mask, ids, gamma, lam)
    return jax.lax.platform_dependent(*arrays, cpu=scan_gae, default=doubled_gae)


# -- a CPU: all rows of one column at a time, from the right


def gathered_next(x, mask, ids) -> jax.Array:
    """`next_chosen` by the index of the next chosen token: [B, S]."""
    size = x.shape[1]
    column = jnp.where(mask > 0, jnp.arange(size, dtype=jnp.int32)[None, :], size)
    here_or_later = jax.lax.cummin(column, axis=1, reverse=True)
    later = jnp.pad(here_or_later[:, 1:], ((0, 0), (0, 1)), constant_values=size)
    index = jnp.minimum(later, size - 1)
    exists = later < size
    if ids is not None:
        exists &= jnp.take_along_axis(ids, index, axis=1) == ids
    return jnp.where(exists, jnp.take_along_axis(x, index, axis=1), jnp.zeros_like(x))


def _one_array(mask, ids):
    """Returns mask and ids in one array, NO_ID where the policy chose nothing: columns are
    transposed first, and each array costs a pass."""
    return jnp.where(mask > 0, 0 if ids is None else ids, NO_ID).astype(jnp.int32)


def scan_sum(x, decay, mask, ids, unroll=1) -> jax.Array:
    """`discounted_sum` as a scan over columns, from the right: [B, S]."""
    per_token, chosen = decay.shape == x.shape, mask > 0

    def column(later, inputs):
        total, segment = later
        x_t, decay_t, keep_t, id_t = inputs
        carried = (decay_t if per_token else decay[:, 0]) * total
        if ids is not None:
            # Behind the last token the total is 0, whichever the segment.
            keep_t, carried = id_t != NO_ID, jnp.where(segment == id_t, carried, 0.0)
            segment = jnp.where(keep_t, id_t, segment)
        # A token that the policy did not choose passes on what it received.
        total = jnp.where(keep_t, x_t + carried, total)
        return (total, segment), total

    masks = (chosen.T, None) if ids is None else (None, _one_array(mask, ids).T)
    columns = (x.T, decay.T if per_token else None, *masks)
    start = (jnp.zeros_like(x[:, 0]), None if ids is None else ids[:, 0])
    total = jax.lax.scan(column, start, columns, reverse=True, unroll=unroll)[1].T
    return jnp.where(chosen, total, 0.0)


def scan_gae(rewards, values, mask, ids, gamma, lam, unroll=1) -> tuple[jax.Array, jax.Array]:
    """`gae` as a scan over columns, from the right: [B, S] each."""
    per_token = lam.shape == rewards.shape

    def column(later, inputs):
        value, advantage, segment = later
        r, v, id_t, lam_t = inputs
        is_chosen, lam_t = id_t != NO_ID, lam_t if per_token else lam[:, 0]
        carried = jnp.where(segment == id_t, gamma[:, 0] * (value + lam_t * advantage), 0.0)
        advantage = jnp.where(is_chosen, r - v + carried, advantage)
        value, segment = jnp.where(is_chosen, v, value), jnp.where(is_chosen, id_t, segment)
        return (value, advantage, segment), advantage

    chosen_ids, chosen = _one_array(mask, ids), mask > 0
    columns = (rewards.T, values.T, chosen_ids.T, lam.T if per_token else None)
    zero = jnp.zeros_like(rewards[:, 0])
    start = (zero, zero, chosen_ids[:, 0])
    advantages = jax.lax.scan(column, start, columns, reverse=True, unroll=unroll)[1].T
    advantages = jnp.where(chosen, advantages, 0.0)
    return advantages, jnp.where(chosen, advantages + values, 0.0)


# -- an accelerator: after step k every token knows of the 2^k tokens from itself on


def _doublings(combine, arrays, fills):
    """Applies combine(arrays, the same arrays from `distance` further right) for distances 1, 2,
    4, ... below S; behind the row stand the numbers `fills`, one for each array."""
    size = arrays[0].shape[1]

    def further(x, distance, number):
        padded = jnp.concatenate([x, jnp.full_like(x, number)], axis=1)
        return jax.lax.dynamic_slice_in_dim(padded, distance, size, axis=1)

    def one(k, current):
        distance = jnp.left_shift(1, k)
        shifted = (further(x, distance, n) for x, n in zip(current, fills, strict=True))
        return combine(current, tuple(shifted))

    return jax.lax.fori_loop(0, (size - 1).bit_length(), one, tuple(arrays))


def _next_and_same(x, mask, ids):
    """Returns (x at t+, or 0 where there is none; whether there is a t+)."""

    def nearer(current, right):
        return tuple(jnp.where(current[0], h, r) for h, r in zip(current, right, strict=True))

    ids = jnp.zeros_like(mask, jnp.int32) if ids is None else ids
    any_later = _doublings(nearer, (mask > 0, ids, x), (False, 0, 0))
    any_later, id_next, x_next = (jnp.pad(a[:, 1:], ((0, 0), (0, 1))) for a in any_later)
    exists = any_later & (id_next == ids)
    return jnp.where(exists, x_next, jnp.zeros_like(x)), exists


def _linear(b, c) -> jax.Array:
    """y_t = b_t + c_t y_{t+1}: composes the maps y -> b + c y."""

    def compose(current, right):
        return current[0] + current[1] * right[0], current[1] * right[1]

    return _doublings(compose, (b, c), (0.0, 1.0))[0]


def _sum(x, decay, chosen, exists) -> jax.Array:
    """x_t + decay_t y_{t+}; a token that was not chosen passes y on."""
    decay = jnp.where(chosen, decay if exists is None else jnp.where(exists, decay, 0.0), 1.0)
    return jnp.where(chosen, _linear(jnp.where(chosen, x, 0.0), decay), 0.0)


def doubled_next(x, mask, ids) -> jax.Array:
    """`next_chosen` by doublings: [B, S]."""
    return _next_and_same(x, mask, ids)[0]


def doubled_sum(x, decay, mask, ids) -> jax.Array:
    """`discounted_sum` by doublings: [B, S]."""
    exists = None if ids is None else _next_and_same(x, mask, ids)[1]
    return _sum(x, decay, mask > 0, exists)


def doubled_gae(rewards, values, mask, ids, gamma, lam) -> tuple[jax.Array, jax.Array]:
    """`gae` by doublings: [B, S] each."""
    chosen = mask > 0
    value_next, exists = _next_and_same(values, mask, ids)
    advantages = _sum(rewards + gamma * value_next - values, gamma * lam, chosen, exists)
    return advantages, jnp.where(chosen, advantages + values, 0.0)
