"""Starts, keeps and ends zygotes, and runs one program against its deadline while its
output is read.

This is the trusted side: pipes, channel, clock. The inside of the sandbox is `zygote`.
"""

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass

from rljax.errors import InputError
from rljax.rewards.sandbox.values import MAX_FRAME_BYTES, WireError, frame, take_frame

_START_TIMEOUT_S = 30.0
_KILL_TIMEOUT_S = 2.0
MAX_SCRATCH_BYTES = 64 << 20  # all files of a program together
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # rljax/rewards
# `rljax.rewards` itself would import every reward.
_BOOT = """
import sys, types
spec, here, package = sys.argv[1:]
for name, folder in (("rljax", package), ("rljax.rewards", here)):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from rljax.rewards.sandbox.zygote import main
main(spec)
"""
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # the same program gives the same output
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUTF8": "1",
    "LC_ALL": "C.UTF-8",
    "HOME": "/tmp",
    **{f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")},
}


class SandboxError(RuntimeError):
    """The error of a sandbox that failed itself, not the program: there is no verdict."""


@dataclass(frozen=True)
class ProcessLimits:
    """Limits of one program. `timeout_s` is wall time, `cpu_s` processor time of all its threads,
    `memory_bytes` its address space (the interpreter takes about 30 MB of it). Raises InputError
    for a limit that is not a positive number."""

    timeout_s: float = 5.0
    cpu_s: float = 10.0
    memory_bytes: int = 1 << 30
    max_output_bytes: int = 4 << 20  # stdout and stderr, each
    max_file_bytes: int = 16 << 20
    max_threads: int = 32

    def __post_init__(self):
        for name, value in asdict(self).items():
            is_whole = name not in ("timeout_s", "cpu_s")
            if isinstance(value, bool) or not isinstance(value, int if is_whole else int | float):
                rule = "it is a number"
                fix = f"{name}={2 if is_whole else 2.0}, or another {'whole ' * is_whole}number"
                raise InputError(f"sandbox limit {name}", value=value, rule=rule, fix=fix)
            if not 0 < value < 1 << 62:
                raise InputError(
                    f"sandbox limit {name}", value=value, fix=f"set {name} to a number above 0"
                )


@dataclass(frozen=True)
class Result:
    """The end of a program. status: ok (exit code 0), error, timeout, memory, output (over its
    limit) or killed (a signal, or another limit). `message` gives the reason."""

    status: str
    exit_code: int  # minus the signal's number
    stdout: bytes
    stderr: bytes
    seconds: float
    message: str
    tier: str
    max_rss_bytes: int = 0


# -- zygotes


class _Zygote:
    """The forking process of a sandbox, from outside."""

    def __init__(self, tier: str):
        self.tier, self.owner = tier, os.getpid()
        self.control, zygote_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            command, spec = _command(tier, zygote_socket.fileno())
            self.process = subprocess.Popen(
                [*command, json.dumps(spec), _HERE, os.path.dirname(_HERE)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(zygote_socket.fileno(),),
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,  # killed as a group, and not by the pool's own kill
            )
        except (OSError, SandboxError) as error:
            self.control.close()
            raise SandboxError(f"{tier}: {error}") from None
        finally:
            zygote_socket.close()
        self.control.settimeout(_START_TIMEOUT_S)
        reply = {}
        with contextlib.suppress(OSError, ValueError):
            reply = json.loads(self.control.recv(1 << 16) or b"{}")
        self._scratch = reply.get("scratch")
        if not reply.get("ready"):
            self.kill()
            text = reply.get("failed") or self.process.stderr.read(500).decode(errors="replace")
            self.process.stderr.close()
            raise SandboxError(f"{tier}: {text.strip() or 'it said nothing'}")
        self.process.stderr.close()
        self.control.settimeout(_KILL_TIMEOUT_S)

    def kill(self) -> None:
        """Sends SIGKILL to the zygote and to its program."""
        if self.owner == os.getpid() and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            if self._scratch:  # it had no time to
                shutil.rmtree(self._scratch, ignore_errors=True)
        self.control.close()

    def close(self) -> None:
        """Lets the zygote end by itself, so that it removes its folder."""
        self.control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_KILL_TIMEOUT_S)
        self.kill()  # at once, if it ended


_idle: list[_Zygote] = []  # zygotes of this process, kept for its next program


def _take(tier: str, warm: bool) -> _Zygote:
    while warm:
        try:
            zygote = _idle.pop()
        except IndexError:  # other threads may have been faster
            break
        if zygote.owner != os.getpid():
            zygote.control.close()  # a fork's copy: the zygote is the parent's
        elif zygote.tier == tier and zygote.process.poll() is None:
            return zygote
        else:
            zygote.close()
    return _Zygote(tier)


def _readable_paths() -> list[str]:
    """Returns the paths of the interpreter's libraries, none of them inside another."""
    paths = sysconfig.get_paths()
    candidates = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    candidates += [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        candidates.append(sysconfig.get_config_var("LIBDIR"))
    candidates += ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache"]
    candidates += ["/usr/share/zoneinfo"]
    readable: list[str] = []
    for path in sorted({os.path.abspath(path) for path in candidates if os.path.exists(path)}):
        if not any(path.startswith(f"{parent}/") for parent in readable):
            readable.append(path)
    return readable


def library_path() -> list[str]:
    """The folders that programs import from: the standard library and the installed packages."""
    standard = sysconfig.get_paths()["stdlib"]
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return [standard, os.path.join(standard, "lib-dynload"), *packages]


def _command(tier: str, control: int) -> tuple[list[str], dict]:
    python = os.path.realpath(sys.executable)  # not the link in a virtual environment
    readable = _readable_paths()
    devices = [f"/dev/{name}" for name in ("null", "zero", "random", "urandom")]
    paths = dict(readable=readable, devices=devices, path=library_path())
    scratch = dict(max_scratch_bytes=MAX_SCRATCH_BYTES, temporary=tempfile.gettempdir())
    spec = dict(tier=tier, control=control, **paths, **scratch)
    command = [python, "-s", "-S", "-B", "-P", "-c", _BOOT]
    if tier == "bubblewrap":
        wrap = shutil.which("bwrap")
        if wrap is None:
            raise SandboxError("there is no bwrap on PATH")
        binds = [["--dev-bind", path, path] for path in devices]
        binds += [["--ro-bind", path, path] for path in [*readable, python, _HERE]]
        binds += [["--proc", "/proc"]]  # the zygote counts a program's threads there
        size = ["--size", str(MAX_SCRATCH_BYTES), "--tmpfs", "/tmp"]
        flags = "--unshare-all --unshare-user --new-session --uid 65534 --gid 65534".split()
        words = (word for bind in binds for word in bind)
        command = [wrap, *flags, *size, *words, *"--remount-ro / --chdir /tmp --".split(), *command]
    return command, spec


# -- one program


class Process:
    """A running program: its pipes, its channel, its clock. A context manager.

    Its time begins when it is confined and ready to run. `wait` runs it to its end; `receive` and
    `send` are for the modes that answer over the channel. Raises SandboxError where no program was
    started, or the zygote died.
    """

    def __init__(
        self,
        header: dict,
        limits: ProcessLimits,
        tier: str,
        *,
        stdin: str | bytes = "",
        warm: bool = True,
    ):
        self.limits, self.tier, self._warm = limits, tier, warm
        stdin = stdin.encode(errors="replace") if isinstance(stdin, str) else stdin
        self._input = memoryview(stdin)
        self._frames, self._outgoing = bytearray(), bytearray(frame(header))
        self.texts = {"stdout": bytearray(), "stderr": bytearray()}
        self._end: dict | None = None  # how the program ended, from the zygote
        self._why, self._note = "", ""  # ended by us: timeout, output, error
        self._selector = selectors.PollSelector()
        self._zygote = _take(tier, warm)
        try:
            self._start()
            reply = self.receive(time.monotonic() + _START_TIMEOUT_S)
            if reply != {"confined": True}:
                reason = (reply or {}).get("broken") or self._note or "the program did not start"
                raise SandboxError(f"{tier}: {reason}")
        except BaseException:
            self._warm = False  # whatever is wrong with this zygote, the next program gets another
            self.close()
            raise
        self.deadline = time.monotonic() + limits.timeout_s

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def _start(self) -> None:
        channel, program_end = socket.socketpair()
        descriptors = [program_end.detach()]
        events = selectors.EVENT_READ | selectors.EVENT_WRITE
        self._channel = channel.detach()
        kept_ends = [(self._channel, events, "channel")]
        for name in ("stdin", "stdout", "stderr"):
            read_end, write_end = os.pipe()
            own_fd, program_fd = (write_end, read_end) if name == "stdin" else (read_end, write_end)
            descriptors.insert(len(descriptors) - 1, program_fd)
            event = selectors.EVENT_WRITE if name == "stdin" else selectors.EVENT_READ
            kept_ends.append((own_fd, event, name))
        for descriptor, event, name in kept_ends:
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, event, name)
        self._selector.register(self._zygote.control, selectors.EVENT_READ, "control")
        try:
            message = json.dumps(asdict(self.limits)).encode()
            socket.send_fds(self._zygote.control, [message], descriptors)
        except OSError as error:
            raise SandboxError(f"{self.tier}: the sandbox is gone: {error}") from None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def receive(self, deadline: float, most_bytes: int = MAX_FRAME_BYTES) -> dict | None:
        """The next message of the program; None if it ended, or was ended because time.monotonic()
        passed `deadline` or the message has more than `most_bytes` bytes. Raises SandboxError if
        the sandbox ended."""
        while True:
            try:
                message = take_frame(self._frames, most_bytes)
            except WireError as error:
                self.kill("error", f"it wrote to the channel: {error}")
                return None
            if message is not None or self._end is not None:
                return message
            if time.monotonic() >= deadline:
                self.kill("timeout")
                return None
            self._pump(deadline)

    def send(self, message: dict) -> None:
        """Sends the program a message, without waiting. Raises WireError if it cannot be sent."""
        self._outgoing += frame(message)
        if "channel" in self._open():
            events = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(self._channel, events, "channel")

    def wait(self) -> Result:
        """Waits for the end of the program, or ends it at its deadline. Raises SandboxError if the
        sandbox ended first."""
        while self._end is None:
            if time.monotonic() >= self.deadline:
                self.kill("timeout")
            else:
                self._pump(self.deadline)
                self._frames.clear()
        return self.result()

    @property
    def ended(self) -> bool:
        """Returns whether the program's end is known."""
        return self._end is not None

    def kill(self, status: str, note: str = "") -> None:
        """Ends the program for the reason `status` and `note`; the first reason stays."""
        if self._end is not None:
            return
        self._why, self._note = self._why or status, self._note or note
        with contextlib.suppress(OSError):
            self._zygote.control.send(b"kill")
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while self._end is None and time.monotonic() < deadline:
            self._pump(deadline)
        if self._end is None:  # a stuck zygote
            self._zygote.kill()
            self._end = {"exit": -signal.SIGKILL}

    def close(self) -> None:
        """Ends the program if it still runs, and keeps its zygote for the next one."""
        self._frames.clear()
        if "control" in self._open() and self._zygote.process.returncode is None:
            self.kill("killed")
        for key in list(self._selector.get_map().values()):
            if key.data != "control":
                self._drop(key)
        self._selector.close()
        if self._warm and self._end is not None and self._zygote.control.fileno() >= 0:
            _idle.append(self._zygote)
        else:
            self._zygote.close()

    def _open(self) -> set[str]:
        return {key.data for key in self._selector.get_map().values()}

    def _drop(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fd)
        os.close(key.fd)

    def _pump(self, deadline: float) -> None:
        """Moves the data that can be moved; waits for some until `deadline`."""
        for key, events in self._selector.select(max(0.0, deadline - time.monotonic())):
            if key.data == "control":
                self._read_end()
            elif key.data == "stdin":
                self._write(key, self._input)
            elif key.data == "channel":
                if events & selectors.EVENT_WRITE:
                    self._write(key, self._outgoing)
                if events & selectors.EVENT_READ and key.fd in self._selector.get_map():
                    self._read(key, self._frames, 2 * MAX_FRAME_BYTES)
            else:
                self._read(key, self.texts[key.data], self.limits.max_output_bytes)

    def _read_end(self) -> None:
        try:
            data = self._zygote.control.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(self._zygote.control)
            self._zygote.kill()
            raise SandboxError(f"{self.tier}: the sandbox ended under a program")
        self._end = json.loads(data)
        self._selector.unregister(self._zygote.control)
        for key in list(self._selector.get_map().values()):  # reads the last output
            if key.data in self.texts:
                while key.fd in self._selector.get_map():
                    if not self._read(key, self.texts[key.data], self.limits.max_output_bytes):
                        break

    def _write(self, key: selectors.SelectorKey, data) -> None:
        try:
            count = os.write(key.fd, data[: 1 << 16])
        except BlockingIOError:
            return
        except OSError:  # it closed its end
            self._drop(key)
            return
        if key.data == "stdin":
            self._input = data[count:]
            if not self._input:
                self._drop(key)
        else:
            del data[:count]
            if not data:
                self._selector.modify(key.fd, selectors.EVENT_READ, key.data)

    def _read(self, key: selectors.SelectorKey, buffer: bytearray, limit: int) -> bool:
        """Returns whether data came; beyond the limit the program is ended."""
        try:
            data = os.read(key.fd, 1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._drop(key)
            return False
        buffer += data[: limit - len(buffer)]
        if len(buffer) >= limit and not self._why:
            self._why, self._note = "output", f"more than {limit} bytes of {key.data}"
            with contextlib.suppress(OSError):
                self._zygote.control.send(b"kill")
        return True

    def result(self) -> Result:
        """The Result, once the program has ended."""
        end, limits = self._end, self.limits
        exit_code = end["exit"]
        stderr = bytes(self.texts["stderr"])
        last = stderr.decode(errors="replace").strip().rpartition("\n")[2][:500]
        # The kernel ends it by counted ticks, which on a loaded machine run ahead of what it used.
        used_up = exit_code < 0 and end.get("cpu_s", 0) > limits.cpu_s / 2
        if self._why == "timeout" or (used_up and not self._why):
            limit = f"{limits.timeout_s} s" if self._why else f"{limits.cpu_s} s of processor time"
            status, message = "timeout", f"over the limit of {limit}"
        elif self._why:
            status, message = self._why, self._note
        elif exit_code == 0:
            status, message = "ok", ""
        elif end["reason"] in ("files", "threads"):
            status, message = "killed", f"more {end['reason']} than allowed"
        elif exit_code < 0:
            name = signal.strsignal(-exit_code) or "a signal"
            status, message = "killed", f"signal {-exit_code}, {name}"
        else:
            memory = last.startswith(("MemoryError", "numpy.core._exceptions._ArrayMemoryError"))
            status, message = "memory" if memory else "error", last or f"exit code {exit_code}"
        seconds, stdout = end.get("seconds", 0.0), bytes(self.texts["stdout"])
        memory = end.get("max_rss_bytes", 0)
        return Result(status, exit_code, stdout, stderr, seconds, message, self.tier, memory)
