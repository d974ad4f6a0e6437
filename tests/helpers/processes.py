"""Processes as a test sees them: who runs, whose children they are, and waiting for a change."""

import time
from pathlib import Path


def alive(pid: int) -> bool:
    """Running; a zombie that only its (other) parent can reap does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def children(parent: int) -> set[int]:
    """Process ids whose parent is `parent`, zombies included."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == parent:
            found.add(int(stat.parent.name))
    return found


def wait_until(condition, what: str, seconds: float = 120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for: {what}"
        time.sleep(0.02)
