"""Adapters as PEFT folders: adapter_config.json and adapter_model.safetensors.

Merging adapters is in rljax.models.adapters.lora.
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from rljax import hosts, hub
from rljax.arrays import fetch, put_whole
from rljax.errors import InputError
from rljax.files import open_file, read_json_object
from rljax.models.adapters import lora
from rljax.models.families import FAMILIES
from rljax.models.model import Model
from rljax.models.names import NAMES, Disk, Fused, block_layers, fused_members
from rljax.models.trees import flattened, nested

# What a plain adapter's config may say; anything else that is set changes what A and B mean.
_PLAIN = frozenset(
    """peft_type task_type base_model_name_or_path r lora_alpha target_modules lora_dropout bias
    modules_to_save inference_mode revision auto_mapping peft_version eva_config loftq_config
    layers_pattern megatron_core runtime_config qalora_group_size target_parameters""".split()
)
_HALVES = {"lora_a": "lora_A", "lora_b": "lora_B"}


@dataclasses.dataclass(frozen=True)
class Half:
    """One of our A or B, of one layer, in PEFT's tensor: alone, or, where several of our maps are
    one on disk (rljax.models.names.Fused, gate and up of experts), one block of it.

    Such a map's A [m r, in] holds the A of its m parts one under the other, and its B [out, m r]
    has the B of each part in the part's rows and in the columns of its A; the rest is zero. Of X
    experts A is [X m r, in], an expert's rows together, and B [out, m r X], its last axis the
    experts'.
    """

    path: tuple[str, ...]
    layer: int | None  # in its stack
    shape: tuple[int, int]  # of the whole tensor
    rows: slice  # of A the ranks, of B what the map writes
    columns: slice  # of B the ranks
    experts: int = 0  # 0 = not of experts

    @property
    def is_a(self) -> bool:
        return self.path[-1] == "lora_a"

    def block(self, tensor: np.ndarray) -> np.ndarray:
        """Our part of PEFT's tensor, a view: [rank, in] or [out, rank] as they have it; of experts
        [X, rank, in] or [out, rank, X]."""
        if not self.experts:
            return tensor[self.rows, self.columns]
        if self.is_a:
            return tensor.reshape(self.experts, -1, tensor.shape[1])[:, self.rows]
        return tensor.reshape(tensor.shape[0], -1, self.experts)[self.rows, self.columns]

    def turned(self, block: np.ndarray) -> np.ndarray:
        """The block in our order of axes: [in, rank] or [rank, out], of experts behind X."""
        return block.swapaxes(-1, -2) if self.experts and self.is_a else block.T


def _halves(model: Model) -> dict[str, list[Half]]:
    """{PEFT's tensor name: what it holds}."""
    out: dict[str, list[Half]] = {}
    config, shapes, blocks = model.config, model.shapes(), block_layers(model.config)
    every = slice(None)
    # transformers keeps the decoder of every model with images below language_model.
    prefix = "base_model.model.model." + ("language_model." if config.vision else "")
    for path, (shape, _) in shapes.items():
        if path == ("head",) and model.head == "scalar":
            out["base_model.model.score.weight"] = [Half(path, None, shape[::-1], every, every)]
        if path[-1] not in _HALVES:
            continue
        if path[0] == "vision":
            for key, half in _of_tower(model, path):
                out[key] = [half]
            continue
        if lora.is_of_experts(path):
            name, where = _of_experts(model, path)
            for i, layer in enumerate(blocks[path[1]]):
                key = f"{prefix}layers.{layer}.{name}.{_HALVES[path[-1]]}.weight"
                out.setdefault(key, []).append(Half(path, i, **where))
            continue
        name, rank = lora.module_name(path[2:-1], config), config.lora.rank
        place, is_a = lora.place_of(path[2:-1], config), path[-1] == "lora_a"
        members = fused_members(path, place) if isinstance(place, Fused) else [path]
        sizes = [math.prod(shapes[member][0][1:]) // rank for member in members]
        at, ranks = members.index(path), rank * len(members)
        before = sum(sizes[:at])
        part = slice(rank * at, rank * (at + 1))
        where = dict(shape=(ranks, sizes[0]), rows=part, columns=every)
        if not is_a:
            rows = slice(before, before + sizes[at])
            where = dict(shape=(sum(sizes), ranks), rows=rows, columns=part)
        for i, layer in enumerate(blocks[path[1]]):
            key = f"{prefix}layers.{layer}.{name}.{_HALVES[path[-1]]}.weight"
            out.setdefault(key, []).append(Half(path, i, **where))
    return out


def _of_tower(model: Model, path: tuple[str, ...]) -> Iterator[tuple[str, Half]]:
    """(PEFT's tensor name, what it holds) of an A or B of the vision tower, block by block."""
    shape, rank, every = model.shapes()[path][0], model.config.lora.rank, slice(None)
    name = lora.tower_name(path[1:-1], model.config)
    stacked = lora.stacked_axes(path)
    size = math.prod(shape[stacked:]) // rank
    whole = (rank, size) if path[-1] == "lora_a" else (size, rank)
    for i in range(shape[0]) if stacked else (None,):
        key = f"base_model.model.model.{name.format(i)}.{_HALVES[path[-1]]}.weight"
        yield key, Half(path, i, whole, every, every)


def _of_experts(model: Model, path: tuple[str, ...]) -> tuple[str, dict]:
    """(the module of PEFT's tensor, fields of Half) of an A or B of experts: those of a parameter
    that is targeted by itself, `target_parameters`. Where both parameters of a module are, PEFT
    wraps that of gate and up first."""
    config, shape = model.config, model.shapes()[path][0][1:]
    matrix, rank, experts = path[-2], config.lora.rank, shape[0]
    module = lora.experts_name(config, matrix).rpartition(".")[0]
    parts = ("down",) if matrix == "down" else ("gate", "up")
    if matrix != "down" and (*path[:-2], "down", path[-1]) in model.shapes():
        module += ".base_layer"
    at, ranks, every = parts.index(matrix), rank * len(parts), slice(None)
    part = slice(rank * at, rank * (at + 1))
    if path[-1] == "lora_a":
        return module, dict(
            shape=(experts * ranks, shape[1]), rows=part, columns=every, experts=experts
        )
    rows = slice(shape[2] * at, shape[2] * (at + 1))
    place = NAMES[FAMILIES[config.family].names][f"mlp.{matrix}[x]"]
    if isinstance(place, Disk) and place.column is not None and not place.halves:
        rows = slice(at, None, 2)
    shape = (shape[2] * len(parts), ranks * experts)
    return module, dict(shape=shape, rows=rows, columns=part, experts=experts)


def _ranks(model: Model) -> dict[str, int]:
    """{last part of the name: rank} of the maps that are several of ours."""
    found = {}
    for path in model.shapes():
        if path[0] == "vision":
            continue
        if path[-1] == "lora_a" and lora.is_of_experts(path):
            if path[-2] != "down":
                found["gate_up_proj"] = 2 * model.config.lora.rank
        elif path[-1] == "lora_a":
            place = lora.place_of(path[2:-1], model.config)
            if isinstance(place, Fused):
                last = place.name.rpartition(".")[2]
                found[last] = len(place.members) * model.config.lora.rank
    return found


def save_adapter(folder: str | Path, model: Model, params: dict, *, base: str = "") -> None:
    """Write the adapters of `params` so that PEFT (and load_adapter) reads them. `base` is the name
    or folder of the model that they belong to; of one of the hub its name and its revision are
    written apart, as PEFT has them. Of several hosts all take part, and the first one writes."""
    name = hub.model_name(base) if base else None
    folder, flat, all_halves = Path(folder), flattened(params), _halves(model)
    whole = fetch({half.path: flat[half.path] for held in all_halves.values() for half in held})
    if not hosts.first():
        return
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for key, held in all_halves.items():
        tensors[key] = np.zeros(held[0].shape, np.float32)
        for half in held:
            value = whole[half.path] if half.layer is None else whole[half.path][half.layer]
            block = half.block(tensors[key])
            # Ours are [in, rank] and [rank, out], whatever the number of axes; theirs transposed.
            value = value.astype(np.float32).reshape(half.turned(block).shape)
            block[...] = half.turned(value)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    paths = {path for path in whole if path[-1] in lora.LEAVES}
    tower = {lora.tower_name(p[1:-1], model.config) for p in paths if p[0] == "vision"}
    experts = {p for p in paths if lora.is_of_experts(p)}
    rest = (p for p in paths - experts if p[0] != "vision")
    names = {lora.module_name(p[2:-1], model.config) for p in rest}
    parameters = {lora.experts_name(model.config, p[-2]) for p in experts}
    rank, alpha, ranks = model.config.lora.rank, model.config.lora.alpha, _ranks(model)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if model.head == "lm" else "SEQ_CLS",
        "base_model_name_or_path": (name.repository if name else base) or None,
        "revision": (name.revision or None) if name else None,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": ranks,
        "alpha_pattern": {last: alpha * many / rank for last, many in ranks.items()},
        "target_modules": _targets(names, tower, bool(model.config.vision)) or None,
        "target_parameters": sorted(parameters) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "modules_to_save": ["score"] if model.head == "scalar" else None,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _targets(names: set[str], tower: set[str], images: bool) -> list[str] | str:
    """The last part of every name; of a model with a vision tower, which has the same ones, a
    pattern, with the names of the tower's maps in full."""
    last = sorted({name.rpartition(".")[2] for name in names})
    if not images:
        return last
    decoder = [rf"language_model\..*\.({'|'.join(last)})"] if last else []
    full = [re.escape(name).replace(re.escape("{}"), r"\d+") for name in sorted(tower)]
    parts = decoder + full
    return ".*" + (parts[0] if len(parts) == 1 else f"({'|'.join(parts)})")


def _read_config(folder: Path, model: Model) -> None:
    """Raises InputError where the adapter is not of the kind and size that `model` has."""
    path = folder / "adapter_config.json"
    config = read_json_object(path)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise InputError(f"{path}: peft_type", value=kind, rule="supported: LORA")
    rank, alpha, ranks = model.config.lora.rank, model.config.lora.alpha, _ranks(model)
    ours = {"rank_pattern": ranks, "alpha_pattern": {n: alpha * m / rank for n, m in ranks.items()}}
    for key, value in config.items():
        plain = key in _PLAIN or not value or (key, value) == ("init_lora_weights", True)
        if not plain and value != ours.get(key):
            raise InputError(f"{path}: {key}", value=value, rule="plain LoRA only")
    if config.get("bias", "none") != "none":
        raise InputError(f"{path}: bias", value=config["bias"], rule="none")
    for key, name, want in (("r", "rank", rank), ("lora_alpha", "alpha", alpha)):
        if config.get(key) != want:
            raise InputError(
                f"{path}: {key}",
                value=config.get(key),
                rule=f"the model has lora.{name}={want}",
                fix=f"--config.lora.{name}={config.get(key)}",
            )


def load_adapter(folder: str | Path, model: Model, params: dict) -> dict:
    """`params` with its adapters replaced by those of a PEFT folder or of a repository of the hub,
    which holds exactly those that the model has."""
    folder = hub.model_folder(folder, hub.ADAPTER)
    _read_config(folder, model)
    file = folder / "adapter_model.safetensors"
    os.close(open_file(file))  # the library would wait for a pipe
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{file} is not readable", rule=str(error), fix="copy it again") from None
    wanted = _halves(model)
    for what, names in (("lacks", set(wanted) - set(tensors)), ("has", set(tensors) - set(wanted))):
        if names:
            raise InputError(
                f"{file} {what} {len(names)} tensors that the model "
                + ("needs" if what == "lacks" else "does not have"),
                value=sorted(names)[:4],
                fix="set lora.targets to the adapter's target_modules",
            )
    flat, paths = flattened(params), {half.path for held in wanted.values() for half in held}
    new = {path: np.empty(flat[path].shape, flat[path].dtype) for path in paths}
    for key, held in wanted.items():
        for half, block in _blocks(file, key, tensors[key], held):
            where = () if half.layer is None else (half.layer,)
            new[half.path][where] = half.turned(block).reshape(new[half.path][where].shape)
    layout = flattened(model.shardings())
    return nested(flat | {path: put_whole(x, layout[path]) for path, x in new.items()})


def _blocks(file: Path, key: str, tensor: np.ndarray, held: list[Half]):
    """(half, its block) of a tensor. Of maps that are one on disk an adapter may also be PEFT's
    own, whose rank is that of one part: its A is that of every part, its B has their rows alone."""
    whole, parts, every = held[0].shape, len(held), slice(None)
    shared = (whole[0] // parts, whole[1]) if held[0].is_a else (whole[0], whole[1] // parts)
    if parts > 1 and tensor.shape == shared:
        for half in held:
            own = {"rows": every} if half.is_a else {"columns": every}
            yield half, dataclasses.replace(half, **own).block(tensor)
        return
    if tensor.shape != whole:
        raise InputError(f"{file}: {key}", value=tensor.shape, rule=f"must be {whole}")
    outside = tensor.copy()
    for half in held:
        half.block(outside)[...] = 0
        yield half, half.block(tensor)
    if np.any(outside):
        raise InputError(
            f"{file}: {key} mixes the parts of a map that are apart here",
            rule="zero outside of one block for each part, as save_adapter writes it",
            fix="merge the adapter into the base with PEFT's merge_and_unload, and start from that",
        )
