"""Kernels of ours, compiled ahead of time for three generations of TPU on a host that has none:
that they fit, what they hold beside their results, and the FLOPs that they declare.

Not part of the usual run. The one command, where `pip install "jax[tpu]"` has put libtpu:

    python -m pytest -n 0 -m "tpu_aot and not slow" tests/kernels/test_tpu_kernels.py
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rljax.kernels.logprob import pallas_tpu
from rljax.kernels.logprob.options import LogprobOptions

pytestmark = pytest.mark.tpu_aot
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
HIGHEST = jax.lax.Precision.HIGHEST
# N, D, V, options
LOGPROB = {
    "Qwen3 8B": (8192, 4096, 151936, LogprobOptions()),
    "Llama 3.2 1B": (4096, 2048, 128256, LogprobOptions(vocab_first=True)),
    "soft cap": (8192, 8192, 256000, LogprobOptions(vocab_first=True, soft_cap=30.0, greedy=True)),
}
ODD = {
    "one row": (
        1,
        9,
        257,
        jnp.float32,
        LogprobOptions(soft_cap=5.0, greedy=True, precision=HIGHEST),
    ),
    "D of 4.5 lanes": (129, 576, 50257, jnp.bfloat16, LogprobOptions(greedy=True)),
    "small vocabulary": (
        7,
        64,
        100,
        jnp.float32,
        LogprobOptions(vocab_first=True, precision=HIGHEST),
    ),
    "wide, in float32": (
        *(8192, 8192, 128000, jnp.float32),
        LogprobOptions(vocab_first=True, soft_cap=30.0, precision=HIGHEST),
    ),
    "very wide": (4096, 16384, 32000, jnp.bfloat16, LogprobOptions(greedy=True)),
}


@pytest.fixture(scope="module")
def one_chip(devices_of):
    """generation -> the sharding of an array on one chip of it."""

    def sharding(generation: str) -> NamedSharding:
        first = np.array(devices_of(TOPOLOGIES[generation])[:1])
        return NamedSharding(Mesh(first, ("chip",)), PartitionSpec())

    return sharding


def kernels(hidden, head, targets, scale, g_logprob, g_entropy, options):
    """log-prob, entropy, logsumexp and both gradients, of a log-prob's and entropy's cotangents."""
    found = pallas_tpu.forward(hidden, head, targets, scale, options)
    entropy = found.log_sum - found.expected
    gradients = pallas_tpu.backward(
        *(hidden, head, targets, scale, found.top, found.log_sum),
        *(g_logprob, -g_logprob - entropy * g_entropy, -g_entropy, options),
    )
    return found.target - found.log_sum, entropy, found.top + found.log_sum, found.best, gradients


def plain(hidden, head, targets, scale, g_logprob, g_entropy, options):
    """The same results from an array of logits."""

    def run(hidden, head):
        z = hidden @ (head.T if options.vocab_first else head)
        z = z.astype(jnp.float32)
        z = (options.soft_cap * jnp.tanh(z / options.soft_cap) if options.soft_cap else z) * scale
        logp = jax.nn.log_softmax(z)
        target = jnp.take_along_axis(logp, targets[:, None], axis=1)[:, 0]
        return target, -jnp.sum(jnp.exp(logp) * logp, axis=1)

    out, back = jax.vjp(run, hidden, head)
    return out, back((g_logprob, g_entropy))


def compile_for(sharding, function, n, depth, vocab, dtype, options):
    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    head = (vocab, depth) if options.vocab_first else (depth, vocab)
    rows = array((n,), jnp.float32)
    return (
        jax.jit(function, static_argnames="options")
        .lower(
            array((n, depth), dtype),
            array(head, dtype),
            array((n,), jnp.int32),
            array((), jnp.float32),
            *(rows, rows),
            options=options,
        )
        .compile()
    )


def declared_flops(program) -> list[int]:
    """Of each kernel in a compiled program."""
    lines = [x for x in program.as_text().splitlines() if 'custom_call_target="tpu_custom' in x]
    return [int(re.search(r'"flops":"(\d+)"', line)[1]) for line in lines]


@pytest.mark.parametrize("name", LOGPROB)
@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_the_log_prob_fits_and_holds_no_logits(one_chip, generation, name):
    n, depth, vocab, options = LOGPROB[name]
    sharding = one_chip(generation)
    program = compile_for(sharding, kernels, n, depth, vocab, jnp.bfloat16, options)
    assert program.memory_analysis().temp_size_in_bytes <= 64e6
    flops = declared_flops(program)
    assert len(flops) == 3  # the statistics, hidden's gradient, the head's
    assert sum(flops) <= 10 * n * depth * vocab
    assert not re.findall(rf"\[(\d+,)*{n},{vocab}\]", program.as_text())


def test_the_bounds_above_are_broken_by_the_plain_form(one_chip):
    n, depth, vocab, options = 1024, 256, 32768, LogprobOptions(vocab_first=True)
    program = compile_for(one_chip("v5e"), plain, n, depth, vocab, jnp.bfloat16, options)
    assert "tpu_custom_call" not in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes > 64e6
    assert re.findall(rf"\[{n},{vocab}\]", program.as_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_odd_shapes_compile(one_chip, generation, name):
    program = compile_for(one_chip(generation), kernels, *ODD[name])
    assert len(declared_flops(program)) == 3
