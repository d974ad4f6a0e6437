"""Distillation: the policy learns a teacher's next-token distribution, on given completions or on
its own samples (GKD, arXiv 2306.13649; on-policy distillation)."""

from typing import Literal

import jax.numpy as jnp

from rljax.contracts import AboveZero, Count, NotNegative, Share, contract
from rljax.dataflows.steps import (
    apply_rollout_correction,
    compute_logprobs,
    filter_rows,
    mask_untaught_rows,
    teacher_gap,
    update_actor,
)
from rljax.errors import InputError
from rljax.learn.metrics import sample_metrics
from rljax.roles import program


@contract(safe=True, data="examples")
@program
def distil(
    batch,
    key,
    cfg,
    *,
    actor,
    teacher,
    beta: Share = 0.5,
    temperature: AboveZero = 1.0,
    top_k: Count = 0,
    top_k_of: Literal["student", "teacher"] = "student",
    tail: bool = True,
):
    """The mask is 1 on the tokens at which both are compared. beta 0 is KL(teacher || student), 1
    the reverse; both are softmax(logits / temperature). With `top_k` only the likeliest tokens
    `top_k_of` one of both are compared, and all others as one (`tail`) or not at all."""
    sampled = batch
    batch, metrics = mask_untaught_rows(batch)
    # Rows of a file have not been sampled: there are no metrics of samples.
    if sampled.finish_reason is not None:
        metrics |= sample_metrics(sampled, actor.state.step, correct_at=cfg.correct_at)
    options = dict(beta=beta, temperature=temperature, top_k=top_k, top_k_of=top_k_of, tail=tail)
    options |= dict(steps=cfg.steps, reduction=cfg.reduction)
    actor, learned = actor.imitate(batch, teacher, **options)
    return {"actor": actor}, {**metrics, **learned}


def _check_match(config, options: dict) -> None:
    """Raises InputError for an option of whole distributions beside match="sampled"."""
    usual = dict(beta=1.0, temperature=1.0, top_k=0, top_k_of="student", tail=True)
    changed = [name for name, value in usual.items() if options.get(name, value) != value]
    if options.get("match") != "sampled" and options.get("prefix_gamma"):
        raise InputError(
            "on_policy_distil(prefix_gamma)",
            value=options["prefix_gamma"],
            rule="it weighs the advantages of sampled tokens",
            fix="on_policy_distil(match='sampled', prefix_gamma=0.5)",
        )
    if options.get("match") == "sampled" and changed:
        raise InputError(
            f"on_policy_distil({changed[0]})",
            value=options[changed[0]],
            rule="match='sampled' compares the sampled token alone, at the sampling temperature",
            fix=f"leave {' and '.join(changed)} out, or match='vocabulary'",
        )


@contract(safe=True, data=lambda o: "rollouts" if o["scored"] else "samples", check=_check_match)
@program
def on_policy_distil(
    batch,
    key,
    cfg,
    *,
    actor,
    teacher,
    match: Literal["vocabulary", "sampled"] = "vocabulary",
    beta: Share = 1.0,
    temperature: AboveZero = 1.0,
    top_k: Count = 0,
    top_k_of: Literal["student", "teacher"] = "student",
    tail: bool = True,
    prefix_gamma: NotNegative = 0.0,
    scored: bool = False,
):
    """`distil` at the tokens of the student's own samples, which need no reward. match="sampled":
    log teacher - log policy of the sampled token is its advantage in algorithm.policy_loss, with
    algorithm.correction; it costs one forward pass of the teacher, and no distribution is built.
    `prefix_gamma` above 0 weighs it by `early_weights` (IW-OPD, arXiv 2606.22600). `scored`
    computes the reward of the samples, for metrics and for hints that read it; nothing here learns
    from it."""
    roles = dict(actor=actor, teacher=teacher)
    options = dict(beta=beta, temperature=temperature, top_k=top_k, top_k_of=top_k_of, tail=tail)
    if match == "vocabulary":
        return distil.page(batch, key, cfg, **roles, **options)
    sampled = batch
    batch, taught = mask_untaught_rows(batch)
    batch, gap = compute_logprobs(batch, cfg, **roles)
    corrected, accepted, mismatch = apply_rollout_correction(batch, cfg)
    advantages = -teacher_gap(corrected)
    if prefix_gamma:
        advantages = early_weights(advantages, prefix_gamma) * advantages
    batch, filtering = filter_rows(corrected.replace(advantages=advantages), accepted, cfg)
    metrics = sample_metrics(sampled, actor.state.step, correct_at=cfg.correct_at)
    metrics |= {**gap, **taught, **mismatch}
    actor, metrics = update_actor(actor, batch, cfg, {**metrics, **filtering})
    return {"actor": actor}, metrics


def early_weights(advantages, gamma: float):
    """Returns 1 + gamma (1 - sum of |A| before the token / sum of |A| of the row): [B, S], from
    1 + gamma at the first token to 1 (IW-OPD, arXiv 2606.22600, Algorithm 1). Advantages [B, S]
    are 0 where nothing is learned."""
    size = jnp.abs(advantages)
    before = jnp.cumsum(size, axis=1) - size
    total = jnp.maximum(jnp.sum(size, axis=1, keepdims=True), 1e-8)
    return 1 + gamma * (1 - before / total)
