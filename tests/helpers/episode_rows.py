"""Batches whose rows are cut into several rows of one episode."""

import jax
import jax.numpy as jnp
import numpy as np

from rljax.batch import Batch


def in_several_rows(batch: Batch):
    """The batch with every row cut where its second step begins, the parts as rows of one episode
    in another order; and the row and the columns of each part."""
    steps, keep = np.asarray(batch.step_ids), np.asarray(batch.mask) > 0
    whole, parts = slice(0, keep.shape[1]), []
    for row, ids in enumerate(steps):
        cut = np.argmax(keep[row] & (ids > ids[keep[row]].min(initial=1 << 30)))
        parts += [(row, slice(0, cut)), (row, slice(cut, whole.stop))] if cut else [(row, whole)]
    parts = [parts[i] for i in np.random.default_rng(2).permutation(len(parts))]
    rows = np.array([row for row, _ in parts])
    split = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[rows]), batch)
    mask = np.zeros(split.mask.shape, keep.dtype)
    for i, (row, columns) in enumerate(parts):
        mask[i, columns] = keep[row, columns]
    episode = jnp.asarray(90 - rows, jnp.int32)
    return split.replace(mask=jnp.asarray(mask, batch.mask.dtype), episode=episode), parts


def joined(of_tokens, parts) -> np.ndarray:
    """Numbers of the tokens of those rows [R, S] as of the rows that were cut: [B, S]."""
    got = np.asarray(of_tokens)
    out = np.zeros((1 + max(row for row, _ in parts), got.shape[1]), got.dtype)
    for i, (row, columns) in enumerate(parts):
        out[row, columns] = got[i, columns]
        assert (np.delete(got[i], np.arange(got.shape[1])[columns]) == 0).all()
    return out
