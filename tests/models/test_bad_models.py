"""Malformed Hugging Face folders: every one is refused with the file and the field in the message.

The cases count towards the 200 of test_bad_input.
"""

import json
import os
import random
import shutil
import struct

import jax
import pytest
from bad_folders import BAD_VALUES, CONFIG_TEXTS, FAMILIES, HEADERS, INDEXES, NORM, SIZES
from tiny_gsm8k import write_model
from tiny_refusal import refused

from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models.families import from_hf_config
from rljax.models.huggingface import load_config, load_params
from rljax.models.model import Model
from rljax.policies.saved import load_policy


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


# -- config.json of a model --


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


def test_keys_that_change_nothing_are_ignored_and_all_others_are_named(folder):
    path = folder / "config.json"
    known = json.loads(path.read_text())
    notes = {"_model_name_or_path": "x", "_own": [1], "unk_token_id": 3, "sep_token_id": 4}
    notes |= {"unsloth_fixed": True, "unsloth_version": "2025.3", "attn_implementation": "sdpa"}
    path.write_text(json.dumps({**known, **notes}))
    assert load_config(folder).layers == known["num_hidden_layers"]
    path.write_text(json.dumps({**known, **notes, "alibi": True, "logit_scale": 2.0}))
    with pytest.raises(InputError, match="sets 'alibi', 'logit_scale'.*silently ignore them"):
        load_config(folder)


def test_notes_of_exporters_are_ignored(folder):
    path = folder / "config.json"
    known = json.loads(path.read_text())
    notes = {"transformers.js_config": {"dtype": "q4"}, "max_length": 4096}
    notes |= {"tokenizer_class": "LlamaTokenizer", "keys_to_ignore_at_inference": ["x"]}
    path.write_text(json.dumps({**known, **notes}))
    assert load_config(folder).layers == known["num_hidden_layers"]


@pytest.mark.parametrize(
    "second, first, other",
    [
        ("max_sequence_length", "max_position_embeddings", 1),
        ("n_layers", "num_hidden_layers", 99),
        ("norm_eps", "rms_norm_eps", 0.5),
        ("activation", "hidden_act", "swish"),
    ],
)
def test_a_second_name_has_to_agree_with_the_first(folder, second, first, other):
    path = folder / "config.json"
    known = json.loads(path.read_text())
    path.write_text(json.dumps({**known, second: known[first]}))
    config = load_config(folder)
    path.write_text(json.dumps({**known, second: other}))
    refused(lambda: load_config(folder), f"{second}: got {other!r}", f"another name of {first}")
    path.write_text(json.dumps(known))
    assert load_config(folder) == config


def test_second_names_of_families():
    """Those of published files: of experts, of windows, of a gated activation, of a default."""
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, vocab_size=32)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=2, head_dim=8)
    experts = {"num_local_experts": 8, "num_experts_per_tok": 4}
    for name, more, second, same in [
        ("gpt_oss", experts, "experts_per_token", 4),
        ("gpt_oss", {"num_local_experts": 8}, "experts_per_token", 4),  # of the family's default
        ("gpt_oss", experts, "num_experts", 8),
        ("gemma2", {"sliding_window": 64}, "sliding_window_size", 64),
        ("llama", {"hidden_act": "silu"}, "activation", "swiglu"),
        ("llama", {}, "activation", "swiglu"),
        ("llama", {}, "max_sequence_length", 2048),
    ]:
        config = {"model_type": name, **sizes, **more}
        assert from_hf_config({**config, second: same}) == from_hf_config(config)
        other = "geglu" if isinstance(same, str) else same + 1
        with pytest.raises(InputError, match=f"config.json: {second}: got {other!r}"):
            from_hf_config({**config, second: other})
    with pytest.raises(InputError, match="sets 'sliding_window_size'"):  # of what llama has not
        from_hf_config({"model_type": "llama", **sizes, "sliding_window_size": 64})


def test_attn_factor_of_yarn_is_not_read_as_in_transformers(caplog):
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, vocab_size=32)
    sizes |= dict(model_type="qwen3", num_attention_heads=2, max_position_embeddings=256)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    plain = from_hf_config({**sizes, "rope_scaling": yarn})
    assert not caplog.records
    given = from_hf_config({**sizes, "rope_scaling": {**yarn, "attn_factor": 0.878}})
    assert given == plain and "attn_factor=0.878" in caplog.text
    for scaling in ({**yarn, "attn_factor": "x"}, {"type": "linear", "factor": 2.0}):
        scaling = {"attn_factor": 0.5, **scaling}
        with pytest.raises(InputError, match="attn_factor"):
            from_hf_config({**sizes, "rope_scaling": scaling})


@pytest.mark.parametrize(
    "settings, tokens",
    [
        ({"chunk_size": 100, "local_size": 20, "original_max_position_embeddings": 100}, 80),
        ({"chunk_size": 100, "local_size": 20, "original_max_position_embeddings": 50}, 50),
        ({"chunk_size": 9000, "local_size": 20}, 4096),
        ({}, 4096),
        ({"chunk_size": 100, "local_size": 100}, "local_size"),
        ({"local_size": 100}, "chunk_size"),
        ({"chunk_size": 100, "sparse_attention_enabled": True}, "sparse_attention_enabled"),
    ],
)
def test_a_context_ends_where_chunks_of_attention_begin_to_differ(settings, tokens, caplog):
    config = dict(model_type="qwen2", hidden_size=16, intermediate_size=32, num_hidden_layers=2)
    config |= dict(num_attention_heads=2, vocab_size=32, max_position_embeddings=4096)
    config["dual_chunk_attention_config"] = settings
    if isinstance(tokens, str):
        with pytest.raises(InputError, match=tokens):
            from_hf_config(config)
        return
    assert from_hf_config(config).max_tokens == tokens
    assert ("dual_chunk_attention_config" in caplog.text) == (tokens < 4096)


@pytest.mark.parametrize("text", CONFIG_TEXTS, ids=lambda t: repr(t[:20]))
def test_model_config_texts(folder, text):
    (folder / "config.json").write_bytes(text)
    refused(lambda: load_config(folder), str(folder / "config.json"))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_are_not_supported(folder, family):
    """Refused by name: a family that loads as another one would be wrong without a word."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": family}))
    refused(lambda: load_config(folder), str(folder), "supported: llama, mistral, qwen2, qwen3")


# -- model.safetensors --


def header_of(path):
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def write_header(path, header, body, size=None):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + body)


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

    def action():
        return load_params(folder, Model(load_config(folder), mesh))

    refused(action, "other.safetensors", NORM)


def test_folders_without_weights(folder, mesh):
    config = load_config(folder)
    (folder / "model.safetensors").unlink()
    refused(lambda: load_params(folder, Model(config, mesh)), "no *.safetensors")
    (folder / "model.safetensors").mkdir()
    refused(lambda: load_params(folder, Model(config, mesh)), "model.safetensors")
    refused(lambda: load_config(folder / "nothing"), "nothing/config.json does not exist")


def test_an_adapter_is_no_model_and_one_beside_a_model_is_warned_of(folder, tmp_path, caplog):
    """PEFT saves into the folder of a base, too, and transformers then loads both."""
    config = {"peft_type": "LORA", "base_model_name_or_path": "some/base", "r": 8}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    load_config(folder)
    [said] = [r.getMessage() for r in caplog.records if "adapter" in r.getMessage()]
    assert str(folder) in said and f"--config.lora.adapter={folder}" in said
    (folder / "config.json").unlink()
    alone = folder.rename(tmp_path / "alone")
    for read in (load_config, load_policy):
        with pytest.raises(
            InputError, match="holds a PEFT adapter and no model; the adapter is of 'some/base'"
        ):
            read(alone)
