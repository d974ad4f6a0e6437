"""Resampling of responses by their scores: the filter of PF-PPO (arXiv 2409.06957).

Weights by rank or by score, drawing with replacement, and the fit that tells a good filter. Axes: B
rows, N samples of one prompt.
"""

import jax
import jax.numpy as jnp

from rljax.errors import InputError

KINDS = ("bon", "br", "bw")
METHODS = ("pow", "max_min", "max_random")


def _weight_of_rank(rank: jax.Array, size: jax.Array, kind: str) -> jax.Array:
    """Returns the probability of the sample with this rank (0 = best) among `size`; 1 if it is
    alone."""
    if kind not in KINDS:
        raise InputError("kind of rank weights", value=kind, fix=f"write one of {', '.join(KINDS)}")
    is_best, is_worst = rank == 0, rank == size - 1
    if kind == "bon":
        weight = jnp.where(is_best, 1.0, 0.0)
    elif kind == "br":
        weight = jnp.where(is_best, 0.5, 0.5 / jnp.maximum(size - 1, 1))
    else:
        weight = jnp.where(is_best | is_worst, 0.5, 0.0)
    return jnp.where(size == 1, 1.0, weight)


def rank_weights(n: int, kind: str = "br") -> jax.Array:
    """Returns the weights of the ranks 1..n, the best first: [n].

    "bon" = best of n (1, 0, ..., 0); "br" = best and the rest (1/2, the rest shares 1/2); "bw" =
    best and worst (1/2, 0, ..., 0, 1/2).
    """
    return _weight_of_rank(jnp.arange(n), jnp.asarray(n), kind)


def group_rank_weights(scores: jax.Array, groups: jax.Array, *, kind: str = "br") -> jax.Array:
    """Returns `rank_weights` of each row by its score inside its group: scores, groups [B] -> [B].

    Of equal scores the row with the lower index ranks higher.
    """
    peers = groups[:, None] == groups[None, :]
    index = jnp.arange(scores.shape[0])
    tie = (scores[None, :] == scores[:, None]) & (index[None, :] < index[:, None])
    ranked_above = peers & ((scores[None, :] > scores[:, None]) | tie)
    return _weight_of_rank(jnp.sum(ranked_above, axis=1), jnp.sum(peers, axis=1), kind)


def score_weights(scores: jax.Array, *, method: str = "pow", power: float = 2.0) -> jax.Array:
    """Returns the weights of rows by their scores, for draws from the whole batch: [B] -> [B].

    "pow" |score|^power; "max_min" 1 for the greatest and the least score, else 0; "max_random" 0.4
    for the greatest, 0.1 for the others. Each + 1e-8, so that scores of 0 alone are drawn
    uniformly. Raises InputError for another method.
    """
    if method not in METHODS:
        raise InputError(
            "method of score weights", value=method, fix=f"write one of {', '.join(METHODS)}"
        )
    is_best = scores == jnp.max(scores)
    if method == "pow":
        weights = jnp.abs(scores) ** power
    elif method == "max_min":
        weights = jnp.where(is_best | (scores == jnp.min(scores)), 1.0, 0.0)
    else:
        weights = jnp.where(is_best, 0.4, 0.1)
    return weights.astype(scores.dtype) + 1e-8


def resample(key: jax.Array, weights: jax.Array, *, groups: jax.Array | None = None) -> jax.Array:
    """Draws rows with replacement, p proportional to `weights`: key, weights [B] -> indices [B].

    With `groups` [B] every row is replaced by one of its own group, so that groups keep their
    sizes; without, by one of the whole batch. Weights that are all 0 count as equal.
    """
    b = weights.shape[0]
    groups = jnp.zeros((b,), jnp.int32) if groups is None else groups
    peers = groups[:, None] == groups[None, :]
    dead = jnp.max(jnp.where(peers, weights[None, :], 0.0), axis=1) <= 0
    weights = jnp.where(dead, 1.0, weights)
    # Sums of the weights up to each row, inside its group, in the order of the rows.
    index = jnp.arange(b)
    cumulative = jnp.sum(
        jnp.where(peers & (index[None, :] <= index[:, None]), weights[None, :], 0.0), axis=1
    )
    total = jnp.max(jnp.where(peers, cumulative[None, :], 0.0), axis=1)
    threshold = jax.random.uniform(key, (b,), weights.dtype) * total
    # Strictly below the total, or rounding could pass the last row of positive weight.
    threshold = jnp.minimum(threshold, jnp.nextafter(total, jnp.zeros_like(total)))
    return jnp.argmax(peers & (cumulative[None, :] > threshold[:, None]), axis=1).astype(jnp.int32)


def linear_fit(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Fits y = slope x + intercept by least squares: x [N], y [N] -> scalars (slope, intercept,
    R^2).

    x = reward, y = true score of groups of held-out samples: the filter with the greatest R^2 is
    the one whose selected responses the reward model judges most reliably.
    """
    dx, dy = x - jnp.mean(x), y - jnp.mean(y)
    slope = jnp.sum(dx * dy) / jnp.sum(dx * dx)
    intercept = jnp.mean(y) - slope * jnp.mean(x)
    residual = jnp.sum((y - slope * x - intercept) ** 2)
    return slope, intercept, 1 - residual / jnp.sum(dy * dy)
