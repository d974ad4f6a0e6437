"""CPU seconds of this thread, for tests of what grows with the size of hostile data.

Neither the clock on the wall nor the garbage collector counts: both depend on what else runs.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def spent() -> Iterator[list[float]]:
    """Yields a list that holds the CPU seconds of the block once it has ended."""
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


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Asserts that the block takes at most so many CPU seconds. Give ten times what it takes, or
    more: the test is of work without end, not of speed."""
    with spent() as found:
        yield
    assert found[0] < seconds, f"{found[0]:.1f} CPU seconds, of at most {seconds}"
