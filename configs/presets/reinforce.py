"""REINFORCE (Williams 1992): -A log pi with the running mean of the scores as baseline; no critic,
no groups, no ratio.

rljax train presets/reinforce:tiny
rljax train presets/reinforce --config.model=MODEL_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

Settings are the published ones; hardware, time and accuracy at full size: not measured. `:tiny`:
docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    config = Config(dataflow="reinforce(decay=0.9)", steps=1000)
    config.data.max_prompt_tokens = 1024
    config.sampler.max_response_tokens = 1024
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 1024, 1
    config.batch.sequences_per_optimizer_step = 1024
    config.algorithm.advantage = "reinforce(gamma=1.0)"
    config.algorithm.policy_loss = "policy_gradient()"
    config.algorithm.reduction = "seq_mean_token_mean"
    config.actor_optimizer.lr = 1e-6
    config.reward.function = "gsm8k()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
    return config
