"""Signals of a run: acknowledged at once, also while compiled code runs, and never a traceback."""

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time

import pytest
from conftest import REPO
from processes import wait_until

from rljax.tracking.signals import Signals

# `busy` is one call of compiled code that holds no lock and hears no signal, as a compile is: it
# waits for a mutex, which another thread gives back when the file `go` is there.
PROGRAM = """
import ctypes, os, signal, sys, threading, time
from rljax.tracking.signals import Signals, quit_now
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
libc.pthread_mutex_lock(mutex)
def busy(go):
    def end():
        while not os.path.exists(go):
            time.sleep(0.01)
        libc.pthread_mutex_unlock(mutex)
    threading.Thread(target=end, daemon=True).start()
    libc.pthread_mutex_lock(mutex)
if sys.argv[2] == "quits":
    signal.signal(signal.SIGINT, quit_now)
else:
    signal.signal(signal.SIGINT, signal.default_int_handler)
with Signals() as signals:
    print("begun", flush=True)
    busy(sys.argv[1])
    open(sys.argv[3], "w").write(str(signals.received))
print("ended", flush=True)
"""


def heard() -> None:
    """Before a program starts: what this process ignores (tests under nohup or in the background
    of a script do) it does not."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def started(go, handler, file, *before, **options):
    command = [*before, sys.executable, "-c", PROGRAM, str(go), handler, str(file)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    options = {**pipes, "preexec_fn": heard, **options}
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    process = subprocess.Popen(command, env=environment, text=True, **options)
    if process.stdout:
        assert process.stdout.readline() == "begun\n"
    return process


def line_of(stream, seconds=120.0) -> str:
    assert select.select([stream], [], [], seconds)[0], "nothing is said"
    return stream.readline()


def test_ctrl_c_is_acknowledged_and_a_second_one_quits_while_compiled_code_runs(tmp_path):
    process = started(tmp_path / "never", "quits", tmp_path / "out")
    process.send_signal(signal.SIGINT)
    assert "interrupted: saving after this step; Ctrl-C again quits now" in line_of(process.stderr)
    process.send_signal(signal.SIGINT)
    rest = process.communicate()
    assert process.returncode == 130 and rest == ("", "\ninterrupted: quit now\n")


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
def test_a_ctrl_c_after_another_signal_does_not_cost_the_save(tmp_path, first):
    process = started(tmp_path / "go", "quits", tmp_path / "out")
    process.send_signal(first)
    assert line_of(process.stderr) == f"{first.name}: saving after this step\n"
    process.send_signal(signal.SIGINT)
    assert "interrupted: saving after this step" in line_of(process.stderr)
    (tmp_path / "go").touch()
    assert process.communicate() == ("ended\n", "") and process.returncode == 0
    assert (tmp_path / "out").read_text() in ("SIGINT", first.name)


def test_nohup_is_respected(tmp_path):
    process = started(tmp_path / "go", "quits", tmp_path / "out", "nohup", stdin=subprocess.DEVNULL)
    process.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    process.communicate()
    assert process.returncode == 0 and (tmp_path / "out").read_text() == "None"


def test_a_closed_terminal_is_answered_like_sigterm(tmp_path):
    """The output goes nowhere, and is no error."""
    ours, theirs = pty.openpty()
    process = started(
        tmp_path / "go",
        "quits",
        tmp_path / "out",
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=lambda: (heard(), os.setsid(), fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)),
    )
    os.close(theirs)
    with open(ours, "rb") as terminal:
        assert terminal.readline() == b"begun\r\n"
    (tmp_path / "go").touch()
    assert process.wait() == 0 and (tmp_path / "out").read_text() == "SIGHUP"


def test_in_a_library_a_second_ctrl_c_is_a_keyboard_interrupt_and_handlers_come_back():
    def own(*_):
        return None

    before = {n: signal.signal(n, own) for n in (signal.SIGTERM, signal.SIGHUP)}
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            wait_until(lambda: signals.received == "SIGINT", "the signal")
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert [signal.getsignal(n) for n in before] == [own, own]
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        for number, handler in [*before.items(), (signal.SIGINT, old)]:
            signal.signal(number, handler)


# Sends Ctrl-C when the import of the first library begins.
EARLY = """
import os, runpy, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "absl":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
runpy.run_module("rljax", run_name="__main__")
"""
IMPORTS = "import signal, rljax.command; print(signal.getsignal(signal.SIGINT).__name__)"


@pytest.mark.parametrize(
    ("program", "code", "out", "err"),
    [(EARLY, 130, "", "\ninterrupted: quit now\n"), (IMPORTS, 0, "default_int_handler\n", "")],
)
def test_ctrl_c_while_rljax_is_imported_prints_no_traceback(program, code, out, err):
    """And a program that imports the commands keeps its handler."""
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    line = [sys.executable, "-c", program]
    ended = subprocess.run(line, env=environment, capture_output=True, text=True, preexec_fn=heard)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, out, err)


@pytest.mark.slow
def test_ctrl_c_while_jax_is_imported_prints_no_traceback(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "rljax", "train", "quickstart"],
        cwd=tmp_path,
        text=True,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        preexec_fn=heard,
    )
    maps = f"/proc/{process.pid}/maps"
    wait_until(lambda: "jaxlib" in open(maps).read(), "the import of jaxlib")
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1] == "\ninterrupted: quit now\n"
    assert process.returncode == 130 and list(tmp_path.iterdir()) == []
