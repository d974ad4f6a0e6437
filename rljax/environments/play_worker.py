"""One worker process that plays episodes: hundreds of generators, and the wire to their parent.

Synchronous generators are stepped one after the other; asynchronous ones wait together on the
worker's event loop. Which episode's code runs, and since when, stands in shared memory, so that the
parent can tell whose code hangs. Frames are those of rljax.workers, tickets name episodes:
  parent -> worker   (environment, tokenizer, limits) once; then lists of
                     ("open", ticket, number, start, marks, replies, suspect),
                     ("reply", ticket, reply) and ("drop", ticket)
  worker -> parent   ("ready", notes) or ("failed", (has a fix, message)) once; then
                     ("steps", [(ticket, Step, mark), ...]), and while it hosts a suspect
                     ("runs", ticket) before code of an episode runs: what stands in the stream
                     after that and is no frame, this episode's code has written
An episode that is opened with marks is played again: its Steps up to there are not told once more,
but must have these marks.
"""

import asyncio
import collections
import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import os
import pickle
import selectors
import socket
import time
from collections.abc import Coroutine

import numpy as np

from rljax.components import resolve
from rljax.environments.episode import Episode
from rljax.environments.messages import EpisodeLimits, Step, failed_step
from rljax.errors import InputError
from rljax.rewards.pool.calling import describe, prepare
from rljax.workers.bootstrap import ORPHAN_POLL_S, WorkerContext, begin, readable
from rljax.workers.progress import WorkerProgress
from rljax.workers.wire import frame, read_frame, take_frame

HOME = "rljax.environments"
ON_LOOP = -3  # number in Progress: the event loop runs code of an unknown episode
_BETWEEN = -2
_FLUSH_S = 0.001  # steps are sent together if they took less: one wake-up of the parent, not many

Reply = tuple  # (ids, finish, turns_left, tokens_left)


def main(spec_text: str) -> None:
    """Runs as a worker. `spec_text`: see rljax.workers.bootstrap."""
    context = begin(spec_text)
    try:
        text, tokenizer, limits = pickle.loads(read_frame(context.socket))
        component = resolve(text, HOME)
        notes = prepare(component)
        make = functools.partial(
            Episode, component=component, tokenizer=pickle.loads(tokenizer), limits=limits
        )
    except BaseException as error:
        has_fix = isinstance(error, InputError)
        reason = has_fix, str(error) if has_fix else describe(error)
        context.socket.sendall(frame(("failed", reason)))
        return
    context.socket.sendall(frame(("ready", notes)))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent has closed it
        Player(context, make, limits).serve()


_LATER = ("stop", "max_tokens")  # fields that marks of older checkpoints do not have


def mark_of(step: Step) -> bytes:
    """A digest that is equal for steps with the same content, in whatever time, process and episode
    they were made."""
    content = dataclasses.replace(
        step, episode=0, ids=(), seconds=0.0, drift="", messages=(), text=""
    )
    hashed = hashlib.blake2b(np.asarray(step.ids, np.int64).tobytes(), digest_size=16)
    for field in dataclasses.fields(content):
        value = getattr(content, field.name)
        if field.name in _LATER and not value:
            continue
        value = sorted(value.items()) if isinstance(value, dict) else value
        hashed.update(repr(value).encode("utf-8", "surrogatepass") + b"\n")
    return hashed.digest()


@dataclasses.dataclass(eq=False)
class Hosted:
    """An episode in this worker. `marks` are those of the steps that are played again, `replies`
    those that it has not been given."""

    episode: Episode
    marks: collections.deque[bytes]
    replies: collections.deque[Reply]
    busy: bool = True  # a step of it runs, waits, or is about to
    task: asyncio.Task | None = None  # an asynchronous step
    timer: asyncio.TimerHandle | None = None


class Player:
    """The loop of a worker. `make(number, ...)` returns an Episode."""

    def __init__(self, context: WorkerContext, make, limits: EpisodeLimits):
        self.context, self.make, self.timeout_s = context, make, limits.turn_timeout_s
        self.socket, self.progress = context.socket, context.progress
        self._hosted: dict[int, Hosted] = {}
        self._suspects: set[int] = set()
        self._todo: collections.deque[tuple[int, Hosted, Reply | None]] = collections.deque()
        self._said: list[tuple[int, Step, bytes]] = []
        self._flushed = time.monotonic()
        self._received = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task] = set()
        self._self = (os.getpid(), *_identity(context.socket))

    def serve(self) -> None:
        """Plays until the parent closes the stream."""
        while self._receive():
            if self._todo:
                self._step(*self._todo.popleft())
            if not self._todo or time.monotonic() - self._flushed > _FLUSH_S:
                self._flush()
            if self._tasks:
                self._run_loop(wait=not self._todo)
            elif not self._todo and not self._wait():
                return

    # -- the wire

    def _wait(self) -> bool:
        """Waits for the parent; False where it has ended."""
        while not readable(self.socket.fileno(), ORPHAN_POLL_S):
            if self.context.orphaned():
                return False
        return True

    def _receive(self) -> bool:
        """Acts on what has come, without waiting; False at the stream's end."""
        try:
            while data := self.socket.recv(1 << 16, socket.MSG_DONTWAIT):
                self._received += data
            return False
        except BlockingIOError:
            pass
        while (messages := take_frame(self._received)) is not None:
            for verb, ticket, *content in messages:
                if verb == "open":
                    self._begin(ticket, *content)
                elif verb == "drop":
                    self._drop(ticket)
                elif (hosted := self._hosted.get(ticket)) is not None:
                    hosted.replies.append(content[0])
                    self._go_on(ticket, hosted)
        return True

    def _flush(self) -> None:
        if self._said:
            self.socket.sendall(frame(("steps", self._said)))
            self._said = []
        self._flushed = time.monotonic()

    # -- episodes

    def _begin(
        self, ticket: int, number: int, start: bytes, marks: list, replies: list, suspect: bool
    ) -> None:
        if suspect:
            self._suspects.add(ticket)
        episode = self.make(number, **pickle.loads(start))
        hosted = Hosted(episode, collections.deque(marks), collections.deque(replies))
        self._hosted[ticket] = hosted
        self._todo.append((ticket, hosted, None))

    def _drop(self, ticket: int) -> None:
        hosted = self._hosted.pop(ticket, None)
        self._suspects.discard(ticket)
        if hosted is None:
            return
        if hosted.task is not None:
            hosted.timer.cancel()
            hosted.task.cancel()
        else:
            self._close(ticket, hosted.episode)

    def _go_on(self, ticket: int, hosted: Hosted) -> None:
        """Queues the next reply of an episode, once the step before it is over."""
        if hosted.replies and not hosted.busy:
            hosted.busy = True
            self._todo.append((ticket, hosted, hosted.replies.popleft()))

    def _step(self, ticket: int, hosted: Hosted, reply: Reply | None) -> None:
        """Runs one step of an episode, or its beginning."""
        if self._hosted.get(ticket) is not hosted:
            return
        episode = hosted.episode
        self.enter(ticket)
        step = episode.start() if reply is None else None
        if step is None:
            verb = episode.begin_async() if reply is None else episode.reply_async(*reply)
            step = None if episode.waits else episode.run(verb)
        self.leave()
        if step is not None:
            self._over(ticket, hosted, step)
            return
        hosted.task = self._spawn(ticket, self._wait_for(ticket, hosted, verb))
        hosted.timer = self._loop.call_later(self.timeout_s, self._late, ticket, hosted)

    def _over(self, ticket: int, hosted: Hosted, step: Step) -> None:
        """Ends a step: sends it to the parent, or, if it is played again, compares its mark with
        that of the first time."""
        hosted.busy, mark = False, mark_of(step)
        if not hosted.marks:
            self._said.append((ticket, step, mark))
        elif hosted.marks.popleft() != mark:
            message = (
                f"played again with the same replies, {hosted.episode.component.name!r} said "
                "something else; @contract(repeatable=False) says that it may"
            )
            step = failed_step(step.episode, "not repeatable", message)
            self._said.append((ticket, step, mark_of(step)))
        if step.ended:
            del self._hosted[ticket]
            self._close(ticket, hosted.episode)
            self._suspects.discard(ticket)
        else:
            self._go_on(ticket, hosted)

    def _close(self, ticket: int, episode: Episode) -> None:
        """Runs the `finally` of an episode, after its last step has been sent."""
        if episode.finished:
            return
        self._flush()
        if episode.waits:
            self._spawn(ticket, self._close_waiting(episode))
        else:
            self.enter(ticket)
            episode.close()
            self.leave()

    async def _close_waiting(self, episode: Episode) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(episode.close_async(), self.timeout_s)

    def enter(self, ticket: int) -> None:
        """Notes that code of the episode `ticket` runs from now on."""
        if self._suspects:
            self._flush()
            self.socket.sendall(frame(("runs", ticket)))
        self.progress.write(ticket, time.monotonic())

    def leave(self, after: int = _BETWEEN) -> None:
        """Notes that the code is over. Exits in a fork of the process, and if the code has closed
        its stream."""
        if self._self != (os.getpid(), *_identity(self.socket)):
            os._exit(1)  # a fork of an environment, or one that has closed our stream
        self.progress.write(after, time.monotonic())

    # -- the event loop

    def _spawn(self, ticket: int, coroutine: Coroutine) -> asyncio.Task:
        """Starts a task on the event loop, on an episode's account."""
        if self._loop is None:
            self._loop = _Loop(self)
            self._loop.add_reader(self.socket.fileno(), self._loop.stop)
        context = contextvars.copy_context()
        context.run(_OWNER.set, ticket)
        task = self._loop.create_task(coroutine, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _wait_for(self, ticket: int, hosted: Hosted, verb: Coroutine) -> None:
        step = await verb
        hosted.timer.cancel()
        hosted.task = None
        if self._hosted.get(ticket) is hosted:
            self._over(ticket, hosted, step)
        else:  # dropped, or late: it was cancelled, and may have gone on all the same
            self._close(ticket, hosted.episode)
        self._loop.stop()

    def _late(self, ticket: int, hosted: Hosted) -> None:
        """Ends an asynchronous step that is over its time; those of other episodes go on."""
        if self._hosted.get(ticket) is not hosted or hosted.task is None:
            return
        del self._hosted[ticket]
        self._suspects.discard(ticket)
        message = f"over environment.turn_timeout_s={self.timeout_s}"
        step = failed_step(hosted.episode.number, "timeout", message, self.timeout_s)
        self._said.append((ticket, step, mark_of(step)))
        hosted.task.cancel()
        self._loop.stop()

    def _run_loop(self, wait: bool) -> None:
        """Runs the event loop until something happens or, without `wait`, for what is ready now."""
        if wait:
            timer = self._loop.call_later(ORPHAN_POLL_S, self._loop.stop)
        else:
            self._loop.call_soon(self._loop.stop)
        self._loop.run_forever()
        if wait:
            timer.cancel()
        self.progress.write(_BETWEEN, time.monotonic())
        if self.context.orphaned():
            os._exit(0)


_OWNER: contextvars.ContextVar[int | None] = contextvars.ContextVar("owner", default=None)


class _Loop(asyncio.SelectorEventLoop):
    """Says whose code runs: that of the episode whose code has scheduled it, whatever tasks and
    callbacks lie between."""

    def __init__(self, player: Player):
        super().__init__(_Selector(player.progress))
        self._player = player

    def call_soon(self, callback, *args, context=None):
        return super().call_soon(self._marked(callback, context), *args, context=context)

    def call_at(self, when, callback, *args, context=None):
        return super().call_at(when, self._marked(callback, context), *args, context=context)

    def _marked(self, callback, context):
        ticket = _OWNER.get() if context is None else context.get(_OWNER)
        return callback if ticket is None else functools.partial(self._run, ticket, callback)

    def _run(self, ticket: int, callback, *args) -> None:
        self._player.enter(ticket)
        callback(*args)
        self._player.leave(ON_LOOP)


class _Selector(selectors.DefaultSelector):
    """Says when an event loop waits and when it runs."""

    def __init__(self, progress: WorkerProgress):
        super().__init__()
        self._progress = progress

    def select(self, timeout=None):
        self._progress.write(_BETWEEN, time.monotonic())
        events = super().select(timeout)
        self._progress.write(ON_LOOP, time.monotonic())
        return events


def _identity(sock: socket.socket) -> tuple[int, int]:
    """Names the stream that a socket's descriptor stands for."""
    try:
        status = os.fstat(sock.fileno())
    except OSError:
        return (0, 0)
    return status.st_dev, status.st_ino
