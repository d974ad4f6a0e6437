"""Supervised fine-tuning with packing: verl's SFT defaults, rows of 1,024 tokens.

The rows: chat messages, prompt and completion, or text (docs/methods/offline.md).

rljax train offline/sft:tiny
rljax train offline/sft --config.model=MODEL_FOLDER \\
    --config.data.train=train.jsonl --config.data.test=test.jsonl

Hardware, time and quality at full size: not measured.
"""

from rljax.config import Config, OptimizerConfig
from rljax.config.tiny import tiny_offline


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on embedded rows."""
    config = Config(dataflow="sft", steps=1000)
    config.offline.examples_per_step, config.offline.max_tokens = 64, 1024
    config.offline.packing, config.data.overlong = True, "error"
    config.actor_optimizer = OptimizerConfig(
        lr=1e-5, schedule="cosine", warmup_steps=100, beta2=0.95, weight_decay=0.01
    )
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 100
    return tiny_offline(config) if variant == "tiny" else config
