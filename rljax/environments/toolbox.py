"""Tools: functions that the policy calls by name, and the environment that runs them.

A tool is a function, which may be async. The policy is shown its name, type hints and docstring; an
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
exception. A sandbox that breaks is the episode's failure: SandboxError.
"""

import collections.abc
import dataclasses
import functools
import inspect
import json
import math
import re
import typing
from collections.abc import Callable, Generator, Mapping, Sequence

import numpy as np

from rljax.components import Component, resolve
from rljax.config import NAMESPACES
from rljax.contracts import component_in, contract, spec
from rljax.environments.awaiting import awaited
from rljax.environments.contract import Call, Opening, Reply
from rljax.environments.schemas import checked_arguments, name_of, schema_of
from rljax.errors import InputError
from rljax.rewards.sandbox.tiers import SandboxError, sandbox_tier

__all__ = ["Toolbox", "answered", "described", "toolbox", "tools"]

HOME = NAMESPACES["tool"]
ToolText = component_in(HOME)
# Limit of an answer, as environment.max_reply_tokens cuts only after all of it was tokenized.
MOST_CHARACTERS = 32_768
_LONGEST_ERROR = 500  # characters
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@contract(
    safe=True,
    repeatable=lambda options: all(spec(_component(f)).repeatable for f in options["functions"]),
    on_limit=None,
    prepare=lambda options: functools.partial(_prepare, options["functions"]),
)
def tools(*, functions: tuple[ToolText, ...] = ()) -> Generator[object, Reply, None]:
    """The prompt of the row, and answers to the policy's calls until a reply has none; then
    `reward.function` scores that reply.

    `functions`: tools of rljax.environments.functions, dotted, or "file.py:function".
    """
    box = toolbox(functions)
    reply = yield Opening(tools=box.schemas)
    while reply.calls:
        reply = yield [box.answer(call) for call in reply.calls]


def _prepare(functions: Sequence[str]) -> dict[str, str]:
    """Makes the tools of `tools` once, before the first clock starts: an index takes its time.
    Returns the tier of the sandbox if one of them uses it."""
    box = toolbox(functions)
    modules = {getattr(tool.function, "__module__", "") for tool in box.tools.values()}
    return {"sandbox_tier": sandbox_tier()} if f"{HOME}.python_tool" in modules else {}


def toolbox(functions: Sequence[str | Callable]) -> "Toolbox":
    """The tools of one episode, from texts as a config has them or from functions. Raises
    InputError without functions, for a text that names none, for one without a schema, and for two
    of one name."""
    if isinstance(functions, str) or not functions:
        rule = "a tuple of their names"
        fix = "functions=('my_tools.multiply', 'python()')"
        raise InputError("a toolbox needs functions", value=functions, rule=rule, fix=fix)
    tools_by_name: dict[str, Tool] = {}
    for function in functions:
        tool = _tool(function)
        name = tool.schema["function"]["name"]
        if name in tools_by_name:
            raise InputError(
                f"two tools are called {name!r}",
                rule="the policy calls them by name",
                fix="rename one of the functions, or leave it out",
            )
        tools_by_name[name] = tool
    return Toolbox(tools_by_name)


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
        """Returns the schemas that a chat template shows, as OpenAI's API writes it."""
        return tuple(tool.schema for tool in self.tools.values())

    def answer(self, call: Call) -> dict:
        """The message of role "tool" that answers a call. If the call failed, `failure` is
        "unknown" (no such tool) or "failed", and the content says why. Raises SandboxError if a
        sandbox breaks."""
        return answered(call, *self._result(call))

    def _result(self, call: Call) -> tuple[str, str]:
        if call.name not in self.tools:
            names = ", ".join(self.tools)
            return f"there is no tool {_name(call)}; there are {names}", "unknown"
        tool = self.tools[call.name]
        arguments, misfit = checked_arguments(tool.schema, call.arguments)
        if misfit:
            return f"the arguments do not fit: {misfit}", "failed"
        try:
            return _as_text(awaited(tool.function(**arguments))), ""
        except SandboxError:
            raise
        except (Exception, SystemExit) as error:
            return described(error), "failed"


def answered(call: Call, text: str, failure: str = "") -> dict:
    """The message of role "tool" with a result; with an error if `failure` is not ""."""
    message = {"role": "tool", "name": _name(call)}
    message |= {"tool_call_id": call.id} if call.id else {}
    message |= {"content": _cut(f"Error: {text}" if failure else text)}
    return message | ({"failure": failure} if failure else {})


def _component(function: str | Callable) -> Component | Callable:
    return resolve(function, HOME) if isinstance(function, str) else function


def _tool(function: str | Callable) -> Tool:
    component = _component(function)
    if isinstance(component, Component) and _makes_a_tool(component):
        component = awaited(component())
    target = getattr(component, "function", component)
    if inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target):
        raise InputError(
            f"tool {name_of(target)!r} is a generator",
            rule="a tool returns its result, once",
            fix="return a list, or one text, instead of each yield",
        )
    if not isinstance(component, Component):
        return Tool(component, schema_of(component))
    bound = functools.partial(component.function, **component.options)
    return Tool(bound, schema_of(component.function, hidden=component.options))


def _makes_a_tool(component: Component) -> bool:
    try:
        kind = typing.get_type_hints(component.function).get("return")
    except (NameError, TypeError):
        return False  # schema_of says what is wrong
    return collections.abc.Callable in (kind, typing.get_origin(kind))


def _name(call: Call) -> str:
    """Returns a name that the policy wrote, without characters that could form a special token."""
    return re.sub(r"[^\w.-]", "?", call.name[:64])


def _as_text(value: object) -> str:
    """Returns a tool's result as text: a text as it is, values that JSON has as JSON, anything
    else as its str(), without addresses. NumPy's numbers and arrays count as Python's, and a set is
    a sorted list; other values inside JSON are written as their str(). So the text is the same in
    every process, in which an episode may be played again."""
    if isinstance(value, str):
        return value
    try:
        value = _plain(_with_sorted_sets(value))
    except RecursionError:  # a circle
        return _str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if not isinstance(value, dict | list | tuple | int | float | None):
        return _str(value)
    try:
        return json.dumps(value, ensure_ascii=False, default=lambda item: _plain(item, _str))
    except (TypeError, ValueError, RecursionError):  # keys that are no texts, a circle
        return _str(value)


def _str(value: object) -> str:
    return without_addresses(str(value))


def without_addresses(text: str) -> str:
    """Returns the text without the addresses of objects, which differ from process to process."""
    return _ADDRESS.sub(" at 0x...", text)


def _with_sorted_sets(value: object) -> object:
    """Returns a value with a list in place of each set: their order differs from process to
    process. Numbers and texts are in their own order, other items in that of their texts."""
    if type(value) is dict:
        return {name: _with_sorted_sets(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_with_sorted_sets, value))
    if not isinstance(value, set | frozenset):
        return value
    items = [_with_sorted_sets(item) for item in value]
    is_plain = all(isinstance(x, str) for x in items) or all(
        isinstance(x, int | float) for x in items
    )
    return sorted(items, key=None if is_plain else lambda item: _str([item]))


def _plain(value: object, convert: Callable = lambda value: value) -> object:
    """Returns a value of NumPy as Python's own, and any other value as `convert` makes it."""
    if isinstance(value, np.generic | np.ndarray):
        plain = value.tolist()
        return convert(plain) if isinstance(plain, np.generic) else plain
    return convert(value)


def described(error: BaseException) -> str:
    """An exception as one line, even if its own text raises."""
    try:
        text = str(error)
    except Exception:
        text = ""
    text = without_addresses(text)
    return f"{type(error).__name__}{': ' * bool(text)}{text}"[:_LONGEST_ERROR]


def _cut(text: str) -> str:
    """Returns valid Unicode of at most MOST_CHARACTERS; a longer text keeps
    its head and its tail."""
    if len(text) > MOST_CHARACTERS:
        half, cut = MOST_CHARACTERS // 2, len(text) - MOST_CHARACTERS
        text = f"{text[:half]}\n[{cut} characters cut]\n{text[-half:]}"
    return text.encode("utf-8", "replace").decode("utf-8")
