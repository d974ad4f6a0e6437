"""VinePPO (arXiv 2410.01679): the value of each line's beginning is the mean score of 9 fresh
completions from there; the advantage of a line is by how much it raises that. No critic.

rljax train presets/vineppo:tiny
rljax train presets/vineppo --config.model=MODEL_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

A step draws 9 further completions for each of up to 20 lines of every response: most of its time.

What differs: 9 completions, 20 states, 64 prompts of 8 responses and the KL are published;
minibatch and epochs are ours.

Hardware, time and accuracy at full size: not measured. `:tiny` takes each token for a step:
docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    config = Config(dataflow="grpo", steps=1000)
    config.data.max_prompt_tokens = 1024
    config.sampler.max_response_tokens = 1024
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 64, 8
    config.batch.sequences_per_optimizer_step, config.batch.epochs = 64, 2
    config.algorithm.collect = "vine(completions=9, most_states=20)"
    config.algorithm.advantage = "vineppo()"
    config.algorithm.policy_loss = "ppo_clip(clip_low=0.2, clip_high=0.2)"
    config.algorithm.kl_in_loss = 1e-4
    config.actor_optimizer.lr = 1e-6
    config.reward.function = "boxed()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 16
    if variant == "tiny":
        tiny(config)
        config.algorithm.collect = "vine(completions=4, step_tokens=1)"
    return config
