"""Self-distillation from samples that are right: the policy, shown another sample of the prompt
that the reward finds right, teaches the policy that is not (SDPO, arXiv 2601.20802).

rljax train presets/sdpo \\
    --config.model=MODEL_FOLDER --config.data.train=train.parquet --config.data.test=test.parquet

A prompt without a right sample teaches nothing. Beside the reward, which is then learned from, too:
--config.dataflow=grpo --config.algorithm.teacher_coef=1.0

What differs: the sampled token is compared, as in TRL by default, and not the likeliest tokens; a
hint holds a right sample, and no feedback of the environment; the teacher is the policy as the run
began. TRL's is a moving mean: --config.algorithm.teacher_rate=0.05 has its rate.

Hardware, time and accuracy at full size: not measured. `:tiny`: docs/methods/presets.md.
rljax train presets/sdpo:tiny
"""

from rljax.config import Config
from rljax.config.tiny import tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    config = Config(dataflow="on_policy_distil(match='sampled', scored=True)", steps=500)
    config.algorithm.collect = (
        "with_hint(hint='right_sample()', template='{prompt}\\n\\nA correct solution:\\n\\n{hint}"
        "\\n\\nCorrectly solve the original question.')"
    )
    config.data.max_prompt_tokens = 1024
    config.sampler.max_response_tokens = 1024
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 32, 8
    config.batch.sequences_per_optimizer_step = 256
    config.actor_optimizer.lr = 1e-6
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
        config.algorithm.collect = "with_hint(hint='right_sample()', template='{prompt}{hint}>')"
        config.data.train, config.data.max_prompt_tokens = "hinted_letter()", 6
        config.sft.steps, config.steps = 20, 160  # worked examples teach to follow hints
        config.batch.samples_per_prompt, config.batch.sequences_per_optimizer_step = 16, 256
    return config
