"""Names of the vision tower's weights in Hugging Face files, as data.

What lives here: our module path -> Hugging Face module name below "visual.", and the shape on disk.
What does not: reading and writing files (rljax.models.huggingface). Published checkpoints put the
tower below "visual." or "model.visual.".

On disk a linear weight is [out, in] (the patch embedding [out, channel, frame, row, column]); ours
is [*in, *out] with heads apart.
"""

import functools
import math

import numpy as np
from flax import nnx

from rljax.models.vision import VisionTower
from rljax.models.vision_config import VisionConfig

VISION_PREFIXES = ("visual.", "model.visual.")

# "{}" is the index of what is stacked on axis 0 of ours.
VISION_NAMES = {
    "qwen2_5_vl": {
        "patch_embed": "patch_embed.proj",
        "blocks.attention_norm": "blocks.{}.norm1",
        "blocks.attention.qkv": "blocks.{}.attn.qkv",
        "blocks.attention.out": "blocks.{}.attn.proj",
        "blocks.mlp_norm": "blocks.{}.norm2",
        "blocks.mlp.gate": "blocks.{}.mlp.gate_proj",
        "blocks.mlp.up": "blocks.{}.mlp.up_proj",
        "blocks.mlp.down": "blocks.{}.mlp.down_proj",
        "merger.norm": "merger.ln_q",
        "merger.up": "merger.mlp.0",
        "merger.down": "merger.mlp.2",
    },
    "qwen3_vl": {
        "patch_embed": "patch_embed.proj",
        "positions": "pos_embed",
        "blocks.attention_norm": "blocks.{}.norm1",
        "blocks.attention.qkv": "blocks.{}.attn.qkv",
        "blocks.attention.out": "blocks.{}.attn.proj",
        "blocks.mlp_norm": "blocks.{}.norm2",
        "blocks.mlp.up": "blocks.{}.mlp.linear_fc1",
        "blocks.mlp.down": "blocks.{}.mlp.linear_fc2",
        "merger.norm": "merger.norm",
        "merger.up": "merger.linear_fc1",
        "merger.down": "merger.linear_fc2",
        "deepstack.norm": "deepstack_merger_list.{}.norm",
        "deepstack.up": "deepstack_merger_list.{}.linear_fc1",
        "deepstack.down": "deepstack_merger_list.{}.linear_fc2",
    },
}
STACKED = ("blocks", "deepstack")


@functools.cache
def vision_definition(config: VisionConfig):
    """(static NNX graph, {path: (shape, logical axes)}) of the tower, without a weight."""
    graph, state = nnx.split(nnx.eval_shape(lambda: VisionTower(nnx.Rngs(0), config)))
    weights = {}
    for path, leaf in nnx.to_flat_state(state):
        axes = leaf.get_metadata()["axes"]
        weights[path] = (leaf.shape, ("layers", *axes) if path[0] in STACKED else axes)
    return graph, weights


def vision_disk_names(config: VisionConfig) -> dict:
    """{name below "visual.": (our path, index on axis 0 or None, our shape of that piece)}."""
    out = {}
    for path, (shape, _) in vision_definition(config)[1].items():
        module, leaf = (path, "weight") if path == ("positions",) else (path[:-1], path[-1])
        name = VISION_NAMES[config.family][".".join(module)]
        name += ".bias" if leaf == "bias" else ".weight"
        if path[0] in STACKED:
            for index in range(shape[0]):
                out[name.format(index)] = (path, index, shape[1:])
        else:
            out[name] = (path, None, shape)
    return out


def _rows_on_disk(path: tuple[str, ...], shape: tuple[int, ...]) -> int:
    """The size of the output axis of a linear weight; 0 for anything else."""
    if path[-1] != "weight":
        return 0
    # The projection out of the heads takes two axes in, every other linear map one.
    return math.prod(shape[2:] if path[-2] == "out" else shape[1:])


def vision_disk_shape(config: VisionConfig, path, shape) -> tuple[int, ...]:
    """The shape in the file of our piece `shape` at `path`."""
    if path == ("patch_embed", "weight"):
        size = (config.temporal_patch_size, config.patch_size, config.patch_size)
        return (config.embed, config.channels, *size)
    rows = _rows_on_disk(path, shape)
    if rows:
        return (rows, math.prod(shape) // rows)
    return shape if path == ("positions",) else (math.prod(shape),)


def vision_from_disk(path, array: np.ndarray, shape) -> np.ndarray:
    """One tensor of the file -> our piece."""
    rows = _rows_on_disk(path, shape)
    return array.reshape(rows, -1).T.reshape(shape) if rows else array.reshape(shape)


def vision_to_disk(config: VisionConfig, path, array: np.ndarray) -> np.ndarray:
    """Our piece -> the tensor of the file."""
    shape, rows = vision_disk_shape(config, path, array.shape), _rows_on_disk(path, array.shape)
    array = array.reshape(-1, rows).T if rows else array
    return np.ascontiguousarray(array).reshape(shape)
