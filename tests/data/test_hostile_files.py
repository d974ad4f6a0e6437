"""Files from strangers: pipes, devices, links, pointers, bombs; each refused by name, at once.

Chat templates are in test_hostile_templates, weights in tests/models/test_bad_models.
"""

import functools
import json
import os
import shutil
import socket
import threading

import pytest
from conftest import golden, lanes
from spent import at_most, spent
from tiny_refusal import refused
from tiny_tokenizer import write_tokenizer

from rljax.data.rows.read import read_rows
from rljax.data.text.tokenizer import CharTokenizer, load_tokenizer
from rljax.errors import InputError
from rljax.models.huggingface import load_config
from rljax.models.huggingface.checkpoint_folder import find_tensors
from rljax.rewards.text.structure import json_schema

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A model folder: config.json, weights, tokenizer."""
    folder = write_tokenizer(tmp_path_factory.mktemp("good") / "model")
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(golden("hf", "qwen3", name), folder / name)
    return folder


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "model")


def within(seconds: float, action):
    """action(), which must not wait for ever: a pipe that is opened does."""
    outcome = []

    def work():
        try:
            outcome.append((action(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, f"still at it after {seconds} s"
    if outcome[0][1] is not None:
        raise outcome[0][1]
    return outcome[0][0]


# -- what stands where a file is wanted --


def as_fifo(path):
    os.mkfifo(path)


def as_socket(path):
    # A socket's name is short, a test's folder is not.
    with socket.socket(socket.AF_UNIX) as one:
        here = os.getcwd()
        os.chdir(path.parent)
        try:
            one.bind(path.name)
        finally:
            os.chdir(here)


def as_loop(path):
    path.symlink_to(path.name)


IN_PLACE = {
    "a pipe": (as_fifo, "is not a file"),
    "a socket": (as_socket, "is not a file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "is not a file"),
    "a link to nothing": (lambda path: path.symlink_to("nowhere"), "points at nothing"),
    "a loop of links": (as_loop, "cannot be read"),
    "a folder": (lambda path: path.mkdir(), "is a folder"),
    "a git-lfs pointer": (lambda path: path.write_text(POINTER), "run 'git lfs pull'"),
    "too large a file": (
        lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 10**13),
        "",
    ),
    "a file of /proc": (lambda path: path.symlink_to("/proc/kmsg"), ""),
}
READERS = {
    "config.json": load_config,
    "model.safetensors": find_tensors,
    "model.safetensors.index.json": find_tensors,
    "tokenizer.json": load_tokenizer,
    "tokenizer_config.json": load_tokenizer,
    "special_tokens_map.json": load_tokenizer,
    "generation_config.json": load_tokenizer,
    "chat_template.jinja": load_tokenizer,
    "char_tokenizer.json": load_tokenizer,
    "additional_chat_templates/rag.jinja": load_tokenizer,
    "rows.jsonl": lambda folder: read_rows(str(folder / "rows.jsonl"), "train"),
    "rows.json": lambda folder: read_rows(str(folder / "rows.json"), "train"),
    "rows.parquet": lambda folder: read_rows(str(folder / "rows.parquet"), "train"),
    "train.jsonl": lambda folder: read_rows(str(folder), "train"),
    "schema.json": lambda folder: json_schema("{}", schema=str(folder / "schema.json")),
}


@pytest.mark.parametrize("kind", IN_PLACE)
def test_what_is_no_file_is_refused_by_name_wherever_one_is_read(folder, kind):
    make, says = IN_PLACE[kind]
    for name, read in READERS.items():
        path = folder / name
        before = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        make(path)
        text = refused(lambda read=read: within(30, lambda: read(folder)), path.name)
        assert says in text or (path.is_dir() and name.startswith("rows")), name
        path.rmdir() if path.is_dir() else path.unlink()
        if before is not None:
            path.write_bytes(before)


NAMES = ["x" * 5_000, "y/" * 3_000 + "z", "a\0b", "\udcff\udcfe", "x" * 10**6, "\n" * 300]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:5]))
@pytest.mark.parametrize("end", [".jsonl", ".parquet", "/", ""])
def test_names_that_no_file_has(name, end):
    text = refused(lambda: read_rows(name + end, "train"))
    assert text.encode("utf-8")  # any terminal prints it


def test_a_file_whose_name_is_not_utf8_is_read(tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe.jsonl")
    with open(path, "w") as file:
        file.write('{"prompt": "a"}\n{"prompt": ')
    refused(lambda: read_rows(path, "train"), "line 2")


# -- JSON --

DEEP = {
    "lists": "[" * 150 + "]" * 150,
    "objects": '{"a": ' * 150 + "1" + "}" * 150,
    "both": '{"a": [' * 900 + "]}" * 900,
    "beyond the parser": "[" * 100_000,
}


@pytest.mark.parametrize("name", DEEP)
def test_nesting_without_end(folder, name):
    for file, read in READERS.items():
        if not file.endswith((".json", ".jsonl")) or file == "schema.json":
            continue
        path = folder / file
        before = path.read_bytes() if path.exists() else None
        path.write_text('{"prompt": "a", "eos_token_id": 1, "train": ' + DEEP[name] + "}")
        refused(lambda read=read: read(folder), file)
        path.unlink()
        if before is not None:
            path.write_bytes(before)


def test_values_without_number(folder):
    (folder / "config.json").write_text('{"a": [' + "[]," * 600_000 + "1]}")
    refused(lambda: load_config(folder), "config.json", "values")


# -- config.json --


def nested_rope(**values):
    return {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, **values}}


CONFIGS = [
    {"num_hidden_layers": 10**9},
    {"num_hidden_layers": 100_000},
    {"num_hidden_layers": 2_000},
    {"num_hidden_layers": 10**400},
    {"hidden_size": 10**12},
    {"vocab_size": 2**62},
    {"num_attention_heads": 10**9, "num_key_value_heads": 10**9},
    {"head_dim": 10**10},
    {"intermediate_size": 10**300},
    {"max_position_embeddings": 10**400},
    {"rms_norm_eps": 10**400},
    {"initializer_range": 1e300},
    nested_rope(factor=1e300),
    nested_rope(factor=10**400),
    nested_rope(rope_theta=1e300),
    nested_rope(beta_fast=1e300),
    nested_rope(attention_factor=-1e300),
    nested_rope(mscale=1e300),
    nested_rope(original_max_position_embeddings=10**30),
    {"layer_types": ["full_attention"] * 100_000},
    {"layer_types": ["full_attention"]},
    {"use_sliding_window": True, "sliding_window": -(10**30)},
    {"architectures": {"a": 1}},
    {"x" * 10**6: 1},
]


@pytest.mark.parametrize("values", CONFIGS, ids=lambda v: str(v)[:40])
def test_config_bombs(folder, values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    refused(lambda: load_config(folder), str(path))


EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16)
BASES = {
    "gemma2": {},
    "gemma3_text": {},
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": dict(num_experts=4, **EXPERTS),
    "deepseek_v3": dict(
        n_routed_experts=8,
        routed_scaling_factor=2.5,
        n_group=1,
        topk_group=1,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        **EXPERTS,
    ),
}
OF_FAMILY = {
    "gemma2": [{"query_pre_attn_scalar": 0}, {"query_pre_attn_scalar": -4.0}],
    "gemma3_text": [{"sliding_window_pattern": 0}, {"_sliding_window_pattern": -3}],
    "mixtral": [{"num_local_experts": 10**9}, {"num_local_experts": 99_999}],
    "qwen3_moe": [{"mlp_only_layers": [{}]}, {"num_experts": 10**7}],
    "deepseek_v3": [
        {"qk_nope_head_dim": -64},
        {"kv_lora_rank": 10**10},
        {"n_shared_experts": 10**9},
    ],
}


@pytest.mark.parametrize("family", OF_FAMILY)
def test_config_bombs_of_families(tmp_path, family):
    config = dict(
        model_type=family,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        head_dim=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **BASES[family],
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_config(tmp_path).layers == 2
    for values in OF_FAMILY[family]:
        (tmp_path / "config.json").write_text(json.dumps({**config, **values}))
        refused(lambda: load_config(tmp_path), "config.json")


def test_the_deepest_model_that_is_taken_is_compared_at_once(folder):
    from rljax.mesh import make_mesh
    from rljax.models.huggingface import load_params
    from rljax.models.model import Model

    path = folder / "config.json"
    config = {**json.loads(path.read_text()), "num_hidden_layers": 1_000, "hidden_size": 2**20}
    config.pop("layer_types", None)
    path.write_text(json.dumps(config))
    with at_most(10):
        refused(lambda: load_params(folder, Model(load_config(folder), make_mesh())), "lacks")


# -- tokenizers --


def replace(pattern, content, times=1, kind="String"):
    one = {"type": "Replace", "pattern": {kind: pattern}, "content": content}
    return {"normalizer": {"type": "Sequence", "normalizers": [one] * times}}


def split(pattern):
    parts = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
    ]
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": parts}}


def added(count):
    token = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    return [{"id": 400 + i, "content": f"<x{i}>", **token} for i in range(count)]


def of_model(change):
    return lambda whole: {"model": {**whole["model"], **change(whole["model"])}}


TOKENIZERS = {
    "each l a thousand, three times": replace("l", "l" * 1_000, 3),
    "each place a thousand": replace("", "l" * 1_000, 3, "Regex"),
    "doubled": replace("z", "zz", 40),
    "a character that few texts have": replace("é", "é" * 1_000, 3),
    "a letter that no trial has": replace("ж", "ж" * 1_000, 3),
    "steps without end": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}] * 10**5}
    },
    "tables that feed each other": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Precompiled", "precompiled_charsmap": ""}] * 3,
        }
    },
    "prepended": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "x" * 10**5}] * 60,
        }
    },
    "a pattern that backtracks": split("(a+)+$"),
    "and another": split("(x+x+)+y"),
    "and one of blanks": split(r"^(\w+\s?)*$"),
    "a decoder": {
        "decoder": {
            "type": "Sequence",
            "decoders": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1_000}]
            * 3,
        }
    },
    "no vocabulary": of_model(lambda model: {"vocab": {}, "merges": []}),
    "all ids 0": of_model(lambda m: {"vocab": dict.fromkeys(m["vocab"], 0), "merges": []}),
    "an id of four thousand million": of_model(
        lambda m: {"vocab": {**m["vocab"], "zzzzz": 2**32 - 6}}
    ),
    "an endless token": of_model(lambda m: {"vocab": {**m["vocab"], "z" * 10**6: 900}}),
    "scores that are no numbers": of_model(
        lambda m: {
            "type": "Unigram",
            "unk_id": 0,
            "vocab": [["<unk>", float("nan")], ["a", float("nan")]],
        }
    ),
    "words of any length": of_model(
        lambda m: {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 10**9,
            "vocab": {"[UNK]": 10**9, "a": 1},
        }
    ),
}
SAMPLE = ("each l a thousand, three times", "a pattern that backtracks", "no vocabulary")
SAMPLE += ("a letter that no trial has", "steps without end", "tables that feed each other")
SAMPLE += ("all ids 0", "an endless token", "an id of four thousand million", "a decoder")


@pytest.mark.parametrize("name", lanes(SAMPLE, [n for n in TOKENIZERS if n not in SAMPLE]))
def test_tokenizer_bombs(tmp_path, name):
    path = write_tokenizer(tmp_path) / "tokenizer.json"
    whole, change = json.loads(path.read_text()), TOKENIZERS[name]
    path.write_text(json.dumps({**whole, **(change(whole) if callable(change) else change)}))
    with at_most(10):  # elsewhere, where the kernel limits it
        refused(lambda: load_tokenizer(tmp_path), str(path))


def test_a_panic_of_the_library_is_an_error_of_ours(tmp_path):
    """What no trial met: the pattern gives up on a text that only this test has."""
    path = write_tokenizer(tmp_path) / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **split("(ö+ö+)+y")}))
    tokenizer = load_tokenizer(tmp_path)
    refused(lambda: tokenizer.encode("ö" * 60), str(path))


@pytest.mark.slow
def test_a_hundred_thousand_added_tokens_are_read_in_linear_time(tmp_path):
    write_tokenizer(tmp_path)
    of_count = [0.0, 0.0]
    for run, count in enumerate((10_000, 100_000)):
        tokens = added(count)
        for name, field, value in (
            ("tokenizer.json", "added_tokens", tokens),
            (
                "tokenizer_config.json",
                "added_tokens_decoder",
                {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in tokens},
            ),
        ):
            path = tmp_path / name
            path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
        with spent() as seconds:
            refused(lambda: load_tokenizer(tmp_path))  # the good file's own tokens are gone
        of_count[run] = seconds[0]
    assert of_count[1] < 40 * max(of_count[0], 0.05)


def test_large_alphabets_take_linear_time():
    with pytest.raises(InputError, match="at most"):
        CharTokenizer("x" * 10**6)
    letters = "".join(chr(0x10000 + i) for i in range(199_999))
    with at_most(10):
        tokenizer = CharTokenizer(letters)
        assert tokenizer.decode(tokenizer.encode(letters[-2:])) == letters[-2:]
        for _ in range(100):
            tokenizer.decode([5])
        with pytest.raises(InputError, match="twice"):
            CharTokenizer(letters + letters[:1])
        text = refused(lambda: tokenizer.encode("a"), "not in the alphabet")
    assert len(text) < 2_000


def test_templates_without_number(tmp_path):
    listed = [{"name": f"t{i}", "template": "x"} for i in range(10**5)]
    refused(functools.partial(load_tokenizer, write_tokenizer(tmp_path, listed)), "at most 16")
    other = write_tokenizer(tmp_path / "other")
    (other / "additional_chat_templates").mkdir()
    for number in range(20):
        (other / f"additional_chat_templates/t{number}.jinja").write_text("x")
    refused(functools.partial(load_tokenizer, other), "at most 16")


def test_a_template_of_megabytes(tmp_path):
    write_tokenizer(tmp_path, "{# " + "x" * 2_000_000 + " #}")
    refused(functools.partial(load_tokenizer, tmp_path), "tokenizer_config.json", "characters")
