"""KTO: learning from completions that are each called good or bad (arXiv 2402.01306)."""

import jax.numpy as jnp

from rljax.batch import masked_mean, row_sum
from rljax.roles import program


def kto(labelled, key, cfg, *, actor, reference):
    """`labelled` is a Batch with scores above 0 for good completions, and the same prompts with
    each other's completions; algorithm.preference_loss is `kto`, or reads the same arguments."""
    return learn(labelled, cfg, actor=actor, reference=reference)


@program
def learn(labelled, cfg, *, actor, reference):
    batch, mismatched = labelled
    rows = cfg.steps.microbatch_rows
    batch = batch.replace(ref_logprobs=reference.logprobs(batch, rows))
    moved = actor.logprobs(mismatched, rows) - reference.logprobs(mismatched, rows)
    live = jnp.any(mismatched.mask > 0, axis=1)
    # How far the policy has moved on completions that have nothing to do with the prompt.
    kl = jnp.maximum(masked_mean(row_sum(moved, mismatched), live), 0.0)

    def loss(policy, b):
        return cfg.preference_loss(policy, b, kl)

    actor, metrics = actor.update(batch, loss, steps=cfg.steps, reduction=cfg.reduction)
    return {"actor": actor}, {**metrics, "kto/kl": kl}
