"""Frames on a stream socket between a worker and its parent: an 8-byte length and a pickle.

A worker runs code of others, which can write anything to its stream. So its parent builds from a
frame only plain values, arrays of numpy and the classes that it names.
"""

import io
import pickle
import socket
import struct
from collections.abc import Collection

LARGEST_FRAME = 2**30  # bytes
_HEADER = struct.Struct("!Q")
# Functions that make numpy's scalars and arrays.
_NUMPY = {
    (module, name)
    for core in ("numpy.core", "numpy._core")
    for module, name in (
        (f"{core}.multiarray", "scalar"),
        (f"{core}.multiarray", "_reconstruct"),
        (f"{core}.numeric", "_frombuffer"),
    )
} | {("numpy", "dtype"), ("numpy", "ndarray")}


class BrokenFrame(ValueError):
    """An error for bytes that are no message."""


def read_frame(sock: socket.socket) -> bytes | None:
    """Returns the bytes of the next frame; None at the end of the stream."""
    header = _read_exactly(sock, _HEADER.size)
    return None if header is None else _read_exactly(sock, _HEADER.unpack(header)[0])


def _read_exactly(sock: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        count = sock.recv_into(view[filled:])
        if count == 0:
            return None
        filled += count
    return data


def frame(message: object) -> bytes:
    """Returns the bytes of a message on the wire."""
    payload = pickle.dumps(message, protocol=5)
    return _HEADER.pack(len(payload)) + payload


def take_frame(buffer: bytearray, classes: Collection[type] = ()) -> object | None:
    """Removes the first whole frame from the buffer and returns its message, of plain values and of
    these classes; None if there is none yet. Raises BrokenFrame for any other bytes."""
    if len(buffer) < _HEADER.size:
        return None
    (size,) = _HEADER.unpack_from(buffer)
    if size > LARGEST_FRAME:
        raise BrokenFrame(f"a message of {size} bytes")
    end = _HEADER.size + size
    if len(buffer) < end:
        return None
    payload = memoryview(buffer)[_HEADER.size : end].tobytes()
    del buffer[:end]
    try:
        return _Plain(payload, classes).load()
    except Exception as error:  # bytes that are no pickle may raise any exception
        raise BrokenFrame(f"{type(error).__name__}: {error}"[:300]) from None


class _Plain(pickle.Unpickler):
    def __init__(self, payload: bytes, classes: Collection[type]):
        super().__init__(io.BytesIO(payload))
        self._classes = {(cls.__module__, cls.__qualname__): cls for cls in classes}

    def find_class(self, module: str, name: str):
        if (module, name) in _NUMPY:
            return super().find_class(module, name)
        if (module, name) in self._classes:
            return self._classes[module, name]
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which is no plain value")
