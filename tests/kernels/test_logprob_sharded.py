"""kernels.logprob over a mesh of eight devices: the numbers of one device, whatever is split and
whatever does not divide; no device holds the whole head."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rljax.kernels.logprob import sharded, token_logprobs
from rljax.mesh import BATCH_AXES, make_mesh

MESHES = {
    "fsdp=8": dict(fsdp=8),
    "tensor=4 x fsdp=2": dict(fsdp=2, tensor=4),
    "data=2 x tensor=2 x context=2": dict(data=2, fsdp=1, tensor=2, context=2),
}
# B, S, D, V: all divide; then none does (the rows by 2, the vocabulary by none); then of fsdp=8 the
# embed axis alone, whose devices have the same rows
SHAPES = {"fitting": (8, 6, 16, 264), "odd": (6, 5, 9, 257), "same rows": (6, 5, 16, 257)}


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def data(shape, vocab_first, dtype):
    b, s, d, v = shape
    rng = np.random.default_rng(v)
    head = rng.normal(size=(v, d) if vocab_first else (d, v))
    targets = rng.integers(0, v, (b, s))
    arrays = jnp.asarray(rng.normal(size=(b, s, d)), dtype), jnp.asarray(head, dtype)
    return (*arrays, jnp.asarray(targets, jnp.int32))


def program(mesh, vocab_first, soft_cap=4.0, **options):
    """The values, and gradients of a sum that bends each: one function for each set of options, and
    for each size of tiles."""
    return _program(mesh, vocab_first, soft_cap, sharded.TILE_BYTES, **options)


@functools.cache
def _program(mesh, vocab_first, soft_cap, tile_bytes, **options):
    def total(hidden, head, targets, temperature):
        found = token_logprobs(
            hidden,
            head,
            targets,
            temperature=temperature,
            soft_cap=soft_cap,
            vocab_first=vocab_first,
            with_greedy=True,
            mesh=mesh,
            **options,
        )
        weights = (1.0, 0.3, -0.2)
        return sum(w * jnp.sum(jnp.sin(x)) for w, x in zip(weights, found[:3], strict=True)), found

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))


def place(mesh, hidden, head, targets, vocab_first):
    """As the model has them, where they divide."""

    def put(x, *spec):
        names = [spec[i] if x.shape[i] % size(spec[i]) == 0 else None for i in range(x.ndim)]
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*names)))

    def size(axes):
        axes = (axes,) if isinstance(axes, str) else axes or ()
        return int(np.prod([mesh.shape[a] for a in axes]))

    of_head = ("tensor", "fsdp") if vocab_first else ("fsdp", "tensor")
    rows = (BATCH_AXES, "context", None)
    return put(hidden, *rows), put(head, *of_head), put(targets, *rows)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("fsdp=8", "same rows"),
        ("tensor=4 x fsdp=2", "odd"),
        ("data=2 x tensor=2 x context=2", "fitting"),
        slow("fsdp=8", "fitting"),
        slow("fsdp=8", "odd"),
        slow("tensor=4 x fsdp=2", "fitting"),
        slow("data=2 x tensor=2 x context=2", "odd"),
    ],
)
def test_a_mesh_says_what_one_device_says(name, shape, monkeypatch):
    vocab_first = name != "fsdp=8"
    # Tiles of 128 tokens of the vocabulary: of 264 two and a rest.
    monkeypatch.setattr(sharded, "TILE_BYTES", 1)
    mesh = make_mesh(**MESHES[name])
    # Float32 has a path of its own where all divides; what does not divide is seen to 1e-10.
    precisions = [(np.float32, 1e-6)] * (shape == "fitting") + [(np.float64, 1e-10)]
    for dtype, tolerance in precisions:
        with jax.enable_x64(dtype == np.float64):
            arrays = data(SHAPES[shape], vocab_first, dtype)
            (_, want), want_gradients = program(None, vocab_first, impl="xla")(*arrays, 0.7)
            placed = place(mesh, *arrays, vocab_first)
            (_, got), gradients = program(mesh, vocab_first)(*placed, 0.7)
            pairs = zip((*got, *gradients), (*want, *want_gradients), strict=True)
            for one, other in pairs:
                scale = np.max(np.abs(other))
                np.testing.assert_allclose(one, other, rtol=0, atol=3 * tolerance * scale)


def test_extreme_shards_and_words_of_probability_zero():
    """One shard whose logits are all -inf, and one whose logits are far below the others'."""
    mesh = make_mesh(fsdp=1, tensor=4, data=2)
    hidden, head, targets = (np.array(x) for x in data((2, 3, 4, 32), False, np.float32))
    hidden[..., 0] = 10.0
    head[0] -= 100  # all logits near -1000: a shard that is empty must not count as 0
    head[0, :8], head[0, 8:16] = -3e38, -1e3  # 10 x -3e38 is -inf in float32
    arrays = jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(np.maximum(targets, 16))
    (_, want), want_gradients = program(None, False, 0.0, impl="reference")(*arrays, 0.7)
    (_, got), gradients = program(mesh, False, 0.0)(*place(mesh, *arrays, False), 0.7)
    rounding = 2 * np.spacing(np.float32(1000))  # of logits of this size
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-3 * np.max(np.abs(other)) + rounding)
    for one, other in zip(gradients, want_gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-3 * np.max(np.abs(other)))


def test_the_head_is_never_whole_and_logits_never_move():
    """In the compiled program of eight devices: what is gathered is a tile, what is summed over
    tensor is numbers per row and gradients, no logits."""
    mesh = make_mesh(fsdp=2, tensor=4)
    b, s, d, v = 4, 8, 64, 4096
    arrays = place(mesh, *data((b, s, d, v), False, np.float32), False)
    tile = 128
    text = None
    before = sharded.TILE_BYTES
    try:
        sharded.TILE_BYTES = tile * d * 4
        text = program(mesh, False).lower(*arrays, 0.7).compile().as_text()
    finally:
        sharded.TILE_BYTES = before
    gathered = re.findall(r"= \(?(?:f32|bf16)\[([\d,]+)\][^=]* all-gather(?:-start)?\(", text)
    sizes = [int(np.prod([int(n) for n in shape.split(",")])) for shape in gathered]
    assert sizes and max(sizes) == tile * d
    assert not re.findall(rf"f32\[{b * s // 2},{v // 4}\]", text)
    assert not re.findall(rf"f32\[[\d,]*{v}\]", text)


# -- a head with padding behind its vocabulary --


PADDED = [("fitting", 250), ("odd", 256), ("odd", 40)]
BEHIND = [("fsdp=8", "fitting", 250), ("tensor=4 x fsdp=2", "odd", 40)]
ALL = [(m, *s) for m in ("one device", *MESHES) for s in PADDED]


@pytest.mark.parametrize(
    ("name", "shape", "entries"), [*BEHIND, *(slow(*case) for case in ALL if case not in BEHIND)]
)
def test_what_is_behind_the_vocabulary_is_in_no_softmax_and_gets_no_gradient(
    name, shape, entries, monkeypatch
):
    """As if the head ended there, whatever its padding holds; 40: devices of tensor have none."""
    vocab_first = name != "fsdp=8"
    monkeypatch.setattr(sharded, "TILE_BYTES", 1)
    mesh = None if name == "one device" else make_mesh(**MESHES[name])
    hidden, head, targets = data(SHAPES[shape], vocab_first, np.float32)
    targets = targets % entries
    axis = 0 if vocab_first else 1
    cut = jnp.asarray(np.take(np.asarray(head), np.arange(entries), axis=axis))
    # Logits that would be nearly all of the softmax.
    behind = (slice(entries, None),) if vocab_first else (slice(None), slice(entries, None))
    head = np.array(head)
    head[behind] *= 50
    head = jnp.asarray(head)
    (_, want), want_gradients = program(None, vocab_first, impl="xla")(hidden, cut, targets, 0.7)
    arrays = (hidden, head, targets)
    placed = arrays if mesh is None else place(mesh, *arrays, vocab_first)
    (_, got), gradients = program(mesh, vocab_first, entries=entries)(*placed, 0.7)
    assert not np.any(np.asarray(gradients[1])[behind])
    kept = np.take(np.asarray(gradients[1]), np.arange(entries), axis=axis)
    pairs = zip((*got, gradients[0], kept), (*want, *want_gradients), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=0, atol=3e-6 * np.max(np.abs(other)))


def test_a_target_behind_the_vocabulary_has_no_log_prob():
    hidden, head, targets = data(SHAPES["odd"], False, np.float32)
    (_, found), _ = program(None, False, entries=200)(hidden, head, targets, 1.0)
    np.testing.assert_array_equal(np.isnan(found[0]), np.asarray(targets) >= 200)
    assert np.isfinite(found[1]).all() and np.isfinite(found[2]).all()


def test_a_head_without_padding_is_the_same_program():
    arrays = data(SHAPES["odd"], False, np.float32)
    texts = [
        program(None, False, entries=entries).lower(*arrays, 1.0).as_text() for entries in (0, 257)
    ]
    assert texts[0] == texts[1]


@pytest.mark.slow  # each run but the first reads the programs of the tests above from that cache
def test_a_program_from_the_cache_on_disk_says_the_same(monkeypatch):
    """There the order of collectives that do not wait for each other is lost: those of the last,
    shorter tile met those of the others, and wrote past their buffers (jaxlib 0.10.2, CPU)."""
    monkeypatch.setattr(sharded, "TILE_BYTES", 1)
    mesh = make_mesh(fsdp=8)
    arrays = place(mesh, *data(SHAPES["fitting"], False, np.float32), False)
    fresh = _program.__wrapped__
    (_, want), want_gradients = fresh(mesh, False, 4.0, 1)(*arrays, 0.7)
    jax.clear_caches()
    (_, got), gradients = fresh(mesh, False, 4.0, 1)(*arrays, 0.7)
    for one, other in zip((*got, *gradients), (*want, *want_gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
