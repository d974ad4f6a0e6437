"""Rows in the columns of other projects, tables, and what a run says of its data when it starts."""

import csv
import datetime
import decimal
import functools
import json
import logging

import pyarrow
import pyarrow.parquet
import pytest
from family_tokenizers import write_family
from test_trl_formats import config_of
from tiny_refusal import refused
from tiny_tokenizer import write_tokenizer

from rljax.config import Config
from rljax.config.checks import check_paths
from rljax.data.offline.encode import encode_rows
from rljax.data.offline.rows import load_rows, load_stored_rows
from rljax.data.online.encoded import load_data, load_run_tokenizer
from rljax.data.online.kept import warn_unread
from rljax.data.online.prompts import encode_prompts
from rljax.data.rows.read import read_rows
from rljax.data.rows.show import load_shown
from rljax.data.rows.sources import load_endless_prompts, load_prompts
from rljax.data.text.tokenizer import CharTokenizer, load_tokenizer
from rljax.errors import InputError

U, A = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
HUMAN, GPT = {"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}
BAD = {"from": "gpt", "value": "5"}
ALPACA = {"instruction": "Add.", "input": "2+2", "output": "4"}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# (form, row, its record as a demonstration, prompt, ground truth)
ONES = [
    ("ShareGPT", {"conversations": [HUMAN, GPT]}, {"messages": [U, A]}, [U], "4"),
    (
        "ShareGPT",
        {"conversations": [HUMAN, GPT], "system": "S"},
        {"messages": [{"role": "system", "content": "S"}, U, A]},
        [{"role": "system", "content": "S"}, U],
        "4",
    ),
    ("ShareGPT", {"conversations": [U, A], "answer": "four"}, {"messages": [U, A]}, [U], "four"),
    ("Alpaca", ALPACA, {"prompt": "Add.\n\n2+2", "completion": "4"}, "Add.\n\n2+2", "4"),
    ("Alpaca", {**ALPACA, "input": ""}, {"prompt": "Add.", "completion": "4"}, "Add.", "4"),
    (
        "Alpaca",
        {**ALPACA, "input": None, "history": [["1+1?", "2"]]},
        {
            "messages": [
                {"role": "user", "content": "1+1?"},
                {"role": "assistant", "content": "2"},
                {"role": "user", "content": "Add."},
                A,
            ],
            "prompt_messages": 3,
        },
        [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "Add."},
        ],
        "4",
    ),
    (
        "Alpaca",
        {"instruction": "Add.", "context": "2+2", "response": "4"},  # Dolly
        {"prompt": "Add.\n\n2+2", "completion": "4"},
        "Add.\n\n2+2",
        "4",
    ),
    (
        "OpenOrca",
        {"system_prompt": "S", "question": "2+2?", "response": "4"},
        {"messages": [{"role": "system", "content": "S"}, U, A]},
        [{"role": "system", "content": "S"}, U],
        "4",
    ),
    (
        "OpenOrca",
        {"system_prompt": "", "question": "2+2?", "response": "4"},
        {"prompt": "2+2?", "completion": "4"},
        "2+2?",
        "4",
    ),
    (
        "verl's prompts",
        {
            "prompt": [{"role": "user", "content": "2+2? Think."}],
            "reward_model": {"ground_truth": "4"},
            "extra_info": {"question": "2+2?", "answer": "4"},
        },
        {"messages": [U, A]},
        [{"role": "user", "content": "2+2? Think."}],
        "4",
    ),
    ("", {"messages": [U, A]}, {"messages": [U, A]}, [U], "4"),
    (
        "GSM8K",
        {"question": "2+2?", "answer": "It is\n#### 1,000"},
        {"prompt": "2+2?", "completion": "It is\n#### 1,000"},
        "2+2?",
        "1000",
    ),
]


@pytest.mark.smoke
@pytest.mark.parametrize("case", ONES, ids=lambda case: case[0] or "OpenAI")
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_form_as_demonstrations_and_as_prompts(tmp_path, case, suffix):
    form, row, demonstration, prompt, truth = case
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 3), path)
    else:
        write(path, [row] * 3)
    notes = []
    record = load_rows(str(path), "train", "examples", notes)[2]
    assert {k: v for k, v in record.items() if k != "index"} == demonstration
    (note,) = notes
    assert f"3 rows, read as {form}" in note
    record = load_prompts(str(path), "train")[2]
    assert (record["prompt"], record["ground_truth"]) == (prompt, truth)


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [HUMAN], "chosen": GPT, "rejected": BAD},
        {"conversations": [U], "chosen": [A], "rejected": [{**A, "content": "5"}]},
        {"instruction": "2+2?", "input": "", "chosen": "4", "rejected": "5"},
    ],
)
def test_pairs(tmp_path, row):
    (record,) = load_rows(write(tmp_path / "pairs.jsonl", [row]), "train", "pairs")
    text = record["prompt"] if isinstance(record["prompt"], str) else record["prompt"][0]["content"]
    assert text == "2+2?"
    assert ["4" in str(record["chosen"]), "5" in str(record["rejected"])] == [True, True]


def test_a_conversation_that_ends_with_a_question_needs_its_answer_in_a_column(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"messages": [U, A, U], "answer": 4}])
    (record,) = load_prompts(path, "train")
    assert (record["prompt"], record["ground_truth"]) == ([U, A, U], "4")
    refused(
        lambda: load_prompts(write(tmp_path / "b.jsonl", [{"messages": [U]}]), "train"), "row 0"
    )


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"conversations": [HUMAN, GPT]}, {"prompt": "a"}], "row 1 (line 2)"),
        ([{"conversations": [HUMAN, {"from": "alien", "value": "x"}]}], "turn 1"),
        ([{"conversations": [HUMAN, "x"]}], "turn 1"),
        ([{"conversations": [HUMAN, {"from": "gpt"}]}], "'content'"),
        ([ALPACA, {**ALPACA, "instruction": 3}], "row 1 (line 2)"),
        ([{**ALPACA, "history": [["a"]]}], "'history'"),
        ([ALPACA, {"output": "x"}], "row 1 (line 2)"),
    ],
)
def test_rows_that_leave_the_form(tmp_path, rows, says):
    path = write(tmp_path / "rows.jsonl", rows)
    refused(lambda: load_rows(path, "train", "examples"), path, says)


OPENRLHF = [
    ({"input": "2+2?", "output": "4"}, "examples", {"prompt": "2+2?", "completion": "4"}),
    ({"input": [U], "output": [A]}, "examples", {"messages": [U, A]}),
    (
        {"input": "2+2?", "output": "4", "label": True},
        "unpaired",
        {"prompt": "2+2?", "completion": "4", "label": True},
    ),
    (
        {"input": "2+2?", "chosen": "4", "rejected": "5"},
        "pairs",
        {"prompt": "2+2?", "chosen": "4", "rejected": "5", "margin": 0.0, "tie": False},
    ),
    (
        {"input": [U], "label": "4", "datasource": "sums"},
        "prompts",
        {"prompt": [U], "ground_truth": "4", "data_source": "sums", "extra_info": {}},
    ),
    (
        {"context_messages": [U], "label": 4},
        "prompts",
        {"prompt": [U], "ground_truth": "4", "data_source": "rows", "extra_info": {}},
    ),
]


@pytest.mark.parametrize(("row", "kind", "want"), OPENRLHF)
def test_openrlhf(tmp_path, row, kind, want):
    path, notes = write(tmp_path / "rows.jsonl", [row] * 2), []
    load = load_prompts if kind == "prompts" else functools.partial(load_rows, kind=kind)
    record = load(path, "train", notes=notes)[1]
    assert {k: v for k, v in record.items() if k != "index"} == want
    assert len(notes) == 1 and "2 rows, read as OpenRLHF: " in notes[0]
    refused(lambda: load(write(tmp_path / "b.jsonl", [row, {"a": 1}]), "train"), "row 1 (line 2)")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"prompt": [U], "data_source": "a", "reward_model": {"ground_truth": "4"}},
            "verl's prompts, conversational",
        ),
        ({"text": "a"}, "language modeling"),
        (
            {"messages": [U, A], "tools": [{"name": "f"}]},
            "language modeling, conversational, with tools",
        ),
        ({"prompt": "a", "completion": "b"}, "prompt-completion"),
        ({"prompt": [U], "chosen": [A], "rejected": [A]}, "preference, conversational"),
        ({"chosen": "ab", "rejected": "ac"}, "preference, implicit prompt"),
        ({"prompt": [U], "completion": [A], "label": True}, "unpaired preference, conversational"),
        ({"prompt": "a", "completions": ["b"], "labels": [1]}, "stepwise supervision"),
        ({"prompt": "a", "steps": ["b"], "reward": 1}, "trajectories of steps"),
        ({"prompt": "a", "steps": 3, "answer": "b"}, "prompts"),
        ({"question": "a", "answer": "b"}, "prompts"),
        ({"prompt": "a", "safer": "b", "more_harmful": "c"}, "safety pairs"),
    ],
)
def test_what_rows_are_read_as_is_said_in_a_line(tmp_path, row, said):
    notes = []
    read_rows(write(tmp_path / "rows.jsonl", [row] * 2), "train", notes=notes)
    assert notes == [f"{tmp_path}/rows.jsonl: 2 rows, read as {said}"]


# -- tables --


def test_tables(tmp_path):
    text = 'prompt,answer\n"2+2, and\n""more""?",4\n\n"é\u2028b",  5\n'
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    records = load_prompts(str(tmp_path / "a.csv"), "train")
    assert [r["prompt"] for r in records] == ['2+2, and\r\n"more"?', "é\u2028b"]
    assert [r["ground_truth"] for r in records] == ["4", "  5"]
    (tmp_path / "train.tsv").write_text("question\tanswer\nx, y\t007\n")
    assert load_prompts(str(tmp_path), "train")[0]["ground_truth"] == "007"


def test_tables_of_preferences_labels_and_messages(tmp_path):
    (tmp_path / "p.csv").write_text("prompt,chosen,rejected,margin\na,b,c,0.5\na,b,d,\n")
    assert [r["margin"] for r in load_rows(str(tmp_path / "p.csv"), "train", "pairs")] == [0.5, 0.0]
    (tmp_path / "l.csv").write_text("prompt,completion,label\na,b,True\na,c,false\n")
    assert [r["label"] for r in load_rows(str(tmp_path / "l.csv"), "train", "unpaired")] == [1, 0]
    cell = json.dumps([HUMAN, GPT]).replace('"', '""')
    (tmp_path / "s.csv").write_text(f'id,conversations\n1,"{cell}"\n')
    assert load_rows(str(tmp_path / "s.csv"), "train", "examples")[0]["messages"] == [U, A]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no rows"),
        ("prompt,answer\n", "no rows"),
        ("prompt,prompt\na,b\n", "field 'prompt' stands twice"),
        ("prompt,\na,b\n", "names no columns"),
        ("prompt,answer\na\n", "line 2"),
        ("prompt,answer\na,b\na,b,c\n", "line 3"),
        ('prompt,answer\n"a,b\n', "line 2"),
        ('prompt,answer\n"a"x,b\n', "line 2"),
        ("prompt,answer\na,\n", "row 0 (line 2), column 'answer'"),
        ("prompt,answer\n,b\n", "row 0 (line 2), column 'prompt'"),
        ("prompts,answer\na,b\n", "lacks the column 'prompt'"),
    ],
)
def test_malformed_tables(tmp_path, text, says):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    refused(lambda: load_prompts(str(path), "train"), "rows.csv", says)


def test_a_column_that_stands_twice_is_refused(tmp_path):
    """One of the two would be lost."""
    names = ["prompt", "chosen", "chosen", "rejected"]
    arrays = [pyarrow.array([text]) for text in ("q", "a", "b", "c")]
    table = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(arrays, names=names), table)
    row = '{"prompt": "q", "chosen": "a", "chosen": "b", "rejected": "c"}'
    (tmp_path / "l.jsonl").write_text(row + "\n")
    (tmp_path / "j.json").write_text(f"[{row}]")
    for name in ("p.parquet", "l.jsonl", "j.json"):
        read = functools.partial(load_rows, str(tmp_path / name), "train", "pairs")
        refused(read, "'chosen' stands twice")
    refused(lambda: load_stored_rows(str(table), "pairs"), "'chosen' stands twice")


CELLS = [
    (["prompt", "answer"], ['{"a": 1}', "1"], "column 'prompt' holds JSON, an object"),
    (["prompt", "answer"], [" [1, 2] ", "1"], "column 'prompt' holds JSON, a list"),
    (["prompt", "answer"], [str([U]), "1"], "column 'prompt' looks like JSON, and is none"),
    (["prompt", "answer"], ['["a", "b"', "1"], ""),
    (["prompt", "answer"], ['["a"] or [b]', "1"], ""),
    (["prompt", "answer"], ["[x] + {y}", "1"], ""),
    (["instruction", "input", "output"], ["sort", "[3, 1]", "1, 3"], "'input' holds JSON, a list"),
]


@pytest.mark.parametrize(("names", "cells", "says"), CELLS)
def test_cells_that_look_like_json(tmp_path, names, cells, says):
    def load():
        return load_prompts(written(tmp_path, names, cells), "train")

    if says:
        refused(load, "rows.csv: row 0 (line 2)", says)
    else:
        assert load()[0]["prompt"] == cells[0]


@pytest.mark.parametrize("cell", ["1.50", "1e3", "True", "007"])
def test_the_label_of_a_prompt_in_a_table_is_a_text(tmp_path, cell):
    for names in (["input", "label"], ["prompt", "answer"]):
        (record,) = load_prompts(written(tmp_path, names, ["q", cell]), "train")
        assert record["ground_truth"] == cell
    path = written(tmp_path, ["input", "output", "label"], ["q", "a", "True"])
    assert load_rows(path, "train", "unpaired")[0]["label"] is True


def written(tmp_path, names, cells):
    with open(tmp_path / "rows.csv", "w", newline="") as file:
        csv.writer(file).writerows([names, cells])
    return str(tmp_path / "rows.csv")


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_truth_values_of_a_table_reach_the_template_and_the_steps(tmp_path, suffix):
    def read(column, cell, kind, **more):
        path = tmp_path / f"rows{suffix}"
        with open(path, "w", newline="") as file:
            table = csv.writer(file, delimiter="," if suffix == ".csv" else "\t")
            table.writerows([["prompt", *more, column], ["q", *more.values(), cell]])
        return load_rows(str(path), "train", kind)[0]

    for cell, truth in (("true", True), ("False", False), ("1", True), ("0", False), ("", None)):
        record = read("enable_thinking", cell, "examples", completion="a")
        assert record.get("variables", {}).get("enable_thinking") is truth
        steps = dict(completions='["a", "b"]', labels="[true, false]")
        assert read("ended", cell, "stepwise", **steps).get("ended") is truth
    refused(lambda: read("enable_thinking", "maybe", "examples", completion="a"), "not true or")


def test_cells_of_json_are_what_they_say(tmp_path):
    names = ["prompt", "ground_truth", "extra_info", "targets", "tools"]
    cells = ["q", '{"a":1}', '{"x": 1}', "[1, 2]", "[]"]
    (record,) = load_prompts(written(tmp_path, names, cells), "train")
    assert record["ground_truth"] == '{"a":1}'  # a reward reads the text
    assert record["extra_info"] == {"targets": [1, 2], "tools": [], "x": 1}
    path = written(tmp_path, ["prompt", "answer"], ["q", "[1,  2]"])
    assert load_prompts(path, "train")[0]["ground_truth"] == "[1,  2]"
    path = written(tmp_path, ["prompt", "chosen", "rejected"], ["q", "", "b"])
    refused(lambda: load_rows(path, "train", "pairs"), "'chosen' is null")  # a gap, no empty text
    cells = [json.dumps([U, A, U, A]), "[0, 0, 0, 1]"]
    path = written(tmp_path, ["messages", "loss_mask"], cells)
    (record,) = load_rows(path, "train", "examples")
    assert record["messages"] == [U, {**A, "learn": False}, U, A]


ROW = {"prompt": "a", "answer": "1"}
LINES = [
    (json.dumps(ROW, indent=1), "line 1 is the beginning of JSON", "one object per line"),
    (json.dumps([ROW, ROW], indent=1), "line 1 is the beginning of JSON", "is named .json"),
    ('{"prompt": "a",\n "answer": "1"}', "line 1 is the beginning of JSON", "json.dumps"),
    ("[" + json.dumps(ROW) + ",\n" + json.dumps(ROW) + "]", "line 1 is the beginning", "per line"),
    (json.dumps([ROW, ROW]), "row 0 (line 1) is not an object", "is named .json"),
    (json.dumps(ROW) + ",\n" + json.dumps(ROW), "line 1 is an element of a list", "per line"),
    ("prompt,answer\n2+2,4\n", "looks like the names of a table's columns", "name the file .csv"),
    ('"prompt"\t"answer"\n', "looks like the names of a table's columns", "name the file .tsv"),
    (json.dumps(ROW) + "\nprompt,answer\n", "line 2", "JSON"),
    (json.dumps(ROW) * 2, "line 1 holds more than one value", "one object per line"),
    (json.dumps(ROW) + "\n\ufeff" + json.dumps(ROW), "line 2 begins with a byte order", "joined"),
    (str(ROW), "line 1 is not valid JSON", "Python's own repr"),
    (json.dumps(ROW) + '\n{"prompt": "a', "line 2 is not valid JSON", ""),
]


@pytest.mark.parametrize(("text", "what", "fix"), LINES)
def test_lines_that_are_no_rows_are_named_for_what_they_are(tmp_path, text, what, fix):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    refused(lambda: load_prompts(str(path), "train"), "rows.jsonl", what, fix)
    if "row 0" not in what:  # that is said of a row, once it is drawn
        refused(lambda: load_endless_prompts(str(path), stored=True).first(2), what, fix)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        (json.dumps(ROW) + "\n" + json.dumps(ROW), "one object per line is a .jsonl file"),
        (json.dumps(ROW, indent=1) + "\n" + json.dumps(ROW, indent=1), "write [{...}, {...}]"),
        (str([ROW]), "Python's own repr"),
        (json.dumps({"prompt": ["a"], "answer": ["1"]}), "orient='records'"),
    ],
)
def test_json_files_that_are_no_list_of_rows(tmp_path, text, fix):
    path = tmp_path / "rows.json"
    path.write_text(text)
    refused(lambda: load_prompts(str(path), "train"), "rows.json", fix)
    for name, marked in (("a.json", [ROW]), ("a.jsonl", ROW)):  # a mark at the beginning is none
        (tmp_path / name).write_text("\ufeff" + json.dumps(marked))
        assert load_prompts(str(tmp_path / name), "train")[0]["prompt"] == "a"


# -- what is said when a run starts --


def loaded(tmp_path, rows, dataflow="grpo", **fields):
    config = config_of(tmp_path, dataflow, rows)
    config.reward.function = fields.pop("reward", "")
    config.data.max_prompt_tokens = 60
    for name, value in fields.items():
        setattr(config.data, name, value)
    return load_data(config, load_run_tokenizer(config), "rollouts")


def test_kept_and_dropped_prompts_are_said(tmp_path):
    rows = [{"prompt": [U], "answer": "4"}] * 20 + [{"prompt": "x" * 900, "answer": "4"}]
    notes = loaded(tmp_path, rows).notes
    path = f"{tmp_path}/rows.jsonl"
    assert notes == (
        f"{path}: 21 rows, read as prompts, conversational",
        f"{path}: 20 of 21 prompts kept (1 over 60 tokens)",
    )
    _, note = loaded(tmp_path, rows, overlong="left").notes
    assert note.endswith("21 of 21 prompts kept; 1 cut to 60 tokens")
    rows = [{"conversations": [HUMAN, GPT]}] * 1_000
    first, second = loaded(tmp_path, rows).notes
    assert "1,000 rows, read as ShareGPT: language modeling, conversational" in first
    assert "1,000 of 1,000 prompts kept" in second


def test_tasks_say_it_too():
    config = Config(model="decoder(layers=1)")
    config.data.train = "sort_digits(prompts=100, test=4, worked_examples=4)"
    config.data.max_prompt_tokens = 64
    notes = load_data(config, load_run_tokenizer(config)).notes
    assert any("prompts kept" in note for note in notes), notes


def test_rows_that_are_shown_come_with_what_is_said(tmp_path):
    config = config_of(tmp_path, "sft", [{"conversations": [HUMAN, GPT]}] * 3)
    notes = load_shown(config)[0].notes
    assert (
        len(notes) == 2
        and "3 rows, read as ShareGPT: language" in notes[0]
        and "3 of 3 rows kept" in notes[1]
    )


def test_bare_prompts_of_a_chat_model_are_warned_of_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "rljax"):
        loaded(tmp_path, [{"prompt": [U], "answer": "4"}] * 3)
        assert not caplog.records
        loaded(tmp_path, [{"prompt": "2+2?", "answer": "4"}] * 3)
    (record,) = caplog.records
    assert "3 prompts are bare text" in record.message and "rljax data prepare" in record.message
    write_tokenizer(tmp_path / "plain", None)
    assert not load_tokenizer(tmp_path / "plain").has_chat_template


TESTS = '{"inputs": ["1"], "outputs": []}'
WRONG = [
    ("", "gsm8k", "many", "not a number"),  # by the data source, as the default does
    ("gsm8k()", "mine", "#### 0", "not a number"),
    ("choice()", "mine", "F", "none of the letters"),
    ("countdown()", "mine", "24", "numbers"),
    ("list_match()", "mine", ",", "no items"),
    ("contains()", "mine", "  x", ""),
    ("exact_match()", "mine", {"answers": ["5"]}, "is an object of answers"),
    ("qa_exact_match()", "mine", {"text": [], "answer_start": []}, "has no target"),
    ("boxed()", "mine", "We add two and three,\nand get five of them.", "a text, not an answer"),
    ("gsm8k(method='strict')", "mine", "many", "not a number"),
    ("code_tests()", "mine", TESTS, "1 inputs and 0 outputs"),
    ("mixture(rewards=('format_tags()', 'gsm8k()'))", "mine", "a", "not a number"),
    ("by_source(sources=(('mine', 'choice()'),))", "mine", "9", "letters"),
]


@pytest.mark.parametrize(("reward", "source", "truth", "says"), WRONG)
def test_a_wrong_ground_truth_is_named_when_the_file_is_read(tmp_path, reward, source, truth, says):
    good = {"contains()": "y", "choice()": "B", "list_match()": "1 2"}.get(reward, "5")
    good = '{"numbers": [1, 2], "target": 3}' if "countdown" in reward else good
    good = '{"inputs": ["1"], "outputs": ["1"]}' if "code" in reward else good
    good = "B" if "by_source" in reward else good
    rows = [{"prompt": [U], "answer": good, "data_source": source}] * 3
    loaded(tmp_path, rows, reward=reward)
    if not says:
        return
    rows.append({**rows[0], "answer": truth})
    text = refused(lambda: loaded(tmp_path, rows, reward=reward), "rows.jsonl: row 3 (line 4)")
    assert says in text and "column 'answer'" in text
    if not reward:
        assert "the reward of data source 'gsm8k' is gsm8k()" in text


def of_columns(completions, answer, level=0, **kwargs):
    return [1.0 for _ in completions]


def of_completion(completion, level):
    return 1.0


@pytest.mark.parametrize("stream", [False, True])
def test_entries_of_extra_info_that_a_reward_is_not_handed_are_counted(tmp_path, caplog, stream):
    row = {"prompt": [U], "reward_model": {"style": "rule", "ground_truth": "4"}, "level": 1}
    rows = [{**row, "extra_info": {"answer": text, "level": 1}} for text in ("4", "2+2=4", "2+2=4")]
    rows[2]["extra_info"]["level"] = 2
    for reward, names in (
        ("test_formats.of_columns()", ["answer", "level"]),
        ("mixture(rewards=('exact_match()', 'test_formats.of_completion()'))", ["level"]),
        ("exact_match()", []),
    ):
        caplog.clear()
        with caplog.at_level("WARNING", "rljax"):
            loaded(tmp_path, rows, reward=reward, stream=stream)
        found = [r.getMessage() for r in caplog.records if "in extra_info" in r.getMessage()]
        assert len(found) == len(names) and all(map(str.__contains__, found, names)), found
        for text in found:
            count, first = (1, 2) if "'level'" in text else (2, 1)
            assert f"rows.jsonl: {count} rows have another" in text and "extra_info[" in text
            assert stream or f"the first is row {first}" in text
            assert f"{reward.split('.')[-1].split('(')[0]}" in text


def never_called(response, ground_truth):
    raise AssertionError("ground_truth: a user's own reward was asked")


def test_a_users_own_reward_is_not_asked_while_a_file_is_read(tmp_path):
    rows = [{"prompt": [U], "answer": "many", "data_source": "gsm8k"}]
    assert loaded(tmp_path, rows, reward="test_formats.never_called()").notes


# -- names on the Hub --


class Problems:
    def __init__(self):
        self.found = []

    def check(self, good, field, value, rule, fix=""):
        if not good:
            self.found.append((field, fix))


def test_names_on_the_hub_are_taken_or_say_how_they_are_written():
    config = Config(model="Qwen/Qwen2.5-0.5B")
    config.data.train = "openai/gsm8k"
    config.data.test = "data/missing.parquet"
    problems = Problems()
    check_paths(config, problems)
    fixes = dict(problems.found)
    assert set(fixes) == {"data.train", "data.test"}
    assert "hf://datasets/openai/gsm8k" in fixes["data.train"]
    assert "hf://" not in fixes["data.test"]
    refused(lambda: read_rows("openai/gsm8k", "train"), "is hf://datasets/openai/gsm8k")


def test_a_null_output_of_alpaca_is_said(tmp_path):
    rows = [{**ALPACA, "label": 1, "output": output} for output in ("4", None)]
    path = write(tmp_path / "rows.jsonl", rows)
    for kind in ("examples", "unpaired"):
        with pytest.raises(InputError, match="row 1 .*is null.*'output'.*fill it in"):
            load_rows(path, "train", kind)


def test_a_score_of_alpaca_is_the_reward_or_the_label_that_is_asked_for(tmp_path):
    def rows(*scores):
        rows = [{"instruction": "2+2?", "output": "4", "score": score} for score in scores]
        return write(tmp_path / "rows.jsonl", rows)

    records = load_rows(rows(0.5, 1.0, 0), "train", "trajectories")
    assert [record["reward"] for record in records] == [0.5, 1.0, 0.0]
    with pytest.raises(InputError, match="row 1 .*'score' is not true or false: got 5"):
        load_rows(rows(1, 5), "train", "unpaired")


def test_openrlhf_rows_of_kto_and_of_process_rewards(tmp_path):
    rows = [
        {"instruction": "2+2?", "response": text, "score": score}
        for text, score in (("4", 1), ("5", 0))
    ]
    found = load_rows(write(tmp_path / "kto.jsonl", rows), "train", "unpaired")
    assert [(r["prompt"], r["completion"], r["label"]) for r in found] == [
        ("2+2?", "4", True),
        ("2+2?", "5", False),
    ]
    steps = "Janet has 2. How many? Step 1: 2+2 = 4 \u043a\u0438\nStep 2: So 5. \u043a\u0438"
    row = {"input": steps, "value": ["+", "-"]}
    (found,) = load_rows(write(tmp_path / "prm.jsonl", [row]), "train", "stepwise")
    assert found["prompt"] == "Janet has 2. How many?"
    assert found["completions"] == ["Step 1: 2+2 = 4", "Step 2: So 5."]
    assert found["labels"] == [1.0, -1.0]
    path = write(tmp_path / "bad.jsonl", [{**row, "value": ["+"]}])
    refused(lambda: load_rows(path, "train", "stepwise"), "row 0", "does not fit the steps")


@pytest.mark.parametrize(
    "columns",
    [
        {"chat_template_kwargs": {"enable_thinking": False, "other": None}},
        {"enable_thinking": False},
        {"chat_template_kwargs": '{"enable_thinking": false}'},
        {"enable_thinking": 0},
    ],
)
def test_variables_of_a_row_reach_the_chat_template(tmp_path, columns):
    write_family(tmp_path / "qwen3", "qwen3", marked=False)
    tokenizer, path = load_tokenizer(tmp_path / "qwen3"), tmp_path / "rows.jsonl"
    begun = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    rows = {
        "examples": {"messages": [U, A]},
        "pairs": {"prompt": [U], "chosen": [A], "rejected": [{**A, "content": "no"}]},
        "unpaired": {"prompt": [U], "completion": [A], "label": True},
    }
    for kind, row in rows.items():
        path = write(tmp_path / "rows.jsonl", [{**row, **columns}])
        ((item,), _) = encode_rows(load_rows(path, "train", kind), tokenizer, kind, max_tokens=99)
        ids = item.ids[item.mask == 0] if kind == "examples" else item.prompt_ids
        assert (
            tokenizer.decode(ids, skip_special_tokens=False).rstrip("\n").endswith(begun.rstrip())
        )
    path = write(tmp_path / "rows.jsonl", [{"prompt": [U], "answer": "4", **columns}])
    ((prompt,), _) = encode_prompts(load_prompts(path, "train"), tokenizer, max_prompt_tokens=99)
    assert prompt.prompt_text.endswith(begun)
    plain = load_tokenizer(tmp_path / "qwen3", variables={"enable_thinking": False})
    assert plain.render_chat([U]) == prompt.prompt_text, "those of a run do the same"
    assert plain.fingerprint() != tokenizer.fingerprint()


def test_variables_that_contradict_or_that_nothing_reads(tmp_path, caplog):
    both = {"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False}
    path = write(tmp_path / "rows.jsonl", [{"messages": [U, A], **both}])
    refused(lambda: load_rows(path, "train", "examples"), "row 0", "disagree")
    path = write(tmp_path / "rows.jsonl", [{"messages": [U, A], "chat_template_kwargs": [1]}])
    refused(lambda: load_rows(path, "train", "examples"), "row 0", "not an object")
    folder = write_tokenizer(tmp_path / "tokenizer")
    refused(lambda: load_tokenizer(folder, variables={"enable_thinking": True}), "does not read")
    rows = [{"messages": [U, A], "enable_thinking": True}]
    warn_unread("rows", load_rows(rows, "train", "examples"), load_tokenizer(folder))
    assert "1 rows give the chat template a variable 'enable_thinking'" in caplog.text


def test_a_row_that_cannot_be_encoded_names_its_file(tmp_path):
    long = {"prompt": "1" * 50, "ground_truth": "4"}
    path = write(tmp_path / "rows.jsonl", [{"prompt": "1", "ground_truth": "4"}, long])
    config = Config(model="decoder(layers=1, embed=8, heads=1, kv_heads=1)")
    config.data.train, config.data.max_prompt_tokens, config.data.overlong = path, 8, "error"
    config.reward.function = "exact_match()"
    refused(lambda: load_data(config, CharTokenizer("14")), "rows.jsonl", "row 1", "too long")


def test_the_question_and_the_system_of_a_pair(tmp_path):
    """Orca's pairs: columns system, question, chosen, rejected."""
    system = {"role": "system", "content": "Be brief."}
    row = {"system": "Be brief.", "question": "2+2?", "chosen": "4", "rejected": "five"}
    (record,) = load_rows([row], "train", "pairs")
    assert record["prompt"] == [system, U] and record["chosen"] == [A]
    (record,) = load_rows([{**row, "system": ""}], "train", "pairs")
    assert record["prompt"] == "2+2?"
    safety = {"question": "2+2?", "safer": "4", "more_harmful": "no"}
    flags = {"safer_is_safe": True, "more_harmful_is_safe": False}
    assert load_rows([safety | flags], "train", "safety")[0]["prompt"] == "2+2?"
    for kind, more in (
        ("examples", {"messages": [U, A]}),
        ("unpaired", {"prompt": [U], "completion": [A], "label": True}),
    ):
        (record,) = load_rows([{"system_prompt": "Be brief.", **more}], "train", kind)
        assert (record.get("messages") or record["prompt"])[0] == system
    two = {"system": "Be brief.", "messages": [{**system, "content": "Be long."}, U, A]}
    refused(lambda: load_rows([two], "train", "examples"), "two system messages")
    (prompt,) = load_prompts([{"system": "Be brief.", "prompt": [U], "answer": "4"}], "train")
    assert prompt["prompt"] == [system, U]
    both = {"system": "Be brief.", "system_prompt": "Be long.", "prompt": "2+2?", "answer": "4"}
    refused(lambda: load_prompts([both], "train"), "'system_prompt'", "two system messages")


@pytest.mark.parametrize("column", ["system", "system_prompt"])
@pytest.mark.parametrize("who", ["system", "System", "role"])
def test_a_sharegpt_conversation_has_one_system_message(column, who):
    def row(said):
        first = (
            {"role": "system", "content": said} if who == "role" else {"from": who, "value": said}
        )
        return {column: "Be brief.", "conversations": [first, HUMAN, GPT]}

    system = {"role": "system", "content": "Be brief."}
    (record,) = load_rows([row("Be brief.")], "train", "examples")
    assert record["messages"] == [system, U, A]
    (prompt,) = load_prompts([row("Be brief.")], "train")
    assert prompt["prompt"] == [system, U]
    pair = {**row("Be brief."), "conversations": [system, U], "chosen": GPT, "rejected": BAD}
    assert load_rows([pair], "train", "pairs")[0]["prompt"] == [system, U]
    for load in (
        lambda: load_rows([row("Be long.")], "train", "examples"),
        lambda: load_prompts([row("Be long.")], "train"),
    ):
        refused(load, "row 0", "two system messages")
    plain = {column: "Be brief.", "conversations": [HUMAN, GPT]}
    assert load_rows([plain], "train", "examples")[0]["messages"] == [system, U, A]


def test_calls_of_sharegpt_and_parts_by_other_names():
    call = {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'}
    row = {"conversations": [HUMAN, call, {"from": "observation", "value": "3"}, GPT]}
    (record,) = load_rows([row], "train", "examples")
    (made,) = record["messages"][1]["tool_calls"]
    assert made.get("function", made)["name"] == "add"
    parts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "so"}]},
        {"type": "output_text", "text": "4"},
    ]
    messages = [{"role": "user", "content": [{"type": "input_text", "text": "2+2?"}]}]
    messages += [{"role": "assistant", "content": parts}]
    (record,) = load_rows([{"messages": messages}], "train", "examples")
    assert [m["content"] for m in record["messages"]] == ["2+2?", "4"]
    assert record["messages"][1]["reasoning_content"] == "so"


Q = "1+1? Step 1: a ки\nStep 2: b ки"
SHEPHERD = {"input": Q, "label": "1+1? Step 1: a +\nStep 2: b -", "task": "GSM8K"}


@pytest.mark.parametrize("row", [SHEPHERD, {**SHEPHERD, "input": Q + "\n"}], ids=["plain", "end"])
def test_math_shepherd_as_it_is_published(tmp_path, row):
    file = write(tmp_path / "rows.jsonl", [row, row])
    record, _ = load_rows(file, "train", "stepwise")
    of_values = {"input": Q, "value": ["+", "-"]}
    (want,) = load_rows(write(tmp_path / "a.jsonl", [of_values]), "train", "stepwise")
    assert record == want and record["labels"] == [1.0, -1.0]
    assert load_stored_rows(file, "stepwise")[0]["labels"] == [1.0, -1.0]
    more = {**row, "input": Q + " Step 3: c", "label": SHEPHERD["label"] + " Step 3: c"}
    for broken in ({**row, "label": "1+1? Step 1: a +\nStep 2: b ?"}, more):
        with pytest.raises(InputError, match=r"row 1 .*'label' does not fit the steps of 'input'"):
            load_rows(write(tmp_path / "b.jsonl", [row, broken]), "train", "stepwise")
    for broken in ("1+1? Step 1: a +\nStep 2: b", "1+1? Step 1: a", more["label"]):
        with pytest.raises(InputError, match=r"row 0: 'label' does not fit the steps of 'input'"):
            load_rows([{**row, "label": broken}], "train", "stepwise")
    # Prompts in Russian are no steps.
    prompts = [{"input": "книжки?", "label": "книж"}, {"input": "ки", "label": "+1"}]
    for one in prompts:
        (read,) = load_prompts(write(tmp_path / "c.jsonl", [one]), "train")
        assert (read["prompt"], read["ground_truth"]) == (one["input"], one["label"])


def test_a_row_of_another_form_than_the_first_is_told_so(tmp_path):
    rows = [{"instruction": "a", "output": "b"}, {"prompt": "a", "completion": "b"}]
    says = "row 1 .*has no column 'instruction': got .*'prompt'.*the first row has one"
    with pytest.raises(InputError, match=says):
        load_rows(write(tmp_path / "rows.jsonl", rows), "train", "examples")


@pytest.mark.parametrize("stored", [False, True])
def test_an_error_about_columns_that_were_renamed_names_those_of_the_file(tmp_path, stored):
    file = write(tmp_path / "rows.jsonl", [{"input": "q", "label": "a", "task": "t"}])
    says = "lacks the column 'completions'.*'input', 'label' were read as columns of OpenRLHF"
    with pytest.raises(InputError, match=says):
        load_stored_rows(file, "stepwise") if stored else load_rows(file, "train", "stepwise")
    file = write(tmp_path / "b.jsonl", [{"instruction": "q", "output": "a"}])
    with pytest.raises(InputError, match="'instruction', 'output' were read as columns of Alpaca"):
        load_rows(file, "train", "pairs")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (True, "is a bool, and no text: got True"),
        (False, "is a bool, and no text: got False"),
        (datetime.date(2020, 1, 2), "is a date, and no text"),
        (datetime.datetime(2020, 1, 2), "is a datetime, and no text"),
        (datetime.time(1, 2), "is a time, and no text"),
        (datetime.timedelta(days=1), "is a timedelta, and no text"),
        (decimal.Decimal("1.50"), "1.5"),
        (decimal.Decimal("72.00"), "72"),
        (decimal.Decimal("1000"), "1000"),
        (decimal.Decimal("-0.25"), "-0.25"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_answers_that_a_database_holds(tmp_path, value, says, nested):
    row = {"prompt": "q", "reward_model": {"ground_truth": value}}
    row = row if nested else {"prompt": "q", "answer": value}
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    if isinstance(value, decimal.Decimal):
        assert [r["ground_truth"] for r in load_prompts(str(path), "train")] == [says]
        return
    with pytest.raises(InputError, match=rf"{says}.*Fix: write it as the text of a right answer"):
        load_prompts(str(path), "train")


@pytest.mark.parametrize(
    ("names", "fix"),
    [
        (["data/train-00000-of-00001.parquet"], ["data/train-00000-of-00001.parquet"]),
        ([f"data/train-0000{n}-of-00002.parquet" for n in (0, 1)], ["data/train-*.parquet"]),
        ([f"train-0000{n}-of-00002.parquet" for n in (0, 1)], ["train-*.parquet"]),
        ([f"{s}/train-0000{n}.jsonl" for s in "ab" for n in (0, 1)], ["a/train-*.jsonl"] * 2),
        ([f"train/000{n}.parquet" for n in (0, 1)], ["train/*.parquet"]),
        ([f"train/part{n}.csv" for n in (1, 20)] + ["train/part.csv"], ["train/part*.csv"]),
        (["test-00000-of-00001.parquet", ".cache/train.parquet"], []),
    ],
)
def test_a_downloaded_data_set_is_told_by_the_pattern_that_reads_it(tmp_path, names, fix):
    for name in [*names, "data/test-00000-of-00001.parquet", "README.md"]:
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pyarrow.Table.from_pylist([{"prompt": f"q {name}", "answer": "a"}])
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(table, path)
        else:
            path.write_text(
                "prompt,answer\nq,a\n" if path.suffix == ".csv" else '{"prompt": "q"}\n'
            )
    for folder in {tmp_path / "set", (tmp_path / "set" / names[0]).parent}:
        with pytest.raises(InputError, match="has no file for the split 'train'") as error:
            load_prompts(str(folder), "train")
        fixes = error.value.parts[1].split(" or ")
        if not fix:
            assert fixes == ["name the file itself"]
        elif folder == tmp_path / "set":
            assert len(fixes) == len(fix) and fixes[0] == f"{folder}/{fix[0]}"
        found = [read_rows(one, "train") for one in fixes if fix]
        assert sum(len(rows.rows) for rows in found) in (0, len(names), len(names) // 2)


def test_rows_that_the_datasets_library_saved_are_told_to_be_written_as_parquet(tmp_path):
    """Its folders hold JSON files that are no rows; the fix was to read these."""
    one, both = tmp_path / "one", tmp_path / "both"
    for folder in (one, both / "train", both / "test"):
        folder.mkdir(parents=True)
        (folder / "data-00000-of-00001.arrow").write_bytes(b"")
        for name in ("dataset_info.json", "state.json"):
            (folder / name).write_text("{}")
    (both / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    alone = tmp_path / "cache.arrow"
    alone.write_bytes(b"")
    of_one = f"datasets.load_from_disk({str(one)!r}).to_parquet('train.parquet')"
    of_both = f"datasets.load_from_disk({str(both)!r})['train'].to_parquet('train.parquet')"
    arrow = one / "data-00000-of-00001.arrow"
    for spec, fix in [
        (one, of_one),
        (f"{one}/", of_one),
        (both, of_both),
        (both / "dataset_dict.json", of_both),
        (one / "*.json", of_one),
        (one / "state.json", of_one),
        (arrow, of_one),
        (one / "*.arrow", of_one),
        (alone, f"datasets.Dataset.from_file({str(alone)!r}).to_parquet('train.parquet')"),
    ]:
        with pytest.raises(InputError) as error:
            load_prompts(str(spec), "train")
        assert error.value.parts[1] == f"write the rows into a file that is read: {fix}"
        with pytest.raises(InputError) as error:
            load_stored_rows(str(spec), "examples")
        assert "*.json" not in error.value.parts[1]
    with pytest.raises(InputError, match="load_from_disk"):
        load_stored_rows(str(arrow), "examples")
    # Rows beside such files are found.
    (both / "data").mkdir()
    table = pyarrow.Table.from_pylist([{"prompt": "q", "answer": "a"}])
    pyarrow.parquet.write_table(table, both / "data" / "train-00000-of-00001.parquet")
    with pytest.raises(InputError, match="Fix: .*/both/data/train-00000-of-00001.parquet$"):
        load_prompts(str(both), "train")
