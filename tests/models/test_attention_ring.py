"""Ring attention: rows whose tokens are split over devices give the values and gradients of one
device, in memory that falls with the number of devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes
from test_attention import (
    assert_same,
    make_packed,
    make_request,
    packed_segments,
    spread,
    value_and_gradients,
)

from rljax.errors import InputError
from rljax.models import attention_xla
from rljax.models.attention import attention

RING = dict(context_attention="ring")
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
MESHES = (
    dict(context=4, tensor=2),
    dict(context=3),
    dict(data=2, expert=2, context=2),
    dict(context=8),
    dict(context=2, tensor=2, fsdp=2),
    dict(context=4),
    dict(context=2),
    dict(fsdp=2, context=3),
)


def random_case(seed: int):
    """(arrays, options, mesh, queries at a time): heads that need not divide by context, rows of
    several segments with padding, and a window, soft cap and sinks in some."""
    draw = np.random.default_rng(seed)
    mesh = dict(data=1, fsdp=1) | MESHES[seed % len(MESHES)]
    kv_heads = int(draw.integers(1, 4))
    heads = kv_heads * int(draw.integers(1, 4)) * mesh.get("tensor", 1)
    rows, tokens = int(draw.integers(1, 5)), int(draw.integers(3, 60))
    lengths = []
    for _ in range(rows):
        cuts = np.sort(draw.integers(1, tokens + 1, size=int(draw.integers(1, 5))))
        lengths.append([n for n in np.diff(cuts, prepend=0) if n])
    e, f = (int(n) for n in draw.choice([4, 8, 12], size=2))

    def of(*shape):
        return jnp.asarray(draw.normal(size=shape), jnp.float32)

    arrays = [2 * of(rows, tokens, heads, e), of(rows, tokens, kv_heads, e)]
    arrays += [of(rows, tokens, kv_heads, f), jnp.asarray(packed_segments(lengths, tokens))]
    sinks = of(heads) if draw.random() < 0.4 else None
    window = int(draw.integers(1, 2 * tokens)) if draw.random() < 0.4 else 0
    cap = 2.0 if draw.random() < 0.3 else 0.0
    options = dict(scale=0.3, window=window, soft_cap=cap)
    return (*arrays, sinks), options, spread(mesh), int(draw.choice([4, 7, 128]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", lanes([4], [*range(4), *range(5, 64)]))
def test_a_ring_gives_the_values_and_gradients_of_one_device(seed, monkeypatch):
    arrays, options, mesh, queries = random_case(seed)
    want = value_and_gradients(*arrays, impl="reference", **options)
    monkeypatch.setattr(attention_xla, "QUERY_BLOCK", queries)
    value_and_gradients.clear_cache()
    got = value_and_gradients(*arrays, impl="xla", mesh=mesh, **RING, **options)
    assert_same(got, want, 2e-5)


def test_a_window_does_not_reach_round_the_ring():
    """One segment over all four devices: the last one's tokens arrive at the first, which are later
    than its own and yet, by the hop, within the window."""
    arrays, options = make_request("window", 24, ((24,),))
    mesh = spread(dict(data=1, fsdp=1, context=4))
    want = value_and_gradients(*arrays, impl="reference", **options)
    got = value_and_gradients(*arrays, impl="xla", mesh=mesh, **RING, **options)
    assert_same(got, want, 2e-5)


def named_in_blocks(segments, prefix):
    """The same packed rows, with segments counted from 1 in every block."""
    segments, (ids, blocks, _) = np.asarray(segments), jax.tree.map(np.asarray, prefix)
    size = segments.shape[1] // blocks.shape[1]
    named, continued = np.zeros_like(segments), np.zeros_like(segments)
    for row, column in np.ndindex(segments.shape):
        block = column // size
        for out, name, of in (
            (named, segments[row, column], block),
            (continued, ids[row, column], blocks[row, block]),
        ):
            there = segments[row, of * size : (of + 1) * size]
            out[row, column] = np.searchsorted(np.unique(there[there > 0]), name) + 1 if name else 0
    assert len(np.unique(named)) < len(np.unique(segments))
    return jnp.asarray(named), prefix._replace(ids=jnp.asarray(continued))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("everything", dict(context=4)), slow("sinks", dict(context=2, tensor=2, fsdp=2))],
)
def test_rows_that_share_prefixes_in_a_ring(name, sizes):
    arrays, options, prefix = make_packed(name)
    segments, prefix = named_in_blocks(arrays[3], prefix)
    arrays = *arrays[:3], segments, arrays[4]
    mesh = spread(dict(data=1, fsdp=1) | sizes)
    want = value_and_gradients(*arrays, prefix, impl="reference", **options)
    got = value_and_gradients(*arrays, prefix, impl="xla", mesh=mesh, **RING, **options)
    assert_same(got, want, 2e-5)


# The kernel's blocks are of 128 tokens, so a window of 5 reaches over two of four devices.
@pytest.mark.parametrize(
    ("name", "tokens", "lengths", "window"),
    [
        slow("sinks", 18, ((9, 1, 6),), 0),
        ("everything", 18, ((9, 1, 6),), 5),
        slow("values_narrower", 1310, ((700, 3, 500), (1300,)), 0),
        slow("everything", 1310, ((700, 3, 500), (1300,)), 500),
    ],
)
def test_the_kernel_of_tpus_at_every_hop(name, tokens, lengths, window):
    arrays, options = make_request(name, tokens, lengths)
    options["window"] = window
    mesh = spread(dict(data=1, fsdp=1, context=2 if tokens < 100 else 4))
    want = value_and_gradients(*arrays, impl="reference", **options)
    got = value_and_gradients(*arrays, impl="splash", mesh=mesh, **RING, **options)
    assert_same(got, want, 2e-5)


@pytest.mark.slow
def test_bfloat16_is_summed_in_float32():
    arrays, options = make_request("everything", dtype=jnp.bfloat16)
    mesh = spread(dict(data=1, fsdp=1, context=4))
    got = value_and_gradients(*arrays, impl="xla", mesh=mesh, **RING, **options)
    exact = [None if x is None else jnp.asarray(x, jnp.float32) for x in arrays[:3]]
    want = value_and_gradients(*exact, *arrays[3:], impl="reference", **options)
    assert_same(got, want, 3e-2)


def forward(heads, tokens, window=0, context=4, **how):
    """The forward pass over `context` devices, traced."""
    mesh = spread(dict(data=1, fsdp=1, context=context))
    q = jax.ShapeDtypeStruct((1, tokens, heads, 8), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    run = functools.partial(attention, mesh=mesh, scale=1.0, window=window, impl="xla", **how)
    return jax.jit(run).trace(q, q, q, ids)


def test_heads_that_do_not_divide_go_in_a_ring_and_others_are_traded():
    traded = dict(context_attention="heads")  # six of them padded to eight
    for heads, how, ring in ((8, {}, False), (6, {}, True), (8, RING, True), (6, traded, False)):
        text = str(forward(heads, 64, **how).jaxpr)
        assert ("ppermute" in text) == ring and ("all_to_all" in text) != ring, (heads, how)
    with pytest.raises(InputError, match="context_attention: got 'rings'.*auto, heads, ring"):
        forward(6, 64, context_attention="rings")


def test_only_devices_within_a_window_send_their_keys():
    """16 tokens a device of 8: a window of 17 reaches into the one before, one of 18 into two."""
    programs = [forward(6, 128, window, 8).lower().compile().as_text() for window in (1, 17, 18)]
    assert [text.count(" collective-permute(") for text in programs] == [0, 2, 4]


def bytes_of_gradient(tokens: int, context: int) -> int:
    """Temporaries of the gradient of attention over one row, on each of `context` devices."""
    mesh = spread(dict(data=1, fsdp=1, context=context))
    split = jax.NamedSharding(mesh, jax.P(None, "context"))
    shape = jax.ShapeDtypeStruct((1, tokens, 6, 8), jnp.float32, sharding=split)
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    run = functools.partial(attention, mesh=mesh, scale=1.0, impl="xla", **RING)

    def loss(q, k, v, segments):
        return jnp.sum(run(q, k, v, segments) ** 2)

    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape, ids)
    return program.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_goes_with_the_tokens_of_a_device():
    of_four, of_eight = (bytes_of_gradient(4096, n) for n in (4, 8))
    assert of_eight < 0.6 * of_four
    assert of_eight < 4096 * 4096 * 4 / 8  # less than the scores of one head


@pytest.mark.slow
def test_longer_rows_on_more_devices_take_the_same_memory():
    # As many tokens on a device as 4,096 on four.
    assert bytes_of_gradient(8192, 8) < 1.1 * bytes_of_gradient(4096, 4)
