"""Families that write arguments as text between tags, and fenced blocks: Qwen3-Coder, DeepSeek
V3.2, Gemma, a block of Python, and a tag of one's own. Pure functions, linear in the text."""

import re
from collections.abc import Mapping, Sequence

from rljax.environments.calls.format import CallReader, Parsed, read_json
from rljax.environments.calls.literals import read_gemma_call, read_python_calls
from rljax.environments.contract import Call
from rljax.environments.schemas import coerced, parameters_of

# -- Qwen3-Coder

_FUNCTION = re.compile(r"<function\s*+=\s*+[\"']?([^\s<>\"']{1,256})[\"']?\s*+>")
_PARAMETER = re.compile(r"\s*+<parameter\s*+=\s*+[\"']?([^<>\"'\n]{1,256})[\"']?\s*+>")
_VALUE_END = re.compile(r"</parameter>\s*+(?=<parameter\s*=|</function>|</tool_call>|\Z)")
_CALL_END = re.compile(r"\s*+(?:</function>)?\s*+(?:</tool_call>)?")


def read_qwen3_coder(text: str, schemas: Sequence[Mapping]) -> Parsed:
    """<tool_call><function=f><parameter=a>value</parameter></function></tool_call>. A value is a
    text; what type it has the schema says. The outer tag may be missing."""
    reader = CallReader("a call is a function tag with a parameter tag for each argument")
    kept, at = [], 0
    while reader.open and (found := _FUNCTION.search(text, at)):
        kept.append(text[at : found.start()].rstrip().removesuffix("<tool_call>").rstrip())
        types, arguments = parameters_of(found[1], schemas), {}
        at = found.end()
        while parameter := _PARAMETER.match(text, at):
            end = _VALUE_END.search(text, parameter.end())
            if not end:
                reader.fail("a parameter has no closing tag")
                break
            name, value = parameter[1].strip(), text[parameter.end() : end.start()]
            value = value.removeprefix("\n").removesuffix("\n")
            arguments[name] = _typed(reader, value, types.get(name, {"type": "string"}))
            at = end.end()
        if reader.open:
            reader.add(found[1], arguments)
        at = _CALL_END.match(text, at).end()
    if reader.open and "<tool_call>" in text[at:]:
        reader.fail("there is no function tag in it")
    if reader.open:
        kept.append(text[at:] if at == 0 or text[at:].strip() else "")
    return reader.parsed("".join(kept))


def _typed(reader: CallReader, text: str, schema: Mapping) -> object:
    """The value that a text is by its schema; JSON has the bounds that it has elsewhere."""
    value = coerced(text, schema)
    if value is not text and isinstance(value, (dict, list, str)):
        problem = read_json(text, 0)[2]
        if problem:
            reader.fail(problem)
    return value


# -- DeepSeek V3.2

DSML = "｜DSML｜"
_INVOKE = re.compile(rf'<{DSML}invoke name="([^"<>]{{1,256}})">')
_DSML_PARAMETER = re.compile(
    rf'\s*+<{DSML}parameter name="([^"<>]{{1,256}})"(?: string="(true|false)")?>'
)
_DSML_END = f"</{DSML}parameter>"


def read_dsml(text: str, schemas: Sequence[Mapping]) -> Parsed:
    """<｜DSML｜invoke name="f"> with parameters that say whether they are texts or JSON."""
    reader = CallReader("a call is an invoke tag with a parameter tag for each argument")
    outer, at = text.find(f"<{DSML}"), 0
    while reader.open and (found := _INVOKE.search(text, at)):
        at, arguments = found.end(), {}
        types = parameters_of(found[1], schemas)
        while parameter := _DSML_PARAMETER.match(text, at):
            end = text.find(_DSML_END, parameter.end())
            if end < 0:
                reader.fail("a parameter has no closing tag")
                break
            value = text[parameter.end() : end]
            kind = {"type": "string"} if parameter[2] == "true" else types.get(parameter[1], {})
            arguments[parameter[1]] = _typed(reader, value, kind)
            at = end + len(_DSML_END)
        if reader.open:
            reader.add(found[1], arguments)
    if not at and reader.open:
        reader.fail("there is no invoke tag in it")
    return reader.parsed(text[:outer].rstrip())


# -- Gemma

TOOL_CODE = "```tool_code"
GEMMA_CALLS = (("<|tool_call>", "<tool_call|>"), ("<start_function_call>", "<end_function_call>"))


def read_gemma(text: str, schemas: Sequence[Mapping]) -> Parsed:
    """A block fenced as tool_code with calls in Python (Gemma 2, 3), or the tokens of FunctionGemma
    and Gemma 4 around call:f{a:1}."""
    reader = CallReader("a call is a function's name with its arguments by name")
    for first, _ in GEMMA_CALLS:
        at = text.find(first)
        if at >= 0:
            content = text[:at].rstrip()
            while reader.open and at >= 0:
                end = read_gemma_call(reader, text, at + len(first))
                at = text.find(first, end)
            return reader.parsed(content)
    begin = text.find(TOOL_CODE)
    if begin < 0:
        return Parsed(text)
    inside, _, after = text[begin + len(TOOL_CODE) :].partition("\n```")
    read_python_calls(reader, inside)
    if reader.open and not reader.calls:
        reader.fail("the block is empty")
    return reader.parsed(text[:begin].rstrip() + (after if after.strip() else ""))


# -- blocks and tags of one's own

_FENCE = re.compile(r"```(?:python|py)[ \t]*\n")


def read_block(text: str, tool: str, argument: str) -> Parsed:
    """The last block fenced as python is a call of `tool` with the code as its `argument`."""
    starts = [text.rfind("```python"), text.rfind("```py")]
    begin = max(starts)
    found = _FENCE.match(text, begin) if begin >= 0 else None
    if not found:
        return Parsed(text)
    code, closed, after = text[found.end() :].partition("\n```")
    if not closed:
        reader = CallReader("a block ends with a line of three backticks")
        reader.fail("its block is not closed")
        return reader.parsed(text)
    content = text[:begin].rstrip() + (after if after.strip() else "")
    return Parsed(content, (Call(tool, {argument: code}),))


def read_tags(
    text: str, tools: tuple[str, ...], argument: str, schemas: Sequence[Mapping]
) -> Parsed:
    """<search>...</search> is a call of `search`. A tag that is not closed is text: a model of a
    few layers could do nothing with what is wrong with it."""
    reader, kept, at, left = CallReader(), [], 0, list(tools)
    while reader.open and left:
        found = re.compile(f"<({'|'.join(map(re.escape, left))})>").search(text, at)
        if not found:
            break
        name = found[1]
        end = text.find(f"</{name}>", found.end())
        if end < 0:
            left.remove(name)
            continue
        kept.append(text[at : found.start()])
        inside = text[found.end() : end].strip()
        types = parameters_of(name, schemas)
        wanted = argument or next(iter(types), "text")
        value = _typed(reader, inside, types.get(wanted, {"type": "string"}))
        if reader.open:
            reader.add(name, {wanted: value})
        at = end + len(name) + 3
    kept.append(text[at:])
    return reader.parsed("".join(kept))
