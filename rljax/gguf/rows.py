"""Tensors of a GGUF file under the names and in the layout of a Hugging Face checkpoint, decoded to
float32 a few rows at a time, by the `gguf` package."""

import dataclasses
import math
from pathlib import Path

import numpy as np

from rljax.errors import InputError
from rljax.files import read_bytes
from rljax.gguf.header import Header, package

# Types that are read; those of the package that are left out were never published for the
# families that are.
TYPES = tuple("F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K".split())
_AT_ONCE = 1 << 16  # values decoded at once: the package's own arrays take several times as much
_SHOWN = 4


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in the file, and what makes a Hugging Face tensor of it.

    `heads` above 0: each head's rows (a pair is two neighbours) are put into the order of a
    rotation by halves. `shift` is added: Gemma's norms are stored with 1 added.
    """

    type: str
    shape: tuple[int, ...]
    begin: int
    end: int
    heads: int = 0
    shift: float = 0.0


def check_types(header: Header) -> None:
    """Raises InputError that names the tensors of types that are not read."""
    wrong = {n: t.type for n, t in header.tensors.items() if t.type not in TYPES}
    if wrong:
        listing = ", ".join(f"{name} ({kind})" for name, kind in list(wrong.items())[:_SHOWN])
        raise InputError(
            f"{header.path}: {len(wrong)} tensors are of types that are not read",
            value=listing,
            rule=f"read are {', '.join(TYPES)}",
            fix="take another quantisation of the model, such as Q8_0 or Q4_K_M",
        )


def decoded(rows: StoredTensor, file: int, path: Path, first: int, out: np.ndarray) -> None:
    """Fills `out` [n, ...] (float32) with n rows of a tensor from `first` on, as the
    package decodes them."""
    row_values = rows.shape[-1] if len(rows.shape) > 1 else 1
    step = max(_AT_ONCE // max(row_values, 1), 1)
    if len(rows.shape) == 1 and not rows.heads:
        step = len(out)  # a row of its own: a norm or a bias
    for start in range(0, len(out), step):
        part = out[start : start + step]
        part[...] = _values(rows, file, path, first + start, len(part)).reshape(part.shape)
    if rows.shift:
        out += np.float32(rows.shift)


def _values(rows: StoredTensor, file: int, path: Path, first: int, count: int) -> np.ndarray:
    """Returns `count` rows of a tensor from `first` on; of a tensor of one axis, `count` values."""
    if len(rows.shape) == 1:  # the codes of one row cannot be cut everywhere
        values = _dequantized(_codes(rows, file, path, 0, 1), rows.type).reshape(-1)
        indices = np.arange(first, first + count)
        return values[_stored_row(indices, rows) if rows.heads else indices]
    if not rows.heads:
        return _dequantized(_codes(rows, file, path, first, count), rows.type)
    head_rows = rows.shape[0] // rows.heads
    begin = first // head_rows * head_rows
    end = -(-(first + count) // head_rows) * head_rows
    codes = _codes(rows, file, path, begin, end - begin)
    stored = _stored_row(np.arange(first, first + count), rows)
    return _dequantized(codes[stored - begin], rows.type)


def _stored_row(row: np.ndarray, rows: StoredTensor) -> np.ndarray:
    """Returns the row in the file of a row of the Hugging Face tensor."""
    head_rows = rows.shape[0] // rows.heads
    head, offset = np.divmod(row, head_rows)
    half, pair = np.divmod(offset, head_rows // 2)
    return head * head_rows + 2 * pair + half


def _codes(rows: StoredTensor, file: int, path: Path, first: int, count: int) -> np.ndarray:
    """Returns the stored bytes of `count` rows: uint8 [count, bytes of a row]."""
    total = math.prod(rows.shape[:-1])
    row_bytes = (rows.end - rows.begin) // max(total, 1)
    out = np.empty((count, row_bytes), np.uint8)
    read_bytes(file, path, rows.begin + first * row_bytes, out)
    return out


def _dequantized(codes: np.ndarray, kind: str) -> np.ndarray:
    gguf = package()
    with np.errstate(all="ignore"):  # a scale may be infinite
        return gguf.quants.dequantize(codes, gguf.GGMLQuantizationType[kind])
