"""Packing: several sequences in one row, so that fewer tokens are padding.

Decides which sequence, or which piece of one, goes into which row, from lengths alone. Lengths and
row sizes are in tokens.
"""

import bisect
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from rljax.data.online.prompts import require_positive
from rljax.errors import InputError

Strategy = Literal["bfd", "bfd_split", "wrapped"]
STRATEGIES = ("bfd", "bfd_split", "wrapped")


class SequenceSlice(NamedTuple):
    """Tokens [start, stop) of sequence `index`."""

    index: int
    start: int
    stop: int


class PackedRows(NamedTuple):
    """Rows of whole examples, and the share of their tokens that are real: real tokens / (rows x
    length)."""

    rows: list[list]
    efficiency: float


def pack(
    lengths: Sequence[int], row_tokens: int, strategy: Strategy = "bfd"
) -> list[list[SequenceSlice]]:
    """Returns rows of at most `row_tokens` tokens, each a list of pieces in their order in the row.

    bfd: best-fit decreasing; longest first, each into the fullest row that still has room, equal
    lengths in their given order; tokens beyond a row are cut off. bfd_split: a longer sequence is
    first split into pieces of a row each, and nothing is lost. wrapped: all tokens one after
    another, cut wherever a row is full. Best-fit packing: arXiv 2404.10830. Raises InputError for
    an unknown strategy, and unless `row_tokens` and all lengths are whole numbers of at least 1.
    """
    require_positive("row_tokens", row_tokens)
    if strategy not in STRATEGIES:
        raise InputError("unknown 'strategy'", value=strategy, fix=f"use one of {STRATEGIES}")
    for index, length in enumerate(lengths):
        require_positive(f"lengths[{index}]", length)
    if strategy == "wrapped":
        return _cut_into_rows(lengths, row_tokens)
    starts = {"bfd": lambda n: range(1), "bfd_split": lambda n: range(0, n, row_tokens)}[strategy]
    pieces = [
        SequenceSlice(index, start, min(start + row_tokens, length))
        for index, length in enumerate(lengths)
        for start in starts(length)
    ]
    return _best_fit_decreasing(pieces, row_tokens)


def _best_fit_decreasing(
    pieces: Sequence[SequenceSlice], row_tokens: int
) -> list[list[SequenceSlice]]:
    rows: list[list[SequenceSlice]] = []
    # The rows with room: by their number of free tokens, first come first served among equals.
    waiting: dict[int, deque[int]] = {}
    free_sizes: list[int] = []  # the keys of `waiting`, ascending
    for piece in sorted(pieces, key=lambda p: p.start - p.stop):  # stable, longest first
        size = piece.stop - piece.start
        position = bisect.bisect_left(free_sizes, size)
        if position < len(free_sizes):
            free = free_sizes[position]
            row = waiting[free].popleft()
            if not waiting[free]:
                del waiting[free], free_sizes[position]
        else:
            free, row = row_tokens, len(rows)
            rows.append([])
        rows[row].append(piece)
        remaining = free - size
        if remaining and remaining not in waiting:
            bisect.insort(free_sizes, remaining)
        if remaining:
            waiting.setdefault(remaining, deque()).append(row)
    return rows


def _cut_into_rows(lengths: Sequence[int], row_tokens: int) -> list[list[SequenceSlice]]:
    rows: list[list[SequenceSlice]] = []
    free = 0
    for index, length in enumerate(lengths):
        start = 0
        while start < length:
            if free == 0:
                rows.append([])
                free = row_tokens
            stop = min(start + free, length)
            rows[-1].append(SequenceSlice(index, start, stop))
            free -= stop - start
            start = stop
    return rows


def pack_examples(items: Sequence[tuple[np.ndarray, np.ndarray]], length: int) -> PackedRows:
    """Packs whole supervised examples (ids [n], mask [n]) into rows, by best-fit decreasing.

    Raises InputError for an example longer than a row: a cut example is the encoder's to count.
    """
    require_positive("length", length)
    sizes = [len(ids) for ids, _ in items]
    for index, size in enumerate(sizes):
        if size > length:
            raise InputError(
                f"example {index} has {size} tokens",
                rule=f"packed rows are {length} tokens long",
                fix="encode the examples with max_tokens of at most that length",
            )
    rows = [[items[piece.index] for piece in row] for row in pack(sizes, length)]
    efficiency = sum(sizes) / (len(rows) * length) if rows else 0.0
    return PackedRows(rows, efficiency)
