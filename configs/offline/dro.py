"""DRO-V (arXiv 2405.19107): one scored completion per prompt, a value of the prompt;
centre the rewards.

What differs: tau 1.0 is quoted by an unofficial note only.

rljax train offline/dro:tiny
rljax train offline/dro --config.model=MODEL_FOLDER \\
    --config.data.train=train.jsonl --config.data.test=test.jsonl

Hardware, time and quality at full size: not measured.
"""

from rljax.config import Config, OptimizerConfig
from rljax.config.tiny import tiny_offline


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on embedded rows."""
    config = Config(dataflow="dro(tau=1.0)", steps=1000)
    config.offline.examples_per_step, config.offline.max_tokens = 64, 1024
    config.actor_optimizer = OptimizerConfig(lr=5e-7, warmup_steps=50)
    config.critic_optimizer = OptimizerConfig(lr=1e-5, warmup_steps=50)
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 100
    return tiny_offline(config) if variant == "tiny" else config
