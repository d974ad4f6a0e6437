"""Endless rows, and the permutation of numbers that every shuffle of the data uses."""

from collections.abc import Callable

import numpy as np


class Stream:
    """An endless sequence: item `index` = 0, 1, ... is `make(index)`, a function of the index
    alone, or None if it cannot be used. A run begins at index seed * 1000003.

    `rows` is the number of items after which the rows of a file come again, and a thread makes the
    next ones while devices train; it is 0 for a stream that never repeats.
    """

    def __init__(self, make: Callable[[int], dict | None], rows: int = 0):
        self.make, self.rows = make, rows

    def __getitem__(self, index: int) -> dict | None:
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            # A slice would have no end.
            raise IndexError(f"a stream is indexed by whole numbers from 0 on, not {index!r}")
        return self.make(index)

    def drawn(self, index: int) -> tuple[dict | None, dict[str, int]]:
        """Returns item `index`, and the counts of its encoding (rljax.data.dropped)."""
        return self.make(index), {}

    __iter__ = None  # `for` would not end

    def first(self, count: int) -> list[dict]:
        """Returns items 0 to `count` - 1."""
        return [self[index] for index in range(count)]


class CountedStream(Stream):
    """A stream whose `make` returns an item with the counts of its encoding."""

    def __getitem__(self, index: int) -> dict | None:
        return super().__getitem__(index)[0]

    def drawn(self, index: int) -> tuple[dict | None, dict[str, int]]:
        """Returns item `index`, and the counts of its encoding."""
        return self.make(index)


def permutation(count: int, *seed: int) -> np.ndarray:
    """Returns a permutation [count] of the numbers below `count`, a function of `seed`.

    It is made of raw bits, whose stream numpy keeps the same in every version, unlike that of
    `Generator.permutation`: a run may be resumed after an upgrade.
    """
    bits = np.random.Philox(np.random.SeedSequence(seed))
    return np.argsort(bits.random_raw(count), kind="stable")
