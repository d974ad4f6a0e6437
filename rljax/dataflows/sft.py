"""Supervised fine-tuning: raise the log-probability of demonstrations, prompts masked."""

import jax.numpy as jnp

from rljax.components import Component
from rljax.contracts import contract
from rljax.losses.policy import dynamic_fine_tuning, negative_log_likelihood
from rljax.metric import Metric
from rljax.roles import program

METRICS = {
    "perplexity": Metric(
        "exp(loss): choices that the policy wavers between at each token",
        "choices",
        "falls; eval/perplexity that rises meanwhile: overfitting",
    ),
    "target_tokens": Metric("tokens learned from in this step", "tokens"),
}


@contract(safe=True, data="examples")
@program
def sft(batch, key, cfg, *, actor, dynamic: bool = False):
    """Maximises the log-probability of tokens at mask 1, the target tokens. `dynamic`: tokens that
    the policy finds impossible do not dominate (arXiv 2508.05629)."""
    loss = dynamic_fine_tuning if dynamic else negative_log_likelihood
    actor, metrics = actor.update(batch, loss, steps=cfg.steps, reduction=cfg.reduction)
    name = cfg.reduction.name if isinstance(cfg.reduction, Component) else cfg.reduction.__name__
    if not dynamic and name == "token_mean":
        metrics["perplexity"] = jnp.exp(metrics["loss"])
    return {"actor": actor}, {**metrics, "target_tokens": jnp.sum(batch.mask)}
