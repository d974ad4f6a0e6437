"""PF-PPO (arXiv 2409.06957): PPO on responses redrawn by the rank of their reward, so that
unreliable middle scores count less.

Per prompt 8 candidates; "br": the best with 1/2, the rest shares 1/2. The other form redraws the
whole batch: --config.dataflow="pf_ppo(scope='batch')".

rljax train presets/pf_ppo:tiny
rljax train presets/pf_ppo --config.model=MODEL_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

Settings are the published ones; hardware, time and accuracy at full size: not measured. `:tiny`:
docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    config = Config(dataflow="pf_ppo(scope='prompt', kind='br')", steps=500)
    config.data.max_prompt_tokens = 1024
    config.sampler.max_response_tokens = 1024
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 128, 8
    config.batch.sequences_per_optimizer_step = 256
    config.algorithm.advantage = "gae(gamma=1.0, lam=0.95)"
    config.algorithm.policy_loss = "ppo_clip(clip_low=0.2, clip_high=0.2, dual_clip=None)"
    config.algorithm.kl_in_reward = 0.001
    config.actor_optimizer.lr, config.critic_optimizer.lr = 1e-6, 1e-5
    config.reward.function = "exact_match()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
    return config
