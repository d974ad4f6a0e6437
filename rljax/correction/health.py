"""Warnings as text: numbers of the mismatch and of the correction outside their healthy range.

The ranges follow ALGORITHMS G1. Host code: floats in, text out.
"""

import math

# metric of "mismatch/": (lowest healthy, highest healthy, where to look)
RANGES = {
    "rollout_is_eff_sample_size": (
        0.5, 1.0, "few tokens carry the update: raise upper, use level='geometric', or update on "
        "fresher samples",
    ),
    "rollout_is_mean": (
        0.5, 2.0, "the weights should average to 1: compare temperature and precision of sampler "
        "and trainer",
    ),
    "rollout_is_veto_fraction": (
        0.0, 0.05, "whole sequences are dropped: look for tokens that the trainer finds nearly "
        "impossible (top-p or stop handling of the sampler), or lower veto",
    ),
    "rollout_is_catastrophic_token_fraction": (
        0.0, 0.01, "the trainer finds sampled tokens nearly impossible: check tokenizer, chat "
        "template and the weights the sampler holds",
    ),
    "rollout_is_masked_fraction": (
        0.0, 0.3, "mask mode drops many tokens: widen lower and upper, or use mode='truncate'",
    ),
    "rollout_rs_masked_fraction": (
        0.0, 0.3, "rejection drops many tokens: widen the bounds in reject",
    ),
    "probability_correlation": (
        0.99, 1.0, "sampler and trainer disagree about probabilities: float32 output head on both "
        "sides, and the same model options",
    ),
    "mismatch_kl": (
        -0.1, 0.1, "sampler and trainer are different policies: stale weights, temperature, or "
        "precision",
    ),
    "mismatch_k3_kl": (
        0.0, 0.1, "sampler and trainer are different policies: stale weights, temperature, or "
        "precision",
    ),
}  # fmt: skip
SLACK = 1e-6  # a correlation of 1 may be rounded to a little more


def health_warnings(metrics: dict[str, float]) -> list[str]:
    """One text per metric outside its healthy range: name, value, range and what to look at."""
    warnings = []
    for name, (low, high, advice) in RANGES.items():
        value = metrics.get(f"mismatch/{name}")
        if value is None:
            continue
        value = float(value)
        if math.isnan(value) or not low - SLACK <= value <= high + SLACK:
            text = f"mismatch/{name} is {value:.4g}, healthy is {low:g} to {high:g}: {advice}"
            warnings.append(text)
    return warnings
