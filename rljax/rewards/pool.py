"""The pool that scores responses in killable processes.

What lives here: starting, timing, killing and replacing workers. What does not: how a reward is
called (`worker.py`) and what rewards there are (`rules.py`).

A response is untrusted and so is the time that its reward takes: `5**(5**(5**5))` in a verifier
holds the interpreter lock for ever, so no timeout inside the process can end it. Here the parent
watches a clock per sample and sends SIGKILL. A failure is never a score: it is a `Score` whose
status is not "ok" and whose value is NaN, for the caller to count and to mask.
"""

import collections
import contextlib
import json
import math
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rljax.components import Component, resolve
from rljax.errors import InputError
from rljax.rewards.worker import (
    HOME,
    Progress,
    call_reward,
    check_own_limit,
    frame,
    missing_field,
    take_frame,
    wanted_fields,
)

__all__ = ["RewardPool", "Score", "call_reward"]

_START_TIMEOUT_S = 120.0  # a worker imports the reward's module: slow on a network disk
_BEGIN_TIMEOUT_S = 30.0  # from handing over a chunk to the worker's word that it began
_REAP_TIMEOUT_S = 5.0
_START_ATTEMPTS = 3
_CHUNK = 64

# The parent's `__main__` is not imported (a launcher is heavy); its sys.path is handed over.
_BOOT = (
    "import sys; spec, *sys.path = sys.argv[1:]; from rljax.rewards.worker import main; main(spec)"
)
# A worker is one of many: no thread pools, and never the parent's accelerator.
_WORKER_ENV = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",
}


@dataclass(frozen=True)
class Score:
    """What became of one sample. Unless status is "ok", `value` is NaN and `parts` is empty."""

    value: float
    parts: dict[str, float]
    status: str  # "ok" | "timeout" | "error"
    seconds: float
    message: str = ""


class _Worker:
    """One process as its parent sees it: the stream, and which sample it is on since when."""

    def __init__(self, reward: str, folder: str, path: list[str]):
        self.state = "starting"  # -> "idle" <-> "busy"; or "dead"
        self.since = time.monotonic()  # when that state began
        self.chunk: collections.deque[int] = collections.deque()  # handed over, not yet heard of
        self.served = 0
        self.buffer = bytearray()
        self.socket, theirs = socket.socketpair()
        read_end, self.lifeline = os.pipe()
        shared = tempfile.TemporaryFile()
        spec = {
            "reward": reward,
            "socket": theirs.fileno(),
            "lifeline": read_end,
            "progress": shared.fileno(),
            "parent": os.getpid(),
        }
        try:
            shared.write(bytes(16))
            shared.flush()
            self.progress = Progress(shared.fileno())
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(spec), *path],
                stdin=subprocess.DEVNULL,
                stdout=2,  # a launcher's own stdout may be data; what rewards print goes to stderr
                pass_fds=(theirs.fileno(), read_end, shared.fileno()),
                cwd=folder,
                env={**os.environ, **_WORKER_ENV},
                start_new_session=True,  # out of the terminal's reach, and killed with its children
            )
        except BaseException:
            self.close_stream()
            raise
        finally:
            theirs.close()
            os.close(read_end)
            shared.close()
        self.socket.setblocking(False)

    def close_stream(self):
        self.socket.close()
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1

    def kill(self):
        """SIGKILL to the process and its children; reaping is the caller's."""
        self.state = "dead"
        # Before it is reaped, the process id cannot belong to anyone else.
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.close_stream()

    def receive(self) -> bool:
        """Move what has arrived into the buffer, without waiting; False at the stream's end."""
        try:
            while data := self.socket.recv(1 << 16):
                self.buffer += data
            return False
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False

    def running(self) -> tuple[int | None, float]:
        """(index of the sample it is on, or None if it has not begun one, since when)."""
        if self.state == "busy":
            index, clock = self.progress.read()
            if index in self.chunk:
                return index, clock
        return None, self.since

    def send(self, chunk: list[tuple[int, bytes]]) -> None:
        self.state, self.since = "busy", time.monotonic()
        self.progress.write(-1, self.since)
        self.chunk.extend(index for index, _ in chunk)
        self.socket.settimeout(_BEGIN_TIMEOUT_S)  # it is idle, so it reads at once
        self.socket.sendall(frame(chunk))
        self.socket.setblocking(False)


@dataclass
class _Round:
    """The state of one `score` call: what is left to do and what has been found."""

    blobs: list[bytes]
    scores: list[Score | None]
    todo: collections.deque[int]
    left: int

    def settle(self, index: int, score: Score):
        assert self.scores[index] is None, "a sample was scored twice"
        self.scores[index] = score
        self.left -= 1


class RewardPool:
    """Processes that score samples, each sample under a deadline that ends in SIGKILL.

    `reward` is a component text. A sample is a mapping of plain picklable values; the reward gets
    those that it declares. The clock of a sample starts when its worker begins it; after
    `timeout_s` the worker is killed and replaced, and the rest of its chunk is scored elsewhere.
    Scores come back in the order of the samples.

    Not affected by what a reward does: hang, raise, exit, crash, print. Workers end when the parent
    ends, even by kill -9. `max_tasks_per_worker` bounds what a leaking reward can pile up.
    """

    def __init__(
        self,
        reward: str,
        *,
        workers: int = 2,
        timeout_s: float = 10.0,
        max_tasks_per_worker: int = 100_000,
    ):
        _check_options(workers, timeout_s, max_tasks_per_worker)
        self.component = _resolve_reward(reward)
        check_own_limit(self.component, timeout_s)
        self.timeout_s = timeout_s
        self._size, self._max_tasks = workers, max_tasks_per_worker
        self._names, self._required = wanted_fields(self.component)
        # Replacements start later: they must see the folder and the path of today.
        self._folder, self._path = os.getcwd(), [str(entry) for entry in sys.path]
        self._owner = os.getpid()
        self._lock = threading.RLock()  # a signal handler may close the pool in mid-score
        self._workers: list[_Worker] = []
        self._dying: list[subprocess.Popen] = []
        self._failed_starts = 0
        self._closed = False
        self._finalizer = weakref.finalize(self, _shutdown, self._workers, self._dying, self._owner)
        try:
            nothing = _Round([], [], collections.deque(), 0)
            self._fill()
            while any(worker.state == "starting" for worker in self._workers):
                self._pump(nothing)
                self._fill()
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def close(self):
        """Kill the workers and wait for their end. May be called again."""
        with self._lock:
            self._closed = True
            self._finalizer()

    def score(self, samples: Sequence[Mapping]) -> list[Score]:
        """One `Score` per sample, in order. InputError: a sample that cannot be sent."""
        if os.getpid() != self._owner:  # a fork shares the streams and would mix up the answers
            raise RuntimeError("a RewardPool belongs to the process that made it")
        blobs = [self._pack(index, sample) for index, sample in enumerate(samples)]
        with self._lock:
            count = len(blobs)
            job = _Round(blobs, [None] * count, collections.deque(range(count)), count)
            try:
                while job.left:
                    if self._closed:
                        raise RuntimeError("this RewardPool is closed")
                    self._fill()
                    self._hand_out(job)
                    self._pump(job)
            except BaseException:
                # A Ctrl-C, say: what the busy workers still send belongs to a round that is over.
                for worker in [w for w in self._workers if w.state == "busy"]:
                    self._discard(worker)
                raise
            return job.scores

    def _pack(self, index: int, sample: Mapping) -> bytes:
        """The fields that the reward declares, pickled."""
        if not isinstance(sample, Mapping):
            raise InputError(f"sample {index} is not a mapping of fields", value=sample)
        for name in self._required:
            if name not in sample:
                raise missing_field(self.component, name, sample)
        names = sample if self._names is None else self._names
        chosen = {name: sample[name] for name in names if name in sample}
        try:
            return pickle.dumps(chosen, protocol=5)
        except Exception as error:
            raise InputError(
                f"field {_unpicklable(chosen)!r} of sample {index} cannot be sent to a worker",
                rule=f"{type(error).__name__}: {error}",
                fix="use plain values: text, numbers, lists, dicts",
            ) from error

    def _fill(self):
        """Bring the pool back to its full number of workers, without waiting for their start."""
        self._dying[:] = [process for process in self._dying if process.poll() is None]
        while len(self._workers) < self._size:
            self._workers.append(_Worker(self.component.text, self._folder, self._path))

    def _hand_out(self, job: _Round):
        """Give every idle worker a chunk: large at first, single samples at the end."""
        for worker in [w for w in self._workers if w.state == "idle"]:
            if not job.todo:
                return
            share = max(1, len(job.todo) // (2 * self._size))
            size = min(_CHUNK, share, self._max_tasks - worker.served)
            chosen = [job.todo.popleft() for _ in range(size)]
            try:
                worker.send([(index, job.blobs[index]) for index in chosen])
            except OSError:  # it died while idle, or reads nothing
                self._bury(worker, job)

    def _pump(self, job: _Round):
        """Wait until a worker says something or a deadline passes, and act on it."""
        with selectors.PollSelector() as selector:
            for worker in self._workers:
                selector.register(worker.socket, selectors.EVENT_READ, worker)
            deadline = min((self._deadline(worker) for worker in self._workers), default=0.0)
            # A sample that begins after this look at the clocks says nothing: look again before it
            # can be over time. (The hour: poll() takes no timeout above 2**31 ms.)
            wait = min(deadline - time.monotonic(), self.timeout_s, 3600.0)
            ready = {key.data for key, _ in selector.select(max(0.0, wait))}
        for worker in list(self._workers):
            if worker in ready:
                self._hear(worker, job)
            if worker.state != "dead" and time.monotonic() > self._deadline(worker):
                # We may have been asleep: what arrived meanwhile counts before the clock does.
                self._hear(worker, job)
                if worker.state != "dead" and time.monotonic() > self._deadline(worker):
                    self._expire(worker, job)

    def _deadline(self, worker: _Worker) -> float:
        index, since = worker.running()
        if index is not None:
            return since + self.timeout_s
        limits = {"starting": _START_TIMEOUT_S, "busy": _BEGIN_TIMEOUT_S, "idle": math.inf}
        return since + limits[worker.state]

    def _hear(self, worker: _Worker, job: _Round):
        """Act on all that a worker has sent, and on its end."""
        still_open = worker.receive()
        while (message := take_frame(worker.buffer)) is not None:
            kind, content = message
            if kind == "scored":
                self._record(worker, content, job)
            elif kind == "ready":
                worker.state, self._failed_starts = "idle", 0
            else:
                self._discard(worker)
                raise InputError(
                    f"a reward worker could not load {self.component.text!r}",
                    rule=content,
                    fix="the reward must be importable in a fresh Python process",
                )
        if not still_open:
            self._bury(worker, job)
        elif worker.state == "idle" and worker.served >= self._max_tasks:
            self._discard(worker)

    def _record(self, worker: _Worker, found: list[tuple], job: _Round):
        for index, status, value, parts, seconds, text in found:
            assert index == worker.chunk.popleft(), "a worker answered out of order"
            if seconds > self.timeout_s:  # the rule is the clock, not whether we looked in time
                job.settle(index, self._timeout(seconds))
            else:
                job.settle(index, Score(value, parts, status, seconds, text))
        worker.served += len(found)
        worker.since = time.monotonic()
        if not worker.chunk:
            worker.state = "idle"

    def _timeout(self, seconds: float) -> Score:
        return Score(math.nan, {}, "timeout", seconds, f"over the limit of {self.timeout_s} s")

    def _expire(self, worker: _Worker, job: _Round):
        """A deadline has passed: kill, and blame the sample if one was running."""
        index, since = worker.running()
        if index is None:
            self._bury(worker, job)
        else:
            worker.chunk.remove(index)
            job.settle(index, self._timeout(time.monotonic() - since))
            self._discard(worker, job)

    def _bury(self, worker: _Worker, job: _Round):
        """A worker has ended by itself: the sample it was on is an error, the rest is requeued."""
        state, (index, since) = worker.state, worker.running()
        if index is not None:
            worker.chunk.remove(index)
        self._discard(worker, job)
        how = _how_it_ended(worker.process)
        if index is not None:
            text = f"the reward ended its worker process ({how})"
            job.settle(index, Score(math.nan, {}, "error", time.monotonic() - since, text))
        elif state != "idle":
            self._failed_starts += 1
        if self._failed_starts >= _START_ATTEMPTS:
            self._failed_starts = 0
            raise RuntimeError(
                f"{_START_ATTEMPTS} reward workers in a row ended, or said nothing, before their "
                f"first sample ({how}); see stderr"
            )

    def _discard(self, worker: _Worker, job: _Round | None = None):
        """Kill a worker; what it had not begun goes back to the front of the queue."""
        if job is not None:
            job.todo.extendleft(reversed(worker.chunk))
        worker.kill()
        self._workers.remove(worker)
        self._dying.append(worker.process)


def _check_options(workers: int, timeout_s: float, max_tasks_per_worker: int):
    for name, value in (("workers", workers), ("max_tasks_per_worker", max_tasks_per_worker)):
        if not isinstance(value, int) or value < 1:
            raise InputError(
                f"RewardPool: {name}", value=value, rule="it is a whole number, at least 1"
            )
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise InputError(
            "RewardPool: timeout_s", value=timeout_s, rule="it is a positive number of seconds"
        )


def _resolve_reward(text: str) -> Component:
    """The reward, imported here once: a mistake in its name shows before any worker starts."""
    if isinstance(text, str) and text.strip().startswith("__main__."):
        raise InputError(
            f"reward {text!r} lives in the running script or notebook",
            rule="reward workers do not import it",
            fix="move the function to a file, my_rewards.py, and name it 'my_rewards.function'",
        )
    try:
        return resolve(text, HOME)
    except InputError:
        raise
    except Exception as error:  # the user's module ran and raised
        raise InputError(
            f"reward {text!r} cannot be imported", rule=f"{type(error).__name__}: {error}"
        ) from error


def _unpicklable(fields: dict) -> str | None:
    for name, value in fields.items():
        try:
            pickle.dumps(value, protocol=5)
        except Exception:
            return name
    return None


def _how_it_ended(process: subprocess.Popen) -> str:
    try:
        code = process.wait(_REAP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "still dying"
    return f"exit code {code}" if code >= 0 else f"signal {-code}, {signal.strsignal(-code)}"


def _shutdown(workers: list[_Worker], dying: list[subprocess.Popen], owner: int):
    """Kill and reap every process of a pool; also run when it is dropped or at exit."""
    if os.getpid() != owner:  # a fork of the parent has a copy of the pool, not the right to end it
        return
    for worker in workers:
        worker.kill()
        dying.append(worker.process)
    workers.clear()
    deadline = time.monotonic() + _REAP_TIMEOUT_S
    for process in dying:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    dying.clear()
