"""Preference losses without a reference model: SimPO, CPO, ORPO, TPO.

Three of them add a supervised term that is a mean over all tokens of the optimizer step, and
declare `whole_step`. Axes: B rows, S tokens, K rows per example, N = B/K examples.
"""

import jax
import jax.numpy as jnp

from rljax.batch import Batch
from rljax.contracts import NotNegative, PlainText, contract
from rljax.losses.policy import PolicyOutputs
from rljax.losses.preference.common import (
    label_noise,
    log_sigmoid_smoothed,
    one_of,
    pair_metrics,
    positive,
    row_tokens,
    rows_of,
    sequence_logprobs,
    step_token_mean,
)
from rljax.metric import Metric

METRICS = {
    "nll": Metric(
        "-log-probability of the better completion, the supervised term", "nats per token", "falls"
    ),
    "log_odds": Metric("log-odds of the better completion over the worse (orpo)", "nats", "rises"),
    "log_odds_ratio": Metric("log sigmoid of log_odds (orpo)", "nats", "rises to 0"),
}

CONTRASTS = ("sigmoid", "hinge", "ipo", "simpo")
LENGTH_MEANS = ("ipo", "simpo")  # these compare log pi / |y|


def _rewards_of(logps: jax.Array, alpha: float) -> jax.Array:
    """Returns (1 - p^-alpha) / alpha, whose limit at alpha = 0 is log p: AlphaPO, arXiv
    2501.03884."""
    if alpha == 0:
        return logps
    exponent = -alpha * logps
    # exp stops before float32 overflows: a long answer has a tiny p.
    return (1 - jnp.exp(jnp.where(exponent > 80.0, 80.0, exponent))) / alpha


def _contrast(loss: str, chosen, rejected, beta, label_smoothing, gamma) -> jax.Array:
    """Returns the pairwise loss of two rewards, which are made of (length means of) log-probs:
    [N]."""
    gap = chosen - rejected
    if loss == "hinge":
        return jax.nn.relu(1 - beta * gap)
    if loss == "ipo":
        return (gap - 1 / (2 * beta)) ** 2
    margin = gamma if loss == "simpo" else 0.0
    return log_sigmoid_smoothed(beta * gap - margin, label_smoothing)


def _logps(policy: PolicyOutputs, batch: Batch, loss: str) -> jax.Array:
    """Returns log pi(y|x), or its mean per token where the loss compares those: [B]."""
    logps = sequence_logprobs(policy, batch)
    return logps / row_tokens(batch) if loss in LENGTH_MEANS else logps


@contract(safe=True, rows=2)
def simpo(
    policy: PolicyOutputs,
    batch: Batch,
    *,
    beta: float = 2.0,
    gamma: NotNegative = 1.0,
    label_smoothing: float = 0.0,
    alpha: NotNegative = 0.0,
):
    """-log sigmoid(beta (log pi(y_w)/|y_w| - log pi(y_l)/|y_l|) - gamma): [N].

    SimPO, arXiv 2405.14734. alpha != 0: rewards (1 - p^-alpha)/alpha of the mean token probability
    p instead of log p (AlphaPO, arXiv 2501.03884). logps/* are means per token.
    """
    positive("beta", beta, by="simpo")
    label_noise(label_smoothing, by="simpo")
    logps = rows_of(_logps(policy, batch, "simpo"), 2, by="simpo")
    rewards = tuple(_rewards_of(x, alpha) for x in logps)
    loss = _contrast("simpo", *rewards, beta, label_smoothing, gamma)
    return loss, pair_metrics(tuple(beta * x for x in rewards), logps)


@contract(safe=True, rows=2, whole_step=True)
def cpo(
    policy: PolicyOutputs,
    batch: Batch,
    *,
    beta: float = 0.1,
    loss: PlainText = "sigmoid",
    nll_coef: NotNegative = 1.0,
    label_smoothing: float = 0.0,
    gamma: NotNegative = 0.5,
    alpha: NotNegative = 0.0,
):
    """-log sigmoid(beta (log pi(y_w) - log pi(y_l))) + nll_coef nll: [N].

    CPO, arXiv 2401.08417; nll is the mean of -log pi over all chosen tokens of the step. loss:
    sigmoid, hinge, ipo (length means), or simpo (CPO-SimPO; reads gamma). nll_coef=0 is DPO without
    a reference. alpha as in simpo. logps/* are means per token for ipo and simpo. Metrics besides
    the pair's: nll.
    """
    by = "cpo"
    positive("beta", beta, by=by)
    label_noise(label_smoothing, by=by)
    one_of("loss", loss, CONTRASTS, by=by)
    logps = rows_of(_logps(policy, batch, loss), 2, by=by)
    rewards = tuple(_rewards_of(x, alpha) for x in logps)
    contrast = _contrast(loss, *rewards, beta, label_smoothing, gamma)
    chosen = rows_of(batch.mask > 0, 2, by=by)[0]
    nll = step_token_mean(-rows_of(policy.logprobs, 2, by=by)[0], chosen, batch, 2, by=by)
    metrics = pair_metrics(tuple(beta * x for x in rewards), logps) | {"nll": nll}
    return contrast + nll_coef * nll, metrics


def _log_odds(mean_logps: jax.Array) -> jax.Array:
    """Returns log(p / (1 - p)) of p = exp(x), x held below 0: an empty response has p = 1."""
    bounded = jnp.where(mean_logps > -1e-7, -1e-7, mean_logps)
    return bounded - jnp.log(-jnp.expm1(bounded))


@contract(safe=True, rows=2, whole_step=True)
def orpo(policy: PolicyOutputs, batch: Batch, *, beta: float = 0.1, prompt_nll: bool = True):
    """-beta log sigmoid(log odds(y_w) - log odds(y_l)) + mean of -log pi over the chosen rows: [N].

    ORPO, arXiv 2403.07691: odds = p / (1 - p), p = exp(log pi(y)/|y|). The mean runs over all
    tokens of the step's chosen rows, prompts too (all but a segment's first token, which nothing
    predicts), so policy.logprobs must hold at every token; prompt_nll=False: over policy tokens
    alone. logps/* are means per token. Metrics besides the pair's: nll, log_odds_ratio
    (log sigmoid), log_odds.
    """
    by = "orpo"
    positive("beta", beta, by=by)
    logps = rows_of(sequence_logprobs(policy, batch) / row_tokens(batch), 2, by=by)
    log_odds = _log_odds(logps[0]) - _log_odds(logps[1])
    ratio = jax.nn.log_sigmoid(log_odds)
    counted = batch.mask > 0
    if prompt_nll:
        counted = counted | ((batch.segment_ids > 0) & (batch.positions > 0))
    nll = -rows_of(policy.logprobs, 2, by=by)[0]
    nll = step_token_mean(nll, rows_of(counted, 2, by=by)[0], batch, 2, by=by)
    metrics = pair_metrics(tuple(beta * x for x in logps), logps)
    metrics |= {"nll": nll, "log_odds_ratio": ratio, "log_odds": log_odds}
    return nll - beta * ratio, metrics


@contract(safe=True, rows=3, whole_step=True)
def tpo(
    policy: PolicyOutputs,
    batch: Batch,
    *,
    beta: float = 0.01,
    loss: PlainText = "sigmoid",
    nll_coef: NotNegative = 1.0,
    label_smoothing: float = 0.0,
    gamma: NotNegative = 0.5,
):
    """-log sigmoid(beta (log pi(y_w) - log pi(y_l))) + nll_coef nll: [N].

    TPO, arXiv 2405.16681: triples, rows 3i (gold), 3i + 1 (chosen), 3i + 2 (rejected); nll is the
    mean of -log pi over all tokens of the gold rows of the step. loss:
    sigmoid, hinge, ipo (length means), or simpo, which is TPO-L: length means and the margin gamma.
    logps/* are means per token for ipo and simpo. Metrics besides the pair's: nll.
    """
    by = "tpo"
    positive("beta", beta, by=by)
    label_noise(label_smoothing, by=by)
    one_of("loss", loss, CONTRASTS, by=by)
    logps = rows_of(_logps(policy, batch, loss), 3, by=by)[1:]
    contrast = _contrast(loss, *logps, beta, label_smoothing, gamma)
    gold = rows_of(batch.mask > 0, 3, by=by)[0]
    nll = step_token_mean(-rows_of(policy.logprobs, 3, by=by)[0], gold, batch, 3, by=by)
    metrics = pair_metrics(tuple(beta * x for x in logps), logps) | {"nll": nll}
    return contrast + nll_coef * nll, metrics
