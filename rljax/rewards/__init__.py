"""Rewards: one response -> a number, in plain Python.

A reward is a function of two strings, `def my_reward(response, ground_truth) -> float`, or of any
other fields of the sample that it names as parameters (`prompt`, `data_source`, `extra_info`,
`num_tokens`, `finish_reason`). It may return a dict of named numbers that contains "score".

What is importable here is what a config may call by its bare name, `"gsm8k(method='strict')"`; a
reward of your own is named by its module, `"my_rewards.my_reward"`. `rewards.pool.RewardPool` runs
them in killable processes. Nothing here imports jax or numpy: a worker starts in a fraction of a
second.
"""

from rljax.rewards.answers import json_fields, list_match
from rljax.rewards.countdown import countdown
from rljax.rewards.gym import reasoning_gym_score
from rljax.rewards.length import l1_exact, l1_max
from rljax.rewards.own import own_rewards
from rljax.rewards.programs import program_tests
from rljax.rewards.rules import (
    boxed,
    exact_match,
    gsm8k,
    last_line,
    length_under,
    sequence_match,
    valid_json,
)

__all__ = [
    "boxed",
    "countdown",
    "exact_match",
    "gsm8k",
    "json_fields",
    "l1_exact",
    "l1_max",
    "last_line",
    "length_under",
    "list_match",
    "own_rewards",
    "program_tests",
    "reasoning_gym_score",
    "sequence_match",
    "valid_json",
]
