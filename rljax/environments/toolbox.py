"""Tools: functions that the policy calls by name, and the environment in which it does.

A tool is a plain function. Its name, type hints and docstring are what the policy is shown; an
option that the config binds is not shown. A function that is annotated to return a callable is
called once for each episode, with its options, and what it returns is the tool, which may have a
memory of that episode:

    def notebook(*, pages: int = 3) -> Callable:
        notes = []

        def write(note: str) -> int:
            "Writes a note and returns how many there are."
            notes.append(note)
            return len(notes)

        return write

A tool's failure is an answer to the policy: an unknown name, arguments that do not fit, an
exception. What the machine lacks is the episode's failure: InputError, SandboxError.
"""

import collections.abc
import dataclasses
import functools
import inspect
import json
import math
import typing
from collections.abc import Callable, Generator, Mapping, Sequence

import numpy as np

from rljax.components import Component, resolve
from rljax.config import NAMESPACES
from rljax.contracts import contract, spec
from rljax.environments.contract import Call, Opening, Reply
from rljax.environments.schemas import schema_of
from rljax.errors import InputError
from rljax.rewards.sandbox.tiers import SandboxError

__all__ = ["Toolbox", "prepare_worker", "toolbox", "tools"]

HOME = NAMESPACES["tool"]
# Of an answer. environment.max_reply_tokens cuts it again, but a tokenizer would read it whole.
MOST_CHARACTERS = 32_768
_LONGEST_ERROR = 500  # characters
_TYPES = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": (list, tuple),
    "object": Mapping, "null": type(None),
}  # fmt: skip


@contract(
    repeatable=lambda options: all(spec(_component(f)).repeatable for f in options["functions"]),
    on_limit=None,
)
def tools(*, functions: tuple[str, ...] = ()) -> Generator[object, Reply, None]:
    """The prompt of the row, and answers to the policy's calls until a reply has none; then
    `reward.function` scores that reply.

    `functions`: tools of rljax.environments.functions, dotted, or "file.py:function".
    """
    box = toolbox(functions)
    reply = yield Opening(tools=box.schemas)
    while reply.calls:
        reply = yield [box.answer(call) for call in reply.calls]


def prepare_worker(component: Component) -> None:
    """Makes the tools of `tools` once, before the first clock starts: an index takes its time."""
    toolbox(component.options.get("functions", ()))


def toolbox(functions: Sequence[str | Callable]) -> "Toolbox":
    """The tools of one episode, from texts as a config has them or from functions. Raises
    InputError."""
    if isinstance(functions, str) or not functions:
        raise InputError(
            "a toolbox needs functions",
            value=functions,
            rule="a tuple of their names",
            fix="functions=('my_tools.multiply', 'python()')",
        )
    found: dict[str, Tool] = {}
    for function in functions:
        tool = _tool(function)
        name = tool.schema["function"]["name"]
        if name in found:
            raise InputError(f"two tools are called {name!r}", rule="the policy calls them by name")
        found[name] = tool
    return Toolbox(found)


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function, bound to the options of the config, and the JSON schema that shows the rest."""

    function: Callable
    schema: dict


@dataclasses.dataclass(frozen=True)
class Toolbox:
    """Tools by name."""

    tools: Mapping[str, Tool]

    @property
    def schemas(self) -> tuple[dict, ...]:
        """What a chat template shows of them, as OpenAI's API writes it."""
        return tuple(tool.schema for tool in self.tools.values())

    def answer(self, call: Call) -> dict:
        """The message of role "tool" that answers a call. Where the call failed, `failure` says
        "unknown" (no such tool) or "failed" and the content says why."""
        tool, failure = self.tools.get(call.name), ""
        if tool is None:
            known = ", ".join(self.tools)
            text, failure = f"there is no tool {call.name!r:.100}; there are {known}", "unknown"
        elif misfit := _misfit_of_call(call.arguments, tool.schema["function"]["parameters"]):
            text, failure = misfit, "failed"
        else:
            try:
                text = _as_text(tool.function(**call.arguments))
            except (InputError, SandboxError):
                raise
            except (Exception, SystemExit) as error:
                text, failure = _described(error), "failed"
        message = {"role": "tool", "name": call.name}
        message |= {"tool_call_id": call.id} if call.id else {}
        message |= {"content": _cut(f"Error: {text}" if failure else text)}
        return message | ({"failure": failure} if failure else {})


def _component(function: str | Callable) -> Component | Callable:
    return resolve(function, HOME) if isinstance(function, str) else function


def _tool(function: str | Callable) -> Tool:
    component = _component(function)
    if not isinstance(component, Component):
        return Tool(component, schema_of(component))
    _require_plain(component)
    if _makes_a_tool(component):
        made = component()
        return Tool(made, schema_of(made))
    shown = schema_of(component.function)
    parameters = shown["function"]["parameters"]
    free = {
        name: kind
        for name, kind in parameters.get("properties", {}).items()
        if name not in component.options
    }
    needed = [name for name in parameters.get("required", ()) if name in free]
    shown = {**shown["function"], "parameters": {**parameters, "properties": free}}
    shown["parameters"] |= {"required": needed} if "required" in parameters else {}
    bound = functools.partial(component.function, **component.options)
    return Tool(bound, {"type": "function", "function": shown})


def _makes_a_tool(component: Component) -> bool:
    kind = component.signature.return_annotation
    return collections.abc.Callable in (kind, typing.get_origin(kind))


def _require_plain(component: Component) -> None:
    kinds = [p.kind for p in component.signature.parameters.values()]
    if inspect.iscoroutinefunction(component.function):
        raise InputError(
            f"tool {component.name!r} is async",
            rule="a tool is a plain function",
            fix="write an environment of your own, an `async def` generator that awaits it",
        )
    if inspect.Parameter.POSITIONAL_ONLY in kinds:
        raise InputError(
            f"tool {component.name!r} takes an argument by position only",
            rule="tools are called with names",
            fix="remove the '/' from its signature",
        )


# -- arguments and answers


def _misfit_of_call(arguments: object, schema: Mapping) -> str:
    """What is wrong with the arguments of a call; "" if nothing is."""
    if not isinstance(arguments, Mapping):
        return f"the arguments are {_kind(arguments)}, not an object of names and values"
    known = schema.get("properties", {})
    if lacking := [name for name in schema.get("required", ()) if name not in arguments]:
        return f"the argument {lacking[0]!r} is missing"
    for name, value in arguments.items():
        if name not in known:
            names = ", ".join(known) or "none"
            return f"there is no argument {name!r:.100}; the arguments are {names}"
        if misfit := _misfit(value, known[name]):
            return f"the argument {name!r} {misfit}"
    return ""


def _misfit(value: object, schema: Mapping) -> str:
    """Why a value is none of a JSON schema's types; "" where it is one."""
    choices = schema.get("anyOf")
    if choices:
        misfits = [_misfit(value, choice) for choice in choices]
        return "" if "" in misfits else " and ".join(dict.fromkeys(misfits))
    if "enum" in schema and value not in schema["enum"]:
        return f"must be one of {', '.join(map(repr, schema['enum']))}"
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is_a(value, kind) for kind in kinds):
        return f"must be of type {' or '.join(kinds)}, not {_kind(value)}"
    if isinstance(value, (list, tuple)) and isinstance(schema.get("items"), Mapping):
        return next(filter(None, (_misfit(item, schema["items"]) for item in value)), "")
    return ""


def _is_a(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES.get(kind, object))


def _kind(value: object) -> str:
    return next((kind for kind in ("boolean", *_TYPES) if _is_a(value, kind)), "something else")


def _as_text(value: object) -> str:
    """A tool's result as text: a text as it is, everything else as JSON. Raises TypeError,
    ValueError."""
    if isinstance(value, str):
        return value
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False)


def _described(error: BaseException) -> str:
    """An exception as one line, even if its own text raises."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}{': ' * bool(text)}{text}"[:_LONGEST_ERROR]


def _cut(text: str) -> str:
    """Valid Unicode of at most MOST_CHARACTERS: a longer text keeps its head and its tail."""
    if len(text) > MOST_CHARACTERS:
        half, cut = MOST_CHARACTERS // 2, len(text) - MOST_CHARACTERS
        text = f"{text[:half]}\n[{cut} characters cut]\n{text[-half:]}"
    return text.encode("utf-8", "replace").decode("utf-8")
