"""Supervised fine-tuning: raise the log-probability of worked examples, prompts masked (ALGORITHMS
A1)."""

from rljax.losses.policy import negative_log_likelihood
from rljax.roles import program


def sft(examples, key, cfg, *, actor):
    """`examples` is a Batch whose mask is 1 on the target tokens; nothing is sampled, so `key` is
    unused."""
    return learn(examples, cfg, actor=actor)


@program
def learn(batch, cfg, *, actor):
    actor, metrics = actor.update(
        batch, negative_log_likelihood, steps=cfg.steps, reduction=cfg.reduction
    )
    return {"actor": actor}, metrics
