"""Losses of single rows that are labelled desirable or not: KTO, APO-zero unpaired, BCO.

A row is desirable where batch.scores > 0. What these losses compare a row with, KTO's KL and BCO's
running mean, is one number beside the batch: the dataflow computes it and keeps it. Axes: B rows,
S tokens.
"""

import jax
import jax.numpy as jnp

from rljax.batch import Batch
from rljax.contracts import AboveZero, NotNegative, contract
from rljax.errors import InputError
from rljax.losses.policy import PolicyOutputs
from rljax.losses.preference.common import (
    LabelledRewards,
    constant_scores,
    labelled_metrics,
    log_ratios,
    positive,
)
from rljax.metric import Metric

METRICS = {
    "delta": Metric(
        "running mean of implicit rewards that good completions are to exceed (bco)", "", "steady"
    )
}


def mismatched_kl(logprobs: jax.Array, batch: Batch) -> jax.Array:
    """z0 = max(0, mean of Delta over the rows), no gradient: a scalar; KTO, arXiv 2402.01306.

    The rows are prompts with answers of other prompts; logprobs [B, S] and batch.ref_logprobs
    describe those. Rows without policy tokens do not count; no row at all gives 0.
    """
    ratios = log_ratios(PolicyOutputs(logprobs, logprobs), batch, by="mismatched_kl")
    counted = jnp.any(batch.mask > 0, axis=1)
    mean = jnp.sum(jnp.where(counted, ratios, 0.0)) / jnp.maximum(jnp.sum(counted), 1)
    return jax.lax.stop_gradient(jnp.maximum(mean, 0.0))


def running_mean(mean, count, step_mean, step_count):
    """Returns (mean, count) over the values seen before and this step's values, all scalars.

    BCO's delta (arXiv 2404.04656) is the mean that includes the present step's rewards. Start from
    (0, 0); a step of count 0 changes nothing.
    """
    total = count + step_count
    return mean + (step_mean - mean) * step_count / jnp.maximum(total, 1), total


def _labelled(policy: PolicyOutputs, batch: Batch, beta: float, *, by: str) -> LabelledRewards:
    desirable = constant_scores(batch, by=by) > 0
    return LabelledRewards(beta * log_ratios(policy, batch, by=by), desirable)


@contract(safe=True, reads=("ref_logprobs", "scores"))
def kto(
    policy: PolicyOutputs,
    batch: Batch,
    kl: jax.Array | float,
    *,
    beta: float = 0.1,
    desirable_weight: NotNegative = 1.0,
    undesirable_weight: NotNegative = 1.0,
):
    """w_D sigmoid(beta (kl - Delta)) at desirable rows, w_U sigmoid(beta (Delta - kl)) at others.

    The loss is [B]. KTO, arXiv 2402.01306 (1 - sigmoid(x) is sigmoid(-x)). kl: mismatched_kl, a
    scalar or [B], without gradient. Keep w_D n_D : w_U n_U between 1:1 and 4:3. Metrics: kl,
    rewards, and those of labelled_metrics.
    """
    rows = _labelled(policy, batch, positive("beta", beta, by="kto"), by="kto")
    kl = jnp.broadcast_to(jax.lax.stop_gradient(jnp.asarray(kl)), rows.rewards.shape)
    gap = rows.rewards - beta * kl
    loss = jax.nn.sigmoid(jnp.where(rows.desirable, -gap, gap))
    loss = loss * jnp.where(rows.desirable, desirable_weight, undesirable_weight)
    return loss, labelled_metrics(rows) | {"kl": kl}


@contract(safe=True, reads=("ref_logprobs", "scores"))
def apo_zero_unpaired(
    policy: PolicyOutputs,
    batch: Batch,
    *,
    beta: float = 0.1,
    desirable_weight: NotNegative = 1.0,
    undesirable_weight: NotNegative = 1.0,
):
    """w_D sigmoid(-beta Delta) at desirable rows, w_U sigmoid(beta Delta) at the others: [B].

    APO-zero, arXiv 2408.06266, of single rows: KTO whose KL is 0. Metrics: labelled_metrics.
    """
    loss, metrics = kto(
        policy,
        batch,
        0.0,
        beta=beta,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )
    return loss, {name: value for name, value in metrics.items() if name != "kl"}


@contract(safe=True, reads=("ref_logprobs", "scores"))
def bco(
    policy: PolicyOutputs,
    batch: Batch,
    delta: jax.Array | float,
    desirable_probability: jax.Array | None = None,
    *,
    beta: float = 0.1,
    min_density_ratio: NotNegative = 0.5,
    max_density_ratio: AboveZero = 10.0,
):
    """-log sigmoid(+-(beta Delta - delta)), + at desirable rows: [B].

    BCO, arXiv 2404.04656: a classifier of the two kinds. delta: running_mean of the rewards, this
    step's included, without gradient. desirable_probability [B], of a classifier of prompts, weighs
    undesirable rows by p / (1 - p) between the two bounds, where the kinds have other prompts.
    Metrics: delta, rewards, and those of labelled_metrics. Raises InputError unless
    0 <= min_density_ratio <= max_density_ratio, and where the batch has no scores or ref_logprobs.
    """
    if not 0 <= min_density_ratio <= max_density_ratio:
        raise InputError(
            "bco(min_density_ratio)",
            value=min_density_ratio,
            rule=f"0 to max_density_ratio, {max_density_ratio}",
            fix="lower min_density_ratio, or raise max_density_ratio",
        )
    rows = _labelled(policy, batch, positive("beta", beta, by="bco"), by="bco")
    delta = jax.lax.stop_gradient(jnp.asarray(delta))
    gap = rows.rewards - delta
    loss = -jax.nn.log_sigmoid(jnp.where(rows.desirable, gap, -gap))
    if desirable_probability is not None:
        odds = desirable_probability / jnp.maximum(1 - desirable_probability, 1e-12)
        weight = jnp.clip(jax.lax.stop_gradient(odds), min_density_ratio, max_density_ratio)
        loss = jnp.where(rows.desirable, 1.0, weight) * loss
    delta = jnp.broadcast_to(delta, loss.shape)
    return loss, labelled_metrics(rows) | {"delta": delta}
