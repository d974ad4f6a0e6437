"""RLOO (arXiv 2402.14740): the baseline of a sample is the mean score of its siblings.

Sequence-level REINFORCE: -A times the log-prob of the whole response; KL in the reward.

rljax train presets/rloo:tiny
rljax train presets/rloo --config.model=MODEL_FOLDER \\
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
    config.sampler.max_response_tokens = 1024
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 128, 4
    config.batch.sequences_per_optimizer_step = 512
    config.algorithm.advantage = "rloo()"
    config.algorithm.policy_loss = "policy_gradient()"
    config.algorithm.reduction = "seq_mean_token_sum"
    config.algorithm.kl_in_reward = 0.01
    config.actor_optimizer.lr = 1e-6
    config.reward.function = "gsm8k()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
    return config
