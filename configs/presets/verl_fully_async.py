"""verl's fully asynchronous trainer on DAPO (its script dapo_7b_math_fsdp2_64_64): steps of 128
prompts, half of a round of 512 begun ahead, the ratio taken to the sampler's own log-probs.

What differs: the weights go to the sampler after every step, not after four of them; responses
keep their caches when they do; no token is older than four steps (a round), which is decided as its
prompt begins, so that nothing is dropped for its age, where verl's queue drops its oldest samples.

rljax train presets/verl_fully_async:tiny
rljax train presets/verl_fully_async \\
    --config.model=MODEL_FOLDER --config.data.train=train.parquet --config.data.test=test.parquet

Settings are the published ones; hardware, time and accuracy at full size: not measured. `:tiny`:
docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import TOKENS, tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    tokens, cache = (TOKENS, 1) if variant == "tiny" else (28 * 1024, 4096)
    config = Config(dataflow="grpo", steps=1600)
    config.data.max_prompt_tokens = 2048
    config.sampler.max_response_tokens = tokens
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 128, 16
    config.batch.sequences_per_optimizer_step = 512  # 32 prompts: 4 optimizer steps
    config.batch.tokens_per_microbatch = 60 * 1024
    config.rollouts.max_staleness, config.rollouts.ahead = 4, 2
    config.algorithm.old_logprobs = "sampler"
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
    config.evaluate.every_steps = 80
    if variant == "tiny":
        tiny(config)
    return config
