"""Reads rows from files, tasks, TFDS data sets and lists, and names each of them for errors.

Rows are checked only for being objects; what they must hold is in `sources` (prompts) and
rljax.data.offline.rows (offline training). A spec is

- the path of a .parquet, .jsonl, .json, .csv or .tsv file; `{split}` in it is replaced, and a
  folder means its file `<split>.parquet`, `.jsonl`, ...; several with commas between them, or a
  pattern such as "part_*.jsonl", are read one after the other;
- `"hf://datasets/OWNER/NAME"`, a data set of the Hugging Face Hub (rljax.hub.datasets);
- `"tfds:name/config"`, a data set of TensorFlow Datasets, or `"tfds:/folder"`, one prepared there;
- a component such as `"sort_digits(digits=3)"` of `rljax.tasks`;
- a list of rows itself.
"""

import contextlib
import csv
import dataclasses
import functools
import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rljax import hub
from rljax.components import resolve
from rljax.config import is_path
from rljax.config.answer_numbers import rows_of_table, written_cells
from rljax.config.overrides import TFDS, kind_of_text
from rljax.data.online.stream import Stream
from rljax.data.rows.columns import KNOWN, plain_row
from rljax.data.rows.formats import Form, form_of, table_row, understood
from rljax.data.rows.nulls import Nulls
from rljax.data.rows.stored import StoredRows
from rljax.data.rows.unread import Unread
from rljax.errors import InputError
from rljax.files import (
    DATA_FILES,
    LARGEST_DATA,
    data_files,
    how_to_get_data,
    once,
    open_file,
    parse_json,
    parse_row,
    read_lines,
    read_text,
)

_MOST_COLUMNS = 10_000
_MOST_FOLDERS = 100  # in a folder, of those that are looked through for files of a split
_LONGEST_CELL = 10_000_000  # characters of a table: an open quote takes all that follows


@dataclass(frozen=True)
class Rows:
    """Raw rows, with the names that errors give their source and each of them.

    `data_source` is the name of the data set for rows that do not give one.
    """

    source: str
    data_source: str
    rows: Sequence[dict] | Stream
    lines: Sequence[int] | None = None  # line numbers, where rows are lines of a file
    # Whether a key of a nested object that holds None was absent when the rows were written: tables
    # have one list of keys for all rows.
    fills_nulls: bool = False
    folder: Path | None = None  # of the file; paths of images are relative to it
    parts: tuple["Rows", ...] = ()  # of several files, in the order of the rows
    header: str = ""  # the first line of a table, where it names no column that is read
    form: str = ""  # a note of the project whose columns were read, where they are not ours

    @functools.cached_property
    def nulls(self) -> Nulls:
        """Returns the object that tells which nulls of tools and calls a table filled in. Of stored
        rows it reads the first block."""
        if isinstance(self.rows, StoredRows):
            return Nulls(self.rows.first_block)
        return Nulls(tuple if isinstance(self.rows, Stream) else lambda: self.rows)

    @functools.cached_property
    def unread(self) -> Unread:
        """Returns the collector of columns that are not read."""
        return Unread(self.source, at_once=isinstance(self.rows, Stream))

    def location(self, index: int) -> str:
        """Returns the file, row and line of row `index`, as errors name them."""
        if isinstance(self.rows, StoredRows):
            return self.rows.location(index)
        for part in self.parts:
            if index < len(part.rows):
                return part.location(index)
            index -= len(part.rows)
        location = f"{self.source}: row {index}"
        return location if self.lines is None else f"{location} (line {self.lines[index]})"

    @contextlib.contextmanager
    def named_columns(self) -> Iterator[None]:
        """Wraps code that reads columns: its errors say so if a table has no names of columns, or
        if the columns of the file are another project's."""
        try:
            yield
        except InputError as error:
            problem, fix = error.parts
            if self.header:
                raise InputError(
                    problem,
                    rule=f"the first line, {self.header[:80]!r}, was read as names of columns",
                    fix="name them, such as prompt,answer, above that line if it is a row",
                ) from None
            if not self.form:
                raise
            raise InputError(problem, rule=self.form, fix=fix) from None


def read_rows(
    spec: str | Sequence[Mapping],
    split: str,
    demonstrations: bool = False,
    endless: bool = False,
    notes: list[str] | None = None,
) -> Rows:
    """Returns the rows of a spec, each an object. `demonstrations` selects those of a task instead
    of its prompts. A stream is accepted only with `endless`. `notes` gets a line that says in which
    form they are read. Raises InputError for a spec that cannot be read or has no rows, and for a
    row that is no object."""
    if isinstance(spec, (list, tuple)):
        rows = Rows("the list of rows", "list", _plain_rows(spec))
    elif isinstance(spec, str) and spec.strip():
        rows = _read_named(spec.strip(), split, demonstrations, [] if notes is None else notes)
    else:
        raise InputError(
            "a data source is a text or a list of rows",
            value=spec,
            fix='write a path, "tfds:name" or "task(...)"',
        )
    if isinstance(rows.rows, Stream):
        if not endless:
            raise InputError(
                f"{spec} is an endless stream",
                rule="a fixed set of rows is needed here",
                fix="write how many into its brackets, prompts=5000 (reasoning_gym: size=5000)",
            )
        return rows  # they are looked at as they come
    if len(rows.rows) == 0:
        raise InputError(f"{rows.source} has no rows", fix="check the file and the split")
    for index, row in enumerate(rows.rows):
        if not isinstance(row, dict):
            fix = 'each row is one JSON object such as {"prompt": ..., "ground_truth": ...}'
            if isinstance(row, list) and rows.lines is not None:
                fix = "one object per line; a file that is one list of rows is named .json"
            raise InputError(f"{rows.location(index)} is not an object", value=row, fix=fix)
        if len(row) > _MOST_COLUMNS:
            raise InputError(
                f"{rows.location(index)} has {len(row)} columns",
                rule=f"at most {_MOST_COLUMNS}",
                fix="drop the columns that the run does not read",
            )
    form = form_of(rows.rows[0])
    if form is not None:
        converted = [form.read(row, rows.location(index)) for index, row in enumerate(rows.rows)]
        rename_note = _rename_note(form, rows.rows[0], converted[0])
        rows = dataclasses.replace(rows, rows=converted, form=rename_note)
    form_name = ": ".join(filter(None, (form and form.name, understood(rows.rows[0]))))
    if notes is not None and form_name and is_path(rows.source):
        notes.append(f"{rows.source}: {len(rows.rows):,} rows, read as {form_name}")
    return rows


def read_stored(spec: str, split: str, notes: list[str] | None = None) -> Rows:
    """Returns the rows of a file, or of all files of a split of a data set of the hub, read and
    checked as they are drawn (rljax.data.rows.stored). Raises InputError for a file that cannot be
    read so, or has no rows."""
    if hub.is_hub(spec):
        split_files = hub.split_files(spec, split)
        paths, data_source = split_files.files, split_files.repository
        names = [f"{split_files.repository}/{name}" for name in split_files.names]
    else:
        path = Path(spec.replace("{split}", split))
        path = _file_of_split(path, split) if os.path.isdir(path) else path
        names = data_files(str(path))
        paths, data_source = [Path(name) for name in names], Path(names[0]).stem
    stored = StoredRows(paths, names)
    fills_nulls = any(path.suffix == ".parquet" for path in paths)
    source = names[0] if len(names) == 1 else spec
    # (Paths of images are relative to the first file.)
    folder = Path(paths[0]).parent
    rows = Rows(source, data_source, stored, fills_nulls=fills_nulls, folder=folder)
    first = stored[0]
    form = form_of(first) if isinstance(first, dict) else None
    if form is not None:
        stored.convert = lambda row, index: form.read(row, rows.location(index))
        rows = dataclasses.replace(rows, form=_rename_note(form, first, stored[0]))
    if notes is not None:
        form_name = ": ".join(filter(None, (form and form.name, understood(stored[0]))))
        as_form = f", as {form_name}" if form_name else ""
        chosen = f" ({split_files.chosen})" if hub.is_hub(spec) else ""
        notes.append(
            f"{rows.source}: {stored.rows:,} rows, read as they are drawn{as_form}{chosen}"
        )
    return rows


def _rename_note(form: Form, row: dict, converted: dict) -> str:
    """Returns a note for errors about rows whose columns were renamed; "" if none was."""
    foreign_columns = sorted(str(name) for name in row if name not in converted)
    if not foreign_columns:
        return ""
    return f"{', '.join(map(repr, foreign_columns))} were read as columns of {form.name}"


def _read_named(spec: str, split: str, demonstrations: bool, notes: list[str]) -> Rows:
    kind = kind_of_text(spec)
    if kind == "component":
        return _run_task(spec, split, demonstrations)
    if kind == "tfds":
        return _read_tfds(spec, split)
    if kind == "hub":
        return _read_hub(spec, split, notes)
    path = Path(spec.replace("{split}", split))
    if os.path.isdir(path):
        path = _file_of_split(path, split)
    if path.suffix in _READERS:
        files = [Path(file) for file in data_files(str(path))]
        parts = [_READERS[file.suffix](file, split) for file in files]
        return parts[0] if len(parts) == 1 else _concatenated(parts, spec, parts[0].data_source)
    raise InputError(
        f"{path} is not a kind of data file that is read",
        rule=f"the name must end in one of {', '.join(DATA_FILES)}",
        fix=how_to_get_data(spec) or "convert it, for example with pyarrow, or correct it",
    )


def _file_of_split(folder: Path, split: str) -> Path:
    for suffix in DATA_FILES:
        if os.path.lexists(folder / f"{split}{suffix}"):
            return folder / f"{split}{suffix}"
    raise InputError(
        f"{folder} has no file for the split {split!r}",
        value=sorted(item.name for item in folder.iterdir())[:10],
        rule=f"a folder holds {split} with one of {', '.join(DATA_FILES)}",
        fix=" or ".join(_patterns_of(folder, split))
        or how_to_get_data(str(folder))
        or "name the file itself",
    )


def _patterns_of(folder: Path, split: str) -> list[str]:
    """Returns the specs of the files of a split that lie in a folder as in a data set of the hub
    (data/train-00000-of-00002.parquet), one for each subset."""
    paths = []
    for parent_folder, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        depth = len(Path(parent_folder).relative_to(folder).parts)
        folders[:] = folders[:_MOST_FOLDERS] if depth < 2 else []
        paths += [Path(parent_folder, name) for name in names if name[0] != "."]
    names_by_folder: dict[tuple[Path, str], list[str]] = {}
    relative = (path.relative_to(folder).as_posix() for path in paths)
    for name in hub.files_by_split(relative).get(split, ()):
        path = folder / name
        names_by_folder.setdefault((path.parent, path.suffix), []).append(path.name)
    texts = []
    for (parent, suffix), names in sorted(names_by_folder.items())[:3]:
        names.sort()
        beginning = re.sub(r"\d.*", "", os.path.commonprefix(names), flags=re.DOTALL)
        pattern = str(parent / (names[0] if len(names) == 1 else f"{beginning}*{suffix}"))
        all_names = ",".join(str(parent / name) for name in names)
        texts.append(pattern if len(data_files(pattern)) == len(names) else all_names)
    return texts


def _read_parquet(path: Path, split: str) -> Rows:
    import pyarrow.parquet  # 0.2 s that a run on procedural data need not pay

    handle = open_file(path)
    try:
        # A file handle, because for a path the library also guesses partitions from folder names.
        with os.fdopen(handle, "rb") as file:
            names = pyarrow.parquet.read_schema(file).names
            once([(name, None) for name in names], str(path))  # a table of such cannot be read
            rows = rows_of_table(pyarrow.parquet.read_table(file), str(path))
    except InputError:
        raise
    except Exception as error:  # truncated, foreign, bad UTF-8: the library has a class for each
        raise InputError(
            f"{path} is not a readable parquet file",
            rule=_first_line(error),
            fix="copy or write it again; a half-copied file lacks its footer",
        ) from None
    return Rows(str(path), path.stem, rows, fills_nulls=True, folder=path.parent)


def _read_jsonl(path: Path, split: str) -> Rows:
    rows, lines = [], []
    for number, line in read_lines(path):
        if line.strip():
            rows.append(parse_row(line, path, number))
            lines.append(number)
    return Rows(str(path), path.stem, rows, lines, folder=path.parent)


def _read_table(path: Path, split: str) -> Rows:
    """Reads rows of a .csv or .tsv file; its first line names the columns, and cells are texts.
    Columns may be separated otherwise than the file's name says, as some spreadsheets write them.
    """
    csv.field_size_limit(_LONGEST_CELL)
    header = next((line for _, line in read_lines(path)), "")
    usual = "\t" if path.suffix == ".tsv" else ","
    separator = next((mark for mark in (usual, ";", "\t", "|", ",") if mark in header), usual)
    lines = (line + "\n" for _, line in read_lines(path))
    table = csv.reader(lines, delimiter=separator, strict=True)
    rows, numbers, names = [], [], None
    try:
        for cells in table:
            if names is None:
                names = [cell.strip() for cell in cells]
                _check_names(names, path)
            elif cells:
                if len(cells) != len(names):
                    raise InputError(
                        f"{path}: the row that ends in line {table.line_num}",
                        rule=f"it has {len(cells)} cells, the first line {len(names)} columns",
                        fix="put quotes around texts with a separator or a line break",
                    )
                rows.append(
                    table_row(names, cells, f"{path}: row {len(rows)} (line {table.line_num})")
                )
                numbers.append(table.line_num)
    except csv.Error as error:
        raise InputError(
            f"{path}: line {table.line_num} is no line of a table",
            rule=str(error),
            fix="put quotes around texts, and double the quotes inside them",
        ) from None
    has_known_names = {name.lower() for name in names or ()} & set(KNOWN)
    unknown_header = "" if has_known_names else header
    return Rows(str(path), path.stem, rows, numbers, folder=path.parent, header=unknown_header)


def _check_names(names: list[str], path: Path) -> None:
    once([(name, None) for name in names if name], f"{path}: the first line")
    if not all(names):
        raise InputError(
            f"{path}: the first line names no columns",
            value=names[:10],
            rule="each column has a name of its own",
            fix="write a line such as prompt,answer above the rows",
        )


def _read_json(path: Path, split: str) -> Rows:
    value = parse_json(read_text(path, LARGEST_DATA), str(path), unique=True)
    if isinstance(value, dict):
        if split not in value:
            fix = "correct the split; one object per line is a .jsonl file"
            if value and all(isinstance(rows, (dict, list)) for rows in value.values()):
                fix += "; a table by its columns is written with to_json(orient='records')"
            fix = how_to_get_data(str(path)) or fix
            raise InputError(
                f"{path} has no split {split!r}",
                value=sorted(value)[:10],
                rule="a .json file is a list of rows, or an object {split: list of rows}",
                fix=fix,
            )
        value = value[split]
    if not isinstance(value, list):
        raise InputError(f"{path} is not a list of rows", value=value, fix="write [{...}, {...}]")
    return Rows(str(path), path.stem, value, folder=path.parent)


_READERS = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_table,
    ".tsv": _read_table,
}


def _read_hub(spec: str, split: str, notes: list[str]) -> Rows:
    """Reads the rows of all files of a split of a data set of the hub, named after its
    repository."""
    split_files = hub.split_files(spec, split)
    parts = [_READERS[file.suffix](file, split) for file in split_files.files]
    notes.append(f"{spec}: {split_files.chosen}")
    if len(parts) == 1:
        source = f"{split_files.repository}/{split_files.names[0]}"
        return dataclasses.replace(parts[0], source=source, data_source=split_files.repository)
    return _concatenated(parts, spec, split_files.repository)


def _concatenated(parts: list[Rows], source: str, data_source: str) -> Rows:
    """Returns the rows of several files as one. Paths of images are relative to the first file."""
    rows = [row for part in parts for row in part.rows]
    return Rows(
        source,
        data_source,
        rows,
        fills_nulls=any(part.fills_nulls for part in parts),
        folder=parts[0].folder,
        parts=tuple(parts),
        header=parts[0].header,
    )


def make_task(spec: str) -> tuple[str, object]:
    """Returns (the name of a task's function, its Task or rows). Raises InputError for an unknown
    task, and for options that are missing or refused."""
    task_function = resolve(spec, "rljax.tasks")
    try:
        inspect.signature(task_function.function).bind(**task_function.options)
    except TypeError as error:
        raise InputError(
            f"{spec}: options are missing", rule=str(error), fix="write them in the brackets"
        ) from None
    return task_function.name, task_function()


def _run_task(spec: str, split: str, demonstrations: bool) -> Rows:
    name, task = make_task(spec)
    if isinstance(task, (list, tuple)):  # a user's function may just return its rows
        return Rows(spec, name, _plain_rows(task))
    try:
        splits = {"train": task.train, "test": task.test}
        if demonstrations:
            splits = {"train": task.worked_examples}
            splits |= {"test": task.worked_test} if vars(task).get("worked_test") else {}
    except AttributeError as error:
        raise InputError(
            f"{spec} returned no task",
            value=task,
            rule=str(error),
            fix="return a list of records, or an object with train, test and worked_examples",
        ) from None
    if split not in splits:
        raise InputError(f"{spec} has no split {split!r}", fix=f"use one of {sorted(splits)}")
    return Rows(spec, name, _plain_rows(splits[split]))


def _plain_rows(rows: Sequence[dict] | Stream) -> Sequence[dict] | Stream:
    """Returns rows of a program, with values as a file would have them."""

    def plain_value(row: object) -> object:
        return plain_row(row) if isinstance(row, dict) else row

    if isinstance(rows, Stream):
        return Stream(lambda index: plain_value(rows[index]), rows=rows.rows)
    return [plain_value(row) for row in rows]


def _read_tfds(spec: str, split: str) -> Rows:
    """Reads a split of a TFDS data set by random access (ArrayRecord files), without TensorFlow."""
    name = spec.removeprefix(TFDS).strip()
    try:
        import tensorflow_datasets as tfds
    except ImportError:
        raise InputError(
            f"{spec}: the package tensorflow_datasets is not installed",
            fix="pip install 'tensorflow-datasets>=4.9'",
        ) from None
    try:
        if os.path.isdir(name):
            builder = tfds.builder_from_directory(name)
        else:
            # ArrayRecord, because TensorFlow's own format cannot be read by row number.
            builder = tfds.builder(name, file_format="array_record")
            builder.download_and_prepare()
    except Exception as error:  # unknown name, no network, foreign folder: a class for each
        raise InputError(
            f"{spec} cannot be opened as a TFDS data set",
            rule=_first_line(error),
            fix="write tfds:name or tfds:name/config, or tfds:/folder of a prepared data set",
        ) from None
    if split not in builder.info.splits:
        raise InputError(
            f"{spec} has no split {split!r}",
            value=sorted(builder.info.splits),
            fix="name one of these in brackets: "
            f"{spec}[{min(builder.info.splits, default='train')}]",
        )
    try:
        source = builder.as_data_source(split=split)
        rows = [
            _plain_feature(written_cells(source[i]), builder.info.features)
            for i in range(len(source))
        ]
    except Exception as error:
        raise InputError(
            f"{spec}, split {split!r} cannot be read by row number",
            rule=_first_line(error),
            fix="prepare the data set with file_format='array_record'",
        ) from None
    return Rows(spec, builder.info.name, rows)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _plain_feature(value: object, feature: object) -> object:
    """Returns a TFDS value in JSON's types: texts decoded, and a sequence of objects as a list of
    them (TFDS stores it as an object of lists)."""
    from tensorflow_datasets import features as kinds

    if isinstance(feature, kinds.FeaturesDict):
        return {name: _plain_feature(value[name], feature[name]) for name in feature}
    if isinstance(feature, kinds.Sequence) and isinstance(feature.feature, kinds.FeaturesDict):
        columns = {name: _plain_list(value[name], kind) for name, kind in feature.feature.items()}
        return [
            dict(zip(columns, item, strict=True)) for item in zip(*columns.values(), strict=True)
        ]
    if isinstance(feature, kinds.Sequence):
        return _plain_list(value, feature.feature)
    if isinstance(feature, kinds.Text) and isinstance(value, bytes):
        return value.decode("utf-8")
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def _plain_list(values, feature) -> list:
    return [_plain_feature(value, feature) for value in values]
