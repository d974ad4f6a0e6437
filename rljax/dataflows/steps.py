"""The steps that online dataflows share: a batch in, a batch out, inside one jitted program.

A dataflow calls them in the order of this file: log-probs, rollout correction, baseline filters,
reward shaping, advantages, row filters, update.
"""

import dataclasses

import jax
import jax.numpy as jnp

from rljax import batch as batches
from rljax.advantages.returns import lagrangian
from rljax.batch import Batch
from rljax.contracts import is_zero, spec
from rljax.correction import bypass_old_logprobs, mismatch_metrics
from rljax.errors import InputError
from rljax.learn import Steps
from rljax.learn.metrics import batch_metrics, reference_kl
from rljax.losses.kl import kl_estimate, kl_penalised_rewards
from rljax.metric import Metric
from rljax.roles.teachers import Teachers
from rljax.shaping.scores import apply_shaping

METRICS = {
    "kl_controller/kl": Metric(
        "KL that the controller sees", "nats per token", "near algorithm.kl_target"
    ),
    "kl_controller/scale": Metric("factor on the KL coefficient", "x", "steady in the end"),
    "entropy_controller/entropy": Metric(
        "entropy of the samples that the controller sees, the mean of -log pi",
        "nats per token",
        "at algorithm.entropy_target or above",
    ),
    "entropy_controller/coef": Metric(
        "coefficient of this step's entropy bonus",
        "x",
        "0 while the entropy is above algorithm.entropy_target, or as entropy_schedule says",
    ),
    "teacher/gap": Metric(
        "log policy - log teacher at the sampled tokens, of those that have a teacher",
        "nats per token",
        "falls to 0",
    ),
    "teacher/gap/*": Metric(
        "log policy - log teacher at the sampled tokens of teacher {}",
        "nats per token",
        "falls to 0",
    ),
    "teacher/none_fraction": Metric(
        "policy tokens of prompts without a teacher", "share", "0, if all prompts should have one"
    ),
    "filter/kept_fraction": Metric("rows that are learned from", "share", "above 0.3"),
}


def compute_logprobs(batch: Batch, cfg, *, actor, reference=None, critic=None, teacher=None):
    """Computes old log-probs with the actor (or takes the sampler's own, algorithm.old_logprobs =
    "sampler"), log-probs of the reference and the teacher, and values, all [B, S].

    Returns (batch, metrics: the load of the actor's experts, the gap to the teacher)."""
    metrics = {}
    if cfg.old_logprobs == "sampler":
        batch = bypass_old_logprobs(batch).replace(weights=batch.weights)
    else:
        old_logprobs, metrics = actor.logprobs_and_load(batch, cfg.steps)
        batch = batch.replace(old_logprobs=old_logprobs)
    if reference is not None:
        batch = batch.replace(ref_logprobs=reference.logprobs(batch, cfg.steps))
    if critic is not None:
        batch = batch.replace(values=critic.values(batch, cfg.steps))
    if "sum_pi_squared" in spec(cfg.advantage).reads:
        batch = batch.replace(sum_pi_squared=actor.sum_pi_squared(batch, cfg.steps))
    if teacher is not None:
        if batch.teacher_logprobs is None:  # a rollout may know them: it showed the teacher more
            batch = batch.replace(teacher_logprobs=teacher.logprobs(batch, cfg.steps))
        metrics = {**metrics, **_gap_metrics(batch, teacher)}
    return batch, metrics


def teacher_gap(batch: Batch) -> jax.Array:
    """Returns log pi_old - log teacher of the policy tokens, 0 where no teacher has the prompt:
    [B, S], in nats. Its mean over samples of the policy estimates KL(policy || teacher).

    Raises InputError where the batch lacks old_logprobs or teacher_logprobs."""
    batch.require("old_logprobs", "teacher_logprobs", by="teacher_gap")
    taught = batch.mask > 0 if batch.teacher is None else (batch.mask > 0) & (batch.teacher > 0)
    return jnp.where(taught, batch.old_logprobs, 0.0) - jnp.where(taught, batch.teacher_logprobs, 0)


def mask_untaught_rows(batch: Batch) -> tuple[Batch, dict]:
    """Masks the tokens of prompts that no teacher has. Returns (batch, their share as a metric);
    the batch as it is and {} where one teacher has all."""
    if batch.teacher is None:
        return batch, {}
    taught = batch.replace(mask=jnp.where(batch.teacher > 0, batch.mask, 0.0))
    return taught, {"teacher/none_fraction": _untaught(batch)}


def _untaught(batch: Batch):
    return batches.masked_mean((batch.teacher == 0).astype(batch.mask.dtype), batch.mask)


def _gap_metrics(batch: Batch, teacher) -> dict:
    gap = teacher_gap(batch)
    if batch.teacher is None:
        return {"teacher/gap": batches.masked_mean(gap, batch.mask)}
    taught = jnp.where(batch.teacher > 0, batch.mask, 0.0)
    masks = {"teacher/gap": taught}
    if isinstance(teacher, Teachers):
        for name, (_, mask) in zip(teacher.names, teacher.teaching(batch), strict=True):
            masks[f"teacher/gap/{name}"] = mask
    # NaN, which is not logged, where no token is taught.
    gaps = {
        name: jnp.where(jnp.any(mask > 0), batches.masked_mean(gap, mask), jnp.nan)
        for name, mask in masks.items()
    }
    return gaps | {"teacher/none_fraction": _untaught(batch)}


def apply_rollout_correction(batch: Batch, cfg):
    """Computes importance weights [B, S] of the trainer's policy against the sampler's, by
    algorithm.correction.

    Returns (batch with the weights, that batch without the tokens that the correction rejects,
    metrics). A rejected token leaves the loss, not the baseline.
    """
    # In bypass the trainer's own log-probs are not known: there is nothing to compare.
    metrics = {} if cfg.old_logprobs == "sampler" else mismatch_metrics(batch)
    if cfg.correction is None:
        return batch, batch, metrics
    accepted, correction_metrics = cfg.correction(batch)
    factors = (batch.weights, accepted.weights)  # those that a rollout gave, and the correction's
    weights = factors[0] * factors[1] if None not in factors else factors[factors[0] is None]
    return batch.replace(weights=weights), accepted, {**metrics, **correction_metrics}


def filter_baseline_rows(batch: Batch, cfg) -> Batch:
    """Removes the rows that algorithm.baseline_filters reject from the loss and from the statistics
    of their group: each gets a group of its own. An episode is removed if any of its rows is."""
    for rule in cfg.baseline_filters:
        keep = batches.of_whole_sequences(rule(batch), batch)
        own_group = jnp.max(batch.group) + 1 + jnp.arange(batch.rows, dtype=batch.group.dtype)
        batch = batch.replace(
            mask=batch.mask * keep[:, None], group=jnp.where(keep > 0, batch.group, own_group)
        )
    return batch


def shape_rewards(batch: Batch, cfg, kl_controller=None) -> Batch:
    """Applies each rule of algorithm.reward_shaping in turn, then the KL penalty in the reward."""
    return apply_kl_penalty(apply_shaping(batch, cfg.reward_shaping), cfg, kl_controller)


def apply_kl_penalty(batch: Batch, cfg, kl_controller=None, sign: float = 1.0) -> Batch:
    """Subtracts the KL penalty of algorithm.kl_in_reward from the rewards [B, S]; `sign` -1 adds
    it, as a cost needs."""
    if is_zero(cfg.kl_in_reward):
        return batch
    scale = sign if kl_controller is None else sign * kl_controller.state
    rewards = kl_penalised_rewards(
        batch, coef=cfg.kl_in_reward * scale, estimator=cfg.kl_reward_estimator
    )
    return batch.replace(rewards=rewards)


def use_costs_as_rewards(batch: Batch) -> Batch:
    """Returns the batch with costs, cost_values and cost_returns in the fields of the reward, where
    an advantage and a critic read them."""
    return batch.replace(rewards=batch.costs, values=batch.cost_values, returns=batch.cost_returns)


def use_lagrangian_advantage(cfg, multiplier, kl_controller=None, *, kl_split: float, clip: float):
    """Returns a `cfg` whose advantage is A = (A_R - lambda A_C) / (1 + lambda), A_R and A_C being
    algorithm.advantage of the rewards and of the costs, both clipped to +-clip at every token.

    With the coefficient beta of algorithm.kl_in_reward, kl_split * beta * KL is subtracted from the
    rewards and added to the costs, so that A has it with the weight kl_split * beta for every
    lambda."""
    cfg = cfg.replace(kl_in_reward=kl_split * cfg.kl_in_reward)

    def advantage(rewarded: Batch):
        costly = apply_kl_penalty(use_costs_as_rewards(rewarded), cfg, kl_controller, -1.0)
        (reward_advantages, returns), (cost_advantages, cost_returns) = (
            cfg.advantage(scored.replace(rewards=jnp.clip(scored.rewards, -clip, clip)))
            for scored in (rewarded, costly)
        )
        return (
            lagrangian(reward_advantages, cost_advantages, multiplier.value),
            returns,
            cost_returns,
        )

    return cfg.replace(advantage=advantage)


def compute_advantages(batch: Batch, rewarded: Batch, cfg) -> Batch:
    """Computes advantages [B, S] from the shaped rewards, and returns [B, S], also of costs, where
    algorithm.advantage gives them. algorithm.teacher_coef (log teacher - log pi_old) is added to
    the advantage of every token, and to no return."""
    result = cfg.advantage(rewarded)
    results = result if isinstance(result, tuple) else (result,)
    advantages, returns, cost_returns = (*results, None, None)[:3]
    if not is_zero(cfg.teacher_coef):
        advantages = advantages - cfg.teacher_coef * teacher_gap(batch)
    return batch.replace(advantages=advantages, returns=returns, cost_returns=cost_returns)


def filter_rows(batch: Batch, accepted: Batch, cfg):
    """Masks the tokens that the correction rejected (those that `accepted` lacks) and the rows that
    algorithm.filters reject; both were part of the baseline.

    Returns (batch, metrics)."""
    # The same array where nothing was rejected: then all passes are packed alike, and once.
    unchanged = accepted.mask is batch.mask
    learned = batch if unchanged else batch.replace(mask=batch.mask * accepted.mask)
    for rule in cfg.filters:
        keep = batches.of_whole_sequences(rule(batch), batch)
        learned = learned.replace(mask=learned.mask * keep[:, None])
    kept_fraction = jnp.sum(jnp.any(learned.mask > 0, axis=1)) / batch.rows
    return learned, {"filter/kept_fraction": kept_fraction}


def describe_batch(sampled: Batch, batch: Batch, cfg, actor, kl_controller=None) -> dict:
    """Returns the metrics of all sampled rows, including those that a filter took from
    the baseline."""
    sampled = sampled.replace(advantages=batch.advantages, returns=batch.returns)
    shaped = shape_rewards(sampled, cfg, kl_controller)
    return batch_metrics(sampled, shaped, actor.state.step, correct_at=cfg.correct_at)


def mean_sequence_kl(batch: Batch):
    """Returns the mean over sequences of the token mean of k1(old, reference), a scalar in nats,
    which a KL controller reads."""
    d = kl_estimate(
        jnp.where(batch.mask > 0, batch.old_logprobs, 0.0),
        jnp.where(batch.mask > 0, batch.ref_logprobs, 0.0),
        "k1",
    )
    tokens = batches.sequence_tokens(batch)
    sequences = jnp.maximum(batches.sequence_count(batch), 1)
    return batches.masked_sum(d / jnp.maximum(tokens, 1), batch.mask) / sequences


def update_kl_controller(kl_controller, batch: Batch):
    """Returns (the KL controller after this batch, its metrics); (None, {}) without one."""
    if kl_controller is None:
        return None, {}
    kl = mean_sequence_kl(batch)
    updated = kl_controller.update(kl, batches.sequence_count(batch))
    return updated, {"kl_controller/kl": kl, "kl_controller/scale": updated.state}


def adapt_entropy_coef(batch: Batch, cfg, entropy_controller=None):
    """Takes the coefficient of the entropy bonus from the controller, by the mean of -log pi of the
    sampler over the policy tokens of the batch, an estimate of the entropy. Without such tokens
    there is no bonus, and the controller stays as it is.

    Returns (cfg with the coefficient of this step, the controller after it, metrics); (cfg, None,
    {}) without a controller. Raises InputError where the batch has no log-probs of the sampler.
    """
    if entropy_controller is None:
        return cfg, None, {}
    batch.require("sampler_logprobs", by="an entropy controller")
    sampled = (batch.mask > 0) & batches.is_sampled(batch)
    entropy = -batches.masked_mean(batch.sampler_logprobs, sampled.astype(batch.mask.dtype))
    coefficient = jnp.where(jnp.any(sampled), entropy_controller.coefficient(entropy), 0.0)
    updated = entropy_controller.update(entropy)
    state = jnp.where(jnp.any(sampled), updated.state, entropy_controller.state)
    updated = dataclasses.replace(updated, state=state)
    metrics = {"entropy_controller/entropy": entropy, "entropy_controller/coef": coefficient}
    return cfg.replace(entropy_coef=coefficient), updated, metrics


def prepare_batch(batch: Batch, cfg, *, actor, kl_controller=None):
    """Applies the steps between log-probs and update; rljax.dataflows.grpo has them one by one.

    Returns (the batch to learn from, metrics, the KL controller after this batch)."""
    sampled, accepted, mismatch = apply_rollout_correction(batch, cfg)
    batch = filter_baseline_rows(sampled, cfg)
    batch = compute_advantages(batch, shape_rewards(batch, cfg, kl_controller), cfg)
    metrics = describe_batch(sampled, batch, cfg, actor, kl_controller)
    learned, filtering = filter_rows(batch, accepted, cfg)
    kl_controller, adaptation = update_kl_controller(kl_controller, batch)
    return learned, {**mismatch, **metrics, **filtering, **adaptation}, kl_controller


def update_actor(actor, batch: Batch, cfg, before: dict, kl_controller=None, pretraining=None):
    """Takes the optimizer steps of algorithm.policy_loss on the batch, plus the loss of the
    examples in `pretraining`. Returns (actor, metrics: those `before` the update and its own).

    Where one optimizer step covers the batch, the old log-probs are those of its own forward pass,
    and so are the metrics of them, over the tokens that are learned from. The pass that filled them
    is then dropped from the program, unless something before the loss read it.
    """
    options, steps = cfg.update_options(kl_controller), cfg.steps
    options["pretraining"] = pretraining
    single_step = steps.learn and steps.epochs == 1 and batch.rows == steps.rows
    if single_step and cfg.old_logprobs == "recomputed":
        options["on_policy"] = lambda step_batch: _renewed(before, step_batch, cfg)
    actor, metrics = actor.update(batch, cfg.policy_loss, **options)
    return actor, {**before, **metrics}


def _renewed(metrics: dict, batch: Batch, cfg) -> dict:
    """Recomputes, for this batch, those of the metrics that depend on its old log-probs alone."""
    renewed = {}
    if "mismatch/mismatch_kl" in metrics and cfg.correction is None:  # else it has read them
        renewed |= mismatch_metrics(batch)
    if "ref_kl/k1" in metrics:
        renewed |= reference_kl(batch, batch.old_logprobs)
    return renewed


def rescaled_steps(steps: Steps, generated: int, learned: int, rows_per_example: int, unit: int):
    """Returns the same number of optimizer steps over `learned` rows that are made of `generated`
    ones, in microbatches of whole examples that divide over `unit` shards if they can. Raises
    InputError unless `learned` divides into whole examples, as many in each optimizer step."""
    count = generated // steps.rows
    if learned % (count * rows_per_example):
        raise InputError(
            "rows to learn from",
            value=learned,
            rule=f"examples of {rows_per_example}, as many in each of the batch's {count} "
            "optimizer steps",
            fix="a larger batch.sequences_per_optimizer_step, which counts what is generated",
        )
    rows = learned // count
    unit *= rows_per_example
    unit = unit if rows % unit == 0 else rows_per_example
    max_rows = max(steps.microbatch_rows, unit)
    microbatch_rows = max(r for r in range(unit, min(rows, max_rows) + 1, unit) if rows % r == 0)
    return dataclasses.replace(steps, rows=rows, microbatch_rows=microbatch_rows)
