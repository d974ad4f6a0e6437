"""Rewards: one response -> a number, in plain Python.

A reward is a function of two strings, `def my_reward(response, ground_truth) -> float`, or of any
other fields of the sample that it names as parameters (`prompt`, `data_source`, `extra_info`,
`num_tokens`, `finish_reason`, and `model_score`, the score of reward.model). It may return a dict
of named numbers that contains "score"; all of them are metrics, and those without a "/" in their
name also reach the advantage (gdpo). An option annotated `rewards.calling.RewardText` names another
reward, as in `mixture` and `by_source`. What a reward declares by `contract(prepare=...)` runs
in each worker before the first sample.

A reward that compares the samples of a prompt declares `responses`, a list of their texts, and is
called once for all of them: also lists are `num_tokens` and `finish_reasons`, and the prompt's own
are `prompt`, `ground_truth`, `data_source` and `extra_info`. It returns a score for each. So is one
that names such a reward, a mixture, say.

None abstains: the sample is left to the other rewards of a mixture, and masked where there are
none. `contract(reads="answer")` of rljax.contracts, which the rewards of an answer here declare,
hands over responses without their reasoning (rljax.reasoning).

Rewards that were written for TRL (`completions, **kwargs`) or for verl (`data_source, solution_str,
ground_truth, extra_info=None`) are called as those libraries do (`rewards.pool.foreign`).

What is importable here is what a config may call by its bare name, `"gsm8k(method='strict')"`; a
reward of your own is named by its module, `"my_rewards.my_reward"`, or by its file,
`"path/to/my_rewards.py:my_reward"`. `rewards.pool.RewardPool` runs them in killable processes.
Nothing here imports jax or numpy: a worker starts in a fraction of a second.
"""

from rljax.rewards.answers.countdown import countdown
from rljax.rewards.answers.lists import list_match
from rljax.rewards.answers.math_answers import math_verify
from rljax.rewards.answers.minerva import dapo
from rljax.rewards.groups import diversity, pairwise
from rljax.rewards.judges.judges import judge
from rljax.rewards.judges.rubrics import rubric
from rljax.rewards.mixing import by_source, mixture, reward_model, with_cost, with_judges
from rljax.rewards.text.answers import (
    choice,
    contains,
    integer_answer,
    mmlu_pro,
    qa_exact_match,
    regex_match,
    token_f1,
)
from rljax.rewards.text.gym import reasoning_gym_score
from rljax.rewards.text.instructions import instruction_following
from rljax.rewards.text.length import l1_exact, l1_max, soft_overlong
from rljax.rewards.text.rules import (
    boxed,
    exact_match,
    gsm8k,
    last_line,
    length_under,
    letter_quota,
    sequence_match,
    valid_json,
)
from rljax.rewards.text.structure import format_tags, json_match, json_schema
from rljax.rewards.text.style import language, looping, repetition
from rljax.rewards.unit_tests.code_fusion import sandbox_fusion
from rljax.rewards.unit_tests.code_run import code_tests
from rljax.rewards.unit_tests.programs import program_tests

__all__ = [
    "boxed",
    "by_source",
    "choice",
    "code_tests",
    "contains",
    "countdown",
    "dapo",
    "diversity",
    "exact_match",
    "format_tags",
    "gsm8k",
    "instruction_following",
    "integer_answer",
    "json_match",
    "json_schema",
    "judge",
    "with_judges",
    "l1_exact",
    "l1_max",
    "language",
    "last_line",
    "length_under",
    "letter_quota",
    "list_match",
    "looping",
    "math_verify",
    "mixture",
    "mmlu_pro",
    "pairwise",
    "program_tests",
    "qa_exact_match",
    "reasoning_gym_score",
    "regex_match",
    "repetition",
    "reward_model",
    "rubric",
    "sandbox_fusion",
    "sequence_match",
    "soft_overlong",
    "token_f1",
    "valid_json",
    "with_cost",
]
