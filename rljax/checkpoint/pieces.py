"""Arrays in a store: each host writes the parts that it holds, as one stream of bytes cut into
pieces of at most 64 MiB, and an index of the parts.

A piece is one put. Whoever reads takes the pieces that its own devices need, whatever hosts and
mesh wrote them, and compares the SHA-256 of each before a byte of it is used.

Orbax writes local folders (rljax.checkpoint.disk). It could write gs://, where a marker file,
commit_success.txt, takes the place of a rename; it has no driver for s3:// and the other file
systems of fsspec. Pieces are used for gs://, too: orbax keeps no SHA-256, so that to compare
one it would have to read back what it wrote; TensorStore, by which it reads and writes, looks
for credentials of its own beside those of fsspec; and a run that has begun with pieces goes on
with them.
"""

import collections
import concurrent.futures
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np

from rljax import hosts
from rljax.errors import InputError
from rljax.files import MOST_VALUES, json_object
from rljax.runs.store import Store

ARRAYS = "arrays"  # the folder of a checkpoint that they are in
PIECE_BYTES = 64 << 20
SPLIT_BYTES = 1 << 20  # smaller parts of an array are written by one of the hosts that hold them
AT_ONCE = 8  # requests
KEPT = 4  # pieces that are kept for what is read next: small arrays share one
# Of an index that somebody else may have written.
MOST_INDEX_VALUES = 10 * MOST_VALUES
LARGEST_PIECE = 1 << 30  # bytes
LARGEST_ARRAY = 1 << 50  # values
MOST_DIMENSIONS = 32
MOST_CELLS = 4096  # of the grid of the edges of an array's parts, for each part

Index = tuple[slice, ...]
RESTORE = "restore the file, or use another step"  # of what is damaged


class Damaged(InputError):
    """An error for bytes that are not those that were saved."""


@dataclasses.dataclass(frozen=True)
class ArrayPart:
    """A part of an array in host memory: `data` begins at `start` of the array."""

    name: str
    start: tuple[int, ...]
    data: np.ndarray


def named_leaves(tree) -> list[tuple[str, object]]:
    """Returns (path, leaf) of every array of a tree; a path is such as "actor/params/layers/q"."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), x) for path, x in flat]


def _bounds(index: Index, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def _moved(bounds, origin) -> Index:
    """Bounds as slices of an array that begins at `origin`."""
    return tuple(slice(a - start, b - start) for (a, b), start in zip(bounds, origin, strict=True))


# -- writing --


def snapshot(tree) -> list[ArrayPart]:
    """Returns the parts of the arrays that this host writes, copied to its memory.

    Arrays that several hosts hold are written by all of them, some rows each.
    """
    leaves = named_leaves(tree)
    for _, x in leaves:
        x.copy_to_host_async()
    parts = []
    for number, (name, x) in enumerate(leaves):
        shards = {_bounds(shard.index, x.shape): shard.data for shard in x.addressable_shards}
        for bounds, holders in _holders(x).items():
            if bounds in shards:
                parts += _own_part(name, bounds, shards[bounds], holders, number)
    return parts


def _holders(x: jax.Array) -> dict[tuple, list[int]]:
    """The hosts that hold each part of an array."""
    by_bounds = collections.defaultdict(set)
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        by_bounds[_bounds(index, x.shape)].add(device.process_index)
    return {bounds: sorted(holders) for bounds, holders in by_bounds.items()}


def _own_part(
    name: str, bounds, data: jax.Array, holders: list[int], number: int
) -> list[ArrayPart]:
    start, rank = tuple(low for low, _ in bounds), holders.index(hosts.index())
    if data.ndim and data.shape[0] >= len(holders) > 1 and data.nbytes >= SPLIT_BYTES:
        rows = data.shape[0]
        low, high = (rows * k // len(holders) for k in (rank, rank + 1))
        return [ArrayPart(name, (start[0] + low, *start[1:]), _copied(data[low:high]))]
    if rank != number % len(holders):
        return []
    return [ArrayPart(name, start, _copied(data))]


def _copied(data: jax.Array) -> np.ndarray:
    """Returns the values in memory that no later program writes: NumPy views a CPU's own memory."""
    on_host = data.sharding.memory_kind not in (None, "device")
    values = np.asarray(data)
    return values.copy() if on_host or data.device.platform == "cpu" else values


def _pieces(parts: list[ArrayPart]) -> Iterator[bytes]:
    piece = bytearray()
    for part in parts:
        data = memoryview(np.ascontiguousarray(part.data).reshape(-1).view(np.uint8))
        while len(data):
            room = PIECE_BYTES - len(piece)
            piece += data[:room]
            data = data[room:]
            if len(piece) == PIECE_BYTES:
                yield bytes(piece)
                piece.clear()
    if piece:
        yield bytes(piece)


def write(store: Store, parts: list[ArrayPart]) -> dict[str, dict]:
    """Puts the parts of this host into the store; returns {name: bytes and SHA-256} of
    the files."""
    head = f"{ARRAYS}/{hosts.index():04d}"
    index, offset = [], 0
    for part in parts:
        dtype, shape = part.data.dtype.name, part.data.shape
        index.append([part.name, dtype, part.start, shape, offset])
        offset += part.data.nbytes
    text = json.dumps({"piece_bytes": PIECE_BYTES, "parts": index}).encode()
    entries = {}

    def put(name: str, data: bytes) -> None:
        entries[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        store.put(name, data)

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        running = collections.deque()
        try:
            for number, piece in enumerate(_pieces(parts)):
                running.append(pool.submit(put, f"{head}-{number:05d}.bin", piece))
                if len(running) == AT_ONCE:
                    running.popleft().result()
            while running:
                running.popleft().result()
        finally:
            for future in running:
                future.cancel()
    put(f"{head}.json", text)
    return entries


# -- reading --


@dataclasses.dataclass(frozen=True)
class _Location:
    """Location of a part: `offset` in the stream of the host whose files begin with `head`."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    head: str
    offset: int
    piece_bytes: int

    def rows(self, low: int, high: int, itemsize: int) -> "_Location":
        """Returns the location of rows of the array that are rows of this part."""
        skipped = (low - self.start[0]) * math.prod(self.shape[1:]) * itemsize
        start, shape = (low, *self.start[1:]), (high - low, *self.shape[1:])
        return dataclasses.replace(self, start=start, shape=shape, offset=self.offset + skipped)

    def pieces(self, size: int) -> list[str]:
        if not size:
            return []
        first, last = self.offset // self.piece_bytes, (self.offset + size - 1) // self.piece_bytes
        return [f"{self.head}-{number:05d}.bin" for number in range(first, last + 1)]


class Reader:
    """Reads the arrays of one checkpoint in its own store; `files` is {name: bytes and SHA-256} of
    its manifest. Raises Damaged for an index that cannot be read."""

    def __init__(self, store: Store, files: Mapping[str, dict]):
        for name, entry in files.items():
            if type(entry["bytes"]) is not int or not isinstance(entry["sha256"], str):
                raise ValueError(f"bytes and SHA-256 of {name:.100}")
        self.store, self.files = store, files
        self.kept: collections.OrderedDict[str, bytes] = collections.OrderedDict()
        self.locations: dict[str, list[_Location]] = collections.defaultdict(list)
        self.dtypes: dict[str, str] = {}
        for name in sorted(n for n in files if n.startswith(ARRAYS) and n.endswith(".json")):
            self._read_index(name)

    def _read_index(self, name: str) -> None:
        try:
            index = json_object(self.read(name).decode(), name, MOST_INDEX_VALUES)
            for leaf, dtype, start, shape, offset in index["parts"]:
                location = (tuple(start), tuple(shape), name.removesuffix(".json"), offset)
                self._add(leaf, dtype, _Location(*location, index["piece_bytes"]))
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, Damaged):
                raise
            raise Damaged(
                f"{self.store.at(name)} is not an index of arrays ({error})", fix=RESTORE
            ) from None

    def _add(self, leaf: str, dtype: str, location: _Location) -> None:
        """Notes where a part lies. Raises ValueError for a location that no part has."""
        if not isinstance(leaf, str) or not isinstance(dtype, str):
            raise ValueError("a part has no name or no dtype")
        numbers = (*location.start, *location.shape, location.offset, location.piece_bytes)
        if not all(type(n) is int and 0 <= n <= LARGEST_ARRAY for n in numbers):
            raise ValueError(f"a part of {leaf:.100} is not at whole numbers")
        if not len(location.start) == len(location.shape) <= MOST_DIMENSIONS:
            raise ValueError(f"a part of {leaf:.100} has {len(location.shape)} dimensions")
        if not 0 < location.piece_bytes <= LARGEST_PIECE:
            raise ValueError(f"its pieces have {location.piece_bytes} bytes")
        locations = self.locations[leaf]
        if locations and (self.dtypes[leaf], len(locations[0].shape)) != (
            dtype,
            len(location.shape),
        ):
            raise ValueError(f"the parts of {leaf:.100} are of several kinds")
        self.dtypes[leaf] = dtype
        locations.append(location)

    def read(self, name: str) -> bytes:
        """Returns the bytes of a file, which it reads again if their SHA-256 is wrong. Raises
        Damaged for a file that is missing, not in the manifest, or wrong twice."""
        if name not in self.files:
            raise Damaged(f"{self.store.at(name)} is not in the manifest", fix=RESTORE)
        for _ in range(2):
            try:
                data = self.store.read(name)
            except FileNotFoundError:
                raise Damaged(f"{self.store.at(name)} is missing", fix=RESTORE) from None
            if hashlib.sha256(data).hexdigest() == self.files[name]["sha256"]:
                return data
        raise Damaged(
            f"{self.store.at(name)} has another SHA-256 than when it was saved", fix=RESTORE
        )

    def array(self, name: str, like) -> jax.Array:
        """Returns an array with the shape, dtype and sharding of `like`; reads the parts of this
        host's own devices. Raises Damaged if the pieces do not cover it exactly once."""
        dtype = np.dtype(like.dtype)
        indices = like.sharding.addressable_devices_indices_map(like.shape).values()
        arrays = {
            bounds: np.empty([high - low for low, high in bounds], dtype)
            for bounds in dict.fromkeys(_bounds(index, like.shape) for index in indices)
        }
        self._fill(name, arrays)
        return jax.make_array_from_callback(
            like.shape, like.sharding, lambda index: arrays[_bounds(index, like.shape)], dtype=dtype
        )

    def kind(self, name: str) -> str:
        """Returns the dtype and shape of a saved array, as text."""
        locations = self.locations.get(name)
        if locations is None:
            return "missing"
        ends = [[a + n for a, n in zip(p.start, p.shape, strict=True)] for p in locations]
        return f"{self.dtypes[name]}{[max(end) for end in zip(*ends, strict=True)]}"

    def _fill(self, name: str, arrays: dict[tuple, np.ndarray]) -> None:
        """Fills the arrays, {bounds: array}. The rows of a part that any of them takes are read
        once for all."""
        filled: dict[tuple, list] = {bounds: [] for bounds in arrays}
        for location in self.locations[name]:
            common = {}
            for bounds in arrays:
                axes = zip(bounds, location.start, location.shape, strict=True)
                overlap = [
                    (max(low, start), min(high, start + n)) for (low, high), start, n in axes
                ]
                if all(low < high for low, high in overlap):
                    common[bounds] = overlap
            if not common:
                continue
            dtype = next(iter(arrays.values())).dtype
            if location.shape:
                low = min(overlap[0][0] for overlap in common.values())
                high = max(overlap[0][1] for overlap in common.values())
                location = location.rows(low, high, dtype.itemsize)
            part = self._part(location, dtype)
            for bounds, overlap in common.items():
                target = _moved(overlap, [low for low, _ in bounds])
                arrays[bounds][target] = part[_moved(overlap, location.start)]
                filled[bounds].append(overlap)
        for bounds, out in arrays.items():
            count = sum(math.prod(b - a for a, b in overlap) for overlap in filled[bounds])
            if count != out.size or _overlap(filled[bounds]):
                problem = f"holds {count} of {out.size} values of {name}"
                raise Damaged(f"{self.store.at(ARRAYS)} {problem}, or some twice", fix=RESTORE)

    def _part(self, location: _Location, dtype: np.dtype) -> np.ndarray:
        size = math.prod(location.shape) * dtype.itemsize
        if size // location.piece_bytes > len(self.files):
            raise Damaged(
                f"{self.store.at(location.head)}.json names more pieces than there are", fix=RESTORE
            )
        names = location.pieces(size)
        missing = [name for name in names if name not in self.kept]
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            self.kept.update(zip(missing, pool.map(self.read, missing), strict=True))
        data = b"".join(self.kept[name] for name in names)
        while len(self.kept) > KEPT:
            self.kept.popitem(last=False)
        begin = location.offset % location.piece_bytes
        if len(data) < begin + size:
            raise Damaged(
                f"{self.store.at(names[-1])} is too short for what its index says", fix=RESTORE
            )
        return np.frombuffer(data, dtype, math.prod(location.shape), begin).reshape(location.shape)


def _overlap(boxes: list[list[tuple[int, int]]]) -> bool:
    """Returns whether any value lies in two of the boxes, each (begin, end) of every dimension."""
    if len(boxes) < 2:
        return False
    ends = np.array(boxes, np.int64).reshape(len(boxes), -1, 2)
    # The grid of all their edges: a box covers whole cells of it.
    edges = [np.unique(ends[:, d]) for d in range(ends.shape[1])]
    cells = math.prod(len(axis_edges) - 1 for axis_edges in edges)
    if cells > MOST_CELLS * len(boxes):  # parts of a mesh lie in rows
        return True
    covered = np.zeros([len(axis_edges) - 1 for axis_edges in edges], bool)
    for box in ends:
        axes = zip(edges, box, strict=True)
        cell = tuple(slice(*np.searchsorted(axis_edges, low_high)) for axis_edges, low_high in axes)
        if covered[cell].any():
            return True
        covered[cell] = True
    return False


def read(reader: Reader, like, fits: Callable[[str], InputError]):
    """Returns the arrays of a tree like `like`. Raises `fits(why)` if their dtypes or shapes
    differ, and Damaged for bytes that are not those that were saved."""
    leaves = named_leaves(like)
    for name, x in leaves:
        expected = f"{np.dtype(x.dtype).name}{list(x.shape)}"
        if reader.kind(name) != expected:
            raise fits(f"{name} is {reader.kind(name)}, not {expected}")
    arrays = [reader.array(name, x) for name, x in leaves]
    return jax.tree.unflatten(jax.tree.structure(like), arrays)
