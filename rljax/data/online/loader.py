"""Batches of items in an endless shuffled order that can be resumed at any batch.

The items stay in memory, in a grain pipeline of their numbers; nothing is read or tokenized here.
"""

import hashlib
import json
from collections.abc import Sequence

import numpy as np

from rljax.data.online.stream import Stream, StreamLoader
from rljax.errors import InputError


class Loader:
    """An iterator of lists of `batch_size` items.

    Each epoch is a new shuffle that holds every item once, and batches run on across the border of
    epochs, so that nothing is dropped. Without `repeat` the last batch may be shorter. The whole
    state is the number of items given out: the order is a function of (seed, position).
    """

    def __init__(self, items: Sequence, *, batch_size: int, seed: int, shuffle: bool, repeat: bool):
        import grain  # 2 s, which `--help` need not pay

        _require_integer("batch_size", batch_size, 1, 2**31)
        _require_integer("seed", seed, 0, 2**32)
        if len(items) == 0:
            raise InputError("there are no items to load", fix="check the data source")
        self.batch_size = batch_size
        self.position = 0  # items given out since the start of the run
        self.dropped = 0  # on the way: what is in memory is all used
        self._items = items
        self._shuffled_epoch, self._permutation = -1, None
        self._order = grain.MapDataset.range(len(items))
        if repeat:
            self._order = self._order.repeat()
        if shuffle:
            # Not grain's own shuffle: it walks 2**16 numbers per epoch however few items there
            # are, 36 ms for ten of them. This one takes microseconds.
            self._order = self._order.map_with_index(self._shuffled)
        self._identity = dict(items=len(items), seed=seed, shuffle=shuffle, repeat=repeat)

    def _shuffled(self, index: int, number: int) -> int:
        """The item at `index` of the endless order; `number` is the one before shuffling."""
        epoch = index // len(self._items)
        if epoch != self._shuffled_epoch:
            # Raw bits, because numpy keeps their stream the same in every version, unlike that of
            # `permutation`: a run may be resumed after an upgrade.
            bits = np.random.Philox(np.random.SeedSequence([self._identity["seed"], epoch]))
            raw = bits.random_raw(len(self._items))
            self._permutation = np.argsort(raw, kind="stable").tolist()
            self._shuffled_epoch = epoch
        return self._permutation[number]

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self.position / len(self._items)

    @property
    def items_per_epoch(self) -> float:
        return float(len(self._items))

    def __iter__(self):
        return self

    def __next__(self) -> list:
        return self.take(self.batch_size)

    def take(self, count: int) -> list:
        """The next `count` items; fewer at the end of a loader that does not repeat."""
        stop = min(self.position + count, len(self._order))
        if stop == self.position:
            raise StopIteration
        batch = [self._items[self._order[i]] for i in range(self.position, stop)]
        self.position = stop
        return batch

    def get_state(self) -> dict:
        """The state from which `set_state` goes on; JSON-serialisable."""
        return dict(self._identity, position=self.position)

    def set_state(self, state: dict) -> None:
        """Goes to the position of `state`; raises InputError if the order there was another one."""
        if not isinstance(state, dict) or set(state) != {*self._identity, "position"}:
            raise InputError(
                "this is not a loader's state",
                value=state,
                fix="pass what get_state() of a loader returned",
            )
        for name, value in self._identity.items():
            if state[name] != value:
                raise InputError(
                    f"the data order cannot be resumed: {name!r} was {state[name]!r}",
                    value=value,
                    rule="a resumed run must see the same items in the same order",
                    fix=f"resume with the old {name!r}, or start a new run",
                )
        _require_integer("position", state["position"], 0, len(self._order) + 1)
        self.position = state["position"]


def make_loader(
    items: Sequence | Stream,
    *,
    batch_size: int,
    seed: int,
    shuffle: bool = True,
    repeat: bool = True,
) -> Loader | StreamLoader:
    """Batches of the items, in an order given by `seed`, endless unless `repeat` is False; those of
    a stream come as they are."""
    if isinstance(items, Stream):
        return StreamLoader(items, batch_size=batch_size, seed=seed)
    return Loader(items, batch_size=batch_size, seed=seed, shuffle=shuffle, repeat=repeat)


def fingerprint(records: Sequence[dict]) -> str:
    """sha256 of the records in order, to notice at resume that a data file has changed."""
    hashed = hashlib.sha256()
    for record in records:
        # Parquet has values that JSON lacks (dates, bytes); their repr tells them apart as well.
        line = json.dumps(record, sort_keys=True, default=repr)
        hashed.update(line.encode("ascii") + b"\n")
    return hashed.hexdigest()


def _require_integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < high:
        raise InputError(
            f"{name} must be a whole number",
            value=value,
            rule=f"from {low} to {high - 1}",
            fix=f"set {name} to a number of this range",
        )
