"""Published checkpoints with quantised weights, decoded a block at a time while they are read.

FP8 (DeepSeek-V3, Qwen3-FP8): E4M3 codes [out, in] and a scale for each block of rows and columns,
w = code x scale. MXFP4 (gpt-oss; OCP Microscaling Formats 1.0): E2M1 codes, two in a byte, the
lower half first, and an exponent for 32 of them, w = code x 2^(exponent - 127);
[experts, out, in / 32, 16] on disk, [experts, in, out] decoded. The tensors of a GGUF file:
rljax.gguf.rows.
"""

import dataclasses
import functools
import math
from pathlib import Path

import ml_dtypes
import numpy as np

from rljax.errors import InputError
from rljax.files import read_bytes, read_json_object
from rljax.gguf.rows import StoredTensor, decoded

FP8 = "F8_E4M3"
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_SCALES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_GROUP = 32  # codes of MXFP4 with one exponent
_ROWS_AT_ONCE = 256  # of MXFP4: the indices into the table take four times their codes' bytes


def combined(tensors: dict, folder: Path) -> dict:
    """Returns {name: location} with codes and their scales as one tensor of the name that it has
    where nothing is quantised."""
    out = dict(tensors)
    sizes = None
    for name, location in tensors.items():
        if isinstance(location.entry, StoredTensor):
            continue
        if location.entry.dtype == FP8:
            sizes = _block_sizes(folder) if sizes is None else sizes
            scales = _taken(out, name, f"{name}_scale_inv")
            out[name] = _fp8(name, location, scales, sizes)
        elif name.endswith("_blocks") and location.entry.dtype == "U8":
            stem = name.removesuffix("_blocks")
            scales = _taken(out, name, f"{stem}_scales")
            del out[name]
            out[stem] = _mxfp4(name, location, scales)
    return out


def _taken(tensors: dict, name: str, scales: str):
    if scales not in tensors:
        location = tensors[name]
        raise InputError(
            f"{location.file}: tensor {name[:200]} has dtype {location.entry.dtype}, and there is "
            f"no tensor {scales[:200]}",
            rule="codes mean nothing without their scales",
            fix="copy the folder again",
        )
    return tensors.pop(scales)


def _block_sizes(folder: Path) -> tuple[int, int] | None:
    """Rows and columns with one scale; None: a whole tensor."""
    path = folder / "config.json"
    settings = read_json_object(path).get("quantization_config")
    sizes = settings.get("weight_block_size") if isinstance(settings, dict) else None
    if sizes is None:
        return None
    whole = isinstance(sizes, list) and len(sizes) == 2
    if not whole or not all(type(n) is int and 0 < n < 2**31 for n in sizes):
        what = f"{path}: quantization_config.weight_block_size"
        fix = '"weight_block_size": [128, 128], or download config.json again'
        raise InputError(what, value=sizes, rule="[rows, columns], each above 0", fix=fix)
    return tuple(sizes)


def _fp8(name: str, location, scales, sizes: tuple[int, int] | None):
    shape, kind = location.entry.shape, scales.entry.dtype
    block = shape if sizes is None else sizes
    wanted = tuple(-(-n // max(b, 1)) for n, b in zip(shape, block, strict=False))
    flat = sizes is None and math.prod(scales.entry.shape) == 1
    if len(shape) != 2 or kind not in _SCALES or not (flat or scales.entry.shape == wanted):
        raise InputError(
            f"{scales.file}: the scales of tensor {name[:200]}",
            value=f"{kind} of shape {scales.entry.shape}",
            rule=f"{', '.join(_SCALES)} of shape {wanted}: one for each block of {tuple(block)} of "
            f"the {shape} codes",
            fix="download the model again, or take its bfloat16 weights",
        )
    return dataclasses.replace(location, scales=scales, block=tuple(block))


def _mxfp4(name: str, location, scales):
    shape = location.entry.shape
    fits = len(shape) == 4 and shape[-1] == _GROUP // 2 and scales.entry.shape == shape[:-1]
    if not fits or scales.entry.dtype != "U8":
        raise InputError(
            f"{location.file}: the MXFP4 codes {name[:200]}",
            value=f"{shape}, scales {scales.entry.dtype} {scales.entry.shape}",
            rule=f"[experts, out, in / {_GROUP}, {_GROUP // 2}], and U8 scales of the first three",
            fix="download the model again, or take its bfloat16 weights",
        )
    return dataclasses.replace(location, scales=scales)


def rows(location, files: dict, first: int, count: int) -> np.ndarray:
    """Returns rows `first` to `first + count` of a quantised tensor, decoded, [count, ...]: float32
    of FP8 and of a GGUF file, bfloat16 of MXFP4, which it holds exactly."""
    if isinstance(location.entry, StoredTensor):
        out = np.empty((count, *location.entry.shape[1:]), np.float32)
        decoded(location.entry, files[location.file], location.file, first, out)
        return out
    return (_fp8_rows if location.block else _mxfp4_rows)(location, files, first, count)


def _read(location, files: dict, first: int, count: int, dtype: np.dtype) -> np.ndarray:
    """Rows of a tensor, or what a tensor without rows holds."""
    out = np.empty((count, *location.entry.shape[1:]), dtype)
    begin = location.entry.begin + first * out[:1].nbytes
    read_bytes(files[location.file], location.file, begin, out)
    return out


def _fp8_rows(location, files, first: int, count: int) -> np.ndarray:
    out = _read(location, files, first, count, E4M3).astype(np.float32)
    tall, wide = location.block
    entry, dtype = location.scales.entry, _SCALES[location.scales.entry.dtype]
    if math.prod(entry.shape) == 1:
        one = np.empty((1, 1), dtype)
        read_bytes(files[location.scales.file], location.scales.file, entry.begin, one)
        return out * one.astype(np.float32)
    top = first // tall
    scales = _read(location.scales, files, top, -(-(first + count) // tall) - top, dtype)
    of_row = (np.arange(first, first + count) // tall) - top
    for column in range(entry.shape[1]):
        part = out[:, column * wide : (column + 1) * wide]
        part *= scales[of_row, column].astype(np.float32)[:, None]
    return out


@functools.cache
def _pairs() -> np.ndarray:
    """uint32 [exponent x 256 + byte]: the two bfloat16 numbers of a byte of codes, side by side."""
    codes = np.arange(256)
    two = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], axis=-1)
    with np.errstate(over="ignore"):
        values = np.ldexp(two, np.arange(256, dtype=np.int32)[:, None, None] - 127)
    return values.astype(ml_dtypes.bfloat16).view(np.uint32).ravel()


def _mxfp4_rows(location, files, first: int, count: int) -> np.ndarray:
    _, outs, groups, _ = location.entry.shape
    decoded = np.empty((count, groups * _GROUP, outs), ml_dtypes.bfloat16)
    for expert in range(count):
        codes = _read(location, files, first + expert, 1, np.dtype(np.uint8))[0]
        exponents = _read(location.scales, files, first + expert, 1, np.dtype(np.uint8))[0]
        for at in range(0, outs, _ROWS_AT_ONCE):
            here = slice(at, at + _ROWS_AT_ONCE)
            index = exponents[here, :, None].astype(np.int32) * 256 + codes[here]
            values = _pairs()[index].view(ml_dtypes.bfloat16)
            decoded[expert, :, here] = values.reshape(len(values), -1).T
    return decoded
