"""Checks of a row's columns: texts, messages, numbers, and the columns of a demonstration.

One row at a time, with errors that name it: `location` is the file, the row and its line.
"""

import contextlib
import dataclasses
import decimal
import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from rljax.config.answer_numbers import written_cells
from rljax.contracts import MOST_REWARD
from rljax.data import kinds
from rljax.data.rows.conversation import (
    asks_to_learn,
    context,
    conversation,
    messages_in_text,
    prompt_flag_error,
    require_no_column_flags,
    require_no_other_reasoning,
    with_column_flags,
)
from rljax.data.rows.nulls import TOOLS, Nulls
from rljax.data.rows.unread import Unread
from rljax.data.text.messages import LEARN, check_unicode, tools_in_one_form
from rljax.errors import InputError
from rljax.files import parse_json

# Columns with scores of the chosen and of the rejected completion of a pair: ours and those of
# UltraFeedback, Argilla and distilabel. The first two that a row has are read.
PAIR_SCORES = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("rating_chosen", "rating_rejected"),
    ("chosen_rating", "rejected_rating"),
    ("chosen-rating", "rejected-rating"),
    ("reward_chosen", "reward_rejected"),
    ("chosen_reward", "rejected_reward"),
)
# Every column that is read by its name, under the words that are true of it. A cell of a table of
# texts holds a text, a response (a text too, but an empty cell is a gap and not the empty
# response), a truth (a text that may look like JSON), a value (a number or a truth value), or else
# JSON. Conversational: it may hold messages. Known: rows of some kind are known by it, and a table
# has one.
_NAMES = {
    "text conversational known": "prompt question",
    "text conversational": "reference",
    "text known": "instruction input output text",
    "text": "context system system_prompt",
    "response conversational known": "completion response chosen rejected safer more_harmful",
    "response known": "response_0",
    "response": "response_1",
    "truth conversational known": "answer",
    "truth known": "ground_truth",
    "value known": "label reward",
    "value": f"score {' '.join(sum(PAIR_SCORES, ()))} margin tie truncated safer_is_safe"
    " more_harmful_is_safe better_response_id safer_response_id is_response_0_safe"
    " is_response_1_safe enable_thinking ended",
    "conversational known": "messages",
    "known": "problem solution conversations context_messages completions labels steps"
    " reward_model",
}
KNOWN, CONVERSATIONAL, TEXTS, RESPONSES, TRUTHS, VALUES = (
    tuple(" ".join(names for words, names in _NAMES.items() if word in words.split()).split())
    for word in ("known", "conversational", "text", "response", "truth", "value")
)
_READ = (*" ".join(_NAMES.values()).split(), *TOOLS)
_REMOVE = "remove the row or fill it in"


# Columns by which rows of a kind are known, a description of such a row, and its kind.
_KINDS = (
    ("chosen rejected", "a pair", "pairs"),
    ("completions labels", "a solution with labelled steps", "stepwise"),
    ("completion label", "a labelled completion", "unpaired"),
    ("prompt completion", "a demonstration", "examples"),
    ("prompt response", "a demonstration", "examples"),
    ("prompt ground_truth", "a prompt with its answer", "rollouts"),
    ("prompt answer", "a prompt with its answer", "rollouts"),
    ("question answer", "a question with its answer", "rollouts"),
    ("prompt solution", "a prompt with its answer", "rollouts"),
    ("question solution", "a question with its answer", "rollouts"),
    ("prompt reward_model", "a prompt with its answer", "rollouts"),
)


_DATAFLOW_READS = ", which reads such rows, or "  # behind the dataflow of a fix


def other_kind(row: dict, lacking: Sequence[str]) -> tuple[str, str]:
    """Returns (rule, fix) for a row without the columns `lacking` that looks like a row of another
    dataflow; ("", "") if it does not."""
    present = {name for name, value in row.items() if value is not None}
    for names, description, kind in _KINDS:
        columns = set(names.split())
        # Pairs may have the prompt within their completions.
        has_prompt = kind == "pairs" or present & {"prompt", "question"}
        if has_prompt and columns <= present and not columns & set(lacking):
            fix = f"--config.dataflow={kinds.KINDS[kind].dataflow}{_DATAFLOW_READS}"
            return f"the row is {description}", fix
    return "", ""


@contextlib.contextmanager
def rows_of(field: str, fix: str) -> Iterator[None]:
    """Wraps code that reads rows of `field`, of a kind that config.dataflow does not choose. Its
    errors name the field, and `fix`: about rows of another kind in place of a dataflow."""
    try:
        yield
    except InputError as error:
        problem, own_fix = error.parts
        _, separator, other_fix = own_fix.partition(_DATAFLOW_READS)
        fixes = (fix, other_fix) if separator else (own_fix, fix)
        raise InputError(f"{field}: {problem}", fix=", or ".join(filter(None, fixes))) from None


def first_of(
    row: dict, names: Sequence[str], location: str, fix: str, others: Sequence[str] = ()
) -> str:
    """Returns the first of the columns `names` that the row has. Raises InputError, with `fix`, if
    it has none. `others` are columns that are read in their place, too."""
    for name in names:
        if name in row:
            return name
    columns, names = sorted(map(str, row)), (*names, *others)
    problem = f"{location} lacks the column {names[0]!r}"
    rule, dataflow_fix = other_kind(row, names)
    if renamed := _rename_advice(columns, names):
        raise InputError(problem, value=columns, fix=f"{renamed}, or {fix}")
    raise InputError(problem, value=columns, rule=rule, fix=dataflow_fix + fix)


def _rename_advice(columns: Sequence[str], names: Sequence[str]) -> str:
    """Returns the advice to rename columns so that one of the `names` is there: those that differ
    in case from a name that is read, else the one whose name is nearest; "" if none is near. A
    column that is read under another of our names is not misspelt: a solution is no question."""
    spellings = {column: re.sub(r"[\s-]+", "_", column.strip().lower()) for column in columns}
    case_differs = {
        column: name for column, name in spellings.items() if name in _READ and name not in columns
    }
    if case_differs.keys() and set(case_differs.values()) & set(names):
        pairs = sorted(case_differs.items(), key=lambda pair: pair[1] not in names)
    else:
        unknown_columns = [column for column, name in spellings.items() if name not in _READ]
        matches = (
            (column, name)
            for name in names
            for column in difflib.get_close_matches(name, unknown_columns, n=1)
        )
        pairs = [pair for pair in [next(matches, None)] if pair]
    renames = " and ".join(f"{column!r} to {name!r}" for column, name in pairs)
    condition = "that is what it holds" if len(pairs) == 1 else "they hold that"
    return f"rename {renames}, if {condition}" if pairs else ""


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a kind of row. `names` are its possible names with spaces between; the first that
    a row has is read.

    `read(value, location)` returns the value, or raises InputError. `fix` is the fix in the error
    for a row without the column; "" means that it may be missing. Null is a value where the column
    is needed, unless `null_is_absent`, or another of the names holds a value.
    """

    names: str
    read: Callable[[object, str], object] = lambda value, location: value
    fix: str = ""
    null_is_absent: bool = False


def read_columns(row: dict, location: str, columns: Iterable[Column]) -> dict:
    """Returns {the first name of each column that the row has: the value that it reads}. Raises
    InputError that names the row and the column: a missing one before one that holds something
    else."""
    filled = {name: value for name, value in row.items() if value is not None}
    sources = []
    for column in columns:
        names = column.names.split()
        if column.fix or filled.keys() & set(names):
            held = {name: row[name] for name in names if not is_missing(row.get(name))}
            candidates = held or (filled if column.null_is_absent else row)
            sources.append((column, names[0], first_of(candidates, names, location, column.fix)))
    return {
        key: column.read(row[name], f"{location}, column {name!r}") for column, key, name in sources
    }


def is_missing(value: object) -> bool:
    """Returns whether a cell holds nothing: null, or the NaN of a gap in a table of numbers."""
    return value is None or isinstance(value, float) and math.isnan(value)


# -- values of columns --


def text_of(value: object, location: str, fix: str = _REMOVE, empty: bool = False) -> str:
    """Returns the value, a text. Raises InputError for anything else, for an empty text unless
    `empty` allows it, and for half a surrogate pair."""
    if not isinstance(value, str) or not (value or empty):
        kind = "null" if value is None else "empty" if isinstance(value, str) else "not a text"
        if fix == _REMOVE and isinstance(value, Mapping):
            fix = "write a text, or a list of messages: [{...}] around this one"
        elif fix == _REMOVE and kind == "not a text" and value is not None:
            fix = "write a text, in quotes"
        raise InputError(f"{location} is {kind}", value=value, fix=fix)
    check_unicode(value, location)
    return value


def prompt_of(value: object, location: str) -> str | list[dict]:
    """Returns a prompt: a text, or messages, of which nothing is learned. Raises InputError for
    anything else."""
    if isinstance(value, list):
        return context(conversation(value, location))
    return text_of(value, location, "write a text or a list of chat messages", empty=True)


def completion_of(value: object, location: str, empty: bool = False) -> str | list[dict]:
    """Returns a completion: a text, or messages from the assistant's first to its last. `empty`
    allows one that says nothing, the response that ends at once. Raises InputError for messages
    that begin or end with another role, or from which nothing is learned."""
    if not isinstance(value, list):
        return text_of(value, location, empty=empty)
    messages = conversation(value, location)
    for position, message in (("first", messages[0]), ("last", messages[-1])):
        if message["role"] != "assistant":
            raise InputError(
                f"{location}: the {position} message is not the assistant's",
                value=message["role"],
                rule="a completion is what the assistant says, with what tools answer in between",
                fix="move what precedes it into 'prompt' and drop what follows it",
            )
    learned = [message for message in messages if message.get(LEARN) is not False]
    if not any(map(has_answer, messages)) and not (empty and _says_nothing(learned)):
        raise InputError(
            f"{location} is empty: the assistant says nothing that is learned", fix=_REMOVE
        )
    return messages


def _says_nothing(learned: list[dict]) -> bool:
    """Returns whether there are turns of the assistant to learn and none of them has a text."""
    texts = [message.get("content") for message in learned if message["role"] == "assistant"]
    return bool(texts) and not any(texts)


def has_answer(message: dict) -> bool:
    """Returns whether a turn of the assistant holds anything to learn."""
    answer = message.get("content") or message.get("tool_calls")
    return message["role"] == "assistant" and message.get(LEARN) is not False and bool(answer)


def number_of(value: object, location: str) -> float:
    """Returns the value as a finite float. Raises InputError for anything else, and for True and
    False."""
    value = plain_number(value)
    number = math.nan
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # A whole number may be too large for a float: JSON has no limit.
        number = float(value) if abs(value) <= MOST_REWARD else math.inf
    if not math.isfinite(number):
        rule = f"not a finite number of at most {MOST_REWARD:g}"
        kind = "missing (null or NaN)" if is_missing(value) else rule
        raise InputError(
            f"{location} is {kind}", value=value, fix="write a number or remove the row"
        )
    return number


def flag_of(value: object, location: str) -> bool:
    """Returns the value, True, False, 1 or 0, as a bool. Raises InputError for anything else."""
    value = plain_number(value)
    if not isinstance(value, (bool, int, float)) or value not in (0, 1):
        kind = "missing (null or NaN)" if is_missing(value) else "not true or false"
        fix = "write true, false, 1 or 0, or remove the row"
        raise InputError(f"{location} is {kind}", value=value, fix=fix)
    return bool(value)


def list_of(value: object, location: str) -> list:
    """Returns the value as a list. Raises InputError for an empty one, and for a value that is no
    list, tuple or array."""
    if isinstance(value, (tuple, np.ndarray)):
        value = list(value)
    if not isinstance(value, list) or not value:
        kind = "null" if value is None else "empty" if isinstance(value, list) else "not a list"
        raise InputError(
            f"{location} is {kind}", value=value, fix="write a list, or remove the row"
        )
    return value


def object_of(value: object, location: str, fix: str = "write {...}") -> dict:
    """Returns the value, a dict; null, which parquet writes for a missing one, becomes {}. Raises
    InputError for anything else."""
    if not isinstance(value, dict | None):
        raise InputError(f"{location} is not an object", value=value, fix=fix)
    return value or {}


def each(read: Callable[[object, str], object], item: str) -> Callable[[object, str], list]:
    """Returns a function that reads a list with `read` for each item; errors call an item by the
    word `item` and its number."""

    def items(value: object, location: str) -> list:
        return [
            read(entry, f"{location}, {item} {i}")
            for i, entry in enumerate(list_of(value, location))
        ]

    return items


VARIABLES = ("chat_template_kwargs", "enable_thinking")  # columns with variables of the template
PROMPT_COLUMNS = ("prompt", "tools", *VARIABLES)  # from which a prompt is rendered


def prompt_columns(row: Mapping) -> dict:
    """Returns the columns of a row from which its prompt is rendered, for rows that are written
    with the same prompt. The text of `system` is in the prompt by then (as_written)."""
    return {name: row[name] for name in PROMPT_COLUMNS if row.get(name) is not None}


def rendering_of(row: dict, location: str) -> dict:
    """Returns the options that a row gives the chat template: {"tools": the functions that may be
    called, "variables": those of `variables_of`}; without a key where the row has none.

    Tools are a list of objects, or the JSON text of one: tables cannot hold objects of different
    keys. Raises InputError for anything else, and for two columns that disagree.
    """
    tools = _agreed_tools(_tool_columns(row, location, Nulls()), location)
    variables = variables_of(row, location)
    options = {"tools": tools} if tools else {}
    return options | ({"variables": variables} if variables else {})


def variables_of(row: dict, location: str) -> dict:
    """Returns the variables that a row gives the chat template: an object in the column
    `chat_template_kwargs`, as TRL has it, or the column `enable_thinking`. Raises InputError for
    anything else, and if the two disagree."""
    where = f"{location}, column 'chat_template_kwargs'"
    column_variables = row.get("chat_template_kwargs")
    if isinstance(column_variables, str) and column_variables:
        column_variables = parse_json(column_variables, where)
    column_variables = object_of(column_variables or None, where)
    variables = {name: value for name, value in column_variables.items() if value is not None}
    enable_thinking = row.get("enable_thinking")
    if enable_thinking is not None:
        enable_thinking = flag_of(enable_thinking, f"{location}, column 'enable_thinking'")
        if variables.setdefault("enable_thinking", enable_thinking) != enable_thinking:
            raise InputError(
                f"{where} and the column 'enable_thinking' disagree",
                value=(variables["enable_thinking"], enable_thinking),
                rule="one of them says it",
                fix="remove one of the columns",
            )
    return variables


def _agreed_tools(tools_of_columns: dict[str, list[dict]], location: str) -> list[dict]:
    """Returns the one list of tools in columns that hold some; [] without such columns."""
    lists = list(tools_of_columns.values())
    if any(tools != lists[0] for tools in lists):
        raise InputError(
            f"{location} has other tools in {' than in '.join(map(repr, tools_of_columns))}",
            rule="a conversation has one list of tools",
            fix="remove one of the columns",
        )
    return lists[0] if lists else []


def _tool_columns(row: dict, location: str, nulls: Nulls) -> dict[str, list[dict]]:
    """Returns {column: the tools that it holds} of the row and of its extra_info."""
    tools_of_columns = {}
    extra_info = row.get("extra_info")
    for prefix, columns in (
        ("", row),
        ("extra_info.", extra_info if isinstance(extra_info, dict) else {}),
    ):
        for name in TOOLS:
            where = f"{location}, column '{prefix}{name}'"
            if tools := _tools(name, columns.get(name), where):
                tools_of_columns[f"{prefix}{name}"] = nulls.tools(tools)
    return tools_of_columns


def _tools(name: str, value: object, location: str) -> list[dict] | None:
    """Returns the tools that a column holds; None where there are none. OpenAI's older `functions`
    are the functions of tools."""
    is_functions = name == "functions"  # an environment may have a column of that name
    if isinstance(value, str) and value and (value.lstrip().startswith("[") or not is_functions):
        value = parse_json(value, location)
    if is_functions and not (_is_objects(value) and all("name" in function for function in value)):
        return None
    if value is None or isinstance(value, str) and not value:
        return None
    return tools_in_one_form(value, f"{location}:")


def as_written(row: dict, location: str, nulls: Nulls) -> dict:
    """Returns the row with texts of messages as messages, and without the nulls that a table filled
    in to its messages, calls and tools. The tools of a conversation are in the column `tools`
    alone."""
    row = {
        name: messages_in_text(value, f"{location}, column {name!r}")
        if name in CONVERSATIONAL
        else value
        for name, value in row.items()
    }
    row = _with_system(row, location)
    if isinstance(row.get("extra_info"), dict):
        row["extra_info"] = dict(row["extra_info"])
    conversational = [name for name in CONVERSATIONAL if _is_conversation(row.get(name))]
    extra_info = row["extra_info"] if isinstance(row.get("extra_info"), dict) else {}
    if not conversational:  # an environment may read the tools
        for columns in (row, extra_info):
            for name in TOOLS:
                if _is_objects(columns.get(name)):
                    columns[name] = nulls.tools(columns[name])
        return row
    tools_of_columns = _tool_columns(row, location, nulls)
    tools = _agreed_tools(tools_of_columns, location)
    for prefix, columns in (("", row), ("extra_info.", extra_info)):
        for name in TOOLS:
            if f"{prefix}{name}" in tools_of_columns or columns.get(name) in (None, "", []):
                columns.pop(name, None)
    if tools:
        row["tools"] = tools
    return row | {name: nulls.messages(row[name], tools) for name in conversational}


def _with_system(row: dict, location: str) -> dict:
    """Returns the row with the text of its column `system` or `system_prompt` as the first message
    of its conversations; a prompt that is a text becomes a conversation."""
    changed = {}
    for name in ("system", "system_prompt"):
        if not isinstance(row.get(name), str) or not row[name]:
            continue
        prompt_names = [
            n for n in ("messages", "prompt", "question", "problem") if row.get(n) is not None
        ]
        first_columns = prompt_names[:1] or [
            n for n in ("chosen", "rejected") if _is_conversation(row.get(n))
        ]
        for column in first_columns:
            value = changed.get(column, row[column])
            if isinstance(value, str) and column != "messages":
                value = [{"role": "user", "content": value}]
            if _is_conversation(value):
                changed[column] = with_system(value, row[name], (name, column), location)
    return row | changed


def with_system(
    messages: list[dict], text: str, columns: tuple[str, str], location: str
) -> list[dict]:
    """Returns the messages with `text` as the system message, their first. Raises InputError, with
    the columns of both, where they begin with another system message."""
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    if str(first.get("role", first.get("from"))).strip().lower() != "system":
        return [{"role": "system", "content": text}, *messages]
    first_text = first.get("content", first.get("value"))
    if first_text != text:
        raise InputError(
            f"{location}: the column {columns[0]!r} and the first message of {columns[1]!r} are two"
            " system messages",
            value=text,
            rule="a conversation has one",
            fix="remove one of them",
        )
    return messages


def _is_conversation(value: object) -> bool:
    return isinstance(value, list) and any(
        isinstance(message, dict) and ("role" in message or "from" in message)
        for message in value[:1]
    )


def _is_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def demonstration_record(row: dict, location: str, index: int, unread: Unread) -> dict:
    """Returns a supervised record: `messages`, or `prompt` + `completion`, or `text`; tools; and
    index.

    `prompt_messages`, where it is there, is the number of the messages that are a prompt, whose own
    turns of the assistant are not learned. `unread` collects the columns that are not read. Raises
    InputError for a row without these columns, for a column of another type or with nothing to
    learn, for reasoning in a column of its own, and where `unread` does.
    """
    record = _demonstration(row, location, index)
    require_no_other_reasoning(row, record, location)
    if "text" in record:
        return record
    prompt, columns = record.get("prompt"), _prompt_and_answer(row)
    if prompt is None:
        prompt = record["messages"]
        prompt = prompt[:-1] if prompt[-1]["role"] == "assistant" else prompt
    read = "messages" if row.get("messages") is not None else columns[0] if columns else ""
    unread.check(row, prompt, location, index, read=read, learned=True, demonstrated=True)
    return record


def _prompt_and_answer(row: dict) -> tuple[str, str] | None:
    """Returns the two columns of a row without `messages` that are its prompt and the answer that
    is learned; None where it has none."""
    pairs = (("prompt", "completion"), ("prompt", "response"), ("question", "answer"))
    # A null that a table writes for a missing value hides no other columns.
    filled_pairs = [pair for pair in pairs if all(row.get(name) is not None for name in pair)]
    return next((pair for pair in filled_pairs or pairs if row.keys() >= set(pair)), None)


def _demonstration(row: dict, location: str, index: int) -> dict:
    options = rendering_of(row, location)
    if row.get("messages") is not None:
        messages = conversation(row["messages"], f"{location}, column 'messages'")
        messages = with_column_flags(row, messages, location)
        _require_answer(messages, f"{location}, column 'messages'")
        return dict(messages=messages, **options, index=index)
    if columns := _prompt_and_answer(row):
        first, second = columns
        prompt = prompt_of(row[first], f"{location}, column {first!r}")
        completion = completion_of(row[second], f"{location}, column {second!r}")
        if isinstance(prompt, str) and isinstance(completion, str):
            require_no_column_flags(row, location)
            return dict(prompt=prompt, completion=completion, **options, index=index)
        if isinstance(prompt, str):
            raise InputError(
                f"{location}: column {first!r} is a text while column {second!r} holds messages",
                fix="write both as texts, or both as messages",
            )
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        if flag := asks_to_learn(row[first]):
            raise prompt_flag_error(flag, f"{location}, column {first!r}")
        messages = with_column_flags(row, [*prompt, *completion], location, len(prompt))
        _require_answer(messages[len(prompt) :], f"{location}, column {second!r}")
        has_assistant = any(message["role"] == "assistant" for message in prompt)
        prompt_size = {"prompt_messages": len(prompt)} if has_assistant else {}
        messages = [*context(messages[: len(prompt)]), *messages[len(prompt) :]]
        return dict(messages=messages, **prompt_size, **options, index=index)
    extra = row.get("extra_info")
    if isinstance(extra, dict) and {"question", "answer"} <= extra.keys():  # verl's own SFT
        prompt, answer = (
            prompt_of(extra[name], f"{location}, column 'extra_info.{name}'")
            for name in ("question", "answer")
        )
        if isinstance(prompt, str) and isinstance(answer, str):
            turns = [("user", prompt), ("assistant", answer)]
            messages = [{"role": role, "content": content} for role, content in turns]
            require_no_other_reasoning(extra, dict(messages=messages), f"{location}, 'extra_info'")
            return dict(messages=messages, **options, index=index)
    if "text" in row:
        require_no_column_flags(row, location)
        return dict(text=text_of(row["text"], f"{location}, column 'text'"), **options, index=index)
    if "messages" in row:
        raise InputError(f"{location}, column 'messages' is null", fix=_REMOVE)
    rule, other = other_kind(row, ("completion", "response"))
    expected = ("messages", "prompt", "completion", "response", "text")
    missing = [name for name in expected if name not in row]
    renames = _rename_advice(sorted(map(str, row)), missing) or "rename the columns"
    needs = "it needs 'messages', or 'prompt' and 'completion' (or 'response'), or 'text'"
    raise InputError(
        f"{location} is no demonstration",
        value=sorted(map(str, row)),
        rule=f"{rule}; {needs}" if rule else needs,
        fix=f"{other}{renames}",
    )


def _require_answer(messages: list[dict], location: str) -> None:
    turns = [message for message in messages if message["role"] == "assistant"]
    if not any(message.get(LEARN) is not False for message in turns):
        context_only = ": each is context only" if turns else ""
        raise InputError(
            f"{location} has no message of the assistant to learn{context_only}",
            value=[message["role"] for message in messages],
            rule="there is nothing to learn from it",
            fix="remove the row or add the answer",
        )
    for number, message in enumerate(messages):
        is_empty = not message.get("content") and not message.get("tool_calls")
        is_learned = message["role"] == "assistant" and message.get(LEARN) is not False
        if is_learned and is_empty:
            raise InputError(
                f"{location}: message {number} of the assistant is empty",
                rule="it would teach to say nothing",
                fix="remove the row or fill it in",
            )


def decoded(value: object, location: str) -> object:
    """Returns the value with bytes as texts, and numpy's numbers and arrays as Python's. Raises
    InputError for bytes that are not UTF-8."""
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{location} holds bytes that are not UTF-8",
                value=value[error.start : error.start + 8],
                fix="store texts as UTF-8",
            ) from None
    if isinstance(value, dict):
        return {decoded(name, location): decoded(item, location) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [decoded(item, location) for item in value]
    return value if value is None or isinstance(value, str) else plain_number(value)


def decoded_row(row: dict, location: str) -> dict:
    """Returns the row with its values as `decoded` has them. Bytes that are no text stay as they
    are in columns that are not read by their names."""
    values = {}
    for name, value in row.items():
        try:
            values[name] = decoded(value, f"{location}, column {name!r}")
        except InputError:
            if name in _READ:
                raise
            values[name] = value
    return values


def without_nulls(value: object) -> object:
    """Returns the value without those keys of its objects whose value is null."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


_IMAGE_COLUMNS = ("images", "image", "image_url", "bytes", "videos")
_MOST_LEVELS = 50  # of lists and objects in a cell


def plain_row(row: dict) -> dict:
    """Returns a row that a program holds as a file would have it: arrays and numbers of NumPy, JAX,
    torch, pandas or pyarrow as Python's, their missing values as None. Images stay as they are."""
    return {name: _plain_cell(value, name) for name, value in written_cells(row).items()}


def _plain_cell(value: object, name: object, depth: int = 0) -> object:
    if name in _IMAGE_COLUMNS or depth > _MOST_LEVELS:
        return value
    if type(value).__name__ in ("NAType", "NaTType"):  # of pandas, which is not imported here
        return None
    if type(value) is dict:
        return {key: _plain_cell(item, key, depth + 1) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain_cell(item, name, depth + 1) for item in value)
    is_date = getattr(getattr(value, "dtype", None), "kind", "") in ("m", "M")  # would be numbers
    for method in ("as_py", "to_pylist", *(() if is_date else ("to_list", "tolist"))):
        if callable(convert := getattr(value, method, None)):
            return _plain_cell(convert(), name, depth + 1)
    return value


def plain_number(value: object) -> object:
    """Returns the value with numpy's numbers and arrays as Python's, and a decimal of a table as an
    int or a float."""
    if isinstance(value, decimal.Decimal):
        return int(value) if value.is_finite() and value == int(value) else float(value)
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value
