"""Policy losses: (policy, batch, **options) -> (loss [B, S], metrics of the same shape).

What lives here: the formulas, unreduced. What does not: masking and averaging (rljax.update),
models.
`policy` holds logprobs [B, S] and entropy [B, S]; every other array is a constant of the batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rljax.batch import Batch


class Policy(NamedTuple):
    """What the model says about the batch's tokens now: log pi(tokens) and the entropy of each
    choice."""

    logprobs: jax.Array
    entropy: jax.Array


def log_ratio(policy: Policy, batch: Batch, *, by: str) -> jax.Array:
    """log pi - log pi_old on policy tokens, clamped to +-20, and 0 elsewhere."""
    batch.require("old_logprobs", by=by)
    old = jax.lax.stop_gradient(batch.old_logprobs)
    # Selecting first keeps garbage at mask 0 out of exp, and so out of the gradient.
    difference = jnp.where(batch.mask > 0, policy.logprobs - old, 0.0)
    return jnp.clip(difference, -20.0, 20.0)


def negative_log_likelihood(policy: Policy, batch: Batch):
    """-log pi(token): supervised fine-tuning (ALGORITHMS A1)."""
    return -policy.logprobs, {}


def policy_gradient(policy: Policy, batch: Batch):
    """-A log pi (REINFORCE, ALGORITHMS D1)."""
    batch.require("advantages", by="policy_gradient")
    return -jax.lax.stop_gradient(batch.advantages) * policy.logprobs, {}


def ppo_clip(
    policy: Policy,
    batch: Batch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
):
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = pi / pi_old; where A < 0 at most -A
    dual_clip.

    arXiv 1707.06347; dual clip 1912.09729; clip_high > clip_low is DAPO's clip-higher, 2503.14476.
    Metrics: pg_clipfrac, pg_clipfrac_lower (dual clip active), ppo_kl = old - new, ppo_k3.
    """
    batch.require("advantages", by="ppo_clip")
    advantages = jax.lax.stop_gradient(batch.advantages)
    difference = log_ratio(policy, batch, by="ppo_clip")
    ratio = jnp.exp(difference)
    unclipped = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = jnp.maximum(unclipped, clipped)
    metrics = {"pg_clipfrac": (clipped > unclipped).astype(jnp.float32)}
    if dual_clip is not None:
        bound = -advantages * dual_clip
        bounded = (advantages < 0) & (loss > bound)
        loss = jnp.where(advantages < 0, jnp.minimum(loss, bound), loss)
        metrics["pg_clipfrac_lower"] = bounded.astype(jnp.float32)
    metrics["ppo_kl"] = -difference
    metrics["ppo_k3"] = ratio - 1 - difference
    return loss, metrics
