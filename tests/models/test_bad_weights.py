"""Hostile weight files and indexes: an error that names file and tensor, no crash, no giant
allocation."""

import json
import os
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from spent import at_most
from tiny_folders import (
    tiny,  # noqa: F401  a fixture
    write_folder,
)
from tiny_refusal import refused

from rljax.models.huggingface import blocks, load_params

NORM = "model.norm.weight"


def edited(path, change, raw=None):
    """Write the file again with another header."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    text = raw(data[8 : 8 + size]) if raw else json.dumps(change(json.loads(data[8 : 8 + size])))
    text = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def with_norm(**changes):
    return lambda h: {**h, NORM: {**h[NORM], **changes}}


def moved(begin: int, end: int):
    def change(header):
        a, b = header[NORM]["data_offsets"]
        return with_norm(data_offsets=[a + begin, b + end])(header)

    return change


HOSTILE = {
    "overlap": (moved(-128, -128), "overlaps"),
    "gap": (moved(128, 128), "leaves a gap"),
    "a shorter span": (moved(0, -4), "hold 124 bytes"),
    "negative": (with_norm(data_offsets=[-128, 0]), "data_offsets"),
    "backwards": (with_norm(data_offsets=[256, 128]), "data_offsets"),
    "out of range": (with_norm(data_offsets=[2**62, 2**62 + 128]), "gap"),
    "three offsets": (with_norm(data_offsets=[0, 1, 2]), "data_offsets"),
    "offsets are floats": (with_norm(data_offsets=[0.0, 128.0]), "data_offsets"),
    "huge and zero": (with_norm(shape=[2**62, 0]), "hold 128 bytes"),
    "huge": (with_norm(shape=[2**62, 2**62]), "hold 128 bytes"),
    "beyond 64 bits": (with_norm(shape=[2**200]), "shape"),
    "a NaN shape": (with_norm(shape=[float("nan")]), "shape"),
    "an infinite shape": (with_norm(shape=[float("inf")]), "shape"),
    "a bool shape": (with_norm(shape=[True]), "shape"),
    "a million axes": (with_norm(shape=[1] * 10**6), "shape"),
    "null dtype": (with_norm(dtype=None), "dtype"),
    "unknown dtype": (with_norm(dtype="F128"), "dtype"),
    "another width": (with_norm(dtype="F16"), "hold 128 bytes"),
    "eight-bit floats": (with_norm(dtype="F8_E4M3", shape=[128]), "has dtype F8_E4M3"),
    "integers": (with_norm(dtype="I32"), "has dtype I32"),
    "complex": (with_norm(dtype="C64", shape=[16]), "has dtype C64"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_entries(tiny, name):  # noqa: F811
    folder, model, _ = tiny
    change, rule = HOSTILE[name]
    edited(folder / "model.safetensors", change)
    refused(lambda: load_params(folder, model), "model.safetensors", NORM, rule)


RAW = {
    "duplicate": lambda t: t[:-1] + b',"model.norm.weight":{}}',
    "not UTF-8": lambda t: t.replace(b"model.norm", b"model.\xff\xfe\xfd"),
    "deep": lambda t: b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "a huge number": lambda t: b'{"a":' + b"9" * 100_000 + b"}",
    "null bytes": lambda t: b"\0" * len(t),
}


@pytest.mark.parametrize("name", RAW)
def test_hostile_texts(tiny, name):  # noqa: F811
    folder, model, _ = tiny
    edited(folder / "model.safetensors", None, RAW[name])
    names = (NORM, "twice") if name == "duplicate" else ()
    refused(lambda: load_params(folder, model), "model.safetensors: the header", *names)


@pytest.mark.parametrize("more", [-100_000, -1000, -1, 1])
def test_cut_short_or_too_long(tiny, more):  # noqa: F811
    folder, model, _ = tiny
    path = folder / "model.safetensors"
    os.truncate(path, max(path.stat().st_size + more, 4))
    refused(lambda: load_params(folder, model), str(path), "bytes", "copy the file again")


def test_zero_sized_tensors(tiny):  # noqa: F811
    folder, model, tensors = tiny
    nothing = np.zeros((0, 32), np.float32)
    write_folder(folder, model, {**tensors, "model.nothing": nothing})
    refused(lambda: load_params(folder, model), "does not use: model.nothing")
    write_folder(folder, model, {**tensors, NORM: np.zeros(0, np.float32)})
    refused(lambda: load_params(folder, model), NORM, "has shape (0,)")


def test_a_lying_header_allocates_nothing(tiny):  # noqa: F811
    """A file with a hole of 64 GiB: the announced header would not fit into memory."""
    folder, model, _ = tiny
    path = folder / "model.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", 2**36 - 8))
        file.truncate(2**36)
    with at_most(5):
        refused(lambda: load_params(folder, model), str(path), "announces a header")


NAMES = ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "a\\b", "a\0b"]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_an_index_stays_in_its_folder(tiny, name):  # noqa: F811
    folder, model, tensors = tiny
    save_file(tensors, folder.parent / "x.safetensors")
    text = json.dumps({"weight_map": dict.fromkeys(tensors, name)})
    (folder / "model.safetensors.index.json").write_text(text)
    refused(lambda: load_params(folder, model), "index.json", "same folder")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite(tiny, monkeypatch, value):  # noqa: F811
    """Read a row at a time: the place is that in the whole tensor."""
    folder, model, _ = tiny
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1)
    path, name = folder / "model.safetensors", "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(path)
    tensors[name] = tensors[name].copy()
    tensors[name][3, 2] = tensors[name][3, 4] = value
    save_file(tensors, path)
    refused(lambda: load_params(folder, model), str(path), f"{name}[3, 2]: got {value}")


@pytest.mark.parametrize("kind", ["loop", "dangling link", "pipe", "folder", "no permission"])
def test_what_is_no_file(tiny, kind):  # noqa: F811
    folder, model, _ = tiny
    path = folder / "model.safetensors"
    if kind == "no permission":
        if os.getuid() == 0:
            pytest.skip("root may read everything")
        path.chmod(0)
    else:
        path.unlink()
        {
            "loop": lambda: path.symlink_to(path),
            "dangling link": lambda: path.symlink_to(folder / "nothing"),
            "pipe": lambda: os.mkfifo(path),  # opening it would block for ever
            "folder": path.mkdir,
        }[kind]()
    refused(lambda: load_params(folder, model), str(path))


def test_an_index_that_loops(tiny):  # noqa: F811
    folder, model, _ = tiny
    index = folder / "model.safetensors.index.json"
    index.symlink_to(index)
    refused(lambda: load_params(folder, model), str(index))
