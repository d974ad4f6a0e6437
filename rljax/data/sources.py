"""Records: from files or procedural tasks to checked, plain dicts. No tokens here.

A spec is the path of a .parquet, .jsonl or .json file (`{split}` in it is replaced; a folder means
its file `<split>.parquet` or `.jsonl` or `.json`), or a component such as `"sort_digits(digits=3)"`
of `rljax.data.tasks`. Every row is checked here, before a model loads.
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rljax.components import resolve
from rljax.data.chat import check_unicode, validate_messages
from rljax.data.files import parse_json, read_text
from rljax.errors import InputError

SUFFIXES = (".parquet", ".jsonl", ".json")
_OTHER_FILES = (".csv", ".tsv", ".txt", ".arrow", ".gz", ".zst", ".zip", ".yaml", ".pq")
_PROMPT_FIX = "give each row a 'prompt' (text, or a list of chat messages) or a 'question'"
_TRUTH_FIX = "give each row a 'ground_truth', an 'answer' or a reward_model.ground_truth"


@dataclass(frozen=True)
class _Rows:
    """Raw rows, and what errors call their source and each of them.

    `data_source` is the name of the data set for rows that do not give one.
    """

    source: str
    data_source: str
    rows: Sequence[dict]
    lines: Sequence[int] | None = None  # line numbers, where rows are lines of a file

    def place(self, index: int) -> str:
        place = f"{self.source}: row {index}"
        return place if self.lines is None else f"{place} (line {self.lines[index]})"


def load_prompts(spec: str, split: str, *, need_ground_truth: bool = True) -> list[dict]:
    """Prompt records: prompt (str or messages), ground_truth, data_source, extra_info, index.

    Without `need_ground_truth` (a reward model judges) a missing one is "".
    """
    rows = _load(spec, split)
    return [
        _prompt_record(row, index, rows, need_ground_truth) for index, row in enumerate(rows.rows)
    ]


def load_worked_examples(spec: str, split: str) -> list[dict]:
    """Supervised records: `messages`, or `prompt` + `completion`, or `text`; and index.

    A task's worked examples are its training split.
    """
    rows = _load(spec, split, worked=True)
    return [_worked_record(row, index, rows) for index, row in enumerate(rows.rows)]


def load_records(spec: str, *, split: str) -> Sequence[dict]:
    """The rows as the file or the task has them, unchecked but for being objects."""
    return _load(spec, split).rows


# -- where rows come from --


def _load(spec: str, split: str, worked: bool = False) -> _Rows:
    if not isinstance(spec, str) or not spec.strip():
        raise InputError("a data source is a text", value=spec, fix='write a path or "task(...)"')
    spec = spec.strip()
    path = Path(spec.replace("{split}", split))
    if path.is_dir():
        path = _file_of_split(path, split)
    readers = {".parquet": _read_parquet, ".jsonl": _read_jsonl, ".json": _read_json}
    if path.suffix in readers:
        rows = readers[path.suffix](path, split)
    elif not spec.endswith(")") and ("/" in spec or path.suffix in _OTHER_FILES or path.exists()):
        raise InputError(
            f"{path} is not a kind of data file that is read",
            rule=f"the name must end in one of {', '.join(SUFFIXES)}",
            fix="convert it, for example with pyarrow, or correct the name",
        )
    else:
        rows = _run_task(spec, split, worked)
    if len(rows.rows) == 0:
        raise InputError(f"{rows.source} has no rows", fix="check the file and the split")
    for index, row in enumerate(rows.rows):
        if not isinstance(row, dict):
            raise InputError(
                f"{rows.place(index)} is not an object",
                value=row,
                fix='each row is one JSON object such as {"prompt": ..., "ground_truth": ...}',
            )
    return rows


def _file_of_split(folder: Path, split: str) -> Path:
    for suffix in SUFFIXES:
        if (folder / f"{split}{suffix}").is_file():
            return folder / f"{split}{suffix}"
    raise InputError(
        f"{folder} has no file for the split {split!r}",
        value=sorted(item.name for item in folder.iterdir())[:10],
        rule=f"a folder holds {split}.parquet, {split}.jsonl or {split}.json",
        fix="name the file itself",
    )


def _read_parquet(path: Path, split: str) -> _Rows:
    import pyarrow.parquet  # 0.2 s that a run on procedural data need not pay

    if not path.is_file():
        raise InputError(f"{path} does not exist", fix="check the path")
    try:
        # A file handle, because for a path the library also guesses partitions from folder names.
        with path.open("rb") as file:
            rows = pyarrow.parquet.read_table(file).to_pylist()
    except Exception as error:  # truncated, foreign, bad UTF-8: the library has a class for each
        raise InputError(
            f"{path} is not a readable parquet file",
            rule=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            fix="copy or write it again; a half-copied file lacks its footer",
        ) from None
    return _Rows(str(path), path.stem, rows)


def _read_jsonl(path: Path, split: str) -> _Rows:
    rows, lines = [], []
    # Not splitlines(): U+2028 and its kin may stand inside a JSON string.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            rows.append(parse_json(line, f"{path}: line {number}"))
            lines.append(number)
    return _Rows(str(path), path.stem, rows, lines)


def _read_json(path: Path, split: str) -> _Rows:
    value = parse_json(read_text(path), str(path))
    if isinstance(value, dict):
        if split not in value:
            raise InputError(
                f"{path} has no split {split!r}",
                value=sorted(value)[:10],
                rule="a .json file is a list of rows, or an object {split: list of rows}",
                fix="correct the split; one object per line is a .jsonl file",
            )
        value = value[split]
    if not isinstance(value, list):
        raise InputError(f"{path} is not a list of rows", value=value, fix="write [{...}, {...}]")
    return _Rows(str(path), path.stem, value)


def _run_task(spec: str, split: str, worked: bool) -> _Rows:
    task_function = resolve(spec, "rljax.data.tasks")
    try:
        inspect.signature(task_function.function).bind(**task_function.options)
    except TypeError as error:
        raise InputError(
            f"{spec}: options are missing", rule=str(error), fix="write them in the brackets"
        ) from None
    task = task_function()
    if isinstance(task, (list, tuple)):  # a user's function may just return its rows
        return _Rows(spec, task_function.name, task)
    try:
        splits = {"train": task.train, "test": task.test}
        if worked:
            splits = {"train": task.worked_examples}
    except AttributeError as error:
        raise InputError(
            f"{spec} returned no task",
            value=task,
            rule=str(error),
            fix="return a list of records, or an object with train, test and worked_examples",
        ) from None
    if split not in splits:
        raise InputError(f"{spec} has no split {split!r}", fix=f"use one of {sorted(splits)}")
    return _Rows(spec, task_function.name, splits[split])


# -- what a row must hold --


def _prompt_record(row: dict, index: int, rows: _Rows, need_ground_truth: bool) -> dict:
    place = rows.place(index)
    prompt_column = _first_of(row, ("prompt", "question"), place, _PROMPT_FIX)
    truth, truth_column, more = _ground_truth(row, place, need_ground_truth)
    data_source = row.get("data_source", rows.data_source)
    _require_text(data_source, f"{place}, column 'data_source'", "name the data set")
    extra_info = row.get("extra_info")
    if extra_info is None:
        extra_info = {}  # parquet writes a missing struct as null
    if not isinstance(extra_info, dict):
        raise InputError(
            f"{place}, column 'extra_info' is not an object", value=extra_info, fix="write {...}"
        )
    used = {prompt_column, truth_column, "reward_model", "data_source", "extra_info"}
    others = {name: value for name, value in row.items() if name not in used}
    return dict(
        prompt=_prompt(row[prompt_column], f"{place}, column {prompt_column!r}"),
        ground_truth=truth,
        data_source=data_source,
        extra_info={**others, **more, **extra_info},
        index=index,
    )


def _prompt(value: object, place: str) -> str | list[dict]:
    if isinstance(value, list):
        return validate_messages(value, where=place)
    _require_text(value, place, "write a text or a list of chat messages", empty=True)
    return value


def _ground_truth(row: dict, place: str, needed: bool) -> tuple[str, str, dict]:
    """The answer to compare with, its column, and what else of that column is worth keeping."""
    model = row.get("reward_model")
    if model is not None:
        if not isinstance(model, dict):
            raise InputError(
                f"{place}, column 'reward_model' is not an object",
                value=model,
                fix='write {"style": "rule", "ground_truth": "..."}',
            )
        text = model.get("ground_truth")
        if text is not None or needed:
            text = _answer_text(text, f"{place}, column 'reward_model.ground_truth'")
        return text or "", "reward_model", {}
    present = [name for name in ("ground_truth", "answer") if name in row]
    if not needed and all(row[name] is None for name in present):
        return "", "ground_truth", {}
    column = _first_of(row, ("ground_truth", "answer"), place, _TRUTH_FIX)
    text = _answer_text(row[column], f"{place}, column {column!r}")
    # The published GSM8K rows hold the worked solution, and the answer after "####".
    solution, mark, final = text.rpartition("\n#### ")
    if column == "answer" and mark:
        final = final.strip().replace(",", "")
        if not final:
            raise InputError(f"{place}, column 'answer' is empty after ####", value=text)
        return final, column, {"solution": solution}
    return text, column, {}


def _answer_text(value: object, place: str) -> str:
    """A ground truth as text; numbers are written as such, 72.0 as 72."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if math.isfinite(value):
            return str(int(value)) if value == int(value) else repr(value)
        value = None if math.isnan(value) else value  # a missing number comes as NaN
    if not isinstance(value, str) or not value.strip():
        fix = "remove the row or fill it in"
        if isinstance(value, (dict, list)):
            fix = "write structured answers as JSON text, or put them into 'extra_info'"
        raise InputError(
            f"{place} is {'null' if value is None else 'empty or not a text'}",
            value=value,
            rule="a ground truth is a text or a number",
            fix=fix,
        )
    check_unicode(value, place)
    return value


def _worked_record(row: dict, index: int, rows: _Rows) -> dict:
    place = rows.place(index)
    if row.get("messages") is not None:
        messages = validate_messages(row["messages"], where=f"{place}, column 'messages'")
        return dict(messages=_with_answer(messages, f"{place}, column 'messages'"), index=index)
    for first, second in (
        ("prompt", "completion"),
        ("prompt", "response"),
        ("question", "answer"),
    ):
        if first not in row or second not in row:
            continue
        prompt = _prompt(row[first], f"{place}, column {first!r}")
        completion = row[second]
        _require_text(completion, f"{place}, column {second!r}", "remove the row or fill it in")
        if isinstance(prompt, list):
            answer = {"role": "assistant", "content": completion}
            return dict(messages=[*prompt, answer], index=index)
        return dict(prompt=prompt, completion=completion, index=index)
    if "text" in row:
        _require_text(row["text"], f"{place}, column 'text'", "remove the row or fill it in")
        return dict(text=row["text"], index=index)
    raise InputError(
        f"{place} is no worked example",
        value=sorted(row),
        rule="it needs 'messages', or 'prompt' and 'completion' (or 'response'), or 'text'",
        fix="rename the columns",
    )


def _with_answer(messages: list[dict], place: str) -> list[dict]:
    if not any(message["role"] == "assistant" for message in messages):
        raise InputError(
            f"{place} has no message of the assistant",
            value=[message["role"] for message in messages],
            rule="there is nothing to learn from it",
            fix="remove the row or add the answer",
        )
    return messages


def _first_of(row: dict, names: Sequence[str], place: str, fix: str) -> str:
    """The first of the columns that the row has."""
    for name in names:
        if name in row:
            return name
    raise InputError(f"{place} lacks the column {names[0]!r}", value=sorted(row), fix=fix)


def _require_text(value: object, place: str, fix: str, empty: bool = False) -> None:
    if not isinstance(value, str) or not (value or empty):
        kind = "null" if value is None else "empty" if value == "" else "not a text"
        raise InputError(f"{place} is {kind}", value=value, fix=fix)
    check_unicode(value, place)
