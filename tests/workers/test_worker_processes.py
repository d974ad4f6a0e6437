"""Worker processes: the wire in both directions, limits, signals, and ends that leave nothing."""

import os
import select
import signal
import sys
import time

import pytest
from processes import alive, wait_until

from rljax.workers.process import WorkerProcess
from rljax.workers.wire import frame, take_frame

# Answers each message; told "stuck" it answers nothing any more.
WORKER = """
import os, pickle, subprocess, time
from rljax.workers.bootstrap import begin
from rljax.workers.wire import frame, read_frame

def main(spec):
    place = begin(spec)
    place.socket.sendall(frame(("facts", place.facts)))
    while (data := read_frame(place.socket)) is not None:
        verb, content = pickle.loads(data)
        if verb == "length":
            place.socket.sendall(frame(len(content)))
        if verb == "allocate":
            try:
                place.socket.sendall(frame(len(bytearray(content))))
            except MemoryError:
                place.socket.sendall(frame("MemoryError"))
        if verb == "child":
            child = subprocess.Popen(["sleep", "600"])
            place.socket.sendall(frame(child.pid))
        if verb == "stuck":
            place.progress.write(content, time.monotonic())
            5 ** (5 ** (5 ** 5))
"""


@pytest.fixture
def worker(tmp_path):
    (tmp_path / "echo_worker.py").write_text(WORKER)
    path = [str(tmp_path), *sys.path]
    one = WorkerProcess("echo_worker", {"a": 1}, str(tmp_path), path, 1 << 28, True)
    assert answer(one) == ("facts", {"a": 1})
    yield one
    one.kill()
    one.process.wait()
    one.close_pipe()


def answer(worker, seconds: float = 120.0):
    """The worker's next message; what it has not been sent is sent meanwhile."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert worker.receive()
        if (message := take_frame(worker.received)) is not None:
            return message
        worker.send_on()
        select.select([worker.socket], [], [], 0.01)
    raise AssertionError("no answer")


def test_a_message_larger_than_the_stream_is_posted_without_waiting(worker):
    for _ in range(2):
        worker.post(frame(("length", b"x" * 20_000_000)))
    assert worker.has_unsent
    assert [answer(worker), answer(worker)] == [20_000_000] * 2 and not worker.has_unsent


def test_a_worker_that_is_stuck_can_be_read_and_killed_with_its_children(worker):
    worker.post(frame(("child", None)))
    child = answer(worker)
    begun = time.monotonic()
    worker.post(frame(("stuck", 42)))
    wait_until(lambda: worker.progress.read()[0] == 42, "its mark")
    assert begun <= worker.progress.read()[1] <= time.monotonic()
    assert alive(child)
    worker.kill()
    wait_until(lambda: not alive(child) and not alive(worker.process.pid), "their end")
    assert worker.process.wait() == -signal.SIGKILL


def test_the_memory_of_a_worker_is_limited(worker):
    worker.post(frame(("allocate", 1 << 20)) + frame(("allocate", 1 << 29)))
    assert [answer(worker), answer(worker)] == [1 << 20, "MemoryError"]


def test_signals_of_the_launcher_do_not_end_a_worker(worker):
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.process.pid, number)
    worker.post(frame(("length", b"xy")))
    assert answer(worker) == 2


def test_a_worker_ends_when_its_lifeline_closes(worker):
    worker.post(frame(("stuck", 1)))  # in C, with the interpreter's lock
    wait_until(lambda: worker.progress.read()[0] == 1, "its mark")
    os.close(worker.lifeline)
    worker.lifeline = -1
    wait_until(lambda: not alive(worker.process.pid), "its end")
