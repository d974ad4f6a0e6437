"""Dr.GRPO (arXiv 2503.20783): GRPO without its two biases.

The advantage is score - group mean (no std), and the sum over tokens is divided by a constant,
the generation limit, instead of each response's length. No KL.

rljax train presets/dr_grpo:tiny
rljax train presets/dr_grpo --config.model=MODEL_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

Settings are the published ones; hardware, time and accuracy at full size: not measured. `:tiny`:
docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import TOKENS, tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    tokens = TOKENS if variant == "tiny" else 3000
    config = Config(dataflow="grpo", steps=1000)
    config.data.max_prompt_tokens = 1024
    config.sampler.max_response_tokens = tokens
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 128, 8
    config.batch.sequences_per_optimizer_step = 128
    config.algorithm.advantage = "group_relative(std='none')"
    config.algorithm.policy_loss = "ppo_clip(clip_low=0.2, clip_high=0.2, dual_clip=None)"
    config.algorithm.reduction = f"seq_mean_token_sum_norm(max_tokens={tokens})"
    config.actor_optimizer.lr = 1e-6
    config.reward.function = "boxed()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
    return config
