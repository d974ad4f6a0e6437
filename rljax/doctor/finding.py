"""A finding of `rljax doctor`, and what its checks share."""

import dataclasses
import os
from pathlib import Path

from rljax.runs.folder import try_to_write


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the result. `broken`: a run would fail, hang or be wrong; `warning`: it would be
    slower, or could be; `fine`: a fact."""

    name: str
    status: str
    what: str
    fix: str = ""


def broken(name: str, problem: str, fix: str) -> Finding:
    """Returns a finding that ends a run or makes it wrong."""
    return Finding(name, "broken", problem, fix)


def warning(name: str, problem: str, fix: str) -> Finding:
    """Returns a finding that slows a run down, or may."""
    return Finding(name, "warning", problem, fix)


def fine(name: str, text: str) -> Finding:
    """Returns a finding without a fault."""
    return Finding(name, "fine", text)


def why_not_written(folder: Path) -> str:
    """Returns why no file can be written into a folder, or into the folder above that would hold
    it; "" if it can. Nothing is left behind."""
    existing = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), folder)
    try:
        try_to_write(existing)
    except OSError as error:
        return f"{existing}: {error.strerror or error}"
    return ""
