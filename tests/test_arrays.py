"""fetch and place: the ways of arrays between the host and the devices."""

import jax
import numpy as np
import pytest

from rljax.arrays import fetch, place
from rljax.mesh import make_mesh


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
    placed = place([np.arange(6), np.zeros((0, 3))], make_mesh(2, 4, 1))
    assert parts(placed[0]) == {(6,)} and placed[0].is_fully_replicated
    assert len(placed[0].sharding.device_set) == 8 and placed[1].shape == (0, 3)


def test_what_is_on_devices_is_placed_again():
    """A batch that one device made, or another layout: the same rows, split."""
    for made in (jax.numpy.arange(16), place(np.arange(16), make_mesh(1, 1, 8))):
        placed = place(made, make_mesh(2, 4, 1))
        assert parts(placed) == {(2,)}
        np.testing.assert_array_equal(fetch(placed), np.arange(16))
