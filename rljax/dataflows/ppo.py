"""PPO: actor and critic, KL to the reference in the reward, generalised advantages (arXiv
1707.06347)."""

from rljax.correction import mismatch_metrics
from rljax.losses.kl import kl_penalised_rewards
from rljax.metrics import batch_metrics
from rljax.roles import program


def ppo(prompts, key, cfg, *, actor, critic, reward, reference=None):
    batch = actor.generate(
        prompts, key, cfg.sampling, n=cfg.samples_per_prompt
    )  # prompts -> trajectories
    batch = reward(batch, prompts)  # trajectories -> rewards
    return learn(
        batch, cfg, actor=actor, critic=critic, reference=reference
    )  # -> new actor and critic


@program
def learn(batch, cfg, *, actor, critic, reference):
    rows = cfg.steps.microbatch_rows
    batch = batch.replace(
        old_logprobs=actor.logprobs(batch, rows), values=critic.values(batch, rows)
    )
    if reference is not None:
        batch = batch.replace(ref_logprobs=reference.logprobs(batch, rows))
    shaped = batch
    if cfg.kl_in_reward:
        shaped = batch.replace(rewards=kl_penalised_rewards(batch, coef=cfg.kl_in_reward))
    advantages, returns = cfg.advantage(shaped)
    batch = batch.replace(advantages=advantages, returns=returns)
    critic, critic_metrics = critic.update(
        batch, cfg.value_loss, steps=cfg.steps, reduction=cfg.reduction
    )
    actor, metrics = actor.update(batch, cfg.policy_loss, **cfg.update_options)
    metrics = {
        **metrics,
        **critic_metrics,
        **batch_metrics(batch, shaped),
        **mismatch_metrics(batch),
    }
    return {"actor": actor, "critic": critic}, metrics
