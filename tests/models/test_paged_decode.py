"""The cache that TPU's ragged paged attention reads, keys and values in one array: every verb of
the sampler gives on it what it gives on two, and the kernel is handed what JAX says it takes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes
from sampler_cases import LONGEST, NEW, prompts, tiny, weights

from rljax.mesh import make_mesh
from rljax.models import attention_paths as paths
from rljax.models import cache
from rljax.models.builtin import decoder
from rljax.models.model import Model
from rljax.sampler import Sampling, generate
from rljax.sampler.engine import Engine
from rljax.sampler.requests import Decoding
from rljax.sampler.slots import SlotInputs

ASKED = Sampling(max_response_tokens=NEW)


def paired(monkeypatch, model: Model) -> Model:
    """The same model, its cache in the order of a TPU, its two kv heads of 8 as one of 16 lanes.
    (Of another `remat`, which decoding does not read: programs of the first are not taken for its
    own.)"""
    monkeypatch.setattr(cache, "order_for", lambda mesh: "tokens")
    monkeypatch.setattr(cache, "pairs_for", lambda *asked: True)
    monkeypatch.setattr(cache, "lanes_for", lambda mesh: 16)
    assert model.config.remat != "none"
    return dataclasses.replace(model, config=dataclasses.replace(model.config, remat="none"))


@pytest.mark.slow
@pytest.mark.parametrize("how", lanes([("device", 4)], [("device", 0), ("host", 4), ("host", 0)]))
def test_a_rollout_in_few_slots_is_the_same(monkeypatch, how):
    """Prefill, slots that are refilled, prompts longer than the window."""
    loop, window = how
    model = tiny(window=window)
    tokens, lengths = prompts()
    how = dict(n=2, decoding=Decoding(loop=loop, slots=6))

    def run(model):
        return generate(
            model, weights(tiny(window=window)), tokens, lengths, jax.random.key(2), ASKED, **how
        )

    want, got = run(model), run(paired(monkeypatch, model))
    assert (want.tokens == got.tokens).all() and (want.finish_reason == got.finish_reason).all()
    np.testing.assert_allclose(got.sampler_logprobs, want.sampler_logprobs, atol=1e-5)


def after_every_verb(model: Model, params) -> np.ndarray:
    """Log-probs [k, B] of tokens decoded in slots that were filled by insert, extend and fork of
    what extract gave back."""
    engine = Engine(model, slots=4, tokens=LONGEST + NEW + 4, steps=4)
    tokens, lengths = prompts(2)
    at, keys = jnp.array([0, 2]), jnp.arange(4, dtype=jnp.uint32).reshape(2, 2)

    def entry(prefix):
        whole = jnp.full((2,), engine.tokens, jnp.int32)
        rules = engine.rules([ASKED] * 2)
        return SlotInputs(prefix.length, prefix.token, whole, prefix.shift, keys, rules, None)

    prefix = engine.prefill(params, tokens, lengths)
    state = engine.insert(prefix, engine.init_state(), at, jnp.arange(2), entry(prefix))
    state, first, _ = engine.generate(params, state, 2)
    reply = jnp.asarray([[3, 4, 5], [6, 7, 0]], jnp.int32)
    state = engine.extend(params, state, at, reply, jnp.array([3, 2]))
    state = engine.fork(state, 0, jnp.array([1, 4]), keys)
    taken = engine.extract(state, at)
    state = engine.release(state, at)
    state = engine.clear(state, jnp.array([2]))
    state = engine.insert(taken, state, jnp.array([3, 4]), jnp.array([1, 0]), entry(taken))
    state, second, done = engine.generate(params, state, 4)
    assert done == 4 and second.valid[0].tolist() == [False, True, False, True]
    return np.concatenate([np.where(one.valid, one.logp, 0) for one in (first, second)])


@pytest.mark.slow
def test_every_verb_of_the_engine_is_the_same(monkeypatch):
    model = tiny(window=6)
    params = weights(model)
    want = after_every_verb(model, params)
    assert np.abs(want).max() > 0.5
    np.testing.assert_allclose(
        after_every_verb(paired(monkeypatch, model), params), want, atol=1e-5
    )


def test_slots_of_whole_pages_are_counted_as_they_are_held(monkeypatch):
    model = paired(monkeypatch, tiny(window=4))
    caches = jax.eval_shape(lambda: model.empty_caches(3, 150))
    assert [one.columns for one in caches] == [4, 256]
    assert caches[0].parts[0].shape == (3, 4, 2, 16)  # (two kv heads of 8)
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(caches))
    assert 3 * cache.slot_bytes(model.config, 150, "", model.mesh) == held


def test_heads_that_share_lanes_take_no_more_than_their_numbers(monkeypatch):
    """Of Qwen2.5-0.5B, two kv heads of 64: two share 128 lanes where a device has both, and what is
    counted is what is held."""
    made = decoder(64, layers=2, embed=896, mlp=64, heads=14, kv_heads=2, head_dim=64)
    made = dataclasses.replace(made, dtype="bfloat16")
    own = cache.slot_bytes(made, 256)
    monkeypatch.setattr(cache, "order_for", lambda mesh: "tokens")
    monkeypatch.setattr(cache, "lanes_for", lambda mesh: 128)
    for tensor, dtype, times in ((1, "", 1), (2, "", 2), (1, "float32", 2), (1, "int8", 33 / 32)):
        mesh = make_mesh(fsdp=1, tensor=tensor, devices=jax.devices()[:tensor])
        empty = jax.eval_shape(lambda m=mesh, d=dtype: cache.empty(made, m, 3, 256, d))
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(empty))
        assert held == 3 * cache.slot_bytes(made, 256, dtype, mesh) == 3 * times * own


# -- the kernel


def case(slots, columns, heads, kv_heads, dtype=jnp.float32, size=128):
    """q, pairs with NaN behind what is held, held, and how `attention_cached` says it."""
    rng = np.random.default_rng(columns)
    q = rng.standard_normal((slots, heads, size)).astype(dtype)
    pairs = rng.standard_normal((slots, columns, 2 * kv_heads, size)).astype(dtype)
    held = np.concatenate([[1, columns], rng.integers(1, columns + 1, slots - 2)]).astype(np.int32)
    seen = np.arange(columns)[None, :] < held[:, None]
    plain = jax.jit(functools.partial(paths.first_held, scale=0.2, soft_cap=3.0))
    want = plain(q, pairs, held)
    pairs = np.where(seen[:, :, None, None], pairs, np.asarray(np.nan, pairs.dtype))
    return *map(jnp.asarray, (q, pairs, held)), want


@pytest.mark.parametrize("sizes", lanes([(48, 4, 2)], [(528, 3, 1), (1024, 8, 8)]))
def test_the_kernels_arguments_mean_what_the_plain_path_computes(sizes):
    """By JAX's own reference of the kernel, which takes the same arguments. (Pallas cannot
    interpret the kernel itself, in 0.10 and 0.12.)"""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import (
        ref_ragged_paged_attention as reference,
    )

    q, pairs, held, want = case(3, *sizes)
    with jax.numpy_rank_promotion("allow"):
        out = reference(*paths.paged_arguments(q, pairs, held), sm_scale=0.2, soft_cap=3.0)
    np.testing.assert_allclose(out, want, atol=1e-5)


def test_slots_of_any_length_are_made_of_whole_pages(monkeypatch):
    """Else the kernel is not run, and the plain path copies a layer's cache at every token. A
    window's ring stays as long as it is."""
    model = paired(monkeypatch, tiny(window=6))

    def empty(n):
        return [x.columns for x in jax.eval_shape(lambda: model.empty_caches(2, n))]

    assert [empty(n) for n in (5, 6, 33, 48)] == [[6, 16], [6, 16], [6, 48], [6, 48]]
    assert all(paths.page_tokens(empty(n)[1]) for n in range(1, 1600, 13))


def test_pages_are_whole_and_no_larger_than_a_block():
    for columns in range(1, 3000):
        whole = paths.whole_pages(columns)
        assert 0 <= whole - columns < 128 and paths.page_tokens(whole) >= min(128, whole)
    found = {columns: paths.page_tokens(columns) for columns in (16, 48, 500, 512, 528, 8192, 8208)}
    assert found == {16: 16, 48: 48, 500: 0, 512: 512, 528: 176, 8192: 512, 8208: 432}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "dtype", "taken"),
    [
        (64, 8, 128, "bfloat16", True),
        (14, 2, 128, "bfloat16", True),
        (24, 24, 128, "bfloat16", True),
        (32, 8, 128, "float32", True),
        (15, 3, 128, "bfloat16", False),  # 3 sublanes
        (24, 24, 128, "float32", False),  # 4 queries in a block of 4 kv heads
        (8, 4, 256, "bfloat16", False),
        (8, 8, 128, "int8", False),
    ],
)
def test_what_the_kernel_takes(heads, kv_heads, size, dtype, taken):
    assert paths.paged_takes(heads, kv_heads, size, dtype) == taken
