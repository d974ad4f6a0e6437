"""Arrays that a run holds on its devices from start to end, as shapes, and their bytes."""

import math

import jax
from jax.sharding import Mesh

from rljax.mesh import HOST_MEMORY
from rljax.sampler.layout import agree, is_apart, kept_like, weights_like
from rljax.setup.rewards import abstract_scorers
from rljax.setup.setup import Setup

# Name of the part that lies beside the base under adapters, in the layout of decoding.
KEPT_COPY = "base in the layout of decoding"


def held_bytes(tree, *, on_host: bool = False) -> int:
    """Returns the bytes of abstract arrays in the memory of one device, or in that of its host."""
    total = 0
    for x in jax.tree.leaves(tree):
        waits = x.sharding is not None and x.sharding.memory_kind == HOST_MEMORY
        if waits == on_host:
            shape = x.sharding.shard_shape(x.shape) if x.sharding is not None else x.shape
            total += math.prod(shape) * x.dtype.itemsize  # random keys have an itemsize as well
    return total


def of_mesh(mesh: Mesh, parts: dict[str, object]) -> dict[str, object]:
    """Returns the parts that the devices of a mesh hold."""

    def own(tree) -> bool:
        layouts = (x.sharding for x in jax.tree.leaves(tree))
        layout_mesh = next((layout.mesh for layout in layouts if layout is not None), mesh)
        return layout_mesh == mesh or set(layout_mesh.devices.flat) == set(mesh.devices.flat)

    return {name: tree for name, tree in parts.items() if own(tree)}


def held_parts(setup: Setup, roles: dict) -> dict[str, object]:
    """Returns {name: abstract arrays} of what a run holds from start to end. Under adapters the
    roles share one base, except that of critic_model."""
    parts = abstract_scorers(setup)
    for name, role in roles.items():
        for part, arrays in role.parts().items():
            has_own_base = name != "actor" and bool(setup.config.critic_model)
            shared = part == "base" and not has_own_base and any(n.endswith("base") for n in parts)
            if not shared:
                parts[f"{name} {part}".rstrip()] = arrays
    if base_copy := _kept_copy(setup, roles):
        parts[KEPT_COPY] = base_copy
    return parts


def _kept_copy(setup: Setup, roles: dict) -> dict:
    """The copy of the frozen weights that stays from one rollout to the next, {} without any; the
    devices of samplers of their own are counted apart."""
    model, decoding = setup.model, setup.decoding
    if "actor" not in roles or not roles["actor"].state.frozen:
        return {}
    target, weights = decoding.of(model), roles["actor"].state.weights
    like = weights_like(target, weights, keep_dtypes=not decoding.weight_dtype)
    if is_apart(model, target) or agree(model, target, weights, like):
        return {}
    return kept_like(model, target, weights, like)
