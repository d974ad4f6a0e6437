"""Bootstrap of a worker process: its limits, its streams, and its end with its parent."""

import dataclasses
import fcntl
import json
import os
import resource
import select
import signal
import socket
import sys

from rljax.workers.progress import WorkerProgress

ORPHAN_POLL_S = 5.0  # seconds between two looks of an idle worker for its parent


@dataclasses.dataclass(frozen=True)
class WorkerContext:
    """The context of a worker: the stream to its parent, its current task, and what its parent
    told it."""

    socket: socket.socket
    progress: WorkerProgress
    parent: int  # process id
    facts: dict

    def orphaned(self) -> bool:
        """Returns whether the parent has ended. A fork of it may hold the stream open."""
        return os.getppid() != self.parent


def begin(spec_text: str) -> WorkerContext:
    """Makes this process a worker. `spec_text`: JSON of descriptors, limits, the parent's pid."""
    # The parent stops its workers. A Ctrl-C or a scheduler's SIGTERM is the launcher's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    spec = json.loads(spec_text)
    _die_with(spec["lifeline"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # core dumps must not fill the disk
    if spec["memory_bytes"]:  # limits memory that is written: libraries reserve far more addresses
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        most = spec["memory_bytes"] if hard < 0 else min(hard, spec["memory_bytes"])
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    sys.stdout.reconfigure(line_buffering=True)  # output survives the kill
    sock = socket.socket(fileno=spec["socket"])
    sock.set_inheritable(False)  # a process that it starts must not keep the stream open
    progress = WorkerProgress(spec["progress"])
    os.close(spec["progress"])
    return WorkerContext(sock, progress, spec["parent"], spec["facts"])


def _die_with(lifeline: int) -> None:
    """Ends this process when the parent ends, even inside a C call that holds the interpreter lock.

    The lifeline is a pipe on which nothing is ever written. When its other end closes, the kernel
    sends SIGIO, whose default action ends the process. (PR_SET_PDEATHSIG would fire when the
    parent's *thread* ends.)
    """
    os.set_inheritable(lifeline, False)
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if readable(lifeline, 0.0):
        sys.exit()  # it closed before we listened


def readable(descriptor: int, seconds: float) -> bool:
    """Returns whether a descriptor has something to read within so many seconds."""
    # select() refuses descriptors above 1023, and ours have the numbers that the parent gave them.
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * seconds))
