"""One process of a `RewardPool` as its parent sees it: start, streams, the task it is on, end."""

import collections
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

from rljax.rewards.pool.jobs import Task
from rljax.rewards.pool.worker import PROGRESS_BYTES, Progress, frame

BEGIN_TIMEOUT_S = 30.0  # from handing over a chunk to the worker's message that it began

# The parent's `__main__` is not imported (a launcher is heavy); its sys.path is handed over.
_BOOT = """
import sys
spec, *sys.path = sys.argv[1:]
from rljax.rewards.pool.worker import main
main(spec)
"""
# A worker is one of many: no thread pools, and never the parent's accelerator.
_WORKER_ENV = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",
}


class WorkerProcess:
    """One process as its parent sees it: the stream, and which task it is on since when."""

    def __init__(self, reward: str, folder: str, path: list[str], memory_bytes: int, pipe: bool):
        self.state = "starting"  # -> "idle" <-> "busy"; or "dead"
        self.since = time.monotonic()  # when that state began
        self.chunk: collections.deque[Task] = collections.deque()  # handed over, not yet heard of
        self.served = 0
        self.buffer = bytearray()
        self.socket, theirs = socket.socketpair()
        read_end, self.lifeline = os.pipe()
        shared = tempfile.TemporaryFile()
        spec = {
            "reward": reward,
            "socket": theirs.fileno(),
            "lifeline": read_end,
            "progress": shared.fileno(),
            "parent": os.getpid(),
            "memory_bytes": memory_bytes,
        }
        # A launcher's own stdout may be data: without a pipe, what rewards print goes to stderr.
        self.printed, output = os.pipe() if pipe else (-1, 2)
        try:
            shared.write(bytes(PROGRESS_BYTES))
            shared.flush()
            self.progress = Progress(shared.fileno())
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(spec), *path],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(), read_end, shared.fileno()),
                cwd=folder,
                env={**os.environ, **_WORKER_ENV},
                start_new_session=True,  # out of the terminal's reach, and killed with its children
            )
        except BaseException:
            self.close_stream()
            self.close_pipe()
            raise
        finally:
            theirs.close()
            os.close(read_end)
            shared.close()
            if pipe:
                os.close(output)
        self.socket.setblocking(False)
        if pipe:
            os.set_blocking(self.printed, False)

    def close_stream(self):
        self.socket.close()
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1

    def close_pipe(self):
        if self.printed >= 0:
            os.close(self.printed)
            self.printed = -1

    def kill(self):
        """SIGKILL to the process and its children; reaping is the caller's."""
        self.state = "dead"
        # Before it is reaped, the process id cannot belong to anyone else.
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.close_stream()

    def receive(self) -> bool:
        """Move what has arrived into the buffer, without waiting; False at the stream's end."""
        try:
            while data := self.socket.recv(1 << 16):
                self.buffer += data
            return False
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False

    def running(self) -> tuple[Task | None, float, bool]:
        """(the task it is on, or None if it has not begun one; since when; whether what runs has a
        score when it is over its limit)."""
        if self.state == "busy":
            number, clock, scored = self.progress.read()
            for task in self.chunk:
                if task.number == number:
                    return task, clock, scored
        return None, self.since, False

    def send(self, chunk: list[Task]) -> None:
        self.state, self.since = "busy", time.monotonic()
        self.progress.write(-1, self.since)
        self.chunk.extend(chunk)
        self.socket.settimeout(BEGIN_TIMEOUT_S)  # it is idle, so it reads at once
        self.socket.sendall(frame([(task.number, task.blob) for task in chunk]))
        self.socket.setblocking(False)
