"""rljax watch: what stands on a screen of any width, and lines where there is none."""

import io
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import rich.console

from rljax.report import watch as module
from rljax.report.watch import Screen, frame, text_chart, watch
from rljax.runs.folder import locked


def made(folder, steps=20, seed=0, summary=True, torn=""):
    folder.mkdir(parents=True)
    config = {
        "dataflow": "grpo",
        "seed": seed,
        "steps": steps,
        "sft": {"steps": 0},
        "data": {"train": "sort_digits()"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    rows = [
        {"step": i, "phase": "rl", "reward/mean": i / steps + seed, "entropy": 1.0, "loss": -i}
        for i in range(1, steps + 1)
    ]
    lines = [*rows[:10], *rows[7:]]  # a restart at step 8
    text = "".join(json.dumps(row) + "\n" for row in lines) + torn
    (folder / "metrics.jsonl").write_text(text)
    samples = [
        {"step": 20, "prompt": "a\x1b[31mb", "response": f"r{i}\n", "reward": i / 4}
        for i in range(4)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    (folder / "starts.jsonl").write_text(json.dumps({"time": 1.0}) + "\n")
    if summary:
        (folder / "summary.json").write_text(json.dumps({"status": "finished", "started": 1.0}))
    return folder


def printed(folders, width=100, terminal=False, encoding="utf-8", **options):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = rich.console.Console(
        file=file, width=width, height=30, force_terminal=terminal, _environ={}, highlight=False
    )
    watch(folders, console=console, **options)
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def test_a_chart_shows_where_values_lie():
    x = np.arange(5.0)
    chart = text_chart("loss", [(x, np.array([0.0, 1.0, np.nan, 3.0, 5.0]))], ["*"], 14, True)
    assert chart == [
        "loss  5",
        "       5|    *",
        "        |     ",
        "        |   * ",
        "        |     ",
        "        | *   ",
        "       0|*    ",
        "        +0---4",
    ]
    flat = text_chart("x", [(x, np.full(5, 2.0))], ["*"], 14, True)
    assert [line for line in flat if "*" in line] == ["       2|*****"]
    nothing = text_chart("x", [(x, np.full(5, np.nan))], ["*"], 14)
    assert nothing[0].strip() == "x" and len(nothing) == len(chart)


@pytest.mark.parametrize("width", [1, 20, 39, 80, 200])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_no_line_is_wider_than_the_screen(tmp_path, width, ascii_only):
    runs = module._read([made(tmp_path / "a"), made(tmp_path / "b", seed=1)])
    for metrics in ((), ("*",), ("no/such",)):
        lines = frame(runs, metrics, Screen(width, 25, ascii_only))
        assert max(map(len, lines)) <= max(width, 10) and len(lines) <= 25
        assert not ascii_only or "\n".join(lines).isascii()


@pytest.mark.smoke
def test_once_is_a_whole_picture_and_needs_no_terminal(tmp_path):
    out = printed([made(tmp_path / "a", torn='{"step": 21, "rew')], once=True)
    assert "\x1b" not in out and "a: GRPO on sort_digits, step 20 of 20, finished" in out
    assert "reward/mean  1" in out and "entropy  1" in out and "┤" in out
    assert "step 20 reward 0.75: a·[31mb -> r3⏎" in out and "reward 0: a·[31mb -> r0⏎" in out
    ascii_out = printed([tmp_path / "a"], once=True, encoding="ascii", width=40)
    assert "reward/mean" in ascii_out and "*" in ascii_out


def test_lines_of_a_finished_run_with_a_restart_are_one_for_each_step(tmp_path):
    out = printed([made(tmp_path / "a", torn='{"step": 21, "rew')]).splitlines()
    assert [line.split("  ")[0] for line in out[:-1]] == [f"step {i}" for i in range(1, 21)]
    assert out[0] == "step 1  reward/mean 0.05  loss -1  entropy 1"
    assert out[-1].endswith("step 20 of 20, finished")
    only = printed([tmp_path / "a"], metrics=("entr*",)).splitlines()
    assert only[0] == "step 1  entropy 1"


def test_the_folder_of_a_sweep_stands_for_its_runs(tmp_path):
    for seed in (0, 1):
        made(tmp_path / "sweep" / f"seed={seed}", seed=seed)
    out = printed([tmp_path / "sweep"])
    assert out.count("seed=0 step ") == out.count("seed=1 step ") == 20
    picture = printed([tmp_path / "sweep"], once=True)
    assert "1 seed=0: GRPO" in picture and "2 seed=1: GRPO" in picture
    assert "reward/mean  1 2" in picture


def test_a_run_that_goes_on_is_followed_to_its_end(tmp_path):
    folder = made(tmp_path / "a", steps=5, summary=False)
    command = [sys.executable, "-m", "rljax", "watch", str(folder), "--every_s=0.1"]
    environment = {**os.environ, "TERM": "dumb"}
    with locked(folder):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as seen:
            for step in range(1, 6):
                assert seen.stdout.readline().startswith(f"step {step}  reward/mean")
            with open(folder / "metrics.jsonl", "a") as file:
                file.write('{"step": 6, "phase": "rl", "reward/me')
                file.flush()
                time.sleep(0.3)  # a look at the torn line
                file.write('an": 9.5}\n')
                file.flush()
                assert seen.stdout.readline() == "step 6  reward/mean 9.5\n"
            summary = {"status": "finished", "started": 1.0}
            (folder / "summary.json").write_text(json.dumps(summary))
            assert seen.stdout.readline().endswith("finished\n")
            assert seen.wait(30) == 0


@pytest.mark.parametrize("once", [True, False])
def test_a_name_stands_for_what_begins_with_it_and_one_of_none_says_which_there_are(tmp_path, once):
    folder = made(tmp_path / "a")
    for name in ("reward", "reward/", "reward/*", "reward/mean"):
        out = printed([folder], metrics=(name,), once=once)
        assert "reward/mean " in out and "no metric" not in out and "loss" not in out
    out = printed([folder], metrics=("rewerd/mean", "loss"), once=once)
    assert out.count("no metric matches 'rewerd/mean'; there are reward/mean") == 1
    assert "loss " in out
    out = " ".join(printed([folder], metrics=("zzz",), once=once).split())
    assert out.count("no metric matches 'zzz'; there are reward/mean, entropy, loss") == 1


def test_a_killed_run_ends_the_watch_and_a_terminal_keeps_the_last_picture(tmp_path):
    out = printed([made(tmp_path / "a", summary=False)], terminal=True, width=60)
    assert "not ended" in out and "reward/mean" in out and "\x1b[?25h" in out


def test_a_folder_that_is_not_there_is_said():
    command = [sys.executable, "-m", "rljax", "watch", "no/such"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no such run folder" in done.stderr
