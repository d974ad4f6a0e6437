"""Trees of tokens in the columns of one slot, behind the tokens that it holds.

Node i of a tree is in column P + i, at position P + its depth of the sequence. It sees the P
tokens, its ancestors and itself, as the tokens of speculative trees do (arXiv 2305.09781): each
path from the root is read as a sequence of its own would be, and nothing is copied. Columns hold
their keys rotated by position, so nodes may change columns, but not their depth.

Axes: B slots, S nodes of one call, N nodes of a tree, T columns of a slot.
"""

import dataclasses

import jax
import jax.numpy as jnp

from rljax.models.cache_pages import token_axis
from rljax.models.cache_ring import put, take
from rljax.models.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Nodes:
    """The nodes that a call reads, and the trees that they belong to."""

    held: jax.Array  # [B] int32: P, the tokens of each slot that its nodes continue
    ids: jax.Array  # [B, S] int32: which nodes are read; one that is not 0..N-1 is padding
    depths: jax.Array  # [B, N] int32: of every node; the root's is 0
    ancestors: jax.Array  # [B, N, N] bool: row i has the ancestors of node i, and node i itself

    @property
    def real(self) -> jax.Array:
        """Returns which entries are no padding: [B, S] bool."""
        return (self.ids >= 0) & (self.ids < self.depths.shape[1])

    def _of_read(self, x: jax.Array) -> jax.Array:
        """Returns x [B, N, ...] at the nodes that are read: [B, S, ...]."""
        ids = jnp.clip(self.ids, 0, self.depths.shape[1] - 1)
        return jnp.take_along_axis(x, jnp.expand_dims(ids, tuple(range(2, x.ndim))), axis=1)

    def positions(self) -> jax.Array:
        """Returns where in its sequence each node that is read stands: [B, S]."""
        return self.held[:, None] + self._of_read(self.depths)

    def columns(self, total: int) -> jax.Array:
        """Returns the column of each node that is read, of `total`: [B, S]. Padding has columns
        that are none, each its own."""
        out_of_range = total + jnp.arange(self.ids.shape[1])[None, :]
        return jnp.where(self.real, self.held[:, None] + self.ids, out_of_range)

    def allowed(self, total: int, window: int) -> jax.Array:
        """Returns which of `total` columns each node that is read sees, of them those at positions
        within the window (0: at any distance): [B, S, T] bool."""
        column, count = jnp.arange(total)[None, :], self.depths.shape[1]
        offset = column - self.held[:, None]
        node = jnp.clip(offset, 0, count - 1)
        of_tree = (offset >= 0) & (offset < count)
        is_ancestor = jnp.take_along_axis(self._of_read(self.ancestors), node[:, None, :], axis=2)
        allowed = (offset < 0)[:, None, :] | (of_tree[:, None, :] & is_ancestor)
        if window:
            depth = jnp.take_along_axis(self.depths, node, axis=1)
            position = jnp.where(offset < 0, column, self.held[:, None] + depth)
            allowed &= self.positions()[:, :, None] - position[:, None, :] < window
        return allowed


def why_not(config: ModelConfig) -> str:
    """Returns why nodes cannot be columns of a slot for a model; "" if they can."""
    if config.batch_invariant:
        return "batch-invariant attention reads a range of columns, and other branches lie between"
    if config.recurrent:
        return "the state of a recurrent layer is of one path, and nodes are of many"
    if any(kind.chunk for kind in config.kinds):
        return "its attention is cut into chunks of columns, and nodes are not where they stand"
    return ""


def moved(cache, held: jax.Array, source: jax.Array):
    """Returns the cache with what was in column held + source[i] in column held + i of each slot:
    held [B], source [B, N]. For nodes that change columns, in a cache without rings."""
    assert not cache.is_ring and not cache.pool
    source_columns = jnp.minimum(held[:, None] + source, cache.columns - 1)
    target_columns = held[:, None] + jnp.arange(source.shape[1])[None, :]

    def one(x):
        axis = token_axis(cache.order)
        return put(x, take(x, source_columns, axis), target_columns, cache.order)

    return jax.tree.map(one, cache)
