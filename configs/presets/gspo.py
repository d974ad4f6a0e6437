"""GSPO (arXiv 2507.18071): one ratio per sequence, the geometric mean of the tokens' ratios,
clipped as a whole.

GRPO's advantage; clip 3e-4/4e-4; no KL; 4 optimizer steps per batch. Expect clip fractions two
orders of magnitude above PPO's.

rljax train presets/gspo:tiny
rljax train presets/gspo --config.model=MODEL_FOLDER \\
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
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 512, 16
    config.batch.sequences_per_optimizer_step = 2048
    config.algorithm.advantage = "group_relative(std='sample', eps=1e-6)"
    config.algorithm.policy_loss = "gspo(clip_low=3e-4, clip_high=4e-4)"
    config.algorithm.reduction = "seq_mean_token_mean"
    config.actor_optimizer.lr, config.actor_optimizer.warmup_steps = 1e-6, 200  # 5 %
    config.reward.function = "boxed()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
    return config
