"""Checks of a row's columns: texts, messages, numbers, and the columns of a demonstration.

One row at a time, with errors that name it: `place` is the file, the row and its line.
"""

import difflib
import math
from collections.abc import Sequence

import numpy as np

from rljax.data.text.messages import check_unicode, validate_messages, validate_objects
from rljax.errors import InputError
from rljax.files import parse_json

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_REMOVE = "remove the row or fill it in"


def first_of(row: dict, names: Sequence[str], place: str, fix: str) -> str:
    """The first of the columns that the row has."""
    for name in names:
        if name in row:
            return name
    columns = sorted(map(str, row))
    close = [c for name in names for c in difflib.get_close_matches(name, columns, n=1)]
    if close:
        fix = f"rename {close[0]!r}, if that is what it holds, or {fix}"
    raise InputError(f"{place} lacks the column {names[0]!r}", value=columns, fix=fix)


def require_text(value: object, place: str, fix: str, empty: bool = False) -> None:
    """Raises InputError unless the value is a text, and one that is not empty."""
    if not isinstance(value, str) or not (value or empty):
        kind = "null" if value is None else "empty" if value == "" else "not a text"
        raise InputError(f"{place} is {kind}", value=value, fix=fix)
    check_unicode(value, place)


def prompt_of(value: object, place: str) -> str | list[dict]:
    """A prompt: a text, or messages."""
    if isinstance(value, list):
        return validate_messages(value, where=place)
    require_text(value, place, "write a text or a list of chat messages", empty=True)
    return value


def messages_of(value: object, place: str) -> list[dict]:
    """Messages whose roles are known."""
    messages = validate_messages(value, where=place)
    for number, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise InputError(
                f"{place}: message {number} has an unknown role",
                value=message["role"],
                rule=f"a role is one of {', '.join(ROLES)}",
                fix="rename it",
            )
    return messages


def completion_of(value: object, place: str, empty: bool = False) -> str | list[dict]:
    """A completion: a text, `empty` ones too where that is so, or messages from the assistant's
    first to its last."""
    if not isinstance(value, list):
        require_text(value, place, _REMOVE, empty)
        return value
    messages = messages_of(value, place)
    for position, message in (("first", messages[0]), ("last", messages[-1])):
        if message["role"] != "assistant":
            raise InputError(
                f"{place}: the {position} message is not the assistant's",
                value=message["role"],
                rule="a completion is what the assistant says, with what tools answer in between",
                fix="move what precedes it into 'prompt' and drop what follows it",
            )
    if not any(has_answer(message) for message in messages):
        raise InputError(f"{place} is empty: the assistant says nothing", fix=_REMOVE)
    return messages


def has_answer(message: dict) -> bool:
    """Whether a turn of the assistant holds anything to learn."""
    return message["role"] == "assistant" and bool(
        message.get("content") or message.get("tool_calls")
    )


def number_of(value: object, place: str) -> float:
    """A finite number; True and False are none."""
    value = plain_number(value)
    number = math.nan
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # A whole number may be too large for a float: JSON has no limit.
        number = float(value) if abs(value) < 1e300 else math.inf
    if not math.isfinite(number):
        missing = value is None or (isinstance(value, float) and math.isnan(value))
        kind = "missing (null or NaN)" if missing else "not a finite number"
        raise InputError(f"{place} is {kind}", value=value, fix="write a number or remove the row")
    return number


def flag_of(value: object, place: str) -> bool:
    """True or False, or 1 or 0."""
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, (bool, int, float)) or value not in (0, 1):
        raise InputError(
            f"{place} is not true or false", value=value, fix="write true, false, 1 or 0"
        )
    return bool(value)


def list_of(value: object, place: str) -> list:
    """A list of at least one item."""
    if isinstance(value, (tuple, np.ndarray)):
        value = list(value)
    if not isinstance(value, list) or not value:
        kind = "null" if value is None else "empty" if value == [] else "not a list"
        raise InputError(f"{place} is {kind}", value=value, fix="write a list, or remove the row")
    return value


def tools_of(row: dict, place: str) -> dict:
    """{"tools": the functions that the row's conversation may call}, {} where it has none.

    A list of objects, or the JSON text of one: tables cannot hold objects of different keys.
    """
    given = row.get("chat_template_kwargs") or {}
    given = given if isinstance(given, dict) else {"chat_template_kwargs": given}
    asked = {name: value for name, value in given.items() if value is not None}
    if row.get("enable_thinking") is not None:
        asked["enable_thinking"] = row["enable_thinking"]
    if asked not in ({}, {"enable_thinking": True}):  # True is what templates do unasked
        raise InputError(
            f"{place} asks the chat template for variables", value=asked,
            rule="a run renders every row as its template does unasked",
            fix="remove the column 'chat_template_kwargs' or 'enable_thinking', or write the row as"
            " text",
        )  # fmt: skip
    tools = row.get("tools")
    if tools is None or tools == "":
        return {}
    if isinstance(tools, str):
        tools = parse_json(tools, f"{place}, column 'tools'")
    return {"tools": validate_objects(tools, f"{place}, column 'tools':")}


def demonstration_record(row: dict, place: str, index: int) -> dict:
    """A supervised record: `messages`, or `prompt` + `completion`, or `text`; tools; and index.

    `prompt_messages`, where it is there, is how many of the messages are a prompt whose own turns
    of the assistant are not learned.
    """
    tools = tools_of(row, place)
    if row.get("messages") is not None:
        messages = validate_messages(row["messages"], where=f"{place}, column 'messages'")
        _require_answer(messages, f"{place}, column 'messages'")
        return dict(messages=messages, **tools, index=index)
    for first, second in (
        ("prompt", "completion"),
        ("prompt", "response"),
        ("question", "answer"),
    ):
        if first not in row or second not in row:
            continue
        prompt = prompt_of(row[first], f"{place}, column {first!r}")
        completion = completion_of(row[second], f"{place}, column {second!r}")
        if isinstance(prompt, str) and isinstance(completion, str):
            return dict(prompt=prompt, completion=completion, index=index)
        if isinstance(prompt, str):
            raise InputError(
                f"{place}: column {first!r} is a text while column {second!r} holds messages",
                fix="write both as texts, or both as messages",
            )
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        spoken = any(message["role"] == "assistant" for message in prompt)
        border = {"prompt_messages": len(prompt)} if spoken else {}
        return dict(messages=[*prompt, *completion], **border, **tools, index=index)
    extra = row.get("extra_info")
    if isinstance(extra, dict) and {"question", "answer"} <= extra.keys():  # verl's own SFT
        prompt, answer = (
            prompt_of(extra[name], f"{place}, column 'extra_info.{name}'")
            for name in ("question", "answer")
        )
        if isinstance(prompt, str) and isinstance(answer, str):
            turns = [("user", prompt), ("assistant", answer)]
            messages = [{"role": role, "content": content} for role, content in turns]
            return dict(messages=messages, **tools, index=index)
    if "text" in row:
        require_text(row["text"], f"{place}, column 'text'", _REMOVE)
        return dict(text=row["text"], index=index)
    raise InputError(
        f"{place} is no demonstration",
        value=sorted(map(str, row)),
        rule="it needs 'messages', or 'prompt' and 'completion' (or 'response'), or 'text'",
        fix="rename the columns",
    )


def _require_answer(messages: list[dict], place: str) -> None:
    if not any(message["role"] == "assistant" for message in messages):
        raise InputError(
            f"{place} has no message of the assistant",
            value=[message["role"] for message in messages],
            rule="there is nothing to learn from it",
            fix="remove the row or add the answer",
        )
    for number, message in enumerate(messages):
        silent = not message.get("content") and not message.get("tool_calls")
        if message["role"] == "assistant" and silent:
            raise InputError(
                f"{place}: message {number} of the assistant is empty",
                rule="it would teach to say nothing",
                fix="remove the row or fill it in",
            )


def decoded(value: object, place: str, fills_nulls: bool) -> object:
    """The value with bytes as texts, and without the keys of objects that a table filled up."""
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{place} holds bytes that are not UTF-8",
                value=value[error.start : error.start + 8],
                fix="store texts as UTF-8",
            ) from None
    if isinstance(value, dict):
        return {
            decoded(name, place, False): decoded(item, place, fills_nulls)
            for name, item in value.items()
            if not (fills_nulls and item is None)
        }
    if isinstance(value, (list, tuple)):
        return [decoded(item, place, fills_nulls) for item in value]
    return value if value is None or isinstance(value, str) else plain_number(value)


def plain_number(value: object) -> object:
    """numpy's numbers and arrays as Python's."""
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value
