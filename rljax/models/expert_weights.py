"""The matrices of a layer's experts: as they are, or as codes of a frozen base, with low-rank
adapters of every expert.

Axes: X experts, D embed, F hidden size of an expert, r rank.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from rljax.models.adapters.quantise import dequantise, quantise
from rljax.models.layers import weight

MATRICES = ("gate", "up", "down")
_INSIDE = 1  # the axis of a matrix [X, in, out] that is summed over


class ExpertWeights(nnx.Module):
    """gate and up [X, D, F], down [X, F, D]: W + (alpha / rank) A B of each expert."""

    def __init__(self, rngs: nnx.Rngs, config):
        d, x, f = config.embed, config.experts.count, config.experts.mlp
        self.gate = weight(rngs, config, (x, d, f), ("experts", "embed", "mlp"))
        self.up = weight(rngs, config, (x, d, f), ("experts", "embed", "mlp"))
        self.down = weight(rngs, config, (x, f, d), ("experts", "mlp", "embed"))
        self.codec, self.adapted, self.boost = "", (), 0.0

    def adapt(self, rngs, names: tuple[str, ...], rank: int, boost: float) -> None:
        """Adds A [X, in, r], uniform in +-1/sqrt(in), and B [X, r, out], zero, to these matrices:
        at first they are unchanged."""
        adapters = {}
        for name in names:
            matrix = getattr(self, name)
            (x, in_size, out_size), axes = matrix[...].shape, matrix.get_metadata()["axes"]
            draw = jax.random.uniform(rngs.params(), (x, in_size, rank), jnp.float32, -1, 1)
            a, b = draw / math.sqrt(in_size), jnp.zeros((x, rank, out_size), jnp.float32)
            adapters[name] = nnx.Dict(
                lora_a=nnx.Param(a, axes=(*axes[:2], "rank")),
                lora_b=nnx.Param(b, axes=(axes[0], "rank", axes[2])),
            )
        self.adapters, self.adapted, self.boost = nnx.Dict(adapters), names, boost

    def quantise(self, codec: str) -> None:
        """Holds the matrices as codes; blocks run along the axis that is summed over."""
        quantised = {}
        for name in MATRICES:
            matrix = getattr(self, name)
            codes, scales = quantise(matrix[...], codec, _INSIDE)
            axes = matrix.get_metadata()["axes"]
            quantised[name] = nnx.Dict(
                codes=nnx.Param(codes, axes=axes),
                scales=nnx.Param(scales, axes=(axes[0], None, axes[2])),
            )
            delattr(self, name)
        self.quantised, self.codec = nnx.Dict(quantised), codec

    def matrices(self, dtype) -> dict[str, jax.Array]:
        """Returns {name: matrix} in the shapes above and, of those with an adapter, NAME_lora_a
        [X, in, r] and NAME_lora_b [X, r, out], which has the factor alpha / rank."""
        matrices = {}
        for name in MATRICES:
            if self.codec:
                codes, scales = (self.quantised[name][kind][...] for kind in ("codes", "scales"))
                matrices[name] = dequantise(codes, scales, self.codec, _INSIDE, dtype)
            else:
                matrices[name] = getattr(self, name)[...].astype(dtype)
        for name in self.adapted:
            adapter = self.adapters[name]
            matrices[f"{name}_lora_a"] = adapter["lora_a"][...].astype(dtype)
            matrices[f"{name}_lora_b"] = (self.boost * adapter["lora_b"][...]).astype(dtype)
        return matrices


def spread(inside: str | None) -> dict[str, P]:
    """Returns the layout of the experts' arrays on the mesh where every device runs its own
    experts; D is split over the axis `inside`, if any."""
    layout = {"gate": P("expert", inside, "tensor"), "down": P("expert", "tensor", inside)}
    layout["up"] = layout["gate"]
    for name in MATRICES:
        _, in_axis, out_axis = layout[name]
        layout |= {
            f"{name}_lora_a": P("expert", in_axis),
            f"{name}_lora_b": P("expert", None, out_axis),
        }
    biases = {"gate_bias": P("expert", "tensor"), "down_bias": P("expert", inside)}
    return layout | biases | {"up_bias": biases["gate_bias"]}


def not_split(inside: str | None) -> dict[str, set[str]]:
    """Returns, for arrays of the experts that `spread` leaves whole along a mesh axis by which the
    product they meet in is split, {array: these mesh axes}."""
    inside_axes, missing = {inside} - {None}, {}
    for name, in_axes, out_axes in (
        ("gate", inside_axes, {"tensor"}),
        ("up", inside_axes, {"tensor"}),
        ("down", {"tensor"}, inside_axes),
    ):
        missing |= {f"{name}_lora_a": out_axes, f"{name}_lora_b": in_axes}
    return missing | {"gate_bias": inside_axes, "up_bias": inside_axes}
