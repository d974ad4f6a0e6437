"""PRIME (arXiv 2502.01456): rewards of tokens by an implicit reward model that learns online from
outcomes, leave-one-out of them and of the outcomes, prompts of which 0.2 to 0.8 are right.

rljax train presets/prime:tiny
rljax train presets/prime --config.model=MODEL_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

What differs: prompts outside of the range are left out of the step, not sampled anew (PRIME draws 4
times as many).

Other settings are the published ones. Hardware, time and accuracy at full size: not measured.
`:tiny`: docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    config = Config(dataflow="prime(update='before')", steps=800)
    config.roles = ("implicit=trained_policy(lr=1e-6, clip_norm=10.0)",)
    config.data.max_prompt_tokens = 1024
    config.sampler.max_response_tokens = 3072
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 256, 4
    config.batch.sequences_per_optimizer_step = 256
    config.algorithm.advantage = "prime()"
    config.algorithm.policy_loss = "ppo_clip(clip_low=0.2, clip_high=0.2)"
    config.algorithm.baseline_filters = ("pass_rate(low=0.2, high=0.8)",)
    config.algorithm.kl_in_reward, config.algorithm.entropy_coef = 0.001, 0.001
    config.actor_optimizer.lr = 5e-7
    config.reward.function = "boxed()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 16
    if variant == "tiny":
        tiny(config)
        config.roles = ("implicit=trained_policy(lr=1e-3, clip_norm=10.0)",)
        # Slow enough that no letter falls out of the filter's range before it is learned.
        config.actor_optimizer.lr = 1e-3
    return config
