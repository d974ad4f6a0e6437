"""One style of help and errors over all commands: standard output for what was asked, standard
error for what is wrong, with its fix; exit codes 0 and 2; never a traceback."""

import dataclasses
import typing

import pytest

from rljax.command import COMMANDS
from rljax.config.declare import option_words

NEEDS_NOTHING = {"configs", "demo", "doctor"}  # of the arguments
TAKES_CONFIG = [name for name, command in COMMANDS.items() if command.config]


def failed(answer) -> str:
    code, out, err = answer
    assert code == 2 and out == "" and err.startswith("error: ") and "Fix: " in err, answer
    assert "Traceback" not in err and not err.rstrip().endswith(("Fix:", ".."))
    return err


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_one_form(name, rljax_command):
    answers = [
        rljax_command(*name.split(), "--help"),
        rljax_command(*name.split(), "-h"),
        rljax_command("help", *name.split()),
    ]
    assert answers[0] == answers[1] == answers[2]
    code, out, err = answers[0]
    lines = out.splitlines()
    assert code == 0 and err == "" and lines[0].startswith(f"usage: rljax {name}")
    assert lines[1] == "" and lines[2].partition(":")[0] and "rljax " in lines[2]
    assert ("Flags:" in lines) == bool(dataclasses.fields(COMMANDS[name].options))
    assert max(len(line) for line in lines if not line.startswith("  --")) <= 110
    for flag in option_words(COMMANDS[name].options):
        assert f"  {flag.removeprefix('--no')}" in out or f"  {flag}" in out or "--no" in flag


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_flag_is_named_with_the_nearest(name, rljax_command):
    words = name.split()
    assert "'--no_such_flag'" in failed(rljax_command(*words, "--no_such_flag=1"))
    flags = [f for f in option_words(COMMANDS[name].options) if f.endswith("=") and len(f) > 6]
    for flag in flags[:1]:
        typed = flag[:-2] + flag[-2] * 2 + "="  # its last letter twice
        assert f"did you mean {flag[:-1]}?" in failed(rljax_command(*words, f"{typed}1"))


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in NEEDS_NOTHING])
def test_a_missing_argument_is_named(name, rljax_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed(rljax_command(*name.split()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_values_of_another_type_are_refused(name, rljax_command):
    kind = COMMANDS[name].options
    hints = typing.get_type_hints(kind)
    words = [*name.split(), *(["quickstart"] if COMMANDS[name].config == "needed" else [])]
    for field in dataclasses.fields(kind):
        spec, flag = field.metadata["spec"], field.metadata["spec"].flag or field.name
        kinds = typing.get_args(hints[field.name]) or (hints[field.name],)
        if spec.positional or not (spec.choices or {int, float, bool} & set(kinds)):
            continue
        err = failed(rljax_command(*words, f"--{flag}=no-value-of-this"))
        assert f"--{flag}" in err and "no-value-of-this" in err
        assert "literal" not in err and "convert" not in err


@pytest.mark.parametrize("name", TAKES_CONFIG)
def test_a_config_that_is_wrong_is_refused_by_all_alike(name, rljax_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("steps: many\n")
    (tmp_path / "c.py").write_text("def get_config(): return 1 / 0\n")
    words = [*name.split(), "--config"]
    assert "no such config file" in failed(rljax_command(*words, "nothing.yaml"))
    assert "steps=many: must be a whole number" in failed(rljax_command(*words, "c.yaml"))
    assert "did you mean --config.steps?" in failed(
        rljax_command(*words, "quickstart", "--config.stesp=1")
    )
    assert "must be a whole number" in failed(
        rljax_command(*words, "quickstart", "--config.steps=x")
    )
    code, out, err = rljax_command(*words, "c.py")
    assert code == 2 and out == "" and err.startswith("error: c.py:1: ") and "ZeroDivision" in err


MISSING = [
    "train nothing",
    "inspect nothing.yaml",
    "plan nothing.json",
    "play nothing --human",
    "evaluate nothing",
    "report nothing",
    "push nothing --to=me/x",
    "replay nothing",
    "chat nothing",
    "sweep nothing",
    "pipeline nothing.yaml",
    "data prepare --source=nothing.jsonl --out=here",
    "sample nothing --out=o.jsonl",
    "label steps --checkpoints=nothing --out=o",
    "label preferences --data=nothing.jsonl --out=o.jsonl --judge=judge()",
    "score steps --reward_model=nothing --data=nothing.jsonl",
    "scaling nothing",
    "compare --config=nothing --out=o",
    "config show nothing",
    "config diff nothing quickstart",
    "config diff quickstart nothing.yaml",
    "doctor --nojax --ports=0",
    "completion csh",
    "pod nothing",
]


@pytest.mark.parametrize("line", MISSING)
def test_what_is_not_there_is_named(line, rljax_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed(rljax_command(*line.split()))
    assert {path.name for path in tmp_path.iterdir()} <= {"o"}


@pytest.mark.parametrize("group", ["data", "label", "config"])
def test_a_word_that_begins_several_commands_lists_them(group, rljax_command):
    code, out, err = rljax_command(group, "--help")
    listed = [name for name in COMMANDS if name.startswith(f"{group} ")]
    assert code == 0 and err == "" and all(f"  {name}" in out for name in listed)
    assert "  train" not in out and "did you mean" in failed(rljax_command(group))
