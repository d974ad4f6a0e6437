"""Objectives of an actor's update: a policy loss, and further terms, over its model's outputs."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rljax.batch import observed_tokens
from rljax.contracts import spec
from rljax.learn import MetricAt, Objective
from rljax.losses.policy import PolicyOutputs
from rljax.losses.policy.common import constant, log_ratio
from rljax.metric import Metric
from rljax.roles.balance import balanced
from rljax.roles.targets import target_logprobs

METRICS = {
    "entropy": Metric(
        "how open the policy's choice of the next token is",
        "nats per token",
        "falls slowly; near 0 early on, the samples are all alike and learning stops",
    ),
    "observation_loss": Metric(
        "negative log-likelihood of what the environment said, before its coefficient",
        "nats per token",
        "falls, while episode/return rises",
    ),
}


def policy_objective(
    actor, loss: Callable, reduction: Callable, terms, shown, observation_coef=None
) -> Objective:
    """Returns the policy loss, which the rollout correction weighs, with further terms (reduction,
    function), which it does not. `shown` are functions whose values are metrics.

    `observation_coef`: times the mean of -log pi over what the environment said, of the optimizer
    step, is added (ECHO, arXiv 2605.24517); None: nothing. These tokens are in the mean of no other
    term, nor the policy's in that one. The log-probs are those at the sampling temperature.
    """

    def values(policy, batch):
        value, metrics = loss(policy, batch)
        metrics = {**metrics, "entropy": policy.entropy}
        if batch.old_logprobs is not None:
            d = log_ratio(policy, batch, by="update")
            # To the policy that the batch began with, whatever ratio the loss itself uses.
            metrics |= {"ppo_kl": -d, "ppo_k3": jnp.exp(d) - 1 - d}
        metrics |= {name: function(policy, batch) for name, function in shown.items()}
        losses = [value, *(function(policy, batch) for _, function in terms)]
        if observation_coef is not None:
            losses.append(-policy.logprobs)
            metrics["observation_loss"] = MetricAt(-policy.logprobs, observed_tokens(batch))
        return losses, metrics

    def observation_weights(batch):
        observed = observed_tokens(batch).astype(batch.mask.dtype)
        return observation_coef * observed / jnp.maximum(jnp.sum(observed), 1)

    declared = spec(loss)
    forward = actor.model.greedy if declared.reads_greedy else actor.model.logprobs
    if declared.reads_targets:
        forward = functools.partial(target_logprobs, actor.model)

    def policy(params, microbatch, hidden):
        return PolicyOutputs(*forward(params, microbatch, actor.temperature, hidden=hidden))

    reductions = [reduction, *(r for r, _ in terms)]
    tokens = [None] * len(reductions)
    if observation_coef is not None:
        reductions.append(observation_weights)
        tokens.append(observed_tokens)
    return Objective(
        **balanced(actor.model, policy),
        terms=values,
        reductions=tuple(reductions),
        corrected=(not declared.applies_weights, *(False for _ in reductions[1:])),
        tokens=tuple(tokens),
        whole_step=declared.whole_step,
        rows_per_example=declared.rows,
    )


def on_policy_objective(
    actor, loss: Callable, objective: Objective, given: jax.Array | None
) -> Objective:
    """Returns the objective whose old log-probs [B, S] are those of its own forward pass,
    which it keeps, with the load of experts. The reductions, which come before that pass,
    read those `given`."""

    def model(params, microbatch):
        if objective.sums:
            return objective.model(params, microbatch)
        if spec(loss).reads_greedy or spec(loss).reads_targets:
            return objective.model(params, microbatch), {}
        logprobs, entropy, load = actor.model.read(params, microbatch, actor.temperature)
        return PolicyOutputs(logprobs, entropy), load

    def terms(policy, batch):
        return objective.terms(policy, batch.replace(old_logprobs=constant(policy.logprobs, batch)))

    def reading(reduction):
        return lambda batch: reduction(batch.replace(old_logprobs=given))

    return dataclasses.replace(
        objective,
        model=model,
        terms=terms,
        reductions=tuple(reading(reduction) for reduction in objective.reductions),
        sums=True,
        keep=lambda policy: policy.logprobs,
    )
