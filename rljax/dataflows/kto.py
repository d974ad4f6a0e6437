"""KTO (arXiv 2402.01306) and BCO (arXiv 2404.04656): learning from completions that are each called
good or bad."""

import dataclasses

import jax.numpy as jnp

from rljax.batch import masked_mean, row_sum, take_rows
from rljax.contracts import contract
from rljax.losses.preference.unpaired import mismatched_kl, running_mean
from rljax.roles import program


@contract(safe=True, data="unpaired", rows=2)
@program
def kto(batch, key, cfg, *, actor, reference):
    """Rows 2i are completions, scores above 0 for good ones; rows 2i + 1 are the same prompts with
    each other's completions. algorithm.preference_loss is kto, or another loss of single rows."""
    rows, mismatched = _alternate(batch, actor)
    loss, arguments = cfg.preference_loss, ()
    rows = rows.replace(ref_logprobs=reference.logprobs(rows, cfg.steps))
    if "kl" in loss.positional:
        # The KL tells how far the policy has moved on completions of other prompts.
        mismatched = mismatched.replace(ref_logprobs=reference.logprobs(mismatched, cfg.steps))
        arguments = (mismatched_kl(actor.logprobs(mismatched, cfg.steps), mismatched),)
    actor, metrics = actor.update(
        rows,
        lambda policy, b: loss(policy, b, *arguments),
        steps=cfg.steps,
        reduction=cfg.reduction,
    )
    return {"actor": actor}, metrics


@contract(safe=True, data="unpaired", rows=2)
@program
def bco(batch, key, cfg, *, actor, reference, baseline):
    """The rows of `kto`; algorithm.preference_loss is bco. `baseline` keeps the running mean of the
    implicit rewards, which good completions are to exceed and bad ones not to reach."""
    rows, _ = _alternate(batch, actor)
    loss = cfg.preference_loss
    rows = rows.replace(ref_logprobs=reference.logprobs(rows, cfg.steps))
    mean, updated = updated_baseline(baseline, actor.logprobs(rows, cfg.steps), rows, loss)
    actor, metrics = actor.update(
        rows, lambda policy, b: loss(policy, b, mean), steps=cfg.steps, reduction=cfg.reduction
    )
    return {"actor": actor, "baseline": updated if cfg.steps.learn else baseline}, metrics


def _alternate(batch, actor):
    """Returns the even and the odd rows."""
    even, odd = take_rows(batch, slice(0, None, 2)), take_rows(batch, slice(1, None, 2))
    return actor.balanced(even), actor.balanced(odd)


def updated_baseline(baseline, logprobs, batch, loss):
    """Returns (the running mean of the implicit rewards, a scalar that includes this step's; the
    baseline role that keeps it)."""
    beta = loss.options.get("beta", loss.signature.parameters["beta"].default)
    live = jnp.any(batch.mask > 0, axis=1)
    rewards = beta * row_sum(logprobs - batch.ref_logprobs, batch)
    mean, count = running_mean(*baseline.state, masked_mean(rewards, live), jnp.sum(live))
    return mean, dataclasses.replace(baseline, state=jnp.stack([mean, count.astype(mean.dtype)]))
