"""token_logprobs: hidden states and the output head -> log-prob, entropy and logsumexp of each
target.

What lives here: the one public function, the plain `reference` and the chunked `xla` implementation
with
its own backward pass. Both compute in float32 (float64 when given float64).

Axes: S tokens along the chunked axis, D embed, V words; any leading axes.
"""

import functools

import jax
import jax.numpy as jnp

CHUNK_LOGITS = 1 << 23  # logits held at once by the chunked form: 32 MiB of float32


def _logits(hidden, head, scale, soft_cap, precision):
    """cap tanh(hidden [..., D] x head [D, V] / cap) / temperature, accumulated and kept in float32
    or wider; soft_cap 0 = none."""
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    z = jnp.einsum("...d,dv->...v", hidden, head, preferred_element_type=wide, precision=precision)
    if soft_cap:
        z = soft_cap * jnp.tanh(z / soft_cap)
    return z * scale


def _statistics(z, targets, with_greedy=False):
    """log-prob of the target, entropy, logsumexp of logits z [..., V]; and with_greedy whether the
    target is the most likely word, the first of equals."""
    # Everything relative to the largest logit: differences of large numbers lose their digits.
    top = jnp.max(z, axis=-1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    shifted = z - top
    log_sum = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1, keepdims=True))
    logp = shifted - log_sum
    p = jnp.exp(logp)
    entropy = -jnp.sum(jnp.where(p > 0, p * logp, 0.0), axis=-1)
    target = jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
    found = target, entropy, (top + log_sum)[..., 0]
    if with_greedy:
        found += ((jnp.argmax(z, axis=-1) == targets).astype(target.dtype),)
    return found


def _chunks(x, n, axis):
    """Split `axis` into n equal parts, stacked in front: the form that lax.scan walks."""
    shape = x.shape[:axis] + (n, x.shape[axis] // n) + x.shape[axis + 1 :]
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _unchunk(x, axis):
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(x.shape[:axis] + (-1,) + x.shape[axis + 2 :])


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _chunked(hidden, head, targets, scale, soft_cap, chunks, precision, greedy):
    return _chunked_forward(hidden, head, targets, scale, soft_cap, chunks, precision, greedy)[0]


def _chunked_forward(hidden, head, targets, scale, soft_cap, chunks, precision, greedy):
    axis = hidden.ndim - 2

    def one(_, part):
        h, y = part
        return None, _statistics(_logits(h, head, scale, soft_cap, precision), y, greedy)

    _, out = jax.lax.scan(
        one, None, (_chunks(hidden, chunks, axis), _chunks(targets, chunks, axis))
    )
    out = tuple(_unchunk(x, axis) for x in out)
    return out, (hidden, head, targets, scale, out[1], out[2])


def _chunked_backward(soft_cap, chunks, precision, greedy, saved, cotangents):
    """dz = g_logp (1[v=y] - p) + g_lse p - g_H p (log p + H), recomputing z chunk by chunk."""
    hidden, head, targets, scale, entropy, lse = saved
    axis = hidden.ndim - 2
    rows = tuple(_chunks(x, chunks, axis) for x in (hidden, targets, entropy, lse, *cotangents[:3]))

    def one(head_grad, part):
        h, y, entropy_, lse_, g_logp, g_entropy, g_lse = part
        z = _logits(h, head, scale, soft_cap, precision)
        logp = z - lse_[..., None]
        p = jnp.exp(logp)
        # p = 0 with z = -inf is a legal word of probability 0; 0 * inf must not become NaN.
        dz = (
            p * (g_lse - g_logp)[..., None]
            - jnp.where(p > 0, p * (logp + entropy_[..., None]), 0.0) * g_entropy[..., None]
        )
        onehot = y[..., None] == jax.lax.broadcasted_iota(
            jnp.int32, (1,) * y.ndim + z.shape[-1:], y.ndim
        )
        dz = (dz + jnp.where(onehot, g_logp[..., None], 0.0)) * scale
        if soft_cap:  # d (c tanh(x / c)) / dx = 1 - tanh^2
            dz = dz * (1 - jnp.square(z / scale / soft_cap))
        dz = dz.astype(h.dtype)
        dh = jnp.einsum("...v,dv->...d", dz, head, precision=precision)
        dw = jnp.einsum(
            "...d,...v->dv", h, dz, preferred_element_type=head_grad.dtype, precision=precision
        )
        return head_grad + dw, dh.astype(h.dtype)

    wide = jnp.promote_types(head.dtype, jnp.float32)
    head_grad, hidden_grad = jax.lax.scan(one, jnp.zeros(head.shape, wide), rows)
    return _unchunk(hidden_grad, axis), head_grad.astype(head.dtype), None, None


_chunked.defvjp(_chunked_forward, _chunked_backward)


def token_logprobs(
    hidden,
    head,
    targets,
    *,
    temperature=1.0,
    soft_cap: float = 0.0,
    float32_head: bool = True,
    with_greedy: bool = False,
    impl: str = "xla",
):
    """log softmax(c tanh(hidden head / c) / temperature)[target], its entropy, and logsumexp.

    hidden [..., S, D] and head [D, V] of one dtype, targets [..., S] int32 -> three float32 arrays
    [..., S].
    log-prob = z_y - logsumexp(z); entropy = logsumexp(z) - sum_v softmax(z)_v z_v (ALGORITHMS 0.4).
    `soft_cap` is c; 0 = none (Gemma 2 has one).
    `with_greedy` adds a fourth, without gradient: 1 where the target is the most likely word.
    `float32_head` asks for full float32 multiplication where the hardware has a faster, coarser
    one.
    `impl`: "xla" (chunked over S, gradients recompute the logits) or "reference" (plain).
    """
    dtype = jnp.promote_types(hidden.dtype, jnp.float32) if float32_head else hidden.dtype
    hidden, head = hidden.astype(dtype), head.astype(dtype)
    precision = jax.lax.Precision.HIGHEST if float32_head else None
    scale = jnp.asarray(1.0 / temperature, jnp.promote_types(dtype, jnp.float32))
    if impl == "reference":
        return _statistics(_logits(hidden, head, scale, soft_cap, precision), targets, with_greedy)
    length, rows = hidden.shape[-2], max(targets.size // max(targets.shape[-1], 1), 1)
    wanted = max(1, -(-rows * length * head.shape[1] // CHUNK_LOGITS))
    # The number of chunks must divide S; padding S to a multiple keeps chunks near the wanted size.
    chunks = min(wanted, length)
    padding = -length % chunks
    if padding:
        hidden = jnp.pad(hidden, [(0, 0)] * (hidden.ndim - 2) + [(0, padding), (0, 0)])
        targets = jnp.pad(targets, [(0, 0)] * (targets.ndim - 1) + [(0, padding)])
    out = _chunked(hidden, head, targets, scale, soft_cap, chunks, precision, with_greedy)
    return tuple(x[..., :length] for x in out)
