"""The path of attention for TPU: JAX's splash attention, and two calls of it where rows share
prefixes, merged by log-sum-exp.

Axes: B rows, S tokens, N blocks (W of each packed row), T tokens of a block, H heads, K kv heads, E
head size of queries and keys, F of values.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from rljax.models.attention_paths import (
    LANES,
    MASKED,
    PackedPrefix,
    View,
    by_block,
    columns,
    columns_transposed,
    looked_for,
    pad_axis,
    prefix_blocks,
)
from rljax.models.attention_xla import xla
from rljax.models.remat import ATTENTION, named_attention

# Tokens are padded to whole lanes, and above one block of the kernel to whole ones.
KERNEL_BLOCK = 512


@dataclasses.dataclass(frozen=True)
class Rule:
    window: int
    soft_cap: float
    interpret: bool  # run the kernel's text off TPU, slowly


def splash(
    q,
    k,
    v,
    segments,
    sinks,
    prefix: PackedPrefix | None,
    *,
    scale,
    window,
    soft_cap,
    interpret=False,
) -> jax.Array:
    """Runs splash attention, which skips the blocks that the causal and window mask rule out;
    arguments and result are as in attention_paths.reference: q [B, S, H, E] -> [B, S, H, F].
    Padding is segment 0, after every real column.

    The kernel's window goes by columns, a prefix's by positions: where a sequence can be longer
    than the window, packed rows go the way of XLA.
    """
    if prefix is not None and 0 < window < 2 * (q.shape[1] // prefix.blocks.shape[1]):
        options = dict(scale=scale, window=window, soft_cap=soft_cap)
        return xla(q, k, v, segments, sinks, prefix, **options)
    rule = Rule(window, soft_cap, interpret)
    # The kernel has no scale of its own.
    q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    if prefix is not None:
        return _merged(rule, q, k, v, sinks, segments, prefix)
    tokens, heads = q.shape[1:3]
    run, width = _kernel(rule, tokens, heads, causal=True, residual_checkpoint_name=ATTENTION)
    q, k, v = (by_block(x, 1, width) for x in (q, k, v))
    ids = _segment_ids(*[pad_axis(segments, 1, width)] * 2)
    output = jax.vmap(run, in_axes=(0, 0, 0, 0, None))(q, k, v, ids, sinks)
    return output.swapaxes(1, 2)[:, :tokens]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _merged(rule: Rule, q, k, v, sinks, segments, prefix):
    return _merged_forward(rule, q, k, v, sinks, segments, prefix)[0]


def _merged_forward(rule: Rule, q, k, v, sinks, segments, prefix):
    """Computes the output as the sum of the parts' outputs, each times exp(its log-sum-exp - that
    of all). A token that continues nothing has a log-sum-exp like MASKED there."""
    heads, parts = _parts(rule, q, k, v, sinks, segments, prefix)
    outs, sums = [], []
    for run, (keys, values, ids, sink) in parts:
        mapped = jax.vmap(run, in_axes=(0, 0, 0, 0, None))
        output, (log_sum,) = mapped(heads, keys, values, ids, sink)
        outs.append(output.astype(jnp.float32))
        sums.append(log_sum)
    log_sum = jnp.logaddexp(*sums)
    shares = [jnp.exp(part_sum - log_sum)[..., None] for part_sum in sums]
    output = sum(share * output for share, output in zip(shares, outs, strict=True)).astype(q.dtype)
    output, log_sum = named_attention(_by_tokens(output, q.shape[:2]), log_sum)
    return output, (q, k, v, sinks, segments, prefix, output, log_sum)


def _merged_backward(rule: Rule, residuals, gradient):
    """Runs the kernel's own backward pass part by part: the gradients of the scores need only the
    output and the log-sum-exp of the whole softmax."""
    q, k, v, sinks, segments, prefix, output, log_sum = residuals
    heads, parts = _parts(rule, q, k, v, sinks, segments, prefix)
    blocks, width = prefix.blocks.shape[1], heads.shape[2]
    output, gradient = (by_block(x, blocks, width) for x in (output, gradient.astype(output.dtype)))
    dq, dk, dv, dsinks = 0.0, [], [], None
    for run, (keys, values, ids, sink) in parts:
        grads = _gradients(run, heads, keys, values, ids, sink, output, log_sum, gradient)
        dq = dq + grads[0].astype(jnp.float32)
        dk.append(grads[1].astype(jnp.float32))
        dv.append(grads[2].astype(jnp.float32))
        if sink is not None:
            dsinks = jnp.sum(grads[4].astype(jnp.float32), axis=0).astype(sinks.dtype)
    dq = _by_tokens(dq.astype(q.dtype), q.shape[:2])
    dk, dv = columns_transposed(dk, k, prefix), columns_transposed(dv, v, prefix)
    return dq, dk, dv, dsinks, None, None


_merged.defvjp(_merged_forward, _merged_backward)


def _gradients(run, q, k, v, ids, sink, output, log_sum, gradient):
    """Runs the kernel's own backward pass: returns the gradients of q, k, v, the segments (None)
    and the sinks."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    def one(q, k, v, ids, output, log_sum, gradient):
        residuals = q, k, v, ids, sink, output, log_sum, run.dq_mask_info, run.dkv_mask_info
        return kernel._splash_attention_bwd(**run.kwargs, res=residuals, do=gradient)[3:]

    return jax.vmap(one)(q, k, v, ids, output, log_sum, gradient)


# -- one chunk of columns, of several that a softmax is over


def splash_part(rule: Rule, q, k, v, view: View) -> tuple[jax.Array, jax.Array]:
    """Returns the softmax over these columns alone: q [B, H, T, E], already scaled, k [B, K, C, E],
    v [B, K, C, F] -> what the queries read [B, H, T, F], and the log-sum-exp of their
    scores [B, H, T]. The numbers of tokens are as `part_tokens` says."""
    run = _part_kernel(rule, q, k, view)
    ids = _segment_ids(*view.wanted, view.ids)
    output, (log_sum,) = jax.vmap(run)(q, k, v, ids)
    # A query that no block of the kernel holds has a log-sum-exp of -inf, and 0 / 0 as output.
    sees = log_sum[..., None] > MASKED / 2
    return jnp.where(sees, output.astype(jnp.float32), 0.0), log_sum


def splash_part_gradients(rule: Rule, q, k, v, view: View, out, log_sum, gradient):
    """Returns the gradients of `splash_part` by q, k and v, as a part of a softmax with the
    output `out` [B, H, T, F] and the log-sum-exp `log_sum` [B, H, T], from `gradient`
    [B, H, T, F], that of the output."""
    run = _part_kernel(rule, q, k, view)
    ids = _segment_ids(*view.wanted, view.ids)
    grads = _gradients(run, q, k, v, ids, None, out, log_sum, gradient.astype(out.dtype))
    return tuple(x.astype(jnp.float32) for x in grads[:3])


def part_tokens(tokens: int) -> int:
    """Returns the number of tokens that a chunk of so many is padded to for the kernel."""
    padded = -(-tokens // LANES) * LANES
    return padded if padded <= KERNEL_BLOCK else -(-tokens // KERNEL_BLOCK) * KERNEL_BLOCK


def _part_kernel(rule: Rule, q, k, view: View):
    shape = q.shape[2], k.shape[2]
    return _kernel_of(rule, shape, q.shape[1], view.distance, save_residuals=True)


def _parts(rule: Rule, q, k, v, sinks, segments, prefix):
    """Returns the queries, and (kernel, its other arguments) of a block's own columns and of its
    prefixes'. The sinks belong to one of the two."""
    blocks, heads = prefix.blocks.shape[1], q.shape[2]
    tokens = q.shape[1] // blocks
    own_kernel, width = _kernel(rule, tokens, heads, causal=True, save_residuals=True)
    prefix_kernel, _ = _kernel(rule, tokens, heads, causal=False, save_residuals=True)
    keys, values = (columns(x, prefix, width) for x in (k, v))

    def flat(x):
        return pad_axis(x.reshape(-1, tokens), 1, width)

    ids = flat(segments)
    continued = flat(looked_for(prefix)), flat(prefix_blocks(segments, prefix))
    return by_block(q, blocks, width), [
        (own_kernel, (keys[0], values[0], _segment_ids(ids, ids), sinks)),
        (prefix_kernel, (keys[1], values[1], _segment_ids(*continued), None)),
    ]


def _kernel(rule: Rule, tokens: int, heads: int, *, causal: bool, **options):
    """Returns (the kernel for blocks of so many tokens, the number that they are padded to)."""
    width = part_tokens(tokens)
    distance = 0 if causal else None
    return _kernel_of(rule, (width, width), heads, distance, **options), width


def _kernel_of(rule: Rule, shape: tuple[int, int], heads: int, distance: int | None, **options):
    """Returns the kernel for so many queries and columns, of which the first query is `distance`
    after the first column; None: every query sees every column."""
    # Imported here: Pallas takes a second to import, and only this path needs it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    block = math.gcd(*shape, KERNEL_BLOCK)
    if distance is None:
        mask = masks.FullMask(shape)
    elif rule.window:
        mask = masks.LocalMask(shape, (rule.window - 1, 0), distance)
    else:
        mask = masks.CausalMask(shape, distance)
    names = ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")
    return kernel.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=kernel.BlockSizes(**{f"block_{name}": block for name in names}),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=rule.soft_cap or None,
        interpret=rule.interpret,
        **options,
    )


def _segment_ids(queries, columns):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    return kernel.SegmentIds(queries, columns)


def _by_tokens(x, rows: tuple[int, int]) -> jax.Array:
    """Returns [N, H, T, E] as [B, S, H, E]."""
    tokens = rows[0] * rows[1] // x.shape[0]
    return x[:, :, :tokens].swapaxes(1, 2).reshape(*rows, x.shape[1], x.shape[3])
