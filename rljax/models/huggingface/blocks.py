"""Moves weights between the mesh and tensors on disk, a block of rows at a time.

A block has the layout and dtype that it has on disk. Layout and dtype change on the device, in
place of the weight's own buffer, so the host holds a block and never a weight.

Of several hosts each reads a share of a block's rows, whatever the layout of the weight, and the
devices exchange them: every byte is read once, in long pieces. The rows of a host's own devices
would be all rows wherever columns are split, as fsdp does, and with replicas.

Every device takes the same rows of its own part of a tensor in one step, and where the experts are
split over devices, of its own expert's tensor: one program per kind of weight, no communication.

Axes of a block: [*ways, T * rows, ...]: `ways` how many ways the leading axes of the weight (layer,
expert) are split, T how many ways the rows are; the rest as on disk.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rljax import hosts
from rljax.models.model import Model
from rljax.models.names import Piece, disk_pieces
from rljax.models.trees import flattened

BLOCK_BYTES = 16 * 2**20  # of a block; a single row per device may exceed it
# Of a block of a GGUF file, whose numbers are several times as large as their codes: some blocks
# are on their way to a device at once, and a small model on a small machine has a small file.
DECODED_BYTES = 2**20
MOST_SHARES = 8  # so many times larger is a block that hosts share: each reads long pieces


@dataclasses.dataclass(frozen=True)
class WeightPart:
    """One of our weights, of which a group of tensors holds a piece."""

    path: tuple[str, ...]
    piece: Piece  # of the first tensor; the others differ in the index only
    spec: tuple  # the mesh axis, or axes, of every axis of the weight, or None
    start: tuple[int, ...]  # the index of the piece within a device's part of the weight

    @property
    def block_spec(self) -> PartitionSpec:
        """Layout of a block on the mesh."""
        leading = len(self.start)
        return PartitionSpec(*self.spec[:leading], *self.piece.disk_axes(self.spec[leading:]))


@dataclasses.dataclass(frozen=True)
class TensorGroup:
    """Tensors that move together: one for each device of the axes that split the experts."""

    names: tuple[str, ...]  # in the order of the blocks' leading axes
    ways: tuple[int, ...]
    row_ways: int
    parts: tuple[WeightPart, ...]

    @property
    def disk_shape(self) -> tuple[int, ...]:
        """Shape on disk of the tensor's rows that the group moves."""
        return self.parts[0].piece.part_shape

    def row_starts(
        self, itemsize: int, shares: int = 1, most_bytes: int = BLOCK_BYTES
    ) -> tuple[int, tuple[int, ...]]:
        """Returns (rows of a block, where in a device's rows each block starts). All blocks have
        one shape: the last may repeat rows of the one before. Rows divide by `shares` where the
        tensor has so many, and a block is larger then."""
        rows = self.disk_shape[0] // self.row_ways
        unit = self.parts[0].piece.unit
        row_bytes = math.prod(self.disk_shape[1:]) * itemsize
        fits = most_bytes // max(row_bytes * self.row_ways * math.prod(self.ways), 1)
        shared = math.lcm(unit, shares // math.gcd(shares, self.row_ways))
        if shares > 1 and shared <= rows:
            unit, fits = shared, fits * min(hosts.count(), MOST_SHARES)
        count = min(max(fits // unit, 1) * unit, rows)
        return count, tuple(min(at, rows - count) for at in range(0, rows, max(count, 1)))

    def spans(self, start: int, count: int):
        """Yields the parts of each tensor that the block at `start` holds: (tensor, its index in
        the leading axes, first row in the block, first row in the tensor)."""
        whole, before = self.disk_shape[0] // self.row_ways, self.parts[0].piece.first_row
        indices = itertools.product(*map(range, self.ways))
        for name, index in zip(self.names, indices, strict=True):
            for k in range(self.row_ways):
                yield name, index, k * count, before + k * whole + start

    def empty(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Returns an unwritten block of `count` rows per device, in the shape of `block_shape`."""
        return np.empty(self.block_shape(count), dtype)

    def block_shape(self, count: int) -> tuple[int, ...]:
        """Returns the shape [*ways, row_ways * count, ...] of a block of `count`
        rows per device."""
        return (*self.ways, self.row_ways * count, *self.disk_shape[1:])


def _ways(mesh: Mesh, axes) -> tuple[int, ...]:
    """Into how many parts entries of a spec split their axes."""
    names = ((a,) if isinstance(a, str) else a or () for a in axes)
    return tuple(math.prod(mesh.shape[name] for name in each) for each in names)


def groups(model: Model, skip: frozenset[str] = frozenset()) -> list[TensorGroup]:
    """Returns the groups of all tensors that a checkpoint of `model` holds, but those
    named in `skip`."""
    of_path: dict[tuple, dict[tuple, tuple[str, Piece]]] = {}
    for name, pieces in disk_pieces(model).items():
        for piece in pieces:
            if name not in skip:
                of_path.setdefault(piece.path, {})[piece.index] = (name, piece)
    by_path: dict[tuple, list[tuple]] = {}
    shardings = model.shardings()
    for path, members in of_path.items():
        spec = tuple(functools.reduce(lambda node, key: node[key], path, shardings).spec)
        shape = model.shapes()[path][0]
        leading = len(next(iter(members)))
        ways = _ways(model.mesh, spec[:leading])
        local = [size // n for size, n in zip(shape[:leading], ways, strict=True)]
        for start in itertools.product(*map(range, local)):
            indices = [
                tuple(w * size + at for w, size, at in zip(index, local, start, strict=True))
                for index in itertools.product(*map(range, ways))
            ]
            names = tuple(members[index][0] for index in indices)
            part = WeightPart(path, members[indices[0]][1], spec, start)
            by_path.setdefault((names, part.piece.rows), []).append((ways, part))
    out = []
    for (names, _), pairs in by_path.items():
        (ways, first), parts = pairs[0], tuple(part for _, part in pairs)
        same = [(w, p.piece.part_shape, p.block_spec) for w, p in pairs]
        assert same == [same[0]] * len(same), names
        rows = _ways(model.mesh, first.block_spec[len(ways) :][:1])
        out.append(TensorGroup(names, ways, math.prod(rows), parts))
    return out


@functools.cache
def _create(model: Model):
    """The program that creates every weight, compiled once."""
    made = flattened(model.abstract())

    def create():
        return {path: jnp.zeros(x.shape, x.dtype) for path, x in made.items()}

    return jax.jit(create, out_shardings={path: x.sharding for path, x in made.items()})


def zeros(model: Model) -> dict[tuple, jax.Array]:
    """Returns {path: a weight of zeros in its own shape, created on the mesh}."""
    return _create(model)()


# What a program is compiled for: `piece` without its path and index.
_STATIC = ("mesh", "spec", "block_spec", "piece")


def _kind(part: WeightPart) -> Piece:
    return dataclasses.replace(part.piece, path=part.path[-1:], index=())


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnums=0)
def _put(leaf, block, start, *, mesh, spec, block_spec, piece):
    leading = leaf.ndim - len(piece.shape)

    def local(leaf, block, start):
        value = piece.ours(block.reshape(block.shape[leading:])).astype(leaf.dtype)
        value = value.reshape((1,) * leading + value.shape)
        was = leaf.dtype
        if was.itemsize < 4:
            # As plain bits: XLA on CPU would turn the whole weight to float32 and back to update a
            # bfloat16 one, instead of writing in place. One of float32 it would read and write as
            # a whole because of the bits.
            bits = jnp.dtype(f"uint{8 * was.itemsize}")
            leaf, value = leaf.view(bits), value.view(bits)
        return jax.lax.dynamic_update_slice(leaf, value, tuple(start)).view(was)

    specs = dict(in_specs=(PartitionSpec(*spec), block_spec, PartitionSpec()))
    specs["out_specs"] = PartitionSpec(*spec)
    return jax.shard_map(local, mesh=mesh, **specs)(leaf, block, start)


@functools.partial(jax.jit, static_argnames=(*_STATIC, "rows", "dtype"))
def _get(leaf, start, *, mesh, spec, block_spec, piece, rows, dtype):
    leading = leaf.ndim - len(piece.shape)

    def local(leaf, start):
        sizes = [1] * leading + list(leaf.shape[leading:])
        sizes[leading + piece.inside] = rows // piece.unit
        value = jax.lax.dynamic_slice(leaf, tuple(start), sizes)
        block = piece.theirs(value.reshape(value.shape[leading:])).astype(dtype)
        return block.reshape((1,) * leading + block.shape)

    specs = dict(in_specs=(PartitionSpec(*spec), PartitionSpec()), out_specs=block_spec)
    return jax.shard_map(local, mesh=mesh, **specs)(leaf, start)


def _start(part: WeightPart, row: int) -> np.ndarray:
    """The index of the block of rows from `row` in a device's part of the weight."""
    below = [0] * len(part.piece.shape)
    if below:
        below[part.piece.inside] = row // part.piece.unit
    return np.array([*part.start, *below], np.int32)


def put(leaf: jax.Array, part: WeightPart, mesh: Mesh, block: jax.Array, row: int) -> jax.Array:
    """Returns the weight, in its own shape, with a block [*ways, T * rows, ...] written into it
    from `row` of each device's part; its old buffer is donated."""
    how = dict(mesh=mesh, spec=part.spec, block_spec=part.block_spec, piece=_kind(part))
    return _put(leaf, block, _start(part, row), **how)


def get(leaf: jax.Array, part: WeightPart, mesh: Mesh, row: int, count: int, dtype) -> jax.Array:
    """Returns a block [*ways, T * count, ...] of the weight, from `row` of each device's part, as
    it is on disk but of `dtype`."""
    how = dict(mesh=mesh, spec=part.spec, block_spec=part.block_spec, piece=_kind(part))
    return _get(leaf, _start(part, row), **how, rows=count, dtype=jnp.dtype(dtype))


def layout(shape: tuple[int, ...], part: WeightPart, mesh: Mesh, *, shared: bool) -> NamedSharding:
    """Returns the first layout of the rows of a block: on the devices that keep them or, if hosts
    share the reading, an equal part on each device, as far as they divide."""
    leading = len(part.start)
    if shared and shape[leading] % mesh.size == 0:
        return NamedSharding(mesh, PartitionSpec(*[None] * leading, mesh.axis_names))
    return NamedSharding(mesh, part.block_spec)


def own_rows(shape: tuple[int, ...], layout: NamedSharding, leading: int) -> list[tuple]:
    """Returns the rows of a block that devices of this host get: (slices of the leading axes,
    first, end), those that touch as one."""
    rows = {
        (
            tuple(s.indices(n)[:2] for s, n in zip(index[:leading], shape, strict=False)),
            *index[leading].indices(shape[leading])[:2],
        )
        for index in layout.addressable_devices_indices_map(shape).values()
    }
    out: list[tuple] = []
    for index, first, end in sorted(rows):
        if out and out[-1][0] == index and first <= out[-1][2]:
            out[-1] = (index, out[-1][1], max(end, out[-1][2]))
        else:
            out.append((index, first, end))
    return out


def to_devices(block: np.ndarray, layout: NamedSharding) -> jax.Array:
    """Puts the block, in its own shape, on the mesh: every device of this host gets its part."""

    def part(index):
        return block[index]

    return jax.make_array_from_callback(block.shape, layout, part, dtype=block.dtype)
