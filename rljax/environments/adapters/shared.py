"""Code that adapters share: imports that say what to install, first prompts, histories,
sessions."""

import asyncio
import importlib
import inspect
import types
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from rljax.errors import InputError
from rljax.files import parse_json


def library(name: str, by: str, install: str) -> types.ModuleType:
    """The module called `name`, for the adapter `by`. Raises InputError with the command `install`
    if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(
            f"{by} needs the library {name.partition('.')[0]}",
            rule=str(error),
            fix=f"pip install {install}",
        ) from None


def with_prompt(prompt: str | Sequence[Mapping], seen: str | list) -> str | list[dict]:
    """The row's prompt with a first observation, a text or content parts, appended to its last
    message behind an empty line, or as a message of the user behind it if that is another
    role's."""
    if isinstance(prompt, str):
        content = joined_contents(prompt, seen, "\n\n")
        return content if isinstance(content, str) else [{"role": "user", "content": content}]
    messages = [dict(message) for message in prompt]
    if messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": seen}]
    messages[-1]["content"] = joined_contents(messages[-1]["content"], seen, "\n\n")
    return messages


def joined_contents(one: str | list, other: str | list, between: str = "") -> str | list[dict]:
    """Joins two contents of messages: to a text if both are texts, else to the parts of both."""
    between = between if one and other else ""
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}{between}{other}"
    texts = [{"type": "text", "text": text} for text in (one, between) if isinstance(text, str)]
    first_parts = [part for part in texts if part["text"]]
    last_parts = [{"type": "text", "text": other}] if isinstance(other, str) else other
    return [*(one if isinstance(one, list) else []), *first_parts, *last_parts]


def declared(function: Callable, fields: Mapping) -> dict:
    """Returns those of the fields that the function takes by name."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: fields[name] for name in fields if takes_all or name in parameters}


def followed(before: Sequence[Mapping], after: Sequence[Mapping]) -> list[Mapping] | None:
    """Returns the messages that `after` has behind `before`; None if it does
    not begin with them."""
    old, new = map(essence, before), map(essence, after[: len(before)])
    matches = len(after) >= len(before) and all(a == b for a, b in zip(old, new, strict=True))
    return list(after[len(before) :]) if matches else None


def essence(message: Mapping) -> tuple:
    """Returns (role, text, calls) of a message, equal for all forms in which libraries write it.
    Agents strip texts, so white space at the ends does not count."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    functions = [(call.get("name"), _arguments(call.get("arguments"))) for call in calls]
    return message.get("role"), content.strip(), functions


def _arguments(arguments: object) -> object:
    try:
        return parse_json(arguments, "arguments") if isinstance(arguments, str) else arguments
    except InputError:
        return arguments


class Session:
    """Keeps the object of `make()`, an async context manager, open in a task of its own:
    libraries built on anyio must be left by the task that entered them, while many tasks play an
    episode's steps."""

    def __init__(self, make: Callable[[], AbstractAsyncContextManager]):
        self._make, self._asked = make, asyncio.Queue()

    async def __aenter__(self) -> "Session":
        await self.connect()
        return self

    async def connect(self) -> None:
        """Opens the object, also again after it has ended. Raises the error that keeps it
        from opening."""
        self._ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live())
        await asyncio.wait([self._ready, self._task], return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            self._task.result()

    async def __aexit__(self, *_) -> None:
        self._asked.put_nowait(None)
        await asyncio.wait([self._task])
        self._task.cancelled() or self._task.exception()  # the error of a lost connection

    @property
    def ended(self) -> bool:
        """Returns whether the object has ended by itself, as after a lost connection."""
        return self._task.done()

    async def ask(self, what: Callable[[object], Awaitable]) -> object:
        """Returns the result of `what(the object)`. Raises the exception that it raises, and
        ConnectionError after the end."""
        answer = asyncio.get_running_loop().create_future()
        self._asked.put_nowait((what, answer))
        await asyncio.wait([answer, self._task], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ConnectionError("the connection was lost; nobody knows whether it was done")
        return answer.result()

    async def _live(self) -> None:
        async with self._make() as resource:
            self._ready.set_result(None)
            while (request := await self._asked.get()) is not None:
                function, answer = request
                try:
                    result = await function(resource)
                except Exception as error:
                    answer.done() or answer.set_exception(error)
                else:
                    answer.done() or answer.set_result(result)
