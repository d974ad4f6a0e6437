"""A Hugging Face folder on disk: which file holds which tensor, which version it is, what fits.

The index, the comparison with a model by name, SHA-256 and revision. Nothing here trusts what a
folder says of itself.
"""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np

from rljax import hosts
from rljax.errors import InputError
from rljax.files import open_file, read_bytes, read_data, read_json_object
from rljax.gguf import weights_file
from rljax.gguf.folder import tensors_of
from rljax.gguf.rows import StoredTensor
from rljax.models.config import ModelConfig
from rljax.models.families import FAMILIES
from rljax.models.huggingface import quantised
from rljax.models.huggingface.safetensors_file import FLOATS, TensorInfo, read_header
from rljax.models.model import Model
from rljax.models.names import NAMES, disk_pieces, names_on_disk, text_prefix

LOG = logging.getLogger("rljax")
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
_REVISION = re.compile(r"[0-9a-f]{40}")
_LONGEST_NOTE = 100_000  # bytes of what a download noted
_SHOWN = 4  # names of each kind in an error
_HEAD = "lm_head.weight"
# What wrappers of a model put before the names of its tensors: DataParallel, torch.compile, FSDP,
# activation checkpoints and TRL's value heads.
_INNER = "_(?:orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)"
_WRAPPERS = re.compile(rf"\A(?:(?:module|pretrained_model|{_INNER})\.)++|(?<=\.)(?:{_INNER}\.)++")
# As models with images and sound are published whose decoder alone is read, and the rest of them.
_OLD_DECODER = re.compile(r"\Alanguage_model\.(?=model\.|lm_head\.)")
_TOWERS = re.compile(
    r"(?:model\.)?"
    r"(?:vision_tower|audio_tower|multi_modal_projector|vision_embedder|embed_vision|embed_audio)\."
)
# Scales of a cache of keys and values in 8 bits, and of activations: here both are not quantised.
_UNUSED_SCALES = tuple(f".{name}_scale" for name in "input activation output q k v kv prob".split())
_VALUE_HEAD = "v_head."
_VALUE_HEAD_FIX = (
    "rename v_head.summary.weight and .bias to score.weight and .bias, and write into config.json "
    '"num_labels": 1 and "architectures": ["...ForTokenClassification"] of the model\'s family'
)
_OF_ADAPTER = (".lora_A.", ".lora_B.", ".base_layer.", ".modules_to_save.")
_COMPARED = 64 << 20  # bytes of a tensor at once


@dataclasses.dataclass(frozen=True)
class TensorLocation:
    """Location of a tensor: its file and entry. A quantised one
    (rljax.models.huggingface.quantised) also has scales, and FP8 the rows and columns that share
    one. One of a GGUF file has `StoredTensor` for an entry."""

    file: Path
    entry: TensorInfo | StoredTensor
    scales: "TensorLocation | None" = None
    block: tuple[int, int] | None = None

    @property
    def files(self) -> set[Path]:
        """Files that hold the tensor and its scales."""
        return {self.file} if self.scales is None else {self.file, self.scales.file}

    @property
    def is_coded(self) -> bool:
        """Returns whether the bytes are decoded, by rljax.models.huggingface.quantised."""
        return self.scales is not None or isinstance(self.entry, StoredTensor)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor as it is read."""
        if self.scales is None or self.block:
            return self.entry.shape
        experts, outs, groups, half = self.entry.shape
        return (experts, groups * 2 * half, outs)

    @property
    def dtype(self) -> np.dtype | None:
        """Type of the tensor as it is read; None if it cannot be read."""
        if isinstance(self.entry, StoredTensor):
            return np.dtype(np.float32)
        if self.scales is None:
            return FLOATS.get(self.entry.dtype)
        return np.dtype(np.float32 if self.block else ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 of a file."""

    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """The contents of a folder against what the model needs. Names are those of the folder."""

    folder: str
    revision: str | None  # the commit of the repository it came from, where the folder records it
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    misshaped: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()  # on disk, expected
    unreadable: tuple[tuple[str, str], ...] = ()  # and their dtype
    ignored: tuple[str, ...] = ()  # they do not change the result
    zero: tuple[str, ...] = ()  # absent, and so started at zero: the head of a new critic
    dtypes: tuple[str, ...] = ()  # as which the tensors are read
    files: dict[str, FileRecord] = dataclasses.field(default_factory=dict)


# -- which file holds which tensor --


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files to read, and the index's {tensor: file} if there is one."""
    index = folder / INDEX
    if os.path.lexists(index):
        names = read_json_object(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(f, str) for f in names.values()):
            raise InputError(
                f"{index} has no 'weight_map' of tensor name to file",
                fix=f"download or copy {INDEX} again",
            )
        for tensor, file in names.items():
            plain = file not in ("", ".", "..") and not set(file) & set("/\\\0")
            if not plain:
                raise InputError(
                    f"{index}: the file of tensor {tensor[:200]!r}",
                    value=file,
                    rule="the name of a file in the same folder",
                    fix="download or copy the index again, with its files beside it",
                )
        return [folder / file for file in sorted(set(names.values()))], names
    if os.path.lexists(folder / WHOLE):
        return [folder / WHOLE], None  # some folders hold the same weights once more
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = [p.name for p in sorted(folder.glob("*")) if p.suffix in (".bin", ".pt", ".pth")]
        raise InputError(
            f"{folder} has no *.safetensors file",
            value=pickles[:_SHOWN] or None,
            rule="pickle files can run any code, and are never read" if pickles else "",
            fix="convert them where you trust them: transformers' save_pretrained writes "
            "safetensors"
            if pickles
            else "give a folder with safetensors weights",
        )
    return files, None


def find_tensors(folder: Path) -> dict[str, TensorLocation]:
    """Returns {tensor name: location}, from the index if there is one, else from the files, without
    what a wrapper of the model put into the names. Raises InputError if two files hold a tensor,
    or if a file lacks one that the index names."""
    if (gguf := weights_file(folder)) is not None:
        return {name: TensorLocation(gguf, rows) for name, rows in tensors_of(gguf).items()}
    files, index = _weight_files(folder)
    out: dict[str, TensorLocation] = {}
    headers = {}
    for path in files:
        file = open_file(path)
        try:
            headers[path.name] = read_header(file, path)
        finally:
            os.close(file)
        if index is None:
            for name, entry in headers[path.name].items():
                _add(out, name, TensorLocation(path, entry))
    for name, file in (index or {}).items():
        if name not in headers[file]:
            raise InputError(
                f"{folder / file} lacks tensor {name}",
                rule=f"{INDEX} names it",
                fix="download or copy the folder again: index and files are of two saves",
            )
        _add(out, name, TensorLocation(folder / file, headers[file][name]))
    return out


def _add(tensors: dict[str, TensorLocation], name: str, location: TensorLocation) -> None:
    """Adds a tensor by its name without wrappers. Raises InputError if there is one."""
    plain = _OLD_DECODER.sub("", _WRAPPERS.sub("", name))
    if plain in tensors:
        other = tensors[plain].file
        raise InputError(
            f"{location.file}: tensor {name[:200]} is in {other.name}, too",
            rule="module., _orig_mod. and other names of wrappers are no part of a name"
            if other == location.file or plain != name
            else "",
            fix="save the model without its wrapper, once"
            if other == location.file
            else "remove the file that does not belong to the model; an earlier save may have left "
            "it",
        )
    tensors[plain] = location


# -- a head of its own --


def has_own_head(folder: Path, config: ModelConfig) -> bool:
    """Returns whether the weights of a folder whose config ties the head to the embedding hold
    another head, as a merged adapter or a resized vocabulary leaves it; False without weights.

    The file wins then, as in transformers 5: both matrices are read. Files of two dtypes hold the
    same matrix where they agree in the narrower one.
    """
    try:
        tensors = find_tensors(folder)
    except InputError:  # whoever reads the weights says what is wrong with them
        return False
    (embedding,) = names_on_disk([f"{text_prefix(config)}embed_tokens.weight"], tensors).values()
    if _HEAD not in tensors or embedding not in tensors:
        return False
    both = tensors[_HEAD], tensors[embedding]
    return _differ(*((location, _stamp(location.file)) for location in both))


def _stamp(path: Path) -> tuple[int, int]:
    """Changes with the file."""
    found = path.stat()
    return found.st_mtime_ns, found.st_size


@functools.lru_cache(maxsize=64)  # a run asks for the config of a folder more than once
def _differ(head: tuple[TensorLocation, tuple], embedding: tuple[TensorLocation, tuple]) -> bool:
    """Returns whether two tensors, given with their files' stamps, differ; logs where they do."""
    one, other = head[0], embedding[0]
    if one.entry.shape != other.entry.shape or None in (one.dtype, other.dtype):
        differ = True
    else:
        narrow = min(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
        with contextlib.ExitStack() as stack:
            blocks = [_blocks_of(location, stack) for location in (one, other)]
            pairs = ([x.astype(narrow) for x in pair] for pair in zip(*blocks, strict=True))
            # By bytes a NaN is itself, by values -0 is 0.
            differ = any(a.tobytes() != b.tobytes() and np.any(a != b) for a, b in pairs)
    if differ and hosts.first():
        LOG.warning(
            "%s: config.json says tie_word_embeddings, and %s holds another matrix than the "
            "embedding: both are read, and what is exported says tie_word_embeddings=false",
            one.file.parent,
            _HEAD,
        )
    return differ


def _blocks_of(location: TensorLocation, stack: contextlib.ExitStack):
    """The elements of a tensor, some at once; of two tensors of one shape as many."""
    file, count = open_file(location.file), int(np.prod(location.entry.shape))
    stack.callback(os.close, file)
    if location.is_coded:
        tall, wide = location.shape[0], max(math.prod(location.shape[1:]), 1)
        step = max(_COMPARED // 8 // wide, 1)
        for first in range(0, tall, step):
            yield quantised.rows(location, {location.file: file}, first, min(step, tall - first))
        return
    step = _COMPARED // 8
    for first in range(0, count, step):
        block = np.empty(min(step, count - first), location.dtype)
        read_bytes(file, location.file, location.entry.begin + first * block.itemsize, block)
        yield block


# -- against the model --


def _ignorable(name: str, model: Model) -> bool:
    config = model.config
    if "rotary_emb" in name:  # tables of old exports
        return True
    if name.endswith(_UNUSED_SCALES):
        return True
    if config.part_of and _TOWERS.match(name):
        return True
    if name == _HEAD:  # else it is a weight of ours
        return True
    if name.startswith(_VALUE_HEAD):  # of TRL, beside a language model; a critic would lose it
        return model.head == "lm"
    if name == "score.weight":
        return model.head == "lm" and config.tie_embeddings
    if name.startswith("mtp."):  # Qwen's layers that predict further tokens
        return config.delta is not None
    layer = re.match(r"(?:model\.)?layers\.(\d{1,9})\.", name)
    # The layers that predict further tokens come after the others.
    has_them = config.family in ("deepseek_v3", "glm4_moe", "minimax_m2")
    return has_them and bool(layer) and int(layer[1]) >= config.layers


def _experts_apart(tensors: dict[str, TensorLocation], config) -> dict[str, TensorLocation]:
    """Returns the tensors with those that hold the matrices of all experts of a layer, [X, 2 F, D]
    and [X, D, F], as one of each expert, where a family's are so; published Qwen3.5 has the
    former. A matrix of an expert is a piece of the file."""
    experts = config.experts
    named_alone = NAMES[FAMILIES[config.family].names].get("mlp.gate[x]")
    if not experts or not isinstance(named_alone, str):
        return tensors
    out = dict(tensors)
    sizes = {"gate_up_proj": (2 * experts.mlp, config.embed)}
    sizes["down_proj"] = (config.embed, experts.mlp)
    for name, location in tensors.items():
        stem, _, matrix = name.rpartition(".mlp.experts.")
        whole = (experts.count, *sizes.get(matrix, ()))
        if not stem or location.is_coded or location.shape != whole or len(whole) != 3:
            continue
        del out[name]
        parts = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else (matrix,)
        entry, shape = location.entry, (whole[1] // len(parts), whole[2])
        size = (entry.end - entry.begin) // (experts.count * len(parts))
        for i in range(experts.count * len(parts)):
            part = f"{stem}.mlp.experts.{i // len(parts)}.{parts[i % len(parts)]}.weight"
            begin = entry.begin + i * size
            piece = dataclasses.replace(entry, shape=shape, begin=begin, end=begin + size)
            out[part] = dataclasses.replace(location, entry=piece)
    return out


def compare(folder: Path, model: Model) -> tuple[LoadReport, dict[str, TensorLocation]]:
    """Returns (report, {the model's name of a tensor: TensorLocation}), from the headers
    alone. Raises one InputError that names every tensor that is missing, unexpected,
    misshaped or unreadable, and one for a head that config.json ties and that is another
    matrix than the embedding."""
    tensors = _experts_apart(quantised.combined(find_tensors(folder), folder), model.config)
    if model.head == "lm" and model.config.tie_embeddings and has_own_head(folder, model.config):
        raise InputError(
            f"{folder}: {_HEAD} is not the embedding, to which config.json ties it",
            rule="the model was planned before its weights were here",
            fix="start again: the weights are here now, and the head of their own is read",
        )
    wanted = {name: pieces[0].disk_shape for name, pieces in disk_pieces(model).items()}
    zero = ()
    if model.head == "scalar" and "score.weight" not in tensors:  # a language model
        del wanted["score.weight"]
        zero = ("score.weight",)
    on_disk = names_on_disk(wanted, tensors)
    embedding = f"{text_prefix(model.config)}embed_tokens.weight"
    if model.config.tie_embeddings and on_disk[embedding] not in tensors and _HEAD in tensors:
        on_disk[embedding] = _HEAD  # safetensors' save_model keeps one name of a shared matrix
    locations = {name: tensors[disk] for name, disk in on_disk.items() if disk in tensors}
    extra = sorted(set(tensors) - set(on_disk.values()))
    ignored = tuple(name for name in extra if _ignorable(name, model))
    shapes = {name: location.shape for name, location in locations.items()}
    report = LoadReport(
        folder=str(folder),
        revision=revision(
            _origin(folder), {file.name for p in tensors.values() for file in p.files}
        ),
        missing=tuple(sorted(d for d in on_disk.values() if d not in tensors)),
        unexpected=tuple(name for name in extra if name not in ignored),
        misshaped=tuple(
            (on_disk[n], s, wanted[n]) for n, s in sorted(shapes.items()) if s != wanted[n]
        ),
        unreadable=tuple(
            (on_disk[n], p.entry.dtype) for n, p in sorted(locations.items()) if p.dtype is None
        ),
        ignored=ignored,
        zero=zero,
        dtypes=tuple(sorted({str(p.dtype) for p in locations.values() if p.dtype is not None})),
    )
    files = {disk: tensors[disk].file.name for disk in on_disk.values() if disk in tensors}
    if any(name.startswith(_VALUE_HEAD) for name in ignored) and hosts.first():
        LOG.warning(
            "%s: the value head in it (v_head) is no part of the language model that is read. %s",
            folder,
            f"Fix: for a critic, {_VALUE_HEAD_FIX}",
        )
    _check(report, len(wanted), files, reward="score.weight" in tensors and model.head == "lm")
    return report, locations


def _shown(names: Iterable[str]) -> str:
    names = [name[:200] for name in names]
    more = f", ... {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _fix_of(report: LoadReport) -> str:
    """The way to a folder that fits, by the names that do not."""
    names = report.unexpected
    if any(part in f".{name}" for name in names for part in _OF_ADAPTER):
        return "merge the adapter, PEFT's merge_and_unload(), and save the model that it returns"
    if any(name.startswith(_VALUE_HEAD) for name in names):
        return _VALUE_HEAD_FIX
    first = report.missing[0] if report.missing else None
    if front := next((n.removesuffix(first) for n in names if first and n.endswith(first)), ""):
        return f"rename the tensors: {front[:200]!r} stands before each name"
    return "use the config.json that came with these weights"


def _check(report: LoadReport, wanted: int, files: dict[str, str], *, reward: bool) -> None:
    """Raises one InputError that names every kind of misfit."""
    problems, fix = [], _fix_of(report)
    if report.missing:
        problems.append(
            f"lacks {len(report.missing)} of {wanted} tensors: {_shown(report.missing)}"
        )
    if report.unexpected:
        problems.append(
            f"has {len(report.unexpected)} tensors that the model does not use: "
            + _shown(report.unexpected)
        )
    if report.misshaped:
        lines = [
            f"{files[name]}: tensor {name} has shape {have}, config.json says {want}"
            for name, have, want in report.misshaped
        ]
        problems.append(f"has {len(lines)} tensors of another shape: {_shown(lines)}")
    if report.unreadable:
        lines = [
            f"{files[name]}: tensor {name} has dtype {dtype}" for name, dtype in report.unreadable
        ]
        problems.append(
            f"has {len(lines)} tensors that are not of {', '.join(FLOATS)}: {_shown(lines)}"
        )
        fix = "give a folder of weights in bfloat16, or in FP8 or MXFP4 as they are published"
    if reward and "lm_head.weight" in report.missing:
        problems.append("is a reward model: it has score.weight, and no lm_head.weight")
        fix = "give the folder of a language model"
    if problems:
        raise InputError(
            f"{report.folder} does not fit the model", rule="it " + "; it ".join(problems), fix=fix
        )


# -- which version it is --


def _origin(folder: Path) -> Path:
    """The folder that the weights were put in: of a GGUF file's folder that of the file."""
    file = weights_file(folder)
    return Path(os.readlink(file)).parent if file is not None and file.is_symlink() else folder


def revision(folder: Path, files: Iterable[str]) -> str | None:
    """Returns the commit that the weights were downloaded at, if the folder records it: the hub's
    cache keeps a folder per commit, and its downloads note the commit of each file."""
    for path in (folder.absolute(), folder.resolve()):
        if path.parent.name == "snapshots" and _REVISION.fullmatch(path.name):
            return path.name
    commits = set()
    for name in files:
        note = folder / ".cache" / "huggingface" / "download" / f"{name}.metadata"
        try:
            commit = read_data(note, _LONGEST_NOTE)[:41].decode("ascii", errors="replace").strip()
        except InputError:
            return None
        commits.add(commit if _REVISION.fullmatch(commit) else None)
    return commits.pop() if len(commits) == 1 else None


def record(path: Path) -> FileRecord:
    """Returns size in bytes and SHA-256 of a file: about 2 s per GB on one core, without the
    interpreter's lock. Raises InputError if the file cannot be read."""
    try:
        with os.fdopen(open_file(path), "rb") as file:
            return FileRecord(os.fstat(file.fileno()).st_size, _digest(file))
    except OSError as error:
        fix = "let your user read the file, or copy the folder again"
        raise InputError(f"{path} cannot be read", rule=str(error), fix=fix) from None


def require_digest(path: Path, found: FileRecord, listed: str | None) -> None:
    """Raises InputError for a file that is not the one of the hub that it is called."""
    if listed and found.sha256 != listed:
        raise InputError(
            f"{path} is not the file that the hub lists",
            value=found.sha256,
            rule=f"its SHA-256 is {listed}",
            fix=f"remove {path.resolve()}: it is downloaded again",
        )


def _digest(file) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()
