"""rljax.train(data=...): whatever holds rows in a Python program becomes the file of these rows."""

import datetime
import decimal
import enum
import importlib
import itertools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pytest

from rljax.config import python_rows
from rljax.config.from_python import config_from
from rljax.config.python_words import python_words
from rljax.errors import InputError

ROWS = [
    {"prompt": "1+1=", "ground_truth": "2", "extra_info": {"level": 1, "tags": ["a", "b"]}},
    {"prompt": "ä\n", "ground_truth": "4", "extra_info": {"level": 2, "tags": []}},
]
FLAT = [{"prompt": "a", "score": 1.5}, {"prompt": "b", "score": 2.5}, {"prompt": "c", "score": 3.0}]


class Indexed:
    """A data set of torch: a length and items by number."""

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return ROWS[index]


class Iterated:
    """Rows again and again, of a class that has nothing but an iterator."""

    def __iter__(self):
        return iter(ROWS)


def library(name: str):
    return pytest.importorskip(name)


def dataset_of(rows):
    return library("datasets").Dataset.from_list(rows)


def frame_of(rows):
    return library("pandas").DataFrame(rows)


KINDS = {
    "list": lambda rows: rows,
    "tuple": tuple,
    "iterator": iter,
    "generator": lambda rows: (dict(row) for row in rows),
    "array of objects": lambda rows: np.array(rows, object),
    "columns": lambda rows: {name: [row[name] for row in rows] for name in rows[0]},
    "pyarrow table": pa.Table.from_pylist,
    "pyarrow batches": lambda rows: pa.Table.from_pylist(rows).to_reader(max_chunksize=1),
    "pyarrow structs": pa.array,
    "pyarrow dataset": lambda rows: pyarrow.dataset.dataset(pa.Table.from_pylist(rows)),
    "datasets": dataset_of,
    "datasets, streamed": lambda rows: dataset_of(rows).to_iterable_dataset(),
    "datasets, shuffled twice": lambda rows: dataset_of(rows[::-1]).select(
        [*range(len(rows))][::-1]
    ),
    "pandas": frame_of,
    "pandas, its index": lambda rows: frame_of(rows).set_axis([7, 7, 9][: len(rows)]),
    "pandas, a series of dicts": lambda rows: library("pandas").Series(rows),
    "polars": lambda rows: library("polars").DataFrame(rows),
}


def made(folder, data=None, **fields):
    return config_from("", None, data, None, {"run_dir": str(folder), **fields})


def rows_in(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("rows", [ROWS, FLAT, ROWS[:1]], ids=["nested", "flat", "one"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_file_holds_the_rows_that_were_given(kind, rows, tmp_path):
    found = made(tmp_path, KINDS[kind](rows)).data.train
    assert rows_in(found) == rows and Path(found).parent == tmp_path / "inputs"
    assert made(tmp_path, rows).data.train == found  # the same rows are the same file
    assert [path.name for path in (tmp_path / "inputs").iterdir()] == [Path(found).name]


@pytest.mark.parametrize("value", [Indexed(), Iterated()])
def test_a_class_of_ones_own(value, tmp_path):
    assert rows_in(made(tmp_path, value).data.train) == ROWS


def test_splits_are_train_and_test(tmp_path):
    datasets = library("datasets")
    one, other = dataset_of(ROWS[:1]), dataset_of(ROWS[1:])
    both = [
        datasets.DatasetDict(train=one, test=other, validation=one),
        datasets.IterableDatasetDict(
            train=one.to_iterable_dataset(), test=other.to_iterable_dataset()
        ),
        {"train": frame_of(ROWS[:1]), "test": iter(ROWS[1:])},
    ]
    for splits in both:
        data = made(tmp_path, splits).data
        assert (rows_in(data.train), rows_in(data.test)) == (ROWS[:1], ROWS[1:])
    assert made(tmp_path, datasets.DatasetDict(train=one)).data.test == ""
    with pytest.raises(InputError, match=r"Fix: data=splits\['train_sft'\]"):
        made(tmp_path, datasets.DatasetDict(train_sft=one, test_sft=other))


def test_other_fields_take_rows_and_sections_stay_sections(tmp_path):
    columns = {"prompt": ["x"], "ground_truth": ["y"]}
    config = made(tmp_path, "a.jsonl", test=columns, sft={"data": iter(ROWS)})
    assert rows_in(config.data.test) == [{"prompt": "x", "ground_truth": "y"}]
    assert rows_in(config.sft.data) == ROWS
    mixed = made(tmp_path, {"train": "a.jsonl", "sources": ("b", "c"), "weights": (1.0, 2.0, 3.0)})
    assert (mixed.data.train, mixed.data.sources) == ("a.jsonl", ("b", "c"))
    mixed = made(tmp_path, {"train": ROWS, "sources": [iter(FLAT), "task()"]})
    assert rows_in(mixed.data.sources[0]) == FLAT and mixed.data.sources[1] == "task()"
    tables = made(tmp_path, {"sources": ["b", "c"], "weights": [0.5, 0.5]}).data
    assert (tables.sources, tables.weights) == (("b", "c"), (0.5, 0.5))


def test_numbers_of_arrays_are_numbers(tmp_path):
    given = {
        "a": np.float32(0.5),
        "b": np.int8(3),
        "c": np.bool_(True),
        "d": np.arange(2),
        "e": jnp.ones((1, 2)),
        "f": np.str_("text"),
        "g": (1, None),
        "h": {"i": np.float64(2)},
    }
    (row,) = rows_in(made(tmp_path, [given]).data.train)
    assert row == {
        "a": 0.5,
        "b": 3,
        "c": True,
        "d": [0, 1],
        "e": [[1.0, 1.0]],
        "f": "text",
        "g": [1, None],
        "h": {"i": 2.0},
    }
    assert [type(row[name]) for name in "abcf"] == [float, int, bool, str]


class Label(str, enum.Enum):  # noqa: UP042, str() of it is another text than that of a StrEnum
    YES = "yes"


class Grade(enum.IntEnum):
    TOP = 3


def test_members_of_enumerations_are_what_they_equal(tmp_path):
    rows = [{"prompt": [{"role": Label.YES, Label.YES: Grade.TOP}], Label.YES: Label.YES}]
    wanted = [{"prompt": [{"role": "yes", "yes": 3}], "yes": "yes"}]
    assert rows_in(made(tmp_path, rows).data.train) == wanted
    columns = {"prompt": ["a"], "answer": np.array([Label.YES], object)}
    assert rows_in(made(tmp_path, columns).data.train) == [{"prompt": "a", "answer": "yes"}]


def test_tensors_of_torch_are_numbers_and_lists(tmp_path):
    torch = library("torch")
    rows = [{"a": torch.tensor(1.5), "b": torch.tensor([[1, 2]]), "c": torch.tensor(True)}]
    assert rows_in(made(tmp_path, rows).data.train) == [{"a": 1.5, "b": [[1, 2]], "c": True}]
    halves = {"prompt": ["a"], "x": [torch.ones(2, dtype=torch.bfloat16)]}
    assert rows_in(made(tmp_path, halves).data.train) == [{"prompt": "a", "x": [1.0, 1.0]}]
    table = dataset_of([{"prompt": "a", "answer": 4}]).with_format("torch")
    assert rows_in(made(tmp_path, table).data.train) == [{"prompt": "a", "answer": 4}]


def test_missing_cells_of_a_table_are_absent(tmp_path):
    pandas = library("pandas")
    rows = [{"a": 1, "s": "x"}, {"a": None, "s": None}]
    cells = {
        "a": [1.0, np.nan],
        "b": [np.float32(1), np.float32("nan")],
        "s": ["x", None],
        "t": pandas.array([1, pandas.NA], "Int64"),
        "u": [pandas.NaT, "y"],
    }
    tables = [pandas.DataFrame(rows), pa.Table.from_pylist(rows), dataset_of(rows), cells]
    for table in tables[:3]:
        assert rows_in(made(tmp_path, table).data.train) == [{"a": 1, "s": "x"}, {}]
    wanted = [{"a": 1.0, "b": 1.0, "s": "x", "t": 1}, {"u": "y"}]
    for table in (cells, pandas.DataFrame(cells)):
        assert rows_in(made(tmp_path, table).data.train) == wanted
    assert rows_in(made(tmp_path, rows).data.train) == rows  # a null that was written is one


def endless():
    yield from itertools.repeat({"prompt": "a"})


def failing():
    yield {"prompt": "a"}
    raise KeyError("answer")


def self_containing():
    inside: list = []
    inside.append(inside)
    return [{"prompt": inside}]


@pytest.mark.parametrize(
    "make, says",
    [
        (list, ("data.train holds no rows", "Fix: data=rows")),
        (lambda: frame_of(ROWS)[:0], ("holds no rows",)),
        (lambda: [{"a": 1}, {"a": float("nan")}], ("row 2, column 'a': got nan", "absent")),
        (lambda: [{"a": [float("inf")]}], ("row 1, column 'a': got inf",)),
        (lambda: [{"a": datetime.datetime(2020, 1, 2)}], ("row 1, column 'a'", ".isoformat()")),
        (lambda: frame_of([{"t": library("pandas").Timestamp(0)}]), ("Timestamp", ".isoformat()")),
        (lambda: [{"a": np.datetime64("2020-01-01", "ns")}], ("datetime64", ".isoformat()")),
        (lambda: [{"a": datetime.timedelta(1)}], ("timedelta", "str(value)")),
        (lambda: [{"a": decimal.Decimal("0.1")}], ("Decimal", "float(value)")),
        (lambda: [{"a": enum.Enum("Level", "low").low}], ("JSON has no Level", "value.value")),
        (lambda: [{"a": np.array(["2020"], "M8[Y]")}], ("JSON has no ndarray", ".isoformat()")),
        (lambda: [{"a": {1, 2}}], ("JSON has no set",)),
        (lambda: [{"a": 1j}], ("JSON has no complex",)),
        (lambda: [{"a": b"x"}], ("JSON has no bytes", "to_parquet")),
        (lambda: [{"a": "\ud800"}], ("row 1, column 'a'", "surrogates")),
        (lambda: [{"a": {3: 1}}], ("names in a dict are texts",)),
        (lambda: [{0: "a"}], ("the name of a column: got 0",)),
        (lambda: frame_of([[1, 2]]), ("the name of a column: got 0",)),
        (self_containing, ("nested deeper than 50",)),
        (lambda: [{"a": 1}, None], ("row 2 is no dict",)),
        (lambda: ["a.jsonl", "b.jsonl"], ("row 1 is no dict: got 'a.jsonl'", "'sources'")),
        (lambda: [1, 2], ("row 1 is no dict: got 1", "a list of dicts")),
        (lambda: frame_of(ROWS).prompt, ("row 1 is no dict: got '1+1='",)),
        (lambda: pa.array([1]), ("row 1 is no dict: got 1",)),
        (lambda: {"a": [1, 2], "b": [1]}, ("{'a': 2, 'b': 1}", "equally long")),
        (lambda: frame_of([[1, 2]]).set_axis(["a", "a"], axis=1), ("two columns are called 'a'",)),
        (lambda: pa.table([[1], [2]], names=["a", "a"]), ("two columns are called 'a'",)),
        (lambda: library("polars").DataFrame(FLAT).lazy(), ("Fix: data=frame.collect()",)),
        (failing, ("row 2 was not given; KeyError: 'answer'", "list(rows)")),
        (endless, ("more than 1,000 rows", "itertools.islice", ".take(")),
        (lambda: ({"a": "x" * 900} for _ in range(60)), ("GiB of rows", "itertools.islice")),
        (lambda: object(), ("no rows come from it", "list(rows)")),
    ],
)
def test_what_cannot_be_a_file_of_rows_is_refused_with_its_place(make, says, tmp_path, monkeypatch):
    monkeypatch.setattr(python_rows, "MOST_ROWS", 1000)
    monkeypatch.setattr(python_rows, "MOST_BYTES", 50_000)
    with pytest.raises(InputError, match="Fix: ") as error:
        made(tmp_path / "run", make())
    assert all(text in str(error.value) for text in says), str(error.value)
    assert not (tmp_path / "run").exists()  # nothing half-written


def test_what_says_how_long_it_is_may_be_long(tmp_path, monkeypatch):
    monkeypatch.setattr(python_rows, "MOST_ROWS", 1)
    monkeypatch.setattr(python_rows, "MOST_BYTES", 1)
    assert rows_in(made(tmp_path, FLAT).data.train) == FLAT
    with pytest.raises(InputError, match="does not say how many"):
        made(tmp_path, iter(FLAT))


def test_no_library_of_tables_is_imported(tmp_path):
    names = ("rljax.config.python_rows", "rljax.config.from_python")
    sources = [Path(importlib.import_module(name).__file__).read_text() for name in names]
    assert not any(
        f"import {name}" in text
        for text in sources
        for name in ("datasets", "pandas", "polars", "pyarrow")
    )


@pytest.mark.parametrize(
    "text, words",
    [
        ("a: got 3. Fix: --config.steps=20", "a: got 3. Fix: steps=20"),
        (
            "Fix: train on: --config.steps=20 --config.checkpoint.allow_changed=steps",
            """Fix: train on: steps=20, checkpoint={"allow_changed": ('steps',)}""",
        ),
        (
            "Fix: --config.batch.prompts_per_step=8 --config.batch.samples_per_prompt=4.",
            'Fix: batch={"prompts_per_step": 8, "samples_per_prompt": 4}.',
        ),
        ("Fix: --config.lora.targets=q,k", "Fix: lora={\"targets\": ('q', 'k')}"),
        ("Fix: --config.sft.optimizer.lr=1e-5", 'Fix: sft={"optimizer": {"lr": 1e-05}}'),
        (
            'Fix: such as --config.environment.function="guess_number()"',
            'Fix: such as environment={"function": "guess_number()"}',
        ),
        ("Fix: batch.epochs=2 or more", 'Fix: batch={"epochs": 2} or more'),
        ("Fix: look at them, then --trust_code", "Fix: look at them, then trust_code=True"),
        ("Fix: --data=rows.parquet --samples=4", 'Fix: data="rows.parquet", samples=4'),
        (
            "  --k=4: each is at least 1. Fix: --help lists the flags",
            "  k=4: each is at least 1. Fix: help(rljax.train) lists the arguments",
        ),
        ("Fix: --config=quickstart", 'Fix: rljax.train("quickstart")'),
        (
            "Fix: `rljax train --help` lists the fields, their types and defaults",
            "Fix: help(rljax.train) says how fields are given, print(rljax.Config()) lists them",
        ),
        ("no flags - or -- here. Fix: a lower one", "no flags - or -- here. Fix: a lower one"),
        ("Fix: `rljax configs` lists more", "Fix: `rljax configs` lists more"),
    ],
)
def test_fixes_are_worded_for_python(text, words):
    assert python_words(text) == words
