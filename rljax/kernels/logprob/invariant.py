"""The log-prob in tiles of rows, each over its whole vocabulary: a row's numbers depend on nothing
but the row (rljax.kernels.row_tiles), so the sampler's are the trainer's, bit by bit.

Axes: N rows, D embed, V vocabulary entries.
"""

import jax
import jax.numpy as jnp

from rljax.kernels.logprob import xla
from rljax.kernels.logprob.options import LogprobOptions, Statistics, logits, tile_statistics
from rljax.kernels.row_tiles import tiled


def forward(hidden, head, targets, scale, options: LogprobOptions) -> Statistics:
    """Returns Statistics [N] of hidden [N, D] under the head at targets [N]; see
    options.Statistics."""

    def rows(weights, hidden, targets):
        head, scale = weights
        z = logits(hidden, head, 1.0, options)
        exact = _statistics(z, targets, jnp.broadcast_to(scale, targets.shape))
        tile_stats = tile_statistics(z * scale, targets, options)
        return exact._replace(expected=tile_stats.expected, best=tile_stats.best)

    return tiled(rows, 1, (head, scale), hidden, targets)


backward = xla.backward


def chosen_logprobs(z: jax.Array, ids: jax.Array, temperature: jax.Array) -> jax.Array:
    """Returns the log-probs of `forward` from logits z [N, V] that are not scaled yet, at ids [N],
    with the temperature [N] of each row: [N], in nats."""
    stats = _statistics(z, ids, 1.0 / temperature)
    return stats.target - stats.log_sum


def _statistics(z, targets, scale) -> Statistics:
    """Returns the statistics of z [N, V] scale [N] without the entropy, by one loop for both
    callers."""

    def rows(_, z, targets, scale):
        return tile_statistics(z * scale[:, None], targets, LogprobOptions(entropy=False))

    return tiled(rows, 1, (), z, targets, scale)
