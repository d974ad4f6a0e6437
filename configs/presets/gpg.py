"""GPG (arXiv 2504.02546): plain policy gradient on group-centred scores, scaled up for the groups
without a gradient.

rljax train presets/gpg:tiny
rljax train presets/gpg --config.model=MODEL_FOLDER \\
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
    config.sampler.max_response_tokens = 3000
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 128, 8
    config.batch.sequences_per_optimizer_step = 1024
    config.algorithm.advantage = "gpg()"
    config.algorithm.policy_loss = "gpg()"
    config.actor_optimizer.lr = 1e-6
    config.reward.function = "boxed()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
    return config
