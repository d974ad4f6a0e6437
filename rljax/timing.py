"""Where a step's seconds go: `with timed("generate"):` adds to the totals of the enclosing
`collect()`."""

import contextlib
import contextvars
import time

_totals: contextvars.ContextVar[dict[str, float] | None] = contextvars.ContextVar(
    "totals", default=None
)


@contextlib.contextmanager
def collect():
    """Within the block, `timed` adds seconds to the dict that this yields."""
    token = _totals.set({})
    try:
        yield _totals.get()
    finally:
        _totals.reset(token)


@contextlib.contextmanager
def timed(name: str):
    """Add the seconds of the block to `name`; free of effect outside `collect`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        totals = _totals.get()
        if totals is not None:
            totals[name] = totals.get(name, 0.0) + time.perf_counter() - start
