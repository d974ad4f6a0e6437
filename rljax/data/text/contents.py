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
    """(the reasoning of an assistant's message, the rest of its content). Reasoning stands under
    its own key, or between tags at the beginning of the content. A closing tag alone ends
    reasoning, too: the generation prompt may have opened it."""
    content = message.get("content")
    content = content if isinstance(content, str) else ""
    given = (message[n] for n in REASONING if isinstance(message.get(n), str))
    own = next(filter(str.strip, given), "")
    for opening, closing in MARKS:
        before, mark, answer = content.partition(closing)
        begun = before.lstrip().removeprefix(opening)
        if mark and opening not in begun and closing not in answer:
            inside = begun.strip()
            return "\n".join(filter(None, (own.strip(), inside))), answer.lstrip("\n")
    return own.strip(), content


def without_reasoning(message: Mapping, answer: str) -> dict:
    """The message with this content and no reasoning."""
    return {**{n: v for n, v in message.items() if n not in REASONING}, "content": answer}


def check_conversation(
    tokenizer,
    messages: Sequence[Mapping],
    text: str,
    options: Mapping,
    *,
    needs_tools: bool = True,
    **how: bool,
) -> None:
    """Raises InputError for a message of which the rendered `text` says nothing, or not all; and
    with `needs_tools` for tools that it does not name. `how` and `options` are those of the
    rendering.

    What the assistant reasoned before is no part of this: templates leave it out of a history. Nor
    is what it said beside a call, where the template writes that until more follows (gpt-oss).
    """
    squeezed = _squeezed(text)
    for number, message in enumerate(messages):
        said = split_reasoning(message)[1] if message["role"] == "assistant" else None
        for what, piece in _said(tokenizer, message, said):
            if _within(piece, squeezed) or _is_past(tokenizer, messages, number, what, options):
                continue
            raise _left_out(number, message, what, piece)
    for number, what in _dropped(tokenizer, messages, options, how) or ():
        if what == "tools" and not needs_tools:
            continue
        if what != "tools" and _is_past(tokenizer, messages, number, what, options):
            continue
        if what != "tools":
            raise _left_out(number, messages[number], what, str(messages[number].get(what)))
        raise InputError(
            "the chat template writes nothing of the tools",
            value=unwritten_tools(tokenizer, messages, options, **how),
            rule="the model would call what it was never told of",
            fix="use a chat template that knows tools, or remove the tools of the row",
        )


def unwritten_tools(
    tokenizer, messages: Sequence[Mapping], options: Mapping, **how: bool
) -> list[str]:
    """Returns the names of the tools of `options` of which the chat template writes nothing.
    `options` and `how` are those of the rendering."""
    tools = options.get("tools") or ()
    marks = [f"{_PROBED_TOOL}_{k}_" for k in range(len(tools))]
    probed = [renamed(tool, mark) for tool, mark in zip(tools, marks, strict=True)]
    text = tokenizer.render_chat(messages, **how, **{**options, "tools": probed or None})
    pairs = zip(tools, marks, strict=True)
    return [str(_function(tool).get("name")) for tool, mark in pairs if mark not in text]


def untold_tools(
    tokenizer, messages: Sequence[Mapping], options: Mapping, **how: bool
) -> list[str]:
    """Returns the names of the tools of which neither the template nor a message tells the model,
    of those of `options`. A system message tells of a tool by its name; a question may have that
    word by chance, and tells of it by its name and those of its parameters."""
    system, others = set(), set()
    for message in messages:
        words = system if message["role"] in _INSTRUCTING else others
        if message["role"] not in _ANSWERING:
            for text in _pieces(tokenizer, message.get("content")):
                words.update(_WORDS.findall(text), _PARTS.findall(text))

    def told(tool: Mapping) -> bool:
        function = _function(tool)
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        names = {str(function.get("name"))}
        inside = names | set(properties if isinstance(properties, Mapping) else ())
        return names <= system or inside <= system | others

    missing = [tool for tool in options.get("tools") or () if not told(tool)]
    return missing and unwritten_tools(tokenizer, messages, {**options, "tools": missing}, **how)


def check_asked(tokenizer, messages: Sequence[Mapping], prompt: str, options: Mapping) -> None:
    """Raises InputError where the `prompt` of the last message leaves out what the others say, or
    the template leaves out what the last one says: for a turn that is read behind its own prompt,
    as the template renders the history otherwise once the turn is there."""
    last = len(messages) - 1
    check_conversation(tokenizer, messages[:last], prompt, options)
    for number, what in _dropped(tokenizer, messages, options, _FINISHED) or ():
        if number == last:
            raise _left_out(last, messages[last], what, str(messages[last].get(what)))


def _is_past(tokenizer, messages, number: int, what: str, options: Mapping) -> bool:
    """Returns whether this is what the assistant said beside a call, and the template leaves it out
    only because more messages follow."""
    message = messages[number]
    if what != "content" or message["role"] != "assistant" or not message.get("tool_calls"):
        return False
    through = messages[: number + 1]
    if len(through) == len(messages):
        return False
    dropped = _dropped(tokenizer, through, options, _FINISHED)
    return dropped is not None and (number, what) not in dropped


def check_messages(tokenizer, messages: Sequence[Mapping], text: str) -> None:
    """Raises InputError for a message of which `text`, what they add to a conversation, says
    nothing, or not all."""
    squeezed = _squeezed(text)
    for number, message in enumerate(messages):
        for what, piece in _said(tokenizer, message, None):
            if not _within(piece, squeezed):
                raise _left_out(number, message, what, piece)


def check_turn(tokenizer, number: int, message: Mapping, written: str) -> None:
    """Raises InputError if `written`, the learned text of a message, lacks its reasoning,
    content or calls."""
    reasoning, answer = split_reasoning(message)
    squeezed, thought = _squeezed(written), _squeezed(reasoning)
    for what, piece in [("reasoning", reasoning), *_said(tokenizer, message, answer)]:
        if not _within(piece, squeezed):
            raise _left_out(number, message, what, piece)
    # The answer, or a call, may say what the reasoning says.
    others = "".join(_squeezed(piece) for _, piece in _said(tokenizer, message, answer))
    if thought and thought in squeezed and squeezed.count(thought) <= others.count(thought):
        raise _left_out(number, message, "reasoning", reasoning)


def _left_out(number: int, message: Mapping, what: str, piece: str) -> InputError:
    role = message["role"]
    fixes = {
        "reasoning": "use a template that writes reasoning (or its variable, for instance"
        " data.template_variables=('enable_thinking=true',)), write it into the content, or remove"
        " it from the row",
        "tool_calls": "use a template that writes calls, or write the call into the content",
    }
    fix = fixes.get(what, "use a template that writes it, or remove it from the row")
    if role == "system":
        fix = "write it into a message of the user, use a template that writes it, or remove it"
    if role not in _COMMON:
        fix = f"rename the role {role!r} to one that the template knows, such as 'system' or 'user'"
    return InputError(
        f"the chat template leaves out the {what} of message {number}, of role {role!r}",
        value=piece[:_SHOWN],
        rule="what a row says is what is read and learned",
        fix=fix,
    )


def _said(tokenizer, message: Mapping, answer: str | None) -> list[tuple[str, str]]:
    """(key, text) of all that a message says beside reasoning; `answer` stands for its content."""
    pieces = _pieces(tokenizer, message.get("content") if answer is None else answer)
    said = [("content", piece) for piece in pieces]
    for call in message.get("tool_calls") or ():
        function = _function(call)
        said += [("tool_calls", text) for text in (function.get("name"), *_texts(function))]
    return [(what, text) for what, text in said if isinstance(text, str) and text.strip()]


def _pieces(tokenizer, content: object) -> list[str]:
    """The texts of a content, in its order; "" for parts that have none. An image parts a text."""
    if isinstance(content, str):
        return content.split(tokenizer.image_mark) if tokenizer.image_mark else [content]
    parts = content if isinstance(content, (list, tuple)) else ()
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    return [text if isinstance(text, str) else "" for text in texts]


def _with_pieces(tokenizer, content: object, pieces: Sequence[str]) -> object:
    """The content with other texts."""
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
    """The texts among a call's arguments."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments, "arguments")
        except InputError:
            return [arguments]
    return texts_in(arguments)


def texts_in(value: object) -> list[str]:
    """Returns the texts in a value of JSON: itself, or those within its lists and objects."""
    found, todo = [], [value]
    while todo:
        value = todo.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, Mapping):
            todo += value.values()
        elif isinstance(value, (list, tuple)):
            todo += value
    return found


def _within(piece: str, squeezed: str) -> bool:
    """Returns whether a text stands in another one, which is squeezed already."""
    small = _squeezed(piece)
    if not small or small in squeezed:
        return True
    if small in _squeezed(html.unescape(squeezed)):
        return True
    written = (json.dumps(piece, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True))
    twice = json.dumps(json.dumps(piece, ensure_ascii=False), ensure_ascii=False)[3:-3]
    return any(
        _squeezed(form.replace("\\n", "\n").replace("\\t", "\t").replace("\\r", "\r"))
        in squeezed.replace("\\n", "").replace("\\t", "").replace("\\r", "")
        for form in (*written, twice, repr(piece)[1:-1], piece.replace("'", "\\'"))
    )


def _squeezed(text: str) -> str:
    return "".join(text.split())


# -- what a template drops whatever it says --

_Dropped = tuple[tuple[int, str], ...]
# Of each tokenizer, by the shape of a conversation. A tokenizer takes its verdicts with it.
_PROBES: weakref.WeakKeyDictionary[object, dict[tuple, _Dropped | None]] = (
    weakref.WeakKeyDictionary()
)
_MOST_PROBES = 1_000
_PROBED_TOOL = "rljax_probed_tool"


def _dropped(tokenizer, messages, options: Mapping, how: Mapping) -> _Dropped | None:
    """(message, key) of what the template leaves out whatever stands there; None where it cannot be
    asked. Asked where a text may stand in the rendering by chance: a short one, names of calls and
    tools; or a role is odd."""
    pieces = [_pieces(tokenizer, message.get("content")) for message in messages]
    calls = [len(m.get("tool_calls") or ()) for m in messages]
    tools = bool(options.get("tools"))
    odd = any(
        piece.strip() and (m["role"] not in _COMMON or len(piece.strip()) < _SHORT)
        for m, texts in zip(messages, pieces, strict=True)
        for piece in texts
    )
    if not (odd or tools or any(calls)):
        return None
    told = [
        (isinstance(m.get("content"), str), *(bool(piece.strip()) for piece in texts))
        for m, texts in zip(messages, pieces, strict=True)
    ]
    keys = [frozenset(n for n, v in m.items() if v is not None) for m in messages]
    shape = tuple(zip((m["role"] for m in messages), told, calls, keys, strict=True))
    variables = json.dumps(options.get("variables"), default=str)
    counts = tuple(len(options.get(name) or ()) for name in ("tools", "documents"))
    key = (shape, variables, counts, tuple(how.items()))
    known = _PROBES.setdefault(tokenizer, {})
    if key in known:
        return known[key]
    if len(known) >= _MOST_PROBES:
        known.clear()
    known[key] = dropped = _missing(tokenizer, messages, pieces, calls, options, how)
    return dropped


def _missing(tokenizer, messages, pieces, calls, options, how) -> _Dropped | None:
    probed, marks = [], {}  # mark -> what it stands for
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
            name = f"rljax_called_{number}_"
            marks[name] = (number, "tool_calls")
            message["tool_calls"] = [renamed(call, name) for call in message["tool_calls"]]
        probed.append(message)
    if options.get("tools"):
        names = [f"{_PROBED_TOOL}_{k}_" for k in range(len(options["tools"]))]
        marks |= {name: (len(messages) + k, "tools") for k, name in enumerate(names)}
        tools = zip(options["tools"], names, strict=True)
        options = {**options, "tools": [renamed(tool, name) for tool, name in tools]}
    try:
        text = tokenizer.render_chat(probed, **how, **options)
    except InputError:  # a template that reads contents; the texts themselves are compared
        return None
    return tuple(dict.fromkeys(name for mark, name in marks.items() if mark not in text))


def renamed(value: object, name: str) -> object:
    """Returns a call, or a tool, with another name."""
    if not isinstance(value, Mapping):
        return value
    if isinstance(value.get("function"), Mapping):
        return {**value, "function": {**value["function"], "name": name}}
    return {**value, "name": name}
