"""Counts the FLOPs of a traced program: its products, with loops multiplied out, and kernels by
their own declaration.

Walks a jaxpr. Numbers are of all devices together, as the program is written: what a layout
computes twice is not counted twice.

Matrix products and convolutions count 2 FLOPs per multiply-add. A Pallas call counts by its
cost_estimate, because it hides its work from the compiler's own count; `mxu_flops` in its metadata
gives the FLOPs of all passes of its products, where they are more than one. A Pallas call without a
cost_estimate counts as its body times its grid. A loop that ends by its data takes `trips`
iterations, and a loop around it takes one; inside a kernel it takes one iteration, and loops around
the kernel are counted as usual. Of a conditional the cheapest branch counts, in a kernel the most
expensive one.
"""

import dataclasses
import math
import operator

import jax
import numpy as np
from jax.extend import core

# Number of bfloat16 passes that a TPU makes for a product, by its precision: of two float32 inputs,
# and of a float32 input with a narrower one, of which only the float32 input is split.
_PASSES = {"HIGHEST": (6, 3), "HIGH": (3, 2)}


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product: shapes and dtype of what is multiplied, dimension numbers as
    jax.lax.dot_general takes them, and the dtype of the result."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    numbers: tuple
    dtype: str
    out_elements: int
    out_dtype: str

    @property
    def flops(self) -> float:
        """FLOPs of the product, two for each multiply-add."""
        return 2.0 * self.out_elements * math.prod(self.left[i] for i in self.numbers[0][0])

    @property
    def bytes(self) -> int:
        """Bytes of both operands and of the result."""
        operands = math.prod(self.left) + math.prod(self.right)
        result_bytes = self.out_elements * np.dtype(self.out_dtype).itemsize
        return operands * np.dtype(self.dtype).itemsize + result_bytes


@dataclasses.dataclass(frozen=True)
class Work:
    """`flops` as written; `passes`: the same where a float32 product counts as often as its
    precision makes a TPU multiply; `kernel_flops`, `kernel_bytes`: what Pallas calls declare;
    `products`: how often each matrix product is made."""

    flops: float = 0.0
    passes: float = 0.0
    kernel_flops: float = 0.0
    kernel_bytes: float = 0.0
    products: dict[Product, float] = dataclasses.field(default_factory=dict)

    def __add__(self, other: "Work") -> "Work":
        products = dict(self.products)
        for product, count in other.products.items():
            products[product] = products.get(product, 0.0) + count
        return Work(*map(operator.add, self._numbers, other._numbers), products)

    def __mul__(self, times: float) -> "Work":
        products = {product: count * times for product, count in self.products.items()}
        return Work(*(x * times for x in self._numbers), products)

    @property
    def _numbers(self) -> tuple[float, ...]:
        return self.flops, self.passes, self.kernel_flops, self.kernel_bytes


def work(jaxpr, *, trips: int = 1, platform: str = "tpu") -> Work:
    """Returns the FLOPs of a closed jaxpr (`jitted.trace(...).jaxpr`) lowered for `platform`."""
    return _walk(_open(jaxpr), trips, platform, False)


def _open(jaxpr):
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def _inner(eqn) -> list:
    return list(core.jaxprs_in_params(eqn.params))


def _walk(jaxpr, trips: int, platform: str, in_kernel: bool) -> Work:
    total, branch_indices = Work(), {}
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name

        def deeper(j):
            return _walk(j, trips, platform, in_kernel)

        if name == "dot_general":
            total += _dot(eqn)
        elif name == "conv_general_dilated":
            total += _convolution(eqn)
        elif name in ("ragged_dot", "ragged_dot_general"):
            total += _ragged(eqn)
        elif name == "scan":
            total += deeper(_open(eqn.params["jaxpr"])) * eqn.params["length"]
        elif name == "while":
            body = _open(eqn.params["body_jaxpr"])
            total += deeper(body) * _trips_of(eqn, body, trips)
        elif name == "platform_index":
            branch_indices[eqn.outvars[0]] = _branch(eqn.params["platforms"], platform)
        elif name == "cond" and eqn.params.get("branches_platforms"):
            index = _branch(eqn.params["branches_platforms"], platform)
            total += deeper(_open(eqn.params["branches"][index]))
        elif name == "cond":
            total += _conditional(eqn, branch_indices, deeper, in_kernel)
        elif name == "pallas_call":
            total += _kernel(eqn, platform)
        elif name == "shard_map":
            total += sum((deeper(j) for j in _inner(eqn)), Work()) * _manual_devices(eqn)
        elif name.startswith("custom_vjp_call") or name.startswith("custom_jvp_call"):
            total += deeper(_inner(eqn)[0]) if _inner(eqn) else Work()
        else:
            total += sum((deeper(j) for j in _inner(eqn)), Work())
    return total


def _passes(eqn) -> int:
    """Passes of a product; one where both operands are narrower than float32."""
    wide_inputs = sum(v.aval.dtype.itemsize >= 4 for v in eqn.invars[:2])
    precision = eqn.params.get("precision")
    names = precision if isinstance(precision, tuple) else (precision,)
    names = (getattr(name, "name", str(name)) for name in names)
    both_wide, one_wide = max(_PASSES.get(name, (1, 1)) for name in names)
    return (1, one_wide, both_wide)[wide_inputs]


def _dot(eqn) -> Work:
    (left, right), out = (v.aval for v in eqn.invars[:2]), eqn.outvars[0].aval
    dtype = str(np.promote_types(left.dtype, right.dtype))
    shapes = left.shape, right.shape, eqn.params["dimension_numbers"]
    product = Product(*shapes, dtype, math.prod(out.shape), str(out.dtype))
    return Work(product.flops, product.flops * _passes(eqn), products={product: 1.0})


def _ragged(eqn) -> Work:
    """FLOPs of a product of [T, K] by [G, K, N], each row by one of the G matrices: 2 T K N."""
    left, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    flops = 2.0 * math.prod(out[-2:]) * (left[-1] if len(out) == 2 else left[0])
    return Work(flops, flops * _passes(eqn))


def _convolution(eqn) -> Work:
    kernel, out = eqn.invars[1].aval, eqn.outvars[0].aval
    features = eqn.params["dimension_numbers"].rhs_spec[0]
    flops = 2.0 * math.prod(out.shape) * math.prod(kernel.shape) / kernel.shape[features]
    return Work(flops, flops * _passes(eqn))


def _branch(platforms, platform: str) -> int:
    """The branch of platform_dependent that is lowered; the one for None is the default."""
    default = 0
    for i, names in enumerate(platforms):
        if names is None:
            default = i
        elif platform in names or (platform == "gpu" and "cuda" in names):
            return i
    return default


def _conditional(eqn, branch_indices: dict, deeper, in_kernel: bool) -> Work:
    branches, index = eqn.params["branches"], eqn.invars[0]
    known = int(index.val) if isinstance(index, core.Literal) else branch_indices.get(index)
    if known is not None:
        return deeper(_open(branches[known]))
    pick = max if in_kernel else min
    return pick((deeper(_open(b)) for b in branches), key=lambda w: w.flops)


def _is_open(eqn) -> bool:
    """Returns whether a while loop ends by its data, and not at a fixed count."""
    condition = _open(eqn.params["cond_jaxpr"])
    [last] = condition.eqns[-1:] or [None]
    compares = last is not None and last.primitive.name in ("lt", "gt")
    return not (compares and len(condition.eqns) == 1)


def _has_open(jaxpr) -> bool:
    return any(
        (eqn.primitive.name == "while" and _is_open(eqn)) or any(_has_open(j) for j in _inner(eqn))
        for eqn in jaxpr.eqns
        if eqn.primitive.name != "pallas_call"
    )


def _trips_of(eqn, body, trips: int) -> int:
    if not _is_open(eqn):  # fori_loop: its bounds, where they are constants
        bounds = [v.val for v in eqn.invars if isinstance(v, core.Literal) and not v.aval.shape]
        return max([int(b) for b in bounds if np.issubdtype(type(b), np.integer)] or [1])
    return 1 if _has_open(body) else trips


def _manual_devices(eqn) -> int:
    """The number of devices that run the body of a shard_map on parts of their own."""
    sizes = dict(eqn.params["mesh"].shape)
    manual = eqn.params.get("manual_axes", sizes)
    return math.prod(sizes[a] for a in manual)


def _kernel(eqn, platform: str) -> Work:
    stated = eqn.params.get("cost_estimate")
    if stated is not None:
        flops, moved_bytes = float(stated.flops), float(stated.bytes_accessed)
        passes = float(dict(eqn.params.get("metadata") or {}).get("mxu_flops", flops))
        return Work(flops, passes, flops, moved_bytes)
    grid = eqn.params["grid_mapping"].grid
    steps = math.prod(int(n) for n in grid if isinstance(n, (int, np.integer)))
    body = _walk(_open(eqn.params["jaxpr"]), 1, platform, True) * steps
    moved_bytes = sum(v.aval.size * v.aval.dtype.itemsize for v in (*eqn.invars, *eqn.outvars))
    return Work(body.flops, body.passes, body.flops, float(moved_bytes))


def flops_of(function, *arguments, platform: str = "tpu") -> Work:
    """Returns the FLOPs of a jitted function at these arguments."""
    return work(jax.jit(function).trace(*arguments).jaxpr, platform=platform)
