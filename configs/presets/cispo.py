"""CISPO as in MiniMax-M1 (arXiv 2506.13585): the ratio is clipped and held constant, so that every
token keeps a gradient.

Group advantage, clip-higher with the lower side open, float32 output head, no KL.

rljax train presets/cispo:tiny
rljax train presets/cispo --config.model=MODEL_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

Settings are the published ones; hardware, time and accuracy at full size: not measured. `:tiny`:
docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    config = Config(dataflow="grpo", steps=1000)
    config.model_settings.head_in_float32 = True
    config.data.max_prompt_tokens = 2048
    config.sampler.max_response_tokens = 8192
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 128, 16
    config.batch.sequences_per_optimizer_step = 512
    config.algorithm.advantage = "group_relative(std='sample', eps=1e-6)"
    config.algorithm.policy_loss = "cispo(clip_low=None, clip_high=0.28)"
    config.algorithm.reduction = "token_mean"
    config.actor_optimizer.lr = 1e-6
    config.reward.function = "boxed()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
    return config
