"""Data sets of a hub on loopback: subsets and splits by README and by names, formats, and what is
refused; read as training reads them."""

import io
import json
from itertools import pairwise

import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet
import pytest
from hub_server import Fault, forget, running_hub, use

from rljax import hub
from rljax.config import Config
from rljax.config.data_options import PrepareOptions
from rljax.data.online.default_rewards import evaluation_text
from rljax.data.rows.prepare import _has_own_test
from rljax.data.rows.read import read_rows
from rljax.data.rows.sources import load_demonstrations, load_endless_prompts, load_prompts
from rljax.errors import InputError

GSM8K_README = """---
license: mit
dataset_info:
- config_name: main
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
# GSM8K
configs: this is text
"""


def rows(count: int, first: int = 0) -> list[dict]:
    return [
        {"question": f"{i} + {i}?", "answer": f"Twice.\n#### {2 * i}"}
        for i in range(first, first + count)
    ]


def parquet(count: int, first: int = 0) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows(count, first)), out)
    return out.getvalue()


def jsonl(count: int, first: int = 0) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows(count, first))


@pytest.fixture
def server(tmp_path, monkeypatch):
    with running_hub() as running:
        use(running, tmp_path / "home", monkeypatch)
        running.put(
            "openai/gsm8k",
            {
                "README.md": GSM8K_README,
                "main/train-00000-of-00002.parquet": parquet(3),
                "main/train-00001-of-00002.parquet": parquet(2, 3),
                "main/test-00000-of-00001.parquet": parquet(2, 50),
                "socratic/train-00000-of-00001.parquet": parquet(4, 100),
                "gsm8k.py": "raise SystemExit",
            },
            kind="dataset",
        )
        yield running


def firsts(spec: str, split: str = "train", notes: list | None = None) -> tuple[int, str]:
    """How many rows, and the first of them."""
    found = read_rows(spec, split, notes=notes)
    return len(found.rows), found.rows[0]["question"]


def test_gsm8k_is_read_as_its_page_says(server):
    notes = []
    assert firsts("hf://datasets/openai/gsm8k", notes=notes) == (5, "0 + 0?")
    assert "subset main, split train (others: socratic), 2 files, commit" in notes[0]
    assert firsts("hf://datasets/openai/gsm8k", "test") == (2, "50 + 50?")
    assert firsts("hf://datasets/openai/gsm8k/socratic") == (4, "100 + 100?")
    assert firsts("hf://datasets/openai/gsm8k@main/main/test") == (2, "50 + 50?")
    assert firsts("hf://datasets/openai/gsm8k/test") == (2, "50 + 50?")
    assert firsts("hf://datasets/openai/gsm8k/main/train-00001-of-00002.parquet") == (2, "3 + 3?")
    assert firsts("hf://datasets/openai/gsm8k/*/train-*") == (9, "0 + 0?")
    assert firsts("hf://datasets/openai/gsm8k/main/{split}-*", "test") == (2, "50 + 50?")
    assert not any(path.endswith(".py") for path in server.paths())


def test_its_rows_train_with_its_own_reward(server):
    spec = "hf://datasets/openai/gsm8k"
    prompts = load_prompts(spec, "test")
    assert [p["ground_truth"] for p in prompts] == ["100", "102"]
    assert {p["data_source"] for p in prompts} == {"openai/gsm8k"}  # which has a reward of its own
    assert load_demonstrations(spec, "train")[3]["completion"] == "Twice.\n#### 6"
    config = Config(model="me/tiny")
    config.data.train = spec
    assert evaluation_text(config).startswith("by_source")
    assert _has_own_test(PrepareOptions(source=spec))
    assert not _has_own_test(PrepareOptions(source=f"{spec}/main/train"))
    assert not _has_own_test(PrepareOptions(source=f"{spec}/socratic"))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (
            "hf://datasets/openai/gsm8k/socratic/test",
            r"subset 'socratic', has no split 'test': got \['train'\].*gsm8k/socratic/train",
        ),
        (
            "hf://datasets/openai/gsm8k/none",
            "no subset, split, folder or file 'none'.*main.*socratic",
        ),
        ("hf://datasets/openai/gsm8k/main/val-*", "no file of openai/gsm8k matches 'main/val-"),
        ("hf://datasets/openai/none", "has no data set openai/none.*hf auth login"),
        ("hf://datasets/openai/gsm8k@v3", "openai/gsm8k has no revision 'v3'"),
        ("hf://openai/gsm8k", "a data set is needed.*hf://datasets/OWNER/NAME"),
        ("openai/gsm8k", "is hf://datasets/openai/gsm8k"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(server, spec, says):
    with pytest.raises(InputError, match=says):
        read_rows(spec, "train")


def test_layouts_without_a_readme(server):
    server.put(
        "a/names",
        {"train.jsonl": jsonl(2), "dev.jsonl": jsonl(1, 9), "LICENSE": "x"},
        kind="dataset",
    )
    assert firsts("hf://datasets/a/names") == (2, "0 + 0?")
    assert firsts("hf://datasets/a/names/validation") == (1, "9 + 9?")
    with pytest.raises(InputError, match=r"no split 'test': got \['train', 'validation'\]"):
        read_rows("hf://datasets/a/names", "test")
    server.put(
        "a/folders",
        {
            "data/train/0.json": json.dumps(rows(2)),
            "data/train/1.json": json.dumps(rows(1, 2)),
            "data/test/0.json": json.dumps(rows(1, 7)),
            "dataset_infos.json": "{}",
        },
        kind="dataset",
    )
    assert firsts("hf://datasets/a/folders") == (3, "0 + 0?")
    assert firsts("hf://datasets/a/folders/data", "test") == (1, "7 + 7?")
    assert firsts("hf://datasets/a/folders/data/test") == (1, "7 + 7?")
    server.put("a/one", {"rows.csv": "question,answer\na,b\n", "rows.jsonl": jsonl(3)}, "dataset")
    assert firsts("hf://datasets/a/one") == (3, "0 + 0?")  # of two formats of the same rows one
    assert read_rows("hf://datasets/a/one/rows.csv", "test").rows == [
        {"question": "a", "answer": "b"}
    ]


@pytest.mark.parametrize(
    ("configs", "spec", "count"),
    [
        (
            "- config_name: b\n  data_files: x/*.jsonl\n"
            "- config_name: a\n  default: true\n  data_files: y.jsonl",
            "hf://datasets/a/forms",
            2,
        ),
        (
            "- config_name: b\n  data_files: x/*.jsonl\n"
            "- config_name: default\n  data_files: [y.jsonl]",
            "hf://datasets/a/forms",
            2,
        ),
        ("- config_name: b\n  data_dir: x", "hf://datasets/a/forms/b", 4),
        (
            "- config_name: b\n  data_files: {train: [x/0.jsonl, y.jsonl]}",
            "hf://datasets/a/forms",
            3,
        ),
        ("- config_name: b\n  data_dir: x\n  data_files: '1.jsonl'", "hf://datasets/a/forms", 3),
        (
            "- config_name: b\n  data_files:\n  - split: train_sft\n    path: [x/*]",
            "hf://datasets/a/forms/b/train_sft",
            4,
        ),
        ("- config_name: 20231101.en\n  data_files: x/**", "hf://datasets/a/forms/20231101.en", 4),
    ],
)
def test_every_form_of_a_readme(server, configs, spec, count):
    files = {"x/0.jsonl": jsonl(1), "x/1.jsonl": jsonl(3), "y.jsonl": jsonl(2)}
    server.put("a/forms", {**files, "README.md": f"---\nconfigs:\n{configs}\n---\n"}, "dataset")
    assert len(read_rows(spec, "train").rows) == count


@pytest.mark.parametrize(
    "readme",
    [
        "",
        "# no front matter",
        "---\nconfigs: [1, {a: b}]\n---\n",
        "---\n{{{\n---\n",
        "---\n- a\n---\n",
        "---\nconfigs:\n- config_name: x\n  data_files: {split: [{}]}\n---\n",
        "---\nconfigs: x",
        "---\nconfigs:\n- data_files: ../../etc/passwd\n---\n",
        b"---\nconfigs: \xff\n---\n",
        "---\na: &a [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{b}: &{b} [{', '.join(9 * ['*' + a])}]\n" for a, b in pairwise("abcdefghi"))
        + "configs:\n- config_name: *i\n  data_dir: *i\n"
        "  data_files: [{split: *i, path: *i}]\n---\n",
    ],
    ids=range(10),
)
def test_readmes_that_say_nothing_leave_it_to_the_names(server, readme):
    server.put("a/odd", {"README.md": readme, "train.jsonl": jsonl(2)}, "dataset")
    assert len(read_rows("hf://datasets/a/odd", "train").rows) == 2


def test_files_that_are_not_read_are_named(server):
    server.put("a/arrow", {"train.arrow": b"1", "load.py": "x"}, "dataset")
    with pytest.raises(InputError, match="no split 'train'.*|no file of rows"):
        read_rows("hf://datasets/a/arrow", "train")
    with pytest.raises(InputError, match=r"no file of rows that is read.*refs/convert/parquet"):
        read_rows("hf://datasets/a/arrow/train.arrow", "train")
    server.put(
        "a/arrow", {"default/train/0000.parquet": parquet(2)}, "dataset", ref="refs/convert/parquet"
    )
    assert firsts("hf://datasets/a/arrow@refs/convert/parquet") == (2, "0 + 0?")


def test_bad_rows_are_named_by_their_file(server):
    server.put("a/bad", {"train.jsonl": jsonl(1) + '{"question": "x"}\n'}, "dataset")
    with pytest.raises(InputError, match=r"a/bad/train.jsonl: row 1 \(line 2\)"):
        load_prompts("hf://datasets/a/bad", "train")


def test_all_files_of_a_split_are_read_as_they_are_drawn(server):
    notes = []
    spec = "hf://datasets/openai/gsm8k"
    stream = load_endless_prompts(spec, stored=True, notes=notes)
    whole = load_prompts(spec, "train")
    for epoch in range(2):
        drawn = [stream[5 * epoch + i] for i in range(5)]
        assert sorted((r["prompt"], r["ground_truth"]) for r in drawn) == sorted(
            (r["prompt"], r["ground_truth"]) for r in whole
        )
    assert any("5 rows, read as they are drawn" in note and "2 files" in note for note in notes)
    bad = jsonl(1) + '{"question": "x"}\n'
    server.put("a/bad", {"train-0.jsonl": jsonl(1), "train-1.jsonl": bad}, "dataset")
    stream = load_endless_prompts("hf://datasets/a/bad", stored=True)
    with pytest.raises(InputError, match=r"a/bad/train-1.jsonl: row 1"):
        [stream[i] for i in range(3)]


def test_offline_after_the_first_time(server, monkeypatch):
    read_rows("hf://datasets/openai/gsm8k", "train")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    forget()
    assert firsts("hf://datasets/openai/gsm8k") == (5, "0 + 0?")
    with pytest.raises(InputError, match="main/test-.*could not be downloaded.*HF_HUB_OFFLINE"):
        read_rows("hf://datasets/openai/gsm8k", "test")


def test_a_changed_file_of_rows_is_refused(server):
    server.faults = [Fault("GET /store", "changed", times=9)]
    with pytest.raises(InputError, match="is not the file that the hub lists.*SHA-256"):
        hub.split_files("hf://datasets/openai/gsm8k", "test")
