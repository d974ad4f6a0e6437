"""REINFORCE++-baseline (arXiv 2501.03262), as in OpenRLHF's script: the group mean is taken off
and the rest whitened over the batch.

PPO clip 0.2, k2 KL in the loss (1e-5), importance weights in mask mode, groups with 0 < accuracy
< 1 only.

rljax train presets/reinforce_pp_baseline:tiny
rljax train presets/reinforce_pp_baseline \\
    --config.model=MODEL_FOLDER \\
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
    config.sampler.max_response_tokens = 63 * 1024
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 128, 8
    config.batch.sequences_per_optimizer_step = 1024
    config.batch.tokens_per_microbatch = 65536
    config.algorithm.advantage = "reinforce_plus_plus_baseline()"
    config.algorithm.policy_loss = "ppo_clip(clip_low=0.2, clip_high=0.2, dual_clip=None)"
    config.algorithm.correction = "rollout_correction(level='token', mode='mask', upper=2.0)"
    config.algorithm.filters = ("live_groups()",)
    config.algorithm.kl_in_loss, config.algorithm.kl_estimator = 1e-5, "k2"
    config.actor_optimizer.lr = 5e-7
    config.reward.function = "boxed()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
    return config
