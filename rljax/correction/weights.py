"""Importance weights from the sampler's policy to the trainer's."""

import math
from typing import Literal

import jax
import jax.numpy as jnp

from rljax.batch import Batch, masked_max, masked_mean, segment_sum
from rljax.contracts import AboveZero, NotNegative, PlainText, contract
from rljax.correction.metrics import mismatch_metrics
from rljax.correction.ratios import (
    BOUND,
    bounded_exp,
    effective_sample_size,
    log_ratio,
    log_weights,
    masked_min,
    masked_quantiles,
    segment_mean,
    sequence_share,
    spread,
    weighted_mean,
)
from rljax.correction.rejection import checked_rules, rejected_fractions, rejection
from rljax.errors import InputError
from rljax.metric import Metric

METRICS = {
    "mismatch/rollout_is_mean": Metric(
        "mean correction weight, before its bounds",
        "ratio",
        limits=(0.8, 1.25),
        advice="the weights should average to 1: compare temperature and precision of sampler and "
        "trainer",
    ),
    "mismatch/rollout_is_eff_sample_size": Metric(
        "share of the tokens that carry the update",
        "share",
        limits=(0.8, 1.0),
        advice="few tokens carry the update: raise upper, use level='geometric', or update on "
        "fresher samples",
    ),
    "mismatch/rollout_is_veto_fraction": Metric(
        "sequences dropped for a token that the trainer finds impossible",
        "share",
        limits=(0.0, 0.05),
        advice="whole sequences are dropped: look for tokens that the trainer finds nearly "
        "impossible (top-p or stop handling of the sampler), or lower veto",
    ),
    "mismatch/rollout_is_catastrophic_token_fraction": Metric(
        "sampled tokens that the trainer finds nearly impossible",
        "share",
        limits=(0.0, 0.01),
        advice="the trainer finds sampled tokens nearly impossible: check tokenizer, chat template "
        "and the weights the sampler holds",
    ),
    "mismatch/rollout_is_masked_fraction": Metric(
        "tokens whose weight left its bounds",
        "share",
        limits=(0.0, 0.3),
        advice="mask mode drops many tokens: widen lower and upper, or use mode='truncate'",
    ),
    "mismatch/rollout_is_seq_masked_fraction": Metric(
        "sequences with a token whose weight left its bounds", "share", "below 0.3"
    ),
    "mismatch/rollout_is_batch_norm_factor": Metric(
        "mean weight that the weights were divided by", "ratio", "near 1"
    ),
    "mismatch/rollout_is_std": Metric(
        "spread of the weights of tokens, within their bounds", "ratio", "near 0"
    ),
    "mismatch/rollout_is_seq_std": Metric("spread of the weights of sequences", "ratio", "below 1"),
    "mismatch/rollout_is_p*": Metric(
        "weight that {} % of the tokens stay below", "ratio", "near 1"
    ),
    "mismatch/rollout_is_*_applied": Metric(
        "{} weight after bounds and rejection", "ratio", "within the bounds"
    ),
    "mismatch/rollout_is_ratio_fraction_*": Metric(
        "tokens whose weight is too {}", "share", "near 0"
    ),
    "mismatch/rollout_is_seq_fraction_*": Metric(
        "sequences whose weight is too {}", "share", "near 0"
    ),
    "mismatch/rollout_is_seq_max_deviation": Metric(
        "largest distance of a sequence's weight from 1", "ratio", "below 1"
    ),
    "mismatch/rollout_is_seq_*": Metric(
        "weights of sequences before their bounds: {}", "ratio", "near 1"
    ),
    "mismatch/rollout_is_*": Metric("weights of tokens before their bounds: {}", "ratio", "near 1"),
}

QUANTILES = (25, 50, 75, 95, 99)


@contract(safe=True, reads=("old_logprobs", "sampler_logprobs"), fills=("weights",))
def rollout_correction(
    batch: Batch,
    *,
    level: Literal["token", "sequence", "geometric"] = "token",
    mode: Literal["truncate", "mask", "clip", "off"] = "truncate",
    upper: AboveZero = 2.0,
    lower: NotNegative | None = None,
    veto: NotNegative | None = 1e-4,
    reject: tuple[tuple[PlainText | float | None, ...], ...] = (),
    affects_denominator: bool = False,
    batch_normalise: bool = False,
) -> tuple[Batch, dict]:
    """The batch with constant weights [B, S] and metrics: w = exp(clamp(X, +-20)), then bounded.

    x = old - sampler; X is x_t (token), the sum of x over the sequence, or its mean (geometric).
    truncate: min(w, upper); mask: w where lower <= w <= upper, else 0; clip: clamp(w, lower,
    upper); off: metrics only. lower None = 1/upper. batch_normalise divides by the mean weight.
    veto drops sequences with a token whose ratio is below it (unless off); reject drops what
    leaves the range of a statistic, (("seq_mean_k3", None, 0.01),): see rljax.correction.rejection.
    What is dropped gets weight 0 and still counts in the loss's denominator, or, with
    affects_denominator, leaves the mask. Yao et al. 2025 (token).
    """
    bounds = _checked_bounds(level, mode, upper, lower, veto)
    rules = checked_rules(reject)
    x = log_ratio(batch, by="rollout_correction")
    share = sequence_share(batch)
    log_w = log_weights(x, batch, share, level)
    w = jnp.where(batch.mask > 0, bounded_exp(log_w), 0.0)
    per_sequence = segment_mean(w, batch, share) if level == "token" else w
    statistics = weight_metrics(w, per_sequence, log_w, batch.mask, share, level, bounds)
    vetoed, numbers = _veto(x, batch, share, veto)
    statistics |= numbers
    accepted, rejected = rejection(batch, rules, share)
    weights = None
    if mode != "off":
        accepted = accepted * (1 - vetoed)
        weights, numbers = _bounded(w, batch, share, mode, bounds)
        statistics |= numbers
        if batch_normalise:
            statistics["batch_norm_factor"] = mean_weight(weights, batch, share, level)
            weights = weights / statistics["batch_norm_factor"]
    elif rules and not affects_denominator:
        weights = batch.mask
    if weights is not None:
        applied = jnp.where((batch.mask * accepted > 0) & (weights > 0), 1.0, 0.0)
        statistics["max_applied"] = masked_max(weights, applied)
        statistics["min_applied"] = masked_min(weights, applied)
        weights = weights if affects_denominator else weights * accepted
    statistics = {f"rollout_is_{key}": value for key, value in statistics.items()} | rejected
    metrics = mismatch_metrics(batch) | {f"mismatch/{k}": v for k, v in statistics.items()}
    if weights is not None:
        weights = jax.lax.stop_gradient(weights)
    mask = batch.mask * accepted if affects_denominator else batch.mask
    return batch.replace(weights=weights, mask=mask), metrics


@contract(reads=("sampler_logprobs",), fills=("old_logprobs",))
def bypass_old_logprobs(batch: Batch) -> Batch:
    """old_logprobs = sampler_logprobs and no weights: the ratio pi/mu then is the correction.

    For ratio losses without a forward pass for the old log-probs. Weights on top
    would count the mismatch twice; `rollout_correction` after this gives weights of exactly 1.
    Raises InputError where the batch has no log-probs of the sampler.
    """
    batch.require("sampler_logprobs", by="bypass_old_logprobs")
    return batch.replace(old_logprobs=batch.sampler_logprobs, weights=None)


def _checked_bounds(level, mode, upper, lower, veto) -> tuple[float, float]:
    """Returns (lower, upper) with the default filled in. Raises InputError for options that make no
    sense."""
    for name, value, allowed in (
        ("level", level, ("token", "sequence", "geometric")),
        ("mode", mode, ("truncate", "mask", "clip", "off")),
    ):
        if value not in allowed:
            raise InputError(
                f"rollout_correction {name}", value=value, fix=f"write one of {', '.join(allowed)}"
            )
    if not upper > 0:
        raise InputError(
            "rollout_correction upper",
            value=upper,
            rule="weights are positive",
            fix="set upper to a number above 0, such as 2.0",
        )
    lower = 1 / upper if lower is None else lower
    if not 0 <= lower <= upper:
        raise InputError(
            "rollout_correction lower",
            value=lower,
            rule=f"0 <= lower <= upper, and upper is {upper}",
            fix="leave lower out (1/upper), which needs upper >= 1, or set both",
        )
    if veto is not None and not 0 < veto < 1:
        raise InputError(
            "rollout_correction veto", value=veto, rule="0 < veto < 1", fix="None turns it off"
        )
    return lower, upper


def _veto(x: jax.Array, batch: Batch, share, veto: float | None) -> tuple[jax.Array, dict]:
    """Returns 1 in sequences that have a token with x (unclamped) < log veto, and how many there
    are."""
    threshold = -math.inf if veto is None else math.log(veto)  # x is finite
    catastrophic = (x < threshold).astype(batch.mask.dtype)
    vetoed = (segment_sum(catastrophic, batch) > 0).astype(batch.mask.dtype)
    return vetoed, {
        "veto_fraction": weighted_mean(vetoed, share),
        "catastrophic_token_fraction": masked_mean(catastrophic, batch.mask),
    }


def _bounded(w, batch: Batch, share, mode: str, bounds) -> tuple[jax.Array, dict]:
    """Returns the weights inside their bounds, and in mask mode how many fell outside."""
    lower, upper = bounds
    if mode == "truncate":
        return jnp.minimum(w, upper), {}
    if mode == "clip":
        return jnp.where(batch.mask > 0, jnp.clip(w, lower, upper), 0.0), {}
    out_of_bounds = ((w < lower) | (w > upper)).astype(w.dtype)
    return jnp.where(out_of_bounds > 0, 0.0, w), rejected_fractions(out_of_bounds, batch, share)


def mean_weight(weights: jax.Array, batch: Batch, share: jax.Array, level: str) -> jax.Array:
    """Returns the mean over tokens (token level) or sequences, a scalar; 1 where every weight is
    0."""
    mean = masked_mean(weights, batch.mask) if level == "token" else weighted_mean(weights, share)
    return jnp.where(mean > 1e-8, mean, 1.0)


def weight_metrics(w, per_sequence, log_w, mask, share, level: str, bounds) -> dict:
    """Spread, effective sample size and quantiles of the weights before bounding.

    ESS = (sum v)^2 / (N sum v^2), v = clamp(w, lower, upper): 1 for equal weights.
    """
    by_sequence = level == "sequence"
    numbers = spread(
        w, per_sequence, mask, share, by_sequence=by_sequence, bounds=bounds, ideal=1.0
    )
    for side in ("high", "low"):
        numbers[f"ratio_fraction_{side}"] = numbers.pop(f"fraction_{side}")
    # In log space: a sequence's weight may lie below what the clamp lets through.
    nonempty = jnp.any(mask > 0)
    floor = -BOUND if level == "token" else -jnp.inf
    numbers["max"] = jnp.where(nonempty, jnp.exp(jnp.minimum(masked_max(log_w, mask), BOUND)), 0.0)
    numbers["min"] = jnp.where(nonempty, jnp.exp(jnp.maximum(masked_min(log_w, mask), floor)), 0.0)
    clamped = jnp.where(mask > 0, jnp.clip(w, *bounds), 0.0)
    numbers["eff_sample_size"] = effective_sample_size(clamped, mask)
    quantiles = masked_quantiles(w, mask, tuple(q / 100 for q in QUANTILES))
    return numbers | {f"p{q}": value for q, value in zip(QUANTILES, quantiles, strict=True)}
