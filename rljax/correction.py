"""Sampler against trainer: how far the two programs' log-probs of the same tokens are apart.

What lives here: the mismatch metrics (ALGORITHMS G2, G3). Both sets of log-probs come from the same
weights
and temperature, so anything but rounding is a bug of one of the two programs.
"""

import jax.numpy as jnp

from rljax.batch import Batch, masked_max, masked_mean, masked_sum


def _correlation(x, y, mask):
    """Pearson correlation over the mask; 1 where neither varies."""
    x = jnp.where(mask > 0, x - masked_mean(x, mask), 0.0)
    y = jnp.where(mask > 0, y - masked_mean(y, mask), 0.0)
    x2, y2, xy = jnp.sum(x * x), jnp.sum(y * y), jnp.sum(x * y)
    # Less variation than float32 rounds away is none.
    varies = jnp.minimum(x2, y2) > 1e-12 * jnp.sum(mask)
    return jnp.where(varies, xy / jnp.sqrt(jnp.maximum(x2 * y2, 1e-30)), 1.0)


def mismatch_metrics(batch: Batch) -> dict:
    """With x = old - sampler on policy tokens: mean -x, mean(e^x - 1 - x), mean and max |x|, the
    Pearson
    correlation of the two probabilities, and perplexities exp(-mean log-prob) averaged over rows.
    """
    batch.require("old_logprobs", "sampler_logprobs", by="mismatch_metrics")
    mask = batch.mask
    old = jnp.where(mask > 0, batch.old_logprobs, 0.0)
    sampler = jnp.where(mask > 0, batch.sampler_logprobs, 0.0)
    x = old - sampler
    ratio = jnp.exp(jnp.clip(x, -80.0, 80.0))  # finite in float32
    tokens = jnp.sum(mask, axis=1)
    live = (tokens > 0).astype(mask.dtype)
    train_log_ppl = -masked_sum(old, mask, axis=1) / jnp.maximum(tokens, 1)
    rollout_log_ppl = -masked_sum(sampler, mask, axis=1) / jnp.maximum(tokens, 1)
    difference = train_log_ppl - rollout_log_ppl  # mean sampler log-prob - mean trainer log-prob
    some = jnp.any(live > 0)
    found = {
        "mismatch_kl": masked_mean(-x, mask),
        "mismatch_k3_kl": masked_mean(ratio - 1 - x, mask),
        "mismatch_training_ppl": masked_mean(jnp.exp(train_log_ppl), live),
        "mismatch_training_log_ppl": masked_mean(train_log_ppl, live),
        "mismatch_rollout_ppl": masked_mean(jnp.exp(rollout_log_ppl), live),
        "mismatch_rollout_log_ppl": masked_mean(rollout_log_ppl, live),
        "mismatch_log_ppl_diff": masked_mean(difference, live),
        "mismatch_log_ppl_abs_diff": masked_mean(jnp.abs(difference), live),
        "mismatch_log_ppl_diff_max": masked_max(difference, live),
        "mismatch_log_ppl_diff_min": jnp.where(some, -masked_max(-difference, live), 0.0),
        "mismatch_ppl_ratio": masked_mean(jnp.exp(difference), live),
        "probability_correlation": _correlation(jnp.exp(old), jnp.exp(sampler), mask),
        "abs_logprob_diff_mean": masked_mean(jnp.abs(x), mask),
        "abs_logprob_diff_max": masked_max(jnp.abs(x), mask),
    }
    return {f"mismatch/{name}": value for name, value in found.items()}
