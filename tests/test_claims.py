"""docs/claims.md: every claim has a row with a verdict, what a row cites is there, and every
command could start: its own parser takes it, and the configs that it runs are valid."""

import argparse
import re
import runpy
import shlex
import sys

import pytest
from conftest import GOLDEN, REPO
from test_blocks import check

from rljax.command.commands import COMMANDS
from rljax.config.flags import config_module, load_config_file
from rljax.config.policy_options import ComparisonOptions
from rljax.experiments.comparison import read_methods, require_comparable

PAGE = REPO / "docs" / "claims.md"
# The rows of our list of claims, and four rows beside them that say how a claim is looked at.
ROWS = """
000-02 000-04 000-07 000-08 000-17 000-19 000-20 000-25 000-32 000-33 000-34 000-47 000-48 000-49
000-50 000-57 000-78 001-01 001-03 001-05 001-08 001-09 001-12 001-14 001-20 001-21 001-32 001-36
001-38 001-39 001-40 001-44 001-45 001-46 001-48 001-60 001-62 001-65 002-14 002-15 002-16 002-17
002-19 003-42 003-43 003-44 003-80 003-93 003-94 003-95 004-03 004-04 004-05 004-06 004-11 004-13
004-21 004-28 004-32 004-34 004-38 004-41 004-46 004-51 004-53 004-68 004-69 004-70
000-03 000-13 000-37 001-24 001-25 003-28 003-38 003-39 003-46 003-48 004-20 004-35 004-37 004-61
""".split()
VERDICTS = {"holds", "partly", "not shown", "not tried", "reference"}
TESTS = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
COMMAND = re.compile(r"`((?:rljax|python) [^`]+)`")
FILES = re.compile(r"(?:benchmarks|configs|notebooks|docs|launchers)/[\w/]+\.(?:py|ipynb|md)")
CALLED = re.compile(r"`rljax ([a-z_]+)")


def rows() -> dict[str, list[str]]:
    """{row: [claim and source, what was measured, verdict]}."""
    lines = [line for line in PAGE.read_text().splitlines() if re.match(r"\| \d{3}-\d\d ", line)]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len({row for row, *_ in cells}) == len(cells), "a row stands twice"
    assert all(len(row) == 4 for row in cells)
    return {row: rest for row, *rest in cells}


def test_every_claim_has_a_row():
    assert sorted(rows()) == sorted(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_says_what_was_measured_or_why_nothing_was(row):
    claim, measured, verdict = rows()[row]
    assert claim and measured and verdict in VERDICTS
    if verdict in ("holds", "partly", "not shown"):
        assert TESTS.search(measured) or COMMAND.search(measured)
    if verdict == "not tried":
        assert re.search(r"not tried|need|other software", measured)


def test_what_is_cited_exists():
    text = PAGE.read_text()
    cited = TESTS.findall(text)
    assert len(cited) > 40
    for file, name in cited:
        assert re.search(rf"^ *def {name}\(", (REPO / file).read_text(), re.M), f"{file}::{name}"
    for file in FILES.findall(text) + re.findall(r"tests/[\w/]+\.py", text):
        assert (REPO / file).is_file(), file
    for name in CALLED.findall(text):
        assert name in COMMANDS, name
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (PAGE.parent / link).is_file(), link
    assert set(re.findall(r"\brow (\d{3}-\d\d)", text)) <= set(ROWS)


def commands() -> list[str]:
    """The commands of the page, each once."""
    return list(dict.fromkeys(COMMAND.findall(PAGE.read_text())))


def test_no_script_is_named_without_the_command_that_runs_it():
    text = PAGE.read_text()
    named = set(re.findall(r"benchmarks/\w+\.py", text))
    assert named == {word for line in commands() for word in line.split() if word in named}


class Parsed(Exception):
    """The arguments of a script were taken."""


def parse_alone(script: str, arguments: list[str], monkeypatch) -> None:
    """Runs a script as far as its arguments are parsed."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser):
        raise Parsed(parse(parser))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.syspath_prepend(REPO / "benchmarks")
    with pytest.raises(Parsed):
        runpy.run_path(str(REPO / script), run_name="__main__")


def dry(line: str, call, monkeypatch, markers: list[str]) -> None:
    """Runs a command in its dry form, or as far as its flags and configs are read."""
    program, *words = shlex.split(line)
    if program == "rljax":
        options, config, path = check(words)
        if hasattr(options, "dry_run"):
            code, out, err = call(*words, "--dry_run")
            assert code == 0 and out, err
        elif isinstance(options, ComparisonOptions) and not options.capabilities:
            if not path:
                path, config = "compare_offline", load_config_file("compare_offline")
            methods = read_methods(config_module(path).methods(), path)
            require_comparable(config, methods, options)
    elif words[:2] == ["-m", "pytest"]:
        assert all((REPO / word).exists() for word in words if "/" in word)
        lanes = [lane for flag, lane in zip(words[2:], words[3:], strict=False) if flag == "-m"]
        assert set(lanes) <= {marker.partition(":")[0] for marker in markers}
    else:
        parse_alone(words[0], words[1:], monkeypatch)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A working folder with the models that stand for the reader's own and for earlier runs."""
    for name in ("MODEL_FOLDER", "runs/prm/start/policy", "runs/prm/scorer/reward_model"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(GOLDEN / "hf" / "qwen3")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("line", commands())
def test_a_command_could_start(line, folders, rljax_command, monkeypatch, pytestconfig):
    dry(line, rljax_command, monkeypatch, pytestconfig.getini("markers"))


@pytest.mark.parametrize(
    "line",
    [
        "rljax compare --config=compare_process_scores",  # no --out
        "rljax evaluate --against --length_buckets",
        "rljax sweep sweep_staleness --config.rollouts.max_stale=1",
        "rljax sweep sweep_staleness --config.steps=-1",
        "rljax compare --config=real/compare_offline --out=x",  # no model
        "rljax compare --config=compare_offline --out=x --config.offline.examples_per_step=0",
        "python benchmarks/precision.py",  # no folder
        "python benchmarks/claims.py --experiments=klx",
        "python -m pytest -m slowly tests/correction",
        "python -m pytest tests/corrections",
    ],
)
def test_a_command_that_could_not_start_is_noticed(
    line, folders, rljax_command, monkeypatch, pytestconfig
):
    with pytest.raises((ValueError, AssertionError, SystemExit)):
        dry(line, rljax_command, monkeypatch, pytestconfig.getini("markers"))
