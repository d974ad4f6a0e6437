"""Where a step's seconds go: `with timed("generate"):` adds to what the enclosing `collect()`
yields; `decoding` and `scored` note what ran at the same time.

All clocks are `time.monotonic()`, in seconds.
"""

import contextlib
import contextvars
import dataclasses
import time


@dataclasses.dataclass
class Timings:
    """What was noted within one `collect()`."""

    begun_s: float
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # by name
    spans: list[tuple[str, float, float]] = dataclasses.field(default_factory=list)
    live: list[tuple[float, int]] = dataclasses.field(default_factory=list)  # sequences decoding
    scoring: list[tuple[float, float]] = dataclasses.field(default_factory=list)  # of each sample


_timings: contextvars.ContextVar[Timings | None] = contextvars.ContextVar("timings", default=None)


@contextlib.contextmanager
def collect():
    """Within the block, everything here is noted in what this yields."""
    token = _timings.set(Timings(time.monotonic()))
    try:
        yield _timings.get()
    finally:
        _timings.reset(token)


@contextlib.contextmanager
def timed(name: str):
    """Add the seconds of the block to `name`; free of effect outside `collect`."""
    start = time.monotonic()
    try:
        yield
    finally:
        found, end = _timings.get(), time.monotonic()
        if found is not None:
            found.seconds[name] = found.seconds.get(name, 0.0) + end - start
            found.spans.append((name, start, end))


def decoding(live: int) -> None:
    """So many sequences are being decoded from now on."""
    if (found := _timings.get()) is not None:
        found.live.append((time.monotonic(), live))


def scored(begun_s: float, ended_s: float) -> None:
    """A sample was being scored from then till then."""
    if (found := _timings.get()) is not None:
        found.scoring.append((begun_s, ended_s))
