"""One worker process of a `RewardPool`: the loop that it runs and the wire to its pool.

`calling` calls the reward; `supervisor` starts, times and kills workers. Imports nothing heavy.

A call is of a sample, or of a reward that declares `responses` a group: the samples of one prompt.
The wire, both ways, is that of rljax.workers.
  pool -> worker   a chunk: [(number of the call, pickled fields), ...]
  worker -> pool   ("ready", notes) or ("failed", (has a fix, message)) once; then
                   ("scored", [(number, outcomes, seconds, longest), ...]) until the chunk is done:
                   an outcome (status, value, parts, message) per sample of the call, the seconds of
                   the call, and (seconds, scored) of the longest piece of it
Which call is running, and since when, stands in shared memory (`WorkerProgress`): that costs no
system call each, and the pool can read it even while the worker is stuck. A reward that asks others
has the limit anew for each of them: what one leaves over must not decide about the next.
"""

import functools
import os
import pickle
import time
from collections.abc import Callable, Mapping

from rljax.components import Component, resolve
from rljax.errors import InputError
from rljax.rewards.pool.calling import (
    HOME,
    Fields,
    Outcome,
    call_group,
    call_sample,
    compares_samples,
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
from rljax.workers.bootstrap import ORPHAN_POLL_S, WorkerContext, begin, readable
from rljax.workers.progress import WorkerProgress
from rljax.workers.wire import frame, read_frame

_FLUSH_S = 0.001  # results are sent together if they took less: one wake-up of the pool, not many


class CallClock:
    """Times a call in its worker: tells the pool which reward runs, and keeps the longest piece
    of a call."""

    def __init__(self, progress: WorkerProgress, component: Component):
        self.progress, self.component = progress, component
        self.number, self.since, self.running = -1, 0.0, component
        self.longest = (0.0, False)  # seconds, and whether that piece has a score when late

    def begin(self, number: int, now: float) -> None:
        """Notes that a call begins; `now` is time.monotonic()."""
        self.number, self.longest = number, (0.0, False)
        self._go_on(self.component, now)

    def begin_member(self, member: Component) -> None:
        """Notes that a reward begins which the reward of the call names."""
        now = time.monotonic()
        self.end(now)
        self._go_on(member, now)

    def end(self, now: float) -> tuple[float, bool]:
        """Returns (seconds of the longest piece of the call so far, whether that piece has a
        score when it is late)."""
        self.longest = max(self.longest, (now - self.since, scores_when_late(self.running)))
        return self.longest

    def _go_on(self, component: Component, now: float) -> None:
        self.running, self.since = component, now
        self.progress.write(self.number, now, scores_when_late(component))


def main(spec_text: str) -> None:
    """Runs as a worker. `spec_text`: see rljax.workers.bootstrap."""
    context = begin(spec_text)
    sock = context.socket
    try:
        component = resolve(context.facts["reward"], HOME)
        fields = wanted_fields(component)
        notes = prepare(component)
    except BaseException as error:
        has_fix = isinstance(error, InputError)
        sock.sendall(frame(("failed", (has_fix, str(error) if has_fix else describe(error)))))
        return
    sock.sendall(frame(("ready", notes)))
    clock = CallClock(context.progress, component)
    if members(component) and not compares_samples(component):
        watch(clock.begin_member)
    score = functools.partial(_outcomes, clock, fields, is_group_reward(component))
    try:
        _serve(context, score, clock)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the pool was closed while a sample ran


def _serve(context: WorkerContext, score: Callable, clock: CallClock) -> None:
    """Scores chunks until the pool closes the stream."""
    own_pid, sock = os.getpid(), context.socket
    while True:
        while not readable(sock.fileno(), ORPHAN_POLL_S):
            if context.orphaned():
                return
        data = read_frame(sock)
        if data is None:
            return
        chunk = pickle.loads(data)
        now = flushed = time.monotonic()
        results = []
        for index, blob in chunk:
            clock.begin(index, now)
            outcomes = score(blob)
            if os.getpid() != own_pid:  # the reward forked and its child came back to our stream
                os._exit(1)
            began, now = now, time.monotonic()
            results.append((index, outcomes, now - began, clock.end(now)))
            if now - flushed > _FLUSH_S:
                sock.sendall(frame(("scored", results)))
                results, now = [], time.monotonic()
                flushed = now
        if results:
            sock.sendall(frame(("scored", results)))


def _outcomes(clock: CallClock, fields: Fields, grouped: bool, blob: bytes) -> list[Outcome]:
    """Returns the outcome of every sample of a call, whatever the reward raises."""
    component, count, sample = clock.component, 1, {}

    def failed(sample: Mapping, error: BaseException) -> Outcome:
        message = describe_failure(component, error)
        if _is_over_limit(error) and scores_when_late(clock.running):
            return late_outcome(component, sample, message)
        return failed_outcome(message)

    try:
        sample = pickle.loads(blob)
        if not grouped:
            return [call_sample(component, sample, fields, failed)]
        count = len(sample["responses"])
        return call_group(component, sample, fields, failed)
    except BaseException as error:  # a reward's SystemExit and KeyboardInterrupt are errors too
        return [failed(sample, error)] * count


def _is_over_limit(error: BaseException | None) -> bool:
    """Returns whether a limit of memory or of the stack was passed: how deep, or how large, is up
    to what the reward reads."""
    while error is not None:
        if isinstance(error, MemoryError | RecursionError):
            return True
        error = error.__cause__
    return False
