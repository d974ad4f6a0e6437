"""Tiny model folders of every naming scheme, with random weights, and what they hold by hand."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from rljax.mesh import make_mesh
from rljax.models.config import LayerKind, ModelConfig
from rljax.models.experts import ExpertsConfig
from rljax.models.huggingface import load as huggingface
from rljax.models.model import Model
from rljax.models.names import disk_pieces
from rljax.models.trees import nested


def config(**changes) -> ModelConfig:
    sizes = dict(vocab_size=48, embed=32, mlp=40, layers=2, heads=4, kv_heads=2, head_dim=8)
    return ModelConfig("qwen3", **{**sizes, "qk_norm": True, **changes})


def experts(family: str) -> ModelConfig:
    """Eight experts, so that they divide over devices; gpt_oss keeps them in one tensor."""
    facts = ExpertsConfig(8, 2, 16)
    if family == "qwen3_moe":
        kinds = (LayerKind(), LayerKind(experts=True), LayerKind(experts=True))
        return dataclasses.replace(config(), family=family, experts=facts, layers=3, kinds=kinds)
    facts = dataclasses.replace(
        facts, mlp=40, router_bias=True, expert_bias=True, gated="clamped_swiglu"
    )
    window = (LayerKind(window=128, experts=True), LayerKind(experts=True))
    return dataclasses.replace(
        config(qk_norm=False, sinks=True, qkv_bias=True, output_bias=True),
        family=family,
        experts=facts,
        kinds=window,
    )


CONFIGS = {
    "qwen3": config(),
    "qwen2": dataclasses.replace(config(qk_norm=False, qkv_bias=True), family="qwen2"),
    "qwen3_moe": experts("qwen3_moe"),
    "gpt_oss": experts("gpt_oss"),
}
MESHES = [dict(fsdp=8), dict(fsdp=4, tensor=2), dict(data=2, fsdp=1, expert=4)]


def one_device() -> jax.sharding.Mesh:
    return make_mesh(1, 1, 1, devices=jax.devices()[:1])


def tensors_of(model: Model, dtype=np.float32) -> dict[str, np.ndarray]:
    """Random tensors under the names and shapes of a checkpoint."""
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal(pieces[0].disk_shape).astype(dtype)
        for name, pieces in disk_pieces(model).items()
    }


def write_folder(folder, model: Model, tensors: dict, files: int = 1):
    """A folder as others write it: by the safetensors library."""
    folder.mkdir(parents=True, exist_ok=True)
    told = huggingface.to_hf_config(model.config, head=model.head, eos_ids=(1,))
    (folder / "config.json").write_text(json.dumps(told))
    names = sorted(tensors)
    parts = [names[i::files] for i in range(files)]
    titles = [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)]
    for part, title in zip(parts, titles if files > 1 else ["model.safetensors"], strict=True):
        save_file({name: tensors[name] for name in part}, folder / title)
    if files > 1:
        weight_map = {n: t for part, t in zip(parts, titles, strict=True) for n in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def by_hand(model: Model, tensors: dict) -> dict:
    """The parameters, assembled as a whole on the host."""
    flat = {path: np.zeros(shape, np.float32) for path, (shape, _) in model.shapes().items()}
    for name, pieces in disk_pieces(model).items():
        for piece in pieces:
            tensor = tensors[name].astype(np.float32)
            if piece.column is not None:
                value = tensor[..., piece.columns]
            else:
                tensor = tensor[piece.first_row :][: piece.part_shape[0]]
                value = (tensor.T if piece.inside else tensor).reshape(piece.shape)
            flat[piece.path][piece.index] = value
    return nested(flat)


def same(got: dict, want: dict) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for path, value in jax.tree_util.tree_leaves_with_path(want):
        found = functools.reduce(lambda node, key: node[key.key], path, got)
        np.testing.assert_array_equal(np.asarray(found, value.dtype), value, err_msg=str(path))


def by_hand_placed(model: Model, tensors: dict) -> dict:
    return jax.device_put(by_hand(model, tensors), model.shardings())


@pytest.fixture
def tiny(tmp_path):
    """(folder, model, its tensors)."""
    model = Model(config(), one_device())
    tensors = tensors_of(model)
    return write_folder(tmp_path / "model", model, tensors), model, tensors
