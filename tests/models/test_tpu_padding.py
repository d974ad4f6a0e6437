"""Qwen2.5-0.5B's widths on eight chips that do not divide its heads, compiled ahead of time for a
TPU v5e on a host that has none: 14 query heads over 2 kv heads, and a vocabulary to pad.

Not part of the usual run. The one command, where `pip install "jax[tpu]"` has put libtpu:

    python -m pytest -n 0 -m tpu_aot tests/models/test_tpu_padding.py
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rljax.batch import Batch
from rljax.mesh import BATCH_AXES, make_mesh
from rljax.models import cache
from rljax.models.builtin import decoder
from rljax.models.model import Model

pytestmark = pytest.mark.tpu_aot
MESHES = {"tensor=8": dict(fsdp=1, tensor=8), "fsdp=2 x tensor=4": dict(fsdp=2, tensor=4)}
EMBED, HEADS, KV_HEADS, HEAD_DIM = 896, 14, 2, 64
ROWS, TOKENS, SLOTS, COLUMNS = 8, 1024, 64, 2048
COLLECTIVE = r" = (\S+) (all-gather|all-to-all|collective-permute)(?:-start)?\("


def model_on(chips, sizes: str, vocab: int) -> Model:
    made = decoder(
        vocab,
        layers=2,
        embed=EMBED,
        mlp=4864,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        tie_embeddings=True,
    )
    kinds = dict(qkv_bias=True, qk_norm=False, dtype="bfloat16", head_dtype="bfloat16")
    return Model(dataclasses.replace(made, **kinds), make_mesh(**MESHES[sizes], devices=chips))


def sent(text: str, *kinds: str) -> list[tuple[int, ...]]:
    """The shapes that chips send each other by one of `kinds`."""
    found = [shapes for shapes, kind in re.findall(COLLECTIVE, text) if kind in kinds]
    each = [sizes for shapes in found for sizes in re.findall(r"\[([\d,]+)\]", shapes)]
    return [tuple(int(n) for n in sizes.split(",")) for sizes in each]


def held_bytes(arrays) -> int:
    """Of abstract arrays, on one chip."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(arrays)
    )


@pytest.mark.parametrize("vocab", [151_936, 151_643], ids=["whole vocabulary", "odd vocabulary"])
@pytest.mark.parametrize("sizes", MESHES)
def test_learning_keeps_weights_split_and_runs_the_kernels(chips, sizes, vocab):
    model = model_on(chips, sizes, vocab)
    rows = NamedSharding(model.mesh, PartitionSpec(BATCH_AXES))

    def array(dtype):
        return jax.ShapeDtypeStruct((ROWS, TOKENS), dtype, sharding=rows)

    batch = Batch(array(jnp.int32), array(jnp.int32), array(jnp.int32), array(jnp.float32))

    def loss(params, batch):
        return jnp.sum(model.logprobs(params, batch)[0] * batch.mask)

    gradient = jax.jit(jax.value_and_grad(loss), out_shardings=(None, model.shardings()))
    program = gradient.lower(model.abstract(), batch).compile()
    text = program.as_text()
    assert 'custom_call_target="tpu_custom_call"' in text
    # The arguments are a chip's own part of every weight (and a row of the batch).
    held = held_bytes(model.abstract())
    assert program.memory_analysis().argument_size_in_bytes < 1.1 * held
    assert held < 1.05 * sum(4 * math.prod(shape) for shape, _ in model.shapes().values()) / 8
    # No matrix of logits: a chip's rows by its part of the vocabulary.
    assert not re.findall(rf"\[[\d,]*{ROWS * TOKENS},{-(-vocab // 8)}\]", text)
    if sizes == "tensor=8":  # no matrix of heads is gathered: biases are, and embedded tokens
        gathered = [shape for shape in sent(text, "all-gather") if shape[:2] != (ROWS, TOKENS)]
        assert max(map(math.prod, gathered)) < EMBED * HEAD_DIM


@pytest.mark.parametrize("sizes", MESHES)
def test_decoding_with_padded_heads_moves_no_cache(chips, sizes):
    steps = 16
    model = model_on(chips, sizes, 151_643)
    caches = jax.eval_shape(lambda: model.empty_caches(SLOTS, COLUMNS))
    caches = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        caches,
        cache.shardings(caches, model.mesh),
    )
    row = jax.ShapeDtypeStruct(
        (SLOTS,), jnp.int32, sharding=NamedSharding(model.mesh, PartitionSpec(BATCH_AXES))
    )

    def run(params, token, column, caches):
        ready = model.unstack(params, steps)

        def step(carry, _):
            token, column, caches = carry
            logits, caches = model.decode_step(ready, token, column, caches)
            return (jnp.argmax(logits, -1).astype(jnp.int32), column + 1, caches), None

        return jax.lax.scan(step, (token, column, caches), None, length=steps)[0]

    program = jax.jit(run, donate_argnums=3).lower(model.abstract(), row, row, caches).compile()
    text, memory = program.as_text(), program.memory_analysis()
    assert memory.alias_size_in_bytes >= held_bytes(caches)  # they are written in place
    moved = sent(text, "all-gather", "all-to-all", "collective-permute")
    assert moved and not [shape for shape in moved if COLUMNS in shape]
