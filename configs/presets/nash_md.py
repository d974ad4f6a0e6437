"""Nash-MD: the probability of beating a sample of the geometric mixture of policy and reference, by
REINFORCE with a KL to the reference (arXiv 2312.00886).

rljax train presets/nash_md:tiny
rljax train presets/nash_md \\
    --config.model=MODEL_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

A rule's verdict is certain: the higher score wins. For scores of a reward model say
--config.dataflow="nash_md(preference='bradley_terry()')".

What differs: mixture, beta, learning rate and temperature are the defaults of TRL 0.19 (0.5, 0.1,
5e-7, 0.9); the other numbers are ours.

Hardware, time and accuracy at full size: not measured. `:tiny`: docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    config = Config(dataflow="nash_md(mixture=0.5, preference='higher_wins()')", steps=500)
    config.data.max_prompt_tokens = 1024
    config.sampler.max_response_tokens, config.sampler.temperature = 1024, 0.9
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 64, 2  # half the mixture's
    config.batch.sequences_per_optimizer_step = 128
    config.algorithm.preference_loss = "nash_md(beta=0.1)"
    config.actor_optimizer.lr = 5e-7
    config.reward.function = "boxed()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
    return config
