"""One step off policy: verl's one_step_off_policy on DAPO (its script dapo_7b_math_fsdp2_64_64),
whose prompts begin during the step before theirs.

What differs: on one mesh nothing is decoded while the policy learns, so the next step's samples
fill the slots that a step's last responses leave idle, and what has not ended goes on under the
next weights: a token is one step old, or none. Truncated importance weights correct for that.

rljax train presets/one_step_off:tiny
rljax train presets/one_step_off --config.model=MODEL_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

Settings are the published ones; hardware, time and accuracy at full size: not measured. `:tiny`:
docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import TOKENS, tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    tokens, cache = (TOKENS, 1) if variant == "tiny" else (28 * 1024, 4096)
    config = Config(dataflow="grpo", steps=400)
    config.data.max_prompt_tokens = 2048
    config.sampler.max_response_tokens = tokens
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 512, 16
    config.batch.sequences_per_optimizer_step = 512  # 32 prompts: 16 optimizer steps
    config.batch.tokens_per_microbatch = 60 * 1024
    config.rollouts.max_staleness, config.rollouts.ahead = 1, 1
    config.algorithm.correction = (
        "rollout_correction(level='token', mode='truncate', upper=2.0, veto=None)"
    )
    config.algorithm.reward_shaping = (
        "scaled(scale=2.0, shift=-0.5)",
        f"soft_overlong(max_tokens={tokens}, cache_tokens={cache}, penalty=1.0)",
    )
    config.algorithm.advantage = "group_relative(std='sample', eps=1e-6)"
    config.algorithm.policy_loss = "ppo_clip(clip_low=0.2, clip_high=0.28, dual_clip=10.0)"
    config.algorithm.reduction = "token_mean"
    config.actor_optimizer.lr, config.actor_optimizer.warmup_steps = 1e-6, 10
    config.actor_optimizer.clip_norm, config.actor_optimizer.weight_decay = 1.0, 0.1
    config.reward.function = "boxed()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 10
    if variant == "tiny":
        tiny(config)
    return config
