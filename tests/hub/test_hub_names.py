"""How repositories of the hub are written: paths, bare names, revisions, and what is refused."""

import pytest

from rljax.config import Config
from rljax.config.checks import refuse_early
from rljax.config.trust import refuse_own_code
from rljax.errors import InputError
from rljax.hub import globs
from rljax.hub.datasets import files_by_split
from rljax.hub.globs import Files
from rljax.hub.names import data_name, model_name, names_in, parse


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hf://Qwen/Qwen2.5-0.5B", ("model", "Qwen/Qwen2.5-0.5B", "", "")),
        ("hf://Qwen/Qwen2.5-0.5B@main/", ("model", "Qwen/Qwen2.5-0.5B", "main", "")),
        ("hf://a/b@refs/pr/3", ("model", "a/b", "refs/pr/3", "")),
        ("hf://a/b@v1.0/adapters/one", ("model", "a/b", "v1.0", "adapters/one")),
        ("hf://a/b@feature%2Fx/c", ("model", "a/b", "feature/x", "c")),
        ("hf://datasets/openai/gsm8k", ("dataset", "openai/gsm8k", "", "")),
        (
            "hf://datasets/openai/gsm8k@" + "a" * 40 + "/main/train",
            ("dataset", "openai/gsm8k", "a" * 40, "main/train"),
        ),
        (
            "hf://datasets/a/b@refs/convert/parquet/x/*.parquet",
            ("dataset", "a/b", "refs/convert/parquet", "x/*.parquet"),
        ),
    ],
)
def test_a_path_says_kind_repository_revision_and_place(text, parts):
    name = parse(text)
    assert (name.kind, name.repository, name.revision, name.path) == parts
    assert parse(str(name)) == name


@pytest.mark.parametrize(
    "text",
    [
        "hf://",
        "hf:///a/b",
        "hf://a",
        "hf://datasets/a",
        "hf://a//",
        "hf://a/b@",
        "hf://a/../b",
        "hf://../b",
        "hf://a/b/../c",
        "hf://a/b/./c",
        "hf://-a/b",
        "hf://a/b--c",
        "hf://a/b c",
        "hf://a/" + "b" * 97,
        "hf://a/b.",
        "hf://a/b/c//d",
        "hf://a/b@..%2F..%2Fc",
        "hf://a/b@../c",
        "hf://a/b/c\\d",
    ],
)
def test_what_names_no_repository_is_refused_with_how_it_is_written(text):
    with pytest.raises(InputError, match="hf://OWNER/NAME"):
        parse(text)


def test_a_bare_name_is_the_hubs_where_nothing_here_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert model_name("Qwen/Qwen2.5-0.5B@v2").revision == "v2"
    for path in ("model", "./a/b", "a/b/c", "/a/b", "~/a", "a/b.c.", "decoder(layers=1)", "a/b@"):
        assert model_name(path) is None, path
    (tmp_path / "Qwen" / "Qwen2.5-0.5B").mkdir(parents=True)
    assert model_name("Qwen/Qwen2.5-0.5B") is None
    assert data_name("openai/gsm8k") is None
    for text, named in (("hf://datasets/a/b", model_name), ("hf://a/b", data_name)):
        with pytest.raises(InputError, match="is needed"):
            named(text)


def test_paths_inside_of_a_component_are_found():
    text = "x=frozen_policy(folder='hf://a/b@v1/c', other=(\"hf://datasets/d/e\",))"
    assert names_in(text) == ["hf://a/b@v1/c", "hf://datasets/d/e"]


def config(**fields) -> Config:
    made = Config(model="Qwen/Qwen2.5-0.5B", trackers=())
    made.data.train = "hf://datasets/openai/gsm8k"
    for field, value in fields.items():
        section, _, name = field.rpartition("__")
        setattr(getattr(made, section) if section else made, name, value)
    return made


def test_every_field_of_a_model_takes_a_name_and_says_what_is_none():
    refuse_early(
        config(
            critic_model="a/b",
            teacher_model="hf://a/b",
            tokenizer="a/b@v1",
            reward__model="a/b",
            lora__adapter="hf://a/b/adapter",
        )
    )
    for field in ("model", "critic_model", "teacher_model", "tokenizer", "reward__model"):
        for wrong in ("/no/such", "runs/x/policy", "hf://datasets/a/b", "hf://a"):
            with pytest.raises(InputError, match=r"1 problem(.|\n)*(OWNER/NAME)"):
                refuse_early(config(**{field: wrong}))
    for wrong in ("hf://a/b", "openai/gsm8k"):
        with pytest.raises(InputError, match=r"1 problem(.|\n)*hf://datasets/"):
            refuse_early(config(data__train=wrong))


def test_a_folder_may_name_repositories_since_they_are_data():
    refuse_own_code(config(tokenizer="a.b/c.d", data__test="hf://datasets/a.b/c.d/e.f"), "a run")
    for field in ("reward__function", "algorithm__policy_loss"):
        with pytest.raises(InputError):
            refuse_own_code(config(**{field: "hf://a/b.py:run"}), "a run")
            refuse_early(config(**{field: "hf://a/b.py:run"}))


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        (
            [
                "data/train-00000-of-00002.parquet",
                "data/train-00001-of-00002.parquet",
                "data/test_prefs-00000-of-00001.parquet",
            ],
            {"train": 2, "test_prefs": 1},
        ),
        (["train.jsonl", "dev.jsonl", "notes.json"], {"train": 1, "validation": 1}),
        (["a/test/part.json", "a/training/part.json"], {"train": 1, "test": 1}),
        (["rows.csv", "more.csv", "readme.txt"], {"train": 2}),
        (["my-eval-set.jsonl", "contest.jsonl"], {"test": 1}),
        (["validation/0000.parquet"], {"validation": 1}),
        (["README.md"], {}),
    ],
)
def test_splits_are_read_off_names(files, splits):
    assert {split: len(found) for split, found in files_by_split(files).items()} == splits


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("main/train-*", ["main/train-0.parquet"]),
        ("**/*.parquet", ["main/train-0.parquet", "main/x/test.parquet", "top.parquet"]),
        ("*.parquet", ["top.parquet"]),
        ("main/*/test.[a-p]*", ["main/x/test.parquet"]),
        ("main/?rain-[!1].parquet", ["main/train-0.parquet"]),
        ("main", ["main/train-0.parquet", "main/x/test.parquet"]),
        ("top.parquet", ["top.parquet"]),
        ("mai", []),
        ("**", ["main/train-0.parquet", "main/x/test.parquet", "top.parquet"]),
        ("[z-a]", []),
    ],
)
def test_patterns_are_fsspecs(pattern, found):
    assert (
        Files(["main/train-0.parquet", "main/x/test.parquet", "top.parquet"]).matching(pattern)
        == found
    )


def test_no_pattern_takes_more_than_a_walk_through_the_names(monkeypatch):
    """A regular expression would not come back from the first of these."""
    files = Files([f"{'a' * 200}{i}" for i in range(2000)])
    for pattern in ("*a" * 16 + "*b", "**a" * 40 + "c", "a*?" * 100 + "[b]", "**/*" * 200 + "c"):
        assert files.matching(pattern) == []
    assert len(files.matching("*a" * 16 + "*")) == 2000
    with pytest.raises(InputError, match="at most 1000"):
        files.matching("*" * 1001)
    files = Files(files.paths)
    monkeypatch.setattr(globs, "MOST_LETTERS", 10 * sum(map(len, files.paths)))  # not a minute
    for number in range(10):
        files.matching(f"*{number}b")
    with pytest.raises(InputError, match="more than .* letters of names"):
        files.matching("*b")
