"""GRPO and its family: a group of samples per prompt, advantages relative to the group, no critic
(arXiv 2402.03300)."""

from rljax.dataflows.stages import estimate, forward_passes, update_options, updated
from rljax.roles import program


def grpo(prompts, key, cfg, *, actor, reward, reference=None, kl_controller=None):
    # prompts -> scored trajectories: one round, or as many as fill the step with live groups
    batch, prompts, counts = cfg.collect(prompts, key, cfg, actor=actor, reward=reward)
    # rewards -> new actor
    roles = dict(actor=actor, reference=reference, kl_controller=kl_controller)
    new, metrics = learn(batch, cfg, **roles)
    return new, {**metrics, **counts}


@program
def learn(batch, cfg, *, actor, reference=None, kl_controller=None):
    batch, seen = forward_passes(batch, cfg, actor=actor, reference=reference)
    options = update_options(cfg, kl_controller)
    batch, found, kl_controller = estimate(batch, cfg, actor=actor, kl_controller=kl_controller)
    actor, metrics = actor.update(batch, cfg.policy_loss, **options)
    return updated(actor=actor, kl_controller=kl_controller), {**metrics, **found, **seen}
