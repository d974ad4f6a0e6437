"""Counts the programs that XLA compiles: a recompile in mid-run is a fault worth a line.

Counts every backend compile of the process, those that the persistent cache answers included.
"""

import os

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_names: list[str] = []
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
        _watching = True


def _note(event: str, _seconds: float, **details) -> None:
    if event == _EVENT:
        _names.append(str(details.get("fun_name", "a program")))


def count() -> int:
    """The number of programs compiled so far."""
    return len(_names)


def names(since: int) -> list[str]:
    """The programs compiled after the first `since`."""
    return _names[since:]
