"""Runs a command, and again after a fault that a new start can mend: the exit codes of rljax runs
say which (rljax.hosts.shutdown)."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

INPUT = 2
# 143 stopped by a notice, and saved; 170 stalled; 171 a host failed; or killed, or ended by JAX.
RESTARTS = (143, 170, 171, 134, 135, 137, 139)
MOST_RESTARTS = 5  # in a row, without a checkpoint between them
LONGEST_PAUSE_S = 300.0
# Files in which a run leaves word: the failure that ended it, and the step that it saved last.
LAST_WORDS, LAST_SAVED = "RLJAX_LAST_WORDS", "RLJAX_LAST_SAVED"


def supervise(command: Sequence[str], first_pause_s: float = 10.0) -> int:
    """Runs a command to its end; returns its last exit code. SIGTERM and Ctrl-C go to the command
    and end the restarts.

    It is started again at most MOST_RESTARTS times without a newer checkpoint, after pauses that
    double, and never while a process of the last start still runs: it may hold the chips.
    """
    failed_in_a_row, saved = 0, -1
    with tempfile.TemporaryDirectory() as folder, _Told() as told:
        words, step = os.path.join(folder, "words"), os.path.join(folder, "saved")
        env = {**os.environ, LAST_WORDS: words, LAST_SAVED: step}
        while True:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(words)
            code = told.run(command, env)
            if told.number or code not in RESTARTS:
                return code
            if code > 128 and code not in (143, 170, 171):
                _say_tpu_logs()
            if code_of_the_failure(words) == INPUT:
                _say(f"exit code {code}, but a host ended with {INPUT}: no restart mends that")
                return code
            if (newest := _number(step)) > saved:
                failed_in_a_row, saved = 0, newest
            if failed_in_a_row == MOST_RESTARTS:
                _say(f"exit code {code}; {MOST_RESTARTS} restarts without a newer checkpoint")
                return code
            pause_s = min(first_pause_s * 2**failed_in_a_row, LONGEST_PAUSE_S)
            failed_in_a_row += 1
            _say(f"exit code {code}, again in {pause_s:g} s")
            if told.during(pause_s):
                return code


class _Told:
    """The signal that tells this process to stop, which it passes on to the command that runs."""

    def __enter__(self) -> "_Told":
        self.number, self.child = 0, None
        numbers = (signal.SIGTERM, signal.SIGINT)
        self.old = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.old.items():
            signal.signal(number, handler)

    def _note(self, number, _frame) -> None:
        self.number = number
        if self.child is not None:
            self.child.send_signal(number)

    def run(self, command: Sequence[str], env: dict[str, str]) -> int:
        """Returns the exit code of one start, once all processes that it has started are gone."""
        self.child = child = subprocess.Popen(command, env=env, process_group=0)
        if self.number:  # it came before there was a child
            child.send_signal(self.number)
        code = child.wait()
        self.child = None
        _end_group(child.pid)
        return code if code >= 0 else 128 - code

    def during(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self.number and time.monotonic() < deadline:
            time.sleep(min(0.2, seconds))
        return bool(self.number)


def _end_group(group: int, patience_s: float = 10.0) -> None:
    """Waits until no process of the group runs any more; kills those that do after patience_s."""
    deadline = time.monotonic() + patience_s
    while _runs(group):
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        time.sleep(0.05)


def _runs(group: int) -> bool:
    """Returns whether a process of the group is more than a zombie, which in a container nobody may
    reap."""
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            with open(f"/proc/{name}/stat") as file:
                state, _, its_group = file.read().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def _say_tpu_logs(lines: int = 10) -> None:
    """Prints the last lines of libtpu's newest log, since some crashes are reported only there."""
    folder = os.environ.get("TPU_LOG_DIR", "/tmp/tpu_logs")
    with contextlib.suppress(OSError):
        files = [os.path.join(folder, name) for name in os.listdir(folder)]
        newest = max(filter(os.path.isfile, files), key=os.path.getmtime, default=None)
        if newest is not None:
            with open(newest, errors="replace") as file:
                _say(f"the end of {newest}:\n" + "".join(file.readlines()[-lines:]))


def code_of_the_failure(path: str) -> int | None:
    """Returns the exit code of the host that failed, from its last message; None without one."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with open(path) as file:
            return json.load(file)["code"]
    return None


def _number(path: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        with open(path) as file:
            return int(file.read())
    return -1


def _say(text: str) -> None:
    print(f"supervise: {text}", file=sys.stderr, flush=True)
