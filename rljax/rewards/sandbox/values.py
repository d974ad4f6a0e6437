"""Values on the wire between a program in the sandbox and the process outside: JSON, no pickle.

`decode` returns Python's own types only, whatever the sender was: a class with an `__eq__` of its
own arrives as the list, number or text that it extends, or as an `ObjectReference`.
"""

import collections
import decimal
import fractions
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass

_HEADER = struct.Struct("!I")
MAX_FRAME_BYTES = 8 << 20


@dataclass(frozen=True)
class ObjectReference:
    """A reference to an object that stays in its process: its number there and "class",
    "function" or "object"."""

    number: int
    kind: str


class WireError(ValueError):
    """The error for bytes that are no valid frame, and for a value that cannot be sent."""


def frame(message: dict) -> bytes:
    """A message as it goes on the wire. Raises WireError if it is too large, or is not JSON."""
    try:
        data = json.dumps(message).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(f"cannot be sent: {type(error).__name__}: {error}") from None
    if len(data) > MAX_FRAME_BYTES:
        raise WireError(f"more than {MAX_FRAME_BYTES} bytes")
    return _HEADER.pack(len(data)) + data


def take_frame(buffer: bytearray, most_bytes: int = MAX_FRAME_BYTES) -> dict | None:
    """Removes the first whole frame from the buffer; None if there is none yet. Raises WireError
    for what is no frame, or one of more than `most_bytes` bytes."""
    if len(buffer) < _HEADER.size:
        return None
    size = _HEADER.unpack_from(buffer)[0]
    if size > min(most_bytes, MAX_FRAME_BYTES):
        raise WireError(f"a frame of {size} bytes")
    end = _HEADER.size + size
    if len(buffer) < end:
        return None
    data = bytes(buffer[_HEADER.size : end])
    del buffer[:end]
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireError(f"no JSON: {type(error).__name__}") from None
    if not isinstance(message, dict):
        raise WireError("no message")
    return message


def encode(value: object, refer: Callable[[object], ObjectReference] | None = None) -> object:
    """The JSON form of `value`; a value without one becomes a reference by `refer`. Raises
    WireError for it without `refer`."""
    if value is None or value is True or value is False:
        return value
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, int):
        value = int.__index__(value)
        return value if abs(value) < 1 << 53 else {"t": "int", "v": int.__format__(value, "x")}
    if isinstance(value, float):
        return {"t": "float", "v": float.hex(value)}
    if isinstance(value, str):
        return str.__str__(value)
    for kind in (list, tuple, set, frozenset, collections.deque):
        if isinstance(value, kind):
            items = [encode(item, refer) for item in kind.__iter__(value)]
            return items if kind is list else {"t": kind.__name__, "v": items}
    if isinstance(value, dict):
        pairs = [[encode(k, refer), encode(v, refer)] for k, v in dict.items(value)]
        return {"t": "dict", "v": pairs}
    if isinstance(value, bytes | bytearray):
        return {"t": "bytearray" if isinstance(value, bytearray) else "bytes", "v": value.hex()}
    if isinstance(value, range):
        return {"t": "range", "v": [encode(x) for x in (value.start, value.stop, value.step)]}
    if isinstance(value, complex):
        return {"t": "complex", "v": [float.hex(value.real), float.hex(value.imag)]}
    if isinstance(value, fractions.Fraction):
        return {"t": "fraction", "v": [encode(value.numerator), encode(value.denominator)]}
    if isinstance(value, decimal.Decimal):
        return {"t": "decimal", "v": decimal.Decimal.__str__(value)}
    if isinstance(value, ObjectReference):
        return {"t": "reference", "v": [value.number, value.kind]}
    if refer is None:
        raise WireError(f"a value of type {type(value).__name__} cannot be sent")
    return encode(refer(value))


_MAKE: dict[str, Callable] = {
    "int": lambda v, decode_item: int(v, 16),
    "float": lambda v, decode_item: float.fromhex(v),
    "tuple": lambda v, decode_item: tuple(map(decode_item, v)),
    "set": lambda v, decode_item: set(map(decode_item, v)),
    "frozenset": lambda v, decode_item: frozenset(map(decode_item, v)),
    "deque": lambda v, decode_item: collections.deque(map(decode_item, v)),
    "dict": lambda v, decode_item: {decode_item(k): decode_item(x) for k, x in v},
    "bytes": lambda v, decode_item: bytes.fromhex(v),
    "bytearray": lambda v, decode_item: bytearray.fromhex(v),
    "range": lambda v, decode_item: range(*map(decode_item, v)),
    "complex": lambda v, decode_item: complex(*map(float.fromhex, v)),
    "fraction": lambda v, decode_item: fractions.Fraction(*map(decode_item, v)),
    "decimal": lambda v, decode_item: decimal.Decimal(v),
}


def decode(data: object, resolve: Callable[[ObjectReference], object] | None = None) -> object:
    """The value that `encode` wrote; references go through `resolve`. Raises WireError for
    anything else."""
    try:
        return _decode(data, resolve or (lambda reference: reference))
    except WireError:
        raise
    except Exception as error:  # whoever sent it may have sent anything
        raise WireError(f"no value: {type(error).__name__}") from None


def _decode(data: object, resolve: Callable[[ObjectReference], object]) -> object:
    if isinstance(data, list):
        return [_decode(item, resolve) for item in data]
    if not isinstance(data, dict):
        return data
    if data["t"] == "reference":
        number, kind = data["v"]
        return resolve(ObjectReference(int(number), str(kind)))
    return _MAKE[data["t"]](data["v"], lambda item: _decode(item, resolve))
