"""Vision: both towers against Hugging Face, and what the features of an image may not depend on."""

import dataclasses
import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import golden, lanes
from flax import nnx
from safetensors.numpy import load_file
from vision_weights import pieces_below, vision_definition, vision_params

from rljax.data.images.rows import expand_image_tokens, image_rows, mrope_positions, patch_coords
from rljax.errors import InputError
from rljax.mesh import make_mesh, row_sharding, weight_sharding
from rljax.models.config import Rope
from rljax.models.decoder import rope_angles
from rljax.models.layers import apply_rope
from rljax.models.multimodal import (
    add_features,
    insert_features,
    mrope_angles,
    mrope_axes,
    vision_tokens,
)
from rljax.models.trees import nested
from rljax.models.vision.config import VisionConfig, from_hf_vision, to_hf_vision
from rljax.models.vision.names import VISION_NAMES
from rljax.models.vision.tower import attend_within

FAMILIES = ("qwen2_5_vl", "qwen3_vl")


def run_tower(config, params, pixels, coords):
    return nnx.merge(vision_definition(config)[0], params)(pixels, coords)


tower = jax.jit(run_tower, static_argnums=0)


@dataclasses.dataclass(frozen=True)
class Family:
    hf: dict
    config: VisionConfig
    tensors: dict
    params: dict
    io: dict

    @property
    def segments(self):
        return self.io["attention_mask"]

    def rows(self, **options):
        io = self.io
        return image_rows(
            io["input_ids"],
            self.segments,
            io["pixel_values"],
            io["image_grid_thw"],
            self.config,
            **options,
        )


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    folder = golden("hf", request.param)
    hf = json.loads((folder / "config.json").read_text())
    config = from_hf_vision(hf)
    tensors = load_file(folder / "model.safetensors")
    below = {n.split("visual.", 1)[1]: t for n, t in tensors.items() if "visual." in n}
    assert set(below) == set(pieces_below(config))
    return Family(
        hf, config, tensors, vision_params(config, below), dict(np.load(folder / "io.npz"))
    )


with_windows = pytest.mark.parametrize("family", lanes(["qwen2_5_vl"], ["qwen3_vl"]), indirect=True)
with_deepstack = pytest.mark.parametrize(
    "family", lanes(["qwen3_vl"], ["qwen2_5_vl"]), indirect=True
)


def row_features(features, coords, config):
    """The features of real patches, rows one after the other, as Hugging Face returns them."""
    real = np.asarray(coords)[:, :: config.merge_area, 0] > 0
    return np.asarray(features)[real]


# -- the tower --


def test_image_features_equal_hugging_face(family):
    pixels, coords = family.rows()
    assert pixels.shape[0] == 2 and len(np.unique(coords[:, :, 0])) > 2  # a row has two images
    features, deepstack = tower(family.config, family.params, pixels, coords)
    got = row_features(features, coords, family.config)
    np.testing.assert_allclose(got, family.io["image_features"], atol=1e-4)
    assert deepstack.shape == (len(family.config.deepstack_layers), *features.shape)


@pytest.mark.slow
@with_deepstack
def test_padding_patches_may_hold_nan_and_the_gradient_flows(family):
    config = family.config
    pixels, coords = family.rows()
    pixels, coords = family.rows(patches=pixels.shape[1] + 8)
    padded = np.where(coords[..., :1] > 0, pixels, np.nan)
    assert np.isnan(padded).any()

    def loss(params, pixels):
        features, deepstack = run_tower(config, params, pixels, coords)
        real = (coords[:, :: config.merge_area, :1] > 0).astype(jnp.float32)
        return jnp.sum(jnp.sin(features) * real) + jnp.sum(jnp.cos(deepstack) * real[None])

    run = jax.jit(jax.value_and_grad(loss))
    want, want_grad = run(family.params, pixels)
    got, got_grad = run(family.params, padded)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    flat = jax.tree_util.tree_leaves_with_path(want_grad)
    for (path, a), b in zip(flat, jax.tree.leaves(got_grad), strict=True):
        scale = np.abs(a).max()
        np.testing.assert_allclose(b, a, atol=1e-4 * scale + 1e-6, err_msg=str(path))
        assert scale > 0, path  # every weight takes part


@with_windows
def test_a_row_is_the_same_alone_and_two_images_do_not_see_each_other(family):
    config, params = family.config, family.params
    pixels, coords = family.rows()
    features, deepstack = tower(config, params, pixels, coords)
    b = int(np.argmax(coords[:, :, 0].max(axis=1)))
    assert coords[b, :, 0].max() == 2
    alone, _ = tower(config, params, pixels[b : b + 1], coords[b : b + 1])
    np.testing.assert_allclose(alone[0], features[b], atol=1e-5)
    second = np.flatnonzero(coords[b, :, 0] == 2)
    one, one_coords = np.zeros_like(pixels[:1]), np.zeros_like(coords[:1])
    one[0, : len(second)], one_coords[0, : len(second)] = pixels[b, second], coords[b, second]
    one_coords[0, : len(second), 0] = 1
    got, got_deep = tower(config, params, one, one_coords)
    count = len(second) // config.merge_area
    at = slice(second[0] // config.merge_area, second[0] // config.merge_area + count)
    np.testing.assert_allclose(got[0, :count], features[b, at], atol=1e-5)
    np.testing.assert_allclose(got_deep[:, 0, :count], deepstack[:, b, at], atol=1e-5)


@with_windows
def test_a_sharded_tower_gives_the_features_of_one_device(family):
    config, mesh = family.config, make_mesh(1, 4, 2)
    shapes = vision_definition(config)[1]
    shardings = nested(
        {path: weight_sharding(mesh, ".".join(path), *x) for path, x in shapes.items()}
    )
    pixels, coords = (np.concatenate([x, x]) for x in family.rows())
    want, want_deep = tower(config, family.params, pixels, coords)
    graph = vision_definition(config)[0]

    @jax.jit
    def spread(params, pixels, coords):
        return nnx.merge(graph, params)(pixels, coords, mesh)

    rows = jax.device_put((pixels, coords), row_sharding(mesh))
    got, got_deep = spread(jax.device_put(family.params, shardings), *rows)
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(got_deep, want_deep, atol=1e-5)


@with_deepstack
@pytest.mark.parametrize(
    "dtype, near", [("float16", 0.008), pytest.param("bfloat16", 0.05, marks=pytest.mark.slow)]
)
def test_numbers_of_two_bytes_stay_near_float32(family, dtype, near):
    config = dataclasses.replace(family.config, dtype=dtype, remat="none")
    pixels, coords = family.rows()
    features, _ = tower(config, family.params, pixels, coords)
    assert features.dtype == jnp.dtype(dtype)
    want = family.io["image_features"]
    got = row_features(features.astype(jnp.float32), coords, config)
    assert np.abs(got - want).max() < near * np.abs(want).max()


@with_deepstack
def test_the_program_does_not_grow_with_depth(family):
    def size(layers):
        last = {"deepstack_layers": (1,)} if family.config.deepstack_layers else {}
        config = dataclasses.replace(family.config, layers=layers, **last)
        graph, shapes = vision_definition(config)
        params = nested({p: jax.ShapeDtypeStruct(s, jnp.float32) for p, (s, _) in shapes.items()})
        pixels, coords = jnp.zeros((1, 8, config.patch_values)), jnp.zeros((1, 8, 4), jnp.int32)
        text = jax.jit(run_tower, static_argnums=0).lower(config, params, pixels, coords).as_text()
        return len(text.splitlines())

    assert size(24) == size(6)


@with_windows
def test_blocks_are_recomputed_backwards_only_when_asked(family):
    pixels, coords = family.rows()

    def kept(remat):  # numbers that the backward pass keeps of the forward pass
        config = dataclasses.replace(family.config, remat=remat, layers=24)
        shapes = vision_definition(config)[1]
        params = nested({p: jnp.zeros(s) for p, (s, _) in shapes.items()})

        def run(p):
            return jax.vjp(lambda p: run_tower(config, p, pixels, coords), p)[1]

        return sum(x.size for x in jax.tree.leaves(jax.eval_shape(run, params)))

    assert kept("full") < kept("none") / 2


def test_attention_in_blocks_of_queries_equals_attention_at_once(monkeypatch):
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, 21, 2, 8)) for key in keys)
    frames = jnp.asarray(np.arange(2 * 21).reshape(2, 21) // 9, jnp.int32)
    windows = jnp.asarray(np.arange(2 * 21).reshape(2, 21) % 3, jnp.int32)

    def total(q, k, v):
        return jnp.sum(jnp.sin(attend_within(q, k, v, frames, windows)))

    want = jax.jit(jax.value_and_grad(total, (0, 1, 2)))(q, k, v)
    monkeypatch.setattr("rljax.models.vision.tower.QUERY_BLOCK", 8)
    got = jax.jit(jax.value_and_grad(lambda *x: total(*x), (0, 1, 2)))(q, k, v)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


# -- the text side --


@pytest.mark.parametrize("side", ["", "left_"])
def test_multimodal_positions_equal_hugging_face(family, side):
    io, grids = family.io, family.io["image_grid_thw"]
    ids, mask = io[side + "input_ids"], io[side + "attention_mask"]
    positions, delta = mrope_positions(ids, mask, grids, family.config)
    np.testing.assert_array_equal(positions.transpose(2, 0, 1), io[side + "mrope_position_ids"])
    np.testing.assert_array_equal(delta, io["rope_deltas"][:, 0])
    assert positions.dtype == delta.dtype == np.int32


def text_logits(family, tokens, segments, x, where, deepstack, positions):
    """The text model of these folders in plain JAX: what a decoder has to do with our pieces."""
    text = family.hf["text_config"]
    below = "model.language_model." if family.config.family == "qwen3_vl" else "model."

    def get(name):
        return jnp.asarray(family.tensors[below + name])

    heads, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    e = text.get("head_dim", text["hidden_size"] // heads)
    rope = text["rope_parameters"]
    frequency = rope["rope_theta"] ** (-jnp.arange(0, e, 2) / e)
    interleaved = rope.get("mrope_interleaved", False)
    cos, sin = mrope_angles(positions, frequency, rope["mrope_section"], interleaved)
    column = jnp.arange(tokens.shape[1])
    allowed = (column[:, None] >= column[None, :])[None] & (segments[:, None, :] > 0)

    def norm(x, name):
        y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + text["rms_norm_eps"])
        return y * jnp.expand_dims(get(name + ".weight"), tuple(range(x.ndim - 1)))

    def linear(x, name, bias=False):
        y = x @ get(name + ".weight").T
        return y + get(name + ".bias")[None, None] if bias else y

    if where is not None:
        x = insert_features(get("embed_tokens.weight")[tokens], where, x)
    for i in range(text["num_hidden_layers"]):
        at, biased = f"layers.{i}.", family.config.family == "qwen2_5_vl"
        y = norm(x, at + "input_layernorm")
        q, k, v = (
            linear(y, f"{at}self_attn.{n}_proj", biased).reshape(*y.shape[:2], -1, e) for n in "qkv"
        )
        if not biased:
            q, k = norm(q, at + "self_attn.q_norm"), norm(k, at + "self_attn.k_norm")
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        k, v = (jnp.repeat(z, heads // kv_heads, axis=2) for z in (k, v))
        scores = jnp.einsum("bshe,bthe->bhst", q, k) / np.sqrt(e)
        weights = jax.nn.softmax(jnp.where(allowed[:, None], scores, -1e30), axis=-1)
        y = jnp.einsum("bhst,bthe->bshe", weights, v).reshape(*y.shape[:2], -1)
        x = x + linear(y, at + "self_attn.o_proj")
        y = norm(x, at + "post_attention_layernorm")
        y = jax.nn.silu(linear(y, at + "mlp.gate_proj")) * linear(y, at + "mlp.up_proj")
        x = x + linear(y, at + "mlp.down_proj")
        if i < len(deepstack):
            x = add_features(x, where, deepstack[i])
    return norm(x, "norm") @ jnp.asarray(family.tensors["lm_head.weight"]).T


@pytest.mark.slow  # the whole model, with the same images: test_families
@pytest.mark.parametrize("side", ["", "left_"])
def test_the_pieces_make_the_whole_model(family, side):
    io, config = family.io, family.config
    ids, mask = io[side + "input_ids"], io[side + "attention_mask"]
    pixels, coords = image_rows(ids, mask, io["pixel_values"], io["image_grid_thw"], config)
    positions, _ = mrope_positions(ids, mask, io["image_grid_thw"], config)
    if side:  # the left-padded logits were recorded with these positions
        positions = io["left_mrope_position_ids"].transpose(1, 2, 0)
    features, deepstack = tower(config, family.params, pixels, coords)
    where = vision_tokens(ids, mask, None, config)
    logits = text_logits(family, ids, mask, features, where, deepstack, positions)
    keep = mask[..., None] > 0
    want = np.where(keep, io[side + "logits"], 0)
    np.testing.assert_allclose(np.where(keep, logits, 0), want, atol=2e-3)


def test_equal_positions_give_plain_rotary_angles():
    frequency = jnp.asarray(10_000.0 ** (-np.arange(8) / 8), jnp.float32)
    plain = np.arange(12).reshape(2, 6)
    positions = jnp.asarray(np.repeat(plain[..., None], 3, axis=-1))
    for section, interleaved in (((2, 3, 3), False), ((4, 2, 2), True)):
        cos, sin = mrope_angles(positions, frequency, section, interleaved)
        angles = jnp.asarray(plain, jnp.float32)[..., None] * frequency[None, None]
        np.testing.assert_array_equal(cos, jnp.cos(angles))
        np.testing.assert_array_equal(sin, jnp.sin(angles))
    assert mrope_axes((2, 3, 3), False).tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert mrope_axes((4, 2, 2), True).tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
    with pytest.raises(InputError, match="adds up to half of head_dim, 8"):
        mrope_angles(positions, frequency, (2, 3, 2), False)
    with pytest.raises(InputError, match="entry 2 reaches frequency 11 of 8"):
        mrope_axes((2, 2, 4), True)


SMALL = VisionConfig(
    family="qwen2_5_vl",
    layers=1,
    embed=8,
    mlp=8,
    heads=1,
    out_embed=8,
    activation="silu",
    image_token_id=90,
    video_token_id=91,
    start_token_id=92,
    end_token_id=93,
    channels=1,
    patch_size=1,
    temporal_patch_size=1,
    window_size=4,
    tokens_per_second=2.0,
)
STAMPED = dataclasses.replace(SMALL, tokens_per_second=0.0)  # as Qwen3-VL: no time in positions


@pytest.mark.slow
def test_features_go_to_image_tokens_that_the_policy_did_not_choose():
    tokens = jnp.array([[5, 90, 90, 7, 90, 90], [0, 0, 5, 91, 6, 90]])
    segments = jnp.array([[1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]])
    mask = jnp.array([[0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0.0]])
    where = vision_tokens(tokens, segments, mask, SMALL)
    assert where.tolist() == [
        [False, True, True, False, False, False],
        [False] * 3 + [True, False, True],
    ]
    assert not (where & (mask > 0)).any()
    features = jnp.arange(1, 7, dtype=jnp.float32).reshape(2, 3, 1)  # the third is padding
    x = jnp.full((2, 6, 1), -1.0)
    insert, add = jax.jit(insert_features), jax.jit(add_features)
    placed = insert(x, where, features)[..., 0]
    assert placed.tolist() == [[-1, 1, 2, -1, -1, -1], [-1, -1, -1, 4, -1, 5]]
    assert add(x, where, features)[..., 0].tolist() == [
        [-1, 0, 1, -1, -1, -1],
        [-1, -1, -1, 3, -1, 4],
    ]
    few = insert(x, where, features[:, :1])[..., 0]  # tokens past the features stay words
    assert few.tolist() == [[-1, 1, -1, -1, -1, -1], [-1, -1, -1, 4, -1, -1]]
    grad = jax.jit(jax.grad(lambda f: jnp.sum(insert_features(x, where, f))))(features)[..., 0]
    assert grad.tolist() == [[1, 1, 0], [1, 1, 0]]


def test_positions_restart_in_packed_segments_and_go_on_past_the_policys_words():
    # Segment 1: word, image of 1 x 2 tokens, word. Segment 2: image of 2 x 2, and one that the
    # policy wrote.
    tokens = np.array([[5, 90, 90, 5, 90, 90, 90, 90, 7, 90, 0]])
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 0]])
    chosen = np.zeros_like(tokens)
    chosen[0, 8:10] = 1
    grids = np.array([[1, 2, 4], [1, 4, 4]])
    positions, delta = mrope_positions(tokens, segments, grids, SMALL, policy_mask=chosen)
    assert positions[0, :, 0].tolist() == [0, 1, 1, 3, 0, 0, 0, 0, 2, 3, 0]
    assert positions[0, :, 1].tolist() == [0, 1, 1, 3, 0, 0, 1, 1, 2, 3, 0]
    assert positions[0, :, 2].tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 0]
    assert delta.tolist() == [4 - 6]  # the next token of segment 2, its seventh, is at 6 - 2


def test_decoding_goes_on_at_column_plus_delta():
    """The sampler extends a prompt by (column, delta); the trainer sees the whole row at once."""
    prompt, response = [5, 90, 90, 90, 90, 6], [7, 90, 8]
    grids = np.array([[1, 4, 4]])
    prompts = np.array([prompt])
    _, delta = mrope_positions(prompts, prompts > 0, grids, SMALL)
    row = np.array([prompt + response + [0]])
    chosen = np.array([[0] * len(prompt) + [1] * len(response) + [0]])
    positions, after = mrope_positions(row, row > 0, grids, SMALL, policy_mask=chosen)
    columns = len(prompt) + np.arange(len(response))
    want = np.repeat((columns + delta[0])[:, None], 3, axis=1)
    np.testing.assert_array_equal(positions[0, columns], want)
    assert delta.tolist() == after.tolist() == [-2]


def test_positions_of_videos():
    tokens = np.array([[5, 91, 91, 91, 91, 5]])
    grids = np.array([[2, 2, 4]])
    options = dict(video_grids=grids, seconds_per_grid=[1.75])
    positions, delta = mrope_positions(tokens, tokens > 0, [], SMALL, **options)
    # Frames are floor(2 tokens per second * 1.75 s) = 3 positions apart.
    assert positions[0, :, 0].tolist() == [0, 1, 1, 4, 4, 5]
    assert positions[0, :, 2].tolist() == [0, 1, 2, 1, 2, 5]
    assert delta.tolist() == [0]
    # With timestamps in the text each frame is a run of its own.
    tokens = np.array([[5, 91, 91, 5, 91, 91]])
    positions, _ = mrope_positions(tokens, tokens > 0, [], STAMPED, video_grids=grids)
    assert positions[0, :, 0].tolist() == [0, 1, 1, 3, 4, 4]
    pixels, coords = image_rows(
        tokens,
        tokens > 0,
        None,
        None,
        STAMPED,
        video_pixels=np.arange(16.0)[:, None],
        video_grids=grids,
    )
    assert pixels[0, :, 0].tolist() == list(range(16))
    assert coords[0, :, 0].tolist() == [1] * 8 + [2] * 8 and not coords[0, :, 1].any()


def test_rows_keep_their_own_images_in_the_order_of_the_text():
    tokens = np.array([[90, 5, 91, 91, 0], [5, 5, 5, 5, 5], [0, 5, 90, 5, 90]])
    values, clips = np.arange(12.0)[:, None], 100 + np.arange(8.0)[:, None]
    grids, video_grids = np.array([[1, 2, 2]] * 3), np.array([[2, 2, 2]])
    pixels, coords = image_rows(
        tokens, tokens > 0, values, grids, SMALL, video_pixels=clips, video_grids=video_grids
    )
    assert pixels[0, :, 0].tolist() == [0, 1, 2, 3, *range(100, 108)]
    assert coords[0, :, 0].tolist() == [1] * 4 + [2] * 8
    assert coords[0, :, 1].tolist() == [0] * 8 + [1] * 4
    assert not coords[1].any() and pixels[2, :8, 0].tolist() == list(range(4, 12))
    # Rows split: the images of the last row alone are the same patches.
    part, part_coords = image_rows(
        tokens[2:], tokens[2:] > 0, values[4:], grids[1:], SMALL, patches=12
    )
    np.testing.assert_array_equal(part, pixels[2:])
    np.testing.assert_array_equal(part_coords, coords[2:])
    text = np.full((2, 3), 5)
    pixels, coords = image_rows(text, text > 0, np.zeros((0, 1)), [], SMALL)
    assert pixels.shape == (2, 4, 1) and not coords.any()  # one program serves text alone


def test_patches_of_one_token_are_neighbours():
    coords = patch_coords((1, 2, 4), 2).tolist()
    assert coords[:4] == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]
    assert coords[4:] == [[0, 0, 2], [0, 0, 3], [0, 1, 2], [0, 1, 3]]


@pytest.mark.parametrize(
    ("tokens", "grids", "says"),
    [
        ([[5, 5], [90, 5]], [[1, 2, 4]], r"row 1 has 1 image tokens.*grid \(1, 2, 4\) fills 2"),
        ([[90, 90], [90, 5]], [[1, 2, 4]], "row 1 has 1 image tokens for which no image is left"),
        ([[90, 5], [5, 5]], [[1, 2, 2]] * 2, "1 image grids are left over.*got 1"),
        ([[90, 5], [5, 5]], [[1, 3, 2]], "multiple of 2"),
        ([[91, 5], [5, 5]], [], "row 0 has 1 video tokens for which no video is left"),
    ],
)
def test_images_that_do_not_fit_the_text_are_named(tokens, grids, says):
    tokens = np.array(tokens)
    with pytest.raises(InputError, match=says):
        mrope_positions(tokens, tokens > 0, np.array(grids), SMALL)


def test_an_image_does_not_run_over_into_the_next_segment():
    with pytest.raises(InputError, match="row 0 has 1 image tokens in a run.*fills 2"):
        mrope_positions(np.array([[90, 90]]), np.array([[1, 2]]), np.array([[1, 2, 4]]), SMALL)


def test_pixels_that_do_not_fit_the_grids_are_named():
    tokens, grids = np.array([[90, 5]]), np.array([[1, 2, 2]])
    with pytest.raises(InputError, match=r"image pixel values.*\(3, 1\).*\(4, 1\)"):
        image_rows(tokens, tokens > 0, np.zeros((3, 1)), grids, SMALL)
    with pytest.raises(InputError, match="row 0 holds 4"):
        image_rows(tokens, tokens > 0, np.zeros((4, 1)), grids, SMALL, patches=0)


def test_one_image_token_in_the_prompt_becomes_as_many_as_the_image_has():
    grids = [(1, 2, 4), (1, 2, 2)]
    assert expand_image_tokens([92, 90, 93, 90], grids, SMALL) == [92, 90, 90, 93, 90]
    with pytest.raises(InputError, match="1 image tokens for 2 images.*id 90"):
        expand_image_tokens([90], grids, SMALL)


# -- configuration and names --


def test_both_spellings_of_config_json_and_back(family):
    folder = golden("hf", family.config.family)
    legacy = json.loads((folder / "config.legacy.json").read_text())
    assert from_hf_vision(legacy) == family.config
    assert from_hf_vision(to_hf_vision(family.config)) == family.config
    # Published spelling: channels by another name, no rope, the model's own model_type.
    vision = {k: v for k, v in legacy["vision_config"].items() if "rope" not in k}
    vision |= {"in_chans": vision.pop("in_channels"), "model_type": family.config.family}
    assert from_hf_vision({**legacy, "vision_config": vision}) == family.config


def test_towers_as_published():
    two = {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    }
    three = {
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 4304,
        "model_type": "qwen3_vl",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    config = from_hf_vision({"model_type": "qwen2_5_vl", "vision_config": two})
    assert (config.window, config.head_dim, config.patch_values) == (4, 80, 1176)
    assert config.image_token_id == 151655 and not config.deepstack_layers
    written = to_hf_vision(dataclasses.replace(config, tokens_per_second=2.0))["vision_config"]
    assert isinstance(written["tokens_per_second"], int)  # transformers 5 takes no 2.0
    config = from_hf_vision({"model_type": "qwen3_vl", "vision_config": three})
    assert (config.position_grid, config.head_dim, config.patch_values) == (48, 72, 1536)
    assert config.deepstack_layers == (8, 16, 24) and not config.tokens_per_second


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_act": "relu"}, "hidden_act.*relu"),
        ({"spatial_patch_size": 7}, "spatial_patch_size.*patch_size, which is 6"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope.*yarn"),
        ({"attention_sinks": 4}, "attention_sinks.*silently ignore"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"num_heads": 3}, "multiple of 4"),
        ({"model_type": "siglip"}, "siglip"),
        ({"depth": "two"}, "depth.*must be a number"),
    ],
)
def test_settings_of_the_tower_that_would_be_ignored_are_refused(family, change, says):
    vision = {**family.hf["vision_config"], **change}
    with pytest.raises(InputError, match=says):
        from_hf_vision({**family.hf, "vision_config": vision})


def test_weights_go_to_disk_and_back(family):
    config, pieces = family.config, pieces_below(family.config)
    modules = {".".join(p.path[1:-1]) or p.path[-1] for p in pieces.values()}
    assert modules == set(VISION_NAMES[config.family])
    below = {n.split("visual.", 1)[1]: t for n, t in family.tensors.items() if "visual." in n}
    for name, piece in pieces.items():
        node = family.params
        for key in piece.path[1:]:
            node = node[key]
        assert node[piece.index].shape == piece.shape
        assert piece.disk_shape == below[name].shape
        np.testing.assert_array_equal(piece.theirs(node[piece.index]), below[name])


def test_yarn_scales_the_angles_of_images_like_those_of_text():
    rope = Rope(1e4, "yarn", 4.0, 16, sections=(2, 3, 3))
    at = jnp.arange(24).reshape(2, 12)
    one = rope_angles(at, rope, 16)
    three = rope_angles(jnp.stack([at] * 3, axis=-1), rope, 16)
    assert rope.amplitude > 1.1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), one, three)


# -- against transformers itself --


def transformers_tower(config, seed=0):
    """(Hugging Face's tower with random weights, the same as our parameters)."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as two
    from transformers.models.qwen3_vl import modeling_qwen3_vl as three

    vision = to_hf_vision(config)["vision_config"]
    torch.manual_seed(seed)
    if config.family == "qwen2_5_vl":
        made = two.Qwen2_5_VLVisionConfig(**vision, attn_implementation="eager")
        model = two.Qwen2_5_VisionTransformerPretrainedModel(made)
    else:
        made = three.Qwen3VLVisionConfig(**vision, attn_implementation="eager")
        model = three.Qwen3VLVisionModel(made)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2)
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    return model.eval(), vision_params(config, tensors)


@pytest.mark.parametrize("name", FAMILIES)
def test_videos_partial_windows_and_deepstack_equal_transformers(name):
    if (
        importlib.util.find_spec("torch") is None
        or importlib.util.find_spec("transformers") is None
    ):
        pytest.skip("transformers and torch are not installed")
    import torch

    shared = dict(
        family=name,
        layers=5,
        embed=24,
        mlp=20,
        heads=2,
        out_embed=12,
        image_token_id=90,
        video_token_id=91,
        start_token_id=92,
        end_token_id=93,
        channels=3,
        patch_size=4,
    )
    two = dict(activation="silu", window_size=24, full_attention_layers=(1, 4), tokens_per_second=2)
    three = dict(activation="gelu_tanh", position_grid=5, deepstack_layers=(0, 2, 4))
    config = VisionConfig(**shared, **(two if name == "qwen2_5_vl" else three))
    model, params = transformers_tower(config)
    grids = np.array([[1, 10, 8], [2, 6, 14], [1, 2, 2]])  # windows are 3 x 3 merged patches
    pixels = np.random.default_rng(0).normal(size=(80 + 168 + 4, config.patch_values))
    pixels = pixels.astype(np.float32)
    with torch.no_grad():
        out = model(torch.from_numpy(pixels), torch.from_numpy(grids))
    number = np.repeat([1, 2, 3], np.prod(grids, axis=1))[:, None]
    coords = np.concatenate([patch_coords(tuple(g), 2) for g in grids.tolist()])
    coords = np.concatenate([number, coords], axis=1).astype(np.int32)
    features, deepstack = tower(config, params, pixels[None], coords[None])
    np.testing.assert_allclose(features[0], out.pooler_output.numpy(), rtol=1e-4, atol=1e-3)
    levels = getattr(out, "deepstack_features", None) or []
    assert len(levels) == len(deepstack)
    for ours, theirs in zip(deepstack, levels, strict=True):
        np.testing.assert_allclose(ours[0], theirs.numpy(), rtol=1e-4, atol=1e-3)
