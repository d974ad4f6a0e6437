"""Training an implicit process reward model: beta (log pi - log ref) of each token is its reward.

Only outcome labels are needed (PRIME, arXiv 2502.01456; Yuan et al., arXiv 2412.01981). A row
is right where batch.scores > 0. PRIME's advantages: rljax.advantages.prime. Axes: B rows, S
tokens. The losses raise InputError where the batch lacks ref_logprobs, scores or, for the
contrast, the group.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from rljax.batch import Batch
from rljax.contracts import contract
from rljax.losses.policy import PolicyOutputs
from rljax.losses.preference.common import (
    constant_scores,
    log_ratios,
    log_sigmoid_smoothed,
    one_of,
    positive,
)
from rljax.losses.reward_model import METRICS as OF_REWARD_MODELS
from rljax.metric import Metric

METRICS = {
    "accuracy": OF_REWARD_MODELS["accuracy"],
    "implicit_reward": Metric(
        "implicit reward of the samples, beta times log policy - log reference", "nats x beta"
    ),
    "group_accuracy": Metric(
        "pairs of a prompt's samples that the implicit reward orders as the scores do",
        "share",
        "rises above 0.5",
    ),
}


@contract(reads=("ref_logprobs", "scores"))
def implicit_reward_classification(policy: PolicyOutputs, batch: Batch, *, beta: float = 0.05):
    """-log sigmoid(+-q), q = beta (log pi(y|x) - log ref(y|x)), + at right rows: [B].

    Metrics: implicit_reward (q), accuracy (the sign of q).
    """
    by = "implicit_reward_classification"
    reward = positive("beta", beta, by=by) * log_ratios(policy, batch, by=by)
    is_right = constant_scores(batch, by=by) > 0
    loss = log_sigmoid_smoothed(jnp.where(is_right, reward, -reward))
    return loss, _metrics(reward, is_right)


@contract(reads=("ref_logprobs", "scores", "group"), whole_step=True)
def implicit_reward_contrast(
    policy: PolicyOutputs,
    batch: Batch,
    *,
    beta: float = 0.05,
    weighting: Literal["none", "labels", "rewards"] = "none",
):
    """-w log sigmoid(+-(q_i - q')), + at right rows: [B].

    q' is the mean q, without gradient, of the rows of i's group with the opposite label, 0 if there
    are none. DPO against the group, as PRIME trains its reward model (arXiv 2502.01456). weighting:
    w is the density of being the best of the group's n rows, n F(i)^(n - 1), F the share of the
    group whose label, or whose q, is no higher. Metrics: implicit_reward, accuracy (the sign of q),
    group_accuracy (pairs of the group with different labels that q orders rightly, 1/2 if none).
    """
    by = "implicit_reward_contrast"
    one_of("weighting", weighting, ("none", "labels", "rewards"), by=by)
    batch.require("group", by=by)
    reward = positive("beta", beta, by=by) * log_ratios(policy, batch, by=by)
    label = constant_scores(batch, by=by)
    constant = jax.lax.stop_gradient(reward)
    siblings = batch.group[:, None] == batch.group[None, :]
    is_right = label > 0
    opposite = siblings & (is_right[:, None] != is_right[None, :])
    opposite_mean = _row_mean(jnp.broadcast_to(constant[None, :], opposite.shape), opposite)
    gap = reward - opposite_mean
    loss = log_sigmoid_smoothed(jnp.where(is_right, gap, -gap))
    if weighting != "none":
        by_value = label if weighting == "labels" else constant
        size = jnp.sum(siblings, axis=1).astype(loss.dtype)
        share = jnp.sum(siblings & (by_value[None, :] <= by_value[:, None]), axis=1) / size
        loss = loss * size * share ** (size - 1)
    metrics = _metrics(reward, is_right)
    metrics["group_accuracy"] = group_accuracy(constant, batch, by=by)
    return loss, metrics


def group_accuracy(rewards: jax.Array, batch: Batch, *, by: str = "group_accuracy") -> jax.Array:
    """Returns the share of the pairs of a row's group with different labels that `rewards` [B]
    order rightly, 1/2 where there are none, at every row of the group: [B]."""
    batch.require("group", by=by)
    is_right = constant_scores(batch, by=by) > 0
    siblings = batch.group[:, None] == batch.group[None, :]
    # Pairs (right row, wrong row): each pair with different labels once.
    pairs = siblings & is_right[:, None] & ~is_right[None, :]
    ordered = pairs & (rewards[:, None] > rewards[None, :])

    def count(x):
        return jnp.sum(jnp.where(siblings, jnp.sum(x, axis=1)[None, :], 0), axis=1)

    total = count(pairs)
    return jnp.where(total > 0, count(ordered) / jnp.maximum(total, 1), 0.5)


def _row_mean(x: jax.Array, counted: jax.Array) -> jax.Array:
    """Returns the mean over axis 1 of what is counted, 0 where nothing is."""
    return jnp.sum(jnp.where(counted, x, 0.0), axis=1) / jnp.maximum(jnp.sum(counted, axis=1), 1)


def _metrics(reward: jax.Array, is_right: jax.Array) -> dict[str, jax.Array]:
    correct = ((reward > 0) == is_right).astype(reward.dtype)
    return {"implicit_reward": jax.lax.stop_gradient(reward), "accuracy": correct}
