"""Attention: every path gives the numbers of the rule written out in NumPy, on one device and on
many."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes
from packed_rows import groups_of, packed_rows

from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models import attention_paths, attention_xla
from rljax.models.attention import attention, attention_cached
from rljax.models.attention_paths import PackedPrefix

ONE = make_mesh(1, 1, 1, devices=jax.devices()[:1])
PACKED = ((9, 1, 6), (12,), (3, 11))  # lengths of the segments of each row; what is left is padding
# name: (heads, kv heads, E, F, window, soft cap, sinks)
REQUESTS = {
    "one_kv_head_per_head": (4, 4, 8, 8, 0, 0.0, False),
    "two_heads_per_kv_head": (4, 2, 8, 8, 0, 0.0, False),
    "one_kv_head": (4, 1, 8, 8, 0, 0.0, False),
    "window": (4, 2, 8, 8, 5, 0.0, False),
    "window_of_one": (2, 1, 8, 8, 1, 0.0, False),
    "soft_cap": (4, 2, 8, 8, 0, 2.0, False),
    "sinks": (4, 2, 8, 8, 0, 0.0, True),
    "values_narrower": (4, 4, 12, 8, 0, 0.0, False),
    "everything": (4, 2, 12, 8, 5, 2.0, True),
}


def cases(fast, others) -> list:
    """Parameters of a test that takes several; those of the second list run in the slow lane."""
    return [*fast, *(pytest.param(*case, marks=pytest.mark.slow) for case in others)]


def packed_segments(lengths, tokens):
    out = np.zeros((len(lengths), tokens), np.int32)
    for row, sizes in enumerate(lengths):
        ids = np.repeat(np.arange(len(sizes)) + 1, sizes)
        out[row, : len(ids)] = ids
    return out


def make_request(name, tokens=18, lengths=PACKED, dtype=jnp.float32):
    """(arrays, options): q, k, v, segments, sinks and what `attention` takes by name."""
    heads, kv_heads, e, f, window, cap, with_sinks = REQUESTS[name]
    normal, rows = np.random.default_rng(0).standard_normal, len(lengths)
    q = 2.0 * normal((rows, tokens, heads, e))
    k = normal((rows, tokens, kv_heads, e))
    v = normal((rows, tokens, kv_heads, f))
    sinks = jnp.asarray(normal(heads) + 1, jnp.float32) if with_sinks else None
    arrays = [jnp.asarray(x.astype(dtype)) for x in (q, k, v)]
    segments = jnp.asarray(packed_segments(lengths, tokens))
    return (*arrays, segments, sinks), dict(scale=0.3, window=window, soft_cap=cap)


def make_packed(name, dtype=jnp.float32):
    """`make_request` for packed rows that share prefixes, and the Prefix."""
    batch, _ = packed_rows(groups_of(np.random.default_rng(0), 50))
    rows, tokens = batch.tokens.shape
    arrays, options = make_request(name, tokens, [[tokens]] * rows, dtype)
    prefix = PackedPrefix(
        *map(jnp.asarray, (batch.prefix_ids, batch.prefix_blocks, batch.positions))
    )
    return (*arrays[:3], jnp.asarray(batch.segment_ids), arrays[4]), options, prefix


def by_hand(q, k, v, segments, sinks, prefix=None, *, scale, window, soft_cap):
    """The rule, one query at a time in float64; zeros where the query is padding."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    segments, prefix = np.asarray(segments), jax.tree.map(np.asarray, prefix)
    rows, tokens, heads, _ = q.shape
    out = np.zeros((rows, tokens, heads, v.shape[-1]))
    for b, t, h in itertools.product(range(rows), range(tokens), range(heads)):
        if segments[b, t] == 0:
            continue
        first = max(0, t - window + 1) if window else 0
        seen = [s for s in range(first, t + 1) if segments[b, s] == segments[b, t]]
        if prefix is not None and prefix.ids[b, t]:
            nearest = prefix.positions[b, t] - window if window else -1
            (before,) = np.nonzero(segments[b] == prefix.ids[b, t])
            seen += [s for s in before if prefix.positions[b, s] > nearest]
        kv = h * k.shape[2] // heads
        scores = scale * k[b, seen, kv] @ q[b, t, h]
        if soft_cap:
            scores = soft_cap * np.tanh(scores / soft_cap)
        total = np.exp(scores).sum() + (np.exp(float(sinks[h])) if sinks is not None else 0.0)
        out[b, t, h] = np.exp(scores) @ v[b, seen, kv] / total
    return out


OPTIONS = ("impl", "mesh", "scale", "window", "soft_cap", "context_attention", "queries")


@functools.partial(jax.jit, static_argnames=OPTIONS)
def value_and_gradients(
    q, k, v, segments, sinks, prefix=None, *, impl, mesh=ONE, queries=None, **options
):
    """(outputs at real tokens, gradients of a loss that reads only those). `queries` tells programs
    apart that a test traces with another QUERY_BLOCK."""
    real = segments[:, :, None, None] > 0

    def loss(q, k, v, sinks):
        how = dict(sinks=sinks, prefix=prefix, mesh=mesh, impl=impl, **options)
        out = attention(q, k, v, segments, **how)
        out = jnp.where(real, out.astype(jnp.float32), 0.0)
        return jnp.sum(jnp.sin(out) * jnp.arange(1.0, 1.0 + out.shape[-1])[None, None, None]), out

    (_, out), gradients = jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(
        q, k, v, sinks
    )
    return out, gradients


def assert_same(got, want, tolerance):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1, np.abs(b).max()))


@pytest.mark.parametrize(
    ("name", "packed"),
    cases(
        [("everything", False), ("everything", True)],
        [*((n, False) for n in REQUESTS if n != "everything"), ("window", True)],
    ),
)
def test_the_reference_is_the_rule_in_double_precision(name, packed):
    (q, k, v, segments, sinks), options = make_request(name)
    prefix = None
    if packed:
        (q, k, v, segments, sinks), options, prefix = make_packed(name)
    with jax.enable_x64(True):

        def wide(x):
            return None if x is None else jnp.asarray(np.asarray(x, np.float64))

        floats = [wide(x) for x in (q, k, v, sinks)]
        real = np.asarray(segments)[:, :, None, None] > 0

        def loss(q, k, v, sinks):
            how = dict(sinks=sinks, prefix=prefix, mesh=ONE, impl="reference", **options)
            out = jnp.where(real, attention(q, k, v, segments, **how), 0.0)
            return jnp.sum(jnp.sin(3 * out)), out

        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
        (_, out), gradients = run(*floats)
        want = by_hand(*floats[:3], segments, floats[3], prefix, **options)
        np.testing.assert_allclose(out, want, rtol=1e-12, atol=1e-12)

        draw = np.random.default_rng(1).normal
        step = [None if x is None else draw(size=x.shape) for x in floats]
        moved = [jax.tree.map(lambda x, d, e=e: x + e * d, floats, step) for e in (1e-5, -1e-5)]
        slope = (run(*moved[0])[0][0] - run(*moved[1])[0][0]) / 2e-5
        products = jax.tree.map(np.vdot, list(gradients), step)
        np.testing.assert_allclose(sum(jax.tree.leaves(products)), slope, rtol=1e-6)


# The interpreter of kernels takes seconds to compile one: a request of each kind is enough.
SPLASH = ("one_kv_head", "window_of_one", "soft_cap", "sinks", "values_narrower", "everything")
QUICK = ("window_of_one", "everything")


@pytest.mark.parametrize(
    ("impl", "name"),
    cases(
        [*(("xla", n) for n in QUICK), ("splash", "everything")],
        [
            *(("xla", n) for n in REQUESTS if n not in QUICK),
            *(("splash", n) for n in SPLASH if n != "everything"),
        ],
    ),
)
def test_every_path_equals_the_reference(impl, name):
    arrays, options = make_request(name)
    want = value_and_gradients(*arrays, impl="reference", **options)
    assert_same(value_and_gradients(*arrays, impl=impl, **options), want, 2e-5)


# Blocks of 14 tokens: two spans; a loop of three; three loops of seven together, or one whose
# columns move with a window.
@pytest.mark.parametrize(
    ("name", "queries"),
    cases(
        [("everything", 5), ("window", 2)],
        [("everything", 7), ("soft_cap", 2), *((n, 7) for n in REQUESTS if n != "everything")],
    ),
)
def test_shared_prefixes_equal_the_reference(name, queries, monkeypatch):
    monkeypatch.setattr(attention_xla, "QUERY_BLOCK", queries)
    arrays, options, prefix = make_packed(name)
    want = value_and_gradients(*arrays, prefix, impl="reference", **options)
    got = value_and_gradients(*arrays, prefix, impl="xla", queries=queries, **options)
    assert_same(got, want, 2e-5)


@pytest.mark.parametrize(
    ("name", "window"), cases([("everything", 28)], [("two_heads_per_kv_head", 0), ("sinks", 0)])
)
def test_two_calls_of_splash_merge_into_one_softmax(name, window):
    """A window of two blocks hides nothing of a prefix; a shorter one goes the way of XLA."""
    arrays, options, prefix = make_packed(name)
    options["window"] = window
    want = value_and_gradients(*arrays, prefix, impl="reference", **options)
    assert_same(value_and_gradients(*arrays, prefix, impl="splash", **options), want, 2e-5)


LONG = (
    (700, 3, 500),
    (1300,),
)  # several queries at a time in each loop, and no multiple of a block


@pytest.mark.slow
@pytest.mark.parametrize("name", lanes(["everything"], ["two_heads_per_kv_head"]))
def test_long_rows_by_blocks_of_queries_equal_the_reference(name):
    arrays, options = make_request(name, tokens=1310, lengths=LONG)
    assert arrays[0].shape[1] > 2 * attention_xla.PARTS * attention_xla.QUERY_BLOCK
    options["window"] = 40 * options["window"]  # 200: less than a row, more than a lane
    want = value_and_gradients(*arrays, impl="reference", **options)
    assert_same(value_and_gradients(*arrays, impl="xla", **options), want, 5e-5)


@pytest.mark.slow
def test_splash_over_several_blocks_equals_the_reference():
    arrays, options = make_request("everything", tokens=1100, lengths=((600, 400),))
    options["window"] = 300
    want = value_and_gradients(*arrays, impl="reference", **options)
    assert_same(value_and_gradients(*arrays, impl="splash", **options), want, 5e-5)


def bytes_of_gradient(impl, tokens, heads=4):
    """Temporaries of the gradient of attention over one row."""
    shape = jax.ShapeDtypeStruct((1, tokens, heads, 8), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    run = functools.partial(attention, mesh=ONE, scale=1.0, impl=impl)

    def loss(q, k, v, segments):
        return jnp.sum(run(q, k, v, segments) ** 2)

    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape, ids)
    return program.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_grows_with_a_row_and_not_with_its_square():
    assert bytes_of_gradient("reference", 1024) > 4 * 4 * 1024**2  # all scores
    small, middle, large = (bytes_of_gradient("xla", tokens) for tokens in (256, 512, 1024))
    assert middle < 2.2 * small and large < 2.2 * middle


@pytest.mark.parametrize("impl", ["reference", "xla", "splash"])
def test_a_packed_segment_equals_its_own_row(impl):
    (q, k, v, segments, sinks), options = make_request("everything")
    out, _ = value_and_gradients(q, k, v, segments, sinks, impl=impl, **options)
    # Row 0 holds segments of 9, 1 and 6 tokens: each alone at the start of a row of the same width.
    starts, sizes = (0, 9, 10), PACKED[0]
    alone = packed_segments([(n,) for n in sizes], q.shape[1])
    shifted = [jnp.stack([jnp.roll(x[0], -start, axis=0) for start in starts]) for x in (q, k, v)]
    rows, _ = value_and_gradients(*shifted, jnp.asarray(alone), sinks, impl=impl, **options)
    for row, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        np.testing.assert_allclose(
            rows[row, :size], out[0, start : start + size], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("impl", ["reference", "xla", "splash"])
def test_what_stands_in_padding_changes_nothing(impl):
    (q, k, v, segments, sinks), options = make_request("everything")
    want = value_and_gradients(q, k, v, segments, sinks, impl=impl, **options)
    empty = segments[:, :, None, None] == 0
    garbage = [jnp.where(empty, 1e4 * (1 + jnp.abs(x)), x) for x in (q, k, v)]
    got = value_and_gradients(*garbage, segments, sinks, impl=impl, **options)
    assert_same(got, want, 1e-6)
    for gradient in got[1][:3]:
        np.testing.assert_array_equal(np.where(empty, gradient, 0.0), 0.0)


@pytest.mark.parametrize("impl", ["reference", "xla", "splash"])
def test_rows_of_padding_come_out_finite(impl):
    (q, k, v, _, sinks), options = make_request("everything")
    run = jax.jit(functools.partial(attention, mesh=ONE, impl=impl, **options))
    assert np.isfinite(run(q, k, v, jnp.zeros(q.shape[:2], jnp.int32), sinks=sinks)).all()


@pytest.mark.parametrize(
    ("impl", "name", "dtype"),
    cases(
        [("xla", "everything", jnp.float16), ("splash", "everything", jnp.bfloat16)],
        [("xla", "two_heads_per_kv_head", jnp.bfloat16), ("xla", "everything", jnp.bfloat16)],
    ),
)
def test_numbers_of_two_bytes_stay_near_float32(impl, name, dtype):
    (q, k, v, segments, sinks), options = make_request(name, dtype=dtype)
    got = value_and_gradients(q, k, v, segments, sinks, impl=impl, **options)
    exact = [x.astype(jnp.float32) for x in (q, k, v)]
    want = value_and_gradients(*exact, segments, sinks, impl="reference", **options)
    assert_same(got, want, 3e-2 if dtype == jnp.bfloat16 else 4e-3)
    run = functools.partial(attention, mesh=ONE, impl=impl, **options)
    assert jax.eval_shape(run, q, k, v, segments, sinks=sinks).dtype == dtype


MESHES = {
    "context=2": dict(data=1, fsdp=1, context=2),
    "context=4": dict(data=1, fsdp=1, context=4),
    "tensor=2 x context=2": dict(data=1, fsdp=1, tensor=2, context=2),
    "fsdp=2 x context=2": dict(data=1, fsdp=2, context=2),
    "data=2 x fsdp=2 x tensor=2": dict(data=2, fsdp=2, tensor=2),
}


def spread(sizes):
    return make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])


# Two kv heads over four shards are repeated; 18 tokens do not divide by 4, nor 3 rows by 2.
@pytest.mark.parametrize(
    ("sizes", "name"),
    cases(
        [("context=4", "everything"), ("tensor=2 x context=2", "everything")],
        [
            ("tensor=2 x context=2", "one_kv_head"),
            ("context=2", "everything"),
            ("fsdp=2 x context=2", "everything"),
            ("data=2 x fsdp=2 x tensor=2", "everything"),
        ],
    ),
)
def test_a_mesh_gives_the_numbers_of_one_device(sizes, name):
    arrays, options = make_request(name)
    want = value_and_gradients(*arrays, impl="xla", **options)
    got = value_and_gradients(*arrays, impl="xla", mesh=spread(MESHES[sizes]), **options)
    assert_same(got, want, 1e-5)


def test_shared_prefixes_over_a_mesh_equal_one_device():
    arrays, options, prefix = make_packed("everything")
    want = value_and_gradients(*arrays, prefix, impl="reference", **options)
    mesh = spread(MESHES["tensor=2 x context=2"])
    got = value_and_gradients(*arrays, prefix, impl="xla", mesh=mesh, **options)
    assert_same(got, want, 2e-5)


@pytest.mark.parametrize("rows", lanes([1], [4]))
def test_rows_that_divide_over_the_mesh_and_rows_that_do_not(rows):
    arrays, options = make_request("everything", lengths=PACKED[:1] * rows)
    mesh = spread(dict(data=2, fsdp=2, context=2))
    want = value_and_gradients(*arrays, impl="xla", **options)
    assert_same(value_and_gradients(*arrays, impl="xla", mesh=mesh, **options), want, 1e-5)


@pytest.mark.slow
def test_splash_on_a_mesh_gives_the_numbers_of_one_device():
    arrays, options = make_request("everything")
    mesh = spread(MESHES["tensor=2 x context=2"])
    want = value_and_gradients(*arrays, impl="reference", **options)
    assert_same(value_and_gradients(*arrays, impl="splash", mesh=mesh, **options), want, 2e-5)


@pytest.mark.parametrize("name", ["two_heads_per_kv_head", "everything"])
def test_decoding_against_a_cache_equals_the_full_rows(name):
    (q, k, v, _, sinks), options = make_request(name)
    rows, tokens = q.shape[:2]
    whole = jnp.ones((rows, tokens), jnp.int32)
    full = jax.jit(functools.partial(attention, mesh=ONE, impl="reference", **options))
    want = full(q, k, v, whole, sinks=sinks)
    at = jnp.array([3, 9, 17])  # each row stands at its own column; the cache is garbage after it
    column = jnp.arange(tokens)[None, :]
    allowed = column <= at[:, None]
    if window := options.pop("window"):
        allowed &= column > at[:, None] - window
    later = (column > at[:, None])[:, :, None, None]
    caches = [jnp.where(later, 1e6, x).swapaxes(1, 2) for x in (k, v)]

    def here(x):
        return jnp.take_along_axis(x, at[:, None, None, None], axis=1)

    step = jax.jit(functools.partial(attention_cached, **options))
    got = step(here(q), *caches, allowed[:, None], sinks=sinks)
    np.testing.assert_allclose(got, here(want), rtol=1e-5, atol=1e-6)
    empty = jnp.zeros_like(allowed[:, None])  # a slot that holds no request
    assert np.isfinite(step(here(q), *caches, empty, sinks=sinks)).all()


def test_a_decode_step_multiplies_as_libraries_do():
    """The keys are the first operand of their product, which is read as it is; of the product with
    the values the rows are the queries of one kv head."""
    b, heads, kv_heads, tokens, e, f = 3, 8, 2, 40, 16, 24
    q, k = jnp.ones((b, 1, heads, e)), jnp.ones((b, kv_heads, tokens, e))
    v = jnp.ones((b, kv_heads, tokens, f))
    step = jax.jit(functools.partial(attention_cached, scale=1.0))
    text = step.lower(q, k, v, jnp.ones((b, 1, tokens), bool)).compile().as_text()
    products = sorted(re.findall(r"= f32\[([\d,]+)\]\S* dot\(", text))
    group = heads // kv_heads
    want = [f"{b},{kv_heads},{tokens},{group}", f"{b},{kv_heads},{group},{f}"]
    assert products == sorted(want)


@pytest.mark.slow
def test_heads_that_do_not_divide_by_context_are_padded():
    (q, k, v, segments, sinks), options = make_request("sinks")
    how, eight = dict(options, sinks=sinks), spread(dict(data=1, fsdp=1, context=8))
    eight = attention(q, k, v, segments, mesh=eight, context_attention="heads", **how)
    keep = (segments > 0)[..., None, None]
    want = attention(q, k, v, segments, mesh=ONE, **how)
    np.testing.assert_allclose(np.where(keep, eight, 0), np.where(keep, want, 0), atol=1e-5)


def test_what_cannot_be_run_is_refused_with_the_fix():
    (q, k, v, segments, sinks), options = make_request("sinks")
    run = functools.partial(attention, q, k, v, segments)
    with pytest.raises(InputError, match="'flash'.*one of auto, reference, xla"):
        run(mesh=ONE, impl="flash", **options)
    with pytest.raises(InputError, match="'cudnn' cannot run this.*cpu devices.*Fix: impl='auto'"):
        run(mesh=ONE, impl="cudnn", **options)
    with pytest.raises(InputError, match="window: got -1"):
        run(mesh=ONE, **{**options, "window": -1})


@pytest.mark.parametrize(
    ("kv_heads", "e", "f", "window"), [(2, 64, 64, 0), (4, 24, 16, 5)], ids=["grouped", "latent"]
)
def test_the_path_of_gpus_is_lowered_to_cudnns_kernels(monkeypatch, kv_heads, e, f, window):
    """For CUDA on a host that has none: not run, and compiled by nobody. JAX asks an installed
    cuDNN for its version, by no flag; where there is none, the answer is given here."""
    from jax._src.cudnn import fused_attention_stablehlo as asking

    monkeypatch.setattr(asking, "check_cudnn_version", lambda: 91000)

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    q, k, v = array(2, 33, 4, e), array(2, 33, kv_heads, e), array(2, 33, kv_heads, f)
    segments = jax.ShapeDtypeStruct((2, 33), jnp.int32)
    how = dict(scale=0.1, window=window, soft_cap=0.0)

    def total(q, k, v, segments):
        out = attention_paths.cudnn(q, k, v, segments, None, None, **how)
        assert out.shape == (2, 33, 4, f)
        return jnp.sum(out.astype(jnp.float32))

    program = jax.jit(jax.grad(total, argnums=(0, 1, 2))).trace(q, k, v, segments)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    for kernel in ("Softmax", "SoftmaxBackward"):
        assert text.count(f"@__cudnn$fmhaScaleBias{kernel}(") == 1, kernel
