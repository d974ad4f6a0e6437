"""PRIME (arXiv 2502.01456) as a user writes it: an implicit reward model learns beside the policy,
from outcomes alone. config.roles = ("implicit=trained_policy(lr=1e-6)",)."""

import functools

import jax.numpy as jnp

from rljax.contracts import contract
from rljax.dataflows import grpo
from rljax.losses.implicit_reward import implicit_reward_classification
from rljax.roles import program


@contract(reads=("rewards", "scores", "group"), fills=("process_rewards",))
@program
def prime(batch, key, cfg, *, actor, implicit, reference, beta: float = 0.05):
    """`implicit` takes its step first; then beta (log pi_implicit - log ref) is each token's
    reward, for algorithm.advantage="prime()"."""
    batch = batch.replace(ref_logprobs=reference.logprobs(batch, cfg.steps))
    loss = functools.partial(implicit_reward_classification, beta=beta)
    implicit, learned = implicit.update(batch, loss, steps=cfg.steps, reduction=cfg.reduction)
    gap = implicit.logprobs(batch, cfg.steps) - batch.ref_logprobs
    batch = batch.replace(process_rewards=jnp.where(batch.mask > 0, beta * gap, 0.0))
    new, metrics = grpo.page(batch, key, cfg, actor=actor)
    return {**new, "implicit": implicit}, {**metrics, **learned}
