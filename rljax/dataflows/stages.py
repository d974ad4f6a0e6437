"""The stages that online dataflows share: batch in, batch out, inside one program.

A page calls them in this order: log-probs, correction, baseline filters, shaping, advantages,
filters, update.
"""

import dataclasses

import jax.numpy as jnp

from rljax import batch as batches
from rljax.advantages.lagrangian import lagrangian
from rljax.batch import Batch
from rljax.contracts import spec
from rljax.correction import bypass_old_logprobs, mismatch_metrics
from rljax.errors import InputError
from rljax.learn import Steps
from rljax.learn.metrics import batch_metrics, reference_kl
from rljax.losses.kl import kl_estimate, kl_penalised_rewards
from rljax.metric import Metric
from rljax.shaping.scores import apply_shaping

METRICS = {
    "kl_controller/kl": Metric(
        "KL that the controller sees", "nats per token", "near algorithm.kl_target"),
    "kl_controller/scale": Metric("factor on the KL coefficient", "x", "steady in the end"),
    "filter/kept_fraction": Metric("rows that are learned from", "share", "above 0.3"),
}  # fmt: skip


def with_logprobs(batch: Batch, cfg, *, actor, reference=None, critic=None):
    """Old log-probs by the actor (or the sampler's own: bypass), reference log-probs, values ->
    the batch, and metrics of the actor's pass (the load of its experts)."""
    metrics = {}
    if cfg.old_logprobs == "sampler":
        batch = bypass_old_logprobs(batch).replace(weights=batch.weights)
    else:
        old, metrics = actor.logprobs_and_load(batch, cfg.steps)
        batch = batch.replace(old_logprobs=old)
    if reference is not None:
        batch = batch.replace(ref_logprobs=reference.logprobs(batch, cfg.steps))
    if critic is not None:
        batch = batch.replace(values=critic.values(batch, cfg.steps))
    if "sum_pi_squared" in spec(cfg.advantage).reads:
        batch = batch.replace(sum_pi_squared=actor.sum_pi_squared(batch, cfg.steps))
    return batch, metrics


def corrected(batch: Batch, cfg):
    """The rollout correction: (the batch with token weights, that batch without the tokens that the
    correction rejects, metrics). A rejected token leaves the loss, not the baseline."""
    # In bypass the trainer's own log-probs are not known: there is nothing to compare.
    metrics = {} if cfg.old_logprobs == "sampler" else mismatch_metrics(batch)
    if cfg.correction is None:
        return batch, batch, metrics
    kept, more = cfg.correction(batch)
    own = (batch.weights, kept.weights)  # those that a rollout gave, and the correction's
    weights = own[0] * own[1] if None not in own else own[own[0] is None]
    return batch.replace(weights=weights), kept, {**metrics, **more}


def baseline_filtered(batch: Batch, cfg) -> Batch:
    """Rows that algorithm.baseline_filters reject leave the loss and their group's baseline: each
    gets a group of its own. An episode one of whose rows is rejected leaves whole."""
    for rule in cfg.baseline_filters:
        keep = batches.of_whole_sequences(rule(batch), batch)
        alone = jnp.max(batch.group) + 1 + jnp.arange(batch.rows, dtype=batch.group.dtype)
        batch = batch.replace(
            mask=batch.mask * keep[:, None], group=jnp.where(keep > 0, batch.group, alone)
        )
    return batch


def shaped(batch: Batch, cfg, kl_controller=None) -> Batch:
    """Every rule of reward_shaping in turn, then the KL penalty in the reward."""
    return kl_penalised(apply_shaping(batch, cfg.reward_shaping), cfg, kl_controller)


def kl_penalised(batch: Batch, cfg, kl_controller=None, sign: float = 1.0) -> Batch:
    """The batch with the KL penalty of algorithm.kl_in_reward in its rewards; `sign` -1 adds it, as
    costs want it."""
    if not cfg.kl_in_reward:
        return batch
    scale = sign if kl_controller is None else sign * kl_controller.state
    rewards = kl_penalised_rewards(
        batch, coef=cfg.kl_in_reward * scale, estimator=cfg.kl_reward_estimator
    )
    return batch.replace(rewards=rewards)


def of_costs(batch: Batch) -> Batch:
    """The batch with costs, cost_values and cost_returns where those of the reward were: what an
    advantage and a critic read of a cost."""
    return batch.replace(rewards=batch.costs, values=batch.cost_values, returns=batch.cost_returns)


def with_lagrangian(cfg, multiplier, kl_controller=None, *, kl_split: float, clip: float):
    """`cfg` whose advantage is A = (A_R - lambda A_C) / (1 + lambda): algorithm.advantage of the
    rewards and of the costs, both within +-clip at every token. With the coefficient beta of
    algorithm.kl_in_reward, kl_split beta KL is taken from the rewards and added to the costs, so
    that A has it with the weight kl_split beta for every lambda."""
    cfg = cfg.replace(kl_in_reward=kl_split * cfg.kl_in_reward)

    def advantage(rewarded: Batch):
        costly = kl_penalised(of_costs(rewarded), cfg, kl_controller, -1.0)
        rewarded, costly = (
            one.replace(rewards=jnp.clip(one.rewards, -clip, clip)) for one in (rewarded, costly)
        )
        (of_rewards, returns), (of_cost, cost_returns) = map(cfg.advantage, (rewarded, costly))
        return lagrangian(of_rewards, of_cost, multiplier.value), returns, cost_returns

    return cfg.replace(advantage=advantage)


def with_advantages(batch: Batch, rewarded: Batch, cfg) -> Batch:
    """The batch with the advantages, and returns if there are any, also of costs, of the shaped
    rewards."""
    result = cfg.advantage(rewarded)
    results = result if isinstance(result, tuple) else (result,)
    advantages, returns, cost_returns = (*results, None, None)[:3]
    return batch.replace(advantages=advantages, returns=returns, cost_returns=cost_returns)


def filtered(batch: Batch, kept: Batch, cfg):
    """The rows to learn from: without the tokens that the correction rejected (`kept`) and the rows
    that algorithm.filters reject, which keep their place in a baseline -> (batch, metrics)."""
    # The same array where nothing was rejected: then all passes are packed alike, and once.
    same = kept.mask is batch.mask
    out = batch if same else batch.replace(mask=batch.mask * kept.mask)
    for rule in cfg.filters:
        keep = batches.of_whole_sequences(rule(batch), batch)
        out = out.replace(mask=out.mask * keep[:, None])
    left = jnp.sum(jnp.any(out.mask > 0, axis=1)) / batch.rows
    return out, {"filter/kept_fraction": left}


def described(whole: Batch, batch: Batch, cfg, actor, kl_controller=None) -> dict:
    """Metrics of all rows, those that a filter takes out of the baseline too."""
    whole = whole.replace(advantages=batch.advantages, returns=batch.returns)
    return batch_metrics(whole, shaped(whole, cfg, kl_controller), actor.state.step)


def mean_sequence_kl(batch: Batch):
    """Mean over sequences of the token mean of k1(old, reference): what a KL controller reads."""
    d = kl_estimate(
        jnp.where(batch.mask > 0, batch.old_logprobs, 0.0),
        jnp.where(batch.mask > 0, batch.ref_logprobs, 0.0),
        "k1",
    )
    tokens = batches.sequence_tokens(batch)
    sequences = jnp.maximum(batches.sequence_count(batch), 1)
    return batches.masked_sum(d / jnp.maximum(tokens, 1), batch.mask) / sequences


def adapted(kl_controller, batch: Batch):
    """The KL controller after this batch, and its metrics; (None, {}) without one."""
    if kl_controller is None:
        return None, {}
    kl = mean_sequence_kl(batch)
    new = kl_controller.update(kl, batches.sequence_count(batch))
    return new, {"kl_controller/kl": kl, "kl_controller/scale": new.state}


def estimate(batch: Batch, cfg, *, actor, kl_controller=None):
    """The stages between log-probs and update -> (the batch to learn from, metrics, the new KL
    controller). rljax.dataflows.grpo shows them one by one."""
    whole, kept, mismatch = corrected(batch, cfg)
    batch = baseline_filtered(whole, cfg)
    batch = with_advantages(batch, shaped(batch, cfg, kl_controller), cfg)
    metrics = described(whole, batch, cfg, actor, kl_controller)
    learned, left = filtered(batch, kept, cfg)
    new_controller, adaptation = adapted(kl_controller, batch)
    return learned, {**mismatch, **metrics, **left, **adaptation}, new_controller


def updated(actor, batch: Batch, cfg, before: dict, kl_controller=None, pretraining=None):
    """The actor after algorithm.policy_loss, and metrics: its own and those from `before` it. With
    `pretraining` the loss of its examples is added.

    Where one optimizer step covers the batch, the old log-probs are those of its own forward pass,
    and so are the metrics of them, over the tokens that are learned from. The pass that filled them
    is then dropped from the program, unless something before the loss read it.
    """
    options, steps = cfg.update_options(kl_controller), cfg.steps
    options["pretraining"] = pretraining
    once = steps.learn and steps.epochs == 1 and batch.rows == steps.rows
    if once and cfg.old_logprobs == "recomputed":
        options["on_policy"] = lambda own: _renewed(before, own, cfg)
    actor, metrics = actor.update(batch, cfg.policy_loss, **options)
    return actor, {**before, **metrics}


def _renewed(metrics: dict, batch: Batch, cfg) -> dict:
    """Those of the metrics that are of the batch's old log-probs alone, of this batch."""
    new = {}
    if "mismatch/mismatch_kl" in metrics and cfg.correction is None:  # else it has read them
        new |= mismatch_metrics(batch)
    if "ref_kl/k1" in metrics:
        new |= reference_kl(batch, batch.old_logprobs)
    return new


def rescaled_steps(steps: Steps, generated: int, learned: int, rows_per_example: int, unit: int):
    """The same number of optimizer steps over the `learned` rows that are made of `generated` ones,
    in microbatches of whole examples that divide over `unit` shards where they can."""
    count = generated // steps.rows
    if learned % (count * rows_per_example):
        raise InputError(
            "rows to learn from", value=learned,
            rule=f"examples of {rows_per_example}, as many in each of the batch's {count} "
            "optimizer steps",
            fix="a larger batch.sequences_per_optimizer_step, which counts what is generated",
        )  # fmt: skip
    rows = learned // count
    unit *= rows_per_example
    unit = unit if rows % unit == 0 else rows_per_example
    most = max(steps.microbatch_rows, unit)
    part = max(r for r in range(unit, min(rows, most) + 1, unit) if rows % r == 0)
    return dataclasses.replace(steps, rows=rows, microbatch_rows=part)
