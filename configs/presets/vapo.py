"""VAPO (arXiv 2504.05118): PPO for long answers.

The critic is trained alone first, its returns use lambda 1, the actor's advantages a lambda that
grows with the length; clip-higher, soft overlong punishment, and an NLL term on correct
responses. The paper's target: 60.4 on AIME24 with a 32B model (not measured here).

rljax train presets/vapo:tiny
rljax train presets/vapo --config.model=MODEL_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

Settings are the published ones; hardware, time and accuracy at full size: not measured. `:tiny`:
docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import TOKENS, tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    tokens, cache = (TOKENS, 1) if variant == "tiny" else (20480, 4096)
    alpha = 10.0 if variant == "tiny" else 0.05  # lambda = 1 - 1 / (alpha x length in tokens)
    config = Config(dataflow="vapo(value_pretraining_steps=50, positive_nll=0.1)", steps=1000)
    config.data.max_prompt_tokens = 2048
    config.sampler.max_response_tokens = tokens
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 512, 16
    config.batch.sequences_per_optimizer_step = 512
    config.batch.tokens_per_microbatch = 32768
    config.algorithm.reward_shaping = (
        f"soft_overlong(max_tokens={tokens}, cache_tokens={cache}, penalty=1.0)",
    )
    config.algorithm.advantage = f"vapo_gae(alpha={alpha}, lam_critic=1.0)"
    config.algorithm.policy_loss = "ppo_clip(clip_low=0.2, clip_high=0.28, dual_clip=10.0)"
    config.algorithm.value_loss = "squared_error(clip=0.5)"
    config.actor_optimizer.lr, config.critic_optimizer.lr = 1e-6, 2e-6
    config.actor_optimizer.warmup_steps = 10
    config.reward.function = "boxed()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
        config.dataflow = "vapo(value_pretraining_steps=10, positive_nll=0.1)"
    return config
