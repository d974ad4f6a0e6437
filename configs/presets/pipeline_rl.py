"""PipelineRL (arXiv 2509.19128): leave-one-out advantages, REINFORCE with a clipped importance
weight.

New weights are used at once by the responses in flight, which keep what older ones have read.

What differs: the bound is ours. No token is older than four steps, and none is dropped for its age
(PipelineRL has a lag in samples, or none).

rljax train presets/pipeline_rl:tiny
rljax train presets/pipeline_rl --config.model=MODEL_FOLDER \\
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
    config.sampler.max_response_tokens = 8192
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 128, 8
    config.batch.sequences_per_optimizer_step = 1024
    config.batch.tokens_per_microbatch = 12288
    config.rollouts.max_staleness, config.rollouts.ahead = 4, 4
    config.algorithm.advantage = "rloo()"
    config.algorithm.policy_loss = "cispo(ratio_max=5.0, behaviour='sampler')"
    config.actor_optimizer.lr, config.actor_optimizer.schedule = 1e-6, "cosine"
    config.actor_optimizer.warmup_steps, config.actor_optimizer.clip_norm = 50, 0.3
    config.reward.function = "boxed()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
    return config
