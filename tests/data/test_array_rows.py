"""Rows that a program holds: values of NumPy, JAX, pandas and pyarrow are what a file would have,
or an InputError that names row, column and fix."""

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from rljax.config.python_rows import rows_of
from rljax.data.offline.rows import load_rows
from rljax.data.rows.sources import load_demonstrations, load_prompts
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
