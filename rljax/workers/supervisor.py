"""Worker processes that can be killed, and the thread that owns them.

A supervisor starts, replaces, times, kills and reaps its processes, reads their messages and keeps
what they print. A subclass decides what they are given, and who is to blame for the end of a
worker: rljax.rewards.pool.supervisor, rljax.environments.supervisor.
"""

import abc
import contextlib
import math
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time

from rljax.components import Component
from rljax.workers.function import worker_failed
from rljax.workers.prints import Prints
from rljax.workers.process import WorkerProcess
from rljax.workers.wire import BrokenFrame, take_frame

START_TIMEOUT_S = 120.0  # a worker imports a user's module: slow on a network disk
REAP_TIMEOUT_S = 5.0
FRAME_TIMEOUT_S = 60.0  # from the first byte of a message to its last
START_ATTEMPTS = 3


class Supervisor(abc.ABC):
    """`size` workers that run `component` and the thread that owns them, from `start` until `stop`.
    Only the thread calls what is below `_run`; others leave `orders` in a queue that a signal
    handler may use as well."""

    name: str  # name of the thread, and of the workers in errors
    cannot_load: str  # the error of a worker that cannot load the component; {} is its text
    closed: str  # the error of those who wait when the supervisor stops
    sends: tuple[type, ...] = ()  # the classes in messages of its workers

    def __init__(self, component: Component, size: int, memory_bytes: int, prints: Prints | None):
        self.component, self.size = component, size
        self.memory_bytes, self.prints = memory_bytes, prints
        self.notes: dict[str, str] = {}  # notes that contract(prepare=...) has returned
        # Replacements start later: they must see the folder and the path of today.
        self.folder, self.path = os.getcwd(), [str(entry) for entry in sys.path]
        self.owner = os.getpid()
        self.orders: queue.SimpleQueue = queue.SimpleQueue()
        self.workers: list = []
        self.failed_starts = 0
        self.stopped = False
        self._is_started = False
        self._started: queue.SimpleQueue = queue.SimpleQueue()  # None, or why it could not start
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._rope.setblocking(False)
        self._dying: list[subprocess.Popen] = []
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    # -- what a subclass says

    @abc.abstractmethod
    def new_worker(self) -> WorkerProcess:
        """Returns a worker that has just been started."""

    @abc.abstractmethod
    def take_order(self, verb: str, *content) -> None:
        """Acts on an order of another thread."""

    @abc.abstractmethod
    def wanted(self) -> bool:
        """Returns whether anybody waits: a worker that cannot start must not be started
        for ever."""

    @abc.abstractmethod
    def hand_out(self) -> None:
        """Gives workers their next tasks."""

    @abc.abstractmethod
    def deadline(self, worker) -> float:
        """Returns the time.monotonic() at which a worker is over its time."""

    @abc.abstractmethod
    def look_again_s(self) -> float:
        """Returns the seconds after which a task that began meanwhile may be near its deadline."""

    @abc.abstractmethod
    def are_results(self, worker, kind: str, content: object) -> bool:
        """Returns whether a worker may send this message in its state."""

    @abc.abstractmethod
    def heard(self, worker, kind: str, content: object) -> None:
        """Acts on a message of a worker that is ready."""

    @abc.abstractmethod
    def expire(self, worker) -> None:
        """Called when a deadline has passed: discards the worker."""

    @abc.abstractmethod
    def reap(self, worker, why: str = "") -> None:
        """Called when a worker has ended by itself, or there is a reason to end it: discards it."""

    @abc.abstractmethod
    def fail(self, error: Exception) -> None:
        """Called when the supervisor itself is at fault: tells everyone who waits."""

    @abc.abstractmethod
    def ended(self) -> None:
        """Called when all processes have ended: tells everyone who waits."""

    # -- what other threads may call

    def start(self) -> None:
        """Returns when every worker is ready. Raises what keeps them from it."""
        self.thread.start()
        if (error := self._started.get()) is not None:
            raise error

    def order(self, *order) -> None:
        """Leaves an order for the thread."""
        self.orders.put(order)
        self.ring()

    def ring(self) -> None:
        """Wakes the thread."""
        with contextlib.suppress(OSError):  # it rings already; or the thread is over
            self._rope.send(b".")

    def stop(self) -> None:
        """Kills the workers and waits for their end. It may be called again, and in a
        signal handler."""
        if os.getpid() != self.owner:  # a fork has a copy, not the right to end it
            return
        self.stopped = True
        self.ring()
        if self.thread.ident is not None and threading.current_thread() is not self.thread:
            self.thread.join()

    # -- the thread

    def _run(self) -> None:
        try:
            while not self.stopped:
                try:
                    self.listen()
                    self._fill()
                    if all(worker.state == "ready" for worker in self.workers):
                        self._end_start()
                    self.hand_out()
                    self._wait_and_act()
                except Exception as error:
                    self.failed_starts = max(1, self.failed_starts)  # see _fill
                    self._end_start(error)
                    self.fail(error)
        finally:
            self._end()

    def listen(self) -> None:
        """Takes up the orders of other threads."""
        while True:
            try:
                order = self.orders.get_nowait()
            except queue.Empty:
                return
            self.take_order(*order)

    def _end_start(self, error: Exception | None = None) -> None:
        """Tells the caller of `start`, once, that all workers are ready, or why they are not."""
        if not self._is_started:
            self._is_started = True
            self._started.put(error)

    def _fill(self) -> None:
        """Brings the workers back to their full number, without waiting for their start."""
        self._dying[:] = [process for process in self._dying if process.poll() is None]
        if self.failed_starts and self._is_started and not self.wanted():
            return
        while len(self.workers) < self.size:
            self.workers.append(self.new_worker())

    def _wait_and_act(self) -> None:
        """Waits for a message or a deadline, and acts on it."""
        with selectors.PollSelector() as selector:
            selector.register(self._bell, selectors.EVENT_READ)
            for worker in self.workers:
                events = selectors.EVENT_READ | selectors.EVENT_WRITE * worker.has_unsent
                selector.register(worker.socket, events, worker)
                if worker.printed >= 0:
                    selector.register(worker.printed, selectors.EVENT_READ, worker)
            deadline = min(map(self._deadline, self.workers), default=math.inf)
            # A call that begins after this look at the clocks says nothing: look again before it
            # can be over time. (The hour: poll() takes no timeout above 2**31 ms.)
            wait = min(deadline - time.monotonic(), self.look_again_s(), 3600.0)
            ready = {key.data for key, _ in selector.select(max(0.0, wait))}
        if None in ready:
            with contextlib.suppress(BlockingIOError):
                self._bell.recv(1 << 16)
        for worker in list(self.workers):
            if worker in ready:
                self._keep_prints(worker)
                self._read(worker)
            if worker.state != "dead" and worker.has_unsent:
                with contextlib.suppress(OSError):  # its end is read, too
                    worker.send_on()
            if worker.state != "dead" and time.monotonic() > self._deadline(worker):
                # We may have been asleep: what arrived meanwhile counts before the clock does.
                self._read(worker)
                if worker.state != "dead" and time.monotonic() > self._deadline(worker):
                    if time.monotonic() > self.deadline(worker):
                        self.expire(worker)
                    else:
                        self.reap(worker, "it began a message and did not end it")

    def _deadline(self, worker) -> float:
        """Returns the time at which a worker is over its time, or over that of a message."""
        return min(self.deadline(worker), worker.unfinished_since + FRAME_TIMEOUT_S)

    def _keep_prints(self, worker) -> None:
        if worker.printed >= 0 and not self.prints.read_from(worker.printed):
            worker.close_pipe()

    def _read(self, worker) -> None:
        """Acts on all that a worker has sent, and on its end."""
        still_open, received_bytes = worker.receive(), len(worker.received)
        try:
            while worker.state != "dead":
                message = take_frame(worker.received, self.sends)
                if message is None:
                    break
                if not self._is_message(worker, message):
                    raise BrokenFrame(f"{message!r:.100}")
                self._act_on(worker, *message)
        except BrokenFrame as error:
            self.reap(worker, f"it sent what is no message: {error}")
        if not worker.received:
            worker.unfinished_since = math.inf
        elif worker.unfinished_since == math.inf or len(worker.received) < received_bytes:
            worker.unfinished_since = time.monotonic()
        if not still_open and worker.state != "dead":
            self.reap(worker)

    def _act_on(self, worker, kind: str, content: object) -> None:
        if kind == "ready":
            worker.state, self.failed_starts = "ready", 0
            self.notes |= content
        elif kind == "failed":
            self.discard(worker)
            raise worker_failed(self.cannot_load.format(repr(self.component.text)), content)
        else:
            self.heard(worker, kind, content)

    def _is_message(self, worker, message: object) -> bool:
        if not (type(message) is tuple and len(message) == 2 and type(message[0]) is str):
            return False
        kind, content = message
        if kind == "ready":
            return worker.state == "starting" and type(content) is dict
        if kind == "failed":
            is_failure = type(content) is tuple and [type(part) for part in content] == [bool, str]
            return worker.state == "starting" and is_failure
        return self.are_results(worker, kind, content)

    def discard(self, worker) -> None:
        """Kills a worker."""
        worker.kill()
        self._keep_prints(worker)  # output that it wrote before its end
        worker.close_pipe()
        self.workers.remove(worker)
        self._dying.append(worker.process)

    def count_failed_start(self, what: str, how: str) -> None:
        """Counts a worker that has ended before its first call. Raises RuntimeError for the third
        in a row."""
        self.failed_starts += 1
        if self.failed_starts >= START_ATTEMPTS:
            self.failed_starts = 1
            raise RuntimeError(
                f"{START_ATTEMPTS} {self.name} workers in a row ended, or said nothing, before "
                f"their first {what} ({how}); see {self.prints.path if self.prints else 'stderr'}"
            )

    def _end(self) -> None:
        """Kills and reaps every process, and tells everyone who waits."""
        for worker in list(self.workers):
            self.discard(worker)
        deadline = time.monotonic() + REAP_TIMEOUT_S
        for process in self._dying:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._dying.clear()
        self._end_start(RuntimeError(self.closed))
        self.ended()
        self._bell.close()
        self._rope.close()


def how_it_ended(process: subprocess.Popen) -> str:
    """Waits for a process and describes how it ended."""
    try:
        code = process.wait(REAP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "still dying"
    return f"exit code {code}" if code >= 0 else f"signal {-code}, {signal.strsignal(-code)}"
