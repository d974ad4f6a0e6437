"""Expert iteration by tree search (arXiv 1705.08439), as AlphaZero trains (1712.01815): the policy
learns the shares of the visits of a search that its critic guides, the critic what responses
were worth. Constants of the search are AlphaZero's (c = 1.25, a quarter of noise at the root,
samples by visit counts); what is its Dirichlet(0.3) for chess is that of `width` tokens here.

rljax train presets/expert_iteration:tiny
rljax train presets/expert_iteration \\
    --config.model=MODEL_FOLDER --config.data.train=train.parquet \\
    --config.data.test=test.parquet

What differs: budget, batch and learning rates are ours, as there are no published ones for language
models of this form.

Hardware, time and accuracy at full size: not measured. `:tiny`: docs/methods/presets.md.
"""

from rljax.config import Config
from rljax.config.tiny import tiny

SEARCH = (
    "critic_search(method='mcts(simulations={simulations}, width={width}, visit_temperature=1.0, "
    "noise_fraction=0.25, noise_concentration=0.3)')"
)


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on an embedded task."""
    config = Config(dataflow="expert_iteration", steps=500)
    config.data.max_prompt_tokens = 1024
    config.sampler.max_response_tokens = 512
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 128, 1
    config.batch.sequences_per_optimizer_step = 128
    config.algorithm.collect = SEARCH.format(simulations=32, width=8)
    config.algorithm.advantage = "gae(gamma=1.0, lam=1.0)"  # the returns are the outcomes
    config.algorithm.value_loss = "squared_error()"
    config.actor_optimizer.lr, config.critic_optimizer.lr = 1e-6, 1e-5
    config.reward.function = "boxed()"
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 25
    if variant == "tiny":
        tiny(config)
        config.algorithm.collect = SEARCH.format(simulations=8, width=4)
    return config
