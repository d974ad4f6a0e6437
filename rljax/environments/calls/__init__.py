"""Formats in which models write tool calls: `environment.calls` names one of these formats, or a
function of yours that returns a `Format`. "auto" asks the chat template.

    format = parser("auto", tokenizer)
    parsed = format.parse(format.decode(tokenizer, reply_ids), schemas)
    parsed.calls, parsed.problem, parsed.content
"""

import os

from rljax.components import resolve
from rljax.contracts import PlainText, contract
from rljax.environments.calls.format import Format, Parsed, assistant_message
from rljax.environments.calls.json_calls import (
    ARGS,
    CALL_BEGIN,
    CALL_END,
    CALL_ID,
    CALLS_BEGIN,
    CALLS_END,
    HARMONY,
    HERMES,
    LISTS,
    PYTHON_START,
    PYTHON_TAG,
    SEPARATOR,
    TOOL_CALLS,
    read_call_list,
    read_deepseek_v3,
    read_harmony,
    read_hermes,
    read_llama3,
    read_mistral,
)
from rljax.environments.calls.literals import ESCAPE, QUOTE
from rljax.environments.calls.tagged import (
    DSML,
    GEMMA_CALLS,
    TOOL_CODE,
    read_block,
    read_dsml,
    read_gemma,
    read_qwen3_coder,
    read_tags,
)
from rljax.errors import InputError
from rljax.reasoning import beginning_of

__all__ = [
    "Format",
    "Parsed",
    "assistant_message",
    "call_list",
    "deepseek_v3",
    "gemma",
    "harmony",
    "hermes",
    "llama3",
    "mistral",
    "none",
    "parser",
    "python",
    "qwen3_coder",
    "tag",
]
HOME = "rljax.environments.calls"


@contract(safe=True)
def none() -> Format:
    """No calls: every text is content."""
    return Format("", lambda text, schemas: Parsed(text))


@contract(safe=True)
def hermes() -> Format:
    """Hermes, Qwen 2.5 and 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""
    return Format("hermes", read_hermes, markers=HERMES, starts=HERMES[:1])


@contract(safe=True)
def qwen3_coder() -> Format:
    """Qwen3-Coder and 3.5: <function=f><parameter=a>value</parameter></function> in the tags of
    hermes; types come from the schemas."""
    starts = (HERMES[0], "<function")
    return Format("qwen3_coder", read_qwen3_coder, markers=HERMES, starts=starts)


@contract(safe=True)
def call_list() -> Format:
    """Apriel, MiniMax-M1, Nemotron Nano 2, Phi-4-mini: [{"name": ..., "arguments": {...}}] between
    <tool_calls>, <TOOLCALL> or <|tool_call|> and its closing tag."""
    return Format("call_list", read_call_list, markers=(*LISTS, *LISTS.values()), starts=(*LISTS,))


@contract(safe=True)
def llama3() -> Format:
    """Llama 3.1 to 4: {"name": ..., "parameters": {...}}, maybe behind <|python_tag|>; xLAM: a list
    of them."""
    ends = ("<|eom_id|>", "<|eot_id|>", "<|eom|>", "<|eot|>")
    starts = (PYTHON_TAG, PYTHON_START, "{", "[")
    return Format("llama3", read_llama3, markers=(PYTHON_TAG,), ends=ends, starts=starts)


@contract(safe=True)
def harmony() -> Format:
    """gpt-oss: messages to functions.f on the channel commentary."""
    ends = ("<|call|>", "<|return|>")
    return Format("harmony", read_harmony, markers=HARMONY, ends=ends, channels=True)


@contract(safe=True)
def deepseek_v3() -> Format:
    """DeepSeek V3, R1 and V3.1, with tokens of their own, and the tags of V3.2."""
    markers = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR, DSML)
    starts = (CALLS_BEGIN, CALL_BEGIN, f"<{DSML}")
    return Format("deepseek_v3", _deepseek, markers=markers, starts=starts)


def _deepseek(text, schemas) -> Parsed:
    # An argument may hold the marks of the other form: what stands first is what is written.
    begins = {text.find(CALL_BEGIN): read_deepseek_v3, text.find(f"<{DSML}"): read_dsml}
    readers = [begins[at] for at in sorted(begins) if at >= 0] or [read_deepseek_v3]
    parsed = [reader(text, schemas) for reader in readers]
    return next((one for one in parsed if one.calls or one.problem), parsed[0])


@contract(safe=True)
def mistral() -> Format:
    """Mistral: [TOOL_CALLS] and a list of objects, or name[ARGS]{...}."""
    markers = (TOOL_CALLS, CALL_ID, ARGS)
    return Format("mistral", read_mistral, markers=markers, starts=markers[:1])


@contract(safe=True)
def gemma() -> Format:
    """Gemma: a block fenced as tool_code, or the tokens of FunctionGemma and Gemma 4."""
    markers = (*(mark for pair in GEMMA_CALLS for mark in pair), QUOTE, ESCAPE)
    ends, starts = ("<end_of_turn>", "<turn|>"), (TOOL_CODE, *(first for first, _ in GEMMA_CALLS))
    return Format("gemma", read_gemma, markers=markers, ends=ends, starts=starts)


@contract(safe=True)
def python(*, tool: PlainText = "python", argument: PlainText = "code") -> Format:
    """The last block fenced as python is a call of `tool`; a turn ends with the fence."""
    return Format(
        "python",
        lambda text, schemas: read_block(text, tool, argument),
        stop_strings=("\n```\n",),
        starts=("```py",),
    )


@contract(safe=True)
def tag(*, name: str | tuple, argument: str = "") -> Format:
    """<search>...</search> for name='search', for models of a few layers; several names are several
    tools. The text inside is the `argument`, by default the tool's first parameter. A turn ends
    with the closing tag.

    Raises InputError for a name that is no identifier.
    """
    tools = (name,) if isinstance(name, str) else name
    if not tools or not all(isinstance(tool, str) and tool.isidentifier() for tool in tools):
        rule = "it is the name of a tool, or several: letters, digits and underscores"
        fix = "write tag(name='search')"
        raise InputError("calls: the name of a tag", value=name, rule=rule, fix=fix)
    return Format(
        "tag",
        lambda text, schemas: read_tags(text, tools, argument, schemas),
        stop_strings=tuple(f"</{tool}>" for tool in tools),
        starts=tuple(f"<{tool}>" for tool in tools),
    )


# In the order in which the template's calls are tried.
FAMILIES = (qwen3_coder, hermes, harmony, deepseek_v3, mistral, gemma, call_list, llama3)


def parser(name: str, tokenizer) -> Format:
    """The format called `name`: "hermes", "tag(name='search')", a function of yours, "auto" for
    that of the tokenizer's chat template, "" for none.

    "auto" has the template render a call and takes the format that reads the same call back, and
    leaves nothing of it as content. A template that renders none, or no template, has the format
    none(), whose name is "". Raises InputError for an unknown name, and for a function that returns
    no Format.
    """
    if name == "auto":
        return of_template(tokenizer)
    component = resolve(name or "none", HOME)
    made = component()
    if not isinstance(made, Format):
        raise InputError(
            f"calls: {component.name} returns no format of tool calls",
            value=made,
            rule="a format says how calls are read and where a turn ends",
            fix="return a rljax.environments.calls.Format, or name one of "
            + ", ".join(family.__name__ for family in (*FAMILIES, python, tag)),
        )
    return made


_PROBE = {"town": "Ulm", "days": 3, "facts": {"sunny": True, "about": ["a", 2.5]}}
_ARGUMENTS = {
    "town": {"type": "string", "description": "A town."},
    "days": {"type": "integer", "description": "How many days."},
    "facts": {"type": "object", "description": "What is known.", "properties": {}},
}
_SCHEMA = {"type": "object", "properties": _ARGUMENTS, "required": ["town"]}
_WEATHER = {"name": "weather_at", "description": "The weather.", "parameters": _SCHEMA}
_TOOL = {"type": "function", "function": _WEATHER}


def of_template(tokenizer) -> Format:
    """The format in which the tokenizer's chat template writes calls."""
    if not tokenizer.has_chat_template:
        return none()
    question = {"role": "user", "content": "What will the weather be like?"}
    plain = {"role": "assistant", "content": "Fine and warm."}
    call = {"id": "call00000", "type": "function"}
    call["function"] = {"name": "weather_at", "arguments": _PROBE}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        text = tokenizer.render_chat([question, answer], tools=[_TOOL], add_generation_prompt=False)
        before = tokenizer.render_chat([question], tools=[_TOOL], add_generation_prompt=True)
        answered = tokenizer.render_chat([question, plain], add_generation_prompt=False)
    except InputError:  # a template that knows no tools
        return _by_vocabulary(tokenizer)
    reply, begun = _reply_in(text, before)
    end_of_turn = answered.rpartition(plain["content"])[2].strip()
    for family in FAMILIES:
        found = family()
        said = reply
        for end in filter(None, (*found.ends, end_of_turn)):
            said = said.partition(end)[0]
        for token in tokenizer.special_ids - found.shown(tokenizer):  # as Format.decode drops them
            said = said.replace(tokenizer.decode([token], skip_special_tokens=False), "")
        parsed = found.parse(said, [_TOOL], begun=begun)
        read = [(c.name, c.arguments) for c in parsed.calls] == [("weather_at", _PROBE)]
        if read and not parsed.content.strip():
            return found
    return _by_vocabulary(tokenizer)


def _reply_in(text: str, prompt: str) -> tuple[str, str]:
    """Returns the assistant's part of a rendered `text`, and the reasoning that is begun before it.
    It may lack reasoning that `prompt`, the question alone, ends with: <think> begins like
    <tool_call>, and half a tag is none of the prompt."""
    prompt = os.path.commonprefix([text, prompt])
    half = prompt.rfind("<")
    at = half if half >= 0 and ">" not in prompt[half:] else len(prompt)
    return text[at:], beginning_of(text[:at])


def _by_vocabulary(tokenizer) -> Format:
    """Gemma 2 and 3 have a way to write calls that their templates do not render."""
    turn = tokenizer.encode("<start_of_turn>")
    return gemma() if len(turn) == 1 and turn[0] in tokenizer.special_ids else none()
