"""XPO: online DPO between a sample of the policy and one of the reference, with a bonus for what
the reference would not write (arXiv 2405.21046).

rljax train presets/xpo:tiny
rljax train presets/xpo \\
    --config.model=MODEL_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

What differs: beta, alpha, learning rate and temperature are the defaults of TRL 0.19 (0.1, 1e-5,
5e-7, 0.9); the other numbers are ours.

Hardware, time and accuracy at full size: not measured. `:tiny`: docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    config = Config(dataflow="xpo", steps=500)
    config.data.max_prompt_tokens = 1024
    config.sampler.max_response_tokens, config.sampler.temperature = 1024, 0.9
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 64, 2  # half the reference's
    config.batch.sequences_per_optimizer_step = 128  # 64 pairs
    config.algorithm.preference_loss = "xpo(beta=0.1, alpha=1e-5)"
    config.actor_optimizer.lr = 5e-7
    config.reward.function = "boxed()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
    return config
