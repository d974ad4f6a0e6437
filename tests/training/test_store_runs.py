"""Runs whose folder is a URL: bitwise those of a local folder, also when the store fails, a process
is killed at any put, and the run goes on elsewhere."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import brittle
import jax
import pytest
from brittle import FAULTS, Brittle
from on_hosts import host_environment
from processes import wait_until
from tiny_run import metrics_rows, policy_bytes, summary, tiny_config

from rljax.command.train import next_steps
from rljax.config.policy_options import EvaluateOptions
from rljax.errors import InputError
from rljax.evaluation.saved import evaluate_saved
from rljax.report.comparison import write_pages
from rljax.runs import mirror, store_lock
from rljax.runs import store as stores
from rljax.runs.folder import is_locked
from rljax.training import train

URL = "brittle://bucket/runs/one"
ONE = jax.devices()[:1]


@pytest.fixture(autouse=True)
def bucket(tmp_path, monkeypatch):
    monkeypatch.setenv("BRITTLE", str(tmp_path))
    monkeypatch.setattr(stores, "PAUSES_S", (0.0, 0.0, 0.0))
    yield tmp_path / "bucket/runs/one"
    FAULTS.update(dict.fromkeys(FAULTS, 0))


def config(run_dir, **fields):
    """Four steps of GRPO, a checkpoint after each."""
    few = dict(sft__steps=0, steps=4, checkpoint__every_steps=1, evaluate__every_steps=0)
    return tiny_config(run_dir, **{**few, **fields})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    train(config(folder), devices=ONE)
    return folder


def assert_same(one, other) -> None:
    """Metrics, samples, policy: of another store the checkpoints have other files."""
    assert metrics_rows(one) == metrics_rows(other)
    assert (one / "samples.jsonl").read_bytes() == (other / "samples.jsonl").read_bytes()
    assert policy_bytes(one) == policy_bytes(other) and len(policy_bytes(other)) > 3
    assert summary(one)["status"] == summary(other)["status"] == "finished"
    assert (one / "report.html").stat().st_size > 10_000


@pytest.mark.hosts
def test_a_run_under_a_url_is_that_of_a_folder_also_when_it_is_stopped(whole, bucket):
    brittle.configure("fail=5,truncate=7,fail_read=6,broken_step=3")
    said, before = [], scratch()
    with pytest.raises(InputError, match="checkpoint of step 3 could not be written.*of step 2"):
        train(config(URL), devices=ONE, on_start=said.append)
    assert said == [URL] and summary(bucket)["status"].startswith("the checkpoint of step 3")
    assert not (bucket / ".lock").exists() and scratch() == before
    FAULTS["broken_step"] = 0
    run = train(config(URL), devices=ONE)
    assert run.folder == URL and run.summary["status"] == "finished"
    assert_same(bucket, whole)
    assert len(run.metrics["step"]) == 4 and run.report == f"{URL}/report.html"
    assert run.policy == f"{URL}/policy" and not (bucket / ".lock").exists()
    assert sorted(p.name for p in (bucket / "checkpoints").iterdir()) == ["00000003", "00000004"]
    assert len((bucket / "starts.jsonl").read_text().splitlines()) == 2
    with pytest.raises(InputError, match=f"{URL} is a finished run: step 4"):
        train(config(URL), devices=ONE)
    read_from_the_url(bucket, whole)
    assert scratch() == before


def scratch() -> list[Path]:
    """The folders of this machine that runs under the URL have written."""
    return sorted(Path(tempfile.gettempdir()).glob("rljax-*/one"))


def read_from_the_url(bucket, whole) -> None:
    """Every command that reads a run folder."""
    (bucket / "report.html").unlink()
    assert write_pages([URL]) == f"{URL}/report.html" and (bucket / "report.html").exists()
    both = write_pages([URL, str(whole)], bucket / "both.html")
    assert "2 runs compared" in both.read_text()
    assert write_pages([URL.rpartition("/")[0]]) == f"{URL.rpartition('/')[0]}/comparison.html"
    data = dict(data="sort_digits(digits=5)", reward="sequence_match()", prompts=8)
    found = {
        place: evaluate_saved(EvaluateOptions(checkpoint=place, **data))["metrics"]
        for place in (URL, str(whole), f"{URL}/policy", f"{whole}/policy")
    }
    assert found[URL] == found[str(whole)]
    assert found[f"{URL}/policy"] == found[f"{whole}/policy"] != found[URL]  # longer responses
    lines = dict(line.split(":", 1) for line in next_steps(URL, None, True))
    assert lines["checkpoint"].strip() == f"{URL}/checkpoints/00000004"
    assert lines["evaluate"].strip() == f"rljax evaluate {URL}"


def test_a_store_without_rights_is_refused_before_anything_is_compiled(bucket, monkeypatch):
    FAULTS["forbidden"] = 1
    monkeypatch.setattr("rljax.training.loop.build", lambda *_: pytest.fail("it began"))
    with pytest.raises(InputError, match=r"run_dir cannot be written: got 'brittle://.*permission"):
        train(config(URL), devices=ONE)
    assert not bucket.exists()


def test_a_store_that_may_not_be_listed_is_refused_before_anything_is_compiled(monkeypatch):
    FAULTS["unlisted"] = 1
    monkeypatch.setattr("rljax.training.loop.build", lambda *_: pytest.fail("it began"))
    with pytest.raises(InputError, match="run_dir cannot be written.*listed.*right to read"):
        train(config(URL), devices=ONE)


# -- one run at a time --


def record(**changes) -> bytes:
    return json.dumps({**store_lock.describe_process(), "id": "a", "beat": 1, **changes}).encode()


def test_a_second_run_is_refused_and_a_dead_one_loses_the_lock(bucket, monkeypatch):
    monkeypatch.setattr(store_lock, "STALE_S", 1.0)
    monkeypatch.setattr(store_lock, "LOOK_S", 0.1)
    store = stores.Store(URL)
    with store_lock.StoreLock(store).held() as lock:
        assert mirror_says_running()
        with pytest.raises(InputError, match=f"another run writes into {URL}.*{os.getpid()}"):
            with store_lock.StoreLock(store).held():
                pass
        lock.check()
        store.put(".lock", record(id="b", host="other"))  # it was thought dead, and comes back
        with pytest.raises(InputError, match="another run writes.*on host other"):
            lock.check()
    assert store.exists(".lock")  # that of the other
    for dead in (record(pid=2**22 + 1), record(boot="elsewhere", time=0), record(boot="elsewhere")):
        store.put(".lock", dead)
        with store_lock.StoreLock(store).held() as lock:
            lock.check()
        assert not store.exists(".lock")


def test_a_run_of_another_machine_that_beats_is_not_disturbed(bucket, monkeypatch):
    monkeypatch.setattr(store_lock, "LOOK_S", 0.01)
    store, beats = stores.Store(URL), iter(range(2, 1000))
    read = store.read

    def beating(name):
        data = read(name)
        store.put(name, record(boot="elsewhere", beat=next(beats)))
        return data

    store.put(".lock", record(boot="elsewhere"))
    monkeypatch.setattr(store, "read", beating)
    with pytest.raises(InputError, match="another run writes into"):
        with store_lock.StoreLock(store).held():
            pass


class Beats:
    """An event that is set after so many waits."""

    def __init__(self, count: int):
        self.left = count

    def wait(self, _seconds: float) -> bool:
        self.left -= 1
        return self.left < 0


def test_a_lock_that_another_process_has_taken_is_left_to_it(bucket):
    store = stores.Store(URL)
    lock = store_lock.StoreLock(store)
    lock._beat()
    lock._go_on(Beats(3))
    assert json.loads(store.read(".lock"))["beat"] == 4
    store.put(".lock", record(id="b", host="other"))
    lock._go_on(Beats(3))
    assert json.loads(store.read(".lock"))["id"] == "b"


def mirror_says_running() -> bool:
    with mirror.local_copy(URL) as here:
        return is_locked(here)


# -- files --


def test_files_are_put_when_they_change_and_whole(bucket, tmp_path):
    here = tmp_path / "here"
    (here / "policy").mkdir(parents=True)
    kept = mirror.Mirror(stores.Store(URL), here)
    for name in ("metrics.jsonl", "report.html", ".hidden", "x.tmp", "policy/a", "policy/b"):
        (here / name).write_text(name)
    kept.put()
    there = {str(p.relative_to(bucket)) for p in bucket.rglob("*") if p.is_file()}
    assert there == {"metrics.jsonl", "report.html", "policy/a", "policy/b"}
    puts = Brittle.puts
    kept.put()
    assert Brittle.puts == puts
    with open(here / "metrics.jsonl", "a") as file:
        file.write("more")
    (here / "report.html").unlink()
    (here / "policy/b").unlink()
    kept.put()
    assert Brittle.puts == puts + 1 and (bucket / "metrics.jsonl").read_text().endswith("more")
    assert not (bucket / "report.html").exists() and not (bucket / "policy/b").exists()

    again = mirror.Mirror(stores.Store(URL), tmp_path / "again")  # a restart
    (tmp_path / "again").mkdir()
    again.fetch()
    assert [p.name for p in (tmp_path / "again").iterdir()] == ["metrics.jsonl"]
    again.put()
    assert (bucket / "policy/a").exists()  # a model is not fetched, and stays
    (tmp_path / "again/policy").mkdir()
    (tmp_path / "again/policy/c").write_text("another export")
    again.put()
    assert [p.name for p in (bucket / "policy").iterdir()] == ["c"]


def test_the_summary_and_then_the_report_are_put_last(bucket, tmp_path, monkeypatch):
    """Whoever sees them finds what they tell of."""
    kept, order = mirror.Mirror(stores.Store(URL), tmp_path), []
    (tmp_path / "policy").mkdir()
    names = ("report.html", "summary.json", "metrics.jsonl", "policy/weights", "timeline.json")
    for name in names:
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(kept, "_put", lambda name, _signature: order.append(name))
    kept.put()
    last = ["summary.json", "report.html"]
    assert order == ["metrics.jsonl", "policy/weights", "timeline.json", *last]


def test_every_minute_and_a_store_that_is_down_ends_nothing(bucket, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(mirror, "EVERY_S", 0.02)
    (tmp_path / "here").mkdir()
    with mirror.Mirror(stores.Store(URL), tmp_path / "here"):
        FAULTS["broken"] = 1
        (tmp_path / "here/metrics.jsonl").write_text("1")
        wait_until(lambda: "the files of the run are not put" in caplog.text, "a warning")
        FAULTS["broken"] = 0
        wait_until((bucket / "metrics.jsonl").exists, "the file")


def test_the_log_of_a_crash_is_appended_to_after_a_restart(bucket, tmp_path):
    store = stores.Store(URL)
    store.put("hosts/host-001.log", b"it crashed\n")
    store.put("hosts/host-010.log", b"of another\n")
    kept = mirror.Mirror(store, tmp_path / "here", ("hosts",))
    kept.fetch_from("hosts", "host-001.")
    assert [p.name for p in (tmp_path / "here/hosts").iterdir()] == ["host-001.log"]
    with open(tmp_path / "here/hosts/host-001.log", "a") as file:
        file.write("it began again\n")
    kept.put()
    assert (bucket / "hosts/host-001.log").read_text() == "it crashed\nit began again\n"
    assert (bucket / "hosts/host-010.log").exists()


# -- kills --

RUN = """
import brittle
from test_store_runs import ONE, URL, config
from rljax.training import train
from rljax.runs import store
store.PAUSES_S = (0.0, 0.0, 0.0)
train(config(URL), devices=ONE)
"""


@pytest.mark.hosts
def test_runs_killed_at_their_puts_end_as_if_nothing_had_happened(whole, bucket, tmp_path):
    env = {**host_environment(0, 1, 8, 0), "BRITTLE": str(tmp_path)}
    env["XLA_FLAGS"] = os.environ["XLA_FLAGS"]  # bitwise the run of this process
    env["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent)
    codes = []
    for put in (1, 3, 12, 17, 9, 14, 22, 0):
        faults = f"killed_after={put}" if put % 2 else f"kill={put}"
        done = subprocess.run(
            [sys.executable, "-c", RUN],
            env={**env, "BRITTLE_FAULTS": faults},
            capture_output=True,
            text=True,
            timeout=300,
        )
        codes.append(done.returncode)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert codes[-1] == 0 and len(codes) > 4, codes
    assert_same(bucket, whole)
