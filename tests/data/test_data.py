"""Records from files and tasks, and what malformed data files say."""

import json
import math
from dataclasses import dataclass, field

import pyarrow
import pyarrow.parquet
import pytest
from tiny_data import gsm8k_row, write_gsm8k_parquet
from tiny_tokenizer import write_json

from rljax.data.rows.sources import load_demonstrations, load_prompts
from rljax.errors import InputError


@dataclass
class CountingTask:
    """A task of a user's own, as `rljax.tasks` has them."""

    train: list = field(default_factory=lambda: [{"prompt": "1 2", "ground_truth": 3}])
    test: list = field(default_factory=lambda: [{"prompt": "2 2", "ground_truth": 4}])
    worked_examples: list = field(default_factory=lambda: [{"prompt": "1 1", "completion": "2"}])


def counting(times=1):
    return CountingTask(train=CountingTask().train * times)


def no_task():
    return {"train": []}


def plain_rows(needed):
    return [{"prompt": "1", "ground_truth": needed}]


# -- sources --


def test_gsm8k_parquet(tmp_path):
    path = write_gsm8k_parquet(tmp_path / "train.parquet", 3)
    records = load_prompts(str(path), "train")
    assert load_prompts(str(tmp_path), "train") == records
    assert load_prompts(str(tmp_path / "{split}.parquet"), "train") == records
    assert len(records) == 3
    row = gsm8k_row(2)
    assert records[2] == {
        "prompt": row["prompt"],
        "ground_truth": "5",
        "data_source": "openai/gsm8k",
        "extra_info": {**row["extra_info"], "ability": "math"},
        "index": 2,
    }


def write_lines(path, *rows):
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("row", "prompt", "truth", "extra"),
    [
        ({"prompt": "1+1", "ground_truth": 2}, "1+1", "2", {}),
        ({"question": "1+1", "answer": "2", "level": 5}, "1+1", "2", {"level": 5}),
        ({"prompt": "x", "answer": 72.0}, "x", "72", {}),
        ({"prompt": "x", "answer": 0.5}, "x", "0.5", {}),
        ({"prompt": "x", "answer": 10**400}, "x", f"1{'0' * 400}", {}),  # too large for a float
        ({"prompt": "x", "ground_truth": "a", "answer": "b"}, "x", "a", {"answer": "b"}),
        (
            {"question": "q", "answer": "48/2 = 24\n#### 1,024"},
            "q",
            "1024",
            {"solution": "48/2 = 24"},
        ),
        ({"prompt": "x", "ground_truth": "a\n#### 3"}, "x", "a\n#### 3", {}),
        ({"prompt": "x", "reward_model": {"ground_truth": 7}, "extra_info": None}, "x", "7", {}),
    ],
)
def test_row_forms(tmp_path, row, prompt, truth, extra):
    (record,) = load_prompts(write_lines(tmp_path / "sums.jsonl", row), "train")
    assert (record["prompt"], record["ground_truth"]) == (prompt, truth)
    assert (record["extra_info"], record["data_source"]) == (extra, "sums")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "x"},
        {"prompt": "x", "ground_truth": None},
        {"prompt": "x", "reward_model": {"style": "model", "ground_truth": None}},
    ],
)
def test_ground_truth_is_optional_where_a_model_judges(tmp_path, row):
    path = write_lines(tmp_path / "a.jsonl", row)
    assert load_prompts(path, "train", need_ground_truth=False)[0]["ground_truth"] == ""
    with pytest.raises(InputError, match="row 0"):
        load_prompts(path, "train")


def test_json_files(tmp_path):
    rows = [{"prompt": "\u2028x", "ground_truth": "1"}]
    write_json(tmp_path / "list.json", rows)
    write_json(tmp_path / "splits.json", {"train": [], "test": rows})
    line = json.dumps(rows[0], ensure_ascii=False)
    (tmp_path / "bom.jsonl").write_text("\ufeff" + line + "\r\n\n", encoding="utf-8")
    for name in ("list.json", "splits.json", "bom.jsonl"):
        assert load_prompts(str(tmp_path / name), "test")[0]["prompt"] == "\u2028x"


def test_tasks():
    assert [r["ground_truth"] for r in load_prompts("test_data.counting(times=2)", "train")] == [
        "3",
        "3",
    ]
    (record,) = load_prompts("test_data.counting", "test")
    assert (record["ground_truth"], record["data_source"]) == ("4", "test_data.counting")
    (example,) = load_demonstrations("test_data.counting", "train")
    assert example == {"prompt": "1 1", "completion": "2", "index": 0}
    assert load_prompts("test_data.plain_rows(needed=1)", "train")[0]["ground_truth"] == "1"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a", "response": "b"}, {"prompt": "a", "completion": "b"}),
        ({"question": "a", "answer": "b\n#### 1"}, {"prompt": "a", "completion": "b\n#### 1"}),
        ({"text": "a"}, {"text": "a"}),
        (
            {"prompt": [{"role": "user", "content": "a"}], "completion": "b"},
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        ),
    ],
)
def test_demonstration_forms(tmp_path, row, expected):
    (record,) = load_demonstrations(write_lines(tmp_path / "a.jsonl", row), "train")
    assert record == {**expected, "index": 0}


# -- malformed files: every error names the file, and is an InputError --

GOOD = {"prompt": "1", "ground_truth": "2"}


def changed(**fields):
    return [GOOD, {**GOOD, **fields}]


JSONL = [
    (b"", "has no rows"),
    (b"\n\n", "has no rows"),
    (b'{"prompt": "1"\n', "line 1 is not valid JSON"),
    (b'{"prompt": "1", "ground_truth": "2"}\n{"prom', "line 2 is not valid JSON"),
    (b'{"prompt": "1", "ground_truth": "2"}\n\n\xff\xfe', "line 3 is not UTF-8"),
    (b'\xff\xfe{\x00"\x00', "not UTF-8"),
    (b"prompt,answer\n1,2\n", "line 1 looks like the names of a table's columns"),
    (b"3\n", "row 0 (line 1) is not an object"),
    (b'\n["a"]\n', "row 0 (line 2) is not an object"),
    (b"null", "is not an object"),
    (b'{"prompt": ' + b"9" * 5000 + b"}", "line 1 is not usable JSON"),
    (b"[" * 100_000, "line 1 is not"),
    (b'{"prompt": "\\ud800", "ground_truth": "2"}', "surrogate"),
    (b'{"prompt": "1", "ground_truth": NaN}', "'ground_truth' is null"),
    (b'{"prompt": "1", "ground_truth": Infinity}', "'ground_truth'"),
    (b'{"ground_truth": "2"}', "lacks the column 'prompt'"),
    (b'{"prompt": "1"}', "lacks the column 'ground_truth'"),
]
ROWS = [
    ([GOOD, {"prompt": "1"}], "row 1 (line 2) lacks the column 'ground_truth'"),
    ([GOOD, {"ground_truth": "1"}], "row 1 (line 2) lacks the column 'prompt'"),
    (changed(prompt=None), "'prompt' is null"),
    (changed(prompt=5), "'prompt' is not a text"),
    (changed(prompt={"role": "user"}), "'prompt' is not a text"),
    (changed(prompt=[]), "'prompt': the list of messages is empty"),
    (changed(prompt=["hi"]), "'prompt': message 0"),
    (changed(prompt=[{"role": "user"}]), "'content'"),
    (changed(prompt=[{"role": 1, "content": "x"}]), "'role'"),
    (changed(ground_truth=None), "'ground_truth' is null"),
    (changed(ground_truth=""), "'ground_truth' is empty"),
    (changed(ground_truth=" "), "'ground_truth' is empty"),
    (changed(ground_truth=[]), "'ground_truth' is empty"),
    (changed(ground_truth={}), "'ground_truth' is empty"),
    (changed(ground_truth=[math.nan]), "'ground_truth' holds what JSON has not"),
    (changed(ground_truth=True), "'ground_truth'"),
    (changed(ground_truth=math.inf), "'ground_truth' is empty or not a text"),
    (changed(ground_truth="\ud800"), "surrogate"),
    (changed(reward_model="rule"), "'reward_model' is not an object"),
    (changed(reward_model={}), "'reward_model.ground_truth' is null"),
    (changed(reward_model={"ground_truth": []}), "'reward_model.ground_truth'"),
    (changed(reward_model={"style": "model", "ground_truth": None}), "is null"),
    (changed(data_source=None), "'data_source' is null"),
    (changed(data_source=3), "'data_source' is not a text"),
    (changed(data_source=""), "'data_source' is empty"),
    (changed(extra_info="x"), "'extra_info' is not an object"),
    (changed(extra_info=[1]), "'extra_info' is not an object"),
    ([{"question": "q", "answer": "steps\n#### "}], "empty after ####"),
    ([{"question": None, "answer": "1"}], "'question' is null"),
]


def check_error(load, name, says, *args):
    with pytest.raises(InputError) as caught:
        load(*args)
    assert type(caught.value) is InputError
    assert name in str(caught.value) and says in str(caught.value)


@pytest.mark.parametrize(("content", "says"), JSONL)
def test_malformed_jsonl(tmp_path, content, says):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    check_error(load_prompts, "bad.jsonl", says, str(path), "train")


@pytest.mark.parametrize(("rows", "says"), ROWS)
def test_malformed_rows(tmp_path, rows, says):
    path = write_lines(tmp_path / "bad.jsonl", *rows)
    check_error(load_prompts, "bad.jsonl", says, path, "train")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "a"}, "no demonstration"),
        ({}, "no demonstration"),
        ({"messages": None}, "'messages' is null. Fix: remove the row"),
        ({"messages": "hi"}, "not a list"),
        ({"messages": []}, "empty"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no message of the assistant"),
        ({"messages": [{"role": "assistant", "content": None}]}, "'content'"),
        ({"prompt": "a", "completion": None}, "'completion' is null"),
        ({"prompt": "a", "completion": ""}, "'completion' is empty"),
        ({"prompt": "a", "response": 3}, "'response' is not a text"),
        ({"prompt": None, "response": "b"}, "'prompt' is null"),
        ({"text": ""}, "'text' is empty"),
        ({"text": ["a"]}, "'text' is not a text"),
    ],
)
def test_malformed_demonstrations(tmp_path, row, says):
    path = write_lines(tmp_path / "bad.jsonl", {"text": "good"}, row)
    check_error(load_demonstrations, "bad.jsonl: row 1 (line 2)", says, path, "train")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "not valid JSON"),
        ("[]", "has no rows"),
        ('[{"prompt": "1", "ground_truth": "2"}, 3]', "row 1 is not an object"),
        ('[{"prompt": "1"', "ends too early"),
        ('{"prompt": "1"}\n{"prompt": "1"}', "is a .jsonl file: rename it"),
        ('{"test": []}', "no split 'train'"),
        ('{"train": {}}', "not a list of rows"),
        ('"text"', "not a list of rows"),
    ],
)
def test_malformed_json(tmp_path, content, says):
    (tmp_path / "bad.json").write_text(content)
    check_error(load_prompts, "bad.json", says, str(tmp_path / "bad.json"), "train")


def parquet_bytes(tmp_path, columns):
    path = tmp_path / "bad.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), str(path))
    return path.read_bytes()


def test_malformed_parquet_bytes(tmp_path):
    path = write_gsm8k_parquet(tmp_path / "bad.parquet", 50)
    whole = path.read_bytes()
    broken = [b"", whole[:-1], whole[: len(whole) // 2], b"PAR1", b'{"prompt": 1}', b"x" * 4096]
    broken += [whole[: len(whole) - 2000] + bytes(1900) + whole[-100:]]
    for content in broken:
        path.write_bytes(content)
        check_error(load_prompts, "bad.parquet", "readable parquet", str(path), "train")


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"prompt": [], "ground_truth": []}, "has no rows"),
        ({"prompts": ["1"], "ground_truth": ["2"]}, "lacks the column 'prompt'"),
        ({"prompt": ["1", "2"], "ground_truth": ["2", None]}, "row 1, column 'ground_truth'"),
        ({"prompt": ["1", "2"], "answer": [2.0, float("nan")]}, "row 1, column 'answer' is null"),
        ({"prompt": ["1", None], "ground_truth": [1, 2]}, "row 1, column 'prompt' is null"),
        ({"prompt": [b"1"], "ground_truth": ["2"]}, "'prompt' is not a text"),
        ({"prompt": [1], "ground_truth": ["2"]}, "'prompt' is not a text"),
        ({"prompt": ["1"], "reward_model": ["rule"]}, "'reward_model' is not an object"),
        ({"prompt": ["1"], "reward_model": [{"style": "rule"}]}, "'reward_model.ground_truth'"),
        ({"prompt": ["1"], "ground_truth": [b"2"]}, "'ground_truth' is empty or not a text"),
        ({"prompt": [[{"role": "user"}]], "ground_truth": ["2"]}, "'content'"),
        ({"prompt": [["hi"]], "ground_truth": ["2"]}, "message 0 is not an object"),
    ],
)
def test_malformed_parquet_rows(tmp_path, columns, says):
    parquet_bytes(tmp_path, columns)
    check_error(load_prompts, "bad.parquet", says, str(tmp_path / "bad.parquet"), "train")


def test_parquet_with_text_that_is_not_utf8(tmp_path):
    text = pyarrow.array([b"\xff\xfe"]).view(pyarrow.string())
    parquet_bytes(tmp_path, {"prompt": text, "ground_truth": ["2"]})
    says = "UnicodeDecodeError"
    check_error(load_prompts, "bad.parquet", says, str(tmp_path / "bad.parquet"), "train")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("nowhere.parquet", "does not exist"),
        ("nowhere.jsonl", "does not exist"),
        ("nowhere/{split}.json", "does not exist"),
        ("data.txt", "not a kind of data file"),
        ("folder/data", "not a kind of data file"),
        ("test_data.counting(timse=2)", "'timse'"),
        ("test_data.counting(2)", "positional"),
        ("test_data.plain_rows()", "missing"),
        ("test_data.absent()", "absent"),
        ("test_data.write_json", "missing"),
        ("test_data.pytest", "no function"),
        ("test_data.no_task()", "returned no task"),
        ("no_such_module.task()", "cannot be imported"),
    ],
)
def test_malformed_specs(spec, says):
    name = spec.partition("(")[0].replace("{split}", "train").rpartition(".")[0]
    check_error(load_prompts, name, says, spec, "train")


def test_specs_of_no_kind(tmp_path):
    for spec in ("", None, 3, "a b"):
        with pytest.raises(InputError):
            load_prompts(spec, "train")
    check_error(load_prompts, tmp_path.name, "no file for the split", str(tmp_path), "train")
    check_error(load_prompts, "counting", "no split 'dev'", "test_data.counting", "dev")
    (tmp_path / "folder.jsonl").mkdir()
    path = str(tmp_path / "folder.jsonl")
    check_error(load_prompts, "folder.jsonl", "no file for the split", path, "train")


def test_several_targets_are_json_text_and_reach_the_rewards_that_read_them():
    """As in verl's searchR1 rows, whose ground truth is an object of targets."""
    from rljax.rewards import qa_exact_match, token_f1

    rows = [
        {"prompt": "1", "ground_truth": ["Paris", "Par\u00eds"]},
        {"prompt": "1", "reward_model": {"style": "rule", "ground_truth": {"target": ["Paris"]}}},
    ]
    listed, targets = [record["ground_truth"] for record in load_prompts(rows, "train")]
    assert json.loads(listed) == rows[0]["ground_truth"]
    assert token_f1("par\u00eds", listed)["score"] == 1.0
    assert qa_exact_match("<answer>Paris</answer>", targets) == 1.0
    assert qa_exact_match("<answer>Rome</answer>", targets) == 0.0
