"""Sizes that a mesh does not divide: heads, kv heads, hidden layer, vocabulary and embed. Every
mesh gives the numbers of one device, and weights keep the model's own shapes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes
from test_sharding import packed_rows

from rljax.arrays import place
from rljax.batch import Batch
from rljax.mesh import make_mesh, weight_sharding
from rljax.models.builtin import decoder
from rljax.models.config import LatentConfig, LoraConfig
from rljax.models.experts import ExpertsConfig
from rljax.models.model import Model
from rljax.models.padding import heads_over
from rljax.models.trees import flattened, merged

VOCAB = 301
MESHES = {
    "tensor=8": dict(fsdp=1, tensor=8),
    "fsdp=2,tensor=4": dict(fsdp=2, tensor=4),
    "fsdp=8": dict(fsdp=8),
    "context=2,tensor=4": dict(fsdp=1, context=2, tensor=4),
    "data=2,fsdp=2,tensor=2": dict(data=2, fsdp=2, tensor=2),
    "fsdp=2,expert=2,tensor=2": dict(fsdp=2, expert=2, tensor=2),
}


def made(vocab=VOCAB, **sizes):
    sizes = dict(layers=1, embed=16, mlp=37, heads=7, kv_heads=1, head_dim=8, init_std=0.3) | sizes
    return decoder(vocab, **sizes)


def experts():
    config = made(embed=24, heads=6, kv_heads=3)
    kinds = tuple(dataclasses.replace(kind, experts=True) for kind in config.kinds)
    return dataclasses.replace(
        config, experts=ExpertsConfig(4, 2, 13, expert_bias=True, shared_mlp=9), kinds=kinds
    )


CONFIGS = {
    # Qwen2.5-0.5B's heads; biases; the embedding is the head.
    "qwen2.5": lambda: dataclasses.replace(
        made(heads=14, kv_heads=2, mlp=40, tie_embeddings=True), qkv_bias=True, qk_norm=False
    ),
    "odd": lambda: made(),  # nothing divides but the embed axis
    "odd embed": lambda: made(embed=18, heads=4, kv_heads=2, mlp=36),
    "one head norm": lambda: dataclasses.replace(
        made(heads=6, kv_heads=3, mlp=24), qk_norm_kind="whole", sinks=True, mlp_bias=True
    ),
    "latent": lambda: dataclasses.replace(
        made(heads=3, kv_heads=3, head_dim=4),
        latent=LatentConfig(kv_rank=8, nope_dim=8, rope_dim=4, value_dim=8, q_rank=6),
        qk_norm=False,
    ),
    "experts": experts,
    "lora": lambda: dataclasses.replace(made(), lora=LoraConfig(rank=2, base="float32")),
    "qlora": lambda: dataclasses.replace(
        made(mlp=50, kv_heads=7), lora=LoraConfig(rank=2, base="nf4")
    ),
    "int8": lambda: dataclasses.replace(
        made(tie_embeddings=True), lora=LoraConfig(rank=2, base="int8")
    ),
}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "shards", "queries", "keys"),
    [
        (14, 2, 8, 16, 8),  # Qwen2.5-0.5B: groups of 7 as 4 of 2
        (14, 14, 8, 16, 16),
        (15, 3, 8, 24, 8),
        (6, 2, 1, 6, 2),
        *(
            pytest.param(*sizes, marks=pytest.mark.slow)
            for sizes in (
                (12, 2, 8, 16, 8),
                (28, 4, 8, 32, 8),
                (8, 8, 8, 8, 8),
                (32, 8, 8, 32, 8),
                (8, 1, 8, 8, 8),
                (7, 1, 4, 8, 4),
                (4, 4, 3, 6, 6),
            )
        ),
    ],
)
def test_heads_are_shared_out_in_whole_groups(heads, kv_heads, shards, queries, keys):
    found = heads_over(heads, kv_heads, shards)
    assert (found.queries, found.keys) == (queries, keys)
    assert queries % shards == 0 == keys % shards and queries % keys == 0
    q = 1 + jnp.arange(heads) // (heads // kv_heads)  # the kv head of each
    k = 1 + jnp.arange(kv_heads)
    wide_q, wide_k = found.widen_queries(q, 0), found.widen_keys(k, 0)
    of_query = np.repeat(wide_k, queries // keys)
    np.testing.assert_array_equal(np.where(wide_q > 0, of_query, 0), wide_q)
    np.testing.assert_array_equal(found.narrow_queries(wide_q, 0), q)


@pytest.mark.parametrize(
    ("sizes", "shape", "axes", "spec"),
    [
        (dict(fsdp=2, tensor=4), (8, 12), ("embed", "mlp"), ("fsdp", "tensor")),
        (dict(fsdp=2, tensor=4), (8, 13), ("embed", "mlp"), (("fsdp", "tensor"), None)),
        (dict(fsdp=2, tensor=4), (9, 8), ("embed", "mlp"), (None, ("tensor", "fsdp"))),
        (dict(fsdp=2, tensor=4), (9, 13), ("embed", "mlp"), (None, None)),
        (
            dict(fsdp=1, tensor=8),
            (3, 14, 64, 896),
            ("layers", "heads", "head_dim", "embed"),
            (None, None, None, ("fsdp", "tensor")),
        ),
        (dict(fsdp=1, tensor=8), (14, 64), ("heads", "head_dim"), (None, None)),
    ],
)
def test_a_mesh_axis_that_does_not_divide_splits_another_one(sizes, shape, axes, spec):
    found = weight_sharding(make_mesh(**sizes), "w", shape, axes)
    assert tuple(found.spec) == spec


def one_device(name: str, head: str = "lm") -> Model:
    return Model(CONFIGS[name](), make_mesh(1, 1, 1, devices=jax.devices()[:1]), head)


@functools.cache
def weights(name: str, head: str = "lm"):
    """Random in every entry, biases and the scalar head, too, which start at 0."""
    params = one_device(name, head).init(jax.random.key(1))
    rng = np.random.default_rng(2)

    def noisy(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        noise = 0.1 * rng.standard_normal(x.shape)
        return (x * (1 + noise) + noise).astype(x.dtype)

    return jax.tree.map(noisy, jax.device_get(params))


def on_mesh(name: str, mesh: str, head: str = "lm"):
    sizes = MESHES[mesh]
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    model = Model(CONFIGS[name](), make_mesh(**sizes, devices=devices), head)
    return model, jax.device_put(weights(name, head), model.shardings())


def trained(model, params, batch):
    """Loss and gradient of what an optimizer moves."""
    moved, frozen = model.split(params)

    def loss(moved, batch):
        if model.head == "scalar":
            return jnp.sum(batch.mask * model.values(merged(moved, frozen), batch) ** 2)
        logprobs, entropy, _ = model.read(merged(moved, frozen), batch)
        return -jnp.sum(batch.mask * (logprobs + 0.1 * entropy)) / jnp.sum(batch.mask)

    value, gradient = jax.jit(jax.value_and_grad(loss))(moved, batch)
    return float(value), jax.device_get(gradient)


@functools.cache
def expected(name: str, head: str = "lm"):
    return trained(one_device(name, head), weights(name, head), packed_rows(8))


FAST = [("qwen2.5", "tensor=8", "lm")]
SLOW = [
    (name, mesh, "lm")
    for name in CONFIGS
    for mesh in MESHES
    if ("expert" in mesh) <= (name == "experts")
]
SLOW += [(name, "tensor=8", "scalar") for name in ("qwen2.5", "odd", "lora")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", lanes(FAST, [case for case in SLOW if case not in FAST]), ids=" ".join
)
def test_loss_and_gradient_are_those_of_one_device(case):
    name, mesh, head = case
    model, params = on_mesh(name, mesh, head)
    value, gradient = trained(model, params, place(packed_rows(8), model.mesh))
    want_value, want_gradient = expected(name, head)
    np.testing.assert_allclose(value, want_value, rtol=2e-5)
    want = flattened(want_gradient)
    top = max(np.abs(x).max() for x in want.values())
    for path, x in flattened(gradient).items():
        assert x.shape == want[path].shape
        np.testing.assert_allclose(x, want[path], atol=3e-5 * top, err_msg=str(path))


STEPS = 2


def decoded(model, params) -> np.ndarray:
    """Logits [STEPS, B, V] behind prompts of several lengths, token by token."""
    rows = packed_rows(8)
    columns = np.arange(32, dtype=np.int32)[None, :]
    first = (columns < 1 + np.arange(8)[:, None] % 5).astype(np.int32)
    tokens = np.asarray(rows.tokens) * first
    mask = np.zeros(first.shape, np.float32)
    prompts = place(Batch(*map(jnp.asarray, (tokens, first, columns * first, mask))), model.mesh)

    @jax.jit
    def run(params, prompts):
        caches, out = model.prefill(params, prompts, 32 + STEPS), []
        unstacked, columns = model.unstack(params), jnp.sum(prompts.segment_ids, axis=1)
        for step in range(STEPS):
            token = rows.tokens[:, step]
            z, caches = model.decode_step(unstacked, token, columns + step, caches)
            out.append(z)
        return jnp.stack(out)

    return np.asarray(run(params, prompts))


FAST = [("odd", "fsdp=2,tensor=4")]
SLOW = [
    (name, mesh)
    for name in CONFIGS
    for mesh in MESHES
    if ("expert" in mesh) <= (name == "experts") and (name, mesh) not in FAST
]


@functools.cache
def expected_logits(name: str):
    return decoded(one_device(name), weights(name))


@pytest.mark.parametrize("case", lanes(FAST, SLOW), ids=" ".join)
def test_decoding_says_what_one_device_says(case):
    model, params = on_mesh(*case)
    want, got = expected_logits(case[0]), decoded(model, params)
    assert want.shape == got.shape == (STEPS, 8, VOCAB)  # no logit of a padding
    np.testing.assert_allclose(got, want, atol=2e-4, rtol=2e-4)
