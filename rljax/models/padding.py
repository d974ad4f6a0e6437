"""Padding: the sizes that a mesh computes with where its tensor axis does not divide the model's.

Weights are stored, updated, saved and exported in the model's own shapes, on every mesh
(rljax.mesh.weight_sharding). A program that computes with them begins by making them wider, split
over tensor: zeros are added to the query heads, to the output projection that reads those, and to
the hidden layer, and kv heads are repeated so that every device has those of its query heads. A
gradient comes back through the same steps, so no padding ever reaches an optimizer, a checkpoint or
a draw. The vocabulary is padded where the head is read (rljax.kernels.logprob.sharded and
rljax.mesh.head_by_vocab).

Axes: H query heads, K kv heads, G = H / K query heads of a kv head.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rljax.errors import InputError
from rljax.mesh import weight_sharding
from rljax.models.attention_paths import pad_axis
from rljax.models.config import LayerKind, ModelConfig
from rljax.models.trees import flattened, nested


@dataclasses.dataclass(frozen=True)
class Heads:
    """H query heads over K kv heads as devices share them: `padded` kv heads (K and zeros), each
    `copies` times in a row, and `group` query heads to each of those."""

    heads: int
    kv_heads: int
    padded: int
    copies: int
    group: int

    @property
    def queries(self) -> int:
        """Number of query heads in all."""
        return self.padded * self.copies * self.group

    @property
    def keys(self) -> int:
        """Number of kv heads in all."""
        return self.padded * self.copies

    def widen_queries(self, x: jax.Array, axis: int) -> jax.Array:
        """Returns x with `queries` heads along `axis`, where it has H: [..., H, ...] ->
        [..., queries, ...]. Those added are zeros."""
        if self.queries == self.heads:
            return x
        x = _split(x, axis, (self.kv_heads, self.heads // self.kv_heads))
        x = pad_axis(pad_axis(x, axis, self.padded), axis + 1, self.copies * self.group)
        return _merge(x, axis)

    def widen_keys(self, x: jax.Array, axis: int) -> jax.Array:
        """Returns x with `keys` heads along `axis`, where it has K: [..., K, ...] ->
        [..., keys, ...]. Those added are copies, and zeros."""
        x = pad_axis(x, axis, self.padded)
        if self.copies == 1:
            return x
        shape = (*x.shape[: axis + 1], self.copies, *x.shape[axis + 1 :])
        return _merge(jnp.broadcast_to(jnp.expand_dims(x, axis + 1), shape), axis)

    def narrow_queries(self, x: jax.Array, axis: int) -> jax.Array:
        """Returns x with the H heads that `widen_queries` was given: [..., queries, ...]
        -> [..., H, ...]."""
        if self.queries == self.heads:
            return x
        group = self.heads // self.kv_heads
        x = _split(x, axis, (self.padded, self.copies * self.group))
        x = jax.lax.slice_in_dim(x, 0, self.kv_heads, axis=axis)
        return _merge(jax.lax.slice_in_dim(x, 0, group, axis=axis + 1), axis)


def _split(x: jax.Array, axis: int, sizes: tuple[int, int]) -> jax.Array:
    return x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])


def _merge(x: jax.Array, axis: int) -> jax.Array:
    """Returns x with `axis` and the next one merged."""
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


@functools.cache
def heads_over(heads: int, kv_heads: int, shards: int) -> Heads:
    """Returns the fewest query heads, and of those the fewest kv heads, that `shards` devices split
    evenly, each with whole groups."""

    def with_copies(copies: int) -> Heads:
        step = shards // copies
        padded = -(-kv_heads // step) * step
        return Heads(heads, kv_heads, padded, copies, -(-(heads // kv_heads) // copies))

    candidates = [with_copies(n) for n in range(1, shards + 1) if shards % n == 0]
    return min(candidates, key=lambda candidate: (candidate.queries, candidate.keys))


def _heads_of(config: ModelConfig, tensor: int) -> Heads:
    """Returns the numbers of heads of a layer; the keys of latent attention are as many as its
    queries."""
    kv_heads = config.heads if config.latent else config.kv_heads
    return heads_over(config.heads, kv_heads, tensor)


def _whole(size: int, parts: int) -> int:
    """Rounds `size` up to the next multiple of `parts`."""
    return -(-size // parts) * parts


def _padded_kinds(config: ModelConfig, tensor: int) -> tuple[LayerKind, ...]:
    """Returns the kinds of layers with the kv heads that programs compute with. Raises InputError
    where layers would need different numbers of query heads."""
    kinds = []
    for kind in config.kinds:
        heads = _heads_of(config.of(kind), tensor)
        if heads.queries != _heads_of(config, tensor).queries:
            rule = "layers of different kv heads would be padded to different query heads"
            fix = f"set mesh.tensor to a divisor of {config.heads} heads and of {kind.kv_heads}"
            raise InputError("mesh.tensor", value=tensor, rule=rule, fix=fix)
        kinds.append(dataclasses.replace(kind, kv_heads=kind.kv_heads and heads.keys))
    return tuple(kinds)


@functools.cache
def padded(config: ModelConfig, tensor: int) -> ModelConfig:
    """Returns the config with the sizes that programs compute with; the config itself
    where all divide."""
    heads, experts = _heads_of(config, tensor), config.experts
    if experts:
        sizes = dict(mlp=_whole(experts.mlp, tensor), shared_mlp=_whole(experts.shared_mlp, tensor))
        experts = dataclasses.replace(experts, **sizes)
    sizes = dict(heads=heads.queries, mlp=_whole(config.mlp, tensor), experts=experts)
    sizes["kinds"] = _padded_kinds(config, tensor)
    if not config.latent or heads.queries != config.heads:
        sizes["kv_heads"] = heads.keys
    padded_config = dataclasses.replace(config, **sizes)
    if padded_config == config:
        return config
    return dataclasses.replace(
        padded_config, normed_heads=(config.heads, config.kv_heads * heads.copies)
    )


def computed_shapes(shapes: dict, config: ModelConfig, tensor: int) -> dict:
    """Returns {path: (shape, logical axes)} as programs compute with them, of those
    that weights have."""
    if padded(config, tensor) is config:
        return shapes
    return dict(_computed_shapes(tuple(shapes.items()), config, tensor))


@functools.lru_cache(maxsize=256)  # a plan's search asks for the same ones hundreds of times
def _computed_shapes(shapes: tuple, config: ModelConfig, tensor: int) -> tuple:
    computed = []
    for path, (shape, axes) in shapes:
        widen = functools.partial(_widened, path, dict(shapes), config, tensor)
        leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
        computed.append((path, (jax.eval_shape(widen, leaf).shape, axes)))
    return tuple(computed)


def copied_elements(shapes: dict, config: ModelConfig, mesh: Mesh) -> int:
    """Returns the elements of a device in the weights that a program makes wider: a
    copy while it runs."""
    return sum(
        math.prod(weight_sharding(mesh, ".".join(path), shape, axes).shard_shape(shape))
        for path, (shape, axes) in computed_shapes(shapes, config, mesh.shape["tensor"]).items()
        if shape != shapes[path][0]
    )


def widened(params: dict, shapes: dict, config: ModelConfig, mesh: Mesh) -> dict:
    """Returns the weights with the sizes of `padded`, split over the mesh (inside a program).
    `shapes`: {path: (shape, logical axes)} of the model (Model.shapes)."""
    if padded(config, mesh.shape["tensor"]) is config:
        return params
    flat, computed = flattened(params), computed_shapes(shapes, config, mesh.shape["tensor"])
    for path, x in flat.items():
        if computed[path][0] == x.shape:
            continue
        widen = functools.partial(_widened, path, shapes, config, mesh.shape["tensor"])
        layout = functools.partial(weight_sharding, mesh, ".".join(path), axes=shapes[path][1])
        # Padding is added where the axis is whole, forward and backward, and then one exchange
        # splits it. Left to itself XLA gathers the weight.
        stored, shape = layout(shape=x.shape), computed[path][0]
        changed = [
            i
            for i, (n, target_size) in enumerate(zip(x.shape, shape, strict=True))
            if n != target_size
        ]
        x = widen(jax.lax.with_sharding_constraint(x, stored))
        if all(stored.spec[i] is None for i in changed):
            x = jax.lax.with_sharding_constraint(x, stored)
        flat[path] = jax.lax.with_sharding_constraint(x, layout(shape=shape))
    return nested(flat)


def _widened(path: tuple, shapes: dict, config: ModelConfig, tensor: int, x: jax.Array):
    """Widens one weight, or the codes or scales of one. A vision tower has other sizes: XLA splits
    it as it likes."""
    if path[0] == "vision":
        return x
    if path[0] == "layers":
        config = config.of([k for stack in config.stacks() for k in stack.unit][int(path[1])])
    heads, axes = _heads_of(config, tensor), shapes[path][1]
    for i, axis in enumerate(axes):
        if axis == "heads":
            x = heads.widen_queries(x, i)
        elif axis == "kv_heads":
            x = heads.widen_keys(x, i)
        elif axis == "mlp":
            x = pad_axis(x, i, _whole(x.shape[i], tensor))
    if path[-1] != "scales":
        return x
    # Blocks along a padded axis are cut into smaller ones that divide it.
    i, (whole_shape, of_codes) = axes.index(None), shapes[(*path[:-1], "codes")]
    size, padded_size = whole_shape[i], _whole(whole_shape[i], tensor)
    if of_codes[i] != "mlp" or padded_size == size:
        return x
    block = math.gcd(size // x.shape[i], padded_size)
    finer = jnp.repeat(x, size // x.shape[i] // block, axis=i)
    return pad_axis(finer, i, padded_size // block)


def described(config: ModelConfig, tensor: int) -> str:
    """Describes the padding in one sentence; "" where all sizes divide."""
    padded_config = padded(config, tensor)
    sizes = {
        "query heads": (config.heads, padded_config.heads),
        "kv heads": (config.kv_heads, padded_config.kv_heads),
    }
    if any(not kind.experts for kind in config.kinds):
        sizes["hidden layer"] = (config.mlp, padded_config.mlp)
    if config.experts:
        sizes["hidden layer of an expert"] = (config.experts.mlp, padded_config.experts.mlp)
        shared = (config.experts.shared_mlp, padded_config.experts.shared_mlp)
        sizes["hidden layer of the shared experts"] = shared
    sizes["vocabulary"] = (config.vocab_size, _whole(config.vocab_size, tensor))
    changes = [
        f"{name} {stored_size} as {computed_size}"
        for name, (stored_size, computed_size) in sizes.items()
        if stored_size != computed_size
    ]
    return f"tensor {tensor} computes {', '.join(changes)}" if changes else ""
