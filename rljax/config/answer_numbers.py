"""Answers that are stored as numbers of fewer bits than Python's: the numbers that were written.

The float32 of 0.1 is 0.10000000149011612 in Python, and rewards compare the text of an answer. Its
number becomes 0.1, as NumPy, pandas and writers of CSV print it; other columns keep theirs. No
library of tables is imported: a type is known by its name and by the types inside it.
"""

import math
from collections.abc import Iterable, Mapping

import ml_dtypes
import numpy as np

from rljax.answer_columns import ANSWERS
from rljax.files import once

# The name of a type of NumPy, JAX, torch, pandas, polars or pyarrow -> its width.
_WIDTHS = {
    "float32": np.float32,
    "float": np.float32,  # pyarrow's
    "float16": np.float16,
    "halffloat": np.float16,  # pyarrow's
    "bfloat16": ml_dtypes.bfloat16,
}
# Of lists, dictionaries, extensions and arrays of pyarrow; of sparse columns of pandas.
_INNER = ("pyarrow_dtype", "value_type", "item_type", "storage_type", "inner", "subtype")
_PROMPTS = {"prompt", "question", "messages", "text"}
_MOST_LEVELS = 50  # of lists and objects in a cell


def written(value: float, width: type) -> float:
    """Returns the number of the fewest digits that a width stores as this one.

    One that was hardly rounded when it was stored stays: a whole number of few bits (2**27), and a
    whole number or a fraction of few bits to which no number comes near that has only the digits
    which the width always holds (13!, 0.000244140625; but 99999997952 was 1e11).
    """
    if not math.isfinite(value):
        return value
    precision = ml_dtypes.finfo(width)
    with np.errstate(over="ignore"):  # 7e4, on the way to 65504 of 16 bits
        for digits in range(1, 18):
            nearest = float(f"{value:.{digits - 1}e}")
            if float(width(nearest)) == value:
                break
    numerator = abs(value.as_integer_ratio()[0])
    bits = (numerator // max(numerator & -numerator, 1)).bit_length()
    few_bits, is_whole = bits <= (precision.nmant + 1) * 2 // 3, value.is_integer()
    imprecise = digits > precision.precision
    return value if few_bits and is_whole or imprecise and (few_bits or is_whole) else nearest


def rows_of_table(table, location: str) -> list[dict]:
    """Returns the rows of a Table or RecordBatch of pyarrow, the numbers of answers as they were
    written. Raises InputError, which names the `location`, if a column stands twice."""
    once([(name, None) for name in table.schema.names], location)
    import pyarrow

    # Python has no nanoseconds, and the library would make them values of pandas.
    exact = [i for i, field in enumerate(table.schema) if getattr(field.type, "unit", "") == "ns"]
    if exact and isinstance(table, pyarrow.RecordBatch):
        table = pyarrow.Table.from_batches([table])
    for i in exact:
        name = table.schema.names[i]
        table = table.set_column(i, name, table.column(i).cast(pyarrow.string()))
    return written_rows(table.to_pylist(), {field.name: field.type for field in table.schema})


def written_rows(rows: list[dict], types: Mapping[str, object]) -> list[dict]:
    """Returns rows of a table with the numbers of their answers as they were written; `types` are
    those of its columns by name."""
    forms = {name: _form(types[name]) for name in _answer_columns(types)}
    model = forms.pop("reward_model", None)
    if isinstance(model, dict):
        forms["reward_model"] = {n: form for n, form in model.items() if n == "ground_truth"}
    forms = {name: form for name, form in forms.items() if form}
    return _written(rows, forms) if forms else rows


def written_cells(row: Mapping) -> Mapping:
    """Returns a row that a program holds with the numbers and arrays of its answer as Python's, as
    they were written, where these have fewer bits."""
    changed = {}
    for name in _answer_columns(row):
        value = row[name]
        if name != "reward_model":
            changed[name] = _cell(value)
        elif isinstance(value, Mapping) and "ground_truth" in value:
            changed[name] = {**value, "ground_truth": _cell(value["ground_truth"])}
    return {**row, **changed} if changed else row


def _answer_columns(names: Iterable[str]) -> list[str]:
    """Returns the columns that hold an answer, of those with these names."""
    names = set(names)
    is_openrlhf = names & {"input", "context_messages"} and not names & {"output", *_PROMPTS}
    return [name for name in (*ANSWERS, *(["label"] if is_openrlhf else [])) if name in names]


def _form(kind: object) -> type | dict | None:
    """Returns the width of the numbers of a type, or {field: form} of an object; None if these have
    as many bits as Python's. The form of a list is that of its items."""
    width = _WIDTHS.get(str(kind).lower().removeprefix("torch.").removesuffix("[pyarrow]"))
    if width is not None:
        return width
    for name in _INNER:
        if hasattr(kind, name):
            return _form(getattr(kind, name))
    if hasattr(kind, "categories"):  # of pandas
        return _form(_type_of(kind.categories))
    fields = getattr(kind, "fields", None)
    if not isinstance(fields, list | tuple):  # a mapping of NumPy's structured arrays
        return None
    forms = {field.name: _form(_type_of(field)) for field in fields}
    return {name: form for name, form in forms.items() if form} or None


def _type_of(value: object) -> object:
    return getattr(value, "dtype", getattr(value, "type", None))


def _written(value: object, form: type | dict) -> object:
    if isinstance(value, list | tuple):
        return type(value)(_written(item, form) for item in value)
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return value
        return value | {n: _written(value[n], inner) for n, inner in form.items() if n in value}
    return written(value, form) if isinstance(value, float) else value


def _cell(value: object, depth: int = 0) -> object:
    if depth > _MOST_LEVELS or isinstance(value, str):
        return value
    if type(value) is dict:
        return {name: _cell(item, depth + 1) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_cell(item, depth + 1) for item in value)
    kind = _type_of(value)
    form = _form(kind)
    if form is None and str(kind) != "object":
        return value
    methods = ("as_py", "to_pylist", "to_list", "tolist")
    method = next((name for name in methods if hasattr(value, name)), None)
    if method is None:
        return value
    converted = getattr(value, method)()
    return _cell(converted, depth + 1) if form is None else _written(converted, form)
