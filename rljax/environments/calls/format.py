"""The format of tool calls, and the reading of one call: JSON with bounds, and errors in words
that the policy can use.

No function here raises for a text of the policy, and each costs time linear in the text: the 129th
call, good or bad, ends the reading.
"""

import bisect
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from rljax.environments.contract import Call
from rljax.reasoning import cut_marks, is_mark, reasoning_spans

MAX_CALLS = 128  # of a reply
MAX_READ = 8 * MAX_CALLS  # values of JSON, good or bad
MAX_NAME = 256  # characters
MAX_DEPTH = 64  # of arguments: what reads them later may recurse
MAX_CONTAINERS = 10_000  # of arguments
_LINE = 256  # characters before a call in which its line is looked at
_SPACE = re.compile(r"\s*")
_FORM = 'a call is {"name": ..., "arguments": {...}}'
# What is written where a form is only shown: {"name": <function-name>, "arguments": {...}}.
_PLACEHOLDER = re.compile(r"\.\.\.|…|<(?!tool_call)[A-Za-z][\w -]*+>")
FORM = "form"
_OBJECT = re.compile(r"""\s*+[\[{]\s*+(?:["'{\[}\]]|\Z)""")
_CODE = re.compile(r"^[ \t]*+(```+|~~~+)([^\n]*)$|`[^`\n]++`", re.MULTILINE)
_QUOTES = "\"'`“‘«"


@dataclasses.dataclass(frozen=True)
class Parsed:
    """The parts of a reply.

    `calls` are those that can be read, and `problem` says what is wrong with the first one that
    cannot ("" if there is none). `content` is the answer: the text without its calls and without
    the `reasoning` before it. `said` is the text without its calls alone, as it was written; where
    a format keeps reasoning apart by itself it is the content. `spans` are the characters [a, b) of
    the text that are calls; a format of one's own need not give them.
    """

    content: str
    calls: tuple[Call, ...] = ()
    problem: str = ""
    reasoning: str = ""
    said: str | None = None
    spans: tuple[tuple[int, int], ...] | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self):
        if self.said is None:
            object.__setattr__(self, "said", self.content)


@dataclasses.dataclass(frozen=True)
class Format:
    """The form in which a family of models writes tool calls; the name "" is that of no calls.

    `markers` are special tokens that `parse` has to see, `ends` tokens that end a turn beside the
    tokenizer's own, `stop_strings` texts that end one. Text before the first of `starts` is
    certainly content (without `starts`, none is). With `channels`, replies without calls have the
    markers, too, and reasoning is a channel.
    """

    name: str
    read: Callable[[str, Sequence[Mapping]], Parsed]
    markers: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    stop_strings: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    channels: bool = False

    def parse(self, text: str, schemas: Sequence[Mapping] = (), *, begun: str = "") -> Parsed:
        """Parses the calls in a reply, outside of its reasoning.

        `schemas` are those of the tools: formats that write no types get them from there. `begun`
        is the beginning of the reply in the prompt (rljax.reasoning.beginning_of). Never raises,
        whatever the text.
        """
        whole = self.read(text, schemas)
        if self.channels or any(map(is_mark, self.starts)):  # a tool may be called <think>
            return whole
        thought = reasoning_spans(text, begun, whole.spans or ())
        if begun and whole.spans and whole.spans[0][0] == 0 and thought == [(0, len(text))]:
            return whole  # at once, where the prompt would have it reason: nothing is drafted
        if not thought:
            return whole
        reasoning = "\n".join(filter(None, (cut_marks(text[a:b]) for a, b in thought)))
        if whole.spans is None:  # of a reader that does not say where its calls are
            at = thought[-1][1]
            rest = self.read(text[at:], schemas) if at < len(text) else Parsed("")
            said = text[:at] + rest.content
            return dataclasses.replace(rest, reasoning=reasoning, said=said, spans=None)
        pieces, at = [], 0
        for a, b in thought:  # as many characters, so that offsets stay what they are
            pieces += [text[at:a], " " * (b - a)]
            at = b
        parsed = self.read("".join([*pieces, text[at:]]), schemas)
        ends = [0, *(end for _, end in thought)]
        spans = [  # white space before a call is its own, but no reasoning is
            (max(a, max(end for end in ends if end <= b)), b) for a, b in parsed.spans or ()
        ]
        content = without(text, sorted([*thought, *spans])).lstrip()
        said = without(text, spans)
        return dataclasses.replace(
            parsed, content=content, reasoning=reasoning, said=said, spans=tuple(spans)
        )

    def stop_ids(self, tokenizer) -> tuple[int, ...]:
        """The ids that end a turn: the tokenizer's own, and those of `ends` that it has."""
        return tuple(dict.fromkeys([*tokenizer.eos_ids, *_ids_of(self.ends, tokenizer)]))

    def decode(self, tokenizer, ids: Sequence[int]) -> str:
        """The text of a reply as `parse` reads it: without end tokens at its end, and without
        special tokens other than `shown`."""
        ids, stops = list(ids), set(self.stop_ids(tokenizer))
        while ids and ids[-1] in stops:
            ids.pop()
        return self.decoder(tokenizer)(ids)

    def shown(self, tokenizer) -> set[int]:
        """The ids of the special tokens that `parse` sees: `markers`, and marks of reasoning."""
        return _marks_of(tokenizer) | set(_ids_of(self.markers, tokenizer))

    def decoder(self, tokenizer) -> Callable[[Sequence[int]], str]:
        """Returns a function ids -> text that drops special tokens other than `shown`."""
        dropped = tokenizer.special_ids - self.shown(tokenizer)

        def decode(ids):
            return tokenizer.decode([i for i in ids if i not in dropped], skip_special_tokens=False)

        return decode


@functools.lru_cache(maxsize=8)
def _marks_of(tokenizer) -> frozenset[int]:
    """The special tokens that are marks of reasoning."""
    return frozenset(
        i
        for i in tokenizer.special_ids
        if is_mark(tokenizer.decode([i], skip_special_tokens=False))
    )


def _ids_of(texts: Iterable[str], tokenizer) -> list[int]:
    """The ids of those texts that are one special token."""
    if not tokenizer.has_chat_template:  # a tokenizer of characters may know none of them
        return []
    found = [tokenizer.encode(text) for text in texts]
    return [ids[0] for ids in found if len(ids) == 1 and ids[0] in tokenizer.special_ids]


def without(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """The text outside of spans [a, b), which are in order."""
    kept, at = [], 0
    for a, b in spans:
        kept.append(text[at:a])
        at = max(at, b)
    return "".join([*kept, text[at:]])


def assistant_message(text: str, parsed: Parsed, *, apart: bool = False) -> dict:
    """The reply as a message that chat templates read. `text` is the whole reply; a call that could
    not be parsed stays text. A call without an id gets one of nine letters and digits: Mistral's
    rule. With `apart`, reasoning is a field of its own, for a template that reads it only there."""
    if parsed.problem and not parsed.calls:
        return {"role": "assistant", "content": text}
    apart = apart or parsed.said == parsed.content  # as formats with channels write it
    message = {"role": "assistant", "content": parsed.content if apart else parsed.said}
    if parsed.reasoning and apart:
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
        channels = parsed.said == parsed.content
        if channels and parsed.reasoning and parsed.content:  # gpt-oss's template takes one only
            message["reasoning_content"] += "\n" + parsed.content
            message["content"] = ""
    return message


class CallReader:
    """Collects the calls of one text. `form` describes how a call is written.

    A reader of a format goes through the text, hands each call to `made` or `bad` with the
    characters [start, end) that it takes, and goes on at the offset that they return. A call
    that is only quoted (in a block of code, in quotes, in the middle of a sentence) is none, and
    no bad one.
    """

    def __init__(self, text: str, form: str = _FORM):
        self.text = text
        self.calls: list[Call] = []
        self.problem = ""
        self.spans: list[tuple[int, int]] = []
        self._bad = self._read = 0
        self._form = form
        self._resumed = 0  # where the last call ended
        self._code: tuple[list[int], list[int]] | None = None  # offsets where code begins, and ends

    @property
    def open(self) -> bool:
        """Returns whether the reading goes on: it stops after a number of calls."""
        return len(self.calls) + self._bad <= MAX_CALLS and self._read < MAX_READ

    def made(
        self, start: int, end: int, *calls: Call | str, tight: bool = True, shown: str = "sentence"
    ) -> int:
        """Adds the calls that stand at [start, end), or texts that say what is wrong with one.
        Returns the offset at which to go on. `tight`: the white space around them is no
        content. `shown`: where calls are only quoted, in a "sentence" or code, in "code", or ""
        = nowhere."""
        if shown and (past := self._past_code(start, end)):
            return past
        if shown == "sentence" and self._in_a_sentence(start, end):
            return end
        good = False
        for call in calls:
            if isinstance(call, str):
                self.bad(start, end, call, shown=False)
            elif len(self.calls) < MAX_CALLS:
                self.calls.append(call)
                good = True
            elif not self.problem:
                self.bad(start, end, f"a reply has at most {MAX_CALLS} calls", shown=False)
        self._resumed, self._code = end, None
        if good:
            if tight:
                start = max(self.spans[-1][1] if self.spans else 0, _rstripped(self.text, start))
                end = len(self.text) if self.text[end:].isspace() else end
            self.spans.append((start, end))
        return end

    def bad(self, start: int, end: int, what: str, *, shown: bool = True) -> int:
        """Adds a call at [start, end) that cannot be read, because of `what`. Returns the offset at
        which to go on."""
        if shown and (past := self._past_code(start, end)):
            return past
        self._bad += 1
        if not self.problem:
            self.problem = f"call {len(self.calls) + self._bad}: {what}; {self._form}"
        self._resumed, self._code = end, None
        return end

    def parsed(self, content: str | None = None, reasoning: str = "") -> Parsed:
        """The result of the reading. `content` replaces the text without the calls."""
        if content is None:
            content = without(self.text, self.spans)
        return Parsed(content, tuple(self.calls), self.problem, reasoning, spans=tuple(self.spans))

    def json(self, at: int) -> tuple[object, int, str]:
        """The result of `read_json`, with the problem "form" for a placeholder, such as dots or a
        name in brackets."""
        self._read += 1
        value, end, problem, where = _decoded(self.text, at)
        return value, end, (FORM if problem and _PLACEHOLDER.match(self.text, where) else problem)

    # -- what is only shown

    def alone(self, start: int) -> bool:
        """Returns whether no sentence stands before the offset in its line."""
        return _beside(self.text[max(0, start - _LINE) : start].rstrip(" \t")[-1:])

    def ends_line(self, end: int) -> bool:
        """Returns whether no sentence stands behind the offset in its line."""
        return _beside(self.text[end : end + _LINE].lstrip(" \t")[:1])

    def _in_a_sentence(self, start: int, end: int) -> bool:
        quoted = self.text[start - 1 : start] in _QUOTES and start > 0
        if quoted and self.text[end : end + 1] in "\"'`”’»" and end < len(self.text):
            return True
        return not self.alone(start) and not self.ends_line(end)

    def _past_code(self, start: int, end: int) -> int:
        """The end of the block of code, or of the code in a line, that holds [start, end); 0 where
        none does."""
        if self._code is None:
            self._code = _code_of(self.text, self._resumed)
        begins, ends = self._code
        at = bisect.bisect_right(begins, start) - 1
        return ends[at] if at >= 0 and end <= ends[at] and start < ends[at] else 0


def _beside(character: str) -> bool:
    """Returns whether a character beside a call is of no sentence: a line's end, or a mark."""
    return not character or character in "\n<>[]{}|;"


def _rstripped(text: str, end: int) -> int:
    """The offset behind the last character before `end` that is no white space."""
    while end and text[end - 1].isspace():
        end -= 1
    return end


def _code_of(text: str, start: int) -> tuple[list[int], list[int]]:
    """Returns (begin, end) of the code from `start` on: fenced blocks, and what stands in
    backticks. A text that is nothing but code is no example of anything: it has none."""
    begins, ends, fence, begin = [], [], "", 0
    if text.find("`", start) < 0 and text.find("~~~", start) < 0:
        return begins, ends
    for found in _CODE.finditer(text, start):
        mark, rest = found[1], found[2]
        if fence:
            if mark and mark[0] == fence[0] and len(mark) >= len(fence) and not rest.strip():
                begins.append(begin)
                ends.append(found.end())
                fence = ""
        elif mark and mark not in rest:
            fence, begin = mark, found.start()
        else:
            begins.append(found.start())
            ends.append(found.end())
    if not start and not without(text, list(zip(begins, ends, strict=True))).strip():
        return [], []
    return begins, ends


# -- one call


def call_of(name: object, arguments: object, call_id: object = "") -> Call | str:
    """A call, or a text that says what is wrong with it; arguments may be JSON as text."""
    if not isinstance(name, str) or not name.strip() or len(name) > MAX_NAME:
        return "it names no tool"
    if isinstance(arguments, str):
        arguments, _, problem = read_json(arguments, 0)
        if problem:
            return problem
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        return "its arguments are not an object with a value for each name"
    given = call_id if isinstance(call_id, str) else ""
    return Call(name.strip(), arguments, given[:MAX_NAME])


def call_of_object(value: object) -> Call | str:
    """A call written as an object, {"name", "arguments"} or {"function": {...}}, or a text that
    says what is wrong with it."""
    if not isinstance(value, dict):
        return "it is not an object"
    inner = value.get("function")
    whole = {**value, **inner} if isinstance(inner, dict) else value
    name = whole.get("name", inner)
    arguments = whole.get("arguments", whole.get("parameters"))
    return call_of(name, arguments, value.get("id", ""))


def like_object(text: str, at: int) -> bool:
    """Returns whether the text at offset `at` looks like a JSON object."""
    return bool(_OBJECT.match(text, at))


# -- JSON


def _no_constant(name: str):
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_constant)


def read_json(text: str, at: int) -> tuple[object, int, str]:
    """(the JSON value that begins at offset `at`, the offset of its end, what is wrong with
    it or "")."""
    return _decoded(text, at)[:3]


def _decoded(text: str, at: int) -> tuple[object, int, str, int]:
    """`read_json`, and the offset at which the JSON is wrong."""
    start = skip_space(text, at)
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        what = error.msg[0].lower() + error.msg[1:]
        what = f"its JSON is wrong at character {error.pos - start + 1}: {what}"
        return None, start, what, error.pos
    except RecursionError:
        return None, start, _too_deep(), start
    except ValueError:
        return None, start, "its JSON has a number that is too long, or none", start
    return value, end, _trouble(value, text, start, end), end


def skip_space(text: str, at: int) -> int:
    """The offset of the first character from `at` on that is no white space."""
    return _SPACE.match(text, at).end()


def _too_deep() -> str:
    return f"its arguments are nested deeper than {MAX_DEPTH}"


def _trouble(value: object, text: str, start: int, end: int) -> str:
    """The reason why a JSON value cannot be used: its depth, or half a surrogate pair."""
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
