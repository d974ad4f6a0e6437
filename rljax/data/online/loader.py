"""Batches of items in an order that can be resumed at any item, drawn from a grain dataset.

grain repeats, maps and batches the items, reads those of files ahead and goes to a saved position.
Ours is what it lacks: a shuffle that stays the same in every version of it and costs nothing where
items are few (grain's walks 2**16 numbers in each epoch), and counts of items that cannot be used.
"""

import collections
import functools
import hashlib
import json
import logging
import math
from collections.abc import Callable, Sequence

from rljax.data.dropped import REASONS, reasons
from rljax.data.online.stream import Stream, permutation
from rljax.errors import InputError

LOG = logging.getLogger("rljax")
_MOST_UNUSABLE = 1000  # items without a usable one, after which the limit is held to be wrong
_WARN_ABOVE, _WARN_AFTER = 0.1, 100  # share of items that are dropped, items
_LIMIT = "data.max_prompt_tokens (offline: offline.max_tokens)"
_RUNS_APART = 1_000_003  # items of a stream between the beginnings of two runs' seeds
_CHUNK = 64  # items that grain reads together
_WITHOUT_END = 2**62  # the length of a stream, which grain holds in 64 bits


class Loader:
    """An iterator of lists of `batch_size` items, in an order that is a function of the seed.

    Of a sequence each epoch is a new shuffle that holds every item once, and batches run on across
    the border of epochs, so that nothing is dropped. Without `repeat` the last batch may be
    shorter. A stream comes as it is from an index on that `seed` decides; its items that cannot be
    used are `dropped`, and `counts` has their number by reason, and that of items that were cut.
    The state is the number of items that were given out, and these counts. Raises InputError for an
    empty sequence, for a batch size below 1, and for a seed outside of [0, 2^32).
    """

    def __init__(
        self,
        items: Sequence | Stream,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        repeat: bool = True,
    ):
        import grain  # a second, which `--help` need not pay

        _require_integer("batch_size", batch_size, 1, 2**31)
        _require_integer("seed", seed, 0, 2**32)
        self.streamed = isinstance(items, Stream)
        if self.streamed:
            numbers = grain.MapDataset.range(seed * _RUNS_APART, _WITHOUT_END)
            dataset = numbers.map(functools.partial(_attempt, items.drawn))
            self._identity, self._numbers = dict(seed=seed), ("position", "dropped")
            self.items_per_epoch = float(items.rows or math.inf)
            # Rows of a file are read while devices train; those of a task are made when needed.
            self._size, ahead = (_CHUNK, -(-batch_size // _CHUNK)) if items.rows else (1, 0)
        else:
            if len(items) == 0:
                raise InputError("there are no items to load", fix="check the data source")
            numbers = grain.MapDataset.range(len(items))
            numbers = numbers.repeat() if repeat else numbers
            order = functools.lru_cache(1)(lambda epoch: permutation(len(items), seed, epoch))
            if shuffle:
                numbers = numbers.map_with_index(lambda i, n: int(order(i // len(items))[n]))
            dataset = numbers.map(lambda index: (items[index], {}))
            self._identity = dict(items=len(items), seed=seed, shuffle=shuffle, repeat=repeat)
            self._numbers, self.items_per_epoch = ("position",), float(len(items))
            self._size, ahead = _CHUNK, 0  # they are in memory
        self.batch_size, self.dropped, self._warned = batch_size, 0, False
        self.counts: collections.Counter[str] = collections.Counter()
        self._most = len(dataset)
        # In chunks: a thread that reads item by item takes turns with the one that asks for them.
        chunks = dataset.batch(self._size, batch_fn=list)
        reading = grain.ReadOptions(num_threads=min(ahead, 1), prefetch_buffer_size=ahead)
        self._chunks = iter(chunks.to_iter_dataset(reading))
        self._seek(0)

    def _seek(self, drawn: int) -> None:
        """Goes on behind the first `drawn` items, used or not."""
        self._chunks.set_state({"next_index": drawn // self._size})
        self._chunk, self._drawn = None, drawn

    def _next(self):
        """Returns the next item, None for one that cannot be used, with its counts; or the error of
        making it; or self at the end."""
        offset = self._drawn % self._size
        if offset == 0 or self._chunk is None:
            self._chunk = next(self._chunks, [])
        if offset >= len(self._chunk):
            return self
        self._drawn += 1
        return self._chunk[offset]

    @property
    def position(self) -> int:
        """Returns the number of items given out since the start of the run."""
        return self._drawn - self.dropped

    @property
    def epoch(self) -> float:
        """Returns the passes over the data so far; 0 for a stream whose items never repeat."""
        return self._drawn / self.items_per_epoch

    def __iter__(self):
        return self

    def __next__(self) -> list:
        return self.take(self.batch_size)

    def take(self, count: int) -> list:
        """Returns the next `count` items; fewer at the end of a loader that does not repeat, and
        raises StopIteration after it. Raises InputError if too many items of a stream in a row
        cannot be used; items that were drawn before an error are drawn again."""
        start, items, dropped, unusable = self._drawn, [], 0, 0
        counts = collections.Counter()
        try:
            while len(items) < count and (drawn := self._next()) is not self:
                if isinstance(drawn, Exception):
                    raise drawn
                item, counted = drawn
                counts.update(counted)
                if item is not None:
                    items.append(item)
                    unusable = 0
                    continue
                dropped, unusable = dropped + 1, unusable + 1
                if unusable >= _MOST_UNUSABLE:
                    raise _none_usable(counts)
        except BaseException:
            self._seek(start)  # the items of the batch are drawn again
            raise
        if count and not items:
            raise StopIteration
        self.dropped += dropped
        self.counts.update(counts)
        self._warn()
        return items

    def _warn(self) -> None:
        warn_after = min(_WARN_AFTER, self.items_per_epoch)
        too_many = self._drawn >= warn_after and self.dropped > _WARN_ABOVE * self._drawn
        if too_many and not self._warned:
            self._warned = True
            LOG.warning(
                "%d of the first %d rows of the stream are dropped: %s",
                self.dropped,
                self._drawn,
                reasons(self.counts, _LIMIT) or f"longer than {_LIMIT}",
            )

    def get_state(self) -> dict:
        """Returns the state from which `set_state` goes on, JSON-serialisable."""
        counts = {"counts": dict(self.counts)} if self.counts else {}
        return self._identity | {name: getattr(self, name) for name in self._numbers} | counts

    def set_state(self, state: dict) -> None:
        """Goes to the position of `state`; raises InputError if the order there was another one."""
        expected = {*self._identity, *self._numbers}
        if not isinstance(state, dict) or {*state} - {"counts"} != expected:
            kind = "an endless stream" if "dropped" in self._numbers else "a loader of a list"
            fix = "resume with the data settings of the checkpoint, or start a new run"
            raise InputError(f"this is not the state of {kind}", value=state, fix=fix)
        for name, value in self._identity.items():
            if state[name] != value:
                raise InputError(
                    f"the data order cannot be resumed: {name!r} was {state[name]!r}",
                    value=value,
                    rule="a resumed run must see the same items in the same order",
                    fix=f"resume with the old {name!r}, or start a new run",
                )
        for name in self._numbers:
            _require_integer(name, state[name], 0, self._most + 1)
        self.dropped = state.get("dropped", 0)
        self.counts = collections.Counter(state.get("counts", {}))  # an older run has none
        self._seek(state["position"] + self.dropped)


def _none_usable(counts: collections.Counter) -> InputError:
    """Returns the error of a stream of which too many rows in a row were dropped; the counts decide
    the reason that it names."""
    name = max(REASONS, key=lambda name: counts[name])
    if name != "dropped_overlong":
        problem = (
            f"{_MOST_UNUSABLE} rows of the stream in a row are dropped: {reasons(counts, _LIMIT)}"
        )
        return InputError(problem, fix=REASONS[name].fix)
    return InputError(
        f"{_MOST_UNUSABLE} rows of the stream in a row are too long, or hold nothing",
        fix="raise data.max_prompt_tokens (offline: offline.max_tokens), or cut "
        "them with data.overlong='left'",
    )


def _attempt(make: Callable[[int], object], index: int) -> object:
    """Returns make(index), or the error that it raises: the items before it in a chunk can be
    drawn."""
    try:
        return make(index)
    except Exception as error:
        return error


def fingerprint(records: Sequence[dict]) -> str:
    """Returns the SHA-256 of the records in order, in hex, by which a resumed run notices that a
    data file has changed."""
    digest = hashlib.sha256()
    for record in records:
        # Parquet has values that JSON lacks (dates, bytes); their repr tells them apart as well.
        line = json.dumps(record, sort_keys=True, default=repr)
        digest.update(line.encode("ascii") + b"\n")
    return digest.hexdigest()


def _require_integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < high:
        rule = f"from {low} to {high - 1}"
        fix = f"set {name} to a number of this range"
        raise InputError(f"{name} must be a whole number", value=value, rule=rule, fix=fix)
