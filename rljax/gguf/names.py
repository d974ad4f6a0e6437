"""Texts and folders that stand for a GGUF file: what a command that only looks at names needs."""

import os
from pathlib import Path

from rljax.errors import InputError

SUFFIX = ".gguf"


def is_gguf(path: str | os.PathLike) -> bool:
    """Returns whether a text names a GGUF file."""
    return str(path).lower().endswith(SUFFIX)


def weights_file(folder: str | Path) -> Path | None:
    """Returns the GGUF file that holds a folder's weights: the only one of a folder without
    safetensors; None where there is none. Raises InputError where there are several."""
    folder = Path(folder)
    if not folder.is_dir():
        return None
    names = sorted(os.listdir(folder))
    files = [name for name in names if is_gguf(name)]
    if not files or any(name.endswith(".safetensors") for name in names):
        return None
    if len(files) > 1:
        listing = ", ".join(files[:6]) + (f" and {len(files) - 6} more" if len(files) > 6 else "")
        raise InputError(
            f"{folder} holds {len(files)} .gguf files",
            value=listing,
            rule="a folder is one model",
            fix=f"name the file: {folder / files[0]}",
        )
    return folder / files[0]
