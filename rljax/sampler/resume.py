"""Requests that go on with cached keys and values: after a tool's reply, after a pause, behind a
part of a response (a branch).

What is new of many samples is read by a few programs. Caches of samples that wait for a reply while
others need their slots are kept beside the slots.

Axes: M slots of a call, S tokens of a call. `cached` tokens of a sample are read; the token behind
them is the next one to be read.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from rljax.errors import InputError
from rljax.sampler.engine import Engine, Prefix
from rljax.sampler.inputs import slot_inputs
from rljax.sampler.memory import check_whole
from rljax.sampler.requests import Sampling
from rljax.sampler.sample import Partial, Sample
from rljax.sampler.slots import Slots

# (M, S) of the programs that read: few slots and many tokens, or many slots and few.
_SHAPES = ((8, 1024), (8, 128), (64, 128), (8, 16), (64, 16), (256, 16))
_PREFIXES = 8  # of paused samples that are put back at a time
_MANY_ROUNDS = 4  # so many rounds of a shape take as long as one of the next larger shape


@dataclasses.dataclass(eq=False)
class Returning:
    """A sample that goes on in any free slot. `partial`: what was read of a paused one."""

    sample: Sample
    partial: Partial | None = None


def rows_for(count: int, choices: Sequence[int], slots: int) -> int:
    """Returns the smallest of `choices` (at most `slots` each) for `count` rows, or the largest."""
    sizes = sorted({min(rows, slots) for rows in choices})
    return next((rows for rows in sizes if rows >= count), sizes[-1])


def columns_for(tokens: int, engine_tokens: int) -> int:
    """Returns S of the call that reads `tokens` tokens of a sample, or the first of them."""
    sizes = sorted({min(columns, engine_tokens) for _, columns in _SHAPES})
    return next((columns for columns in sizes if tokens <= _MANY_ROUNDS * columns), sizes[-1])


def calls(unread: Sequence[int], engine: Engine) -> Iterator[tuple[int, int, list[int]]]:
    """Yields (M, S, which samples) of calls that each read at most S tokens of M samples, where
    sample i has unread[i] tokens to be read."""
    groups: dict[int, list[int]] = {}
    for i, tokens in enumerate(unread):
        groups.setdefault(columns_for(tokens, engine.tokens), []).append(i)
    for columns, indices in sorted(groups.items()):
        choices = [rows for rows, s in _SHAPES if min(s, engine.tokens) == columns]
        while indices:
            rows = rows_for(len(indices), choices, engine.slots)
            yield rows, columns, indices[:rows]
            indices = indices[rows:]


def read_together(engine: Engine, params, state: Slots, waiting: dict[int, Sample]) -> Slots:
    """Reads what is not cached of {slot: sample}, and makes the slots live. `state` is donated."""
    pending = [(slot, sample, sample.ids) for slot, sample in waiting.items()]
    while pending:
        unread = [len(ids) - 1 - sample.cached for _, sample, ids in pending]
        for rows, columns, indices in calls(unread, engine):
            state = _read(engine, params, state, [pending[i] for i in indices], rows, columns)
        pending = [entry for entry in pending if entry[1].cached < len(entry[2]) - 1]
    return state


def compile_reads(engine: Engine, params, state: Slots) -> Slots:
    """Compiles all programs of `read_together` by reading nothing."""
    shapes = {(min(rows, engine.slots), min(s, engine.tokens)) for rows, s in _SHAPES}
    for rows, columns in sorted(shapes):
        state = _read(engine, params, state, [], rows, columns)
    return state


def _read(engine: Engine, params, state: Slots, entries: list, rows: int, columns: int) -> Slots:
    """Reads up to `columns` tokens of each entry (slot, sample, ids), of at most `rows` entries."""
    slots = np.full(rows, engine.slots, np.int32)
    tokens, counts = np.zeros((rows, columns), np.int32), np.zeros(rows, np.int32)
    live = np.zeros(rows, bool)
    for i, (slot, sample, ids) in enumerate(entries):
        new_ids = ids[sample.cached + 1 : sample.cached + 1 + columns]
        slots[i], counts[i], tokens[i, : len(new_ids)] = slot, len(new_ids), new_ids
        live[i] = sample.cached + len(new_ids) == len(ids) - 1
    samples = [sample for _, sample, _ in entries]
    length = [sample.cached for sample in samples]
    token = [ids[sample.cached] for _, sample, ids in entries]
    inputs = slot_inputs(engine, samples, length, token, rows)
    state = engine.extend(params, state, slots, tokens, counts, inputs, live)
    for sample, count in zip(samples, counts.tolist(), strict=False):
        sample.cached += count
    return state


def batches(pairs: Sequence[tuple[int, int]], slots: int, beyond: int) -> Iterator[tuple]:
    """Yields all pairs as arrays (source [M], target [M]); the target of padding is `beyond`."""
    while pairs:
        rows = rows_for(len(pairs), (8, 64, 256), slots)
        source, target = np.zeros(rows, np.int32), np.full(rows, beyond, np.int32)
        for i, (source_index, target_index) in enumerate(pairs[:rows]):
            source[i], target[i] = source_index, target_index
        yield source, target
        pairs = pairs[rows:]


def restore_prefixes(engine: Engine, state: Slots, prefixes: dict[int, Prefix]) -> Slots:
    """Puts what was read of paused samples, {slot: prefix of one row}, into their slots.
    `state` is donated."""
    waiting = list(prefixes.items())
    while waiting:
        batch, waiting = waiting[:_PREFIXES], waiting[_PREFIXES:]
        count = 1 if len(batch) == 1 else _PREFIXES
        slots = np.full(count, engine.slots, np.int32)
        slots[: len(batch)] = [slot for slot, _ in batch]
        rows = [prefix for _, prefix in batch] + [batch[0][1]] * (count - len(batch))
        state = engine.restore(rows, state, slots, np.arange(count, dtype=np.int32))
    return state


class ParkedCaches:
    """Caches of samples without a slot: rows of a slot's size, as many as `tokens` allow."""

    def __init__(self, engine: Engine, tokens: int):
        self.engine, self.rows = engine, tokens // engine.tokens
        self._beside: Prefix | None = None  # allocated where it is first needed
        self._free = list(range(self.rows))
        self._row: dict[Sample, int] = {}

    def put(self, state: Slots, samples: dict[int, Sample]) -> None:
        """Keeps what slots {slot: sample} hold, as far as there is room; the rest is read again."""
        moves = []
        for slot, sample in samples.items():
            if sample.cached and self._free:
                self._row[sample] = self._free.pop(0)
                moves.append((slot, self._row[sample]))
            else:
                sample.forget()
        if moves and self._beside is None:
            self._beside = self.engine.empty_prefix(self.rows)
        for slots, rows in batches(moves, self.engine.slots, self.rows):
            self._beside = self.engine.park(state, self._beside, slots, rows)

    def take(self, state: Slots, samples: dict[int, Sample]) -> Slots:
        """Puts what is kept of samples into slots {slot: sample}, and gives its rows up."""
        moves = [(self._row[s], slot) for slot, s in samples.items() if s in self._row]
        for rows, slots in batches(moves, self.engine.slots, self.engine.slots):
            state = self.engine.restore([self._beside], state, slots, rows)
        for sample in samples.values():
            self.drop(sample)
        return state

    def copy(self, sample: Sample) -> Prefix | None:
        """Returns what is kept of a sample as a prefix of one row; None if nothing is."""
        if sample not in self._row:
            return None
        return self.engine.widen(self._beside, self._row[sample], sample.cached)

    def drop(self, sample: Sample) -> None:
        """Gives up what is kept of a sample, if there is anything."""
        if sample in self._row:
            self._free.append(self._row.pop(sample))
            self._free.sort()


def check_branch(
    sample: Sample,
    ends: Sequence[int],
    n: int,
    sampling: Sampling | None,
    more: Sequence[int],
    both: bool,
) -> None:
    """Raises InputError unless `Sampler.branch` can continue a sample behind the first ends[i]
    tokens of its response. `both`: keep and hold are asked for."""
    check_whole("n of a branch", n, 1)
    if sample.images is not None:
        raise InputError("branches of samples with images", fix="prompts of text")
    if both:
        raise InputError(
            "keep and hold", value=(True, True), rule="one of both", fix="set one of the two"
        )
    if sample.finish_reason is None:
        rule, fix = "a finished sample", "submit(hold=True), and branch when it has ended"
        raise InputError("branch", value=f"sample {sample.id}", rule=rule, fix=fix)
    count = len(sample.tokens)
    low, high = (sample.turn_start, count - 1) if sampling is None else (0, count)
    are_integers = [
        isinstance(end, (int, np.integer)) and not isinstance(end, bool) for end in ends
    ]
    if not ends or not all(are_integers) or not all(low <= end <= high for end in ends):
        rule = f"tokens of the response, {low} to {high}"
        if sampling is None:
            rule += ": inside of its last turn, whose limits go on"
        fix = "sampling= begins a new turn there" if sampling is None else "name such a token"
        raise InputError("branch at", value=ends[:8], rule=rule, fix=fix)
    if len(more) and sampling is None:
        rule = "a new turn begins behind them"
        raise InputError("branch more", value=list(more)[:8], rule=rule, fix="sampling=")
