"""Decoding on a layout of its own: equal samples, nothing copied where layouts agree, one copy per
rollout and none after it, and never one of older weights."""

import dataclasses
import functools
import gc
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes
from sampler_cases import EOS, prompts, tiny

from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models.adapters.lora import LEAVES
from rljax.models.adapters.quantise import dequantise
from rljax.models.config import LatentConfig, LayerKind, LoraConfig
from rljax.models.experts import ExpertsConfig
from rljax.models.trees import flattened, merged
from rljax.sampler import Decoding, Layout, Sampling, SecondModel, generate, held_weights
from rljax.sampler.layout import copied_bytes, reshard_program
from rljax.tracking.timing import collect

VOCAB, N, NEW = 32, 2, 6
TOKENS, LENGTHS = prompts(8, 5, vocab=VOCAB)
ASKED = Sampling(max_response_tokens=NEW, stop_ids=(EOS,))
FIELDS = ("tokens", "mask", "sampler_logprobs", "policy_version", "group", "finish_reason")


def model_on(*sizes, **changes):
    """A tiny model that every mesh of eight devices splits; sizes of data, fsdp and tensor."""
    config = dict(vocab_size=VOCAB, heads=8, kv_heads=8, head_dim=4, kinds=()) | changes
    return dataclasses.replace(tiny(**config), mesh=make_mesh(*sizes))


def sampled(model, params, second=None, **how):
    inputs = (model, params, TOKENS, LENGTHS, jax.random.key(0), ASKED)
    return generate(*inputs, n=N, decoding=Decoding(**how), second=second)


def put(model, params):
    return jax.tree.map(jax.device_put, params, model.shardings())


@pytest.fixture(scope="module")
def params():
    return jax.device_get(model_on(1, 8, 1).init(jax.random.key(3)))


# What samples has one layer: decoding unrolls them, and each is as the first.
shallow_on = functools.partial(model_on, layers=1)


@pytest.fixture(scope="module")
def shallow():
    return jax.device_get(shallow_on(1, 8, 1).init(jax.random.key(3)))


@pytest.fixture(scope="module")
def expected(shallow):
    """On one device."""
    model = dataclasses.replace(shallow_on(1, 8, 1), mesh=make_mesh(devices=jax.devices()[:1]))
    return jax.device_get(sampled(model, put(model, shallow)))


def bytes_of(arrays) -> int:
    """On all devices together. (The data of a shard would be a further live array.)"""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize * len(x.sharding.device_set)
        for x in arrays
    )


def held_bytes() -> int:
    gc.collect()
    return bytes_of(jax.live_arrays())


TRAINED = [(1, 8, 1), (2, 2, 2)]
DECODED = [sizes for sizes in itertools.product((1, 2, 4, 8), repeat=3) if np.prod(sizes) == 8]
FEW = [(1, 1, 8)]


@pytest.mark.parametrize("trained", lanes(TRAINED[1:], TRAINED[:1]), ids=str)
@pytest.mark.parametrize(
    "decoded", lanes(FEW, [sizes for sizes in DECODED if sizes not in FEW]), ids=str
)
def test_every_layout_samples_the_same(shallow, expected, decoded, trained):
    """From every layout of training; the batch lies where training expects it."""
    model = shallow_on(*trained)
    batch = sampled(model, put(model, shallow), layout=Layout(*decoded))
    for name in FIELDS:
        ours, theirs = np.asarray(getattr(batch, name)), getattr(expected, name)
        np.testing.assert_allclose(ours, theirs, atol=1e-5, err_msg=name)
    assert batch.tokens.sharding.mesh == model.mesh


@pytest.mark.slow
def test_the_hosts_loop_samples_the_same(shallow, expected):
    """Two slots for each row of the mesh, refilled, on weights that are gathered over fsdp."""
    model = shallow_on(1, 8, 1)
    how = dict(loop="host", slots=8, layout=Layout(2, 1, 4))
    batch = sampled(model, put(model, shallow), **how)
    for name in FIELDS:
        ours, theirs = np.asarray(getattr(batch, name)), getattr(expected, name)
        np.testing.assert_allclose(ours, theirs, atol=1e-5, err_msg=name)
    assert batch.tokens.sharding.mesh == model.mesh


@pytest.mark.slow
def test_a_mixture_of_two_models_decodes_in_the_layout(params):
    """Both sets of weights are brought there, each once."""
    model = model_on(1, 8, 1)
    placed = put(model, params)
    second = SecondModel(model, jax.tree.map(lambda x: x * 0.9, placed), 0.5)
    own = sampled(model, placed, second)
    with collect() as timings, held_weights():
        for _ in range(2):
            batch = sampled(model, placed, second, layout=Layout(2, 1, 4))
    for name in FIELDS:
        ours, theirs = (np.asarray(getattr(one, name)) for one in (batch, own))
        np.testing.assert_allclose(ours, theirs, atol=1e-5, err_msg=name)
    copy = Decoding(layout=Layout(2, 1, 4)).of(model).abstract()
    assert timings.synced_bytes == 2 * copied_bytes(copy)


KINDS = {
    "tied": dict(tie_embeddings=True),
    "adapters": dict(lora=LoraConfig(2)),
    "codes": dict(lora=LoraConfig(2, base="int8")),
    "four bits": dict(lora=LoraConfig(2, base="nf4")),
    "latent": dict(latent=LatentConfig(16, 4, 4, 4), family="deepseek_v3", qk_norm=False),
    "experts": dict(
        family="deepseek_v3",
        experts=ExpertsConfig(8, 2, 8, shared_mlp=8),
        kinds=(LayerKind(experts=True),) * 2,
    ),
}


def drawn(model):
    """Random numbers of every weight's type: no program draws them."""
    rng = np.random.default_rng(0)

    def draw(x):
        whole = jnp.issubdtype(x.dtype, jnp.integer)
        values = rng.integers(0, 8, x.shape) if whole else rng.standard_normal(x.shape)
        return jax.device_put(values.astype(x.dtype), x.sharding)

    return jax.tree.map(draw, model.abstract())


decoded = jax.jit(dequantise, static_argnums=(2, 3, 4))


# Every kind but tied ones, whose head is read as the others are; every type.
PLACED = [(name, "int8") for name in ("latent", "experts", "four bits")]
PLACED += [("codes", "bfloat16"), ("adapters", "")]
FURTHER = [pair for pair in itertools.product(KINDS, ("", "bfloat16")) if pair not in PLACED]


@pytest.mark.parametrize(
    "name, dtype", [*PLACED, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in FURTHER)]
)
def test_every_kind_of_weight_gets_to_its_place(name, dtype):
    """Values as they are or rounded once; a quantised base and adapters stay what they are."""
    model = model_on(1, 4, 2, **KINDS[name])
    decoding = Decoding(layout=Layout(2, 2, 2), weight_dtype=dtype)
    placed = drawn(model)
    target, copy = decoding.of(model), flattened(decoding.weights(model, placed))
    like, given = flattened(target.abstract()), flattened(placed)
    assert set(copy) == set(like)
    for path, x in copy.items():
        assert x.sharding == like[path].sharding and x.dtype == like[path].dtype, path
        if path in given:
            expect = np.asarray(given[path]).astype(x.dtype)
            np.testing.assert_array_equal(np.asarray(x), expect, err_msg=str(path))
            continue
        assert dtype == "int8" and path[-1] in ("codes", "scales")
        whole = given[(*path[:-1], "weight")]
        axis = target.shapes()[(*path[:-1], "scales")][1].index(None)
        codes, scales = (copy[(*path[:-1], part)] for part in ("codes", "scales"))
        again = decoded(codes, scales, "int8", axis, np.float32)
        # Half a step of 1/127 of the largest number of each block.
        blocks = np.asarray(scales).repeat(codes.shape[axis] // scales.shape[axis], axis)
        assert (np.abs(np.asarray(again) - np.asarray(whole)) <= blocks / 254 * 1.01).all()
    if dtype:
        trained = [path for path in given if path[-1] in ("lora_a", "lora_b")]
        assert all(copy[path].dtype == np.float32 for path in trained)


def exchanges(text: str) -> list[tuple[str, int]]:
    """(type, numbers) that each exchange of a compiled program gives a device."""
    kinds = "all-gather|all-to-all|all-reduce|collective-permute"
    pattern = rf"= \(?(\w+)\[([\d,]*)\]\S* .*?({kinds})(?:-start)?\("
    return [
        (kind, math.prod(int(n) for n in shape.split(",") if n))
        for kind, shape, _ in re.findall(pattern, text)
    ]


def largest_held(model) -> int:
    """The numbers of the largest array, one layer of a stack, that a device holds of a model."""
    return max(
        math.prod(x.sharding.shard_shape(x.shape)[path[0] == "layers" :])
        for path, x in flattened(model.abstract()).items()
    )


@pytest.mark.parametrize(
    "trained, decoded", [((1, 8, 1), (4, 1, 2)), ((2, 2, 2), (1, 1, 8)), ((1, 4, 2), (2, 2, 2))]
)
@pytest.mark.parametrize("dtype", lanes(["int8"], [""]))
def test_nothing_is_sent_that_a_device_does_not_keep(trained, decoded, dtype):
    """What an exchange gives a device is at most what it holds of the array afterwards; and codes
    are sent, not what they are made of."""
    model = model_on(*trained, embed=256, mlp=512, vocab_size=64)
    decoding = Decoding(layout=Layout(*decoded), weight_dtype=dtype)
    target = decoding.of(model)
    program = reshard_program(model, target, not dtype)
    text = program.lower(model.abstract()).compile().as_text()
    sent = exchanges(text)
    assert sent and max(size for _, size in sent) <= largest_held(target)
    if dtype == "int8":
        most = {kind: max(size for k, size in sent if k == kind) for kind, _ in sent}
        assert most["s8"] >= 8 * most["f32"] or most["f32"] <= 64 * 256


@pytest.mark.parametrize("how", [{}, dict(layout=Layout(2, 2, 2)), dict(weight_dtype="float32")])
def test_where_nothing_differs_the_very_arrays_are_read(params, how):
    model = model_on(2, 2, 2)
    placed = put(model, params)
    with collect() as timings:
        assert Decoding(**how).weights(model, placed) is placed
    assert timings.synced_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", lanes(["int8"], ["", "bfloat16"]))
def test_a_copy_holds_the_bytes_that_are_counted_and_is_dropped(params, dtype):
    """One copy for all calls of a block, of all devices as many bytes as are logged."""
    model = model_on(1, 8, 1)
    placed, decoding = put(model, params), Decoding(layout=Layout(4, 1, 2), weight_dtype=dtype)
    before = held_bytes()
    with collect() as timings, held_weights():
        copy = decoding.weights(model, placed)
        assert decoding.weights(model, dict(placed)) is copy
        with held_weights():
            assert decoding.weights(model, placed) is copy
        assert jax.tree.structure(copy) == jax.tree.structure(decoding.of(model).abstract())
        assert held_bytes() - before == timings.synced_bytes > 0
        del copy
        assert held_bytes() - before == timings.synced_bytes
    assert held_bytes() == before
    assert timings.synced_s > 0


@pytest.mark.slow
def test_a_new_version_never_decodes_with_older_weights(params):
    """Also inside one block, and where the update has donated what the copy was made of."""
    model, decoding = model_on(1, 8, 1), Decoding(layout=Layout(4, 1, 2))
    step = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p), donate_argnums=0)
    placed, before = put(model, params), held_bytes()
    with held_weights():
        for version in range(3):
            copy = flattened(decoding.weights(model, placed))
            for path, x in flattened(params).items():
                np.testing.assert_array_equal(copy[path], 2**version * np.asarray(x))
            del copy
            placed = step(placed)
        size = bytes_of(jax.tree.leaves(decoding.weights(model, placed)))
        assert held_bytes() == before + size  # older copies are gone


@pytest.mark.parametrize("sizes", [dict(data=0), dict(data=-1, fsdp=-1), dict(data=-2)])
def test_sizes_that_are_none_are_refused(sizes):
    with pytest.raises(InputError, match="sampler.layout"):
        Layout(**sizes)
    with pytest.raises(InputError, match="sampler layout"):
        Decoding(layout="mesh(data=1)")


def with_adapters():
    """A model with adapters, its weights, and how an update changes them: the base stays."""
    model = model_on(1, 8, 1, lora=LoraConfig(2))
    trained, frozen = model.split(drawn(model))
    step = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p), donate_argnums=0)
    return model, trained, frozen, step


@pytest.mark.parametrize("dtype", lanes([""], ["int8"]))
def test_an_update_brings_the_adapters_alone(dtype):
    """The base is brought once, also from one block to the next, and is dropped with its source."""
    model, trained, frozen, step = with_adapters()
    decoding = Decoding(layout=Layout(4, 1, 2), weight_dtype=dtype)
    like = decoding.of(model).abstract()
    few = copied_bytes({p: x for p, x in flattened(like).items() if p[-1] in LEAVES})
    sizes, base = [], None
    for _ in range(3):
        with collect() as timings, held_weights():
            copy = decoding.weights(model, merged(trained, frozen))
        sizes.append(timings.synced_bytes)
        flat = flattened(copy)
        for path, x in flattened(trained).items():
            np.testing.assert_array_equal(flat[path], np.asarray(x))
        own = {path: x for path, x in flat.items() if path[-1] not in LEAVES}
        assert base is None or all(own[path] is x for path, x in base.items())
        base, trained = own, step(trained)
        del copy, flat
    assert sizes == [copied_bytes(like), few, few] and few < copied_bytes(like) / 3
    kept, before = bytes_of(base.values()), held_bytes()
    del base, own, x
    assert held_bytes() == before  # what decodes next reads it again
    given = bytes_of(jax.tree.leaves(frozen))
    del frozen
    gc.collect()
    assert held_bytes() == before - kept - given


def test_another_base_is_never_read_for_this_one():
    model, trained, frozen, step = with_adapters()
    other = jax.tree.map(lambda x: 3 * x, frozen)
    decoding = Decoding(layout=Layout(4, 1, 2))
    for base in (frozen, other, frozen):
        copy = flattened(decoding.weights(model, merged(trained, base)))
        for path, x in flattened(base).items():
            np.testing.assert_array_equal(copy[path], np.asarray(x))


def test_a_base_that_is_read_as_it_is_is_not_copied():
    """Where the adapters alone are of another type than what decodes."""
    model = model_on(2, 2, 2, lora=LoraConfig(2), weight_dtype="bfloat16", dtype="bfloat16")
    trained, frozen = model.split(drawn(model))
    trained = jax.tree.map(lambda x: x.astype(np.float16), trained)
    decoding = Decoding(weight_dtype="bfloat16")
    copy = flattened(decoding.weights(model, merged(trained, frozen)))
    assert all(copy[path] is x for path, x in flattened(frozen).items())
    assert all(copy[path].dtype != np.float16 for path in flattened(trained))
