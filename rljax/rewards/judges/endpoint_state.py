"""State that calls of an endpoint share: a cache of answers in a folder, and a circuit breaker.

Both survive a SIGKILL at any moment: files are renamed into place, locks are the kernel's.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rljax.errors import InputError
from rljax.files import read_json_object


def answer_path(folder: str, url: str, payload: bytes) -> Path | None:
    """The file of the cached answer to a request; None without a cache folder."""
    if not folder:
        return None
    name = hashlib.sha256(url.encode() + b"\n" + payload).hexdigest()
    return Path(folder).expanduser() / name[:2] / f"{name}.json"


def read_answer(path: Path | None, parse: Callable) -> tuple | None:
    """Returns (parse(text),) of a cached answer; None if there is none that can
    be read and parsed."""
    try:
        return None if path is None else (parse(read_json_object(path)["text"]),)
    except (ValueError, KeyError, TypeError):
        return None


def write_answer(path: Path | None, text: str) -> None:
    """Writes the answer whole or not at all: the process may be killed at any moment."""
    if path is None:
        return
    with _folder_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.stem}.{os.getpid()}.{threading.get_ident()}.half")
        partial.write_text(json.dumps({"text": text}))
        os.replace(partial, path)


@contextlib.contextmanager
def _folder_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"the cache {folder} cannot be written",
            rule=str(error),
            fix="name a folder of yours, on a disk with room",
        ) from None


# Breakers of calls without a folder, by address; a breaker has to remember earlier calls.
_OF_PROCESS: dict[str, dict] = {}
_LOCK = threading.Lock()


@contextlib.contextmanager
def _breaker(url: str, folder: str) -> Iterator[dict]:
    """Yields the breaker's numbers, to read and to change, under a lock that a kill releases."""
    state = {"failures": 0, "open_until": 0.0, "probe_until": 0.0}
    if not folder:
        with _LOCK:
            yield _OF_PROCESS.setdefault(url, state)
        return
    path = Path(folder).expanduser() / f"breaker-{hashlib.sha256(url.encode()).hexdigest()}.json"
    with _folder_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        with contextlib.suppress(ValueError, TypeError):  # cut off by a kill: as if new
            state |= {k: v for k, v in json.load(file).items() if isinstance(v, int | float)}
        try:
            yield state
        finally:
            file.seek(0)
            file.truncate()
            json.dump(state, file)


def enter_breaker(url: str, folder: str, *, failures: int, open_s: float, probe_s: float) -> str:
    """The reason why no call may be made now, "" if one may.

    Once the breaker has been open for `open_s` seconds, one call at a time is let through, for at
    most `probe_s` seconds.
    """
    with _breaker(url, folder) as state:
        now = time.time()
        if state["failures"] < failures:
            return ""
        wait, probing = state["open_until"] - now, state["probe_until"] - now
        if 0 < wait <= open_s:  # a clock that was set back must not keep it open
            return f"{state['failures']} calls in a row found {url} down; next try in {wait:.0f} s"
        if 0 < probing <= probe_s:
            return f"another call is trying whether {url} is up again"
        state["probe_until"] = now + probe_s
        return ""


def leave_breaker(url: str, folder: str, up: bool, *, failures: int, open_s: float) -> None:
    """Records the outcome of a call that was let through."""
    with _breaker(url, folder) as state:
        state["failures"] = 0 if up else state["failures"] + 1
        state["probe_until"] = 0.0
        state["open_until"] = time.time() + open_s if state["failures"] >= failures else 0.0
