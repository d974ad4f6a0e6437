"""RAFT: supervised learning on the best of a prompt's 32 samples, over and over (arXiv 2304.06767).

rljax.datagen.rejection.raft is the same with long iterations and files between them.

rljax train presets/raft:tiny
rljax train presets/raft \\
    --config.model=MODEL_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

What differs: 32 samples of each prompt are published; the other numbers are ours.

Hardware, time and accuracy at full size: not measured. `:tiny`: docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    config = Config(dataflow="raft(keep=1)", steps=500)
    config.data.max_prompt_tokens = 1024
    config.sampler.max_response_tokens = 1024
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 64, 32
    config.batch.sequences_per_optimizer_step = 2048  # 64 of them are learned
    config.actor_optimizer.lr = 2e-6
    config.reward.function = "boxed()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
    return config
