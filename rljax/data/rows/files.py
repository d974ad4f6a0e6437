"""Reading and writing files: text and JSON, with errors that name the file and the place.

What a field must hold is not decided here but where it is used (`sources`, `tokenizer`).
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from rljax.errors import InputError


def read_text(path: str | Path) -> str:
    """The file as text; a byte order mark is dropped."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path} does not exist", fix="check the path") from None
    except IsADirectoryError:
        raise InputError(
            f"{path} is a folder", rule="a file is needed", fix="name a file"
        ) from None
    except OSError as error:
        rule = error.strerror or str(error)
        raise InputError(f"{path} cannot be read", rule=rule, fix="check its permissions") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path}: line {line} is not UTF-8 (byte {error.start} of the file)",
            value=data[error.start : error.start + 8],
            fix="save the file as UTF-8",
        ) from None


def parse_json(text: str, place: str) -> object:
    """The value written in `text`; `place` is the file, or the file and the line."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip())
        near = text[max(0, error.pos - 40) : error.pos + 40]
        raise InputError(
            f"{place} is not valid JSON",
            value=near,
            rule=f"{error.msg} at line {error.lineno}, column {error.colno}",
            fix="the text ends too early: copy or write it again" if cut else "correct the syntax",
        ) from None
    except (ValueError, RecursionError) as error:  # a number of 5000 digits; nesting without end
        raise InputError(
            f"{place} is not usable JSON", rule=str(error), fix="write such values as strings"
        ) from None


def read_json_object(path: str | Path) -> dict:
    """The JSON object that the file holds."""
    value = parse_json(read_text(path), str(path))
    if not isinstance(value, dict):
        raise InputError(
            f"{path} holds a {type(value).__name__}",
            value=value,
            rule="a JSON object is expected",
            fix="copy the file from the model's repository again",
        )
    return value


def write_text(path: str | Path, text: str) -> None:
    """Writes a whole file or none: what was there before stays until the new text is complete."""
    path = Path(path)
    hidden = path.with_name(f".{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden.write_text(text, encoding="utf-8")
        os.replace(hidden, path)
    except OSError as error:
        raise InputError(f"{path} cannot be written", rule=str(error)) from None


def write_json(path: str | Path, value: object) -> None:
    """Writes a value as a whole JSON file."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_rows(path: str | Path, rows: Iterable[dict]) -> dict:
    """Writes a whole .jsonl file -> {"file", "rows", "sha256"}."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    text = "".join(lines)
    write_text(path, text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"file": str(path), "rows": len(lines), "sha256": digest}
