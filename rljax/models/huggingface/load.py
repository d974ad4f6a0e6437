"""Loads and saves Hugging Face folders: config.json + safetensors <-> Model and parameters.

Weights move a block of rows at a time, so the host holds a few blocks whatever the size of a
tensor. No pickle is read and no code of a folder is run.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from rljax.errors import InputError
from rljax.files import open_file, read_json_object
from rljax.models.config import ModelConfig
from rljax.models.families import from_hf_config, to_hf_config
from rljax.models.huggingface import blocks, checkpoint_folder
from rljax.models.huggingface.checkpoint_folder import INDEX, WHOLE, LoadReport, Place
from rljax.models.huggingface.safetensors_file import (
    FLOATS,
    Entry,
    new_header,
    read_bytes,
    write_bytes,
)
from rljax.models.model import Model
from rljax.models.names import disk_pieces
from rljax.models.trees import nested


def load_config(folder: str | Path, **overrides) -> ModelConfig:
    """The ModelConfig of a Hugging Face folder. Raises InputError that names config.json and
    the key."""
    path = Path(folder) / "config.json"
    try:
        return from_hf_config(read_json_object(path), **overrides)
    except InputError as error:
        text = str(error)
        raise InputError(text if str(path) in text else f"{path}: {text}") from None


# -- loading --


def load_params(folder: str | Path, model: Model) -> dict:
    """Parameters of `model` from a Hugging Face folder, placed on its mesh.

    A scalar head that is not on disk (the folder holds a language model) starts at zero. Missing,
    unexpected and mis-shaped tensors raise one InputError that names them.
    """
    return _read(*checkpoint_folder.compare(Path(folder), model), model)


def load_with_report(folder: str | Path, model: Model) -> tuple[dict, LoadReport]:
    """load_params, and what was loaded: ignored tensors, revision, size and SHA-256 of each file.

    The files are hashed by threads beside the loading, which so costs about 2 s per GB and core
    where it is not hidden.
    """
    report, places = checkpoint_folder.compare(Path(folder), model)
    paths = sorted({place.file for place in places.values()})
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        hashing = [pool.submit(checkpoint_folder.record, path) for path in paths]
        params = _read(report, places, model)
        files = {p.name: f.result() for p, f in zip(paths, hashing, strict=True)}
    return params, dataclasses.replace(report, files=files)


def _read(report: LoadReport, places: dict[str, Place], model: Model) -> dict:
    """Every weight, from blocks that are read in the order of the files."""
    leaves = blocks.zeros(model)
    todo = blocks.groups(model, skip=frozenset(report.zero))
    last = None  # the weight written to most recently
    order = lambda g: min((places[n].file, places[n].entry.begin) for n in g.names)  # noqa: E731
    with contextlib.ExitStack() as stack:
        files = {}
        for path in sorted({place.file for place in places.values()}):
            files[path] = open_file(path)
            stack.callback(os.close, files[path])
        for group in sorted(todo, key=order):
            dtypes = [FLOATS[places[name].entry.dtype] for name in group.names]
            dtype = dtypes[0] if len(set(dtypes)) == 1 else np.dtype(np.float32)
            count, starts = group.row_starts(dtype.itemsize)
            for start in starts:
                block = _read_block(group, start, count, dtype, places, files)
                for part in group.parts:
                    placed = blocks.place(block, part, model.mesh)
                    # A block is read while the devices work on the one before, not further ahead.
                    jax.block_until_ready(last)
                    last = blocks.put(leaves[part.path], part, model.mesh, placed, start)
                    leaves[part.path] = last
    return nested(jax.block_until_ready(leaves))


def _read_block(group, start: int, count: int, dtype, places, files) -> np.ndarray:
    """A block of a group of tensors, each byte read once."""
    block = group.empty(count, dtype)
    for name, place, row, first in group.spans(start, count):
        file, entry = places[name].file, places[name].entry
        out = block[place][row : row + count]
        source = out if FLOATS[entry.dtype] == dtype else np.empty(out.shape, FLOATS[entry.dtype])
        row_bytes = source.nbytes // max(count, 1)
        read_bytes(files[file], file, entry.begin + first * row_bytes, source)
        if source is not out:
            out[...] = source
    # JAX has no float64 unless it is asked for.
    return block.astype(np.float32) if block.dtype == np.float64 else block


# -- saving --


def save_params(
    folder: str | Path,
    model: Model,
    params: dict,
    *,
    bos_id=None,
    eos_ids=(),
    pad_id=None,
    shard_bytes: int = 5_000_000_000,
    dtype: str = "",
):
    """Write config.json, generation_config.json and safetensors files that transformers reads.

    More than `shard_bytes` become several files and an index. `dtype`: float32 | bfloat16 | "" =
    as the parameters are. All files get their names at the end, config.json last: a folder that a
    killed save leaves is the old one, or has no config.json.
    """
    if dtype not in ("", "float32", "bfloat16"):
        raise InputError("dtype", value=dtype, rule="float32, bfloat16, or '' for the weights' own")
    if shard_bytes < 1:
        raise InputError("shard_bytes", value=shard_bytes, rule="1 or more")
    config = dataclasses.replace(model.config, weight_dtype=dtype or model.config.weight_dtype)
    folder, writes = Path(folder), jax.process_index() == 0
    shards = _shards(model, jnp.dtype(config.weight_dtype), shard_bytes)
    texts = _texts(config, model.head, shards, bos_id=bos_id, eos_ids=eos_ids, pad_id=pad_id)
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(".*.saving"):  # of a save that was killed
            stale.unlink()
    with contextlib.ExitStack() as stack:
        targets: dict[str, tuple[int, Entry]] = {}
        for shard, tensors in shards.items() if writes else ():
            header, entries = new_header(tensors)
            file = os.open(_hidden(folder / shard), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            stack.callback(os.close, file)
            write_bytes(file, 0, np.frombuffer(header, np.uint8))
            targets |= {name: (file, entry) for name, entry in entries.items()}
        _write(model, params, jnp.dtype(config.weight_dtype), targets)
        for file in {file for file, _ in targets.values()}:
            os.fsync(file)
    if writes:
        _commit(folder, list(shards), texts)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("rljax: saved")  # the others may read it from here on


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.saving")


def _shards(model: Model, dtype, shard_bytes: int) -> dict[str, dict]:
    """{file: {tensor: (dtype, shape)}}: at most `shard_bytes` each, or one tensor."""
    shards, size = [{}], 0
    for name, pieces in disk_pieces(model).items():
        shape = pieces[0].disk_shape
        more = int(np.prod(shape)) * dtype.itemsize
        if shards[-1] and size + more > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = (dtype, shape)
        size += more
    if len(shards) == 1:
        return {WHOLE: shards[0]}
    total = len(shards)
    return {f"model-{i + 1:05d}-of-{total:05d}.safetensors": s for i, s in enumerate(shards)}


def _texts(config: ModelConfig, head: str, shards: dict, **ids) -> dict[str, dict]:
    """{name: object} of the JSON files, config.json last."""
    hf_config = to_hf_config(config, head=head, **ids)
    texts = {}
    if len(shards) > 1:
        tensors = [(d.itemsize * int(np.prod(s))) for t in shards.values() for d, s in t.values()]
        texts[INDEX] = {
            "metadata": {"total_size": sum(tensors)},
            "weight_map": {name: file for file, of in shards.items() for name in of},
        }
    texts["generation_config.json"] = {
        "bos_token_id": ids["bos_id"],
        "eos_token_id": hf_config.get("text_config", hf_config)["eos_token_id"],
        "pad_token_id": ids["pad_id"],
    }
    return {**texts, "config.json": hf_config}


def _write(model: Model, params: dict, dtype, targets: dict[str, tuple[int, Entry]]) -> None:
    """Every block of every weight, gathered from the devices one at a time. Other processes than
    the first have no targets: they take part in the gathering."""
    for group in blocks.groups(model):
        count, starts = group.row_starts(dtype.itemsize)
        for start in starts:
            block = group.empty(count, dtype)
            for part in group.parts:
                leaf = params
                for key in part.path:
                    leaf = leaf[key]
                value = blocks.get(leaf, part, model.mesh, start, count, dtype)
                if not value.is_fully_addressable:
                    value = multihost_utils.process_allgather(value, tiled=True)
                step = (
                    slice(None) if part.piece.column is None else slice(part.piece.column, None, 2)
                )
                block[..., step] = np.asarray(value)
            for name, place, row, first in group.spans(start, count) if targets else ():
                file, entry = targets[name]
                data = block[place][row : row + count]
                write_bytes(file, entry.begin + first * (data.nbytes // max(count, 1)), data)


def _commit(folder: Path, shards: list[str], texts: dict[str, dict]) -> None:
    """Give the written files their names. config.json goes first and comes last."""
    for name, value in texts.items():
        _hidden(folder / name).write_text(json.dumps(value, indent=2) + "\n")
    stale = [folder / "config.json", folder / INDEX, folder / WHOLE]
    for path in [*stale, *sorted(folder.glob("model-*-of-*.safetensors"))]:
        path.unlink(missing_ok=True)
    for name in [*shards, *texts]:
        os.replace(_hidden(folder / name), folder / name)
