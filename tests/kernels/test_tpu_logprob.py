"""The log-prob over a TPU v5e of eight chips, compiled ahead of time on a host that has none: the
head is gathered tile by tile, logits are never whole, the kernel runs on every chip.

Not part of the usual run. The one command, where `pip install "jax[tpu]"` has put libtpu:

    python -m pytest -n 0 -m tpu_aot tests/kernels/test_tpu_logprob.py
"""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rljax.kernels.logprob import sharded, token_logprobs
from rljax.mesh import BATCH_AXES, make_mesh
from rljax.plan.hlo import traffic

pytestmark = pytest.mark.tpu_aot
B, S, D, V = 8, 1536, 2048, 128256  # no two of them alike, nor their shares
MESHES = {
    "fsdp=8": dict(fsdp=8),
    "fsdp=2 x tensor=4": dict(fsdp=2, tensor=4),
    "data=2 x tensor=2 x context=2": dict(data=2, fsdp=1, tensor=2, context=2),
}


def compiled(mesh, vocab_first, of=(0, 1)):
    """The gradient of log-probs and entropies with bfloat16 arrays, split as the model's are."""

    def array(shape, dtype, *axes):
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def total(hidden, head, targets):
        found = token_logprobs(hidden, head, targets, vocab_first=vocab_first, mesh=mesh)
        return jnp.sum(found[0]) + 0.1 * jnp.sum(found[1])

    hidden = array((B, S, D), jnp.bfloat16, BATCH_AXES, "context")
    head = array(
        (V, D) if vocab_first else (D, V),
        jnp.bfloat16,
        *(("tensor", "fsdp") if vocab_first else ("fsdp", "tensor")),
    )
    targets = array((B, S), jnp.int32, BATCH_AXES, "context")
    return jax.jit(jax.value_and_grad(total, argnums=of)).lower(hidden, head, targets).compile()


def sizes(text: str, kind: str) -> list[int]:
    """Elements of the largest array in the result of each instruction of a kind."""
    found = re.findall(rf"= (\(.*?\)|\S+) {kind}(?:-start)?\(", text)
    shapes = [re.findall(r"\w+\[([\d,]*)\]", types) for types in found]
    return [max(math.prod(int(n) for n in s.split(",") if n) for s in each) for each in shapes]


@pytest.mark.parametrize("name", MESHES)
def test_the_head_is_gathered_in_tiles_and_logits_are_never_whole(chips, name):
    mesh = make_mesh(**MESHES[name], devices=chips)
    program = compiled(mesh, vocab_first=name == "fsdp=2 x tensor=4")
    text = program.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') >= 3
    tile = sharded.TILE_BYTES // 2
    assert max(sizes(text, "all-gather"), default=0) <= tile
    assert bool(sizes(text, "all-gather")) == (mesh.shape["fsdp"] > 1)
    vocab = V // mesh.shape["tensor"]
    rows = B * S * mesh.shape["tensor"] // mesh.size
    assert not re.findall(rf"\w+\[[\d,]*(?:{rows}|{S}),{vocab}\]", text)
    assert not re.findall(rf"\w+\[[\d,]*{rows},{V}\]", text)
    # Gradients of a tile are scattered over fsdp, and not summed whole on every chip.
    along_fsdp = [x for x in traffic(text, mesh).collectives if x.axes == ("fsdp",)]
    large = {x.op for x in along_fsdp if x.result_bytes > 2**20}
    assert "all-reduce" not in large and ("reduce-scatter" in large) == (mesh.shape["fsdp"] > 1)
    # A tile, its gradient in float32, and the float32 gradient of the hidden states.
    least = 4 * rows * D + 4 * sharded.TILE_BYTES
    assert program.memory_analysis().temp_size_in_bytes < 1.5 * least


def test_a_frozen_head_costs_no_gradient(chips):
    """Of a head that is not differentiated, as under adapters, the compiler drops the kernel."""
    mesh = make_mesh(1, 1, 1, devices=chips[:1])

    def kernels(of):
        return compiled(mesh, False, of).as_text().count("tpu_custom_call")

    assert kernels((0,)) < kernels((0, 1))
