"""ScaleRL (arXiv 2510.13786): the recipe whose compute curve could be predicted.

CISPO towards the sampler, prompt-level averaging, advantages normalised over the batch, dead
groups dropped, prompts retired at a pass rate of 0.9, thinking interrupted by force, float32
head; no KL, no length penalty. PipelineRL-8: new weights are used at once by the responses in
flight, and no token is older than eight steps, of one optimizer step each.

rljax train presets/scalerl:tiny
rljax train presets/scalerl --config.model=MODEL_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

Settings are the published ones; hardware, time and accuracy at full size: not measured. `:tiny`:
docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    config = Config(dataflow="grpo", steps=1000)
    config.model_settings.head_in_float32 = True
    config.data.max_prompt_tokens = 2048
    config.data.retire_at_pass_rate = 0.9
    config.sampler.max_response_tokens = 14 * 1024  # with the prompt 16384
    config.sampler.thinking_tokens = (10240, 12288)
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 48, 16
    config.batch.sequences_per_optimizer_step = 768
    config.batch.tokens_per_microbatch = 32768
    config.rollouts.max_staleness, config.rollouts.ahead = 8, 8
    config.algorithm.reward_shaping = ("scaled(scale=2.0, shift=-0.5)",)
    config.algorithm.advantage = "batch_normalised()"
    config.algorithm.policy_loss = "cispo(ratio_max=5.0, behaviour='sampler')"
    config.algorithm.reduction = "prompt_mean"
    config.algorithm.filters = ("live_groups()",)
    config.actor_optimizer.lr = 5e-7
    config.reward.function = "boxed()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
        config.data.retire_at_pass_rate = 0.0  # 48 prompts: all of them are solved within the run
        config.sampler.max_response_tokens, config.sampler.thinking_tokens = 4, (2, 2)
        config.sampler.interrupt_phrase = config.sampler.end_of_thinking = ">"
    return config
