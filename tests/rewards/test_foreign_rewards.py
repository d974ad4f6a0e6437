"""Rewards with the signatures of TRL and verl, as their users have them, named and by file."""

import sys

import numpy as np
import pytest
from rollout_cases import Letters

from rljax.components import resolve
from rljax.data.online.prompts import PromptRecord
from rljax.errors import InputError
from rljax.rewards.pool.calling import HOME, is_group_reward, wanted_fields
from rljax.rewards.pool.pool import RewardPool
from rljax.rollout import Reward

MODULE = '''
import re

# -- TRL: of its documentation, of open-r1, and what else people write

def unique_letters(completions, **kwargs):
    """For a conversation: the content of the first message."""
    return [float(len(set(completion[0]["content"]))) for completion in completions]

def boxed_is(completions, ground_truth, **kwargs):
    matches = [re.search(r"\\\\boxed\\{(.*?)\\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]

def longer_than_prompt(prompts, completions, **kwargs):
    return [float(len(c) > len(p)) for p, c in zip(prompts, completions)]

def accuracy(completions, solution, **kwargs):
    """None where it does not apply."""
    return [None if c == "?" else float(c == s) for c, s in zip(completions, solution)]

def by_answer(completions, **kwargs):
    assert len(kwargs["answer"]) == len(kwargs["difficulty"]) == len(completions)
    columns = zip(completions, kwargs["answer"], kwargs["difficulty"])
    return [float(c == a) * d for c, a, d in columns]

def no_kwargs(completions, difficulty, weight=1.0):
    return [weight * d for d in difficulty]

def several(prompts, completions, completion_ids=None, trainer_state=None, **kwargs):
    assert prompts == prompts[:1] * len(prompts) and prompts[0][-1]["role"] == "user"
    return [float(len(completions))] * len(completions)

def needs_ids(completions, completion_ids): return [len(ids) for ids in completion_ids]
def needs_column(completions, flavour): return [1.0 for _ in completions]

# -- verl

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source != "toy":
        raise NotImplementedError(data_source)
    return 1.0 if solution_str.strip() == ground_truth else 0.0

def score_dict(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert not kwargs and extra_info["difficulty"] == 3
    right = solution_str == ground_truth
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": solution_str, "why": None}

def weighed(solution_str, ground_truth, weight): return weight * (solution_str == ground_truth)
def needs_more(solution_str, prompt_str): return 0.0
def text_score(data_source, solution_str, ground_truth): return {"score": "1", "acc": 1.0}
'''


@pytest.fixture(scope="module")
def score(tmp_path_factory):
    """Scores of responses to one prompt: as a run hands them to its reward."""
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "foreign_rewards.py").write_text(MODULE)
    sys.path.insert(0, str(folder))

    def scored(text, *responses, messages=None, by_file=False):
        text = f"{folder / 'foreign_rewards.py'}:{text}" if by_file else f"foreign_rewards.{text}"
        record = PromptRecord(
            "2+2", np.ones(1, np.int32), "4", "toy", {"difficulty": 3}, 0, messages=messages
        )
        with RewardPool(text, workers=1) as pool:
            reward = Reward(pool, Letters, None)
            return pool.score(
                [{**reward.sample(record, [], 0, 7), "response": text} for text in responses]
            )

    yield scored
    sys.path.remove(str(folder))
    sys.modules.pop("foreign_rewards", None)


CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2"})


@pytest.mark.parametrize(
    ("text", "responses", "messages", "values"),
    [
        ("unique_letters", ("aab", "abc"), CHAT, (2, 3)),
        ("boxed_is", (r"\boxed{4}", r"\boxed{5}", "4"), None, (1, 0, 0)),
        ("longer_than_prompt", ("4", "four"), None, (0, 1)),
        ("accuracy", ("4", "5"), None, (1, 0)),
        ("by_answer", ("4", "5", "4"), None, (3, 0, 3)),
        ("no_kwargs(weight=0.5)", ("4", "5"), None, (1.5, 1.5)),
        ("several", ("a", "b", "c"), CHAT, (3, 3, 3)),
        ("compute_score", ("4 ", "5"), None, (1, 0)),
        ("score_dict", ("4", "5"), CHAT, (1, -1)),
        ("weighed(weight=2.0)", ("4", "5"), None, (2, 0)),
    ],
)
def test_it_is_accepted_as_it_is(score, text, responses, messages, values):
    by_name = score(text, *responses, messages=messages)
    assert [s.status for s in by_name] == ["ok"] * len(responses), by_name
    assert tuple(s.value for s in by_name) == values


def test_it_is_found_by_its_file_and_its_parts_are_the_numbers(score):
    (right, wrong) = score("score_dict", "4", "5", by_file=True)
    assert right.parts == {"score": 1.0, "acc": 1.0} and wrong.parts == {"score": -1.0, "acc": 0.0}
    assert [s.value for s in score("by_answer", "4", by_file=True)] == [3.0]


def test_one_sample_without_a_score_does_not_concern_the_others(score):
    one, none, other = score("accuracy", "4", "?", "5")
    assert (one.value, none.status, other.value) == (1.0, "error", 0.0)
    assert "returned None for this response" in none.message
    (bad,) = score("text_score", "4")
    assert bad.status == "error" and "'1' (str) as 'score'" in bad.message


def test_what_it_needs_and_nobody_has_is_named(score):
    with pytest.raises(InputError, match="signature of TRL and needs 'completion_ids'"):
        score("needs_ids", "4")
    with pytest.raises(InputError, match="signature of verl and needs 'prompt_str'"):
        score("needs_more", "4")
    (found,) = score("needs_column", "4")
    assert found.status == "error" and "needs the column 'flavour'" in found.message
    assert "'difficulty'" in found.message  # those that there are


def test_verls_may_be_a_member_of_a_mixture_and_trls_is_asked_of_a_group(score):
    mixed = resolve("mixture(rewards=('foreign_rewards.compute_score', 'valid_json'))", HOME)
    assert {"response", "ground_truth", "data_source"} <= set(wanted_fields(mixed)[0])
    with RewardPool(mixed.text, workers=1) as pool:
        sample = {"response": "4", "ground_truth": "4", "data_source": "toy", "extra_info": {}}
        assert pool.score([sample])[0].value == 2.0
    assert is_group_reward(resolve("foreign_rewards.accuracy", HOME))
    with pytest.raises(InputError, match="compares the samples of a prompt"):
        wanted_fields(resolve("mixture(rewards=('foreign_rewards.accuracy',))", HOME))
