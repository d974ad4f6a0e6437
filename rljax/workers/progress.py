"""A worker's current call and its start time, in memory that its parent maps, too: that costs no
system call for each one, and the parent can read it even while the worker is stuck."""

import mmap
import struct
import time

PROGRESS_BYTES = 24
_LOOKS = 1000
_BETWEEN = struct.pack("q", -2)


class WorkerProgress:
    """The call that a worker is on, as (number, clock, flag) in a file that both processes map.

    `clock` is `time.monotonic()`, one clock for all processes of a machine. Number -1: none of the
    calls that it was given yet; -2: between two. `flag` is the call's own: whether a reward has a
    score when it is over its limit.
    """

    def __init__(self, descriptor: int):
        self._map = mmap.mmap(descriptor, PROGRESS_BYTES)

    def write(self, number: int, clock: float, flag: bool = False):
        """Notes the number of a task, its start time and its flag."""
        # Each a copy of 8 bytes. (struct.pack_into writes zeros first: the other side may read
        # them, and a clock of 0 is a deadline long past.)
        self._map[0:8] = _BETWEEN
        self._map[8:16] = struct.pack("d", clock)
        self._map[16:24] = struct.pack("q", flag)
        self._map[0:8] = struct.pack("q", number)

    def read(self) -> tuple[int, float, bool]:
        """Returns (number, clock, flag); the clock is 0, a deadline long past, if it holds a time
        that cannot be."""
        for _ in range(_LOOKS):  # the other side may be half-way through a write
            before, content, after = self._map[0:8], self._map[8:24], self._map[0:8]
            if before == after:
                break
        clock, flag = struct.unpack("dq", content)
        # A clock that cannot be, which code of others has written, is a deadline long past.
        clock = clock if 0.0 <= clock <= time.monotonic() else 0.0
        return struct.unpack("q", after)[0], clock, bool(flag)
