"""PPO: actor and critic, KL to the reference in the reward, generalised advantages (arXiv
1707.06347)."""

from rljax.dataflows.stages import estimate, forward_passes, update_options, updated
from rljax.roles import program


def ppo(prompts, key, cfg, *, actor, critic, reward, reference=None, kl_controller=None):
    batch, prompts, counts = cfg.collect(prompts, key, cfg, actor=actor, reward=reward)
    roles = dict(actor=actor, critic=critic, reference=reference, kl_controller=kl_controller)
    new, metrics = learn(batch, cfg, **roles)  # rewards -> new actor and critic
    return new, {**metrics, **counts}


@program
def learn(batch, cfg, *, actor, critic, reference=None, kl_controller=None):
    batch, seen = forward_passes(batch, cfg, actor=actor, reference=reference, critic=critic)
    options = update_options(cfg, kl_controller)
    batch, found, kl_controller = estimate(batch, cfg, actor=actor, kl_controller=kl_controller)
    critic, critic_metrics = critic.update(batch, cfg.value_loss, **cfg.critic_options)
    actor, metrics = actor.update(batch, cfg.policy_loss, **options)
    new = updated(actor=actor, critic=critic, kl_controller=kl_controller)
    return new, {**metrics, **critic_metrics, **found, **seen}
