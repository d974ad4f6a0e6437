"""VAPO: PPO with a critic that is trained alone first, and an NLL term on correct responses (arXiv
2504.05118; its GAE is the advantage `vapo_gae`)."""

from rljax.dataflows.ppo import learn
from rljax.dataflows.stages import estimate, forward_passes
from rljax.roles import program


def vapo(
    prompts, key, cfg, *, actor, critic, reward, reference=None, kl_controller=None,
    value_pretraining_steps: int = 50, positive_nll: float = 0.1,
):  # fmt: skip
    """`value_pretraining_steps` optimizer steps of the critic, on returns of the fixed policy, come
    before the actor's first; `positive_nll` weighs the NLL of rows with score >= correct_at."""
    batch, prompts, counts = cfg.collect(prompts, key, cfg, actor=actor, reward=reward)
    if int(critic.state.step) < value_pretraining_steps:
        new, metrics = pretrain_values(batch, cfg, actor=actor, critic=critic)
    else:
        roles = dict(actor=actor, critic=critic, reference=reference, kl_controller=kl_controller)
        new, metrics = learn(batch, cfg.replace(positive_nll=positive_nll), **roles)
    return new, {**metrics, **counts}


@program
def pretrain_values(batch, cfg, *, actor, critic):
    batch, seen = forward_passes(batch, cfg, actor=actor, critic=critic)
    batch, found, _ = estimate(batch, cfg.replace(kl_in_reward=0.0), actor=actor)
    critic, metrics = critic.update(batch, cfg.value_loss, **cfg.critic_options)
    return {"critic": critic}, {**metrics, **found, **seen}
