"""GGUF files as models: the numbers of the `gguf` package, the tokens of transformers, and an
InputError for whatever is not read."""

import json
import os
import struct
import tracemalloc
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes
from gguf_files import ARCHITECTURES, READ, TYPE, codes, tokenizer_of, write_gguf
from tiny_folders import one_device

from rljax import hub
from rljax.batch import batch_from_rows
from rljax.data.text.tokenizer import load_tokenizer
from rljax.errors import InputError
from rljax.files import open_file
from rljax.gguf import gguf_folder
from rljax.gguf.folder import tensors_of
from rljax.gguf.rows import StoredTensor, decoded
from rljax.models.huggingface import blocks, load_config, load_params, save_params
from rljax.models.model import Model
from rljax.policies import load_policy

PROMPTS, LENGTH, NEW = 50, 8, 8


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rljax" / "gguf"


def read(rows: StoredTensor, path: Path, first: int, count: int) -> np.ndarray:
    out, file = np.empty((count, *rows.shape[1:]), np.float32), open_file(path)
    try:
        decoded(rows, file, path, first, out)
    finally:
        os.close(file)
    return out


# -- weights --


@pytest.mark.smoke
def test_every_type_is_decoded_as_the_package_decodes_it(tmp_path):
    path, rng = tmp_path / "all.gguf", np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.attention.head_count", 4)
    for kind in READ:
        writer.add_tensor(f"t.{kind}", codes(rng, TYPE[kind], 70, 512), raw_dtype=TYPE[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    places = tensors_of(path)
    for tensor in gguf.GGUFReader(path).tensors:
        wanted = gguf.dequantize(tensor.data, tensor.tensor_type)
        for first, count in ((0, 70), (0, 1), (69, 1), (13, 40)):
            got = read(places[tensor.name], path, first, count)
            assert got.tobytes() == wanted[first : first + count].tobytes(), tensor.name


def test_rows_of_heads_and_norms_are_as_a_checkpoint_has_them(tmp_path):
    path, rng = tmp_path / "x.gguf", np.random.default_rng(0)
    data = rng.standard_normal((48, 32)).astype(np.float32)
    path.write_bytes(data.tobytes())
    # As convert_hf_to_gguf of llama.cpp puts pairs beside each other.
    back = data.reshape(4, 6, 2, 32).swapaxes(1, 2).reshape(48, 32)
    for first, count in ((0, 48), (5, 9), (47, 1)):
        got = read(StoredTensor("F32", (48, 32), 0, data.nbytes, heads=4), path, first, count)
        np.testing.assert_array_equal(got, back[first : first + count])
    flat = StoredTensor("F32", (48 * 32,), 0, data.nbytes, heads=4)
    wanted = data.reshape(4, 192, 2).swapaxes(1, 2).ravel()
    np.testing.assert_array_equal(read(flat, path, 7, 300), wanted[7:307])
    shifted = read(StoredTensor("F32", (48 * 32,), 0, data.nbytes, shift=-1.0), path, 0, 48 * 32)
    np.testing.assert_array_equal(shifted, data.ravel() - np.float32(1))


def loaded(path) -> tuple[Model, dict]:
    model = Model(load_config(path), one_device())
    return model, load_params(path, model)


def greedy(model: Model, params: dict, prompts: np.ndarray) -> np.ndarray:
    step = jax.jit(model.logits)
    tokens = np.pad(prompts, ((0, 0), (0, NEW)))
    mask = jnp.zeros(tokens.shape, jnp.float32)
    for at in range(LENGTH, LENGTH + NEW):
        batch = batch_from_rows(jnp.asarray(tokens), jnp.full(len(tokens), at), mask)
        tokens[:, at] = np.asarray(step(params, batch)[:, at - 1].argmax(-1))
    return tokens[:, LENGTH:]


# Rows of heads in another order, and a tokenizer of bytes; norms that are shifted, windows, soft
# caps, and one of pieces.
QUICK = ("llama", "gemma2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", lanes(QUICK, [name for name in ARCHITECTURES if name not in QUICK])
)
def test_greedy_tokens_are_those_of_transformers(architecture, tmp_path):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    layers = {"gemma3": 6}.get(architecture, 2)  # the sixth of Gemma 3 has no window
    kinds = READ if architecture in ("llama", "gemma3") else ("Q8_0", "F16", "Q4_1", "Q6_K")
    write_gguf(
        tmp_path / "m.gguf", architecture, kinds=kinds, layers=layers, tied=architecture != "qwen2"
    )
    prompts = np.random.default_rng(1).integers(5, 260, (PROMPTS, LENGTH))
    model, params = loaded(tmp_path / "m.gguf")
    got = greedy(model, params, prompts)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.tensor(prompts)
    with torch.no_grad():
        for _ in range(NEW):
            chosen = theirs(tokens, use_cache=False).logits[:, -1].argmax(-1)
            tokens = torch.cat([tokens, chosen[:, None]], 1)
    np.testing.assert_array_equal(got, tokens[:, LENGTH:].numpy())
    assert len(np.unique(got, axis=0)) > PROMPTS // 2  # no model that says one thing
    if architecture != "llama":
        return
    # What was read is exported whole: transformers knows nothing of the file.
    out, tokenizer = tmp_path / "out", load_tokenizer(tmp_path / "m.gguf")
    save_params(
        out,
        model,
        params,
        bos_id=tokenizer.bos_id,
        eos_ids=tokenizer.eos_ids,
        pad_id=tokenizer.pad_id,
    )
    tokenizer.save(out)
    again = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    for name, weight in theirs.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    text = "hello 12  é<|b|>"
    read_back = transformers.AutoTokenizer.from_pretrained(out)
    assert read_back(text)["input_ids"] == tokenizer.encode(text)
    assert read_back.chat_template == tokenizer_of("llama")["chat_template"]


def test_loading_holds_little_beside_the_parameters(tmp_path, monkeypatch):
    path = tmp_path / "large.gguf"
    monkeypatch.setattr(blocks, "DECODED_BYTES", blocks.DECODED_BYTES // 8)
    write_gguf(path, kinds=("Q8_0",), vocabulary=10_000)
    gguf_folder(path)
    model = Model(load_config(path), one_device())
    load_params(path, model)  # compiled programs are no part of a load
    tracemalloc.start()
    load_params(path, model)  # arrays of JAX are not counted
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 0.3 * path.stat().st_size


# -- config.json --


def config_of(path, *args, **changes) -> dict:
    write_gguf(path, *args, kinds=("Q8_0",), layers=1, **changes)
    return json.loads((gguf_folder(path) / "config.json").read_text())


def test_scaled_rotations_windows_and_caps(tmp_path):
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    got = config_of(tmp_path / "a.gguf", "llama", metadata=linear)
    assert got["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert got["rms_norm_eps"] == 1e-5  # as it was before it became a float32
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
    }
    got = config_of(tmp_path / "b.gguf", "qwen2", metadata=yarn)["rope_scaling"]
    assert got == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    mistral = config_of(tmp_path / "c.gguf", metadata={"attention.sliding_window": 32})
    assert (mistral["model_type"], mistral["sliding_window"]) == ("mistral", 32)
    phi = config_of(
        tmp_path / "d.gguf",
        "phi3",
        metadata={"rope.dimension_count": 48, "attention.sliding_window": 64},
    )
    assert (phi["partial_rotary_factor"], phi["sliding_window"]) == (0.75, 64)
    caps = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}
    gemma = config_of(tmp_path / "e.gguf", "gemma2", metadata=caps)
    assert {k: gemma[k] for k in caps} == caps
    local = {"rope.freq_base_swa": 5000.0, "attention.sliding_window_pattern": 3}
    gemma = config_of(tmp_path / "f.gguf", "gemma3", metadata=local)
    assert (gemma["rope_local_base_freq"], gemma["sliding_window_pattern"]) == (5000.0, 3)
    for name in "abcdef":
        load_config(tmp_path / f"{name}.gguf")


def test_the_divisors_of_llama_3_are_recognised(tmp_path):
    pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(head_dim=64, rope_parameters={"rope_theta": 500_000.0, **scaling})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1 / 500_000.0 ** (np.arange(0, 64, 2) / 64)
    divisors = {"rope_freqs.weight": plain / scaled.numpy()}
    base = {"rope.freq_base": 500_000.0}
    got = config_of(tmp_path / "a.gguf", metadata=base, tensors=divisors)
    assert got["rope_scaling"] == scaling
    with pytest.raises(InputError, match="rope_freqs.weight holds other divisors"):
        config_of(
            tmp_path / "b.gguf", metadata=base, tensors={"rope_freqs.weight": np.ones(32) * 3}
        )


def test_what_is_not_read_is_refused_by_name(tmp_path):
    scores = [0.0] * len(tokenizer_of("phi3")["tokens"])
    scores[5] = np.nan
    cases = [
        (
            dict(architecture="phi3", tokenizer=tokenizer_of("phi3", scores=scores)),
            "scores: .*that of token 5 is nan",
        ),
        (
            dict(metadata={"attention.clamp_kqv": 8.0, "logit_scale": 2.0}),
            "sets llama.attention.clamp_kqv, llama.logit_scale",
        ),
        (dict(metadata={"expert_count": 8, "expert_used_count": 2}), "a model of experts"),
        (dict(metadata={"attention.head_count": [4, 4]}), "attention.head_count: got '2 values'"),
        (dict(metadata={"attention.value_length": 32}), "value_length"),
        (dict(metadata={"rope.dimension_count": 32}), "rope.dimension_count"),
        (dict(metadata={"rope.scaling.type": "longrope"}), "rope.scaling.type"),
        (dict(metadata={"attention.causal": False}), "attention.causal"),
        (dict(metadata={"block_count": None}), "has no llama.block_count"),
        (dict(tokenizer=tokenizer_of("llama", pre="mystery")), "pre: got 'mystery'.*smollm"),
        (dict(tokenizer=tokenizer_of("llama", model="rwkv")), "model: got 'rwkv'.*gpt2 and llama"),
        (dict(tokenizer=tokenizer_of("llama", normalizer="x")), "sets tokenizer.ggml.normalizer"),
        (dict(tokenizer=tokenizer_of("llama", merges=["h q"])), "merges: got 'h q'"),
        (dict(tokenizer=tokenizer_of("llama", eos_token_id=9999)), "eos_token_id: got 9999"),
        (dict(architecture="gemma3", metadata={"attention.scale": 0.0}), "scale: got 0.0"),
    ]
    for i, (how, match) in enumerate(cases):
        write_gguf(tmp_path / f"{i}.gguf", kinds=("Q8_0",), layers=1, **how)
        with pytest.raises(InputError, match=match):
            hub.model_folder(tmp_path / f"{i}.gguf")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "falcon")
    writer.add_tensor("x", np.zeros((2, 256), np.uint8)[:, :136], raw_dtype=TYPE.IQ4_XS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InputError, match=r"x \(IQ4_XS\).*read are F32"):
        hub.model_folder(tmp_path / "other.gguf")


# -- the tokenizer --

TEXTS = [
    "hello hello",
    "  two",
    "a  12 12",
    "é日本🙂",
    "tab\tnew\n\n",
    "it's",
    "",
    " ",
    "<|b|>x",
    "<eos>hell",
    "\u00a0",
    "123456",
    "x=1; y  =  2",
]


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "phi3", "spm"])
def test_ids_are_those_of_transformers(architecture, tmp_path):
    transformers = pytest.importorskip("transformers")
    name = "llama" if architecture == "spm" else architecture
    keys = tokenizer_of("phi3" if architecture == "spm" else architecture)
    write_gguf(tmp_path / "m.gguf", name, kinds=("Q8_0",), layers=1, tokenizer=keys)
    ours = load_tokenizer(tmp_path / "m.gguf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS:
        for special in (False, True):
            want = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == want, text
            assert ours.decode(want, False) == theirs.decode(want), text
    assert (ours.bos_id, ours.pad_id) == (theirs.bos_token_id, theirs.pad_token_id)


def test_digits_stand_alone_in_smollm(tmp_path):
    write_gguf(tmp_path / "m.gguf", tokenizer=tokenizer_of("llama", pre="smollm"), layers=1)
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    vocabulary = {text: i for i, text in tokenizer.vocabulary().items()}
    assert tokenizer.encode("  12") == [vocabulary[t] for t in ("ĠĠ", "1", "2")]


def test_a_prefix_space_is_left_out_and_turn_ends_stop(tmp_path):
    keys = tokenizer_of("phi3", add_space_prefix=False, eot_token_id=3)
    write_gguf(tmp_path / "m.gguf", tokenizer=keys, layers=1)
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    vocabulary = tokenizer.vocabulary()
    assert [vocabulary[i] for i in tokenizer.encode("hello")] == ["hello"]
    assert tokenizer.eos_ids == (1, 3)


# -- the folder --


def test_a_folder_is_written_once_and_anew_for_a_changed_file(tmp_path, cache):
    path = tmp_path / "m.gguf"
    write_gguf(path, layers=1)
    folder = hub.model_folder(path)
    before = (folder / "tokenizer.json").stat().st_mtime_ns
    assert hub.model_folder(path) == hub.model_folder(tmp_path) == folder
    assert (folder / "tokenizer.json").stat().st_mtime_ns == before
    assert folder.parent == cache and sum(p.is_dir() for p in cache.iterdir()) == 1
    assert sum(p.stat().st_size for p in folder.iterdir() if not p.is_symlink()) < 50_000
    write_gguf(path, layers=2)
    with pytest.raises(InputError, match="has changed"):
        tensors_of(folder / "m.gguf")
    assert load_config(path).layers == 2
    write_gguf(tmp_path / "n.gguf", layers=1)
    with pytest.raises(InputError, match="2 .gguf files: got 'm.gguf, n.gguf'"):
        hub.model_folder(tmp_path)


def test_a_missing_package_is_said(tmp_path, monkeypatch):
    write_gguf(tmp_path / "m.gguf", layers=1)
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(InputError, match="pip install 'gguf>=0.17'"):
        hub.model_folder(tmp_path / "m.gguf")


def test_what_is_wrong_in_the_written_folder_is_said_of_the_file(tmp_path, cache):
    """Nobody can correct the config.json that is made of a file."""
    no_end = dict(tokenizer_of("llama"))
    del no_end["eos_token_id"], no_end["padding_token_id"]
    cases = [
        dict(metadata={"block_count": 0}),
        dict(metadata={"attention.head_count_kv": 3}),
        dict(metadata={"block_count": 3}),
        dict(tensors={"blk.0.foo.weight": np.ones(3)}),
        dict(tokenizer=tokenizer_of("llama", chat_template="{% for m in %}")),
        dict(tokenizer=no_end),
    ]
    for i, changed in enumerate(cases):
        path = tmp_path / f"a model {i}.gguf"
        write_gguf(path, kinds=("Q8_0",), layers=1, **changed)
        with pytest.raises(InputError) as error:
            load_policy(path)
        text = str(error.value)
        assert text.startswith(str(path)) and "Fix: take another file" in text
        assert "config.json" not in text and str(cache) not in text


# -- damaged and hostile files --


def test_damaged_and_hostile_files_are_refused_soon(tmp_path):
    write_gguf(tmp_path / "m.gguf", layers=1)
    whole, path = (tmp_path / "m.gguf").read_bytes(), tmp_path / "bad.gguf"
    huge = struct.pack("<Q", 2**60)
    key = struct.pack("<Q", 1) + b"k"
    start = whole[:8]
    one = struct.pack("<QQ", 0, 1)
    tensor = struct.pack("<QQ", 1, 0) + struct.pack("<Q", 1) + b"t"
    both = struct.pack("<QQ", 2, 0)
    for name, offset in ((b"t", 0), (b"u", 16)):  # eight numbers of four bytes each
        both += struct.pack("<Q", 1) + name + struct.pack("<IQIQ", 1, 8, 0, offset)
    bad = {
        "no GGUF file": b"PK\x03\x04" + whole[4:],
        "big-endian": b"GGUF" + struct.pack(">I", 3) + whole[8:],
        "version 1": b"GGUF" + struct.pack("<I", 1) + whole[8:],
        "the number of tensors": start + huge + whole[16:],
        "the number of keys": start + whole[8:16] + huge,
        "name of a key": start + one + huge + b"x",
        "values of key": start + one + key + struct.pack("<II", 9, 0) + huge,
        "array of type 9": start + one + key + struct.pack("<IIQ", 9, 9, 1),
        "the type of key": start + one + key + struct.pack("<I", 77),
        "not UTF-8": start + one + key + struct.pack("<IQ", 8, 2) + b"\xff\xfe",
        "number of axes": start + tensor + struct.pack("<I", 2**31),
        "is of type 250": start + tensor + struct.pack("<IQIQ", 1, 32, 250, 0),
        "multiples of 32": start + tensor + struct.pack("<IQIQ", 1, 31, 8, 0),
        "ends at byte": start + tensor + struct.pack("<IQIQ", 1, 2**62, 0, 0),
        "'u' overlaps 't'": start + both + b"\0" * 128,
    }
    bad = {match: data + b"\0" * 64 * match.startswith("ends") for match, data in bad.items()}
    tracemalloc.start()
    for match, data in bad.items():
        path.write_bytes(data)
        with pytest.raises(InputError, match=match):
            hub.model_folder(path)
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()
    for cut in [0, 3, *range(4, len(whole) - 1, len(whole) // 40)]:
        path.write_bytes(whole[:cut])
        with pytest.raises(InputError):
            hub.model_folder(path)
    rng = np.random.default_rng(0)
    for _ in range(60):  # any byte of the header may be another
        data = bytearray(whole)
        data[int(rng.integers(0, 12_000))] = int(rng.integers(0, 256))
        path.write_bytes(data)
        try:
            load_config(path)
        except InputError:
            pass
    part = tmp_path / "m-00001-of-00003.gguf"
    part.write_bytes(whole)
    with pytest.raises(InputError, match="one part of a model.*join the parts"):
        hub.model_folder(part)
