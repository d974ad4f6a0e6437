"""GRPO as DeepSeekMath trained it (arXiv 2402.03300).

Group-normalised advantage (sample std), clip 0.2, the mean over tokens of each response and then
over responses, KL to the starting policy in the loss (k3, 0.04).

rljax train presets/grpo:tiny
rljax train presets/grpo --config.model=MODEL_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

Settings are the published ones; hardware, time and accuracy at full size: not measured. `:tiny`:
docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    config = Config(dataflow="grpo", steps=1000)
    config.data.max_prompt_tokens = 1024
    config.sampler.max_response_tokens = 1024
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 16, 64
    config.batch.sequences_per_optimizer_step = 1024
    config.algorithm.advantage = "group_relative(std='sample', eps=1e-6)"
    config.algorithm.policy_loss = "ppo_clip(clip_low=0.2, clip_high=0.2, dual_clip=None)"
    config.algorithm.reduction = "seq_mean_token_mean"
    config.algorithm.kl_in_loss, config.algorithm.kl_estimator = 0.04, "k3"
    config.actor_optimizer.lr = 1e-6
    config.reward.function = "boxed()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
    return config
