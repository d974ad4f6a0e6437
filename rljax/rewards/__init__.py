"""Rewards: one response -> a number, in plain Python.

A reward is a function of two strings, `def my_reward(response, ground_truth) -> float`, or of any
other fields of the sample that it names as parameters (`prompt`, `data_source`, `extra_info`,
`num_tokens`, `finish_reason`). It may return a dict of named numbers that contains "score".

A reward that compares the samples of a prompt declares `responses`, a list of their texts, and is
called once for all of them: also lists are `num_tokens` and `finish_reasons`, and the prompt's own
are `prompt`, `ground_truth`, `data_source` and `extra_info`. It returns a score for each, or None
for one that failed.

What is importable here is what a config may call by its bare name, `"gsm8k(method='strict')"`; a
reward of your own is named by its module, `"my_rewards.my_reward"`. `rewards.pool.RewardPool` runs
them in killable processes. Nothing here imports jax or numpy: a worker starts in a fraction of a
second.
"""

from rljax.rewards.groups import diversity, pairwise
from rljax.rewards.length import l1_exact, l1_max
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
    "diversity",
    "exact_match",
    "gsm8k",
    "l1_exact",
    "l1_max",
    "last_line",
    "length_under",
    "pairwise",
    "program_tests",
    "sequence_match",
    "valid_json",
]
