"""AReaL's GSM8K example (arXiv 2505.24298): PPO decoupled from the sampler.

The clip is around the policy just before the update, the weight (capped at 5) is that of it to
the sampler. Rewards (r - 0.5) 10; group-normalised, then the batch. Tokens are at most two steps
old, and responses that go on under new weights are read again by them.

What differs: AReaL bounds how many samples have begun; here no single token is older either. It
trains what is ready first; here that is so within the bound, with one step of prompts ahead.

rljax train presets/areal:tiny
rljax train presets/areal --config.model=MODEL_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

Settings are the published ones; hardware, time and accuracy at full size: not measured. `:tiny`:
docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    config = Config(dataflow="grpo", steps=500)
    config.data.max_prompt_tokens = 512
    config.sampler.max_response_tokens = 1024
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 256, 4
    config.batch.sequences_per_optimizer_step = 256
    config.rollouts.max_staleness, config.rollouts.in_flight_cache = 2, "reread"
    config.algorithm.reward_shaping = ("scaled(scale=10.0, shift=-0.5)",)
    config.algorithm.advantage = "group_relative(std='sample', eps=1e-6, whiten=True)"
    config.algorithm.policy_loss = "decoupled_ppo(clip_low=0.4, clip_high=0.4)"
    config.actor_optimizer.lr = 1.7e-5
    config.reward.function = "gsm8k()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
    return config
