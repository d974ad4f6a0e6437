"""DR Tulu's reinforcement stage (arXiv 2511.19399): GRPO with a small KL, rewards from rubrics.

The rubric reward is a function of your own here (`reward.function`); without one the rule reward
stands in.

rljax train presets/dr_tulu:tiny
rljax train presets/dr_tulu --config.model=MODEL_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

With its search tool, on rubrics that evolve (the rows bring extra_info["rubrics"]; corpus.jsonl has
an object with "text" in each line; needs the extra `agents`):

rljax train presets/dr_tulu:search --config.model=MODEL_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet \\
    --config.reward.function="rubric(base_url='http://127.0.0.1:8000/v1', model='m')" \\
    --config.reward.rubrics="evolving_rubrics(generator='my_rubrics.generate')"

Settings are the published ones; hardware, time and accuracy at full size: not measured. `:tiny`:
docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import tiny


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task, `:search` that of agents with a search
    tool over corpus.jsonl."""
    config = Config(dataflow="grpo", steps=1000)
    config.data.max_prompt_tokens = 2048
    config.sampler.max_response_tokens = 16 * 1024
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 32, 8
    config.batch.sequences_per_optimizer_step = 256
    config.batch.tokens_per_microbatch = 32768
    config.algorithm.advantage = "group_relative(std='sample', eps=1e-6)"
    config.algorithm.policy_loss = "ppo_clip(clip_low=0.2, clip_high=0.2, dual_clip=None)"
    config.algorithm.kl_in_loss = 0.001
    config.actor_optimizer.lr = 5e-7
    config.reward.function = "exact_match()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "search":
        tool = "search(corpus='corpus.jsonl', k=5)"
        config.environment.function = f"tools(functions=({tool!r},))"
        config.environment.max_turns, config.environment.max_calls = 11, 10
        config.environment.max_tokens = 18 * 1024
        config.environment.turn_timeout_s = 30.0
    if variant == "tiny":
        tiny(config)
    return config
