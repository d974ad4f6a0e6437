"""A Bradley-Terry reward model with scores kept near 0; the run's folder
reward_model/ is what --config.reward.model and --config.critic_model of a PPO run read.

rljax train offline/reward_model:tiny
rljax train offline/reward_model --config.model=MODEL_FOLDER \\
    --config.data.train=train.jsonl --config.data.test=test.jsonl

Hardware, time and quality at full size: not measured.
"""

from rljax.config import Config, OptimizerConfig
from rljax.config.tiny import tiny_offline


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on embedded rows."""
    config = Config(dataflow="reward_model", steps=1000)
    config.offline.examples_per_step, config.offline.max_tokens = 128, 1024
    config.algorithm.reward_loss = "bradley_terry(center=0.01)"
    config.critic_optimizer = OptimizerConfig(lr=1e-5, schedule="cosine", warmup_steps=50)
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 100
    return tiny_offline(config) if variant == "tiny" else config
