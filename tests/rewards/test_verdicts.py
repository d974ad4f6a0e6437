"""Verdicts on answers judged by hand, in many forms: how often ours are wrong, of both kinds.

The answers and their labels, with the verdicts of two published rules beside them, are in
verdicts.jsonl; tests/helpers/published_verdicts.py says how those were made.
"""

import json
from collections import Counter

import pytest
from conftest import REPO, golden
from published_verdicts import rows, verl_math, verl_verdict

from rljax import rewards
from rljax.rewards.unit_tests.code_forms import same_output

# The share of right answers has to be far from 0 and 1, and every kind of answer in it.
LEAST = {
    "math_verify": 700,
    "gsm8k": 110,
    "boxed": 60,
    "choice": 60,
    "json_match": 35,
    "same_output": 30,
}


def ours(reward: str, reference: str, response: str) -> int:
    if reward == "same_output":
        return int(same_output(response, reference))
    options = {"partial": False} if reward == "json_match" else {}
    returned = getattr(rewards, reward)(response, reference, **options)
    return int(returned["score"] if isinstance(returned, dict) else returned)


def errors(verdict: int, right: int) -> str:
    return "right" if verdict == right else "false positive" if verdict else "false negative"


@pytest.mark.slow
def test_the_verdicts_on_answers_that_were_judged_by_hand():
    wrong = []
    for reward, reference, response, right, *_ in rows():
        kind = errors(ours(reward, reference, response), right)
        if kind != "right":
            wrong.append((kind, reward, reference, response))
    assert wrong == []


def test_the_labelled_answers_are_many_and_of_both_kinds():
    labelled = rows()
    keys = [tuple(row[:3]) for row in labelled]
    assert len(set(keys)) == len(keys)
    counts = Counter(row[0] for row in labelled)
    assert all(counts[reward] >= least for reward, least in LEAST.items()), counts
    for reward in LEAST:
        right = sum(row[3] for row in labelled if row[0] == reward)
        assert 0.2 < right / counts[reward] < 0.8, (reward, right)


@pytest.mark.parametrize("column, name", [(4, "math-verify"), (5, "verl")])
def test_the_published_rules_beside_ours_err_more(column, name):
    judged = [row for row in rows() if row[column] is not None]
    kinds = Counter(errors(row[column], row[3]) for row in judged)
    print(f"{name}: {dict(kinds)} of {len(judged)}")
    assert len(judged) > 600 and kinds["false negative"] > 20


def test_the_library_disagrees_with_the_reward_of_its_name_as_often_as_the_guide_says():
    judged = [row for row in rows() if row[0] == "math_verify"]
    guide = " ".join((REPO / "docs/guides/rewards.md").read_text().split())
    differ = sum(right != library for _, _, _, right, library, _ in judged)
    assert f"their verdict differs on {differ} of {len(judged):,} judged answers" in guide


def test_the_stored_verdicts_are_those_of_verls_rule():
    cases = json.loads(golden("verl", "reward_scores.json").read_text())["cases"]
    for case in cases:
        if case["fn"] == "math_reward.compute_score":
            assert verl_math(case["solution_str"], case["ground_truth"]) == case["output"], case
    for reward, reference, response, _, _, verdict in rows():
        assert verl_verdict(reward, reference, response) == verdict, (reference, response)
