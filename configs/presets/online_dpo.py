"""Online iterative DPO, after RLHF Workflow (arXiv 2405.07863): at each step the best of a prompt's
eight samples is preferred to the worst.

The reference stays the starting policy; --config.dataflow="online_dpo(refresh_every=64)" makes it
the policy of the iteration. Give a reward model's folder as --config.reward.model=FOLDER
(configs/offline/reward_model.py trains one); without one the rule reward stands in.

rljax train presets/online_dpo:tiny
rljax train presets/online_dpo \\
    --config.model=MODEL_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

What differs: eight samples and beta 0.1 are published; learning rate and temperature are the
defaults of TRL 0.19 (5e-7, 0.9), the other numbers ours.

Hardware, time and accuracy at full size: not measured. `:tiny`: docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    config = Config(dataflow="online_dpo(rejected='worst')", steps=500)
    config.data.max_prompt_tokens = 1024
    config.sampler.max_response_tokens, config.sampler.temperature = 1024, 0.9
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 64, 8
    config.batch.sequences_per_optimizer_step = 512  # 64 pairs
    config.algorithm.preference_loss = "dpo(beta=0.1)"
    config.actor_optimizer.lr = 5e-7
    config.reward.function = "boxed()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
    return config
