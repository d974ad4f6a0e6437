"""The messages of a row in one form, whoever wrote it: roles, calls, and which turns are learned.

A turn of the assistant that is context only has `"learn": False` (messages.LEARN); every other one
is learned. Rows say so in ten ways, by a key of a message or by a column with a value for each
message. A key or column that resembles one of these, but is none, is refused: to learn a turn that
should not be learned is the worse mistake.
"""

import functools
import re
from collections.abc import Mapping

import numpy as np

from rljax.data.text.contents import texts_in
from rljax.data.text.messages import (
    LEARN,
    REASONING,
    SPEAKERS,
    for_template,
    role_of,
    validate_messages,
)
from rljax.errors import InputError
from rljax.files import parse_json

# Keys that say whether a turn is learned, true or 1, or is context only, false or 0. They are in
# lower case and have letters alone, so that stepLossMask and step_loss_mask are one. They are those
# of OpenAI and Mistral (weight), axolotl (train, training), ms-swift (loss, loss_scale),
# LLaMA-Factory (loss_mask) and slime (step_loss_mask).
_FLAGS = "weight train training trainable istrainable loss lossmask lossscale lossweight"
FLAGS = (LEARN, *_FLAGS.split(), "computeloss", "steplossmask")
_FLAGS_OF_COLUMNS = tuple(flag.removesuffix("s") for flag in FLAGS)  # weights, loss_masks
_ROW_WEIGHTS = ("weight", "lossmask", "lossscale", "lossweight", "steplossmask")
# Beginnings of the words of other keys that look like flags: always, and with a truth value alone.
_FLAG_BEGINNINGS = ("train", "loss", "weight", "learn", "mask", "unmask", "supervis")
_FLAG_BEGINNINGS_OF_TRUTHS = ("ignor", "skip", "exclu", "context", "target", "label")
_TRUTHS = ("true", "false", "yes", "no", "on", "off", "0", "1")
_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](role|from|content|value)['"]""")
_FIX = f'write "{LEARN}": false at a turn that is context only, and nothing at the others'


def conversation(value: object, location: str) -> list[dict]:
    """Returns the messages, a list or the JSON text of one, in one form. Raises InputError, with
    the number of the message, for a role, content or call that is not valid."""
    value = messages_in_text(value, location)
    if isinstance(value, (list, tuple)):
        value = [
            _in_one_form(message, f"{location}: message {number}")
            if isinstance(message, Mapping)
            else message
            for number, message in enumerate(value)
        ]
    return validate_messages(for_template(value, location), where=location)


def context(messages: list[dict]) -> list[dict]:
    """Returns the messages as a prompt, of which nothing is learned: the key `learn` is removed."""
    return [{n: v for n, v in message.items() if n != LEARN} for message in messages]


def messages_in_text(value: object, location: str) -> object:
    """Parses a text that is the JSON of messages, as tables hold them; any other value stays.
    Raises InputError for a text that looks like a list of messages and is no JSON."""
    looks_like_messages = (
        isinstance(value, str) and _MESSAGES.match(value) and value.rstrip().endswith("]")
    )
    if not looks_like_messages:
        return value
    try:
        return parse_json(value, location)
    except InputError:
        raise InputError(
            f"{location} looks like a list of messages, and is no JSON",
            value=value,
            rule="Python's own repr of a list is not JSON",
            fix="write it with json.dumps(messages), or the rows as .jsonl or .parquet",
        ) from None


def sharegpt_content(turn: Mapping, location: str) -> object:
    """Returns the content of a turn {"from", "value"}, which may stand in `content` instead. Raises
    InputError where the two differ."""
    value, content = turn.get("value"), turn.get("content")
    if value and content and value != content:
        raise InputError(
            f"{location} has contents that differ in 'value' and 'content'",
            value=(value, content),
            rule="these are names of one field",
            fix="remove one of them",
        )
    return content if value in (None, "") and content is not None else value


def _in_one_form(message: Mapping, location: str) -> dict:
    converted = {name: value for name, value in message.items() if value is not None}
    if "role" not in converted and "from" in converted:
        fields = {n: v for n, v in converted.items() if n not in ("from", "value", "content")}
        content = sharegpt_content(message, location)
        converted = {"role": converted["from"], "content": content, **fields}
    converted["role"] = role = role_of(converted.get("role"), location)
    if isinstance(converted.get("tool_calls"), str):
        text = converted["tool_calls"]
        converted["tool_calls"] = (
            parse_json(text, f"{location}, 'tool_calls'") if text.strip() else None
        )
    _require_whole_turn(converted.get("content"), location)
    flags = {}
    for name, value in message.items():
        if (is_learned := _flag(name, value, location)) is not None:
            flags[name] = is_learned
            del converted[name]
    if len(set(flags.values())) > 1:
        raise InputError(f"{location} contradicts itself", value=flags, fix=_FIX)
    if not flags:
        return converted
    if role != "assistant" and any(flags.values()):
        raise _role_flag_error(next(iter(flags)), role, location)
    if role == "assistant" and not any(flags.values()):
        converted[LEARN] = False
    return converted


def _require_whole_turn(content: object, location: str) -> None:
    """Raises InputError for a part of a content that is not learned with the others."""
    for part in content if isinstance(content, (list, tuple)) else ():
        for name, value in part.items() if isinstance(part, Mapping) else ():
            if _flag(name, value, location) is False:
                raise InputError(
                    f"{location}: {name!r} leaves out a part of a turn",
                    value=part,
                    rule="a turn is learned whole, or it is context only",
                    fix=_FIX,
                )


def asks_to_learn(messages: object) -> str:
    """Returns the key by which one of the messages asks to be learned; "" if none does."""
    for message in messages if isinstance(messages, (list, tuple)) else ():
        for name, value in message.items() if isinstance(message, Mapping) else ():
            if _flag(name, value, "a message"):
                return name
    return ""


def _flag(name: object, value: object, location: str) -> bool | None:
    """Returns whether the key says that the turn is learned; None where it is no such key.

    Raises InputError for a key that looks like one and is none."""
    if not isinstance(name, str) or value is None:
        return None
    letters, looks = _read_name(name)
    if letters in FLAGS:
        return _checked_truth(name, value, location)
    is_truth = (
        value.strip().lower() in _TRUTHS if isinstance(value, str) else _truth(value) is not None
    )
    is_suspicious = (
        is_truth if looks == "if truth" else is_truth or bool(value) and not isinstance(value, str)
    )
    if not looks or not is_suspicious:
        return None
    rule = "it looks like a key that says whether a turn is learned, and is none that is read"
    if letters == "mask":
        rule = "in some data 1 is what is learned, in others what is left out"
    if letters == "traindetail":
        rule = "a turn is learned whole, or it is context only"
    fix = f"{_FIX}, or rename it"
    raise InputError(f"{location}: {name!r} is not understood", value=value, rule=rule, fix=fix)


@functools.lru_cache(maxsize=10_000)
def _read_name(name: str) -> tuple[str, str]:
    """Returns the letters of a key, and whether it looks like a flag: "always", "if truth" or
    ""."""
    words = [word.lower() for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", name)]
    looks = "if truth" if any(word.startswith(_FLAG_BEGINNINGS_OF_TRUTHS) for word in words) else ""
    looks = "always" if any(word.startswith(_FLAG_BEGINNINGS) for word in words) else looks
    return "".join(words), looks


def _truth(value: object) -> bool | None:
    value = value.item() if isinstance(value, np.generic) else value
    return bool(value) if isinstance(value, (bool, int, float)) and value in (0, 1) else None


def _checked_truth(name: str, value: object, location: str) -> bool:
    truth = _truth(value)
    if truth is None:
        raise InputError(
            f"{location}: {name!r} is neither 0 nor 1",
            value=value,
            rule="a turn is learned, or it is context only",
            fix=_FIX,
        )
    return truth


# -- columns with a value for each message --


def with_column_flags(
    row: Mapping, messages: list[dict], location: str, prompt: int = 0
) -> list[dict]:
    """Returns the messages, with `learn` set from the columns of the row that say which are learned
    (`loss_mask`, `weights`): a value for each message, or for each of the assistant's. The first
    `prompt` messages are not learned.

    Raises InputError for another number of values, and for a value that would learn a turn of
    another role or of the prompt, or contradicts the message.
    """
    messages = list(messages)
    for name, values in column_flags(row, location).items():
        where = f"{location}, column {name!r}"
        of_assistant = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        of_all = list(range(len(messages)))
        # (A column `system` stands before the messages that the values are of.)
        of_all_but_system = of_all[1:] if messages[0]["role"] == "system" else []
        candidates = (of_all, of_all_but_system, of_assistant)
        positions = next((ks for ks in candidates if len(ks) == len(values)), None)
        if positions is None:
            raise InputError(
                f"{where} has {len(values)} values for {len(messages)} messages",
                rule=f"one of each message, or of each of the {len(of_assistant)} of the assistant",
                fix=_FIX,
            )
        for k, value in zip(positions, values, strict=True):
            is_learned = None if value is None else _checked_truth(name, value, where)
            role = messages[k]["role"]
            if is_learned and role != "assistant":
                raise _role_flag_error(name, role, f"{where}, message {k}")
            if is_learned and k < prompt:
                raise prompt_flag_error(name, location)
            if is_learned and messages[k].get(LEARN) is False:
                raise InputError(f"{where} contradicts message {k}", value=value, fix=_FIX)
            if is_learned is False and role == "assistant":
                messages[k] = {**messages[k], LEARN: False}
    return messages


def column_flags(row: Mapping, location: str) -> dict[str, list]:
    """Returns the columns of a row that have a value for each message. Raises InputError for a
    column that looks like one, and for a weight of the whole row but 1."""
    flags = {}
    for name, value in row.items():
        letters, looks = _read_name(name) if isinstance(name, str) else ("", "")
        where, flag = f"{location}, column {name!r}", letters.removesuffix("s")
        of_turns = looks and letters.endswith(("turn", "turns"))
        if value is None or not (looks == "always" or of_turns or flag in _FLAGS_OF_COLUMNS):
            continue
        # NeMo's rows name the speaker whose turns are left out.
        speaker = SPEAKERS.get(value.strip().lower()) if isinstance(value, str) else ""
        if letters == "mask" and speaker in ("user", None):
            continue
        if isinstance(value, str) and value.lstrip().startswith("[") and flag in _FLAGS_OF_COLUMNS:
            value = parse_json(value, where)
        is_list = isinstance(value, (list, tuple, np.ndarray))
        if is_list and not len(value):
            continue
        is_number_list = isinstance(value, str) and re.fullmatch(r"\s*[01]([\s,;]+[01])+\s*", value)
        if is_number_list or is_list and letters.endswith(("turn", "turns", "message", "messages")):
            rule = "it looks like turns that are learned or left out"
            raise InputError(f"{where} is not understood", value=value, rule=rule, fix=_FIX)
        if is_list and flag in _FLAGS_OF_COLUMNS:
            flags[name] = list(value)
        elif letters == "mask" or is_list and all(_truth(item) is not None for item in value):
            rule = "it looks like a value for each message or token that says what is learned"
            fix = f"{_FIX}, or rename the column"
            raise InputError(f"{where} is not understood", value=value, rule=rule, fix=fix)
        elif not is_list and flag in _FLAGS_OF_COLUMNS and _is_weight(value, flag in _ROW_WEIGHTS):
            raise InputError(
                f"{where} is a weight of the whole row",
                value=value,
                rule="every row is learned with weight 1",
                fix="remove the column, and the rows of weight 0",
            )
    return flags


def _is_weight(value: object, is_row_weight: bool) -> bool:
    """Returns whether a value is a weight other than 1, also as the text of a table. Without
    `is_row_weight` only 0 counts."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return False
    except OverflowError:  # a whole number may be too large for a float: JSON has no limit
        number = float("inf")
    return number != 1 if is_row_weight else _truth(value) is False


def require_no_column_flags(row: Mapping, location: str) -> None:
    """Raises InputError if a row that is no conversation has a column that says which messages
    are learned."""
    for name, value in column_flags(row, location).items():
        raise InputError(
            f"{location}, column {name!r} has a value for each message",
            value=value,
            rule="they are read of a demonstration of messages",
            fix=f"{_FIX}, or remove the column",
        )


_SHORT = 16  # characters of a text that may stand in a prompt by chance
# Columns with reasoning of the model, by the letters of their names: of the completion, or of one
# of a pair (chosen_reasoning, thinking_rejected).
_REASONING_COLUMN = re.compile(
    "(chosen|rejected|completion|response|answer)?"
    f"({'|'.join(name.replace('_', '') for name in REASONING)})(chosen|rejected)?"
)


def require_no_other_reasoning(row: Mapping, record: Mapping, location: str) -> None:
    """Raises InputError if a column of the row holds reasoning that its record has not: the answer
    would be learned without it. "on" or true, which say that the model shall think, are no
    reasoning."""
    columns = {
        name: [text for text in texts_in(value) if text.strip().lower() not in (*_TRUTHS, "")]
        for name, value in row.items()
        if isinstance(name, str) and _REASONING_COLUMN.fullmatch(_read_name(name)[0])
    }
    if not any(columns.values()):
        return
    learned, read = _record_texts(record)
    for name, texts in columns.items():
        missing = next((text for text in texts if not _is_in_record(text, learned, read)), None)
        if missing is not None:
            raise InputError(
                f"{location}, column {name!r} is not learned",
                value=missing,
                rule="reasoning is learned as a part of the turn that it belongs to",
                fix="write it into the completion, or into the message of the assistant as its"
                f" {REASONING[0]!r}; remove or rename the column if the model shall not learn it",
            )


def _record_texts(record: Mapping) -> tuple[str, str]:
    """Returns (the texts of a record that are learned, the others), without white space."""
    learned, read = [], []
    for name, value in record.items():
        if name in ("tools", "variables"):
            continue
        for part in value if isinstance(value, list) else [value]:
            message = isinstance(part, Mapping)
            is_read = name == "prompt" or message and part["role"] != "assistant"
            texts = {n: v for n, v in part.items() if n != "role"} if message else part
            (read if is_read else learned).extend(texts_in(texts))
    learned, read = ("\0".join("".join(t.split()) for t in texts) for texts in (learned, read))
    return learned, read


def _is_in_record(text: str, learned: str, read: str) -> bool:
    """Returns whether a text stands in a record; a short one, in the texts that are learned."""
    text = "".join(text.split())
    return text in learned or len(text) >= _SHORT and text in read


def prompt_flag_error(name: str, location: str) -> InputError:
    """Returns the error for a key or column `name` that asks to learn a turn of a prompt."""
    return InputError(
        f"{location}: {name!r} asks to learn a turn of the prompt",
        rule="of a row with a prompt and a completion the completion is learned",
        fix="write the whole conversation as 'messages'",
    )


def _role_flag_error(name: str, role: str, location: str) -> InputError:
    return InputError(
        f"{location}: {name!r} asks to learn a turn of {role!r}",
        rule="what the assistant says is learned, and nothing else",
        fix="set it to 0 there, or remove it",
    )
