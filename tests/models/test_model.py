"""The decoder against Hugging Face: logits, log-probs, gradients, cached decoding, and the way back
to disk."""

import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import golden, lanes

from rljax.batch import batch_from_rows
from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models.families import from_hf_config, to_hf_config
from rljax.models.huggingface import load_config, load_params, save_params
from rljax.models.model import TRANSPOSED_STEPS, Model

FAMILIES = lanes(["qwen3"], ["llama3", "qwen2"])  # the logits of all: test_families


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    folder = golden("hf", request.param)
    model = Model(load_config(folder, remat="none"), make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    io = np.load(folder / "io.npz")
    lengths = io["attention_mask"].sum(axis=1)
    batch = batch_from_rows(
        jnp.asarray(io["input_ids"], jnp.int32),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(io["attention_mask"], jnp.float32),
    )
    return folder, model, load_params(folder, model), batch, io


@pytest.mark.slow  # test_families has it of these, too
def test_logits_equal_hugging_face(family):
    _, model, params, batch, io = family
    got = jax.jit(model.logits)(params, batch)
    keep = io["attention_mask"][..., None] > 0
    np.testing.assert_allclose(np.where(keep, got, 0), np.where(keep, io["logits"], 0), atol=2e-4)


@pytest.mark.slow
def test_logprobs_and_loss_gradient_equal_hugging_face(family):
    _, model, params, batch, io = family
    mask = jnp.asarray(io["attention_mask"][:, 1:], jnp.float32)

    def loss(params):
        logp = model.logprobs(params, batch)[0][:, 1:]
        return -jnp.sum(mask * logp) / jnp.sum(mask), logp

    (value, logp), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(logp * mask, io["token_logprobs"] * mask, atol=1e-4)
    np.testing.assert_allclose(value, io["loss"], rtol=1e-5)
    norm = np.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(norm, io["grad_global_norm"], rtol=1e-4)
    np.testing.assert_allclose(gradient["embedding"], io["grad/embed_tokens"], atol=1e-4)


@pytest.mark.slow  # the greedy continuation of test_families goes the same way
def test_cached_decoding_equals_the_full_forward(family):
    _, model, params, batch, io = family
    columns = batch.tokens.shape[1]
    first = batch_from_rows(batch.tokens[:, :4], jnp.full(batch.rows, 4), batch.mask[:, :4])
    caches = model.prefill(params, first, columns)
    decode = jax.jit(lambda p, t, c, k: model.decode_step(model.unstack(p), t, c, k))
    for t in range(4, columns):
        at = jnp.full((batch.rows,), t, jnp.int32)
        logits, caches = decode(params, batch.tokens[:, t], at, caches)
        keep = io["attention_mask"][:, t, None] > 0
        want = np.where(keep, io["logits"][:, t], 0)
        np.testing.assert_allclose(np.where(keep, logits, 0), want, atol=3e-4)


def test_on_one_cpu_the_weights_of_a_long_dispatch_are_the_first_operands(family):
    """As [out, in], which the library of products reads as it is: each gives [out, rows]."""
    _, model, params, batch, io = family
    if model.config.family != "qwen3":
        pytest.skip("one family is enough: the others share its linear maps")
    caches = model.empty_caches(batch.rows, 8)
    at = jnp.full((batch.rows,), 3, jnp.int32)

    def step(steps):
        return lambda p, t, c, k: model.decode_step(model.unstack(p, steps), t, c, k)

    by, first = {}, {}
    for steps in (1, TRANSPOSED_STEPS):
        compiled = jax.jit(step(steps)).lower(params, batch.tokens[:, 3], at, caches).compile()
        by[steps] = compiled(params, batch.tokens[:, 3], at, caches)[0]
        products = re.findall(r"= f32\[(\d+),\d+\]\S* dot\(", compiled.as_text())
        first[steps] = {int(x) for x in products} - {batch.rows}
    np.testing.assert_allclose(by[1], by[TRANSPOSED_STEPS], atol=1e-5)
    config = model.config
    wide = {config.heads * config.head_dim, config.kv_heads * config.head_dim}
    assert first[TRANSPOSED_STEPS] >= wide | {config.mlp, config.embed}
    assert not first[1] & wide


@pytest.mark.slow
def test_remat_changes_memory_not_numbers(family):
    _, model, params, batch, _ = family
    if model.config.family != "qwen3":
        pytest.skip("one family is enough: remat wraps the layer, whatever is in it")
    again = dataclasses.replace(model, config=dataclasses.replace(model.config, remat="full"))

    def total(m):
        return jax.jit(jax.grad(lambda p: jnp.sum(m.logprobs(p, batch)[0])))(params)

    for a, b in zip(jax.tree.leaves(total(model)), jax.tree.leaves(total(again)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_a_saved_folder_loads_to_the_same_weights_and_config(family, tmp_path):
    folder, model, params, _, _ = family
    save_params(tmp_path, model, params, bos_id=1, eos_ids=(2,), pad_id=0)
    assert load_config(tmp_path, remat="none") == model.config
    again = load_params(tmp_path, model)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    # Both spellings of config.json give one ModelConfig.
    legacy = json.loads((folder / "config.legacy.json").read_text())
    assert from_hf_config(legacy, remat="none") == model.config
    assert from_hf_config(to_hf_config(model.config, eos_ids=(1, 2)), remat="none") == model.config


@pytest.mark.slow
def test_sharded_loading_gives_the_logits_of_one_device(family):
    folder, model, params, batch, _ = family
    spread = Model(model.config, make_mesh(1, 4, 2))
    placed = load_params(folder, spread)
    want = jax.jit(model.logits)(params, batch)
    keep = np.asarray(batch.mask)[..., None] > 0
    got = np.asarray(jax.jit(spread.logits)(placed, batch))
    np.testing.assert_allclose(np.where(keep, got, 0), np.where(keep, want, 0), atol=2e-4)


def test_settings_that_would_be_ignored_are_refused(tmp_path):
    config = json.loads((golden("hf", "qwen3") / "config.json").read_text())
    for change, pattern in (
        (
            {
                "layer_types": None,
                "use_sliding_window": True,
                "sliding_window": 0,
                "max_window_layers": 0,
            },
            "window",
        ),
        ({"layer_types": ["chunked_attention"] * 2, "use_sliding_window": True}, "chunked"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "short_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "relu"}, "relu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"model_type": "mamba"}, "mamba"),
    ):
        with pytest.raises(InputError, match=pattern):
            from_hf_config({**config, **change})


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path):
    source = golden("hf", "qwen3")
    model = Model(load_config(source), make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    shutil.copy(source / "model.safetensors", tmp_path)
    config, full = json.loads((source / "config.json").read_text()), ["full_attention"]
    for change, pattern in (
        ({"num_hidden_layers": 3, "layer_types": full * 3}, r"lacks.*model\.layers\.2"),
        ({"num_hidden_layers": 1, "layer_types": full}, r"does not use.*model\.layers\.1"),
        ({"intermediate_size": 80}, r"mlp.*has shape \(64, 96\).*\(64, 80\)"),
    ):
        changed = Model(from_hf_config({**config, **change}), model.mesh)
        with pytest.raises(InputError, match=pattern):
            load_params(tmp_path, changed)


def test_switches_that_are_off_do_not_refuse_a_published_config():
    """Qwen2.5's own config.json says use_mrope: false."""
    config = json.loads((golden("hf", "qwen2") / "config.legacy.json").read_text())
    assert from_hf_config({**config, "use_mrope": False}) == from_hf_config(config)
    with pytest.raises(InputError, match="use_mrope"):
        from_hf_config({**config, "use_mrope": True})
