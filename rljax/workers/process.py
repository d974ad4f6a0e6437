"""One worker process as its parent sees it: its start, streams, current task and end."""

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

from rljax.workers.progress import PROGRESS_BYTES, WorkerProgress

# The parent's `__main__` is not imported (a launcher is heavy); its sys.path is handed over.
_BOOT = """
import importlib, sys
module, spec, *sys.path = sys.argv[1:]
importlib.import_module(module).main(spec)
"""
_READS = 1024  # reads of 64 KiB: a worker that writes without end is not read without end
# A worker is one of many: no thread pools, and never the parent's accelerator.
_WORKER_ENV = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",
}


class WorkerProcess:
    """A process that runs `main(spec)` of a module, which begins with rljax.workers.bootstrap; its
    streams, its state and the time at which that began. `facts`: JSON for the worker."""

    def __init__(
        self, module: str, facts: dict, folder: str, path: list[str], memory_bytes: int, pipe: bool
    ):
        self.state = "starting"  # then "ready", or what its supervisor calls it; "dead" at the end
        self.since = time.monotonic()  # when that state began
        self.received, self._unsent = bytearray(), bytearray()
        self.unfinished_since = math.inf  # when the message began of which a part has come
        self.socket, worker_socket = socket.socketpair()
        read_end, self.lifeline = os.pipe()
        shared = tempfile.TemporaryFile()
        spec = {
            "facts": facts,
            "socket": worker_socket.fileno(),
            "lifeline": read_end,
            "progress": shared.fileno(),
            "parent": os.getpid(),
            "memory_bytes": memory_bytes,
        }
        # A launcher's own stdout may be data: without a pipe, what is printed goes to stderr.
        self.printed, output = os.pipe() if pipe else (-1, 2)
        try:
            shared.write(bytes(PROGRESS_BYTES))
            shared.flush()
            self.progress = WorkerProgress(shared.fileno())
            self.progress.write(-1, self.since)
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, module, json.dumps(spec), *path],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(worker_socket.fileno(), read_end, shared.fileno()),
                cwd=folder,
                env={**os.environ, **_WORKER_ENV},
                start_new_session=True,  # out of the terminal's reach, and killed with its children
            )
        except BaseException:
            self.close_stream()
            self.close_pipe()
            raise
        finally:
            worker_socket.close()
            os.close(read_end)
            shared.close()
            if pipe:
                os.close(output)
        self.socket.setblocking(False)
        if pipe:
            os.set_blocking(self.printed, False)

    def close_stream(self):
        """Closes the stream to the worker."""
        self.socket.close()
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1

    def close_pipe(self):
        """Closes the pipe of what the worker prints."""
        if self.printed >= 0:
            os.close(self.printed)
            self.printed = -1

    def kill(self):
        """Sends SIGKILL to the process and its children; the caller reaps them."""
        self.state = "dead"
        # Before it is reaped, the process id cannot belong to anyone else.
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.close_stream()

    def receive(self) -> bool:
        """Moves bytes that have arrived into the buffer, without waiting and a bounded number at a
        time; returns False at the stream's end."""
        try:
            for _ in range(_READS):
                if not (data := self.socket.recv(1 << 16)):
                    return False
                self.received += data
            return True
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False

    @property
    def has_unsent(self) -> bool:
        """Returns whether bytes wait until the worker reads."""
        return bool(self._unsent)

    def post(self, data: bytes) -> None:
        """Sends as much as the stream takes now, and keeps the rest for `send_on`."""
        self._unsent += data
        self.send_on()

    def send_on(self) -> None:
        """Sends more of the bytes that wait. Raises OSError if the worker has ended."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                sent = self.socket.send(memoryview(self._unsent)[: 1 << 20])
                del self._unsent[:sent]
