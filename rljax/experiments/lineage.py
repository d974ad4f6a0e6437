"""The inputs and outputs of a stage of a pipeline, by SHA-256."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from rljax.config.declare import Spec
from rljax.files import file_sha256

EXPORTED = ("policy", "reward_model", "adapter")  # folders that a run hands on


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


def _read_from(spec: Spec, text: str) -> Iterator[Path]:
    """The files and folders that a field's text names: a path, RUN@STEP, a file for each {split},
    the Python file of a function, and what stands in quotes inside of a call. A bare word may be a
    file or a folder if the field names data or a model; else it is a name."""
    names_path = spec.path or spec.component == "data"
    names = {text, text.rpartition("@")[0], *re.findall(r"[^\s()'\"=,]+\.py(?=:)", text)}
    names |= {*re.findall(r"'([^']+)'", text), *re.findall(r'"([^"]+)"', text)}
    for split in ("train", "test"):
        names |= {name.replace("{split}", split) for name in names}
    for name in sorted(names):
        is_path = "/" in name or "." in name or (name == text and names_path)
        # Dots alone are a pattern, not a folder.
        if is_path and name.strip("./") and len(name) < 1000 and Path(name).exists():
            yield Path(name)


def inputs_of(fields: Mapping[str, object], specs: Mapping[str, Spec]) -> dict[str, dict[str, str]]:
    """Returns {field: {path: SHA-256}} of all existing paths that the fields of a config, or the
    options of a command, name, but for what is written there. `specs` are their declarations."""
    digests = {}
    for field, value in fields.items():
        if specs[field].is_written or field == "compilation_cache":
            continue
        texts = value if isinstance(value, tuple | list) else (value,)
        texts = [text for text in texts if isinstance(text, str)]
        paths = [path for text in texts for path in _read_from(specs[field], text)]
        if paths:
            digests[field] = {str(path): digest(path) for path in paths}
    return digests
