"""Low-rank adapters: which maps get one, what is trained, merging.

LoRA and QLoRA (arXiv 2106.09685, 2305.14314). The maps themselves are rljax.models.layers.Linear,
and those of experts rljax.models.expert_weights.
"""

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from rljax.errors import InputError
from rljax.models.adapters.quantise import KINDS, dequantise, quantise
from rljax.models.config import ModelConfig
from rljax.models.expert_weights import MATRICES, ExpertWeights
from rljax.models.families import FAMILIES
from rljax.models.layers import Linear
from rljax.models.names import NAMES, Disk, Fused
from rljax.models.trees import flattened, nested
from rljax.models.vision.names import STACKED, VISION_NAMES

LEAVES = ("lora_a", "lora_b")
_OF_EXPERTS = ("adapters", "quantised")  # what holds the parts of a matrix of experts


def module_name(path: tuple[str, ...], config: ModelConfig) -> str:
    """Returns Hugging Face's name, below a layer, of a linear map of a block, or of the one that
    it is a part of."""
    module = module_of(path, config)
    return module.name if isinstance(module, Fused) else module


def module_of(path: tuple[str, ...], config: ModelConfig):
    """Returns the entry of rljax.models.names for a linear map of a block."""
    return NAMES[FAMILIES[config.family].names][".".join(map(str, path))]


def experts_name(config: ModelConfig, matrix: str) -> str:
    """Returns transformers' name, below a layer, of the parameter that holds the matrices "gate",
    "up" or "down" of all experts of a layer."""
    name = NAMES[FAMILIES[config.family].names]["mlp.down[x]"]
    name = name.name if isinstance(name, Disk) else name
    module = name.partition(".experts.")[0].replace("block_sparse_moe", "mlp")
    return f"{module}.experts.{'down_proj' if matrix == 'down' else 'gate_up_proj'}"


def is_of_experts(path: tuple[str, ...]) -> bool:
    """Returns whether the leaf is a part (codes, scales, A or B) of a matrix of experts."""
    return len(path) > 2 and path[-3] in _OF_EXPERTS


def weight_of(path: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the path of the plain weight that codes, scales, A or B at `path` stand
    for or belong to."""
    return (*path[:-3], path[-2]) if is_of_experts(path) else (*path[:-1], "weight")


def _matches(name: str, pattern: str) -> bool:
    # An adapter for each of many experts, or of the vision tower: never by chance.
    for marker, word in ((".experts.", "experts"), ("visual.", "visual")):
        if marker in name:
            return word in pattern and fnmatch.fnmatchcase(name, pattern)
    return any(fnmatch.fnmatchcase(n, pattern) for n in (name, name.rpartition(".")[2]))


def adapt(block: nnx.Module, rngs: nnx.Rngs, config: ModelConfig) -> set[str]:
    """Gives every targeted linear map of a block its adapter, and all of them their codec; returns
    the names of its linear maps."""
    lora, names = config.lora, set()
    for path, module in list(nnx.iter_modules(block)):
        if isinstance(module, ExpertWeights):
            names |= _adapt_experts(module, rngs, config)
        if not isinstance(module, Linear):
            continue
        name = module_name(path, config)
        names.add(name)
        if lora.rank and any(_matches(name, pattern) for pattern in lora.targets):
            module.adapt(rngs, lora.rank, lora.alpha / lora.rank)
        if lora.base in KINDS:
            module.quantise(lora.base)
    return names


def tower_name(path: tuple[str, ...], config: ModelConfig) -> str:
    """Returns transformers' name of a linear map of the vision tower, with "{}" in place of the
    number of the block or deepstack merger."""
    return "visual." + VISION_NAMES[config.vision.family][".".join(map(str, path))]


def tower_adapter(config: ModelConfig, names: set[str]) -> Callable:
    """Returns a function that gives every targeted linear map of a part of the vision tower
    its adapter. Patterns see its name without numbers, "visual.blocks.attn.qkv". Adds the
    names to `names`."""
    targets, rank = config.lora.targets, config.lora.rank

    def adapt(module: nnx.Module, part: str, rngs: nnx.Rngs) -> nnx.Module:
        for path, submodule in list(nnx.iter_modules(module)):
            if isinstance(submodule, Linear):
                name = tower_name((part, *path), config).replace(".{}", "")
                names.add(name)
                if rank and any(_matches(name, pattern) for pattern in targets):
                    submodule.adapt(rngs, rank, config.lora.alpha / rank)
        return module

    return adapt


def stacked_axes(path: tuple[str, ...]) -> int:
    """Counts the axes of layers, or of blocks of the tower, and of experts that come first in the
    leaf."""
    layers = path[0] == "layers" or path[:1] == ("vision",) and path[1] in STACKED
    return int(layers) + is_of_experts(path)


def _adapt_experts(experts: ExpertWeights, rngs: nnx.Rngs, config: ModelConfig) -> set[str]:
    lora, names = config.lora, {matrix: experts_name(config, matrix) for matrix in MATRICES}
    targeted = tuple(
        matrix
        for matrix, name in names.items()
        if lora.rank and any(_matches(name, pattern) for pattern in lora.targets)
    )
    if targeted:
        experts.adapt(rngs, targeted, lora.rank, lora.alpha / lora.rank)
    if lora.base in KINDS and lora.quantised_experts:
        experts.quantise(lora.base)
    return set(names.values())


def check_targets(config: ModelConfig, names: set[str]) -> None:
    """Raises InputError for a pattern that matches no linear map."""
    for pattern in config.lora.targets:
        if not any(_matches(name, pattern) for name in names):
            raise InputError(
                "lora.targets: a pattern that matches nothing",
                value=pattern,
                rule=f"the linear maps of a layer are {', '.join(sorted(names))}",
                fix='a name, its last part ("q_proj") or a pattern ("*_proj", "*"); those of '
                'experts by a pattern that says so ("*.experts.*"), of the tower ("visual.*")',
            )


def without(config: ModelConfig) -> ModelConfig:
    """Returns the config of the model with the adapters merged into plain weights."""
    return dataclasses.replace(config, lora=None)


def is_trained(path: tuple[str, ...], config: ModelConfig, head: str) -> bool:
    """Returns whether an optimizer moves this weight: with adapters only they, and a scalar head;
    none of a vision tower that is frozen."""
    if config.freeze_vision and path[0] == "vision":
        return False
    if config.lora is None:
        return True
    return path[-1] in LEAVES or (head == "scalar" and path in (("head",), ("head_bias",)))


def attach(model, plain: dict, key: jax.Array) -> dict:
    """Returns the weights of `model` from those of a plain model: fresh adapters, A [*in, r] random
    and B [r, *out] zero, and codes where the base is quantised.

    Takes the leaves of `plain` out of it, so that no second base is ever held.
    """
    config, shapes, layout = model.config, model.shapes(), flattened(model.shardings())
    base = flattened(plain)
    plain.clear()
    dtypes = {path: x.dtype for path, x in flattened(model.abstract()).items()}
    for path, x in base.items():  # a trained head is float32, whatever the base is
        if path in dtypes and x.dtype != dtypes[path]:
            base[path] = x.astype(dtypes[path])
    weights = _fresh(model)(key)
    for path, (_, axes) in shapes.items():
        if path[-1] == "scales":
            weight = base.pop(weight_of(path))
            codes = (*path[:-1], "codes")
            encode = jax.jit(
                functools.partial(quantise, kind=config.lora.base, axis=axes.index(None)),
                out_shardings=(layout[codes], layout[path]),
            )
            weights[codes], weights[path] = encode(weight)
    return nested(weights | base)


@functools.cache
def _fresh(model):
    """Returns the program that draws the adapters, compiled once."""
    layout = {path: x for path, x in flattened(model.shardings()).items() if path[-1] in LEAVES}

    def draw(key):
        params = flattened(model.create(key))
        return {path: params[path] for path in layout}

    return jax.jit(draw, out_shardings=layout)


def merge(model, params: dict) -> dict:
    """Returns the parameters of the model without adapters, with W + (alpha / rank) A B for each W.

    What was adapted or quantised is float32: bfloat16 would round a small update away.
    """
    lora, flat = model.config.lora, flattened(params)
    weights = {path: x for path, x in flat.items() if path[-1] not in (*LEAVES, "codes", "scales")}
    for path, x in flat.items():
        if path[-1] == "codes":
            weight = weight_of(path)
            scales = (*path[:-1], "scales")
            axis = model.shapes()[scales][1].index(None)
            weights[weight] = _decode(x, flat[scales], lora.base, axis, jnp.float32)
    for path, a in flat.items():
        if path[-1] == "lora_a":
            weight, b = weight_of(path), flat[(*path[:-1], "lora_b")]
            weights[weight] = _add(
                weights[weight], a, b, lora.alpha / lora.rank, stacked_axes(path)
            )
    return nested(weights)


_decode = jax.jit(dequantise, static_argnums=(2, 3, 4))


@functools.partial(jax.jit, static_argnums=4)
def _add(weight, a, b, boost, stacked: int):
    """Returns weight [L, *in, *out] + boost a [L, *in, r] b [L, r, *out], with the product in
    float32; `stacked` axes stand in place of L (`stacked_axes`)."""
    layers, rank = math.prod(b.shape[:stacked]), b.shape[stacked]
    low, high = a.reshape(layers, -1, rank), b.reshape(layers, rank, -1)
    product = jnp.einsum("lir,lro->lio", low, high, precision=jax.lax.Precision.HIGHEST)
    return weight.astype(jnp.float32) + boost * product.reshape(weight.shape)
