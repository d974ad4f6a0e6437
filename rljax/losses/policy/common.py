"""Parts that the policy losses share: the policy's arrays, ratios, clamps, and their metrics.

Everything here selects policy tokens before it computes, so that garbage at mask 0, NaN included,
meets neither exp nor a gradient. Axes: B rows, S tokens.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from rljax import batch as batches
from rljax.batch import Batch
from rljax.metric import Metric

METRICS = {
    "ppo_kl": Metric(
        "how far the update moved the policy from the one that sampled, log old - log new",
        "nats per token",
        "within 0.05 of 0; more: lower learning rate or fewer epochs",
    ),
    "ppo_k3": Metric(
        "KL of the update by an estimate that is never negative",
        "nats per token",
        "below 0.05; more: lower learning rate or fewer epochs",
    ),
    "pg_clipfrac": Metric(
        "tokens whose ratio the clip holds back",
        "share",
        "0 at one optimizer step a batch, 0.01 to 0.2 with several; above 0.3 most of the gradient "
        "is cut",
    ),
    "pg_clipfrac_upper": Metric(
        "clipped tokens of good samples, that had become too likely", "share", "below 0.2"
    ),
    "pg_clipfrac_under": Metric(
        "clipped tokens of bad samples, that had become too unlikely", "share", "below 0.2"
    ),
    "sequence_keep": Metric(
        "tokens of sequences near enough to the sampler (max_sequence_kl)", "share", "above 0.7"
    ),
}

# The log-probs that a ratio divides by: those recomputed by the trainer, or the sampler's own.
Behaviour = Literal["old", "sampler"]
# One ratio per token, or the geometric mean of a sequence's ratios at each of its tokens.
Level = Literal["token", "sequence"]


class PolicyOutputs(NamedTuple):
    """log pi of the batch's tokens and the entropy of each choice, by the model as it is now; also,
    for a loss whose contract has `reads_greedy`, whether the token is the most likely one: [B, S]
    each. For one that has `reads_targets`, log pi of batch.target_ids [B, S, M]."""

    logprobs: jax.Array
    entropy: jax.Array
    greedy: jax.Array | None = None
    targets: jax.Array | None = None


def clip(x: jax.Array, low, high) -> jax.Array:
    """min(max(x, low), high) in the shape of x; the gradient is 1 at the bounds too, where
    jnp.clip halves it."""
    return jnp.where(x < low, low, jnp.where(x > high, high, x))


def constant(x: jax.Array, batch: Batch) -> jax.Array:
    """Returns x [B, S] at policy tokens and 0 elsewhere, without gradient."""
    return jax.lax.stop_gradient(jnp.where(batch.mask > 0, x, 0.0))


def policy_logprobs(policy: PolicyOutputs, batch: Batch) -> jax.Array:
    """Returns log pi at policy tokens and 0 elsewhere: [B, S]."""
    return jnp.where(batch.mask > 0, policy.logprobs, 0.0)


def batch_advantages(batch: Batch, *, by: str) -> jax.Array:
    """Returns the batch's advantages at policy tokens and 0 elsewhere, without gradient: [B, S].

    Raises InputError, in the name of the loss `by`, where the batch has none.
    """
    batch.require("advantages", by=by)
    return constant(batch.advantages, batch)


def log_difference(policy: PolicyOutputs, batch: Batch, *, by: str, behaviour: Behaviour = "old"):
    """Returns log pi - log pi_old (or log pi_sampler) at policy tokens, else 0, not clamped: [B,
    S].

    Raises InputError, in the name of the loss `by`, where the batch has no such log-probs.
    """
    name = f"{behaviour}_logprobs"
    batch.require(name, by=by)
    return policy_logprobs(policy, batch) - constant(batch.__dict__[name], batch)


def log_ratio(
    policy: PolicyOutputs, batch: Batch, *, by: str, behaviour: Behaviour = "old"
) -> jax.Array:
    """Returns log_difference clamped to +-20: [B, S]. Raises InputError as that does."""
    return clip(log_difference(policy, batch, by=by, behaviour=behaviour), -20.0, 20.0)


def sequence_mean(x: jax.Array, batch: Batch, tokens: jax.Array | None = None) -> jax.Array:
    """Returns the mean of x over the policy tokens of each token's own sequence, at every token:
    [B, S].

    `tokens` replaces the number of those tokens as the divisor.
    """
    count = jnp.maximum(batches.segment_tokens(batch), 1) if tokens is None else tokens
    return batches.segment_sum(x, batch) / count


def ratio_at(level: Level, difference: jax.Array, batch: Batch) -> jax.Array:
    """Returns exp(log-ratio [B, S]), or exp(its mean over the sequence) at each of its tokens: [B,
    S]."""
    if level == "token":
        return jnp.exp(difference)
    return jnp.exp(clip(sequence_mean(difference, batch), -20.0, 20.0))


def at_tokens(x: jax.Array, batch: Batch) -> jax.Array:
    """Returns x [B, S] at policy tokens and 0 elsewhere: no value of a sequence, nor gradient,
    there."""
    return jnp.where(batch.mask > 0, x, 0.0)


def drift_metrics(difference: jax.Array) -> dict:
    """Returns ppo_kl = old - new and ppo_k3 = r - 1 - log r, log r clamped to +-20, of `difference`
    = log r: [B, S] each."""
    bounded = clip(difference, -20.0, 20.0)
    return {"ppo_kl": -difference, "ppo_k3": jnp.exp(bounded) - 1 - bounded}


def indicator(condition: jax.Array, batch: Batch) -> jax.Array:
    """Returns 1 where the condition [B, S] holds at a policy token, else 0: its masked mean is a
    share."""
    return (condition & (batch.mask > 0)).astype(batch.mask.dtype)


def row_mean(x: jax.Array, batch: Batch) -> jax.Array:
    """Returns the mean over a row's sequences of a value that stands at each of their tokens: [B,
    S] -> [B]."""
    share = 1.0 / jnp.maximum(batches.segment_tokens(batch), 1)
    total = batches.row_sum(share * x, batch)
    return total / jnp.maximum(batches.row_sum(share, batch), 1)


def keep_near_sequences(
    policy: PolicyOutputs, batch: Batch, max_kl: float, *, by: str
) -> jax.Array:
    """Returns 1, but 0 where A < 0 and the mean of log sampler - log pi over the sequence exceeds
    max_kl.

    DeepSeek-V3.2's off-policy sequence mask (arXiv 2512.02556): a sequence that the policy would
    hardly sample any more is not pushed down further. No gradient: [B, S]. Raises InputError where
    the batch has no advantages or no log-probs of the sampler.
    """
    gap = jax.lax.stop_gradient(-log_difference(policy, batch, by=by, behaviour="sampler"))
    is_near = sequence_mean(gap, batch) <= max_kl
    return (is_near | (batch_advantages(batch, by=by) >= 0)).astype(batch.mask.dtype)


# -- what the contracts of the losses with a ratio declare

RATIO = ("advantages", "old_logprobs")


def ratio_and_near_sequences(options: dict) -> tuple[str, ...]:
    """Returns the fields that a ratio loss with the option max_sequence_kl reads."""
    return RATIO if options["max_sequence_kl"] is None else (*RATIO, "sampler_logprobs")
