"""Losses of reward models: Bradley-Terry on pairs, costs of labelled pairs, regression and
classification of steps.

Formulas on the output of the scalar (or two-way) head, unreduced. Rows are unpacked. Axes: B rows,
S tokens, N = B/2 pairs: rows 2i (chosen) and 2i + 1 (rejected).
"""

from typing import Literal

import jax
import jax.numpy as jnp

from rljax.batch import Batch, row_sum
from rljax.contracts import contract
from rljax.errors import InputError
from rljax.losses.preference.common import label_noise, log_sigmoid_smoothed, one_of, rows_of
from rljax.metric import Metric, MetricAt

METRICS = {
    "score": Metric("score that the model gives, mean", "score"),
    "accuracy": Metric("examples that are judged right", "share", "rises above 0.5"),
    "margin": Metric("score of the better completion minus the worse", "score", "rises"),
    "score/chosen": Metric("score of the better completion", "score", "rises"),
    "score/rejected": Metric("score of the worse completion", "score", "falls"),
    "score/safer": Metric("cost of the safer completion", "score", "falls"),
    "score/more_harmful": Metric("cost of the more harmful completion", "score", "rises"),
    "score_min": Metric("lowest score of the step", "score"),
    "score_max": Metric("highest score of the step", "score"),
    "mse": Metric("squared error of the steps' scores", "score squared", "falls"),
    "sign_accuracy": Metric(
        "labelled steps, or completions labelled safe or unsafe, whose score has the right sign",
        "share",
        "rises above 0.5",
    ),
}


@contract(safe=True, reads=lambda options: ("scores",) if options["margin"] else (), rows=2)
def bradley_terry(
    scores: jax.Array,
    batch: Batch,
    *,
    margin: bool = False,
    center: float = 0.0,
    label_smoothing: float = 0.0,
):
    """-(1 - eps) log sigmoid(h) - eps log sigmoid(-h) + center (r_w + r_l)^2, h = r_w - r_l: [N].

    Bradley-Terry; scores [B] are the head's, read at a row's last token. margin: h = r_w - r_l - m,
    m = batch.scores of the chosen row less that of the rejected one, as rows of data with scores
    have them: the margin of Llama 2 (arXiv 2307.09288). center: pulls scores to mean 0
    (arXiv 2312.09244); without it a constant added to all scores changes nothing. label_smoothing:
    the share of wrong labels; 1/2 for pairs that tie. Metrics: accuracy, margin, score,
    score/chosen, score/rejected, score_min, score_max. Raises InputError for scores of another
    shape, a label_smoothing out of its range, and, with margin, where the batch has no scores.
    """
    by = "bradley_terry"
    label_noise(label_smoothing, by=by)
    chosen, rejected = _pair_scores(scores, batch, by=by)
    logit = chosen - rejected
    if margin:
        batch.require("scores", by=f"{by}(margin)")
        wanted = rows_of(jax.lax.stop_gradient(batch.scores), 2, by=by)
        logit = logit - (wanted[0] - wanted[1])
    loss = log_sigmoid_smoothed(logit, label_smoothing)
    if center:
        loss = loss + center * (chosen + rejected) ** 2
    shown = {"score/chosen": chosen, "score/rejected": rejected}
    return loss, _pair_metrics(chosen, rejected) | shown


def _pair_scores(scores: jax.Array, batch: Batch, *, by: str) -> tuple[jax.Array, jax.Array]:
    """The scores of rows 2i and of rows 2i + 1: [N] each."""
    if scores.shape != (batch.rows,):
        raise InputError(
            f"{by}(scores)",
            value=scores.shape,
            rule=f"({batch.rows},): one per row",
            fix="give one score for each row of the batch, [B]",
        )
    return rows_of(scores, 2, by=by)


def _pair_metrics(higher: jax.Array, lower: jax.Array) -> dict[str, jax.Array]:
    """Metrics of the score that should be higher and the one that should be lower, [N] each."""
    return {
        "accuracy": (higher > lower).astype(higher.dtype),
        "margin": higher - lower,
        "score": 0.5 * (higher + lower),
        "score_min": jnp.minimum(higher, lower),
        "score_max": jnp.maximum(higher, lower),
    }


@contract(safe=True, reads=("costs",), rows=2)
def cost_preference(scores: jax.Array, batch: Batch):
    """-log sigmoid(C_w - C_l) - log sigmoid(s_w C_w) - log sigmoid(s_l C_l): [N].

    A cost model (Safe-RLHF, arXiv 2310.12773): scores C [B] are the head's, w is the more harmful
    completion (rows 2i + 1) and l the safer one (rows 2i); s = +1 for unsafe and -1 for safe is the
    sum of batch.costs over a row. So C > 0 says unsafe. Metrics: accuracy (of the order),
    sign_accuracy, margin, score, score/safer, score/more_harmful, score_min, score_max. Raises
    InputError for scores of another shape, and where the batch has no costs.
    """
    by = "cost_preference"
    batch.require("costs", by=by)
    signs = jax.lax.stop_gradient(jnp.sign(row_sum(batch.costs, batch)))
    safer, harmful = _pair_scores(scores, batch, by=by)
    right = [s * c for s, c in zip(rows_of(signs, 2, by=by), (safer, harmful), strict=True)]
    loss = -sum(map(jax.nn.log_sigmoid, (harmful - safer, *right)))
    signed = 0.5 * sum((x > 0).astype(scores.dtype) for x in right)
    shown = {"sign_accuracy": signed, "score/safer": safer, "score/more_harmful": harmful}
    return loss, _pair_metrics(harmful, safer) | shown


def _labels(batch: Batch, *, by: str) -> jax.Array:
    """process_rewards at labelled tokens (mask 1) and 0 elsewhere, without gradient: [B, S]."""
    batch.require("process_rewards", by=by)
    return jax.lax.stop_gradient(jnp.where(batch.mask > 0, batch.process_rewards, 0.0))


@contract(
    safe=True, reads=("process_rewards",), per_token=True, squash=lambda options: options["squash"]
)
def step_regression(scores: jax.Array, batch: Batch, *, squash: Literal["none", "tanh"] = "none"):
    """(squash(s) - label)^2 at each labelled token: [B, S].

    A process reward model by regression (arXiv 2410.17621): batch.mask is 1 at the last token of
    each step, batch.process_rewards its label, 0 being neutral. The head gives s; the reward model
    that is trained with squash="tanh" scores with tanh(s), on disk too, and a critic that starts
    from it keeps its values in (-1, 1). Metrics: mse, sign_correct and non_neutral, both shares of
    the labelled tokens, whose quotient is the accuracy of the sign on steps that are not neutral.
    Raises InputError where the batch lacks process_rewards.
    """
    one_of("squash", squash, ("none", "tanh"), by="step_regression")
    labels = _labels(batch, by="step_regression")
    scores = jnp.where(batch.mask > 0, scores, 0.0)
    scores = jnp.tanh(scores) if squash == "tanh" else scores
    loss = (scores - labels) ** 2
    return loss, {
        "mse": loss,
        "sign_correct": (scores * labels > 0).astype(scores.dtype),
        "non_neutral": (labels != 0).astype(scores.dtype),
    }


@contract(safe=True, reads=("process_rewards",), per_token=True, labels=2)
def step_classification(logits: jax.Array, batch: Batch):
    """-p log softmax(z)[right] - (1 - p) log softmax(z)[wrong] at each labelled token: [B, S].

    A process reward model by classification (arXiv 2211.14275, 2305.20050): logits [B, S, 2] of
    (wrong, right), batch.mask 1 at the last token of each step. p = (1 + process_rewards) / 2 is
    the probability that the step is right: 1 at the label 1, 0 at -1, and the share itself at a
    label 2 * share - 1, as OpenRLHF's soft labels are learned. A neutral step, 0, has p = 1/2, so
    that it favours neither class and its score, the log-odds, goes to 0. Metrics: accuracy, of the
    sign of the labels that are not 0. Raises InputError where the batch lacks process_rewards.
    """
    labels = _labels(batch, by="step_classification")
    logits = jnp.where((batch.mask > 0)[..., None], logits, 0.0)
    wrong, right = jnp.moveaxis(jax.nn.log_softmax(logits, axis=-1), -1, 0)
    loss = -0.5 * ((1 + labels) * right + (1 - labels) * wrong)
    has_sign = (jnp.argmax(logits, axis=-1) == 1) == (labels > 0)
    return loss, {"accuracy": MetricAt(has_sign.astype(loss.dtype), labels != 0)}
