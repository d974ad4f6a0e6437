"""Writes a user's rows as train.parquet and test.parquet in verl's columns: mapped, checked,
counted.

`rljax data prepare` is the command.

Which side of the split a row is on is a function of its prompt alone: it stays there when rows are
added or reordered, and two rows with one prompt are never on both.
"""

import bisect
import contextlib
import dataclasses
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path

from rljax import hub
from rljax.answer_columns import held_answers
from rljax.components import resolve
from rljax.config import is_path
from rljax.config.data_options import PrepareOptions
from rljax.data.images.columns import require_text_alone
from rljax.data.online.prompts import encode_prompt
from rljax.data.rows.conversation import conversation
from rljax.data.rows.read import Rows, make_task, read_rows
from rljax.data.rows.sources import prompt_record
from rljax.data.rows.split import is_held_out, messages_text
from rljax.data.text.chat import learned_turns
from rljax.data.text.messages import NOT_ASKING
from rljax.data.text.tokenizer import load_tokenizer
from rljax.errors import InputError
from rljax.files import DATA_FILES

MAPS = "rljax.data.rows.maps"


def prepare(options: PrepareOptions) -> dict:
    """Writes out/train.parquet, out/test.parquet (if there are test rows) and out/counts.json;
    returns the counts. Raises InputError, and writes nothing, for options that exclude each other,
    for a bad row, and if no row is left for a split."""
    _check(options)
    records_by_split, counts = {}, {}
    for split in ("train", "test") if _has_own_test(options) else ("train",):
        records_by_split[split], part_counts = _mapped_records(options, split)
        counts |= {name: counts.get(name, 0) + n for name, n in part_counts.items()}
    if options.test_fraction:
        all_rows = records_by_split["train"]
        records_by_split = {"train": [], "test": []}
        for row in all_rows:
            held_out = is_held_out(messages_text(row["prompt"]), options.test_fraction)
            records_by_split["test" if held_out else "train"].append(row)
    # The test split first: its prompts leave the training split.
    rows_by_split, first_locations = {}, {}
    for split in ("test", "train"):
        if split in records_by_split:
            rows_by_split[split], part_counts = _without_duplicates(
                records_by_split[split], first_locations, split
            )
            counts |= {name: counts.get(name, 0) + n for name, n in part_counts.items()}
    for split, rows in rows_by_split.items():
        counts[split] = len(rows)
        fix = "more rows, or a larger --test_fraction" if split == "test" else "check the source"
        if not rows:
            raise InputError(f"no row is left for {split}.parquet", value=counts, fix=fix)
    _write(
        Path(options.out),
        {split: _table(rows, split) for split, rows in rows_by_split.items()},
        counts,
    )
    return counts


def _check(options: PrepareOptions) -> None:
    for name in ("source", "out"):
        if not getattr(options, name):
            raise InputError(f"--{name} is not set", fix=f"--{name}=...; --help lists the flags")
    if not 0 <= options.test_fraction < 1:
        rule = "0 <= fraction < 1"
        fix = "--test_fraction=0.05, or 0 for no test split"
        raise InputError("--test_fraction", value=options.test_fraction, rule=rule, fix=fix)
    if bool(options.max_prompt_tokens) != bool(options.tokenizer):
        raise InputError(
            "--max_prompt_tokens and --tokenizer belong together", fix="set both, or neither"
        )
    if options.max_prompt_tokens < 0:
        rule = "at least 1"
        fix = "--max_prompt_tokens=512, or leave it out: prompts of any length stay"
        raise InputError("--max_prompt_tokens", value=options.max_prompt_tokens, rule=rule, fix=fix)
    if os.path.exists(options.out) and not os.path.isdir(options.out):
        raise InputError(f"--out={options.out} is a file", fix="name a folder")


def _has_own_test(options: PrepareOptions) -> bool:
    """Returns whether the source has a test split of its own: a folder, a name with {split} and a
    TFDS data set have splits; one file has not."""
    if options.test_fraction:
        return False
    if hub.is_hub(options.source):
        return _hub_has_test(options.source)
    if is_path(options.source):
        return not options.source.endswith(DATA_FILES) or "{split}" in options.source
    return not isinstance(make_task(options.source)[1], (list, tuple))  # just rows: no splits


def _hub_has_test(source: str) -> bool:
    """Returns whether a data set of the hub has a test split beside the rows that it names."""
    try:
        return hub.split_files(source, "test").names != hub.split_files(source, "train").names
    except InputError:  # it has none; other faults show when its rows are read
        return False


# -- rows --


def _mapped_records(options: PrepareOptions, split: str) -> tuple[list[dict], dict[str, int]]:
    """Returns the prompt records of a split with their prompts as messages, and counts."""
    rows = read_rows(options.source, split)
    function = _map_function(options.map) if options.map else None
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
    counts = dict(rows=len(rows.rows), dropped_by_map=0, dropped_overlong=0, split_conversations=0)
    after = dataclasses.replace(rows, source=f"{rows.source}, after the map") if function else rows
    records = []
    for index, row in enumerate(rows.rows):
        mapped_row = _call_map(function, row, index, rows) if function else row
        if mapped_row is None:
            counts["dropped_by_map"] += 1
            continue
        if options.data_source:
            mapped_row = {**mapped_row, "data_source": options.data_source}
        split_rows = [mapped_row]
        if options.turns == "each":
            split_rows = _rows_of_turns(mapped_row, after.location(index))
        counts["split_conversations"] += len(split_rows) > 1
        for split_row in split_rows:
            record = prompt_record(split_row, index, after, True)
            require_text_alone([record], "rljax data prepare")
            if isinstance(record["prompt"], str):
                record["prompt"] = [{"role": "user", "content": record["prompt"]}]
            if tokenizer is not None:
                limit = options.max_prompt_tokens
                encoded, _ = encode_prompt(record, tokenizer, max_prompt_tokens=limit)
                if encoded is None:
                    counts["dropped_overlong"] += 1
                    continue
            records.append(record)
    after.unread.warn(records)
    return records, counts


def _rows_of_turns(row: dict, location: str) -> list[dict]:
    """Returns a row for each turn of the assistant in `messages` that is learned and answers
    someone: the messages up to it. A row without `messages` is returned as it is."""
    has_prompt = any(row.get(name) is not None for name in ("prompt", "question"))
    if row.get("messages") is None or has_prompt:
        return [row]
    messages = conversation(row["messages"], f"{location}, column 'messages'")
    turns = [
        k
        for k in learned_turns(messages)
        if messages[k].get("content")
        and any(message["role"] not in NOT_ASKING for message in messages[:k])
    ]
    if len(turns) < 2:
        return [row]
    if answers := held_answers(row):
        raise InputError(
            f"{location} has one ground truth, in {answers[0]!r}, for {len(turns)} turns",
            rule="with --turns=each the ground truth of a turn is its own text",
            fix="remove the column with a --map, or use --turns=last",
        )
    return [{**row, "messages": messages[: k + 1]} for k in turns]


def _map_function(text: str) -> Callable[[dict, int], dict | None]:
    """Returns the function of (example, index) that `text` names: itself, or the function that a
    call of it with its options returns (verl's make_map_fn(split))."""
    component = resolve(text, MAPS)
    rule = "a map is a function of (example, index), or returns one"
    with contextlib.suppress(TypeError):
        component.signature.bind({}, 0, **component.options)
        return component
    try:
        component.signature.bind(**component.options)
    except TypeError as error:
        fix = "write its options in the brackets, such as make_map_fn(split='train')"
        raise InputError(f"--map={text}", rule=f"{error}; {rule}", fix=fix) from None
    function = component()
    if not callable(function):
        raise InputError(
            f"--map={text} returned no function",
            value=function,
            rule=rule,
            fix="return a function (row, index) -> dict from it, or name the function itself "
            "without brackets",
        )
    return function


def _call_map(function: Callable, row: dict, index: int, rows: Rows) -> dict | None:
    location = rows.location(index)
    try:
        mapped_row = function(row, index)
    except InputError as error:
        raise error.within(f"{location} ") from None
    except Exception as error:  # the user's own code: name its line and the row
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise InputError(
            f"{location}: the map failed",
            value=sorted(map(str, row)),
            rule=f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})",
            fix="correct the map, or let it return None to drop the row",
        ) from error
    if mapped_row is not None and not isinstance(mapped_row, dict):
        fix = "return {'prompt': ..., 'ground_truth': ...}"
        if callable(mapped_row):  # make_map_fn(split, more="") was taken for a map
            fix = "write the options of what makes the map, such as make_map_fn(split='train')"
        rule = "an object with prompt and ground_truth, or None to drop the row"
        raise InputError(
            f"{location}: the map returned no row", value=mapped_row, rule=rule, fix=fix
        )
    return mapped_row


def _without_duplicates(
    rows: list[dict], first_locations: dict[str, tuple[str, str]], split: str
) -> tuple[list[dict], dict[str, int]]:
    """Returns the first row of every prompt that is not in `first_locations` (prompt -> (split,
    ground truth)), and counts."""
    unique_rows, counts = [], dict(duplicates=0, contradicting=0, also_in_test=0)
    for row in rows:
        text = messages_text(row["prompt"])
        key = " ".join(text.lower().split())
        if key not in first_locations:
            first_locations[key] = (split, row["ground_truth"])
            unique_rows.append(row)
            continue
        first_split, truth = first_locations[key]
        counts["duplicates" if first_split == split else "also_in_test"] += 1
        counts["contradicting"] += truth != row["ground_truth"]
    return unique_rows, counts


# -- files --


def _table(rows: list[dict], split: str):
    """Returns the rows as a table in verl's columns."""
    import pyarrow

    columns: dict[str, list] = {
        "data_source": [row["data_source"] for row in rows],
        "prompt": [_with_text_arguments(row["prompt"]) for row in rows],
        "ability": [str(row["extra_info"].get("ability", "")) for row in rows],
        "reward_model": [{"style": "rule", "ground_truth": row["ground_truth"]} for row in rows],
        "extra_info": [
            {
                k: _tools_text(v) if k == "tools" else v
                for k, v in row["extra_info"].items()
                if k not in ("ability", "index", "split")
            }
            | {"index": row["index"], "split": split}
            for row in rows
        ],
    }
    arrays = {}
    for name, values in columns.items():
        try:
            arrays[name] = pyarrow.array(values)
        except (pyarrow.ArrowException, OverflowError, UnicodeError) as error:
            row = rows[_first_unfit(values)]
            raise InputError(
                f"row {row['index']}, column {name!r} does not fit the rows before it",
                value=row.get(name, row["extra_info"]),
                rule=f"a column holds values of one type: {str(error).splitlines()[0]}",
                fix="let the map write that value as a text (json.dumps) in every row",
            ) from None
        if empty := _empty_struct(arrays[name].type, name):
            raise InputError(
                f"column {empty!r} holds only empty objects",
                rule="parquet has no object without keys",
                fix="let the map leave it out, or write it as a text (json.dumps)",
            )
    return pyarrow.table(arrays)


def _with_text_arguments(messages: list[dict]) -> list[dict]:
    """Returns the messages with the arguments of their calls as JSON texts: a table has one list of
    keys for all objects, and would fill in nulls."""
    return [
        {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_text(call: dict) -> dict:
    if "function" in call:
        return {**call, "function": _with_text(call["function"])}
    return {**call, "arguments": _as_text(call["arguments"])}


def _tools_text(tools: object) -> object:
    """Returns tools as JSON text; a list of anything else, which an environment may read, as it
    is."""
    are_objects = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    return _as_text(tools) if are_objects else tools


def _as_text(value: object) -> object:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _empty_struct(kind, location: str) -> str:
    """Returns the path in a column's type where an object has no key at all; "" if nowhere."""
    import pyarrow

    if pyarrow.types.is_list(kind):
        return _empty_struct(kind.value_type, location)
    if not pyarrow.types.is_struct(kind):
        return ""
    if not kind.num_fields:
        return location
    paths = (_empty_struct(field.type, f"{location}.{field.name}") for field in kind)
    return next(filter(None, paths), "")


def _first_unfit(values: list) -> int:
    """Returns the index of the first value with which the column cannot be written, by
    bisection."""
    import pyarrow

    def fails(count: int) -> bool:
        try:
            pyarrow.array(values[:count])
        except (pyarrow.ArrowException, OverflowError, UnicodeError):
            return True
        return False

    return bisect.bisect_left(range(1, len(values)), True, key=fails)


def _write(folder: Path, tables: dict, counts: dict) -> None:
    """Writes all files under other names first, then renames them: a reader never finds half of
    one."""
    import pyarrow.parquet

    temporary = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for split, table in tables.items():
            temporary[split] = folder / f".{split}.parquet.{os.getpid()}"
            pyarrow.parquet.write_table(table, temporary[split])
        temporary["counts"] = folder / f".counts.json.{os.getpid()}"
        temporary["counts"].write_text(json.dumps(counts, indent=2) + "\n")
        stale = folder / "test.parquet"
        if "test" not in tables and stale.exists():
            raise InputError(
                f"{stale} is of an earlier preparation, and this one has no test split",
                fix="set --test_fraction, remove the file, or choose another --out",
            )
        for split in tables:
            os.replace(temporary[split], folder / f"{split}.parquet")
        os.replace(temporary["counts"], folder / "counts.json")
    except OSError as error:
        fix = "--out=FOLDER of a disk with room that you can write to"
        raise InputError(f"--out={folder} cannot be written", rule=str(error), fix=fix) from None
    finally:
        for path in temporary.values():
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
