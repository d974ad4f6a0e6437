"""Evaluation of a reward model on held-out pairs: accuracy, calibration, and the effect of length.
Axes: B = 2N rows, rows 2i (chosen) and 2i + 1 (rejected) of N pairs; lengths in tokens.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from rljax.arrays import fetch
from rljax.batch import Batch
from rljax.errors import InputError
from rljax.metric import Metric

METRICS = {
    "eval/margin/mean": Metric("score of the better completion minus the worse", "score", "rises"),
    "eval/margin/std": Metric("spread of the lead of the better completion", "score"),
    "eval/score/mean": Metric("score of the held-out completions", "score"),
    "eval/score/std": Metric("spread of the scores of the held-out completions", "score"),
    "eval/share/*": Metric("held-out pairs of the kind {}", "share"),
    "eval/accuracy/*": Metric(
        "accuracy on held-out pairs of the kind {}",
        "share",
        "alike for all kinds; else length decides",
    ),
    "eval/favours_longer": Metric(
        "pairs at which the longer completion is preferred", "share", "near 0.5"
    ),
    "eval/calibration_error": Metric("confidence minus accuracy, mean size", "share", "below 0.1"),
    "eval/reliability/*": Metric("reliability: {}", "share", "accuracy near confidence"),
}


def pair_report(scores, lengths, live=None, *, bins: int = 5) -> dict[str, float]:
    """Accuracy, calibration, scores, and accuracy by which completion is longer.

    scores [2N], lengths [2N] in tokens, live [N] (default all). accuracy counts equal scores as
    1/2. calibration_error is the expected calibration error of sigmoid(margin) as the probability
    that the model's favourite was chosen: sum over `bins` equal bins of confidence in [1/2, 1] of
    the bin's share times |accuracy - mean confidence|. reliability/LOW-HIGH/... are the bins, and
    accuracy/chosen_longer, chosen_shorter, equal_length the buckets: only those with pairs in them.
    Raises InputError for other shapes, for `bins` below 1, and for scores that are not finite. {}
    without a live pair.
    """
    scores, lengths = np.asarray(scores, np.float64), np.asarray(lengths)
    if scores.ndim != 1 or scores.shape != lengths.shape or len(scores) % 2:
        raise InputError(
            "pair_report(scores, lengths)",
            value=(scores.shape, lengths.shape),
            rule="both [2N]: chosen and rejected in turns",
            fix="give the score and the length of chosen, rejected, chosen, rejected, ... in two "
            "flat arrays",
        )
    if bins < 1:
        raise InputError("pair_report(bins)", value=bins, fix="set bins to 1 or more")
    live = np.ones(len(scores) // 2, bool) if live is None else np.asarray(live, bool)
    scores, lengths = scores.reshape(-1, 2)[live], lengths.reshape(-1, 2)[live]
    if not np.isfinite(scores).all():
        fix = "leave pairs without a score out by `live`"
        raise InputError("pair_report(scores)", value=float(scores.min()), rule="finite", fix=fix)
    if not len(scores):
        return {}
    margin = scores[:, 0] - scores[:, 1]
    right = 0.5 * (1 + np.sign(margin))
    longer = np.sign(lengths[:, 0] - lengths[:, 1])
    out = {
        "accuracy": right.mean(),
        "margin/mean": margin.mean(),
        "margin/std": margin.std(),
        "score/mean": scores.mean(),
        "score/std": scores.std(),
        **_reliability(margin, right, bins),
    }
    for name, sign in (("chosen_longer", 1), ("chosen_shorter", -1), ("equal_length", 0)):
        in_bucket = longer == sign
        out[f"share/{name}"] = in_bucket.mean()
        if in_bucket.any():
            out[f"accuracy/{name}"] = right[in_bucket].mean()
    favours = np.sign(margin) * longer
    unequal = (longer != 0) & (margin != 0)
    if unequal.any():  # 1/2 of an impartial judge, where chosen completions are as often longer
        out["favours_longer"] = np.mean(favours[unequal] > 0)
    return {name: float(value) for name, value in out.items()}


def _reliability(margin, right, bins: int) -> dict[str, float]:
    """The expected calibration error, and accuracy, confidence and share of every bin in use."""
    confidence = 1 / (1 + np.exp(-np.minimum(np.abs(margin), 700.0)))
    edges = np.linspace(0.5, 1.0, bins + 1)
    index = np.clip(np.searchsorted(edges, confidence, side="right") - 1, 0, bins - 1)
    out, error = {}, 0.0
    for i in range(bins):
        in_bin = index == i
        if not in_bin.any():
            continue
        accuracy, mean = right[in_bin].mean(), confidence[in_bin].mean()
        error += in_bin.mean() * abs(accuracy - mean)
        name = f"reliability/{edges[i]:.2f}-{edges[i + 1]:.2f}"
        out |= {
            f"{name}/accuracy": accuracy,
            f"{name}/confidence": mean,
            f"{name}/share": in_bin.mean(),
        }
    return {"calibration_error": error, **out}


@functools.partial(jax.jit, static_argnames="rows")
def _scores(reward_model, batch: Batch, rows: int):
    return reward_model.scores(batch, rows)


def evaluate_pairs(reward_model, batch: Batch, rows: int) -> dict[str, float]:
    """`pair_report` of a reward model on a Batch of pairs, `rows` read at once; pairs without a
    token at mask 1 (the filling of a batch) are left out."""
    lengths, scores = fetch((jnp.sum(batch.mask > 0, axis=1), _scores(reward_model, batch, rows)))
    live = (lengths.reshape(-1, 2) > 0).any(axis=1)
    return pair_report(scores, lengths, live)
