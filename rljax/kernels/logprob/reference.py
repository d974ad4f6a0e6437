"""The plain form, all logits at once: for tests, and the rule that the others meet.

Axes: N rows, D embed, V vocabulary entries.
"""

import jax

from rljax.kernels.logprob.options import (
    LogprobOptions,
    Statistics,
    gradient_dtype,
    head_gradient,
    hidden_gradient,
    logit_gradient,
    logits,
    raw_logits,
    tile_statistics,
)


def forward(hidden, head, targets, scale, options: LogprobOptions) -> Statistics:
    """Returns Statistics [N] of hidden [N, D] under the head at targets [N]; see
    options.Statistics."""
    return tile_statistics(logits(hidden, head, scale, options), targets, options)


def backward(
    hidden, head, targets, scale, top, log_sum, a, b, c, options: LogprobOptions
) -> tuple[jax.Array, jax.Array]:
    """Returns (d hidden [N, D], d head) of cotangents a, b, c [N]; see options.logit_gradient."""
    raw = raw_logits(hidden, head, options)
    dz = logit_gradient(raw, targets, scale, top, log_sum, a, b, c, options)
    dz = dz.astype(gradient_dtype(hidden, head))
    of_hidden = hidden_gradient(dz, head, options).astype(hidden.dtype)
    return of_hidden, head_gradient(dz, hidden, options)
