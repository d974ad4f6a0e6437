"""Counts the programs that XLA compiles, and knows which one it is at: a recompile in mid-run is a
fault worth a line, and the minutes of the first one need an explanation.

Counts every backend compile of the process, those that the persistent cache answers included.
"""

import os
import time
from collections.abc import Iterable
from typing import NamedTuple

import jax

from rljax import beats

_EVENT = "/jax/core/compile/backend_compile_duration"
_HIT = "/jax/compilation_cache/cache_hits"
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # what comes next is the compile
_names: list[str] = []
_seconds: list[float] = []  # of each of them
_hits: list[int] = []  # how many programs had been named when the cache had one
_now: list[tuple[str, float]] = []  # name and start of the program that is being compiled
_expected: dict[str, str] = {}
_watching = False


def use_cache(folder: str) -> None:
    """Keeps compiled programs in `folder` for the next process; "" = does not."""
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


def _note(event: str, seconds: float, **details) -> None:
    name = str(details.get("fun_name", "a program"))
    if event == _LOWERED:
        _now[:] = [(name, time.monotonic())]
        beats.compiling(True)
    if event == _EVENT:
        _now.clear()
        beats.compiling(False)
        _names.append(name)
        _seconds.append(seconds)


def _note_hit(event: str, **_details) -> None:
    if event == _HIT:
        _hits.append(len(_names))


def expect(programs: Iterable[tuple[str, str]]) -> None:
    """Says which large programs a run has, in their order: (name of the function, what it does)."""
    _expected.clear()
    _expected.update((f"jit({name})", what) for name, what in programs)


def running() -> tuple[str, float] | None:
    """("compiling learn (2 of 3)", seconds so far), None while nothing is compiled."""
    now = next(iter(_now), None)  # one read: another thread writes it
    if now is None:
        return None
    name, begun = now
    what = _expected.get(name, name.removeprefix("jit(").removesuffix(")"))
    place = list(_expected).index(name) + 1 if name in _expected else 0
    number = f" ({place} of {len(_expected)})" if place else ""
    return f"compiling {what}{number}", time.monotonic() - begun


class Compiled(NamedTuple):
    """What was compiled, and of that came from the persistent cache."""

    programs: int
    hits: int
    seconds: float
    longest_s: float


def since(start: int) -> Compiled:
    """Of the programs after the first `start`."""
    seconds = _seconds[start:]
    hits = sum(at >= start for at in _hits)
    return Compiled(len(seconds), hits, sum(seconds), max(seconds, default=0.0))


def missed(start: int) -> list[str]:
    """The programs after the first `start` that the persistent cache did not have."""
    found = set(_hits)
    return [name for i, name in enumerate(_names) if i >= start and i not in found]


def count() -> int:
    """The number of programs compiled so far."""
    return len(_names)


def names(since: int) -> list[str]:
    """The programs compiled after the first `since`."""
    return _names[since:]
