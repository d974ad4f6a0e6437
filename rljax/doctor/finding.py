"""A finding of `rljax doctor`, and what its checks share."""

import dataclasses
import functools
import os
from pathlib import Path

from rljax.runs.folder import try_to_write


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the result: its name, its status, what was found, and the line that mends it."""

    name: str
    status: str = dataclasses.field(kw_only=True)
    what: str
    fix: str = ""


# Findings (name, what, fix) by their status.
broken = functools.partial(Finding, status="broken")  # a run would fail, hang or be wrong
warning = functools.partial(Finding, status="warning")  # a run would be slower, or could be
fine = functools.partial(Finding, status="fine")  # a fact, without a fix


def why_not_written(folder: Path) -> str:
    """Returns why no file can be written into a folder, or into the folder above that would hold
    it; "" if it can. Nothing is left behind."""
    existing = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), folder)
    try:
        try_to_write(existing)
    except OSError as error:
        return f"{existing}: {error.strerror or error}"
    return ""
