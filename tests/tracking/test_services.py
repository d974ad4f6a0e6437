"""Trackers by name: services, the user's own, what is the same in all of them, and one that hangs
or fails."""

import json
import logging
import os
import sqlite3
import sys
import textwrap
import threading
import time

import pytest

from rljax.config import Config
from rljax.errors import InputError
from rljax.runs.jsonl import read_jsonl
from rljax.tracking import trackers
from rljax.tracking.trackers import open_tracking

CONFIG = {"name": "toy", "sampler": {"temperature": 1.0}}
METRICS = {"reward/mean": 0.25, "eval/accuracy": 0.5, "time/learn_s": 2.0, "loss": -1.5}
SAMPLE = {"prompt": "1+1", "response": "2", "reward": 1.0, "status": "ok"}
OWN = """
import json, time
class MyTracker:
    def __init__(self, run_dir, config, *, project="none", wait_s=0.0, bad=False):
        if project == "no login":
            raise OSError("no route to host")
        self.file = open(run_dir / f"{project}.jsonl", "a")
        self.wait_s, self.bad = wait_s, bad
        self.file.write(json.dumps({"config": config["name"]}) + "\\n")
    def log(self, step, metrics):
        time.sleep(self.wait_s)
        if self.bad:
            raise RuntimeError("gone")
        self.file.write(json.dumps({"step": step, **metrics}) + "\\n")
    def samples(self, step, rows):
        self.file.write(json.dumps({"step": step, "samples": len(rows)}) + "\\n")
    def close(self):
        self.file.close()

def one_argument(run_dir):
    return MyTracker(run_dir, {})

class Mute(Exception):
    def __str__(self):
        raise ValueError

class Ends(MyTracker):
    # Ends by SystemExit, or by an error that cannot be printed.
    def __init__(self, run_dir, config, *, at_start=False, mute=False):
        super().__init__(run_dir, config)
        self.error = Mute() if mute else SystemExit("please log in")
        if at_start:
            raise self.error
    def log(self, step, metrics):
        raise self.error

def nothing(run_dir, config):
    pass

def no_close(run_dir, config):
    return type("Half", (), {"log": print, "samples": print})()

text = "no function"
"""


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    (tmp_path / "users_tracker.py").write_text(textwrap.dedent(OWN))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("users_tracker", None)


def run(folder, names, steps=(1,)):
    with open_tracking(names, folder, CONFIG) as tracking:
        for step in steps:
            tracking.log(step, METRICS)
        tracking.samples(steps[-1], [SAMPLE])
    return tracking


def test_a_tracker_of_the_users_own_by_its_dotted_name_and_options(tmp_path):
    text = "users_tracker.MyTracker(project='x')"
    tracking = run(tmp_path / "run", [text, "users_tracker.MyTracker"], (1, 2))
    rows = read_jsonl(tmp_path / "run" / "x.jsonl")
    assert rows[0] == {"config": "toy"} and [row.get("step") for row in rows[1:]] == [1, 2, 2]
    assert rows[1] == {"step": 1, **METRICS} and rows[3]["samples"] == 1
    assert (tmp_path / "run" / "none.jsonl").exists()  # two of them, with other options
    assert set(tracking.failures().values()) == {0}


@pytest.mark.parametrize(
    "text, words",
    [
        ("wandbb", "did you mean wandb"),
        ("users_tracker.MyTrackr", "did you mean 'MyTracker'"),
        ("users_tracker.MyTracker(projekt='x')", "did you mean 'project'"),
        ("users_tracker.text", "'text' is no function"),
        ("users_tracker.one_argument", "is made of"),
        ("wandb(project=3)", "must be str"),
    ],
)
def test_a_tracker_that_cannot_be_made_is_refused_with_the_config(text, words):
    from rljax.validation import validate  # imports the models: the other tests need none

    config = Config(model="decoder(layers=1)", trackers=("console", text))
    config.data.train = "sort_digits()"
    with pytest.raises(InputError, match="trackers=") as caught:
        validate(config)
    assert words in str(caught.value)


def test_one_that_does_not_start_ends_a_new_run_and_not_a_resumed_one(tmp_path, caplog):
    text = "users_tracker.MyTracker(project='no login')"
    with pytest.raises(InputError, match="no route to host"):
        run(tmp_path, [text])
    run(tmp_path, [])
    assert run(tmp_path, [text]).failures() == {"jsonl": 0}
    assert "does not start again" in caplog.text


def test_one_that_raises_costs_nothing_and_is_named_once(tmp_path, caplog):
    bad, good = "users_tracker.MyTracker(bad=True)", "users_tracker.MyTracker(project='y')"
    tracking = run(tmp_path, [bad, good], range(1, 9))
    assert tracking.failures() == {"jsonl": 0, bad: 3, good: 0}
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text for text in texts if "failed in" in text] == texts[:1] and "gone" in texts[0]
    assert [text for text in texts if "is off" in text] == texts[1:]
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 8
    assert len(read_jsonl(tmp_path / "y.jsonl")) == 10


@pytest.mark.parametrize("mute", [False, True])
def test_one_that_ends_its_thread_is_named_and_off_and_nobody_waits(tmp_path, caplog, mute):
    text = f"users_tracker.Ends(mute={mute})"
    assert run(tmp_path, [text], range(1, 9)).failures() == {"jsonl": 0, text: 3}
    said = "Mute" if mute else "SystemExit: please log in"
    assert said in caplog.text and "is off: 3 failures in a row" in caplog.text


@pytest.mark.parametrize(
    "text, words",
    [
        ("Ends(at_start=True)", "SystemExit: please log in"),
        ("Ends(at_start=True, mute=True)", "Mute"),
        ("nothing", "made a NoneType, which has no log, samples, close.*class or a function of"),
        ("no_close", "made a Half, which has no close"),
    ],
)
def test_what_makes_no_tracker_ends_a_new_run(tmp_path, text, words):
    with pytest.raises(InputError, match=f"does not start; .*{words}"):
        run(tmp_path, [f"users_tracker.{text}"])


def test_one_that_hangs_holds_no_step_up_and_is_named_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trackers, "HANG_S", 0.2)
    text = "users_tracker.MyTracker(wait_s=3600.0)"
    with open_tracking([text], tmp_path, CONFIG) as tracking:
        tracking.log(1, METRICS)
        time.sleep(0.3)
        for step in range(2, 200):
            tracking.log(step, METRICS)
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 199
    assert [r.getMessage() for r in caplog.records if "hangs" in r.getMessage()] == [
        f"tracker {text!r} hangs and is off; run goes on"
    ]
    left = [t for t in threading.enumerate() if t.name == f"tracker {text}"]
    assert left and all(t.daemon for t in left)  # the process can end


def test_one_that_hangs_as_it_starts_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "START_S", 0.1)
    (tmp_path / "users_tracker.py").write_text(
        "import time\ndef slow(run_dir, config): time.sleep(3600)\n"
    )
    with pytest.raises(InputError, match="has not started within 0.1 s"):
        run(tmp_path / "run", ["users_tracker.slow"])


# --- the services, for real, where they are installed ---


def _of_tensorboard(folder):
    from test_tracking import _events

    files = sorted((folder / "tensorboard").glob("events.*"))
    values = [v for file in files for event in _events(file) for v in event.summary.value]
    return {v.tag for v in values if v.WhichOneof("value") == "simple_value"}


def _of_wandb(folder):
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    data = b""
    for file in files:
        data += file.read_bytes()
    blocks = b"".join(data[at + 7 : at + 32768] for at in range(0, len(data), 32768))
    return {key for key in METRICS if key.encode() in blocks}


def _of_mlflow(folder):
    import mlflow

    run_id = (folder / "mlflow_id.txt").read_text().strip()
    return set(mlflow.MlflowClient().get_run(run_id).data.metrics)


def _of_swanlab(folder):
    data = b"".join(file.read_bytes() for file in folder.glob("swanlog/run-*/run-*.swanlab"))
    return {key for key in METRICS if key.encode() in data}


def _of_trackio(folder):
    name = (folder / "trackio_id.txt").read_text().strip()
    (file,) = (folder.parent / "trackio").glob("*.db")
    with sqlite3.connect(file) as base:
        rows = base.execute("select metrics from metrics where run_name = ?", (name,)).fetchall()
    return {key for (text,) in rows for key in json.loads(text)}


READERS = {
    "tensorboard": ("tensorboardX", _of_tensorboard),
    "wandb": ("wandb", _of_wandb),
    "mlflow": ("mlflow", _of_mlflow),
    "swanlab": ("swanlab", _of_swanlab),
    "trackio": ("trackio", _of_trackio),
}


@pytest.fixture
def offline(tmp_path, monkeypatch):
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "SWANLAB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"file://{tmp_path}/mlflow",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }.items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
def test_all_services_have_the_same_keys_and_one_run_after_a_restart(tmp_path, offline):
    installed = {}
    for name, (package, reader) in READERS.items():
        try:
            __import__(package)
            installed[name] = reader
        except ImportError:
            pass
    assert installed
    folder = tmp_path / "run"
    ids = []
    for steps in ((1, 2), (3,)):
        tracking = run(folder, ["users_tracker.MyTracker", *installed], steps)
        assert set(tracking.failures().values()) == {0}, tracking.failures()
        ids.append({p.name: p.read_text() for p in folder.glob("*_id.txt")})
    assert ids[0] == ids[1] and len(ids[0]) == len(set(installed) - {"tensorboard"})
    local = [row for row in read_jsonl(folder / "metrics.jsonl")]
    assert all(set(row) == {"step", *METRICS} for row in local)
    end = time.monotonic() + 60  # wandb's own process may write after `finish`
    for name, reader in installed.items():
        while not set(METRICS) <= reader(folder) and time.monotonic() < end:
            time.sleep(0.2)
        assert set(METRICS) <= reader(folder), name


def test_a_host_that_is_not_the_first_speaks_to_no_tracker(tmp_path):
    silent = trackers.Silent()
    silent.log(1, METRICS)
    silent.samples(1, [SAMPLE])
    silent.close()
    assert os.listdir(tmp_path) == ["users_tracker.py"] and silent.failures() == {}
