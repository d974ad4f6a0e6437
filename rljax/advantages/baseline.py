"""The baseline per token that minimises the variance of the gradient. Rows must be unpacked."""

import jax
import jax.numpy as jnp

from rljax.advantages.grouping import choose, dense_ids, group_range, group_total
from rljax.advantages.groups import Singleton
from rljax.advantages.returns import discounted_sum
from rljax.batch import Batch
from rljax.contracts import NotNegative, contract


def _energy(batch: Batch) -> jax.Array:
    """W_t = sum over policy tokens j <= t of w_j^2 (1 - 2 pi_j + sum_v pi_v^2): [B, S].

    The bracket is the squared norm of the gradient of log pi_j with respect to its logits; w is
    the importance weight (`weights`), 1 where there is none.
    """
    is_policy = batch.mask > 0
    probability = jnp.exp(jnp.where(is_policy, batch.old_logprobs, 0.0))
    energy = 1 - 2 * probability + jnp.where(is_policy, batch.sum_pi_squared, 0.0)
    if batch.weights is not None:
        energy = energy * jnp.where(is_policy, batch.weights, 0.0) ** 2
    return jnp.cumsum(jnp.where(is_policy, energy, 0.0), axis=1)


@contract(
    safe=True,
    reads=("rewards", "group", "old_logprobs", "sum_pi_squared"),
    fills=(),
    compares_samples=True,
    token_rewards=True,
    single_rows=True,
)
def optimal_token_baseline(
    batch: Batch,
    *,
    multi_turn: bool = False,
    zero_tail: bool = True,
    eps: NotNegative = 1e-8,
    singleton: Singleton = "zero",
) -> jax.Array:
    """A_t = G_t - b_t, b_t = sum_i W_it G_it / (sum_i W_it + eps) over rows of the group: [B, S].

    G = rewards from t on; W = energy of the gradient up to t (see `_energy`). Steps are columns:
    the rows of a group share their prompt. `multi_turn` counts policy tokens alone, so that tool
    replies of unequal length do not move the steps apart. `zero_tail` takes no baseline at steps
    that only one row reaches. A group of one gets 0, or its G with `singleton="raw"`; returns of a
    step that are all equal give 0.
    """
    by = "optimal_token_baseline"
    batch.require("rewards", "group", "old_logprobs", "sum_pi_squared", by=by)
    choose(f"{by}(singleton)", singleton, ("zero", "raw"))
    is_policy = batch.mask > 0
    energy = _energy(batch)
    returns = discounted_sum(batch.rewards, batch, 1.0)
    columns = batch.tokens.shape[1]
    steps = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32)[None, :], is_policy.shape)
    if multi_turn:
        steps = jnp.cumsum(is_policy, axis=1, dtype=jnp.int32) - 1
    steps = jnp.where(is_policy, steps, columns)  # one column more takes tokens of no step

    def at_steps(x):
        def put(row, step):
            return jnp.zeros((columns + 1,), x.dtype).at[step].set(row)

        return jax.vmap(put)(x, steps)[:, :columns]

    def at_tokens(x):
        return jnp.take_along_axis(x, jnp.minimum(steps, columns - 1), axis=1)

    present = at_steps(is_policy.astype(returns.dtype))
    value, weight = at_steps(returns) * present, at_steps(energy) * present
    ids = dense_ids(batch.group)
    baseline = group_total(weight * value, ids) / (group_total(weight, ids) + eps)
    reached = group_total(present, ids)
    low, high = group_range(value, ids, present > 0)
    baseline = jnp.where((low == high) & (reached > 1), value, baseline)
    if zero_tail:
        baseline = jnp.where(reached == 1, 0.0, baseline)
    size = group_total(jnp.ones((batch.rows,), returns.dtype), ids)[:, None]
    singleton_value = returns if singleton == "raw" else jnp.zeros_like(returns)
    advantages = jnp.where(size > 1, returns - at_tokens(baseline), singleton_value)
    return jax.lax.stop_gradient(jnp.where(is_policy, advantages, 0.0))
