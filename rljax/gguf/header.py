"""The GGUF format: metadata, names, shapes, types and offsets of tensors, then the bytes.

A header is read without trusting it: every count is compared with what is left of the file before
anything is allocated, and nothing is run. The `gguf` package knows the types of tensors.

Format, little-endian: "GGUF", version, number of tensors, number of keys; each key with its type
and value; each tensor with its name, its sizes (fastest first), its type and its offset in the
data, which begin at the next multiple of general.alignment.
"""

import dataclasses
import math
import os
import re
from pathlib import Path

import numpy as np

from rljax import DISTRIBUTION
from rljax.errors import InputError
from rljax.files import open_file

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = dict(enumerate("<u1 <i1 <u2 <i2 <u4 <i4 <f4 <u1".split()))
_NUMBERS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _TEXT, _ARRAY = 7, 8, 9
# Bounds on a header. The largest published one has 12 MB, 50 keys and 500,000 texts in an array.
_MOST_BYTES = 256_000_000
_MOST_KEYS = 10_000
_MOST_TENSORS = 100_000
_MOST_ITEMS = 4_000_000  # of an array
_MOST_AXES = 4
_MOST_ALIGNMENT = 1 << 20
_COPY_AGAIN = "download or copy the file again"
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf\Z", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file: the name of its type, its shape (rows first) and its bytes from the
    start of the file."""

    type: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class Header:
    """Metadata and tensors of a file. Arrays of numbers are NumPy arrays, arrays of texts lists."""

    path: Path
    metadata: dict[str, object]
    tensors: dict[str, Tensor]


def package():
    """Returns the `gguf` package. Raises InputError where it is not installed."""
    try:
        import gguf
    except ImportError:
        raise InputError(
            "a .gguf file is read by the package gguf, which is not installed",
            fix=f"pip install 'gguf>=0.17', or pip install '{DISTRIBUTION}[gguf]'",
        ) from None
    return gguf


def part_of(name: str) -> tuple[int, int] | None:
    """Returns (number, count) of a file that is one part of a model, by its name;
    None: it is whole."""
    match = _PART.search(name)
    return (int(match[1]), int(match[2])) if match else None


class _Stream:
    """The bytes of a file from its start, no more than it has and than a header may have."""

    def __init__(self, file, path: Path, size: int, texts: bool):
        self.file, self.path, self.at, self.texts = file, path, 0, texts
        self.end = min(size, _MOST_BYTES)

    def take(self, count: int, what: str) -> bytes:
        if count > self.end - self.at:
            raise InputError(
                f"{self.path}: {what}",
                value=count,
                rule=f"{self.end - self.at} bytes are left of the file, or of the "
                f"{_MOST_BYTES} that a header may have",
                fix=f"{_COPY_AGAIN}: it is cut short or damaged",
            )
        data = self.file.read(count)
        if len(data) < count:
            raise InputError(f"{self.path} ended while it was read", value=self.at, fix=_COPY_AGAIN)
        self.at += count
        return data

    def numbers(self, dtype: str, count: int, what: str) -> np.ndarray:
        size = np.dtype(dtype).itemsize
        return np.frombuffer(self.take(count * size, what), dtype)

    def whole(self, dtype: str, what: str, most: int | None = None) -> int:
        value = int(self.numbers(dtype, 1, what)[0])
        if most is not None and value > most:
            fix = f"{_COPY_AGAIN}: it is damaged"
            raise InputError(f"{self.path}: {what}", value=value, rule=f"at most {most}", fix=fix)
        return value

    def text(self, what: str) -> str:
        data = self.take(self.whole("<u8", f"the length of {what}"), what)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise InputError(
                f"{self.path}: {what} is not UTF-8", value=data[:40], fix=_COPY_AGAIN
            ) from None

    def value(self, kind: int, what: str) -> object:
        if kind == _TEXT:
            return self.text(what)
        if kind == _BOOL:
            return bool(self.whole("<u1", what))
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind], 1, what)[0].item()
        if kind != _ARRAY:
            rule = f"0 to {max(_NUMBERS)}, as the format numbers them"
            fix = _COPY_AGAIN
            raise InputError(f"{self.path}: the type of {what}", value=kind, rule=rule, fix=fix)
        inner = self.whole("<u4", f"the type of {what}")
        count = self.whole("<u8", f"the number of values of {what}", _MOST_ITEMS)
        if inner in _NUMBERS:
            values = self.numbers(_NUMBERS[inner], count, what)
            return values.astype(bool) if inner == _BOOL else values
        if inner != _TEXT:
            raise InputError(
                f"{self.path}: {what} is an array of type {inner}",
                rule="arrays of numbers and of texts are read",
                fix=_COPY_AGAIN,
            )
        if not self.texts:
            for _ in range(count):
                self.take(self.whole("<u8", what), what)
            return []
        return [self.text(what) for _ in range(count)]


def read_header(path: str | Path, *, texts: bool = True) -> Header:
    """Returns the header of a file, every offset of it checked against the file's size. Without
    `texts` arrays of them, which only the tokenizer has, are left empty. Raises InputError for what
    is no GGUF file, is damaged, or is one part of several."""
    path = Path(path)
    with os.fdopen(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        stream = _Stream(file, path, size, texts)
        _check_beginning(stream)
        count = stream.whole("<u8", "the number of tensors", _MOST_TENSORS)
        keys = stream.whole("<u8", "the number of keys", _MOST_KEYS)
        metadata = {}
        for _ in range(keys):
            key = stream.text("the name of a key")
            if key in metadata:
                raise InputError(f"{path}: key {key[:200]!r} stands twice", fix=_COPY_AGAIN)
            kind = stream.whole("<u4", f"the type of {key[:200]!r}")
            metadata[key] = stream.value(kind, f"key {key[:200]!r}")
        _check_whole(path, metadata)
        infos = [_info(stream) for _ in range(count)]
    start = stream.at + -stream.at % _alignment(path, metadata)
    return Header(path, metadata, _tensors(path, infos, start, size))


def _check_beginning(stream: _Stream) -> None:
    magic = stream.take(4, "the first four bytes") if stream.end >= 4 else b""
    if magic != _MAGIC:
        rule = "one begins with GGUF"
        raise InputError(f"{stream.path} is no GGUF file", value=magic, rule=rule, fix=_COPY_AGAIN)
    version = stream.whole("<u4", "the version")
    if version & 0xFFFF == 0:
        raise InputError(
            f"{stream.path} is big-endian",
            rule="little-endian files are read",
            fix="take the model's little-endian file, or convert it with gguf-convert-endian",
        )
    if version not in _VERSIONS:
        raise InputError(
            f"{stream.path} is of GGUF version {version}",
            rule="versions 2 and 3 are read",
            fix="convert the model again with a current llama.cpp",
        )


def _check_whole(path: Path, metadata: dict) -> None:
    count = metadata.get("split.count", 0)
    part = part_of(path.name)
    if (isinstance(count, int) and count > 1) or (part and part[1] > 1):
        raise InputError(
            f"{path} is one part of a model in several .gguf files",
            value=f"split.count {count}",
            rule="whole files are read",
            fix="join the parts by llama-gguf-split of llama.cpp, or take a file that is whole",
        )


def _alignment(path: Path, metadata: dict) -> int:
    value = metadata.get("general.alignment", 32)
    valid = isinstance(value, int) and 0 < value <= _MOST_ALIGNMENT and value & (value - 1) == 0
    if not valid:
        rule = f"a power of two up to {_MOST_ALIGNMENT}"
        raise InputError(f"{path}: general.alignment", value=value, rule=rule, fix=_COPY_AGAIN)
    return value


def _info(stream: _Stream) -> tuple[str, list[int], int, int]:
    """(name, sizes, number of the type, offset) of the next tensor."""
    name = stream.text("the name of a tensor")
    label = f"tensor {name[:200]!r}"
    axes = stream.whole("<u4", f"the number of axes of {label}", _MOST_AXES)
    sizes = stream.numbers("<u8", axes, f"the shape of {label}").tolist()
    kind = stream.whole("<u4", f"the type of {label}")
    return name, sizes, kind, stream.whole("<u8", f"the offset of {label}")


def _tensors(path: Path, infos: list, start: int, size: int) -> dict[str, Tensor]:
    constants = package().constants
    names = {kind.value: kind.name for kind in constants.GGMLQuantizationType}
    sizes_of = {kind.name: sizes for kind, sizes in constants.GGML_QUANT_SIZES.items()}
    out: dict[str, Tensor] = {}
    for name, sizes, kind, offset in infos:
        label = f"{path}: tensor {name[:200]!r}"
        if name in out:
            raise InputError(f"{label} stands twice", fix=_COPY_AGAIN)
        if names.get(kind) not in sizes_of:
            raise InputError(
                f"{label} is of type {kind}",
                rule="the package gguf does not know it",
                fix="update the package: pip install -U gguf",
            )
        elements, stored = sizes_of[names[kind]]
        if not sizes or sizes[0] % elements:
            rule = f"rows of {names[kind]} are multiples of {elements}"
            raise InputError(f"{label} has shape {sizes[::-1]}", rule=rule, fix=_COPY_AGAIN)
        begin = start + offset
        end = begin + math.prod(sizes) // elements * stored
        if end > size:
            fix = f"{_COPY_AGAIN}: it is cut short or damaged"
            raise InputError(f"{label} ends at byte {end}", rule=f"the file has {size}", fix=fix)
        out[name] = Tensor(names[kind], tuple(sizes[::-1]), begin, end)
    last, last_name = start, ""
    for name, tensor in sorted(out.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin < last:
            raise InputError(
                f"{path}: tensor {name[:200]!r} overlaps {last_name[:200]!r}", fix=_COPY_AGAIN
            )
        last, last_name = tensor.end, name
    return out
