"""CPU seconds of this thread, for tests of what grows with the size of hostile data.

The clock on the wall and the collector are left out: both depend on what else runs and lives."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def spent() -> Iterator[list[float]]:
    """A list that holds the CPU seconds of the block behind it."""
    seconds: list[float] = []
    was_on = gc.isenabled()
    gc.disable()
    began = time.thread_time()
    try:
        yield seconds
    finally:
        seconds.append(time.thread_time() - began)
        if was_on:
            gc.enable()


def at_most(seconds: float):
    """The block takes at most these CPU seconds. Give ten times what it takes, or more: the test is
    of work without end, not of speed."""

    @contextmanager
    def limited():
        with spent() as found:
            yield
        assert found[0] < seconds, f"{found[0]:.1f} CPU seconds, of at most {seconds}"

    return limited()
