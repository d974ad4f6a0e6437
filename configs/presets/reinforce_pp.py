"""REINFORCE++ (arXiv 2501.03262): returns with the KL penalty, whitened over the batch; no groups,
PPO's clip.

rljax train presets/reinforce_pp:tiny
rljax train presets/reinforce_pp --config.model=MODEL_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

Settings are the published ones; hardware, time and accuracy at full size: not measured. `:tiny`:
docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    config = Config(dataflow="reinforce", steps=1000)
    config.data.max_prompt_tokens = 1024
    config.sampler.max_response_tokens = 1024
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 1024, 1
    config.batch.sequences_per_optimizer_step = 1024
    config.algorithm.advantage = "reinforce_plus_plus(gamma=1.0)"
    config.algorithm.policy_loss = "ppo_clip(clip_low=0.2, clip_high=0.2, dual_clip=None)"
    config.algorithm.kl_in_reward = 0.01
    config.actor_optimizer.lr = 5e-7
    config.reward.function = "gsm8k()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
    return config
