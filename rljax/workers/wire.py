"""Frames on a stream socket between a worker and its parent: an 8-byte length and a pickle."""

import pickle
import socket
import struct

_HEADER = struct.Struct("!Q")


def read_frame(sock: socket.socket) -> bytes | None:
    """The next frame's bytes; None at the end of the stream."""
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
    """A message as it goes on the wire."""
    payload = pickle.dumps(message, protocol=5)
    return _HEADER.pack(len(payload)) + payload


def take_frame(buffer: bytearray) -> object | None:
    """Remove the first whole frame from the buffer and return its message; None if none yet."""
    if len(buffer) < _HEADER.size:
        return None
    end = _HEADER.size + _HEADER.unpack_from(buffer)[0]
    if len(buffer) < end:
        return None
    message = pickle.loads(memoryview(buffer)[_HEADER.size : end].tobytes())
    del buffer[:end]
    return message
