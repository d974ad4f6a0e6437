"""Families that write a call's arguments as JSON: Hermes and Qwen, Llama 3, Mistral, DeepSeek, and
gpt-oss in its harmony format. Pure functions text -> Parsed, linear in the text."""

import re
from collections.abc import Mapping, Sequence

from rljax.environments.calls.format import (
    FORM,
    CallReader,
    Parsed,
    call_of,
    call_of_object,
    like_object,
    read_json,
    skip_space,
)
from rljax.environments.calls.literals import python_calls
from rljax.environments.contract import Call

HERMES = ("<tool_call>", "</tool_call>")


def read_hermes(text: str, schemas: Sequence[Mapping]) -> Parsed:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, several times."""
    reader, (first, last) = CallReader(text), HERMES
    at = 0
    while reader.open and (start := text.find(first, at)) >= 0:
        inside = start + len(first)
        value, end, problem = reader.json(inside)
        at, call = skip_space(text, end), problem or call_of_object(value)
        closed = text.startswith(last, at)
        # A model may leave the closing tag out.
        if not problem and not (closed or at == len(text) or text.startswith(first, at)):
            call = "something stands behind its object"
        if not isinstance(call, str):
            at = reader.made(start, at + len(last) * closed, call)
        elif problem != FORM and like_object(text, inside) or meant(reader, start, inside, last):
            at = reader.bad(start, end_of_bad(text, inside, HERMES), call)
        else:
            at = inside
    return reader.parsed()


def meant(reader: CallReader, start: int, inside: int, last: str) -> bool:
    """Returns whether a tag without an object in it is an attempt at a call: it has a line of its
    own, and so has its closing tag, or nothing follows it."""
    if not reader.alone(start) or reader.json(inside)[2] == FORM:
        return False
    end = reader.text.find(last, inside)
    if end >= 0:
        return reader.ends_line(end + len(last))
    body = skip_space(reader.text, inside)
    return body == len(reader.text) or reader.text.startswith("{", body)


def end_of_bad(text: str, inside: int, tags: tuple[str, str]) -> int:
    """Returns the offset at which a call that cannot be read ends: at its closing tag, tags in its
    own texts aside; without one, before the next tag that begins a line."""
    first, last = map(re.escape, tags)
    depth = 1
    for found in re.compile(f"{first}|{last}").finditer(text, inside):
        depth += 1 if found[0] == tags[0] else -1
        if not depth:
            return found.end()
    begins = re.compile(rf"\n[ \t]*+(?={first})").search(text, inside)
    return begins.end() if begins else len(text)


# -- lists between tags

# The tags of Apriel and MiniMax-M1, of Nemotron Nano 2, and of Phi-4-mini and Granite.
LISTS = {
    "<tool_calls>": "</tool_calls>",
    "<TOOLCALL>": "</TOOLCALL>",
    "<|tool_call|>": "<|/tool_call|>",
}
_LIST_BEGINS = re.compile("|".join(map(re.escape, LISTS)))


def read_call_list(text: str, schemas: Sequence[Mapping]) -> Parsed:
    """<tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>, or the objects without the
    brackets of a list, one behind the other."""
    reader = CallReader(text)
    at = 0
    while reader.open and (found := _LIST_BEGINS.search(text, at)):
        start, inside, first, last = found.start(), found.end(), found[0], LISTS[found[0]]
        values, end, problem = _listed_values(reader, inside, last)
        at = skip_space(text, end)
        closed = text.startswith(last, at)
        # A model may leave the closing tag out.
        if not problem and not (closed or at == len(text)):
            problem = "something stands behind its list"
        if not problem and values:
            calls = map(call_of_object, values)
            at = reader.made(start, at + len(last) * closed, *calls)
        elif problem != FORM and like_object(text, inside) or meant(reader, start, inside, last):
            problem = problem or "its list is empty"
            at = reader.bad(start, end_of_bad(text, inside, (first, last)), problem)
        else:
            at = inside
    return reader.parsed()


def _listed_values(reader: CallReader, at: int, last: str) -> tuple[list, int, str]:
    """(the values of a list, or up to the text `last`; the offset behind them; what is wrong)."""
    text, values = reader.text, []
    if text.startswith("[", skip_space(text, at)):
        value, end, problem = reader.json(at)
        return (value or []), end, problem
    while reader.open:
        value, at, problem = reader.json(at)
        if problem:
            return values, at, problem
        values.append(value)
        at = skip_space(text, at)
        if text.startswith(last, at) or at == len(text):
            break
    return values, at, ""


# -- Llama 3

PYTHON_TAG = "<|python_tag|>"
_NAMED = r'\{\s*+"(?:name|function|type)"\s*+:'
# Llama 4's pair may stand around a call, or before it. Tokenizers have them as special tokens.
PYTHON_START = "<|python_start|>"
_LLAMA_4 = r"<\|python_start\|>(?:<\|python_end\|>)?+\s*+(?=\{)"
_LLAMA = re.compile(rf"<\|python_tag\|>\s*+|{_LLAMA_4}|^[ \t]*+(?=\{{)|(?={_NAMED})", re.MULTILINE)
_LLAMA_NEXT = re.compile(rf"(?:^[ \t]*+|;\s*+)(?={_NAMED})", re.MULTILINE)
_LLAMA_NAMED = re.compile(_NAMED)
_LLAMA_END = re.compile(r"(?:\s*+<\|python_end\|>)?+(?:\s*+;\s*+|)")
_BUILT_IN = re.compile(r"\s*([\w.]{1,256})\.call\(")
_OBJECTS = re.compile(r"\s*+\[\s*+\{")
_LISTED = re.compile(r"\s*+\[\s*+[A-Za-z_][\w.]*+\s*+\(")


def read_llama3(text: str, schemas: Sequence[Mapping]) -> Parsed:
    """{"name": ..., "parameters": {...}}, maybe behind <|python_tag|>, several with a semicolon
    between; `name.call(a="b")` of the built-in tools, and lists that are all that is said, of such
    objects (xLAM) or [name(a="b")] of Llama 3.2 and 4."""
    reader = CallReader(text, 'a call is {"name": ..., "parameters": {...}}')
    tag = text.find(PYTHON_TAG)
    if tag >= 0 and (built_in := _BUILT_IN.match(text, tag + len(PYTHON_TAG))):
        called = f"{built_in[1]}({text[built_in.end() :]}"
        reader.made(tag, len(text), *python_calls(called), shown="")
        return reader.parsed()
    if tag < 0 and _LISTED.match(text):
        reader.made(0, len(text), *python_calls(text), shown="")
        return reader.parsed()
    if tag < 0 and _OBJECTS.match(text):
        values, end, problem = reader.json(0)
        if not problem and skip_space(text, end) == len(text) and all(map(_is_call, values)):
            reader.made(0, len(text), *map(call_of_object, values), shown="")
            return reader.parsed()
    at = 0
    while reader.open and (found := _LLAMA.search(text, at)):
        start, inside, tagged = found.start(), found.end(), found[0].startswith("<")
        if tagged and not text.startswith("{", inside):
            alone = reader.alone(start)
            at = reader.bad(start, len(text), "there is no object") if alone else inside
            continue
        value, end, problem = reader.json(inside)
        if problem:
            named = tagged or (_LLAMA_NAMED.match(text, inside) and reader.alone(start))
            if not named or problem == FORM:
                at = inside + 1
                continue
            following = _LLAMA_NEXT.search(text, inside + 1)
            at = reader.bad(start, following.end() if following else len(text), problem)
        elif tagged or _is_call(value):
            end = _LLAMA_END.match(text, end).end()
            at = reader.made(start, end, call_of_object(value))
        else:
            at = end  # an answer that is JSON, not a call
    return reader.parsed()


def _is_call(value: object) -> bool:
    keys = value.keys() if isinstance(value, Mapping) else set()
    return bool({"name", "function"} & keys and {"arguments", "parameters", "function"} & keys)


# -- Mistral

TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MISTRAL_NAME = re.compile(
    r"\s*+([^\s\[\]{}]{1,256})\s*+(?:\[CALL_ID\]\s*+([\w-]{1,64})\s*+)?(?:\[ARGS\]\s*+)?(?=\{)"
)
_MISTRAL_NEXT = re.compile(r"[}\]\n][ \t]*+(?=\[TOOL_CALLS\])")


def read_mistral(text: str, schemas: Sequence[Mapping]) -> Parsed:
    """[TOOL_CALLS] [{"name", "arguments", "id"}, ...], and as later versions write it
    [TOOL_CALLS]name[CALL_ID]id[ARGS]{...}."""
    reader = CallReader(text)
    at = 0
    while reader.open and (start := text.find(TOOL_CALLS, at)) >= 0:
        inside = skip_space(text, start + len(TOOL_CALLS))
        named = _MISTRAL_NAME.match(text, inside)
        value, end, problem = reader.json(named.end() if named else inside)
        if named and not problem:
            call = call_of(named[1], value, named[2] or "")
            at = reader.made(start, end, call, shown="code")
        elif not problem:
            calls = [call_of_object(one) for one in (value if isinstance(value, list) else [value])]
            at = reader.made(start, end, *calls, shown="code")
        elif problem == FORM or not (
            named or like_object(text, inside) or (reader.alone(start) and inside == len(text))
        ):
            at = inside
        else:  # of a list, what comes before the object that is none
            calls = _objects(reader, inside + 1) if text.startswith("[", inside) else []
            following = _MISTRAL_NEXT.search(text, inside)
            past = following.end() if following else len(text)
            at = reader.made(start, past, *calls, problem, shown="code")
    return reader.parsed()


def _objects(reader: CallReader, at: int) -> list:
    """The calls of a list from its first item on, up to the one that is no JSON."""
    calls, problem = [], ""
    while reader.open and not problem:
        value, at, problem = reader.json(at)
        if not problem:
            calls.append(call_of_object(value))
            at = skip_space(reader.text, at)
            problem = "" if reader.text.startswith(",", at) else "the list goes on otherwise"
            at += 1
    return calls


# -- DeepSeek

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_DEEPSEEK_HEAD = re.compile(
    re.escape(CALL_BEGIN)
    + r"\s*+([^<>\s]{0,256})\s*+"
    + re.escape(SEPARATOR)
    + r"\s*+(?:([^\s`{]{1,256})\s*+)?(?:```(?:json)?\s*+)?(?=\{)"
)
_DEEPSEEK_END = re.compile(
    rf"(?:\s*+```)?+(?:\s*+{re.escape(CALL_END)})?+(?:\s*+{re.escape(CALLS_END)})?+"
)


def read_deepseek_v3(text: str, schemas: Sequence[Mapping]) -> Parsed:
    """Between tokens of its own: function, separator, name and a fenced object (V3, R1), or name,
    separator and an object (V3.1)."""
    reader = CallReader(text, "a call is a name and an object with its arguments")
    at = 0
    while reader.open and (begin := text.find(CALL_BEGIN, at)) >= 0:
        start = begin
        if text[:begin].endswith(CALLS_BEGIN, at):
            start -= len(CALLS_BEGIN)
        inside = begin + len(CALL_BEGIN)
        head = _DEEPSEEK_HEAD.match(text, begin)
        if head:
            value, end, problem = reader.json(head.end())
            call = problem or call_of(head[2] or head[1] or " ", value)
        else:
            call = "its name or its object is missing"
        if not isinstance(call, str):
            at = reader.made(start, _DEEPSEEK_END.match(text, end).end(), call, shown="code")
        elif call != FORM and (
            head or reader.alone(start) or text.startswith(SEPARATOR, _word(text, inside))
        ):
            at = reader.bad(start, end_of_bad(text, inside, (CALL_BEGIN, CALL_END)), call)
        else:
            at = inside
    return reader.parsed()


def _word(text: str, at: int) -> int:
    """The end of the word that begins at `at`."""
    return re.compile(r"[^<\s]{0,256}").match(text, at).end()


# -- harmony

_MARKS = "start channel constrain message end call return"
HARMONY = tuple(f"<|{mark}|>" for mark in _MARKS.split())
_TO = re.compile(r"to\s*=\s*([\w.-]{1,256})")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w{1,64})")
_HARMONY_END = re.compile(r"<\|(?:end|call|return|start|channel)\|>")
_HARMONY_MARK = re.compile(r"<\|(?:start|channel|constrain)\|>")
_PREFIX = "functions."


def read_harmony(text: str, schemas: Sequence[Mapping]) -> Parsed:
    """Messages with a header: <|channel|>commentary to=functions.f <|constrain|>json<|message|>
    {...}<|call|>. The recipient may stand before the channel; what the strict library does not
    take and gpt-oss writes is read: a header twice, no <|end|>, no <|start|>, no <|constrain|>."""
    reader = CallReader(text, "a call is a message to functions.NAME with an object of arguments")
    said: dict[str, list[str]] = {"content": [], "reasoning": []}
    at = 0
    while reader.open and (begin := text.find("<|message|>", at)) >= 0:
        header, begin = text[at:begin], begin + len("<|message|>")
        recipient = _TO.search(header)
        channels = _CHANNEL.findall(header)
        if recipient:
            at = _harmony_call(reader, begin, recipient[1])
            continue
        end = _HARMONY_END.search(text, begin)
        at = end.start() if end else len(text)
        kind = "reasoning" if channels and channels[-1] == "analysis" else "content"
        said[kind].append(text[begin:at])
    header = text[at:]
    if reader.open and _HARMONY_MARK.search(header) and _TO.search(header):
        reader.bad(at, len(text), "its message is missing", shown=False)
    if not at and not reader.problem:  # no message at all: a text without the format
        return Parsed(text)
    return reader.parsed("\n".join(said["content"]), "\n".join(said["reasoning"]))


def _harmony_call(reader: CallReader, begin: int, name: str) -> int:
    """Reads the call whose body begins at `begin`; returns where it ends."""
    text, name = reader.text, name.removeprefix(_PREFIX)
    if name == "python" and not text.startswith("{", skip_space(text, begin)):
        end = _HARMONY_END.search(text, begin)  # the built-in tool takes bare code
        stop = end.start() if end else len(text)
        return reader.made(begin, stop, Call(name, {"code": text[begin:stop]}), shown="")
    value, stop, problem = read_json(text, begin)
    end = _HARMONY_END.search(text, stop)
    stop = end.start() if end else len(text)
    return reader.made(begin, stop, problem or call_of(name, value), shown="")
