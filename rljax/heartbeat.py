"""Signs of life of this process: in which phase of which step it is, and since when.

Whatever takes long says so here; `rljax.hosts.watchdog` reads it from a thread of its own.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator

FIRST_S = 3600.0  # before the first of a kind, and while something compiles
TIMES, EXTRA_S = 5.0, 120.0  # of the slowest so far, and added to it


@dataclasses.dataclass(frozen=True)
class CurrentPhase:
    """The phase that a process is in. `entered` counts phases: hosts that run the same program are
    at the same point of it where their numbers are equal."""

    phase: str
    step: int
    entered: int
    waiting: bool  # for other hosts
    silent_s: float  # since the last sign of life
    limit_s: float  # how long that may be


@dataclasses.dataclass
class _Beats:
    """Signs of life of this process. Only its main thread enters phases."""

    # The first one is that of what runs between the others: "start", "rest", "finish".
    phases: list[str] = dataclasses.field(default_factory=lambda: ["start"])
    step: int = 0
    entered: int = 0
    waiting: int = 0
    compiling: bool = False
    compiled: bool = False  # since the last sign of life
    last_s: float = dataclasses.field(default_factory=time.monotonic)
    begun_s: float = dataclasses.field(default_factory=time.monotonic)  # the step, the start or end
    died_in: str = ""  # the phase that the last exception came out of
    slowest: dict[str, float] = dataclasses.field(default_factory=dict)  # s between two, by phase


_beats = _Beats()


def beat() -> None:
    """Something has been done: a dispatch of decoding, a scored sample, a file."""
    now, phase = time.monotonic(), _beats.phases[-1]
    if not _beats.compiled:  # compiling says nothing of how long the next one may take
        _beats.slowest[phase] = max(_beats.slowest.get(phase, 0.0), now - _beats.last_s)
    _beats.compiled, _beats.last_s = _beats.compiling, now


def still_moving() -> None:
    """A sign of life that another thread has seen: nothing is learned from it."""
    _beats.last_s = time.monotonic()


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """A part of a step, by the name under which a stall is reported."""
    beat()
    _beats.phases.append(name)
    _beats.entered += 1
    if sys.exception() is None:  # what clears up behind an error is not where it came from
        _beats.died_in = ""
    try:
        yield
    except BaseException:
        _beats.died_in = _beats.died_in or name
        raise
    finally:
        beat()
        _beats.phases.pop()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Nothing is left to do here but to wait for other hosts."""
    _beats.waiting += 1
    try:
        yield
    finally:
        _beats.waiting -= 1


def at_start() -> None:
    """A run begins; another one may have ended in this process."""
    beat()
    _beats.phases[0], _beats.step, _beats.begun_s = "start", 0, time.monotonic()


def at_step(step: int) -> None:
    """The step that has been begun."""
    beat()
    _beats.phases[0], _beats.step, _beats.begun_s = "rest", step, time.monotonic()


def at_end() -> None:
    """No step is left to do: what follows wraps the run up."""
    beat()
    _beats.phases[0], _beats.died_in, _beats.begun_s = "finish", "", time.monotonic()
    _beats.entered += 1


def doing() -> tuple[list[str], int, float]:
    """The phases that this process is in, outermost first, its step, and the seconds since the
    step, the start or the end of the run has begun."""
    return list(_beats.phases), _beats.step, time.monotonic() - _beats.begun_s


def died_in() -> str:
    """The innermost phase that an exception came out of; "" if another has begun since."""
    return _beats.died_in


def compiling(going_on: bool) -> None:
    """A program begins to compile, or has been compiled."""
    _beats.compiling, _beats.compiled = going_on, True
    _beats.last_s = time.monotonic()


def current(stall_s: float = 0.0) -> CurrentPhase:
    """Returns the phase of this process. A phase may be silent for `stall_s`; 0: learned from those
    before."""
    name = _beats.phases[-1]
    slowest = _beats.slowest.get(name)
    learned = FIRST_S if slowest is None else TIMES * slowest + EXTRA_S
    begins = _beats.compiling or name in ("start", "load")  # each once, and as long as it takes
    limit = FIRST_S if begins else stall_s or learned
    silent = time.monotonic() - _beats.last_s
    return CurrentPhase(name, _beats.step, _beats.entered, _beats.waiting > 0, silent, limit)
