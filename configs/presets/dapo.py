"""DAPO (arXiv 2503.14476): clip-higher, token mean, dynamic sampling, soft overlong punishment.

GRPO's advantage; rounds of 3 x the prompts until every group has both right and wrong answers; no
KL, no entropy bonus; rewards +-1. The paper's target: 50 on AIME24 with Qwen2.5-32B (not measured
here).

rljax train presets/dapo:tiny
rljax train presets/dapo --config.model=MODEL_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

`:filter` leaves responses that the limit cut out of the loss, in place of the punishment.

Settings are the published ones; hardware, time and accuracy at full size: not measured. `:tiny`:
docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import TOKENS, tiny


def get_config(variant: str = "") -> Config:
    """`:filter` drops overlong responses instead of punishing them; `:tiny` is the same algorithm
    on an embedded task."""
    tokens, cache = (TOKENS, 1) if variant == "tiny" else (20480, 4096)
    config = Config(dataflow="grpo", steps=1000)
    config.data.max_prompt_tokens = 2048
    config.sampler.max_response_tokens = tokens
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 512, 16
    config.batch.sequences_per_optimizer_step = 512  # 32 prompts: 16 optimizer steps
    config.batch.tokens_per_microbatch = 32768
    config.algorithm.collect = "dynamic(oversample=3, max_rounds=10)"
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
    config.evaluate.every_steps = 25
    if variant == "filter":
        config.algorithm.reward_shaping = ("scaled(scale=2.0, shift=-0.5)",)
        config.algorithm.filters = ("overlong()",)
    if variant == "tiny":  # late in the run most groups are all right: fill up instead of stopping
        tiny(config)
        config.algorithm.collect = "dynamic(oversample=2, max_rounds=3, if_short='fill')"
    return config
