"""A vision tower alone: its definition, and its tensors on disk, for tests."""

import functools

import numpy as np
from flax import nnx

from rljax.models.names import vision_pieces
from rljax.models.trees import nested
from rljax.models.vision.names import STACKED
from rljax.models.vision.tower import VisionTower


@functools.cache
def vision_definition(config):
    """(static NNX graph, {path: (shape, logical axes)})."""
    graph, state = nnx.split(nnx.eval_shape(lambda: VisionTower(nnx.Rngs(0), config)))
    weights = {}
    for path, leaf in nnx.to_flat_state(state):
        axes = leaf.get_metadata()["axes"]
        weights[path] = (leaf.shape, ("layers", *axes) if path[0] in STACKED else axes)
    return graph, weights


def pieces_below(config) -> dict:
    """{tensor name below "visual.": its piece}."""
    out = {}
    for path, (shape, axes) in vision_definition(config)[1].items():
        found = vision_pieces(config, ("vision", *path), shape, axes)
        out |= {name.split("visual.", 1)[1]: piece for name, (piece,) in found.items()}
    return out


def vision_params(config, tensors):
    """Tensors of a file, named below "visual.", -> the parameters of the tower."""
    flat = {
        path: np.empty(shape, np.float32)
        for path, (shape, _) in vision_definition(config)[1].items()
    }
    for name, piece in pieces_below(config).items():
        assert piece.disk_shape == tensors[name].shape, name
        flat[piece.path[1:]][piece.index] = piece.ours(tensors[name])
    return nested(flat)
