"""Families that write a call's arguments as JSON: Hermes and Qwen, Llama 3, Mistral, DeepSeek, and
gpt-oss in its harmony format. Pure functions text -> Parsed, linear in the text."""

import re
from collections.abc import Mapping, Sequence

from rljax.environments.calls.format import CallReader, Parsed, read_json, skip_space
from rljax.environments.calls.literals import read_python_calls

HERMES = ("<tool_call>", "</tool_call>")


def read_hermes(text: str, schemas: Sequence[Mapping]) -> Parsed:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, several times."""
    reader, (first, last) = CallReader(), HERMES
    kept, at = [], 0
    while reader.open and (start := text.find(first, at)) >= 0:
        kept.append(text[at:start].rstrip() if start else "")
        at = skip_space(text, reader.add_json(text, start + len(first)))
        if reader.open and not text.startswith(last, at) and at < len(text):
            if not text.startswith(first, at):  # a model may leave the closing tag out
                reader.fail("something stands behind its object")
        elif at < len(text):
            at += len(last)
    if reader.open:
        kept.append(text[at:] if at == 0 or text[at:].strip() else "")
    return reader.parsed("".join(kept))


# -- Llama 3

PYTHON_TAG = "<|python_tag|>"
_LLAMA_OBJECT = re.compile(r'\{\s*"(?:name|function|type)"\s*:')
_BUILT_IN = re.compile(r"\s*([\w.]{1,256})\.call\(")


def read_llama3(text: str, schemas: Sequence[Mapping]) -> Parsed:
    """{"name": ..., "parameters": {...}}, maybe behind <|python_tag|>, several with a semicolon
    between; `name.call(a="b")` of the built-in tools, and [name(a="b")] of Llama 3.2 and 4."""
    reader = CallReader('a call is {"name": ..., "parameters": {...}}')
    content, tag, rest = text.partition(PYTHON_TAG)
    if tag and (built_in := _BUILT_IN.match(rest)):
        called = f"{built_in[1]}({rest[built_in.end() :]}"
        read_python_calls(reader, called)
        return reader.parsed(content.rstrip())
    if not tag:
        rest, listed = text, text.lstrip()
        if listed.startswith("[") and re.match(r"\[\s*[A-Za-z_][\w.]*\s*\(", listed):
            read_python_calls(reader, listed)
            return reader.parsed("")
        found = _LLAMA_OBJECT.search(text)
        if not found:
            return Parsed(text)
        content, rest = text[: found.start()], text[found.start() :]
    at = 0
    while reader.open and rest.startswith("{", at := skip_space(rest, at)):
        value, at, problem = read_json(rest, at)
        if problem:
            reader.fail(problem)
        elif isinstance(value, dict) and not tag and not _is_call(value):
            return Parsed(text)  # an answer that is JSON, not a call
        else:
            reader.add_object(value)
        at = skip_space(rest, at)
        at += rest.startswith(";", at)
    if tag and reader.open and not reader.calls:
        reader.fail("there is no object")
    return reader.parsed(content.rstrip())


def _is_call(value: dict) -> bool:
    return bool({"arguments", "parameters", "function"} & value.keys())


# -- Mistral

TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MISTRAL_NAME = re.compile(
    r"\s*+([^\s\[\]{}]{1,256})\s*+(?:\[CALL_ID\]\s*+([\w-]{1,64})\s*+)?(?:\[ARGS\]\s*+)?(?=\{)"
)


def read_mistral(text: str, schemas: Sequence[Mapping]) -> Parsed:
    """[TOOL_CALLS] [{"name", "arguments", "id"}, ...], and as later versions write it
    [TOOL_CALLS]name[CALL_ID]id[ARGS]{...}."""
    reader = CallReader()
    at = text.find(TOOL_CALLS)
    if at < 0:
        return Parsed(text)
    content = text[:at].rstrip()
    while reader.open and at >= 0:
        at = skip_space(text, at + len(TOOL_CALLS))
        if named := _MISTRAL_NAME.match(text, at):
            end = reader.add_json(text, named.end(), named[1], named[2] or "")
        else:
            value, end, problem = read_json(text, at)
            if problem:
                reader.fail(problem)
            for one in value if isinstance(value, list) else [value]:
                if reader.open:
                    reader.add_object(one)
        at = text.find(TOOL_CALLS, end)
    return reader.parsed(content)


# -- DeepSeek

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_DEEPSEEK_HEAD = re.compile(
    re.escape(CALL_BEGIN) + r"\s*+([^<>\s]{0,256})\s*+" + re.escape(SEPARATOR)
    + r"\s*+(?:([^\s`{]{1,256})\s*+)?(?:```(?:json)?\s*+)?(?=\{)"
)  # fmt: skip


def read_deepseek_v3(text: str, schemas: Sequence[Mapping]) -> Parsed:
    """Between tokens of its own: function, separator, name and a fenced object (V3, R1), or name,
    separator and an object (V3.1)."""
    reader = CallReader("a call is a name and an object with its arguments")
    at = text.find(CALL_BEGIN)
    if at < 0:
        return Parsed(text)
    outer = text.find(CALLS_BEGIN)
    content = text[: at if outer < 0 else min(at, outer)].rstrip()
    while reader.open and at >= 0:
        head = _DEEPSEEK_HEAD.match(text, at)
        if not head:
            reader.fail("its name or its object is missing")
            break
        end = reader.add_json(text, head.end(), head[2] or head[1] or " ")
        at = text.find(CALL_BEGIN, end)
    return reader.parsed(content)


# -- harmony

HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>",
           "<|return|>")  # fmt: skip
_TO = re.compile(r"to\s*=\s*([\w.-]{1,256})")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w{1,64})")
_HARMONY_END = re.compile(r"<\|(?:end|call|return|start|channel)\|>")
_PREFIX = "functions."


def read_harmony(text: str, schemas: Sequence[Mapping]) -> Parsed:
    """Messages with a header: <|channel|>commentary to=functions.f <|constrain|>json<|message|>
    {...}<|call|>. The recipient may stand before the channel; what the strict library does not
    take and gpt-oss writes is read: a header twice, no <|end|>, no <|start|>, no <|constrain|>."""
    reader = CallReader("a call is a message to functions.NAME with an object of arguments")
    said: dict[str, list[str]] = {"content": [], "reasoning": []}
    at = 0
    while reader.open and (begin := text.find("<|message|>", at)) >= 0:
        header, begin = text[at:begin], begin + len("<|message|>")
        recipient = _TO.search(header)
        channels = _CHANNEL.findall(header)
        if recipient:
            at = _harmony_call(reader, text, begin, recipient[1])
            continue
        end = _HARMONY_END.search(text, begin)
        at = end.start() if end else len(text)
        kind = "reasoning" if channels and channels[-1] == "analysis" else "content"
        said[kind].append(text[begin:at])
    if reader.open and _TO.search(text, at):
        reader.fail("its message is missing")
    if not at and reader.open:  # no message at all: a text without the format
        return Parsed(text)
    return reader.parsed("\n".join(said["content"]), "\n".join(said["reasoning"]))


def _harmony_call(reader: CallReader, text: str, begin: int, name: str) -> int:
    """Reads the call whose body begins at `begin`; returns where it ends."""
    name = name.removeprefix(_PREFIX)
    if name == "python" and not text.startswith("{", skip_space(text, begin)):
        end = _HARMONY_END.search(text, begin)  # the built-in tool takes bare code
        stop = end.start() if end else len(text)
        reader.add(name, {"code": text[begin:stop]})
        return stop
    stop = reader.add_json(text, begin, name)
    end = _HARMONY_END.search(text, stop)
    return end.start() if end else len(text)
