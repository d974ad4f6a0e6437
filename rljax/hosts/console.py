"""Keeps what a host prints in a file, and says why it ended when the host itself no longer can.

`ConsoleCopy` starts this file as a process of its own: it copies the output, outlives the host for
a moment, and translates JAX's last lines ("tasks: 3") into the names of hosts. A thread could do
neither: JAX ends a process by abort, and after kill -9 it prints nothing.
"""

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time

LATE_S = 3.0  # after the end of the host: what its children still print
# What JAX's coordination service says of hosts that it has lost, and of the first one.
_SILENT = re.compile(r"stopped sending heartbeats\):\n((?:\d+\n)+)")
_NO_LEADER = re.compile(r"Failed to send RPC to coordination service|leader task was preempted")


class ConsoleCopy:
    """The output of this process, copied to a file until `close`."""

    def __init__(self, path: str, host: int, names: tuple[str, ...]):
        self._kept = [os.dup(1), os.dup(2)]
        (out, self._out), (err, self._err), (facts, self._facts) = (os.pipe() for _ in range(3))
        arguments = [path, host, json.dumps(names), os.getpid(), out, err, facts]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *map(str, arguments)],
            pass_fds=(out, err, facts),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        for fd in (out, err, facts):
            os.close(fd)
        self._redirect(self._out, self._err)
        os.close(self._out), os.close(self._err)

    def _redirect(self, out: int, err: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os.dup2(out, 1), os.dup2(err, 2)

    def know(self, phases: dict[int, str]) -> None:
        """Remembers the phase in which every host was last heard of, for the final message."""
        self._say({"places": phases})

    def _say(self, message: dict) -> None:
        with contextlib.suppress(OSError):
            os.write(self._facts, json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Ends the copy without a final message. The output goes where it went before."""
        self._say({"bye": True})
        self._redirect(*self._kept)
        with contextlib.suppress(subprocess.TimeoutExpired):  # children of ours may print on
            self._process.wait(LATE_S)


class _Copy:
    """Copies two streams to where they went before, and to the file."""

    def __init__(self, path: str, host: str, names: str, parent: str, *pipes: str):
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.host, self.names, self.parent = int(host), json.loads(names), int(parent)
        out, err, self.facts = map(int, pipes)
        self.targets = {out: 1, err: 2}
        self.phases: dict[str, str] = {}
        self.bye, self.partial, self.errors = False, b"", b""

    def run(self) -> None:
        ended_s = 0.0
        with selectors.DefaultSelector() as selector:
            for fd in (*self.targets, self.facts):
                selector.register(fd, selectors.EVENT_READ)
            while True:
                ready = [key.fd for key, _ in selector.select(0.2)]
                for fd in ready:
                    if not (self.copy(fd) if fd in self.targets else self.read_facts()):
                        selector.unregister(fd)
                if (self.bye or os.getppid() != self.parent) and not ended_s:
                    ended_s = time.monotonic()
                if ended_s and (not ready or time.monotonic() > ended_s + LATE_S):
                    break
        if not self.bye:
            self.write(2, self.last_words().encode())

    def copy(self, fd: int) -> bool:
        """Returns whether there is more to come."""
        data, target = os.read(fd, 1 << 16), self.targets[fd]
        if target == 2:
            self.errors = (self.errors + data)[-(1 << 16) :]
        self.write(target, data)
        return bool(data)

    def write(self, target: int, data: bytes) -> None:
        for fd in (self.file, target):
            with contextlib.suppress(OSError):  # a full disk, a closed terminal
                rest = data
                while rest:
                    rest = rest[os.write(fd, rest) :]

    def read_facts(self) -> bool:
        data = os.read(self.facts, 1 << 16)
        *lines, self.partial = (self.partial + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            self.bye = self.bye or "bye" in message
            self.phases = message.get("places", self.phases)
        return bool(data)

    def last_words(self) -> str:
        """Returns the reason why the host ended, judged by what it printed last."""
        name, printed = self.named(self.host), self.errors.decode(errors="replace")
        silent = [int(k) for numbers in _SILENT.findall(printed) for k in numbers.split()]
        lost = sorted(set(silent)) or ([0] if _NO_LEADER.search(printed) else [])
        if not lost or lost == [self.host]:
            return f"hosts: {name} was killed\n"
        reasons = "; ".join(f"{self.named(k)} was lost" for k in lost)
        return f"hosts: {reasons}; so {self.names[self.host]} has ended\n"

    def named(self, host: int) -> str:
        phase = self.phases.get(str(host))
        return self.names[host] + (f", last heard of in {phase}," if phase else "")


if __name__ == "__main__":
    # It ends after the host. A scheduler may send its signals to every process of a job.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _Copy(*sys.argv[1:]).run()
