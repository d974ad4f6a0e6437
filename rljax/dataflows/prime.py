"""PRIME: a reward of every token, by a model that learns beside the policy from outcomes alone
(arXiv 2502.01456)."""

import functools
from typing import Literal

import jax.numpy as jnp

from rljax import batch as batches
from rljax.advantages.grouping import dense_ids, group_statistics
from rljax.contracts import AboveZero, contract
from rljax.dataflows.grpo import grpo
from rljax.dataflows.steps import filter_baseline_rows
from rljax.learn.reductions import seq_mean_token_mean
from rljax.losses.implicit_reward import group_accuracy, implicit_reward_classification
from rljax.metric import Metric
from rljax.roles import program

METRICS = {
    "process_share": Metric(
        "how far the implicit rewards of a prompt's samples lie apart, as a part of that and the "
        "outcomes' distance: both at equal coefficients",
        "share",
        "above 0.01; at 0 the implicit model says nothing",
    )
}


@contract(
    safe=True, reads=("rewards", "scores", "group"), fills=("process_rewards",), one_version=True
)
@program
def prime(
    batch,
    key,
    cfg,
    *,
    actor,
    implicit,
    reference,
    kl_controller=None,
    entropy_controller=None,
    beta: AboveZero = 0.05,
    update: Literal["before", "after"] = "before",
):
    """process_rewards = beta (log pi_implicit - log ref), for algorithm.advantage="prime()".

    `implicit` takes its steps on the rows that algorithm.baseline_filters keep, before or after it
    gives the rewards of this batch. config.roles = ("implicit=trained_policy(lr=1e-6)",).
    """
    batch = batch.replace(ref_logprobs=reference.logprobs(batch, cfg.steps))
    rated = _rated(batch, implicit, cfg, beta)
    loss = functools.partial(implicit_reward_classification, beta=beta)
    options = dict(steps=cfg.steps, reduction=seq_mean_token_mean)
    implicit, metrics = implicit.update(filter_baseline_rows(batch, cfg), loss, **options)
    if update == "before":
        rated = _rated(batch, implicit, cfg, beta)
    rewards = jnp.sum(jnp.where(batch.mask > 0, rated.process_rewards, 0.0), axis=1)
    live = jnp.any(batch.mask > 0, axis=1)
    accuracy = group_accuracy(rewards, batch, by="prime")
    metrics["implicit/group_accuracy"] = batches.masked_mean(accuracy, live)
    ids = dense_ids(batch.group)
    spread = [
        jnp.sum(jnp.where(live, jnp.abs(x - group_statistics(x, ids, live).mean), 0.0))
        for x in (rewards, batch.scores)
    ]
    metrics["implicit/process_share"] = spread[0] / jnp.maximum(sum(spread), 1e-12)
    controllers = dict(kl_controller=kl_controller, entropy_controller=entropy_controller)
    roles, learned = grpo.page(rated, key, cfg, actor=actor, reference=reference, **controllers)
    return {**roles, "implicit": implicit}, {**learned, **metrics}


def _rated(batch, implicit, cfg, beta: float):
    """Returns the batch with the reward of every token."""
    gap = implicit.logprobs(batch, cfg.steps) - batch.ref_logprobs
    return batch.replace(process_rewards=jnp.where(batch.mask > 0, beta * gap, 0.0))
