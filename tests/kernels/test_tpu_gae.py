"""The GAE kernel, compiled ahead of time for three TPUs on a host that has none: one pass over the
data, no copies beside it, and rows that stay on their device.

Not part of the usual run. The one command, where `pip install "jax[tpu]"` has put libtpu:

    python -m pytest -n 0 -m tpu_aot tests/kernels/test_tpu_gae.py
"""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rljax import advantages
from rljax.batch import Batch
from rljax.kernels.gae import discounted_sum, gae, next_chosen
from rljax.losses.q_function import lambda_returns
from rljax.mesh import make_mesh, row_sharding

pytestmark = pytest.mark.tpu_aot
CHIPS = ("v5e:2x4", "v5p:2x2x1", "v6e:2x4")
SHAPES = ((512, 8192), (64, 32768))


def arrays(sharding, shape, dtypes):
    return [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for dtype in dtypes]


def packed_gae(rewards, values, mask, ids, lam=0.95, impl="auto"):
    return gae(rewards, values, mask, gamma=0.99, lam=lam, segment_ids=ids, impl=impl)


FLOAT, INT = jnp.float32, jnp.int32
CALLS = {
    "gae": (packed_gae, [FLOAT, FLOAT, FLOAT, INT]),
    "gae, lambda per token": (packed_gae, [FLOAT, FLOAT, FLOAT, INT, FLOAT]),
    "discounted_sum": (lambda x, mask, ids: discounted_sum(x, 0.9, mask, ids), [FLOAT, FLOAT, INT]),
    "next_chosen": (next_chosen, [FLOAT, FLOAT, INT]),
}


def bytes_moved(program):
    """(bytes the program reads and writes, bytes of its inputs and outputs) on one device."""
    memory = program.memory_analysis()
    least = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return program.cost_analysis()["bytes accessed"], least


def copies(program):
    return re.findall(r"= \S+ (?:copy|copy-start|transpose|pad|gather)\(", program.as_text())


def check_one_pass(program):
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 1
    moved, least = bytes_moved(program)
    assert moved <= 1.2 * least
    assert program.memory_analysis().temp_size_in_bytes < 0.01 * least
    assert copies(program) == []


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chip", CHIPS)
def test_one_pass_over_the_data(devices_of, chip, shape):
    mesh = make_mesh(1, 1, 1, devices=devices_of(chip)[:1])
    for function, dtypes in CALLS.values():
        given = arrays(NamedSharding(mesh, PartitionSpec()), shape, dtypes)
        check_one_pass(jax.jit(function).lower(*given).compile())


def test_the_bounds_above_are_broken_by_the_plain_form(devices_of):
    mesh = make_mesh(1, 1, 1, devices=devices_of("v5e:2x4")[:1])
    given = arrays(NamedSharding(mesh, PartitionSpec()), (64, 512), CALLS["gae"][1])
    program = jax.jit(lambda *a: packed_gae(*a, impl="xla")).lower(*given).compile()
    moved, least = bytes_moved(program)
    assert "tpu_custom_call" not in program.as_text() and moved > 1.2 * least


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (9, 129), (7, 300), (130, 1300)])
def test_ragged_shapes_compile(devices_of, shape):
    mesh = make_mesh(1, 1, 1, devices=devices_of("v5e:2x4")[:1])
    given = arrays(NamedSharding(mesh, PartitionSpec()), shape, CALLS["gae"][1])
    program = jax.jit(packed_gae).lower(*given).compile()
    assert "tpu_custom_call" in program.as_text()


@pytest.mark.parametrize("sizes", [dict(fsdp=4, tensor=2), dict(data=2, fsdp=2, context=2)])
def test_rows_over_eight_chips_stay_where_they_are(devices_of, sizes):
    mesh = make_mesh(**sizes, devices=devices_of("v5e:2x4"))
    given = arrays(row_sharding(mesh), (512, 8192), CALLS["gae"][1])
    program = jax.jit(packed_gae).lower(*given).compile()
    check_one_pass(program)
    assert not re.findall(r"all-gather|all-to-all|collective-permute|all-reduce", program.as_text())
    assert bytes_moved(program)[1] < 512 * 8192 * 24 / 4 * 1.01  # a quarter of the rows


def test_the_estimators_run_one_kernel_each(devices_of):
    """As a learning program calls them: a batch whose rows lie over the mesh."""
    mesh = make_mesh(fsdp=4, tensor=2, devices=devices_of("v5e:2x4"))
    x, ids = arrays(row_sharding(mesh), (512, 2048), [FLOAT, INT])
    given = dict(tokens=ids, segment_ids=ids, positions=ids, mask=x, rewards=x, values=x)
    batch = Batch(**given, ref_logprobs=x, old_logprobs=x)

    def dqo(batch):
        return lambda_returns(batch, batch.values, logprobs=batch.old_logprobs, beta=0.1, lam=0.9)

    for estimate in (lambda b: advantages.gae(b, whiten=False), advantages.reinforce, dqo):
        text = jax.jit(estimate).lower(batch).compile().as_text()
        assert text.count('custom_call_target="tpu_custom_call"') == 1
        assert not re.findall(r"all-gather|all-to-all|collective-permute| while\(", text)
