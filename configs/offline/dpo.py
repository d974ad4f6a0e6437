"""DPO with the paper's settings (arXiv 2305.18290): beta 0.1, 64 pairs, 150 steps of warm-up.

What differs: the paper uses RMSprop at 1e-6; here AdamW at 5e-7, as its successors do.

Any paired loss: --config.algorithm.preference_loss="simpo()" (docs/methods/offline.md).

rljax train offline/dpo:tiny
rljax train offline/dpo --config.model=MODEL_FOLDER \\
    --config.data.train=train.jsonl --config.data.test=test.jsonl

Hardware, time and quality at full size: not measured.
"""

from rljax.config import Config, OptimizerConfig
from rljax.config.tiny import tiny_offline


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on embedded rows."""
    config = Config(dataflow="preference", steps=1000)
    config.offline.examples_per_step, config.offline.max_tokens = 64, 1024
    config.batch.tokens_per_microbatch = 16384
    config.algorithm.preference_loss = "dpo(beta=0.1)"
    config.actor_optimizer = OptimizerConfig(lr=5e-7, schedule="linear", warmup_steps=150)
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 100
    return tiny_offline(config) if variant == "tiny" else config
