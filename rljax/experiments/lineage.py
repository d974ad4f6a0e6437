"""The inputs and outputs of a stage of a pipeline, by SHA-256."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from rljax.config.schema import DATA, MODELS
from rljax.files import file_sha256

EXPORTED = ("policy", "reward_model", "adapter")  # folders that a run hands on
# Fields that name where something is written or kept.
_WRITTEN = ("run_dir", "out", "pairs", "trajectories", "answers", "compilation_cache")
# Fields in which a bare word may be a file or a folder; elsewhere it is a name.
_PATHS = {
    *MODELS,
    *DATA,
    "checkpoint",
    "checkpoints",
    "policy",
    "against",
    "completer",
    "reward_model",
    "search_model",
    "data",
}


def digest(path: str | Path) -> str:
    """Returns the SHA-256 of a file, or of the names and SHA-256s of the files in a folder,
    in order.

    In the folder of a run only its exports count, or else its checkpoints: its metrics hold times,
    and its report is written anew.
    """
    path = Path(path)
    if not path.is_dir():
        return file_sha256(path)
    parts = [path]
    if (path / "metrics.jsonl").exists():
        parts = [path / name for name in EXPORTED if (path / name).is_dir()]
        parts = parts or [path / "checkpoints"]
    total = hashlib.sha256()
    for file in sorted(file for part in parts for file in part.rglob("*")):
        name = file.relative_to(path).as_posix()
        if file.is_file() and not any(piece.startswith(".") for piece in name.split("/")):
            total.update(f"{name} {file_sha256(file)}\n".encode())
    return total.hexdigest()


def _read_from(field: str, text: str) -> Iterator[Path]:
    """The files and folders that a field's text names: a path, RUN@STEP, a file for each {split},
    the Python file of a function, and what stands in quotes inside of a call."""
    names = {text, text.rpartition("@")[0], *re.findall(r"[^\s()'\"=,]+\.py(?=:)", text)}
    names |= {*re.findall(r"'([^']+)'", text), *re.findall(r'"([^"]+)"', text)}
    for split in ("train", "test"):
        names |= {name.replace("{split}", split) for name in names}
    for name in sorted(names):
        is_path = "/" in name or "." in name or (name == text and field in _PATHS)
        # Dots alone are a pattern, not a folder.
        if is_path and name.strip("./") and len(name) < 1000 and Path(name).exists():
            yield Path(name)


def inputs_of(fields: Mapping[str, object]) -> dict[str, dict[str, str]]:
    """Returns {field: {path: SHA-256}} of all existing paths that the fields of a config, or the
    options of a command, name."""
    found = {}
    for field, value in fields.items():
        if field in _WRITTEN:
            continue
        texts = value if isinstance(value, tuple | list) else (value,)
        paths = [p for text in texts if isinstance(text, str) for p in _read_from(field, text)]
        if paths:
            found[field] = {str(path): digest(path) for path in paths}
    return found
