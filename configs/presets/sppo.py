"""SPPO: self-play preference optimisation (arXiv 2405.00675). Of five samples the one that wins
most often against the others, and the one that wins least, go towards eta (P - 1/2).

rljax train presets/sppo:tiny
rljax train presets/sppo \\
    --config.model=MODEL_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

What differs: beta = 1/eta = 1e-3, five samples and the learning rate are published; the paper takes
three long iterations, here the reference is the policy of the step before (`refresh_every`).

Hardware, time and accuracy at full size: not measured. `:tiny`: docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    config = Config(dataflow="sppo(preference='bradley_terry()', refresh_every=1)", steps=500)
    config.data.max_prompt_tokens = 1024
    config.sampler.max_response_tokens = 1024
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 64, 5
    config.batch.sequences_per_optimizer_step = 320  # 64 pairs
    config.algorithm.preference_loss = "sppo(eta=1000.0)"
    config.actor_optimizer.lr = 5e-7
    config.reward.function = "boxed()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
    return config
