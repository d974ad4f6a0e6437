"""Findings of the checks of `rljax doctor`, and what the checks look at."""

import dataclasses
import glob
import importlib.util
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the result. `broken`: a run would fail, hang or be wrong; `warning`: it would be
    slower, or could be; `fine`: a fact."""

    name: str
    status: str
    what: str
    fix: str = ""


def broken(name: str, what: str, fix: str) -> Finding:
    """Returns a finding that ends a run or makes it wrong."""
    return Finding(name, "broken", what, fix)


def warning(name: str, what: str, fix: str) -> Finding:
    """Returns a finding that slows a run down, or may."""
    return Finding(name, "warning", what, fix)


def fine(name: str, what: str) -> Finding:
    """Returns a finding without a fault."""
    return Finding(name, "fine", what)


def has_tpu() -> bool:
    """Returns whether the system shows TPU chips."""
    return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))


def has_nvidia() -> bool:
    """Returns whether the system shows NVIDIA GPUs."""
    return bool(glob.glob("/dev/nvidia[0-9]*"))


def is_installed(module: str) -> bool:
    """Returns whether a module can be found; it is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def platforms(env: Mapping[str, str]) -> list[str]:
    """Returns the platforms that JAX_PLATFORMS names, or its older spelling JAX_PLATFORM_NAME."""
    listed = env.get("JAX_PLATFORMS") or env.get("JAX_PLATFORM_NAME") or ""
    return [part for part in listed.split(",") if part]


def why_not_written(folder: Path) -> str:
    """Returns why no file can be written into a folder, or into the folder above that would hold
    it; "" if it can. Nothing is left behind."""
    there = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), folder)
    if not there.is_dir():
        return f"{there} is no folder"
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        return f"{there}: {error.strerror or error}"
    return ""
