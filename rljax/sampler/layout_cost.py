"""Costs of decoding in a layout: bytes of a device, and a lower bound of the seconds. Chooses the
fastest mesh that fits.

A step of decoding reads the weights and what is remembered of each slot from HBM, and exchanges
activations: over fsdp the outputs of products whose inner axis (embed) is split, over tensor those
that are summed back to embed. Its collectives stand between products that wait for them, so HBM and
ICI add up. Numbers are of one device.

Axes: B slots, D embed, V vocabulary entries.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from rljax.chips import Chip
from rljax.mesh import RULES, row_shards, undivided, weight_sharding
from rljax.models.model import Model
from rljax.models.padding import computed_shapes, copied_elements
from rljax.models.trees import flattened
from rljax.sampler.layout import Layout, agree, weights_like
from rljax.sampler.memory import pool_for, slots_bytes
from rljax.sampler.requests import Decoding

# The latency of one collective between products that wait for it. It is not published: an
# assumption, which only breaks ties between layouts whose bytes take about as long.
LATENCY_S = 5e-6
# The estimate of what programs need besides arguments and caches is within this factor of the
# compiler's own count (tests/plan/test_plan.py). A run is refused only where the lower end of that
# range does not fit; a layout is chosen only where the upper end does.
FACTOR = 3.0
LOGITS_PASSES = 2  # over the float32 logits in HBM; compiled, others stay in a core's own memory


@dataclasses.dataclass(frozen=True)
class Workload:
    """The decoding of a step of a run: each of `prompts` sampled `samples` times."""

    prompts: int
    samples: int
    prompt_tokens: int
    response_tokens: int

    def slots(self, decoding: Decoding) -> int:
        """Returns how many rows decode at a time."""
        rows = self.prompts * self.samples
        return min(decoding.slots or rows, rows)

    def steps(self, decoding: Decoding) -> int:
        """Returns the steps of decoding, every response at full length."""
        return -(-self.prompts * self.samples // self.slots(decoding)) * self.response_tokens


@dataclasses.dataclass(frozen=True)
class LayoutCost:
    """The least time of decoding in a layout (None: training's own). `hbm_s`, `compute_s` and
    `ici_s`, by mesh axis, are of one step, `latency_s` its collectives at LATENCY_S each;
    `copy_bytes` are those of weights held a second time, `most_bytes` all that decoding adds to
    what a run holds, at most."""

    layout: Layout | None
    mesh: dict[str, int]
    steps: int
    hbm_s: float
    compute_s: float
    ici_s: dict[str, float]
    latency_s: float
    reshard_s: float
    copy_bytes: int
    most_bytes: int

    @property
    def step_s(self) -> float:
        """Seconds of one decode step, without latency."""
        return max(self.hbm_s, self.compute_s) + sum(self.ici_s.values())

    @property
    def rollout_s(self) -> float:
        """Total estimated seconds: decode steps, weight transfer and latency; the layout search
        minimises it."""
        return self.steps * (self.step_s + self.latency_s) + self.reshard_s

    @property
    def binding(self) -> str:
        """Names the largest part of a step."""
        seconds_of = {"HBM": self.hbm_s, "compute": self.compute_s}
        seconds_of |= {f"ICI {axis}": seconds for axis, seconds in self.ici_s.items()}
        return max(seconds_of, key=seconds_of.get)


def layout_costs(
    model: Model, params, decoding: Decoding, work: Workload, chip: Chip, *, slices: int = 1
) -> list[LayoutCost]:
    """Returns the cost of every data x fsdp x tensor mesh that divides the devices that decode and
    the model, and of their own without a layout, the fastest first. `params` may be abstract;
    expert stays as it is, and each of `slices` holds whole weights.

    Other meshes can be named: they pad weights anew in every program, which no cost here counts.
    """
    unchanged = dataclasses.replace(decoding, layout=None)
    costs, mesh = [layout_cost(model, params, unchanged, work, chip)], decoding.mesh or model.mesh
    for layout in _meshes(mesh.size // mesh.shape["expert"]):
        if (layout.data, layout.fsdp, layout.tensor) == tuple(
            mesh.shape[axis] for axis in ("data", "fsdp", "tensor")
        ) or layout.data % slices:
            continue
        candidate = dataclasses.replace(decoding, layout=layout)
        if not undivided(candidate.of(model).mesh, model.shapes()):
            costs.append(layout_cost(model, params, candidate, work, chip))
    return sorted(costs, key=lambda cost: cost.rollout_s)


def decode_layout(costs: list[LayoutCost], free_bytes: float) -> Layout | None:
    """Returns the fastest layout whose needs fit into `free_bytes`, the bytes that a device has
    left while decoding; None, training's own, if none does or none is faster."""
    return next((cost.layout for cost in costs if cost.most_bytes <= free_bytes), None)


def _meshes(devices: int) -> Iterator[Layout]:
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for tensor, fsdp in itertools.product(divisors, divisors):
        if devices % (tensor * fsdp) == 0:
            yield Layout(data=devices // (tensor * fsdp), fsdp=fsdp, tensor=tensor)


def layout_cost(model: Model, params, decoding: Decoding, work: Workload, chip: Chip) -> LayoutCost:
    """Returns the cost of `decoding` in its own layout. Raises InputError if that does not
    divide the experts."""
    target = decoding.of(model)
    like = weights_like(target, params, keep_dtypes=not decoding.weight_dtype)
    no_copy = agree(model, target, params, like)
    weights = flattened(like)
    slots, context = work.slots(decoding), work.prompt_tokens + work.response_tokens // 2
    rows = _split(slots, row_shards(target.mesh))
    read_bytes = _read_bytes(target, weights, slots) + slots_bytes(
        target, slots, context, decoding.kv_dtype
    )
    read_bytes += LOGITS_PASSES * 4 * rows * target.config.vocab_size // target.mesh.shape["tensor"]
    sent_bytes, collectives = _exchanged(target, weights, slots)
    link = 2 * chip.link_bytes_per_s  # both ways along one ring
    needed_bytes = decode_bytes(target, work, decoding)
    kv_bytes = needed_bytes["keys and values"]
    copy_bytes = 0 if no_copy else _shard_bytes(weights)
    return LayoutCost(
        decoding.layout,
        {axis: size for axis, size in target.mesh.shape.items() if size > 1},
        work.steps(decoding),
        read_bytes / chip.hbm_bytes_per_s,
        _flops(target, slots) / chip.flops_per_s,
        {axis: size / link for axis, size in sent_bytes.items() if size},
        collectives * LATENCY_S,
        0.0 if no_copy else _gathered_bytes(model, target, weights) / link,
        copy_bytes,
        copy_bytes + int(kv_bytes + FACTOR * (sum(needed_bytes.values()) - kv_bytes)),
    )


def decode_bytes(model: Model, work: Workload, decoding: Decoding) -> dict[str, int]:
    """Returns the bytes of a device that decoding with `model` (decoding.of) needs beside weights:
    keys and values exactly, the rest estimated."""
    config, mesh = model.config, model.mesh
    shards, tensor = row_shards(mesh), mesh.shape["tensor"]
    size, slots = jnp.dtype(config.dtype).itemsize, work.slots(decoding)
    shapes = flattened(model.abstract()).items()
    layer_elements = sum(_of_shard(x) for path, x in shapes if path[0] == "layers")
    wider_elements = sum(_of_shard(x) for _, x in shapes if x.dtype.itemsize > size)
    # CPU and GPU programs copy the layers before the loop; all keep weights that are wider than
    # their products in the dtype of the products.
    copied_bytes = 4 * layer_elements if mesh.devices.flat[0].platform != "tpu" else 0
    copied_bytes += size * copied_elements(model.shapes(), config, mesh)
    tokens = _split(work.prompts, shards) * work.prompt_tokens
    activations = tokens * (6 * config.embed + 4 * config.mlp // tensor) * size
    columns = work.prompt_tokens + work.response_tokens
    pool = pool_for(model, slots, columns, decoding.page_tokens, decoding.pages)
    return {
        "keys and values": slots_bytes(model, slots, columns, decoding.kv_dtype, pool),
        "prompts": activations
        + slots_bytes(model, work.prompts, work.prompt_tokens, decoding.kv_dtype),
        "weights as used": copied_bytes + wider_elements * size,
        "logits": 4 * 4 * _split(slots, shards) * config.vocab_size // tensor,
    }


# -- the parts of a step


def _split(count: int, shards: int) -> int:
    """Returns how many of `count` rows one device holds: all of them where they do not divide."""
    return count // shards if count % shards == 0 else count


def _of_shard(x: jax.ShapeDtypeStruct) -> int:
    """Elements of an array on one device."""
    return math.prod(x.sharding.shard_shape(x.shape))


def _shard_bytes(weights: dict) -> int:
    return sum(_of_shard(x) * x.dtype.itemsize for x in weights.values())


def _used(model: Model, path, rows: int) -> float:
    """Returns the part of a weight that a step with so many rows reads: all of it, but of the
    embedding only rows, and of experts those that a row goes to."""
    config = model.config
    if path[0] == "embedding" and not (config.tie_embeddings and model.head == "lm"):
        return min(1.0, rows / config.vocab_size)
    if "experts" in model.shapes().get(path, ((), ()))[1]:
        return 1 - (1 - config.experts.per_token / config.experts.count) ** rows
    return 0.0 if path[0] == "vision" else 1.0


def _read_bytes(model: Model, weights: dict, slots: int) -> float:
    """Bytes of weights that a step reads, with what is padded."""
    total, padded = 0.0, _computed(model)
    for path, x in weights.items():
        shape, axes = padded[path]
        layout = weight_sharding(model.mesh, ".".join(path), shape, axes)
        size = math.prod(layout.shard_shape(shape)) * x.dtype.itemsize
        total += size * _used(model, path, slots)
    return total


def _computed(model: Model) -> dict:
    """{path: (shape, logical axes)} as the products of a step read them."""
    return computed_shapes(model.shapes(), model.config, model.mesh.shape["tensor"])


def _flops(model: Model, slots: int) -> float:
    """FLOPs of a step's products with weights: 2 per weight and row; of experts, those of a row."""
    config, total = model.config, 0.0
    for path, (shape, axes) in _computed(model).items():
        if len(shape) > 1 + (axes[0] == "layers") and path[0] not in ("vision", "embedding"):
            share = config.experts.per_token / config.experts.count if "experts" in axes else 1.0
            total += math.prod(shape) * share
    if config.tie_embeddings and model.head == "lm":
        total += config.vocab_size * config.embed
    return 2 * total * slots / model.mesh.size


def _exchanged(model: Model, weights: dict, slots: int) -> tuple[dict[str, float], float]:
    """Returns ({mesh axis: bytes that a device sends in a step}, collectives), as XLA lays out a
    step whose residual is split over fsdp (rljax.mesh.constrain_step)."""
    config, mesh = model.config, model.mesh
    fsdp, tensor = mesh.shape["fsdp"], mesh.shape["tensor"]
    rows, size = _split(slots, mesh.size // fsdp // tensor), jnp.dtype(config.dtype).itemsize
    all_reduce, reduce_scatter = 2 * (fsdp - 1) / fsdp, (fsdp - 1) / fsdp
    sent_bytes, collectives = {"fsdp": 0.0, "tensor": 0.0}, 2.0
    # Attention is by rows: to them XLA scatters queries, keys and values that no bias is added to.
    ring = {"heads": all_reduce if config.qkv_bias else reduce_scatter, "mlp": all_reduce}
    ring["kv_heads"] = ring["heads"]
    for path, (shape, axes) in _computed(model).items():
        layers = shape[0] if axes[0] == "layers" else 0
        if not layers or "embed" not in axes or path[-1] in ("bias", "scales"):
            continue
        inner = dict(zip(axes, shape, strict=True))
        tensor_parts = tensor if "tensor" in (RULES[axis] for axis in axes) else 1
        width = math.prod(shape[1:]) / inner["embed"] / tensor_parts / inner.get("experts", 1)
        if axes[-1] != "embed":
            outer = next((axis for axis in axes if axis in ring), "")
            sent_bytes["fsdp"] += layers * rows * width * size * ring.get(outer, all_reduce)
            collectives += layers * (fsdp > 1)
            continue
        if "heads" in axes:
            sent_bytes["fsdp"] += layers * rows * width * size * reduce_scatter
        sent_bytes["tensor"] += (
            layers * rows * inner["embed"] / fsdp * size * 2 * (tensor_parts - 1) / tensor_parts
        )
        collectives += layers * ((tensor_parts > 1) + (fsdp > 1) * ("heads" in axes))
    vocab_shards = tensor * (fsdp if "fsdp" in _axes_of("vocab") else 1)
    head_bytes = rows * config.vocab_size / vocab_shards * 4
    sent_bytes["fsdp"] += head_bytes * (
        reduce_scatter if vocab_shards > tensor or not config.tie_embeddings else all_reduce
    )
    sent_bytes["tensor"] += rows * config.embed / fsdp * size * (tensor - 1) / tensor
    return sent_bytes, collectives


def _axes_of(name: str) -> tuple[str, ...]:
    """Returns the mesh axes over which a logical axis is split."""
    rule = RULES[name]
    return rule if isinstance(rule, tuple) else (rule,) if rule else ()


def _gathered_bytes(source: Model, target: Model, weights: dict) -> float:
    """Bytes that a device receives of the weights `held` of `target`, beside what it had of them on
    the mesh of `source`."""
    total = 0.0
    for path, x in weights.items():
        sharding = weight_sharding(source.mesh, ".".join(path), x.shape, target.shapes()[path][1])
        local_elements = math.prod(sharding.shard_shape(x.shape))
        total += max(_of_shard(x) - local_elements, 0) * x.dtype.itemsize
    return total
