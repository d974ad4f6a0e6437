"""Slices and the wires between chips, compiled ahead of time on a host that has no TPU.

python -m pytest -n 0 -m tpu_aot tests/plan/test_slices_tpu.py
"""

import numpy as np
import pytest
from test_plan import tiny

from rljax.errors import InputError
from rljax.mesh import make_mesh, slice_count
from rljax.plan.chips import stand_ins, topology_devices
from rljax.plan.compiled import make_plan
from rljax.plan.table import plan_json, plan_text

pytestmark = pytest.mark.tpu_aot
DENSE = "decoder(layers=2, embed=256, mlp=512, heads=4, kv_heads=4, head_dim=128)"
SIZES = dict(
    model=DENSE,
    model_settings__dtype="bfloat16",
    data__max_prompt_tokens=128,
    sampler__max_response_tokens=128,
    batch__prompts_per_step=32,
    batch__samples_per_prompt=4,
    batch__sequences_per_optimizer_step=128,
    batch__tokens_per_microbatch=256 * 32,
    mesh__data=2,
    mesh__fsdp=-1,
    mesh__tensor=1,
)


@pytest.fixture(scope="module")
def two_slices(devices_of):
    return topology_devices("2xv5e:4x4")


def planned(two_slices, **changes):
    return make_plan(tiny(**{**SIZES, **changes}), *two_slices, "2xv5e:4x4")


def distance(a, b, sides) -> int:
    """Wires from one chip to another; v5e has no wires around but at 16."""
    away = [abs(x - y) for x, y in zip(a.coords, b.coords, strict=True)]
    return sum(min(d, side - d) if side == 16 else d for d, side in zip(away, sides, strict=True))


@pytest.mark.parametrize("topology", ["v5e:4x4", "v5e:4x8", "v5p:4x4x4", "v6e:8x8", "tpu7x:4x4x4"])
@pytest.mark.parametrize("tensor", [4, 8])
def test_neighbours_on_the_innermost_axes_are_neighbours_on_the_wires(devices_of, topology, tensor):
    devices, _ = topology_devices(topology)
    mesh = make_mesh(1, -1, tensor, devices=devices)
    assert set(mesh.devices.flat) == set(devices)
    sides = tuple(int(n) for n in np.max([d.coords for d in devices], axis=0) + 1)
    rows = mesh.devices.reshape(-1, tensor)
    steps = [distance(a, b, sides) for row in rows for a, b in zip(row, row[1:], strict=False)]
    # A block of chips in the order of its rows: one wire, or one row back.
    assert np.mean(steps) < 2
    assert max(np.ptp([d.coords for d in row], axis=0).max() for row in rows) < tensor


def test_data_alone_reaches_from_one_slice_to_the_other(two_slices):
    devices, _ = two_slices
    mesh = make_mesh(4, -1, 2, devices=devices)
    assert slice_count(mesh) == 2 and mesh.devices.shape == (4, 4, 1, 1, 2)
    for half, index in ((mesh.devices[:2], 0), (mesh.devices[2:], 1)):
        assert {device.slice_index for device in half.flat} == {index}
    with pytest.raises(InputError, match="mesh.data=1 does not divide by 2 slices.*mesh.data=2"):
        make_mesh(1, -1, 2, devices=devices)
    with pytest.raises(InputError, match="mesh.slices: got 4; the devices are of 2 slices"):
        make_mesh(4, -1, 2, slices=4, devices=devices)
    # Without a compiler the same mesh, on devices that are not there.
    same = make_mesh(4, -1, 2, devices=stand_ins("2xv5e:4x4")[0])
    assert [d.slice_index for d in same.devices.flat] == [d.slice_index for d in mesh.devices.flat]


@pytest.mark.parametrize("packing", [False, True])
def test_a_step_crosses_once_with_its_gradients_and_decoding_does_not(two_slices, packing):
    plan = planned(two_slices, batch__packing=packing)
    generate, learn = plan.reports
    assert plan.fits and (plan.slices, plan.host_devices) == (2, 4)
    # All gradients, float32, a sixteenth of them on each chip; a sum over two slices sends as much.
    gradients = plan.training.gradients
    assert gradients <= learn.sent_bytes["DCN"] < 1.1 * gradients + 2e5
    assert learn.seconds["DCN"] == learn.sent_bytes["DCN"] / two_slices[1].dcn_bytes_per_s
    assert generate.sent_bytes["DCN"] < 5e4  # whether rows are live, every 16 steps
    assert not [w for r in plan.reports for w in r.warnings if "DCN" in w]
    lines = plan_text(plan).splitlines()
    at = lines.index("per host of 4 devices, to the other of 2 slices")
    size, seconds = lines[at + 3].split()[1:]
    assert lines[at + 3].startswith("learn")
    assert float(size) == pytest.approx(4 * learn.sent_bytes["DCN"] / 1e9, rel=1e-2)
    assert float(seconds) == pytest.approx(learn.seconds["DCN"], rel=1e-2)
    assert plan_json(plan)["slices"] == 2


def test_rows_that_do_not_divide_are_said_to_cross(two_slices):
    """Half as many prompts as shards of rows: the slots of a slice read prompts of the other."""
    plan = planned(two_slices, batch__prompts_per_step=16, batch__samples_per_prompt=8)
    assert [w for r in plan.reports[:1] for w in r.warnings if "DCN" in w]


def test_split_moments_are_an_eighth_and_weights_are_gathered_once(devices_of):
    devices = topology_devices("v5e:2x4")
    sizes = dict(SIZES, mesh__data=8, mesh__fsdp=1, batch__packing=False)
    whole, split = (
        make_plan(tiny(**sizes, mesh__shard_optimizer=on), *devices, "v5e:2x4", only=["learn"])
        for on in (False, True)
    )
    assert split.training.optimizer == pytest.approx(whole.training.optimizer / 8, rel=0.01)
    (before,), (after,) = whole.reports, split.reports
    saved = whole.training.optimizer - split.training.optimizer
    assert before.arguments - after.arguments == pytest.approx(saved, rel=0.02)
    assert after.sent_bytes["data"] < 1.6 * before.sent_bytes["data"]
    assert "stage 1 on data 8" in plan_text(split)
