"""A run that was stopped anywhere and resumed is bitwise the run that was never stopped.

Runs in this process share their compiled programs; kills need processes of their own.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import lanes
from processes import alive, children, wait_until
from test_checkpoint import with_hash
from tiny_offline import offline_config
from tiny_run import (
    REPO,
    assert_same_run,
    metrics_rows,
    newest_step,
    summary,
    tiny_config,
    train_on_one,
)
from tiny_tokenizer import QWEN_LIKE, write_tokenizer

from rljax.checkpoint.checkpoint import Checkpoints, reads_steps
from rljax.config import to_dict
from rljax.config.policy_options import EvaluateOptions
from rljax.errors import InputError
from rljax.evaluation.saved import evaluate_saved
from rljax.policies import load_policy
from rljax.report.starts import run_date
from rljax.runs.folder import FILES, FOLDERS, LOCK, locked
from rljax.training import RunStopped
from rljax.training import train as train_on_all

# A signal is sent from inside the reward, so that it arrives in the middle of a known step.
PARTS = '''
import os, shutil, time
from pathlib import Path
from rljax.rewards import sequence_match

HERE = Path(__file__).parent
calls = 0

def score(response, ground_truth):
    """Sends the signal that the file `plan` names at the call that it names, or removes the path
    that it names, once."""
    global calls
    calls += 1
    if (HERE / "plan").exists():
        number, at = (HERE / "plan").read_text().split()
        if calls == int(at):
            (HERE / "plan").unlink()
            if os.path.isdir(number):
                while len(os.listdir(HERE / number / "checkpoints")) > 2:  # a save that goes on
                    time.sleep(0.01)
                shutil.rmtree(number)
            elif not number.isdecimal():
                os.unlink(number)
            else:
                os.kill(os.getppid(), int(number))
    return sequence_match(response, ground_truth, partial=0.5)
'''
# In a module of its own: what imports tasks imports JAX, which would take every worker seconds.
DATA = '''
import dataclasses
from pathlib import Path
from rljax import tasks

HERE = Path(__file__).parent

def digits():
    """Data that can change without the config: the file `seed` decides, `short` makes it fewer."""
    text = (HERE / "seed").read_text()
    task = tasks.sort_digits(digits=5, prompts=600, test=16, seed=int(text.strip("-")))
    return dataclasses.replace(task, train=task.train[:500]) if "-" in text else task
'''
EVALUATION = 16  # calls of the reward in an evaluation, and in a step


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """The folder of `resume_parts`, a reward that can kill, and `resume_data`, which can change."""
    folder = tmp_path_factory.mktemp("parts")
    (folder / "resume_parts.py").write_text(PARTS)
    (folder / "resume_data.py").write_text(DATA)
    (folder / "seed").write_text("1")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


# One learning program serves every run here, that whose accuracy must move included.
FIELDS = {
    "reward.function": "resume_parts.score",
    "data.train": "resume_data.digits",
    "model": "decoder(layers=1, embed=96, mlp=288, heads=3, kv_heads=3, head_dim=32)",
    "evaluate.correct_at": 0.1,
    "actor_optimizer.lr": 5e-3,
}
DEVICES = 2  # what is resumed is sharded


def configured(run_dir, **fields):
    ours = {name.replace(".", "__"): value for name, value in FIELDS.items()}
    return tiny_config(run_dir, **{**ours, **fields})


def train(config):
    return train_on_all(config, devices=jax.devices()[:DEVICES])


def plan(parts: Path, what: signal.Signals | Path, calls: int) -> None:
    what = int(what) if isinstance(what, signal.Signals) else what
    (parts / "plan").write_text(f"{what} {calls}")


def stopped(config) -> RunStopped:
    """Returns what `train` raises where a signal stops the run."""
    with pytest.raises(RunStopped) as stop:
        train(config)
    return stop.value


@pytest.fixture(scope="module")
def whole(parts, tmp_path_factory):
    """The run that nothing stops: 6 supervised steps, 6 of GRPO; checkpoints of 10 and 12 kept."""
    folder = tmp_path_factory.mktemp("whole")
    train(configured(folder))
    return folder


@pytest.fixture(scope="module")
def halfway(parts, whole, tmp_path_factory):
    """The same run stopped by SIGTERM in a step after which no checkpoint was due."""
    folder = tmp_path_factory.mktemp("halfway")
    plan(parts, signal.SIGTERM, EVALUATION + 8)
    found = stopped(configured(folder)).run.summary
    assert found["status"] == "stopped by SIGTERM at step 7, saved at step 7"
    return folder


@pytest.fixture
def half(halfway, tmp_path):
    """A copy of the stopped run, to go on with."""
    return shutil.copytree(halfway, tmp_path / "half")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "policy/model.safetensors"])
def test_the_comparison_sees_one_changed_digit(whole, tmp_path, name):
    folder = shutil.copytree(whole, tmp_path / "copy")
    assert_same_run(folder, whole)
    data = bytearray((folder / name).read_bytes())
    place = (
        data.index(b'"reward') + len(b'"reward": 0') if name.endswith("jsonl") else len(data) - 9
    )
    data[data.index(b"0", place) if name.endswith("jsonl") else place] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(AssertionError):
        assert_same_run(folder, whole)


@pytest.mark.slow
def test_every_name_in_a_run_folder_is_one_that_is_looked_at_before_a_run(whole):
    assert {path.name for path in whole.iterdir()} <= {*FILES, *FOLDERS}


# -- SIGTERM --


@pytest.mark.slow
def test_sigterm_in_mid_step_saves_that_step_and_the_resumed_run_is_the_same(half, whole, parts):
    assert newest_step(half) == 7 and len(metrics_rows(half)) == 7
    assert summary(half)["status"] == "stopped by SIGTERM at step 7, saved at step 7"
    assert not (half / "policy").exists()  # what is exported is final
    before = summary(half)["accuracy_before"]
    assert before["n"] == 16 and summary(half)["accuracy_after"] is None
    plan(parts, signal.SIGINT, 16 + EVALUATION + 8)  # step 8, and in step 9
    stop = stopped(configured(half))
    assert stop.signal == "SIGINT" and stop.code == 3
    assert stop.run.summary["steps"] == 9 == newest_step(half)
    found = train(configured(half)).summary
    assert found["status"] == "finished"
    assert found["accuracy_before"] == before != found["accuracy_after"]
    assert found["last_evaluation"]["step"] == 12 and found["difference"]["n"] == 16
    assert_same_run(half, whole)


@pytest.mark.slow
def test_sigterm_in_the_last_step_ends_a_finished_run(half, whole, parts):
    plan(parts, signal.SIGTERM, 16 * 4 + EVALUATION * 2 + 8)  # steps 8 to 11, and in step 12
    late = stopped(configured(half))  # a script does not begin what comes next
    assert str(late) == "finished, when SIGTERM had arrived" and late.code == 3
    assert late.run.summary["status"] == "finished" and late.run.policy == half / "policy"
    assert_same_run(half, whole)


def test_sigterm_before_the_first_step_trains_nothing(parts, tmp_path):
    plan(parts, signal.SIGTERM, 8)  # in the evaluation before the first step
    found = stopped(configured(tmp_path, sft__steps=0)).run.summary
    assert found["status"] == "stopped by SIGTERM at step 0, before the first checkpoint"
    assert metrics_rows(tmp_path) == [] and not any((tmp_path / "checkpoints").iterdir())


@pytest.mark.slow
def test_the_accuracy_after_is_of_the_policy_at_the_end(parts, tmp_path):
    """A stopped run has none; the resumed one has that of a fresh evaluation, also where fewer
    steps make the step at which it stopped the last one."""
    fields = dict(evaluate__every_steps=0)
    plan(parts, signal.SIGTERM, EVALUATION + 3 * 16 - 8)  # in step 9, the third after SFT
    found = stopped(configured(tmp_path / "one", **fields)).run.summary
    before = found["accuracy_before"]
    assert found["rl_steps"] == 3 and before["n"] == 16
    assert found["accuracy_after"] is None and "difference" not in found
    assert found["last_evaluation"] == {"step": 6, "accuracy": before, "eval": None}
    assert {"lora.alpha", "algorithm.preference_loss", "critic_optimizer.lr"} <= {*found["unread"]}
    assert not {"actor_optimizer.lr", "algorithm.policy_loss", "steps"} & {*found["unread"]}
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    for name, steps in (("one", 3), ("other", 5)):
        run = train(configured(tmp_path / name, **fields, steps=steps))
        assert run.summary["status"] == "finished" and run.summary["rl_steps"] == steps
        fresh = evaluate_saved(EvaluateOptions(str(run.folder), samples=0, trust_code=True))[
            "metrics"
        ]
        assert (
            run.summary["accuracy_after"]
            == fresh["greedy_accuracy"]
            == summary(run.folder)["accuracy_after"]
        )
        assert run.summary["accuracy_before"] == before != run.summary["accuracy_after"]
        assert run.summary["last_evaluation"]["step"] == 6 + steps == run.summary["steps"]
        assert run.summary["difference"]["n"] == 16
        evaluated = [row["step"] for row in metrics_rows(run.folder) if "eval/accuracy" in row]
        assert evaluated == [6, 6 + steps]


@pytest.mark.slow
def test_sigterm_in_the_supervised_phase(parts, whole, tmp_path):
    plan(parts, signal.SIGTERM, EVALUATION - 8)  # the evaluation between the phases
    stop = stopped(configured(tmp_path))
    assert stop.run.summary["status"].endswith("saved at step 6") and stop.signal == "SIGTERM"
    train(configured(tmp_path))
    assert_same_run(tmp_path, whole)


# -- what a resume refuses, and what it lets through --


@pytest.mark.slow
def test_a_finished_run_is_refused_and_left_as_it_is(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "copy")
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(InputError, match="is a finished run: step 12, nothing left to train"):
        train(configured(folder))
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    shutil.rmtree(folder / "checkpoints")  # to save room
    before = {p: data for p, data in before.items() if "checkpoints" not in p.parts}
    with pytest.raises(InputError, match="holds a finished run, and no checkpoint"):
        train(configured(folder))
    after = {p: p.read_bytes() for p in before}
    assert after == before


@pytest.mark.slow
def test_a_finished_run_goes_on_with_more_steps(whole, tmp_path):
    """Its learning rate does not depend on their number: the first twelve are those of a longer
    run. Another schedule would be spread over them."""
    folder = shutil.copytree(whole, tmp_path / "copy")
    run = train(configured(folder, steps=8))
    assert (run.summary["status"], run.summary["rl_steps"]) == ("finished", 8)
    # Step 12 was the last one of the shorter run, and so was evaluated there too.
    assert metrics_rows(folder)[:12] == metrics_rows(whole) and len(metrics_rows(folder)) == 14
    # What train returns is the run.
    assert run.folder == folder and run.summary == summary(folder)
    assert run.metrics["step"].tolist() == list(range(1, 15))
    assert np.isnan(run.metrics["reward/mean"]).sum() == 6  # the supervised steps have none
    assert run.report.read_text().startswith("<!doctype html>")
    assert load_policy(run.policy).model.config.embed == 96


@pytest.mark.parametrize(
    ("fields", "spread"),
    [
        ({}, False),
        ({"actor_optimizer__schedule": "linear(final=0.1)"}, True),
        ({"critic_optimizer__schedule": "rljax.learn.schedules.cosine()"}, True),
        ({"sft__optimizer__schedule": "linear"}, False),  # over sft.steps
        ({"data__final_weights": (1.0,)}, True),
        ({"evaluate__patience": 2}, True),
        ({"roles": ("other=my_roles.trained()",)}, True),
    ],
)
def test_what_is_spread_over_the_number_of_steps(fields, spread, tmp_path):
    assert reads_steps(configured(tmp_path, **fields)) == spread


@pytest.mark.slow
def test_a_run_killed_after_its_last_step_is_wrapped_up_by_a_resume(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "copy")
    shutil.rmtree(folder / "policy")
    (folder / "summary.json").unlink()
    (folder / "report.html").unlink()
    assert train(configured(folder)).summary["status"] == "finished"
    assert_same_run(folder, whole)
    (folder / "report.html").unlink()  # the last file to be written
    assert train(configured(folder)).summary["status"] == "finished"
    with pytest.raises(InputError, match="is a finished run"):
        train(configured(folder))


@pytest.mark.slow
def test_a_finished_run_makes_an_export_that_is_asked_for_later(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "copy")
    shutil.rmtree(folder / "policy")
    recorded = summary(folder)
    assert recorded["exported"] == {"policy": 12}
    (folder / "summary.json").write_text(json.dumps({**recorded, "exported": {}}))
    assert train(configured(folder)).summary["exported"] == {"policy": 12}
    assert_same_run(folder, whole)
    with pytest.raises(InputError, match="is a finished run"):
        train(configured(folder))


@pytest.mark.slow
def test_another_config_is_refused_by_name_and_changes_nothing(half):
    before = {p: p.read_bytes() for p in half.rglob("*") if p.is_file()}
    changes = {"actor_optimizer__lr": 0.2, "sampler__temperature": 0.9}
    for allowed in ((), ("sampler.temperature",)):
        with pytest.raises(InputError, match="actor_optimizer.lr") as error:
            train(configured(half, **changes, checkpoint__allow_changed=allowed))
        assert ("sampler.temperature" in str(error.value).partition(";")[0]) == (not allowed)
        assert {p: p.read_bytes() for p in half.rglob("*") if p.is_file()} == before


@pytest.mark.slow
def test_another_config_is_let_through_by_name(half, whole):
    change = {"evaluate__every_steps": 3, "checkpoint__allow_changed": ("evaluate.every_steps",)}
    assert train(configured(half, **change)).summary["status"] == "finished"
    rows, expected = metrics_rows(half), metrics_rows(whole)
    assert rows[:7] == expected[:7] and len(rows) == 12
    assert [r["step"] for r in rows[7:] if "eval/accuracy" in r] == [9, 12]
    assert json.loads((half / "config.json").read_text())["evaluate"]["every_steps"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["2", "1-"], ids=["other", "fewer"])
def test_other_data_is_refused_and_let_through_by_name(half, whole, parts, seed):
    (parts / "seed").write_text(seed)
    try:
        with pytest.raises(InputError, match=r"got \['data'\].*allow_changed.*'data'"):
            train(configured(half))
        found = train(configured(half, checkpoint__allow_changed=("data",))).summary
    finally:
        (parts / "seed").write_text("1")
    assert (found["status"], found["steps"]) == ("finished", 12)
    assert metrics_rows(half)[:7] == metrics_rows(whole)[:7]
    assert metrics_rows(half)[7] != metrics_rows(whole)[7]


@pytest.mark.slow
def test_a_change_that_the_arrays_do_not_fit_is_refused_although_allowed(half):
    model = "decoder(layers=1, embed=64, mlp=288, heads=3, kv_heads=3, head_dim=32, init_std=0.05)"
    with pytest.raises(InputError, match="arrays does not fit the model and optimizer"):
        train(configured(half, model=model, checkpoint__allow_changed=("model",)))


def test_a_folder_that_another_run_writes_is_refused_and_left_alone(half):
    (half / "checkpoints" / ".00000008").mkdir()  # its save in progress
    before = {p: p.lstat().st_mtime_ns for p in half.rglob("*")}
    with locked(half):
        with pytest.raises(InputError, match=f"another run writes into .*process {os.getpid()} on"):
            train(configured(half))
    assert {p: p.lstat().st_mtime_ns for p in half.rglob("*")} == before


# -- damage --


def test_a_resume_from_the_one_before_a_damaged_one_ends_equal(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "copy")
    damaged = folder / "checkpoints" / "00000012" / "state.json"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with pytest.warns(UserWarning, match=f"step 12 is damaged: {damaged}"):
        assert train(configured(folder)).summary["status"] == "finished"
    assert_same_run(folder, whole)


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_anew(half):
    for state in half.glob("checkpoints/*/state.json"):
        state.write_text("{")
    before = (half / "metrics.jsonl").read_bytes()
    with pytest.warns(UserWarning, match="damaged"):
        with pytest.raises(InputError, match="checkpoints are damaged"):
            train(configured(half))
    assert (half / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    lanes(
        [("fingerprints",), ("sources", "rl", "position")],
        [("offsets",), ("progress", "taken", "sft"), ("sources", "sft"), ("progress",)],
    ),
)
def test_a_state_without_a_part_or_with_another_in_its_place_is_one_error(half, path):
    """Although every hash is right."""
    for value in (None, "x"):
        for folder in (half / "checkpoints").iterdir():
            state = json.loads((folder / "state.json").read_text())
            part = state
            for name in path[:-1]:
                part = part[name]
            part.pop(path[-1], None)
            part |= {path[-1]: value} if value else {}
            with_hash(folder, state=json.dumps(state).encode())
        with warnings.catch_warnings(), pytest.raises(InputError):
            warnings.simplefilter("ignore")
            train(configured(half))


# -- disks --


@contextlib.contextmanager
def file_sizes_up_to(limit: int):
    """No file of this process can grow past `limit` bytes: to a writer this is a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_save_that_fails_is_one_line_and_costs_what_came_after_the_last_one(half, whole, capfd):
    before = {p: p.read_bytes() for p in half.glob("*/*") if p.is_file()}
    with file_sizes_up_to(280_000), pytest.raises(InputError) as error:
        train(configured(half))
    said = str(error.value)
    assert said.startswith("the checkpoint of step 8 could not be written: got ")
    assert "File too large; " in said and " free there" in said and "step 7" in said
    assert error.value.__context__ is None and "Traceback" not in capfd.readouterr().err
    assert newest_step(half) == 7 and not hidden(half)
    assert {p: p.read_bytes() for p in half.glob("*/*") if p.is_file()} == before
    # Summary and report tell of it; the model is that of the step that could still be exported.
    # A save is written beside the steps that follow: the run ends when it is seen to have failed.
    assert summary(half)["status"].startswith(said) and 8 <= summary(half)["steps"] <= 10
    assert "the exported model could not be written" in summary(half)["status"]
    assert (half / "report.html").stat().st_size > 1000
    assert train(configured(half)).summary["status"] == "finished"
    assert_same_run(half, whole)


@pytest.mark.slow
def test_an_export_that_fails_costs_neither_summary_nor_report(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "copy")
    shutil.rmtree(folder / "policy")
    (folder / "report.html").unlink()
    (folder / "policy" / ".model.safetensors.saving").mkdir(parents=True)
    found = train(configured(folder)).summary
    assert found["status"].startswith("finished; the exported model could not be written: got ")
    assert summary(folder)["status"] == found["status"] and (folder / "report.html").exists()
    assert not (folder / "policy").exists()
    assert train(configured(folder)).summary["status"] == "finished"
    assert_same_run(folder, whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", lanes(["metrics.jsonl", ""], ["samples.jsonl", "config.json"]))
def test_a_run_that_loses_its_files_does_not_end_well(half, whole, parts, name):
    plan(parts, half / name, 16 + EVALUATION + 8)  # after step 8
    if not name:
        with pytest.raises(InputError, match="checkpoint of step 10.*No such file"):
            train(configured(half))
        assert not half.exists()
        return
    status = train(configured(half)).summary["status"]
    assert (half / name).exists()
    if name == "config.json":
        assert status == "finished" and json.loads((half / name).read_text())["steps"] == 6
        return
    assert status == f"finished; {half / name} was removed or replaced while it was written"
    assert newest_step(half) == 12
    if name == "metrics.jsonl":
        assert metrics_rows(half) == metrics_rows(whole)[8:]


def test_a_disk_without_room_for_two_checkpoints_is_refused_at_the_start(whole, tmp_path):
    checkpoints = Checkpoints(shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints"))
    there = sum(p.stat().st_size for p in checkpoints.folder.rglob("*") if p.is_file())
    free = shutil.disk_usage(tmp_path).free
    checkpoints.check_room(free // 3)
    checkpoints.check_room((free + there // 2) // 2)  # what is there makes room
    for needed in (free // 2 + there, free * 2):
        with pytest.raises(InputError, match=r"no room for the checkpoints .* GB free in .*takes"):
            checkpoints.check_room(needed)


# -- kill -9 --


def environment() -> dict:
    """As many devices as runs of this process have, so that runs of both can be compared."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", f"device_count={DEVICES}")
    others = {"PYTHONPATH": str(REPO), "PYTHONWARNINGS": "default", "XLA_FLAGS": flags}
    return {**os.environ, **others}


def command(config: str, run_dir: Path, *flags: str) -> list[str]:
    launcher = [sys.executable, str(REPO / "launchers" / "train.py")]
    where = [f"--config={REPO}/{config}", f"--config.run_dir={run_dir}"]
    cache = "--config.compilation_cache=~/.cache/rljax/tests"
    return [*launcher, *where, cache, "--config.trackers=()", *flags]


class Launched:
    """A launcher in a process of its own, which a test kills or waits for."""

    def __init__(self, arguments: list[str], folder: Path):
        self.log = folder / "log.txt"
        with self.log.open("ab") as log:
            options = {"stdout": log, "stderr": log, "env": environment(), "cwd": folder}
            self.process = subprocess.Popen(arguments, **options)

    def ended(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        """SIGKILL; the reward workers must notice by themselves."""
        workers = children(self.process.pid)
        self.process.kill()
        self.process.wait()
        wait_until(lambda: not any(map(alive, workers)), "the end of the reward workers")

    def wait(self, seconds: float = 300.0) -> int:
        code = self.process.wait(seconds)
        assert b"Traceback" not in self.log.read_bytes(), self.log.read_text()[-3000:]
        return code


def wait_for(launched: Launched, condition, what: str, seconds: float = 300.0) -> bool:
    """True once the condition holds, False if the process ended first."""
    deadline = time.monotonic() + seconds
    while not condition():
        if launched.ended():
            return False
        assert time.monotonic() < deadline, f"waited {seconds} s for: {what}"
        time.sleep(0.0005)
    return True


def lines(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def hidden(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob(".0*"))


PARTS_FLAGS = tuple(f"--config.{name}={value}" for name, value in FIELDS.items())


@pytest.mark.slow
def test_kills_in_the_reward_in_the_start_and_in_a_save(parts, tmp_path):
    killed, plain = tmp_path / "killed", tmp_path / "plain"

    def start(folder=killed) -> Launched:
        return Launched(command("tests/helpers/tiny_run.py", folder, *PARTS_FLAGS), parts)

    # A process of two devices rounds otherwise than one that runs on two of eight.
    assert start(plain).wait() == 0
    plan(parts, signal.SIGKILL, EVALUATION + 16 + 8)  # in the reward of step 8
    assert start().wait() == -signal.SIGKILL
    assert newest_step(killed) == 6 and lines(killed) == 7

    launched = start()
    time.sleep(random.Random(0).uniform(3, 6))  # in the imports, the restore or a compile
    launched.kill()

    launched = start()  # in the save of step 8, or of a later one
    lock = killed / LOCK  # of whoever writes into the folder, by its process
    assert wait_for(launched, lambda: str(launched.process.pid) in lock.read_text(), "the lock")
    launched.process.send_signal(signal.SIGSTOP)  # it must not end before the other looks
    second = start()
    assert second.wait() == 2 and f"process {launched.process.pid} on" in second.log.read_text()
    launched.process.send_signal(signal.SIGCONT)
    assert wait_for(launched, lambda: hidden(killed), "a save")
    launched.kill()
    assert hidden(killed) and newest_step(killed) < 12

    assert start().wait() == 0
    assert_same_run(killed, plain)
    launched = start()
    assert launched.wait() == 2  # nothing left to train is no success
    assert "is a finished run" in launched.log.read_text()


@pytest.mark.slow
def test_a_launcher_on_a_disk_that_becomes_full(tmp_path):
    """A small tmpfs in a mount namespace: room for two checkpoints, but not for all of keep=9."""
    (tmp_path / "disk").mkdir()
    mount = f"mount -t tmpfs -o size=12m none {tmp_path / 'disk'}"
    inside = ["unshare", "-rm", "sh", "-c"]
    if subprocess.run([*inside, mount], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    run_dir, keep = tmp_path / "disk" / "run", "--config.checkpoint.keep=9"
    train = shlex.join(command("tests/helpers/tiny_run.py", run_dir, keep))
    both = f"{mount} && {train}; code=$?; cp -r {tmp_path}/disk/run {tmp_path}/kept; exit $code"
    launched = Launched([*inside, both], tmp_path)
    assert launched.wait() == 2
    said = launched.log.read_text()
    # At once, as the save is in the background, and as what ends the run.
    assert said.count(" is not saved: ") == said.count("\nerror: ") == 1
    assert said.count("No space left on device") == 2
    assert said.replace("MB", "kB").count("kB free there") == 2
    kept = tmp_path / "kept"
    step = newest_step(kept)
    assert f"goes on from that of step {step}" in said and not hidden(kept)
    assert "No space left on device" in summary(kept)["status"]
    assert step + 2 <= lines(kept) <= step + 4  # at the latest where the next save begins
    assert Checkpoints(kept / "checkpoints").latest() == step


@pytest.mark.slow
def test_ten_kills_and_a_sigterm_of_the_quickstart(tmp_path):
    """Moments drawn uniformly over the run; every third one is moved into the next save."""
    whole, killed, rng = tmp_path / "whole", tmp_path / "killed", random.Random(20)

    def start(run_dir: Path) -> Launched:
        flag = "--config.checkpoint.every_steps=5"
        return Launched(command("configs/quickstart.py", run_dir, flag), tmp_path)

    assert start(whole).wait(3000) == 0
    found = summary(whole)
    moments = sorted(rng.uniform(0, found["steps"] - 6) for _ in range(11))
    for number, moment in enumerate(moments):
        launched, at = start(killed), int(moment)
        assert wait_for(launched, lambda at=at: lines(killed) >= at, f"step {at}", 1500)
        time.sleep(moment % 1 * found["step_s"])
        if number == 5:
            launched.process.send_signal(signal.SIGTERM)
            assert launched.wait(30) == 3  # in 30 s, all in all
            step = newest_step(killed)
            status = f"stopped by SIGTERM at step {step}, saved at step {step}"
            assert summary(killed)["status"] == status and lines(killed) == step
            assert status in launched.log.read_text()
            continue
        if number % 3 == 1:
            assert wait_for(launched, lambda: hidden(killed), "a save", 1500)
        launched.kill()
        assert launched.process.returncode == -signal.SIGKILL
    assert start(killed).wait(3000) == 0
    assert_same_run(killed, whole)


@pytest.mark.parametrize("dataflow", lanes([], ["grpo", "reinforce(decay=0.5)"]))
def test_what_outlives_a_step_is_resumed(parts, tmp_path, dataflow):
    """Pass rates and positions of a mixture, rounds of sampling, the KL scale, a running mean."""
    fields = {
        "dataflow": dataflow,
        "data__sources": ("sort_digits(digits=4, prompts=14, test=6, worked_examples=8)",),
        "data__weights": (0.3, 0.7),
        "data__retire_at_pass_rate": 0.01,
        "evaluate__correct_at": 0.4,
        "algorithm__kl_in_loss": 0.05,
        "algorithm__kl_target": 0.01,
        "algorithm__kl_horizon": 50.0,
        "steps": 8,
    }
    if dataflow == "grpo":
        fields["algorithm__collect"] = "active(refill=0.5, max_rounds=3)"
    else:
        fields["algorithm__advantage"] = "reinforce()"
    train(configured(tmp_path / "whole", **fields))
    plan(parts, signal.SIGTERM, EVALUATION + 40)
    assert stopped(configured(tmp_path / "half", **fields)).signal == "SIGTERM"
    train(configured(tmp_path / "half", **fields))
    assert_same_run(tmp_path / "half", tmp_path / "whole")
    last = metrics_rows(tmp_path / "whole")[-1]
    assert last["kl_controller/scale"] != 1 and "data/retired_prompts" in last
    chances = {k: v for k, v in last.items() if k.startswith("data/chance/")}
    assert sorted(chances.values()) == pytest.approx([0.3, 0.7])
    if dataflow == "grpo":
        assert last["collect/rounds"] >= 1
    else:
        assert last["baseline"] > 0


def test_a_resumed_run_writes_the_date_of_its_first_start(tmp_path):
    dated = "{{ strftime_now('%d %b %Y') }}\n" + QWEN_LIKE
    write_tokenizer(tmp_path / "tokenizer", dated)
    config = offline_config(tmp_path, "examples", "sft", "run", steps=1, data__test="")
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows_path = tmp_path / "rows.jsonl"
    rows_path.write_text((json.dumps({"messages": turns}) + "\n") * 20)
    config.data.train, config.checkpoint.allow_changed = str(rows_path), ("steps",)
    train_on_one(config)
    starts_path = tmp_path / "run" / "starts.jsonl"
    start = json.loads(starts_path.read_text())
    first_date = datetime.datetime.fromisoformat(start["chat_date"])
    assert abs(time.time() - first_date.timestamp()) < 600
    start["chat_date"] = "2020-02-03T00:00:00"  # as if it had begun then
    starts_path.write_text(json.dumps(start) + "\n")
    train_on_one(dataclasses.replace(config, steps=2))
    assert json.loads(starts_path.read_text().splitlines()[1])["chat_date"] == start["chat_date"]
    assert "03 Feb 2020" in (tmp_path / "run" / "data.json").read_text()
    date = datetime.datetime(2020, 2, 3)
    assert load_policy(tmp_path / "run").tokenizer.now == date
    assert load_policy(tmp_path / "run", today=True).tokenizer.now > date


def test_a_base_of_another_config_is_noticed_by_a_resume_and_a_load(tmp_path, caplog):
    """config.json decides what the weights compute: model.json has that of the first start."""
    fields = dict(steps=1, data__test="")
    train_on_one(offline_config(tmp_path, "examples", "sft", "base", export=True, **fields))
    config = offline_config(tmp_path, "examples", "sft", "run", **fields)
    config.model, config.tokenizer = str(tmp_path / "base" / "policy"), ""
    config.checkpoint.allow_changed = ("steps",)
    train_on_one(config)
    path = tmp_path / "base" / "policy" / "config.json"
    first = path.read_text()
    path.write_text(json.dumps(json.loads(first) | {"transformers_version": "9"}))
    load_policy(tmp_path / "run")  # the same model
    path.write_text(json.dumps(json.loads(first) | {"rms_norm_eps": 0.5}))
    longer = dataclasses.replace(config, steps=2)
    with pytest.raises(
        InputError, match="another model.*rms_norm_eps=0.5, which was 1e-06.*'model'"
    ):
        train_on_one(longer)
    assert "rms_norm_eps" not in caplog.text
    load_policy(tmp_path / "run")
    assert caplog.text.count("rms_norm_eps=0.5") == 1
    longer.checkpoint.allow_changed = ("steps", "model")
    train_on_one(longer)
    assert caplog.text.count("rms_norm_eps=0.5") == 2
    record = tmp_path / "run" / "model.json"
    written_before = {k: v for k, v in json.loads(record.read_text()).items() if k != "configs"}
    record.write_text(json.dumps(written_before))
    load_policy(tmp_path / "run")
    assert caplog.text.count("rms_norm_eps=0.5") == 2


@pytest.mark.parametrize("name", ["base", "./base", "/nowhere/base"])
def test_a_run_whose_model_folder_is_not_there_is_opened_by_none(tmp_path, name):
    """A bare word may be a built-in model, too."""
    config = offline_config(tmp_path, "examples", "sft", "run", model=name, tokenizer="")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_dict(config)))
    (folder / "starts.jsonl").write_text(
        json.dumps({"time": 1.0, "working_folder": "/my/work"}) + "\n"
    )
    with pytest.raises(InputError, match=f"run/config.json is not there: got '{name}'") as error:
        load_policy(folder, trust_code=True)
    assert ("began, /my/work" in str(error.value)) == (not name.startswith("/"))


@pytest.mark.parametrize(
    ("starts", "date"),
    [
        ([{"time": 1e9}, {"time": 2e9}], datetime.datetime.fromtimestamp(1e9)),
        ([{"time": 1e9, "chat_date": None}], datetime.datetime.fromtimestamp(1e9)),
        ([{"time": 1e30}, {"time": 0, "chat_date": "x"}], None),
        ([], None),
    ],
)
def test_the_date_of_a_run_whose_starts_do_not_say_it(tmp_path, starts, date):
    (tmp_path / "starts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in starts))
    made = run_date(tmp_path)
    assert made == date if date else abs(made.timestamp() - time.time()) < 60
