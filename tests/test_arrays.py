"""fetch and place: the ways of arrays between the host and the devices."""

import jax
import numpy as np
import pytest

from rljax.arrays import fetch, moved_rows, place, weights_of
from rljax.mesh import is_on_host, make_mesh, on_host, replicated
from rljax.tracking import timing


def parts(array) -> set[tuple]:
    """The shapes that the devices hold."""
    return {shard.data.shape for shard in array.addressable_shards}


@pytest.mark.parametrize("meshed", [(2, 4, 1), (2, 1, 4), (1, 1, 8)])
def test_rows_are_split_over_the_mesh_and_come_back(meshed):
    mesh = make_mesh(*meshed)
    shards = meshed[0] * meshed[1]  # of the rows; those of the tensor axis hold the same
    tree = {
        "rows": np.arange(48, dtype=np.float32).reshape(16, 3),
        "row": np.arange(8, dtype=np.int32),
        "number": np.float32(2),
    }
    placed = place(tree, mesh)
    assert all(len(x.sharding.device_set) == 8 for x in placed.values())
    assert parts(placed["rows"]) == {(16 // shards, 3)} and parts(placed["row"]) == {(8 // shards,)}
    assert parts(placed["number"]) == {()}
    back = fetch(placed)
    for name, value in tree.items():
        assert isinstance(back[name], np.ndarray | np.generic) and back[name].dtype == value.dtype
        np.testing.assert_array_equal(back[name], value)


def test_rows_that_do_not_divide_are_whole_on_every_device():
    placed = place([np.arange(6), np.arange(12), np.zeros((0, 3))], make_mesh(2, 4, 1))
    for rows, array in zip((6, 12), placed, strict=False):
        assert parts(array) == {(rows,)} and array.is_fully_replicated
        assert len(array.sharding.device_set) == 8
    assert placed[2].shape == (0, 3)


def test_rows_of_some_of_the_devices_are_moved_to_all_and_that_is_recorded():
    few, all_ = make_mesh(4, devices=jax.devices()[:4]), make_mesh(2, 4, 1)
    rows = place(np.arange(16, dtype=np.int32), few)
    with timing.collect() as timings:
        moved = moved_rows({"rows": rows, "host": np.arange(8)}, all_, "reference")
        assert moved_rows(moved, all_, "reference") is moved
    assert moved["rows"].sharding.device_set == set(jax.devices())
    np.testing.assert_array_equal(fetch(moved["rows"]), np.arange(16))
    assert timings.moves["reference"]["moved_bytes"] == 16 * 4 + 8 * 8


def test_weights_that_wait_on_the_host_are_copied_and_counted():
    whole = replicated(make_mesh(1, 8))
    waits = jax.device_put(np.arange(4, dtype=np.float32), on_host(whole))
    there = jax.device_put(np.arange(16, dtype=np.float32), whole)
    with timing.collect() as timings:
        weights = weights_of({"waits": waits, "there": there}, "scorer")
        assert weights_of(weights, "scorer") is weights
    assert is_on_host(waits) and not is_on_host(weights["waits"])
    np.testing.assert_array_equal(fetch(weights["waits"]), np.arange(4))
    assert timings.moves["scorer"]["weights_bytes"] == 4 * 4


def test_what_is_on_devices_is_placed_again():
    """A batch that one device made, or another layout: the same rows, split."""
    for made in (jax.numpy.arange(16), place(np.arange(16), make_mesh(1, 1, 8))):
        placed = place(made, make_mesh(2, 4, 1))
        assert parts(placed) == {(2,)}
        np.testing.assert_array_equal(fetch(placed), np.arange(16))
