"""PF-PPO: PPO on responses that are redrawn, with replacement, by their rewards: a reward model is
least reliable in the middle of its range (arXiv 2409.06957)."""

from typing import Literal

import jax
import jax.numpy as jnp

from rljax.batch import masked_mean
from rljax.dataflows.ppo import learn
from rljax.dataflows.stages import estimate, forward_passes, update_options, updated
from rljax.roles import program
from rljax.shaping.resampling import group_rank_weights, resample, score_weights


def pf_ppo(
    prompts, key, cfg, *, actor, critic, reward, reference=None, kl_controller=None,
    scope: Literal["prompt", "batch"] = "prompt",
    kind: Literal["bon", "br", "bw"] = "br",
    method: Literal["pow", "max_min", "max_random"] = "pow",
    power: float = 2.0,
):  # fmt: skip
    """scope "prompt": each row is replaced by one of its prompt's, drawn by rank (`kind`), before
    learning. "batch": by one of the whole batch, drawn by score (`method`, `power`), after GAE."""
    batch, prompts, counts = cfg.collect(prompts, key, cfg, actor=actor, reward=reward)
    draw = jax.random.fold_in(key, 2**20)
    roles = dict(actor=actor, critic=critic, reference=reference, kl_controller=kl_controller)
    if scope == "prompt":
        rows = redraw_in_groups(draw, batch, kind)
        new, metrics = learn(take(batch, rows), cfg, **roles)
    else:
        new, metrics = learn_redrawn((batch, draw), (cfg, method, power), **roles)
    return new, {**metrics, **counts}


def take(batch, rows):
    """The batch with row rows[b] in place of row b."""
    return jax.tree.map(lambda x: x[rows], batch)


def redraw_in_groups(key, batch, kind: str):
    """Row indices [B]: of its own group, by the rank of the score."""
    weights = group_rank_weights(batch.scores, batch.group, kind=kind)
    return resample(key, weights, groups=batch.group)


def weights_of_scored(batch, method: str, power: float):
    """score_weights of the rows that have policy tokens; 0 for the others, whose reward failed."""
    live = jnp.any(batch.mask > 0, axis=1)
    # Their score of 0 must be neither the greatest nor the least.
    scores = jnp.where(live, batch.scores, masked_mean(batch.scores, live))
    return jnp.where(live, score_weights(scores, method=method, power=power), 0.0)


@program
def learn_redrawn(batch_and_key, options, *, actor, critic, reference, kl_controller):
    (batch, key), (cfg, method, power) = batch_and_key, options
    batch, seen = forward_passes(batch, cfg, actor=actor, reference=reference, critic=critic)
    update = update_options(cfg, kl_controller)
    batch, found, kl_controller = estimate(batch, cfg, actor=actor, kl_controller=kl_controller)
    rows = resample(key, weights_of_scored(batch, method, power))
    batch = take(batch, rows)
    critic, critic_metrics = critic.update(batch, cfg.value_loss, **cfg.critic_options)
    actor, metrics = actor.update(batch, cfg.policy_loss, **update)
    new = updated(actor=actor, critic=critic, kl_controller=kl_controller)
    return new, {**metrics, **critic_metrics, **found, **seen}
