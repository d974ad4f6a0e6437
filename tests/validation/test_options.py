"""Options of launchers: one declaration gives the flag, its help, its default and its check."""

import dataclasses
import math
import os

import pytest
from absl import flags

from rljax.command.commands import COMMANDS
from rljax.config.declare import (
    Options,
    check_options,
    define_flags,
    option,
    options_of,
    parsed_options,
    whole_numbers,
)
from rljax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Few(Options):
    folders: tuple[str, ...] = option((), "Folders", required=True, positional=True)
    rate: float | None = option(None, "Of everything", above=0)
    count: int = option(4, "How many", low=1, high=8)
    sizes: tuple[int, ...] = option((1, 2), "Of each", flag="size")
    kind: str = option("a", "Which", choices=("a", "b"))
    names: tuple[str, ...] = option(("x",), "Of things")
    loud: bool = option(False, "Print more")

    def conflicts(self):
        if self.count < max(self.sizes):
            yield "sizes", self.sizes, f"at most --count={self.count}"


def parse(*arguments):
    values = flags.FlagValues()
    define_flags(Few, values)
    return parsed_options(Few, values(["launcher", *arguments])[1:], values)


def test_flags_give_the_options_with_their_types():
    assert parse("here") == Few(("here",))  # the defaults are those of the fields
    given = parse("a", "b", "--rate=0.5", "--count=3", "--size=3,1,3", "--kind=b", "--names=p, q,")
    assert given == Few(("a", "b"), 0.5, 3, (1, 3), "b", ("p", "q"))
    assert parse("a", "--loud").loud and not parse("a", "--noloud").loud
    given = parse("a", "--size=[3,1]", "--names=[p,'q,r']")
    assert given == Few(("a",), sizes=(1, 3), names=("p", "q,r"))
    with pytest.raises(InputError, match=r"--names=\[p\]; a list of one is written p"):
        parse("a", "--names=[p]")
    with pytest.raises(InputError, match="--names: got 'None'; a flag has no null. Fix: leave"):
        parse("a", "--names=None")
    with pytest.raises(InputError, match="--size: got '1,x'.*whole numbers"):
        parse("a", "--size=1,x")
    with pytest.raises(flags.Error, match="--kind=c"):
        parse("a", "--kind=c")


def test_every_problem_is_listed_in_the_order_of_the_fields():
    with pytest.raises(InputError) as error:
        check_options(Few((), rate=math.inf, count=0, sizes=(1, 9), kind="c"))
    assert str(error.value).splitlines()[1:] == [
        "  FOLDERS=(): needed: Folders",
        "  --rate=inf: must be > 0",
        "  --count=0: must be >= 1 and <= 8",
        "  --size=(1, 9): at most --count=0",
        "  --kind=c: one of a, b",
        "Fix: --help lists the flags",
    ]
    check_options(Few(("x",), rate=None))


def test_what_is_written_is_neither_read_nor_a_device(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "q_train.jsonl", "q_test.jsonl", "judge.py", "file"):
        (tmp_path / name).write_text("x\n")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "rows.jsonl")
    (tmp_path / "rows").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.jsonl").write_text("x\n")
    os.mkfifo(tmp_path / "pipe.jsonl")

    def problem(command: str, **values) -> str:
        try:
            options_of(COMMANDS[command].options, values)
        except InputError as error:
            return str(error)
        return ""

    label = dict(judge="judge.py:ask", trust_code=True)
    for data, out, rule in (
        ("rows.jsonl", "rows.jsonl", "--out=rows.jsonl: it is --data, which is read"),
        ("rows.jsonl", "./rows/../rows.jsonl", "it is --data, which is read"),
        ("rows.jsonl", "link.jsonl", "it is --data, which is read"),
        ("link.jsonl", "rows.jsonl", "it is --data, which is read"),
        ("file,rows.jsonl", "rows.jsonl", "it is --data, which is read"),
        ("row*.jsonl", "rows.jsonl", "it is --data, which is read"),
        ("q_{split}.jsonl", "q_test.jsonl", "it is --data, which is read"),
        ("my_task(path='rows.jsonl')", "rows.jsonl", "it is --data, which is read"),
        ("folder", "folder/train.jsonl", "it is --data, which is read"),
        ("rows.jsonl", "judge.py", "it is --judge, which is read"),
        ("rows.jsonl", "pipe.jsonl", "is not a file"),
        ("rows.jsonl", "/dev/stdout", "is not a file"),
        ("rows.jsonl", "/dev/full", "is not a file"),
        ("rows.jsonl", "file/x/pairs.jsonl", f"{tmp_path}/file is a file, not a folder"),
    ):
        told = problem("label preferences", data=data, out=out, **label)
        assert rule in told and told.endswith("Fix: give another path for --out"), (data, out)
    assert problem("label preferences", data="rows.jsonl", out="new/pairs.jsonl", **label) == ""
    two = dict(checkpoint="rows", out="a.jsonl", pairs="./a.jsonl")
    assert "--out is written there, too" in problem("sample", **two)
    both = dict(checkpoint="rows", out="a.json", answers="link.jsonl", data="rows.jsonl")
    assert "--answers=link.jsonl: it is --data" in problem("evaluate", **both)
    assert "it is --source" in problem("data prepare", source="rows", out="rows")
    named = dict(source="rows.jsonl", data_source="rows", out="rows")  # a name, no folder
    assert problem("data prepare", **named) == ""
    assert problem("evaluate", checkpoint="rows", out="rows/result.json") == ""
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / "rows" / name).write_text("")
    of_a_run = problem("evaluate", checkpoint="rows", out="rows/samples.jsonl")
    assert f"it is what the run in {tmp_path}/rows has written; name another file" in of_a_run
    assert problem("evaluate", checkpoint="rows", out="rows/report.html") == ""
    assert "file is a file" in problem("push", run="rows", to="a/b", out="file/x")


def test_a_file_is_not_written_over_a_folder_nor_a_folder_over_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x\n")
    (tmp_path / "folder.jsonl").mkdir()
    of_both = [  # (a command whose --out is a file, or a folder, and its other options)
        ("folder.jsonl", "evaluate", dict(checkpoint="run")),
        ("folder.jsonl", "sample", dict(checkpoint="run")),
        ("folder.jsonl", "label preferences", dict(data="rows.jsonl")),
        ("folder.jsonl", "scaling", {}),
        ("file", "sample", dict(checkpoint="run", iterations=2)),
        ("file", "sweep", {}),
        ("file", "push", dict(run="run", to="a/b")),
        ("file", "data prepare", dict(source="rows.jsonl")),
    ]
    for path, command, values in of_both:
        with pytest.raises(InputError) as caught:
            options_of(COMMANDS[command].options, {**values, "out": path})
        kind, other = ("folder", "file") if path == "folder.jsonl" else ("file", "folder")
        message = str(caught.value)
        assert f"--out={path}: it is a {kind}" in message and f"name a {other}" in message, command


def test_a_folder_without_permission_is_said_before_anything_is_computed():
    with pytest.raises(InputError, match="--out=/proc/x.json: nothing can be written into /proc;"):
        options_of(COMMANDS["evaluate"].options, dict(checkpoint="run", out="/proc/x.json"))


def test_no_option_writes_over_the_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def get_config(variant): ...\n")
    plan = COMMANDS["plan"].options
    for config_file in ("mine.py", "./mine.py:tiny"):
        with pytest.raises(InputError, match="--json=mine.py: it is --config, which is read"):
            check_options(plan(json="mine.py"), config_file)
    check_options(plan(json="plan.json"), "mine.py")
    with pytest.raises(InputError, match="it is a folder; name a file"):
        check_options(plan(json=str(tmp_path)), "mine.py")


def test_arguments_that_no_option_takes_are_refused():
    @dataclasses.dataclass(frozen=True)
    class Plain(Options):
        out: str = option("", "A file")

    values = flags.FlagValues()
    define_flags(Plain, values)
    with pytest.raises(InputError, match=r"unknown arguments: got \['more'\]"):
        parsed_options(Plain, values(["launcher", "more"])[1:], values)


def test_whole_numbers_are_sorted_and_given_once():
    assert whole_numbers("4,1, 4", "k") == (1, 4)


LAUNCHERS = list(dict.fromkeys(one.options for one in COMMANDS.values() if one.options != Options))


@pytest.mark.parametrize("kind", LAUNCHERS, ids=lambda kind: kind.__name__)
def test_every_option_says_what_it_is_and_its_default_is_in_range(kind):
    assert len(LAUNCHERS) >= 15
    for field in dataclasses.fields(kind):
        spec = field.metadata["spec"]
        assert spec.help and spec.help[0].isupper(), field.name
        if not spec.required:
            assert spec.problem(field.default) == "", field.name
