"""SAPO (arXiv 2511.20347): a smooth gate on the ratio instead of a clip, cooler for negative
advantages.

rljax train presets/sapo:tiny
rljax train presets/sapo --config.model=MODEL_FOLDER \\
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
    config.sampler.max_response_tokens = 8192
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 128, 8
    config.batch.sequences_per_optimizer_step = 256
    config.algorithm.advantage = "group_relative(std='sample', eps=1e-6)"
    config.algorithm.policy_loss = "sapo()"
    config.algorithm.reduction = "seq_mean_token_mean"
    config.actor_optimizer.lr = 1e-6
    config.reward.function = "boxed()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
    return config
