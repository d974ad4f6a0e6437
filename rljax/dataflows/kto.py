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
    own, others = _alternate(batch, actor)
    loss, given = cfg.preference_loss, ()
    own = own.replace(ref_logprobs=reference.logprobs(own, cfg.steps))
    if "kl" in loss.positional:
        # How far the policy has moved on completions that have nothing to do with the prompt.
        others = others.replace(ref_logprobs=reference.logprobs(others, cfg.steps))
        given = (mismatched_kl(actor.logprobs(others, cfg.steps), others),)
    actor, metrics = actor.update(
        own, lambda policy, b: loss(policy, b, *given), steps=cfg.steps, reduction=cfg.reduction
    )
    return {"actor": actor}, metrics


@contract(safe=True, data="unpaired", rows=2)
@program
def bco(batch, key, cfg, *, actor, reference, baseline):
    """The rows of `kto`; algorithm.preference_loss is bco. `baseline` keeps the running mean of the
    implicit rewards, which good completions are to exceed and bad ones not to reach."""
    own, _ = _alternate(batch, actor)
    loss = cfg.preference_loss
    own = own.replace(ref_logprobs=reference.logprobs(own, cfg.steps))
    mean, updated = updated_baseline(baseline, actor.logprobs(own, cfg.steps), own, loss)
    actor, metrics = actor.update(
        own, lambda policy, b: loss(policy, b, mean), steps=cfg.steps, reduction=cfg.reduction
    )
    return {"actor": actor, "baseline": updated if cfg.steps.learn else baseline}, metrics


def _alternate(batch, actor):
    """The even and the odd rows."""
    even, odd = take_rows(batch, slice(0, None, 2)), take_rows(batch, slice(1, None, 2))
    return actor.balanced(even), actor.balanced(odd)


def updated_baseline(baseline, logprobs, batch, loss):
    """(the running mean of the implicit rewards, a scalar that includes this step's; the baseline
    role that keeps it)."""
    beta = loss.options.get("beta", loss.signature.parameters["beta"].default)
    live = jnp.any(batch.mask > 0, axis=1)
    rewards = beta * row_sum(logprobs - batch.ref_logprobs, batch)
    mean, count = running_mean(*baseline.state, masked_mean(rewards, live), jnp.sum(live))
    return mean, dataclasses.replace(baseline, state=jnp.stack([mean, count.astype(mean.dtype)]))
