"""CGPO (arXiv 2409.20370): rewards calibrated by a baseline response and constrained by judges, two
tasks with their own judges and optimizers.

rljax train presets/cgpo:tiny
rljax train presets/cgpo --config.model=MODEL_FOLDER \\
    --config.data.train=train.parquet --config.data.test=test.parquet

Rows whose data_source is math* or json* are the tasks; a column baseline_response is used where
there is one. The formulas are the paper's, which has a reward model for each task: with
--config.reward.model=FOLDER a task's reward may be reward_model().

What differs: its numbers (kl_max, samples, sizes, learning rate) are not known to us; these are
ours.

Hardware, time and accuracy at full size: not measured. `:tiny`: docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import TOKENS, tiny


def with_judges(reward: str, *judges: str) -> str:
    return f"with_judges(reward={reward!r}, judges={judges!r})"


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on two embedded tasks."""
    small = variant == "tiny"
    limit = f"length_under(max_tokens={TOKENS if small else 2048})"
    if small:
        names = "first_letter", "two_letters"
        rewards = (
            with_judges("contains()", limit),
            with_judges("contains()", "regex_match(pattern='[a-z]', whole=True)"),
        )
    else:
        names = "math*", "json*"
        rewards = with_judges("boxed()", limit), with_judges("json_match()", "valid_json()")
    tasks = (names[0], "crpg(kl_max=20.0)"), (names[1], "codpo(beta=0.1, nll_coef=1.0)")
    config = Config(dataflow=f"cgpo(tasks={tasks!r})", steps=500)
    sources = tuple(zip(names, rewards, strict=True))
    config.reward.function = f"by_source(sources={sources!r}, defaults=())"
    reward = config.reward.function
    # sigmoid of a difference of scores of 0 and 1 stays between 0.27 and 0.73; a reward model that
    # was trained on pairs needs no scale.
    config.algorithm.reward_shaping = ("scaled(scale=4.0)",)
    config.data.max_prompt_tokens = 1024
    config.sampler.max_response_tokens = 2048
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 128, 8
    config.batch.sequences_per_optimizer_step = 1024
    config.actor_optimizer.lr = 1e-6
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if small:
        tiny(config)
        config.reward.function = reward
        config.data.sources = (
            "first_letter(letters=2, kinds=4, test=4, data_source='two_letters')",
        )
    return config
