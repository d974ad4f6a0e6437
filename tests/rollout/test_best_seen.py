"""The best score that each prompt has had in a run, against the step's samples."""

import json

import numpy as np
import pytest

from rljax.data.online.prompts import PromptRecord
from rljax.rewards.pool.pool import Score
from rljax.rollout import BestSeen, RewardReport, ScoredRow


def report(*scores: tuple[int | None, float]) -> RewardReport:
    """One sample for each (prompt_id, score); a score that is NaN has failed."""
    rows = []
    for prompt, score in scores:
        record = PromptRecord("", np.zeros(1, np.int32), "", "toy", {}, 0, prompt_id=prompt)
        status = "error" if np.isnan(score) else "ok"
        known = Score(score, {}, status, 0.0, "")
        rows.append(ScoredRow({}, known, record, 0 if prompt is None else prompt))
    return RewardReport(tuple(rows))


def test_the_best_of_the_run_and_what_the_step_is_short_of():
    best = BestSeen()
    first = best.record(report((3, 1.0), (3, 0.0), (5, -1.0), (5, -0.5)))
    assert first == {"reward/best_seen": 0.25, "reward/best_seen_gap": pytest.approx(0.375)}
    # Prompt 3 was better before, prompt 5 is better now; prompt 9 is new, and failed once.
    later = best.record(report((3, 0.0), (3, 0.5), (5, 0.0), (9, np.nan), (9, 2.0)))
    assert later["reward/best_seen"] == pytest.approx((1.0 + 0.0 + 2.0) / 3)
    assert later["reward/best_seen_gap"] == pytest.approx((0.75 + 0.0 + 0.0) / 3)


def test_nothing_is_said_where_no_score_of_a_training_prompt_is_known():
    best = BestSeen()
    assert best.record(report()) == best.record(report((4, np.nan))) == {}
    assert best.record(report((None, 1.0))) == {}
    assert best.get_state() == {}


def test_a_resumed_run_remembers_and_a_stream_keeps_nothing():
    best = BestSeen()
    best.record(report((3, 1.0), (12, -2.0)))
    resumed = BestSeen()
    resumed.set_state(json.loads(json.dumps(best.get_state())))
    again = report((3, 0.0), (12, -3.0))
    expected = {"reward/best_seen": -0.5, "reward/best_seen_gap": 1.0}
    assert resumed.record(again) == best.record(again) == expected
    stream = BestSeen(endless=True)
    stream.record(report((3, 1.0)))
    assert stream.get_state() == {}
    assert stream.record(report((3, 0.0)))["reward/best_seen"] == 0.0
