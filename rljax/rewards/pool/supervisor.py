"""The processes of a `RewardPool`, and the thread that feeds, times, kills and replaces them.

One thread owns every process and knows which worker runs which task since when. Other threads send
it `orders` through a queue that a signal handler may use as well; it answers by settling jobs.
"""

import collections
import contextlib
import math
import os
import pickle
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time

from rljax.components import Component
from rljax.errors import InputError
from rljax.rewards.pool.calling import failed_outcome, late_outcome
from rljax.rewards.pool.jobs import Job, Score, Task
from rljax.rewards.pool.prints import Prints
from rljax.rewards.pool.process import BEGIN_TIMEOUT_S, WorkerProcess
from rljax.rewards.pool.worker import take_frame

_START_TIMEOUT_S = 120.0  # a worker imports the reward's module: slow on a network disk
_REAP_TIMEOUT_S = 5.0
_START_ATTEMPTS = 3
_CHUNK = 256  # tasks at most that a worker is handed at once,
_CHUNK_S = 0.01  # and seconds of work: one wake-up of the thread costs a hundredth of it
_RECENT = 0.1  # weight of a task in the running mean of their seconds


class Supervisor:
    """`size` workers and the thread that owns them, from `start` until `stop`."""

    def __init__(
        self, component: Component, size: int, timeout_s: float, max_tasks: int,
        memory_bytes: int = 0, prints: Prints | None = None,
    ):  # fmt: skip
        self.component, self.size, self.memory_bytes = component, size, memory_bytes
        self.timeout_s, self.max_tasks, self.prints = timeout_s, max_tasks, prints
        self.notes: dict[str, str] = {}  # what the reward's prepare_worker has said
        # Replacements start later: they must see the folder and the path of today.
        self._folder, self._path = os.getcwd(), [str(entry) for entry in sys.path]
        self._owner = os.getpid()
        self.orders: queue.SimpleQueue = queue.SimpleQueue()
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._rope.setblocking(False)
        self._workers: list[WorkerProcess] = []
        self._dying: list[subprocess.Popen] = []
        self._todo: collections.deque[Task] = collections.deque()
        self._jobs: set[Job] = set()
        self._waiting: list[Job] = []  # for all workers to be ready
        self._numbers = 0
        self._typical_s: float | None = None  # of a task
        self._failed_starts = 0
        self.stopped = False
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)

    # -- what other threads may call

    def start(self) -> None:
        """Returns when every worker is ready. Raises what keeps them from it."""
        ready = Job(0)
        self.orders.put(("start", ready))
        self._thread.start()
        self.wait(ready)

    def order(self, *order) -> None:
        """("work", job, tasks) or ("cancel", job)."""
        self.orders.put(order)
        self._ring()

    def wait(self, job: Job) -> list[Score]:
        """Its scores, once all are known. Raises what ended the pool, or what interrupts the wait;
        the job is forgotten then."""
        try:
            while not job.ended:
                with contextlib.suppress(queue.Empty):
                    job.done.get(timeout=1.0)
                if not self._thread.is_alive() and not job.ended:  # it was asked too late
                    raise RuntimeError("this RewardPool is closed")
        except BaseException:
            self.order("cancel", job)
            raise
        if job.failure is not None:
            raise job.failure
        return job.scores

    def stop(self) -> None:
        """Kill the workers and wait for their end. May be called again, and in a handler."""
        if os.getpid() != self._owner:  # a fork has a copy of the pool, not the right to end it
            return
        self.stopped = True
        self._ring()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # it rings already; or the thread is over
            self._rope.send(b".")

    # -- the thread

    def _run(self) -> None:
        try:
            while not self.stopped:
                try:
                    self._listen()
                    self._fill()
                    self._hand_out()
                    self._wait_and_act()
                except Exception as error:
                    self._failed_starts = max(1, self._failed_starts)  # see _fill
                    self._fail(error)
        finally:
            self._end()

    def _listen(self) -> None:
        while True:
            try:
                kind, job, *tasks = self.orders.get_nowait()
            except queue.Empty:
                return
            if kind == "start":
                self._waiting.append(job)
            elif kind == "cancel":
                self._cancel(job)
            else:
                self._jobs.add(job)
                for task in tasks[0]:
                    task.number, self._numbers = self._numbers, self._numbers + 1
                self._todo.extend(tasks[0])

    def _cancel(self, job: Job) -> None:
        """Forget a job; a worker that has any of it is killed, and the rest of what it has goes
        back into the queue."""
        self._jobs.discard(job)
        self._todo = collections.deque(task for task in self._todo if task.job is not job)
        for worker in list(self._workers):
            if any(task.job is job for task in worker.chunk):
                worker.chunk = collections.deque(t for t in worker.chunk if t.job is not job)
                self._discard(worker)
        job.end()

    def _fail(self, error: Exception) -> None:
        """The pool itself is at fault: everyone who waits is told."""
        for worker in [w for w in self._workers if w.state == "busy"]:
            worker.chunk.clear()
            self._discard(worker)
        self._todo.clear()
        for job in [*self._jobs, *self._waiting]:
            job.end(error)
        self._jobs.clear()
        self._waiting.clear()

    def _fill(self) -> None:
        """Bring the crew back to its full number, without waiting for their start."""
        self._dying[:] = [process for process in self._dying if process.poll() is None]
        if self._failed_starts and not (self._todo or self._waiting):
            return  # nobody asks: a reward that cannot start must not be started for ever
        while len(self._workers) < self.size:
            piped = self.prints is not None
            text, memory = self.component.text, self.memory_bytes
            self._workers.append(WorkerProcess(text, self._folder, self._path, memory, piped))

    def _hand_out(self) -> None:
        """Give every idle worker a chunk: of a few milliseconds, and single tasks at the end and
        while nobody knows how long one takes."""
        most = 1
        if self._typical_s is not None:
            most = min(_CHUNK, max(1, int(_CHUNK_S / max(self._typical_s, 1e-6))))
        for worker in [w for w in self._workers if w.state == "idle"]:
            if not self._todo:
                return
            share = max(1, len(self._todo) // (2 * self.size))
            size = min(most, share, self.max_tasks - worker.served)
            chosen = [self._todo.popleft() for _ in range(size)]
            try:
                worker.send(chosen)
            except OSError:  # it died while idle, or reads nothing
                self._reap(worker)

    def _wait_and_act(self) -> None:
        """Wait for a message or a deadline, and act on it."""
        if self._waiting and all(worker.state == "idle" for worker in self._workers):
            for job in self._waiting:
                job.end()
            self._waiting.clear()
        with selectors.PollSelector() as selector:
            selector.register(self._bell, selectors.EVENT_READ)
            for worker in self._workers:
                selector.register(worker.socket, selectors.EVENT_READ, worker)
                if worker.printed >= 0:
                    selector.register(worker.printed, selectors.EVENT_READ, worker)
            deadline = min((self._deadline(worker) for worker in self._workers), default=math.inf)
            # A task that begins after this look at the clocks says nothing: look again before it
            # can be over time. (The hour: poll() takes no timeout above 2**31 ms.)
            busy = any(worker.state == "busy" for worker in self._workers)
            soon = self.timeout_s if busy else math.inf
            wait = min(deadline - time.monotonic(), soon, 3600.0)
            ready = {key.data for key, _ in selector.select(max(0.0, wait))}
        if None in ready:
            with contextlib.suppress(BlockingIOError):
                self._bell.recv(1 << 16)
        for worker in list(self._workers):
            if worker in ready:
                self._keep_prints(worker)
                self._read(worker)
            if worker.state != "dead" and time.monotonic() > self._deadline(worker):
                # We may have been asleep: what arrived meanwhile counts before the clock does.
                self._read(worker)
                if worker.state != "dead" and time.monotonic() > self._deadline(worker):
                    self._expire(worker)

    def _deadline(self, worker: WorkerProcess) -> float:
        task, since, _ = worker.running()
        if task is not None:
            return since + self.timeout_s
        limits = {"starting": _START_TIMEOUT_S, "busy": BEGIN_TIMEOUT_S, "idle": math.inf}
        return since + limits[worker.state]

    def _keep_prints(self, worker: WorkerProcess) -> None:
        if worker.printed >= 0 and not self.prints.read_from(worker.printed):
            worker.close_pipe()

    def _read(self, worker: WorkerProcess) -> None:
        """Act on all that a worker has sent, and on its end."""
        still_open = worker.receive()
        while (message := take_frame(worker.buffer)) is not None:
            kind, content = message
            if kind == "scored":
                self._record(worker, content)
            elif kind == "ready":
                worker.state, self._failed_starts = "idle", 0
                self.notes |= content
            else:
                self._discard(worker)
                raise InputError(
                    f"a reward worker could not load {self.component.text!r}",
                    rule=content,
                    fix="the reward must be importable in a fresh Python process",
                )
        if not still_open:
            self._reap(worker)
        elif worker.state == "idle" and worker.served >= self.max_tasks:
            self._discard(worker)

    def _record(self, worker: WorkerProcess, found: list[tuple]) -> None:
        for number, outcomes, seconds, longest in found:
            task = worker.chunk.popleft()
            assert task.number == number, "a worker answered out of order"
            before = seconds if self._typical_s is None else self._typical_s
            self._typical_s = before + _RECENT * (seconds - before)
            late, scored = longest[0] > self.timeout_s, longest[1]
            if late:  # the rule is the clock, not whether we looked in time
                outcomes = [self._timeout(task, scored)] * len(task.places)
            self._settle(task, outcomes, seconds)
        worker.served += len(found)
        worker.since = time.monotonic()
        if not worker.chunk:
            worker.state = "idle"

    def _timeout(self, task: Task, scored: bool) -> tuple:
        """The outcome of a task over its time."""
        message = f"over the limit of {self.timeout_s} s"
        if scored:
            return late_outcome(self.component, pickle.loads(task.blob), message)
        return "timeout", math.nan, {}, message

    def _settle(self, task: Task, outcomes: list[tuple], seconds: float) -> None:
        job, now = task.job, time.monotonic()
        for place, (status, value, parts, message) in zip(task.places, outcomes, strict=True):
            assert job.scores[place] is None, "a sample was scored twice"
            over = status == "over limit"
            status = "ok" if over else status
            job.scores[place] = Score(value, parts, status, seconds, message, now, over)
        job.left -= len(task.places)
        if job.left == 0:
            self._jobs.discard(job)
            job.end()

    def _attribute(self, task: Task, outcome: tuple, since: float) -> None:
        self._settle(task, [outcome] * len(task.places), time.monotonic() - since)

    def _expire(self, worker: WorkerProcess) -> None:
        """A deadline has passed: kill, and blame the task if one was running."""
        task, since, scored = worker.running()
        if task is None:
            self._reap(worker)
            return
        worker.chunk.remove(task)
        self._attribute(task, self._timeout(task, scored), since)
        self._typical_s = max(self._typical_s or 0.0, self.timeout_s * _RECENT)
        self._discard(worker)

    def _reap(self, worker: WorkerProcess) -> None:
        """A worker has ended by itself: the task it was on is an error, the rest is requeued. One
        that a signal ended was out of memory or stack."""
        state, (task, since, scored) = worker.state, worker.running()
        if task is not None:
            worker.chunk.remove(task)
        self._discard(worker)
        how = _how_it_ended(worker.process)
        if task is not None:
            text = f"the reward ended its worker process ({how})"
            outcome = failed_outcome(text)
            if scored and (worker.process.returncode or 0) < 0:
                outcome = late_outcome(self.component, pickle.loads(task.blob), text)
            self._attribute(task, outcome, since)
        elif state != "idle":
            self._failed_starts += 1
        if self._failed_starts >= _START_ATTEMPTS:
            self._failed_starts = 1
            raise RuntimeError(
                f"{_START_ATTEMPTS} reward workers in a row ended, or said nothing, before their "
                f"first sample ({how}); see {self.prints.path if self.prints else 'stderr'}"
            )

    def _discard(self, worker: WorkerProcess) -> None:
        """Kill a worker; what it had not begun goes back to the front of the queue."""
        self._todo.extendleft(reversed(worker.chunk))
        worker.kill()
        self._keep_prints(worker)  # what it wrote before its end
        worker.close_pipe()
        self._workers.remove(worker)
        self._dying.append(worker.process)

    def _end(self) -> None:
        """Kill and reap every process, and tell everyone who waits."""
        for worker in self._workers:
            worker.kill()
            self._keep_prints(worker)
            worker.close_pipe()
            self._dying.append(worker.process)
        self._workers.clear()
        deadline = time.monotonic() + _REAP_TIMEOUT_S
        for process in self._dying:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._dying.clear()
        self._listen()  # what came too late is told, too
        for job in [*self._jobs, *self._waiting]:
            job.end(RuntimeError("this RewardPool is closed"))
        self._bell.close()
        self._rope.close()


def _how_it_ended(process: subprocess.Popen) -> str:
    try:
        code = process.wait(_REAP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "still dying"
    return f"exit code {code}" if code >= 0 else f"signal {-code}, {signal.strsignal(-code)}"
