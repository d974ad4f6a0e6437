"""On-policy distillation: the reverse KL to the teacher at every token of the policy's own samples
(GKD, arXiv 2306.13649); no reward is asked.

rljax train presets/distil \\
    --config.model=MODEL_FOLDER --config.teacher_model=TEACHER_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

What differs: beta 1 is GKD's on-policy reverse KL; the other numbers are ours.

Hardware, time and accuracy at full size: not measured. `:tiny`: docs/methods/presets.md; its
teacher is what another tiny run has learned:

rljax train presets/grpo:tiny --config.run_dir=runs/teacher
rljax train presets/distil:tiny \\
    --config.teacher_model=runs/teacher/policy
"""

from rljax.config import Config
from rljax.config.tiny import tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    config = Config(dataflow="on_policy_distil(beta=1.0)", steps=500)
    config.data.max_prompt_tokens = 1024
    config.sampler.max_response_tokens = 1024
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 64, 4
    config.batch.sequences_per_optimizer_step = 256
    config.actor_optimizer.lr = 1e-6
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
    return config
