"""Rows that a program holds: values of NumPy, JAX, pandas and pyarrow are what a file would have,
or an InputError that names row, column and fix."""

import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rljax.config.python_rows import rows_of
from rljax.data.offline.rows import load_rows
from rljax.data.rows.sources import load_demonstrations, load_endless_prompts, load_prompts
from rljax.errors import InputError

PROMPT = {"prompt": "a?", "ground_truth": "b"}
ARRAYS = (np.array([1, 2, 3]), jnp.arange(1, 4), pd.Series([1, 2, 3]), pa.array([1, 2, 3]))
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
READERS = {  # reader of one row, a row, the columns that may hold no list of numbers
    "prompts": (lambda row: load_prompts([row], "train"), PROMPT, ("prompt", "data_source")),
    "demonstrations": (
        lambda row: load_demonstrations([row], "train"),
        {"prompt": "a", "completion": "b"},
        ("prompt", "completion", "tools", "chat_template_kwargs"),
    ),
    "pairs": (lambda row: load_rows([row], "train", "pairs"), PAIR, ("prompt", "chosen", "margin")),
}


def outcome(read, row: dict):
    """What is read of a row, or the text of its InputError."""
    try:
        return read(row)
    except InputError as error:
        return str(error)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: type(array).__module__.split(".")[0])
def test_an_array_is_read_as_a_list_is(reader, array):
    read, row, columns = READERS[reader]
    for column in (*columns, "system", "note"):
        ours, lists = (outcome(read, row | {column: value}) for value in (array, [1, 2, 3]))
        assert ours == lists
        if column in columns:
            assert "row 0, column" in ours and repr(column) in ours and "Fix: " in ours


@pytest.mark.parametrize("reader", READERS)
def test_missing_values_of_pandas_are_null(reader):
    read, row, columns = READERS[reader]
    for column in (*columns, "system"):
        ours = [outcome(read, row | {column: value}) for value in (pd.NA, pd.NaT, None)]
        assert ours[0] == ours[1] == ours[2]


def test_texts_messages_and_numbers_of_other_libraries_are_read():
    said = [{"role": "user", "content": "hi"}]
    for value, wanted in (
        (np.str_("hi"), "hi"),
        (pa.scalar("hi"), "hi"),
        (np.array(said, dtype=object), said),
        (pa.scalar(said), said),
    ):
        (record,) = load_prompts([PROMPT | {"prompt": value}], "train")
        assert record["prompt"] == wanted and type(record["prompt"]) is type(wanted)
    for value in (np.int64(72), np.float32(72), pa.scalar(72), np.array(72)):
        (record,) = load_prompts([PROMPT | {"ground_truth": value}], "train")
        assert record["ground_truth"] == "72"
    with pytest.raises(InputError, match="row 0, column 'ground_truth' is null"):
        load_prompts([PROMPT | {"ground_truth": np.float32("nan")}], "train")
    more = {"reward_model": {"ground_truth": np.array([1, 2])}}
    assert load_prompts([{"prompt": "a?"} | more], "train")[0]["ground_truth"] == "[1, 2]"
    (one,) = load_rows(
        [{"prompt": "a", "completion": "b", "label": np.bool_(1)}], "train", "unpaired"
    )
    assert one["label"] is True


def test_rows_of_train_hold_values_of_pyarrow():
    row = {"prompt": pa.scalar("hi"), "answer": pa.scalar([1, 2]), "note": pa.scalar(None)}
    assert list(rows_of([row], "data")) == [{"prompt": "hi", "answer": [1, 2], "note": None}]


# -- answers of fewer bits than Python's numbers ---------------------------------------------------

WIDE = 0.10000000149011612  # Python's number of the float32 of 0.1
NUMBERS = {  # a number, and the text of the float32 of it
    0.1: "0.1",
    -19.99: "-19.99",
    2.0: "2",
    1e-7: "1e-07",
    1e11: "100000000000",
    2.0**27: "134217728",  # whole: 134217730 is the same float32, and another number
    6227020800.0: "6227020800",
    0.000244140625: "0.000244140625",  # of one bit: it was not rounded
}


def texts(rows):
    return [str(record["ground_truth"]) for record in load_prompts(rows, "train")]


@pytest.mark.parametrize(
    ("width", "number", "text"),
    [
        *((np.float32, number, text) for number, text in NUMBERS.items()),
        *((np.float16, *case) for case in ((0.1, "0.1"), (19.99, "19.98"), (2.6875, "2.6875"))),
        (np.float16, 8192.0, "8192"),
        *((ml_dtypes.bfloat16, *case) for case in ((0.1, "0.1"), (3.14, "3.14"), (2.75, "2.75"))),
        (np.float64, WIDE, "0.10000000149011612"),
        (float, WIDE, "0.10000000149011612"),
    ],
)
def test_an_answer_of_few_bits_is_the_number_that_was_written(width, number, text):
    assert texts([{"prompt": "q", "answer": width(number)}]) == [text]


def test_answers_of_few_bits_in_lists_and_objects_and_no_other_number():
    small = np.float32(0.1)
    struct = pa.struct([("x", pa.float32()), ("y", pa.list_(pa.float16()))])
    cells = {
        "[0.1, [0.1]]": [small, np.array([0.1], np.float32)],
        '{"x": 0.1, "y": [0.5]}': pa.scalar({"x": 0.1, "y": [0.5]}, struct),
        '{"x": [0.1]}': {"x": jnp.array([0.1])},
        "[0.1]": np.array([small], object),
    }
    rows = [{"prompt": "q", "answer": value, "level": small} for value in cells.values()]
    assert texts(rows) == [*cells]
    assert {record["extra_info"]["level"] for record in load_prompts(rows, "train")} == {WIDE}
    model = {"ground_truth": np.array([0.1], np.float16), "weight": small}
    (record,) = load_prompts([{"prompt": "q", "reward_model": model}], "train")
    assert record["ground_truth"] == "[0.1]"
    assert record["ground_truth"].columns == {
        "reward_model": {"ground_truth": [0.1], "weight": WIDE}
    }
    assert texts([{"input": "q", "label": small}]) == ["0.1"]  # OpenRLHF's
    pair = {**PAIR, "margin": small, "note": {"answer": small}}
    assert load_rows([pair], "train", "pairs")[0]["margin"] == WIDE


def test_answers_of_few_bits_of_files_and_tables(tmp_path):
    numbers = [*NUMBERS]
    narrow = pa.array(numbers, pa.float32())
    table = pa.table({"prompt": ["q"] * len(numbers), "answer": narrow, "level": narrow})
    path = str(tmp_path / "rows.parquet")
    pq.write_table(table, path)
    assert texts(path) == [*NUMBERS.values()]
    assert load_prompts(path, "train")[0]["extra_info"] == {"level": WIDE}
    stream = load_endless_prompts(path, stored=True)
    assert {str(stream[i]["ground_truth"]) for i in range(len(numbers))} == {*NUMBERS.values()}
    assert {stream[i]["extra_info"]["level"] for i in range(len(numbers))} == {
        *np.float32(numbers).tolist()
    }
    column = np.array([0.1], np.float32)
    frame = pd.DataFrame({"prompt": ["q"], "answer": column, "level": column})
    row = {"prompt": "q", "answer": 0.1, "level": WIDE}
    for rows in (
        frame,
        frame.astype({"answer": "Float32"}),
        frame.astype({"answer": "category"}),
        frame.astype({"answer": pd.SparseDtype(np.float32)}),
        table[:1],
        table[:1].to_struct_array(),
    ):
        assert list(rows_of(rows, "data")) == [row]
    assert list(rows_of({"prompt": ["q"], "answer": column, "level": column}, "data")) == [row]
    assert list(rows_of(frame.to_dict("series"), "data")) == [row]
    assert list(rows_of([{**row, "answer": np.float32(0.1)}], "data")) == [row]


def test_nanoseconds_are_texts(tmp_path, monkeypatch):
    """Python has none, and pyarrow asks pandas for a value of them, which is no dependency."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    times = pa.array([1, None], pa.timestamp("ns"))
    table = pa.table({"prompt": ["a", "b"], "answer": ["1", "2"], "created": times})
    path = str(tmp_path / "rows.parquet")
    pq.write_table(table, path)
    written = "1970-01-01 00:00:00.000000001"
    assert [r["extra_info"].get("created") for r in load_prompts(path, "train")] == [written, None]
    assert load_endless_prompts(path, stored=True)[0]["extra_info"]["created"] in (written, None)


def test_answers_of_few_bits_of_a_dataset():
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    narrow = pa.array([0.1], pa.float32())
    rows = datasets.Dataset(pa.table({"prompt": ["q"], "answer": narrow, "level": narrow}))
    for given in (rows, rows.to_iterable_dataset(), rows.with_format("numpy")):
        assert list(rows_of(given, "data")) == [{"prompt": "q", "answer": 0.1, "level": WIDE}]
