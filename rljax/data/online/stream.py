"""Rows without end: a stream is a function of the index, so resuming needs a position alone."""

import logging
import math
from collections.abc import Callable

from rljax.errors import InputError

LOG = logging.getLogger("rljax")
_IN_A_ROW = 1000  # items without a usable one, after which the limit is held to be wrong
_WARN_ABOVE, _WARN_AFTER = 0.1, 100  # share of items that are dropped, items
_RUNS_APART = 1_000_003  # items between the beginnings of two runs' seeds


class Stream:
    """Items without end: item `index` = 0, 1, ... is `make(index)`, a function of it alone; None is
    one that cannot be used. A run begins at seed * 1000003, not at 0. `rows`: after so many items
    those of a file come again; 0: none does."""

    def __init__(self, make: Callable[[int], dict | None], rows: int = 0):
        self.make, self.rows = make, rows

    def __getitem__(self, index: int) -> dict | None:
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            # A slice would have no end.
            raise IndexError(f"a stream is indexed by whole numbers from 0 on, not {index!r}")
        return self.make(index)

    __iter__ = None  # `for` would not end

    def first(self, count: int) -> list[dict]:
        """Items 0 to `count` - 1."""
        return [self[index] for index in range(count)]


class StreamLoader:
    """Loader's interface over a stream: items in the order of their indices, none repeated.

    `seed` decides where the run begins. The whole state is how many items were given out and how
    many were dropped on the way.
    """

    def __init__(self, stream: Stream, *, batch_size: int, seed: int):
        self.batch_size, self.position, self.dropped = batch_size, 0, 0
        self._stream, self._seed = stream, seed
        self._warned = False

    @property
    def epoch(self) -> float:
        """Passes over the rows of a file; a stream of a task is never passed over."""
        return (self.position + self.dropped) / self._stream.rows if self._stream.rows else 0.0

    @property
    def items_per_epoch(self) -> float:
        """The rows of a file; infinite for a stream of a task."""
        return float(self._stream.rows) if self._stream.rows else math.inf

    def __iter__(self):
        return self

    def __next__(self) -> list:
        return self.take(self.batch_size)

    def take(self, count: int) -> list:
        """The next `count` items that can be used."""
        items, position, dropped, in_a_row = [], self.position, self.dropped, 0
        while len(items) < count:
            item = self._stream[self._seed * _RUNS_APART + position + dropped]
            if item is not None:
                items.append(item)
                position, in_a_row = position + 1, 0
                continue
            dropped, in_a_row = dropped + 1, in_a_row + 1
            if in_a_row >= _IN_A_ROW:
                raise InputError(
                    f"{_IN_A_ROW} rows of the stream in a row are too long, or hold nothing",
                    fix="raise data.max_prompt_tokens (offline: offline.max_tokens), or cut them "
                    "with data.overlong='left'",
                )
        self.position, self.dropped = position, dropped
        self._warn()
        return items

    def _warn(self) -> None:
        drawn = self.position + self.dropped
        if not self._warned and drawn >= _WARN_AFTER and self.dropped > _WARN_ABOVE * drawn:
            self._warned = True
            LOG.warning(
                "%d of the first %d rows of the stream are dropped: longer than "
                "data.max_prompt_tokens (offline: offline.max_tokens)",
                self.dropped,
                drawn,
            )

    def get_state(self) -> dict:
        """The state from which `set_state` goes on; JSON-serialisable."""
        return {"seed": self._seed, "position": self.position, "dropped": self.dropped}

    def set_state(self, state: dict) -> None:
        """Goes to the position of `state`; raises InputError if it is another order's."""
        if not isinstance(state, dict) or set(state) != set(self.get_state()):
            raise InputError(
                "this is not the state of an endless stream",
                value=state,
                fix="resume with the data settings of the checkpoint, or start a new run",
            )
        if state["seed"] != self._seed:
            raise InputError(
                f"the data order cannot be resumed: 'seed' was {state['seed']!r}",
                value=self._seed,
                rule="a resumed run must see the same items in the same order",
                fix="resume with the old 'seed', or start a new run",
            )
        for name in ("position", "dropped"):
            value = state[name]
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InputError(
                    f"{name} must be a whole number",
                    value=value,
                    rule="from 0 on",
                    fix="pass what get_state() of a stream returned",
                )
        self.position, self.dropped = state["position"], state["dropped"]
