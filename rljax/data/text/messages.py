"""Chat messages: the values that a conversation may hold, and the form that a template sees.

A message is `{"role": str, "content": str}`; other keys (tool_calls, name, reasoning_content, ...)
reach the template. Roles and calls have one form, whoever wrote them: `for_template`. Rendering is
in `template`, tokens and masks are in `chat`, the keys of rows in rljax.data.rows.
"""

import json
from collections.abc import Mapping, Sequence

import numpy as np

from rljax.errors import InputError
from rljax.files import require_shallow

REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field, the usual first
LEARN = "learn"  # the key of a turn of the assistant that is context only: False; else it is absent
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
NOT_ASKING = ("system", "developer", "assistant")  # no turn of the assistant answers these roles
ARGUMENTS = ("arguments", "parameters", "args", "input")  # of a call, the usual name first
_SCHEMAS = ("parameters", "input_schema", "inputSchema")  # of a tool, the usual name first
# Other names of the roles: ShareGPT's and its kin's.
SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "observation": "tool",
} | {role: role for role in ROLES}


def validate_messages(messages: object, *, where: str = "chat messages") -> list[dict]:
    """Returns the messages with every content as one string; raises InputError that names the
    message.

    A turn that only calls tools has no content: its key is left out where it is None.
    """
    checked = []
    for message, text in _checked_messages(messages, where):
        fields = {name: value for name, value in message.items() if name != "content"}
        checked.append(dict(fields) if text is None else {**message, "content": text})
    return checked


def role_of(value: object, location: str) -> str:
    """Returns the role that a message names, in lower case and by its usual name. Raises
    InputError for an unknown role."""
    if not isinstance(value, str) or not value:
        raise InputError(
            f"{location}: 'role' must be a text",
            value=value,
            fix='write [{"role": "user", "content": "..."}, ...]',
        )
    role = SPEAKERS.get(value.strip().lower())
    if role is None:
        raise InputError(
            f"{location} has an unknown role",
            value=value,
            rule=f"a role is one of {', '.join(ROLES)}",
            fix="rename it",
        )
    return role


def check_unicode(text: str, location: str) -> None:
    """Raises InputError where `text` holds half a surrogate pair: no tokenizer can encode it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{location} has half a surrogate pair at character {error.start}",
            value=text[error.start : error.start + 8],
            rule="text must be valid Unicode",
            fix="write the character as one \\U code point or remove it",
        ) from None


def for_template(messages: object, where: str = "chat messages") -> object:
    """Returns the messages with their calls in the one form that is learned, sampled on and served:
    arguments are objects, where OpenAI's API has JSON texts; its older `function_call` is a call of
    `tool_calls`; a tool's answer has the name of its call; and no list of calls is empty. A value
    that is no message stays, for `validate_messages` to refuse. Raises InputError for arguments
    that are no JSON object, and for a field that has two values under two of its names."""
    if not isinstance(messages, (list, tuple)):
        return messages
    call_names, converted, has_older_calls = {}, [], False
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            converted.append(message)
            continue
        location = f"{where}: message {number}"
        if message.get("function_call"):
            has_older_calls = True
            message = _with_older_call(message, location)
        _require_one_reasoning(message, location)
        if isinstance(message.get("content"), (list, tuple)):
            message = _with_usual_parts(message, location)
        if "tool_calls" in message:
            calls = _calls(message["tool_calls"], location)
            message = {
                n: calls if n == "tool_calls" else v
                for n, v in message.items()
                if calls or n != "tool_calls"
            }
            call_names |= {
                call["id"]: call.get("function", call)["name"]
                for call in calls
                if isinstance(call.get("id"), str)
            }
        role = SPEAKERS.get(str(message.get("role")).lower())
        if has_older_calls and role == "function":
            message, role = {**message, "role": "tool"}, "tool"
        if role == "tool" and message.get("name") is None:
            call_name = call_names.get(str(message.get("tool_call_id")))
            message = {**message, "name": call_name} if call_name else message
        converted.append(message)
    return converted


def _require_one_reasoning(message: Mapping, location: str) -> None:
    """Raises InputError for a message with reasonings that differ: a template gets one of them."""
    texts = {name: message[name] for name in REASONING if isinstance(message.get(name), str)}
    if len({text.strip() for text in texts.values()} - {""}) > 1:
        raise InputError(
            f"{location} has reasonings that differ in {' and '.join(map(repr, texts))}",
            value=texts,
            rule="these are names of one field: a turn has one reasoning",
            fix="remove all but one of them",
        )


def _with_usual_parts(message: Mapping, location: str) -> dict:
    """Returns the message with OpenAI's input_text and output_text as parts of text, and Mistral's
    parts of thinking as its reasoning. Raises InputError for thinking that is not the reasoning
    before an answer: it would stand elsewhere, or be left out."""
    parts, reasonings = [], []
    for part in message["content"]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("input_text", "output_text"):
            part = {"type": "text", "text": part.get("text")}
        if kind != "thinking":
            parts.append(part)
            continue
        reasoning = _thinking_text(part.get("thinking"), location)
        follows_text = any(
            not isinstance(p, Mapping) or str(p.get("text", "_")).strip() for p in parts
        )
        role = SPEAKERS.get(str(message.get("role")).strip().lower())
        if reasoning.strip() and (follows_text or role != "assistant"):
            raise InputError(
                f"{location}: 'content' has a part of thinking "
                + ("behind another part" if role == "assistant" else f"in the role {role!r}"),
                value=reasoning,
                rule="such a part is the reasoning of the assistant, before its answer",
                fix="write it as text, in the marks of the model's template",
            )
        reasonings.append(reasoning)
    converted, reasoning = {**message, "content": parts}, "".join(reasonings)
    fields = [message[n] for n in REASONING if isinstance(message.get(n), str)]
    other = next((text for text in fields if text.strip() not in ("", reasoning.strip())), None)
    if reasoning.strip() and other is not None:
        raise InputError(
            f"{location} has parts of thinking and another reasoning",
            value=(reasoning, other),
            rule="a turn has one reasoning",
            fix="remove one of them",
        )
    return converted | {REASONING[0]: reasoning} if reasoning else converted


def _thinking_text(value: object, location: str) -> str:
    """Returns the text of a part of thinking, which may be a list of parts of text."""
    parts = value if isinstance(value, (list, tuple)) else [{"type": "text", "text": value or ""}]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise InputError(
            f"{location}: 'content' has a part of thinking that is not text",
            value=value,
            fix='write {"type": "thinking", "thinking": "..."}',
        )
    return "".join(texts)


def _with_older_call(message: Mapping, location: str) -> dict:
    if message.get("tool_calls"):
        raise InputError(
            f"{location} has 'function_call' and 'tool_calls'",
            rule="the first is the older form of the second",
            fix="write 'tool_calls' alone",
        )
    call = {"type": "function", "function": message["function_call"]}
    fields = {n: v for n, v in message.items() if n not in ("function_call", "tool_calls")}
    return {**fields, "tool_calls": [call]}


def _calls(calls: object, location: str) -> list[dict]:
    """Returns the calls of a message, their arguments as objects."""
    if calls is None:
        return []
    if not isinstance(calls, (list, tuple)):
        raise InputError(
            f"{location}: 'tool_calls' is not a list",
            value=calls,
            fix='write [{"type": "function", "function": {"name": ..., "arguments": {...}}}]',
        )
    return [_call(call, f"{location}, call {number}") for number, call in enumerate(calls)]


def _call(call: object, location: str) -> dict:
    """Returns a call with its arguments as an object, and in {"type", "function"}, where templates
    look for it. ShareGPT's, APIGen's and Hermes' data sets write the function alone."""
    nested = call.get("function") if isinstance(call, Mapping) else None
    if nested is not None:
        return {**call, "function": _function(nested, location)}
    function = _function(call, location)
    call_fields = {name: function.pop(name) for name in ("id", "type", "index") if name in function}
    return {**call_fields, "type": "function", "function": function}


def _function(call: object, location: str) -> dict:
    """Returns the function of a call with its name and its arguments as an object."""
    name = call.get("name") if isinstance(call, Mapping) else None
    if not isinstance(name, str) or not name:
        raise InputError(
            f"{location} names no function",
            value=call,
            fix='write {"type": "function", "function": {"name": ..., "arguments": {...}}}',
        )
    values = {n: call[n] for n in ARGUMENTS if call.get(n) is not None}
    filled = {n: value for n, value in values.items() if value not in ("", {})}
    key = next(iter(filled or values), "arguments")
    if any(value != filled[key] for value in filled.values()):
        raise InputError(
            f"{location} of {name!r} has arguments that differ in"
            f" {' and '.join(map(repr, filled))}",
            value=filled,
            rule="these are names of one field",
            fix="write 'arguments' alone",
        )
    arguments = _arguments(call.get(key), f"{location} of {name!r}")
    if arguments is call.get("arguments"):
        return dict(call)
    # The name first, whatever the order was: some templates write the object as it is.
    other_fields = {
        n: v for n, v in call.items() if n not in ("name", "arguments", key) and v is not None
    }
    return {"name": name, "arguments": arguments, **other_fields}


def _arguments(value: object, location: str) -> Mapping:
    """Returns the arguments of a call as an object. `value` is the object or its JSON text; None
    and an empty text stand for no arguments."""
    if isinstance(value, Mapping):
        return value
    rule, arguments = "they are an object, or the JSON text of one", value
    if isinstance(value, str):
        try:
            text = value if value.strip() else "{}"
            arguments = json.loads(text, strict=False, parse_constant=_no_constant)
            check_unicode(json.dumps(arguments, ensure_ascii=False), location)
        except InputError:
            raise
        except (ValueError, RecursionError) as error:
            rule = f"{rule}: {error}"
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise InputError(
            f"{location}: its arguments are no JSON object",
            value=value,
            rule=rule,
            fix="write them as json.dumps does, or remove the call",
        )
    require_shallow(arguments, location)
    return arguments


def _no_constant(name: str):
    raise ValueError(f"{name} is no JSON")


def template_view(messages: object) -> list[dict]:
    """Returns the messages as a template sees them: plain values, no key that is None, parts as
    they are, calls as `for_template` makes them, and without the key `learn`.

    Templates ask whether a key is there (`message.tool_calls is defined`), while APIs and parquet
    write None for what is absent. A message's reasoning is given under each of its usual names.
    """
    views = []
    for message, _ in _checked_messages(for_template(messages), "chat messages", images=True):
        view = {
            n: to_plain(value) for n, value in message.items() if value is not None and n != LEARN
        }
        if view.get("content") == []:
            view["content"] = ""
        reasonings = [view.pop(name) for name in REASONING if name in view]
        # The first that says any, else the first.
        reasoning = next(filter(None, reasonings), next(iter(reasonings), None))
        if reasoning is not None:
            view |= {"thinking": reasoning, "reasoning_content": reasoning}
        views.append(view)
    return views


def with_text_arguments(view: Sequence[Mapping]) -> list[dict]:
    """Returns the messages with a content for every turn that calls tools, and the arguments of its
    calls as JSON text."""
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
    """Returns a call, or the function in it, with arguments as text where they are an object."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _text_arguments(call["function"])}
    if not isinstance(call.get("arguments"), Mapping):
        return call
    return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}


def validate_objects(values: object, name: str) -> list | None:
    """Returns a list of JSON objects (tools, documents) as plain values; None stays None. Raises
    InputError for anything else, which calls the values by `name`."""
    if values is None:
        return None
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, Mapping) for v in values):
        raise InputError(
            f"{name} are not a list of objects",
            value=values,
            rule="each is a JSON object",
            fix='write a list, for instance [{"type": "function", "function": {...}}]',
        )
    return to_plain(values)


def tools_in_one_form(values: object, name: str) -> list | None:
    """Returns tools as plain values, each function in {"type", "function"}, where templates look
    for it: data sets publish the functions alone, OpenAI's newer API and Anthropic's ask for them
    so, and MCP calls their parameters `inputSchema`. Raises InputError as `validate_objects`."""
    tools = validate_objects(values, name)
    return tools and [_tool(tool) for tool in tools]


def _tool(tool: dict) -> dict:
    is_function = tool.get("type") in (None, "function") and isinstance(tool.get("name"), str)
    if not is_function or tool.get("function") is not None:
        return tool
    schema = next((n for n in _SCHEMAS if tool.get(n) is not None), "parameters")
    names = {schema: "parameters"}
    hidden = ("type", "function", *(n for n in _SCHEMAS if n != schema))
    function = {names.get(n, n): value for n, value in tool.items() if n not in hidden}
    return {"type": "function", "function": function}


def to_plain(value: object) -> object:
    """Returns the value made of JSON's own types alone: a template must not reach an object's
    methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # of a class of its own, as an enum is
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {to_plain(name): to_plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, np.generic):
        return to_plain(value.item())
    return f"<{type(value).__name__}>"


def _checked_messages(
    messages: object, where: str, images: bool = False
) -> list[tuple[Mapping, str | None]]:
    """Returns every message with its text, which is None where a turn only calls tools. With
    `images`, parts {"type": "image"} are no text, and no error."""
    fix = 'write [{"role": "user", "content": "..."}, ...]'
    if not isinstance(messages, (list, tuple)):
        raise InputError(f"{where}: not a list of messages", value=messages, fix=fix)
    if not messages:
        raise InputError(f"{where}: the list of messages is empty", fix=fix)
    checked = []
    for number, message in enumerate(messages):
        location = f"{where}: message {number}"
        if not isinstance(message, Mapping):
            raise InputError(f"{location} is not an object", value=message, fix=fix)
        role = role_of(message.get("role"), location)
        message = message if message["role"] == role else {**message, "role": role}
        text = _content(message, location, images)
        check_unicode(text or "", f"{location}: 'content'")
        checked.append((message, text))
    return checked


def _content(message: Mapping, location: str, images: bool) -> str | None:
    """Returns a message's content as one string; text parts are joined."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message.get("tool_calls"):
        return None
    fix = 'write text, or [{"type": "text", "text": "..."}]'
    if not isinstance(content, (list, tuple)):
        raise InputError(f"{location}: 'content' is missing or not text", value=content, fix=fix)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if images and kind == "image":
            continue
        text = part.get("text") if kind == "text" else None
        if not isinstance(text, str):
            raise InputError(
                f"{location}: 'content' has a part that is not text", value=part, fix=fix
            )
        texts.append(text)
    return "".join(texts)
