"""rljax doctor: every set-up that it names is made here, with real variables, folders, packages,
limits, processes and sockets, and is named with a line that mends it."""

import ast
import contextlib
import importlib.metadata
import json
import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
from conftest import REPO, lanes

import rljax
from rljax.checkpoint.checkpoint import Checkpoints
from rljax.config import Config, fingerprints, to_dict
from rljax.doctor.before_jax import fatal_findings, start_fix
from rljax.doctor.environment import environment
from rljax.doctor.network import hosts_network
from rljax.doctor.run_folder import run_folder
from rljax.hosts.cluster import Cluster
from rljax.hosts.rendezvous import meet
from rljax.runs.folder import locked

SOURCES = [*(REPO / "rljax" / "doctor").glob("*.py")]
PAGE = REPO / "docs" / "guides" / "command.md"
# The shell and the tools of the system, and no `rljax` of another Python.
PLAIN = {"PATH": f"{os.path.dirname(sys.executable)}:/usr/bin:/bin", "LC_ALL": "C.UTF-8"}

# {what is named: the variables that make it}
VARIABLES = {
    "platform_not_installed": {"JAX_PLATFORMS": "cuda"},
    "xla_flags_not_flags": {"XLA_FLAGS": "xla_cpu_enable_fast_math=true"},
    "proxy_for_loopback": {"http_proxy": "http://proxy:3128"},
}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    return tmp_path_factory.mktemp("here")


def named(findings) -> dict[str, str]:
    """{name: fix} of what is not fine; each says how to mend it in one line."""
    wrong = {f.name: f.fix for f in findings if f.status != "fine"}
    assert all(fix and "\n" not in fix for fix in wrong.values()), wrong
    return wrong


def found_by(variables):
    return environment(variables, 0.0, "")


@pytest.mark.smoke
@pytest.mark.parametrize("name", VARIABLES)
def test_variables_are_named_each_by_itself(name):
    assert named(found_by(VARIABLES[name])).keys() == {name}
    assert named(found_by(PLAIN)) == {}


# -- the command, in processes


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """site(NAME, without=..., metadata=...) -> a folder of links to what is installed, but for
    rljax and some others, and with metadata of its own."""

    def make(name: str, without=(), metadata=()) -> Path:
        folder = tmp_path_factory.mktemp(name) / "site-packages"
        folder.mkdir()
        for home in [path for path in sys.path if path.endswith("-packages")]:
            for entry in os.scandir(home):
                left = re.match(r"(__editable__)?_*rljax|.*\.pth$", entry.name) or any(
                    entry.name.lower().startswith(prefix) for prefix in without
                )
                if not left and not (folder / entry.name).exists():
                    (folder / entry.name).symlink_to(entry.path)
        for package, version in metadata:
            about = folder / f"{package}-{version}.dist-info"
            about.mkdir()
            (about / "METADATA").write_text(f"Name: {package}\nVersion: {version}\n")
        return folder

    return make


@pytest.fixture(scope="module")
def doctor(site, here):
    """doctor(ARGUMENTS, ...) -> (exit code, its findings by name, what it said of errors)."""
    plain = site("plain")
    home = here / "home"
    home.mkdir()

    def call(*arguments, env=None, before="true", inside=(), paths=(), packages=plain, jax=False):
        command = [sys.executable, "-S", "-m", "rljax", "doctor", "--json", *arguments]
        command = shlex.join([*command, *([] if jax else ["--nojax"])])
        path = shlex.quote(":".join(map(str, [*paths, REPO, packages])))
        line = f"{before}; export PYTHONPATH={path}"
        done = subprocess.run(
            [*inside, "bash", "-c", f"{line}; exec {command}"],
            cwd=here,
            capture_output=True,
            text=True,
            env={**PLAIN, "HOME": str(home), **(env or {})},
            timeout=120,
        )
        assert "Traceback" not in done.stderr and done.stdout, done.stderr
        result = json.loads(done.stdout)
        found = {f["name"]: f for f in result["findings"] if f["status"] != "fine"}
        assert all(f["fix"] for f in found.values())
        assert result["broken"] == sum(f["status"] == "broken" for f in result["findings"])
        assert done.returncode == bool(result["broken"])
        return found

    return call


def test_a_healthy_machine_is_told_so(doctor):
    found = doctor("--disk_gb=0.001", env={"JAX_PLATFORMS": "cpu"}, jax=True)
    assert found.keys() <= {"sandbox_weak"}, found


def test_variables_reach_the_command(doctor):
    environment = {key: value for own in VARIABLES.values() for key, value in own.items()}
    assert VARIABLES.keys() <= doctor(env=environment).keys()


# -- packages


@pytest.fixture(scope="module")
def bad_packages(doctor, site, here):
    """What is found where every package is wrong in a way of its own."""
    packages = site(
        "wrong",
        without=("grain-", "optax-"),
        metadata=[("optax", "0.0.1"), ("jax_cuda12_plugin", "0.1")],
    )
    hiding = here / "hiding"
    hiding.mkdir()
    (hiding / "jax.py").touch()
    return doctor(packages=packages, paths=[hiding])


PACKAGES = ("package_missing", "package_too_old", "plugin_of_another_version", "library_hidden")


@pytest.mark.parametrize("name", PACKAGES)
def test_packages(name, bad_packages):
    assert name in bad_packages
    said = {"package_missing": "grain", "package_too_old": "optax 0.0.1", "library_hidden": "'jax'"}
    assert said.get(name, "") in bad_packages[name]["what"]


@pytest.mark.parametrize("ours", lanes([False], [True]))
def test_the_distribution_of_that_name_which_is_another_projects(doctor, site, ours):
    """With ours beside it, and alone, as after `pip install rljax`."""
    metadata = [("rljax", "2.5"), *[("rljax_lm", rljax.__version__)] * ours]
    packages = site(f"foreign_{ours}", metadata=metadata)
    found = doctor(packages=packages)
    assert found.keys() <= {"rljax_of_another_project", "sandbox_weak"}, found
    finding = found["rljax_of_another_project"]
    assert f"rljax 2.5 in {packages}" in finding["what"] and finding["status"] == "broken"
    assert not ours or f"rljax-lm {rljax.__version__}" in finding["what"]
    assert "pip uninstall -y rljax rljax-lm" in finding["fix"]
    packages = site(f"own_{ours}", metadata=metadata[1:])
    assert doctor(packages=packages).keys() <= {"sandbox_weak"}
    packages = site(f"former_{ours}", metadata=metadata)  # ours, from before it was renamed
    scripts = packages / "rljax-2.5.dist-info" / "entry_points.txt"
    scripts.write_text("[console_scripts]\nrljax = rljax.command:main\n")
    assert doctor(packages=packages).keys() <= {"sandbox_weak"}


# -- the machine

MACHINE = ("compilation_cache_unwritable", "disk_full")


@pytest.fixture(scope="module")
def bad_machine(doctor, here):
    (here / "a_file").touch()
    return doctor("--disk_gb=1e9", env={"HOME": f"{here}/a_file/home"})


@pytest.mark.parametrize("name", MACHINE)
def test_machine(name, bad_machine):
    assert name in bad_machine


def test_the_room_of_a_disk_is_counted_in_gb(monkeypatch):
    room = types.SimpleNamespace(free=5 * 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room)
    for asked, is_full in ((4.9, False), (5.1, True)):
        names = {finding.name for finding in environment({}, asked, "")}
        assert ("disk_full" in names) == is_full


@pytest.fixture(scope="module")
def bad_devices(doctor, here):
    """A machine with a GPU and a TPU: a /dev of its own."""
    inside = ("unshare", "-rm")
    if subprocess.run(
        [*inside, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True
    ).returncode:
        pytest.skip("this machine allows no namespaces")
    dev = here / "dev"
    dev.mkdir()
    for name in ("null", "nvidia0", "accel0"):
        (dev / name).touch()
    before = f"mount --bind /dev/null {dev}/null; mount --rbind {dev} /dev"
    return doctor(before=before, inside=inside)


def test_devices(bad_devices):
    assert "device_not_used" in bad_devices


# -- what JAX says itself


def test_a_flag_that_xla_does_not_know(doctor):
    flags = {"XLA_FLAGS": "--xla_no_such_flag=1", "JAX_PLATFORMS": "cpu"}
    found = doctor(env=flags, jax=True)
    assert "--xla_no_such_flag" in found["xla_flags_unknown"]["what"]


# -- what a command that needs JAX looks for first

ENDS_JAX = {  # what is named: variables that end JAX, in several spellings
    "platform_not_installed": (
        "JAX_PLATFORMS=cuda",
        "JAX_PLATFORMS=gpu",
        "JAX_PLATFORMS=cuda,cpu",
        "JAX_PLATFORM_NAME=cuda",
    ),
    "xla_flags_not_flags": ("XLA_FLAGS=xla_foo=1",),
    "xla_flag_value_wrong": tuple(
        f"XLA_FLAGS=--xla_{flag}"
        for flag in (
            *(
                f"force_host_platform_device_count={n}"
                for n in ("abc", "0", "-1", "", "1e3", "9" * 11)
            ),
            "force_host_platform_device_count=x --xla_force_host_platform_device_count=4",
        )
    ),
}


@pytest.mark.parametrize("name", ENDS_JAX)
def test_what_ends_jax_is_found_before_it(name):
    for text in ENDS_JAX[name]:
        variable, _, value = text.partition("=")
        found = [finding for finding in fatal_findings({variable: value})]
        assert name in [finding.name for finding in found] and all(f.fix for f in found), text
    assert list(fatal_findings({})) == [] and list(fatal_findings({"JAX_PLATFORMS": "cpu"})) == []


def command(*words, **env):
    path = {"PYTHONPATH": str(REPO), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**PLAIN, **path, **env},
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    ("words", "env", "says"),
    [
        (("train", "quickstart"), {"JAX_PLATFORMS": "cuda"}, "pip install 'jax[cuda12]>=0.10'"),
        (("serve", "no_run"), {"XLA_FLAGS": "--xla_foo=1"}, "take it out of XLA_FLAGS"),
        (("train", "quickstart:tiny"), {"JAX_DEBUG_NANS": "maybe"}, "unset JAX_DEBUG_NANS"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (("train", "quickstart:tiny"), {"JAX_PLATFORMS": "gpuu"}, "unset JAX_PLATFORMS"),
                (("chat", "no_run"), {"XLA_FLAGS": "--xla_tpu_foo=1"}, "LIBTPU_INIT_ARGS"),
                (
                    ("train", "quickstart:tiny"),
                    {"XLA_FLAGS": "--xla_force_host_platform_device_count=abc"},
                    "platform_device_count=1 or more",
                ),
                (
                    ("train", "quickstart:tiny"),
                    {"XLA_FLAGS": "--xla_dump_to=/tmp/x --xla_dump_hlo_as_text=maybe"},
                    "take --xla_dump_hlo_as_text out of XLA_FLAGS",
                ),
            )
        ),
    ],
)
def test_a_command_that_needs_jax_says_so_in_one_line(words, env, says):
    done = command("-m", "rljax", *words, **env)
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and not done.stdout


@pytest.mark.parametrize(
    "words",
    lanes([("config", "show", "quickstart")], [("configs",), ("train", "--help")]),
    ids="-".join,
)
def test_commands_that_need_none_answer_all_the_same(words):
    wrong = {"JAX_PLATFORMS": "gpuu", "XLA_FLAGS": "--xla_foo=1"}
    assert command("-m", "rljax", *words, **wrong).returncode == 0


def test_an_old_jax_is_named(site):
    packages = site("old", without=("jax-",), metadata=[("jax", "0.6.0")])
    path = {"PYTHONPATH": f"{REPO}:{packages}"}
    for words in (("-m", "rljax", "train", "quickstart"), ("-c", "import rljax; rljax.train")):
        done = command("-S", *words, **path)
        assert "jax 0.6.0 is installed, and rljax needs >=0.10" in done.stderr
        assert "pip install -U 'jax>=0.10'" in done.stderr.splitlines()[-1]
    assert command("-S", "-c", "import rljax; rljax.Config()", **path).returncode == 0


@pytest.mark.parametrize("words", [("launchers/train.py", "quickstart"), ("-m", "rljax", "train")])
def test_a_python_without_the_packages_is_named(words):
    done = subprocess.run(
        [sys.executable, "-S", *words], capture_output=True, text=True, cwd=REPO, env=PLAIN
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "has no package 'absl'" in done.stderr and f"pip install -e {REPO}" in done.stderr


def test_a_device_that_jax_does_not_find_is_one_line(tmp_path):
    """A plugin may register a platform that this machine has none of."""
    script = tmp_path / "asks.py"
    script.write_text(
        "import jax\nfrom rljax.doctor.before_jax import no_device\n"
        "try:\n    jax.devices()\nexcept Exception as error:\n    print(no_device(error))\n"
        "try:\n    1 / 0\nexcept Exception as error:\n    print(no_device(error))\n"
    )
    done = command(str(script), JAX_PLATFORMS="gpuu")
    first, second = done.stdout.splitlines()
    assert "gpuu" in first and "Fix: " in first and second == "None"


@pytest.mark.slow
def test_jax_says_what_is_wrong(doctor, site):
    found = doctor(env={"JAX_PLATFORMS": "cpuu"}, jax=True)
    assert "cpuu" in found["no_device"]["what"]
    packages = site("abi", without=("numpy", "jax"))
    (packages / "numpy.py").write_text("raise ImportError('numpy.core.multiarray failed')\n")
    (packages / "jax").mkdir()
    (packages / "jax" / "__init__.py").write_text("import numpy\n")
    found = doctor(packages=packages, jax=True)
    assert "multiarray" in found["jax_does_not_start"]["what"]
    (packages / "jax" / "__init__.py").write_text("import time; time.sleep(60)\n")
    found = doctor("--timeout_s=0.5", packages=packages, jax=True)
    assert "within 0.5 s" in found["jax_hangs"]["what"]


@pytest.mark.slow
def test_a_weak_sandbox(doctor):
    inside = ("unshare", "-rm")
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no namespaces")
    forbidden = "echo 0 > /proc/sys/user/max_user_namespaces"
    found = doctor(env={"JAX_PLATFORMS": "cpu"}, inside=inside, before=forbidden, jax=True)
    assert {"sandbox_weak", "sandbox_missing"} & found.keys()


# -- a run folder


@pytest.fixture
def run(tmp_path):
    """A run folder with a whole checkpoint."""
    folder, config = tmp_path / "run", Config(model="decoder()")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_dict(config)))
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.prepare()
    state = {"progress": {"taken": {"rl": 3}}, "fingerprints": fingerprints(config)}
    checkpoints.save(3, {"w": np.zeros(4)}, state)
    assert named(run_folder(folder)) == {}
    return folder


def torn(run):
    file = max((run / "checkpoints" / "00000003" / "arrays").rglob("*"), key=lambda p: p.is_file())
    file.write_bytes(file.read_bytes()[:-1])


def half_written(run):
    (run / "checkpoints" / ".00000004").mkdir()


def of_another_version(run):
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "a_field_of_next_year": 1}))


def of_other_settings(run):
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "seed": 7}))


def unwritable(run):
    (run / "metrics.jsonl").mkdir()


def without_a_config(run):
    (run / "config.json").unlink()


def file_in_place_of_a_checkpoint(run):
    (run / "checkpoints" / "00000009").touch()


def without_its_model(run):
    config = Config(model="base")  # a folder that was there
    (run / "config.json").write_text(json.dumps(to_dict(config)))
    shutil.rmtree(run / "checkpoints")
    Checkpoints(run / "checkpoints").prepare()


def with_a_renamed_checkpoint(run):
    (run / "summary.json").write_text(json.dumps({"status": "finished"}))
    (run / "checkpoints" / "00000003").rename(run / "checkpoints" / "3")


RUNS = {
    "model_of_the_run_gone": without_its_model,
    "run_without_checkpoint": with_a_renamed_checkpoint,
    "checkpoint_in_the_way": file_in_place_of_a_checkpoint,
    "run_folder_without_run": without_a_config,
    "checkpoint_torn": torn,
    "checkpoint_half_written": half_written,
    "run_of_another_version": of_another_version,
    "checkpoint_of_other_settings": of_other_settings,
    "run_folder_unwritable": unwritable,
}


@pytest.mark.parametrize("name", RUNS)
def test_run_folders(name, run):
    RUNS[name](run)
    assert named(run_folder(run)).keys() == {name}


def test_the_name_of_a_step_that_was_renamed_is_said(run):
    with_a_renamed_checkpoint(run)
    (finding,) = (f for f in run_folder(run) if f.status != "fine")
    assert "checkpoints/ has 3, and a step has 8 digits" in finding.what
    shutil.rmtree(run / "checkpoints")
    assert named(run_folder(run)).keys() == {"run_without_checkpoint"}


def test_a_model_or_a_file_is_no_run_folder(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    for path in (tmp_path / "m.gguf", tmp_path):
        (finding,) = run_folder(path)
        assert finding.name == "no_run_folder" and "is a model, and no run" in finding.what


def test_a_run_folder_that_is_used_or_cannot_be_made(run, tmp_path):
    with locked(run):
        assert named(run_folder(run)).keys() == {"run_folder_in_use"}
    (tmp_path / "a_file").touch()
    assert named(run_folder(tmp_path / "a_file" / "run")).keys() == {"run_folder_unwritable"}
    new = tmp_path / "new" / "run"
    assert named(run_folder(new)) == {} and not new.parent.exists()
    new.mkdir(parents=True)
    assert named(run_folder(new)) == {}
    assert named(run_folder("gs://me/runs/1")).keys() == {"run_folder_of_a_url"}


def test_what_is_left_without_a_torn_checkpoint(run):
    """Each of several says from where the run goes on; the first has none before it."""
    state = Checkpoints(run / "checkpoints").read_state(3)
    for step in (5, 7):
        progress = {**state["progress"], "taken": {"rl": step}}
        later = {**state, "step": step, "progress": progress}
        Checkpoints(run / "checkpoints", keep=9).save(step, {"w": np.zeros(4)}, later)
    fixes = []
    for step in ("00000007", "00000005", "00000003"):
        files = [p for p in (run / "checkpoints" / step / "arrays").rglob("*") if p.is_file()]
        files[0].write_bytes(files[0].read_bytes()[:-1])
        fixes = [f.fix for f in run_folder(run) if f.name == "checkpoint_torn"]
        if step != "00000003":
            before = int(step) - 2
            assert len(fixes) == {5: 1, 3: 2}[before]
            assert all(fix.endswith(f"the run goes on from step {before}") for fix in fixes)
    assert [fix.endswith("the run begins anew") for fix in fixes] == [True, True, True]


@pytest.mark.parametrize(
    ("error", "env", "fix"),
    [
        (
            "ValueError: invalid literal for int(): 'abc'",
            {"JAX_NUM_CPU_DEVICES": "abc", "A": "b"},
            "unset JAX_NUM_CPU_DEVICES;",
        ),
        (
            "ImportError: numpy.core.multiarray",
            {"JAX_PLATFORMS": "cpu"},
            f"pip install --force-reinstall jax=={importlib.metadata.version('jax')}",
        ),
        ("ValueError: x", {}, "pip install --force-reinstall"),
    ],
)
def test_what_mends_a_jax_that_does_not_start(error, env, fix):
    """The versions that are pinned stay, and a variable is no reason to install."""
    found = start_fix(env, error)
    assert fix.partition("==")[0] in found and " -U" not in found
    assert fix.partition("==")[2] in found


@pytest.mark.parametrize("name", ["random", "logging"])
def test_a_file_that_hides_a_module_of_python_is_named(name, tmp_path):
    (tmp_path / f"{name}.py").touch()
    done = subprocess.run(
        [sys.executable, "-c", "from rljax.command import main; main()", "doctor"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"{tmp_path}/{name}.py hides Python's own '{name}'. Fix: rename it" in done.stderr


@pytest.mark.slow
def test_the_command_looks_into_a_run_folder(run, doctor):
    torn(run)
    assert "checkpoint_torn" in doctor(str(run))


# -- the hosts


def free_port() -> int:
    """The first of three free ports, below those that the system gives to outgoing calls."""
    for port in random.sample(range(20_000, 30_000), 100):
        with contextlib.ExitStack() as servers:
            try:
                for k in range(3):
                    servers.enter_context(socket.create_server(("", port + k)))
            except OSError:
                continue
            return port
    raise AssertionError("no free ports")


def variables_of(host: int, hosts: int, port: int) -> dict[str, str]:
    return {
        "RLJAX_COORDINATOR": f"127.0.0.1:{port}",
        "RLJAX_HOSTS": str(hosts),
        "RLJAX_HOST": str(host),
    }


def together(*calls) -> list[list]:
    """What calls that wait for each other return."""
    out = [None] * len(calls)

    def run(k):
        out[k] = list(calls[k]() or ())

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return out


def test_three_hosts_reach_each_other():
    port, other = free_port(), free_port()
    hosts = [lambda k=k: hosts_network(variables_of(k, 3, port), (other,), 20.0) for k in range(3)]
    for findings in together(*hosts):
        assert named(findings) == {}
        assert [f.name for f in findings] == ["hosts", "port", "port"]


def test_a_port_that_is_taken():
    port, other = free_port(), free_port()
    with socket.create_server(("", other)):  # of the first host; it answers nobody
        first, second = together(
            lambda: hosts_network(variables_of(0, 2, port), (other,), 2.0),
            lambda: hosts_network(variables_of(1, 2, port), (other,), 2.0),
        )
    assert named(first).keys() == {"port_taken"}
    assert named(second).keys() == {"host_unreachable", "host_does_not_reach_us"}


def test_a_way_that_is_closed_in_one_direction():
    """The second host answers, and its calls do not get through."""
    port = free_port()

    def second():
        meet(Cluster(f"127.0.0.1:{port}", 2, 1, "test"), 20.0)
        with socket.create_server(("", port + 1)) as server:
            caller, _ = server.accept()
            with caller:
                caller.recv(100)
                caller.sendall(json.dumps({"rljax": 1}).encode() + b"\n")

    first, _ = together(lambda: hosts_network(variables_of(0, 2, port), (), 2.0), second)
    assert named(first).keys() == {"host_does_not_reach_us"}


def test_hosts_that_are_not_there():
    alone = hosts_network(variables_of(0, 2, free_port()), (), 1.5)
    assert named(alone).keys() == {"hosts_do_not_meet"}
    assert named(hosts_network({}, (), 1.0)).keys() == {"hosts_not_named"}
    env = {**variables_of(1, 2, 8476), "RLJAX_COORDINATOR": "no-such-host.invalid:8476"}
    assert named(hosts_network(env, (), 1.0)).keys() == {"host_unknown"}
    env = variables_of(5, 2, 8476)
    assert named(hosts_network(env, (), 1.0)).keys() == {"hosts_variables_wrong"}


# -- that nothing is left out

OTHERS = {
    "rljax_of_another_project",
    "device_not_used",
    "xla_flags_of_tpu",
    "xla_flags_unknown",
    "xla_flag_value_wrong",
    "no_device",
    "hosts_variables_wrong",
    "jax_does_not_start",
    "jax_hangs",
    "sandbox_weak",
    "no_run_folder",
    "run_folder_in_use",
    "run_folder_of_a_url",
    "hosts_do_not_meet",
    "hosts_not_named",
    "host_unknown",
    "port_taken",
    "host_unreachable",
    "host_does_not_reach_us",
}


def names_in_the_source() -> set[str]:
    calls = [
        node
        for file in SOURCES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    wrong = [call for call in calls if call.func.id in ("broken", "warning", "_problem")]
    return {call.args[0].value for call in wrong if isinstance(call.args[0], ast.Constant)}


def test_every_name_is_provoked_and_documented():
    """But for a machine without any sandbox, which none of ours is."""
    provoked = {*VARIABLES, *PACKAGES, *MACHINE, *RUNS, *OTHERS}
    assert names_in_the_source() == provoked | {"sandbox_missing"}
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.M)) == names_in_the_source()
