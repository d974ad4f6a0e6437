"""Advantage estimators: batch -> advantages [B, S], or (advantages, returns). No gradient.

What lives here: functions of rewards, values, mask and group alone. All outputs are 0 where mask is
0.
"""

import jax
import jax.numpy as jnp

from rljax import batch as batches
from rljax.batch import Batch
from rljax.errors import InputError


def gae(batch: Batch, *, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True):
    """delta_t = r_t + gamma V_{t+} - V_t; A_t = delta_t + gamma lam A_{t+}; returns = A + V.

    t+ is the next token the policy chose in the same segment; V and A are 0 after the last one
    (arXiv 1506.02438). `whiten` normalises the advantages (not the returns) over the whole batch.
    """
    batch.require("rewards", "values", by="gae")
    keep = batch.mask > 0
    rewards = jnp.where(keep, batch.rewards, 0.0)
    values = jnp.where(keep, batch.values, 0.0)
    delta = rewards + gamma * batches.next_policy_token(values, batch) - values

    def step(carry, column):
        advantage, segment = carry
        delta_t, keep_t, id_t = column
        following = jnp.where(segment == id_t, advantage, 0.0)
        here = delta_t + gamma * lam * following
        # A token that the policy did not choose hands on what it was handed.
        carry = (jnp.where(keep_t, here, advantage), jnp.where(keep_t, id_t, segment))
        return carry, jnp.where(keep_t, here, 0.0)

    rows = batch.rows
    start = (jnp.zeros((rows,), delta.dtype), jnp.full((rows,), -1, batch.segment_ids.dtype))
    columns = (delta.T, keep.T, batch.segment_ids.T)
    _, advantages = jax.lax.scan(step, start, columns, reverse=True, unroll=8)
    advantages = advantages.T
    returns = jnp.where(keep, advantages + values, 0.0)
    if whiten:
        advantages = batches.whiten(advantages, batch.mask)
    return jax.lax.stop_gradient((advantages, returns))


def group_statistics(scores: jax.Array, group: jax.Array, counts: jax.Array):
    """Mean, sum of squared deviations and size of each row's group: scores, group, counts [B] ->
    three [B].

    `counts` is 1 for rows that belong to the statistics. Groups may have any ids, order and sizes.
    """
    same = (group[:, None] == group[None, :]).astype(scores.dtype) * counts[None, :]
    size = jnp.sum(same, axis=1)
    mean = jnp.sum(same * scores[None, :], axis=1) / jnp.maximum(size, 1)
    # Deviations are taken row by row before squaring: sum(x^2) - n mean^2 loses all digits near 0.
    centred = scores[None, :] - mean[:, None]
    return mean, jnp.sum(same * centred**2, axis=1), size


def group_relative(batch: Batch, *, std: str = "sample", eps: float = 1e-6) -> jax.Array:
    """A = (score - mean of its group) / (std of its group + eps), on every policy token: [B, S].

    GRPO, arXiv 2402.03300. std: "sample" (n - 1), "population" (n), or "none" (Dr. GRPO,
    2503.20783).
    A group of one and a group of equal scores give exactly 0.
    """
    batch.require("rewards", "group", by="group_relative")
    if std not in ("sample", "population", "none"):
        raise InputError("group_relative(std)", value=std, rule='"sample", "population" or "none"')
    scores = batches.row_sum(batch.rewards, batch)
    mean, squares, size = group_statistics(scores, batch.group, jnp.ones_like(scores))
    advantages = scores - mean
    if std != "none":
        divisor = size - 1 if std == "sample" else size
        advantages = advantages / (jnp.sqrt(squares / jnp.maximum(divisor, 1)) + eps)
    same = batch.group[:, None] == batch.group[None, :]
    live = jnp.any(same & (scores[:, None] != scores[None, :]), axis=1)
    advantages = jnp.where(live, advantages, 0.0)
    return jax.lax.stop_gradient(jnp.where(batch.mask > 0, advantages[:, None], 0.0))
