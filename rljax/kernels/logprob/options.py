"""Shared by the implementations of the fused log-prob: options, results, and formulas on a tile
of logits.

Axes: N rows, D embed, V vocabulary entries of the head (or of one shard of it).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

CHUNK_LOGITS = 1 << 23  # held at once where tokens are walked in plain JAX: 32 MiB of float32


@dataclasses.dataclass(frozen=True)
class LogprobOptions:
    """The options that are fixed when a program is compiled."""

    soft_cap: float = 0.0  # c of c tanh(z / c); 0 = none
    vocab_first: bool = False  # the head is an embedding [V, D], else [D, V]
    entropy: bool = True  # computes `expected`
    greedy: bool = False  # computes `best`
    precision: jax.lax.Precision | None = None  # of products with a float32 input
    head_dtype: str = ""  # in which products read the head; "" = its own
    frozen_head: bool = False  # the gradient of the head is not computed
    cores: int = 1  # of a device that share the rows of one TPU kernel
    entries: int = 0  # of the head, from its first on, that are the vocabulary; 0 = all


class Statistics(NamedTuple):
    """Five arrays [N] that describe rows of logits z: logprob = target - log_sum, entropy = log_sum
    - expected, logsumexp = top + log_sum, all in nats.

    All but `top` are relative to it: differences of numbers near 1e4 lose their digits in float32.
    """

    top: jax.Array  # max_v z; 0 where that is not finite
    log_sum: jax.Array  # log sum_v exp(z - top)
    target: jax.Array  # z_y - top; 0 where y is not in this part of the vocabulary
    expected: jax.Array | None  # sum_v p (z - top), p = softmax(z) over this part of it
    best: jax.Array | None  # int32: the first token with the largest logit


def wide_dtype(dtype) -> jnp.dtype:
    """Returns the dtype in which logits of this dtype are accumulated and kept."""
    return jnp.promote_types(dtype, jnp.float32)


def product_dtypes(hidden_dtype, head_dtype, float32_head: bool, rounded: str = ""):
    """Returns (dtype of hidden, dtype of the head, precision) of the product that makes the logits.

    With `float32_head` each input keeps all its digits. Products of two bfloat16 numbers, and of
    two float16 ones, are exact in float32, where they are summed: such a pair needs no precision.
    Where one is float32, full precision splits that one alone into three bfloat16 parts on a TPU,
    where two take six products. `rounded` is a dtype that the head is rounded to first. Without
    `float32_head` both are what hidden is.
    """
    head_dtype = jnp.dtype(rounded or head_dtype)
    if not float32_head:
        return hidden_dtype, hidden_dtype, None
    if hidden_dtype == head_dtype and head_dtype in (jnp.bfloat16, jnp.float16):
        return hidden_dtype, head_dtype, None
    mixable = (jnp.bfloat16, jnp.float32)
    if hidden_dtype not in mixable or head_dtype not in mixable:
        hidden_dtype = head_dtype = jnp.promote_types(wide_dtype(hidden_dtype), head_dtype)
    return hidden_dtype, head_dtype, jax.lax.Precision.HIGHEST


def head_product(hidden, head, float32_head: bool, rounded: str = ""):
    """Returns (hidden, head, precision), cast as `product_dtypes` says."""
    *dtypes, precision = product_dtypes(hidden.dtype, head.dtype, float32_head, rounded)
    return hidden.astype(dtypes[0]), head.astype(dtypes[1]), precision


def vocab_size_of(head: jax.Array, options: LogprobOptions) -> int:
    """Returns V of the head [D, V] or [V, D], or of this part of it."""
    return head.shape[0 if options.vocab_first else 1]


def gradient_dtype(hidden: jax.Array, head: jax.Array) -> jnp.dtype:
    """Returns the dtype in which a gradient at the logits is multiplied with hidden [N, D] and with
    the head: as exact as the logits were."""
    return jnp.promote_types(hidden.dtype, head.dtype)


def hidden_gradient(dz: jax.Array, head: jax.Array, options: LogprobOptions) -> jax.Array:
    """Returns dz [N, V] times the head, transposed: [N, D], in float32 or wider."""
    layout = "nv,vd->nd" if options.vocab_first else "nv,dv->nd"
    dtype = wide_dtype(dz.dtype)
    return jnp.einsum(layout, dz, head, preferred_element_type=dtype, precision=options.precision)


def head_gradient(dz: jax.Array, hidden: jax.Array, options: LogprobOptions) -> jax.Array:
    """Returns hidden [N, D], transposed, times dz [N, V]: in the shape of the head, in
    float32 or wider."""
    layout = "nv,nd->vd" if options.vocab_first else "nv,nd->dv"
    dtype = wide_dtype(dz.dtype)
    return jnp.einsum(layout, dz, hidden, preferred_element_type=dtype, precision=options.precision)


def capped(products: jax.Array, soft_cap: float) -> jax.Array:
    """c tanh(x / c), in the shape of x; x where c = 0."""
    return soft_cap * jnp.tanh(products / soft_cap) if soft_cap else products


def raw_logits(hidden: jax.Array, head: jax.Array, options: LogprobOptions) -> jax.Array:
    """Returns hidden [..., D] times the head [D, V] or [V, D]: [..., V], accumulated and kept in
    float32 or wider."""
    layout = "...d,vd->...v" if options.vocab_first else "...d,dv->...v"
    return jnp.einsum(
        layout,
        hidden,
        head,
        preferred_element_type=wide_dtype(gradient_dtype(hidden, head)),
        precision=options.precision,
    )


def logits(hidden: jax.Array, head: jax.Array, scale, options: LogprobOptions) -> jax.Array:
    """Returns z = cap(hidden head) scale of hidden [..., D]: [..., V]."""
    return capped(raw_logits(hidden, head, options), options.soft_cap) * scale


def tile_statistics(z: jax.Array, targets: jax.Array, options: LogprobOptions) -> Statistics:
    """Returns Statistics of whole rows of logits z [N, V] at targets [N]."""
    top = jnp.max(z, axis=-1)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    shifted = z - top[:, None]
    e = jnp.exp(shifted)
    total = jnp.sum(e, axis=-1)
    expected = None
    if options.entropy:  # a token of probability 0 may have z = -inf; 0 * inf must not become NaN
        expected = jnp.sum(jnp.where(e > 0, e * shifted, 0.0), axis=-1) / total
    best = jnp.argmax(z, axis=-1).astype(jnp.int32) if options.greedy else None
    return Statistics(top, jnp.log(total), picked(shifted, targets), expected, best)


def picked(z: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns z [N, V] at targets [N]; 0 where they are not in [0, V)."""
    vocab = z.shape[-1]
    values = jnp.take_along_axis(z, jnp.clip(targets, 0, vocab - 1)[:, None], axis=-1)[:, 0]
    return jnp.where((targets >= 0) & (targets < vocab), values, 0.0)


def merged(parts: Statistics, inside: jax.Array, largest, total) -> Statistics:
    """Merges statistics of disjoint parts of the vocabulary, whose `best` counts from one common 0.

    `inside`, in the shape of the statistics, is whether the target lies in the part. `largest` and
    `total` reduce over the parts and keep the axis: a maximum and a sum, over an axis of the arrays
    or of the mesh. They are called one after the other: collectives that do not wait for each other
    can meet out of order.
    """
    # A part with nothing but -inf has top 0, and must not be the largest.
    empty = jnp.isneginf(parts.log_sum)
    tops = jnp.where(empty, -jnp.inf, parts.top)
    highest = largest(tops)
    top = jnp.where(jnp.isfinite(highest), highest, 0.0)
    shift = parts.top - top
    share = jnp.where(empty, 0.0, jnp.exp(parts.log_sum + shift))
    sums = [share, jnp.where(inside, parts.target + shift, 0.0)]
    if parts.expected is not None:
        sums.append(jnp.where(share > 0, share * (parts.expected + shift), 0.0))
    best = None
    if parts.best is not None:  # the least of those that have the largest logit
        no_token = jnp.iinfo(jnp.int32).max
        best = -largest(-jnp.where(tops == highest, parts.best, no_token))
        sums, best = jax.lax.optimization_barrier((sums, best))
    mass, target, *expected = total(jnp.stack(sums))
    expected = expected[0] / mass if expected else None
    return Statistics(top, jnp.log(mass), target, expected, best)


def merged_tiles(parts: Statistics, inside: jax.Array) -> Statistics:
    """Merges statistics over the leading axis of parts [T, N] and inside [T, N],
    as `merged` does."""
    stats = merged(
        parts,
        inside,
        lambda x: jnp.max(x, axis=0, keepdims=True),
        lambda x: jnp.sum(x, axis=1, keepdims=True),
    )
    return jax.tree.map(lambda x: x[0], stats)


def logit_gradient(
    raw: jax.Array, targets: jax.Array, scale, top, log_sum, a, b, c, options: LogprobOptions
) -> jax.Array:
    """Returns d loss / d raw logits [N, V]: (a 1[v = y] + p (b + c q)) scale cap', with the
    softmax p = e^q."""
    slope = scale
    if options.soft_cap:  # d (c tanh(x / c)) / dx = 1 - tanh^2
        tanh = jnp.tanh(raw / options.soft_cap)
        z, slope = options.soft_cap * tanh * scale, (1 - tanh * tanh) * scale
    else:
        z = raw * scale
    a, b, c = (x[:, None] for x in (a, b, c))
    q = (z - top[:, None]) - log_sum[:, None]
    p = jnp.exp(q)
    through_softmax = p * (b + c * q) if options.entropy else p * b
    token_id = jax.lax.broadcasted_iota(jnp.int32, (1, raw.shape[1]), 1)
    at_target = jnp.where(token_id == targets[:, None], a, 0.0)
    # A token of probability 0 may have q = -inf; 0 * inf must not become NaN.
    return (jnp.where(p > 0, through_softmax, 0.0) + at_target) * slope
