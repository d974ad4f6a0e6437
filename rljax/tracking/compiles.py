"""Counts the programs that XLA compiles, and names the current one: a recompile in mid-run is a
fault worth a line, and the minutes of the first one need an explanation.

Every backend compile of the process is counted, including those that the persistent cache answers.
"""

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax

from rljax import heartbeat

_EVENT = "/jax/core/compile/backend_compile_duration"
_HIT = "/jax/compilation_cache/cache_hits"
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # event before the compile
_names: list[str] = []
_seconds: list[float] = []  # of each of them
_hits: list[int] = []  # indices in _names of the programs that the cache had
_now: list[str] = []  # the name of the program that is being compiled
_expected: dict[str, str] = {}
_ahead: set[int] = set()  # indices in _names of the programs that were compiled ahead
_thread = threading.local()
_watching = False


def use_cache(folder: str) -> None:
    """Keeps compiled programs in `folder` for the next process; does nothing for ""."""
    if folder:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def watch() -> None:
    """Starts counting; calling it again changes nothing."""
    global _watching
    if not _watching:
        jax.monitoring.register_event_duration_secs_listener(_note)
        jax.monitoring.register_event_listener(_note_hit)
        _watching = True


def _compiles(name: str | None) -> None:
    """Says which program is being compiled: `name`, or none."""
    _now[:] = [] if name is None else [name]
    heartbeat.compiling(name is not None)


def _note(event: str, seconds: float, **details) -> None:
    name, ahead = str(details.get("fun_name", "a program")), getattr(_thread, "ahead", None)
    if event == _LOWERED and ahead is None:
        _compiles(name)
    if event == _EVENT:
        if ahead is not None:
            ahead.append(name)
            _ahead.add(len(_names))
        else:
            _compiles(None)
        _names.append(name)
        _seconds.append(seconds)


@contextlib.contextmanager
def ahead() -> Iterator[list[str]]:
    """Counts the programs that this thread compiles as compiled ahead: no phase of the run waits
    for them. Yields the list of their names, which grows."""
    _thread.ahead = compiled = []
    try:
        yield compiled
    finally:
        _thread.ahead = None


@contextlib.contextmanager
def waits_for(name: str) -> Iterator[None]:
    """Says that this thread waits for the program `name`, which another one compiles."""
    _compiles(name)
    try:
        yield
    finally:
        _compiles(None)


def _note_hit(event: str, **_details) -> None:
    if event == _HIT:
        _hits.append(len(_names))


def expect(programs: Iterable[tuple[str, str]]) -> None:
    """Names the large programs of a run, in their order: (name of the function, what it does)."""
    _expected.clear()
    _expected.update((f"jit({name})", purpose) for name, purpose in programs)


# Phases of rljax.heartbeat, in the words that are shown to people.
_WORDS = {
    "start": "preparing the run",
    "load": "loading the model",
    "begin": "setting up the next phase",
    "data": "drawing rows of the data",
    "generate": "sampling responses",
    "reward": "scoring responses",
    "learn": "learning",
    "evaluate": "evaluating",
    "rest": "working",
    "save": "saving a checkpoint",
    "tracking": "writing metrics",
    "finish": "wrapping the run up",
    "export": "exporting the policy",
    "programs": "copying compiled programs",
    "download": "downloading",
    "reference_logprobs": "computing log-probs of the reference",
}


def doing() -> tuple[str, float]:
    """Returns what this process does now, and the seconds since the step began: ("step 12:
    evaluating, sampling responses", 7.5). Large programs that are being compiled are named by
    their purpose."""
    phases, step, seconds = heartbeat.doing()
    words = [_WORDS.get(name, name) for name in phases[1:] or phases[:1]]
    words = [word for word in words if word != _WORDS["data"]] or words  # what it draws them for
    name = next(iter(_now), None)  # one read: another thread writes it
    if name is not None and name in _expected:
        number = [*_expected].index(name) + 1
        words.append(f"compiling {_expected[name]} ({number} of {len(_expected)})")
    elif name is not None:
        words.append("compiling")
    prefix = f"step {step}: " if phases[0] == "rest" else ""
    return prefix + ", ".join(dict.fromkeys(words)), seconds


class Compiled(NamedTuple):
    """Counts of programs that were compiled, and of those that came from the persistent cache."""

    programs: int
    hits: int
    seconds: float
    longest_s: float


def since(start: int) -> Compiled:
    """Returns the counts of the programs after the first `start`."""
    seconds = _seconds[start:]
    hits = sum(hit >= start for hit in _hits)
    return Compiled(len(seconds), hits, sum(seconds), max(seconds, default=0.0))


def longest(start: int, least_s: float = 1.0) -> list[tuple[str, float]]:
    """Returns (purpose, seconds) of the programs after the first `start` that took `least_s` or
    more, all of one name together, the longest first."""
    total: dict[str, float] = {}
    for name, seconds in zip(_names[start:], _seconds[start:], strict=False):
        purpose = _expected.get(name, name.removeprefix("jit(").removesuffix(")"))
        total[purpose] = total.get(purpose, 0.0) + seconds
    long = [(purpose, seconds) for purpose, seconds in total.items() if seconds >= least_s]
    return sorted(long, key=lambda item: -item[1])


def missed(start: int) -> list[str]:
    """Returns the names of the programs after the first `start` that the cache did not have."""
    hits = set(_hits)
    return [name for i, name in enumerate(_names) if i >= start and i not in hits]


def count() -> int:
    """Returns the number of programs compiled so far."""
    return len(_names)


def names(since: int, *, ahead: bool = True) -> list[str]:
    """Returns the names of the programs compiled after the first `since`, with or without those
    that were compiled ahead."""
    programs = list(enumerate(_names))[since:]
    return [name for i, name in programs if ahead or i not in _ahead]
