"""Hugging Face folders: config.json + safetensors <-> Model and parameters.

What lives here: the name map of the families, and checks that name the file and tensor. Weights are
read tensor by tensor and placed on the mesh, so the host holds one tensor at a time.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rljax.errors import InputError
from rljax.models.config import ModelConfig
from rljax.models.families import from_hf_config, to_hf_config
from rljax.models.model import Model
from rljax.models.names import disk_pieces
from rljax.trees import nested


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{path} does not exist",
            fix="give a Hugging Face model folder (config.json, *.safetensors)",
        ) from None
    except (ValueError, RecursionError, OSError) as error:  # bad JSON, bad UTF-8, huge numbers
        raise InputError(
            f"{path} is not readable JSON", rule=str(error), fix="copy the file again"
        ) from None
    if not isinstance(value, dict):
        raise InputError(f"{path} holds no JSON object", value=type(value).__name__)
    return value


def load_config(folder: str | Path, **overrides) -> ModelConfig:
    """The ModelConfig of a Hugging Face folder. Raises InputError that names config.json and the
    key."""
    path = Path(folder) / "config.json"
    try:
        return from_hf_config(_read_json(path), **overrides)
    except InputError as error:
        text = str(error)
        raise InputError(text if str(path) in text else f"{path}: {text}") from None


def _tensor_files(folder: Path) -> dict[str, Path]:
    """{tensor name: file}, from the index if there is one, else from every *.safetensors."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(f, str) for f in weight_map.values()
        ):
            raise InputError(f"{index} has no 'weight_map' of tensor name to file")
        files = {name: folder / Path(file).name for name, file in weight_map.items()}
        missing = sorted({f for f in files.values() if not f.exists()})
        if missing:
            raise InputError(f"{missing[0]} does not exist", rule=f"{index.name} names it")
        return files
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise InputError(
            f"{folder} has no *.safetensors file", fix="give a folder with safetensors weights"
        )
    files = {}
    for file in found:
        with _open(file) as tensors:
            files |= {name: file for name in tensors.keys()}
    return files


def _open(file: Path):
    try:
        # "flax" reads bfloat16 as well; numpy has no such dtype.
        return safe_open(file, framework="flax")
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(
            f"{file} is not a readable safetensors file", rule=str(error), fix="copy the file again"
        ) from None


def _read_tensors(files: dict[str, Path], wanted: dict, dtype) -> dict[str, np.ndarray]:
    """Every wanted tensor, its shape checked, as host arrays of `dtype`."""
    arrays = {}
    by_file: dict[Path, list[str]] = {}
    for name in wanted:
        by_file.setdefault(files[name], []).append(name)
    for file, names in by_file.items():
        with _open(file) as tensors:
            for name in names:
                try:
                    tensor = tensors.get_tensor(name)
                except SafetensorError as error:
                    raise InputError(
                        f"{file}: tensor {name} cannot be read", rule=str(error)
                    ) from None
                expected = wanted[name][0].disk_shape
                if tuple(tensor.shape) != expected:
                    raise InputError(
                        f"{file}: tensor {name} has shape {tuple(tensor.shape)}",
                        rule=f"config.json says {expected}",
                        fix="use the config.json that came with these weights",
                    )
                if not jnp.issubdtype(tensor.dtype, jnp.floating):
                    raise InputError(
                        f"{file}: tensor {name} has dtype {tensor.dtype}", rule="floats only"
                    )
                arrays[name] = np.asarray(tensor, dtype=dtype)
    return arrays


def load_params(folder: str | Path, model: Model, key: jax.Array | None = None) -> dict:
    """Parameters of `model` from a Hugging Face folder, placed on its mesh.

    A scalar head is not on disk (the folder holds a language model): it starts at zero. Missing and
    mis-shaped tensors raise InputError by name; tensors the model does not use are an error too.
    """
    folder = Path(folder)
    files = _tensor_files(folder)
    wanted = disk_pieces(model)
    if model.head == "scalar" and "score.weight" not in files:
        wanted.pop("score.weight")  # a language model: the head starts at zero
    missing = sorted(set(wanted) - set(files))
    if missing:
        raise InputError(
            f"{folder} lacks {len(missing)} of {len(wanted)} tensors",
            value=missing[:4],
            fix="use the config.json that came with these weights",
        )
    # A tied model may still carry lm_head, and old exports carry rotary tables: neither changes the
    # result.
    extra = [
        n
        for n in sorted(set(files) - set(wanted))
        if n != "lm_head.weight" and "rotary_emb" not in n
    ]
    if extra:
        raise InputError(
            f"{folder} has tensors the model does not use",
            value=extra[:4],
            rule=f"{len(extra)} would be silently ignored",
        )
    dtype = jnp.dtype(model.config.weight_dtype)
    arrays = _read_tensors(files, wanted, dtype)
    flat = {path: np.zeros(shape, dtype) for path, (shape, _) in model.shapes().items()}
    for name, pieces in wanted.items():
        tensor = arrays.pop(name)
        for piece in pieces:
            flat[piece.path][piece.index] = piece.ours(tensor)
    return jax.device_put(nested(flat), model.shardings())


def save_params(
    folder: str | Path, model: Model, params: dict, *, bos_id=None, eos_ids=(), pad_id=None
):
    """Write config.json, generation_config.json and model.safetensors that transformers reads."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, pieces in disk_pieces(model).items():
        for piece in pieces:
            node = params
            for key in piece.path:
                node = node[key]
            value = np.asarray(node[piece.index])
            tensor = tensors.setdefault(name, np.empty(piece.disk_shape, value.dtype))
            piece.fill(tensor, value)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = to_hf_config(
        model.config, head=model.head, bos_id=bos_id, eos_ids=eos_ids, pad_id=pad_id
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {
        "bos_token_id": bos_id,
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": pad_id,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
