"""Offline losses that tie a policy to a value: DQO token by token, DRO by whole responses.

Unreduced losses of the two networks, their targets, and the correction for data of another policy.
A policy loss reads the critic's V from `batch.values`, a value loss the policy's log-probs from
`old_logprobs` (and its entropies from `entropy`), so that each is a constant of the other. A loss
raises InputError where the batch lacks a field that it reads.

Axes: B rows, S tokens. Token h is the action a_h in the state s_h, everything before it; `values`
holds V(s_h) at token h. h+1 is the next token the policy chose in the same segment (tool output is
skipped), and V is 0 behind the last one. Rows may be packed, except for DRO.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp

from rljax import batch as batches
from rljax.batch import Batch
from rljax.contracts import contract
from rljax.errors import InputError
from rljax.kernels import gae as recurrences
from rljax.losses.policy.common import PolicyOutputs, at_tokens, constant
from rljax.metric import Metric

METRICS = {
    "dqo_residual_abs": Metric("size of the soft Bellman error of the policy", "score", "falls"),
    "dqo_value_residual_abs": Metric(
        "size of the soft Bellman error of the critic", "score", "falls"
    ),
    "value_at_prompt": Metric(
        "value that the critic gives the prompt", "score", "near return_at_prompt"
    ),
    "return_at_prompt": Metric("return from the prompt on", "score"),
    "is_weight": Metric("weight of the policy over whoever wrote the row", "ratio", "near 1"),
    "is_capped": Metric("tokens whose weight was capped", "share", "below 0.3"),
    "dro_residual_abs": Metric("error of reward = value + tau log-ratio", "score", "falls"),
    "dro_value": Metric("value of the prompt", "score", "near dro_reward"),
    "dro_reward": Metric("reward of the rows", "score"),
    "ref_kl": Metric("log policy - log reference of the rows' tokens", "nats per token", "near 0"),
    "ref_kl_sequence": Metric("log policy - log reference of whole completions", "nats", "near 0"),
}

# The tokens that one importance weight is the product over: the response, the rest of it from the
# token on, the token alone; or no correction.
Level = Literal["trajectory", "suffix", "token", "off"]
LEVELS = ("trajectory", "suffix", "token", "off")
# The log-probs that the data were drawn with: recorded ones, the reference's or old_logprobs.
Source = Literal["sampler", "ref", "old"]


def _choose(name: str, value, allowed: tuple) -> None:
    if value not in allowed:
        raise InputError(name, value=value, fix=f"write one of {', '.join(map(str, allowed))}")


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise InputError(name, value=value, fix="set it to a number above 0, such as 1.0")


# -- DQO: targets


def soft_rewards(logprobs: jax.Array, batch: Batch, *, beta: float) -> jax.Array:
    """r'_h = r_h + beta (log ref - log pi)(a_h|s_h) on policy tokens, else 0; no gradient: [B, S].

    The sample form of r_h + beta log ref + beta H(pi) (DQO, arXiv 2410.09302, section 4.2).
    """
    batch.require("rewards", "ref_logprobs", by="soft_rewards")
    penalty = constant(batch.ref_logprobs, batch) - constant(logprobs, batch)
    return constant(batch.rewards, batch) + beta * penalty


def _behind(batch: Batch, values: jax.Array, bootstrap_truncated: bool) -> jax.Array:
    """Returns V behind the last token, at that token: 0, or where the row was cut off and
    `bootstrap_truncated` the value of the last token, the nearest estimate there is: [B, S]."""
    if not bootstrap_truncated:
        return jnp.zeros_like(values)
    batch.require("finish_reason", by="bootstrap_truncated")
    is_cut = batches.truncated(batch)[:, None]
    return jnp.where(is_cut & (batches.last_token(batch) > 0), values, 0.0)


def lambda_returns(
    batch: Batch,
    values: jax.Array,
    *,
    logprobs: jax.Array,
    beta: float,
    lam: float,
    bootstrap_truncated: bool = False,
) -> jax.Array:
    """G_h = r'_h + (1 - lam) V(s_{h+1}) + lam G_{h+1} on policy tokens, else 0; no gradient.

    r' are `soft_rewards` of `logprobs`; G = V = 0 behind the end of a response, or the value of the
    last token where the row was cut off and `bootstrap_truncated`. DQO, arXiv 2410.09302, section
    4.2: [B, S]. Raises InputError unless 0 <= lam <= 1.
    """
    if not 0.0 <= lam <= 1.0:
        raise InputError(
            "lambda_returns(lam)",
            value=lam,
            rule="between 0 and 1",
            fix="lam=0.95, or another number of this range",
        )
    values = constant(values, batch)
    # At the last token (1 - lam) V + lam G of what is behind it is that value itself.
    end = _behind(batch, values, bootstrap_truncated)
    rewards = soft_rewards(logprobs, batch, beta=beta) + end
    # The returns of GAE with gamma = 1: A + V, A_h = r'_h + V(s_{h+1}) - V(s_h) + lam A_{h+1}.
    options = dict(gamma=1.0, lam=lam, segment_ids=batch.segment_ids)
    return recurrences.gae(rewards, values, batch.mask, **options)[1]


def _log_weights(logprobs, behaviour, batch: Batch, level: Level) -> jax.Array:
    """Returns the log of the uncapped weights at policy tokens, 0 elsewhere: [B, S]."""
    _choose("offline_weights(level)", level, LEVELS)
    if level == "off":
        return jnp.zeros_like(batch.mask)
    ratio = constant(logprobs, batch) - constant(behaviour, batch)
    if level == "trajectory":
        return at_tokens(batches.segment_sum(ratio, batch), batch)
    return batches.discounted_sum(ratio, batch, 1.0) if level == "suffix" else ratio


def offline_weights(
    logprobs: jax.Array,
    behaviour: jax.Array,
    batch: Batch,
    *,
    cap: float = math.e,
    level: Level = "trajectory",
) -> jax.Array:
    """w = min(cap, prod pi / mu) on policy tokens, else 0; no gradient: [B, S].

    pi and mu are log-probs [B, S]; the product runs over the response ("trajectory"), from the
    token on ("suffix"), or over the token alone; "off" = 1. DQO, arXiv 2410.09302, section 4.3;
    the cap e is not in the paper.
    """
    _positive("offline_weights(cap)", cap)
    log_weights = _log_weights(logprobs, behaviour, batch, level)
    if level == "off":
        return at_tokens(jnp.ones_like(batch.mask), batch)
    # The cap before exp: the product of a long response overflows.
    return at_tokens(jnp.exp(jnp.minimum(log_weights, math.log(cap))), batch)


def _correction(logprobs, batch: Batch, behaviour: Source, level: Level, cap: float, by: str):
    """Returns (weights, metrics) of `offline_weights` with the log-probs mu that the batch has."""
    _choose(f"{by}(behaviour)", behaviour, ("sampler", "ref", "old"))
    mu = batch.mask
    if level != "off":
        batch.require(f"{behaviour}_logprobs", by=by)
        mu = batch.__dict__[f"{behaviour}_logprobs"]
    weights = offline_weights(logprobs, mu, batch, cap=cap, level=level)
    capped = _log_weights(logprobs, mu, batch, level) > math.log(cap)
    return weights, {
        "is_weight": weights,
        "is_capped": (capped & (batch.mask > 0) & (level != "off")).astype(batch.mask.dtype),
    }


def _calibration(values: jax.Array, batch: Batch) -> dict:
    """Returns V at the first policy token, and the sum of the rewards after it: means over the
    sequences of a row, [B] each."""
    is_first = (batches.segment_order(batch) == 0) & (batch.mask > 0)
    count = jnp.maximum(jnp.sum(is_first, axis=1), 1)
    value = jnp.sum(jnp.where(is_first, values, 0.0), axis=1) / count
    return {
        "value_at_prompt": value,
        "return_at_prompt": batches.row_sum(batch.rewards, batch) / count,
    }


# -- DQO: the two losses


def _more_reads(options: dict) -> tuple[str, ...]:
    """Names the batch fields that the options of a DQO loss read beside its own."""
    behaviour = () if options["is_level"] == "off" else (f"{options['behaviour']}_logprobs",)
    return (*behaviour, *(("finish_reason",) if options["bootstrap_truncated"] else ()))


@contract(reads=lambda options: ("rewards", "values", "ref_logprobs", *_more_reads(options)))
def dqo_policy(
    policy: PolicyOutputs,
    batch: Batch,
    *,
    beta: float,
    lam: float = 1.0,
    one_step: bool = False,
    behaviour: Source = "sampler",
    is_level: Level = "trajectory",
    is_cap: float = math.e,
    bootstrap_truncated: bool = False,
):
    """w (beta log pi/ref(a_h|s_h) - (r_h + G_{h+1} - V(s_h)))^2: [B, S] (DQO, arXiv 2410.09302).

    V = `batch.values`, r = `batch.rewards` (process rewards included), G = `lambda_returns`, w =
    `offline_weights` against the log-probs named by `behaviour`. `one_step` puts V(s_{h+1}) in
    place of G_{h+1} and does not read lam. All but the first log pi is constant. Metrics:
    dqo_residual_abs, is_weight, is_capped, ref_kl, value_at_prompt and return_at_prompt [B].
    """
    by = "dqo_policy"
    _positive(f"{by}(beta)", beta)
    batch.require("rewards", "values", "ref_logprobs", by=by)
    values = constant(batch.values, batch)
    returns = values
    if not one_step:
        returns = lambda_returns(
            batch,
            values,
            logprobs=policy.logprobs,
            beta=beta,
            lam=lam,
            bootstrap_truncated=bootstrap_truncated,
        )
    end = _behind(batch, values, bootstrap_truncated)
    target = constant(batch.rewards, batch) + batches.next_policy_token(returns, batch) + end
    ratio = at_tokens(policy.logprobs, batch) - constant(batch.ref_logprobs, batch)
    residual = beta * ratio - (target - values)
    weights, metrics = _correction(policy.logprobs, batch, behaviour, is_level, is_cap, by)
    metrics |= {"dqo_residual_abs": jnp.abs(residual), "ref_kl": ratio}
    return weights * residual**2, metrics | _calibration(values, batch)


@contract(
    reads=lambda options: (
        "rewards",
        "ref_logprobs",
        "old_logprobs",
        *(("entropy",) if options["one_step"] else ()),
        *_more_reads(options),
    )
)
def dqo_value(
    values: jax.Array,
    batch: Batch,
    *,
    beta: float,
    lam: float = 1.0,
    one_step: bool = False,
    behaviour: Source = "sampler",
    is_level: Level = "trajectory",
    is_cap: float = math.e,
    bootstrap_truncated: bool = False,
):
    """w (G_h - V(s_h))^2, gradient through V(s_h) alone: values [B, S] -> [B, S] (DQO, 2410.09302).

    pi = `batch.old_logprobs`. `one_step`: G_h = r_h + beta log ref(a_h|s_h) + V(s_{h+1}) + beta
    H(pi(.|s_h)) with H = `batch.entropy`, and lam is not read. Metrics: dqo_value_residual_abs,
    is_weight, is_capped, value_at_prompt and return_at_prompt [B], and what explained variance
    takes, 1 - Var(residual) / Var(target): dqo_target, dqo_target_square, dqo_value_residual,
    dqo_value_residual_square.
    """
    by = "dqo_value"
    _positive(f"{by}(beta)", beta)
    batch.require("rewards", "ref_logprobs", "old_logprobs", by=by)
    values = at_tokens(values, batch)
    constant_values, options = (
        jax.lax.stop_gradient(values),
        {"bootstrap_truncated": bootstrap_truncated},
    )
    if one_step:
        batch.require("entropy", by=f"{by}(one_step)")
        target = constant(batch.rewards, batch) + batches.next_policy_token(constant_values, batch)
        target = target + _behind(batch, constant_values, bootstrap_truncated)
        soft_bonus = constant(batch.ref_logprobs, batch) + constant(batch.entropy, batch)
        target = target + beta * soft_bonus
    else:
        target = lambda_returns(
            batch, constant_values, logprobs=batch.old_logprobs, beta=beta, lam=lam, **options
        )
    residual = target - values
    weights, metrics = _correction(batch.old_logprobs, batch, behaviour, is_level, is_cap, by)
    metrics |= {
        "dqo_value_residual_abs": jnp.abs(residual),
        "dqo_value_residual": residual,
        "dqo_value_residual_square": residual**2,
        "dqo_target": target,
        "dqo_target_square": target**2,
    }
    return weights * residual**2, metrics | _calibration(constant_values, batch)


# -- DRO


def prompt_values(values: jax.Array, batch: Batch) -> jax.Array:
    """Returns V of the prompt: the value at the first policy token, 0 for a row without one: [B, S]
    -> [B].

    That token's state is the prompt alone. Rows are unpacked.
    """
    is_first = (batches.segment_order(batch) == 0) & (batch.mask > 0)
    return jnp.sum(jnp.where(is_first, values, 0.0), axis=1)


def _outcomes(batch: Batch, by: str) -> jax.Array:
    """Returns the reward of each row: the sum of its rewards, or its score where no rewards were
    placed."""
    if batch.rewards is None:
        batch.require("scores", by=by)
        return jax.lax.stop_gradient(batch.scores)
    return jax.lax.stop_gradient(batches.row_scores(batch))


def _dro_residual(ratio, value, batch: Batch, tau: float, by: str):
    """Returns (r - V - tau ratio, metrics), all [B]."""
    _positive(f"{by}(tau)", tau)
    reward = _outcomes(batch, by)
    residual = reward - value - tau * ratio
    return residual, {
        "dro_residual_abs": jnp.abs(residual),
        "dro_value": value,
        "dro_reward": reward,
        "ref_kl_sequence": ratio,
    }


def _log_ratio(logprobs: jax.Array, batch: Batch, by: str) -> jax.Array:
    """Returns log pi(y) - log ref(y): [B]."""
    batch.require("ref_logprobs", by=by)
    return jnp.sum(at_tokens(logprobs, batch) - constant(batch.ref_logprobs, batch), axis=1)


@contract(
    reads=lambda options: (
        "rewards",
        "ref_logprobs",
        *(("values",) if options["value"] is None else ()),
    )
)
def dro_policy(
    policy: PolicyOutputs,
    batch: Batch,
    value: jax.Array | None = None,
    *,
    tau: float,
    gradient: Literal["rescaled", "exact"] = "rescaled",
):
    """1/2 (r - V(x) - tau log pi/ref(y))^2: [B] (DRO-V, arXiv 2405.19107).

    With value = V*, estimated beforehand from samples of the reference, and gradient="exact" it is
    half of A*PO's loss, (tau log pi/ref(y) - (r - V*))^2 (arXiv 2505.20686).

    value [B] is a constant; None takes `batch.values` at the first policy token. "rescaled" divides
    the gradient by tau, as the paper does; the value of the loss stays. r = the row's rewards, or
    `scores` where it has none. Metrics [B]: dro_residual_abs, dro_value, dro_reward,
    ref_kl_sequence.
    """
    by = "dro_policy"
    _choose(f"{by}(gradient)", gradient, ("rescaled", "exact"))
    if value is None:
        batch.require("values", by=by)
        value = prompt_values(batch.values, batch)
    ratio = _log_ratio(policy.logprobs, batch, by)
    if gradient == "rescaled":
        constant_ratio = jax.lax.stop_gradient(ratio)
        ratio = constant_ratio + (ratio - constant_ratio) / tau
    residual, metrics = _dro_residual(ratio, jax.lax.stop_gradient(value), batch, tau, by)
    return 0.5 * residual**2, metrics


@contract(reads=("rewards", "ref_logprobs", "old_logprobs"))
def dro_value(value: jax.Array, batch: Batch, *, tau: float):
    """1/2 (r - V(x) - tau log pi/ref(y))^2, gradient through V alone: [B] (DRO-V, 2405.19107).

    value [B], or a critic's values [B, S], of which the one at the first policy token is read; pi =
    `batch.old_logprobs`. The fixed point is V = tau log E_ref exp(r / tau). Metrics as dro_policy.
    """
    by = "dro_value"
    batch.require("old_logprobs", by=by)
    value = prompt_values(value, batch) if value.ndim == 2 else value
    ratio = jax.lax.stop_gradient(_log_ratio(batch.old_logprobs, batch, by))
    residual, metrics = _dro_residual(ratio, value, batch, tau, by)
    return 0.5 * residual**2, metrics
