"""Malformed models, configs, components, files and runs: an error of ours that names the culprit.

Every case goes through a real entry point and must raise InputError; anything else is a bare
traceback for a user. Data files, tokenizers and templates have cases of their own in test_data,
test_tokenizer and test_chat.
"""

import json
import os
import random
import shutil
import struct
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import REPO, golden
from tiny_data import write_gsm8k_parquet
from tiny_gsm8k import TINY, write_model
from tiny_tokenizer import write_tokenizer

from rljax.build import build
from rljax.components import resolve
from rljax.config import HOMES, Config, field_names, with_overrides
from rljax.data.tokenizer import load_tokenizer
from rljax.errors import InputError
from rljax.launch import load_config_file
from rljax.mesh import make_mesh
from rljax.models.huggingface import load_config, load_params
from rljax.models.model import Model
from rljax.validation import validate


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A valid model folder; tests copy it before they break it."""
    return write_model(tmp_path_factory.mktemp("good") / "model", "qwen3")


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "model")


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(devices=jax.devices()[:1])


def refused(action, *names: str) -> str:
    """action() raises InputError, and its text holds each name and no Python of ours."""
    with pytest.raises(InputError) as error:
        action()
    text = str(error.value)
    for name in names:
        assert name in text, text
    assert len(text) < 3000
    return text


# -- config.json of a model: key -> values that it cannot have --

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SIZES += ("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
BAD_VALUES = [(key, value) for key in SIZES for value in (0, -1, "8", 2.5, True, [8])]
BAD_VALUES += [(key, None) for key in SIZES[:5]]
BAD_VALUES += [
    ("num_key_value_heads", 3),
    ("head_dim", 31),
    ("model_type", "gpt2"),
    ("model_type", None),
    ("model_type", 3),
    ("rms_norm_eps", "1e-6"),
    ("rms_norm_eps", -1.0),
    ("rms_norm_eps", float("nan")),
    ("tie_word_embeddings", "false"),
    ("tie_word_embeddings", 1),
    ("attention_bias", "no"),
    ("hidden_act", "gelu"),
    ("hidden_act", 3),
    ("initializer_range", "0.02"),
    ("rope_parameters", [1]),
    ("rope_parameters", "default"),
    ("rope_parameters", {"rope_type": "yarn", "factor": 4.0}),
    ("rope_parameters", {"rope_type": "dynamic", "factor": 2.0}),
    ("rope_parameters", {"rope_type": 3}),
    ("rope_parameters", {"rope_type": ["llama3"]}),
    ("rope_parameters", {"rope_type": "linear"}),
    ("rope_parameters", {"rope_type": "linear", "factor": "2"}),
    ("rope_parameters", {"rope_type": "linear", "factor": 0}),
    ("rope_parameters", {"rope_type": "llama3", "factor": 8.0}),
    ("rope_parameters", {"rope_theta": "10000"}),
    ("rope_parameters", {"rope_theta": -1.0}),
    ("rope_parameters", {"rope_theta": 1e4, "mrope_section": [1, 2, 3]}),
    ("rope_scaling", {"type": "su", "factor": 2.0}),
    ("use_sliding_window", True),
    ("layer_types", ["full_attention", "sliding_attention"]),
    ("layer_types", ["full_attention", "linear_attention"]),
    ("layer_types", 7),
    ("num_experts", 8),
    ("attn_logit_softcapping", 50.0),
    ("q_lora_rank", 16),
    ("quantization_config", {"bits": 4}),
    ("vision_config", {}),
    ("", 1),
]


@pytest.mark.parametrize(("key", "value"), BAD_VALUES, ids=lambda x: str(x)[:40])
def test_model_config_values(folder, mesh, key, value):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if key == "rope_scaling":
        del config["rope_parameters"]
    config[key] = value
    path.write_text(json.dumps(config))
    refused(lambda: load_params(folder, Model(load_config(folder), mesh)), str(folder))


def test_model_config_without_a_needed_key(folder):
    path = folder / "config.json"
    whole = json.loads(path.read_text())
    for key in ("model_type", *SIZES[:5]):
        path.write_text(json.dumps({k: v for k, v in whole.items() if k != key}))
        refused(lambda: load_config(folder), str(path), key)


CONFIG_TEXTS = [b"", b"{", b"[]", b"null", b"3", b'"qwen3"', b"\xff\xfe{}", b"[" * 100_000]
CONFIG_TEXTS += [b'{"model_type": "qwen3"', b"<html>404</html>", b'{"vocab_size": ' + b"9" * 5000]


@pytest.mark.parametrize("text", CONFIG_TEXTS, ids=lambda t: repr(t[:20]))
def test_model_config_texts(folder, text):
    (folder / "config.json").write_bytes(text)
    refused(lambda: load_config(folder), str(folder / "config.json"))


FAMILIES = ["deepseek_v3", "gemma2", "gemma3_text", "gpt_oss", "mistral", "mixtral", "qwen2_5_vl"]
FAMILIES += ["qwen3_moe", "qwen3_vl"]


@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_are_not_supported(folder, family):
    """Refused by name: a family that loads as another one would be wrong without a word."""
    shutil.copyfile(golden("public", "hf", family, "config.json"), folder / "config.json")
    refused(lambda: load_config(folder), str(folder), "supported: llama, qwen2, qwen3")


# -- model.safetensors --


def header_of(path):
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def write_header(path, header, body, size=None):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + body)


NORM = "model.norm.weight"
HEADERS = {
    "no header": lambda h: b"",
    "header is no JSON": lambda h: b"{" * 64,
    "header is a list": lambda h: [],
    "header is a number": lambda h: 7,
    "empty header": lambda h: {},
    "entry is null": lambda h: {**h, NORM: None},
    "entry has no dtype": lambda h: {**h, NORM: {k: v for k, v in h[NORM].items() if k != "dtype"}},
    "unknown dtype": lambda h: {**h, NORM: {**h[NORM], "dtype": "F7"}},
    "integer dtype": lambda h: {**h, NORM: {**h[NORM], "dtype": "I32"}},
    "negative shape": lambda h: {**h, NORM: {**h[NORM], "shape": [-1]}},
    "huge shape": lambda h: {**h, NORM: {**h[NORM], "shape": [2**40, 2**40]}},
    "shape is text": lambda h: {**h, NORM: {**h[NORM], "shape": "64"}},
    "shape of another rank": lambda h: {**h, NORM: {**h[NORM], "shape": [8, 8]}},
    "offsets overlap": lambda h: {**h, NORM: {**h[NORM], "data_offsets": [0, 256]}},
    "offsets backwards": lambda h: {**h, NORM: {**h[NORM], "data_offsets": [256, 0]}},
    "offsets past the end": lambda h: {**h, NORM: {**h[NORM], "data_offsets": [0, 2**62]}},
    "a tensor is missing": lambda h: {k: v for k, v in h.items() if k != NORM},
    "a tensor is misnamed": lambda h: {("x" if k == NORM else k): v for k, v in h.items()},
}


@pytest.mark.parametrize("name", HEADERS)
def test_safetensors_headers(folder, mesh, name):
    path = folder / "model.safetensors"
    header, body = header_of(path)
    write_header(path, HEADERS[name](header), body)
    refused(lambda: load_params(folder, Model(load_config(folder), mesh)), str(folder))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100, 5_000, 100_000, 430_239])
def test_truncated_safetensors(folder, mesh, size):
    path = folder / "model.safetensors"
    assert path.stat().st_size > size
    os.truncate(path, size)
    refused(lambda: load_params(folder, Model(load_config(folder), mesh)), str(path))


@pytest.mark.parametrize("size", [2**64 - 1, 2**63, 2**32, 10**8, 3])
def test_header_sizes_that_lie(folder, mesh, size):
    path = folder / "model.safetensors"
    header, body = header_of(path)
    write_header(path, header, body, size)
    refused(lambda: load_params(folder, Model(load_config(folder), mesh)), str(path))


def test_random_damage_of_the_header_never_escapes(folder, mesh):
    """200 files with a few random bytes: each loads, or is refused by name."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    rng, model, refusals = random.Random(0), Model(load_config(folder), mesh), 0
    for _ in range(200):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(8 + size)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            load_params(folder, model)
        except InputError as error:
            refusals += 1
            assert str(folder) in str(error)
    assert refusals > 150


INDEXES = {
    "no map": {},
    "map is a list": {"weight_map": []},
    "map of numbers": {"weight_map": {NORM: 3}},
    "map is null": {"weight_map": None},
    "an absent file": {"weight_map": {NORM: "model-00002.safetensors"}},
    "a folder": {"weight_map": {NORM: "."}},
    "an empty name": {"weight_map": {NORM: ""}},
    "too few tensors": {"weight_map": {NORM: "model.safetensors"}},
    "a tensor that its file lacks": {"weight_map": {"lm_head.weight": "model.safetensors"}},
    "no object": [],
}


@pytest.mark.parametrize("name", INDEXES)
def test_safetensors_indexes(folder, mesh, name):
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(INDEXES[name]))
    refused(lambda: load_params(folder, Model(load_config(folder), mesh)), str(folder))


def test_an_index_that_names_a_tensor_of_another_file(folder, mesh):
    header, _ = header_of(folder / "model.safetensors")
    names = [name for name in header if name != "__metadata__"]
    write_header(folder / "other.safetensors", {}, b"")
    weight_map = {name: "model.safetensors" for name in names} | {NORM: "other.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    action = lambda: load_params(folder, Model(load_config(folder), mesh))  # noqa: E731
    refused(action, "other.safetensors", NORM)


def test_folders_without_weights(folder, mesh):
    config = load_config(folder)
    (folder / "model.safetensors").unlink()
    refused(lambda: load_params(folder, Model(config, mesh)), "no *.safetensors")
    (folder / "model.safetensors").mkdir()
    refused(lambda: load_params(folder, Model(config, mesh)), "model.safetensors")
    refused(lambda: load_config(folder / "nothing"), "nothing/config.json does not exist")


# -- the config: hostile values in every field --

HOSTILE = [None, "x" * 5000, -1, 2**70, float("nan"), float("-inf"), [], {}, (1,), "\0", b"x"]


def valid_config() -> Config:
    config = Config(model="decoder(layers=1)")
    config.data.train = "sort_digits()"
    config.data.max_prompt_tokens = 16
    return config


@pytest.mark.parametrize("name", field_names(Config()))
def test_hostile_values_in_every_field(name):
    """A value of another type is named; one of the right type is refused or harmless."""
    refusals = 0
    for value in HOSTILE:
        config = with_overrides(valid_config(), {name: value}, "test")
        try:
            validate(config)
        except InputError as error:
            refusals += 1
            assert name in str(error) or f" {name.partition('.')[0]}=" in str(error)
    assert refusals >= 8


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
    "(" * 100_000,
    "f(x=" + "[" * 5000,
    "f(x=" + "9" * 10_000 + ")",
    "_hidden",
    "jnp",
    "Batch",
    "NamedTuple",
]


@pytest.mark.parametrize("text", COMPONENTS, ids=lambda t: repr(t[:30]))
def test_component_texts(text):
    refused(lambda: resolve(text, HOMES["policy_loss"]))
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
        "letter_counts(kinds=1)",
        "letter_counts(letters=20)",
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
    "def get_config(x): pass": "TypeError",
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
        (["--config.steps=-1", "--config.seed=-1"], "steps=-1: must be >= 0"),
    ],
)
def test_flags_of_a_launcher(tmp_path, flags, says):
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
    "is too long": {"data.max_prompt_tokens": 2, "data.overlong": "error"},
    "do not divide over 8 devices": {"batch.sequences_per_optimizer_step": 4},
    "mesh.tensor=3 does not divide the devices": {"mesh.tensor": 3},
    "needs 7 devices": {"mesh.data": 7, "mesh.fsdp": 1},
    "weight 'layers.attention.k'": {"mesh.tensor": 8, "mesh.fsdp": 1},
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
    assert np.prod([len(HOSTILE), len(field_names(Config()))]) > 600
