"""The sampler's log-probs are the trainer's, for every family, in both loops, with prompts longer
than chunks and windows; and what bfloat16 and int8 make of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import golden, lanes
from sampler_cases import prompts
from test_family_variants import ROWS, write

from rljax.batch import batch_from_rows
from rljax.mesh import make_mesh
from rljax.models.adapters import lora
from rljax.models.config import LoraConfig
from rljax.models.huggingface import load_config, load_params
from rljax.models.model import Model
from rljax.models.trees import flattened, nested
from rljax.sampler import Decoding, Engine, Sampler, Sampling, generate

LONGEST, NEW, N = 14, 10, 2
ASKED = Sampling(max_response_tokens=NEW, temperature=0.8)
FAMILIES = [
    "gemma2",
    "deepseek_v3",
    "llama3",
    "qwen2",
    "qwen3",
    "mistral",
    "mixtral",
    "qwen3_moe",
    "gemma3_text",
    "qwen2_5_vl",
    "qwen3_vl",
]


@functools.cache
def family(name, **changes):
    folder = golden("hf", name)
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    plain = Model(load_config(folder, remat="none"), mesh)
    return folder, plain, load_params(folder, plain)


def first_layer(name):
    """(model, params) of a family's first layer alone: decoding unrolls layers."""
    _, model, params = family(name)
    layers = {"0": jax.tree.map(lambda x: x[:1], params["layers"]["0"])}
    config = dataclasses.replace(model.config, layers=1, kinds=model.config.kinds[:1])
    return dataclasses.replace(model, config=config), {**params, "layers": layers}


def requests(model):
    vocab = min(300, model.config.vocab_size)
    return prompts(4, LONGEST, seed=2, vocab=vocab)


def differences(model, params, temperature=ASKED.temperature, kv_dtype="", host=True, **how):
    """|log-prob of the sampler - log-prob of the trainer| of each sampled token: of the device loop
    and, with chunks of 5 tokens, of the host loop."""
    tokens, lengths = requests(model)
    asked = dataclasses.replace(ASKED, temperature=temperature)
    key = jax.random.key(0)
    how = Decoding(slots=3, kv_dtype=kv_dtype)
    batch = generate(model, params, tokens, lengths, key, asked, n=N, decoding=how)
    logprobs = jax.jit(lambda p, b: model.logprobs(p, b, temperature)[0])
    keep = np.asarray(batch.mask) > 0
    assert keep.sum() == 4 * N * NEW
    ends = jnp.asarray(np.repeat(lengths, N) + NEW)
    # Of the fields that both loops give: one program scores them.
    drawn = batch_from_rows(jnp.asarray(np.asarray(batch.tokens)), ends, np.asarray(batch.mask))
    np.testing.assert_array_equal(drawn.segment_ids, batch.segment_ids)
    said = np.asarray(batch.sampler_logprobs)
    found = [(np.asarray(logprobs(params, drawn)) - said)[keep]]
    if host:
        engine = Engine(model, 3, LONGEST + NEW, kv_dtype=kv_dtype, steps=7)
        sampler = Sampler(engine, key=key, chunk_tokens=5, prefill_rows=2, prefix_cache_tokens=20)
        rows = np.zeros((4 * N, LONGEST + NEW), np.int32)
        said, mask = np.zeros(rows.shape, np.float32), np.zeros(rows.shape, bool)
        for p in (2, 0, 3, 1):
            ids = range(N * p, N * p + N)
            sampler.submit(tokens[p, : lengths[p]], asked, n=N, request_ids=ids)
        for sample in sampler.run(params):
            end = len(sample.ids)
            where = (sample.id, slice(len(sample.prompt), end))
            rows[sample.id, :end], said[where], mask[where] = sample.ids, sample.logprobs, True
        again = batch_from_rows(jnp.asarray(rows), ends, mask.astype(np.float32))
        assert mask.sum() == keep.sum()
        found.append((np.asarray(logprobs(params, again)) - said)[mask])
    return found


def assert_agrees(model, params, limit=1e-5, **how):
    for found in differences(model, params, **how):
        assert np.abs(found).mean() < limit, np.abs(found).mean()
        assert np.abs(found).max() < 40 * limit
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", lanes(["gpt_oss"], FAMILIES))
def test_the_sampler_agrees_with_the_trainer(name):
    _, model, params = family(name)
    assert_agrees(model, params)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_variants_agree_too(name, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    write(torch, transformers, *ROWS[name][:2], tmp_path)
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    model = Model(load_config(tmp_path, remat="none"), mesh)
    # Their weights are large (a spread of 0.3 and more): float32 itself is coarser.
    assert_agrees(model, load_params(tmp_path, model), limit=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("base", ["float32", "int8", "nf4"])
@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3", "mixtral"])
def test_adapters_agree_too(name, base):
    folder, plain, _ = family(name)
    wish = LoraConfig(rank=4, alpha=8.0, base=base)
    model = dataclasses.replace(plain, config=dataclasses.replace(plain.config, lora=wish))
    params = lora.attach(model, load_params(folder, plain), jax.random.key(0))
    flat = flattened(params)
    for i, path in enumerate(sorted(path for path in flat if path[-1] in lora.LEAVES)):
        noise = jax.random.normal(jax.random.key(i), flat[path].shape, flat[path].dtype)
        flat[path] = flat[path] + 0.05 * noise
    assert_agrees(model, nested(flat))


# Mean |dlogp| of the trainer's float32 forward against samples over a smaller cache.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kv_dtype", "limit"),
    [
        ("gpt_oss", "int8", 0.03),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("gemma2", "bfloat16", 0.02),
                ("deepseek_v3", "int8", 0.05),
                ("deepseek_v3", "bfloat16", 0.02),
                ("gemma2", "int8", 0.03),
                ("qwen3", "int8", 0.03),
                ("qwen3", "bfloat16", 0.02),
            )
        ),
    ],
)
def test_a_smaller_cache_costs_this_much(name, kv_dtype, limit):
    _, model, params = family(name)
    for found in differences(model, params, kv_dtype=kv_dtype):
        mean = np.abs(found).mean()
        print(f"{name}, {kv_dtype} cache: mean |dlogp| {mean:.2e}, k3 {k3(found):.2e}")
        assert 1e-6 < mean < limit


def k3(difference):
    """exp(d) - d - 1 of d = log p - log q: Schulman's estimate of KL(q | p)."""
    return float(np.mean(np.expm1(difference) - difference))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "qwen3", "deepseek_v3", "mixtral"])
def test_in_bfloat16_they_differ_by_rounding(name):
    _, model, params = family(name)
    half = dataclasses.replace(model, config=dataclasses.replace(model.config, dtype="bfloat16"))
    for found in differences(half, params):
        mean = np.abs(found).mean()
        print(f"{name}, bfloat16: mean |dlogp| {mean:.2e}, k3 {k3(found):.2e}")
        assert mean < 0.05 and k3(found) < 5e-3
