"""Guess a number from 1 to 8 in three turns, by episodes that branch after each guess.

python launchers/train.py --config=configs/agents/guess_tree.py

The task of guess_number, smaller: halving finds 7 of 8 numbers. `turn_tree` plays a first guess
once and goes on from it four times, so that what is compared are the guesses behind it. `rloo` with
the weights of the rows and a reduction by a constant has the gradient of the expected return.
"""

from rljax.config import Config
from rljax.config.tiny import tiny_agent


def get_config(variant: str = "") -> Config:
    config = tiny_agent(Config(dataflow="grpo", steps=120))
    config.data.train = "guess_number(high=8, turns=3)"
    config.data.max_prompt_tokens = 42
    config.sampler.max_response_tokens = 2
    config.sampler.stop_strings = ("\n",)
    config.environment.function = "guess_number(high=8, turns=3)"
    config.environment.max_turns = 3
    config.environment.max_tokens = 48
    config.sft.steps = 150
    config.algorithm.collect = "turn_tree(branches=2, at=(1, 2))"
    config.algorithm.advantage = "rloo()"
    config.algorithm.policy_loss = "ppo_clip(clip_high=0.28)"
    config.algorithm.reduction = "token_sum_norm(max_tokens=512)"
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 8, 28
    config.batch.sequences_per_optimizer_step = 224
    config.actor_optimizer.lr = 1.5e-3
    config.evaluate.prompts, config.evaluate.correct_at = 8, 0.5
    return config
