"""Rows of offline training: every form that is read, every file format, and what bad rows say."""

import decimal
import json
import logging
import math
import os
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
from conftest import REPO
from tiny_tokenizer import write_json

from rljax.data.offline.rows import KINDS, load_rows, load_stored_rows
from rljax.data.rows.sources import load_demonstrations
from rljax.errors import InputError

U, V = {"role": "user", "content": "hi"}, {"role": "user", "content": "ho"}
A, B, C = ({"role": "assistant", "content": text} for text in ("a", "b", "c"))
SILENT = {"role": "assistant", "content": ""}
TOOL = {"role": "tool", "content": "5"}
SCHEMA = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

GOOD = {
    "examples": {"prompt": "q", "completion": "a"},
    "pairs": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "unpaired": {"prompt": "q", "completion": "a", "label": True},
    "stepwise": {"prompt": "q", "completions": ["s", "t"], "labels": [True, False]},
    "trajectories": {"prompt": "q", "completion": "a", "reward": 1.0},
}
PLAIN_PAIR = dict(margin=0.0, tie=False)

FORMS = [
    ("examples", {"messages": [U, A]}, {"messages": [U, A]}),
    ("examples", {"messages": [U, A], "tools": SCHEMA}, {"messages": [U, A], "tools": SCHEMA}),
    (
        "examples",
        {"messages": [U, A], "tools": json.dumps(SCHEMA)},
        {"messages": [U, A], "tools": SCHEMA},
    ),
    ("examples", {"prompt": [U], "completion": [A]}, {"messages": [U, A]}),
    ("examples", {"prompt": [U], "completion": "a"}, {"messages": [U, A]}),
    (
        "examples",
        {"prompt": [U, A, V], "completion": [B, TOOL, C]},
        {"messages": [U, A, V, B, TOOL, C], "prompt_messages": 3},
    ),
    ("pairs", {"prompt": "q", "chosen": "a", "rejected": "b"}, GOOD["pairs"] | PLAIN_PAIR),
    (
        "unpaired",  # a null in one of the two names of the prompt
        {"prompt": None, "question": "q", "completion": "a", "label": 1},
        {"prompt": "q", "completion": "a", "label": True},
    ),
    (
        "pairs",
        {"prompt": [U], "chosen": [A], "rejected": "b"},
        dict(prompt=[U], chosen=[A], rejected=[B], **PLAIN_PAIR),
    ),
    (
        "pairs",  # explicit messages, and whole conversations all the same
        {"prompt": [U], "chosen": [U, A], "rejected": [U, B]},
        dict(prompt=[U], chosen=[A], rejected=[B], **PLAIN_PAIR),
    ),
    (
        "pairs",  # a text beside whole conversations
        {"prompt": "hi", "chosen": [U, A], "rejected": [U, B]},
        dict(prompt=[U], chosen=[A], rejected=[B], **PLAIN_PAIR),
    ),
    (
        "pairs",
        {"chosen": [U, A, V, B], "rejected": [U, A, V, C]},
        dict(prompt=[U, A, V], chosen=[B], rejected=[C], **PLAIN_PAIR),
    ),
    (
        "pairs",
        {"chosen": [U, A, TOOL, B], "rejected": [U, C], "prompt": None},
        dict(prompt=[U], chosen=[A, TOOL, B], rejected=[C], **PLAIN_PAIR),
    ),
    (
        "pairs",
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        dict(prompt="The sky is", chosen=" blue.", rejected=" green.", **PLAIN_PAIR),
    ),
    (
        "pairs",
        {"chosen": "2+3=5", "rejected": "2+3=6", "reference": "2+3=55"},
        dict(prompt="2+3=", chosen="5", rejected="6", reference="55", **PLAIN_PAIR),
    ),
    (
        "pairs",
        GOOD["pairs"] | {"reference": "r", "margin": 2},
        GOOD["pairs"] | dict(reference="r", margin=2.0, tie=False),
    ),
    (
        "pairs",
        GOOD["pairs"] | {"score_chosen": 3, "score_rejected": 0.5},
        GOOD["pairs"] | dict(margin=2.5, tie=False),
    ),
    (
        "pairs",
        GOOD["pairs"] | {"score_chosen": 3, "score_rejected": 3.0},
        GOOD["pairs"] | dict(margin=0.0, tie=True),
    ),
    # Columns of other data sets.
    (
        "pairs",
        GOOD["pairs"] | {"chosen_rating": 5, "rejected_rating": 5.0},
        GOOD["pairs"] | dict(margin=0.0, tie=True),
    ),
    (
        "pairs",
        GOOD["pairs"] | {"chosen-rating": 5, "rejected-rating": 4.0, "chosen_score": None},
        GOOD["pairs"] | dict(margin=1.0, tie=False),
    ),
    (
        "pairs",
        GOOD["pairs"] | {"rating_chosen": float("nan"), "rating_rejected": float("nan")},
        GOOD["pairs"] | PLAIN_PAIR,
    ),
    # A response that ended at once.
    ("pairs", GOOD["pairs"] | {"rejected": ""}, GOOD["pairs"] | dict(rejected="", **PLAIN_PAIR)),
    ("pairs", GOOD["pairs"] | {"chosen": ""}, GOOD["pairs"] | dict(chosen="", **PLAIN_PAIR)),
    (
        "pairs",
        {"prompt": [U], "chosen": [A], "rejected": ""},
        dict(prompt=[U], chosen=[A], rejected=[{"role": "assistant", "content": ""}], **PLAIN_PAIR),
    ),
    ("unpaired", GOOD["unpaired"] | {"completion": ""}, GOOD["unpaired"] | {"completion": ""}),
    ("pairs", GOOD["pairs"] | {"tie": True}, GOOD["pairs"] | dict(margin=0.0, tie=True)),
    ("unpaired", GOOD["unpaired"] | {"label": 0}, GOOD["unpaired"] | {"label": False}),
    (
        "unpaired",
        {"prompt": [U], "response": "a", "label": 1.0},
        dict(prompt=[U], completion=[A], label=True),
    ),
    ("stepwise", GOOD["stepwise"], GOOD["stepwise"] | {"labels": [1.0, -1.0]}),
    (
        "stepwise",
        GOOD["stepwise"] | {"labels": [0, -0.5]},
        GOOD["stepwise"] | {"labels": [0.0, -0.5]},
    ),
    ("trajectories", GOOD["trajectories"], GOOD["trajectories"] | {"truncated": False}),
    (
        "trajectories",
        {"prompt": [U], "response": "a", "score": -1, "truncated": 1, "logprobs": [-0.5, 0]},
        dict(prompt=[U], completion=[A], reward=-1.0, truncated=True, logprobs=[-0.5, 0.0]),
    ),
    (
        "trajectories",
        {"prompt": "q", "steps": ["s", "t"], "reward": 1, "process_scores": [0.5, -1]},
        dict(prompt="q", steps=["s", "t"], reward=1.0, truncated=False, process_scores=[0.5, -1.0]),
    ),
    (
        "trajectories",  # the steps are needed for their scores, else the completion is the record
        {"prompt": "q", "steps": ["s"], "completion": "s", "reward": 1, "process_scores": [0.5]},
        dict(prompt="q", steps=["s"], reward=1.0, truncated=False, process_scores=[0.5]),
    ),
    (
        "trajectories",
        {"prompt": "q", "steps": ["s"], "completion": "a", "reward": 1.0},
        GOOD["trajectories"] | {"truncated": False},
    ),
]


@pytest.mark.parametrize(("kind", "row", "expected"), FORMS)
def test_forms_of_rows(kind, row, expected):
    assert load_rows([row], "train", kind) == [{**expected, "index": 0}]


def test_examples_are_the_demonstrations(tmp_path):
    rows = [row for kind, row, _ in FORMS if kind == "examples"] + [{"text": "t"}]
    write_json(tmp_path / "train.json", rows)
    assert load_rows(str(tmp_path), "train", "examples") == load_demonstrations(
        str(tmp_path), "train"
    )


def test_a_space_before_the_first_difference_belongs_to_the_word():
    (record,) = load_rows([{"chosen": "a  b", "rejected": "a  c"}], "train", "pairs")
    assert [record[k] for k in ("prompt", "chosen", "rejected")] == ["a ", " b", " c"]


@pytest.mark.parametrize(("text", "prompt"), [("same", ""), ([U, A], [U])])
def test_identical_completions_are_left_for_the_encoder_to_count(text, prompt):
    (record,) = load_rows([{"chosen": text, "rejected": text}], "train", "pairs")
    assert record["chosen"] == record["rejected"] and record["prompt"] == prompt


# -- bad rows: every error names the source, the row and the column --


@pytest.mark.parametrize(
    "row, prompt, chosen, rejected",
    [
        (dict(prompt=[U], chosen=[A], rejected=[SILENT]), [U], [A], [SILENT]),
        (dict(prompt=[U], chosen=[SILENT], rejected=[A]), [U], [SILENT], [A]),
        (dict(prompt=[U], chosen=[A], rejected=""), [U], [A], [SILENT]),
        (dict(chosen=[U, A], rejected=[U, SILENT]), [U], [A], [SILENT]),
        (dict(prompt="hi", chosen=[U, A], rejected=[U, SILENT]), [U], [A], [SILENT]),
        (dict(prompt=[U], chosen=[U, A], rejected=[U, SILENT]), [U], [A], [SILENT]),
        (dict(prompt=[U], chosen=[A, V, SILENT], rejected=[B]), [U], [A, V, SILENT], [B]),
        (dict(chosen="Q: x A: yes, it is", rejected="Q: x A: yes"), "Q: x A: yes", ", it is", ""),
        (dict(chosen="Q: x A:", rejected="Q: x A: no"), "Q: x A:", "", " no"),
        (dict(chosen="Q: x A: ", rejected="Q: x A: no"), "Q: x A:", " ", " no"),
        # Of conversations the answer with which one ends stays with both.
        (dict(chosen=[U, A, V, B], rejected=[U, A]), [U], [A, V, B], [A]),
    ],
)
def test_an_empty_answer_of_a_pair_is_one_that_ends_at_once(row, prompt, chosen, rejected):
    [made] = load_rows([row], "train", "pairs")
    assert (made["prompt"], made["chosen"], made["rejected"]) == (prompt, chosen, rejected)
    [made] = load_rows([dict(prompt=[U], completion=[SILENT], label=0)], "train", "unpaired")
    assert made["completion"] == [SILENT]


@pytest.mark.parametrize("gap", [None, math.nan])
@pytest.mark.parametrize(
    "kind, row, name, value",
    [
        ("unpaired", dict(prompt="q", completion=..., response="a", label=True), "completion", "a"),
        ("unpaired", dict(prompt=[U], completion=..., response=[A], label=1), "completion", [A]),
        ("unpaired", dict(prompt=..., question="q", completion="a", label=1), "prompt", "q"),
        ("trajectories", dict(prompt="q", completion="a", reward=..., score=0.5), "reward", 0.5),
        (
            "trajectories",
            dict(prompt="q", completion=..., response="a", reward=1),
            "completion",
            "a",
        ),
        ("trajectories", dict(prompt="q", completion=..., steps=["a"], reward=1), "steps", ["a"]),
    ],
)
def test_a_gap_of_a_table_hides_no_other_name_of_a_column(kind, row, name, value, gap):
    row = {key: gap if held is ... else held for key, held in row.items()}
    [made] = load_rows([row], "train", kind)
    assert made[name] == value
    other = {key: held for key, held in row.items() if held is not gap}
    assert load_rows([other], "train", kind) == [made]


def bad(kind, **fields):
    return kind, {**GOOD[kind], **fields}


BAD = [
    (*bad("examples", completion=[V]), "'completion': the first message is not the assistant's"),
    (*bad("examples", completion=[A]), "'prompt' is a text while column 'completion'"),
    (*bad("examples", completion=""), "'completion' is empty"),
    ("examples", {"messages": [U, {"role": "critic", "content": "x"}, A]}, "'critic'"),
    ("examples", {"messages": [U, A], "tools": "[{"}, "column 'tools' is not valid JSON"),
    ("examples", {"messages": [U, A], "tools": ["add"]}, "'tools': are not a list of objects"),
    ("pairs", {"prompt": "q", "chosen": "a"}, "lacks the column 'rejected'"),
    ("pairs", {"prompt": "q", "rejected": "a"}, "lacks the column 'chosen'"),
    (*bad("pairs", rejected=None), "'rejected' is null"),
    (*bad("pairs", chosen=5), "got 5. Fix: write a text, in quotes"),
    (
        *bad("pairs", chosen={"role": "assistant", "content": "b"}),
        "a list of messages: [{...}] around this one",
    ),
    (*bad("pairs", prompt=5), "'prompt' is not a text"),
    (*bad("pairs", chosen="\ud800"), "surrogate"),
    (*bad("pairs", chosen=b"\xff"), "'chosen' holds bytes that are not UTF-8"),
    (*bad("pairs", prompt=[U], chosen=[V]), "'chosen': the first message is not the assistant's"),
    (*bad("pairs", prompt=[U], chosen=[A, V]), "'chosen': the last message is not the assistant's"),
    (*bad("pairs", prompt=[{"role": "critic", "content": "x"}]), "unknown role: got 'critic'"),
    (*bad("pairs", prompt=[U], chosen=[A], rejected=[B], reference=[SILENT]), "says nothing"),
    (*bad("pairs", prompt=[U], chosen=[{**SILENT, "weight": 0}], rejected=[B]), "says nothing"),
    ("trajectories", dict(prompt=[U], completion=[SILENT], reward=1.0), "says nothing"),
    (*bad("pairs", chosen=[A]), "'prompt' is a text while column 'chosen' holds messages"),
    (*bad("pairs", reference=""), "'reference' is empty"),
    ("pairs", {"prompt": "q", "chosen": "a", "rejected": "b", "margin": -1}, "'margin' is below 0"),
    ("examples", {"messages": [U, {"role": "assistant", "content": ""}]}, "message 1 of the"),
    ("pairs", {"chosen": "ab", "rejected": ""}, "'rejected' is empty"),
    ("pairs", {"chosen": "ab", "rejected": "a", "reference": "a"}, "'reference' is empty"),
    ("pairs", {"chosen": [U, A], "rejected": [U]}, "'rejected' is the beginning of 'chosen'"),
    ("pairs", {"chosen": [U, A], "rejected": [V, A]}, "share no first message"),
    ("pairs", {"chosen": [U, A], "rejected": "b"}, "texts and messages are mixed"),
    (*bad("pairs", margin=float("nan")), "'margin' is missing (null or NaN)"),
    (*bad("pairs", margin="1"), "'margin' is not a finite number"),
    (*bad("pairs", margin=float("inf")), "'margin' is not a finite number"),
    (*bad("pairs", margin=10**400), "'margin' is not a finite number"),
    (*bad("pairs", margin=1e39), "'margin' is not a finite number of at most 1e+15"),
    (*bad("pairs", score_chosen=1.0), "'score_rejected' is missing"),
    (*bad("pairs", score_chosen=1, score_rejected=2), "'score_chosen' is below"),
    (*bad("pairs", chosen_reward=1, rejected_reward=2), "'chosen_reward' is below"),
    (*bad("pairs", rejected_score=1), "'chosen_score' is missing"),
    (*bad("pairs", tie="yes"), "'tie' is not true or false"),
    (*bad("unpaired", label=None), "'label' is missing (null or NaN)"),
    (*bad("unpaired", label="good"), "'label' is not true or false"),
    (*bad("unpaired", label=2), "'label' is not true or false"),
    (*bad("unpaired", label=float("nan")), "'label' is missing (null or NaN)"),
    ("unpaired", {"prompt": "q", "completion": "a"}, "lacks the column 'label'"),
    ("unpaired", {"prompt": "q", "label": True}, "lacks the column 'completion'"),
    ("unpaired", {"completion": "a", "label": True}, "lacks the column 'prompt'"),
    # What is missing is said first: it tells a row of another kind.
    ("unpaired", {"prompt": 5, "completion": "a"}, "--config.dataflow=sft"),
    (*bad("stepwise", labels=[True]), "'labels' has 1 values for 2 steps"),
    (*bad("stepwise", labels=[True, 1.5]), "'labels', step 1 is out of range"),
    (*bad("stepwise", labels=[True, None]), "'labels', step 1 is missing"),
    (*bad("stepwise", labels=[True, float("nan")]), "'labels', step 1 is missing"),
    (*bad("stepwise", labels=True), "'labels' is not a list"),
    (*bad("stepwise", completions=[]), "'completions' is empty"),
    (*bad("stepwise", completions="st"), "'completions' is not a list"),
    (*bad("stepwise", completions=["s", ""]), "'completions', step 1 is empty"),
    ("stepwise", {"prompt": "q", "completions": ["s"]}, "lacks the column 'labels'"),
    (*bad("trajectories", reward=float("nan")), "'reward' is missing (null or NaN)"),
    (*bad("trajectories", reward=None), "'reward' is missing"),
    (*bad("trajectories", reward=True), "'reward' is not a finite number"),
    ("trajectories", {"prompt": "q", "completion": "a"}, "lacks the column 'reward'"),
    ("trajectories", {"prompt": "q", "reward": 1.0}, "lacks the column 'completion'"),
    (*bad("trajectories", completion=""), "'completion' is empty"),
    (*bad("trajectories", truncated="no"), "'truncated' is not true or false"),
    (*bad("trajectories", logprobs=[]), "'logprobs' is empty"),
    (*bad("trajectories", logprobs=[-1.0, None]), "'logprobs', token 1 is missing"),
    (*bad("trajectories", logprobs=[0.5]), "'logprobs' holds a positive value"),
    (*bad("trajectories", process_scores=[1.0]), "'process_scores' needs the column 'steps'"),
    (
        "trajectories",
        {"prompt": "q", "steps": ["s", "t"], "reward": 1, "process_scores": [1.0]},
        "'process_scores' has 1 values for 2 steps",
    ),
]


def test_decimals_of_a_table_are_numbers(tmp_path):
    half, one = decimal.Decimal("0.5"), decimal.Decimal(1)
    for kind, decimals, numbers in (
        ("trajectories", {"reward": -half}, {"reward": -0.5}),
        ("pairs", {"score_chosen": one, "score_rejected": half}, {"margin": 0.5}),
        ("unpaired", {"label": one}, {"label": True}),
        ("stepwise", {"labels": [half, -one]}, {"labels": [0.5, -1.0]}),
    ):
        row = {k: v for k, v in GOOD[kind].items() if k != "margin"} | decimals
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
        (record,) = load_rows(str(tmp_path / "rows.parquet"), "train", kind)
        assert {name: record[name] for name in numbers} == numbers


@pytest.mark.parametrize(("kind", "row", "says"), BAD)
def test_bad_rows(tmp_path, kind, row, says):
    for spec, place in (
        ([GOOD[kind], row], "the list of rows: row 1"),
        (tmp_path / "bad.jsonl", "bad.jsonl: row 1 (line 2)"),
    ):
        if not isinstance(spec, list):
            if b"\xff" in row.values():
                continue  # JSON has no bytes
            lines = [json.dumps(GOOD[kind]), json.dumps(row)]
            spec.write_text("\n".join(lines))
            spec = str(spec)
        with pytest.raises(InputError) as caught:
            load_rows(spec, "train", kind)
        assert type(caught.value) is InputError
        by_line = place.replace("row 1 (line 2)", "line 2")  # of what is no JSON
        text = str(caught.value)
        assert (place in text or by_line in text) and says in text
        assert "Fix: " in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("pairs", {"reference": "r"}),
        ("trajectories", {"logprobs": [-1.0]}),
        ("trajectories", {"completion": None, "steps": ["s"], "process_scores": [1.0]}),
    ],
)
def test_a_column_of_arrays_is_in_every_row_or_in_none(kind, more):
    name = list(more)[-1]
    with pytest.raises(InputError, match=f"row 1 lacks the column '{name}', which other rows have"):
        load_rows([{**GOOD[kind], **more}, GOOD[kind]], "train", kind)


def test_specs_that_are_none(tmp_path):
    with pytest.raises(InputError, match="unknown kind of rows"):
        load_rows([GOOD["pairs"]], "train", "pair")
    with pytest.raises(InputError, match="the list of rows has no rows"):
        load_rows([], "train", "pairs")
    with pytest.raises(InputError, match="row 0 is not an object"):
        load_rows(["a"], "train", "pairs")
    with pytest.raises(InputError, match="row 0 lacks the column 'chosen'"):
        load_rows([{"prompt": "q", 3: "a"}], "train", "pairs")
    (tmp_path / "cut.jsonl").write_text(json.dumps(GOOD["pairs"]) + '\n{"prompt": "q", "cho')
    with pytest.raises(InputError, match="cut.jsonl: line 2 is not valid JSON"):
        load_rows(str(tmp_path / "cut.jsonl"), "train", "pairs")


# -- formats --


def pairs_task():
    """A task of a user's own that just returns its rows."""
    return ROWS["pairs"]


ROWS = {
    "examples": [{"messages": [U, A, V, B], "tools": json.dumps(SCHEMA)}, {"messages": [U, C]}],
    "pairs": [
        {"prompt": [U], "chosen": [A], "rejected": [B], "margin": 0.5},
        {"prompt": [U, A, V], "chosen": [B], "rejected": [C, TOOL, A], "margin": 2.0},
    ],
    "unpaired": [GOOD["unpaired"], {"prompt": "é", "completion": "ß", "label": False}],
    "stepwise": [GOOD["stepwise"], {"prompt": "r", "completions": ["s"], "labels": [True]}],
    "safety": [
        {
            "prompt": "q",
            "safer": "s",
            "more_harmful": "t",
            "safer_is_safe": True,
            "more_harmful_is_safe": False,
        },
        {
            "prompt": "r",
            "safer": "s",
            "more_harmful": "t",
            "safer_is_safe": False,
            "more_harmful_is_safe": False,
        },
    ],
    "trajectories": [
        {"prompt": "q", "steps": ["s", "t"], "reward": 1.0, "process_scores": [0.5, 1.0]},
        {"prompt": "r", "steps": ["s"], "reward": 0.0, "process_scores": [0.0]},
    ],
}


def write_parquet(path, rows, as_bytes: bool = False):
    table = pyarrow.Table.from_pylist(rows)
    if as_bytes:
        for number, field in enumerate(table.schema):
            if field.type == pyarrow.string():
                column = table.column(number).cast(pyarrow.binary())
                table = table.set_column(number, field.name, column)
        assert pyarrow.binary() in table.schema.types
    pyarrow.parquet.write_table(table, str(path))


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_records(tmp_path, kind):
    rows = ROWS[kind]
    want = load_rows(rows, "train", kind)
    assert len(want) == len(rows)
    write_json(tmp_path / "a.json", {"train": rows})
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    write_parquet(tmp_path / "a.parquet", rows)
    for name in ("a.json", "a.jsonl", "a.parquet"):
        assert load_rows(str(tmp_path / name), "train", kind) == want, name
    assert load_rows(tuple(rows), "test", kind) == want
    if kind == "pairs":
        assert load_rows("test_preference_rows.pairs_task", "train", kind) == want
    if kind in ("unpaired", "stepwise", "trajectories"):
        write_parquet(tmp_path / "b.parquet", rows, as_bytes=True)
        assert load_rows(str(tmp_path / "b.parquet"), "train", kind) == want


def test_a_table_fills_what_a_message_lacks_and_it_is_taken_out(tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    asks = {"role": "assistant", "content": None, "tool_calls": [call]}
    rows = [{"messages": [U, asks, TOOL, A]}, {"messages": [U, B]}]
    write_parquet(tmp_path / "a.parquet", rows)
    first, second = load_rows(str(tmp_path / "a.parquet"), "train", "examples")
    assert second["messages"] == [U, B]
    assert first["messages"][1] == {"role": "assistant", "tool_calls": [call]}


# -- TFDS --

WRITE_TFDS = """
import sys
import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets import features as kinds

message = {"role": kinds.Text(), "content": kinds.Text()}
feature = dict(
    prompt=kinds.Sequence(message), chosen=kinds.Sequence(message),
    rejected=kinds.Sequence(message), margin=np.float32,
    completions=kinds.Sequence(kinds.Text()), labels=kinds.Sequence(np.bool_),
)
rows = %r

class Tiny(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self, features=kinds.FeaturesDict(feature), disable_shuffling=True
        )

    def _split_generators(self, manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        yield from enumerate(rows)

Tiny(data_dir=sys.argv[1], file_format="array_record").download_and_prepare()
"""
READ_TFDS = """
import json, sys
from rljax.data.offline.rows import load_rows

rows = [load_rows(sys.argv[1], "train", kind) for kind in ("pairs", "stepwise")]
assert "tensorflow" not in sys.modules
print(json.dumps(rows))
"""


def test_tfds(tmp_path):
    pytest.importorskip("tensorflow_datasets", reason="tensorflow-datasets is not installed")
    pairs = [dict(row) for row in ROWS["pairs"]]
    steps = [{k: v for k, v in row.items() if k != "prompt"} for row in ROWS["stepwise"]]
    rows = [{**a, **b} for a, b in zip(pairs, steps, strict=True)]

    def run(code, *args):
        env = {**os.environ, "PYTHONPATH": str(REPO), "TFDS_DATA_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", code, *args], env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    run(WRITE_TFDS % rows, str(tmp_path))
    folder = f"tfds:{tmp_path / 'tiny' / '1.0.0'}"
    for spec in (folder, "tfds:tiny"):
        found = json.loads(run(READ_TFDS, spec).splitlines()[-1])
        assert found == [load_rows(rows, "train", kind) for kind in ("pairs", "stepwise")]
    with pytest.raises(InputError, match="has no split 'test'"):
        load_rows(folder, "test", "pairs")
    with pytest.raises(InputError, match="cannot be opened as a TFDS data set"):
        load_rows(f"tfds:{tmp_path}", "train", "pairs")


@pytest.mark.parametrize(
    "more, fix",
    [
        (dict(query="q?"), "rename 'query' to 'prompt'"),
        (dict(trajectory=[U]), "rename 'trajectory' to 'prompt'"),
        (dict(prompt="q", initial_reason_steps="First"), "write 'initial_reason_steps' into"),
        (dict(context="a text"), "rename 'context' to 'prompt'"),
        (dict(question="q", history=[["x", "y"]]), "write 'history' into"),
    ],
)
def test_a_question_in_a_column_that_is_not_read_is_refused(more, fix):
    """The common first words of the answers would be learned as what was asked."""
    pair = dict(chosen="The answer is 4", rejected="The answer is 5", **more)
    with pytest.raises(InputError, match=fix):
        load_rows([pair], "train", "pairs")
    whole = dict(chosen=[U, A], rejected=[U, B], history=[["x", "y"]], id="7")
    [record] = load_rows([whole], "train", "pairs")
    assert record["prompt"] == [U]
    empty = dict(pair, **dict.fromkeys(more, ""), source="a b c")
    if "prompt" not in more and "question" not in more:
        [record] = load_rows([empty], "train", "pairs")
        assert record["prompt"] == "The answer is"


@pytest.mark.parametrize(
    "labels, rows",
    [
        ([[1, 0, 0], [1, 1, 1]], "1 of 2 rows"),
        ([[1.0, 0.0, 0.0]], "1 of 1 rows"),
        ([[True, 0, 1]], "1 of 1 rows"),
        ([[0.9, 0.5, 0.1], [0, 0, 0]], "2 of 2 rows"),
        ([[1, 0, 0], [1, 0, -1]], ""),
        ([[1, 1, 1]], ""),
        ([[True, False, False]], ""),
        ([[True, False, 0], [1, 0, 0]], ""),
        ([[1, -0.5, 0]], ""),
    ],
)
@pytest.mark.parametrize("stored", [False, True])
def test_step_labels_of_which_none_is_wrong_are_warned_of(tmp_path, caplog, labels, rows, stored):
    """TRL's and others' 0 is a wrong step, ours is between wrong and right."""
    made = [dict(prompt="q", completions=["a", "b", "c"], labels=one) for one in labels]
    if stored:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in made))
        load_stored_rows(str(path), "stepwise")
    else:
        load_rows(made, "train", "stepwise")
    found = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(found) == bool(rows)
    assert all(rows in one and "no label of a step is below 0" in one for one in found)
