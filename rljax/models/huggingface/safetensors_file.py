"""The safetensors format: a header of names, dtypes, shapes and offsets, then the bytes.

A header is read without trusting it: nothing is unpickled or run, and nothing is allocated because
a header says so.

Format: 8 bytes n (little-endian), n bytes of JSON {name: {dtype, shape, data_offsets}}, the data.
"""

import dataclasses
import json
import math
import os
import struct
from pathlib import Path

import ml_dtypes
import numpy as np

from rljax.errors import InputError
from rljax.files import parse_json, read_bytes

# What we read: dtype in a header -> numpy's.
FLOATS: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
SPELLING = {dtype: name for name, dtype in FLOATS.items()}
# The bits of an element of every dtype that the format knows.
_BITS = {
    name: bits
    for bits, names in (
        (4, "F4"),
        (6, "F6_E2M3 F6_E3M2"),
        (8, "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ"),
        (16, "I16 U16 F16 BF16"),
        (32, "I32 U32 F32"),
        (64, "C64 F64 I64 U64"),
    )
    for name in names.split()
}
_LONGEST_HEADER = 25_000_000  # bytes; the format allows more, and no published file has 10 MB
_MOST_VALUES = 2_000_000  # of a header; a tensor has about eight
_MOST_AXES = 16  # of a tensor: a bound on the work that a hostile shape asks for
_COPY_AGAIN = "copy the file again"


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file: `begin` and `end` are byte offsets from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _parse(text: bytes, path: Path) -> dict:
    header = parse_json(text, f"{path}: the header", _MOST_VALUES, unique=True)
    if not isinstance(header, dict):
        raise InputError(
            f"{path}: the header is no JSON object", value=type(header).__name__, fix=_COPY_AGAIN
        )
    return header


def _whole(values, count: int | None = None) -> bool:
    """Returns whether `values` is a list of whole numbers that fit 63 bits."""
    if not isinstance(values, list) or (count is not None and len(values) != count):
        return False
    return all(type(v) is int and 0 <= v < 2**63 for v in values)


def _entry(path: Path, name: str, fields, start: int) -> TensorInfo:
    """A checked entry of the header; the data start at byte `start` of the file."""
    location = f"{path}: tensor {name[:200]!r}"
    if not isinstance(fields, dict):
        raise InputError(
            location, value=fields, rule="needs dtype, shape and data_offsets", fix=_COPY_AGAIN
        )
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _BITS:
        rule = f"known: {', '.join(_BITS)}"
        fix = "save the tensor in one of these, such as bfloat16"
        raise InputError(f"{location}: dtype", value=dtype, rule=rule, fix=fix)
    if not _whole(shape) or len(shape) > _MOST_AXES:
        rule = f"at most {_MOST_AXES} whole numbers >= 0"
        raise InputError(f"{location}: shape", value=shape, rule=rule, fix=_COPY_AGAIN)
    if not _whole(offsets, 2) or offsets[0] > offsets[1]:
        rule = "[begin, end], begin <= end"
        raise InputError(f"{location}: data_offsets", value=offsets, rule=rule, fix=_COPY_AGAIN)
    begin, end = offsets
    if 8 * (end - begin) != math.prod(shape) * _BITS[dtype]:
        raise InputError(
            f"{location}: data_offsets {offsets} hold {end - begin} bytes",
            rule=f"{dtype} of shape {tuple(shape)} has {math.prod(shape) * _BITS[dtype] // 8}",
            fix=_COPY_AGAIN,
        )
    return TensorInfo(dtype, tuple(shape), start + begin, start + end)


def read_header(file: int, path: Path) -> dict[str, TensorInfo]:
    """Returns {tensor name: TensorInfo} of an open file, every offset checked against its size.
    Raises InputError for a file that is cut short, or whose tensors overlap or leave gaps."""
    size = os.fstat(file).st_size
    if size < 8:
        raise InputError(
            f"{path} has {size} bytes", rule="a safetensors file has 8 or more", fix=_COPY_AGAIN
        )
    count = np.empty(8, np.uint8)
    read_bytes(file, path, 0, count)
    (length,) = struct.unpack("<Q", count.tobytes())
    if length > min(size - 8, _LONGEST_HEADER):
        raise InputError(
            f"{path} announces a header of {length} bytes",
            rule=f"the file has {size}, and a header at most {_LONGEST_HEADER}",
            fix=f"{_COPY_AGAIN}: it is cut short, or is no safetensors file",
        )
    text = np.empty(length, np.uint8)
    read_bytes(file, path, 8, text)
    header = _parse(text.tobytes(), path)
    header.pop("__metadata__", None)
    start = 8 + length
    entries = {name: _entry(path, name, fields, start) for name, fields in header.items()}
    at, before = start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            what = "overlaps" if entry.begin < at else "leaves a gap after"
            raise InputError(
                f"{path}: tensor {name[:200]!r} {what} {before[:200]!r}",
                value=(entry.begin - start, entry.end - start),
                rule="tensors lie one after the other",
                fix=_COPY_AGAIN,
            )
        at, before = entry.end, name
    if at != size:
        raise InputError(
            f"{path} has {size} bytes", rule=f"its header describes {at}", fix=_COPY_AGAIN
        )
    return entries


def new_header(tensors: dict[str, tuple[np.dtype, tuple[int, ...]]]) -> tuple[bytes, dict]:
    """Returns the beginning of a file of {name: (dtype, shape)}, and {name: TensorInfo}
    of its tensors."""
    header, spans, at = {"__metadata__": {"format": "pt"}}, {}, 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * dtype.itemsize
        spelling = SPELLING[dtype]
        header[name] = {"dtype": spelling, "shape": list(shape), "data_offsets": [at, end]}
        spans[name], at = (at, end), end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data are aligned to 8 bytes
    start = 8 + len(text)
    entries = {
        name: TensorInfo(SPELLING[tensors[name][0]], tuple(tensors[name][1]), start + a, start + b)
        for name, (a, b) in spans.items()
    }
    return struct.pack("<Q", len(text)) + text, entries


def write_bytes(file: int, begin: int, data: np.ndarray) -> None:
    """Writes the contiguous `data`, of any shape, into `file` from byte `begin`."""
    view = memoryview(data.reshape(-1).view(np.uint8))
    while view:
        count = os.pwrite(file, view, begin)
        view, begin = view[count:], begin + count


def require_finite(rows: np.ndarray, file: Path, name: str, first: int = 0) -> None:
    """Raises InputError where a weight of tensor `name`, of which `rows` [rows, ...] are those from
    `first` on, is NaN or infinite. Such a policy samples without an error, and learns nothing."""
    finite = np.isfinite(rows)
    if not finite.all():
        at = np.argwhere(~finite)[0]
        value = float(rows[tuple(at)])
        at[:1] += first
        raise InputError(
            f"{file}: {name}{at.tolist()}",
            value=value,
            rule=f"weights are finite, and {np.sum(~finite)} of {finite.size} are not",
            fix="download or convert it again; if it was trained, it diverged: take an earlier "
            "checkpoint",
        )
