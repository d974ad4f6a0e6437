"""PPO that samples responses anew from their weakest token: half of a step's rows are regenerated
behind all that comes before the token with the smallest advantage.

rljax train presets/special_token:tiny
rljax train presets/special_token --config.model=MODEL_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

There is no publication: the settings are those of the preset ppo, in two rounds. Hardware, time and
accuracy at full size: not measured. `:tiny`: docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    config = Config(dataflow="ppo", steps=1000)
    config.data.max_prompt_tokens = 1024
    config.sampler.max_response_tokens = 1024
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 128, 4
    config.batch.sequences_per_optimizer_step = 128
    config.algorithm.collect = "special_token(max_rounds=2)"
    config.algorithm.advantage = "gae(gamma=1.0, lam=0.95)"
    config.algorithm.policy_loss = "ppo_clip(clip_low=0.2, clip_high=0.2)"
    config.actor_optimizer.lr, config.critic_optimizer.lr = 1e-6, 1e-5
    config.reward.function = "boxed()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 16
    if variant == "tiny":
        tiny(config)
    return config
