"""Guess a number from 1 to 16 in four turns: higher, lower. Halving finds 15 of 16.

rljax train agents/guess_number

The task: "Guess my number, 1 to 16." -> "8", "lower" -> "4", ... SFT teaches the form of a guess; a
fifth of its examples halve what is left, the others are any number, whatever was said.

Hardware: 2 CPU cores, shared with other work. Measured 2026-11-23, seed 0: greedy 0.25 before and
0.75 after (all 16 numbers), sampled 0.75 in the last step, at an entropy of 0.01. Halving finds
0.94.
"""

from rljax.config import Config
from rljax.config.tiny import tiny_agent


def get_config(variant: str = "") -> Config:
    config = tiny_agent(Config(dataflow="grpo", steps=220))
    config.data.train = "guess_number(high=16, turns=4)"
    config.data.max_prompt_tokens = 56
    config.sampler.max_response_tokens = 3
    config.sampler.stop_strings = ("\n",)
    config.environment.function = "guess_number(high=16, turns=4)"
    config.environment.max_turns = 4
    config.environment.max_tokens = 64
    config.sft.steps = 300
    config.algorithm.policy_loss = "ppo_clip(clip_high=0.28)"
    config.batch.samples_per_prompt = 16
    config.actor_optimizer.lr = 1.5e-3
    config.evaluate.prompts, config.evaluate.correct_at = 16, 0.5
    return config
