"""Bytes per device of roles on devices of their own (rljax.setup.placement)."""

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rljax.config import microbatch_tokens
from rljax.errors import InputError
from rljax.kernels.logprob.options import CHUNK_LOGITS
from rljax.mesh import row_shards
from rljax.runs.units import human_bytes
from rljax.setup.held import held_bytes, of_mesh
from rljax.setup.placement import SAMPLER
from rljax.setup.setup import Setup

COPY = "weights in the layout of decoding"
KV = "keys and values"
IN_FLIGHT = "keys and values in flight"
FETCHED = "fetched weights"
USE = "one use"


def fetched_bytes(parts: dict[str, object]) -> dict[str, int]:
    """Returns {FETCHED: bytes} of a device for the weights that wait on the host between their
    uses: the largest of them, because they come one after the other."""
    largest = max((held_bytes(tree, on_host=True) for tree in parts.values()), default=0)
    return {FETCHED: largest} if largest else {}


def group_bytes(setup: Setup, parts: dict[str, object]) -> dict[str, dict[str, int]]:
    """Returns {group: {what: bytes of one of its devices}} at its peak: weights are counted
    exactly, what a use of them needs is estimated."""
    out = {}
    for group in setup.groups:
        if SAMPLER in group.roles:  # it holds what decoding needs, and no role
            continue
        group_parts = of_mesh(group.mesh, parts)
        sizes = {name: size for name, tree in group_parts.items() if (size := held_bytes(tree))}
        used = max((_used(setup, group.mesh, tree) for tree in group_parts.values()), default=0)
        out[group.name] = {**sizes, **fetched_bytes(group_parts), USE: used}
    return out


def _used(setup: Setup, mesh: Mesh, tree) -> int:
    """Bytes of a device for a forward pass with these weights over a microbatch: the weights in the
    dtype of products, one layer of activations, a chunk of logits."""
    size, tensor = jnp.dtype(setup.model.config.dtype).itemsize, mesh.shape["tensor"]
    weights = sum(math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))
    vocab, embed = tree["embedding"].shape
    parts = row_shards(mesh) * mesh.shape["context"]
    tokens = max(microbatch_tokens(setup.config), setup.row_tokens) // parts
    logits = 3 * 4 * min(tokens * vocab, CHUNK_LOGITS) // tensor
    return weights * size * (size < 4) + tokens * 32 * embed // tensor * size + logits


def check_groups_fit(groups: dict[str, dict[str, int]], have: float) -> None:
    """Raises InputError for a group whose devices cannot hold the weights of its roles, or what
    decoding is sure to need."""
    for name, parts in groups.items():
        if name == SAMPLER:
            needs = parts.get(COPY, 0) + parts[IN_FLIGHT] + parts[KV]
            if needs > have:
                raise InputError(
                    f"rollouts.sampler_devices: each needs {human_bytes(needs)} for weights, keys "
                    "and values",
                    value=f"{human_bytes(have)} left",
                    fix="more of them with sampler.layout='mesh(tensor=...)', fewer sampler.slots, "
                    "or sampler.kv_dtype and weight_dtype",
                )
            continue
        needs = sum(size for part, size in parts.items() if part != USE)
        if needs > have:
            raise InputError(
                f"{name!r} of config.placement needs {human_bytes(needs)} per device for weights",
                value=f"{human_bytes(have)} left",
                fix=f"a group of {math.ceil(needs / have)} times the devices, or weights that "
                "wait on the host: memory.scorers_on_host, memory.reference_on_host",
            )
