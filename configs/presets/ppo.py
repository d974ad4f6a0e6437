"""PPO with a rule reward, as in verl's GSM8K script: actor and critic, one sample per prompt.

GAE with gamma = lambda = 1, clip 0.2, KL to the starting policy in the reward (k1, 0.001).

rljax train presets/ppo:tiny
rljax train presets/ppo --config.model=MODEL_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

Settings are the published ones; hardware, time and accuracy at full size: not measured. `:tiny`:
docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    config = Config(dataflow="ppo", steps=500)
    config.data.max_prompt_tokens = 512
    config.sampler.max_response_tokens = 256
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 1024, 1
    config.batch.sequences_per_optimizer_step = 256
    config.algorithm.advantage = "gae(gamma=1.0, lam=1.0)"
    config.algorithm.policy_loss = "ppo_clip(clip_low=0.2, clip_high=0.2, dual_clip=3.0)"
    config.algorithm.value_loss = "squared_error(clip=0.5)"
    config.algorithm.kl_in_reward = 0.001
    config.actor_optimizer.lr, config.critic_optimizer.lr = 1e-6, 1e-5
    config.reward.function = "gsm8k()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
    return config
