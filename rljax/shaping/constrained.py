"""CGPO: rewards under the constraints of judges, and what each of its three optimizers learns from
(arXiv 2409.20370).

Functions of numbers, without gradient. An optimizer is a function (responses, *, options) ->
Targets, which config text names: "crpg(kl_max=5.0)", or one of your own; the loss of Targets is
rljax.losses.constrained. Axes: P prompts, K samples of each, k rows of a prompt that are learned
from.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rljax.batch import masked_mean
from rljax.contracts import AboveZero, NotNegative, contract
from rljax.errors import InputError
from rljax.shaping.pairs import of_prompts


class GroupedResponses(NamedTuple):
    """The samples of each prompt, and its baseline response. Values where `live` is false (a reward
    failed, a prompt of another task) may be garbage."""

    rewards: jax.Array  # [P, K]
    compliant: jax.Array  # [P, K] bool: all judges pass
    log_ratios: jax.Array  # [P, K]: log pi - log ref, summed over the response
    tokens: jax.Array  # [P, K]: policy tokens
    live: jax.Array  # [P, K] bool
    baseline_rewards: jax.Array  # [P]
    baseline_compliant: jax.Array  # [P] bool

    @property
    def calibrated(self) -> jax.Array:
        """R_cal of the samples, 0 where they are not live: [P, K]."""
        rewards = jnp.where(self.live, self.rewards, 0.0)
        has_live = jnp.any(self.live, axis=1)
        baseline = jnp.where(has_live, self.baseline_rewards, 0.0)[:, None]
        return jnp.where(self.live, calibrated_rewards(rewards, baseline), 0.0)

    @property
    def passing(self) -> jax.Array:
        """Live samples that all judges pass: [P, K] bool."""
        return self.live & self.compliant

    def where(self, prompts: jax.Array) -> "GroupedResponses":
        """Returns the same responses, live at these prompts alone: [P] bool."""
        return self._replace(
            live=self.live & prompts[:, None], baseline_compliant=self.baseline_compliant & prompts
        )


class Targets(NamedTuple):
    """Objective of an optimizer step: the mean over its `count` examples of -weights log pi(row),
    and with pair_beta > 0 of the DPO loss of row 0 of a prompt against row 1."""

    rows: jax.Array  # [P, k] int: a sample of the prompt, or K, its baseline response
    weights: jax.Array  # [P, k]
    keep: jax.Array  # [P, k] bool
    count: jax.Array  # scalar
    pair_beta: float = 0.0
    metrics: dict = {}


def calibrated_rewards(rewards: jax.Array, baseline_rewards: jax.Array) -> jax.Array:
    """Returns sigmoid(r(s, a) - r(s, baseline)), elementwise, shapes broadcast: 1/2 is as good as
    the baseline response."""
    return jax.nn.sigmoid(rewards - baseline_rewards)


def kl_factors(log_ratios: jax.Array, *, kl_max: AboveZero, cap: bool = False) -> jax.Array:
    """Returns max(1 - log_ratio / kl_max, 0), elementwise, in the shape of the log-ratios, which
    are nats as kl_max is; a negative one gives more than 1, unless `cap`."""
    factors = jnp.maximum(1 - log_ratios / kl_max, 0.0)
    return jnp.minimum(factors, 1.0) if cap else factors


def constrained_rewards(calibrated: jax.Array, compliant: jax.Array) -> jax.Array:
    """Returns R_cal where all judges pass, else 0, elementwise, in the shape of both."""
    return jnp.where(compliant, calibrated, 0.0)


@contract(safe=True)
def crpg(
    responses: GroupedResponses, *, kl_max: AboveZero = 10.0, cap_kl_factor: bool = False
) -> Targets:
    """Every sample, weighted by R~ - mean R~, R~ = max(1 - log_ratio / kl_max, 0) R_cal 1[all
    judges pass]: calibrated-regularised policy gradient.

    The mean runs over the live samples of the task. R~ is at least 0, and 0 where a judge fails, so
    a violating sample is never made more likely. kl_max: nats of a whole response. Raises
    InputError unless kl_max > 0.
    """
    _positive("crpg(kl_max)", kl_max)
    live = responses.live
    log_ratios = jnp.where(live, responses.log_ratios, 0.0)
    factors = kl_factors(log_ratios, kl_max=kl_max, cap=cap_kl_factor)
    rewards = factors * constrained_rewards(responses.calibrated, responses.passing)
    weights = jnp.where(live, rewards - masked_mean(rewards, live), 0.0)
    metrics = {
        "kl_factor": masked_mean(factors, live),
        "regularised_reward": masked_mean(rewards, live),
    }
    rows = jnp.broadcast_to(jnp.arange(live.shape[1]), live.shape)
    return Targets(rows, weights, live, jnp.sum(live), metrics=metrics)


@contract(safe=True)
def codpo(
    responses: GroupedResponses, *, beta: AboveZero = 0.1, nll_coef: NotNegative = 1.0
) -> Targets:
    """Pairs: the best compliant sample against the worst violating one, and nll_coef / tokens of
    -log pi(chosen): constrained online DPO.

    Without a violating sample the worst one is rejected; a prompt without a compliant one is
    skipped. Ties go to the first. Best and worst are by reward: calibration keeps the order. Raises
    InputError unless beta > 0 and nll_coef >= 0.
    """
    _positive("codpo(beta)", beta)
    if nll_coef < 0:
        raise InputError(
            "codpo(nll_coef)",
            value=nll_coef,
            fix="codpo(nll_coef=1.0), or another number of 0 or more",
        )
    live, passing = responses.live, responses.passing
    violating = live & ~responses.compliant
    has_violation = jnp.any(violating, axis=1, keepdims=True)
    chosen = jnp.argmax(jnp.where(passing, responses.rewards, -jnp.inf), axis=1)
    rejectable = jnp.where(has_violation, violating, live)
    rejected = jnp.argmin(jnp.where(rejectable, responses.rewards, jnp.inf), axis=1)
    has_passing = jnp.any(passing, axis=1)
    tokens = jnp.maximum(of_prompts(responses.tokens, chosen), 1)
    nll_weight = nll_coef / tokens
    weights = jnp.stack([nll_weight, jnp.zeros_like(nll_weight)], axis=1)
    with_violation = masked_mean(has_violation[:, 0].astype(nll_weight.dtype), has_passing)
    return Targets(
        jnp.stack([chosen, rejected], axis=1),
        weights,
        jnp.repeat(has_passing[:, None], 2, axis=1),
        jnp.sum(has_passing),
        beta,
        {"violating_rejected_fraction": with_violation},
    )


@contract(safe=True)
def crraft(responses: GroupedResponses, *, kl_max: AboveZero = 10.0) -> Targets:
    """The compliant sample of the best R_cal among those with log_ratio <= kl_max, weighted by
    R_cal: calibrated-regularised reward ranking fine-tuning.

    Where none is left: the baseline response, if it complies (its R_cal is 1/2), else the
    prompt is skipped. Ties go to the first. kl_max: nats of a whole response. Raises InputError
    unless kl_max > 0.
    """
    _positive("crraft(kl_max)", kl_max)
    calibrated, samples = responses.calibrated, responses.live.shape[1]
    within_kl = responses.log_ratios <= kl_max
    is_eligible = responses.passing & within_kl
    best_sample = jnp.argmax(jnp.where(is_eligible, calibrated, -jnp.inf), axis=1)
    has_eligible = jnp.any(is_eligible, axis=1)
    learned = has_eligible | responses.baseline_compliant
    rows = jnp.where(has_eligible, best_sample, samples)
    weights = jnp.where(has_eligible, of_prompts(calibrated, best_sample), 0.5)
    metrics = {
        "within_kl_fraction": masked_mean(within_kl.astype(weights.dtype), responses.live),
        "baseline_fallbacks": jnp.sum(learned & ~has_eligible).astype(weights.dtype),
    }
    columns = (x[:, None] for x in (rows, weights, learned))
    return Targets(*columns, jnp.sum(learned), metrics=metrics)


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise InputError(name, value=value, fix=f"set {name} to a number above 0")
