"""Logits -> one token per row, with its log-prob. Every rule is a runtime array and causes no
compile.

Axes: B rows, V words.
"""

import jax
import jax.numpy as jnp

BLOCK = 64  # words per block of the two-level inverse CDF


def _inverse_cdf(probs: jax.Array, u: jax.Array) -> jax.Array:
    """The word at which the cumulative sum of probs [B, V] passes u [B] in [0, 1) of its total.

    Two levels (blocks, then words of one block): one uniform per row instead of V Gumbels, and far
    cheaper than one cumulative sum over V.
    """
    rows, words = probs.shape
    blocks = jnp.pad(probs, ((0, 0), (0, -words % BLOCK))).reshape(rows, -1, BLOCK)
    block_cdf = jnp.cumsum(jnp.sum(blocks, axis=-1), axis=-1)
    target = u * block_cdf[:, -1]
    # The first block whose running sum exceeds the target; it has mass, so word 0 is never a
    # default.
    block = jnp.sum(block_cdf <= target[:, None], axis=-1)
    block = jnp.minimum(block, block_cdf.shape[1] - 1)
    before = jnp.where(
        block > 0, jnp.take_along_axis(block_cdf, block[:, None] - 1, axis=1)[:, 0], 0.0
    )
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    word = jnp.sum(jnp.cumsum(inside, axis=-1) <= (target - before)[:, None], axis=-1)
    # Rounding may push the target past the block's own sum: stay on its last word that has mass.
    last = jnp.max(jnp.where(inside > 0, jnp.arange(BLOCK)[None, :], 0), axis=-1)
    return block * BLOCK + jnp.minimum(word, last)


def _truncate(probs: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Keep the top_k likeliest words and the smallest set with mass top_p; ties at the edge
    stay."""
    ordered = jnp.sort(probs, axis=-1, descending=True)
    rank = jnp.arange(probs.shape[-1])[None, :]
    kept = (rank < jnp.where(top_k > 0, top_k, probs.shape[-1])[:, None]) & (
        (jnp.cumsum(ordered, axis=-1) - ordered) < top_p[:, None]
    )
    kept = kept | (rank == 0)
    edge = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(probs >= edge, probs, 0.0)


def sample(logits: jax.Array, keys: jax.Array, columns: jax.Array, temperature, top_k, top_p):
    """One word per row: logits [B, V] f32, keys [B], columns [B], temperature/top_k/top_p [B].

    The draw is a function of (key of the request, column) alone: u = uniform(fold_in(key, column)).
    temperature 0 is greedy. Returns ids [B] and log softmax(logits / temperature)[id] [B] over the
    full vocabulary; greedy rows report it at temperature 1.
    """
    greedy = temperature <= 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    lse = jax.nn.logsumexp(scaled, axis=-1, keepdims=True)
    probs = jnp.exp(scaled - lse)
    truncated = jnp.any((top_k > 0) | (top_p < 1))
    probs = jax.lax.cond(truncated, _truncate, lambda p, k, t: p, probs, top_k, top_p)
    u = jax.vmap(lambda key, column: jax.random.uniform(jax.random.fold_in(key, column)))(
        keys, columns
    )
    ids = jnp.where(greedy, jnp.argmax(logits, axis=-1), _inverse_cdf(probs, u)).astype(jnp.int32)
    logp = jnp.take_along_axis(scaled, ids[:, None], axis=-1)[:, 0] - lse[:, 0]
    return ids, logp
