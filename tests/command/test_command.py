"""The command line: every command is found and explained, its errors end with 2 and a fix, and the
wheel holds all that it needs outside of a clone."""

import importlib
import importlib.metadata
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
from conftest import REPO, lanes, one_device_environment

import rljax
from rljax.command import COMMANDS
from rljax.command.launch import _print_config
from rljax.config import NAMESPACES, Config, field_names
from rljax.config.checks import Problems, check_bare_name, components_of
from rljax.config.flags import load_config_file, shipped_configs
from rljax.config.schema import FIELDS
from rljax.errors import InputError


@pytest.mark.smoke
def test_every_command_explains_itself(rljax_command):
    code, overview, _ = rljax_command("--help")
    assert code == 0
    for name, command in COMMANDS.items():
        assert f"  {name} " in overview
        code, out, err = rljax_command(*name.split(), "--help")
        assert code == 0 and err == "" and f"usage: rljax {name}" in out
        assert f"rljax {name}" in command.doc() or name == "data inspect"
        assert ("--config.batch.epochs=1" in out) == bool(command.config)
    assert rljax_command("--version")[1] == f"rljax {rljax.__version__}\n"
    assert rljax_command()[0] == 2


def test_a_full_disk_is_an_error_of_every_command(rljax_command, monkeypatch):
    def write(*_):
        with open("/dev/full", "w") as file:
            file.write("x")

    monkeypatch.setattr("rljax.command.configs.main", write)
    code, _, err = rljax_command("configs")
    assert code == 2 and "cannot be written; No space left on device. Fix: make room" in err


@pytest.mark.smoke
def test_launchers_are_the_same_commands():
    launchers = sorted((REPO / "launchers").glob("*.py"))
    texts = [path.read_text() for path in launchers]
    named = [name for name in COMMANDS if any(f'run("{name}")' in text for text in texts)]
    assert len(launchers) == len(named) and COMMANDS.keys() - named == {
        "demo",
        "configs",
        "report",
        "data inspect",
        "config show",
        "config diff",
        "doctor",
        "completion",
        "watch",
    }
    assert all(len(text.splitlines()) == 10 for text in texts)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("trian", "did you mean rljax train?"),
        ("evaluat RUN", "did you mean rljax evaluate?"),
        ("data", "rljax data prepare or data inspect"),
        ("data preprae", "did you mean rljax data prepare?"),
        ("prepare", "did you mean rljax data prepare?"),
        ("xyz", "`rljax --help` lists them"),
        ("train", "no --config. Fix: --config=quickstart"),
        ("train quickstar", "did you mean quickstart?"),
        ("train dapo:tiny", "did you mean presets/dapo?"),
        ("train configs/presets/dpao.py", "did you mean presets/dapo?"),
        ("train quickstart --config.stesp=1", "did you mean --config.steps?"),
        ("train quickstart more", "unknown arguments"),
        ("train quickstart --stesp=1", "--help lists the flags"),
        ("train quickstart --print_config=some", "all or changed"),
        ("train quickstart --config.steps", "--config.steps has no value"),
        ("evaluate RUN --config.steps=1", "takes no --config"),
        ("evaluate RUN --checkpoint=OTHER", "--checkpoint is given twice"),
        ("sweep quickstart", "has no sweep()"),
        ("report nowhere", "no such run folder"),
        ("scaling", "RUNS=(): needed"),
    ],
)
def test_mistakes_end_with_2_and_a_fix(line, says, rljax_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = rljax_command(*line.split())
    assert code == 2 and out == "" and err.startswith("error: ") and says in err
    assert list(tmp_path.iterdir()) == []


def test_configs_are_listed_with_their_first_sentence(rljax_command):
    code, out, _ = rljax_command("configs")
    listed = dict(line.split(maxsplit=1) for line in out.splitlines()[: len(shipped_configs())])
    files = sorted((REPO / "configs").rglob("*.py"))
    assert code == 0 and len(files) == len(listed) > 30
    for file in files:
        name = file.relative_to(REPO / "configs").with_suffix("").as_posix()
        text = " ".join(file.read_text().removeprefix('"""').split())
        assert listed[name].endswith(".") and text.startswith(listed[name][:-1])


def test_what_stands_behind_two_dashes_is_another_commands():
    given = ["up", "--hosts=2", "--", "rljax", "train", "quickstart", "--print_config"]
    assert _print_config(given) == (None, given)
    assert _print_config(["--print_config=changed", *given]) == ("changed", given)


@pytest.mark.parametrize("every", lanes([3], [1]))
def test_print_config_prints_what_config_reads(rljax_command, tmp_path, every):
    """Whole or in part, for each or every third config that ships; with what the command line
    changed."""
    for name in list(shipped_configs())[::every]:
        for how in ("", "=changed"):
            flags = ("--config.seed=7", "--config.trackers=console,wandb", f"--print_config{how}")
            code, out, _ = rljax_command("train", name, *flags)
            file = tmp_path / "again.json"
            file.write_text(out)
            config = load_config_file(name)
            config.seed, config.trackers = 7, ("console", "wandb")
            assert code == 0 and load_config_file(str(file)) == config
            assert how or set(json.loads(out)) == {
                name.split(".")[0] for name in field_names(Config)
            }
    short = json.loads(rljax_command("train", "quickstart", "--print_config=changed")[1])
    assert (
        short["steps"] == 160 and "seed" not in short and "beta1" not in short["sft"]["optimizer"]
    )


def test_help_lists_every_field_with_its_default_and_comment(rljax_command):
    out = rljax_command("train", "--help")[1]
    flat = " ".join(out.split())
    for name in field_names(Config):
        assert f"--config.{name}=" in out
    for field, spec in FIELDS.items():
        assert spec.help, f"{field}: no help"
        assert spec.help in flat
    assert "--config.actor_optimizer.lr=1e-06 (number) Learning rate after warm-up" in flat
    assert "--config.critic_optimizer.lr=1e-05 (number)" in flat
    assert "--config.baseline_filters" not in out and "rows that they reject leave loss" in flat


@pytest.mark.parametrize(
    ("arguments", "there", "absent"),
    [
        (
            ("train", "--help", "kl"),
            ("--config.algorithm.kl_in_loss=", "algorithm:"),
            ("--dry_run", "mesh:"),
        ),
        (("train", "-h", "KL", "loss"), ("--config.algorithm.kl_in_loss=",), ("kl_horizon",)),
        (("train", "quickstart", "--help", "dry"), ("--dry_run=",), ("--config.steps=",)),
        (
            ("train", "--help", "steps"),
            ("--config.steps=", "--config.sft.optimizer.warmup_steps="),
            (),
        ),
        (("data", "prepare", "--help", "split"), ("--test_fraction=",), ("--out=", "--config")),
    ],
)
def test_a_word_behind_help_picks_the_fields_that_are_about_it(
    arguments, there, absent, rljax_command
):
    code, out, _ = rljax_command(*arguments)
    assert code == 0 and len(out.splitlines()) < 250
    for text in there:
        assert text in out
    for text in ("usage:", *absent):
        assert text not in out
    words = [word.lower() for word in arguments[1:] if word not in ("prepare", "quickstart")][1:]
    for entry in re.split(r"\n(?=  --)", out)[1:]:
        entry = entry.partition("\n\n")[0]  # without the section that follows
        assert all(word in " ".join(entry.lower().split()) for word in words)


def test_a_word_that_no_help_holds_is_said(rljax_command):
    code, out, err = rljax_command("train", "--help", "zebra")
    assert code == 2 and not out and "has zebra in its name or its help. Fix: --help" in err


def test_a_mistyped_path_is_answered_before_jax_is_imported(tmp_path):
    code = (
        "import sys\n"
        "from rljax.command import main\n"
        "for line in sys.argv[1:]:\n"
        "    try: main(line.split())\n"
        "    except SystemExit as end: print(end.code, 'jax' in sys.modules)\n"
    )
    lines = [
        ("train quickstart --config.model=./nope --config.trackers=consol", "is not a folder"),
        ("plan quickstart --config.data.train=nope.jsonl --config.steps=-1", "does not exist"),
        ("inspect quickstart --config.dataflow=gpro", "did you mean grpo"),
        ("train quickstart --config.actor_optimizer.name=adamv", "did you mean adamw"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *(line for line, _ in lines)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        timeout=120,
    )
    assert done.stdout == "2 False\n" * len(lines), done.stderr
    said = done.stderr.split("error: ")[1:]
    assert len(said) == len(lines), done.stderr
    for (_, says), error in zip(lines, said, strict=True):
        assert says in error
    assert "did you mean console" in said[0] and "steps=-1: must be >= 0" in said[1]


@pytest.mark.parametrize(
    ("words", "exit_code"),
    [(["completion", "dos"], 2), pytest.param(["completion", "bash"], 0, marks=pytest.mark.slow)],
)
def test_the_end_of_a_command_waits_for_threads_and_exit_functions_and_frees_nothing(
    words, exit_code
):
    """Threads of XLA and TensorStore abort a process whose Python is being taken down."""
    code = (
        "import atexit, os, threading, time\n"
        "import jax\n"
        "from rljax.command import main\n"
        "class Freed:\n"
        "    def __del__(self, write=os.write): write(2, b'freed')\n"
        "freed = Freed()\n"
        "def work():\n"
        "    time.sleep(0.2)\n"
        "    print('thread')\n"
        "threading.Thread(target=work).start()\n"
        "atexit.register(print, 'exit function')\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )
    assert done.returncode == exit_code
    said = done.stdout.splitlines()
    assert "thread" in said and said[-1] == "exit function" and "freed" not in done.stderr


@pytest.mark.parametrize("home", NAMESPACES.values())
def test_names_are_known_without_jax(home):
    """The sources say which functions of a namespace are components: those with a contract."""
    functions = {
        name: value
        for name, value in vars(importlib.import_module(home)).items()
        if inspect.isfunction(value) and f"{value.__module__}.".startswith(f"{home}.")
    }
    declared = {name for name, value in functions.items() if hasattr(value, "contract")}
    assert set(components_of(home)) == declared, home


@pytest.mark.parametrize(
    ("field", "helper"), [("algorithm.reward_shaping", "apply_shaping"), ("trackers", "library")]
)
def test_a_function_that_serves_a_namespace_is_no_component(field, helper):
    problems = Problems()
    assert not check_bare_name(field, helper, problems)
    assert f"has no '{helper}'" in problems[0]


# -- what is installed


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The folder of an unpacked wheel."""
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip("setuptools of 77 or later builds the wheel")
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("rljax", "configs"):
        shutil.copytree(
            REPO / name, folder / "source" / name, ignore=shutil.ignore_patterns("__py*")
        )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPO / name, folder / "source" / name)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=folder / "source", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("*.whl")
    zipfile.ZipFile(file).extractall(folder / "unpacked")
    return folder / "unpacked"


def test_a_wheel_holds_configs_command_license_and_version(wheel):
    for home, name in (("rljax", "rljax"), ("configs", "rljax/configs")):
        for file in (REPO / home).rglob("*"):
            if file.suffix in (".py", ".json"):
                assert (wheel / name / file.relative_to(REPO / home)).is_file(), file
    about = wheel / f"rljax_lm-{rljax.__version__}.dist-info"
    assert (about / "licenses" / "LICENSE").read_text() == (REPO / "LICENSE").read_text()
    metadata = importlib.metadata.PathDistribution(about).metadata
    assert metadata["Name"] == rljax.DISTRIBUTION
    assert metadata["License-Expression"] == "Apache-2.0"
    (script,) = importlib.metadata.PathDistribution(about).entry_points
    assert (script.name, script.value) == ("rljax", "rljax.command:main")
    assert {path.name for path in wheel.iterdir()} == {"rljax", about.name}


@pytest.mark.slow
def test_the_command_works_from_a_wheel_in_an_empty_folder(wheel, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(wheel)}

    def call(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "rljax", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    done = call("configs")
    assert done.returncode == 0 and str(wheel / "rljax" / "configs") in done.stdout
    done = call("sweep", "sweep_quickstart", "--dry_run", "--config.steps=3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("-m rljax train --config=sweep_quickstart --config.steps=3") == 6
    assert list(tmp_path.iterdir()) == []


def test_version_and_license_are_said_once():
    assert "Apache License" in (REPO / "LICENSE").read_text()
    assert rljax.__version__ not in (REPO / "pyproject.toml").read_text().partition("[tool")[0]
    assert inspect.getsource(rljax).count(rljax.__version__) == 1


def test_the_name_of_the_distribution_is_said_once():
    """pyproject.toml must spell it too; it is not the import's, which is another project's."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert project["name"] == rljax.DISTRIBUTION != "rljax"
    assert project["scripts"] == {"rljax": "rljax.command:main"}
    written = [
        str(path)
        for path in (REPO / "rljax").rglob("*.py")
        if re.search(rf"[\"']{rljax.DISTRIBUTION}\b", path.read_text())
    ]
    assert written == [str(REPO / "rljax" / "__init__.py")]
    # Nothing asks for the metadata of the import's name, but for doctor, which looks for the other.
    asking = [
        path.name
        for path in (REPO / "rljax").rglob("*.py")
        if "importlib.metadata" in (text := path.read_text())
        and re.search(r"(?<!getLogger)[\[(]\s*[\"']rljax[\"']\s*[,\])]", text)
    ]
    assert asking == ["packages.py"]


@pytest.mark.slow
def test_the_demo_trains_in_an_empty_folder_and_ends_on_a_report(wheel, tmp_path):
    """With fewer steps than `rljax demo` has by itself."""
    environment = {**one_device_environment(), "PYTHONPATH": str(wheel)}
    command = [sys.executable, "-m", "rljax", "demo", "--config.steps=2", "--config.sft.steps=2"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert f"report:       runs/{run.name}/report.html  (open it in a browser)" in done.stdout
    assert re.match(
        r"The task: how often is there an \"a\"\? '[a-f]{8}>' is answered by '[0-4]'\.", done.stdout
    )
    assert "| rl | " in done.stdout and " step 4/4 | " in done.stdout
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    assert (run / "policy" / "model.safetensors").is_file() and (run / "report.html").is_file()


def test_a_variant_that_a_config_does_not_know_is_refused(rljax_command):
    assert load_config_file("quickstart:tiny") != load_config_file("quickstart")
    code, _, said = rljax_command("train", "quickstart:tinyy", "--dry_run")
    assert code == 2 and "no variant 'tinyy'" in said


def test_a_reader_that_leaves_is_no_traceback():
    command = f"{sys.executable} -m rljax train --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=REPO)
    assert done.stdout and "Traceback" not in done.stderr


def test_escape_codes_of_a_response_do_not_reach_the_terminal():
    error = InputError("a\x1b[31m b", value="\x1b[0m", rule="two\nlines\x9b", fix="c")
    assert not {"\x1b", "\x9b"} & set(str(error)) and "\\x1b[31m b" in str(error)
    assert "two\nlines" in str(error)
