"""Weights that are matrices, how they are stacked, and updates that treat each one by itself.

A weight is [*stacked, *inside, *outside]: a stack of layers, and of experts in each, and the axes
that its product sums over (heads and head_dim are two) before those that it yields. Optimizers that
look at a matrix as a whole must not look at the stack, nor at heads as a third axis.
"""

import math
from collections.abc import Callable

import jax
import optax

from rljax.contracts import is_zero

_VECTORS = ("scale", "bias", "sinks", "correction", "log_decay")
_OF_EXPERTS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
_OUT_OF_HEADS = ("o", "out")
_STACKS = ("layers", "blocks", "deepstack")
_TABLES = ("embedding", "head", "positions")


def _keys(path) -> tuple[str, ...]:
    return tuple(entry.key for entry in path)


def is_matrix(path: tuple[str, ...]) -> bool:
    """Returns whether the weight is no norm scale, bias, sink or correction."""
    return path[-1] not in _VECTORS and not path[-1].endswith("_bias")


def is_hidden(path: tuple[str, ...]) -> bool:
    """Returns whether the weight is a matrix from hidden values to hidden values: neither a table
    of embeddings nor a head, nor the map that takes in the pixels of an image, nor the taps of a
    convolution."""
    other = "patch_embed" in path or path[-2:][0].endswith("conv")
    return is_matrix(path) and path[-1] not in _TABLES and not other


def matrix_axes(path: tuple[str, ...], ndim: int) -> tuple[int, int]:
    """Returns (how many leading axes are stacked, how many of the next ones are summed over) of a
    weight of `ndim` axes. A vector sums over none."""
    stacked = int(any(key in _STACKS for key in path[:-1]))
    # A leaf of that name holds all experts of a layer, and so do their adapters.
    stacked += path[-1] in _OF_EXPERTS or "adapters" in path[:-1]
    if not is_matrix(path):
        return stacked, 0
    many_inside = path[-1] == "lora_a" or path[-1] == "weight" and path[-2] in _OUT_OF_HEADS
    return stacked, ndim - stacked - 1 if many_inside else 1


def decayed(params):
    """Returns a tree of bools: true for matrices, which weight decay touches."""
    return jax.tree_util.tree_map_with_path(lambda path, _: is_matrix(_keys(path)), params)


def decay_matrices(rate: float) -> optax.GradientTransformation:
    """Returns decoupled weight decay of matrices (arXiv 1711.05101), to stand before the learning
    rate; rate 0 = none."""
    return optax.identity() if is_zero(rate) else optax.add_decayed_weights(rate, decayed)


def per_matrix(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies `inner` to every matrix of every layer and expert by itself, as [inside, outside],
    and to the vectors of a layer as [size].

    Stacked axes are mapped over, not joined, so that an axis that is split over devices stays so.
    The state is a tree like the parameters, with a state of `inner` at each.
    """

    def one(function: Callable, path, weight):
        """Returns (`function` mapped over the stacked axes, the reshape of what it reads)."""
        stacked, summed = matrix_axes(_keys(path), weight.ndim)
        shape, middle = weight.shape, stacked + summed
        sizes = [math.prod(shape[stacked:middle])] if summed else []
        flat = (*shape[:stacked], *sizes, math.prod(shape[middle:]))
        for _ in range(stacked):
            function = jax.vmap(function)
        return function, lambda x: x.reshape(flat)

    def init(params):
        def start(path, weight):
            function, flat = one(inner.init, path, weight)
            return function(flat(weight))

        return jax.tree_util.tree_map_with_path(start, params)

    def update(updates, state, params):
        leaves, treedef = jax.tree_util.tree_flatten_with_path(updates)
        states, weights = treedef.flatten_up_to(state), treedef.flatten_up_to(params)
        changes, new_states = [], []
        for (path, gradient), leaf_state, weight in zip(leaves, states, weights, strict=True):
            function, flat = one(inner.update, path, weight)
            change, new_state = function(flat(gradient), leaf_state, flat(weight))
            changes.append(change.reshape(gradient.shape))
            new_states.append(new_state)
        return treedef.unflatten(changes), treedef.unflatten(new_states)

    return optax.GradientTransformation(init, update)
