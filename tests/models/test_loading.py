"""Loading: every weight on every mesh, host memory, the report, which version a folder is."""

import dataclasses
import functools
import hashlib
import json
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import REPO, lanes
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiny_folders import (
    CONFIGS,
    by_hand,
    config,
    experts,
    one_device,
    same,
    tensors_of,
    tiny,  # noqa: F401  a fixture
    write_folder,
)
from tiny_folders import config as model_config
from tiny_refusal import refused

from rljax.batch import batch_from_rows
from rljax.config import Config
from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models.config import LoraConfig
from rljax.models.huggingface import (
    blocks,
    checkpoint_folder,
    load_config,
    load_params,
    load_with_report,
    save_params,
)
from rljax.models.huggingface.checkpoint_folder import _ignorable
from rljax.models.model import Model
from rljax.setup import initial_params

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MESHES = [dict(fsdp=8), dict(fsdp=4, tensor=2), dict(data=2, fsdp=1, expert=4)]


@pytest.fixture
def small_blocks(monkeypatch):
    """So few bytes that every tensor goes in several blocks, the last of them overlapping."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 2100)


# -- every weight lands where it belongs --


# Every kind of weight is met on one mesh, and each axis by the weights that it may split.
MET = [("qwen3_moe", MESHES[1]), ("gpt_oss", MESHES[2])]
OTHERS = [(name, mesh) for name in CONFIGS for mesh in MESHES if (name, mesh) not in MET]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"), [*MET, *(pytest.param(*o, marks=pytest.mark.slow) for o in OTHERS)], ids=str
)
def test_any_mesh_gets_the_weights(tmp_path, small_blocks, name, mesh):
    model = Model(CONFIGS[name], make_mesh(**mesh))
    tensors = tensors_of(model)
    params = load_params(write_folder(tmp_path, model, tensors, files=3), model)
    same(params, by_hand(model, tensors))
    for leaf, sharding in zip(
        jax.tree.leaves(params), jax.tree.leaves(model.shardings()), strict=True
    ):
        assert leaf.sharding == sharding and leaf.dtype == jnp.float32
    # And back: the same bytes under the same names.
    save_params(tmp_path / "again", model, params)
    with safe_open(tmp_path / "again" / "model.safetensors", framework="np") as file:
        assert set(file.keys()) == set(tensors)
        for tensor, value in tensors.items():
            np.testing.assert_array_equal(file.get_tensor(tensor), value, err_msg=tensor)


def test_blocks_cover_every_row_whatever_the_sizes(monkeypatch):
    model = Model(config(vocab_size=47, mlp=37), one_device())
    for size in (1, 100, 1000, 10**6):
        monkeypatch.setattr(blocks, "BLOCK_BYTES", size)
        for group in blocks.groups(model):
            count, starts = group.row_starts(4)
            rows = {row for start in starts for row in range(start, start + count)}
            assert rows == set(range(group.disk_shape[0])), group.names
            assert count % group.parts[0].piece.unit == 0


DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]


WIDER, NARROWER = ("float32", ml_dtypes.bfloat16), ("bfloat16", np.float64)
PAIRS = [(ours, disk) for ours in ("float32", "bfloat16") for disk in DTYPES]
PAIRS = [pair for pair in PAIRS if pair not in (WIDER, NARROWER)]


@pytest.mark.parametrize(
    ("ours", "disk"),
    [WIDER, NARROWER, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS)],
    ids=lambda d: np.dtype(d).name,
)
def test_dtypes_on_disk(tmp_path, disk, ours):
    """Rounded once, to nearest even; what fits is kept to the bit."""
    model = Model(config(layers=1, weight_dtype=ours), one_device())
    tensors = tensors_of(model, disk)
    params = load_params(write_folder(tmp_path, model, tensors), model)
    want = by_hand(model, tensors)
    want = jax.tree.map(lambda x: x.astype(ours), want)
    same(params, want)


@pytest.mark.slow
def test_dtypes_may_differ_from_tensor_to_tensor(tmp_path):
    model = Model(experts("qwen3_moe"), one_device())
    tensors = tensors_of(model)
    for i, name in enumerate(sorted(tensors)):
        tensors[name] = tensors[name].astype((np.float32, ml_dtypes.bfloat16)[i % 2])
    same(load_params(write_folder(tmp_path, model, tensors), model), by_hand(model, tensors))


@pytest.mark.slow
def test_few_programs_whatever_the_depth(tmp_path):
    """One program per kind of weight: loading must not compile per layer or per expert."""
    counts = []
    for layers in (2, 6):
        model = Model(config(layers=layers, vocab_size=49 + layers), one_device())
        folder = write_folder(tmp_path / str(layers), model, tensors_of(model))
        blocks._put.clear_cache()  # of programs that others have made
        load_params(folder, model)
        counts.append(blocks._put._cache_size())
    assert counts[0] == counts[1] <= 11, counts


def test_a_block_is_written_into_a_weight_without_a_pass_over_it():
    """A pass for each block takes a time that grows with the square of the weight. (Of two-byte
    weights a pass that changes nothing is counted, which LLVM then removes.)"""
    model = Model(config(layers=1, vocab_size=1024), one_device())
    path, embed = max(model.shapes().items(), key=lambda item: math.prod(item[1][0]))
    group = next(g for g in blocks.groups(model) if g.parts[0].path == path)
    part, rows = group.parts[0], 8
    leaf, block = jnp.zeros(embed[0]), jnp.ones(group.block_shape(rows))
    how = dict(mesh=model.mesh, spec=part.spec, block_spec=part.block_spec, piece=part.piece)
    cost = blocks._put.lower(leaf, block, np.zeros(2, np.int32), **how).compile().cost_analysis()
    assert block.nbytes < cost["bytes accessed"] < 5 * block.nbytes < leaf.nbytes / 10


# -- memory --


def measured(*flags: str) -> dict:
    command = [sys.executable, str(REPO / "benchmarks" / "loading.py"), *flags]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.slow
def test_host_memory_stays_under_the_largest_file():
    found = measured("--gigabytes=0.1", "--devices=8", "--tensor=2")
    assert found["parameter_bytes"] > 0.9 * found["checkpoint_bytes"] > 0.8e8
    assert found["ratio"] < 1.3, found


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [("--devices=1",), ("--devices=8",), ("--devices=8", "--tensor=2")]
)
def test_host_memory_of_two_gigabytes(flags):
    found = measured(*flags)
    assert found["checkpoint_bytes"] > 1.9e9 and found["files"] >= 4
    assert found["ratio"] < 0.35, found


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fp8", "mxfp4"])
def test_host_memory_of_published_formats(form):
    """What is decoded is twice or four times as large as its file, and held a block at a time."""
    found = measured(f"--format={form}", "--gigabytes=1.2", "--shard_megabytes=600")
    assert found["parameter_bytes"] > 1.8 * found["checkpoint_bytes"] > 1.8 * 1.1e9
    assert found["ratio"] < 0.35, found


# -- what a folder may hold, and what is said of it --


def test_the_report_has_files_with_their_hashes(tiny):  # noqa: F811
    folder, model, tensors = tiny
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    write_folder(folder, model, tensors, files=2)
    (folder / "model.safetensors").unlink()
    params, report = load_with_report(folder, model)
    same(params, by_hand(model, tensors))
    assert report.ignored == ("model.layers.0.self_attn.rotary_emb.inv_freq",)
    assert (report.missing, report.unexpected, report.misshaped, report.zero) == ((), (), (), ())
    want = {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.glob("*.safetensors")
    }
    assert {name: r.sha256 for name, r in report.files.items()} == want and len(want) == 2
    sizes = {p.name: p.stat().st_size for p in folder.glob("*.safetensors")}
    assert {name: r.bytes for name, r in report.files.items()} == sizes
    assert report.revision is None
    assert json.loads(json.dumps(dataclasses.asdict(report)))["folder"] == str(folder)


def test_a_run_folder_says_what_it_started_from(tiny, tmp_path):  # noqa: F811
    folder, model, tensors = tiny
    config = Config(model=f"{folder}/")
    same(initial_params(config, model, tmp_path / "model.json"), by_hand(model, tensors))
    told = json.loads((tmp_path / "model.json").read_text())
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert told["files"]["model.safetensors"]["sha256"] == digest and "revision" in told


def test_adapters_are_not_put_on_other_weights_than_those_they_were_trained_on(tmp_path, caplog):
    """A checkpoint of a run with adapters holds them alone; model.json says what lay below."""
    folder = tmp_path / "base"
    plain = Model(model_config(layers=1), one_device())
    write_folder(folder, plain, tensors_of(plain))
    config = Config(model=f"{folder}/")
    config.lora.rank, config.lora.base = 2, "float32"
    lora = LoraConfig(rank=2, alpha=4.0, targets=("q_proj",), base="float32")
    model = Model(dataclasses.replace(plain.config, lora=lora), one_device())
    record = tmp_path / "model.json"
    initial_params(config, model, record)
    initial_params(config, model, begun=record)
    write_folder(folder, plain, {name: x + 1 for name, x in tensors_of(plain).items()})
    with pytest.raises(InputError, match="not those that.*model.safetensors: another SHA-256"):
        initial_params(config, model, begun=record)
    assert caplog.text == ""
    initial_params(config, model, begun=record, may_differ=True)
    assert "put the files of that time back" in caplog.text
    initial_params(config, model, begun=tmp_path / "none.json")  # a run of before: nothing is known


def test_the_revision_of_a_cache_and_of_a_download(tiny, tmp_path):  # noqa: F811
    folder, model, _ = tiny
    cached = tmp_path / "models--a--b" / "snapshots" / COMMIT
    cached.parent.mkdir(parents=True)
    folder.rename(cached)
    assert load_with_report(cached, model)[1].revision == COMMIT
    link = tmp_path / "link"
    link.symlink_to(cached)
    assert load_with_report(link, model)[1].revision == COMMIT
    plain = tmp_path / "plain"
    cached.rename(plain)
    assert load_with_report(plain, model)[1].revision is None
    notes = plain / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    (notes / "model.safetensors.metadata").write_text(f"{COMMIT}\netag\n1700000000.0\n")
    assert load_with_report(plain, model)[1].revision == COMMIT
    (notes / "model.safetensors.metadata").write_text("not a commit\n")
    assert load_with_report(plain, model)[1].revision is None


def test_all_problems_at_once(tiny):  # noqa: F811
    folder, model, tensors = tiny
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.extra.weight"] = np.ones(3, np.float32)
    tensors["model.norm.weight"] = np.ones(31, np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int8)
    write_folder(folder, model, tensors)
    refused(
        lambda: load_params(folder, model),
        "lacks 1 of 25 tensors: model.layers.1.mlp.up_proj.weight",
        "1 tensors that the model does not use: model.extra.weight",
        "model.safetensors: tensor model.norm.weight has shape (31,), config.json says (32,)",
        "tensor lm_head.weight has dtype I8",
    )


def test_a_hundred_missing_tensors_are_counted_not_listed(tiny):  # noqa: F811
    folder, model, tensors = tiny
    bigger = Model(config(layers=12), one_device())
    text = refused(lambda: load_params(folder, bigger), "lacks 110 of 135", "106 more")
    assert text.count("model.layers.") == 4


def test_a_base_model_export_has_no_prefix(tiny):  # noqa: F811
    folder, model, tensors = tiny
    tied = Model(config(tie_embeddings=True), model.mesh)
    del tensors["lm_head.weight"]
    want = by_hand(tied, tensors)
    base = {name.removeprefix("model."): value for name, value in tensors.items()}
    write_folder(folder, tied, base)
    params, report = load_with_report(folder, tied)
    same(params, want)
    refused(lambda: load_params(folder, model), "lacks 1 of 25 tensors: lm_head.weight")
    mixed = {**base, "model.norm.weight": base["norm.weight"]}
    write_folder(folder, tied, mixed)
    refused(lambda: load_params(folder, tied), "does not use: model.norm.weight")
    write_folder(folder, tied, {**base, **tensors})  # both spellings: which one is meant?
    refused(lambda: load_params(folder, tied), "does not use: embed_tokens.weight")


@pytest.mark.parametrize(
    "front, between",
    [
        ("module.", ""),
        ("_orig_mod.", ""),
        ("pretrained_model.", ""),
        ("module._orig_mod.", ""),
        ("_orig_mod.module.", ""),
        ("", "_orig_mod."),
        ("_fsdp_wrapped_module.", "_fsdp_wrapped_module._checkpoint_wrapped_module."),
    ],
)
def test_names_of_a_wrapped_model(tiny, front, between):  # noqa: F811
    folder, model, tensors = tiny
    want = by_hand(model, tensors)
    wrapped = {
        front + name.replace("layers.1.", f"layers.1.{between}"): value
        for name, value in tensors.items()
    }
    for files in (1, 2):  # without and with an index
        write_folder(folder, model, wrapped, files)
        params, report = load_with_report(folder, model)
        same(params, want)
        assert report.ignored == report.missing == ()
        for path in folder.glob("model*"):
            path.unlink()
    write_folder(folder, model, {**wrapped, **tensors})
    refused(lambda: load_params(folder, model), "is in model.safetensors, too", "wrapper")


def test_names_that_are_not_read_have_a_way(tiny):  # noqa: F811
    folder, model, tensors = tiny
    write_folder(folder, model, {f"actor.{name}": value for name, value in tensors.items()})
    refused(lambda: load_params(folder, model), "rename the tensors: 'actor.' stands before")
    layer = "model.layers.0.self_attn.q_proj"
    adapted = dict(tensors)
    adapted[f"{layer}.base_layer.weight"] = adapted.pop(f"{layer}.weight")
    adapted[f"{layer}.lora_A.default.weight"] = np.ones((2, 32), np.float32)
    write_folder(folder, model, adapted)
    refused(lambda: load_params(folder, model), "lora_A", "merge_and_unload()")


@pytest.mark.parametrize("name", ["k_scale", "v_scale", "k_proj.k_scale", "k_proj.output_scale"])
def test_scales_of_a_cache_in_8_bits_are_not_read(tiny, name):  # noqa: F811
    folder, model, tensors = tiny
    scale = f"model.layers.0.self_attn.{name}"
    write_folder(folder, model, {**tensors, scale: np.ones((), np.float32)})
    params, report = load_with_report(folder, model)
    same(params, by_hand(model, tensors))
    assert report.ignored == (scale,)


def test_a_value_head_beside_a_language_model(tiny, caplog):  # noqa: F811
    """TRL's: no part of the policy, which says so; a critic is refused with a way that works."""
    folder, model, tensors = tiny
    head = {"weight": np.full((1, 32), 0.5, np.float32), "bias": np.full(1, 2.0, np.float32)}
    trl = {**tensors, **{f"v_head.summary.{name}": value for name, value in head.items()}}
    write_folder(folder, model, trl)
    same(load_params(folder, model), by_hand(model, tensors))
    assert "value head" in caplog.text and "ForTokenClassification" in caplog.text
    critic = dataclasses.replace(model, head="scalar")
    refused(lambda: load_params(folder, critic), "v_head.summary.bias", "ForTokenClassification")
    write_folder(
        folder, model, {name.replace("v_head.summary.", "score."): v for name, v in trl.items()}
    )
    path = folder / "config.json"
    told = {"architectures": ["LlamaForTokenClassification"], "num_labels": 1}
    path.write_text(json.dumps(json.loads(path.read_text()) | told))
    params = load_params(folder, Model(load_config(folder), model.mesh, "scalar"))
    np.testing.assert_array_equal(params["head"], head["weight"].T)
    np.testing.assert_array_equal(params["head_bias"], head["bias"])


def test_layers_that_predict_further_tokens_are_deepseeks_alone(tiny):  # noqa: F811
    folder, model, tensors = tiny
    further = "model.layers.2.eh_proj.weight"
    write_folder(folder, model, {**tensors, further: np.ones((4, 4), np.float32)})
    refused(lambda: load_params(folder, model), further)
    deepseek = dataclasses.replace(model.config, family="deepseek_v3")
    ignored = functools.partial(_ignorable, model=dataclasses.replace(model, config=deepseek))
    assert ignored(further) and ignored("model.layers.61.mlp.gate.weight")
    assert not ignored("model.layers.1.mlp.gate.weight") and not ignored("model.other.weight")


def test_heads(tiny, tmp_path):  # noqa: F811
    """A critic of a language model starts at zero; a reward model brings its own head, and is no
    language model unless its embeddings are tied."""
    folder, model, tensors = tiny
    critic = dataclasses.replace(model, head="scalar")
    params, report = load_with_report(folder, critic)
    assert report.zero == ("score.weight",) and report.ignored == ("lm_head.weight",)
    assert params["head"].shape == (32, 1) and not np.any(params["head"])
    same({"e": params["embedding"]}, {"e": tensors["model.embed_tokens.weight"]})

    scorer = Model(config(labels=3), model.mesh, "scalar")
    scored = tensors_of(scorer)
    reward = write_folder(tmp_path / "reward", scorer, scored)
    params, report = load_with_report(reward, scorer)
    np.testing.assert_array_equal(params["head"], scored["score.weight"].T)
    assert report.zero == () and np.any(params["head"])
    refused(lambda: load_params(reward, critic), "score.weight has shape (3, 32)", "(1, 32)")
    refused(lambda: load_params(reward, model), "lm_head.weight", "is a reward model")
    tied = Model(config(tie_embeddings=True), model.mesh)
    _, report = load_with_report(reward, tied)
    assert report.ignored == ("score.weight",)


def test_code_of_a_folder_is_never_run(tiny):  # noqa: F811
    folder, model, tensors = tiny
    told = json.loads((folder / "config.json").read_text())
    told["auto_map"] = {"AutoModelForCausalLM": "modeling_mine.Mine"}
    (folder / "config.json").write_text(json.dumps(told))
    (folder / "modeling_mine.py").write_text("raise SystemExit('remote code ran')")
    same(load_params(folder, Model(load_config(folder), model.mesh)), by_hand(model, tensors))
    assert "modeling_mine" not in sys.modules


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "m.pt"])
def test_pickles_are_refused_with_the_fix(tiny, name):  # noqa: F811
    folder, model, _ = tiny
    (folder / "model.safetensors").rename(folder / name)
    refused(lambda: load_params(folder, model), name, "any code", "save_pretrained")


def test_one_tensor_in_two_files_is_refused(tiny):  # noqa: F811
    folder, model, tensors = tiny
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, folder / "b.safetensors")
    refused(lambda: load_params(folder, model), "b.safetensors", "model.norm.weight", "a.safet")


# -- a config that ties the head to the embedding, and a file with another head --


def tied_folder(folder, head=None, files=1, **changes):
    """A folder whose config.json ties the head, with `head` of its embedding as lm_head.weight."""
    model = Model(config(tie_embeddings=True, **changes), one_device())
    tensors = tensors_of(model)
    if head is not None:
        tensors["lm_head.weight"] = head(tensors["model.embed_tokens.weight"])
    return write_folder(folder, model, tensors, files=files), model, tensors


@pytest.mark.parametrize("wrapper", ["", "module."])
def test_a_tied_matrix_under_the_name_of_the_head(tmp_path, wrapper):
    """safetensors' save_model keeps one name of a shared matrix, of most families lm_head.weight.
    Policies and critics read it; a model whose head is not tied lacks its embedding."""
    folder, model, tensors = tied_folder(tmp_path)
    want = by_hand(model, tensors)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    write_folder(folder, model, {wrapper + name: value for name, value in tensors.items()})
    assert load_config(folder).tie_embeddings
    params, report = load_with_report(folder, model)
    same(params, want)
    assert report.ignored == ()
    critic = load_params(folder, dataclasses.replace(model, head="scalar"))
    np.testing.assert_array_equal(critic["embedding"], want["embedding"])
    untied = dataclasses.replace(model.config, tie_embeddings=False)
    apart = dataclasses.replace(model, config=untied)
    refused(lambda: load_params(folder, apart), "lacks 1 of", "model.embed_tokens.weight")


def one_row_changed(embedding):
    head = embedding.copy()
    head[-1, -1] += 1
    return head


@pytest.mark.parametrize("files", lanes([3], [1]))
def test_the_head_of_the_file_wins(tmp_path, files, small_blocks, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint_folder, "_COMPARED", 800)
    folder, tied, tensors = tied_folder(tmp_path / "m", one_row_changed, files)
    found = load_config(folder)
    assert not found.tie_embeddings and "lm_head.weight holds another matrix" in caplog.text
    params = load_params(folder, Model(found, one_device()))
    np.testing.assert_array_equal(params["head"], tensors["lm_head.weight"].T)
    np.testing.assert_array_equal(params["embedding"], tensors["model.embed_tokens.weight"])
    save_params(tmp_path / "again", Model(found, one_device()), params)
    assert not json.loads((tmp_path / "again/config.json").read_text())["tie_word_embeddings"]
    # Where the config was read before the weights were here, as of the hub.
    text = refused(lambda: load_params(folder, tied), "lm_head.weight is not the embedding")
    assert "start again" in text
    # A critic has another head, and reads the body alone.
    critic = Model(load_config(folder), one_device(), "scalar")
    assert load_with_report(folder, critic)[1].ignored == ("lm_head.weight",)


@pytest.mark.parametrize(
    "head",
    [
        lambda x: x.copy(),
        lambda x: x.astype(ml_dtypes.bfloat16),
        lambda x: np.where(x == x[0, 0], -0.0, x).astype(np.float32),
        None,
    ],
    ids=["equal", "rounded", "zero", "none"],
)
def test_an_equal_head_stays_tied(tmp_path, head, caplog):
    folder, tied, tensors = tied_folder(tmp_path)
    if head is not None:
        tensors["model.embed_tokens.weight"][0, 0] = 0.0
        tensors["lm_head.weight"] = head(tensors["model.embed_tokens.weight"])
        write_folder(folder, tied, tensors)
    assert load_config(folder).tie_embeddings and caplog.text == ""
    params, report = load_with_report(folder, tied)
    assert report.ignored == (() if head is None else ("lm_head.weight",))
    same(params, by_hand(tied, tensors))


def test_a_float32_head_of_which_the_embedding_is_the_rounded_copy_is_tied(tmp_path):
    folder, tied, tensors = tied_folder(tmp_path)
    exact = tensors["model.embed_tokens.weight"]
    tensors |= {"lm_head.weight": exact, "model.embed_tokens.weight": exact.astype(np.float16)}
    write_folder(folder, tied, tensors)
    assert load_config(folder).tie_embeddings
    write_folder(folder, tied, {**tensors, "lm_head.weight": one_row_changed(exact)})
    assert not load_config(folder).tie_embeddings  # the file is another one now


@pytest.mark.slow
@pytest.mark.parametrize("family", lanes(["Gemma2"], ["Qwen2", "Llama", "Phi3"]))
def test_logits_of_two_matrices_are_those_of_transformers(tmp_path, family):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = dict(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    sizes |= dict(head_dim=8, query_pre_attn_scalar=8) if family == "Gemma2" else {}
    made = getattr(transformers, f"{family}Config")(**sizes)
    theirs = getattr(transformers, f"{family}ForCausalLM")
    theirs(made).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = one_row_changed(tensors["model.embed_tokens.weight"])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = Model(load_config(tmp_path), one_device())
    ids = [[3, 5, 7, 47, 11]]
    batch = batch_from_rows(jnp.array(ids), jnp.array([5]), jnp.ones((1, 5)))
    params = load_params(tmp_path, model)
    ours = jax.jit(model.logits)(params, batch)

    def same_as(folder):
        with torch.no_grad():
            want = theirs.from_pretrained(folder).eval()(torch.tensor(ids)).logits.numpy()
        np.testing.assert_allclose(ours, want, atol=2e-5)

    same_as(tmp_path)
    save_params(tmp_path / "again", model, params)
    same_as(tmp_path / "again")
