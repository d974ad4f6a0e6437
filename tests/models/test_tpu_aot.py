"""The decoder's kernels and memory, compiled ahead of time for a TPU v5e of eight chips, on a host
that has none.

Not part of the usual run. The one command, where `pip install "jax[tpu]"` has put libtpu:

    python -m pytest -n 0 -m tpu_aot tests/models/test_tpu_aot.py
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rljax.config import OptimizerConfig
from rljax.kernels.grouped_matmul import grouped_matmul
from rljax.learn.optimizers import make_optimizer
from rljax.learn.state import new_train_state, optimizer_step
from rljax.mesh import BATCH_AXES, HOST_MEMORY, make_mesh
from rljax.models.attention import attention, attention_cached

pytestmark = pytest.mark.tpu_aot
ROWS, TOKENS = 8, 4096
MESHES = {
    "fsdp=4 x tensor=2": dict(fsdp=4, tensor=2),
    "fsdp=4 x context=2": dict(fsdp=4, context=2),
}
# name: (heads, kv heads, E, F, options, sinks)
REQUESTS = {
    "causal": (16, 4, 128, 128, {}, False),
    "window": (16, 4, 128, 128, dict(window=512), False),
    "soft_cap": (16, 4, 256, 256, dict(soft_cap=50.0), False),
    "sinks": (16, 2, 64, 64, dict(window=128), True),
    "latent": (16, 16, 192, 128, {}, False),
}


def compile_training(mesh, request, *, rows=ROWS, tokens=TOKENS, dtype=jnp.bfloat16, impl="auto"):
    """Forward and backward of `attention` on `mesh`, compiled by the TPU's own compiler."""
    heads, kv_heads, e, f, options, with_sinks = request

    def array(shape, dtype, *axes):
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    sizes = ((heads, e), (kv_heads, e), (kv_heads, f))
    axes = (BATCH_AXES, "context", "tensor") if mesh.size > 1 else ()
    q, k, v = (array((rows, tokens, *size), dtype, *axes) for size in sizes)
    segments = array((rows, tokens), jnp.int32, *axes[:1])
    sinks = array((heads,), jnp.float32) if with_sinks else None
    run = functools.partial(attention, mesh=mesh, scale=e**-0.5, impl=impl, **options)

    def loss(q, k, v, sinks, segments):
        return jnp.sum(run(q, k, v, segments, sinks=sinks).astype(jnp.float32) ** 2)

    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))
    return gradient.lower(q, k, v, sinks, segments).compile()


def bytes_of_scores(request):
    """The float32 scores of one chip: MESHES split the rows by 4 and the heads by 2."""
    return 4 * (ROWS // 4) * (request[0] // 2) * TOKENS**2


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("sizes", MESHES)
def test_training_runs_the_kernel_and_holds_no_matrix_of_scores(chips, sizes, name):
    program = compile_training(make_mesh(**MESHES[sizes], devices=chips), REQUESTS[name])
    text = program.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3  # forward, dq, dk and dv
    assert not re.findall(rf"\w+\[[\d,]*{TOKENS},{TOKENS}\]", text)
    assert program.memory_analysis().temp_size_in_bytes < bytes_of_scores(REQUESTS[name]) / 8
    # Ulysses: q, k, v and the output there, their gradients back; without context, no exchange.
    assert text.count(" all-to-all(") == (8 if "context" in sizes else 0)


@pytest.mark.parametrize("name", ["causal", "window", "latent"])
def test_a_ring_runs_the_kernel_at_every_hop(chips, name):
    """12 heads over 8 chips: a hop's kernels run while the next keys arrive."""
    heads, kv_heads, *rest = REQUESTS[name]
    request = (12, 12 if kv_heads == heads else 4, *rest)
    mesh = make_mesh(fsdp=1, context=8, devices=chips)
    program = compile_training(mesh, request, rows=1, tokens=8 * TOKENS)
    text = program.as_text()
    # A device's own tokens, then two pairs of chunks in the loop over hops; forward, dq, dk and dv.
    # A window reaches over one neighbour, whose tokens come in one piece.
    calls = 3 * (2 if name == "window" else 3)
    assert text.count('custom_call_target="tpu_custom_call"') == calls
    assert text.count(" collective-permute-start(") >= 4 and " all-to-all(" not in text
    for size in (TOKENS, TOKENS // 2):  # of a device, of a chunk
        assert not re.findall(rf"\w+\[[\d,]*{size},{size}\]", text)
    # A few float32 arrays like a device's queries, in whole lanes; the scores of its own tokens
    # alone are more.
    queries = 4 * TOKENS * request[0] * -(-request[2] // 128) * 128
    assert 10 * queries < 4 * TOKENS**2 * request[0]
    assert program.memory_analysis().temp_size_in_bytes < 10 * queries


def test_the_bounds_above_are_broken_by_the_plain_form(chips):
    mesh = make_mesh(**MESHES["fsdp=4 x tensor=2"], devices=chips)
    program = compile_training(mesh, REQUESTS["causal"], impl="reference")
    assert "tpu_custom_call" not in program.as_text()
    assert re.findall(rf"f32\[[\d,]*{TOKENS},{TOKENS}\]", program.as_text())
    assert program.memory_analysis().temp_size_in_bytes > bytes_of_scores(REQUESTS["causal"])


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "e", "f", "dtype"),
    [
        (8, 4, 2, 16, 16, jnp.float32),
        (300, 4, 1, 80, 80, jnp.bfloat16),
        (640, 4, 4, 24, 16, jnp.bfloat16),
        (1024, 4, 2, 256, 256, jnp.float32),
    ],
)
def test_sizes_that_fit_no_lane_run_the_kernel(chips, tokens, heads, kv_heads, e, f, dtype):
    mesh = make_mesh(1, 1, 1, devices=chips[:1])
    request = (heads, kv_heads, e, f, dict(window=5, soft_cap=2.0), True)
    program = compile_training(mesh, request, rows=2, tokens=tokens, dtype=dtype)
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 3


def test_a_cached_decode_step_moves_no_cache(chips):
    mesh = make_mesh(fsdp=4, tensor=2, devices=chips)
    rows, heads, kv_heads, e = 32, 16, 4, 128

    def array(shape, dtype, *axes):
        sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES, *axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    q = array((rows, 1, heads, e), jnp.bfloat16, None, "tensor")
    cache = array((rows, kv_heads, TOKENS, e), jnp.bfloat16, "tensor")
    allowed = array((rows, 1, TOKENS), jnp.bool_)
    step = jax.jit(functools.partial(attention_cached, scale=e**-0.5, soft_cap=30.0))
    program = step.lower(q, cache, cache, allowed).compile()
    moved = r" (all-gather|all-to-all|all-reduce|collective-permute)"
    assert not re.findall(moved, program.as_text())
    bytes_of_cache = 2 * int(np.prod(cache.shape)) // mesh.size
    assert program.memory_analysis().temp_size_in_bytes < bytes_of_cache / 2


# -- memory of the hosts


def compile_step(device, on_host):
    """A gradient and the optimizer's step in one program, the state donated; four gated layers, so
    that the backward pass needs more than the update. Returns its bytes and those of the weights.
    """
    here = NamedSharding(make_mesh(1, 1, 1, devices=[device]), PartitionSpec())
    optimizer = make_optimizer(OptimizerConfig(lr=1e-5), 0)

    def place(x, s=here):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)

    sizes = {"gate": (4, 1024, 2048), "up": (4, 1024, 2048), "down": (4, 2048, 1024)}
    params = {k: jax.ShapeDtypeStruct(size, jnp.float32) for k, size in sizes.items()}
    create = functools.partial(new_train_state, optimizer=optimizer)
    state = jax.tree.map(place, jax.eval_shape(create, params))
    if on_host:

        def send(x):
            return place(x, here.with_memory_kind(HOST_MEMORY) if x.ndim else here)

        state = dataclasses.replace(state, opt_state=jax.tree.map(send, state.opt_state))

    def layer(x, w):
        return x + (jnp.tanh(x @ w["gate"]) * (x @ w["up"])) @ w["down"], None

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, x):
        def total(params):
            return jnp.sum(jax.lax.scan(layer, x, params)[0] ** 2)

        loss, gradient = jax.value_and_grad(total)(state.params)
        return optimizer_step(state, gradient, loss, optimizer)[0]

    program = step.lower(state, place(jnp.zeros((8192, 1024)))).compile()
    return program.memory_analysis(), sum(4 * int(np.prod(size)) for size in sizes.values())


def test_moments_on_the_host_lower_the_peak_of_a_step(chips):
    (off, weights), (on, _) = (compile_step(chips[0], on_host) for on_host in (False, True))
    assert off.host_argument_size_in_bytes == 0 and off.argument_size_in_bytes > 3 * weights
    assert on.host_argument_size_in_bytes >= 2 * weights  # both moments
    assert on.host_alias_size_in_bytes >= 2 * weights  # donated: written back in place
    peaks = [x.argument_size_in_bytes + x.temp_size_in_bytes for x in (off, on)]
    # Nothing of them is there during the backward pass; the update, which fetches all, needs less.
    assert peaks[1] < peaks[0] - 1.9 * weights, (peaks, weights)


# -- experts


def compile_experts(chips, platform: str, sizes: dict, groups=256):
    """The gradient of a grouped product of `groups` matrices over a mesh, each device with its own
    rows, its groups and its columns; and the bytes of the matrices on a chip."""
    mesh = make_mesh(**sizes, devices=chips[: math.prod(sizes.values())])
    rows, inside, outside = 8192, 2048, 1536
    split = dict(x=("expert",), w=("expert", None, "tensor"), sizes=("expert",))
    shapes = dict(x=(rows, inside), w=(groups, inside, outside), sizes=(groups,))

    def array(name):
        dtype = jnp.int32 if name == "sizes" else jnp.bfloat16
        sharding = NamedSharding(mesh, PartitionSpec(*split[name]))
        return jax.ShapeDtypeStruct(shapes[name], dtype, sharding=sharding)

    def product(x, w, sizes):
        x, sizes = (jax.lax.pcast(a, "tensor", to="varying") for a in (x, sizes))
        return grouped_matmul(x, w, sizes, platform=platform)

    spread = jax.shard_map(
        product,
        mesh=mesh,
        in_specs=tuple(PartitionSpec(*split[name]) for name in split),
        out_specs=PartitionSpec("expert", "tensor"),
    )

    def total(*args):
        return jnp.sum(spread(*args).astype(jnp.float32) ** 2)

    run = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))
    return run.lower(*map(array, split)).compile(), 2 * math.prod(shapes["w"]) // mesh.size


@pytest.mark.parametrize("sizes", [dict(fsdp=1), dict(fsdp=1, expert=4, tensor=2)])
def test_experts_run_the_kernels_and_their_gradient_copies_no_matrix(chips, sizes):
    sizes = dict(data=1, tensor=1) | sizes
    program, matrices = compile_experts(chips, "tpu", sizes)
    calls = re.findall(
        r"%([\w\-.]+) = [^\n]* custom-call\([^\n]*tpu_custom_call", program.as_text()
    )
    assert sum(name.startswith("ragged-dot") for name in calls) == 2, calls  # the blocks; their sum
    assert sum("gmm" in name for name in calls) == 2, calls  # for the rows, for the matrices
    plain = compile_experts(chips, "gpu", sizes)[0]
    temporary = [x.memory_analysis().temp_size_in_bytes for x in (program, plain)]
    assert temporary[0] < temporary[1] - 0.9 * matrices, (temporary, matrices)
