"""Logs a run's numbers with one call: jsonl files (always), console, services, the user's own.

The `Tracker` protocol, and `Tracking`, which fans out to all trackers. Training outranks tracking:
a service is called in a thread of its own, and one that fails or hangs while the run goes on is
named and switched off; it never stops a step. In a run of several processes only the first one
opens a tracking.

The run folder gets `metrics.jsonl` {"step": 3, "reward/mean": 0.5, ...} and `samples.jsonl`
{"step": 3, "prompt": ..., "response": ..., "reward": ...}, one JSON object a line; with an
environment also `episodes.jsonl` (rljax.tracking.episodes).
"""

import functools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rljax.components import resolve
from rljax.errors import InputError
from rljax.runs.jsonl import JsonlTracker, plain

LOG = logging.getLogger("rljax.tracking.trackers")
SERVICES = "rljax.tracking.services"  # where bare names are looked up
FAILURES_UNTIL_OFF = 3
START_S = 180.0  # for a service to start: a login, the first answer of a server
HANG_S = 120.0  # of one call of a service, after which it is off
CLOSE_S = 300.0  # for what a service still has to send when the run has ended
METHODS = ("log", "samples", "close")


class Tracker(Protocol):
    """Receives metrics and example completions. A config names what makes one: a class or a
    function of (run_dir, config) and of options."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step, {name: number or text}."""

    def samples(self, step: int, rows: Sequence[Mapping]) -> None:
        """Takes example completions of a step."""

    def close(self) -> None:
        """Ends the tracker."""


# --- the fan-out ---


def _reason(error: BaseException) -> str:
    """The kind and the text of any error, also of one that cannot be printed."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


class _Guarded:
    """One tracker whose failures are counted and reported, never raised."""

    caught: type[BaseException] = Exception

    def __init__(self, name: str, tracker: Tracker):
        self.name, self.tracker = name, tracker
        self.may_go_off = not isinstance(tracker, JsonlTracker)  # a disk may be full for a while
        self.failures = self.in_a_row = 0
        self.on = True

    def call(self, what: str, *args) -> None:
        try:
            getattr(self.tracker, what)(*args)
            self.in_a_row = 0
        except self.caught as error:  # a third party's network or disk must not cost a training run
            self.failures += 1
            self.in_a_row += 1
            if self.failures == 1:
                LOG.warning(
                    "tracker %r failed in %s (%s); run goes on", self.name, what, _reason(error)
                )
            if self.may_go_off and self.on and self.in_a_row >= FAILURES_UNTIL_OFF:
                self.on = False
                LOG.warning("tracker %r is off: %d failures in a row", self.name, self.in_a_row)

    def close(self) -> None:
        self.call("close")


class _Threaded(_Guarded):
    """A tracker of a service or of the user: made and called in one thread of its own, in order, so
    that no step waits for it. One whose call does not return is off, and nobody waits for it.
    In its thread sys.exit() is a failure as any other: it would end that thread alone."""

    caught = BaseException

    def __init__(self, name: str, make: Callable[[], Tracker]):
        super().__init__(name, None)
        self.calls: queue.SimpleQueue = queue.SimpleQueue()
        self.ready, self.done = threading.Event(), threading.Event()
        self.error: BaseException | None = None  # of the start
        self.since: float | None = None  # when the call that runs began
        self.thread = threading.Thread(
            target=self._work, args=(make,), daemon=True, name=f"tracker {name}"
        )
        self.thread.start()
        if not self.ready.wait(START_S):
            self.error = TimeoutError(f"it has not started within {START_S:g} s")

    def call(self, what: str, *args) -> None:
        if self._hangs():
            self._give_up()
        else:
            self.calls.put((what, args))

    def close(self) -> None:
        self.calls.put(("close", ()))
        end = time.monotonic() + CLOSE_S
        while not self.done.wait(min(1.0, HANG_S)):
            if time.monotonic() > end or self._hangs() and self.calls.qsize():
                self._give_up()
                return

    def _hangs(self) -> bool:
        since = self.since
        return since is not None and time.monotonic() - since > HANG_S

    def _give_up(self) -> None:
        if self.on:
            self.on = False
            LOG.warning("tracker %r hangs and is off; run goes on", self.name)

    def _work(self, make: Callable[[], Tracker]) -> None:
        try:
            self.tracker = make()
            lacking = [name for name in METHODS if not callable(getattr(self.tracker, name, 0))]
            if lacking:
                kind = type(self.tracker).__name__
                raise TypeError(f"it made a {kind}, which has no {', '.join(lacking)}")
        except BaseException as error:
            self.error = error
            return
        finally:
            self.ready.set()
        method = ""
        while method != "close":
            method, args = self.calls.get()
            self.since = time.monotonic()
            if self.on or method == "close":
                super().call(method, *args)
            self.since = None
        self.done.set()


class Tracking:
    """Every tracker of a run as one: `log`, `samples`, `close`, and offsets for exact resume."""

    def __init__(self, jsonl: JsonlTracker, others: Sequence[_Guarded]):
        self._jsonl = jsonl
        self._guarded = [_Guarded("jsonl", jsonl), *others]
        self._dropped: set[str] = set()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends one row of metrics: scalars (numpy, device) and text such as the phase."""
        step, row = int(step), self._clean(metrics)
        self._call("log", step, row)

    def samples(self, step: int, rows: Sequence[Mapping]) -> None:
        """Sends example completions: prompt, response, reward, ground_truth, status, phase."""
        step, rows = int(step), [plain(row) for row in rows]
        self._call("samples", step, rows)

    def _call(self, method: str, *args) -> None:
        for guarded in self._guarded:
            if guarded.on:
                guarded.call(method, *args)

    def episodes(self, step: int, rows: Sequence[Mapping]) -> None:
        """Writes records of episodes (rljax.tracking.episodes) into episodes.jsonl alone."""
        for guarded in self._guarded[:1]:
            guarded.call("episodes", int(step), rows)

    def close(self) -> None:
        """Closes every tracker, the failed ones too: they may hold files and threads."""
        for guarded in self._guarded:
            guarded.close()

    def offsets(self) -> dict[str, int]:
        """Returns the bytes of the jsonl files, synced to disk, for a checkpoint."""
        try:
            return self._jsonl.offsets()
        except OSError as error:  # the checkpoint matters more than its log
            LOG.warning("the jsonl files are not synced (%s): a resume will not cut them", error)
            return {}

    def truncate(self, offsets: Mapping[str, int]) -> None:
        """Cuts the jsonl files back to the checkpoint's `offsets` on resume; warns if they
        are shorter."""
        self._jsonl.truncate(offsets)

    def empty(self) -> None:
        """Empties the jsonl files, for a run that starts anew in a folder."""
        self._jsonl.truncate(dict.fromkeys(self._jsonl.files, 0))

    def lost(self) -> str:
        """Returns a text about rows of the jsonl files that were lost, "" if none were."""
        return self._jsonl.lost()

    def failures(self) -> dict[str, int]:
        """Returns the number of failures so far by tracker name."""
        return {guarded.name: guarded.failures for guarded in self._guarded}

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _clean(self, metrics: Mapping[str, float]) -> dict[str, float]:
        row = {}
        for key, value in metrics.items():
            number = plain(value)
            if isinstance(number, int | float) or isinstance(value, str):
                row[str(key)] = number
            elif key not in self._dropped:
                self._dropped.add(key)
                kind = type(value).__name__
                LOG.warning("metric %r is no scalar (%s) and is not logged", key, kind)
        return row


class Silent(Tracking):
    """The tracking of a process that writes nothing: of several hosts only the first one writes."""

    def __init__(self):
        self._guarded = []
        self._dropped: set[str] = set()

    def offsets(self) -> dict[str, int]:
        """Returns no offsets."""
        return {}

    def truncate(self, offsets: Mapping[str, int]) -> None:
        """Does nothing."""

    def empty(self) -> None:
        """Does nothing."""

    def lost(self) -> str:
        """Returns "": nothing is written."""
        return ""


def open_tracking(
    trackers: Sequence[str],
    run_dir: str | os.PathLike,
    config: Mapping,
    console: Tracker | None = None,
    meanings: Tracker | None = None,
) -> Tracking:
    """Opens the trackers that `trackers` names besides the jsonl files and the `meanings` of
    metrics; `console` is used if it is named. One that is named twice, with other options, is
    opened twice. Raises InputError for a name that cannot be resolved, a package that is not
    installed, and a tracker that does not start; in a resumed run the last is a warning."""
    if isinstance(trackers, str):
        fix = f"({trackers!r},)"
        raise InputError("trackers must be a sequence of names", value=trackers, fix=fix)
    makers = {
        text: resolve(text, SERVICES) for text in dict.fromkeys(trackers) if text != "console"
    }
    run_dir = Path(run_dir)
    jsonl = JsonlTracker(run_dir)
    resumed = jsonl.files["metrics.jsonl"].size() > 0
    use_console = "console" in trackers and console is not None
    guarded = [_Guarded("meanings", meanings)] if meanings is not None else []
    guarded += [_Guarded("console", console)] if use_console else []
    for text, maker in makers.items():
        started = _Threaded(text, functools.partial(maker, run_dir, config))
        error = started.error
        if error is None:
            guarded.append(started)
        elif isinstance(error, InputError):
            raise error
        elif not resumed:  # the user is still watching: fail before hours go unrecorded
            network = "check login and network (WANDB_MODE=offline needs none)"
            own = "make it a class or a function of (run_dir, config) whose result has log, samples"
            fix = network if maker.function.__module__ == SERVICES else f"{own} and close"
            problem = f"tracker {text!r} does not start"
            raise InputError(problem, rule=_reason(error), fix=f"{fix}, or drop it") from None
        else:
            LOG.warning(
                "tracker %r does not start again (%s); run goes on without", text, _reason(error)
            )
    return Tracking(jsonl, guarded)
