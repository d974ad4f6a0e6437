"""Chooses the implementation of the fused log-prob that runs on one device's arrays.

Every implementation is a module with `forward` and `backward`.

Axes: N rows, D embed, V vocabulary entries.
"""

import functools

import jax
import jax.numpy as jnp

from rljax.errors import InputError
from rljax.kernels.logprob import invariant, reference, xla
from rljax.kernels.logprob.options import LogprobOptions, Statistics, gradient_dtype

IMPLS = ("reference", "xla", "invariant", "pallas_tpu", "pallas_gpu")


def check(impl: str | None) -> None:
    """Raises InputError for the name of an implementation that is none of IMPLS."""
    if impl is not None and impl not in IMPLS:
        raise InputError(
            "token_logprobs(impl)",
            value=impl,
            rule=f"None or one of {IMPLS}",
            fix="impl=None, which takes the best of this device",
        )


def forward(impl: str | None, hidden, head, targets, scale, options: LogprobOptions) -> Statistics:
    """Returns Statistics [N] of hidden [N, D] under the head at targets [N]; see
    options.Statistics. Raises InputError if impl "pallas_gpu" cannot address
    arrays of this size."""
    return _run(impl, "forward", options, hidden, head, targets, scale)


def backward(
    impl: str | None, hidden, head, targets, scale, top, log_sum, a, b, c, options: LogprobOptions
) -> tuple[jax.Array, jax.Array]:
    """Returns (d hidden [N, D], d head, in float32 or wider) of cotangents a, b, c [N]; see
    options.logit_gradient."""
    return _run(impl, "backward", options, hidden, head, targets, scale, top, log_sum, a, b, c)


def _module(impl: str):
    """Returns the module of an implementation. Pallas takes a second to import, so it is imported
    only for its own kernels."""
    if impl == "pallas_tpu":
        from rljax.kernels.logprob import pallas_tpu

        return pallas_tpu
    if impl == "pallas_gpu":
        from rljax.kernels.logprob import pallas_gpu

        return pallas_gpu
    return {"reference": reference, "invariant": invariant}.get(impl, xla)


def _run(impl: str | None, function: str, options: LogprobOptions, *arrays):
    def call(impl):
        return functools.partial(vars(_module(impl))[function], options=options)

    hidden, head, *rest = arrays
    if not len(hidden):
        impl = "reference"  # no rows make no tiles
    elif impl is None and hidden.dtype not in (jnp.float32, jnp.bfloat16):
        impl = "xla"  # the kernels count in float32
    if impl == "pallas_gpu" and not _module(impl).fits(hidden, head):
        sizes, subject = [x.shape for x in (hidden, head)], "token_logprobs(impl='pallas_gpu')"
        raise InputError(subject, value=sizes, rule="below 2^31 elements", fix="impl='xla'")
    if impl == "pallas_gpu":  # its products take two of a kind
        dtype = gradient_dtype(hidden, head)
        arrays = hidden.astype(dtype), head.astype(dtype), *rest
    if impl is not None:
        return call(impl)(*arrays)
    # Lowering, not tracing, knows the platform: a CPU host may lower for a TPU. GPUs get the Triton
    # kernels by name alone until they have run on one.
    return jax.lax.platform_dependent(*arrays, tpu=call("pallas_tpu"), default=call("xla"))
