"""OlmoRL as Olmo 3 Think was trained (arXiv 2512.13961): token-level PPO 0.2/0.272 times truncated
importance weights.

No std in the advantage, no KL, dead groups replaced by active sampling, truncated rows kept as
they are scored.

rljax train presets/olmorl:tiny
rljax train presets/olmorl --config.model=MODEL_FOLDER \\
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
    config.sampler.max_response_tokens = 30 * 1024
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 64, 8
    config.batch.sequences_per_optimizer_step = 512
    config.batch.tokens_per_microbatch = 32768
    config.algorithm.collect = "active()"
    config.algorithm.advantage = "group_relative(std='none')"
    config.algorithm.policy_loss = "ppo_clip(clip_low=0.2, clip_high=0.272, dual_clip=None)"
    config.algorithm.correction = (
        "rollout_correction(level='token', mode='truncate', upper=2.0, veto=None)"
    )
    config.algorithm.filters = ("live_groups()",)
    config.actor_optimizer.lr = 1e-6  # 2e-6 for 32B
    config.reward.function = "boxed()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
        config.algorithm.collect = "active(refill=0.5, max_rounds=4)"
    return config
