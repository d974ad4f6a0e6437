"""token_logprobs: hidden states and the output head -> log-prob, entropy and logsumexp of
each target.

The public function and its gradient; `dispatch` runs it on one device, `sharded` on a mesh.

Axes: S tokens, D embed, V vocabulary entries; any leading axes.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rljax.errors import InputError
from rljax.kernels.logprob import dispatch, sharded
from rljax.kernels.logprob.options import LogprobOptions, product_dtypes, vocab_size_of, wide_dtype


def token_logprobs(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    temperature=1.0,
    soft_cap: float = 0.0,
    vocab_first: bool = False,
    float32_head: bool = True,
    head_dtype: str = "",
    with_entropy: bool = True,
    with_greedy: bool = False,
    entries: int = 0,
    mesh: Mesh | None = None,
    impl: str | None = None,
):
    """log softmax(c tanh(hidden head / c) / temperature)[target], its entropy, and logsumexp.

    hidden [..., S, D], head [D, V], or the embedding [V, D] with `vocab_first`, targets
    [..., S] int32 -> three arrays [..., S], float32 (float64 of float64); the entropy is
    None without `with_entropy`.

    log-prob = z_y - logsumexp(z); entropy = logsumexp(z) - sum_v softmax(z)_v z_v.
    A target outside [0, V) has log-prob NaN. `soft_cap` is c; 0 = none (Gemma 2 has one).
    `temperature` is a number or a scalar array, and gets no gradient.

    `with_greedy` adds a fourth, without gradient: 1 where the target is the most likely token (the
    first of equals). `float32_head` asks for full float32 products where the hardware has a faster,
    coarser one; `head_dtype` rounds the head first, past which its gradient goes straight through
    in float32. `entries`: V, where the head has padding behind it, which gets no gradient; 0 = all
    of the head. `mesh`: hidden [B, S, D] and the head are split over it as rljax.mesh says (see
    sharded). `impl`: None = what suits the platform that the program is lowered for; or a name of
    dispatch.IMPLS. Raises InputError for another `impl`, shapes that do not fit, and a temperature
    that is no single number.
    """
    dispatch.check(impl)
    dtypes = product_dtypes(hidden.dtype, head.dtype, float32_head, head_dtype)
    hidden, read_as, precision = hidden.astype(dtypes[0]), jnp.dtype(dtypes[1]).name, dtypes[2]
    settings = (float(soft_cap), vocab_first, with_entropy, with_greedy)
    options = LogprobOptions(*settings, precision, read_as, sharded.cores(mesh))
    if 0 < entries < vocab_size_of(head, options):
        options = dataclasses.replace(options, entries=entries)
    if hidden.shape[:-1] != targets.shape or hidden.shape[-1] != head.shape[int(vocab_first)]:
        raise InputError(
            "token_logprobs: hidden, head, targets",
            value=(hidden.shape, head.shape, targets.shape),
            rule=f"[..., D], {'[V, D]' if vocab_first else '[D, V]'} and [...]",
            fix="transpose the head, or set vocab_first to what it is",
        )
    if jnp.ndim(temperature):  # [V] temperatures would scale each token of the vocabulary
        raise InputError(
            "token_logprobs(temperature)",
            value=jnp.shape(temperature),
            rule="one number, for all",
            fix="divide the hidden states of each row by its own temperature beforehand",
        )
    scale = jax.lax.stop_gradient(jnp.asarray(1.0 / temperature, wide_dtype(read_as)))
    return _described(hidden, head, targets, scale, options, mesh, impl)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _described(hidden, head, targets, scale, options: LogprobOptions, mesh, impl):
    return _forward(hidden, head, targets, scale, options, mesh, impl)[0]


def _forward(hidden, head, targets, scale, options: LogprobOptions, mesh, impl):
    stats = sharded.forward(mesh, impl, hidden, head, targets, scale, options)
    exists = (targets >= 0) & (targets < (options.entries or vocab_size_of(head, options)))
    logprob = jnp.where(exists, stats.target - stats.log_sum, jnp.nan)
    entropy = stats.log_sum - stats.expected if options.entropy else None
    outputs = logprob, entropy, stats.top + stats.log_sum
    if options.greedy:
        outputs += ((stats.best == targets).astype(logprob.dtype),)
    return outputs, (hidden, head, targets, scale, stats.top, stats.log_sum, entropy)


def _forward_for_gradient(hidden, head, targets, scale, options: LogprobOptions, mesh, impl):
    """`_forward`, which also keeps whether the head gets a gradient: under adapters it does not."""
    inputs = (x.value for x in (hidden, head, targets, scale))
    outputs, saved = _forward(*inputs, options, mesh, impl)
    return outputs, (saved, () if head.perturbed else None)


def _backward(options: LogprobOptions, mesh, impl, residuals, cotangents):
    """Computes the gradients from the cotangents of log-prob, entropy and logsumexp, which are the
    a, b and c of logit_gradient."""
    (hidden, head, targets, scale, top, log_sum, entropy), of_head_too = residuals
    options = dataclasses.replace(options, frozen_head=of_head_too is None)
    a, g_entropy, g_lse = (_materialised(x) for x in cotangents[:3])
    b = g_lse - a
    c = jnp.zeros_like(b)
    if options.entropy:
        b, c = b - entropy * g_entropy, -g_entropy
    arrays = hidden, head, targets, scale, top, log_sum, a, b, c
    of_hidden, of_head = sharded.backward(mesh, impl, *arrays, options)
    return of_hidden, None if options.frozen_head else of_head, None, None


def _materialised(cotangent) -> jax.Array:
    """Returns a cotangent as an array: zeros for an output that the loss does not read."""
    zero = isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
    return jnp.zeros(cotangent.shape, cotangent.dtype) if zero else cotangent


_described.defvjp(_forward_for_gradient, _backward, symbolic_zeros=True)
