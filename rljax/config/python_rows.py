"""Turns rows that a Python program holds into the lines of a .jsonl file.

Rows are a `datasets.Dataset` or `IterableDataset`, a DataFrame of pandas or polars, a Table of
pyarrow, a dict of columns, a list of dicts, or any iterator of dicts. None of these libraries is
imported: each is recognised by the method that turns it into dicts. A missing cell of a table
(None, NaN, NA, NaT) is absent from its row; a value that JSON has no type for is refused with
its location.
"""

import datetime
import enum
import inspect
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sized

from rljax.config.answer_numbers import written_cells, written_rows
from rljax.config.schema import DataConfig
from rljax.errors import InputError

# Limits of an iterator that does not say how many rows it has.
MOST_ROWS, MOST_BYTES = 1_000_000, 4 * 2**30
SPLITS = ("train", "test")  # of a dict of splits, that are fields of the section data
_OTHER_SPLITS = ("validation", "valid", "val", "dev", "eval", "unsupervised")  # are not read
_MISSING = ("NAType", "NaTType")  # types of pandas that stand for no value
MOST_LEVELS = 50  # of lists and dicts in a cell
DATES = (datetime.date, datetime.time, datetime.timedelta)
KINDS = (
    "a datasets.Dataset, a DataFrame, a pyarrow Table, a dict of columns, a list of dicts, or an "
    "iterator of dicts"
)


def is_section(value: object) -> bool:
    """Returns whether a value of the argument `data` names fields of the section: data={"train":
    ...}."""
    fields = DataConfig.__dataclass_fields__
    return isinstance(value, Mapping) and bool(value) and all(name in fields for name in value)


def is_columns(value: object) -> bool:
    """Returns whether a value is a dict of columns, which are lists or arrays of cells,
    not tables."""
    if not isinstance(value, Mapping) or not all(map(_is_column, value.values())):
        return False
    return any(not _is_rows(column) for column in value.values())


def _is_column(value: object) -> bool:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sized):
        return False
    return hasattr(value, "__getitem__") and not _names_of_columns(value)


def _is_rows(column: object) -> bool:
    """Returns whether all of a column's cells, of which there are some, are dicts: rows of a
    split."""
    return bool(len(column)) and all(isinstance(cell, Mapping) for cell in column)


def splits_of(value: Mapping) -> dict[str, object] | None:
    """Returns the fields `train` and `test` of a DatasetDict, or of any dict of tables by split;
    None for another dict. Raises InputError if no split is called train."""
    if not value or any(isinstance(table, str | Mapping) for table in value.values()):
        return None
    if is_columns(value) or not all(hasattr(table, "__iter__") for table in value.values()):
        return None
    if "train" in value and {*value} <= {*SPLITS, *_OTHER_SPLITS}:
        return {name: value[name] for name in SPLITS if name in value}
    named = next((name for name in value if "train" in str(name)), next(iter(value)))
    raise InputError(
        "rljax.train: data",
        value=list(value),
        rule="one split is called train, and test may be another",
        fix=f"data=splits[{named!r}]",
    )


def rows_of(value: object, subject: str) -> Iterator[dict]:
    """Yields the rows of a value as dicts of values that JSON has. Raises InputError that names row
    and column of any other value, and if there are no rows, or no end of them."""
    count = 0
    for count, (row, of_table) in enumerate(_dicts(value, subject), 1):
        yield _json_row(row, subject, count, of_table)
    if not count:
        raise InputError(
            f"{subject} holds no rows", rule=KINDS, fix=f"{_argument(subject)}=rows, one or more"
        )


def _argument(subject: str) -> str:
    return {"data.train": "data"}.get(
        subject.removeprefix("rljax.train: "), subject.rpartition(".")[2]
    )


def _dicts(value: object, subject: str) -> Iterator[tuple[Mapping, bool]]:
    """Yields (row, True where missing cells of a table are absent) of everything that holds
    rows."""
    if isinstance(value, Mapping):
        yield from ((row, True) for row in _of_columns(value, subject))
        return
    if hasattr(value, "collect") and not hasattr(value, "__iter__"):  # a lazy frame
        rule, fix = f"it holds no rows yet; {KINDS}", f"{_argument(subject)}=frame.collect()"
        raise InputError(subject, value=type(value).__name__, rule=rule, fix=fix)
    table = _table_rows(value, subject)
    if table is not None:
        yield from ((row, True) for row in table)
        return
    # A datasets.Dataset is a table, too: the cells that a row lacks come as None.
    of_table = hasattr(value, "features") and hasattr(value, "map")
    types = _types_of_fields(getattr(value.features, "arrow_schema", ())) if of_table else {}
    endless = not isinstance(value, Sized)
    if not hasattr(value, "__iter__") and (endless or not hasattr(value, "__getitem__")):
        rule, fix = f"no rows come from it; {KINDS}", f"{_argument(subject)}=list(rows)"
        raise InputError(subject, value=type(value).__name__, rule=rule, fix=fix)
    for number, item in enumerate(_items_of_user(value, subject), 1):
        if endless and number > MOST_ROWS:
            raise _endless_error(subject, f"more than {MOST_ROWS:,} rows")
        if isinstance(item, Mapping):
            yield written_rows([dict(item)], types)[0], of_table
            continue
        inside = None if isinstance(item, str) else _table_rows(item, subject)
        if inside is None:  # neither a row nor a batch of rows
            raise _row_error(subject, number, item)
        yield from ((row, True) for row in inside)


def _items_of_user(value: Iterable, subject: str) -> Iterator:
    """Yields the items of an iterator of the user. Raises InputError that names the row if the
    iterator raises."""
    count = 0
    try:
        for item in value:
            count += 1
            yield item
    except Exception as error:
        raise InputError(
            f"{subject}: row {count + 1} was not given",
            rule=f"{type(error).__name__}: {error}",
            fix="list(rows) alone raises the same: mend what gives the rows",
        ) from error


def _endless_error(subject: str, how_many: str) -> InputError:
    name = _argument(subject)
    return InputError(
        f"{subject} gives {how_many} and does not say how many there are",
        rule="all rows are written to a file before the first step",
        fix=f"{name}=itertools.islice(rows, 10_000), {name}=dataset.take(10_000), or a .jsonl file "
        "with data={'train': FILE, 'stream': True}",
    )


def _row_error(subject: str, number: int, item: object) -> InputError:
    shown = item if isinstance(item, str | int | float) or item is None else type(item).__name__
    fix = "a list of dicts: [{'prompt': ..., 'ground_truth': ...}, ...]"
    if isinstance(item, str) and item.endswith((".jsonl", ".parquet", ".csv", ".json", ".arrow")):
        fix = f"data={{'train': {item!r}, 'sources': [...]}} mixes several files"
    return InputError(
        f"{subject}: row {number} is no dict",
        value=shown,
        rule=f"must be a text, or {KINDS}",
        fix=fix,
    )


def _of_columns(columns: Mapping, subject: str) -> Iterator[dict]:
    lengths = {str(name): len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        rule = "the columns of a table are equally long"
        raise InputError(
            f"{subject}: columns", value=lengths, rule=rule, fix="drop what has no row"
        )
    types = {n: getattr(c, "dtype", getattr(c, "type", None)) for n, c in columns.items()}
    for cells in zip(*(_cells(column) for column in columns.values()), strict=True):
        yield written_rows([dict(zip(columns, cells, strict=True))], types)[0]


def _cells(column: object) -> Iterable:
    for name in ("to_pylist", "to_list", "tolist"):
        if hasattr(column, name):
            return getattr(column, name)()
    return column


def _table_rows(value: object, subject: str) -> Iterable[Mapping] | None:
    """Returns the rows of a DataFrame or a Table by its own method, None for anything else."""
    names = _names_of_columns(value)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{subject}: two columns are called {twice!r}", fix="rename one of them")
    if hasattr(value, "to_dicts"):  # polars
        return written_rows(value.to_dicts(), {name: value[name].dtype for name in names})
    if hasattr(value, "to_pylist"):  # pyarrow: a Table, a RecordBatch, an Array of structs
        rows = value.to_pylist()
        wrong_row = next((i for i, row in enumerate(rows, 1) if not isinstance(row, Mapping)), 0)
        if wrong_row:
            raise _row_error(subject, wrong_row, rows[wrong_row - 1])
        fields = value.schema if hasattr(value, "schema") else getattr(value.type, "fields", ())
        return written_rows(rows, _types_of_fields(fields))
    if names and "orient" in _parameters(getattr(value, "to_dict", None)):  # pandas
        rows = value.to_dict(orient="records")
        return written_rows(rows, {name: value[name].dtype for name in names})
    if hasattr(value, "to_table"):  # a dataset of pyarrow
        return _table_rows(value.to_table(), subject)
    return None


def _types_of_fields(fields: Iterable) -> dict[str, object]:
    """Returns the types of pyarrow's fields by their names."""
    return {field.name: field.type for field in fields}


def _names_of_columns(value: object) -> list:
    """Returns the names of the columns of a table, [] of anything else."""
    for name in ("column_names", "columns"):  # of datasets and pyarrow, of pandas and polars
        names = getattr(value, name, None)
        if names is not None:
            return list(names)
    return []


def _parameters(function: object) -> Iterable[str]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ()


def _json_row(row: Mapping, subject: str, number: int, of_table: bool) -> dict:
    plain_cells = {}
    for name, value in written_cells(row).items():
        if not isinstance(name, str):
            raise InputError(
                f"{subject}: row {number}: the name of a column",
                value=name,
                rule="must be a text",
                fix="rename it: frame.columns = ['prompt', 'ground_truth', ...]",
            )
        if of_table and _is_missing(value):
            continue
        name = str.__str__(name)
        plain_cells[name] = _json_value(value, f"{subject}: row {number}, column {name!r}")
    return plain_cells


def _is_missing(value: object) -> bool:
    if value is None or type(value).__name__ in _MISSING:
        return True
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # of float32, which is no float of Python
    return isinstance(value, float) and math.isnan(value)


def _json_value(value: object, location: str, depth: int = 0) -> object:
    """Returns a value as JSON has it: numbers and arrays of NumPy, JAX or torch as numbers and
    lists."""
    if depth > MOST_LEVELS:
        raise InputError(
            location, rule=f"is nested deeper than {MOST_LEVELS}", fix="a flatter value"
        )
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                location, rule=f"{error}", fix="valid text, without halves of characters"
            ) from None
        return str.__str__(value)  # of a member of an enumeration the text that it is
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            fix = "leave the cell out (a table's missing cells are absent), or give a number"
            raise InputError(location, value=value, rule="JSON has no NaN and no infinity", fix=fix)
        return float(value)
    if isinstance(value, Mapping):
        wrong_name = next((name for name in value if not isinstance(name, str)), None)
        if wrong_name is not None:
            raise InputError(
                location,
                value=wrong_name,
                rule="names in a dict are texts",
                fix=f"{str(wrong_name)!r}",
            )
        return {
            str.__str__(name): _json_value(item, location, depth + 1)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_json_value(item, location, depth + 1) for item in value]
    of_numpy = getattr(getattr(value, "dtype", None), "kind", "")  # torch's have no kind
    date = isinstance(value, DATES) or of_numpy in ("m", "M")  # nanoseconds would be numbers
    if hasattr(value, "dtype") and hasattr(value, "tolist") and not date:  # an array, or a number
        return _json_value(value.tolist(), location, depth + 1)
    if hasattr(value, "as_py"):  # a value of pyarrow
        return _json_value(value.as_py(), location, depth + 1)
    kind = type(value).__name__
    if date:
        fix = "make it a text before: value.isoformat(), or str(value)"
    elif isinstance(value, enum.Enum):
        fix = "value.value, or a class of texts: class Label(str, Enum)"
    elif isinstance(value, bytes) or "image" in type(value).__module__.lower():
        fix = "dataset.to_parquet('rows.parquet') first, then data='rows.parquet'"
    else:
        fix = "text, numbers, lists and dicts; str(value) or float(value) make one of it"
    raise InputError(
        location, value=value, rule=f"JSON has no {kind}: rows become a .jsonl file", fix=fix
    )


def lines_of(value: object, subject: str) -> Iterator[str]:
    """Yields the lines of the .jsonl file of a value's rows. Raises InputError as `rows_of`, and if
    an iterator gives more than MOST_BYTES."""
    size = 0
    for row in rows_of(value, subject):
        line = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        size += len(line)
        if size > MOST_BYTES and not isinstance(value, Sized):
            raise _endless_error(subject, f"more than {MOST_BYTES / 2**30:.0f} GiB of rows")
        yield line
