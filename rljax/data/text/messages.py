"""Chat messages: what a conversation may hold, and what of it a template sees.

A message is `{"role": str, "content": str}`; other keys (tool_calls, name, reasoning_content, ...)
reach the template. Rendering is in `template`, tokens and masks are in `chat`. No arrays here.
"""

import json
from collections.abc import Mapping, Sequence

import numpy as np

from rljax.errors import InputError

LEARN = "learn"  # a key of an assistant's message; False: it is read only
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field, the usual first


def validate_messages(messages: object, *, where: str = "chat messages") -> list[dict]:
    """The messages with every content as one string; raises InputError that names the message.

    A turn that only calls tools has no content: its key is left out where it is None.
    """
    checked = []
    for message, text in _checked(messages, where):
        rest = {name: value for name, value in message.items() if name != "content"}
        checked.append(dict(rest) if text is None else {**message, "content": text})
    return checked


def check_unicode(text: str, place: str) -> None:
    """Raises InputError where `text` holds half a surrogate pair: no tokenizer can encode it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{place} has half a surrogate pair at character {error.start}",
            value=text[error.start : error.start + 8],
            rule="text must be valid Unicode",
            fix="write the character as one \\U code point or remove it",
        ) from None


def template_view(messages: object) -> list[dict]:
    """The messages as a template sees them: plain values, no key that is None, parts as they are.

    Templates ask whether a key is there (`message.tool_calls is defined`), while APIs and parquet
    write None for what is absent. A message's reasoning is given under each of its usual names.
    """
    views = []
    for message, _ in _checked(messages, "chat messages", images=True):
        view = {
            name: plain(value)
            for name, value in message.items()
            if value is not None and name != LEARN
        }
        reasoning = next((view[name] for name in REASONING if name in view), None)
        if reasoning is not None:
            view = {"thinking": reasoning, **view, "reasoning_content": reasoning}
        views.append(view)
    return views


def joined_parts(view: Sequence[Mapping]) -> list[dict]:
    """The messages with every list of text parts as one string. Raises InputError for an image: a
    template that reads no lists writes none."""
    parts = [p for m in view if isinstance(m.get("content"), (list, tuple)) for p in m["content"]]
    if any(part["type"] != "text" for part in parts):
        raise InputError(
            "the chat template writes no images",
            rule="it does not read a list of parts", fix="use the template of a model with images",
        )  # fmt: skip
    return [
        {**message, "content": "".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), (list, tuple))
        else dict(message)
        for message in view
    ]


def with_texts(view: Sequence[Mapping]) -> list[dict]:
    """The messages with a content for every turn that calls tools, and the arguments of its calls
    as JSON text."""
    return [
        {
            "content": "",
            **message,
            "tool_calls": [_text_arguments(call) for call in message["tool_calls"]],
        }
        if isinstance(message.get("tool_calls"), list)
        else dict(message)
        for message in view
    ]


def _text_arguments(call: object) -> object:
    """A call, or the function in it, with arguments as text where they are an object."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _text_arguments(call["function"])}
    if not isinstance(call.get("arguments"), Mapping):
        return call
    return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}


def validate_objects(values: object, what: str) -> list | None:
    """A list of JSON objects (tools, documents) as plain values; None stays None."""
    if values is None:
        return None
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, Mapping) for v in values):
        raise InputError(
            f"{what} are not a list of objects",
            value=values,
            rule="each is a JSON object",
            fix='write a list, for instance [{"type": "function", "function": {...}}]',
        )
    return plain(values)


def plain(value: object) -> object:
    """The value out of JSON's own types: a template must not reach an object's methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # of a class of its own, as an enum is
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {plain(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    return f"<{type(value).__name__}>"


def _checked(
    messages: object, where: str, images: bool = False
) -> list[tuple[Mapping, str | None]]:
    """Every message with its text, which is None where a turn only calls tools. `images`: parts
    {"type": "image"} are no text, and no error."""
    fix = 'write [{"role": "user", "content": "..."}, ...]'
    if not isinstance(messages, (list, tuple)):
        raise InputError(f"{where}: not a list of messages", value=messages, fix=fix)
    if not messages:
        raise InputError(f"{where}: the list of messages is empty", fix=fix)
    messages_out = []
    for number, message in enumerate(messages):
        place = f"{where}: message {number}"
        if not isinstance(message, Mapping):
            raise InputError(f"{place} is not an object", value=message, fix=fix)
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise InputError(f"{place}: 'role' must be a text", value=role, fix=fix)
        text = _content(message, place, images)
        check_unicode(text or "", f"{place}: 'content'")
        messages_out.append((message, text))
    return messages_out


def _content(message: Mapping, place: str, images: bool) -> str | None:
    """A message's content as one string; text parts are joined."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message.get("tool_calls"):
        return None
    fix = 'write text, or [{"type": "text", "text": "..."}]'
    if not isinstance(content, (list, tuple)):
        raise InputError(f"{place}: 'content' is missing or not text", value=content, fix=fix)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if images and kind == "image":
            continue
        text = part.get("text") if kind == "text" else None
        if not isinstance(text, str):
            raise InputError(f"{place}: 'content' has a part that is not text", value=part, fix=fix)
        texts.append(text)
    return "".join(texts)
