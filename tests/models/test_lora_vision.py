"""Adapters of the vision tower: reached by name, beside frozen weights, and as peft has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import golden, lanes
from test_families import loaded, rows
from test_lora import adapted, moved

from rljax.errors import InputError
from rljax.models.adapters import lora
from rljax.models.huggingface.peft import load_adapter, save_adapter
from rljax.models.trees import flattened

FAMILIES = lanes(["qwen3_vl"], ["qwen2_5_vl"])


def case(family, targets):
    """(model with adapters, its weights, the plain model, its weights, rows with images, io)."""
    _, plain, _, io = loaded(family)
    model, params, plain, base = adapted(golden("hf", family), targets=targets)
    return model, params, plain, base, rows(io, vision=plain.config.vision), io


def real(logits, batch):
    return np.asarray(logits)[np.asarray(batch.segment_ids) > 0]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_computes_the_same_of_images_and_reads_what_we_saved(family, tmp_path):
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model, params, plain, base, batch, io = case(family, ("visual.*", "q_proj"))
    of_tower = {p for p in flattened(params) if p[0] == "vision" and p[-1] in lora.LEAVES}
    assert {path[1] for path in of_tower} >= {"blocks", "merger"}
    before = jax.jit(plain.logits)(base, batch)
    np.testing.assert_array_equal(jax.jit(model.logits)(params, batch), before)
    params = moved(params)
    got = jax.jit(model.logits)(params, batch)
    assert np.abs(real(got, batch) - real(before, batch)).max() > 0.02
    merged = jax.jit(plain.logits)(lora.merge(model, params), batch)
    np.testing.assert_allclose(real(got, batch), real(merged, batch), atol=1e-3)
    save_adapter(tmp_path, model, params)
    auto = transformers.AutoModelForImageTextToText
    theirs = auto.from_pretrained(golden("hf", family), attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path)
    theirs_of_tower = {n for n, _ in theirs.named_parameters() if "lora_" in n and "visual" in n}
    stacked = {p: flattened(params)[p].shape[0] if p[1] != "merger" else 1 for p in of_tower}
    assert len(theirs_of_tower) == sum(stacked.values())
    feed = {
        k: torch.tensor(io[k])
        for k in ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")
    }
    image = torch.tensor(np.asarray(io["input_ids"]) == theirs.config.image_token_id)
    with torch.no_grad():
        want = theirs(**feed, mm_token_type_ids=image.int()).logits.numpy()
    np.testing.assert_allclose(real(got, batch), real(want, batch), atol=2e-3)
    read = flattened(load_adapter(tmp_path, model, case(family, ("visual.*", "q_proj"))[1]))
    for path, x in flattened(params).items():
        np.testing.assert_array_equal(read[path], x)


@pytest.mark.slow
def test_the_gradient_reaches_the_adapters_of_the_tower_alone():
    model, params, _, _, batch, _ = case("qwen3_vl", ("visual.blocks.*",))
    own, base = model.split(moved(params))
    assert {path[:2] for path in flattened(own)} == {("vision", "blocks")}

    @jax.jit
    def gradient(own, base):
        def loss(own):
            return jnp.sum(
                jnp.sin(model.logprobs(lora.nested(flattened(own) | flattened(base)), batch)[0])
            )

        return jax.grad(loss)(own)

    for path, x in flattened(gradient(own, base)).items():
        assert np.abs(x).max() > 0, path


def test_the_tower_is_reached_by_name_alone():
    _, params, *_ = case("qwen3_vl", ("*",))
    assert not any(p[0] == "vision" and p[-1] in lora.LEAVES for p in flattened(params))
    with pytest.raises(InputError, match=r"lora.targets.*visual.merger.linear_fc1"):
        case("qwen3_vl", ("visual.blocks.attn.q_proj",))
