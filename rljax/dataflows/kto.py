"""KTO (arXiv 2402.01306) and BCO (arXiv 2404.04656): learning from completions that are each called
good or bad."""

import dataclasses

import jax.numpy as jnp

from rljax.batch import masked_mean, row_sum
from rljax.losses.preference.unpaired import mismatched_kl, running_mean
from rljax.roles import program


def kto(labelled, key, cfg, *, actor, reference):
    """`labelled` is a Batch with scores above 0 for good completions, and the same prompts with
    each other's completions; algorithm.preference_loss is kto, or another loss of single rows."""
    return learn(labelled, cfg, actor=actor, reference=reference)


def bco(labelled, key, cfg, *, actor, reference, baseline):
    """As kto; algorithm.preference_loss is bco. `baseline` keeps the running mean of the implicit
    rewards, which good completions are to exceed and bad ones not to reach."""
    return learn(labelled, cfg, actor=actor, reference=reference, baseline=baseline)


@program
def learn(labelled, cfg, *, actor, reference, baseline=None):
    batch, mismatched = labelled
    rows, loss = cfg.steps.microbatch_rows, cfg.preference_loss
    batch = batch.replace(ref_logprobs=reference.logprobs(batch, rows))
    beside, new = (), {}
    if baseline is not None:
        delta, new["baseline"] = _moved(baseline, actor.logprobs(batch, rows), batch, loss)
        beside = (delta,)
        if not cfg.steps.learn:
            new = {}
    elif "kl" in loss.positional:
        # How far the policy has moved on completions that have nothing to do with the prompt.
        mismatched = mismatched.replace(ref_logprobs=reference.logprobs(mismatched, rows))
        beside = (mismatched_kl(actor.logprobs(mismatched, rows), mismatched),)

    actor, metrics = actor.update(
        batch, lambda policy, b: loss(policy, b, *beside), steps=cfg.steps, reduction=cfg.reduction
    )
    return {"actor": actor, **new}, metrics


def _moved(baseline, logprobs, batch, loss):
    """The running mean of the rewards, this step's included, and the baseline that keeps it."""
    beta = loss.options.get("beta", loss.signature.parameters["beta"].default)
    live = jnp.any(batch.mask > 0, axis=1)
    rewards = beta * row_sum(logprobs - batch.ref_logprobs, batch)
    mean, count = running_mean(*baseline.state, masked_mean(rewards, live), jnp.sum(live))
    return mean, dataclasses.replace(baseline, state=jnp.stack([mean, count.astype(mean.dtype)]))
