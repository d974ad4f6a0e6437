"""The blocks of README and docs/: bash takes every command line, rljax its flags and fields, and in
the slow lane every block runs, page by page, in a folder with the files of the repository.

A block of python that begins with `# name.py` is that file, and is imported; others are run.
RUN_DIR stands for the newest run of the page, else for a small one. A block that cannot run in a
test has `<!-- not run: why -->` above it; one that needs a model and data, or hours, has
`<!-- dry run: why -->` and runs with --dry_run, on small ones.
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from absl import flags
from conftest import REPO, one_device_environment
from placeholders import write_placeholders

from rljax.command import COMMANDS
from rljax.config import Config
from rljax.config.declare import define_flags, parsed_options
from rljax.config.flags import config_flags, load_config_file
from rljax.config.service_options import PodOptions
from rljax.config.texts import with_texts
from rljax.pods import read_pod

PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:<!-- ([^\n]*) -->\n)?^```(bash|python)\n(.*?)^```", re.DOTALL | re.MULTILINE
)
# Blocks of these pages run elsewhere: README's in .ci/run, test_examples and the pages that it
# links. (What the parts of extend/ do is asserted in test_docs.)
ELSEWHERE = {"README.md"}


def blocks(path) -> list[tuple[str, str, str]]:
    """(why it is not run or "", language, text) of every block of a page; --dry_run is in the text
    of those that are run dry."""
    found = []
    for note, kind, text in BLOCK.findall(path.read_text(encoding="utf-8")):
        if "dry run: " in note:
            text = re.sub(
                r"launchers/(train|sweep)\.py|rljax (train|sweep) \S+", r"\g<0> --dry_run", text
            )
        found.append((note.removeprefix("not run: ") if "not run: " in note else "", kind, text))
    return found


def name(path) -> str:
    return str(path.relative_to(REPO))


WITH_BLOCKS = [path for path in PAGES if blocks(path)]
OF_BASH = [path for path in WITH_BLOCKS if any(kind == "bash" for _, kind, _ in blocks(path))]


def commands(text: str) -> list[list[str]]:
    """The words of every rljax command of a block, from its name on."""
    out, started = [], ""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        started += line
        try:
            words = shlex.split(started, comments=True)
        except ValueError:  # a quotation that goes on
            started += "\n"
            continue
        started = ""
        while words:
            end = next(
                (i for i, word in enumerate(words) if word in ("&&", "&", "|", ">", ";")), None
            )
            out += _command(words[:end])
            words = [] if end is None else words[end + 1 :]
    return out


def _command(words: list[str]) -> list[list[str]]:
    while words and re.fullmatch(r"\w+=\S+", words[0]):
        words = words[1:]
    if words and words[0].endswith("rljax"):
        return [words[1:]]
    if len(words) > 1 and words[1].startswith("launchers/"):
        launcher = (REPO / words[1]).read_text()
        return [[*re.search(r'run\("(.+?)"', launcher)[1].split(), *words[2:]]]
    # What another program is given as text.
    given = [word for word in words if word.startswith("--command=") and "rljax " in word]
    return [shlex.split(word.rpartition("rljax ")[2]) for word in given]


def check(words: list[str]):
    """Raises where rljax would not take the flags of a command, or the fields of its config;
    returns its options, its config, and the path of that."""
    if words[:1] in (["--help"], ["--version"]) or "--help" in words:
        return None
    called = next(" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in COMMANDS)
    command = COMMANDS[called]
    path, fields, others = config_flags(words[len(called.split()) :])
    others = [word for word in others if not word.startswith("--print_config")]
    values = flags.FlagValues()
    define_flags(command.options, values)
    others = [word.replace("$SLURM_ARRAY_TASK_ID", "0") for word in others]
    positional = values([called, *others])[1:]
    of_data = command.data_with and values[command.data_with].value
    if of_data:
        positional = []
    elif command.config not in ("", "optional") and positional and not path:
        path, *positional = positional
    options = parsed_options(command.options, positional, values)
    ships = path and (REPO / path.partition(":")[0]).exists() or path and "/" not in path[:3]
    own = path and (path.startswith(("my", "RUN")) or path.endswith((".yaml", ".json")))
    config = load_config_file(path) if ships and not own else Config()
    config = with_texts(config, fields, called, "--config.")
    if isinstance(options, PodOptions):
        if options.type:
            read_pod(options.type, options.slices)
        if options.command:
            check(list(options.command))
    return options, config, path


@pytest.mark.parametrize("path", OF_BASH, ids=name)
def test_rljax_takes_every_command(path, monkeypatch):
    monkeypatch.chdir(REPO)
    for _, kind, text in blocks(path):
        if kind == "bash":
            subprocess.run(["bash", "-n"], input=text, text=True, check=True)
            for words in commands(text):
                check(words)


def test_python_blocks_are_python():
    for path in WITH_BLOCKS:
        for _, kind, text in blocks(path):
            if kind == "python":
                ast.parse(text, name(path))


def test_every_block_names_its_language():
    """One that names none would be a command that nothing checks."""
    for path in (path for path in PAGES if name(path) not in ELSEWHERE):
        fences = re.findall(r"^```.*$", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert "```" not in fences[::2], name(path)
        assert set(fences[1::2]) <= {"```"}, name(path)


def test_few_blocks_are_not_run_and_say_why():
    every = [(name(path), why) for path in WITH_BLOCKS for why, _, _ in blocks(path)]
    skipped = [(page, why) for page, why in every if why]
    assert len(every) > 60 and len(skipped) < len(every) / 4
    assert [page for page, why in skipped if len(why) < 10] == []
    hardware = re.compile(r"needs|goes on|you are|serves|run|shape|compiles|account")
    assert [(page, why) for page, why in skipped if not hardware.search(why)] == []


def test_a_wrong_flag_field_or_config_is_noticed():
    for line in (
        "rljax train quickstart --config.stepz=2",
        "rljax plan quickstart --topolgy=x",
        "rljax train quickstarts",
        "python launchers/evaluate.py --samples=0",
    ):
        (words,) = commands(line)
        with pytest.raises((ValueError, flags.Error)):
            check(words)
    (words,) = commands("A=1 .venv/bin/python launchers/label_steps.py \\\n  --out=x  # text")
    assert words == ["label", "steps", "--out=x"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """rljax, python and pip of this environment on PATH; pip does nothing, as all is there."""
    bin = tmp_path_factory.mktemp("bin")
    python = f'exec "{sys.executable}"'
    scripts = {"python": f'{python} "$@"', "rljax": f'{python} -m rljax "$@"', "pip": "exit 0"}
    for called, script in scripts.items():
        (bin / called).write_text(f"#!/bin/sh\n{script}\n")
        (bin / called).chmod(0o755)
    variables = one_device_environment()
    return {**variables, "PATH": f"{bin}{os.pathsep}{variables['PATH']}", "BIN": str(bin)}


@pytest.fixture(scope="module")
def small_run(tmp_path_factory, environment):
    """The run that RUN_DIR stands for in a block without one of its page before it."""
    folder = tmp_path_factory.mktemp("small_run") / "small"
    command = ["rljax", "train", "quickstart:tiny", f"--config.run_dir={folder}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return folder


RUN = [
    path
    for path in WITH_BLOCKS
    if name(path) not in ELSEWHERE and not all(why for why, _, _ in blocks(path))
]


@pytest.mark.slow
@pytest.mark.parametrize("path", RUN, ids=name)
def test_every_block_runs(path, environment, tmp_path, request):
    for part in ("configs", "launchers", "examples", "benchmarks", "docs", "pyproject.toml"):
        (tmp_path / part).symlink_to(REPO / part)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(environment["BIN"])
    if any("_FOLDER" in text for why, _, text in blocks(path) if not why):
        write_placeholders(tmp_path)
    for why, kind, text in blocks(path):
        if why:
            continue
        if kind == "python" and (own := re.match(r"# (\w+)\.py\n", text)):
            (tmp_path / f"{own[1]}.py").write_text(text)
            text = f"import {own[1]}"
        runs = sorted((tmp_path / "runs").glob("*/config.json"), key=lambda f: f.stat().st_mtime)
        if not runs and "RUN_DIR" in text and not re.search(r"rljax train|launchers/train", text):
            runs = [tmp_path / "runs" / "small" / "config.json"]
            shutil.copytree(request.getfixturevalue("small_run"), runs[0].parent)
        if runs:
            text = re.sub(r"\bRUN_DIR\b", str(runs[-1].parent), text)
        if kind == "bash":  # a line that needs a run of a line before it finds it
            lines = re.sub(r"\\\n\s*", " ", text).splitlines()
            newest = 'RUN_DIR="$(ls -td runs/*/ 2>/dev/null | head -1)"; RUN_DIR="${RUN_DIR%/}"'
            text = "\n".join(
                f"{newest}\n{line.replace('RUN_DIR', '$RUN_DIR')}" if "RUN_DIR" in line else line
                for line in lines
            )
        ends = "trap 'kill $(jobs -p) 2> /dev/null || :' EXIT\n"  # of a server, if a line fails
        command = ["bash", "-euo", "pipefail", "-c", ends + text]
        command = command if kind == "bash" else [sys.executable, "-c", text]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=3600
        )
        assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
