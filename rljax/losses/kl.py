"""KL to the reference policy: estimators (ALGORITHMS B1), the penalty in the reward (B2), and the
exact KL of two categoricals (D2)."""

import jax
import jax.numpy as jnp

from rljax.batch import Batch
from rljax.errors import InputError

ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+")


def kl_estimate(logprobs: jax.Array, ref_logprobs: jax.Array, estimator: str = "k3") -> jax.Array:
    """Per-token estimate of KL(pi || ref) from samples of pi, d = log pi - log ref: [B, S] -> [B,
    S].

    k1 = d; abs = |d|; k2 = d^2 / 2; k3 = exp(-d) - 1 + d, with -d clamped to +-20 and k3 to +-10.
    A trailing "+" keeps the value and takes k2's gradient, whose expectation is the gradient of the
    KL.
    """
    if estimator not in ESTIMATORS:
        raise InputError("KL estimator", value=estimator, rule=f"one of {', '.join(ESTIMATORS)}")
    if estimator.endswith("+"):
        value = kl_estimate(logprobs, ref_logprobs, estimator[:-1])
        carrier = kl_estimate(logprobs, ref_logprobs, "k2")
        return carrier - jax.lax.stop_gradient(carrier) + jax.lax.stop_gradient(value)
    d = logprobs - jax.lax.stop_gradient(ref_logprobs)
    if estimator == "k1":
        return d
    if estimator == "abs":
        return d * jnp.sign(d)  # not |d|: its derivative at 0 is 0
    if estimator == "k2":
        return 0.5 * d * d
    return _clip(_k3(d), 10.0)


def _k3(d: jax.Array) -> jax.Array:
    """exp(-d) - 1 + d with -d clamped to +-20; unbounded otherwise."""
    minus_d = _clip(-d, 20.0)
    return jnp.exp(minus_d) - 1 - minus_d


def _clip(x: jax.Array, bound: float) -> jax.Array:
    """x within +-bound, with gradient 1 at the bounds too (jnp.clip halves it there)."""
    return jnp.where(x < -bound, -bound, jnp.where(x > bound, bound, x))


def importance_corrected_kl(
    logprobs: jax.Array, ref_logprobs: jax.Array, old_logprobs: jax.Array, estimator: str = "k3"
) -> jax.Array:
    """r k(d) with r = pi / pi_old: the estimate from samples of pi_old, gradient through both.

    For k3 that is DeepSeek-V3.2's unbiased estimator (arXiv 2512.02556): its expected gradient is
    that of KL(pi || ref), which k3 alone misses. log r is clamped to +-20: [B, S] -> [B, S].
    """
    ratio = jnp.exp(_clip(logprobs - jax.lax.stop_gradient(old_logprobs), 20.0))
    return ratio * kl_estimate(logprobs, ref_logprobs, estimator)


def exact_kl(logits: jax.Array, other_logits: jax.Array) -> jax.Array:
    """KL(p || q) = sum_v p_v (log p_v - log q_v), p and q the softmax of [..., V] logits: [...].

    Logarithms of probabilities are logits as well; a word of probability 0 (-inf) adds nothing.
    """
    log_p = jax.nn.log_softmax(logits, axis=-1)
    log_q = jax.nn.log_softmax(other_logits, axis=-1)
    possible = log_p > -jnp.inf
    # Both are selected first: inf - inf would be NaN, in the gradient too.
    gap = jnp.where(possible, log_p, 0.0) - jnp.where(possible, log_q, 0.0)
    return jnp.sum(jnp.where(possible, jnp.exp(log_p) * gap, 0.0), axis=-1)


def kl_penalised_rewards(batch: Batch, *, coef: float, estimator: str = "k1") -> jax.Array:
    """rewards - coef KL(old || ref) at every policy token; a constant of the batch: [B, S]."""
    batch.require("rewards", "old_logprobs", "ref_logprobs", by="kl_in_reward")
    keep = batch.mask > 0
    old = jnp.where(keep, batch.old_logprobs, 0.0)
    ref = jnp.where(keep, batch.ref_logprobs, 0.0)
    rewards = jnp.where(keep, batch.rewards, 0.0) - coef * jnp.where(
        keep, kl_estimate(old, ref, estimator), 0.0
    )
    return jax.lax.stop_gradient(rewards)
