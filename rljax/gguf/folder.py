"""The Hugging Face folder of a GGUF file: written once into a cache, with a link to the file, whose
weights are read in place."""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from rljax.errors import InputError
from rljax.files import json_object, open_file, read_text
from rljax.gguf.header import Header, read_header
from rljax.gguf.model_config import hf_config, hf_tensors, kind_of
from rljax.gguf.names import cache_folder
from rljax.gguf.rows import StoredTensor, check_types
from rljax.gguf.tokenizer import generation_config, tokenizer_files

_FORM = 1  # version of the written folder: raise it when the same file becomes another folder
_SOURCE = "gguf.json"
_LARGEST_NOTE = 100_000  # bytes of it


def cached_folder(path: str | Path) -> Path:
    """Returns the Hugging Face folder of a GGUF file, from the cache if it is there, else written.

    It has config.json, generation_config.json, tokenizer.json, tokenizer_config.json and a link to
    the file. Its name is that of the file's path, size and time of change: a file that has changed
    has another folder. Raises InputError for a file that is not read, which it names.
    """
    path = Path(os.path.abspath(path))
    source = _identity(path)
    digest = hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()
    folder = cache_folder() / f"{path.stem[:80]}-{digest[:16]}"
    if (folder / _SOURCE).is_file():
        return folder
    texts = _texts(read_header(path))
    try:
        _write(folder, path, {**texts, _SOURCE: source})
    except OSError as error:
        fix = "set XDG_CACHE_HOME to a folder of yours, on a disk with room"
        raise InputError(f"{folder} cannot be written", rule=str(error), fix=fix) from None
    return folder


def _identity(path: Path) -> dict:
    file = open_file(path)
    try:
        status = os.fstat(file)
    finally:
        os.close(file)
    return {
        "file": str(path),
        "place": os.path.realpath(path),
        "bytes": status.st_size,
        "changed_ns": status.st_mtime_ns,
        "form": _FORM,
    }


def _texts(header: Header) -> dict[str, dict]:
    check_types(header)
    config, kind = hf_config(header), kind_of(header)
    generation = generation_config(header)
    ids = {key: value for key, value in generation.items() if key.endswith("_token_id")}
    files = tokenizer_files(header, kind.model_type)
    files["tokenizer_config.json"]["model_max_length"] = config["max_position_embeddings"]
    return {"config.json": {**config, **ids}, "generation_config.json": generation, **files}


def _write(folder: Path, path: Path, texts: dict[str, dict]) -> None:
    """Writes the whole folder or none, even if another process writes the same one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    hidden = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name[:60]}."))
    try:
        for name, value in texts.items():
            text = json.dumps(value, ensure_ascii=name != "tokenizer.json")
            (hidden / name).write_text(text + "\n", encoding="utf-8")
        (hidden / path.name).symlink_to(path)
        try:
            os.rename(hidden, folder)
        except OSError:
            if not (folder / _SOURCE).is_file():  # else another process was faster
                raise
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def tensors_of(path: Path) -> dict[str, StoredTensor]:
    """Returns {Hugging Face name: StoredTensor} of a GGUF file. Raises InputError where it has
    changed since the folder beside it was written."""
    note = path.parent / _SOURCE
    if note.exists():
        recorded, current = json_object(read_text(note, _LARGEST_NOTE), note), _identity(path)
        if [recorded.get(k) for k in ("bytes", "changed_ns")] != [
            current["bytes"],
            current["changed_ns"],
        ]:
            raise InputError(
                f"{os.path.realpath(path)} has changed",
                rule="its config was read before",
                fix="start again: the file is read anew",
            )
    header = read_header(path, texts=False)
    check_types(header)
    return hf_tensors(header)
