"""Checks that a chat template writes what a row's messages say.

A template may leave out a role that it does not know, reasoning, calls or tools, and says nothing.
Here the rendered text is compared with the messages, for every kind of data and for the server.
White space does not count, and a template may write a text as JSON or as HTML.
"""

import html
import json
import re
import weakref
from collections.abc import Mapping, Sequence

from rljax.data.text.messages import REASONING
from rljax.errors import InputError
from rljax.files import parse_json
from rljax.reasoning import MARKS

_SHORT = 16  # characters, of a text that may stand in a template by chance
_COMMON = ("system", "user", "assistant", "tool")
_INSTRUCTING, _ANSWERING = ("system", "developer"), ("assistant", "tool")
_PARTS = re.compile(r"\w+")  # of a text in which a name may stand
_WORDS = re.compile(r"\w+(?:[-.]\w+)++")
_SHOWN = 60  # characters of a text in an error
_FINISHED = {"add_generation_prompt": False}


def split_reasoning(message: Mapping) -> tuple[str, str]:
    """Returns (the reasoning of an assistant's message, the rest of its content). Reasoning stands
    under its own key, or between tags at the beginning of the content. A closing tag alone ends
    reasoning, too: the generation prompt may have opened it."""
    content = message.get("content")
    content = content if isinstance(content, str) else ""
    texts = (message[n] for n in REASONING if isinstance(message.get(n), str))
    field_reasoning = next(filter(str.strip, texts), "")
    for opening, closing in MARKS:
        before, mark, answer = content.partition(closing)
        tagged = before.lstrip().removeprefix(opening)
        if mark and opening not in tagged and closing not in answer:
            reasonings = (field_reasoning.strip(), tagged.strip())
            return "\n".join(filter(None, reasonings)), answer.lstrip("\n")
    return field_reasoning.strip(), content


def without_reasoning(message: Mapping, answer: str) -> dict:
    """Returns the message with this content and no reasoning."""
    return {**{n: v for n, v in message.items() if n not in REASONING}, "content": answer}


def check_conversation(
    tokenizer,
    messages: Sequence[Mapping],
    text: str,
    options: Mapping,
    *,
    needs_tools: bool = True,
    **render_arguments: bool,
) -> None:
    """Raises InputError for a message that the rendered `text` leaves out, or does not write
    whole; and with `needs_tools` for tools that it does not name. `options` and
    `render_arguments` are those of the rendering.

    Earlier reasoning of the assistant is not compared: templates leave it out of a history. Nor
    is what it said beside a call, where the template writes that until more follows (gpt-oss).
    """
    squeezed = _squeezed(text)
    for number, message in enumerate(messages):
        answer = split_reasoning(message)[1] if message["role"] == "assistant" else None
        for key, piece in _message_texts(tokenizer, message, answer):
            if _occurs_in(piece, squeezed) or _is_dropped_later(
                tokenizer, messages, number, key, options
            ):
                continue
            raise _left_out_error(number, message, key, piece)
    for number, key in _dropped_parts(tokenizer, messages, options, render_arguments) or ():
        if key == "tools" and not needs_tools:
            continue
        if key != "tools" and _is_dropped_later(tokenizer, messages, number, key, options):
            continue
        if key != "tools":
            raise _left_out_error(number, messages[number], key, str(messages[number].get(key)))
        raise InputError(
            "the chat template writes nothing of the tools",
            value=unwritten_tools(tokenizer, messages, options, **render_arguments),
            rule="the model would call what it was never told of",
            fix="use a chat template that knows tools, or remove the tools of the row",
        )


def unwritten_tools(
    tokenizer, messages: Sequence[Mapping], options: Mapping, **render_arguments: bool
) -> list[str]:
    """Returns the names of the tools of `options` of which the chat template writes nothing.
    `options` and `render_arguments` are those of the rendering."""
    tools = options.get("tools") or ()
    marks = [f"{_PROBED_TOOL}_{k}_" for k in range(len(tools))]
    probed = [renamed(tool, mark) for tool, mark in zip(tools, marks, strict=True)]
    text = tokenizer.render_chat(
        messages, **render_arguments, **{**options, "tools": probed or None}
    )
    pairs = zip(tools, marks, strict=True)
    return [str(_function(tool).get("name")) for tool, mark in pairs if mark not in text]


def untold_tools(
    tokenizer, messages: Sequence[Mapping], options: Mapping, **render_arguments: bool
) -> list[str]:
    """Returns the names of the tools of `options` of which neither the template nor a message
    tells the model. A system message tells of a tool by its name. A question may have that word by
    chance: it tells of a tool by its name and those of its parameters."""
    system, others = set(), set()
    for message in messages:
        words = system if message["role"] in _INSTRUCTING else others
        if message["role"] not in _ANSWERING:
            for text in _pieces(tokenizer, message.get("content")):
                words.update(_WORDS.findall(text), _PARTS.findall(text))

    def is_described(tool: Mapping) -> bool:
        function = _function(tool)
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        names = {str(function.get("name"))}
        all_names = names | set(properties if isinstance(properties, Mapping) else ())
        return names <= system or all_names <= system | others

    missing = [tool for tool in options.get("tools") or () if not is_described(tool)]
    return missing and unwritten_tools(
        tokenizer, messages, {**options, "tools": missing}, **render_arguments
    )


def check_turn_prompt(
    tokenizer, messages: Sequence[Mapping], prompt: str, options: Mapping
) -> None:
    """Raises InputError where the `prompt` of the last message leaves out a text of the others, or
    the template leaves out a text of the last one. It is for a turn that is read behind its own
    prompt, as the template renders the history otherwise once the turn is there."""
    last = len(messages) - 1
    check_conversation(tokenizer, messages[:last], prompt, options)
    for number, key in _dropped_parts(tokenizer, messages, options, _FINISHED) or ():
        if number == last:
            raise _left_out_error(last, messages[last], key, str(messages[last].get(key)))


def _is_dropped_later(tokenizer, messages, number: int, key: str, options: Mapping) -> bool:
    """Returns whether the assistant said this beside a call, and the template leaves it out only
    because more messages follow."""
    message = messages[number]
    if key != "content" or message["role"] != "assistant" or not message.get("tool_calls"):
        return False
    through = messages[: number + 1]
    if len(through) == len(messages):
        return False
    dropped = _dropped_parts(tokenizer, through, options, _FINISHED)
    return dropped is not None and (number, key) not in dropped


def check_messages(tokenizer, messages: Sequence[Mapping], text: str) -> None:
    """Raises InputError for a message that `text`, which the messages add to a conversation, leaves
    out, or does not write whole."""
    squeezed = _squeezed(text)
    for number, message in enumerate(messages):
        for key, piece in _message_texts(tokenizer, message, None):
            if not _occurs_in(piece, squeezed):
                raise _left_out_error(number, message, key, piece)


def check_turn(tokenizer, number: int, message: Mapping, written: str) -> None:
    """Raises InputError if `written`, the learned text of a message, lacks its reasoning,
    content or calls."""
    reasoning, answer = split_reasoning(message)
    squeezed, squeezed_reasoning = _squeezed(written), _squeezed(reasoning)
    for key, piece in [("reasoning", reasoning), *_message_texts(tokenizer, message, answer)]:
        if not _occurs_in(piece, squeezed):
            raise _left_out_error(number, message, key, piece)
    # The answer, or a call, may repeat the text of the reasoning.
    others = "".join(_squeezed(piece) for _, piece in _message_texts(tokenizer, message, answer))
    count = squeezed.count(squeezed_reasoning) if squeezed_reasoning else 0
    if 0 < count <= others.count(squeezed_reasoning):
        raise _left_out_error(number, message, "reasoning", reasoning)


def _left_out_error(number: int, message: Mapping, key: str, piece: str) -> InputError:
    role = message["role"]
    fixes = {
        "reasoning": "use a template that writes reasoning (or its variable, for instance"
        " data.template_variables=('enable_thinking=true',)), write it into the content, or remove"
        " it from the row",
        "tool_calls": "use a template that writes calls, or write the call into the content",
    }
    fix = fixes.get(key, "use a template that writes it, or remove it from the row")
    if role == "system":
        fix = "write it into a message of the user, use a template that writes it, or remove it"
    if role not in _COMMON:
        fix = f"rename the role {role!r} to one that the template knows, such as 'system' or 'user'"
    return InputError(
        f"the chat template leaves out the {key} of message {number}, of role {role!r}",
        value=piece[:_SHOWN],
        rule="what a row says is what is read and learned",
        fix=fix,
    )


def _message_texts(tokenizer, message: Mapping, answer: str | None) -> list[tuple[str, str]]:
    """Returns (key, text) for each text of a message beside its reasoning. `answer`, if it is not
    None, stands in for the content."""
    pieces = _pieces(tokenizer, message.get("content") if answer is None else answer)
    texts = [("content", piece) for piece in pieces]
    for call in message.get("tool_calls") or ():
        function = _function(call)
        texts += [("tool_calls", text) for text in (function.get("name"), *_texts(function))]
    return [(key, text) for key, text in texts if isinstance(text, str) and text.strip()]


def _pieces(tokenizer, content: object) -> list[str]:
    """Returns the texts of a content, in its order; "" for parts that have none. The mark of an
    image divides a text."""
    if isinstance(content, str):
        return content.split(tokenizer.image_mark) if tokenizer.image_mark else [content]
    parts = content if isinstance(content, (list, tuple)) else ()
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    return [text if isinstance(text, str) else "" for text in texts]


def _with_pieces(tokenizer, content: object, pieces: Sequence[str]) -> object:
    """Returns the content with other texts."""
    if isinstance(content, str):
        return tokenizer.image_mark.join(pieces)
    return [
        {**part, "text": piece} if piece.strip() else part
        for part, piece in zip(content, pieces, strict=True)
    ]


def _function(value: object) -> Mapping:
    inner = value.get("function") if isinstance(value, Mapping) else None
    return inner if isinstance(inner, Mapping) else value if isinstance(value, Mapping) else {}


def _texts(function: Mapping) -> list[str]:
    """Returns the texts among a call's arguments."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments, "arguments")
        except InputError:
            return [arguments]
    return texts_in(arguments)


def texts_in(value: object) -> list[str]:
    """Returns the texts in a value of JSON: itself, or those within its lists and objects."""
    texts, pending = [], [value]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, Mapping):
            pending += value.values()
        elif isinstance(value, (list, tuple)):
            pending += value
    return texts


def _occurs_in(piece: str, squeezed: str) -> bool:
    """Returns whether a text stands in another one, which is squeezed already: as it is, or written
    as HTML, JSON or a Python string."""
    squeezed_piece = _squeezed(piece)
    if not squeezed_piece or squeezed_piece in squeezed:
        return True
    if squeezed_piece in _squeezed(html.unescape(squeezed)):
        return True
    json_texts = (json.dumps(piece, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True))
    nested_json = json.dumps(json.dumps(piece, ensure_ascii=False), ensure_ascii=False)[3:-3]
    return any(
        _squeezed(form.replace("\\n", "\n").replace("\\t", "\t").replace("\\r", "\r"))
        in squeezed.replace("\\n", "").replace("\\t", "").replace("\\r", "")
        for form in (*json_texts, nested_json, repr(piece)[1:-1], piece.replace("'", "\\'"))
    )


def _squeezed(text: str) -> str:
    return "".join(text.split())


# -- parts of messages that a template drops whatever their text is --

_DroppedParts = tuple[tuple[int, str], ...]
# Of each tokenizer, by the shape of a conversation. A tokenizer takes its verdicts with it.
_PROBES: weakref.WeakKeyDictionary[object, dict[tuple, _DroppedParts | None]] = (
    weakref.WeakKeyDictionary()
)
_MOST_PROBES = 1_000
_PROBED_TOOL = "rljax_probed_tool"


def _dropped_parts(
    tokenizer, messages, options: Mapping, render_arguments: Mapping
) -> _DroppedParts | None:
    """Returns (number of the message, key) of each part that the template leaves out whatever its
    text is; None where the template cannot be probed. It is probed only where a text may stand in
    the rendering by chance (a short text, a name of a call or tool), or where a role is uncommon.
    """
    pieces = [_pieces(tokenizer, message.get("content")) for message in messages]
    calls = [len(message.get("tool_calls") or ()) for message in messages]
    tools = bool(options.get("tools"))
    may_occur_by_chance = any(
        piece.strip() and (message["role"] not in _COMMON or len(piece.strip()) < _SHORT)
        for message, texts in zip(messages, pieces, strict=True)
        for piece in texts
    )
    if not (may_occur_by_chance or tools or any(calls)):
        return None
    content_shapes = [
        (isinstance(message.get("content"), str), *(bool(piece.strip()) for piece in texts))
        for message, texts in zip(messages, pieces, strict=True)
    ]
    fields = [frozenset(n for n, v in message.items() if v is not None) for message in messages]
    shape = tuple(
        zip((message["role"] for message in messages), content_shapes, calls, fields, strict=True)
    )
    variables = json.dumps(options.get("variables"), default=str)
    counts = tuple(len(options.get(name) or ()) for name in ("tools", "documents"))
    key = (shape, variables, counts, tuple(render_arguments.items()))
    verdicts = _PROBES.setdefault(tokenizer, {})
    if key in verdicts:
        return verdicts[key]
    if len(verdicts) >= _MOST_PROBES:
        verdicts.clear()
    verdicts[key] = dropped = _find_dropped_parts(
        tokenizer, messages, pieces, calls, options, render_arguments
    )
    return dropped


def _find_dropped_parts(
    tokenizer, messages, pieces, calls, options, render_arguments
) -> _DroppedParts | None:
    probed, marks = [], {}  # mark -> (message, key) for which it stands
    for number, message in enumerate(messages):
        message = dict(message)
        if any(map(str.strip, pieces[number])):
            marked = [
                f"RLJAX-SAID-{number}-{k}-" if piece.strip() else piece
                for k, piece in enumerate(pieces[number])
            ]
            marks |= {mark: (number, "content") for mark in marked if mark.strip()}
            message["content"] = _with_pieces(tokenizer, message["content"], marked)
        if calls[number]:
            mark_name = f"rljax_called_{number}_"
            marks[mark_name] = (number, "tool_calls")
            message["tool_calls"] = [renamed(call, mark_name) for call in message["tool_calls"]]
        probed.append(message)
    if options.get("tools"):
        names = [f"{_PROBED_TOOL}_{k}_" for k in range(len(options["tools"]))]
        marks |= {mark_name: (len(messages) + k, "tools") for k, mark_name in enumerate(names)}
        tools = zip(options["tools"], names, strict=True)
        options = {**options, "tools": [renamed(tool, mark_name) for tool, mark_name in tools]}
    try:
        text = tokenizer.render_chat(probed, **render_arguments, **options)
    except InputError:  # a template that reads contents; the texts themselves are compared
        return None
    return tuple(dict.fromkeys(mark_name for mark, mark_name in marks.items() if mark not in text))


def renamed(value: object, name: str) -> object:
    """Returns a call, or a tool, with another name."""
    if not isinstance(value, Mapping):
        return value
    if isinstance(value.get("function"), Mapping):
        return {**value, "function": {**value["function"], "name": name}}
    return {**value, "name": name}
