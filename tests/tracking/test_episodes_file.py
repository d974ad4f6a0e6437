"""episodes.jsonl: which episodes are recorded, what a record holds, and what a resume cuts."""

import json
import math

import numpy as np

from rljax.runs.jsonl import read_jsonl
from rljax.tracking.episodes import (
    MOST_CHARACTERS,
    MOST_TOKENS,
    EpisodeSummary,
    episode_record,
    shown_episodes,
    turn_record,
)
from rljax.tracking.trackers import open_tracking


def summary(number, group, total, tokens=10, status="ok"):
    return EpisodeSummary(number, group, status, total, tokens, lambda: {"episode": number})


def numbers(episodes):
    return [e.record()["episode"] for e in episodes]


def turn(text="8", **fields):
    given = dict(
        observation="Guess.",
        tokens=[41, 2],
        pieces=[text, "\n"],
        logprobs=[-1.23456, 0],
        chosen=[1.0, 0.0],
        versions=[3, 4],
        text=text,
    )
    return turn_record(**given | fields)


def test_the_ends_and_each_kind_of_failure_come_first_then_whole_groups():
    episodes = [
        summary(0, 0, 0.5),
        summary(1, 0, 0.4),
        summary(2, 1, 0.9),
        summary(3, 1, 0.1),
        summary(4, 2, 0.3, tokens=99),
        summary(5, 2, 0.3),
        summary(6, 3, None, 5, "raised"),
        summary(7, 3, None, 6, "raised"),
        summary(8, 4, None, 7, "timeout"),
        summary(9, 5, math.nan),
    ]
    assert numbers(shown_episodes(episodes, 5)) == [2, 3, 4, 6, 8]
    assert numbers(shown_episodes(episodes, 6)) == [2, 3, 4, 5, 6, 8]  # the longest's sibling
    assert numbers(shown_episodes(episodes)) == [2, 3, 4, 5, 6, 7, 8]
    assert numbers(shown_episodes(episodes, 2)) == [2, 3]
    assert shown_episodes([]) == [] and numbers(shown_episodes(episodes[6:7])) == [6]
    # A group is shown whole or not at all.
    wide = [summary(i, 0, i / 10) for i in range(9)]
    assert numbers(shown_episodes(wide, 8)) == [0, 8]


def test_a_record_is_bounded():
    long = turn(
        tokens=range(3000),
        pieces=["a"] * 3000,
        logprobs=[-1.0] * 3000,
        chosen=[1] * 3000,
        versions=[0] * 3000,
        text="x" * 30_000,
    )
    record = episode_record(episode=1, group=2, turns=[long, long, turn()], total=1.5)
    kept = [len(t[name]) for t in record["turns"] for name in ("tokens", "pieces", "logprobs")]
    assert kept == [3000] * 3 + [MOST_TOKENS - 3000] * 3 + [0] * 3
    assert len(record["turns"][0]["text"]) < MOST_CHARACTERS + 40
    assert "[10000 characters cut]" in record["turns"][0]["text"]
    assert record["turns"][2]["text"] == "8" and record["return"] == 1.5
    assert turn()["logprobs"] == [-1.2346, 0.0] and turn()["chosen"] == [1, 0]


def test_what_is_written_is_read_back_and_a_resume_cuts_it(tmp_path):
    record = episode_record(
        episode=0,
        group=0,
        turns=[turn("nan", observation="inf\ud800</script>")],
        seat="inf",
        status="raised",
        finish="turns",
        message="-inf",
    )
    with open_tracking((), tmp_path, {}) as tracking:
        assert not (tmp_path / "episodes.jsonl").exists()  # a run without an environment has none
        assert tracking.offsets()["episodes.jsonl"] == 0
        before = tracking.offsets()
        tracking.episodes(3, [record])
        offsets = tracking.offsets()
        tracking.episodes(4, [record, record])
    row = read_jsonl(tmp_path / "episodes.jsonl")[0]
    # Texts that look like numbers stay texts; half a surrogate pair is shown as U+FFFD.
    assert row == {"step": 3, **json.loads(json.dumps(record).replace("\\ud800", "\ufffd"))}
    with open_tracking((), tmp_path, {}) as tracking:
        tracking.truncate(offsets)
        assert [row["step"] for row in read_jsonl(tmp_path / "episodes.jsonl")] == [3]
        tracking.truncate(before)
        assert read_jsonl(tmp_path / "episodes.jsonl") == [] and tracking.lost() == ""


def test_every_number_is_plain_json():
    record = episode_record(
        episode=np.int64(1),
        group=np.int32(2),
        total=np.float32(0.5),
        turns=[
            turn(
                tokens=np.arange(2),
                logprobs=np.zeros(2, np.float32),
                chosen=np.ones(2),
                versions=np.ones(2, np.int32),
                reward=np.float32(1),
                bad=np.True_,
            )
        ],
    )
    assert json.loads(json.dumps(record)) == record
