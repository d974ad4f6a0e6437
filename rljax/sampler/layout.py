"""Layout: the mesh and the type of the weights while a model decodes, where they are not those of
training; and the one program that brings the weights there.

Training splits weights by fsdp, which at every token costs decoding an exchange of activations. A
mesh of its own over the same devices (HybridFlow, arXiv 2409.19256) costs an exchange of weights
per update of the policy, and the memory of the copy while it samples. Under adapters the copy of
the frozen base stays, and an update brings the adapters alone.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
import re
import time
import weakref

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rljax.arrays import moved
from rljax.components import resolve
from rljax.contracts import contract
from rljax.errors import InputError
from rljax.mesh import MESH_AXES
from rljax.models.adapters.quantise import KINDS, quantise
from rljax.models.config import LoraConfig
from rljax.models.model import Model
from rljax.models.trees import flattened, merged, nested
from rljax.sampler.relayout import sent
from rljax.tracking import timing

WEIGHT_DTYPES = ("", "float32", "bfloat16", "float16", "int8")
AUTO = "auto"
_FORM = '"" (training\'s own), "auto", or "mesh(data=4, fsdp=1, tensor=2)"'


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sizes of a mesh over the devices that decode. One may be -1: what is left; expert 0: as
    training has it. Its context is 1."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    expert: int = 0

    def __post_init__(self):
        sizes = dataclasses.asdict(self)
        for name, size in sizes.items():
            if type(size) is not int or size < -1 or size == 0 and name != "expert":
                raise InputError(
                    f"sampler.layout: {name}",
                    value=size,
                    rule="a size >= 1, or -1",
                    fix=f"{name}=-1, which takes the devices that are left, or a size of 1 or more",
                )
        if list(sizes.values()).count(-1) > 1:
            raise InputError(
                "sampler.layout",
                value=sizes,
                rule="at most one size is -1",
                fix="keep one -1, and write the other sizes",
            )

    def mesh(self, training: Mesh) -> Mesh:
        """Returns the mesh, over the devices of `training` in their order. Raises InputError if the
        sizes do not divide them."""
        sizes = dict.fromkeys(MESH_AXES, 1) | dataclasses.asdict(self)
        sizes["expert"] = self.expert or training.shape["expert"]
        fixed_size = math.prod(size for size in sizes.values() if size > 0)
        free = [name for name, size in sizes.items() if size == -1]
        fits = training.size % fixed_size == 0 if free else training.size == fixed_size
        if not fits:
            raise InputError(
                "sampler.layout does not fit the devices",
                value=str(self),
                rule=f"its sizes divide the {training.size} devices of the mesh, and one of them "
                "may be -1: what is left",
                fix="--config.sampler.layout='mesh(tensor=-1)', or sizes that multiply to them",
            )
        sizes |= {name: training.size // fixed_size for name in free}
        grid = training.devices.reshape([sizes[name] for name in MESH_AXES])
        return Mesh(grid, MESH_AXES, axis_types=training.axis_types)

    def __str__(self):
        named = {k: v for k, v in dataclasses.asdict(self).items() if k != "expert" or v}
        return f"mesh({', '.join(f'{k}={v}' for k, v in named.items())})"


@contract(safe=True)
def mesh(*, data: int | None = None, fsdp: int = 1, tensor: int = 1, expert: int = 0) -> Layout:
    """Returns the layout of a config. Without `data` it is what the other sizes leave."""
    if data is None:
        data = 1 if -1 in (fsdp, tensor, expert) else -1
    return Layout(data, fsdp, tensor, expert)


def parsed(text: str) -> Layout | None:
    """Returns the layout that a config names; None for training's own, and for "auto", which
    depends on the model. Raises InputError for any other text."""
    if text in ("", AUTO):
        return None
    if not re.fullmatch(r"mesh *\(.*\)", text.strip(), re.DOTALL):
        raise InputError(
            "sampler.layout",
            value=text,
            rule=f"one of {_FORM}",
            fix="--config.sampler.layout=auto, or '' to decode as the mesh trains",
        )
    return resolve(text.strip(), __name__)()


def check_slices(mesh: Mesh, slices: int) -> None:
    """Raises InputError if a mesh of decoding splits weights over several slices."""
    if mesh.shape["data"] % slices:
        raise InputError(
            "sampler.layout: data",
            value=mesh.shape["data"],
            rule=f"a multiple of the {slices} slices: data alone reaches from one to another",
            fix=f"data={slices} in sampler.layout, or a multiple of it",
        )


# -- the model that decodes


def decode_model(model: Model, layout: Layout | None, weight_dtype: str) -> Model:
    """Returns `model` on the mesh of a layout, with weights of `weight_dtype`. With "int8" the
    linear maps are codes, and all other weights have the dtype of products. A quantised base and
    adapters stay as they are. Raises InputError if the layout does not fit the model."""
    config, target = model.config, layout.mesh(model.mesh) if layout else model.mesh
    if config.batch_invariant and weight_dtype:
        rule = "'' with model_settings.batch_invariant: the trainer's own weights"
        raise InputError(
            "sampler.weight_dtype",
            value=weight_dtype,
            rule=rule,
            fix="--config.sampler.weight_dtype=''",
        )
    base = config.lora.base if config.lora else ""
    if weight_dtype == "int8" and base not in KINDS:
        lora = config.lora or LoraConfig(rank=0)
        # Experts that are codes would all be decoded in every step, which reads only a few of them.
        lora = dataclasses.replace(lora, base="int8", quantised_experts=False)
        config = dataclasses.replace(config, lora=lora, weight_dtype=config.dtype)
    elif weight_dtype and weight_dtype != "int8":
        config = dataclasses.replace(config, weight_dtype=weight_dtype)
    decoding_model = dataclasses.replace(model, config=config, mesh=target)
    if layout:
        _check_fits(decoding_model, layout)
    return decoding_model


def _check_fits(model: Model, layout: Layout) -> None:
    """Raises InputError that names the sizes that would fit. Experts alone are never padded."""
    count, size = model.config.experts and model.config.experts.count, model.mesh.shape["expert"]
    if not count or count % size == 0:
        return
    fit = [n for n in range(1, model.mesh.size + 1) if model.mesh.size % n == 0 == count % n]
    raise InputError(
        f"sampler.layout does not fit the model: expert={size}",
        value=str(layout),
        rule=f"it divides experts of {count}",
        fix=f"expert of {', '.join(map(str, fit))}",
    )


# -- the weights that it reads


def weights_like(model: Model, params, *, keep_dtypes: bool) -> dict:
    """Returns shape, dtype and sharding of the weights of a model that decodes, made of `params`:
    their own dtypes with `keep_dtypes`."""
    like = model.abstract()
    if not keep_dtypes:
        return like

    def own(x, p):
        return jax.ShapeDtypeStruct(x.shape, p.dtype, sharding=x.sharding)

    return jax.tree.map(own, like, params)


def agree(source: Model, target: Model, params, like) -> bool:
    """Returns whether `params`, on the layout of `source`, are what `target` reads, as they are."""
    if source.mesh != target.mesh or jax.tree.structure(params) != jax.tree.structure(like):
        return False
    leaves = zip(jax.tree.leaves(params), jax.tree.leaves(like), strict=True)
    return all(x.dtype == y.dtype for x, y in leaves)


def is_apart(source: Model, target: Model) -> bool:
    """Returns whether two models lie on other devices, between which no program sends anything."""
    return set(source.mesh.devices.flat) != set(target.mesh.devices.flat)


def copied_bytes(like) -> int:
    """Returns the bytes of weights like these on all devices together."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize * x.sharding.mesh.size
        for x in jax.tree.leaves(like)
    )


_CODES = ("codes", "scales")  # the weights of a linear map that is rounded to int8


def _like(target: Model, params, tree) -> dict:
    """Returns the leaves of a tree of the weights of `target` that are made of `params`, which may
    be some of the weights alone."""
    flat, paths = flattened(tree), []
    for path in flattened(params):
        paths += [path] if path in flat else [(*path[:-1], name) for name in _CODES]
    return nested({path: flat[path] for path in paths})


@functools.lru_cache(maxsize=64)
def reshard_program(source: Model, target: Model, keep_dtypes: bool, part: str = ""):
    """Returns the program that maps weights of `source` to weights of `target`. Weights are cast or
    quantised where they lie, and then sent. Layers go one after another, so that a relayout holds
    one layer beside its input and its output. `part`: "trained" or "frozen" weights alone."""
    source_shardings, target_shardings = (
        flattened(source.shardings()),
        flattened(target.shardings()),
    )
    dtypes = {path: x.dtype for path, x in flattened(target.abstract()).items()}
    axes = {path: named for path, (_, named) in target.shapes().items()}

    def of(sharding: NamedSharding, stacked: bool) -> NamedSharding:
        """Returns the layout of one layer, where weights of several are stacked."""
        spec = PartitionSpec(*sharding.spec[stacked:])
        return NamedSharding(sharding.mesh, spec)

    def encoded(path, x, stacked: bool) -> dict:
        codes, scales = ((*path[:-1], name) for name in _CODES)
        quantised = quantise(x, target.config.lora.base, axes[scales].index(None) - stacked)
        sent_codes = sent(
            quantised[0], of(source_shardings[path], stacked), of(target_shardings[codes], stacked)
        )
        sent_scales = jax.lax.with_sharding_constraint(
            quantised[1], of(target_shardings[scales], stacked)
        )
        return {codes: sent_codes, scales: sent_scales}

    def moved(flat: dict, stacked: bool) -> dict:
        leaves = {}
        for path, x in flat.items():
            if path not in target_shardings:
                leaves |= encoded(path, x, stacked)
                continue
            values = x if keep_dtypes else x.astype(dtypes[path])
            leaves[path] = sent(
                values, of(source_shardings[path], stacked), of(target_shardings[path], stacked)
            )
        return leaves

    def reshard(params):
        flat = flattened(params)
        leaves = moved({path: x for path, x in flat.items() if path[0] != "layers"}, False)
        for member in sorted({path[1] for path in flat if path[0] == "layers"}):
            member_leaves = {path: x for path, x in flat.items() if path[:2] == ("layers", member)}
            leaves |= jax.lax.scan(
                lambda _, layer: (None, moved(layer, True)), None, member_leaves
            )[1]
        return nested(leaves)

    inputs, (trained, frozen) = source.abstract(), source.split(source.abstract())
    inputs = {"": inputs, "trained": trained, "frozen": frozen}[part]
    return jax.jit(reshard, out_shardings=_like(target, inputs, target.shardings()))


# The copies of the enclosing `held_weights`: (source model, target model, leaves of the source,
# copy).
_held: contextvars.ContextVar[list | None] = contextvars.ContextVar("held_weights", default=None)


@contextlib.contextmanager
def held_weights():
    """Brings each set of weights to a layout once within the block, and drops the copies at its
    end. Blocks inside it share its copies."""
    if _held.get() is not None:
        yield
        return
    copies: list = []
    token = _held.set(copies)
    try:
        yield
    finally:
        copies.clear()
        _held.reset(token)


# Copies of frozen weights, the base under adapters: [key, weak references to the leaves that it was
# made of, copy]. No update changes them, so a copy stays as long as what it was made of.
_frozen: list[tuple[tuple, list, dict]] = []


def decode_weights(source: Model, target: Model, params, *, keep_dtypes: bool):
    """Returns the weights that `target` reads: `params` itself where nothing differs, else a copy,
    which the enclosing `held_weights` keeps. Its frozen half, if it has one, is kept as long as
    that of `params`: after an update the adapters alone are brought again.

    A copy is found by the very arrays that it was made of, so one of older weights is never read.
    """
    like = weights_like(target, params, keep_dtypes=keep_dtypes)
    if agree(source, target, params, like):
        return params
    leaves, copies = jax.tree.leaves(params), _held.get()
    for held_source, held_target, held_leaves, copy in copies or ():
        if (held_source, held_target) == (source, target) and _same(leaves, held_leaves):
            return copy
    if copies is not None:  # arrays that were donated since are of an older version
        copies[:] = [entry for entry in copies if not any(x.is_deleted() for x in entry[2])]
    copy = _copy(source, target, params, like, keep_dtypes)
    if copies is not None:
        copies.append((source, target, leaves, copy))
    return copy


def _copy(source: Model, target: Model, params, like, keep_dtypes: bool) -> dict:
    """Returns the weights of `target`, and counts in the metrics what is copied for it."""
    trained, frozen = source.split(params)
    if not (trained and frozen):
        return _brought(source, target, params, like, keep_dtypes)
    if base := kept_like(source, target, params, like):
        frozen = _kept(source, target, frozen, base, keep_dtypes)
    like = _like(target, trained, like)
    return merged(_brought(source, target, trained, like, keep_dtypes, "trained"), frozen)


def kept_like(source: Model, target: Model, params, like) -> dict:
    """Returns the part of a copy `like` that outlives an update: the frozen weights, {} where they
    are none, or read as they are."""
    trained, frozen = source.split(params)
    base = _like(target, frozen, like) if trained and frozen else {}
    return {} if not base or agree(source, target, frozen, base) else base


def _kept(source: Model, target: Model, frozen, like, keep_dtypes: bool) -> dict:
    """Returns the frozen weights of `target`: the copy that there is, or a new one that is kept."""
    key, leaves = (source, target, keep_dtypes), jax.tree.leaves(frozen)
    for held_key, made_of, copy in _frozen:
        if held_key == key and _same(leaves, [reference() for reference in made_of]):
            return copy

    def forget(_):
        _frozen[:] = [other for other in _frozen if other is not entry]

    copy = _brought(source, target, frozen, like, keep_dtypes, "frozen")
    entry = (key, [weakref.ref(x, forget) for x in leaves], copy)
    _frozen.append(entry)
    return copy


def _brought(source, target, params, like, keep_dtypes: bool, part: str = "") -> dict:
    """Returns a copy of `params` for `target`, counted in the metrics. Between devices that no
    program spans the weights are cast where they lie, and then sent."""
    begun = time.monotonic()
    apart = is_apart(source, target)
    local_target = dataclasses.replace(target, mesh=source.mesh) if apart else target
    copy = params
    if not apart or not agree(source, local_target, params, like):
        copy = reshard_program(source, local_target, keep_dtypes, part)(params)
    if apart:
        copy = jax.tree.map(lambda x, struct: moved(x, struct.sharding), copy, like)
    jax.block_until_ready(copy)
    timing.synced(copied_bytes(like), time.monotonic() - begun)
    return copy


def _same(leaves: list, others: list) -> bool:
    return len(leaves) == len(others) and all(x is y for x, y in zip(leaves, others, strict=True))
