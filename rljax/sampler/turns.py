"""Samples that go on: what is new of many of them is read by a few programs, and caches of samples
that wait for a tool while others need their slots are kept beside the slots.

Axes: M slots of a call, S tokens of a call.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from rljax.sampler.engine import Engine, Prefix
from rljax.sampler.entries import entry_of
from rljax.sampler.sample import Partial, Sample
from rljax.sampler.slots import Slots

# (M, S) of the programs that read: few slots and many tokens, or many slots and few.
_SHAPES = ((8, 1024), (8, 128), (64, 128), (8, 16), (64, 16), (256, 16))
_PREFIXES = 8  # of paused samples that are put back at a time
_MANY_ROUNDS = 4  # of a shape of fewer tokens: then the next one takes as long


@dataclasses.dataclass(eq=False)
class Return:
    """A sample that goes on in any slot; a paused one with what was read of it."""

    sample: Sample
    partial: Partial | None = None


def rows_for(count: int, choices: Sequence[int], slots: int) -> int:
    """The smallest number of rows that takes `count`, or the largest there is."""
    known = sorted({min(rows, slots) for rows in choices})
    return next((rows for rows in known if rows >= count), known[-1])


def columns_for(tokens: int, engine_tokens: int) -> int:
    """S of the call that reads so many tokens, or the first of them."""
    known = sorted({min(columns, engine_tokens) for _, columns in _SHAPES})
    return next((columns for columns in known if tokens <= _MANY_ROUNDS * columns), known[-1])


def calls(unread: Sequence[int], engine: Engine) -> Iterator[tuple[int, int, list[int]]]:
    """(M, S, which) of the calls that each read at most S of unread [N] tokens."""
    groups: dict[int, list[int]] = {}
    for i, tokens in enumerate(unread):
        groups.setdefault(columns_for(tokens, engine.tokens), []).append(i)
    for columns, which in sorted(groups.items()):
        choices = [rows for rows, s in _SHAPES if min(s, engine.tokens) == columns]
        while which:
            rows = rows_for(len(which), choices, engine.slots)
            yield rows, columns, which[:rows]
            which = which[rows:]


def read_together(engine: Engine, params, state: Slots, waiting: dict[int, Sample]) -> Slots:
    """Reads what is not cached of the samples in slots {slot: sample}, and makes the slots live."""
    left = [(at, sample, sample.ids) for at, sample in waiting.items()]
    while left:
        unread = [len(ids) - 1 - sample.cached for _, sample, ids in left]
        for rows, columns, which in calls(unread, engine):
            state = _read(engine, params, state, [left[i] for i in which], rows, columns)
        left = [one for one in left if one[1].cached < len(one[2]) - 1]
    return state


def reread_nothing(engine: Engine, params, state: Slots) -> Slots:
    """Compiles the programs that read what is new, by reading nothing."""
    for rows, columns in sorted(
        {(min(r, engine.slots), min(s, engine.tokens)) for r, s in _SHAPES}
    ):
        state = _read(engine, params, state, [], rows, columns)
    return state


def _read(engine: Engine, params, state: Slots, some: list, rows: int, columns: int) -> Slots:
    slots = np.full(rows, engine.slots, np.int32)
    tokens, counts = np.zeros((rows, columns), np.int32), np.zeros(rows, np.int32)
    live = np.zeros(rows, bool)
    for i, (at, sample, ids) in enumerate(some):
        new = ids[sample.cached + 1 : sample.cached + 1 + columns]
        slots[i], counts[i], tokens[i, : len(new)] = at, len(new), new
        live[i] = sample.cached + len(new) == len(ids) - 1
    samples = [sample for _, sample, _ in some]
    length = [sample.cached for sample in samples]
    token = [ids[sample.cached] for _, sample, ids in some]
    entry = entry_of(engine, samples, length, token, rows)
    state = engine.extend(params, state, slots, tokens, counts, entry, live)
    for sample, count in zip(samples, counts.tolist(), strict=False):
        sample.cached += count
    return state


def batches(pairs: Sequence[tuple[int, int]], slots: int, beyond: int) -> Iterator[tuple]:
    """(source [M], target [M]) arrays of all pairs; the target of padding is `beyond`."""
    while pairs:
        rows = rows_for(len(pairs), (8, 64, 256), slots)
        source, target = np.zeros(rows, np.int32), np.full(rows, beyond, np.int32)
        for i, (one, other) in enumerate(pairs[:rows]):
            source[i], target[i] = one, other
        yield source, target
        pairs = pairs[rows:]


def put_back(engine: Engine, state: Slots, prefixes: dict[int, Prefix]) -> Slots:
    """Puts what was read of paused samples, a prefix of one row each, into slots {slot: prefix}."""
    waiting = list(prefixes.items())
    while waiting:
        some, waiting = waiting[:_PREFIXES], waiting[_PREFIXES:]
        count = 1 if len(some) == 1 else _PREFIXES
        slots = np.full(count, engine.slots, np.int32)
        slots[: len(some)] = [at for at, _ in some]
        rows = [prefix for _, prefix in some] + [some[0][1]] * (count - len(some))
        state = engine.restore(rows, state, slots, np.arange(count, dtype=np.int32))
    return state


class Parked:
    """Caches of samples beside the slots: rows of a slot's size, as many as `tokens` allows."""

    def __init__(self, engine: Engine, tokens: int):
        self.engine, self.rows = engine, tokens // engine.tokens
        self._beside: Prefix | None = None  # allocated where it is first needed
        self._free = list(range(self.rows))
        self._row: dict[Sample, int] = {}

    def __contains__(self, sample: Sample) -> bool:
        return sample in self._row

    def put(self, state: Slots, samples: dict[int, Sample]) -> None:
        """Keeps what slots {slot: sample} hold, as far as there is room; the others forget it."""
        moves = []
        for at, sample in samples.items():
            if sample.cached and self._free:
                self._row[sample] = self._free.pop(0)
                moves.append((at, self._row[sample]))
            else:
                sample.forget()
        if moves and self._beside is None:
            self._beside = self.engine.empty_prefix(self.rows)
        for slots, rows in batches(moves, self.engine.slots, self.rows):
            self._beside = self.engine.park(state, self._beside, slots, rows)

    def take(self, state: Slots, samples: dict[int, Sample]) -> Slots:
        """Puts what is kept of samples into slots {slot: sample}."""
        moves = [(self._row[s], at) for at, s in samples.items() if s in self._row]
        for rows, slots in batches(moves, self.engine.slots, self.engine.slots):
            state = self.engine.restore([self._beside], state, slots, rows)
        for sample in samples.values():
            self.drop(sample)
        return state

    def copied(self, sample: Sample) -> Prefix | None:
        """Copies what is kept of a sample, as a prefix of one row."""
        if sample not in self._row:
            return None
        return self.engine.widen(self._beside, self._row[sample], sample.cached)

    def drop(self, sample: Sample) -> None:
        """Gives up what is kept of a sample, if anything is."""
        if sample in self._row:
            self._free.append(self._row.pop(sample))
            self._free.sort()
