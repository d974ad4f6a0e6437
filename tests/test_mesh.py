"""The mesh on devices that say nothing of slices: their order, and the parts that play slices."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from test_plan import tiny

from rljax.arrays import place
from rljax.errors import InputError
from rljax.mesh import make_mesh, replica_mesh, row_sharding, slice_count, weight_sharding
from rljax.plan.chips import stand_ins
from rljax.plan.compiled import make_plan
from rljax.plan.table import plan_text


def ids(mesh) -> list[int]:
    return [device.id for device in mesh.devices.flat]


def test_devices_without_wires_keep_their_order():
    for sizes in ((8, 1, 1), (2, 2, 2), (1, 8, 1)):
        assert ids(make_mesh(*sizes)) == list(range(8))
        assert ids(make_mesh(*sizes, devices=jax.devices()[::-1])) == list(range(8))[::-1]
    mesh = make_mesh(2, 2, 2, slices=2)
    assert ids(mesh) == list(range(8)) and (slice_count(mesh), slice_count(mesh, 2)) == (1, 2)
    assert ids(replica_mesh(mesh)) == ids(mesh) and replica_mesh(mesh).shape["data"] == 1


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (dict(data=3, slices=3), "mesh.data=3.* does not divide|does not divide the devices"),
        (dict(data=1, slices=2), "mesh.data=1 does not divide by 2 slices"),
        (dict(data=8, fsdp=1, slices=3), "mesh.slices: got 3; cuts 8 devices of 1 hosts"),
    ],
)
def test_slices_that_cannot_be_are_refused(how, said):
    with pytest.raises(InputError, match=said):
        make_mesh(**how)


@pytest.mark.smoke
def test_slices_are_the_outermost_part_of_data():
    devices, chip = stand_ins("2xv5e:4x4")
    assert len(devices) == 32 and chip.dcn_bytes_per_s == 3.125e9
    for shuffled in (devices, devices[::-1]):
        mesh = make_mesh(4, 2, 4, devices=shuffled)
        assert slice_count(mesh) == 2
        assert [[d.slice_index for d in part.flat] for part in mesh.devices.reshape(2, 16)] == [
            [0] * 16,
            [1] * 16,
        ]
    with pytest.raises(InputError, match="does not divide by 2 slices"):
        make_mesh(1, -1, devices=devices)
    with pytest.raises(InputError, match=r"slices of several sizes: got \[16, 8\]"):
        make_mesh(-1, 1, devices=devices[:-8])


@pytest.mark.parametrize("topology", ["0xv5e:4x4", "2x", "2xv5e", "xv5e:4x4", "2xv9:4x4"])
def test_what_is_no_topology_of_slices_is_refused(topology):
    with pytest.raises(InputError, match="topology.*Nx before it"):
        stand_ins(topology)


def test_tensor_ranks_have_the_same_rows_and_data_ranks_others():
    mesh = make_mesh(2, 2, 2)
    batch = place(np.arange(8 * 3, dtype=np.int32).reshape(8, 3), mesh)
    at = dict(zip(mesh.devices.flat, np.ndindex(mesh.devices.shape), strict=True))
    held = {at[part.device]: np.asarray(part.data) for part in batch.addressable_shards}
    for data, fsdp in np.ndindex(2, 2):
        one, other = (held[data, fsdp, 0, 0, tensor] for tensor in range(2))
        np.testing.assert_array_equal(one, other)
    rows = [set(held[data, fsdp, 0, 0, 0][:, 0]) for data, fsdp in np.ndindex(2, 2)]
    assert sum(map(len, rows)) == 8 == len(set.union(*rows))  # disjoint, and together all
    # Weights the other way round: other parts on tensor ranks, the same on data ranks.
    layout = weight_sharding(mesh, "up", (4, 8), ("embed", "mlp"))
    assert layout.spec == PartitionSpec("fsdp", "tensor")
    weight = jax.device_put(np.arange(32.0).reshape(4, 8), layout)
    held = {at[part.device]: np.asarray(part.data) for part in weight.addressable_shards}
    for fsdp in range(2):
        np.testing.assert_array_equal(held[0, fsdp, 0, 0, 1], held[1, fsdp, 0, 0, 1])
        assert not set(held[0, fsdp, 0, 0, 0].flat) & set(held[0, fsdp, 0, 0, 1].flat)
    assert row_sharding(mesh) == NamedSharding(mesh, PartitionSpec(("data", "fsdp", "expert")))


def test_an_axis_that_does_not_divide_leaves_its_mesh_axis_to_one_that_does():
    """Three heads over tensor=2: embed takes it, where both of its mesh axes divide it."""
    mesh = make_mesh(2, 2, 2)
    for embed, spec in ((4, (("fsdp", "tensor"), None)), (2, ("fsdp", None)), (3, (None, None))):
        layout = weight_sharding(mesh, "k", (embed, 3), ("embed", "kv_heads"))
        assert layout.spec == PartitionSpec(*spec)


def test_a_plan_of_split_moments_is_that_of_stage_1():
    sizes = dict(mesh__data=8, mesh__fsdp=1, mesh__tensor=1)
    devices, chip = stand_ins("v5e:2x4")
    whole, split = (
        make_plan(tiny(**sizes, mesh__shard_optimizer=on), devices, chip, "v5e:2x4", compile=False)
        for on in (False, True)
    )
    w = whole.weights
    assert (whole.training.weights, whole.training.gradients) == (4 * w, 4 * w)
    assert (split.training.weights, split.training.gradients) == (4 * w, 4 * w)
    assert whole.training.optimizer == pytest.approx(8 * w, rel=1e-3)
    assert split.training.optimizer == pytest.approx(8 * w / 8, rel=0.05)
    assert "* this config, stage 0 " in plan_text(whole)
    assert "* this config, stage 1 on data 8 " in plan_text(split)
