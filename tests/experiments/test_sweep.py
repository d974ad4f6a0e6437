"""Sweeps: members and their errors, what is run again and what is not, the table."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import REPO, one_device_environment
from on_hosts import free_port
from rich.console import Console

from rljax.command.sweep import _start_again
from rljax.config import Config, to_dict
from rljax.config.declare import check_options
from rljax.config.flags import config_module, load_config_file
from rljax.config.run_options import SweepOptions
from rljax.errors import InputError
from rljax.experiments.sweep import (
    ALONE,
    Stopped,
    command,
    flag,
    make_members,
    member_name,
    result_rows,
    run_members,
    run_together,
    table,
    write_result,
)

# A launcher of twenty lines: it trains nothing, notes that it ran, and ends as `seed` says.
FAKE = """
import json, pathlib, signal, sys, time
flags = dict(a.removeprefix("--config.").split("=", 1) for a in sys.argv[1:])
folder = pathlib.Path(flags["run_dir"])
folder.mkdir(parents=True, exist_ok=True)
starts = folder / "starts"
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
print("hello from", flags["seed"], flush=True)
resumed = len(starts.read_text()) > 1
if flags["seed"] == "1" and not resumed:
    sys.exit(1)
if flags["seed"] == "2" and not resumed:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit((folder / "saved").write_text("") or 3))
    (folder / "waiting").write_text("")
    time.sleep(60)
value = {"value": 0.1 * int(flags["seed"]), "low": 0.0, "high": 0.5, "n": 9}
summary = {"status": "finished", "steps": 3, "wall_s": 1.0, "accuracy_after": value}
summary |= {"accuracy_before": None, "resumed": resumed}
(folder / "summary.json").write_text(json.dumps(summary))
"""
REAL = """
from rljax.config import Config

def get_config():
    config = Config(steps=1, export=False, trackers=())
    config.model = "decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16)"
    config.data.train, config.data.max_prompt_tokens = "sort_digits(digits=3, test=16)", 4
    config.sampler.max_response_tokens, config.model_settings.remat = 4, "none"
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 4, 4
    config.batch.sequences_per_optimizer_step, config.evaluate.prompts = 16, 16
    return config

def sweep():
    yield {"seed": 1, "actor_optimizer.lr": 1e-3}
"""


def base():
    config = Config(model="decoder(layers=1)")
    config.data.train = "sort_digits()"
    return config


def members_of(folder, *overrides):
    return make_members(base(), overrides, Path(folder), "x.py")


@pytest.fixture
def launcher(tmp_path):
    path = tmp_path / "fake.py"
    path.write_text(FAKE)
    return [sys.executable, str(path)]


def starts(member) -> int:
    path = member.folder / "starts"
    return len(path.read_text()) if path.exists() else 0


def test_finished_members_are_not_run_again_and_failed_ones_are(tmp_path, launcher, capfd):
    members = members_of(tmp_path / "s", {"seed": 0}, {"seed": 1}, {"seed": 3})
    codes = [code for _, code in run_members(members, [], launcher=launcher)]
    assert codes == [0, 1, 0]  # a crash of one stops no other
    assert [starts(m) for m in members] == [1, 1, 1]
    assert [m.finished() for m in members] == [True, False, True]
    assert "hello from 3" in capfd.readouterr().out
    assert (members[1].folder / "log.txt").read_text() == "hello from 1\n"

    codes = [code for _, code in run_members(members, [], launcher=launcher)]
    assert codes == [None, 0, None]
    assert [starts(m) for m in members] == [1, 2, 1]
    assert members[1].summary()["resumed"]


def test_a_member_whose_log_cannot_be_written_does_not_go_on_alone(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "folder = [a for a in sys.argv if 'run_dir=' in a][0].partition('=')[2]\n"
        "(pathlib.Path(folder) / 'pid').write_text(str(os.getpid()))\n"
        "print('hello', flush=True)\n"
        "time.sleep(60)\n"
    )
    (member,) = members_of(tmp_path / "s", {"seed": 0})
    member.folder.mkdir(parents=True)
    (member.folder / "log.txt").mkdir()
    with pytest.raises(InputError, match="log.txt cannot be written; Is a directory.*goes on"):
        list(run_members([member], [], launcher=[sys.executable, str(script)]))
    assert not (member.folder / "pid").exists()
    (member.folder / "log.txt").rmdir()
    (member.folder / "log.txt").symlink_to("/dev/full")
    with pytest.raises(InputError, match="log.txt cannot be written; No space left"):
        list(run_members([member], [], launcher=[sys.executable, str(script)]))
    with pytest.raises(ProcessLookupError):
        os.kill(int((member.folder / "pid").read_text()), 0)


@pytest.mark.slow
def test_a_stopped_sweep_hands_the_signal_on_and_resumes(tmp_path, launcher):
    script = f"""
import pathlib, sys
from rljax.config import Config
from rljax.experiments.sweep import Stopped, make_members, run_members
base = Config(model="decoder(layers=1)")
base.data.train = "sort_digits()"
members = make_members(base, [{{"seed": s}} for s in (0, 2, 3)], pathlib.Path("s"), "x.py")
try:
    for member, code in run_members(members, [], launcher={launcher}):
        pass
except Stopped as stop:
    print("stopped by", stop)
"""
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    start = [sys.executable, "-c", script]
    child = subprocess.Popen(start, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    waiting = tmp_path / "s" / "seed=2" / "waiting"
    deadline = time.monotonic() + 60
    while not waiting.exists():
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    out, _ = child.communicate(timeout=60)
    assert "stopped by SIGTERM" in out
    assert (waiting.parent / "saved").exists()  # the member was told, not killed
    assert not (tmp_path / "s" / "seed=3").exists()  # the rest waits for the next call

    again = subprocess.run(start, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert "hello from 0" not in again.stdout
    assert again.stdout.splitlines() == ["  hello from 2", "  hello from 3"]


def test_a_killed_member_is_resumed(tmp_path, launcher):
    """SIGKILL leaves no summary.json, or one of an earlier stop: neither counts as finished."""
    (member,) = members_of(tmp_path / "s", {"seed": 3})
    member.folder.mkdir(parents=True)
    for left in (None, '{"status": "stopped by SIGTERM, saved at step 2"}', '{"status', "[]"):
        if left is not None:
            (member.folder / "summary.json").write_text(left)
        assert not member.finished()
    assert [code for _, code in run_members([member], [], launcher=launcher)] == [0]


def test_table_and_json(tmp_path, launcher):
    members = members_of(tmp_path / "s", {"seed": 0}, {"seed": 1}, {"seed": 3}, {"seed": 4})
    for _ in run_members(members[:3], [], launcher=launcher):
        pass
    rows = result_rows(members)
    assert [row["status"] for row in rows] == [
        "finished",
        "not finished",
        "finished",
        "not started",
    ]
    path = write_result(rows, tmp_path / "s")
    assert json.loads(path.read_text())[2]["accuracy_after"]["value"] == pytest.approx(0.3)
    console = Console(width=150, record=True, file=open(os.devnull, "w"))
    console.print(table(rows))
    text = console.export_text()
    assert [f"seed={s}" in text for s in (0, 1, 3, 4)] == [True] * 4
    assert "0.300 [0.000, 0.500]" in text and "not started" in text


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("listed", "says"),
    [
        ([], "x.py: sweep() yields nothing"),
        (3, "x.py: sweep() must yield dicts: got 3"),
        ([("seed", 1)], "member 0 of sweep() is no dict of dotted fields"),
        ([{1: 2}], "member 0 of sweep() is no dict of dotted fields"),
        ([{"seed": 1}, {"sede": 1}], "member 1 of sweep() has unknown fields"),
        ([{"sede": 1}], "sede: no such field; did you mean seed?"),
        ([{"steps": "many"}], "steps='many': must be a whole number"),
        ([{"batch": {"epochs": 2}}], "batch: a section has no value"),
        ([{"algorithm.advantage": "gae"}], "needs a critic"),
        ([{"run_dir": "x"}], "sets run_dir"),
        ([{"seed": 1}, {"seed": 1}], "{'seed': 1} and {'seed': 1} are called 'seed=1'"),
        ((1 / 0 for _ in "x"), "sweep() failed; ZeroDivisionError: division by zero"),
    ],
)
def test_members_are_checked_before_anything_runs(listed, says, tmp_path):
    with pytest.raises(InputError) as error:
        make_members(base(), listed, tmp_path, "x.py")
    assert says in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_all_members_problems_come_at_once(tmp_path):
    with pytest.raises(InputError) as error:
        members_of(tmp_path, {"steps": -1}, {"seed": 1}, {"batch.epochs": 0, "seed": -2})
    text = str(error.value)
    assert all(f in text for f in ("steps=-1", "batch.epochs=0", "seed=-2", "member 2"))
    wrong = base()
    wrong.reward.function = "nope"
    with pytest.raises(InputError) as error:
        make_members(wrong, [{"seed": s} for s in range(6)], tmp_path, "x.py")
    assert "{'seed': 0} and 5 more: " in str(error.value) and "{'seed': 1}" not in str(error.value)


def test_results_of_two_experiments_are_not_mixed(tmp_path):
    (member,) = members_of(tmp_path, {"seed": 1})
    member.folder.mkdir(parents=True)
    (member.folder / "config.json").write_text(json.dumps(to_dict(member.config)))
    members_of(tmp_path, {"seed": 1})
    changed = base()
    changed.actor_optimizer.lr, changed.trackers = 3e-3, ()
    with pytest.raises(InputError, match=r"other settings: got \['actor_optimizer.lr'\]"):
        make_members(changed, [{"seed": 1}], tmp_path, "x.py")
    (member.folder / "config.json").write_text("{")
    with pytest.raises(InputError, match="config.json is not a run's config"):
        members_of(tmp_path, {"seed": 1})


def test_a_sweep_goes_on_with_what_allow_changed_names(tmp_path):
    (member,) = members_of(tmp_path, {"seed": 1})
    member.folder.mkdir(parents=True)

    def write(config, **summary):
        (member.folder / "config.json").write_text(json.dumps(to_dict(config)))
        summary = {"status": "finished", "started": 1.0, **summary}
        (member.folder / "summary.json").write_text(json.dumps(summary))

    write(member.config)
    (member.folder / "starts.jsonl").write_text('{"time": 1.0}\n')
    assert member.finished()
    more = base()
    more.steps = 900
    with pytest.raises(InputError, match="other settings.*allow_changed=steps"):
        make_members(more, [{"seed": 1}], tmp_path, "x.py")
    more.checkpoint.allow_changed = ("steps",)
    (member,) = make_members(more, [{"seed": 1}], tmp_path, "x.py")
    assert not member.finished()
    write(member.config)
    assert member.finished()
    with (member.folder / "starts.jsonl").open("a") as file:
        file.write('{"time": 2.0}\n')  # it was killed: the summary is of its earlier end
    assert not member.finished()


@pytest.mark.parametrize(
    ("exported", "finished"),
    [
        ({}, True),  # of an earlier version
        ({"exported": {}}, False),
        ({"exported": {"policy": 2}}, False),
        ({"exported": {"policy": 3}}, True),
    ],
)
def test_a_member_whose_export_is_asked_for_later_is_not_finished(exported, finished, tmp_path):
    (member,) = members_of(tmp_path, {"export": True})
    member.folder.mkdir(parents=True)
    summary = {"status": "finished", "steps": 3, **exported}
    (member.folder / "summary.json").write_text(json.dumps(summary))
    assert member.finished() == finished
    (member,) = members_of(tmp_path, {"export": False})
    member.folder.mkdir(parents=True)
    (member.folder / "summary.json").write_text(json.dumps(summary))
    assert member.finished()


def test_fields_of_one_name_are_told_apart_by_their_sections(tmp_path):
    rates = [{f"{role}_optimizer.lr": 0.001, "seed": 1} for role in ("actor", "critic")]
    config = base()
    config.dataflow, config.algorithm.advantage = "ppo", "gae()"
    members = make_members(config, [*rates, {"steps": 3}], tmp_path, "x.py")
    expected = ["actor_optimizer.lr=0.001,seed=1", "critic_optimizer.lr=0.001,seed=1", "steps=3"]
    assert [member.name for member in members] == expected
    assert members[0].setting == "actor_optimizer.lr=0.001"
    both = {"actor_optimizer.lr": 1e-3, "critic_optimizer.lr": 1e-2}  # a name of its own
    (member,) = make_members(config, [both], tmp_path, "x.py")
    assert member.name == "lr=0.001,lr=0.01"


def test_names_and_flags(tmp_path):
    assert member_name({"actor_optimizer.lr": 1e-5, "seed": 1}) == "lr=1e-05,seed=1"
    assert "/" not in member_name({"data.train": "a/b c.parquet"})
    assert member_name({"config": "presets/dapo:tiny", "seed": 1}) == "dapo,seed=1"
    whole = ("config",)
    assert member_name({"config": "presets/dapo:tiny"}, whole) == "presets_dapo_tiny"
    assert member_name({"config": "b/run.yaml", "seed": 1}, whole) == "b_run,seed=1"
    long = [member_name({"reward.function": "f" * 300 + end}) for end in "ab"]
    assert len(set(long)) == 2 and max(map(len, long)) < 120
    assert flag("trackers", ("console",)) == "--config.trackers=('console',)"
    (member,) = members_of(tmp_path, {"seed": 1, "export": False})
    line = command(["--config=x.py", "--config.steps=3"], member)
    assert line[1:] == [
        *("-m", "rljax", "train"),
        "--config=x.py",
        "--config.steps=3",
        "--config.seed=1",
        "--config.export=False",
        f"--config.run_dir={member.config.run_dir}",
    ]


def test_numbers_of_numpy_are_numbers(tmp_path):
    entries = [
        {"actor_optimizer.lr": lr, "seed": np.int64(3), "data.weights": weights}
        for lr in np.geomspace(1e-5, 1e-3, 2).astype(np.float32)
        for weights in ((np.float64(0.25), np.float64(0.75)), np.array([0.5, 0.5]))
    ]
    config = load_config_file("quickstart:tiny")
    config.data.sources = ("letter_count(letters=4)",)
    members = make_members(config, entries, tmp_path, "x.py")
    line = command([], members[0])
    assert "--config.data.weights=(0.25, 0.75)" in line and "--config.seed=3" in line
    assert "--config.actor_optimizer.lr=1e-05" in line and "np." not in members[0].folder.name
    assert members[1].config.data.weights == (0.5, 0.5) and type(members[1].config.seed) is int


def test_the_shipped_sweep(tmp_path):
    path = f"{REPO}/configs/sweep_quickstart.py"
    module = config_module(path)
    members = make_members(load_config_file(f"{path}:tiny"), module.sweep(), tmp_path, path)
    assert len(members) == 6 and len({m.name for m in members}) == 6
    assert {m.config.steps for m in members} == {load_config_file(f"{path}:tiny").steps}


@pytest.mark.slow
def test_the_launcher_from_end_to_end(tmp_path):
    """A real member; the second call does not run it and has the same table."""
    (tmp_path / "my_sweep.py").write_text(REAL)
    cache = jax.config.jax_compilation_cache_dir
    line = [sys.executable, f"{REPO}/launchers/sweep.py", "--config=my_sweep.py", "--out", "sw"]
    line += ["--config.reward.workers=1", f"--config.compilation_cache={cache}"]
    env = one_device_environment()
    options = dict(cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    first = subprocess.run(line, **options)
    assert first.returncode == 0, first.stdout + first.stderr
    rows = json.loads((tmp_path / "sw" / "sweep.json").read_text())
    assert [row["name"] for row in rows] == ["seed=1,lr=0.001"]
    assert rows[0]["status"] == "finished" and rows[0]["accuracy_after"]["n"] == 16
    assert "seed=1,lr=0.001" in first.stdout and "finished" in first.stdout
    run = tmp_path / "sw" / "seed=1,lr=0.001"
    assert json.loads((run / "metrics.jsonl").read_text())["lr"] == pytest.approx(1e-3)
    assert json.loads((run / "config.json").read_text())["reward"]["workers"] == 1
    again = subprocess.run(line, **options)
    assert again.returncode == 0 and again.stdout.count("was finished") == 1
    assert json.loads((tmp_path / "sw" / "sweep.json").read_text()) == rows


@pytest.mark.slow
def test_machines_that_share_a_sweep_run_each_member_once(tmp_path):
    """--member_of of the launcher: the parts are the whole, and a wrong one is named."""
    (tmp_path / "many.py").write_text(
        REAL.replace('{"seed": 1, "actor_optimizer.lr": 1e-3}', '{"seed": 1}')
        + "".join(f"    yield {{'seed': {seed}}}\n" for seed in range(2, 8))
    )
    start = [sys.executable, f"{REPO}/launchers/sweep.py", "--config=many.py", "--dry_run"]
    options = dict(cwd=tmp_path, env=one_device_environment(), capture_output=True, text=True)
    lines = [
        subprocess.run([*start, f"--member_of={k}/2"], **options).stdout.splitlines()
        for k in range(2)
    ]
    assert [len(part) for part in lines] == [4, 3]
    seeds = [line.partition("--config.seed=")[2].split()[0] for part in lines for line in part]
    assert sorted(seeds) == list("1234567")
    for share in ("3/3", "1", "-1/2", "a/b"):
        with pytest.raises(InputError, match="INDEX from 0 to COUNT - 1"):
            check_options(SweepOptions(member_of=share))


def test_a_member_of_one_host_is_told_to_stay_alone(tmp_path):
    (path := tmp_path / "show.py").write_text(
        "import os; print(os.environ.get('RLJAX_HOSTS'), os.environ.get('RLJAX_HOST'))"
    )
    (member,) = members_of(tmp_path / "s", {"seed": 3})
    for _ in run_members([member], [], launcher=[sys.executable, str(path)], env=ALONE, host=2):
        pass
    assert (member.folder / "log-002.txt").read_text() == "1 None\n"


def test_a_member_that_another_host_has_stopped_ends_the_sweep(tmp_path):
    (path := tmp_path / "stop.py").write_text("raise SystemExit(143)")
    members = members_of(tmp_path / "s", {"seed": 3}, {"seed": 4})
    with pytest.raises(Stopped, match="SIGTERM"):
        list(run_members(members, [], launcher=[sys.executable, str(path)]))
    assert not members[1].folder.exists()


def test_which_codes_of_a_member_end_a_sweep_over_a_pod(tmp_path):
    """-9: killed here. Not the 171 that follows from what one host refused with 2."""
    words = tmp_path / "words"
    given = (None, 0, 1, 2, 3, 143, 170, 171, -9)
    ends = [0, 0, 0, 0, 0, 143, 170, 171, 137]
    assert [_start_again(code, words) for code in given] == ends
    words.write_text('{"host": 1, "reason": "a model that is not there", "code": 2}')
    assert _start_again(171, words) == 0


@pytest.mark.hosts
def test_a_sweep_over_a_pod_ends_with_what_a_new_start_can_mend(tmp_path):
    """The first member ends with 171, since the other host never comes, and by SIGTERM."""
    (tmp_path / "two.py").write_text(REAL + '    yield {"seed": 2}\n')
    line = [sys.executable, f"{REPO}/launchers/sweep.py", "--config=two.py", "--out=sw"]
    pod = {"RLJAX_COORDINATOR": f"127.0.0.1:{free_port()}", "RLJAX_HOSTS": "2", "RLJAX_HOST": "0"}
    options = dict(cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    options["env"] = {**one_device_environment(), **pod}
    late = subprocess.run([*line, "--config.hosts.init_timeout_s=2"], **options, timeout=300)
    assert late.returncode == 171, late.stdout
    assert "seed=1,lr=0.001 can go on: exit code 171" in late.stdout
    child = subprocess.Popen(line, **options)
    try:
        while "; waiting" not in (said := child.stdout.readline()):
            assert said, child.wait()
        child.send_signal(signal.SIGTERM)
        out, _ = child.communicate(timeout=300)
    finally:
        child.kill()
    assert child.returncode == 143 and "stopped by SIGTERM" in out
    assert not (tmp_path / "sw" / "seed=2").exists()


@pytest.mark.hosts
def test_a_sweep_over_a_pod_and_one_host_per_member(tmp_path):
    """Two members on two hosts, together, and then each by itself: the same results."""
    rljax = [sys.executable, "-m", "rljax"]
    (tmp_path / "two.py").write_text(REAL + '    yield {"seed": 2}\n')
    sweep = ["sweep", "two.py", "--config.reward.workers=1"]
    options = dict(cwd=tmp_path, env=one_device_environment(), capture_output=True, text=True)
    local = [*rljax, "pod", "local", "--hosts=2", "--devices=2", "--", *sweep, "--out=together"]
    done = subprocess.run(local, **options, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    together = json.loads((tmp_path / "together/sweep.json").read_text())
    assert [row["status"] for row in together] == ["finished"] * 2
    for name in ("seed=1,lr=0.001", "seed=2"):
        assert f"[0] {name}: exit code 0" in done.stdout, done.stdout
        assert f"[1] {name}: exit code" in done.stdout, done.stdout
    again = subprocess.run(local, **options, timeout=500)
    assert again.returncode == 0 and again.stdout.count("was finished") == 4
    parts = [
        subprocess.Popen(
            [*rljax, *sweep, "--out=apart", f"--member_of={k}/2", "--config.mesh.data=1"],
            cwd=tmp_path,
            env={**options["env"], "RLJAX_HOSTS": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for k in range(2)
    ]
    for part in parts:
        out, _ = part.communicate(timeout=500)
        assert part.returncode == 0, out
    apart = json.loads((tmp_path / "apart/sweep.json").read_text())
    assert [row["status"] for row in apart] == ["finished"] * 2
    for one, other in zip(together, apart, strict=True):
        assert one["accuracy_after"]["n"] == other["accuracy_after"]["n"] == 16
        assert one["accuracy_before"] == other["accuracy_before"]


def test_each_member_is_run_with_as_many_seeds_as_are_asked_for(tmp_path, rljax_command):
    seeds = range(4, 6)
    members = make_members(base(), [{"steps": 3}, {"steps": 5}], tmp_path, "x.py", seeds=seeds)
    assert [member.name for member in members] == [
        f"steps={steps},seed={seed}" for steps in (3, 5) for seed in seeds
    ]
    assert [member.config.seed for member in members] == [4, 5, 4, 5]
    with pytest.raises(InputError, match="sets a seed beside --seeds=2"):
        make_members(base(), [{"seed": 1}], tmp_path, "x.py", seeds=seeds)
    with pytest.raises(InputError, match="dict of dotted fields"):
        make_members(base(), ["seed"], tmp_path, "x.py", seeds=seeds)
    asked = ["sweep", "quickstart:tiny", "--dry_run", f"--out={tmp_path}"]
    _, out, _ = rljax_command(*asked, "--seeds=2", "--config.seed=7")
    assert [line.rpartition("/")[2] for line in out.splitlines()] == ["seed=7", "seed=8"]
    assert [line.count("--config.seed=") for line in out.splitlines()] == [1, 1]
    code, _, said = rljax_command(*asked)
    assert code == 2 and "has no sweep()" in said
    for flags in (asked, [word for word in asked if word != "--dry_run"]):
        code, out, said = rljax_command(*flags, "--seeds=2", "--together")
        assert code == 2 and "program_steps=1" in said and not out
    code, out, _ = rljax_command(*asked, "--seeds=2", "--together", "--config.program_steps=2")
    assert code == 0 and out.startswith("program 1 of 1 trains 2 runs: seed=0, seed=1\nEach run by")
    assert len(out.splitlines()) == 4


def test_a_flag_of_a_field_that_members_set_is_refused_at_once(tmp_path, rljax_command):
    asked = ["sweep", "sweep_quickstart", f"--out={tmp_path / 's'}"]
    for dry in ([], ["--dry_run"]):
        for given in ("--config.actor_optimizer.lr=1e-5", "--config.seed=3"):
            code, _, said = rljax_command(*asked, given, *dry)
            name = given.partition("=")[0]
            assert code == 2 and f"{name}: member " in said and "sets it, too" in said
            assert " and 5 more of sweep_quickstart" in said
        code, _, said = rljax_command(*asked, "--config.run_dir=x", *dry)
        assert code == 2 and "--config.run_dir: each member has a folder of its own" in said
    assert not (tmp_path / "s").exists()
    code, out, _ = rljax_command(*asked, "--config.steps=3", "--dry_run")
    assert code == 0 and out.count("--config.steps=3") == len(out.splitlines()) == 6
    asked = ["pipeline", "pipelines/post_training:tiny", f"--out={tmp_path / 'p'}", "--dry_run"]
    code, _, said = rljax_command(*asked, "--config.steps=3", "--config.run_dir=x")
    assert code == 2 and "--config.steps: stage '" in said and "--config.run_dir: each" in said
    code, out, _ = rljax_command(*asked, "--config.seed=3")
    assert code == 0 and "--config.seed=3" in out


OTHER_FILE = """
from rljax.config.flags import load_config_file

def get_config():
    config = load_config_file("quickstart:tiny")
    config.steps, config.actor_optimizer.lr = {steps}, 3e-3
    return config

def {listing}():
    yield {entry}
"""


@pytest.mark.parametrize("command_name", ["sweep", "pipeline"])
def test_a_flag_of_the_files_own_value_holds_for_a_member_of_another_file(
    command_name, tmp_path, rljax_command, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    entry = {"config": "other.py"}
    entry |= {"stage": "a", "command": "train"} if command_name == "pipeline" else {}
    for name, steps in (("own.py", 3), ("other.py", -1)):  # -1: no valid config
        text = OTHER_FILE.format(steps=steps, listing=command_name, entry=entry)
        (tmp_path / name).write_text(text)
    line = [command_name, "own.py", "--out=out", "--dry_run"]
    code, _, said = rljax_command(*line)
    assert code == 2 and "steps=-1" in said
    code, out, said = rljax_command(*line, "--config.steps=3")
    assert code == 0 and "--config.steps=3" in out and "--config=other.py" in out, said
    settings = load_config_file("own.py"), [{"config": "other.py"}], tmp_path / "s", "own.py"
    (member,) = make_members(*settings, flags=["steps"])
    assert member.config.steps == 3


@pytest.mark.slow
def test_members_that_differ_in_seed_and_rate_are_trained_together(tmp_path, capsys):
    path = tmp_path / "conf.py"
    path.write_text(REAL.replace('{"seed": 1, ', '{"program_steps": 2, "steps": 2, '))
    config = load_config_file(str(path))
    config.reward.function = "sequence_match(partial=0.5)"
    listed = list(config_module(str(path)).sweep()) * 2
    listed[1] = {**listed[1], "actor_optimizer.lr": 1e-2}
    members = make_members(config, listed, tmp_path / "s", str(path), seeds=(0, 1))
    assert [code for _, code in run_together(members)] == [0, 0, 0, 0]
    said = capsys.readouterr().out
    assert said.count("step 2 of 2: 8 steps of 4 runs") == 1
    rows = [json.loads((m.folder / "metrics.jsonl").read_text().splitlines()[-1]) for m in members]
    assert len({row["entropy"] for row in rows}) == 4 and {row["step"] for row in rows} == {2}
    assert [code for _, code in run_together(members)] == [None] * 4
