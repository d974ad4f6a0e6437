"""Pairs that are labelled safe or unsafe: PKU-SafeRLHF's columns and ours, and what becomes of
them."""

import json

import numpy as np
import pytest
from tiny_refusal import refused

from rljax.data.offline.batches import batch_arrays, longest_row
from rljax.data.offline.encode import encode_rows
from rljax.data.offline.rows import load_rows
from rljax.data.text.tokenizer import CharTokenizer

PKU = {
    "prompt": "ab",
    "response_0": "c",
    "response_1": "dd",
    "is_response_0_safe": True,
    "is_response_1_safe": False,
    "better_response_id": 1,
    "safer_response_id": 0,
}
OURS = {
    "prompt": "ab",
    "safer": "c",
    "more_harmful": "dd",
    "safer_is_safe": True,
    "more_harmful_is_safe": False,
}
RECORD = {"prompt": "ab", "chosen": "c", "rejected": "dd", "margin": 0.0, "tie": False}


def write(path, rows):
    if path.suffix == ".csv":
        names = list(rows[0])
        cells = [",".join(str(row[name]) for name in names) for row in rows]
        path.write_text("\n".join([",".join(names), *cells]) + "\n")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
@pytest.mark.parametrize("row", [PKU, OURS], ids=["PKU", "ours"])
def test_a_row_of_either_form_is_a_safer_and_a_more_harmful_completion(tmp_path, row, suffix):
    (record,) = load_rows(write(tmp_path / f"rows{suffix}", [row]), "train", "safety")
    assert record == RECORD | {"unsafe": (False, True), "index": 0}


def test_the_same_file_is_pairs_by_what_is_better(tmp_path):
    """For a reward model; and prompts keep what else the row says."""
    (record,) = load_rows(write(tmp_path / "rows.jsonl", [PKU]), "train", "pairs")
    assert record == RECORD | {"chosen": "dd", "rejected": "c", "index": 0}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(safer_response_id=2), ("safer_response_id", "0 or 1")),
        (dict(safer_response_id=1), ("the safer completion is unsafe", "safe")),
        (dict(is_response_1_safe="yes"), ("more_harmful_is_safe", "true or false")),
        (dict(is_response_1_safe=None), ("more_harmful_is_safe", "whether they are safe")),
        (dict(safer_response_id=None), ("'safer' completion",)),
        (dict(response_1=None), ("null",)),
    ],
)
def test_what_is_wrong_with_a_row_is_said(tmp_path, change, says):
    path = write(tmp_path / "rows.jsonl", [PKU, PKU | change])
    refused(lambda: load_rows(path, "train", "safety"), "row 1", *says)


def test_an_empty_response_is_one_and_an_empty_cell_of_a_table_is_none(tmp_path):
    row = PKU | dict(response_1="")
    (record,) = load_rows(write(tmp_path / "rows.jsonl", [row]), "train", "safety")
    assert "" in (record["chosen"], record["rejected"])
    table = write(tmp_path / "rows.csv", [row])
    refused(lambda: load_rows(table, "train", "safety"), "row 0", "null")


def test_labels_stand_at_the_last_token_of_each_row():
    tokenizer = CharTokenizer("abcd")
    rows = [
        OURS,
        OURS | {"safer": "dd", "more_harmful": "c", "more_harmful_is_safe": True},
        OURS | {"safer_is_safe": False},
        OURS | {"more_harmful": "c"},  # the same text twice: nothing to compare
    ]
    records = load_rows(rows, "train", "safety")
    items, counts = encode_rows(records, tokenizer, "safety", max_tokens=6)
    assert counts["kept"] == 3 and counts["dropped_identical"] == 1
    assert longest_row("safety", items) == 5  # "ab", "dd" and the end
    batch = batch_arrays("safety", items, length=7)
    assert set(batch) == {"tokens", "segment_ids", "positions", "mask", "costs", "group"}
    assert (np.count_nonzero(batch["costs"], axis=1) == 1).all()
    np.testing.assert_array_equal(batch["costs"].sum(axis=1), [-1, 1, -1, -1, 1, 1])
    for costs, segments in zip(batch["costs"], batch["segment_ids"], strict=True):
        assert np.flatnonzero(costs)[0] == segments.sum() - 1
    np.testing.assert_array_equal(batch["group"], [0, 0, 1, 1, 2, 2])
