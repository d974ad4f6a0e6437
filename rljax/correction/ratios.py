"""Log-ratios of trainer to sampler, their sums per sequence, and statistics that respect both.

Per-sequence values stand at every policy token of their sequence, [B, S]; `share` is 1/n there, so
that a sum weighted by it counts every sequence once, in packed and unpacked rows alike, and an
empty sequence never.
"""

import jax
import jax.numpy as jnp

from rljax.batch import (
    Batch,
    behaviour_logprobs,
    masked_max,
    masked_mean,
    masked_sum,
    masked_variance,
    segment_sum,
    segment_tokens,
)

BOUND = 20.0  # |log w| beyond this is clamped before exp: e^20 is far outside any threshold
FLOOR = 1e4  # an infinite log-prob counts as this far away, so that sums stay finite


def finite_logprobs(logprobs: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns constant log-probs [B, S] on policy tokens, 0 elsewhere; -inf becomes a large
    negative number."""
    selected = jnp.where(mask > 0, jax.lax.stop_gradient(logprobs), 0.0)
    return jnp.clip(selected, -FLOOR, FLOOR)


def log_ratio(batch: Batch, *, by: str) -> jax.Array:
    """Returns x = old - behaviour on policy tokens, 0 elsewhere and where both are -inf: [B, S]."""
    batch.require("old_logprobs", by=by)
    old_logprobs = finite_logprobs(batch.old_logprobs, batch.mask)
    return old_logprobs - finite_logprobs(behaviour_logprobs(batch, by=by), batch.mask)


def bounded_exp(x: jax.Array) -> jax.Array:
    """Returns exp(clamp(x, +-20)), in the shape of x."""
    return jnp.exp(jnp.clip(x, -BOUND, BOUND))


def segment_mean(x: jax.Array, batch: Batch, share: jax.Array) -> jax.Array:
    """Returns the mean of x over the policy tokens of each token's own segment, sum x/n: [B, S] ->
    [B, S]."""
    return segment_sum(x * share, batch)


def log_weights(x: jax.Array, batch: Batch, share: jax.Array, level: str) -> jax.Array:
    """Returns x at the token, its sum over the sequence, or its mean (geometric): [B, S]."""
    if level == "token":
        return x
    return segment_sum(x, batch) if level == "sequence" else segment_mean(x, batch, share)


def segment_max(x: jax.Array, batch: Batch) -> jax.Array:
    """Returns the maximum of x over the policy tokens of each token's own segment: [B, S] -> [B,
    S]."""
    values = jnp.where(batch.mask > 0, x, -jnp.inf)
    size = batch.tokens.shape[1] + 1

    def one_row(row, ids):
        return jax.ops.segment_max(row, ids, num_segments=size)[ids]

    return jnp.where(batch.mask > 0, jax.vmap(one_row)(values, batch.segment_ids), 0.0)


def sequence_share(batch: Batch) -> jax.Array:
    """Returns 1/n at every policy token of a sequence of n, 0 elsewhere: [B, S]."""
    n = jnp.maximum(segment_tokens(batch), 1)
    return jnp.where(batch.mask > 0, 1.0 / n, 0.0).astype(batch.mask.dtype)


def weighted_mean(x: jax.Array, share: jax.Array) -> jax.Array:
    """Returns sum share x / sum share, a scalar, 0 where nothing has a share: with 1/n, the mean
    over sequences."""
    total = jnp.sum(share)
    return jnp.where(total > 0, masked_sum(x * share, share) / jnp.maximum(total, 1e-30), 0.0)


def masked_min(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the minimum of x over the mask, a scalar; 0 where the mask is empty."""
    return -masked_max(-x, mask)


def effective_sample_size(weights: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns (sum w)^2 / (N sum w^2) over the N tokens of the mask: 1 for equal weights, 1 / N
    where one has it all, 0 without any. A scalar."""
    squares = masked_sum(weights * weights, mask) * jnp.sum(mask)
    total = masked_sum(weights, mask)
    return jnp.where(squares > 0, total**2 / jnp.maximum(squares, 1e-30), 0.0)


def sequence_std(x: jax.Array, share: jax.Array) -> jax.Array:
    """Returns the unbiased standard deviation over sequences, a scalar; 0 for fewer than two."""
    count = jnp.round(jnp.sum(share))  # shares 1/n add up to a whole number but for rounding
    squares = masked_sum(share * (x - weighted_mean(x, share)) ** 2, share)
    return jnp.where(count > 1, jnp.sqrt(squares / jnp.maximum(count - 1, 1)), 0.0)


def spread(values, per_sequence, mask, share, *, by_sequence: bool, bounds, ideal: float) -> dict:
    """Describes the spread of a statistic over tokens (`values`) and over sequences
    (`per_sequence`).

    mean, max, min over tokens; std (biased) of the values clamped to `bounds`; fractions outside
    the bounds, of sequences or of tokens; then the same of the sequences, and max |value - ideal|.
    """
    lower, upper = bounds
    counted = share if by_sequence else mask

    def high(x, w):
        return weighted_mean((x > upper).astype(share.dtype), w)

    def low(x, w):
        return weighted_mean((x < lower).astype(share.dtype), w)

    return {
        "mean": masked_mean(values, mask),
        "max": masked_max(values, mask),
        "min": masked_min(values, mask),
        "std": jnp.sqrt(masked_variance(jnp.clip(values, lower, upper), mask)),
        "fraction_high": high(values, counted),
        "fraction_low": low(values, counted),
        "seq_mean": weighted_mean(per_sequence, share),
        "seq_std": sequence_std(per_sequence, share),
        "seq_max": masked_max(per_sequence, share),
        "seq_min": masked_min(per_sequence, share),
        "seq_max_deviation": masked_max(jnp.abs(per_sequence - ideal), share),
        "seq_fraction_high": high(per_sequence, share),
        "seq_fraction_low": low(per_sequence, share),
    }


def masked_quantiles(x: jax.Array, mask: jax.Array, quantiles: tuple[float, ...]) -> jax.Array:
    """Returns linearly interpolated quantiles over the mask, position (n - 1) q, in the shape of
    `quantiles`; 0 where it is empty.

    One sort with the masked elements at the end, so that no shape depends on the mask.
    """
    ordered = jnp.sort(jnp.where(mask > 0, x, jnp.inf).reshape(-1))
    n = jnp.sum(mask > 0)
    position = jnp.asarray(quantiles, x.dtype) * jnp.maximum(n - 1, 0).astype(x.dtype)
    lower_index = jnp.floor(position).astype(jnp.int32)
    upper_index = jnp.minimum(lower_index + 1, jnp.maximum(n - 1, 0))
    low, high = (jnp.where(n > 0, ordered[i], 0.0) for i in (lower_index, upper_index))
    return low + (high - low) * (position - lower_index)
