"""Texts and folders that stand for a GGUF file: what a command that only looks at names needs."""

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path

from rljax.errors import InputError

SUFFIX = ".gguf"
ANOTHER_FILE = "take another file of the model, or its Hugging Face folder"


def cache_folder() -> Path:
    """Returns the folder of all folders of GGUF files."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "rljax", "gguf")


def names_the_file(read: Callable) -> Callable:
    """Wraps a function that reads the folder of a model: an InputError about a folder of the cache
    names the GGUF file it was made of, as the user has no config.json to correct."""

    @functools.wraps(read)
    def call(*args, **kwargs):
        try:
            return read(*args, **kwargs)
        except InputError as error:
            problem, _ = error.parts
            pattern = rf"({re.escape(str(cache_folder()))}/[^\n]*?-[0-9a-f]{{16}})(/\w+\.json)?"
            match = re.search(pattern, problem)
            file = match and weights_file(match[1])
            if not match or file is None:
                raise
            text = problem.replace(match[0], os.path.realpath(file)).replace(match[1], str(file))
            raise InputError(text, fix=ANOTHER_FILE) from None

    return call


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
