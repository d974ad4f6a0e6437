"""What evaluations of a run log beside accuracy: the mean reward, and pass@k of drawn responses."""

import itertools
import math

import numpy as np
import pytest
from tiny_run import metrics_rows, tiny_config, train_on_one

from rljax.data.online.prompts import PromptRecord
from rljax.evaluation.in_training import accuracy_metrics, counts_of, pass_estimates
from rljax.evaluation.policy import Answers, answer_metrics, correct, score_table
from rljax.policies import Completion


def samples(rewards) -> list[Completion]:
    return [Completion(0, "", (), (), "stop", math.nan if r is None else r) for r in rewards]


def by_subsets(rights: list[int], k: int) -> float:
    """The share of the subsets of k responses that hold a right one."""
    return np.mean([any(chosen) for chosen in itertools.combinations(rights, k)])


def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_answer():
    rewards = [1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 1]  # three prompts, four responses each
    found = pass_estimates(samples(rewards), 4, 0.5)
    assert counts_of(4) == [1, 2, 4] and counts_of(6) == [1, 2, 4, 6] and counts_of(1) == [1]
    for k in (1, 2, 4):
        each = [by_subsets(rewards[4 * p : 4 * p + 4], k) for p in range(3)]
        estimate = found[f"pass@{k}"]
        assert estimate["value"] == pytest.approx(np.mean(each)) and estimate["n"] == 3
        assert min(each) <= estimate["low"] <= np.mean(each) <= estimate["high"] <= max(each)


def test_a_response_without_a_score_is_left_out():
    found = pass_estimates(samples([1, None, 0, 0]), 2, 0.5)
    assert found["pass@1"]["value"] == pytest.approx(0.5)  # of one response, of two
    assert found["pass@2"]["value"] == 0.0  # of the second prompt alone


def test_scores_without_a_mark_are_reported_as_they_are():
    """Those of a reward model may all be far from 1: accuracy says nothing then."""
    greedy = samples([-3.5, None, -1.5, -2.5])
    prompts = [PromptRecord(f"p{i}", np.zeros(1, int), "", "sums", {}, i) for i in range(4)]
    found = accuracy_metrics(prompts, correct(score_table(greedy, 1)[:, 0], 1.0), greedy)
    assert found["eval/accuracy"] == 0.0 and found["eval/reward"] == pytest.approx(-2.5)
    assert -3.5 <= found["eval/reward_low"] < -2.5 < found["eval/reward_high"] <= -1.5
    reward = answer_metrics(Answers(greedy, [], 0), ks=())["greedy_reward"]
    assert (reward["value"], reward["n"]) == (pytest.approx(-2.5), 3)


@pytest.mark.slow
def test_a_run_logs_pass_at_k_and_resumes(tmp_path):
    fields = dict(evaluate__samples=4, evaluate__every_steps=2)
    summary = train_on_one(tiny_config(tmp_path / "whole", steps=4, **fields))
    train_on_one(tiny_config(tmp_path / "half", steps=2, **fields))
    resumed = train_on_one(tiny_config(tmp_path / "half", steps=4, **fields))
    whole, half = (metrics_rows(tmp_path / name) for name in ("whole", "half"))
    evaluated = [row for row in whole if "eval/pass@4" in row]
    assert len(evaluated) >= 3
    for row in evaluated:
        assert row["eval/pass@1"] <= row["eval/pass@2"] <= row["eval/pass@4"]
        assert row["eval/pass@4_low"] <= row["eval/pass@4"] <= row["eval/pass@4_high"]
    assert half[-2:] == whole[-2:]
    for k in (1, 2, 4):
        for when in ("before", "after"):
            assert summary[f"pass@{k}_{when}"] == resumed[f"pass@{k}_{when}"]
        assert summary[f"pass@{k}_after"]["value"] == whole[-1][f"eval/pass@{k}"]
    assert summary["pass@4_before"]["n"] == summary["accuracy_before"]["n"]
    assert ">pass@4<" in (tmp_path / "whole" / "report.html").read_text()
