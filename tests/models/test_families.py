"""Every model folder of the golden vectors against the numbers that transformers computed with it:
logits (right- and left-padded), hidden states, log-probs, gradients, greedy continuation with the
cache; and back to disk, where transformers loads what we saved.

The folders are walked, of tests/golden and of $RLJAX_GOLDEN (default ../shared/golden/public): a
model put there later is checked without another line here.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import FURTHER, GOLDEN, lanes
from conftest import golden as golden_folder

from rljax.batch import Batch
from rljax.data.images.rows import image_rows, mrope_positions
from rljax.mesh import make_mesh
from rljax.models.families import from_hf_config, to_hf_config
from rljax.models.huggingface import load_config, load_params, save_params
from rljax.models.model import TRANSPOSED_STEPS, Model
from rljax.models.names import disk_pieces

FOLDERS = {p.parent.name: p.parent for r in (GOLDEN, FURTHER) for p in r.glob("hf/*/config.json")}
ATOL = 1e-3  # of float32 logits; the folder's README


@functools.cache
def loaded(name: str):
    """(folder, model, params, the stored arrays) on one device."""
    folder = FOLDERS.get(name) or golden_folder("hf", name)
    io = dict(np.load(folder / "io.npz"))
    classifies = "SequenceClassification" in json.loads(str(io["__meta__"]))["architecture"]
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    config = load_config(folder, remat="none")
    model = Model(config, mesh, "scalar" if classifies else "lm")
    return folder, model, load_params(folder, model), io


def rows(io, prefix: str = "", vision=None) -> Batch:
    """The stored rows, padded on either side."""
    keep = np.asarray(io[f"{prefix}attention_mask"], np.int32)
    batch = Batch(
        tokens=jnp.asarray(io[f"{prefix}input_ids"], jnp.int32),
        segment_ids=jnp.asarray(keep),
        positions=jnp.asarray(np.maximum(np.cumsum(keep, axis=1) - 1, 0), jnp.int32),
        mask=jnp.asarray(keep, jnp.float32),
    )
    return batch if "pixel_values" not in io else with_images(batch, io, vision)


def with_images(batch: Batch, io, vision) -> Batch:
    """The images of the rows, and the positions that they give the tokens; no token is chosen."""
    tokens, segments = np.asarray(batch.tokens), np.asarray(batch.segment_ids)
    pixels, coords = image_rows(tokens, segments, io["pixel_values"], io["image_grid_thw"], vision)
    positions, _ = mrope_positions(tokens, segments, io["image_grid_thw"], vision)
    return batch.replace(
        pixels=jnp.asarray(pixels),
        patch_coords=jnp.asarray(coords),
        rope_positions=jnp.asarray(positions),
        mask=np.zeros_like(batch.mask),
    )


# One program for both sides of padding, which have one shape.
logits, scores, token_scores, state_values = (
    jax.jit(function, static_argnums=0)
    for function in (Model.logits, Model.scores, Model.token_scores, Model.values)
)


def close(got, want, keep, **tolerance):
    keep = np.asarray(keep)[..., None] > 0
    np.testing.assert_allclose(np.where(keep, got, 0), np.where(keep, want, 0), **tolerance)


@pytest.fixture(scope="module", params=sorted(FOLDERS))
def golden(request):
    return loaded(request.param)


def few(*names: str):
    """Of the models these in the normal lane, and the rest in the slow one."""
    rest = [name for name in sorted(FOLDERS) if name not in names]
    return pytest.mark.parametrize("golden", lanes(names, rest), indirect=True)


@pytest.fixture
def language(golden):
    if golden[1].head != "lm":
        pytest.skip("a sequence-classification model: test_scores")
    return golden


@pytest.mark.parametrize("side", ["", "left_"])
def test_logits(language, side):
    _, model, params, io = language
    batch = rows(io, side, model.config.vision)
    got = logits(model, params, batch)
    close(got, io[f"{side}logits"], batch.segment_ids, atol=ATOL)


@pytest.mark.parametrize("side", ["", "left_"])
def test_scores(golden, side):
    _, model, params, io = golden
    if model.head != "scalar":
        pytest.skip("a language model: test_logits")
    batch = rows(io, side, model.config.vision)
    got = scores(model, params, batch)
    assert got.shape == io[f"{side}logits"].shape == (batch.rows, model.config.labels)
    np.testing.assert_allclose(got, io[f"{side}logits"], atol=ATOL)
    # The value of the state before a token is the score after the one before it.
    each, values = (np.asarray(f(model, params, batch)) for f in (token_scores, state_values))
    np.testing.assert_allclose(values[:, 1:], each[:, :-1, 0], atol=1e-5)


@few("gemma2")
def test_hidden_states(language):
    _, model, params, io = language
    if "hidden_states/0" not in io:
        pytest.skip("no hidden states stored")
    batch = rows(io, vision=model.config.vision)
    for i, got in enumerate(jax.jit(model.hidden_states)(params, batch)):
        close(got, io[f"hidden_states/{i}"], batch.mask, atol=ATOL)
    assert f"hidden_states/{i + 1}" not in io


def _norms_on_disk(model, gradient) -> dict[str, float]:
    """Norm of the gradient of every tensor on disk; experts count as one tensor, as transformers
    holds them."""
    squares: dict[str, float] = {}
    for name, pieces in disk_pieces(model).items():
        for stem, fused in (
            ("gate_proj", "gate_up_proj"),
            ("up_proj", "gate_up_proj"),
            ("down_proj", "down_proj"),
            ("w1", "gate_up_proj"),
            ("w3", "gate_up_proj"),
            ("w2", "down_proj"),
        ):
            before, _, after = name.partition(".experts.")
            if after.endswith(f"{stem}.weight"):
                name = f"{before}.experts.{fused}".replace("block_sparse_moe", "mlp")
        name = name.replace("block_sparse_moe", "mlp")
        for piece in pieces:
            value = functools.reduce(lambda node, key: node[key], piece.path, gradient)
            squares[name] = squares.get(name, 0.0) + float(np.sum(np.square(value[piece.index])))
    return {name: s**0.5 for name, s in squares.items()}


@few("qwen3_moe")  # the custom gradients have tests of their own
def test_logprobs_and_gradients(language):
    _, model, params, io = language
    if "loss" not in io:
        pytest.skip("no gradients stored")
    batch = rows(io, vision=model.config.vision)
    mask = batch.mask[:, 1:]

    def loss(params):
        logp = model.logprobs(params, batch)[0][:, 1:]
        return -jnp.sum(mask * logp) / jnp.sum(mask), logp

    (value, logp), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(logp * mask, io["token_logprobs"] * np.asarray(mask), atol=2e-4)
    np.testing.assert_allclose(value, io["loss"], rtol=1e-5)
    gradient = jax.device_get(gradient)
    np.testing.assert_allclose(gradient["embedding"], io["grad/embed_tokens"], atol=1e-4)
    got = _norms_on_disk(model, gradient)
    for name, want in zip(io["grad_norm_names"].tolist(), io["grad_norms"], strict=True):
        np.testing.assert_allclose(got.pop(name), want, rtol=2e-3, atol=1e-6, err_msg=name)
    # What is left moves no loss: a router's correction bias has no gradient.
    assert all(norm == 0 for norm in got.values()), got


@few("deepseek_v3", "gemma2", "qwen3_vl")  # latents, experts; windows, soft caps; images
def test_greedy_continuation_with_the_cache(language):
    _, model, params, io = language
    keep, want = io["left_attention_mask"], io["greedy_ids"]
    lengths, new = keep.sum(axis=1), want.shape[1]
    columns = keep.shape[1]
    prompts = {"input_ids": np.zeros_like(io["left_input_ids"])}
    for row, length in enumerate(lengths):
        prompts["input_ids"][row, :length] = io["left_input_ids"][row, columns - length :]
    prompts["attention_mask"] = np.arange(columns)[None, :] < lengths[:, None]
    prompts |= {name: io[name] for name in ("pixel_values", "image_grid_thw") if name in io}
    caches = jax.jit(model.prefill, static_argnums=2)(
        params, rows(prompts, vision=model.config.vision), columns + new
    )
    shift = jnp.asarray(io["rope_deltas"][:, 0] if "rope_deltas" in io else 0, jnp.int32)

    @jax.jit
    def decode(params, token, at, caches):
        """The tokens [new, B]; they went on after the end-of-sequence token, too."""
        unstacked = model.unstack(params, TRANSPOSED_STEPS)  # as a long dispatch reads the weights

        def step(carry, _):
            token, at, caches = carry
            logits, caches = model.decode_step(unstacked, token, at, caches, shift)
            token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            return (token, at + 1, caches), token

        return jax.lax.scan(step, (token, at, caches), length=new)[1]

    last = prompts["input_ids"][np.arange(len(lengths)), lengths - 1]
    token, at = jnp.asarray(last, jnp.int32), jnp.asarray(lengths - 1, jnp.int32)
    np.testing.assert_array_equal(decode(params, token, at, caches).T, want)


def first_columns(batch: Batch, count: int) -> Batch:
    return batch.replace(
        **{
            name: getattr(batch, name)[:, :count]
            for name in ("tokens", "segment_ids", "positions", "mask")
        }
    )


@pytest.mark.slow  # the greedy continuation goes the same way
def test_cached_decoding_equals_the_full_forward(language):
    _, model, params, io = language
    batch = rows(io, vision=model.config.vision)
    if batch.pixels is not None:
        pytest.skip("its images do not end at that column: the greedy continuation")
    start = 3
    caches = model.prefill(params, first_columns(batch, start), batch.tokens.shape[1])
    step = jax.jit(lambda p, *args: model.decode_step(model.unstack(p), *args))
    for t in range(start, batch.tokens.shape[1]):
        at = jnp.full((batch.rows,), t, jnp.int32)
        logits, caches = step(params, batch.tokens[:, t], at, caches)
        close(logits, io["logits"][:, t], batch.mask[:, t], atol=ATOL)


def test_both_spellings_and_our_own_give_one_config(golden):
    folder, model, _, _ = golden
    legacy = json.loads((folder / "config.legacy.json").read_text())
    assert from_hf_config(legacy, remat="none") == model.config
    ours = to_hf_config(model.config, head=model.head, eos_ids=(1, 2))
    assert from_hf_config(json.loads(json.dumps(ours)), remat="none") == model.config


@pytest.fixture(scope="module")
def saved(golden, tmp_path_factory):
    folder, model, params, io = golden
    out = tmp_path_factory.mktemp(folder.name)
    save_params(out, model, params, bos_id=1, eos_ids=(2,), pad_id=0)
    return out


@few("deepseek_v3", "gpt_oss", "qwen3_vl")  # transformers, below, reads those of all
def test_a_saved_folder_loads_to_the_same_weights(golden, saved):
    _, model, params, _ = golden
    assert load_config(saved, remat="none") == model.config
    again = load_params(saved, model)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, params, again)


def test_transformers_reads_what_we_saved(golden, saved, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    _, model, _, io = golden
    kind = transformers.AutoModelForSequenceClassification
    if model.head == "lm":
        kind = transformers.AutoModelForCausalLM
    if model.config.vision:
        kind = transformers.AutoModelForImageTextToText
    theirs, report = kind.from_pretrained(
        saved, output_loading_info=True, attn_implementation="eager"
    )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    assert not report["mismatched_keys"], report
    keep = io["attention_mask"]
    given = {"input_ids": io["input_ids"], "attention_mask": keep}
    given |= {name: io[name] for name in ("pixel_values", "image_grid_thw") if name in io}
    if "mrope_position_ids" in io:
        given["position_ids"] = io["mrope_position_ids"]
    with torch.no_grad():
        out = theirs(**{name: torch.tensor(value) for name, value in given.items()})
    got = out.logits.float().numpy()
    if model.head == "lm":
        close(got, io["logits"], keep, atol=ATOL)
        return
    np.testing.assert_allclose(got, io["logits"], atol=ATOL)
    # A process reward model is read at each token.
    kind = transformers.AutoModelForTokenClassification
    theirs, report = kind.from_pretrained(saved, output_loading_info=True)
    assert not any(report[f"{name}_keys"] for name in ("missing", "unexpected", "mismatched"))
    theirs.save_pretrained(tmp_path)
    assert not load_config(tmp_path).head_bias
    assert load_params(tmp_path, model).keys() == load_params(saved, model).keys()
