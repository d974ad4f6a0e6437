"""Clip-Cov (arXiv 2505.22617): a few of the tokens whose log-prob and advantage move together get
no gradient, so that entropy does not collapse.

PPO's own clip is practically off (1/1); 2e-4 of the tokens with covariance in (1, 5) are drawn;
dead groups are filtered.

rljax train presets/clip_cov:tiny
rljax train presets/clip_cov --config.model=MODEL_FOLDER \\
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
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 256, 8
    config.batch.sequences_per_optimizer_step = 256  # 32 prompts
    config.algorithm.advantage = "group_relative(std='sample', eps=1e-6)"
    config.algorithm.policy_loss = (
        "clip_cov(clip_low=1.0, clip_high=1.0, fraction=2e-4, cov_low=1.0, cov_high=5.0)"
    )
    config.algorithm.filters = ("live_groups()",)
    config.actor_optimizer.lr = 1e-6
    config.reward.function = "boxed()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
    return config
