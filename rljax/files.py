"""Reading and writing files: bytes, text and JSON, with errors that name the file and the place.

Every file that a stranger may have written is opened here and nowhere else: a regular file, of a
bounded size, and no git-lfs pointer. What a field must hold is decided where it is used.
"""

import errno
import fnmatch
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from rljax.errors import InputError

# Bytes of a file that is read whole. The largest tokenizer.json have 35 MB, other texts of a model
# folder one.
LARGEST_TEXT = 64_000_000
LARGEST_OBJECT = 32_000_000
LARGEST_DATA = 2_000_000_000  # of a .json file of rows
LONGEST_LINE = 64_000_000  # of a .jsonl or .csv file
# Of a JSON value: a hundred thousand brackets take the parser's stack, and 3 bytes of text 70 of
# memory.
MOST_LEVELS = 100
MOST_VALUES = 1_000_000
DATA_FILES = (".parquet", ".jsonl", ".json", ".csv", ".tsv")  # endings of files of rows
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")  # owner/name
_LFS = b"version https://git-lfs.github.com/spec/"
_LFS_BYTES = 1024  # a pointer is shorter


def leads_nowhere(error: Exception) -> bool:
    """Whether no file can be there under that name, so that another try finds none either."""
    known = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
    return isinstance(error, known) or (
        isinstance(error, OSError) and error.errno in (errno.ELOOP, errno.ENAMETOOLONG)
    )


class Unreadable(InputError):
    """A file could not be read now, which says nothing of what it holds."""


def open_file(path: str | Path, largest: int | None = None) -> int:
    """A file descriptor for reading a regular file of at most `largest` bytes.

    A pipe, which would wait for ever, or a device, which never ends, is refused before a byte is
    read.
    """
    try:
        # Of a pipe, opening alone would wait; of a file it makes no difference.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        raise _cannot_open(path, error) from None
    try:
        _require_plain(path, file, largest)
    except BaseException:
        os.close(file)
        raise
    return file


def _cannot_open(path: str | Path, error: Exception) -> InputError:
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.ENOENT:
        rule = "the link points at nothing" if os.path.islink(path) else ""
        return InputError(f"{path} does not exist", rule=rule, fix="check the path")
    if number == errno.ENXIO:  # a socket
        return InputError(f"{path} is not a file", fix="name a regular file")
    rule = error.strerror if isinstance(error, OSError) else str(error)
    kind = InputError if number is None or leads_nowhere(error) else Unreadable
    return kind(f"{path} cannot be read", rule=rule or "", fix="check path and permissions")


def _require_plain(path: str | Path, file: int, largest: int | None) -> None:
    status = os.fstat(file)
    if stat.S_ISDIR(status.st_mode):
        raise InputError(f"{path} is a folder", rule="a file is needed", fix="name a file")
    if not stat.S_ISREG(status.st_mode):
        raise InputError(
            f"{path} is not a file",
            rule="it is a pipe, a device or a socket",
            fix="name a regular file",
        )
    if largest is not None and status.st_size > largest:
        raise InputError(
            f"{path} has {status.st_size} bytes",
            rule=f"a file of this kind has at most {largest}",
            fix="check that it is the right file",
        )
    if len(_LFS) < status.st_size < _LFS_BYTES and os.pread(file, len(_LFS), 0) == _LFS:
        raise InputError(
            f"{path} is a git-lfs pointer, not the file itself",
            rule="git wrote a note of where the content is stored",
            fix="run 'git lfs pull' in its folder, or download it again",
        )


def read_data(path: str | Path, largest: int = LARGEST_TEXT) -> bytes:
    """The bytes of a file."""
    file = open_file(path, largest)
    try:
        with os.fdopen(file, "rb") as stream:
            data = stream.read(largest + 1)
    except OSError as error:
        raise _cannot_open(path, error) from None
    if data is None:  # of /proc, whose files say that they are empty: it would wait
        raise InputError(f"{path} has nothing to read", fix="name a regular file")
    if len(data) > largest:
        raise InputError(f"{path} has more than {largest} bytes", fix="check that it is a file")
    return data


def file_sha256(path: str | Path) -> str:
    """The SHA-256 of a file of any size, in hexadecimal."""
    with os.fdopen(open_file(path), "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_text(path: str | Path, largest: int = LARGEST_TEXT) -> str:
    """The file as text; a byte order mark is dropped."""
    data = read_data(path, largest)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, data.count(b"\n", 0, error.start) + 1, error) from None


def read_lines(path: str | Path, offset: int = 0) -> Iterator[tuple[int, str]]:
    """(number from 1, text without its end) of every line from the byte `offset` on; a byte order
    mark is dropped.

    Not as splitlines() parts them: U+2028 and its kin may stand inside a line.
    """
    with os.fdopen(open_file(path), "rb") as stream:
        stream.seek(offset)
        number = 0
        while True:
            try:
                data = stream.readline(LONGEST_LINE + 1)
            except OSError as error:
                raise _cannot_open(path, error) from None
            number += 1
            if not data:
                return
            if len(data) > LONGEST_LINE:
                raise InputError(
                    f"{path}: line {number} has more than {LONGEST_LINE} bytes",
                    fix="write one row per line",
                )
            try:
                yield number, data.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\n")
            except UnicodeDecodeError as error:
                raise _not_utf8(path, number, error) from None


def _not_utf8(path: str | Path, line: int, error: UnicodeDecodeError) -> InputError:
    return InputError(
        f"{path}: line {line} is not UTF-8 (byte {error.start} of what was read)",
        value=error.object[error.start : error.start + 8],
        fix="save the file as UTF-8",
    )


def parse_json(text: str, place: str, most_values: int | None = None) -> object:
    """The value written in `text`, of at most MOST_LEVELS levels; `place` is the file, or the file
    and the line."""
    if most_values is not None:
        values = sum(map(text.count, ",[{"))
        if values > most_values:
            raise InputError(
                f"{place} holds {values} values",
                rule=f"at most {most_values}",
                fix="split it into several files, or use .jsonl: one object per line",
            )
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip())
        near = text[max(0, error.pos - 40) : error.pos + 40]
        fix = "the text ends too early: copy or write it again" if cut else "correct the syntax"
        if error.msg == "Extra data" and text[error.pos] in "{[":
            fix = "several values are one list: write [{...}, {...}]"
            if "\n" not in text[: error.pos].strip():
                fix = "one object per line is a .jsonl file: rename it, or write [{...}, {...}]"
        elif text.lstrip().startswith(("{'", "[{'", "['")):
            fix = "this is Python's own repr: write it with json.dumps"
        raise InputError(
            f"{place} is not valid JSON",
            value=near,
            rule=f"{error.msg} at line {error.lineno}, column {error.colno}",
            fix=fix,
        ) from None
    except (ValueError, RecursionError) as error:  # a number of 5000 digits; nesting without end
        raise InputError(
            f"{place} is not usable JSON", rule=str(error), fix="write such values as strings"
        ) from None
    require_shallow(value, place)
    return value


def parse_row(line: str, path: str | Path, number: int) -> object:
    """The value of line `number` of a .jsonl file. Raises InputError that says what the line is."""
    place = f"{path}: line {number}"
    try:
        return parse_json(line, place)
    except InputError as error:
        if what := _why_no_row(line.strip()):
            what, fix = what
            raise InputError(
                f"{place} {what}", value=line.strip()[:80],
                rule="a .jsonl file has one object per line", fix=fix,
            ) from None  # fmt: skip
        raise error from None


def _why_no_row(line: str) -> tuple[str, str] | None:
    """Says what a line that is no JSON is, and the fix; None where nothing is known."""
    again = "write each row with json.dumps(row), without indent"
    if line.startswith("\ufeff"):
        return "begins with a byte order mark", "take it out: two files were joined"
    try:
        _, end = json.JSONDecoder().raw_decode(line)
    except json.JSONDecodeError:
        if line[:1] in "{[" and line[-1] in "{[,:":
            fix = f"{again}; a file that is one list of rows is named .json"
            return "is the beginning of JSON that goes on over further lines", fix
        return None
    except (ValueError, RecursionError):
        return None
    if line[end:].strip() in (",", "]", ",]"):
        fix = f"{again}; a file that is one list of rows is named .json"
        return "is an element of a list", fix
    return "holds more than one value", again


def require_shallow(value: object, place: str) -> None:
    """Raises InputError for a value of more than MOST_LEVELS levels, on which code that follows
    them down would end."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MOST_LEVELS):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for items in inner for item in items if isinstance(item, (dict, list))]
        if not level:
            return
    raise InputError(
        f"{place} nests more than {MOST_LEVELS} lists or objects", fix="write it flatter"
    )


def read_json_object(path: str | Path) -> dict:
    """The JSON object that the file holds."""
    return json_object(read_text(path, LARGEST_OBJECT), path)


def json_object(text: str, path: str | Path, most_values: int = MOST_VALUES) -> dict:
    """The JSON object that is the text of a file."""
    value = parse_json(text, str(path), most_values)
    if not isinstance(value, dict):
        raise InputError(
            f"{path} holds a {type(value).__name__}",
            value=value,
            rule="a JSON object is expected",
            fix="copy the file from the model's repository again",
        )
    return value


def how_to_get_data(name: str) -> str:
    """How a text that may be the name of a data set of the hub is written; "" for another text."""
    if not _HUB_NAME.fullmatch(name) or Path(name).suffix in DATA_FILES:
        return ""
    return f"check the path; a data set of the Hugging Face Hub is hf://datasets/{name}"


def data_files(spec: str) -> list[str]:
    """The files of rows that a text names: one, several with commas between them, or a pattern of
    a file's name such as "rows/part_*.jsonl", which are taken in the order of their names.

    Raises InputError for a pattern that fits no file; a file that is named may be missing."""
    parts = [part.strip() for part in spec.split(",")]
    if os.path.lexists(spec) or not all(part.endswith(DATA_FILES) for part in parts):
        parts = [spec]
    files = []
    for part in map(os.path.expanduser, parts):
        folder, pattern = os.path.split(part)
        if os.path.lexists(part) or not set(pattern) & set("*?["):
            files.append(part)
            continue
        names = sorted(os.listdir(folder or ".")) if os.path.isdir(folder or ".") else []
        shown = [name for name in names if name.endswith(DATA_FILES) and name[0] != "."]
        found = [os.path.join(folder, name) for name in fnmatch.filter(shown, pattern)]
        if not found:
            raise InputError(
                f"no file fits the pattern {part!r}",
                rule=f"{folder or os.getcwd()} holds {', '.join(shown[:8]) or 'no file of rows'}",
                fix="correct the pattern, whose stars stand for parts of a file's name alone",
            )
        files += found
    return files


def write_text(path: str | Path, text: str) -> None:
    """Writes a whole file or none: what was there before stays until the new text is complete."""
    path = Path(path)
    hidden = path.with_name(f".{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden.write_text(text, encoding="utf-8")
        os.replace(hidden, path)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written",
            rule=str(error),
            fix="write to a folder of yours, on a disk with room",
        ) from None


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
