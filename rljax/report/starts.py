"""Starts of a run: a line of `starts.jsonl` in its folder for each start, resumes included.

Command line, working folder and its git commit, rljax's version, host, process and devices; and the
date that the chat template writes, which is that of the first start.
"""

import contextlib
import datetime
import json
import logging
import os
import platform
import resource
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import rljax
from rljax.errors import InputError
from rljax.runs.jsonl import read_jsonl

LOG = logging.getLogger("rljax")
FILE = "starts.jsonl"
GIT_TIMEOUT_S = 3.0  # a working folder on a slow disk must not hold a run up


def git_state(folder: str | os.PathLike) -> dict:
    """Returns {"commit", "dirty"} of the git repository that `folder` is in; {} if it is in none.
    `dirty`: tracked files differ from the commit."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return {}
    return {"commit": commit, "dirty": bool(changed)}


def _git(folder: str | os.PathLike, *arguments: str) -> str:
    # No lock is taken: the user's own git commands go on.
    result = subprocess.run(
        ["git", "--no-optional-locks", *arguments],
        cwd=folder,
        check=True,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=GIT_TIMEOUT_S,
    )
    return result.stdout.strip()


def versions() -> dict[str, str]:
    """Returns {name: version} of Python and of the libraries that numbers depend on."""
    names = ("jax", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    return {"python": platform.python_version()} | {name: version(name) for name in names}


def record_start(
    folder: Path,
    *,
    device: str,
    step: int,
    memory: str,
    compiled_for: Mapping[str, str] | None = None,
    warnings: Sequence[str] = (),
    chat_date: datetime.datetime | None = None,
) -> None:
    """Adds a line about this start to the folder: `step` steps are done, `device` is "8 x TPU v5e",
    `memory` the line of the plan, `compiled_for` what programs depend on, `warnings` those before
    the first step, `chat_date` the date that the chat template writes. If it cannot be written,
    there is a warning."""
    working_folder = os.path.realpath(".")  # also of a folder that is gone
    row = {
        "time": time.time(),
        "command": shlex.join(sys.orig_argv),
        "working_folder": working_folder,
        "git": git_state(working_folder),
        "rljax": rljax.__version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": device,
        "memory": memory,
        "step": step,
        "compiled_for": dict(compiled_for or {}),
        "warnings": list(warnings),
        "chat_date": chat_date and chat_date.isoformat(),
    }
    try:
        with open(folder / FILE, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:  # a full disk: what is written next says so, too
        LOG.warning("%s is not written: %s", folder / FILE, error)


def read_starts(folder: Path) -> list[dict]:
    """Returns the lines of `starts.jsonl`; none if there is no such file."""
    try:
        rows = read_jsonl(folder / FILE)
    except (OSError, InputError):
        return []
    return [row for row in rows if isinstance(row.get("time"), int | float)]


def last_start(folder: Path) -> float | None:
    """Returns the time of the last start, in seconds since 1970; None if nothing says so."""
    starts = read_starts(folder)
    return starts[-1]["time"] if starts else None


def run_date(folder: Path) -> datetime.datetime:
    """Returns the date that the chat template of the run in `folder` writes: that of its first
    start, so that a resumed run learns the same prompts; now, of a run that begins."""
    for start in read_starts(folder):
        date = start.get("chat_date")
        with contextlib.suppress(ValueError, OverflowError, OSError):  # a damaged line
            if isinstance(date, str):
                return datetime.datetime.fromisoformat(date)
            return datetime.datetime.fromtimestamp(start["time"])  # of an older version
    return datetime.datetime.now()


def peak_memory(devices: Sequence) -> Mapping[str, int]:
    """Returns the most bytes that were in use so far: by this process on the host, and on any of
    the devices, if they say so."""
    kilobyte = 1 if sys.platform == "darwin" else 1024
    out = {"host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobyte}
    stats = [device.memory_stats() or {} for device in devices]
    peaks = [int(s["peak_bytes_in_use"]) for s in stats if "peak_bytes_in_use" in s]
    return out | ({"device_bytes": max(peaks)} if peaks else {})
