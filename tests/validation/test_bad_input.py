"""Malformed configs, components, config files, flags and runs: an error that names the culprit.

Every case goes through a real entry point and must raise InputError; anything else is a bare
traceback for a user. Model folders are broken in test_bad_models; data files, tokenizers and
templates in test_data, test_tokenizer and test_chat.
"""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from bad_folders import BAD_VALUES, CONFIG_TEXTS, FAMILIES, HEADERS, INDEXES
from conftest import REPO
from tiny_data import write_gsm8k_parquet
from tiny_gsm8k import TINY, write_model
from tiny_refusal import refused
from tiny_tokenizer import write_tokenizer

from rljax.components import resolve
from rljax.config import NAMESPACES, Config, field_names, with_overrides
from rljax.config.flags import load_config_file
from rljax.data.text.tokenizer import load_tokenizer
from rljax.errors import InputError
from rljax.setup import build
from rljax.validation import validate


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A valid model folder; tests copy it before they break it."""
    return write_model(tmp_path_factory.mktemp("good") / "model", "qwen3")


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "model")


# -- the config: hostile values in every field --

HOSTILE = [None, "x" * 5000, -1, 2**70, float("nan"), "\0"]
MORE_HOSTILE = [*HOSTILE, float("-inf"), [], {}, (1,), b"x"]


def valid_config() -> Config:
    config = Config(model="decoder(layers=1)")
    config.data.train = "sort_digits(prompts=100, test=8)"  # of 20,000 each build makes records
    config.data.max_prompt_tokens = 16
    return config


@pytest.mark.parametrize(
    ("values", "least"),
    [(HOSTILE, 3), pytest.param(MORE_HOSTILE, 8, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
@pytest.mark.parametrize("name", field_names(Config()))
def test_hostile_values_in_every_field(name, values, least):
    """A value of another type is named; one of the right type is refused or harmless."""
    refusals = 0
    for value in values:
        config = with_overrides(valid_config(), {name: value}, "test")
        try:
            validate(config)
        except InputError as error:
            refusals += 1
            assert name in str(error) or f" {name.partition('.')[0]}=" in str(error)
    assert refusals >= least


# -- components --

COMPONENTS = [
    "",
    " ",
    "(",
    "ppo_clip(",
    "ppo_clip)",
    "ppo_clip()()",
    "ppo_clip().x",
    "ppo_clip(0.2)",
    "ppo_clip(*a)",
    "ppo_clip(**a)",
    "ppo_clip(clip_low=)",
    "ppo_clip(clip_low=x)",
    "ppo_clip(clip_low=1+x)",
    "ppo_clip(clip_low=__import__('os').system('true'))",
    "ppo_clip(clip_low=[0.2])",
    "ppo_clip(clip_low='0.2')",
    "ppo_clip(clip_low=True)",
    "ppo_clip(clip_low=None)",
    "ppo_clip(klip_low=0.2)",
    "ppo_clip(policy=1, policy=2)",
    "ppo-clip",
    "ppo_clip; import os",
    "lambda: 0",
    "3",
    "'ppo_clip'",
    "a..b",
    ".a",
    "a.",
    "a.b.c.d",
    "rljax.no_such.f",
    "rljax.losses.policy.Policyy",
    "rljax.losses.policy",
    "os.environ",
    "\0",
    "é" * 10,
    "f(" * 5000,
    "(" * 100_000,  # these three took seconds to hours, by the square of their length or its cube
    " " * 100_000,
    "a.py" + " " * 100_000 + "x",
    "f(x=" + "[" * 5000,
    "f(x=" + "9" * 10_000 + ")",
    "_hidden",
    "jnp",
    "Batch",
    "NamedTuple",
]


@pytest.mark.parametrize("text", COMPONENTS, ids=lambda t: repr(t[:30]))
def test_component_texts(text):
    refused(lambda: resolve(text, NAMESPACES["policy_loss"]))
    config = with_overrides(valid_config(), {"algorithm.policy_loss": text}, "test")
    refused(lambda: validate(config), "algorithm.policy_loss=")


@pytest.mark.parametrize(
    "text",
    [
        "decoder(layers=0)",
        "decoder(heads=0)",
        "decoder(heads=3, kv_heads=2)",
        "decoder(head_dim=7)",
        "decoder(embed=-1)",
        "decoder(layers=1.5)",
        "decoder(init_std='x')",
        "decoder(rope_theta=0.0)",
        "decoder(max_tokens=4)",
        "decoder(vocab=3)",
    ],
)
def test_built_in_models(text):
    config = with_overrides(valid_config(), {"model": text}, "test")

    def action():
        validate(config)
        build(config)

    refused(action)


@pytest.mark.parametrize(
    "text",
    [
        "sort_digits(digits=1)",
        "sort_digits(digits='5')",
        "sort_digits(test=0)",
        "sort_digits(test=10**9)",
        "sort_digits(prompts=-1)",
        "sort_digits(worked_examples=0)",
        "addition(digits=0)",
        "letter_count(kinds=1)",
        "letter_count(letters=20)",
        "sort_digits(seed=None)",
    ],
)
def test_tasks(text):
    config = with_overrides(valid_config(), {"data.train": text}, "test")

    def action():
        validate(config)
        build(config)

    refused(action)


# -- config files and flags --

CONFIG_FILES = {
    "": "has no get_config()",
    "get_config = 3": "has no get_config()",
    "def get_config(:": "SyntaxError",
    "import nothing_of_this_name": "ModuleNotFoundError",
    "1 / 0": "ZeroDivisionError",
    "def get_config(): 1 / 0": "ZeroDivisionError",
    "def get_config(): return {}": "must return rljax.config.Config",
    "def get_config(): pass": "must return rljax.config.Config",
    "def get_config(x): pass": "a parameter without a default",
    "from rljax.config import Config\ndef get_config():\n    return Config(stpes=3)": "stpes",
    "raise SystemExit(3)": "SystemExit",
    "\0": "cannot be imported",
}


@pytest.mark.parametrize("text", CONFIG_FILES, ids=lambda t: repr(t[:40]))
def test_config_files(tmp_path, text):
    path = tmp_path / "mine.py"
    path.write_text(text)
    refused(lambda: load_config_file(str(path)), str(path), CONFIG_FILES[text])


@pytest.mark.parametrize("path", ["", "nope.py", ".", "nope.py:tiny", "\0"])
def test_config_paths(path):
    refused(lambda: load_config_file(path), "no such config file")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--config.stepz=3", "--config.x=1"], "--config.stepz: no such field; did you mean"),
        (["--config.steps=many"], "--config.steps=many"),
    ],
)
def test_flags_of_a_command(tmp_path, monkeypatch, rljax_command, flags, says):
    monkeypatch.chdir(tmp_path)
    code, out, err = rljax_command("train", f"--config={REPO}/configs/quickstart.py", *flags)
    assert (code, out) == (2, "") and err.startswith("error: ")
    assert says in err and "Traceback" not in err and list(tmp_path.iterdir()) == []


def test_flags_of_a_launcher(tmp_path):
    flags, says = ["--config.steps=-1", "--config.seed=-1"], "steps=-1: must be >= 0"
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    line = [sys.executable, f"{REPO}/launchers/train.py", f"--config={REPO}/configs/quickstart.py"]
    done = subprocess.run(
        [*line, *flags], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and done.stderr.startswith("error: ")
    assert says in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


# -- whole runs: parts that are fine alone and do not fit --


def run_config(model, data, **overrides):
    config = load_config_file(f"{REPO}/configs/grpo_gsm8k.py")
    fields = {**TINY, "model": str(model), "data.train": str(data), **overrides}
    return with_overrides(config, fields, "test")


def no_template(folder):
    write_tokenizer(folder, chat_template=None)


def broken_template(folder):
    write_tokenizer(folder, chat_template="{% for %}")


def no_end_token(folder):
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config))


def too_many_words(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))


BREAK = {
    "tokenizer.json": lambda folder: (folder / "tokenizer.json").unlink(),
    "tokenizer.json is not": lambda folder: (folder / "tokenizer.json").write_text("{}"),
    "has no chat template": no_template,
    "chat_template": broken_template,
    "no end-of-text token": no_end_token,
    "too many ids": too_many_words,
    "config.json does not exist": lambda folder: (folder / "config.json").unlink(),
}


@pytest.mark.parametrize("says", BREAK)
def test_model_folders_that_cannot_be_trained(folder, tmp_path, says):
    data = write_gsm8k_parquet(tmp_path / "train.parquet", 2)
    BREAK[says](folder)
    refused(lambda: build(run_config(folder, data)), says.removesuffix(" is not"))


RUNS = {
    "the model's context is 256 tokens": {"sampler.max_response_tokens": 250},
    "no prompt is left": {"data.max_prompt_tokens": 2},
    "are too long": {"data.max_prompt_tokens": 2, "data.overlong": "error"},
    "do not divide over 8 devices": {"batch.sequences_per_optimizer_step": 4},
    "mesh.tensor=3 does not divide the devices": {"mesh.tensor": 3},
    "needs 7 devices": {"mesh.data": 7, "mesh.fsdp": 1},
    "row 0": {"sft.steps": 1, "sft.data": "{data}"},
}


@pytest.mark.parametrize("says", RUNS)
def test_settings_that_do_not_fit_the_model_or_the_machine(good, tmp_path, says):
    data = write_gsm8k_parquet(tmp_path / "train.parquet", 2)
    fields = {k: str(data) if v == "{data}" else v for k, v in RUNS[says].items()}
    config = run_config(good, data, **fields)

    def action():
        setup = build(config)
        setup.model.shardings()

    refused(action, says)


def test_files_in_place_of_folders_and_the_reverse(good, tmp_path):
    data = write_gsm8k_parquet(tmp_path / "train.parquet", 2)
    refused(lambda: validate(run_config(data, data)), "model=", "is not a folder")
    refused(lambda: validate(run_config(good, data, tokenizer=str(data))), "tokenizer=")
    refused(lambda: validate(run_config(good, data, run_dir=str(data))), "run_dir=", "is a file")
    refused(lambda: build(run_config(good, good)), str(good))
    refused(lambda: load_tokenizer(data), str(data))


def test_there_are_enough():
    listed = (BAD_VALUES, CONFIG_TEXTS, FAMILIES, HEADERS, INDEXES, COMPONENTS, CONFIG_FILES)
    assert sum(map(len, (*listed, BREAK, RUNS))) >= 200
    assert np.prod([len(MORE_HOSTILE), len(field_names(Config()))]) > 600


@pytest.mark.parametrize("folder", ["$HOME/runs", "${HOME}/runs", "${oc.env:HOME}/runs", "$HOME"])
def test_a_variable_in_a_path_is_refused_and_no_folder_of_its_name_made(folder):
    with pytest.raises(InputError, match="variables of the environment are not expanded"):
        Config(run_dir=folder)
    Config(run_dir="costs$/x").data.train = "a$b.jsonl"  # a sign within a name is one


def test_a_config_file_may_hold_a_dataclass_whose_annotations_are_texts(tmp_path):
    path = tmp_path / "with_dataclass.py"
    path.write_text(
        "from __future__ import annotations\nimport dataclasses\nfrom rljax.config import Config\n"
        "@dataclasses.dataclass\nclass Sizes:\n    layers: int = 3\n"
        "def get_config():\n    return Config(steps=Sizes().layers)\n"
    )
    assert load_config_file(str(path)).steps == 3
