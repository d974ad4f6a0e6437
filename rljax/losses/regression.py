"""Losses that regress a sequence's log-ratio on a target: FlowRL's balance, A*PO's advantage.

Both take one array beside the batch, (policy, batch, array [B], **options) -> (loss [B], metrics):
a loss of one's own passes it, for instance the output of a head. Rows are unpacked.
"""

import jax
import jax.numpy as jnp

from rljax import batch as batches
from rljax.batch import Batch
from rljax.losses.policy.common import Policy


def _constant(x: jax.Array, batch: Batch) -> jax.Array:
    return jax.lax.stop_gradient(jnp.where(batch.mask > 0, x, 0.0))


def trajectory_balance(
    policy: Policy,
    batch: Batch,
    log_z: jax.Array,
    *,
    beta: float = 15.0,
    weight_max: float = 10.0,
):
    """w (log Z + mean log pi - beta mean A - mean log ref)^2, w = min(prod r, weight_max): [B].

    FlowRL, arXiv 2509.15207: pi matches ref exp(beta reward) / Z instead of maximising it; means
    run over the policy tokens of a row, A is the normalised reward, and log_z [B], which a head
    predicts from the prompt, gets a gradient too. Metrics: balance_weight, balance_residual.
    """
    by = "trajectory_balance"
    batch.require("old_logprobs", "ref_logprobs", "advantages", by=by)
    count = jnp.maximum(jnp.sum(batch.mask, axis=1), 1)
    return _balance(policy, batch, log_z, beta, weight_max, count)


def _balance(policy, batch, log_z, beta: float, weight_max: float, count: jax.Array):
    """trajectory_balance whose means divide by count [B]."""
    logprobs = jnp.where(batch.mask > 0, policy.logprobs, 0.0)

    def mean(x):
        return batches.row_sum(x, batch) / count

    reward = beta * mean(_constant(batch.advantages, batch))
    residual = log_z + mean(logprobs) - reward - mean(_constant(batch.ref_logprobs, batch))
    total = batches.row_sum(logprobs - _constant(batch.old_logprobs, batch), batch)
    weight = jax.lax.stop_gradient(jnp.minimum(jnp.exp(jnp.minimum(total, 20.0)), weight_max))
    metrics = {"balance_weight": weight, "balance_residual": jnp.abs(residual)}
    return weight * residual**2, metrics


def optimal_advantage(
    policy: Policy, batch: Batch, optimal_value: jax.Array, *, beta: float = 1e-3
):
    """(beta (log pi(y) - log ref(y)) - (reward - V*))^2, V* [B] of the prompt: [B].

    A*PO, arXiv 2505.20686: least squares on the optimal advantage; V* is estimated beforehand from
    samples of the reference. Metrics: implicit_reward, optimal_advantage.
    """
    batch.require("ref_logprobs", "rewards", by="optimal_advantage")
    ratio = batches.row_sum(policy.logprobs, batch)
    ratio = ratio - jax.lax.stop_gradient(batches.row_sum(batch.ref_logprobs, batch))
    target = jax.lax.stop_gradient(batches.row_scores(batch) - optimal_value)
    metrics = {"implicit_reward": beta * ratio, "optimal_advantage": target}
    return (beta * ratio - target) ** 2, metrics
