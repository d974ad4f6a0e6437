"""Tracking and console: nothing is lost, nothing stops training, nothing in a completion runs."""

import functools
import io
import itertools
import json
import logging
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
import rich.console
from processes import wait_until

from rljax import heartbeat
from rljax.errors import InputError
from rljax.runs.jsonl import JsonlTracker, read_jsonl
from rljax.tracking import compiles, timing
from rljax.tracking.console import Console, Waiting, differing, one_line
from rljax.tracking.trackers import open_tracking

CONFIG = {"name": "toy", "sampler": {"temperature": 1.0}, "nan": math.nan}
SAMPLE = {"prompt": "1+1", "response": "nan", "reward": 1.0, "ground_truth": "inf", "status": "ok"}


class Fake:
    """Records calls; raises in the calls whose number `bad` holds."""

    def __init__(self, bad=()):
        self.rows, self.closed, self.calls, self.bad = [], False, 0, bad

    def log(self, step, metrics):
        self.calls += 1
        if self.calls in self.bad:
            raise RuntimeError(f"call {self.calls}")
        self.rows.append((step, dict(metrics)))

    def samples(self, step, rows):
        self.log(step, {"samples": len(rows)})

    def close(self):
        self.closed = True


def _run(code, *arguments, **options):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


# --- jsonl ---


def test_jsonl_round_trip_is_strict_json_and_keeps_text(tmp_path):
    metrics = {
        "a": math.nan,
        "b": math.inf,
        "c": -math.inf,
        "d": np.float32(0.5),
        "e": np.int64(2**40),
        "f": np.array(1.5),
        "phase": "rl",
    }
    odd = {
        **SAMPLE,
        "response": 'é\u2028\n"\\ \udc80 🙂',
        "parts": {"x": math.nan},
        "reward": -math.inf,
    }
    with open_tracking([], tmp_path, CONFIG) as tracking:
        tracking.log(np.int32(3), metrics)
        tracking.samples(3, [SAMPLE, odd])

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    for name in ("metrics.jsonl", "samples.jsonl"):
        for line in (tmp_path / name).read_text(encoding="utf-8").split("\n")[:-1]:
            json.loads(line, parse_constant=refuse)
    (row,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert math.isnan(row.pop("a"))
    assert row == {
        "step": 3,
        "b": math.inf,
        "c": -math.inf,
        "d": 0.5,
        "e": 2**40,
        "f": 1.5,
        "phase": "rl",
    }
    first, second = read_jsonl(tmp_path / "samples.jsonl")
    assert first == {"step": 3, **SAMPLE}  # the texts "nan" and "inf" stay texts
    assert second["response"] == odd["response"].replace(
        "\udc80", "\ufffd"
    )  # no page can hold half a pair
    assert second["reward"] == -math.inf and math.isnan(second["parts"]["x"])


def test_a_line_is_in_the_file_when_log_returns(tmp_path):
    tracker = JsonlTracker(tmp_path)
    tracker.log(1, {"a": 1})
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 1}]
    tracker.close()


def test_torn_last_line_is_dropped_and_not_joined(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "a": 0.')
    assert read_jsonl(path) == [{"step": 1}] and not caplog.records
    with open_tracking([], tmp_path, CONFIG) as tracking:
        tracking.log(2, {"a": 0.5})
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2, "a": 0.5}\n'


def test_damage_in_the_middle_is_reported_with_its_line(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\x00\x00\n{"step": 3}\n')
    assert read_jsonl(path) == [{"step": 1}, {"step": 3}]
    assert "line 2" in caplog.text


def test_kill_9_leaves_whole_rows(tmp_path):
    code = (
        "import sys, itertools; from rljax.runs.jsonl import JsonlTracker\n"
        "t = JsonlTracker(sys.argv[1]); print('go', flush=True)\n"
        "for i in itertools.count(): t.log(i, {'x': i / 7})"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    process.stdout.readline()
    file = tmp_path / "metrics.jsonl"
    wait_until(lambda: file.exists() and file.stat().st_size > 100_000, "some rows")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert rows and rows == [{"step": i, "x": i / 7} for i in range(len(rows))]


def test_full_disk_warns_and_leaves_whole_rows(tmp_path):
    code = (
        "import resource, sys; from rljax.tracking.trackers import open_tracking\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))\n"
        "with open_tracking([], sys.argv[1], {}) as t:\n"
        "    for i in range(50): t.log(i, {'x': 0.125})\n"
        "    print('lost:', t.lost())"
    )
    done = _run(code, tmp_path)
    assert done.stdout.startswith("lost: rows of ") and "metrics.jsonl" in done.stdout, done.stderr
    assert done.stderr.count("'jsonl' failed in log") == 1 and "is off" not in done.stderr
    data = (tmp_path / "metrics.jsonl").read_bytes()
    assert 150 < len(data) <= 200 and data.endswith(b"}\n")
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == data.count(b"\n")


@pytest.mark.parametrize("how", ["removed", "replaced", "moved"])
def test_a_file_that_somebody_removes_is_written_again_and_said_to_be_lost(tmp_path, caplog, how):
    path = tmp_path / "metrics.jsonl"
    with open_tracking([], tmp_path, CONFIG) as tracking:
        tracking.log(1, {"x": 1.0})
        assert tracking.lost() == ""
        if how == "replaced":
            os.replace(shutil.copy(path, tmp_path / "copy"), path)
        else:
            path.unlink() if how == "removed" else path.rename(tmp_path / "old")
        for step in (2, 3):
            tracking.log(step, {"x": 1.0})
        assert tracking.lost() == f"{path} was removed or replaced while it was written"
        (tmp_path / "samples.jsonl").unlink()  # nothing was written to it since
        assert "samples.jsonl was removed" in tracking.lost()
        assert tracking.failures() == {"jsonl": 0}
    kept = [row["step"] for row in read_jsonl(path)]
    assert kept == ([1, 2, 3] if how == "replaced" else [2, 3])
    assert [r.getMessage().count("rows are missing") for r in caplog.records] == [1]


def test_a_folder_that_somebody_removes_costs_no_step(tmp_path, caplog):
    place = tmp_path / "run"
    with open_tracking([], place, CONFIG) as tracking:
        tracking.log(1, {"x": 1.0})
        shutil.rmtree(place)
        for step in range(2, 6):
            tracking.log(step, {"x": 1.0})
        assert "metrics.jsonl was removed" in tracking.lost()
        place.mkdir()  # a disk that comes back
        tracking.log(6, {"x": 1.0})
    assert [row["step"] for row in read_jsonl(place / "metrics.jsonl")] == [6]


# --- resume ---


def _train(tracking, first, last):
    for step in range(first, last):
        tracking.log(step, {"x": step / 3})
        tracking.samples(step, [SAMPLE])


def test_resumed_files_equal_uninterrupted_ones(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with open_tracking([], whole, CONFIG) as tracking:
        _train(tracking, 0, 10)
    with open_tracking([], killed, CONFIG) as tracking:
        _train(tracking, 0, 4)
        offsets = tracking.offsets()
        _train(tracking, 4, 7)  # past the checkpoint, then killed in mid-write
    with open(killed / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 7, "x"')
    with open_tracking([], killed, CONFIG) as tracking:
        tracking.truncate(offsets)
        _train(tracking, 4, 10)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


def test_truncate_never_stretches_a_file(tmp_path, caplog):
    with open_tracking([], tmp_path, CONFIG) as tracking:
        tracking.log(1, {"x": 1})
        size = tracking.offsets()["metrics.jsonl"]
        tracking.truncate({"metrics.jsonl": size + 100, "samples.jsonl": 5})
    assert (tmp_path / "metrics.jsonl").stat().st_size == size
    assert "metrics.jsonl" in caplog.text and "samples.jsonl" in caplog.text


# --- the fan-out ---


def test_failing_tracker_warns_once_and_is_off_after_three_in_a_row(tmp_path, caplog):
    fake = Fake(bad=(2, 4, 5, 7, 8, 9))
    with open_tracking(["console"], tmp_path, CONFIG, fake) as tracking:
        for step in range(1, 15):
            tracking.log(step, {"x": 1.0})
        assert tracking.failures() == {"jsonl": 0, "console": 6}
    assert [step for step, _ in fake.rows] == [1, 3, 6] and fake.calls == 9
    assert fake.closed  # it may hold files and threads
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(texts) == 2 and "'console' failed in log (RuntimeError: call 2)" in texts[0]
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 14


def test_close_and_samples_failures_do_not_stop(tmp_path):
    class Bad(Fake):
        def close(self):
            raise OSError("gone")

    with open_tracking(["console"], tmp_path, CONFIG, Bad(bad=(1,))) as tracking:
        tracking.samples(1, [SAMPLE])
    assert tracking.failures()["console"] == 2


def test_ctrl_c_passes_through(tmp_path):
    class Stop(Fake):
        def log(self, step, metrics):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with open_tracking(["console"], tmp_path, CONFIG, Stop()) as tracking:
            tracking.log(1, {})


def test_the_seconds_of_a_phase_are_those_of_all_its_times():
    with timing.collect() as timings:
        for name in ("learn", "generate", "learn"):
            with timing.timed(name):
                pass
    assert [name for name, *_ in timings.spans] == ["learn", "generate", "learn"]
    for name, seconds in timings.seconds.items():
        spans = [end - start for one, start, end in timings.spans if one == name]
        assert 0 < seconds == pytest.approx(sum(spans), rel=1e-6)


def test_what_is_no_scalar_is_dropped_and_named_once(tmp_path, caplog):
    with open_tracking([], tmp_path, CONFIG) as tracking:
        for step in (1, 2):
            tracking.log(step, {"bad": np.zeros(3), "none": None, "good": 1})
    assert read_jsonl(tmp_path / "metrics.jsonl") == [
        {"step": 1, "good": 1},
        {"step": 2, "good": 1},
    ]
    assert len(caplog.records) == 2 and "'bad'" in caplog.text


def test_a_console_that_is_not_named_is_not_used(tmp_path):
    fake = Fake()
    with open_tracking([], tmp_path, CONFIG, fake) as tracking:
        tracking.log(1, {"x": 1})
    assert not fake.rows


def test_unknown_name_has_a_hint(tmp_path):
    with pytest.raises(InputError, match="did you mean wandb"):
        open_tracking(["wanbd"], tmp_path, CONFIG)
    with pytest.raises(InputError, match="sequence of names"):
        open_tracking("wandb", tmp_path, CONFIG)


@pytest.mark.parametrize(
    "name, package, install",
    [
        ("tensorboard", "tensorboardX", "tensorboardX>=2.6"),
        ("wandb", "wandb", "wandb>=0.20"),
        ("mlflow", "mlflow", "mlflow-skinny>=3"),
        ("swanlab", "swanlab", "swanlab>=0.10"),
        ("trackio", "trackio", "trackio>=0.20"),
    ],
)
def test_missing_package_says_what_to_install(tmp_path, monkeypatch, name, package, install):
    monkeypatch.setitem(sys.modules, package, None)  # what import sees when it is not installed
    with pytest.raises(InputError, match=f"pip install '{install}'"):
        open_tracking([name], tmp_path, CONFIG)


def test_importing_imports_no_service():
    code = (
        "import sys, rljax.tracking.trackers, rljax.tracking.console, rljax.report.page\n"
        "services = ('wandb', 'tensorboardX', 'mlflow', 'swanlab', 'trackio')\n"
        "print([m for m in services if m in sys.modules])"
    )
    assert _run(code).stdout.strip() == "[]"


def test_run_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="run folder cannot be written"):
        open_tracking([], tmp_path / "file" / "run", CONFIG)


# --- the services, for real ---


def _events(path):
    """The records of a tensorboard event file."""
    from tensorboardX.proto.event_pb2 import Event

    data, at = path.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        yield Event.FromString(data[at + 12 : at + 12 + length])
        at += length + 16


def test_tensorboard_files_hold_the_values_and_resume_purges(tmp_path):
    pytest.importorskip("tensorboardX", reason="the tensorboard extra is not installed")
    for steps in ((1, 2, 3), (3, 4)):
        with open_tracking(["tensorboard"], tmp_path, CONFIG) as tracking:
            for step in steps:
                tracking.log(step, {"reward/mean": step / 4, "phase": "rl", "nan": math.nan})
            tracking.samples(steps[-1], [{**SAMPLE, "response": "\udc80"}])
            assert tracking.failures()["tensorboard"] == 0
        time.sleep(1.1)  # event files are named by the second
    files = sorted((tmp_path / "tensorboard").iterdir())
    events = [list(_events(file)) for file in files]
    scalars = [
        (event.step, value.simple_value)
        for event in events[0] + events[1]
        for value in event.summary.value
        if value.tag == "reward/mean"
    ]
    assert scalars == [(1, 0.25), (2, 0.5), (3, 0.75), (3, 0.75), (4, 1.0)]
    started = [event.step for event in events[1] if event.HasField("session_log")]
    assert started == [3]  # the reader forgets what the killed run wrote from step 3 on


def test_wandb_offline_run_is_written_and_continued(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the wandb extra is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for step in (1, 2):
        with open_tracking(["wandb"], tmp_path, CONFIG) as tracking:
            tracking.log(step, {"reward/mean": 0.25, "phase": "rl", "nan": math.nan})
            tracking.samples(step, [SAMPLE])
        assert tracking.failures() == {"jsonl": 0, "wandb": 0}
    run_id = (tmp_path / "wandb_id.txt").read_text().strip()
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert files and {file.name for file in files} == {f"run-{run_id}.wandb"}

    def written(file) -> bool:
        # Blocks of 32 KiB, each with a header of 7 bytes, which may cut a name in two.
        data = file.read_bytes()
        blocks = (data[start + 7 : start + 32768] for start in range(0, len(data), 32768))
        return b"reward/mean" in b"".join(blocks)

    # wandb's own process may write the file after `finish` has returned.
    for file in files:
        wait_until(functools.partial(written, file), f"the metrics in {file.name}")


def test_mlflow_run_is_written_and_continued(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="the mlflow extra is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/store")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for step in (1, 2):
        with open_tracking(["mlflow"], tmp_path / "run", CONFIG) as tracking:
            tracking.log(step, {"reward/mean": step / 4, "pass@4": 0.5})
            tracking.samples(step, [SAMPLE])
        assert tracking.failures() == {"jsonl": 0, "mlflow": 0}
    run_id = (tmp_path / "run" / "mlflow_id.txt").read_text().strip()
    history = mlflow.MlflowClient().get_metric_history(run_id, "reward/mean")
    assert [(m.step, m.value) for m in history] == [(1, 0.25), (2, 0.5)]


# --- console ---


def _terminal(**options):
    return rich.console.Console(
        file=io.StringIO(), force_terminal=True, width=120, height=45, _environ={}, **options
    )


def test_live_console_draws_and_gives_the_cursor_back():
    terminal = _terminal()
    console = Console(20, console=terminal)
    assert console.live
    for step in range(1, 11):
        console.log(
            step,
            {"phase_rl": 1, "reward/mean": step / 10, "time/generate_s": 3.0, "time/learn_s": 1.0},
        )
    console.samples(10, [{**SAMPLE, "response": "the [bold red]answer[/nope]\nis 2"}])
    console.close()
    console.close()
    out = terminal.file.getvalue()
    for text in ("rl step 10/20", "reward", "▁", "█", "75 %", "[bold red]answer[/nope]⏎is 2"):
        assert text in out, text
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l")


def test_control_characters_never_reach_the_terminal():
    terminal = _terminal()
    console = Console(5, console=terminal)
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp\x08\r"
    console.samples(1, [{"prompt": evil, "response": evil, "reward": evil, "status": evil}])
    console.log(1, {evil: 1.0, "phase": evil})
    console.close()
    out = terminal.file.getvalue()
    assert "owned" in out  # shown, as text
    for bad in ("\x1b]0", "\x1b[2J", "\x9b", "\u202e", "\x07", "\x08"):
        assert bad not in out


def test_uncaught_exception_gives_the_cursor_back(tmp_path):
    code = (
        "import sys, rich.console; from rljax.tracking.console import Console\n"
        "c = Console(5, console=rich.console.Console(force_terminal=True))\n"
        "c.log(1, {'loss': 1.0}); raise SystemError('boom')"
    )
    done = _run(code)
    assert "boom" in done.stderr and done.returncode == 1
    assert done.stdout.rindex("\x1b[?25h") > done.stdout.rindex("\x1b[?25l")


@pytest.mark.parametrize("live", [True, False])
def test_weird_metrics_never_raise(live):
    terminal = _terminal()
    console = Console(0, console=terminal, live=live, every=1)
    for step, value in enumerate(
        (math.nan, math.inf, -math.inf, 1e308, -1e308, None, "x", [1], 10**400)
    ):
        keys = ("reward/mean", "loss", "tokens_per_s", "time/generate_s", "time/rest_s", "phase_rl")
        console.log(step, dict.fromkeys(keys, value))
    console.log(3, {})
    console.samples(3, [])
    console.samples(3, [{}, {"reward": math.nan, "prompt": None, "response": 7}])
    console.close()


def test_ascii_terminals_get_ascii():
    raw = io.BytesIO()
    terminal = rich.console.Console(
        file=io.TextIOWrapper(raw, "ascii"), force_terminal=True, width=100, height=40, _environ={}
    )
    console = Console(5, console=terminal)
    console.log(1, {"reward/mean": 1.0})
    console.log(2, {"reward/mean": 2.0})
    console.samples(2, [{**SAMPLE, "response": "é\n→"}])
    console.close()
    terminal.file.flush()
    assert b"reward" in raw.getvalue() and b"?" in raw.getvalue()


def test_plain_console_prints_one_line_every_so_often():
    plain = rich.console.Console(file=io.StringIO(), width=60, _environ={})
    console = Console(25, console=plain, every=10)
    assert not console.live
    for step in range(1, 26):
        console.log(step, {"phase_rl": step > 5, "reward/mean": step / 100, "loss": math.nan})
    console.log(25, {"eval/accuracy": 0.5})
    console.close()
    lines = plain.file.getvalue().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d step", line) for line in lines)
    assert [line[9:].split(" | ")[0] for line in lines] == [
        "step 1/25",
        "step 10/25",
        "step 20/25",
        "step 25/25",
        "step 25/25",
    ]
    assert "rl | reward 0.2 | loss nan" in lines[2] and "accuracy 0.5" in lines[4]
    assert "\x1b" not in plain.file.getvalue()


def test_a_plain_console_is_never_silent_for_half_a_minute_and_names_what_compiles():
    """A step of 90 s: sampling and small programs, the large one, learning; then nothing new."""
    waiting, lines = Waiting(0.0), {}
    for now in range(1, 91):
        at = "sampling responses" + ", compiling" * (now % 3 == 0)
        at = (
            at
            if now < 32
            else "learning, compiling learn grpo (2 of 3)"
            if now < 50
            else "learning"
        )
        if line := waiting.line(f"step 1: {at}", float(now), float(now)):
            lines[now] = line
            waiting.printed_s = now
    assert max(b - a for a, b in itertools.pairwise([0, *lines, 90])) <= 20
    assert lines[35] == "step 1: learning, compiling learn grpo (2 of 3), 35 s so far"
    assert len(lines) == 4 and sum("grpo" in line for line in lines.values()) == 1


def test_a_step_is_a_line_after_a_silence():
    plain = rich.console.Console(file=io.StringIO(), width=60, _environ={})
    console = Console(100, console=plain, every=10)
    for step in (1, 2, 3):
        console.log(step, {"loss": 1.0})
        console.waiting.printed_s -= 30 * (step == 2)
    assert [line[9:17] for line in plain.file.getvalue().splitlines()] == ["step 1/1", "step 3/1"]


def test_what_goes_on_is_said_in_the_words_of_who_waits():
    heartbeat.at_start()
    assert compiles.doing()[0] == "preparing the run"
    compiles.expect([("grpo", "learn grpo"), ("rollout", "generate")])
    heartbeat.at_step(7)
    with heartbeat.phase("data"), heartbeat.phase("generate"):
        assert compiles.doing()[0] == "step 7: sampling responses"
        compiles._note(compiles._LOWERED, 0.1, fun_name="jit(_extend)")
        assert compiles.doing()[0] == "step 7: sampling responses, compiling"
        compiles._note(compiles._LOWERED, 0.1, fun_name="jit(rollout)")
        assert compiles.doing()[0] == "step 7: sampling responses, compiling generate (2 of 2)"
        first = compiles.doing()[1]
        compiles._note(compiles._EVENT, 0.1, fun_name="jit(rollout)")
    with heartbeat.phase("evaluate"), heartbeat.phase("generate"):
        assert compiles.doing()[0] == "step 7: evaluating, sampling responses"
        assert compiles.doing()[1] >= first  # of the step: they never go back
    heartbeat.at_end()
    with heartbeat.phase("export"):
        assert compiles.doing()[0] == "exporting the policy"


def test_a_live_console_says_what_it_waits_for_from_the_start():
    terminal, now = _terminal(), [("compiling learn grpo (2 of 3)", 41.2)]
    console = Console(12, console=terminal, live=True, busy=lambda: now[0])
    console.begin()
    console.show()
    shown = "compiling learn grpo (2 of 3), 41 s so far"
    wait_until(lambda: shown in terminal.file.getvalue(), "it")
    now[0] = ("", 0.0)
    console.log(1, {"loss": 1.0, "phase": "sft"})
    console.clock[-1] = (1, time.monotonic() - 75)
    ago = re.compile(r"last step 1 min \d+ s ago")  # a loaded machine shows it a little later
    wait_until(lambda: ago.search(terminal.file.getvalue()), "the pause")
    console.close()


def test_the_bar_is_full_at_the_end_of_a_run_whose_sft_ended_early():
    terminal = _terminal()
    console = Console(220, console=terminal, sft_steps=60)
    for step in range(1, 11):
        console.log(step, {"phase": "sft", "loss": 1.0})
    for step in range(11, 171):
        console.log(step, {"phase": "rl", "reward/mean": 0.5})
    assert console.total == 170
    console.finished()
    console.close()
    last = terminal.file.getvalue().rpartition("rl step ")[2]
    assert last.startswith("170/170") and "left" not in last
    bars = last.partition("170/170")[2].splitlines()[0]
    assert "━" in bars and "╸" not in bars  # the whole of it
    assert not re.search(r"38;5;197|249;38;114", terminal.file.getvalue())  # never in red
    early = Console(100, console=_terminal(), live=False)  # by evaluate.patience
    early.log(40, {"phase": "rl"})
    early.finished()
    assert early.total == 40
    resumed = Console(220, console=_terminal(), live=False, sft_steps=60)
    resumed.goes_on(100, 170)
    resumed.log(101, {"phase": "rl"})
    assert resumed.total == 170


def test_the_line_of_pairs_shows_their_accuracy_and_no_empty_times():
    plain = rich.console.Console(file=io.StringIO(), width=60, _environ={})
    console = Console(3, console=plain)
    times = {"time/generate_s": 0.0, "time/reward_s": 0.0, "time/learn_s": 3.0, "time/rest_s": 1.0}
    console.log(
        1,
        {
            "phase": "preference",
            "rewards/accuracies": 0.75,
            "rewards/margins": 1.5,
            "loss": 0.5,
            **times,
        },
    )
    line = plain.file.getvalue()
    assert "right pairs 0.75 | margin 1.5 | loss 0.5 | time learn 75% rest 25%" in line


def test_a_new_phase_starts_its_trends_anew():
    console = Console(10, console=_terminal(), live=False)
    console.log(1, {"phase_rl": 0, "loss": 3.0, "eval/accuracy": 0.1})
    console.log(2, {"phase_rl": 1, "loss": 0.01, "eval/accuracy": 0.2})
    assert list(console.history["loss"]) == [0.01]
    assert list(console.history["eval/accuracy"]) == [0.1, 0.2]


def test_one_line_keeps_both_ends():
    assert one_line("a\nb\tc", 10) == "a⏎b c"
    assert one_line("x" * 5000 + "END", 30).endswith("END")
    assert len(one_line("x" * 5000, 30)) == 30
    assert one_line(None, 5) == ""


def test_plain_console_prints_in_a_c_locale():
    code = "from rljax.tracking.console import Console; c = Console(1); "
    code += "c.log(1, {'\\xe9': 1.0}); c.close()"
    env = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = _run(code, env=env)
    assert done.returncode == 0 and "step 1/1" in done.stdout, done.stderr


def test_the_part_of_prompts_in_which_they_differ_is_shown():
    """A chat template writes the same around every question; a line has no room for it."""
    around = ("<|im_start|>system\nYou are a helpful assistant" * 3, "<|im_end|>\nassistant\n" * 3)
    asked = [f"What is {a} + {b}?" for a, b in ((24, 48), (9, 7), (24, 4))]
    shown = differing([question.join(around) for question in asked], 80)
    for question, line in zip(asked, shown, strict=True):
        assert question in line and len(line) <= 80 and line[0] == line[-1] == "…"
    # The question itself is long, or is the end or the beginning of the prompt.
    long = differing([around[0] + c * 200 + around[1] for c in "ab"], 40)
    assert long[0].startswith("…a") and "b" * 10 in long[1] and {*map(len, long)} == {40}
    for begin, end in ((around[0], ""), ("", around[1]), ("", "")):
        short = differing([begin + question + end for question in asked], 50)
        assert all(q in line for q, line in zip(asked, short, strict=True))
    same = differing(["a" * 99] * 2, 30)
    assert same == [one_line("a" * 99, 30)] * 2 and differing([None, "x\ny"], 9) == ["", "x⏎y"]
    one, other = differing(["ab" * 50, "ab" * 60], 20)  # one begins the other
    assert len(one) <= 20 and len(other) <= 20


def test_a_plain_console_shows_questions_of_a_chat():
    out = io.StringIO()
    console = Console(3, live=False, console=rich.console.Console(file=out, width=400))
    template = "<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\nuser\n{}<|im_end|>\n"
    texts = [template.format(f"What is {n} + 1? Reply with the number only.") for n in (71, 82)]
    console.samples(1, [{"prompt": text, "response": "3", "reward": 1.0} for text in texts])
    assert "What is 71 + 1?" in out.getvalue() and "What is 82 + 1?" in out.getvalue()
