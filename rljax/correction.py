"""Sampler against trainer: how far the two programs' log-probs of the same tokens are apart
(ALGORITHMS G2)."""

import jax.numpy as jnp

from rljax.batch import Batch, masked_max, masked_mean


def mismatch_metrics(batch: Batch) -> dict:
    """With x = old - sampler on policy tokens: mean -x, mean(e^x - 1 - x), mean |x|, max |x|.

    Both sets of log-probs come from the same weights and temperature, so anything but rounding is a
    bug.
    """
    batch.require("old_logprobs", "sampler_logprobs", by="mismatch_metrics")
    x = jnp.where(batch.mask > 0, batch.old_logprobs - batch.sampler_logprobs, 0.0)
    x = jnp.clip(x, -20.0, 20.0)
    return {
        "mismatch/mismatch_kl": masked_mean(-x, batch.mask),
        "mismatch/mismatch_k3_kl": masked_mean(jnp.exp(x) - 1 - x, batch.mask),
        "mismatch/abs_logprob_diff_mean": masked_mean(jnp.abs(x), batch.mask),
        "mismatch/abs_logprob_diff_max": masked_max(jnp.abs(x), batch.mask),
    }
