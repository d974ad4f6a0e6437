"""OlmoRL from the base model on mathematics, "RL-Zero" (arXiv 2512.13961): as olmorl, with fewer
prompts per step and prompts retired at a pass rate of 0.875; prompts that the base model solves
in more than 62.5 % of 8 samples are dropped beforehand.

rljax train presets/olmorl_zero:tiny
rljax train presets/olmorl_zero --config.model=MODEL_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

Settings are the published ones; hardware, time and accuracy at full size: not measured. `:tiny`:
docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    config = Config(dataflow="grpo", steps=1000)
    config.data.max_prompt_tokens = 2048
    config.data.retire_at_pass_rate = 0.875
    config.data.drop_above_pass_rate = 0.625
    config.sampler.max_response_tokens = 16 * 1024
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 32, 8
    config.batch.sequences_per_optimizer_step = 256
    config.batch.tokens_per_microbatch = 32768
    config.algorithm.collect = "active()"
    config.algorithm.advantage = "group_relative(std='none')"
    config.algorithm.policy_loss = "ppo_clip(clip_low=0.2, clip_high=0.272, dual_clip=None)"
    config.algorithm.correction = (
        "rollout_correction(level='token', mode='truncate', upper=2.0, veto=None)"
    )
    config.algorithm.filters = ("live_groups()",)
    config.actor_optimizer.lr = 1e-6
    config.reward.function = "boxed()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
        config.algorithm.collect = "active(refill=0.5, max_rounds=4)"
        config.data.retire_at_pass_rate = 0.0  # 48 prompts: all of them are solved within the run
    return config
