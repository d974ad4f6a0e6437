"""Self-distillation from a hint: the policy, shown a demonstration, the answer or feedback in the
prompt, teaches the policy that is not (SDFT, arXiv 2601.19897).

rljax train presets/sdft \\
    --config.model=MODEL_FOLDER --config.data.train=train.parquet --config.data.test=test.parquet

The rows' column privileged_context is the hint: `with_hint(hint="column(name='demonstration')")`
names another one. No reward is read; the held-out rows are judged by their ground truth.

What differs: the sampled token is compared, and not the teacher's likeliest ones; the teacher is
the policy as the run began, as TRL has it by default; the numbers are ours.

Hardware, time and accuracy at full size: not measured. `:tiny`: docs/methods/presets.md.
rljax train presets/sdft:tiny
"""

from rljax.config import Config
from rljax.config.tiny import tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    config = Config(dataflow="on_policy_distil(match='sampled')", steps=500)
    config.algorithm.collect = "with_hint()"
    config.data.max_prompt_tokens = 1024
    config.sampler.max_response_tokens = 1024
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 64, 4
    config.batch.sequences_per_optimizer_step = 256
    config.actor_optimizer.lr = 1e-6
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
        config.algorithm.collect = "with_hint(template='{prompt}{hint}>')"
        config.data.train, config.data.max_prompt_tokens = "hinted_letter()", 6
        config.sft.steps, config.steps = 20, 120  # worked examples teach to follow hints
        config.batch.samples_per_prompt, config.batch.sequences_per_optimizer_step = 16, 256
    return config
