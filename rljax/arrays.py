"""Host and device: the one place where host code reads device arrays and places its own.

`fetch` and `place` are the only two ways in and out: several hosts must agree on both, so that
`np.asarray` and `jax.device_put` of batches anywhere else would be a bug that one host never shows.
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rljax import heartbeat, hosts
from rljax.mesh import in_device_memory, is_on_host, replicated, row_sharding, row_shards
from rljax.tracking import timing


def fetch(tree):
    """Copies arrays of the devices to numpy arrays, the same on every host. Waits until
    they are computed.

    Of arrays that are split over several hosts every host must call it, in the same order.
    """
    if hosts.count() == 1:
        return jax.device_get(tree)
    with heartbeat.waiting():  # for devices, and so for the hosts whose programs they run with
        return _fetched(tree)


def _fetched(tree):
    leaves, structure = jax.tree.flatten(tree)
    spread = [i for i, x in enumerate(leaves) if _is_spread(x)]
    if spread:
        parts = [leaves[i] for i in spread]
        for i, x in zip(spread, _gathered(parts), strict=True):
            leaves[i] = x
    elsewhere = [i for i, x in enumerate(leaves) if _is_apart(x)]
    if elsewhere:
        for i, x in zip(elsewhere, _told([leaves[i] for i in elsewhere]), strict=True):
            leaves[i] = x
    return jax.tree.unflatten(structure, [_own(x) for x in leaves])


def _is_spread(x) -> bool:
    """Returns whether this host holds a part of the array only."""
    return isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated


def _is_apart(x) -> bool:
    """Returns whether the array lies on a mesh without devices of some host
    (rljax.setup.placement). What lies on no mesh is a host's own."""
    on_mesh = isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding)
    return on_mesh and _hosts_of(x.sharding.mesh) < hosts.count()


@functools.lru_cache(maxsize=64)
def _hosts_of(mesh: Mesh) -> int:
    return len({device.process_index for device in mesh.devices.flat})


def _told(arrays: list[jax.Array]) -> list[np.ndarray]:
    """Returns arrays that each of their devices holds whole as numpy arrays of every host. One
    program sums their bits with zeros, so that NaN and -0 stay what they are."""
    devices = jax.devices()
    by_device = NamedSharding(Mesh(np.array(devices), ("device",)), PartitionSpec("device"))
    replicated_layout = NamedSharding(by_device.mesh, PartitionSpec())

    def spread(x):
        source = devices.index(min(x.sharding.device_set, key=lambda device: device.id))
        bits = np.dtype(f"uint{8 * x.dtype.itemsize}")

        def shard(index):
            if index[0].start == source:
                local = x if x.is_fully_addressable else x.addressable_data(0)
                return np.asarray(local).view(bits)[None]
            return np.zeros((1, *x.shape), bits)

        return jax.make_array_from_callback((len(devices), *x.shape), by_device, shard, dtype=bits)

    copies = jax.jit(_summed, out_shardings=[replicated_layout] * len(arrays))(
        [spread(x) for x in arrays]
    )
    return [
        np.asarray(bits.addressable_data(0)).view(x.dtype)
        for bits, x in zip(copies, arrays, strict=True)
    ]


def _summed(arrays):
    return [jnp.sum(x, axis=0, dtype=x.dtype) for x in arrays]


def _same(arrays):
    return arrays


def _gathered(arrays: list[jax.Array]) -> list[jax.Array]:
    """Returns the arrays whole on every device, by one program."""
    layouts = [
        NamedSharding(x.sharding.mesh, PartitionSpec(), memory_kind=x.sharding.memory_kind)
        for x in arrays
    ]
    return jax.jit(_same, out_shardings=layouts)(arrays)


def _own(x):
    """Returns the value of an array of which this host holds all, or a copy of all."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = x.addressable_data(0)
    return jax.device_get(x)


def place(tree, mesh: Mesh):
    """Places arrays [B, ...] with their rows split over the mesh; arrays whose rows do not divide,
    and scalars, are whole on every device.

    With several hosts numpy arrays are equal on all of them, and each host builds its own rows.
    """

    def put(x):
        fits = np.ndim(x) > 0 and np.shape(x)[0] % row_shards(mesh) == 0
        return put_whole(x, row_sharding(mesh) if fits else replicated(mesh))

    return jax.tree.map(put, tree)


def put_whole(x, sharding: NamedSharding):
    """Places an array that every host has whole, or a device array, with this layout."""
    if hosts.count() == 1 or isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    x = np.asarray(_own(x))  # device_put would compare it on all hosts, and NaN equals nothing
    return jax.make_array_from_callback(x.shape, sharding, lambda rows: x[rows], dtype=x.dtype)


def of_each_host(flag: bool, mesh: Mesh) -> jax.Array:
    """Gathers what each host says into bools [mesh.size], one for every device: the one
    input of a program that may differ between hosts, for programs that return what all of
    them have in common."""
    layout = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.make_array_from_callback(
        (mesh.size,), layout, lambda _: np.array([flag]), dtype=bool
    )


def told_to_stop(mesh: Mesh) -> jax.Array | None:
    """Gathers what each host was told about stopping, as `of_each_host` does: bools [mesh.size];
    None with one process."""
    if hosts.count() == 1:
        return None
    return of_each_host(bool(hosts.asked_to_stop()), mesh)


# -- roles on devices of their own (rljax.setup.placement)


def known_to_all(tree):
    """Copies the arrays that lie on devices of one of several hosts alone to numpy arrays of all
    hosts, and leaves the others as they are: orbax writes no others."""
    return jax.tree.map(lambda x: fetch(x) if is_of_one_host(x) else x, tree)


def is_of_one_host(x) -> bool:
    """Returns whether one of several hosts holds all devices that the array lies on."""
    return _is_apart(x) and _hosts_of(x.sharding.mesh) == 1


def moved(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Moves a device array of any shape to a layout on other devices: they copy it by themselves
    where one host sees all of them, else it goes by way of the hosts' memory."""
    if hosts.count() == 1 or x.sharding.device_set == sharding.device_set:
        return jax.device_put(x, sharding)
    return put_whole(fetch(x), sharding)


def moved_rows(tree, mesh: Mesh, role: str):
    """Returns arrays [B, ...] with their rows split over `mesh`: as they are where they lie on its
    devices, or on none in particular, else moved there, which is recorded as the role's."""
    devices, arrays = set(mesh.devices.flat), jax.tree.leaves(tree)
    if not any(_is_elsewhere(x, devices) for x in arrays):
        return tree
    start = time.monotonic()
    placed = jax.block_until_ready(place(tree if hosts.count() == 1 else fetch(tree), mesh))
    size = sum(x.nbytes for x in arrays)
    timing.moved(role, moved_bytes=size, moved_s=time.monotonic() - start)
    return placed


def _is_elsewhere(x, devices: set) -> bool:
    return isinstance(x, jax.Array) and x.committed and x.sharding.device_set != devices


def weights_of(params, role: str):
    """Returns weights in the memory of the devices. Those that wait on the host are copied, which
    is recorded as the role's; let go of them after use."""
    waiting = [x for x in jax.tree.leaves(params) if is_on_host(x)]
    if not waiting:
        return params
    start = time.monotonic()
    copies = jax.block_until_ready(in_device_memory(params))
    size = sum(x.nbytes for x in waiting)
    timing.moved(role, weights_bytes=size, weights_s=time.monotonic() - start)
    return copies
