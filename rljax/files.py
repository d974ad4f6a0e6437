"""Reads and writes files: bytes, text, JSON, YAML and arrays, with errors that name the file and
the place.

Every untrusted file is opened here and nowhere else: a regular file, of a bounded size, and no
git-lfs pointer. An exception of a parser of untrusted bytes becomes an InputError here, too. The
code that uses a field decides what it must hold.
"""

import contextlib
import errno
import fnmatch
import functools
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rljax.errors import InputError
from rljax.suggest import near_names

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
LARGEST_YAML = 1_000_000  # bytes: its parser is written in Python, and a megabyte takes it seconds
LARGEST_ARRAYS = 64_000_000_000  # bytes of the arrays of an .npz file, unpacked
DATA_FILES = (".parquet", ".jsonl", ".json", ".csv", ".tsv")  # endings of files of rows
# Endings of files that are given as data and cannot be read as rows.
OTHER_FILES = (".txt", ".arrow", ".gz", ".zst", ".zip", ".yaml", ".pq")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")  # owner/name
_LFS = b"version https://git-lfs.github.com/spec/"
_LFS_BYTES = 1024  # a pointer is shorter
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")  # as JSON writes it, or as it is


def leads_nowhere(error: Exception) -> bool:
    """Returns whether no file can exist under that name, so that another try finds none either."""
    known = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
    return isinstance(error, known) or (
        isinstance(error, OSError) and error.errno in (errno.ELOOP, errno.ENAMETOOLONG)
    )


class Unreadable(InputError):
    """An error for a file that could not be read now, which says nothing about its content."""


def open_file(path: str | Path, largest: int | None = None) -> int:
    """Returns a file descriptor for reading a regular file of at most `largest` bytes. Raises
    InputError for any other file, and Unreadable if it cannot be read now.

    A pipe, which would wait for ever, or a device, which never ends, is refused before a byte
    is read.
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
        rule = "it is a pipe, a device or a socket"
        raise InputError(f"{path} is not a file", rule=rule, fix="name a regular file")
    if largest is not None and status.st_size > largest:
        rule, fix = f"a file of this kind has at most {largest}", "check that it is the right file"
        raise InputError(f"{path} has {status.st_size} bytes", rule=rule, fix=fix)
    if len(_LFS) < status.st_size < _LFS_BYTES and os.pread(file, len(_LFS), 0) == _LFS:
        rule = "git wrote a note of where the content is stored"
        fix = "run 'git lfs pull' in its folder, or download it again"
        raise InputError(f"{path} is a git-lfs pointer, not the file itself", rule=rule, fix=fix)


def read_data(path: str | Path, largest: int = LARGEST_TEXT) -> bytes:
    """Returns the bytes of a file. Raises InputError as `open_file`, and for a file without content
    to read."""
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


def read_bytes(file: int, path: Path, begin: int, out) -> None:
    """Fills the contiguous array `out`, of any shape and dtype, with the bytes of `file` from
    `begin`. Raises InputError if it cannot be read or is too short."""
    view = memoryview(out.reshape(-1).view("u1"))
    while view:
        try:
            count = os.preadv(file, [view], begin)
        except OSError as error:
            fix = "look at the disk, then copy the file again"
            raise InputError(f"{path} cannot be read", rule=str(error), fix=fix) from None
        if not count:
            raise InputError(
                f"{path} ended while it was read", value=begin, fix="copy the file again"
            )
        view, begin = view[count:], begin + count


def file_sha256(path: str | Path) -> str:
    """Returns the SHA-256 of a file of any size, in hexadecimal."""
    with os.fdopen(open_file(path), "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_text(path: str | Path, largest: int = LARGEST_TEXT) -> str:
    """Returns the file as text, without a byte order mark. Raises InputError as `read_data`, and
    for a file that is not UTF-8."""
    data = read_data(path, largest)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, data.count(b"\n", 0, error.start) + 1, error) from None


def read_lines(path: str | Path, offset: int = 0) -> Iterator[tuple[int, str]]:
    """Yields (number from 1, text without its end) of every line from the byte `offset` on, without
    a byte order mark. Raises InputError as `raw_lines`, and for a line that is not UTF-8.

    Lines are not those of splitlines(): U+2028 and its kin may be inside a line.
    """
    for number, data in enumerate(raw_lines(path, offset), start=1):
        try:
            yield number, data.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\n")
        except UnicodeDecodeError as error:
            raise _not_utf8(path, number, error) from None


def raw_lines(path: str | Path, offset: int = 0) -> Iterator[bytes]:
    """Yields the bytes of every line, with its end, from the byte `offset` on. Raises InputError as
    `open_file`, and for a line of more than LONGEST_LINE bytes."""
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
                problem = f"{path}: line {number} has more than {LONGEST_LINE} bytes"
                raise InputError(problem, fix="write one row per line")
            yield data


def _not_utf8(path: str | Path, line: int, error: UnicodeDecodeError) -> InputError:
    problem = f"{path}: line {line} is not UTF-8 (byte {error.start} of what was read)"
    fix = "save the file as UTF-8"
    return InputError(problem, value=error.object[error.start : error.start + 8], fix=fix)


def parse_json(
    text: str | bytes,
    location: str,
    most_values: int | None = None,
    *,
    unique: bool = False,
    mends: bool = False,
) -> object:
    """Returns the value written in `text`, of at most MOST_LEVELS levels, whose texts UTF-8 can
    encode. Raises InputError for any other text, and for more than `most_values` values.

    `location` is the file, or the file and the line. `unique`: a name that stands twice in an
    object, of which one value would be lost, is refused. `mends`: half a surrogate pair becomes
    U+FFFD, for texts that are only shown; by default it is refused.
    """
    if not isinstance(text, str):
        text = _decoded(text, location)
    if most_values is not None:
        values = sum(map(text.count, ",[{"))
        if values > most_values:
            raise InputError(
                f"{location} holds {values} values",
                rule=f"at most {most_values}",
                fix="check that it is the right file; split it into several, or use .jsonl: one "
                "object per line",
            )
    try:
        value = json.loads(
            text, object_pairs_hook=(lambda p: once(p, location)) if unique else None
        )
    except InputError:
        raise
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
        rule = f"{error.msg} at line {error.lineno}, column {error.colno}"
        raise InputError(f"{location} is not valid JSON", value=near, rule=rule, fix=fix) from None
    except Exception as error:  # a number of 5000 digits; nesting without end; no memory
        fix = "write such values as strings"
        raise _unparsed(f"{location} is not usable JSON", error, fix) from None
    require_shallow(value, location)
    if _SURROGATE.search(text):
        if mends:
            return _mended(value)
        require_whole(value, location)
    return value


def _mended(value: object) -> object:
    """The value with half surrogate pairs as U+FFFD."""
    if isinstance(value, str):
        return re.sub("[\ud800-\udfff]", "\ufffd", value)
    if isinstance(value, dict):
        return {_mended(name): _mended(item) for name, item in value.items()}
    return [_mended(item) for item in value] if isinstance(value, list) else value


def parse_yaml(text: str | bytes, location: str, loader: type | None = None) -> object:
    """Returns the value written in YAML, of at most MOST_LEVELS levels and MOST_VALUES values,
    counting all that aliases repeat. The default loader is `yaml.SafeLoader`, which runs nothing.
    Raises InputError for any other text."""
    import yaml

    if not isinstance(text, str):
        text = _decoded(text, location)
    if len(text) > LARGEST_YAML:
        rule, fix = f"at most {LARGEST_YAML}", "write it as JSON, which is read faster"
        raise InputError(f"{location} has {len(text)} characters of YAML", rule=rule, fix=fix)
    try:
        # The parser follows each bracket by several calls, so the stack would end it later.
        value = yaml.load(text, loader or _loader_class())
    except InputError:
        raise
    except Exception as error:  # its constructors raise KeyError, AttributeError and more
        raise _unparsed(f"{location} is not YAML", error, "correct the syntax") from None
    _require_bounded(value, location)
    if _SURROGATE.search(text):
        require_whole(value, location)
    return value


@functools.cache
def _loader_class() -> type:
    """Returns yaml.SafeLoader, giving up where merge keys copy more than MOST_VALUES fields."""
    import yaml

    class Loader(yaml.SafeLoader):
        copied = 0

        def flatten_mapping(self, node):
            for key, value in node.value:
                if key.tag != "tag:yaml.org,2002:merge":
                    continue
                inside = value.value if isinstance(value, yaml.SequenceNode) else [value]
                inside = [one for one in inside if isinstance(one, yaml.MappingNode)]
                for one in {id(one): one for one in inside}.values():
                    self.flatten_mapping(one)
                self.copied += sum(len(one.value) for one in inside)
                if self.copied > MOST_VALUES:
                    raise ValueError(f"merge keys copy more than {MOST_VALUES} fields")
            super().flatten_mapping(node)

    return Loader


def parse_toml(text: str, location: str) -> dict:
    """Returns the tables written in TOML. Raises InputError for any other text."""
    import tomllib

    try:
        return tomllib.loads(text)
    except Exception as error:
        raise _unparsed(f"{location} is not TOML", error, "correct the syntax") from None


def parse_number(text: str, kind: type = int) -> int | float | None:
    """Returns the number of a kind, int or float, that is written in ASCII; None for any other
    text. int() itself reads the digits of every script, and raises for more than 4,300."""
    try:
        return kind(text) if text.isascii() else None
    except (ValueError, OverflowError):
        return None


def is_whole_number(text: str) -> bool:
    """Returns whether a text is a whole number that `int` reads, such as a step or a count."""
    return text.isascii() and text.isdecimal() and len(text) <= 18


def once(pairs: Sequence[tuple[str, object]], location: str) -> dict:
    """Returns the dict of a mapping as it is written. Raises InputError if a name stands twice."""
    out = dict(pairs)
    if len(out) < len(pairs):
        seen = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise InputError(f"{location}: field {twice!r} stands twice", fix="remove one")
    return out


def read_arrays(path: str | Path) -> dict:
    """Returns {name: array} of an .npz file; nothing in it is unpickled. Raises InputError for a
    file that is none, or unpacks to more than LARGEST_ARRAYS bytes."""
    import zipfile

    import numpy as np

    try:
        with os.fdopen(open_file(path), "rb") as file, np.load(file, allow_pickle=False) as arrays:
            size = sum(entry.file_size for entry in arrays.zip.infolist())
            if size > LARGEST_ARRAYS:
                raise InputError(f"{path} unpacks to {size} bytes", fix="remove the file")
            return {name: arrays[name] for name in arrays.files}
    except InputError:
        raise
    except Exception as error:
        # What numpy reads of a file that is no archive has no entries either.
        kind = "" if isinstance(error, zipfile.BadZipFile) else f"{type(error).__name__}: "
        rule = f"{kind}{first_line(error)}"
        raise InputError(f"{path} is no readable .npz file", rule=rule, fix="remove it") from None


def first_line(error: BaseException) -> str:
    """Returns the first line of the message of an error."""
    return next(iter(str(error).split("\n")), "")[:300]


@contextlib.contextmanager
def strangers_bytes(location: str, fix: str = "") -> Iterator[None]:
    """Turns any exception of a parser of untrusted bytes in the block into an InputError: such a
    parser has one for each way in which they may be wrong, MemoryError among them."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise _unparsed(f"{location} cannot be read", error, fix) from None


def _unparsed(what: str, error: Exception, fix: str) -> InputError:
    rule = f"{type(error).__name__}: {first_line(error)}"
    if isinstance(error, RecursionError):
        rule = "it is nested too deeply"
    elif (mark := getattr(error, "problem_mark", None)) is not None:  # of YAML
        rule = f"{error.problem} at line {mark.line + 1}, column {mark.column + 1}"
    return InputError(what, rule=rule, fix=fix)


def _decoded(data: bytes, location: str) -> str:
    try:
        return bytes(data).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(location, data.count(b"\n", 0, error.start) + 1, error) from None


def require_whole(value: object, location: str) -> None:
    """Raises InputError for a text in a value with half a surrogate pair: JSON can write it, and no
    file and no tokenizer can hold it."""
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            todo += [*one, *one.values()]
        elif isinstance(one, list):
            todo += one
        elif isinstance(one, str) and not one.isascii():
            try:
                one.encode()
            except UnicodeEncodeError as error:
                near = one[max(0, error.start - 20) : error.end + 20]
                problem = f"{location} has half a surrogate pair"
                fix = "write the whole character"
                raise InputError(problem, value=near, rule="no text can hold it", fix=fix) from None


def _require_bounded(value: object, location: str) -> None:
    """Raises InputError for a value that aliases make too deep, too large or endless."""
    known: dict[int, tuple[int, int]] = {}  # of a list or dict: its levels, its values

    def measure(item: object, above: int) -> tuple[int, int]:
        if not isinstance(item, (dict, list)):
            return 0, 1
        if id(item) in known:
            return known[id(item)]
        if above == MOST_LEVELS:  # where something holds itself, too
            fix = "write it flatter"
            raise InputError(f"{location} nests more than {MOST_LEVELS} lists or mappings", fix=fix)
        inside = [*item, *item.values()] if isinstance(item, dict) else item
        sizes = [measure(one, above + 1) for one in inside]
        levels = 1 + max((levels for levels, _ in sizes), default=0)
        known[id(item)] = levels, 1 + sum(values for _, values in sizes)
        return known[id(item)]

    levels, values = measure(value, 0)
    if levels > MOST_LEVELS or values > MOST_VALUES:
        what = f"{location} holds {levels} levels and {values} values where its aliases stand"
        rule = f"at most {MOST_LEVELS} and {MOST_VALUES}"
        raise InputError(what, rule=rule, fix="write fewer aliases")


def parse_row(line: str, path: str | Path, number: int) -> object:
    """Returns the value of line `number` of a .jsonl file. Raises InputError that says what the
    line is."""
    location = f"{path}: line {number}"
    try:
        return parse_json(line, location, unique=True)
    except InputError as error:
        if what := _why_no_row(line.strip(), number):
            what, fix = what
            problem = f"{location} {what}"
            rule = "a .jsonl file has one object per line"
            raise InputError(problem, value=line.strip()[:80], rule=rule, fix=fix) from None
        raise error from None


def _why_no_row(line: str, number: int) -> tuple[str, str] | None:
    """Says what a line that is no JSON is, and the fix; None where nothing is known."""
    again = "write each row with json.dumps(row), without indent"
    if line.startswith("\ufeff"):
        return "begins with a byte order mark", "take it out: two files were joined"
    if number == 1 and (ending := _table_of(line)):
        return "looks like the names of a table's columns (CSV)", f"name the file {ending}"
    try:
        _, end = json.JSONDecoder().raw_decode(line)
    except json.JSONDecodeError:
        if line[:1] in "{[" and line[-1] in "{[,:":
            fix = f"{again}; a file that is one list of rows is named .json"
            return "is the beginning of JSON that goes on over further lines", fix
        return None
    except (ValueError, RecursionError):
        return None
    if not line[end:].strip():
        return None
    if line[end:].strip() in (",", "]", ",]"):
        fix = f"{again}; a file that is one list of rows is named .json"
        return "is an element of a list", fix
    return "holds more than one value", again


def _table_of(line: str) -> str:
    """The ending of a table whose columns a line names, "" for another line."""
    for separator, ending in (("\t", ".tsv"), (",", ".csv"), (";", ".csv"), ("|", ".csv")):
        cells = [cell.strip().strip('"') for cell in line.split(separator)]
        if len(cells) > 1 and all(re.fullmatch(r"[A-Za-z_][\w .\-]{0,60}", c) for c in cells):
            return ending
    return ""


def require_shallow(value: object, location: str) -> None:
    """Raises InputError for a value of more than MOST_LEVELS levels, which would end code that
    recurses into it."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MOST_LEVELS):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for items in inner for item in items if isinstance(item, (dict, list))]
        if not level:
            return
    raise InputError(
        f"{location} nests more than {MOST_LEVELS} lists or objects", fix="write it flatter"
    )


def read_json(path: str | Path, *, mends: bool = False) -> object:
    """Returns the JSON value of a file; `mends` as in parse_json. Raises InputError as `read_text`
    and `parse_json`."""
    return parse_json(read_text(path, LARGEST_OBJECT), str(path), MOST_VALUES, mends=mends)


def read_json_object(path: str | Path) -> dict:
    """Returns the JSON object of a file. Raises InputError as `read_json`, and for other values."""
    return json_object(read_text(path, LARGEST_OBJECT), path)


def json_object(text: str, path: str | Path, most_values: int = MOST_VALUES) -> dict:
    """Returns the JSON object that is the text of a file. Raises InputError for any other text."""
    value = parse_json(text, str(path), most_values)
    if not isinstance(value, dict):
        rule, fix = "a JSON object is expected", "copy the file from the model's repository again"
        raise InputError(f"{path} holds a {type(value).__name__}", value=value, rule=rule, fix=fix)
    return value


SAVED_FILES = ("dataset_info.json", "dataset_dict.json", "state.json")  # of the library `datasets`


def how_to_get_data(name: str) -> str:
    """Returns what to do for a text that names no file of rows: how to write the rows of what the
    library `datasets` saved (.arrow files), or the name of a data set of the hub; "" for another
    text."""
    if write := _how_to_write_saved(os.path.expanduser(name)):
        return f"write the rows into a file that is read: {write}"
    if not _HUB_NAME.fullmatch(name) or Path(name).suffix in DATA_FILES:
        return ""
    return f"check the path; a data set of the Hugging Face Hub is hf://datasets/{name}"


def _how_to_write_saved(path: str) -> str:
    """Returns the call that writes a folder of `save_to_disk`, one of its files, or another .arrow
    file as parquet; "" for anything else."""
    own = path.endswith(".arrow") or os.path.basename(path) in SAVED_FILES
    folder = path if os.path.isdir(path) else os.path.dirname(path) if own else None
    if folder is None:
        return ""
    if os.path.exists(os.path.join(folder, "dataset_dict.json")):
        return f"datasets.load_from_disk({folder!r})['train'].to_parquet('train.parquet')"
    if os.path.exists(os.path.join(folder, "state.json")):
        return f"datasets.load_from_disk({folder!r}).to_parquet('train.parquet')"
    if path.endswith(".arrow"):
        return f"datasets.Dataset.from_file({path!r}).to_parquet('train.parquet')"
    return ""


def near_path(path: str) -> str:
    """Returns the existing path that `path` misspells in one of its parts; "" if there is none."""
    folder, name = os.path.split(path.rstrip("/"))
    if os.path.isdir(folder or "."):
        close = near_names(name, sorted(os.listdir(folder or ".")), 1)
        return os.path.join(folder, close[0]) if close else ""
    near = os.path.join(near_path(folder), name)
    return near if near != name and os.path.exists(near) else ""


def data_files(spec: str) -> list[str]:
    """Returns the files of rows that a text names: one, several with commas between them, or
    a pattern of a file's name such as "rows/part_*.jsonl", which are taken in the order of
    their names.

    Raises InputError for a pattern that fits no file; a file that is named may be missing.
    """
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
            rule = f"{folder or os.getcwd()} holds {', '.join(shown[:8]) or 'no file of rows'}"
            fix = "correct the pattern, whose stars stand for parts of a file's name alone"
            raise InputError(f"no file fits the pattern {part!r}", rule=rule, fix=fix)
        files += found
    return files


def require_replaceable(path: str | Path) -> None:
    """Raises InputError if a pipe, a device, a socket or a name in /dev would be replaced by the
    file that is written: it would be gone for all programs."""
    in_dev = os.path.realpath(os.path.dirname(os.path.abspath(path))) == "/dev"
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # nothing is there
        mode = stat.S_IFREG
    if in_dev or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        rule = "it is a pipe, a device or a socket, which a file would replace"
        raise InputError(f"{path} is not a file", rule=rule, fix="name a regular file")


def make_folder(path: str | Path) -> None:
    """Makes a folder, with those around it, where it is not there. Raises InputError if it cannot
    be made."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        fix = "name a folder of yours; no part of its path may be a file"
        raise InputError(f"the folder {path} cannot be made", rule=str(error), fix=fix) from None


def write_text(path: str | Path, text: str) -> None:
    """Writes a whole file or none: the old one stays until the new text is complete. Raises
    InputError if it cannot be written, and as `require_replaceable`."""
    path = Path(path)
    require_replaceable(path)
    if path.is_dir():
        raise InputError(f"{path} is a folder", rule="a file is written", fix="name a file")
    hidden = path.with_name(f".{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            hidden.write_text(text, encoding="utf-8")
            os.replace(hidden, path)
        finally:
            hidden.unlink(missing_ok=True)
    except OSError as error:
        fix = "write to a folder of yours, on a disk with room"
        raise InputError(f"{path} cannot be written", rule=str(error), fix=fix) from None


def yaml_text(values: dict, *, blocks: bool = False) -> str:
    """Returns a dict as YAML that reads to the same values; `blocks`: texts of several lines are
    written as blocks, which are easier to read."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def represented(dumper: Dumper, value: str):
        # In another style it would be written as it is, and read as the end of a line.
        style = '"' if "\x85" in value else "|" if blocks and "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, represented)
    return yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)


def write_json(path: str | Path, value: object) -> None:
    """Writes a value as a whole JSON file. Raises InputError as `write_text`."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_rows(path: str | Path, rows: Iterable[dict]) -> dict:
    """Writes a whole .jsonl file; returns {"file", "rows", "sha256"}. Half a surrogate pair, which
    no file can hold, becomes U+FFFD. Raises InputError as `write_text`."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    text = _mended("".join(lines))
    write_text(path, text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"file": str(path), "rows": len(lines), "sha256": digest}
