"""What a format of tool calls is, and how one call is read: JSON with bounds, and what is wrong
with it in words that the policy can use.

No function here raises for what a policy wrote, and each costs time linear in the text: the first
bad call ends the reading, and so does the 129th call.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from rljax.environments.contract import Call

MAX_CALLS = 128  # of a reply
MAX_NAME = 256  # characters
MAX_DEPTH = 64  # of arguments: what reads them later may recurse
MAX_CONTAINERS = 10_000  # of arguments
_SPACE = re.compile(r"\s*")
_FORM = 'a call is {"name": ..., "arguments": {...}}'


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A reply taken apart.

    `content` is the text without its calls, `problem` says what is wrong with the first call that
    cannot be read ("" where all is well), and `calls` are those before it. `reasoning` is a text
    that the format itself keeps apart from the content.
    """

    content: str
    calls: tuple[Call, ...] = ()
    problem: str = ""
    reasoning: str = ""


@dataclasses.dataclass(frozen=True)
class Format:
    """How a family of models writes tool calls; "" is the name of the one without calls.

    `markers` are special tokens that `parse` has to see, `ends` tokens that end a turn beside the
    tokenizer's own, `stop_strings` texts that end one. What comes before the first of `starts` is
    content for sure (none: nothing is). `channels`: replies without calls have its markers, too.
    """

    name: str
    read: Callable[[str, Sequence[Mapping]], Parsed]
    markers: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    stop_strings: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    channels: bool = False

    def parse(self, text: str, schemas: Sequence[Mapping] = ()) -> Parsed:
        """The calls in a reply. `schemas` are those of the tools: formats that write no types get
        them from there. Never raises, whatever the text."""
        return self.read(text, schemas)

    def stop_ids(self, tokenizer) -> tuple[int, ...]:
        """The ids that end a turn: the tokenizer's own, and `ends` where it has them."""
        return tuple(dict.fromkeys([*tokenizer.eos_ids, *_ids_of(self.ends, tokenizer)]))

    def decode(self, tokenizer, ids: Sequence[int]) -> str:
        """The text of a reply as `parse` reads it: without end tokens at its end, and of special
        tokens with `markers` alone."""
        ids, stops = list(ids), set(self.stop_ids(tokenizer))
        while ids and ids[-1] in stops:
            ids.pop()
        return self.decoder(tokenizer)(ids)

    def decoder(self, tokenizer) -> Callable[[Sequence[int]], str]:
        """ids -> text, of special tokens with `markers` alone."""
        dropped = tokenizer.special_ids - set(_ids_of(self.markers, tokenizer))

        def decode(ids):
            return tokenizer.decode([i for i in ids if i not in dropped], skip_special_tokens=False)

        return decode


def _ids_of(texts: Iterable[str], tokenizer) -> list[int]:
    """The ids of those texts that are one special token."""
    if not tokenizer.has_chat_template:  # a tokenizer of characters may know none of them
        return []
    found = [tokenizer.encode(text) for text in texts]
    return [ids[0] for ids in found if len(ids) == 1 and ids[0] in tokenizer.special_ids]


def assistant_message(text: str, parsed: Parsed) -> dict:
    """The reply as a message that chat templates read; `text` is the whole of it. What could not be
    parsed stays text. A call without an id gets one of nine letters and digits: Mistral's rule."""
    message = {"role": "assistant", "content": parsed.content}
    if parsed.problem:
        return message | {"content": text}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [
            {
                "id": call.id or f"call{number:05d}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(parsed.calls)
        ]
        if parsed.reasoning and parsed.content:  # gpt-oss's template takes one of them only
            message["reasoning_content"] += "\n" + parsed.content
            message["content"] = ""
    return message


class CallReader:
    """Collects the calls of one text, up to the first bad one. `form` says how one is written."""

    def __init__(self, form: str = _FORM):
        self.calls: list[Call] = []
        self.problem = ""
        self._form = form

    @property
    def open(self) -> bool:
        """Whether to go on."""
        return not self.problem

    def fail(self, what: str) -> None:
        """Ends the reading with what is wrong with the call that comes next."""
        self.problem = f"call {len(self.calls) + 1}: {what}; {self._form}"

    def add(self, name: object, arguments: object, call_id: object = "") -> None:
        """One more call; arguments may be JSON as text."""
        if not isinstance(name, str) or not name.strip() or len(name) > MAX_NAME:
            self.fail("it names no tool")
            return
        if isinstance(arguments, str):
            arguments, _, problem = read_json(arguments, 0)
            if problem:
                self.fail(problem)
                return
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, dict):
            self.fail("its arguments are not an object with a value for each name")
        elif len(self.calls) >= MAX_CALLS:
            self.fail(f"a reply has at most {MAX_CALLS} calls")
        else:
            given = call_id if isinstance(call_id, str) else ""
            self.calls.append(Call(name.strip(), arguments, given[:MAX_NAME]))

    def add_object(self, value: object) -> None:
        """A call written as an object: {"name", "arguments"} or {"function": {...}}."""
        if not isinstance(value, dict):
            self.fail("it is not an object")
            return
        inner = value.get("function")
        whole = {**value, **inner} if isinstance(inner, dict) else value
        name = whole.get("name", inner)
        arguments = whole.get("arguments", whole.get("parameters"))
        self.add(name, arguments, value.get("id", ""))

    def add_json(self, text: str, at: int, name: str = "", call_id: str = "") -> int:
        """The call whose JSON begins at `at`; with a `name` the JSON is its arguments. Returns
        where it ends."""
        value, end, problem = read_json(text, at)
        if problem:
            self.fail(problem)
        elif name:
            self.add(name, value, call_id)
        else:
            self.add_object(value)
        return end

    def parsed(self, content: str, reasoning: str = "") -> Parsed:
        """All that was read."""
        return Parsed(content, tuple(self.calls), self.problem, reasoning)


# -- JSON


def _no_constant(name: str):
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_constant)


def read_json(text: str, at: int) -> tuple[object, int, str]:
    """The JSON value that begins at `at`, where it ends, and what is wrong with it."""
    start = skip_space(text, at)
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        what = error.msg[0].lower() + error.msg[1:]
        return None, start, f"its JSON is wrong at character {error.pos - start + 1}: {what}"
    except RecursionError:
        return None, start, _too_deep()
    except ValueError:
        return None, start, "its JSON has a number that is too long, or none"
    return value, end, _trouble(value, text, start, end)


def skip_space(text: str, at: int) -> int:
    """The place of the first character from `at` on that is no white space."""
    return _SPACE.match(text, at).end()


def _too_deep() -> str:
    return f"its arguments are nested deeper than {MAX_DEPTH}"


def _trouble(value: object, text: str, start: int, end: int) -> str:
    """Why a value that is JSON cannot be used: its depth, or half a surrogate pair."""
    if text.count("{", start, end) + text.count("[", start, end) > MAX_DEPTH:
        level, depth, containers = [value], 0, 0
        while level and depth <= MAX_DEPTH:
            level = [v for outer in level for v in _inside(outer) if isinstance(v, (dict, list))]
            depth, containers = depth + 1, containers + len(level)
            if containers > MAX_CONTAINERS:
                return f"its arguments have more than {MAX_CONTAINERS} lists and objects"
        if level:
            return _too_deep()
    if text.find("\\u", start, end) >= 0:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return "its JSON has half a surrogate pair"
    return ""


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
