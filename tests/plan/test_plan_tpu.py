"""plan for TPUs, compiled ahead of time on a host that has none.

Not part of the usual run. The one command, where `pip install "jax[tpu]"` has put libtpu:

    python -m pytest -n 0 -m tpu_aot tests/plan/test_plan_tpu.py
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from test_plan import tiny

from rljax.chips import GIB
from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.plan.chips import topology_devices
from rljax.plan.compiled import Plan, make_plan, report
from rljax.plan.memory import FACTOR, MemoryEstimate
from rljax.plan.programs import ProgramCall
from rljax.plan.table import plan_text

pytestmark = pytest.mark.tpu_aot


@pytest.fixture(scope="module")
def topology():
    pytest.importorskip("libtpu", reason='libtpu is absent: pip install "jax[tpu]"')
    # What is compiled for chips that are not there cannot be read back from the cache on disk.
    jax.config.update("jax_enable_compilation_cache", False)
    yield topology_devices("v5e:2x4")
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.parametrize(
    ("text", "devices", "hbm_gib"),
    [
        ("v5e:2x4", 8, 15.75),
        ("v5p:2x2x1", 4, 95.73),
        ("v6e:2x4", 8, 31.24),
        ("v4:2x2x1", 8, 15.25),
        ("v7x:2x2x1", 8, 94.74),
        ("v5e:1x1", 1, 15.75),
    ],
)
def test_topologies_have_their_chips(topology, text, devices, hbm_gib):
    found, chip = topology_devices(text)  # of v4 and v7x JAX sees two devices in a chip
    assert (len(found), round(chip.hbm_bytes / GIB, 2)) == (devices, hbm_gib)
    # What the compiler says that it has, of a program that needs more.
    mesh = make_mesh(1, 1, 1, devices=found[:1])
    whole = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((int(hbm_gib) + 1, 2**28), jnp.float32, sharding=whole)
    refused = report(ProgramCall("big", jax.jit(lambda x: jnp.tanh(x) + 1), (x,)), {}, mesh, chip)
    assert f"available HBM ({hbm_gib:.2f}G)" in refused.error


@pytest.mark.parametrize("text", ["v9:2x4", "v5p:5x5x5"])
def test_what_is_no_topology_is_refused(topology, text):
    with pytest.raises(InputError, match="topology"):
        topology_devices(text)


def test_every_program_of_a_step_on_eight_chips(topology):
    devices, chip = topology
    config = tiny(
        model="decoder(layers=2, embed=256, mlp=512, heads=4, kv_heads=2, head_dim=128)",
        model_settings__dtype="bfloat16",
        data__max_prompt_tokens=128,
        sampler__max_response_tokens=128,
        batch__tokens_per_microbatch=4096,
    )
    plan = make_plan(config, devices, chip, "v5e:2x4")
    generate, learn = plan.reports
    assert plan.fits and (generate.name, learn.name) == ("generate", "learn")
    held = plan.estimate.held
    assert learn.parts == held and learn.beside == 0
    assert generate.beside == sum(held.values()) - held["actor weights"]
    assert learn.aliased >= held["actor weights"] + held["actor optimizer"]
    # Attention is a kernel, of which the compiler sees nothing: two forward passes, and of the
    # third with its recomputation and the backward kernels.
    assert 0.02 * learn.flops < learn.kernel_flops < 0.6 * learn.flops
    assert set(learn.sent_bytes) >= {"fsdp", "tensor"} and learn.binding in learn.seconds
    for one, parts in ((generate, plan.estimate.generate), (learn, plan.estimate.learn)):
        assert one.hbm_bytes > one.arguments and one.least_s > 0
        assert 1 / FACTOR < sum(parts.values()) / one.temporaries < FACTOR, one.name
    assert not [w for r in plan.reports for w in r.warnings if "whole on every" in w]
    assert "v5e:2x4, 15.75 GiB each; mesh fsdp 4 x tensor 2" in plan_text(plan)


def test_a_program_that_the_chip_cannot_hold_is_reported_with_its_size(topology):
    mesh = make_mesh(1, 1, 1, devices=topology[0][:1])
    whole = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((5, 2**30), jnp.float32, sharding=whole)
    found = report(
        ProgramCall("big", jax.jit(lambda x: jnp.tanh(x) + 1), (x,)), {}, mesh, topology[1]
    )
    assert "HBM" in found.error and found.total > 2 * 5 * 4 * GIB  # its input and its output
    plan = Plan("v5e:1x1", {}, topology[1], MemoryEstimate({}, {}, {}), [found], {})
    assert not plan.fits and "does not fit" in plan_text(plan) and "error: big" in plan_text(plan)
