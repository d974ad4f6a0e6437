"""Which implementation of the fused log-prob runs on one device's arrays.

What lives here: the names, and the choice by platform. What does not: meshes (sharded), gradients
(api). Every implementation is a module with `forward` and `backward`.

Axes: N rows, D embed, V words.
"""

import functools

import jax
import jax.numpy as jnp

from rljax.errors import InputError
from rljax.kernels.logprob import pallas_gpu, pallas_tpu, reference, xla
from rljax.kernels.logprob.options import Options, Statistics

_FUNCTIONS = {
    "reference": (reference.forward, reference.backward),
    "xla": (xla.forward, xla.backward),
    "pallas_tpu": (pallas_tpu.forward, pallas_tpu.backward),
    "pallas_gpu": (pallas_gpu.forward, pallas_gpu.backward),
}
IMPLS = tuple(_FUNCTIONS)


def check(impl: str | None) -> None:
    if impl is not None and impl not in _FUNCTIONS:
        raise InputError("token_logprobs(impl)", value=impl, rule=f"None or one of {IMPLS}")


def forward(impl: str | None, hidden, head, targets, scale, options: Options) -> Statistics:
    """Statistics of hidden [N, D] under the head at targets [N]; see options.Statistics."""
    return _run(impl, 0, options, hidden, head, targets, scale)


def backward(
    impl: str | None, hidden, head, targets, scale, top, log_sum, a, b, c, options: Options
) -> tuple[jax.Array, jax.Array]:
    """(d hidden [N, D], d head) of cotangents a, b, c [N]; see options.logit_gradient."""
    return _run(impl, 1, options, hidden, head, targets, scale, top, log_sum, a, b, c)


def _run(impl: str | None, which: int, options: Options, *arrays):
    call = {
        name: functools.partial(pair[which], options=options) for name, pair in _FUNCTIONS.items()
    }
    if impl is None:
        if arrays[0].dtype not in (jnp.float32, jnp.bfloat16):
            impl = "xla"  # the kernels count in float32
        else:
            # Lowering, not tracing, knows the platform: a CPU host may lower for a TPU. GPUs get
            # the Triton kernels by name alone until they have run on one.
            return jax.lax.platform_dependent(*arrays, tpu=call["pallas_tpu"], default=call["xla"])
    if impl == "pallas_gpu" and not pallas_gpu.fits(*arrays[:2]):
        shapes = [x.shape for x in arrays[:2]]
        raise InputError(
            "token_logprobs(impl='pallas_gpu')", value=shapes, rule="below 2^31 elements", fix="xla"
        )
    return call[impl](*arrays)
