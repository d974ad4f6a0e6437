"""Parts of every layer: the declaration of a weight, linear maps, norms, rotary positions.

One declaration per weight gives its shape, init and logical axes (rljax.mesh maps those to
the mesh).

Axes: B rows, S tokens, D embed, H heads, E head_dim.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh

from rljax.mesh import gathered_over_fsdp
from rljax.models.adapters.quantise import dequantise, quantise


def weight(rngs: nnx.Rngs, config, shape, axes, *, init="normal") -> nnx.Param:
    """Creates one weight. `axes` are its logical axes; init: normal | ones | zeros."""
    dtype = jnp.dtype(config.weight_dtype)
    if init == "normal":
        value = config.init_std * jax.random.normal(rngs.params(), shape, jnp.float32)
        return nnx.Param(value.astype(dtype), axes=axes)
    value = jnp.ones(shape, dtype) if init == "ones" else jnp.zeros(shape, dtype)
    return nnx.Param(value, axes=axes)


def project(x: jax.Array, matrix: jax.Array, contract: int = 1, on_cpu: bool = False) -> jax.Array:
    """Returns x [B, S, ...] times `matrix` over its first `contract` axes, as one plain matrix
    product. `on_cpu`: the program is for one device that is a CPU.

    XLA on CPU runs the gradient of the [B*S, D] product 1.7 times as fast as that of the
    einsum over B and S.
    """
    rows, in_shape, out_shape = x.shape[:2], matrix.shape[:contract], matrix.shape[contract:]
    flat = x.reshape(math.prod(rows), math.prod(in_shape))
    matrix = matrix.astype(x.dtype).reshape(math.prod(in_shape), math.prod(out_shape))
    in_bfloat16 = on_cpu and x.dtype == jnp.bfloat16
    product = bfloat16_product(flat, matrix) if in_bfloat16 else flat @ matrix
    return product.reshape(*rows, *out_shape)


@jax.custom_vjp
def bfloat16_product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Returns x [N, in] times `matrix` [in, out], both bfloat16, summed in float32 and rounded
    once, as x @ matrix is.

    For one CPU device. XLA hands a product to a library that uses a processor's instructions for
    bfloat16 (AMX: 3 to 5 times the FLOP/s of float32) only where its result is float32 and its
    operands lie row by row; all others it converts to float32 first. Hence a gradient of its own,
    whose products are of this kind, too.
    """
    return _summed_wide(x, matrix, 0).astype(x.dtype)


def _summed_wide(x: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
    """Returns x [N, in] times `matrix`, summed over `axis` of the matrix: float32."""
    sums = (((1,), (axis,)), ((), ()))
    x, matrix = _by_rows(x), _by_rows(matrix)
    # XLA would fold a transposition behind the product into it, and then refuses to run it.
    return _by_rows(jax.lax.dot_general(x, matrix, sums, preferred_element_type=jnp.float32))


def _by_rows(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(major_to_minor=(0, 1)))


def _of_product(residuals, cotangent):
    x, matrix = residuals
    gradients = _summed_wide(cotangent, matrix, 1), _summed_wide(x.T, cotangent, 0)
    return tuple(gradient.astype(x.dtype) for gradient in gradients)


bfloat16_product.defvjp(lambda x, matrix: (bfloat16_product(x, matrix), (x, matrix)), _of_product)


def project_transposed(x: jax.Array, matrix: jax.Array, **how) -> jax.Array:
    """Returns x [..., in] times the transpose of `matrix` [out, in]: [..., out].

    For a few rows on CPU, where the library packs the second operand anew at every call and reads
    the first as it is: with the weights first a product of 32 rows is 1.2 to 1.4 times as fast.
    """
    flat = x.reshape(-1, matrix.shape[1])
    if x.dtype == matrix.dtype == jnp.bfloat16 and not how:  # see bfloat16_product
        product = _summed_wide(matrix, flat, 1).astype(x.dtype)
    else:
        product = jax.lax.dot_general(matrix, flat, (((1,), (1,)), ((), ())), **how)
    # Without it XLA swaps the operands back.
    product = jax.lax.optimization_barrier(product)
    return product.T.reshape(*x.shape[:-1], matrix.shape[0])


def add_last(x: jax.Array, value: jax.Array) -> jax.Array:
    """Returns x + value, which is broadcast over the leading axes of x: [..., *value.shape]."""
    return x + jnp.expand_dims(value.astype(x.dtype), tuple(range(x.ndim - value.ndim)))


class Linear(nnx.Module):
    """x W (+ b) (+ (alpha / rank) x A B): W [*inside, *outside], x [B, S, *inside] -> [B, S,
    *outside]. A frozen W may be held as codes and scales (rljax.models.adapters.quantise)."""

    def __init__(self, rngs, config, inside, outside, axes, *, bias: bool = False):
        self.contract, self.axes = len(inside), axes
        self.shape, self.biased = (*inside, *outside), bias
        self.weight = weight(rngs, config, self.shape, axes)
        if bias:
            self.bias = weight(rngs, config, outside, axes[self.contract :], init="zeros")
        self.codec, self.boost = "", 0.0
        self.transposed = False  # see `transpose`
        self.on_cpu = False  # see `project`
        self.gathered_on: Mesh | None = None  # see `gather_weights`

    def adapt(self, rngs, rank: int, boost: float) -> None:
        """Adds A, uniform in +-1/sqrt(fan in), and B, zero: at first the map is unchanged."""
        fan_in = math.prod(self.shape[: self.contract])
        a = (*self.shape[: self.contract], rank)
        draw = jax.random.uniform(rngs.params(), a, jnp.float32, -1, 1) / math.sqrt(fan_in)
        self.lora_a = nnx.Param(draw, axes=(*self.axes[: self.contract], "rank"))
        b = jnp.zeros((rank, *self.shape[self.contract :]), jnp.float32)
        self.lora_b = nnx.Param(b, axes=("rank", *self.axes[self.contract :]))
        self.boost = boost

    def quantise(self, codec: str) -> None:
        """Holds the weight as codes; blocks run along the last axis that is summed over."""
        axis = self.contract - 1
        codes, scales = quantise(self.weight[...], codec, axis)
        self.codes = nnx.Param(codes, axes=self.axes)
        scale_axes = tuple(None if i == axis else a for i, a in enumerate(self.axes))
        self.scales = nnx.Param(scales, axes=scale_axes)
        del self.weight
        self.codec = codec

    def transpose(self) -> None:
        """Holds the weight as [out, in], for `project_transposed`."""
        flat = self.weight[...].reshape(math.prod(self.shape[: self.contract]), -1)
        self.weight, self.transposed = nnx.Param(flat.T), True

    def matrix(self, dtype) -> jax.Array:
        """Returns the whole map as one weight [*inside, *outside], its adapter included."""
        merged = self._base(jnp.float32 if self.boost else dtype)
        if self.boost:
            a, b = (x[...].astype(jnp.float32) for x in (self.lora_a, self.lora_b))
            merged = merged + self.boost * jnp.tensordot(a, b, axes=1)
        return merged.astype(dtype)

    def _base(self, dtype) -> jax.Array:
        """Returns W, without its adapter."""
        if self.codec:
            codes, scales = self._whole(self.codes), self._whole(self.scales)
            return dequantise(codes, scales, self.codec, self.contract - 1, dtype)
        return self._whole(self.weight, dtype)

    def _whole(self, param: nnx.Param, dtype=None) -> jax.Array:
        """Returns the array in `dtype`, gathered over fsdp where the products want it so."""
        x = param[...] if dtype is None else param[...].astype(dtype)
        if self.gathered_on is None:
            return x
        return gathered_over_fsdp(x, param.get_metadata()["axes"], self.gathered_on)

    def __call__(self, x: jax.Array) -> jax.Array:
        # Weights are gathered again in the backward pass, or a layer would keep them whole.
        multiply = self._multiply
        if self.gathered_on is not None:
            multiply = jax.checkpoint(multiply, prevent_cse=False)
        y = multiply(x)
        return add_last(y, self.bias[...]) if self.biased else y

    def _multiply(self, x: jax.Array) -> jax.Array:
        if self.transposed:
            flat = x.reshape(*x.shape[:2], -1)
            y = project_transposed(flat, self.weight[...].astype(x.dtype))
            y = y.reshape(*x.shape[:2], *self.shape[self.contract :])
        else:
            y = project(x, self._base(x.dtype), self.contract, self.on_cpu)
        if self.boost:
            low = project(x, self._whole(self.lora_a, x.dtype), self.contract, self.on_cpu)
            update = project(low, self._whole(self.lora_b, x.dtype), on_cpu=self.on_cpu)
            y = y + update * jnp.asarray(self.boost, y.dtype)
        return y


def gather_weights(block: nnx.Module, mesh: Mesh) -> nnx.Module:
    """Returns the block with linear maps that gather their weights over fsdp, in the dtype of the
    product, before they multiply: for passes over whole rows.

    Left to itself XLA splits the product by what fsdp splits, the embed axis, and sends pieces of
    the weight around between products whose inner size is D / fsdp: on a TPU, too short a one.
    """
    if mesh.shape["fsdp"] > 1:
        for _, module in nnx.iter_modules(block):
            if isinstance(module, Linear):
                module.gathered_on = mesh
    return block


def on_one_cpu(decoder: nnx.Module, mesh: Mesh) -> nnx.Module:
    """Returns the decoder with linear maps that know whether the mesh is one CPU device
    (see `project`)."""
    if mesh.size == 1 and mesh.devices.flat[0].platform == "cpu":
        for _, module in nnx.iter_modules(decoder):
            if isinstance(module, Linear):
                module.on_cpu = True
    return decoder


def transpose_weights(block: nnx.Module) -> nnx.Module:
    """Returns the block with linear maps that multiply by `project_transposed`."""
    for path, module in nnx.iter_modules(block):
        # Decoding multiplies parts of kv_up (LatentAttention), and codes are read as they are.
        if isinstance(module, Linear) and not module.codec and path[-1] != "kv_up":
            module.transpose()
    return block


def root_mean_squared(x: jax.Array, eps: float, over=-1, share: float = 1.0) -> jax.Array:
    """Returns x / sqrt(mean(x^2) + eps) in float32 and in the shape of x, the mean over the axes
    `over`, of whose numbers the fraction `share` is not padding."""
    x = x.astype(jnp.float32)
    mean = jnp.mean(x * x, axis=over, keepdims=True)
    return x * jax.lax.rsqrt((mean if share == 1 else mean / share) + eps)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * (scale + offset), statistics in float32 (arXiv 1910.07467).

    The mean is over the last axis of x, or over as many as `size` has numbers; of `real` of them
    where the others are padding."""

    def __init__(self, rngs, config, size, axis="norm", real: int = 0):
        self.eps, self.offset = config.norm_eps, config.norm_offset
        size, axes = (size, axis) if isinstance(size, tuple) else ((size,), (axis,))
        self.over = tuple(range(-len(size), 0))
        self.share = real / math.prod(size) if real else 1.0
        self.scale = weight(rngs, config, size, axes, init="zeros" if self.offset else "ones")

    def __call__(self, x: jax.Array) -> jax.Array:
        y = root_mean_squared(x, self.eps, self.over, self.share)
        scale = jnp.expand_dims(self.scale[...], tuple(range(x.ndim - len(self.over))))
        if self.offset:  # Gemma: the product in float32, rounded once
            return (y * (scale.astype(jnp.float32) + self.offset)).astype(x.dtype)
        return y.astype(x.dtype) * scale.astype(x.dtype)


def activate(x: jax.Array, name: str) -> jax.Array:
    """Applies the activation of this name, silu, gelu_tanh or gelu, to x of any shape."""
    if name == "silu":
        return jax.nn.silu(x)
    return jax.nn.gelu(x, approximate=name == "gelu_tanh")


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array, interleaved=False) -> jax.Array:
    """Rotates the first 2 P elements of x [B, S, H, E], in pairs (i, i + P), by angles whose cos
    and sin are [B, S, P].

    `interleaved`: the pairs are neighbours (2 i, 2 i + 1); they come out as halves, which moves the
    elements of queries and keys alike and so changes no product.
    """
    pairs = cos.shape[-1]
    rotated, rest = x[..., : 2 * pairs].astype(jnp.float32), x[..., 2 * pairs :]
    if interleaved:
        a, b = rotated[..., ::2], rotated[..., 1::2]
    else:
        a, b = jnp.split(rotated, 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated
