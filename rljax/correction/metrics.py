"""Sampler against trainer: how far the two programs' log-probs of the same tokens are apart.

The mismatch metrics and the proxies of the gradient's variance. Both sets of
log-probs come from the same weights and temperature, so anything but rounding is a bug of one of
the two programs.
"""

import jax
import jax.numpy as jnp

from rljax.batch import (
    Batch,
    masked_max,
    masked_mean,
    masked_variance,
    sampler_logprobs,
    segment_sum,
)
from rljax.contracts import contract
from rljax.correction.ratios import (
    bounded_exp,
    effective_sample_size,
    finite_logprobs,
    log_ratio,
    masked_min,
    masked_quantiles,
    segment_mean,
    sequence_share,
    weighted_mean,
)
from rljax.metric import Metric

OTHER_POLICY = (
    "sampler and trainer are different policies: stale weights, temperature, or precision"
)
BY_NUMBERS = (
    "a run warns above what its narrowest numbers explain (docs/guides/mismatch.md, Numbers)"
)
METRICS = {
    "mismatch/mismatch_kl": Metric(
        "KL from the sampler's to the trainer's log-probs of the same tokens",
        "nats per token",
        limits=(-0.1, 0.1),
        advice=OTHER_POLICY,
    ),
    "mismatch/mismatch_k3_kl": Metric(
        "KL between sampler and trainer by an estimate that is never negative",
        "nats per token",
        limits=(0.0, 0.1),
        advice=OTHER_POLICY,
    ),
    "mismatch/mismatch_chi2_token": Metric(
        "mean squared ratio of trainer to sampler, minus 1, per token", "", "near 0"
    ),
    "mismatch/mismatch_chi2_seq": Metric(
        "mean squared ratio of trainer to sampler, minus 1, per sequence", "", "below 1"
    ),
    "mismatch/mismatch_training_ppl": Metric(
        "perplexity of the samples by the trainer", "choices", "equals rollout_ppl"
    ),
    "mismatch/mismatch_training_log_ppl": Metric(
        "log perplexity of the samples by the trainer", "nats", "equals rollout_log_ppl"
    ),
    "mismatch/mismatch_rollout_ppl": Metric("perplexity of the samples by the sampler", "choices"),
    "mismatch/mismatch_rollout_log_ppl": Metric(
        "log perplexity of the samples by the sampler", "nats"
    ),
    "mismatch/mismatch_log_ppl_diff": Metric(
        "trainer's log perplexity minus the sampler's", "nats", "near 0"
    ),
    "mismatch/mismatch_log_ppl_abs_diff": Metric(
        "size of the difference of the log perplexities, mean over sequences", "nats", "near 0"
    ),
    "mismatch/mismatch_log_ppl_diff_max": Metric(
        "trainer's log perplexity minus the sampler's, highest", "nats", "below 0.1"
    ),
    "mismatch/mismatch_log_ppl_diff_min": Metric(
        "trainer's log perplexity minus the sampler's, lowest", "nats", "above -0.1"
    ),
    "mismatch/mismatch_ppl_ratio": Metric(
        "trainer's perplexity over the sampler's", "ratio", "near 1"
    ),
    "mismatch/eff_sample_size": Metric(
        "share of the tokens that carry an update in which each weighs as the trainer's "
        "probability of it over the sampler's",
        "share",
        limits=(0.8, 1.0),
        advice=OTHER_POLICY,
    ),
    "mismatch/probability_correlation": Metric(
        "correlation of the sampler's and the trainer's probabilities",
        "-1 to 1",
        limits=(0.99, 1.0),
        advice="sampler and trainer disagree about probabilities: float32 output head on both "
        "sides, and the same model options",
    ),
    "mismatch/probability_diff_mean": Metric(
        "difference of the probabilities, mean", "share", "below 0.01"
    ),
    "mismatch/probability_diff_max": Metric(
        "difference of the probabilities, largest", "share", "below 0.3"
    ),
    "mismatch/probability_diff_std": Metric(
        "difference of the probabilities, spread", "share", "below 0.01"
    ),
    "mismatch/abs_logprob_diff_mean": Metric(
        "difference of the log-probs, mean size", "nats", BY_NUMBERS
    ),
    "mismatch/abs_logprob_diff_p99": Metric(
        "size of the difference of the log-probs that 99 % of the tokens stay below",
        "nats",
        BY_NUMBERS,
    ),
    "mismatch/abs_logprob_diff_max": Metric(
        "difference of the log-probs, largest", "nats", "below 1"
    ),
    "variance_proxy/proxy1_signal_strength": Metric("squared norm of the gradient"),
    "variance_proxy/proxy2_total_power": Metric("estimate of the gradient's total power"),
    "variance_proxy/proxy3_pure_noise": Metric("noise in the gradient", "", "below the signal"),
    "variance_proxy/expected_a_squared": Metric("mean squared advantage"),
    "variance_proxy/expected_w": Metric("mean weighted squared norm of the scores"),
}


def _correlation(x, y, mask):
    """Returns the Pearson correlation over the mask; 1 where neither varies."""
    x = jnp.where(mask > 0, x - masked_mean(x, mask), 0.0)
    y = jnp.where(mask > 0, y - masked_mean(y, mask), 0.0)
    x2, y2, xy = jnp.sum(x * x), jnp.sum(y * y), jnp.sum(x * y)
    # Variation that float32 rounds away counts as none.
    varies = jnp.minimum(x2, y2) > 1e-12 * jnp.sum(mask)
    return jnp.where(varies, xy / jnp.sqrt(jnp.maximum(x2 * y2, 1e-30)), 1.0)


def _finite_exp(x: jax.Array) -> jax.Array:
    return jnp.exp(jnp.clip(x, -80.0, 80.0))  # finite in float32


def perplexity_metrics(training, rollout, share) -> dict:
    """Returns means over sequences of the perplexities exp(-mean log-prob) under the two programs,
    their logs and ratios. `training` and `rollout` [B, S] are -mean log-prob of each token's
    sequence."""
    difference = training - rollout  # mean sampler log-prob - mean trainer log-prob
    return {
        "training_ppl": weighted_mean(_finite_exp(training), share),
        "training_log_ppl": weighted_mean(training, share),
        "rollout_ppl": weighted_mean(_finite_exp(rollout), share),
        "rollout_log_ppl": weighted_mean(rollout, share),
        "log_ppl_diff": weighted_mean(difference, share),
        "log_ppl_abs_diff": weighted_mean(jnp.abs(difference), share),
        "log_ppl_diff_max": masked_max(difference, share),
        "log_ppl_diff_min": masked_min(difference, share),
        "ppl_ratio": weighted_mean(_finite_exp(difference), share),
    }


def chi2_sequence(log_sums: jax.Array, share: jax.Array) -> jax.Array:
    """Returns the mean over sequences of (prod of ratios)^2, minus 1, a scalar: the sums of
    log-ratios [B, S] at each token of a sequence, share [B, S]."""
    return weighted_mean(bounded_exp(log_sums) ** 2, share) - jnp.any(share > 0)


@contract(reads=("old_logprobs", "sampler_logprobs"))
def mismatch_metrics(batch: Batch) -> dict:
    """Metrics of how far the two programs are apart, with x = old - sampler on policy tokens.

    kl = mean -x; k3_kl = mean(e^x - 1 - x); chi2 = mean of ratio^2 - 1, over tokens and sequences;
    perplexities exp(-mean log-prob), their logs and ratios averaged over sequences; effective
    sample size of the ratios, (sum w)^2 / (N sum w^2) (PipelineRL, arXiv 2509.19128); Pearson
    correlation and difference of the probabilities; mean, 99th percentile and max of |x|. Scalars
    each. Raises InputError where the batch lacks one of the two log-probs.
    """
    x = log_ratio(batch, by="mismatch_metrics")
    mask, share = batch.mask, sequence_share(batch)
    old_logprobs = finite_logprobs(batch.old_logprobs, mask)
    drawn_logprobs = finite_logprobs(sampler_logprobs(batch, by="mismatch_metrics"), mask)
    training, rollout = (
        -segment_mean(value, batch, share) for value in (old_logprobs, drawn_logprobs)
    )
    bounded = jnp.clip(x, -80.0, 80.0)
    numbers = {
        "kl": masked_mean(-x, mask),
        "k3_kl": masked_mean(jnp.expm1(bounded) - x, mask),
        "chi2_token": masked_mean(bounded_exp(x) ** 2, mask) - jnp.any(mask > 0),
        "chi2_seq": chi2_sequence(segment_sum(x, batch), share),
        **perplexity_metrics(training, rollout, share),
    }
    p, q = jnp.exp(old_logprobs), jnp.exp(drawn_logprobs)
    size = jnp.abs(x)
    distance = jnp.abs(p - q)
    return {f"mismatch/mismatch_{name}": value for name, value in numbers.items()} | {
        # Without any token nothing is lost: the size is 1, as the differences are 0.
        "mismatch/eff_sample_size": jnp.where(
            jnp.sum(mask) > 0, effective_sample_size(bounded_exp(x), mask), 1.0
        ),
        "mismatch/probability_correlation": _correlation(p, q, mask),
        "mismatch/probability_diff_mean": masked_mean(distance, mask),
        "mismatch/probability_diff_max": masked_max(distance, mask),
        "mismatch/probability_diff_std": jnp.sqrt(masked_variance(distance, mask, ddof=1)),
        "mismatch/abs_logprob_diff_mean": masked_mean(size, mask),
        "mismatch/abs_logprob_diff_p99": masked_quantiles(size, mask, (0.99,))[0],
        "mismatch/abs_logprob_diff_max": masked_max(size, mask),
    }


@contract(reads=("advantages", "old_logprobs", "sum_pi_squared"))
def variance_proxy_metrics(batch: Batch, *, gradient_norm: float | jax.Array | None = None) -> dict:
    """Proxies of the gradient's variance: total power E[w^2 A^2 W], signal |g|^2, the noise
    left; scalars each.

    W = sum_t (1 - 2 pi_t + sum_v pi_v^2) estimates the squared norm of a sequence's score, over its
    tokens of weight > 0; A is its mean advantage, w its mean weight. expected_w has the weights
    inside, sum_t w_t^2 (...). noise = (power - signal) / (sequences - 1). Raises InputError where
    the batch lacks `advantages`, `old_logprobs` or `sum_pi_squared`.
    """
    batch.require("advantages", "old_logprobs", "sum_pi_squared", by="variance_proxy_metrics")
    share = sequence_share(batch)
    live = batch.mask > 0
    pi = jnp.exp(finite_logprobs(batch.old_logprobs, batch.mask))
    score = 1 - 2 * pi + jnp.where(live, batch.sum_pi_squared, 0.0)
    weights = batch.mask if batch.weights is None else jnp.where(live, batch.weights, 0.0)
    norm = segment_sum(jnp.where(weights > 0, score, 0.0), batch)
    weighted_norm = segment_sum(score * weights**2, batch)
    power = segment_mean(batch.advantages, batch, share) ** 2
    total = weighted_mean(
        segment_mean(weights, batch, share) ** 2 * power * jnp.maximum(norm, 0.0), share
    )
    signal = jnp.zeros((), total.dtype) if gradient_norm is None else gradient_norm**2
    count = jnp.round(jnp.sum(share))
    noise = jnp.maximum(total - signal, 0.0) / jnp.maximum(count - 1, 1)
    if gradient_norm is None:
        noise = jnp.zeros((), total.dtype)  # without the signal there is nothing to subtract
    proxies = {
        "proxy1_signal_strength": signal,
        "proxy2_total_power": total,
        "proxy3_pure_noise": jnp.where(count > 1, noise, 0.0),
        "expected_a_squared": weighted_mean(power, share),
        "expected_w": weighted_mean(weighted_norm, share),
    }
    return {f"variance_proxy/{k}": jax.lax.stop_gradient(v) for k, v in proxies.items()}
