"""What a run says of rewards that fail or are all equal, and the timeline of its steps."""

import json
import logging
import sys

import pytest
from tiny_run import metrics_rows, policy_bytes, summary, tiny_config, train_on_one

from rljax.report import timeline
from rljax.report.page import write_report
from rljax.report.run_folder import read_run, reward_warnings
from rljax.report.starts import read_starts
from rljax.tracking.timing import Timings

REWARDS = """
from rljax.rollout import Rollout

def one_after_the_other(prompts, key, cfg, *, actor, reward):
    batch = actor.generate(prompts, key, cfg.sampling, n=cfg.samples_per_prompt)
    batch, report = reward(batch, prompts)
    return Rollout(batch, prompts, report)

def constant(response):
    print("seen:", response)
    return {"score": 0.25, "extracted": float("1" in response)}

def best_of_group(responses, ground_truth):
    right = [sum(a == b for a, b in zip(text, ground_truth)) for text in responses]
    return [None if text.startswith("9") else float(n == max(right))
            for text, n in zip(responses, right)]
"""


@pytest.fixture(scope="module", autouse=True)
def rewards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "health_rewards.py").write_text(REWARDS)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    sys.modules.pop("health_rewards", None)


def run(folder, function: str, **fields):
    fields = {"evaluate__reward": "sequence_match", **fields}
    config = tiny_config(
        folder,
        reward__function=function,
        sft__steps=2,
        evaluate__every_steps=0,
        evaluate__prompts=4,
        **fields,
    )
    train_on_one(config)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["phase"] == "rl"]


@pytest.mark.slow
def test_rewards_that_are_all_equal_are_said_on_the_console_in_the_summary_and_in_the_report(
    tmp_path, caplog, capfd
):
    """And what the reward prints is in the run folder, not between the lines of the console."""
    with caplog.at_level(logging.WARNING, "rljax"):
        reward = "health_rewards.constant"
        rows = run(tmp_path, reward, steps=4, evaluate__reward=reward)
    assert "seen:" not in "".join(capfd.readouterr())
    # Of the trial 2, of four steps 16 each, and of the evaluations.
    assert (tmp_path / "rewards.log").read_text().count("seen: ") >= 2 + 4 * 16 + 4
    said = [r.getMessage() for r in caplog.records if "nothing is learned" in r.getMessage()]
    assert (
        len(said) == 1 and "step 5: all rewards of 3 steps in a row are one number, 0.25" in said[0]
    )
    assert "not in the format" in said[0] and "too hard or too easy" in said[0]
    assert summary(tmp_path)["faults"]["equal_rewards"] == 4.0
    page = (tmp_path / "report.html").read_text()
    assert "Step 6: all rewards of 4 steps in a row are one number, 0.25" in page
    # Where the run came from, and that it has come to its end.
    assert summary(tmp_path)["started"] == read_starts(tmp_path)[-1]["time"]
    assert "Command, code and machine" in page and "1 x cpu" in page and "6 of 6" in page
    assert "without an end" not in page and "Still running" not in page
    for row in rows:
        assert row["reward/all_equal"] == row["reward/equal_groups"] == 1.0
        assert row["reward/errors"] == row["reward/failed_fraction/sort_digits"] == 0.0
        failed = row["reward/extraction_failed_fraction"]
        assert failed == 1.0 - row["reward/part/extracted"] and 0 <= failed < 1
        assert 0 < row["time/reward_sample_mean_s"] <= row["time/reward_sample_max_s"] < 10
        assert row["time/reward_hidden_s"] == 0.0  # 7 tokens end in one turn of decoding
    evaluated = [row for row in rows if "eval/accuracy" in row]
    shares = [row["eval/extraction_failed_fraction"] for row in evaluated]
    assert shares and {*shares} <= {0.0, 0.25, 0.5, 0.75, 1.0}  # of four prompts
    # The figure: two steps, each with its lanes.
    assert page.count('aria-label="timeline of step') == 2
    first, last = timeline.read(tmp_path)
    assert first["step"] < last["step"] == 6 and {"generate", "reward", "learn"} <= set(
        first["spans"]
    )
    assert last["scoring"][-1][1:] == [0, 16]


@pytest.mark.slow
def test_the_logged_prompts_and_completions_of_a_step_are_those_of_the_config(tmp_path):
    sizes = dict(batch__prompts_per_step=2, batch__samples_per_prompt=4)
    rows = run(tmp_path, "sequence_match(partial=0.5)", steps=2, **sizes)
    steps = [row for row in rows if "batch/prompts" in row]
    assert len(steps) == 2
    for row in steps:
        assert row["batch/prompts"] == 2 and row["batch/completions"] == 2 * 4
    # All of them were scored: [samples in scoring, samples scored] at the end of the step.
    assert timeline.read(tmp_path)[-1]["scoring"][-1][1:] == [0, 2 * 4]


@pytest.mark.slow
def test_a_run_by_a_reward_of_the_group(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "rljax"):
        rows = run(tmp_path, "health_rewards.best_of_group", steps=3, sampler__loop="host")
    assert all(row["reward/mean"] > 0 for row in rows)
    assert any(0 < row["reward/equal_groups"] < 1 or row["reward/all_equal"] == 0 for row in rows)
    failed = sum(row["reward/errors"] for row in rows)
    if failed:  # which is above 1 % of 16
        said = [r.getMessage() for r in caplog.records]
        assert any("rewards failed and are masked out" in text for text in said)
        assert any("Rewards failed and were masked out" in n for n in read_run(tmp_path).notes)
    assert any(row["time/reward_hidden_s"] > 0 for row in rows)


@pytest.mark.slow
def test_a_run_that_overlaps_is_bitwise_the_run_that_does_not(tmp_path):
    rows = {}
    for collect in ("once", "health_rewards.one_after_the_other"):
        folder = tmp_path / collect
        options = dict(steps=2, sampler__slots=8, algorithm__collect=collect)
        rows[collect] = run(folder, "sequence_match(partial=0.5)", **options)
    overlapped, plain = rows.values()
    assert sum(row["time/reward_hidden_s"] for row in overlapped) > 0
    assert sum(row["time/reward_hidden_s"] for row in plain) == 0
    first, second = (tmp_path / collect for collect in rows)
    assert metrics_rows(first) == metrics_rows(second)
    assert policy_bytes(first) == policy_bytes(second)
    assert (first / "samples.jsonl").read_bytes() == (second / "samples.jsonl").read_bytes()


def test_warnings_of_a_folder_count_steps_in_a_row():
    def rows(*equal, errors=0.0):
        return [
            {"step": i, "reward/all_equal": e, "reward/errors": errors, "batch/completions": 100.0}
            for i, e in enumerate(equal)
        ]

    assert reward_warnings(rows(1, 1, 0, 1, 1, 0)) == []
    assert "Step 4: all rewards of 3 steps" in reward_warnings(rows(0, 0, 1, 1, 1, 0, 1))[0]
    dead = [{**row, "reward/equal_groups": 1.0} for row in rows(0, 0, 0)]
    assert "every prompt's samples are all equal" in reward_warnings(dead)[0]
    assert reward_warnings(rows(0, errors=1.0)) == []  # 1 %
    assert "2 at step 0" in reward_warnings(rows(0, 0, errors=2.0))[0]
    assert reward_warnings([{"step": 1, "loss": 0.1}]) == []


def timings():
    return Timings(
        100.0,
        spans=[("generate", 100.0, 104.0), ("reward", 104.0, 105.0), ("learn", 105.0, 107.0)],
        live=[(101.0, 8), (103.0, 3), (104.0, 0)],
        scoring=[(101.0, 102.0), (101.5, 103.0), (103.5, 104.5), (104.2, 105.0)],
    )


def test_hidden_scoring_is_what_overlaps_decoding():
    assert timeline.scored_while_decoding(timings()) == pytest.approx(2.0 + 0.5)
    assert timeline.scored_while_decoding(Timings(0.0)) == 0.0


def test_a_timeline_is_kept_small_and_drawn(tmp_path):
    record = timeline.record_of(timings(), 7, 7.0)
    assert record["scoring"] == [
        [1.0, 1, 0],
        [1.5, 2, 0],
        [2.0, 1, 1],
        [3.0, 0, 2],
        [3.5, 1, 2],
        [4.2, 2, 2],
        [4.5, 1, 3],
        [5.0, 0, 4],
    ]
    assert record["decoding"] == [[1.0, 8], [3.0, 3], [4.0, 0]]
    many = Timings(0.0, live=[(float(i), i) for i in range(5001)])
    kept = timeline.record_of(many, 1, 5000.0)["decoding"]
    assert len(kept) < 250 and kept[0] == [0.0, 0] and kept[-1] == [5000.0, 5000]
    timeline.write(tmp_path, [record])
    page = write_report(tmp_path).read_text()
    assert "timeline of step 7" in page and "samples scored at most <b>4</b>" in page
    assert "reward: 4 to 5 s" in page


@pytest.mark.parametrize("text", ["", "[", "{}", "[3]", '[{"step": 1}]'])
def test_a_timeline_that_was_cut_short_is_left_out(tmp_path, text):
    (tmp_path / timeline.FILE).write_text(text)
    assert timeline.read(tmp_path) == []
    assert "timeline of step" not in write_report(tmp_path).read_text()
