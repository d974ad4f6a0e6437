"""What the learning programs of the online dataflows share: batch in, batch out, inside one jit.

What lives here: the order forward passes -> correction -> shaping -> advantages -> filters, which
is the same for every online algorithm. What does not: who is updated with what (each dataflow).
"""

import dataclasses

import jax.numpy as jnp

from rljax import batch as batches
from rljax.batch import Batch
from rljax.contracts import spec
from rljax.correction import bypass_old_logprobs, mismatch_metrics
from rljax.errors import InputError
from rljax.learn import Steps
from rljax.learn.metrics import batch_metrics
from rljax.losses.kl import kl_estimate, kl_penalised_rewards
from rljax.mesh import row_shards


def forward_passes(batch: Batch, cfg, *, actor, reference=None, critic=None):
    """Old log-probs by the actor (or the sampler's own: bypass), reference log-probs, values ->
    the batch, and what the actor's pass showed (the load of its experts)."""
    rows, seen = cfg.steps.microbatch_rows, {}
    if cfg.old_logprobs == "sampler":
        batch = bypass_old_logprobs(batch)
    else:
        old, seen = actor.logprobs_and_load(batch, rows)
        batch = batch.replace(old_logprobs=old)
    if reference is not None:
        batch = batch.replace(ref_logprobs=reference.logprobs(batch, rows))
    if critic is not None:
        batch = batch.replace(values=critic.values(batch, rows))
    if "sum_pi_squared" in spec(cfg.advantage).reads:
        batch = batch.replace(sum_pi_squared=actor.sum_pi_squared(batch, rows))
    return batch, seen


def _with_score(batch: Batch, scores) -> Batch:
    """The outcome moved to these scores: the difference is added at the last policy token."""
    change = scores - batches.row_sum(batch.rewards, batch)
    rewards = batch.rewards + batches.last_token(batch) * change[:, None]
    return batch.replace(rewards=rewards)


def shape_scores(batch: Batch, cfg) -> Batch:
    """Every rule of reward_shaping in turn."""
    for rule in cfg.reward_shaping:
        batch = _with_score(batch, rule(batch))
    return batch


def shape_rewards(batch: Batch, cfg, kl_scale=1.0) -> Batch:
    """Every rule of reward_shaping in turn, then the KL penalty in the reward."""
    batch = shape_scores(batch, cfg)
    if cfg.kl_in_reward:
        rewards = kl_penalised_rewards(
            batch, coef=cfg.kl_in_reward * kl_scale, estimator=cfg.kl_reward_estimator
        )
        batch = batch.replace(rewards=rewards)
    return batch


def _leave_group(batch: Batch, keep) -> Batch:
    """Rows with keep 0 leave the loss, and their group: each gets a group of its own."""
    alone = jnp.max(batch.group) + 1 + jnp.arange(batch.rows, dtype=batch.group.dtype)
    return batch.replace(
        mask=batch.mask * keep[:, None], group=jnp.where(keep > 0, batch.group, alone)
    )


def mean_sequence_kl(batch: Batch):
    """Mean over sequences of the token mean of k1(old, reference): what a KL controller sees."""
    d = kl_estimate(
        jnp.where(batch.mask > 0, batch.old_logprobs, 0.0),
        jnp.where(batch.mask > 0, batch.ref_logprobs, 0.0),
        "k1",
    )
    tokens = batches.segment_tokens(batch)
    sequences = jnp.maximum(batches.segment_count(batch), 1)
    return batches.masked_sum(d / jnp.maximum(tokens, 1), batch.mask) / sequences


def estimate(batch: Batch, cfg, *, actor, kl_controller=None):
    """Rewards and forward passes -> the batch to learn from, metrics, and the new KL controller.

    Correction weighs tokens, shaping changes scores, the advantage is taken, and only then do
    filters empty the mask of rows, so that a filtered row keeps its place in a baseline.
    """
    scale = 1.0 if kl_controller is None else kl_controller.state
    # In bypass the trainer's own log-probs are not known: nothing to compare.
    metrics = {} if cfg.old_logprobs == "sampler" else mismatch_metrics(batch)
    whole, corrected = batch, batch
    if cfg.correction is not None:
        corrected, found = cfg.correction(batch)
        batch, metrics = batch.replace(weights=corrected.weights), {**metrics, **found}
    for rule in cfg.baseline_filters:
        batch = _leave_group(batch, rule(batch))
    shaped = shape_rewards(batch, cfg, scale)
    found = cfg.advantage(shaped)
    advantages, returns = found if isinstance(found, tuple) else (found, None)
    batch = batch.replace(advantages=advantages, returns=returns)
    # The metrics describe all rows, those that a filter takes out of the baseline too.
    whole = whole.replace(advantages=advantages, returns=returns)
    described = batch_metrics(whole, shape_rewards(whole, cfg, scale), actor.state.step)
    metrics = {**metrics, **described}
    # A token that the correction rejected leaves the loss, not the baseline.
    kept = batch.replace(mask=batch.mask * corrected.mask)
    for rule in cfg.filters:
        kept = kept.replace(mask=kept.mask * rule(batch)[:, None])
    left = jnp.sum(jnp.any(kept.mask > 0, axis=1)) / batch.rows
    metrics["filter/kept_fraction"] = left
    if kl_controller is not None:
        kl = mean_sequence_kl(batch)
        kl_controller = kl_controller.update(kl, batches.segment_count(batch))
        metrics |= {"kl_controller/kl": kl, "kl_controller/scale": kl_controller.state}
    return kept, metrics, kl_controller


def update_options(cfg, kl_controller=None) -> dict:
    """The keyword arguments of Actor.update, with the KL coefficient that is in force."""
    options = cfg.update_options
    if kl_controller is not None and cfg.kl_in_loss:
        options["kl_in_loss"] = cfg.kl_in_loss * kl_controller.state
    return options


def updated(**roles) -> dict:
    """The roles that exist, as a program returns them."""
    return {name: role for name, role in roles.items() if role is not None}


def steps_over(steps: Steps, generated: Batch, learned: Batch, together: int, mesh) -> Steps:
    """The same number of optimizer steps over the rows that are learned from, `together` of which
    are one example."""
    count = generated.rows // steps.rows
    if learned.rows % (count * together):
        raise InputError(
            "rows to learn from", value=learned.rows,
            rule=f"examples of {together}, as many in each of the batch's {count} optimizer steps",
            fix="a larger batch.sequences_per_optimizer_step, which counts what is generated",
        )  # fmt: skip
    rows = learned.rows // count
    unit = together * row_shards(mesh)
    unit = unit if rows % unit == 0 else together
    most = max(steps.microbatch_rows, unit)
    part = max(r for r in range(unit, min(rows, most) + 1, unit) if rows % r == 0)
    return dataclasses.replace(steps, rows=rows, microbatch_rows=part)
