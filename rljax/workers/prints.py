"""Output of workers: into one file of bounded size, in place of the terminal."""

import os
from pathlib import Path

MAX_BYTES = 10 << 20
_CUT = b"\n[the rest of what was printed was dropped]\n"


class Prints:
    """The file at `path`, made with the first byte that is printed. Its size is bounded, whoever
    else writes to it; if it cannot be written, what was printed is dropped."""

    def __init__(self, path: Path):
        self.path, self._full = path, False

    def write(self, data: bytes) -> None:
        """Appends bytes, up to the bound of the file."""
        if self._full:
            return
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
            try:
                room = MAX_BYTES - os.fstat(file).st_size
                os.write(file, data[: max(room, 0)])
                if len(data) > room:
                    self._full = True
                    if room >= 0:  # else somebody has said so already
                        os.write(file, _CUT)
            finally:
                os.close(file)
        except OSError:
            self._full = True

    def read_from(self, descriptor: int) -> bool:
        """Moves the content of a non-blocking pipe into the file; returns False once its other end
        is closed."""
        for _ in range(64):  # endless output must not keep the parent from its clocks
            try:
                data = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.write(data)
        return True
