"""launchers/prepare_data.py: a user's rows to parquet, split by the hash of the prompt; what is
wrong is named before anything is written."""

import json
import os
import random
import subprocess
import sys

import pyarrow.parquet
import pytest
from conftest import REPO
from tiny_tokenizer import write_tokenizer

from rljax.data.rows.prepare import PrepareOptions, prepare
from rljax.data.rows.sources import load_prompts
from rljax.data.rows.split import is_held_out
from rljax.errors import InputError


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows_of(folder, split):
    return pyarrow.parquet.read_table(folder / f"{split}.parquet").to_pylist()


def questions(count):
    return [{"q": f"What is {i} + {i}?", "a": str(2 * i), "level": i % 3} for i in range(count)]


# -- maps, as a user writes them --


def plain(example, index):
    return {"prompt": example["q"], "ground_truth": example["a"]}


def make_map_fn(split, instruction=""):
    def process_fn(example, idx):
        if example["level"] == 0:
            return None
        return {
            "data_source": "mine",
            "prompt": [{"role": "user", "content": example["q"] + instruction}],
            "ability": "sums",
            "reward_model": {"style": "rule", "ground_truth": example["a"]},
            "extra_info": {"split": split, "index": idx, "level": example["level"]},
        }

    return process_fn


def mixed_types(example, index):
    return {**plain(example, index), "extra_info": {"x": index if index < 7 else "seven"}}


def empty_object(example, index):
    return {**plain(example, index), "extra_info": {"tests": [{"options": {}}]}}


def no_row(example, index):
    return [example["q"]]


def not_a_maker(option="x"):
    return option


def test_a_plain_function_and_verls_form(tmp_path):
    source = write_rows(tmp_path / "rows.jsonl", questions(60))
    counts = prepare(
        PrepareOptions(
            source, str(tmp_path / "a"), map="test_prepare_data.plain", test_fraction=0.3
        )
    )
    assert counts["rows"] == 60 == counts["train"] + counts["test"] and 5 < counts["test"] < 30
    assert json.loads((tmp_path / "a" / "counts.json").read_text()) == counts
    row = rows_of(tmp_path / "a", "train")[0]
    assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert row["prompt"] == [{"role": "user", "content": "What is 0 + 0?"}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "0"}
    assert (row["data_source"], row["extra_info"]) == ("rows", {"index": 0, "split": "train"})

    text = "test_prepare_data.make_map_fn(split='train', instruction=' Think.')"
    counts = prepare(PrepareOptions(source, str(tmp_path / "b"), map=text))
    assert counts["dropped_by_map"] == 20 and counts["train"] == 40 and "test" not in counts
    assert not (tmp_path / "b" / "test.parquet").exists()
    (row, *_) = rows_of(tmp_path / "b", "train")
    assert row["prompt"][0]["content"].endswith("? Think.") and row["ability"] == "sums"
    assert row["data_source"] == "mine" and row["extra_info"]["level"] == 1
    # data.train reads what was written.
    records = load_prompts(str(tmp_path / "b"), "train")
    assert [r["ground_truth"] for r in records[:3]] == ["2", "4", "8"]
    assert records[0]["data_source"] == "mine"


def test_the_split_is_the_prompts_own(tmp_path):
    """Rows that are added, removed or reordered move no other row; repeated prompts stay
    together."""
    rows = questions(200)

    def split(name, rows):
        source = write_rows(tmp_path / f"{name}.jsonl", rows)
        options = PrepareOptions(
            source, str(tmp_path / name), map="test_prepare_data.plain", test_fraction=0.2
        )
        counts = prepare(options)
        sides = [
            {r["prompt"][0]["content"] for r in rows_of(tmp_path / name, s)}
            for s in ("train", "test")
        ]
        assert not sides[0] & sides[1] and 20 < len(sides[1]) < 60
        return counts, sides

    _, (train, test) = split("first", rows)
    shuffled = questions(300)
    random.Random(0).shuffle(shuffled)
    _, (more_train, more_test) = split("more", shuffled)
    assert train < more_train and test < more_test
    _, (few_train, few_test) = split("few", rows[50:])
    assert few_train < train and few_test < test
    again = [{**r, "q": r["q"].upper().replace(" ", "  ")} for r in rows]
    counts, sides = split("twice", rows + rows + again)
    assert sides == [train, test] and counts["duplicates"] == 400 and counts["contradicting"] == 0
    counts, _ = split("contradicting", rows + [{**rows[7], "a": "wrong"}])
    assert (counts["duplicates"], counts["contradicting"]) == (1, 1)


def test_the_share_that_is_held_out():
    found = [is_held_out(f"prompt {i}", 0.1) for i in range(20_000)]
    assert 0.09 < sum(found) / len(found) < 0.11
    assert all(is_held_out(f"prompt {i}", 0.5) for i, x in enumerate(found) if x)


def test_a_sources_own_test_split_leaves_the_training_split(tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    write_rows(folder / "train.jsonl", questions(10))
    write_rows(folder / "test.jsonl", questions(12)[8:])
    counts = prepare(
        PrepareOptions(str(folder), str(tmp_path / "out"), map="test_prepare_data.plain")
    )
    assert (counts["train"], counts["test"], counts["also_in_test"]) == (8, 4, 2)
    (tmp_path / "rest").mkdir()
    write_rows(tmp_path / "rest" / "train.jsonl", questions(10))
    with pytest.raises(InputError, match="no file for the split 'test'"):
        prepare(
            PrepareOptions(
                str(tmp_path / "rest"), str(tmp_path / "out"), map="test_prepare_data.plain"
            )
        )


@pytest.mark.parametrize(("name", "says"), [("gsm8k", "#### "), ("math", "\\boxed")])
def test_built_in_maps_and_offline_samples(tmp_path, name, says):
    options = PrepareOptions(
        f"rljax.data.rows.offline_samples.{name}_rows()",
        str(tmp_path),
        map=f"{name}()",
        data_source=f"sample/{name}",
        test_fraction=0.2,
    )
    counts = prepare(options)
    assert counts["train"] >= 6 and counts["test"] >= 1
    rows = rows_of(tmp_path, "train") + rows_of(tmp_path, "test")
    assert {row["data_source"] for row in rows} == {f"sample/{name}"}
    for row in rows:
        info = row["extra_info"]
        assert says in (info["answer"] if name == "gsm8k" else info["solution"])
        assert row["reward_model"]["ground_truth"].replace(",", "") in (
            info["answer" if name == "gsm8k" else "solution"].replace(",", "")
        )
    assert "3060" in {row["reward_model"]["ground_truth"] for row in rows} or name == "math"


def test_over_long_prompts_are_dropped_and_counted(tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    rows = [*questions(5), {"q": "long " * 200, "a": "1", "level": 1}]
    options = PrepareOptions(
        write_rows(tmp_path / "rows.jsonl", rows),
        str(tmp_path / "out"),
        map="test_prepare_data.plain",
        tokenizer=str(tokenizer),
        max_prompt_tokens=100,
    )
    counts = prepare(options)
    assert (counts["dropped_overlong"], counts["train"]) == (1, 5)


GOOD = [{"q": "a", "a": "1"}, {"q": "b", "a": "2"}]


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        ([*GOOD, {"q": "c"}], {}, r"row 2 \(line 3\): the map failed.*KeyError: 'a'.*test_prepare"),
        ([*GOOD, {"q": "c", "a": None}], {}, r"after the map: row 2 .*'ground_truth' is null"),
        ([*GOOD, {"q": 3, "a": "1"}], {}, r"row 2 .*column 'prompt' is not a text"),
        (GOOD, {"map": "test_prepare_data.no_row"}, "row 0 .*the map returned no row"),
        (GOOD, {"map": "test_prepare_data.not_a_maker()"}, "returned no function"),
        (GOOD, {"map": "test_prepare_data.make_map_fn()"}, r"make_map_fn\(split='train'\)"),
        (GOOD, {"map": "gsm8k()"}, r"row 0 \(line 1\) lacks the column 'question'.*\['a', 'q'\]"),
        (GOOD, {"map": "gsm9k()"}, "did you mean gsm8k"),
        (GOOD, {"map": ""}, "lacks the column 'prompt'"),
        (questions(9), {"map": "test_prepare_data.mixed_types"}, "row 7, column 'extra_info'"),
        (GOOD, {"map": "test_prepare_data.empty_object"}, "'extra_info.tests.options' holds only"),
        ([GOOD[0]], {"test_fraction": 0.99}, "no row is left for train.parquet"),
        (GOOD, {"test_fraction": 1.5}, "fraction < 1"),
        (GOOD, {"max_prompt_tokens": 5}, "belong together"),
        (GOOD, {"out": ""}, "--out is not set"),
        (GOOD, {"source": "countdown(test=2)"}, "endless stream"),
    ],
)
def test_errors_name_the_place_and_nothing_is_written(tmp_path, rows, options, says):
    fields = dict(
        source=write_rows(tmp_path / "rows.jsonl", rows),
        out=str(tmp_path / "out"),
        map="test_prepare_data.plain",
    )
    with pytest.raises(InputError, match=says):
        prepare(PrepareOptions(**{**fields, **options}))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows.jsonl"]


def test_an_earlier_preparation_survives_a_failure_and_is_not_mixed(tmp_path):
    source, out = write_rows(tmp_path / "rows.jsonl", questions(60)), tmp_path / "out"
    options = PrepareOptions(source, str(out), map="test_prepare_data.plain", test_fraction=0.3)
    prepare(options)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    assert set(before) == {"train.parquet", "test.parquet", "counts.json"}
    with pytest.raises(InputError, match="earlier preparation"):
        prepare(PrepareOptions(source, str(out), map="test_prepare_data.plain"))
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


@pytest.mark.slow
def test_the_launcher_and_the_example_of_a_map(tmp_path):
    command = [
        sys.executable,
        "launchers/prepare_data.py",
        "--source=examples/limr_sample.jsonl",
        "--map=examples.limr.make_map_fn(split='train')",
        "--data_source=limr",
        "--test_fraction=0.25",
        f"--out={tmp_path}/limr",
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {line.split()[0]: int(line.split()[1]) for line in done.stdout.splitlines()}
    assert found["rows"] == 10 and found["dropped_by_map"] == 1 and found["duplicates"] == 1
    assert found["train"] + found["test"] == 8
    (row, *_) = load_prompts(f"{tmp_path}/limr", "train")
    assert row["data_source"] == "limr" and "\\boxed{}" in row["prompt"][0]["content"]
    done = subprocess.run(
        [*command[:2], "--source=missing.jsonl", f"--out={tmp_path}/x"],
        cwd=REPO,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (
        done.returncode == 2
        and done.stderr == "error: missing.jsonl does not exist. Fix: check the path\n"
    )


def test_each_turn_of_a_conversation_is_a_prompt(tmp_path):
    said = [("user", "a"), ("assistant", "1"), ("user", "b"), ("assistant", "2")]
    messages = [{"role": role, "content": content} for role, content in said]
    told = {"role": "developer", "content": "be kind"}  # asks nothing, as a greeting does not
    hello = [told, {"role": "assistant", "content": "hi"}, *messages[:2]]
    rows = [{"messages": messages}, {"messages": hello}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = dict(source=str(tmp_path / "rows.jsonl"))
    for turns, expected in (("each", ["1", "2", "1"]), ("last", ["2", "1"])):
        out = str(tmp_path / turns)
        counts = prepare(PrepareOptions(**source, out=out, turns=turns))
        assert counts["split_conversations"] == (turns == "each")
        made = load_prompts(out, "train")
        assert [row["ground_truth"] for row in made] == expected
        assert made[-2]["prompt"] == messages[:3]
    truths = dict.fromkeys(("answer", "ground_truth", "solution"), "2")
    for name, value in (truths | {"reward_model": {"ground_truth": "2"}}).items():
        (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages, name: value}) + "\n")
        with pytest.raises(InputError, match=f"one ground truth, in '{name}', for 2 turns"):
            prepare(PrepareOptions(**source, out=str(tmp_path / "o"), turns="each"))
    nulls = dict.fromkeys(("prompt", "question", "answer", "ground_truth", "solution"))  # a table's
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages, **nulls}) + "\n")
    prepare(PrepareOptions(**source, out=str(tmp_path / "nulls"), turns="each"))
    assert [row["ground_truth"] for row in load_prompts(str(tmp_path / "nulls"), "train")] == [
        "1",
        "2",
    ]
