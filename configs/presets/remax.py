"""ReMax (arXiv 2310.10505): the baseline is the score of the greedy response to the same prompt.

-A log pi, one sample and one greedy response per prompt, KL in the reward (0.05).

rljax train presets/remax:tiny
rljax train presets/remax --config.model=MODEL_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

Settings are the published ones; hardware, time and accuracy at full size: not measured. `:tiny`:
docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    config = Config(dataflow="remax", steps=1000)
    config.data.max_prompt_tokens = 1024
    config.sampler.max_response_tokens = 1024
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 1024, 1
    config.batch.sequences_per_optimizer_step = 256
    config.algorithm.advantage = "remax(gamma=0.99)"
    config.algorithm.policy_loss = "policy_gradient()"
    config.algorithm.kl_in_reward = 0.05
    config.actor_optimizer.lr = 1e-6
    config.reward.function = "gsm8k()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
    return config
