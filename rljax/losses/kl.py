"""KL to the reference policy: estimators and the penalty in the reward.

The exact KL of two next-token distributions: rljax.losses.distillation.jsd_terms(beta=1), summed.
"""

import jax
import jax.numpy as jnp

from rljax.batch import Batch
from rljax.contracts import contract
from rljax.errors import InputError
from rljax.losses.policy.common import clip

ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+")


def kl_estimate(logprobs: jax.Array, ref_logprobs: jax.Array, estimator: str = "k3") -> jax.Array:
    """Per-token estimate of KL(pi || ref) from samples of pi, d = log pi - log ref: [B, S].

    k1 = d; abs = |d|; k2 = d^2 / 2; k3 = exp(-d) - 1 + d, with -d clamped to +-20 and k3 to +-10. A
    trailing "+" keeps the value and takes k2's gradient, whose expectation is that of the KL.
    Raises InputError for another estimator.
    """
    if estimator not in ESTIMATORS:
        raise InputError(
            "KL estimator", value=estimator, fix=f"write one of {', '.join(ESTIMATORS)}"
        )
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
    return clip(_k3(d), -10.0, 10.0)


def _k3(d: jax.Array) -> jax.Array:
    """Returns exp(-d) - 1 + d with -d clamped to +-20; unbounded otherwise."""
    minus_d = clip(-d, -20.0, 20.0)
    return jnp.exp(minus_d) - 1 - minus_d


def importance_corrected_kl(
    logprobs: jax.Array, ref_logprobs: jax.Array, old_logprobs: jax.Array, estimator: str = "k3"
) -> jax.Array:
    """r k(d) with r = pi / pi_old: the estimate from samples of pi_old, gradient through both.

    For k3 that is DeepSeek-V3.2's unbiased estimator (arXiv 2512.02556): its expected gradient is
    that of KL(pi || ref), which k3 alone misses. log r is clamped to +-20: [B, S] -> [B, S].
    """
    ratio = jnp.exp(clip(logprobs - jax.lax.stop_gradient(old_logprobs), -20.0, 20.0))
    return ratio * kl_estimate(logprobs, ref_logprobs, estimator)


@contract(reads=("rewards", "old_logprobs", "ref_logprobs"))
def kl_penalised_rewards(batch: Batch, *, coef: float, estimator: str = "k1") -> jax.Array:
    """rewards - coef KL(old || ref) at every policy token; a constant of the batch: [B, S].

    Raises InputError where the batch lacks rewards, old_logprobs or ref_logprobs, and for
    another estimator.
    """
    batch.require("rewards", "old_logprobs", "ref_logprobs", by="kl_in_reward")
    is_policy = batch.mask > 0
    old_logprobs = jnp.where(is_policy, batch.old_logprobs, 0.0)
    ref_logprobs = jnp.where(is_policy, batch.ref_logprobs, 0.0)
    rewards = jnp.where(is_policy, batch.rewards, 0.0) - coef * jnp.where(
        is_policy, kl_estimate(old_logprobs, ref_logprobs, estimator), 0.0
    )
    return jax.lax.stop_gradient(rewards)
