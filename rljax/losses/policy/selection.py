"""Policy losses that pick tokens by statistics of the whole optimizer step: covariance, entropy,
second moments.

Every loss here declares `whole_step`: rljax.learn calls it once on all rows of the step. Losses are
(policy, batch, **options) -> (loss [B, S], metrics), of B rows and S tokens. They raise InputError
where the batch lacks a field that their contract reads.
"""

from fractions import Fraction
from typing import Literal

import jax
import jax.numpy as jnp

from rljax import batch as batches
from rljax.batch import Batch
from rljax.contracts import AboveZero, NotNegative, Share, contract
from rljax.losses.policy.common import (
    RATIO,
    Behaviour,
    PolicyOutputs,
    batch_advantages,
    constant,
    drift_metrics,
    indicator,
    log_ratio,
    policy_logprobs,
)
from rljax.losses.policy.tokens import clipped_surrogate, ppo_loss
from rljax.metric import Metric

METRICS = {
    "cov": Metric(
        "covariance of advantage and log-probability, which drives the entropy down",
        "",
        "small; a few tokens carry it",
    ),
    "cov_clipfrac": Metric(
        "tokens left out for their covariance (clip_cov)", "share", "about its option"
    ),
    "cov_klfrac": Metric(
        "tokens held by a KL for their covariance (kl_cov)", "share", "about its option"
    ),
    "cov_tokens_max": Metric("number of tokens picked by covariance", "tokens"),
    "entropy_keep": Metric(
        "tokens learned from, those of highest entropy", "share", "about its option"
    ),
    "second_moment": Metric(
        "squared log-ratio of the tokens that the bound is on (m2po), 0 at others", "nats squared"
    ),
    "second_moment_masked": Metric(
        "tokens left out for their squared log-ratio (m2po)", "share", "below 0.01"
    ),
}


def _covariance(policy: PolicyOutputs, batch: Batch, advantages: jax.Array) -> jax.Array:
    """Returns (A - mean A)(log pi - mean log pi) at policy tokens, 0 elsewhere; no gradient: [B,
    S]."""
    logprobs = jax.lax.stop_gradient(policy_logprobs(policy, batch))
    mask = batch.mask
    a = advantages - batches.masked_mean(advantages, mask)
    b = logprobs - batches.masked_mean(logprobs, mask)
    return constant(a * b, batch)


def _count(fraction: float, batch: Batch) -> jax.Array:
    """Returns max(1, floor(fraction N)), N the policy tokens, in integers: no rounding of N.

    Where JAX has float64 it is Python's int(fraction * N), rounding of the product included.
    """
    n = jnp.sum((batch.mask > 0).astype(jnp.int32))
    if jax.config.jax_enable_x64:
        product = n.astype(jnp.float64) * fraction
        return jnp.maximum(jnp.floor(product).astype(jnp.int32), 1)
    # The finest denominator q with q p < 2^31, so that n % q * p does not overflow.
    limit = min(int((2**31 / max(fraction, 1e-9)) ** 0.5), 10**7)
    exact = Fraction(fraction).limit_denominator(limit)
    p, q = exact.numerator, exact.denominator
    return jnp.maximum(n // q * p + n % q * p // q, 1)


def _ranks(order: jax.Array, eligible: jax.Array) -> jax.Array:
    """Returns the rank of each eligible token by ascending order, ties by lower flat index; the
    rest follow."""
    order, eligible = order.reshape(-1), eligible.reshape(-1)
    by_order = jnp.argsort(order, stable=True)
    by_eligible = by_order[jnp.argsort(~eligible[by_order], stable=True)]
    return jnp.argsort(by_eligible, stable=True)


def _mix(x: jax.Array) -> jax.Array:
    """Returns a bijection of uint32 in which every output bit depends on every input bit
    (murmur3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _shuffle(batch: Batch, seed: int) -> jax.Array:
    """Returns a pseudo-random number per token from (seed, policy version, its sequence, its
    position).

    It depends on neither row, column nor padding, so that a permuted, padded or packed batch draws
    the same tokens; other samples or a newer policy draw others: uint32 [B, S].
    """
    version = jnp.zeros((), jnp.int32)
    if batch.policy_version is not None:
        version = jnp.max(jnp.where(batch.mask > 0, batch.policy_version, 0))
    key = _mix(jnp.uint32(seed) ^ _mix(version.astype(jnp.uint32)))
    position = batch.positions.astype(jnp.uint32)
    token = _mix(batch.tokens.astype(jnp.uint32) ^ _mix(position ^ key))
    token = jnp.where(batch.segment_ids > 0, token, jnp.uint32(0))
    size = batch.tokens.shape[1] + 1

    def digest(row, ids):
        return jax.ops.segment_sum(row, ids, num_segments=size)[ids]

    sequence = jax.vmap(digest)(token, batch.segment_ids)
    return _mix(sequence ^ _mix(position ^ key))


def _clip_cov(
    policy, batch, difference, order, *, clip_low, clip_high, cov_low, cov_high, fraction
):
    """Computes clip_cov of a log-ratio [B, S], drawing the first k eligible tokens by `order` [B,
    S].

    Returns the eligible tokens as well.
    """
    advantages = batch_advantages(batch, by="clip_cov")
    loss, is_clipped = clipped_surrogate(advantages, jnp.exp(difference), clip_low, clip_high)
    covariance = _covariance(policy, batch, advantages)
    eligible = (batch.mask > 0) & ~is_clipped & (covariance > cov_low) & (covariance < cov_high)
    k = _count(fraction, batch)
    is_drawn = eligible & (_ranks(order, eligible) < k).reshape(eligible.shape)
    metrics = {
        "pg_clipfrac": indicator(is_clipped, batch),
        "cov_clipfrac": indicator(is_drawn, batch),
        "cov": covariance,
        "cov_tokens_max": jnp.broadcast_to(k.astype(loss.dtype), loss.shape),
    }
    return jnp.where(is_drawn, 0.0, loss), metrics | drift_metrics(difference), eligible


@contract(safe=True, reads=RATIO, whole_step=True)
def clip_cov(
    policy: PolicyOutputs,
    batch: Batch,
    *,
    clip_low: Share = 1.0,
    clip_high: NotNegative = 1.0,
    cov_low: NotNegative = 1.0,
    cov_high: NotNegative = 5.0,
    fraction: Share = 2e-4,
    seed: int = 0,
):
    """PPO clip without the gradient of k random tokens whose covariance is in (cov_low, cov_high).

    cov = (A - mean A)(log pi - mean log pi) over the step; k = max(1, floor(fraction N)); a token
    that PPO clips already is not eligible (Clip-Cov, arXiv 2505.22617). The draw is a function of
    `seed`, the policy's version and the sampled tokens: the same in every epoch over one batch.
    Returns [B, S]. Metrics: pg_clipfrac, cov_clipfrac (drawn), cov, cov_tokens_max = k, ppo_kl,
    ppo_k3.
    """
    loss, metrics, _ = _clip_cov(
        policy,
        batch,
        log_ratio(policy, batch, by="clip_cov"),
        _shuffle(batch, seed),
        clip_low=clip_low,
        clip_high=clip_high,
        cov_low=cov_low,
        cov_high=cov_high,
        fraction=fraction,
    )
    return loss, metrics


def _kl_cov(policy, batch, difference, fraction: float, kl_coef: float):
    """Computes kl_cov of a given log-ratio [B, S]."""
    advantages = batch_advantages(batch, by="kl_cov")
    covariance = _covariance(policy, batch, advantages)
    is_policy, k = batch.mask > 0, _count(fraction, batch)
    is_penalised = is_policy & (_ranks(-covariance, is_policy) < k).reshape(is_policy.shape)
    # x sign(x), not |x|: its derivative at 0 is 0.
    penalty = kl_coef * difference * jnp.sign(difference)
    loss = -advantages * jnp.exp(difference) + jnp.where(is_penalised, penalty, 0.0)
    metrics = {
        "cov": covariance,
        "cov_klfrac": indicator(is_penalised, batch),
        "cov_tokens_max": jnp.broadcast_to(k.astype(loss.dtype), loss.shape),
    }
    return loss, metrics | drift_metrics(difference)


@contract(safe=True, reads=RATIO, whole_step=True)
def kl_cov(
    policy: PolicyOutputs, batch: Batch, *, fraction: Share = 2e-3, kl_coef: NotNegative = 1.0
):
    """-A r, plus kl_coef |log r| at the k tokens of largest covariance (KL-Cov, arXiv 2505.22617).

    cov and k = max(1, floor(fraction N)) as in clip_cov, ties by lower flat index; no clip.
    Returns [B, S]. Metrics: cov, cov_klfrac (share of penalised tokens), cov_tokens_max = k,
    ppo_kl, ppo_k3.
    """
    return _kl_cov(policy, batch, log_ratio(policy, batch, by="kl_cov"), fraction, kl_coef)


def high_entropy(policy: PolicyOutputs, batch: Batch, fraction: float) -> jax.Array:
    """Returns 1 at the policy tokens whose entropy reaches the (1 - fraction) quantile of the step,
    else 0: [B, S]."""
    entropy = constant(policy.entropy, batch)
    ordered = jnp.sort(jnp.where(batch.mask > 0, entropy, jnp.inf).reshape(-1))
    n = jnp.sum((batch.mask > 0).astype(jnp.int32))
    rank = (1 - fraction) * jnp.maximum(n - 1, 0).astype(entropy.dtype)
    lower_index = jnp.floor(rank).astype(jnp.int32)
    low, high = ordered[lower_index], ordered[jnp.minimum(lower_index + 1, jnp.maximum(n - 1, 0))]
    threshold = low + (high - low) * (rank - lower_index)  # linear between the two neighbours
    return indicator(jnp.where(n > 0, entropy >= threshold, False), batch)


@contract(safe=True, reads=RATIO, whole_step=True)
def ppo_high_entropy(
    policy: PolicyOutputs,
    batch: Batch,
    *,
    fraction: Share = 0.2,
    clip_low: Share = 0.2,
    clip_high: NotNegative = 0.2,
    dual_clip: AboveZero | None = 3.0,
):
    """ppo_clip on the `fraction` of tokens with the highest entropy; the others give 0.

    "Beyond the 80/20 rule", arXiv 2506.01939. The quantile runs over the whole step, and the
    denominators still count every token. Returns [B, S]. Metrics as ppo_clip, and entropy_keep.
    """
    advantages = batch_advantages(batch, by="ppo_high_entropy")
    difference = log_ratio(policy, batch, by="ppo_high_entropy")
    ratio = jnp.exp(difference)
    loss, metrics = ppo_loss(advantages, difference, ratio, batch, clip_low, clip_high, dual_clip)
    metrics["entropy_keep"] = high_entropy(policy, batch, fraction)
    return loss * metrics["entropy_keep"], metrics


def _within_second_moment(squares: jax.Array, eligible: jax.Array, threshold) -> jax.Array:
    """Returns whether the mean of `squares` over the eligible tokens that have at most a token's
    own is at most the threshold: bool [B, S], of use at eligible tokens."""
    flat = jnp.where(eligible, squares, jnp.inf).reshape(-1)
    ordered = jnp.sort(flat)
    sums = jnp.cumsum(jnp.where(jnp.isfinite(ordered), ordered, 0.0))
    counts = jnp.maximum(jnp.searchsorted(ordered, flat, side="right"), 1)
    return (sums[counts - 1] <= threshold * counts).reshape(squares.shape)


@contract(
    safe=True,
    reads=lambda options: ("advantages", f"{options['behaviour']}_logprobs"),
    corrects_mismatch=lambda options: options["behaviour"] == "sampler",
    whole_step=True,
)
def m2po(
    policy: PolicyOutputs,
    batch: Batch,
    *,
    threshold: NotNegative = 0.04,
    tokens: Literal["trust_region", "all"] = "trust_region",
    behaviour: Behaviour = "sampler",
):
    """-A r where a bound on the mean of (log r)^2 over the step keeps the token, else 0.

    M2PO, arXiv 2510.01161, r = pi / pi_behaviour: of the tokens of the trust region, those with A >
    0 and r > 1 or A < 0 and r < 1, the ones with the largest (log r)^2 are left out until the mean
    of the rest is at most `threshold`; tokens with equal ones share their fate. The denominators
    still count every token. tokens="all" takes the mean over all policy tokens, and leaves any of
    them out, as AReaL does. The authors' own code clips in place of that: at the ratio that brings
    the mean of the clipped (log r)^2 to the threshold, but not inside of 0.7 and 1.5.
    Returns [B, S]. Metrics: second_moment, second_moment_masked, ppo_kl, ppo_k3.
    """
    advantages = batch_advantages(batch, by="m2po")
    difference = log_ratio(policy, batch, by="m2po", behaviour=behaviour)
    log_r = jax.lax.stop_gradient(difference)
    eligible = batch.mask > 0
    if tokens == "trust_region":
        eligible = eligible & (advantages * log_r > 0)
    squares = jnp.where(eligible, log_r**2, 0.0)
    is_masked = eligible & ~_within_second_moment(squares, eligible, threshold)
    metrics = {"second_moment": squares, "second_moment_masked": indicator(is_masked, batch)}
    loss = jnp.where(is_masked, 0.0, -advantages * jnp.exp(difference))
    return loss, metrics | drift_metrics(difference)
