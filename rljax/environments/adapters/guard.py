"""Runs a program that does not outlive its episode: not through a child of its own, nor after the
death of the worker that started it."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence

_KEPT = 1 << 16  # characters of what it writes, the last ones
# Stands between: when the pipe from the worker closes, by whatever end, the program's whole group
# is killed.
_GUARD = """
import os, signal, subprocess, sys, threading
lifeline = int(sys.argv[1])
try:
    program = subprocess.Popen(sys.argv[2:], start_new_session=True)
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error}")
def kill():
    try:
        os.killpg(program.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
def watch():
    os.read(lifeline, 1)
    kill()
threading.Thread(target=watch, daemon=True).start()
status = program.wait()
kill()
os._exit(status & 255 if status >= 0 else 128 - status)
"""


class Guarded:
    """Runs a command, as an async context manager. `ended` becomes (exit status, the end of its
    stdout, that of its stderr)."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], line: str):
        self._command, self._environment, self._line = command, environment, line

    async def __aenter__(self) -> "Guarded":
        end, self._lifeline = os.pipe()
        try:
            guarded = sys.executable, "-S", "-E", "-c", _GUARD, str(end), *self._command
            pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
            options = dict(env=self._environment, pass_fds=(end,), start_new_session=True)
            self._process = await asyncio.create_subprocess_exec(*guarded, **pipes, **options)
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(end)
        self.ended = asyncio.ensure_future(self._watched())
        return self

    async def __aexit__(self, *_) -> None:
        os.close(self._lifeline)
        await asyncio.wait([self.ended])

    async def _watched(self) -> tuple[int, str, str]:
        process = self._process
        texts = asyncio.gather(_end_of(process.stdout), _end_of(process.stderr))
        with contextlib.suppress(ConnectionError):
            process.stdin.write(self._line.encode() + b"\n")
            await process.stdin.drain()
        process.stdin.close()
        output, errors = await texts
        return await process.wait(), output, errors


async def _end_of(stream: asyncio.StreamReader) -> str:
    tail = b""
    while data := await stream.read(_KEPT):
        tail = (tail + data)[-_KEPT:]
    return tail.decode("utf-8", "replace")
