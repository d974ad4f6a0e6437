"""Loads and saves Hugging Face folders: config.json + safetensors <-> Model and parameters.

Weights move a block of rows at a time, so the host holds a few blocks whatever the size of a
tensor. No pickle is read and no code of a folder is run.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rljax import hosts, hub
from rljax.arrays import fetch
from rljax.errors import InputError
from rljax.files import open_file, read_bytes, read_json_object
from rljax.gguf import names_the_file
from rljax.gguf.rows import StoredTensor, decoded
from rljax.models.config import DTYPES, ModelConfig
from rljax.models.families import from_hf_config, to_hf_config
from rljax.models.huggingface import blocks, checkpoint_folder, quantised
from rljax.models.huggingface.checkpoint_folder import (
    INDEX,
    WHOLE,
    FileRecord,
    LoadReport,
    TensorLocation,
)
from rljax.models.huggingface.safetensors_file import (
    FLOATS,
    TensorInfo,
    new_header,
    require_finite,
    write_bytes,
)
from rljax.models.model import Model
from rljax.models.names import disk_pieces
from rljax.models.trees import nested

LOG = logging.getLogger("rljax")
ADAPTER_CONFIG = "adapter_config.json"


@names_the_file
def load_config(folder: str | Path, **overrides) -> ModelConfig:
    """Returns the ModelConfig of a Hugging Face folder, or of a repository of the hub, of which
    config.json alone is downloaded. Where it ties the head, and the weights beside it have another,
    the head is not tied. Raises InputError that names config.json and the key."""
    path = hub.model_folder(folder, hub.CONFIG) / "config.json"
    look_for_adapter(path.parent)
    try:
        config = from_hf_config(read_json_object(path), **overrides)
        if config.tie_embeddings and checkpoint_folder.has_own_head(path.parent, config):
            config = dataclasses.replace(config, tie_embeddings=False)
        return config
    except InputError as error:
        text = str(error)
        if str(path) not in text:
            text = f"{path}: {text.removeprefix('config.json: ')}"
        raise InputError.of_text(text) from None


@functools.cache
def look_for_adapter(folder: Path) -> None:
    """Warns of a PEFT adapter beside a model. Raises InputError where there is no model."""
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        return
    if not (folder / "config.json").exists():
        base = read_json_object(path).get("base_model_name_or_path")
        raise InputError(
            f"{folder} holds a PEFT adapter and no model",
            rule=f"the adapter is of {base!r}" if base else "the adapter does not name its base",
            fix="name the base as the model; --config.lora.adapter=ADAPTER_FOLDER trains on from "
            "the adapter, and PEFT's merge_and_unload() makes one model of both",
        )
    LOG.warning(
        "%s: the adapter in it (%s) is not part of the model that is read. Fix: merge it with "
        "PEFT's merge_and_unload(), or train on from it with --config.lora.adapter=%s",
        folder,
        ADAPTER_CONFIG,
        folder,
    )


# -- loading --


@names_the_file
def load_params(folder: str | Path, model: Model) -> dict:
    """Returns parameters of `model` from a Hugging Face folder or a repository of the hub,
    placed on its mesh.

    A scalar head that is not on disk (the folder holds a language model) starts at zero. Missing,
    unexpected and mis-shaped tensors raise one InputError that names them.
    """
    here = hub.model_folder(folder, hub.WEIGHTS)
    return _read(*checkpoint_folder.compare(here, model), model)


@names_the_file
def load_with_report(folder: str | Path, model: Model) -> tuple[dict, LoadReport]:
    """Returns the parameters, as `load_params` does, and what was loaded: ignored tensors,
    revision, size and SHA-256 of each file.

    The files are hashed by threads beside the loading, which so costs about 2 s per GB and core
    where it is not hidden. Of several hosts each hashes its share of the files. Those of a
    repository of the hub must have the SHA-256 that it lists, or InputError is raised.
    """
    here, listed = hub.model_folder(folder, hub.WEIGHTS), hub.digests(folder)
    report, locations = checkpoint_folder.compare(here, model)
    paths = sorted({file for location in locations.values() for file in location.files})
    mine = [paths[i] for i in hosts.mine(len(paths))]
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        hashing = [pool.submit(checkpoint_folder.record, path) for path in mine]
        params = _read(report, locations, model)
        own = {p.name: vars(f.result()) for p, f in zip(mine, hashing, strict=True)}
    records = {name: record for each in hosts.gather(own) for name, record in each.items()}
    files = {path.name: FileRecord(**records[path.name]) for path in paths}
    for path in paths:
        checkpoint_folder.require_digest(path, files[path.name], listed.get(path.name))
    return params, dataclasses.replace(report, folder=str(folder), files=files)


def _read(report: LoadReport, locations: dict[str, TensorLocation], model: Model) -> dict:
    """Every weight, from blocks that are read in the order of the files."""
    leaves = blocks.zeros(model)
    todo = blocks.groups(model, skip=frozenset(report.zero))
    last = None  # the weight written to most recently

    def order(g):
        return min((locations[n].file, locations[n].entry.begin) for n in g.names)

    with contextlib.ExitStack() as stack:
        files = {}
        for path in sorted({file for location in locations.values() for file in location.files}):
            files[path] = open_file(path)
            stack.callback(os.close, files[path])
        for group in sorted(todo, key=order):
            dtypes = [locations[name].dtype for name in group.names]
            dtype = dtypes[0] if len(set(dtypes)) == 1 else np.dtype(np.float32)
            shares = model.mesh.size if hosts.count() > 1 else 1
            decodes = isinstance(locations[group.names[0]].entry, StoredTensor)
            most = blocks.DECODED_BYTES if decodes else blocks.BLOCK_BYTES
            count, starts = group.row_starts(dtype.itemsize, shares, most)
            shape, first = group.block_shape(count), group.parts[0]
            layout = blocks.layout(shape, first, model.mesh, shared=shares > 1)
            rows = blocks.own_rows(shape, layout, len(first.start))
            for start in starts:
                block = _read_block(group, start, count, dtype, locations, files, rows)
                for part in group.parts:
                    placed = blocks.to_devices(block[..., part.piece.columns], layout)
                    # A block is read while the devices work on the one before, not further ahead.
                    jax.block_until_ready(last)
                    last = blocks.put(leaves[part.path], part, model.mesh, placed, start)
                    leaves[part.path] = last
    return nested(jax.block_until_ready(leaves))


def _read_block(group, start: int, count: int, dtype, locations, files, rows) -> np.ndarray:
    """A block of a group of tensors, each byte of `rows` (blocks.own_rows) read once; what other
    rows hold is undefined."""
    # JAX has no float64 unless it is asked for.
    block = group.empty(count, np.dtype(np.float32) if dtype == np.float64 else dtype)
    for name, index, row, first in group.spans(start, count):
        tensor = locations[name]
        file, entry = tensor.file, tensor.entry
        for lead, begin, end in rows:
            begin, end = max(begin, row), min(end, row + count)
            here = all(a <= at < b for at, (a, b) in zip(index, lead, strict=True))
            if not here or begin >= end:
                continue
            out = block[index][begin:end]
            at = first + begin - row  # the first row of the tensor that is read
            if isinstance(entry, StoredTensor):
                decoded(entry, files[file], file, at, out)
            elif tensor.is_coded:
                out[...] = quantised.rows(tensor, files, at, end - begin)
            else:
                disk = FLOATS[entry.dtype]
                source = out if disk == block.dtype else np.empty(out.shape, disk)
                row_bytes = source.nbytes // (end - begin)
                read_bytes(files[file], file, entry.begin + at * row_bytes, source)
                if source is not out:
                    out[...] = source
            require_finite(out, file, name, at)
    return block


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
    settings: Mapping[str, object] | None = None,
):
    """Writes config.json, generation_config.json and safetensors files that transformers reads.

    More than `shard_bytes` become several files and an index. `dtype`: float32 | bfloat16 | float16
    | "" = as the parameters are. `settings`: further keys of config.json. All files get their
    names at the end, config.json last: a folder that a killed save leaves is the old one, or has no
    config.json. Raises InputError for another
    `dtype` and for shard_bytes below 1.
    """
    if dtype not in ("", *DTYPES):
        rule = f"{', '.join(DTYPES)}, or '' for the weights' own"
        raise InputError("dtype", value=dtype, rule=rule, fix="dtype='' or one of these")
    if shard_bytes < 1:
        fix = "set shard_bytes to the size of a file, such as 5_000_000_000"
        raise InputError("shard_bytes", value=shard_bytes, fix=fix)
    config = dataclasses.replace(model.config, weight_dtype=dtype or model.config.weight_dtype)
    dtype = jnp.dtype(config.weight_dtype)
    shards = _shards(model, dtype, shard_bytes)
    texts = _texts(config, model.head, shards, bos_id=bos_id, eos_ids=eos_ids, pad_id=pad_id)
    texts["config.json"] |= settings or {}
    gathered, fault = _gathered(model, params, dtype), None
    try:
        if hosts.first():
            _write(Path(folder), shards, texts, gathered)
    except OSError as error:
        fault = error
    for _ in gathered if hosts.count() > 1 else ():  # also after a fault: the others need a partner
        pass
    hosts.wait("a model is saved")  # the others may read it from here on
    if fault is not None:
        raise fault


def _write(folder: Path, shards: dict[str, dict], texts: dict[str, dict], gathered) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(".*.saving"):  # of a save that was killed
        stale.unlink()
    with contextlib.ExitStack() as stack:
        targets: dict[str, tuple[int, TensorInfo]] = {}
        for shard, tensors in shards.items():
            header, entries = new_header(tensors)
            file = os.open(_hidden(folder / shard), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            stack.callback(os.close, file)
            write_bytes(file, 0, np.frombuffer(header, np.uint8))
            targets |= {name: (file, entry) for name, entry in entries.items()}
        for name, first, data in gathered:
            file, entry = targets[name]
            write_bytes(file, entry.begin + first * (data.nbytes // max(len(data), 1)), data)
        for file in {file for file, _ in targets.values()}:
            os.fsync(file)
    _commit(folder, list(shards), texts)


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


def _gathered(model: Model, params: dict, dtype) -> Iterator[tuple[str, int, np.ndarray]]:
    """(tensor, its first row, rows) of every weight, gathered from the devices a block at a time:
    every host has to go through all of it."""
    for group in blocks.groups(model):
        count, starts = group.row_starts(dtype.itemsize)
        for start in starts:
            block = group.empty(count, dtype)
            for part in group.parts:
                leaf = params
                for key in part.path:
                    leaf = leaf[key]
                value = blocks.get(leaf, part, model.mesh, start, count, dtype)
                block[..., part.piece.columns] = fetch(value)
            for name, index, row, first in group.spans(start, count):
                yield name, first, block[index][row : row + count]


def _commit(folder: Path, shards: list[str], texts: dict[str, dict]) -> None:
    """Give the written files their names. config.json goes first and comes last."""
    for name, value in texts.items():
        _hidden(folder / name).write_text(json.dumps(value, indent=2) + "\n")
    stale = [folder / "config.json", folder / INDEX, folder / WHOLE]
    for path in [*stale, *sorted(folder.glob("model-*-of-*.safetensors"))]:
        path.unlink(missing_ok=True)
    for name in [*shards, *texts]:
        os.replace(_hidden(folder / name), folder / name)
