"""PF-PPO: PPO on responses that are redrawn, with replacement, by their rewards: a reward model is
least reliable in the middle of its range (arXiv 2409.06957)."""

from typing import Literal

import jax.numpy as jnp

from rljax.batch import masked_mean, take_rows
from rljax.contracts import NotNegative, contract
from rljax.dataflows.ppo import ppo
from rljax.dataflows.steps import adapt_entropy_coef, compute_logprobs, prepare_batch, update_actor
from rljax.roles import program
from rljax.shaping.resampling import group_rank_weights, resample, score_weights


@contract(safe=True, reads=("rewards", "scores", "group"), fills=("values",))
@program
def pf_ppo(
    batch,
    key,
    cfg,
    *,
    actor,
    critic,
    reference=None,
    kl_controller=None,
    entropy_controller=None,
    scope: Literal["prompt", "batch"] = "prompt",
    kind: Literal["bon", "br", "bw"] = "br",
    method: Literal["pow", "max_min", "max_random"] = "pow",
    power: NotNegative = 2.0,
):
    """PPO on redrawn rows. scope "prompt" replaces each row by one of its prompt's, drawn by rank
    (`kind`), before learning; "batch" by one of the whole batch, drawn by score (`method`,
    `power`), after GAE."""
    roles = dict(actor=actor, critic=critic, reference=reference)
    if scope == "prompt":
        batch = take_rows(batch, redraw_in_groups(key, batch, kind))
        controllers = dict(kl_controller=kl_controller, entropy_controller=entropy_controller)
        return ppo.page(batch, key, cfg, **roles, **controllers)
    cfg, entropy_controller, bonus = adapt_entropy_coef(batch, cfg, entropy_controller)
    batch, load = compute_logprobs(batch, cfg, **roles)
    batch, metrics, controller = prepare_batch(batch, cfg, actor=actor, kl_controller=kl_controller)
    batch = take_rows(batch, resample(key, weights_of_scored(batch, method, power)))
    critic, critic_metrics = critic.update(batch, cfg.value_loss, **cfg.critic_options)
    earlier_metrics = {**critic_metrics, **metrics, **bonus, **load}
    actor, metrics = update_actor(actor, batch, cfg, earlier_metrics, kl_controller)
    controllers = dict(kl_controller=controller, entropy_controller=entropy_controller)
    return {"actor": actor, "critic": critic, **controllers}, metrics


def redraw_in_groups(key, batch, kind: str):
    """Returns row indices [B]: for each row one of its own group, drawn by the rank of the
    score."""
    weights = group_rank_weights(batch.scores, batch.group, kind=kind)
    return resample(key, weights, groups=batch.group)


def weights_of_scored(batch, method: str, power: float):
    """Returns score_weights [B] of the rows that have policy tokens; 0 for the others, whose reward
    failed."""
    live = jnp.any(batch.mask > 0, axis=1)
    # Their score of 0 must be neither the greatest nor the least.
    scores = jnp.where(live, batch.scores, masked_mean(batch.scores, live))
    return jnp.where(live, score_weights(scores, method=method, power=power), 0.0)
