"""Kuhn poker against oneself: three cards, an equilibrium that is known.

python launchers/train.py --config=configs/agents/kuhn.py
python examples/kuhn_exploitability.py RUN_DIR

The task: "Kpb" -> "b", the card and the moves so far; p passes, b bets. SFT begins where both moves
are equally likely; the entropy bonus keeps self-play from going round in circles.
rljax.environments.kuhn.exploitability says exactly what the best answers to the policy win: 0 at an
equilibrium, 0.458 where both moves are equally likely.

Time and strength after training: not measured.
"""

from rljax.config import Config
from rljax.config.tiny import tiny_agent


def get_config(variant: str = "") -> Config:
    config = tiny_agent(Config(dataflow="grpo", steps=200))
    config.data.train = "kuhn_poker()"
    config.data.max_prompt_tokens = 4
    config.sampler.max_response_tokens = 1
    config.environment.function = "kuhn_poker(style='short')"
    config.environment.max_tokens = 8
    config.sft.steps = 80
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 6, 128
    config.batch.sequences_per_optimizer_step = 768
    config.algorithm.advantage = "group_relative(std='none')"
    config.algorithm.policy_loss = "policy_gradient"
    config.algorithm.entropy_coef = 0.2
    config.actor_optimizer.lr, config.actor_optimizer.schedule = 2e-3, "linear"
    config.evaluate.prompts = 6
    return config
