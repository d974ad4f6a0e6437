"""Adapters as PEFT folders: adapter_config.json and adapter_model.safetensors.

Merging adapters is in rljax.models.adapters.lora.
"""

import json
import math
import os
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from rljax import hosts, hub
from rljax.arrays import fetch, put_whole
from rljax.errors import InputError
from rljax.files import open_file, read_json_object
from rljax.models.adapters import lora
from rljax.models.model import Model
from rljax.models.names import block_layers
from rljax.models.trees import flattened, nested

# What a plain adapter's config may say; anything else that is set changes what A and B mean.
_PLAIN = frozenset(
    """peft_type task_type base_model_name_or_path r lora_alpha target_modules lora_dropout bias
    modules_to_save inference_mode revision auto_mapping peft_version eva_config loftq_config
    layers_pattern megatron_core runtime_config qalora_group_size""".split()
)
_HALVES = {"lora_a": "lora_A", "lora_b": "lora_B"}


def _tensors(model: Model) -> dict[str, tuple[tuple, int | None, tuple[int, ...]]]:
    """{PEFT's tensor name: (path of our leaf, layer in its stack, shape on disk)}."""
    out, blocks = {}, block_layers(model.config)
    # transformers keeps the decoder of every model with images below language_model.
    prefix = "base_model.model.model." + ("language_model." if model.config.vision else "")
    for path, (shape, _) in model.shapes().items():
        if path == ("head",) and model.head == "scalar":
            out["base_model.model.score.weight"] = (path, None, shape[::-1])
        if path[-1] not in _HALVES:
            continue
        name, rank = lora.module_name(path[2:-1], model.config), model.config.lora.rank
        rest = math.prod(shape[1:]) // rank
        on_disk = (rank, rest) if path[-1] == "lora_a" else (rest, rank)
        for at, layer in enumerate(blocks[path[1]]):
            key = f"{prefix}layers.{layer}.{name}.{_HALVES[path[-1]]}.weight"
            out[key] = (path, at, on_disk)
    return out


def save_adapter(folder: str | Path, model: Model, params: dict, *, base: str = "") -> None:
    """Write the adapters of `params` so that PEFT (and load_adapter) reads them. `base` is the name
    or folder of the model that they belong to; of one of the hub its name and its revision are
    written apart, as PEFT has them. Of several hosts all take part, and the first one writes."""
    name = hub.model_name(base) if base else None
    folder, flat = Path(folder), flattened(params)
    whole = fetch({path: flat[path] for path, *_ in _tensors(model).values()})
    if not hosts.first():
        return
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for key, (path, at, shape) in _tensors(model).items():
        value = np.asarray(whole[path] if at is None else whole[path][at], np.float32)
        # Ours are [in, rank] and [rank, out], whatever the number of axes; theirs transposed.
        tensors[key] = np.ascontiguousarray(value.reshape(shape[::-1]).T)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    names = {lora.module_name(path[2:-1], model.config) for path, *_ in _tensors(model).values()
             if path[0] == "layers"}  # fmt: skip
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if model.head == "lm" else "SEQ_CLS",
        "base_model_name_or_path": (name.repository if name else base) or None,
        "revision": (name.revision or None) if name else None,
        "r": model.config.lora.rank,
        "lora_alpha": model.config.lora.alpha,
        "target_modules": _targets(names, bool(model.config.vision)),
        "lora_dropout": 0.0,
        "bias": "none",
        "modules_to_save": ["score"] if model.head == "scalar" else None,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _targets(names: set[str], images: bool) -> list[str] | str:
    """The last part of every name; beside a vision tower, which has the same, a pattern."""
    last = sorted({name.rpartition(".")[2] for name in names})
    return rf".*language_model\..*\.({'|'.join(last)})" if images else last


def _read_config(folder: Path, model: Model) -> None:
    """Raises InputError where the adapter is not of the kind and size that `model` has."""
    path = folder / "adapter_config.json"
    config = read_json_object(path)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise InputError(f"{path}: peft_type", value=kind, rule="supported: LORA")
    for key, value in config.items():
        plain = key in _PLAIN or not value or (key, value) == ("init_lora_weights", True)
        if not plain:
            raise InputError(f"{path}: {key}", value=value, rule="plain LoRA only")
    if config.get("bias", "none") != "none":
        raise InputError(f"{path}: bias", value=config["bias"], rule="none")
    for key, name, want in (
        ("r", "rank", model.config.lora.rank), ("lora_alpha", "alpha", model.config.lora.alpha)
    ):  # fmt: skip
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
    wanted = _tensors(model)
    for what, names in (("lacks", set(wanted) - set(tensors)), ("has", set(tensors) - set(wanted))):
        if names:
            raise InputError(
                f"{file} {what} {len(names)} tensors that the model "
                + ("needs" if what == "lacks" else "does not have"),
                value=sorted(names)[:4],
                fix="set lora.targets to the adapter's target_modules",
            )
    flat = flattened(params)
    new = {path: np.empty(flat[path].shape, flat[path].dtype) for path, *_ in wanted.values()}
    for key, (path, at, shape) in wanted.items():
        if tensors[key].shape != shape:
            raise InputError(f"{file}: {key}", value=tensors[key].shape, rule=f"must be {shape}")
        where = () if at is None else (at,)
        new[path][where] = tensors[key].T.reshape(new[path][where].shape)
    layout = flattened(model.shardings())
    return nested(flat | {path: put_whole(x, layout[path]) for path, x in new.items()})
