"""KTO (arXiv 2402.01306): completions that are each called good or bad; beta 0.1, both kinds
weighing the same (keep w_D n_D : w_U n_U between 1:1 and 4:3).

rljax train offline/kto:tiny
rljax train offline/kto --config.model=MODEL_FOLDER \\
    --config.data.train=train.jsonl --config.data.test=test.jsonl

Hardware, time and quality at full size: not measured.
"""

from rljax.config import Config, OptimizerConfig
from rljax.config.tiny import tiny_offline


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on embedded rows."""
    config = Config(dataflow="kto", steps=1000)
    config.offline.examples_per_step, config.offline.max_tokens = 64, 1024
    config.algorithm.preference_loss = "kto(beta=0.1)"
    config.actor_optimizer = OptimizerConfig(lr=5e-7, schedule="linear", warmup_steps=100)
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 100
    return tiny_offline(config) if variant == "tiny" else config
