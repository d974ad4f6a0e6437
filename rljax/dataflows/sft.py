"""Supervised fine-tuning: raise the log-probability of worked examples, prompts masked (ALGORITHMS
A1)."""

import jax.numpy as jnp

from rljax.components import Component
from rljax.losses.policy import dynamic_fine_tuning, negative_log_likelihood
from rljax.roles import program


def sft(examples, key, cfg, *, actor, dynamic: bool = False):
    """`examples` is a Batch whose mask is 1 on the target tokens; nothing is sampled, so `key` is
    unused. `dynamic`: words that the policy finds impossible do not dominate (arXiv 2508.05629)."""
    loss = dynamic_fine_tuning if dynamic else negative_log_likelihood
    return learn(examples, (cfg, loss), actor=actor)


@program
def learn(batch, options, *, actor):
    cfg, loss = options
    actor, metrics = actor.update(batch, loss, steps=cfg.steps, reduction=cfg.reduction)
    text = cfg.reduction.name if isinstance(cfg.reduction, Component) else cfg.reduction.__name__
    if loss is negative_log_likelihood and text == "token_mean":
        metrics["perplexity"] = jnp.exp(metrics["loss"])
    return {"actor": actor}, {**metrics, "target_tokens": jnp.sum(batch.mask)}
