"""Multi-teacher on-policy distillation: each prompt has the teacher of its domain, and the sampled
token's log teacher - log policy is its advantage (MOPD, arXiv 2606.30406).

rljax train presets/mopd \\
    --config.model=MODEL_FOLDER --config.teachers=MATH_FOLDER,CODE_FOLDER \\
    --config.data.train=math.parquet --config.data.sources=code.parquet \\
    --config.data.test=test.parquet

The rows' data_source says whose they are; `teacher_sources` has its patterns.

What differs: the numbers are ours, and teachers are on the mesh of the policy, not on servers.

Hardware, time and accuracy at full size: not measured. `:tiny`: docs/methods/presets.md; its
teachers are what two other tiny runs have learned:

rljax train presets/grpo:tiny --config.run_dir=runs/three
rljax train presets/grpo:tiny --config.run_dir=runs/four --config.data.max_prompt_tokens=5 \\
    --config.data.train="first_letter(letters=4)"
rljax train presets/mopd:tiny \\
    --config.teachers=runs/three/policy,runs/four/policy
"""

from rljax.config import Config
from rljax.config.tiny import tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    config = Config(dataflow="on_policy_distil(match='sampled')", steps=500)
    config.teacher_sources = ("math*", "code*")
    config.data.max_prompt_tokens = 1024
    config.sampler.max_response_tokens = 1024
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 64, 4
    config.batch.sequences_per_optimizer_step = 256
    config.actor_optimizer.lr = 1e-6
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
        config.teacher_sources = ("three", "four")
        config.data.train = "first_letter(data_source='three')"
        config.data.sources = ("first_letter(letters=4, data_source='four')",)
        config.data.max_prompt_tokens = 5
        config.evaluate.prompts = 32
    return config
