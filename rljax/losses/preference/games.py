"""Preference optimisation as a game against another policy: SPPO, XPO, Nash-MD.

Rows are samples of the present policy or an opponent's; batch.scores holds win probabilities or
rewards. Axes: B rows, S tokens, N = B/2 pairs: rows 2i (chosen) and 2i + 1 (rejected).
"""

from typing import Literal

import jax
import jax.numpy as jnp

from rljax import batch as batches
from rljax.batch import Batch
from rljax.contracts import AboveZero, NotNegative, contract
from rljax.errors import InputError
from rljax.losses.policy import PolicyOutputs
from rljax.losses.preference.common import (
    constant_scores,
    log_ratios,
    log_sigmoid_smoothed,
    one_of,
    pair_metrics,
    positive,
    rows_of,
    sequence_logprobs,
)
from rljax.losses.reward_model import METRICS as OF_REWARD_MODELS
from rljax.metric import Metric

METRICS = {
    "score": OF_REWARD_MODELS["score"],
    "log_ratio": Metric("log policy - log reference of a sample", "nats"),
    "target": Metric("what log_ratio is regressed on", "nats"),
    "dpo_loss": Metric(
        "the contrast between the two completions, without the bonus (xpo)", "", "falls"
    ),
    "exploration": Metric("the bonus for what the reference would not write (xpo)"),
    "win_probability": Metric(
        "chance that the sample beats the opponent's (nash_md)", "share", "rises above 0.5"
    ),
}


@contract(safe=True, reads=("ref_logprobs", "scores"), rows=2, scores_of_samples=True)
def sppo(policy: PolicyOutputs, batch: Batch, *, eta: AboveZero = 1e3):
    """[(Delta_w - eta (P_w - 1/2))^2 + (Delta_l - eta (P_l - 1/2))^2] / 2: [N].

    SPPO, arXiv 2405.00675. P = batch.scores: the row's probability of winning against the policy.
    The reference is the previous iterate, eta = 1/beta. rewards/* are Delta / eta.
    """
    positive("eta", eta, by="sppo")
    ratios = log_ratios(policy, batch, by="sppo")
    residual = ratios - eta * (constant_scores(batch, by="sppo") - 0.5)
    loss = 0.5 * sum(rows_of(residual**2, 2, by="sppo"))
    rewards = rows_of(ratios / eta, 2, by="sppo")
    return loss, pair_metrics(rewards, rows_of(sequence_logprobs(policy, batch), 2, by="sppo"))


def soft_mean(
    rewards: jax.Array,
    beta: float = 1.0,
    kind: Literal["log_mean_exp", "weighted_mean"] = "log_mean_exp",
) -> jax.Array:
    """Returns the term in place of beta log Z in SPPO (arXiv 2405.00675), over all rewards [B]: a
    scalar.

    log_mean_exp: log(mean exp(beta R)) / beta; weighted_mean: sum R exp(beta R) / sum exp(beta R).
    Both are the mean at beta = 0. Run it over the whole rollout, not a microbatch.
    """
    one_of("kind", kind, ("log_mean_exp", "weighted_mean"), by="soft_mean")
    if kind == "weighted_mean" or beta == 0:
        return jnp.sum(jax.nn.softmax(beta * rewards) * rewards)
    return (jax.nn.logsumexp(beta * rewards) - jnp.log(rewards.shape[0])) / beta


@contract(safe=True, reads=("old_logprobs", "scores"), scores_of_samples=True)
def sppo_online(policy: PolicyOutputs, batch: Batch, *, eta: AboveZero = 1.0):
    """(Delta - eta R)^2, Delta = log pi(y|x) - log pi_old(y|x), R = batch.scores, centred: [B].

    SPPO on every sample of a rollout (arXiv 2405.00675): R is the reward less soft_mean of all, or
    the win probability less 1/2. Metrics: log_ratio, target.
    """
    by = "sppo_online"
    batch.require("old_logprobs", by=by)
    target = positive("eta", eta, by=by) * constant_scores(batch, by=by)
    old_logps = jax.lax.stop_gradient(batches.row_sum(batch.old_logprobs, batch))
    ratios = sequence_logprobs(policy, batch) - old_logps
    return (ratios - target) ** 2, {"log_ratio": ratios, "target": target}


@contract(safe=True, reads=("ref_logprobs",), rows=2)
def xpo(
    policy: PolicyOutputs,
    batch: Batch,
    chosen_is_policy: jax.Array,
    *,
    beta: float = 0.1,
    alpha: NotNegative = 1e-5,
    loss: Literal["sigmoid", "ipo"] = "sigmoid",
):
    """-log sigmoid(beta (Delta_w - Delta_l)) + alpha log pi(y_ref): [N].

    XPO, arXiv 2405.21046: a pair is a sample of the policy and one of the reference; the bonus
    pushes the policy away from what the reference writes. chosen_is_policy [N]: true where the
    policy's sample won. loss="ipo": (Delta_w - Delta_l - 1/(2 beta))^2. Metrics besides the pair's:
    dpo_loss, exploration. Raises InputError unless there is one chosen_is_policy for each pair.
    """
    by = "xpo"
    positive("beta", beta, by=by)
    one_of("loss", loss, ("sigmoid", "ipo"), by=by)
    logps = rows_of(sequence_logprobs(policy, batch), 2, by=by)
    ratios = rows_of(log_ratios(policy, batch, by=by), 2, by=by)
    if chosen_is_policy.shape != logps[0].shape:
        raise InputError(
            "xpo(chosen_is_policy)",
            value=chosen_is_policy.shape,
            rule=f"{logps[0].shape}: one per pair",
            fix="give one bool for each pair: whether the policy wrote the chosen response",
        )
    gap = ratios[0] - ratios[1]
    contrast = (gap - 1 / (2 * beta)) ** 2 if loss == "ipo" else log_sigmoid_smoothed(beta * gap)
    bonus = alpha * jnp.where(chosen_is_policy > 0, logps[1], logps[0])
    metrics = pair_metrics(tuple(beta * x for x in ratios), logps)
    return contrast + bonus, metrics | {"dpo_loss": contrast, "exploration": bonus}


@contract(safe=True, reads=("ref_logprobs", "scores"), scores_of_samples=True)
def nash_md(policy: PolicyOutputs, batch: Batch, *, beta: float = 0.1):
    """beta sum_t sg(log pi - log ref) log pi - (P - 1/2) log pi(y|x): [B].

    Nash-MD, arXiv 2312.00886: REINFORCE on the probability P = batch.scores of beating a sample of
    the mixture of policy and reference, 1/2 being its baseline, with a KL by REINFORCE, token by
    token. Metrics: score, kl, win_probability.
    """
    by = "nash_md"
    probability = constant_scores(batch, by=by)
    batch.require("ref_logprobs", by=by)
    score = (probability - 0.5) * sequence_logprobs(policy, batch)
    log_ratio = jax.lax.stop_gradient(policy.logprobs - batch.ref_logprobs)
    # Selected before the product: the gradient of garbage times log pi would be garbage.
    log_ratio = jnp.where(batch.mask > 0, log_ratio, 0.0)
    kl_loss = batches.row_sum(log_ratio * policy.logprobs, batch)
    metrics = {"score": score, "kl": jnp.sum(log_ratio, axis=1), "win_probability": probability}
    return beta * kl_loss - score, metrics
