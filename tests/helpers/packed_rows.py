"""Rows packed by hand: pieces put where a plan says, one loop, independent of the library's packer.

A group is (prefix tokens, [rest tokens, ...]). A plan is a list of rows, a row a list of blocks, a
block a list of pieces: ("prefix", g), ("rest", g, i), ("whole", g, i) or ("gap", tokens).
"""

import numpy as np

from rljax.batch import Batch

GROUPS = (5, (4, 1, 6)), (3, (5, 2)), (6, (3, 3)), (4, (2,))  # lengths
# Two prefixes in a block, before and behind their rests; a rest beside its prefix; a group over
# both rows; a whole sequence; gaps.
PLAN = [
    [
        [("rest", 0, 1), ("rest", 1, 0), ("gap", 2), ("rest", 1, 1)],
        [("prefix", 0), ("gap", 1), ("prefix", 1)],
        [("rest", 0, 2), ("gap", 3)],
    ],
    [
        [("prefix", 2), ("rest", 2, 1), ("gap", 1), ("rest", 2, 0)],
        [("prefix", 0), ("whole", 3, 0)],
        [("gap", 1), ("rest", 0, 0)],
    ],
]
BLOCK_TOKENS = 14


def groups_of(rng, vocab: int, lengths=GROUPS):
    """Groups of random tokens."""

    def draw(n):
        return rng.integers(3, vocab, n).astype(np.int32)

    return [(draw(n), [draw(m) for m in rests]) for n, rests in lengths]


def plain_rows(groups) -> Batch:
    """One row for each sequence, in the order of the groups."""
    sequences = [np.concatenate([prefix, rest]) for prefix, rests in groups for rest in rests]
    width = max(len(s) for s in sequences)
    tokens = np.stack([np.pad(s, (0, width - len(s))) for s in sequences])
    real = np.arange(width)[None, :] < np.array([len(s) for s in sequences])[:, None]
    return Batch(
        tokens=tokens,
        segment_ids=real.astype(np.int32),
        positions=np.where(real, np.arange(width, dtype=np.int32)[None, :], 0),
        mask=real.astype(np.float32),
    ).check()


def packed_rows(groups, plan=PLAN, block_tokens: int = BLOCK_TOKENS):
    """(the packed batch, the row and the column of each token of `plain_rows`: [2, B, S])."""
    shape = (len(plan), len(plan[0]) * block_tokens)
    names = ("tokens", "segment_ids", "positions", "prefix_ids", "previous")
    out = {name: np.zeros(shape, np.int32) for name in names}
    out["previous"][:] = np.arange(shape[1])
    out["prefix_blocks"] = np.tile(np.arange(len(plan[0]), dtype=np.int32), (len(plan), 1))
    names = [(g, i) for g, (_, rests) in enumerate(groups) for i in range(len(rests))]
    where = np.zeros((2, *plain_rows(groups).tokens.shape), np.int32)
    prefixes = {}  # (row, group): segment id, block, columns
    placed = sorted(_placed(groups, plan, block_tokens), key=lambda p: p[2][0] != "prefix")
    for segment, (r, w, (kind, g, *i), start, tokens, at) in enumerate(placed, start=1):
        out["tokens"][r, at] = tokens
        out["segment_ids"][r, at] = segment
        out["positions"][r, at] = start + np.arange(len(tokens))
        out["previous"][r, at] = np.maximum(at - 1, at[0])
        if kind == "prefix":
            prefixes[r, g] = segment, w, at
            continue
        sequence = names.index((g, *i))
        if kind == "rest":
            out["prefix_ids"][r, at], out["prefix_blocks"][r, w], before = prefixes[r, g]
            out["previous"][r, at[0]] = before[-1]
            at = np.concatenate([before, at])
        where[0, sequence, : len(at)], where[1, sequence, : len(at)] = r, at
    return Batch(mask=(out["segment_ids"] > 0).astype(np.float32), **out).check(), where


def _placed(groups, plan, block_tokens: int):
    """(row, block, piece, position of its first token, its tokens, their columns) of each piece."""
    for r, row in enumerate(plan):
        for w, block in enumerate(row):
            column = w * block_tokens
            for piece in block:
                kind, g, *i = piece
                if kind == "gap":
                    column += g
                    continue
                prefix, rests = groups[g]
                start = len(prefix) if kind == "rest" else 0
                tokens = prefix if kind == "prefix" else np.concatenate([prefix, rests[i[0]]])
                tokens = tokens[start:]
                yield r, w, piece, start, tokens, column + np.arange(len(tokens))
                column += len(tokens)
            assert column <= (w + 1) * block_tokens, (r, w)
