"""Runs a job on an untrusted file in a process with limits, and says how it ended.

`guarded_process` is that process. It is started when it is first needed, answers one request after
the other (a tenth of a millisecond each), and is started again if a job has ended it.
"""

import atexit
import contextlib
import functools
import os
import pickle
import selectors
import signal
import subprocess
import sys
import threading
import time

from rljax.data.text.guarded_process import LIMIT, REPLY, REQUEST

# What a job may take, and more for each byte that it is handed: a long conversation is no attack.
# Of processor time. A tokenizer of 262,144 tokens (16 MB) takes 1.5 to 3 s on cores that other
# programs share.
SECONDS, SECONDS_PER_BYTE = 0.5, 1e-6
MEMORY, MEMORY_PER_BYTE = 200_000_000, 12
_PATIENCE_S = 120.0  # by the clock, on a machine that hardly gives it the processor
_BOOT = """
import sys
sys.path[:] = sys.argv[1:]
from rljax.data.text.guarded_process import main
main()
"""


def call(job: str, *arguments: object) -> tuple[str, str]:
    """Returns (kind of answer, text); the kinds are those of guarded_process. Job and arguments are
    ours; the contents of the arguments are untrusted."""
    return _process(os.getpid()).call(job, arguments)


@functools.cache
def _process(pid: int) -> "_Process":
    """Returns the guarded process of this process: after a fork, the pipes belong to the parent."""
    return _Process()


class _Process:
    def __init__(self):
        self.lock = threading.Lock()
        self.child: subprocess.Popen | None = None
        self.owner = os.getpid()
        atexit.register(self.end)

    def call(self, job: str, arguments: tuple) -> tuple[str, str]:
        data = pickle.dumps((job, arguments))
        seconds = SECONDS + SECONDS_PER_BYTE * len(data)
        memory = MEMORY + MEMORY_PER_BYTE * len(data)
        request = REQUEST.pack(len(data), seconds, memory) + data
        with self.lock:
            try:
                self._send(request)
                reply = self._receive(memory)
            except BaseException:  # Ctrl-C, say: the next caller must not get this one's reply
                self.end()
                raise
            if not reply:
                return LIMIT, self._reason_of_end(seconds)
            kind = chr(reply[0])
            if kind == LIMIT:  # memory that its heap keeps would count for the next job
                self.end()
            return kind, reply[1:].decode("utf-8", "surrogatepass")

    def _reason_of_end(self, seconds: float) -> str:
        """Returns the reason why there is no reply."""
        code = self.end()
        if code >= 0:
            raise RuntimeError("the process that tries strangers' files ended, see stderr")
        if -code in (signal.SIGPROF, signal.SIGKILL):
            return f"it takes more than {seconds:.1f} s of processor time"
        return f"it ends the process that tries it ({signal.Signals(-code).name})"

    def _send(self, request: bytes) -> None:
        if self.child is None or self.child.poll() is not None:
            self.end()
            self.child = _start_process()
        with contextlib.suppress(BrokenPipeError):  # it has just ended: there will be no reply
            self.child.stdin.write(request)
            self.child.stdin.flush()

    def _receive(self, limit: int) -> bytes:
        """Returns the reply; b"" where the process has ended, or never answers."""
        deadline = time.monotonic() + _PATIENCE_S
        handle = self.child.stdout.fileno()
        received, size = bytearray(), None
        with selectors.DefaultSelector() as selector:
            selector.register(handle, selectors.EVENT_READ)
            while size is None or len(received) < size:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return b""
                data = os.read(handle, 1 << 20)
                received += data
                if size is None and len(received) >= REPLY.size:
                    size = REPLY.size + REPLY.unpack(received[: REPLY.size])[0]
                if not data or (size or 0) > limit:
                    return b""
        return bytes(received[REPLY.size :])

    def end(self) -> int:
        """Ends the child, if there is one, and returns how it ended."""
        child, self.child = self.child, None
        if child is None or os.getpid() != self.owner:
            return 0
        child.kill()
        with contextlib.suppress(OSError):  # closing sends the rest of a request
            child.stdin.close()
        child.stdout.close()
        return child.wait()


def _start_process() -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", _BOOT, *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is the parent's to answer
    )
