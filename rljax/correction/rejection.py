"""Rejection: tokens or whole sequences whose divergence leaves a range do not count.

A rule is (statistic, lower, upper): keep where lower <= statistic <= upper; None leaves a side
open. With x = old - sampler: k1 = -x, k2 = x^2 / 2, k3 = e^x - 1 - x, all in nats (x clamped to
+-20); ratio = e^x, for which an open lower side means 1/upper. token_binary_kl is the larger of
the two Bernoulli divergences between "this token" and "any other" (no clamp, probabilities kept
inside 1e-6).
"""

import math

import jax
import jax.numpy as jnp

from rljax.batch import Batch, masked_mean, sampler_logprobs, segment_sum
from rljax.correction.ratios import (
    BOUND,
    bounded_exp,
    finite_logprobs,
    log_ratio,
    log_weights,
    segment_max,
    segment_mean,
    spread,
    weighted_mean,
)
from rljax.errors import InputError
from rljax.metric import Metric

METRICS = {
    "mismatch/rollout_rs_masked_fraction": Metric(
        "tokens rejected by the rules of `reject`",
        "share",
        limits=(0.0, 0.3),
        advice="rejection drops many tokens: widen the bounds in reject",
    ),
    "mismatch/rollout_rs_seq_masked_fraction": Metric(
        "sequences with a rejected token", "share", "below 0.3"
    ),
    "mismatch/rollout_rs_*": Metric("rejection statistic {}", "", "within the rule's bounds"),
}

RATIOS = ("token_ratio", "sequence_ratio", "geometric_ratio")
STATISTICS = (
    *RATIOS,
    "token_k1",
    "token_k2",
    "token_k3",
    "token_binary_kl",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k1",
    "seq_max_k2",
    "seq_max_k3",
)


def checked_rules(reject: tuple) -> tuple[tuple[str, float, float], ...]:
    """Returns (statistic, lower, upper) of each rule, with both sides filled in. Raises
    InputError for a rule that is no such triple, an unknown or repeated statistic, and limits
    that leave nothing."""
    fix = 'write reject=(("seq_mean_k3", None, 0.01),), one triple per statistic'
    rules = []
    for rule in reject:
        if not isinstance(rule, tuple) or len(rule) != 3:
            raise InputError("rejection rule", value=rule, rule="it is a triple", fix=fix)
        name, lower, upper = rule
        if name not in STATISTICS:
            raise InputError(
                "rejection statistic", value=name, rule=f"one of {', '.join(STATISTICS)}", fix=fix
            )
        if upper is not None and name in RATIOS and upper <= 0:
            raise InputError(
                f"upper bound of {name}",
                value=upper,
                rule="ratios are positive",
                fix=f"an upper bound above 0, such as ('{name}', 0.5, 2.0), or None for none",
            )
        if lower is None:
            lower = 1 / upper if name in RATIOS and upper is not None else -math.inf
        upper = math.inf if upper is None else upper
        if lower > upper:
            raise InputError(f"bounds of {name}", value=rule, rule="lower <= upper", fix=fix)
        if name in (n for n, *_ in rules):
            raise InputError(
                "rejection statistic",
                value=name,
                rule="each stands once",
                fix=f"leave all but one {name} out",
            )
        rules.append((name, float(lower), float(upper)))
    return tuple(rules)


def _binary_kl(p: jax.Array, q: jax.Array) -> jax.Array:
    """Returns the KL between Bernoulli(p) and Bernoulli(q)."""
    return p * jnp.log(p / q) + (1 - p) * jnp.log((1 - p) / (1 - q))


def statistic(name: str, batch: Batch, share: jax.Array) -> jax.Array:
    """Returns the statistic at every policy token; sequences repeat theirs: [B, S]."""
    if name == "token_binary_kl":
        logprobs = (batch.old_logprobs, sampler_logprobs(batch, by=f"rejection by {name}"))
        p, q = (jnp.clip(jnp.exp(finite_logprobs(x, batch.mask)), 1e-6, 1 - 1e-6) for x in logprobs)
        return jnp.maximum(_binary_kl(p, q), _binary_kl(q, p))
    x = log_ratio(batch, by=f"rejection by {name}")
    if name in RATIOS:
        return bounded_exp(log_weights(x, batch, share, name.removesuffix("_ratio")))
    x = jnp.clip(x, -BOUND, BOUND)
    level, estimator = name.rsplit("_", 1)
    value = {"k1": lambda: -x, "k2": lambda: 0.5 * x * x, "k3": lambda: jnp.expm1(x) - x}
    reduce = {
        "token": lambda v: v,
        "seq_sum": lambda v: segment_sum(v, batch),
        "seq_mean": lambda v: segment_mean(v, batch, share),
        "seq_max": lambda v: segment_max(v, batch),
    }
    return reduce[level](value[estimator]())


def rejected_fractions(rejected: jax.Array, batch: Batch, share: jax.Array) -> dict:
    """Returns the shares of the tokens, and of the sequences with any token, where rejected [B, S]
    is 1."""
    any_in_sequence = (segment_sum(rejected, batch) > 0).astype(rejected.dtype)
    return {
        "masked_fraction": masked_mean(rejected, batch.mask),
        "seq_masked_fraction": weighted_mean(any_in_sequence, share),
    }


def rejection(batch: Batch, rules: tuple, share: jax.Array) -> tuple[jax.Array, dict]:
    """Returns the accepted tokens [B, S], 1 where every rule holds, else 0, and metrics of how each
    statistic is spread."""
    accepted, metrics = jnp.ones_like(batch.mask), {}
    for name, lower, upper in rules:
        value = jax.lax.stop_gradient(statistic(name, batch, share))
        in_bounds = ((value >= lower) & (value <= upper)).astype(accepted.dtype)
        by_sequence = not name.startswith("token")
        numbers = spread(
            value,
            value if by_sequence else segment_mean(value, batch, share),
            batch.mask,
            share,
            by_sequence=by_sequence,
            bounds=(lower, upper),
            ideal=1.0 if name in RATIOS else 0.0,
        )
        numbers |= rejected_fractions(1 - in_bounds, batch, share)
        metrics |= {f"rollout_rs_{name}_{key}": number for key, number in numbers.items()}
        accepted = accepted * in_bounds
    if rules:
        fractions = rejected_fractions(1 - accepted, batch, share)
        metrics |= {f"rollout_rs_{key}": number for key, number in fractions.items()}
    return accepted, metrics
