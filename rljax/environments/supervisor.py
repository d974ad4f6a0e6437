"""The processes in which episodes are played: which worker plays which episode, and which episode
is to blame for a kill.

One thread owns them. An episode stays in one worker. If that worker ends, the episode whose code
ran has failed; the others are played again elsewhere, from the replies that they have had, and
their steps are compared with those of before.
"""

import collections
import dataclasses
import math
import queue
import threading
import time

from rljax.components import Component
from rljax.contracts import spec
from rljax.environments.messages import EpisodeLimits, Step, failed_step, is_step
from rljax.environments.play_worker import ON_LOOP, Reply
from rljax.workers.prints import Prints
from rljax.workers.process import WorkerProcess
from rljax.workers.supervisor import START_TIMEOUT_S, Supervisor, how_it_ended
from rljax.workers.wire import frame

# Worker ends without a cause (a thread's, the kernel's) after which an episode counts as guilty.
_MOST_STRIKES = 3


@dataclasses.dataclass(eq=False)
class OpenEpisode:
    """One episode, with all that is needed to play it again."""

    number: int
    start: bytes  # pickled arguments of Episode
    attempt: int = 0  # number of attempts that have failed
    replies: list[Reply] = dataclasses.field(default_factory=list)
    marks: list[bytes] = dataclasses.field(default_factory=list)  # marks of sent steps
    strikes: int = 0
    ticket: int = -1  # its ticket in the worker that plays it now
    worker: "PlayWorker | None" = None
    over: bool = False

    @property
    def owes(self) -> bool:
        """Returns whether a step is expected of it."""
        return len(self.marks) <= len(self.replies)


class PlayWorker(WorkerProcess):
    """A worker that plays. `state`: "starting", then "ready"; "dead" at the end."""

    def __init__(self, facts: bytes, folder: str, path: list[str], memory_bytes: int, pipe: bool):
        self.played: dict[int, OpenEpisode] = {}  # by ticket
        self.mail: list[tuple] = []  # to be sent together
        self.announced = -1  # the ticket whose code it said it would run, where it says so
        super().__init__("rljax.environments.play_worker", {}, folder, path, memory_bytes, pipe)
        self.post(facts)


class EpisodeSupervisor(Supervisor):
    """`size` workers that play, and the thread that owns them, from `start` until `stop`. `news`
    holds (episode, attempt, Step) for all steps, and an exception if the workers cannot be kept."""

    name = "environment"
    cannot_load = "a worker could not load environment {}"
    closed = "these workers are closed"
    sends = (Step,)

    def __init__(
        self,
        component: Component,
        tokenizer: bytes,
        limits: EpisodeLimits,
        size: int,
        retries: int,
        memory_bytes: int,
        prints: Prints | None,
    ):
        super().__init__(component, size, memory_bytes, prints)
        self.retries = retries
        self.timeout_s, self.repeatable = limits.turn_timeout_s, spec(component).repeatable
        self.news: queue.SimpleQueue = queue.SimpleQueue()
        self.counts: collections.Counter = collections.Counter()
        self.lock = threading.Lock()  # guards the counts
        self._facts = frame((component.text, tokenizer, limits))
        self._homeless: collections.deque[OpenEpisode] = collections.deque()
        self._tickets = 0

    # -- the thread. Orders: ("open", played), ("reply", played, attempt, reply), ("drop", played)

    def take_order(self, verb: str, played: OpenEpisode, *content) -> None:
        """Takes up the driver's order about an episode."""
        if verb == "open":
            self._homeless.append(played)
        elif verb == "drop":
            self._forget(played)
        elif content[0] == played.attempt and not played.over:
            played.replies.append(content[1])
            if played.worker is not None:
                played.worker.mail.append(("reply", played.ticket, content[1]))

    def wanted(self) -> bool:
        """Returns whether an episode waits for a worker."""
        return bool(self._homeless)

    def new_worker(self) -> PlayWorker:
        """Starts a worker that loads the environment and the tokenizer."""
        piped = self.prints is not None
        return PlayWorker(self._facts, self.folder, self.path, self.memory_bytes, piped)

    def hand_out(self) -> None:
        """Gives each waiting episode to the worker with the fewest, and sends all
        pending messages."""
        while self._homeless and self.workers:
            played = self._homeless.popleft()
            worker = min(self.workers, key=lambda w: len(w.played))
            played.ticket, played.worker = self._tickets, worker
            self._tickets += 1
            worker.played[played.ticket] = played
            history = list(played.marks), list(played.replies)
            suspect = played.strikes > 0
            worker.mail.append(
                ("open", played.ticket, played.number, played.start, *history, suspect)
            )
        for worker in [w for w in self.workers if w.mail]:
            mail, worker.mail = worker.mail, []
            try:
                worker.post(frame(mail))
            except OSError:  # it has ended
                self.reap(worker)

    def deadline(self, worker: PlayWorker) -> float:
        """The deadline of the step that runs, by time.monotonic()."""
        if worker.state == "starting":
            return worker.since + START_TIMEOUT_S
        number, since, _ = worker.progress.read()
        return since + self.timeout_s if number >= 0 or number == ON_LOOP else math.inf

    def look_again_s(self) -> float:
        """The seconds until the clocks are looked at again: the limit of a step, while one
        may begin."""
        return self.timeout_s if any(worker.played for worker in self.workers) else math.inf

    def are_results(self, worker: PlayWorker, kind: str, content: object) -> bool:
        """Returns whether a message holds steps of episodes that the worker plays, or has played,
        or the episode whose code it runs next."""
        if kind == "runs":
            return worker.state == "ready" and type(content) is int
        return (
            (kind, worker.state, type(content)) == ("steps", "ready", list)
            and all(type(result) is tuple and len(result) == 3 for result in content)
            and all(self._is_told(worker, *result) for result in content)
        )

    def _is_told(self, worker: PlayWorker, ticket: object, step: object, mark: object) -> bool:
        if not (type(ticket) is int and is_step(step) and type(mark) is bytes):
            return False
        played = worker.played.get(ticket)
        return played is None or played.number == step.episode

    def heard(self, worker: PlayWorker, kind: str, content: object) -> None:
        """Handles steps, and the notes of whose code runs next."""
        if kind == "steps":
            for ticket, step, mark in content:
                if (played := worker.played.get(ticket)) is not None:
                    self._say(played, step, mark)
        else:
            worker.announced = content

    def _say(self, played: OpenEpisode, step: Step, mark: bytes) -> None:
        self._count("seconds", step.seconds)
        if step.failure:
            self._fail_attempt(played, step)
            return
        restart = played.attempt > 0 and not played.marks
        played.marks.append(mark)
        played.strikes = 0
        if step.ended:
            self._forget(played, notify=False)
        step = dataclasses.replace(step, restart=restart, mark=mark)
        self.news.put((played, played.attempt, step))

    def _fail_attempt(self, played: OpenEpisode, step: Step) -> None:
        """Plays a failed episode anew, with the same seeds, or ends it after the last retry."""
        self._forget(played, notify=False)
        if played.attempt < self.retries:
            played.over = False
            played.attempt += 1
            played.replies, played.marks, played.strikes = [], [], 0
            self._homeless.append(played)
            self._count("retried")
            return
        self._count("failed")
        self._count(f"failed/{step.kind.replace(' ', '_')}")
        self.news.put((played, played.attempt, step))

    def _forget(self, played: OpenEpisode, notify: bool = True) -> None:
        """Closes an episode, and with `notify` tells its worker so."""
        played.over, worker = True, played.worker
        if worker is None:
            self._homeless = collections.deque(p for p in self._homeless if p is not played)
        elif worker.played.pop(played.ticket, None) is not None and notify:
            worker.mail.append(("drop", played.ticket))
        played.worker = None

    def _count(self, name: str, amount: float = 1) -> None:
        with self.lock:
            self.counts[name] += amount

    # -- ends of workers

    def expire(self, worker: PlayWorker) -> None:
        """Ends a worker whose step is over its time, or that does not start."""
        if worker.state == "starting":
            self.reap(worker)
            return
        self._lose(worker, "timeout", f"over environment.turn_timeout_s={self.timeout_s}")

    def reap(self, worker: PlayWorker, why: str = "") -> None:
        """Replaces a worker that has ended, or has to end because of `why`."""
        if worker.state == "starting":
            self._scatter(worker, [])
            self.count_failed_start("episode", why or how_it_ended(worker.process))
            return
        self._lose(worker, "killed", why or "it ended its worker process", broken=bool(why))

    def _lose(self, worker: PlayWorker, kind: str, reason: str, broken: bool = False) -> None:
        """Blames the episode whose code ran, and plays the others again."""
        number, since, _ = worker.progress.read()
        if broken:  # when that was read, the worker may have been running another's code already
            number = worker.announced
        guilty = [played for ticket, played in worker.played.items() if ticket == number]
        if number == ON_LOOP and kind == "timeout":  # code of theirs, outside of their own tasks
            guilty = [played for played in worker.played.values() if played.owes]
        elif number < 0:
            guilty = self._struck(worker)
        self._scatter(worker, guilty)
        if kind == "killed":
            reason = f"{reason} ({how_it_ended(worker.process)})"
        seconds = time.monotonic() - since if kind == "timeout" else 0.0
        self._count("seconds", seconds)
        for played in guilty:
            self._fail_attempt(played, failed_step(played.number, kind, reason, seconds))

    def _struck(self, worker: PlayWorker) -> list[OpenEpisode]:
        """Returns the episodes that owed a step too many times when a worker ended without a cause
        that can be seen. The next worker that plays one of the others announces before each step
        whose code it runs."""
        owing = [played for played in worker.played.values() if played.owes]
        for played in owing:
            played.strikes += 1
        return [played for played in owing if played.strikes >= _MOST_STRIKES]

    def _scatter(self, worker: PlayWorker, guilty: list[OpenEpisode]) -> None:
        """Kills a worker. Its episodes, but for the guilty, go to others."""
        innocent = [played for played in worker.played.values() if played not in guilty]
        if worker.state != "starting":
            self._count("killed")
        self.discard(worker)
        for played in [*innocent, *guilty]:
            played.worker = None
        for played in innocent:
            if not played.marks:  # nothing of it was heard of
                self._homeless.append(played)
            elif self.repeatable:
                self._count("replayed")
                self._homeless.append(played)
            else:
                message = (
                    "its worker was killed for another's step, and it declares repeatable=False"
                )
                self._fail_attempt(played, failed_step(played.number, "killed", message))

    def fail(self, error: Exception) -> None:
        """Kills all workers, and tells the driver the error of the supervisor itself."""
        for worker in list(self.workers):
            worker.played.clear()
            self.discard(worker)
        self._homeless.clear()
        self.news.put(error)

    def ended(self) -> None:
        """Tells the driver that the supervisor is closed."""
        self.news.put(RuntimeError(self.closed))
