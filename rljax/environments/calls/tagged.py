"""Families that write arguments as text between tags, and fenced blocks: Qwen3-Coder, DeepSeek
V3.2, Gemma, a block of Python, and a tag of one's own. Pure functions, linear in the text."""

import re
from collections.abc import Mapping, Sequence

from rljax.environments.calls.format import (
    CallReader,
    Parsed,
    call_of,
    like_object,
    read_json,
    skip_space,
)
from rljax.environments.calls.json_calls import HERMES, end_of_bad, meant
from rljax.environments.calls.literals import gemma_call, python_calls
from rljax.environments.contract import Call
from rljax.environments.schemas import coerced, parameters_of

# -- Qwen3-Coder

_FUNCTION = re.compile(
    r"(<tool_call>\s*+)?<function\s*+=\s*+[\"']?([^\s<>\"']{1,256})[\"']?\s*+>|<tool_call>"
)
_PARAMETER = re.compile(r"\s*+<parameter\s*+=\s*+[\"']?([^<>\"'\n]{1,256})[\"']?\s*+>")
_VALUE_END = re.compile(
    r"</parameter>\s*+(?:(?=<parameter\s*+=\s*+[\"']?([^<>\"'\n]{1,256}))|(?=</function>|</tool_call>|\Z))"
)
_NEXT_TAG = re.compile(r"<parameter\s*+=|<function\s*+=|(</parameter>)")
_CALL_END = re.compile(r"\s*+(?:</function>)?\s*+(?:</tool_call>)?")
_WHOLE_END = re.compile(r"</function>\s*+</tool_call>(?=\s*+(?:<tool_call>|<function|\Z))")
_BAD_END = re.compile(r"</function>\s*+(?:</tool_call>)?|</tool_call>|\n[ \t]*+(?=<tool_call>)")


def read_qwen3_coder(text: str, schemas: Sequence[Mapping]) -> Parsed:
    """<tool_call><function=f><parameter=a>value</parameter></function></tool_call>. A value is a
    text; the schema gives its type. The outer tag may be missing."""
    reader = CallReader(text, "a call is a function tag with a parameter tag for each argument")
    at = 0
    while reader.open and (found := _FUNCTION.search(text, at)):
        start, inside, name = found.start(), found.end(), found[2]
        if name is None:
            if like_object(text, inside) or meant(reader, start, inside, HERMES[1]):
                end = end_of_bad(text, inside, HERMES)
                at = reader.bad(start, end, "there is no function tag in it")
            else:
                at = inside
            continue
        arguments, problem, at = _parameters(text, inside, parameters_of(name, schemas))
        end = _CALL_END.match(text, at).end()
        bare = not arguments and not text[at:end].strip()  # neither parameter nor closing tag
        if problem or bare and (found[1] or reader.alone(start) and reader.ends_line(inside)):
            closing = _BAD_END.search(text, at)
            at = reader.bad(
                start, closing.end() if closing else len(text), problem or "it has no closing tag"
            )
        elif not bare:
            at = reader.made(start, end, call_of(name, arguments))
    return reader.parsed()


def _parameters(text: str, at: int, types: Mapping) -> tuple[dict, str, int]:
    """The arguments that begin at `at`, what is wrong with them, and where they end."""
    arguments = {}
    while parameter := _PARAMETER.match(text, at):
        end = _value_end(text, parameter.end(), types, {*arguments, parameter[1].strip()})
        if not end or _WHOLE_END.search(text, parameter.end(), end.start()):
            return arguments, "a parameter has no closing tag", parameter.end()
        name, value = parameter[1].strip(), text[parameter.end() : end.start()]
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[name], problem = _typed(value, types.get(name, {"type": "string"}))
        at = end.end()
        if problem:
            return arguments, problem, at
    return arguments, "", at


def _value_end(text: str, at: int, types: Mapping, given: set[str]) -> re.Match | None:
    """The closing tag of the value that begins at `at`, which may hold such tags: what follows is
    a parameter that the tool has and that is not given yet, or the end of the call, behind which no
    value ends."""
    while end := _VALUE_END.search(text, at):
        name = (end[1] or "").strip()
        if name:
            if name not in given and (name in types or not types):
                return end
        elif not ((tag := _NEXT_TAG.search(text, end.end())) and tag[1]):
            return end
        at = end.end()
    return None


def _typed(text: str, schema: Mapping) -> tuple[object, str]:
    """The value that a text is by its schema, and what is wrong with it; JSON has the bounds that
    it has elsewhere."""
    value = coerced(text, schema)
    if value is not text and isinstance(value, (dict, list, str)):
        return value, read_json(text, 0)[2]
    return value, ""


# -- DeepSeek V3.2

DSML = "｜DSML｜"
_OUTER = rf"<{DSML}(?:function|tool)_calls>\s*+"
_INVOKE = re.compile(rf'(?:{_OUTER})?<{DSML}invoke name="([^"<>]{{1,256}})">')
_DSML_PARAMETER = re.compile(
    rf'\s*+<{DSML}parameter name="([^"<>]{{1,256}})"(?: string="(true|false)")?>'
)
_DSML_END, _INVOKE_END = f"</{DSML}parameter>", f"</{DSML}invoke>"
_DSML_VALUE_END = re.compile(  # a value may hold the tag: behind its own one the call goes on
    rf'{_DSML_END}(?=\s*+(?:<{DSML}parameter name="|{_INVOKE_END}|<{DSML}invoke|\Z'
    rf"|</{DSML}(?:function|tool)_calls>))"
)
_DSML_CLOSE = re.compile(rf"\s*+(?:{_INVOKE_END})?(?:\s*+</{DSML}(?:function|tool)_calls>)?")


def read_dsml(text: str, schemas: Sequence[Mapping]) -> Parsed:
    """<｜DSML｜invoke name="f"> with parameters that say whether they are texts or JSON."""
    reader = CallReader(text, "a call is an invoke tag with a parameter tag for each argument")
    at = 0
    while reader.open and (found := _INVOKE.search(text, at)):
        start, arguments, problem = found.start(), {}, ""
        types, at = parameters_of(found[1], schemas), found.end()
        while not problem and (parameter := _DSML_PARAMETER.match(text, at)):
            closing = _DSML_VALUE_END.search(text, parameter.end())
            end = closing.start() if closing else text.find(_DSML_END, parameter.end())
            if end < 0:
                problem = "a parameter has no closing tag"
                break
            value = text[parameter.end() : end]
            kind = {"type": "string"} if parameter[2] == "true" else types.get(parameter[1], {})
            arguments[parameter[1]], problem = _typed(value, kind)
            at = end + len(_DSML_END)
        closing = _DSML_CLOSE.match(text, at).end()
        if not arguments and not problem and not text[at:closing].strip():
            if not reader.alone(start):
                continue
            problem = "it has no closing tag"
        if problem:
            end = text.find(_INVOKE_END, at)
            at = reader.bad(start, end + len(_INVOKE_END) if end >= 0 else len(text), problem)
        else:
            at = reader.made(start, closing, call_of(found[1], arguments), shown="code")
    outer = text.find(f"<{DSML}")
    if not at and reader.alone(outer):
        reader.bad(outer, len(text), "there is no invoke tag in it")
    return reader.parsed()


# -- Gemma

TOOL_CODE = "```tool_code"
GEMMA_CALLS = (("<|tool_call>", "<tool_call|>"), ("<start_function_call>", "<end_function_call>"))
# What the model writes behind a call, to have it answered.
_ANSWERS = {
    "<|tool_call>": "<|tool_response>",
    "<start_function_call>": "<start_function_response>",
}


def read_gemma(text: str, schemas: Sequence[Mapping]) -> Parsed:
    """A block fenced as tool_code with calls in Python (Gemma 2, 3), or the tokens of FunctionGemma
    and Gemma 4 around call:f{a:1}."""
    reader = CallReader(text, "a call is a function's name with its arguments by name")
    # An argument may hold the marks of another form: what stands first is what is written.
    code = text.find(TOOL_CODE)
    begins = sorted((text.find(pair[0]), pair) for pair in GEMMA_CALLS)
    for begin, (first, last) in begins:
        if begin < 0 or 0 <= code < begin:
            continue
        at = begin
        while reader.open and (start := text.find(first, at)) >= 0:
            inside = start + len(first)
            call, end = gemma_call(text, inside)
            if not isinstance(call, str):
                for mark in (last, _ANSWERS[first]):
                    end += len(mark) * text.startswith(mark, end)
                at = reader.made(start, end, call, shown="code")
            elif text.startswith("call:", skip_space(text, inside)) or reader.alone(start):
                at = reader.bad(start, end_of_bad(text, inside, (first, last)), call)
            else:
                at = inside
        if reader.spans or reader.problem:
            return reader.parsed()
    at = 0
    while reader.open and (start := text.find(TOOL_CODE, at)) >= 0:
        inside = start + len(TOOL_CODE)
        fence = _fence(text, inside)
        block = text[inside : fence.start() if fence else len(text)]
        calls = python_calls(block) or ["the block is empty"]
        at = reader.made(start, fence.end() if fence else len(text), *calls, shown="")
    return reader.parsed()


# -- blocks and tags of one's own

_FENCE = re.compile(r"```(?:python|py)[ \t]*\n")
# What ends a block, or begins another one; and what hides that: comments and strings.
_PIECE = re.compile(
    r"\n[ \t]*+```(?:(?![\w`])|(?P<opens>(?:python|py)[ \t]*+\n))|#[^\n]*+|\"{3}|'{3}|[\"']"
)
_STRING_REST = {
    quote: re.compile(pattern, re.DOTALL)
    for quote, pattern in (
        ('"""', r'(?:[^\\"]++|\\.|"(?!""))*+"""'),
        ("'''", r"(?:[^\\']++|\\.|'(?!''))*+'''"),
        ('"', r'(?:[^"\\\n]++|\\.)*+"'),
        ("'", r"(?:[^'\\\n]++|\\.)*+'"),
    )
}


def _fence(text: str, at: int) -> re.Match | None:
    """The line of backticks that ends the block of code whose text goes on at `at`, or the one that
    begins another block; those in strings are text. A string without an end hides nothing."""
    endless: dict[str, int] = {}  # quote -> up to where it ends no string
    while piece := _PIECE.search(text, at):
        quote = piece[0]
        if quote not in _STRING_REST:
            if not quote.startswith("#"):
                return piece
        elif piece.start() >= endless.get(quote, 0):
            if rest := _STRING_REST[quote].match(text, piece.end()):
                at = rest.end()
                continue
            line_end = text.find("\n", piece.end()) if len(quote) == 1 else -1
            endless[quote] = len(text) if line_end < 0 else line_end
        at = piece.end()
    return None


def read_block(text: str, tool: str, argument: str) -> Parsed:
    """The last block fenced as python is a call of `tool` with the code as its `argument`."""
    begins = end = None
    at = 0
    while found := _FENCE.search(text, at):
        begins = found
        end = _fence(text, found.end() - 1)  # from its newline on: the block may be empty
        if end is None:
            break
        at = end.start() + 1 if end["opens"] else end.end()
    if begins is None:
        return Parsed(text, spans=())
    reader = CallReader(text, "a block ends with a line of three backticks")
    if end is None:
        reader.bad(begins.start(), len(text), "its block is not closed", shown=False)
    else:
        call = Call(tool, {argument: text[begins.end() : max(begins.end(), end.start())]})
        reader.made(begins.start(), end.end(), call, shown="")
    return reader.parsed()


def read_tags(
    text: str, tools: tuple[str, ...], argument: str, schemas: Sequence[Mapping]
) -> Parsed:
    """Reads <search>...</search> as a call of `search`. A tag that is not closed is text: a model
    of a few layers could do nothing with an error message."""
    reader, at, left = CallReader(text), 0, list(tools)
    while reader.open and left:
        found = re.compile(f"<({'|'.join(map(re.escape, left))})>").search(text, at)
        if not found:
            break
        name = found[1]
        end = text.find(f"</{name}>", found.end())
        if end < 0:
            left.remove(name)
            continue
        inside = text[found.end() : end].strip()
        types = parameters_of(name, schemas)
        wanted = argument or next(iter(types), "text")
        value, problem = _typed(inside, types.get(wanted, {"type": "string"}))
        call = problem or call_of(name, {wanted: value})
        at = reader.made(found.start(), end + len(name) + 3, call, tight=False, shown="code")
    return reader.parsed()
