"""Filters: batch -> 1 for every row that is learned from, else 0: [B].

A filtered row gets mask 0: it leaves numerators and denominators of the loss. After the advantages
it still counts in the group's baseline (`algorithm.filters`); before them it has not
(`algorithm.baseline_filters`). Rows of one episode count as one. A filter raises InputError where
the batch lacks a field that it reads.
"""

import jax.numpy as jnp

from rljax.batch import Batch, first_of_sequence, truncated
from rljax.contracts import Share, contract


@contract(safe=True, reads=("finish_reason",))
def overlong(batch: Batch):
    """0 for rows that a limit cut off (DAPO's overlong filter): of tokens, or of an
    episode's turns or seconds."""
    batch.require("finish_reason", by="overlong")
    return (~truncated(batch)).astype(batch.mask.dtype)


def _group_extremes(batch: Batch):
    peers = batch.group[:, None] == batch.group[None, :]
    low = jnp.min(jnp.where(peers, batch.scores[None, :], jnp.inf), axis=1)
    high = jnp.max(jnp.where(peers, batch.scores[None, :], -jnp.inf), axis=1)
    return low, high, jnp.sum(peers & first_of_sequence(batch)[None, :], axis=1)


@contract(safe=True, reads=("scores", "group"))
def live_groups(batch: Batch):
    """0 for rows of groups whose scores are all equal: no advantage, only a share of the
    denominator. By the reward's own score, before shaping; a group of one stays."""
    batch.require("scores", "group", by="live_groups")
    low, high, size = _group_extremes(batch)
    return ((low != high) | (size == 1)).astype(batch.mask.dtype)


@contract(safe=True, reads=("scores", "group"))
def pass_rate(batch: Batch, *, low: Share = 0.2, high: Share = 0.8, correct_at: float = 1.0):
    """1 for rows of groups whose share of correct rows is in [low, high]: PRIME's prompt filter."""
    batch.require("scores", "group", by="pass_rate")
    peers = batch.group[:, None] == batch.group[None, :]
    peers = (peers & first_of_sequence(batch)[None, :]).astype(batch.mask.dtype)
    is_correct = (batch.scores >= correct_at).astype(batch.mask.dtype)
    rate = (peers @ is_correct) / jnp.sum(peers, axis=1)
    return ((rate >= low - 1e-6) & (rate <= high + 1e-6)).astype(batch.mask.dtype)
