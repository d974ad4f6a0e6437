"""The shardings by way of which an array goes from a mesh to another one over the same devices.

From "split by eight along one axis" to "split by two along another" XLA knows no exchange: it makes
the array whole on every device first. In axes that both meshes consist of there are four steps,
one exchange each: of what lies there several times each device keeps its part, what both split goes
to its new axis (all-to-all), the parts that stay get into the order of the target (permute), and
what the target does not split is gathered.
"""

import functools
import math

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@functools.lru_cache(maxsize=64)
def common_mesh(one: Mesh, other: Mesh) -> Mesh | None:
    """Returns a mesh over the same devices in whose axes, "0", "1", ..., both meshes are products
    of neighbours; None if their sizes have none."""
    ends = sorted({end for mesh in (one, other) for _, end in _spans(mesh).values()} | {1})
    if any(b % a for a, b in zip(ends, ends[1:], strict=False)):
        return None
    sizes = [b // a for a, b in zip(ends, ends[1:], strict=False)] or [1]
    names = tuple(str(i) for i in range(len(sizes)))
    types = (one.axis_types[0],) * len(sizes)
    return Mesh(one.devices.reshape(sizes), names, axis_types=types)


def _spans(mesh: Mesh) -> dict[str, tuple[int, int]]:
    """Returns {axis: (number of parts by the axes before it, number of parts with it)}."""
    spans, parts = {}, 1
    for name, size in mesh.shape.items():
        spans[name] = (parts, parts * size)
        parts *= size
    return spans


def _in_common(sharding: NamedSharding, common: Mesh, rank: int) -> list[tuple[str, ...]]:
    """Returns the axes of the common mesh that split each axis of an array."""
    source_spans, common_spans = _spans(sharding.mesh), _spans(common)

    def axes(entry) -> tuple[str, ...]:
        names = entry if isinstance(entry, tuple) else (entry,) * (entry is not None)
        spans = [source_spans[name] for name in names]

        def inside(a, b, low, high):
            return low <= a < b <= high

        return tuple(
            name
            for low, high in spans
            for name, span in common_spans.items()
            if inside(*span, low, high)
        )

    spec = [*sharding.spec, *[None] * (rank - len(sharding.spec))]
    return [axes(entry) for entry in spec]


def way(shape: tuple[int, ...], source: NamedSharding, target: NamedSharding) -> list:
    """Returns the shardings between `source` and `target`, `target` last. (The common mesh is
    coarser than neither; where there is none, or a size does not divide, XLA goes to `target` in
    one step.)"""
    common = common_mesh(source.mesh, target.mesh)
    if common is None:
        return [target]
    source_axes, target_axes = (_in_common(s, common, len(shape)) for s in (source, target))
    target_names, source_names = (
        {name for axes in spec for name in axes} for spec in (target_axes, source_axes)
    )
    unsplit = [tuple(name for name in axes if name not in target_names) for axes in source_axes]
    sliced = [  # each device keeps a part of what it has a copy of; nothing is sent
        (*old, *(name for name in new if name not in source_names))
        for old, new in zip(source_axes, target_axes, strict=True)
    ]
    exchanged = [  # the mesh axes that stay, in the order of the source, and those that arrive
        tuple(name for name in old if name in (*new, *rest))
        + tuple(name for name in new if name not in old)
        for old, new, rest in zip(sliced, target_axes, unsplit, strict=True)
    ]
    ordered = [(*new, *rest) for new, rest in zip(target_axes, unsplit, strict=True)]
    steps = []
    for spec in (sliced, exchanged, ordered):
        counts = [math.prod(common.shape[name] for name in axes) for axes in spec]
        if any(size % count for size, count in zip(shape, counts, strict=True)):
            return [target]
        if spec not in steps and spec not in (source_axes, target_axes):
            steps.append(spec)
    shardings = [PartitionSpec(*(axes or None for axes in spec)) for spec in steps]
    return [*(NamedSharding(common, spec) for spec in shardings), target]


def sent(x: jax.Array, source: NamedSharding, target: NamedSharding) -> jax.Array:
    """Returns x [...], which lies as `source` says, as `target` says (inside a program)."""
    for sharding in [source, *way(x.shape, source, target)]:
        x = jax.lax.with_sharding_constraint(x, sharding)
    return x
