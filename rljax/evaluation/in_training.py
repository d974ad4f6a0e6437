"""Metrics of an evaluation within a run: accuracy, overall, by source and by difficulty, and pass@k
of drawn responses, each with its interval."""

from collections.abc import Sequence

import numpy as np

from rljax.data.online.prompts import PromptRecord
from rljax.evaluation.policy import SHARE, bootstrap, correct, no_answer, pass_at_k, score_table
from rljax.metric import Metric
from rljax.policies import Completion

METRICS = {
    "eval/accuracy": Metric("held-out prompts whose greedy response is right", "share", "rises"),
    "eval/accuracy_low": Metric("lower end of the 95 % interval of eval/accuracy", "share"),
    "eval/accuracy_high": Metric("upper end of the 95 % interval of eval/accuracy", "share"),
    "eval/reward": Metric(
        "mean reward of the greedy responses to held-out prompts", "score", "rises"
    ),
    "eval/reward_low": Metric("lower end of the 95 % interval of eval/reward", "score"),
    "eval/reward_high": Metric("upper end of the 95 % interval of eval/reward", "score"),
    "eval/source/*_low": Metric("lower end of the 95 % interval of the accuracy on {}", "share"),
    "eval/source/*_high": Metric("upper end of the 95 % interval of the accuracy on {}", "share"),
    "eval/source/*": Metric("accuracy on held-out prompts of {}", "share", "rises"),
    "eval/difficulty/*_low": Metric("lower end of the 95 % interval at difficulty {}", "share"),
    "eval/difficulty/*_high": Metric("upper end of the 95 % interval at difficulty {}", "share"),
    "eval/difficulty/*": Metric(
        "accuracy on held-out prompts whose difficulty is {}", "share", "rises"
    ),
    "eval/pass@*_low": Metric("lower end of the 95 % interval of eval/pass@{}", "share"),
    "eval/pass@*_high": Metric("upper end of the 95 % interval of eval/pass@{}", "share"),
    "eval/pass@*": Metric(
        "chance that a right one is among {} drawn responses",
        "share",
        "rises; pass@1 that rises while the largest k falls: less is explored",
    ),
    "eval/truncated_fraction": Metric("held-out responses that were cut off", "share", "below 0.1"),
    "eval/failed_fraction": Metric("held-out responses whose reward failed", "share", "0"),
    "eval/extraction_failed_fraction": Metric(
        "held-out responses without an answer", "share", "near 0"
    ),
}

DIFFICULTY = ("difficulty", "level")  # columns of a data set that say how hard its row is


def accuracy_metrics(
    prompts: Sequence[PromptRecord], right: np.ndarray, samples: Sequence[Completion]
) -> dict[str, float]:
    """eval/accuracy with its interval, by source and difficulty, the mean reward, and shares of
    responses that were cut, failed or have no answer. `right` [P] is 1, 0, or NaN where a reward
    failed. Raises InputError if all are NaN."""
    return {
        **accuracy_by_kind(prompts, right),
        **with_interval("eval/accuracy", bootstrap(right, within=SHARE)),
        **with_interval("eval/reward", bootstrap([s.reward for s in samples])),
        "eval/truncated_fraction": float(np.mean([s.cut_off for s in samples])),
        "eval/failed_fraction": float(np.mean(np.isnan(right))),
        **no_answer(samples, "eval/"),
    }


def with_interval(name: str, found: dict) -> dict[str, float]:
    """An estimate of `bootstrap` as three metrics: NAME, NAME_low, NAME_high."""
    return {name: found["value"], f"{name}_low": found["low"], f"{name}_high": found["high"]}


def accuracy_by_kind(prompts: Sequence[PromptRecord], right: np.ndarray) -> dict[str, float]:
    """{"eval/source/NAME": mean of `right` [P] over the prompts of a source, ..._low, ..._high},
    and eval/difficulty/NAME for data whose rows have a column `difficulty` or `level`; NaN left
    out. Sources, or difficulties, are left out if all prompts have the same."""
    out = {}
    for kind, kind_of in (("source", _source), ("difficulty", difficulty)):
        values: dict[str, list[float]] = {}
        for prompt, value in zip(prompts, right, strict=True):
            name = kind_of(prompt)
            if name:
                values.setdefault(name, []).append(float(value))
        if len(values) > 1:
            for name, scores in sorted(values.items()):
                if not np.isnan(scores).all():
                    out |= with_interval(f"eval/{kind}/{name}", bootstrap(scores, within=SHARE))
    return out


def _source(prompt: PromptRecord) -> str:
    return prompt.source or prompt.data_source


def difficulty(prompt: PromptRecord) -> str:
    """Returns the difficulty of a prompt, from its row; "" if no column has it."""
    values = (prompt.extra_info.get(column) for column in DIFFICULTY)
    return next((str(value) for value in values if value not in (None, "")), "")


def counts_of(samples: int) -> list[int]:
    """The k of pass@k for this number of samples: 1, 2, 4, ... and all of them."""
    powers = [2**i for i in range(samples.bit_length()) if 2**i < samples]
    return [*powers, samples]


def pass_estimates(samples: Sequence[Completion], n: int, correct_at: float) -> dict[str, dict]:
    """Returns {"pass@k": estimate with its interval over prompts} of n drawn responses to each
    prompt, for k = 1, 2, 4, ..., n. A response whose reward failed is left out, and a prompt with
    fewer than k others."""
    right = correct(score_table(samples, n), correct_at)
    counts = (~np.isnan(right)).sum(axis=1)
    hits = np.nansum(right, axis=1)
    pairs = list(zip(counts.tolist(), hits.astype(int).tolist(), strict=True))
    out = {}
    for k in counts_of(n):
        values = [pass_at_k(m, c, k) for m, c in pairs if m >= k]
        if values:
            out[f"pass@{k}"] = bootstrap(values, within=SHARE)
    return out
