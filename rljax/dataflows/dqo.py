"""DQO and DRO: policy and value learned together from scored completions of a file, nothing sampled
(arXiv 2410.09302, 2405.19107)."""

import functools
import math
from typing import Literal

import jax.numpy as jnp

from rljax.contracts import AboveZero, Share, contract
from rljax.errors import InputError
from rljax.losses.q_function import dqo_policy, dqo_value, dro_policy, dro_value
from rljax.roles import program


@contract(safe=True, data="trajectories", token_rewards=True)
@program
def dqo(
    batch,
    key,
    cfg,
    *,
    actor,
    critic,
    reference=None,
    beta: AboveZero = 0.03,
    lam: Share = 1.0,
    one_step: bool = False,
    behaviour: Literal["auto", "sampler", "ref"] = "auto",
    is_level: Literal["trajectory", "suffix", "token", "off"] = "trajectory",
    is_cap: AboveZero = math.e,
    bootstrap_truncated: bool = False,
):
    """Q = beta log pi + V in the MDP of tokens. `behaviour` says who wrote the completions, for the
    weight pi / mu; "auto" is their recorded log-probs, or the reference where there are none.
    Process scores of a row are its rewards, in place of its outcome.

    `is_level` and `is_cap` say over which tokens the weight runs, and bound it. Raises InputError
    for behaviour="sampler" if the rows have no log-probs.
    """
    if behaviour == "auto":
        behaviour = "ref" if batch.sampler_logprobs is None else "sampler"
    if behaviour == "sampler" and batch.sampler_logprobs is None:
        raise InputError(
            "dqo(behaviour='sampler') needs the log-probs of whoever wrote the completions",
            rule="the rows of data.train have no column 'logprobs'",
            fix="add it, or behaviour='ref' where the reference wrote them",
        )
    options = dict(
        beta=beta,
        lam=lam,
        one_step=one_step,
        behaviour=behaviour,
        is_level=is_level,
        is_cap=is_cap,
        bootstrap_truncated=bootstrap_truncated,
    )
    losses = (functools.partial(loss, **options) for loss in (dqo_policy, dqo_value))
    return _both(batch, cfg, *losses, actor=actor, critic=critic, reference=reference)


@contract(safe=True, data="trajectories")
@program
def dro(batch, key, cfg, *, actor, critic, reference=None, tau: float):
    """Fits r = V(prompt) + tau log pi / ref by least squares; tau is the strength of the KL.
    The prompt has one value and the response one reward, that of its row: scores of steps are not
    read."""
    batch = batch.replace(rewards=None)  # the losses read `scores` then
    losses = (functools.partial(loss, tau=tau) for loss in (dro_policy, dro_value))
    return _both(batch, cfg, *losses, actor=actor, critic=critic, reference=reference)


def _both(batch, cfg, policy_loss, value_loss, *, actor, critic, reference=None):
    """Returns policy and value after one step towards each other's targets, and metrics."""
    if reference is not None:
        batch = batch.replace(ref_logprobs=reference.logprobs(batch, cfg.steps))
    # Targets are those of policy and value as the step begins, for both.
    logprobs, entropy = actor.logprobs_and_entropy(batch, cfg.steps)
    values = critic.values(batch, cfg.steps)
    batch = batch.replace(old_logprobs=logprobs, entropy=entropy, values=values)
    critic, critic_metrics = critic.update(batch, value_loss, **cfg.critic_options)
    actor, metrics = actor.update(batch, policy_loss, steps=cfg.steps, reduction=cfg.reduction)
    for name in ("ppo_kl", "ppo_k3"):  # to the policy that the step began with: always 0
        metrics.pop(name, None)
    return {"actor": actor, "critic": critic}, {**metrics, **explained(critic_metrics)}


def explained(metrics: dict) -> dict:
    """Returns the metrics, with the explained variance 1 - Var(residual) / Var(target) in place of
    the sums that it is computed from."""
    if "critic/dqo_target" not in metrics:
        return metrics
    means = [
        metrics.pop(f"critic/{name}")
        for name in (
            "dqo_value_residual",
            "dqo_value_residual_square",
            "dqo_target",
            "dqo_target_square",
        )
    ]
    residual, target = means[1] - means[0] ** 2, means[3] - means[2] ** 2
    share = 1 - residual / jnp.maximum(target, 1e-8)
    return {**metrics, "critic/explained_variance": jnp.where(target > 1e-8, share, 0.0)}
