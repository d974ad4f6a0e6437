"""GRPO: a group of samples per prompt, advantages relative to the group, no critic (arXiv
2402.03300)."""

from rljax.correction import mismatch_metrics
from rljax.losses.kl import kl_penalised_rewards
from rljax.metrics import batch_metrics
from rljax.roles import program


def grpo(prompts, key, cfg, *, actor, reward, reference=None):
    batch = actor.generate(
        prompts, key, cfg.sampling, n=cfg.samples_per_prompt
    )  # prompts -> trajectories
    batch = reward(batch, prompts)  # trajectories -> rewards
    return learn(batch, cfg, actor=actor, reference=reference)  # rewards -> new actor


@program
def learn(batch, cfg, *, actor, reference):
    rows = cfg.steps.microbatch_rows
    batch = batch.replace(old_logprobs=actor.logprobs(batch, rows))
    if reference is not None:
        batch = batch.replace(ref_logprobs=reference.logprobs(batch, rows))
    shaped = batch
    if cfg.kl_in_reward:
        shaped = batch.replace(rewards=kl_penalised_rewards(batch, coef=cfg.kl_in_reward))
    batch = batch.replace(advantages=cfg.advantage(shaped))
    actor, metrics = actor.update(batch, cfg.policy_loss, **cfg.update_options)
    return {"actor": actor}, {**metrics, **batch_metrics(batch, shaped), **mismatch_metrics(batch)}
