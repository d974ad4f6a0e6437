"""One worker process of a `RewardPool`: the loop that it runs and the wire to its pool.

`calling` calls the reward; `supervisor` starts, times and kills workers. Imports nothing heavy.

A task is a sample, or of a reward that declares `responses` a group: the samples of one prompt.
The wire, both ways, is frames of an 8-byte length and a pickle.
  pool -> worker   a chunk: [(number of the task, pickled fields), ...]
  worker -> pool   ("ready", notes) or ("failed", message) once; then
                   ("scored", [(number, outcomes, seconds, longest), ...]) until the chunk is done:
                   an outcome (status, value, parts, message) per sample of the task, the seconds of
                   the call, and (seconds, scored) of the longest piece of it
Which task is running, and since when, stands in shared memory (`Progress`): that costs no system
call per task, and the pool can read it even while the worker is stuck. A reward that asks others
has the limit anew for each of them: what one leaves over must not decide about the next.
"""

import fcntl
import functools
import json
import mmap
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable

from rljax.components import Component, resolve
from rljax.rewards.pool.calling import (
    HOME,
    Fields,
    Outcome,
    call_group,
    call_reward,
    describe,
    describe_failure,
    failed_outcome,
    is_group_reward,
    late_outcome,
    members,
    prepare,
    scores_when_late,
    wanted_fields,
    watch,
)

_HEADER = struct.Struct("!Q")
_BETWEEN = struct.pack("q", -2)
PROGRESS_BYTES = 24
_ORPHAN_POLL_S = 5.0
_FLUSH_S = 0.001  # results are sent together if they took less: one wake-up of the pool, not many


class Progress:
    """(number, clock, scored) of the task that a worker is on, in a file that both processes map.

    `clock` is `time.monotonic()`, one clock for all processes of a machine. Number -1: none of the
    chunk yet; -2: in between. `scored`: whether what runs has a score when it is over its limit.
    """

    def __init__(self, descriptor: int):
        self._map = mmap.mmap(descriptor, PROGRESS_BYTES)

    def write(self, number: int, clock: float, scored: bool = False):
        # Each a copy of 8 bytes. (struct.pack_into writes zeros first: the other side may read
        # them, and a clock of 0 is a deadline long past.)
        self._map[0:8] = _BETWEEN
        self._map[8:16] = struct.pack("d", clock)
        self._map[16:24] = struct.pack("q", scored)
        self._map[0:8] = struct.pack("q", number)

    def read(self) -> tuple[int, float, bool]:
        while True:  # the other side may be half-way through a write
            before, content, after = self._map[0:8], self._map[8:24], self._map[0:8]
            if before == after:
                clock, scored = struct.unpack("dq", content)
                return struct.unpack("q", after)[0], clock, bool(scored)


class Clock:
    """What a worker is on: it says so to the pool, and keeps the longest piece of a call."""

    def __init__(self, progress: Progress, component: Component):
        self.progress, self.component = progress, component
        self.number, self.since, self.running = -1, 0.0, component
        self.longest = (0.0, False)  # seconds, and whether that piece has a score when late

    def begin(self, number: int, now: float) -> None:
        """A task begins."""
        self.number, self.longest = number, (0.0, False)
        self._go_on(self.component, now)

    def begin_member(self, member: Component) -> None:
        """A reward that the task's reward asks begins."""
        now = time.monotonic()
        self.end(now)
        self._go_on(member, now)

    def end(self, now: float) -> tuple[float, bool]:
        """The longest piece of the call so far."""
        self.longest = max(self.longest, (now - self.since, scores_when_late(self.running)))
        return self.longest

    def _go_on(self, component: Component, now: float) -> None:
        self.running, self.since = component, now
        self.progress.write(self.number, now, scores_when_late(component))


def read_frame(sock: socket.socket) -> bytes | None:
    """The next frame's bytes; None at the end of the stream."""
    header = _read_exactly(sock, _HEADER.size)
    return None if header is None else _read_exactly(sock, _HEADER.unpack(header)[0])


def _read_exactly(sock: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        count = sock.recv_into(view[filled:])
        if count == 0:
            return None
        filled += count
    return data


def frame(message: object) -> bytes:
    """A message as it goes on the wire."""
    payload = pickle.dumps(message, protocol=5)
    return _HEADER.pack(len(payload)) + payload


def take_frame(buffer: bytearray) -> object | None:
    """Remove the first whole frame from the buffer and return its message; None if none yet."""
    if len(buffer) < _HEADER.size:
        return None
    end = _HEADER.size + _HEADER.unpack_from(buffer)[0]
    if len(buffer) < end:
        return None
    message = pickle.loads(memoryview(buffer)[_HEADER.size : end].tobytes())
    del buffer[:end]
    return message


def main(spec_text: str) -> None:
    """Run as a worker. `spec_text`: JSON of the reward's text, descriptors, parent's pid."""
    # The pool stops its workers. A Ctrl-C or a scheduler's SIGTERM is the launcher's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    spec = json.loads(spec_text)
    _die_with(spec["lifeline"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a reward that crashes must not fill the disk
    if spec["memory_bytes"]:  # of what it writes to: libraries reserve far more addresses than that
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        most = spec["memory_bytes"] if hard < 0 else min(hard, spec["memory_bytes"])
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    sys.stdout.reconfigure(line_buffering=True)  # what a reward prints survives the kill
    sock = socket.socket(fileno=spec["socket"])
    sock.set_inheritable(False)  # a process that the reward starts must not keep the stream open
    progress = Progress(spec["progress"])
    os.close(spec["progress"])
    try:
        component = resolve(spec["reward"], HOME)
        fields = wanted_fields(component)
        notes = prepare(component)
    except BaseException as error:
        sock.sendall(frame(("failed", describe(error))))
        return
    sock.sendall(frame(("ready", notes)))
    clock = Clock(progress, component)
    if members(component) and not is_group_reward(component):
        watch(clock.begin_member)
    score = functools.partial(_outcomes, clock, fields, is_group_reward(component))
    try:
        _serve(sock, score, clock, spec["parent"])
    except (BrokenPipeError, ConnectionResetError):
        pass  # the pool was closed while a sample ran


def _die_with(lifeline: int) -> None:
    """End this process when the parent ends, even inside a C call that holds the interpreter lock.

    The lifeline is a pipe on which nothing is ever written. When its other end closes, the kernel
    sends SIGIO, whose default action ends the process. (PR_SET_PDEATHSIG would fire when the
    parent's *thread* ends.)
    """
    os.set_inheritable(lifeline, False)
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if _readable(lifeline, 0.0):
        sys.exit()  # it closed before we listened


def _readable(descriptor: int, seconds: float) -> bool:
    # select() refuses descriptors above 1023, and ours have the numbers that the parent gave them.
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _serve(sock: socket.socket, score: Callable, clock: Clock, parent: int) -> None:
    """Score chunks until the pool closes the stream."""
    me = os.getpid()
    while True:
        # A fork of the parent may hold the stream open after the parent's death: look ourselves.
        while not _readable(sock.fileno(), _ORPHAN_POLL_S):
            if os.getppid() != parent:
                return
        data = read_frame(sock)
        if data is None:
            return
        chunk = pickle.loads(data)
        now = flushed = time.monotonic()
        found = []
        for index, blob in chunk:
            clock.begin(index, now)
            outcomes = score(blob)
            if os.getpid() != me:  # the reward forked and its child came back to our stream
                os._exit(1)
            began, now = now, time.monotonic()
            found.append((index, outcomes, now - began, clock.end(now)))
            if now - flushed > _FLUSH_S:
                sock.sendall(frame(("scored", found)))
                found, now = [], time.monotonic()
                flushed = now
        if found:
            sock.sendall(frame(("scored", found)))


def _outcomes(clock: Clock, fields: Fields, grouped: bool, blob: bytes) -> list[Outcome]:
    """Of every sample of a task, whatever the reward raises."""
    component, count, sample = clock.component, 1, {}
    try:
        sample = pickle.loads(blob)
        if not grouped:
            return [("ok", *call_reward(component, sample, fields), "")]
        count = len(sample["responses"])
        return call_group(component, sample, fields)
    except BaseException as error:  # a reward's SystemExit and KeyboardInterrupt are errors too
        message = describe_failure(component, error)
        if _is_over_limit(error) and scores_when_late(clock.running):
            return [late_outcome(component, sample, message)] * count
        return [failed_outcome(message)] * count


def _is_over_limit(error: BaseException | None) -> bool:
    """Whether a limit of memory or of the stack was passed: how deep, or how large, is up to what
    the reward reads."""
    while error is not None:
        if isinstance(error, MemoryError | RecursionError):
            return True
        error = error.__cause__
    return False
