"""Adapters: parity with peft, what is trained, one base for all roles, codes, folders, runs."""

import dataclasses
import functools
import json
import re
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import compiled, golden, lanes
from safetensors.torch import load_file, save_file
from tiny_folders import config as folder_config
from tiny_folders import one_device, tensors_of, write_folder
from tiny_run import checkpoint_bytes, newest_step, policy_bytes, tiny_config, train_on_one
from tiny_tokenizer import write_tokenizer

from rljax import setup as build
from rljax.batch import batch_from_rows
from rljax.config import AlgorithmConfig
from rljax.data.text.tokenizer import CharTokenizer
from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models.adapters import lora
from rljax.models.adapters.quantise import block_of, dequantise, quantise
from rljax.models.config import LoraConfig
from rljax.models.huggingface import load_config, load_params
from rljax.models.huggingface.peft import load_adapter, save_adapter
from rljax.models.model import Model
from rljax.models.trees import flattened, nested
from rljax.policies import load_policy
from rljax.roles import start_training
from rljax.sampler import Sampling, generate
from rljax.setup import build as build_setup
from rljax.setup.role_table import scalar_start
from rljax.training.run import Run, adapted_folder


def adapted(folder, *, mesh=None, head="lm", **wish):
    """(model with adapters, its weights, the plain model, its weights)."""
    mesh = mesh or make_mesh(devices=jax.devices()[:1])
    wish = {"rank": 4, "alpha": 8.0, "base": "float32", **wish}
    plain = Model(load_config(folder, remat="none"), mesh, head)
    model = dataclasses.replace(
        plain, config=dataclasses.replace(plain.config, lora=LoraConfig(**wish))
    )
    params, base = weights(str(folder), model), loaded(str(folder), plain)
    return model, nested(flattened(params)), plain, nested(flattened(base))


# Arrays are made once for each folder and model. Who changes a tree changes a copy.
loaded = functools.cache(load_params)


@functools.cache
def weights(folder, model):
    plain = dataclasses.replace(model, config=lora.without(model.config))
    return lora.attach(model, dict(loaded(folder, plain)), jax.random.key(0))


slow = functools.partial(pytest.param, marks=pytest.mark.slow)
# One program for each model, for all tests that compute with an equal one.
logits = jax.jit(Model.logits, static_argnums=0)
logprobs = jax.jit(Model.logprobs, static_argnums=0)
values = jax.jit(Model.values, static_argnums=0)


def moved(params, key=1, size=0.05):
    """The same weights with random adapters, B included."""
    flat = flattened(params)
    rng = np.random.default_rng(key)
    for path in sorted(path for path in flat if path[-1] in lora.LEAVES):
        x = flat[path]
        noise = size * rng.standard_normal(x.shape).astype(x.dtype)
        flat[path] = jax.device_put(np.asarray(x) + noise, x.sharding)
    return nested(flat)


@functools.cache
def tokens(rows=2, columns=12, vocab=300):
    ids = np.random.default_rng(3).integers(3, vocab, (rows, columns)).astype(np.int32)
    lengths, mask = np.full(rows, columns), np.ones((rows, columns), np.float32)
    return batch_from_rows(*map(jnp.asarray, (ids, lengths, mask)))


@pytest.mark.parametrize("family", lanes(["qwen3"], ["deepseek_v3", "gemma2", "gpt_oss"]))
def test_fresh_adapters_change_nothing_and_merged_ones_are_plain_weights(family):
    model, params, plain, base = adapted(golden("hf", family))
    batch = tokens()
    before = logits(plain, base, batch)
    np.testing.assert_array_equal(logits(model, params, batch), before)
    params = moved(params)
    after = logits(model, params, batch)
    assert np.abs(after - before).max() > 0.05  # the adapters do reach the logits
    whole = lora.merge(model, params)
    assert jax.tree.structure(whole) == jax.tree.structure(base)
    np.testing.assert_allclose(logits(plain, whole, batch), after, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", lanes(["deepseek_v3"], ["qwen3", "gemma2"]))
def test_the_sampler_uses_the_adapters_that_the_trainer_has(family):
    """Decoding takes other paths than training: the latent attention's, one token at a time."""
    model, params, _, _ = adapted(golden("hf", family))
    params = moved(params)
    prompts = np.asarray(tokens(rows=2, columns=5).tokens)
    sampling = Sampling(max_response_tokens=6)
    batch = generate(model, params, prompts, np.array([5, 3]), jax.random.key(0), sampling, n=2)
    found = logprobs(model, params, batch)[0]
    keep = np.asarray(batch.mask) > 0
    np.testing.assert_allclose(batch.sampler_logprobs[keep], found[keep], atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen3", ("*",)),
        slow("qwen2", ("q_proj", "v_proj")),
        slow("llama3", ("self_attn.*",)),
        slow("gemma2", ("mlp.*", "o_proj")),
    ],
)
def test_peft_computes_the_same_with_what_we_saved(family, targets, tmp_path):
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = golden("hf", family)
    model, params, _, _ = adapted(folder, targets=targets)
    params, batch = moved(params), tokens()
    save_adapter(tmp_path, model, params, base=str(folder))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path)
    with torch.no_grad():
        want = theirs(torch.tensor(np.asarray(batch.tokens))).logits.numpy()
    np.testing.assert_allclose(logits(model, params, batch), want, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("family", lanes(["qwen2_5_vl"], ["qwen3_vl"]))
def test_peft_adapts_the_decoder_of_a_model_with_images_and_not_its_tower(family, tmp_path):
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = golden("hf", family)
    model, params, _, _ = adapted(folder)
    params, batch = moved(params), tokens()
    save_adapter(tmp_path, model, params)
    auto = transformers.AutoModelForImageTextToText
    theirs = auto.from_pretrained(folder, attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path)
    assert not any("visual" in n for n, _ in theirs.named_parameters() if "lora" in n)
    with torch.no_grad():
        want = theirs(torch.tensor(np.asarray(batch.tokens))).logits.numpy()
    np.testing.assert_allclose(logits(model, params, batch), want, atol=1e-3)


def test_a_small_update_survives_the_merge_into_a_bfloat16_base():
    model, params, _, _ = adapted(golden("hf", "qwen3"), base="bfloat16")
    before, after = (flattened(lora.merge(model, p)) for p in (params, moved(params, size=1e-5)))
    path = ("layers", "0", "attention", "q", "weight")
    assert after[path].dtype == jnp.float32
    assert np.mean(np.asarray(before[path]) != np.asarray(after[path])) > 0.95


def theirs(family="qwen3", *, folder=None, **wish):
    """(PEFT's model with random numbers in all that it trains, the folder of its base)."""
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = folder or golden("hf", family)
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    kind = wish.pop("kind", peft.LoraConfig)
    model = peft.get_peft_model(base, kind(task_type="CAUSAL_LM", **wish))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model, folder


def logits_of(model, batch) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(np.asarray(batch.tokens))).logits.numpy()


def same_weights(ours: dict, plain: Model, theirs, tmp_path) -> None:
    """Our merged weights are PEFT's, to 1e-6."""
    theirs.merge_and_unload().save_pretrained(tmp_path / "merged")
    want = flattened(load_params(tmp_path / "merged", plain))
    for path, value in flattened(ours).items():
        np.testing.assert_allclose(value, want[path], atol=1e-6, err_msg=str(path))


TWO = dict(target_modules=["q_proj", "down_proj"])
# Ranks and alphas are of few kinds: each is a program.
READ = {
    "plain": (dict(r=3, lora_alpha=8, **TWO), {}),
    "rsLoRA": (dict(r=4, lora_alpha=8, use_rslora=True, **TWO), {}),
    "gaussian": (dict(r=4, lora_alpha=8, init_lora_weights="gaussian", **TWO), {}),
    "orthogonal": (dict(r=4, lora_alpha=8, init_lora_weights="orthogonal", **TWO), {}),
    "not initialised": (dict(r=4, lora_alpha=8, init_lora_weights=False, **TWO), {}),
    "smaller ranks": (dict(r=4, lora_alpha=8, rank_pattern={"down_proj": 2}, **TWO), {}),
    "larger ranks": (
        dict(r=2, lora_alpha=8, rank_pattern={r"^model\.layers\.1\..*q_proj": 5}, **TWO),
        dict(rank=5),
    ),
    "alphas": (
        dict(r=4, lora_alpha=8, alpha_pattern={"model.layers.0.mlp.down_proj": 3}, **TWO),
        {},
    ),
    "all patterns, rsLoRA": (
        dict(
            r=4,
            lora_alpha=8,
            use_rslora=True,
            rank_pattern={"q_proj": 3, "down_proj": 2},
            alpha_pattern={"layers.1.self_attn.q_proj": 5.0},
            **TWO,
        ),
        dict(rank=3),
    ),
    "excluded": (
        dict(r=4, lora_alpha=8, target_modules="all-linear", exclude_modules=["k_proj", "up_proj"]),
        dict(targets=("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")),
    ),
}


QUICK = ("all patterns, rsLoRA", "excluded")


@pytest.mark.parametrize("case", lanes(QUICK, [case for case in READ if case not in QUICK]))
def test_we_compute_the_same_with_what_peft_saved(case, tmp_path):
    wish, changes = READ[case]
    peft, folder = theirs(**wish)
    peft.save_pretrained(tmp_path)
    rank, alpha = wish["r"], float(wish["lora_alpha"])
    how = dict(rank=rank, alpha=alpha, targets=("q_proj", "down_proj")) | changes
    model, params, plain, _ = adapted(folder, **how)
    fresh = flattened(params)
    params, batch = load_adapter(tmp_path, model, params), tokens()
    ours = logits(model, params, batch)
    np.testing.assert_allclose(ours, logits_of(peft, batch), atol=1e-3)
    if "ranks" in case:  # what is beside the file's own ranks can be trained, and changes nothing
        path = ("layers", "0", "mlp", "down", "lora_a")
        beside = (Ellipsis, slice(wish.get("rank_pattern", {}).get("down_proj", rank), None))
        np.testing.assert_array_equal(flattened(params)[path][beside], fresh[path][beside])
        assert np.all(np.any(np.asarray(fresh[path][beside]) != 0, axis=-2))
    save_adapter(tmp_path / "again", model, params)
    again = load_adapter(tmp_path / "again", model, adapted(folder, **how)[1])
    jax.tree.map(np.testing.assert_array_equal, params, again)
    same_weights(lora.merge(model, params), plain, peft, tmp_path)


def test_the_factor_of_an_adapter_in_16_bits_is_not_rounded(tmp_path):
    """B x sqrt(8), the factor of rsLoRA, is the float32 product where B has 16 bits."""
    wish = dict(r=8, lora_alpha=8, use_rslora=True, target_modules=["q_proj"])
    peft, folder = theirs(**wish)
    peft.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    rounded = {name: x.bfloat16() + 0.3 for name, x in load_file(file).items()}  # B is 0 at first
    save_file(rounded, file)
    model, params, _, _ = adapted(folder, rank=8, alpha=8.0, targets=("q_proj",))
    loaded = flattened(load_adapter(tmp_path, model, params))
    name = next(n for n in rounded if ".layers.0." in n and n.endswith("lora_B.weight"))
    (b,) = (x for path, x in loaded.items() if path[:2] == ("layers", "0") and path[-1] == "lora_b")
    wanted = rounded[name].float().numpy().T * np.float32(np.sqrt(8))
    np.testing.assert_array_equal(np.asarray(b).reshape(-1, *wanted.shape)[0], wanted)


def merged_as_told(error: str, folder) -> None:
    """Does what the fix of an error says, word by word."""
    import peft
    import torch
    import transformers

    lines = re.search(r"start from that: (base = .*?), the tokenizer by ", error)[1]
    names = {"AutoModelForCausalLM": transformers.AutoModelForCausalLM, "torch": torch}
    exec(lines.replace("FOLDER", repr(str(folder))), {**names, "PeftModel": peft.PeftModel})


TO_MERGE = {
    "DoRA": (dict(use_dora=True, **TWO), "use_dora"),
    "PiSSA": (dict(init_lora_weights="pissa", **TWO), "init_lora_weights"),
    "biases": (dict(bias="all", **TWO), "bias"),
    "saved head": (dict(modules_to_save=["lm_head"], **TWO), "modules_to_save: got ['lm_head']"),
    "saved both": (
        dict(modules_to_save=["embed_tokens", "lm_head"], **TWO),
        "modules_to_save: got ['embed_tokens', 'lm_head']",
    ),
    "tokens": (dict(trainable_token_indices=[5, 7], **TWO), "trainable_token_indices"),
    "saved embedding": (
        dict(modules_to_save=["embed_tokens"], **TWO),
        "modules_to_save: got ['embed_tokens']",
    ),
    "head adapted": (dict(target_modules=["q_proj", "lm_head"]), "beside the A and B"),
    "embedding adapted": (dict(target_modules=["q_proj", "embed_tokens"]), "beside the A and B"),
    "some layers": (dict(layers_to_transform=[1], **TWO), "the same of all layers"),
    "some layers left out": (
        dict(exclude_modules=["model.layers.0.self_attn.q_proj"], **TWO),
        "the same of all layers",
    ),
}


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """family -> a folder of its weights with the head tied, written once."""

    @functools.cache
    def written(family):
        folder = shutil.copytree(golden("hf", family), tmp_path_factory.mktemp(family) / "base")
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        tensors.pop("lm_head.weight", None)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
        return folder

    return written


# One of each reason: a kind of adapter, a saved matrix, more adapters, fewer layers.
MERGED = ("DoRA", "saved head", "head adapted", "some layers left out")


@pytest.mark.parametrize("family", lanes(["qwen3"], ["gemma2"]))
@pytest.mark.parametrize("case", lanes(MERGED, [case for case in TO_MERGE if case not in MERGED]))
def test_what_is_more_than_a_and_b_is_refused_and_its_fix_works(case, family, tied, tmp_path):
    """The base ties its head: a saved head or embedding makes two of the one matrix."""
    wish, text = TO_MERGE[case]
    folder = tied(family)
    peft, _ = theirs(folder=folder, r=4, lora_alpha=8, **wish)
    peft.save_pretrained(tmp_path / "adapter")
    model, params, plain, _ = adapted(folder, targets=("q_proj", "down_proj"))
    with pytest.raises(InputError) as refused:
        load_adapter(tmp_path / "adapter", model, params)
    assert text in str(refused.value), str(refused.value)
    merged_as_told(str(refused.value), tmp_path / "whole")
    batch = tokens()
    whole = Model(load_config(tmp_path / "whole", remat="none"), plain.mesh)
    ours = logits(whole, load_params(tmp_path / "whole", whole), batch)
    np.testing.assert_allclose(ours, logits_of(peft, batch), atol=1e-3)


@pytest.mark.slow
def test_an_adapter_comes_back_bitwise_also_on_a_mesh(tmp_path):
    folder = golden("hf", "qwen3_moe")
    mesh = make_mesh(1, 2, 2, devices=jax.devices()[:4])
    model, params, _, _ = adapted(folder, mesh=mesh, head="scalar", targets=("q_proj", "o_proj"))
    params = moved(params)
    save_adapter(tmp_path, model, params)
    again = load_adapter(
        tmp_path, model, adapted(folder, mesh=mesh, head="scalar", targets=("q_proj", "o_proj"))[1]
    )
    jax.tree.map(np.testing.assert_array_equal, params, again)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"] == [
        "score"
    ]


def test_the_bias_of_a_head_is_a_part_of_the_adapter(tmp_path):
    """A process reward model is one of ...ForTokenClassification, whose head has a bias."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    kind, folder = transformers.AutoModelForTokenClassification, tmp_path / "base"
    kind.from_pretrained(golden("hf", "qwen3"), num_labels=1).save_pretrained(folder)
    wish = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "down_proj"), base="float32")
    mesh = make_mesh(devices=jax.devices()[:1])
    model = Model(load_config(folder, remat="none", lora=wish), mesh, "scalar")
    plain = dataclasses.replace(model, config=lora.without(model.config))
    params = moved(lora.attach(model, load_params(folder, plain), jax.random.key(0)))
    params["head_bias"] = params["head_bias"] + 0.25
    save_adapter(tmp_path / "adapter", model, params)
    told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert told["task_type"] == "TOKEN_CLS"
    again = load_adapter(tmp_path / "adapter", model, model.init(jax.random.key(1)))
    np.testing.assert_array_equal(again["head_bias"], params["head_bias"])
    batch = tokens()
    base = kind.from_pretrained(folder, num_labels=1, attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        want = theirs(torch.tensor(np.asarray(batch.tokens))).logits.numpy()
    np.testing.assert_allclose(model.token_scores(params, batch), want, atol=1e-3)


def test_an_adapter_names_the_model_that_it_was_trained_on():
    config = tiny_config("run", model="base/", critic_model="scorer/")
    assert [adapted_folder(config, role) for role in ("actor", "reward_model")] == [
        "base/",
        "scorer/",
    ]
    alone = tiny_config("run", model="base/")
    assert adapted_folder(alone, "reward_model") == "base/"
    assert adapted_folder(tiny_config("run"), "actor") == ""


def test_a_run_starts_from_the_adapter_that_the_config_names(tmp_path):
    folder = golden("hf", "qwen3")
    model, params, _, _ = adapted(folder)
    params = moved(params)
    save_adapter(tmp_path, model, params)
    wish = dict(model=f"{folder}/", lora__rank=4, lora__alpha=8.0, lora__base="float32")
    config = tiny_config(tmp_path / "run", **wish, lora__adapter=str(tmp_path))
    jax.tree.map(np.testing.assert_array_equal, build.initial_params(config, model), params)


@pytest.mark.parametrize("base, warns", [("bfloat16", True), ("float32", False)])
def test_a_base_that_is_rounded_is_said(base, warns, tmp_path, caplog):
    """The folder of the model has float32."""
    folder = golden("hf", "qwen3")
    model, *_ = adapted(folder)
    config = tiny_config(tmp_path / "run", model=f"{folder}/", lora__rank=4, lora__base=base)
    build.initial_params(config, model)
    assert ("lora.base=float32 keeps them" in caplog.text) == warns


def test_an_adapter_that_is_not_finite_is_refused(tmp_path):
    model, params, _, _ = adapted(golden("hf", "qwen3"))
    save_adapter(tmp_path, model, params)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(key for key in tensors if "lora_B" in key)
    tensors[name][1, 2] = np.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=rf"{re.escape(name)}\[1, 2\]: got nan"):
        load_adapter(tmp_path, model, params)


def test_adapters_of_another_kind_are_refused(tmp_path):
    folder = golden("hf", "qwen3")
    model, params, _, _ = adapted(folder)
    save_adapter(tmp_path, model, params)
    path = tmp_path / "adapter_config.json"
    good = json.loads(path.read_text())
    for change, text in (
        ({"r": 8}, "lora.rank=4.*--config.lora.rank=8"),
        ({"lora_alpha": 1}, "lora.alpha=8"),
        ({"peft_type": "IA3"}, "IA3.*merge it"),
        ({"peft_type": "PREFIX_TUNING"}, "no weights of the model can hold it"),
        ({"alora_invocation_tokens": [1]}, "train an adapter without alora"),
        ({"a_key_of_tomorrow": 1}, "a_key_of_tomorrow.*merge it"),
        ({"rank_pattern": {"q_proj": 2}}, "the shape of .*q_proj.*copy both files"),
        ({"rank_pattern": {"(a*)*": 2}}, "rank_pattern.*names in full"),
        ({"rank_pattern": {"q_proj": "2"}}, "rank_pattern: q_proj.*a number above 0"),
        ({"alpha_pattern": {"q_proj": 0}}, "alpha_pattern: q_proj.*a number above 0"),
        ({"alpha_pattern": {"(q_proj": 1}}, "alpha_pattern"),
    ):
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(InputError, match=text):
            load_adapter(tmp_path, model, params)
    path.write_text(json.dumps(good))
    fewer, start, _, _ = adapted(folder, targets=("q_proj",))
    with pytest.raises(
        InputError, match=r"has .* tensors that the model does not have.*lora.targets=down_proj,"
    ):
        load_adapter(tmp_path, fewer, start)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\xff" * 9)
    with pytest.raises(InputError, match="not readable"):
        load_adapter(tmp_path, model, params)
    with pytest.raises(InputError, match="'q_prj'.*self_attn.q_proj"):
        adapted(folder, targets=("q_proj", "q_prj"))


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_codes_are_near_the_weight_and_a_second_coding_changes_nothing(kind):
    def coded(w, axis=1):
        return compiled(quantise)(w, kind=kind, axis=axis)

    def back_from(codes, scales, axis=1):
        return compiled(dequantise)(codes, scales, kind=kind, axis=axis, dtype=jnp.float32)

    w = jax.random.normal(jax.random.key(0), (3, 96, 5))
    codes, scales = coded(w)
    assert codes.shape == w.shape and scales.shape == (3, 96 // block_of(96), 5) == (3, 2, 5)
    back = back_from(codes, scales)
    step = {"int8": 0.5 / 127, "nf4": 0.16}[kind]  # half the widest gap between levels
    w, back = np.asarray(w), np.asarray(back)
    assert np.abs(back - w).max() <= step * np.abs(w).max() * 1.001
    np.testing.assert_array_equal(back_from(*coded(back)), back)
    assert not np.any(back_from(*coded(jnp.zeros((64, 1)), axis=0), axis=0))


@pytest.mark.parametrize(("base", "bound"), [("nf4", 0.6), slow("int8", 0.05)])
def test_a_quantised_base_computes_what_its_merged_weights_compute(base, bound):
    model, params, plain, _ = adapted(golden("hf", "qwen3"), base=base)
    params, batch = moved(params), tokens()
    got = logits(model, params, batch)
    exact = dataclasses.replace(model.config.lora, base="float32")
    exact = dataclasses.replace(model, config=dataclasses.replace(model.config, lora=exact))
    want = logits(exact, moved(weights(str(golden("hf", "qwen3")), exact)), batch)
    relative = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert 1e-5 < relative < bound
    np.testing.assert_allclose(logits(plain, lora.merge(model, params), batch), got, atol=2e-3)
    held = sum(x.size for p, x in flattened(params).items() if p[-1] == "codes")
    assert held > 0 and not any(
        p[-1] == "weight" for p in flattened(params)
    )  # no linear map of the layers is held twice


def test_the_optimizer_holds_the_adapters_alone():
    model, params, _, _ = adapted(golden("hf", "qwen3"), head="scalar")
    state = start_training(model, params, optax.adam(1e-3))
    trained = flattened(state.params)
    assert set(p[-1] for p in trained) == {"lora_a", "lora_b", "head"}
    sizes = sum(x.size for x in trained.values())
    assert sum(x.size for x in jax.tree.leaves(state.opt_state)) == 2 * sizes + 1
    for path, x in flattened(state.frozen).items():
        assert x is flattened(params)[path]


def with_adapters(folder, **changes):
    """A PPO run with adapters after a supervised phase; KL to the reference in the loss."""
    changes = {
        "lora__rank": 4,
        "lora__base": "float32",
        "algorithm__kl_in_loss": 0.05,
        "dataflow": "ppo",
        "algorithm__advantage": "gae",
        **changes,
    }
    return tiny_config(folder, **changes)


def pointers(tree) -> set[int]:
    return {
        shard.data.unsafe_buffer_pointer()
        for x in jax.tree.leaves(tree)
        for shard in x.addressable_shards
    }


@pytest.mark.slow
def test_a_run_is_not_continued_on_another_base(tmp_path, caplog):
    plain = Model(folder_config(vocab_size=320, layers=1), one_device())
    base = write_tokenizer(write_folder(tmp_path / "base", plain, tensors_of(plain)))
    rows = [{"text": f"the {i} answer is"} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = dict(
        model=f"{base}/",
        dataflow="sft",
        data__train=str(tmp_path / "rows.jsonl"),
        algorithm=AlgorithmConfig(),
        lora__rank=4,
        lora__base="float32",
        offline__examples_per_step=4,
        offline__max_tokens=16,
        sft__steps=0,
        evaluate__every_steps=0,
    )
    allowed = ("steps",)
    run = tmp_path / "run"
    train_on_one(tiny_config(run, **fields, steps=1))
    load_policy(run)
    assert "another SHA-256" not in caplog.text
    file = base / "model.safetensors"
    tensors = {name: x * 2 for name, x in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    load_policy(run)
    assert "model.safetensors: another SHA-256" in caplog.text
    with pytest.raises(InputError, match="not those that the adapters of this run were trained on"):
        train_on_one(tiny_config(run, **fields, steps=2, checkpoint__allow_changed=allowed))
    allowed += ("model",)
    train_on_one(tiny_config(run, **fields, steps=2, checkpoint__allow_changed=allowed))


@pytest.mark.slow
def test_actor_critic_and_reference_share_one_base(tmp_path):
    config = with_adapters(tmp_path, sft__steps=0)
    with Run(build_setup(config), tmp_path) as run:
        params = build.initial_params(run.config, run.setup.model)
        before = jax.device_get(params)
        run.begin(run.setup.main, params)
        base = pointers(run.roles["actor"].state.frozen)
        for step in range(2):
            metrics = run.step()
            actor, critic = run.roles["actor"], run.roles["critic"]
            assert pointers(actor.state.frozen) == base, step
            # The critic has no output head; everything else of its base is the actor's.
            assert pointers(critic.state.frozen) < base
            reference = run.roles["reference"]
            assert base < pointers(reference.params)
            assert pointers(reference.params) - base == pointers(
                reference.model.split(reference.params)[0]
            )
        assert metrics["ref_kl/k3"] > 0 and metrics["optimizer_steps"] == 2
        after = jax.device_get(run.roles["actor"].state.weights)
        for path, x in flattened(after).items():
            same = np.array_equal(x, flattened(before)[path])
            assert same != (path[-1] in lora.LEAVES), path
        head = run.roles["critic"].state.params["head"]
        assert np.any(head)


@pytest.mark.slow
def test_a_run_resumes_bitwise_and_its_checkpoints_hold_adapters_alone(tmp_path):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    small = dict(steps=4, sft__steps=2, evaluate__every_steps=0)
    train_on_one(with_adapters(whole, **small))  # the run above is on eight
    train_on_one(with_adapters(parted, **{**small, "steps": 2}))
    train_on_one(with_adapters(parted, **small, checkpoint__allow_changed=("steps",)))
    step = newest_step(whole)
    one, other = checkpoint_bytes(whole, step), checkpoint_bytes(parted, step)
    assert one == other
    assert policy_bytes(whole) == policy_bytes(parted)
    names = [path for path in one if "params" in path or "reference" in path]
    assert names and all("lora_" in path or "head" in path for path in names)
    assert (whole / "adapter" / "adapter_model.safetensors").exists()
    # The exported policy is the base with the adapters merged, and so is what evaluation loads (the
    # run merged on one device, this merges on eight: sums in another order).
    saved = load_policy(whole)
    merged = flattened(lora.merge(saved.model, saved.params))
    plain = dataclasses.replace(saved.model, config=lora.without(saved.model.config))
    exported = flattened(load_params(whole / "policy", plain))
    for path, x in merged.items():
        np.testing.assert_allclose(x, exported[path], rtol=0, atol=1e-7)
    again = load_adapter(whole / "adapter", saved.model, saved.params)
    jax.tree.map(np.testing.assert_array_equal, again, saved.params)


def reward_folder(folder, tmp_path, **changes):
    """A copy of a reward model's folder, with changes to its config.json."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    told = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**told, **changes}))
    return tmp_path


def inputs(config, model, params=None) -> build.RoleInputs:
    """What a role of this policy is made of."""
    setup = SimpleNamespace(config=config, model=model, tokenizer=CharTokenizer("abc"))
    return build.RoleInputs("", setup, None, params or {})


@pytest.mark.slow
@pytest.mark.parametrize("rank", lanes([2], [0]))
def test_a_critic_starts_from_a_reward_model_and_its_own_settings(tmp_path, rank):
    folder = golden("hf", "qwen3_seqcls")
    other = reward_folder(folder, tmp_path / "rm", rms_norm_eps=0.5)
    policy = Model(load_config(folder, remat="none"), make_mesh(devices=jax.devices()[:1]))
    config = tiny_config(tmp_path, critic_model=f"{other}/", lora__rank=rank)
    model, params = scalar_start(inputs(config, policy))
    plain = Model(load_config(other, remat="none"), policy.mesh, "scalar")
    assert model.config.norm_eps == 0.5
    got, want = values(model, params, tokens()), values(plain, load_params(other, plain), tokens())
    np.testing.assert_allclose(got, want, atol=0.05 if rank else 1e-6)  # a bfloat16 base
    for path, x in flattened(model.abstract()).items():
        assert flattened(params)[path].dtype == x.dtype, path
    assert params["head"].dtype == jnp.float32 and np.any(params["head"])
    wrong = reward_folder(folder, tmp_path / "wrong", vocab_size=321)
    with pytest.raises(InputError, match="another vocabulary"):
        scalar_start(inputs(tiny_config(tmp_path, critic_model=f"{wrong}/"), policy))


def test_a_critic_starts_from_a_process_reward_model(tmp_path):
    """Of two labels, as TRL trains them, the value is the log-odds of the second."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    kind = transformers.AutoModelForTokenClassification
    folder = golden("hf", "qwen3")
    theirs = kind.from_pretrained(folder, num_labels=2, attn_implementation="eager")
    with torch.no_grad():
        theirs.score.bias.copy_(torch.tensor([0.3, -0.2]))
    theirs.save_pretrained(tmp_path / "prm")
    batch = tokens()
    with torch.no_grad():
        want = theirs(torch.tensor(np.asarray(batch.tokens))).logits.numpy()
    mesh = make_mesh(devices=jax.devices()[:1])
    prm = Model(load_config(tmp_path / "prm", remat="none"), mesh, "scalar")
    params = load_params(tmp_path / "prm", prm)
    np.testing.assert_allclose(prm.token_scores(params, batch), want, atol=1e-3)
    policy = Model(load_config(folder, remat="none"), mesh)
    config = tiny_config(tmp_path, critic_model=f"{tmp_path}/prm/")
    model, params = scalar_start(inputs(config, policy))
    got = values(model, params, batch)
    np.testing.assert_allclose(got[:, 1:], (want[..., 1] - want[..., 0])[:, :-1], atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("family", lanes(["gemma2"], ["deepseek_v3", "qwen3", "qwen3_moe"]))
def test_kl_to_the_reference_starts_at_exactly_0_in_bfloat16(family, tmp_path):
    folder = golden("hf", family)
    mesh = make_mesh(devices=jax.devices()[:1])
    model = Model(load_config(folder, remat="none", dtype="bfloat16"), mesh)
    params = jax.tree.map(  # no bfloat16 numbers
        lambda x: jax.device_put(np.asarray(x) * x.dtype.type(1.0037), x.sharding),
        load_params(folder, model),
    )
    config = tiny_config(tmp_path, model_settings__dtype="bfloat16")
    frozen = inputs(config, model, params).frozen(model)
    low = sum(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(frozen))
    assert low >= 7  # it does take less memory
    one, other = (logprobs(model, p, tokens())[0] for p in (params, frozen))
    np.testing.assert_array_equal(one, other)
