"""The processes of a `RewardPool`: chunks of samples for each, a clock per call, and scores.

One thread owns every process and knows which worker runs which call since when. Other threads send
it `orders` through a queue that a signal handler may use as well; it answers by settling jobs.
"""

import collections
import contextlib
import math
import pickle
import queue
import time
from collections.abc import Sequence

from rljax.components import Component
from rljax.rewards.pool.calling import (
    compares_samples,
    failed_outcome,
    is_group_reward,
    late_outcome,
)
from rljax.rewards.pool.jobs import Job, RewardCall, Score
from rljax.rewards.pool.process import BEGIN_TIMEOUT_S, RewardWorker
from rljax.workers.prints import Prints
from rljax.workers.supervisor import START_TIMEOUT_S, Supervisor, how_it_ended

_CHUNK = 256  # calls at most that a worker is handed at once,
_CHUNK_S = 0.01  # and seconds of work: a wake-up of the thread costs a hundredth of that
_STATUSES = ("ok", "over limit", "error", "abstained", "timeout")
_RECENT = 0.1  # weight of a call in the running mean of their seconds


class RewardSupervisor(Supervisor):
    """`size` workers that score, and the thread that owns them, from `start` until `stop`."""

    name = "reward"
    cannot_load = "a reward worker could not load {}"
    closed = "this RewardPool is closed"

    def __init__(
        self,
        component: Component,
        size: int,
        timeout_s: float,
        max_calls: int,
        memory_bytes: int = 0,
        prints: Prints | None = None,
    ):
        super().__init__(component, size, memory_bytes, prints)
        self.timeout_s, self.max_calls = timeout_s, max_calls
        # A group whose samples are scored one by one: what is late in one says nothing of others.
        self.combined = is_group_reward(component) and not compares_samples(component)
        self._todo: collections.deque[RewardCall] = collections.deque()
        self._jobs: set[Job] = set()
        self._numbers = 0
        self._typical_s: float | None = None  # mean seconds of a call

    # -- what other threads may call

    # `order` takes ("work", job, calls) or ("cancel", job).

    def wait(self, job: Job) -> list[Score]:
        """The scores of the job, once all are known. Raises RuntimeError if the pool is closed,
        what made it fail, and what interrupts the wait; the job is forgotten then."""
        try:
            while not job.ended:
                with contextlib.suppress(queue.Empty):
                    job.done.get(timeout=1.0)
                if not self.thread.is_alive() and not job.ended:  # it was asked too late
                    raise RuntimeError(self.closed)
        except BaseException:
            self.order("cancel", job)
            raise
        if job.failure is not None:
            raise job.failure
        return job.scores

    # -- the thread

    def take_order(self, verb: str, job: Job, calls: Sequence[RewardCall] = ()) -> None:
        """Takes up a job, or forgets one that was cancelled."""
        if verb == "cancel":
            self._cancel(job)
            return
        self._jobs.add(job)
        for call in calls:
            call.number, self._numbers = self._numbers, self._numbers + 1
        self._todo.extend(calls)

    def _cancel(self, job: Job) -> None:
        """Forgets a job. A worker that has any of it is killed, and its other calls go
        back into the queue."""
        self._jobs.discard(job)
        self._todo = collections.deque(call for call in self._todo if call.job is not job)
        for worker in list(self.workers):
            if any(call.job is job for call in worker.chunk):
                worker.chunk = collections.deque(t for t in worker.chunk if t.job is not job)
                self.discard(worker)
        job.end()

    def fail(self, error: Exception) -> None:
        """Ends all jobs with an error of the pool itself."""
        for worker in [w for w in self.workers if w.state == "busy"]:
            worker.chunk.clear()
            self.discard(worker)
        self._todo.clear()
        for job in self._jobs:
            job.end(error)
        self._jobs.clear()

    def wanted(self) -> bool:
        """Returns whether a job waits."""
        return bool(self._todo)

    def new_worker(self) -> RewardWorker:
        """Starts a worker that loads the reward."""
        piped, text = self.prints is not None, self.component.text
        return RewardWorker(text, self.folder, self.path, self.memory_bytes, piped)

    def hand_out(self) -> None:
        """Gives every worker that is ready a chunk of a few milliseconds, or single calls at the
        end and as long as the time of a call is unknown."""
        most = 1
        if self._typical_s is not None:
            most = min(_CHUNK, max(1, int(_CHUNK_S / max(self._typical_s, 1e-6))))
        for worker in [w for w in self.workers if w.state == "ready"]:
            if not self._todo:
                return
            share = max(1, len(self._todo) // (2 * self.size))
            size = min(most, share, self.max_calls - worker.served)
            chosen = [self._todo.popleft() for _ in range(size)]
            try:
                worker.send(chosen)
            except OSError:  # it died while it waited, or reads nothing
                self.reap(worker)

    def deadline(self, worker: RewardWorker) -> float:
        """The deadline of the call that runs, or of the next message of the worker,
        by time.monotonic()."""
        call, since, _ = worker.running()
        if call is not None:
            return since + self.timeout_s
        limits = {"starting": START_TIMEOUT_S, "busy": BEGIN_TIMEOUT_S, "ready": math.inf}
        return since + limits[worker.state]

    def look_again_s(self) -> float:
        """The seconds until the clocks are looked at again: the limit of a call, while one
        may begin."""
        busy = any(worker.state == "busy" for worker in self.workers)
        return self.timeout_s if busy else math.inf

    def are_results(self, worker: RewardWorker, kind: str, content: object) -> bool:
        """Returns whether a message holds the scores of the calls that the worker was handed, in
        their order."""
        return (
            (kind, worker.state, type(content)) == ("scored", "busy", list)
            and len(content) <= len(worker.chunk)
            and all(
                _is_result(result, call)
                for result, call in zip(content, worker.chunk, strict=False)
            )
        )

    def heard(self, worker: RewardWorker, kind: str, content: object) -> None:
        """Records scores."""
        self._record(worker, content)
        if worker.state == "ready" and worker.served >= self.max_calls:
            self.discard(worker)

    def _record(self, worker: RewardWorker, results: list[tuple]) -> None:
        for _, outcomes, seconds, longest in results:
            call = worker.chunk.popleft()
            typical_s = seconds if self._typical_s is None else self._typical_s
            self._typical_s = typical_s + _RECENT * (seconds - typical_s)
            late, scored = longest[0] > self.timeout_s, longest[1]
            if late:  # the rule is the clock, not whether we looked in time
                outcomes = [self._timeout(call, scored)] * len(call.rows)
            self._settle(call, outcomes, seconds)
        worker.served += len(results)
        worker.since = time.monotonic()
        if not worker.chunk:
            worker.state = "ready"

    def _timeout(self, call: RewardCall, scored: bool) -> tuple:
        """Returns the outcome of a call over its time."""
        message = f"over the limit of {self.timeout_s} s"
        if scored and not self.combined:
            return late_outcome(self.component, pickle.loads(call.blob), message)
        return "timeout", math.nan, {}, message

    def _settle(self, call: RewardCall, outcomes: list[tuple], seconds: float) -> None:
        job, now = call.job, time.monotonic()
        for row, (status, value, parts, message) in zip(call.rows, outcomes, strict=True):
            assert job.scores[row] is None, "a sample was scored twice"
            over_limit = status == "over limit"
            status = "ok" if over_limit else status
            job.scores[row] = Score(value, parts, status, seconds, message, now, over_limit)
        job.left -= len(call.rows)
        if job.left == 0:
            self._jobs.discard(job)
            job.end()

    def _attribute(self, call: RewardCall, outcome: tuple, since: float) -> None:
        self._settle(call, [outcome] * len(call.rows), time.monotonic() - since)

    def expire(self, worker: RewardWorker) -> None:
        """Kills a worker whose deadline has passed; the call that ran, if any, is late."""
        call, since, scored = worker.running()
        if call is None:
            self.reap(worker)
            return
        worker.chunk.remove(call)
        self._attribute(call, self._timeout(call, scored), since)
        self._typical_s = max(self._typical_s or 0.0, self.timeout_s * _RECENT)
        self.discard(worker)

    def reap(self, worker: RewardWorker, why: str = "") -> None:
        """Replaces a worker that has ended, or has to end because of `why`: the call that ran is an
        error, the rest is queued again. A worker that a signal ended was out of memory or stack."""
        state, (call, since, scored) = worker.state, worker.running()
        if call is not None:
            worker.chunk.remove(call)
        self.discard(worker)
        cause = why or how_it_ended(worker.process)
        if call is not None:
            text = f"the reward ended its worker process ({cause})"
            outcome = failed_outcome(text)
            if scored and not why and not self.combined and (worker.process.returncode or 0) < 0:
                outcome = late_outcome(self.component, pickle.loads(call.blob), text)
            self._attribute(call, outcome, since)
        elif state != "ready":
            self.count_failed_start("sample", cause)

    def discard(self, worker: RewardWorker) -> None:
        """Kills a worker; the calls that it had not begun return to the front of the queue."""
        self._todo.extendleft(reversed(worker.chunk))
        super().discard(worker)

    def ended(self) -> None:
        """Ends all jobs with a RuntimeError, after the pool was closed."""
        self.listen()  # jobs that came too late are ended as well
        for job in self._jobs:
            job.end(RuntimeError(self.closed))


def _is_result(result: object, call: RewardCall) -> bool:
    """Returns whether a worker has sent what it found of a call: (its number, an outcome for each
    sample, seconds, (those of the longest piece, whether that has a score when it is late))."""
    if not (type(result) is tuple and len(result) == 4 and result[0] == call.number):
        return False
    _, outcomes, seconds, longest = result
    return (
        type(outcomes) is list
        and len(outcomes) == len(call.rows)
        and all(map(_is_outcome, outcomes))
        and isinstance(seconds, float)
        and type(longest) is tuple
        and len(longest) == 2
        and isinstance(longest[0], float)
    )


def _is_outcome(outcome: object) -> bool:
    if not (type(outcome) is tuple and len(outcome) == 4):
        return False
    status, value, parts, message = outcome
    return (
        status in _STATUSES
        and isinstance(value, int | float)
        and (type(parts), type(message)) == (dict, str)
        and all(type(name) is str and isinstance(x, int | float) for name, x in parts.items())
    )
