"""Calls written as code: Python's `f(a=1)` and Gemma's `call:f{a:1}`, whose arguments are literals.

A scanner of its own, for Python's parser warns about what a policy writes, and its cost and depth
could not be bounded. Such a call has bounds of its own, MAX_VALUES and MAX_ESCAPES.
"""

import contextlib
import re
from collections.abc import Iterator

from rljax.environments.calls.format import MAX_CALLS, MAX_DEPTH, call_of
from rljax.environments.contract import Call

MAX_VALUES, MAX_ESCAPES = 1000, 10_000
QUOTE = '<|"|>'  # Gemma 4 writes strings between these
ESCAPE = "<escape>"  # FunctionGemma between these
_STRING = re.compile(
    r"""([rRbBuU]{0,2})(?:"{3}((?:[^\\"]++|\\.|"(?!""))*+)"{3}|'{3}((?:[^\\']++|\\.|'(?!''))*+)'{3}"""
    r"""|"((?:[^"\\\n]++|\\.)*+)"|'((?:[^'\\\n]++|\\.)*+)')""",
    re.DOTALL,
)
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?")
_NAME = re.compile(r"[A-Za-z_][\w.]{0,255}")
_KEY = re.compile(r"[^:,{}\[\]<>\"'\n]{1,256}")
_SPACE = re.compile(r"(?:\s|\\\n)*+")
_CONSTANTS = {"True": True, "False": False, "None": None}
_CONSTANTS |= {"true": True, "false": False, "null": None}
_ESCAPED = re.compile(r"\\(\n|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "\n": "", "\\": "\\", "'": "'", '"': '"', "0": "\0"}


# Where a string between marks may end: a text may hold the mark. By what the string is: a key, a
# value of an object, an item of a list, or an argument at the top, which is a value, too.
_ANOTHER_KEY = (
    r"(?:<\|\"\|>|<escape>|[\"'])?[^:,{}\[\]<>\"'\n]{1,256}(?:<\|\"\|>|<escape>|[\"'])?\s{0,9}:"
)
_ANOTHER_ITEM = r"(?:<\|\"\|>|<escape>|[-\"'{\[0-9]|true|false|null|None|True|False)"
_CLOSED = r"\s{0,9}[}\]](?=\s{0,9}(?:[,}\]]|<tool_call\||<end_function_call|<\|tool_call>|\Z))"
_STRING_ENDS = {
    kind: {mark: re.compile(f"{re.escape(mark)}(?={follows})") for mark in (QUOTE, ESCAPE)}
    for kind, follows in (
        ("key", r"\s{0,9}:"),
        ("}", rf"\s{{0,9}},\s{{0,9}}{_ANOTHER_KEY}|{_CLOSED}"),
        ("]", rf"\s{{0,9}},\s{{0,9}}{_ANOTHER_ITEM}|{_CLOSED}"),
    )
}


class _Wrong(Exception):
    """Raised for text that cannot be read, with the reason; caught in this file."""


def python_calls(text: str) -> list[Call | str]:
    """Calls as Python writes them: one to a line or with semicolons between, in a list, or each
    within print(...). If one cannot be read, a text that says why is the last item."""
    scanner, found = _Scanner(text), []
    try:
        listed = scanner.take("[")
        while len(found) <= MAX_CALLS and not scanner.ended():
            if listed and scanner.take("]"):
                break
            found.append(call_of(*scanner.python_call()))
            while scanner.take(";") or scanner.take(","):
                pass
    except _Wrong as error:
        found.append(str(error))
    return found


def gemma_call(text: str, at: int) -> tuple[Call | str, int]:
    """(the call `call:f{a:<|"|>x<|"|>,b:[1,2]}` that begins at offset `at`, or a text with its
    error; the offset of its end)."""
    scanner = _Scanner(text, at)
    try:
        if not scanner.take("call:"):
            raise _Wrong("it does not begin with call:")
        name = scanner.match(_NAME, "its name is missing")
        return call_of(name, scanner.mapping()), scanner.at
    except _Wrong as error:
        return str(error), scanner.at


class _Scanner:
    """Reads literals from an index on; raises _Wrong at the first thing that is none."""

    def __init__(self, text: str, at: int = 0):
        self.text, self.at, self._values, self._escapes = text, at, 0, 0
        self._endless: set[tuple[str, str]] = set()  # marks that end no string from here on

    def ended(self) -> bool:
        self.at = _SPACE.match(self.text, self.at).end()
        return self.at >= len(self.text)

    def take(self, mark: str) -> bool:
        """Returns whether `mark` comes next, and past it then."""
        self.at = _SPACE.match(self.text, self.at).end()
        if self.text.startswith(mark, self.at):
            self.at += len(mark)
            return True
        return False

    def match(self, pattern: re.Pattern, otherwise: str) -> str:
        self.at = _SPACE.match(self.text, self.at).end()
        found = pattern.match(self.text, self.at)
        if not found:
            raise _Wrong(otherwise)
        self.at = found.end()
        return found[0]

    def python_call(self) -> tuple[str, dict]:
        name = self.match(_NAME, "it is no call of a function")
        if name == "print" and self.take("("):
            called = self.python_call()
            self._require(")")
            return called
        self._require("(")
        arguments = {}
        for _ in self._listed(")"):
            argument = self.match(_NAME, "its arguments are not written as name=value")
            if not self.take("="):
                raise _Wrong("its arguments are not written as name=value")
            arguments[argument] = self.value(1)
        return name, arguments

    def _listed(self, last: str) -> Iterator[None]:
        """Yields before each item of a list with commas that ends with `last`."""
        while not self.take(last):
            yield
            if not self.take(","):
                return self._require(last)

    def mapping(self, depth: int = 1) -> dict:
        """Keys with or without quotes, and their values."""
        self._require("{")
        found = {}
        for _ in self._listed("}"):
            key = self._string("key")
            if key is None:
                key = self.match(_KEY, "an object has a key that is none").rstrip()
            self._require(":")
            found[key] = self.value(depth, "}")
        return found

    def value(self, depth: int, within: str = "") -> object:
        """Returns what comes next, within an object ("}") or a list ("]")."""
        self._values += 1
        if self._values > MAX_VALUES:
            raise _Wrong(f"it has more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise _Wrong(f"its arguments are nested deeper than {MAX_DEPTH}")
        string = self._string(within)
        if string is not None:
            return string
        if self.text.startswith("{", self.at):
            return self.mapping(depth + 1)
        for first, last in (("[", "]"), ("(", ")")):
            if self.take(first):
                return [self.value(depth + 1, last) for _ in self._listed(last)]
        if number := _NUMBER.match(self.text, self.at):
            self.at = number.end()
            return _number(number[0])
        name = self.match(_NAME, "an argument is no literal")
        if name not in _CONSTANTS:
            raise _Wrong("an argument is no literal: a name is not known here")
        return _CONSTANTS[name]

    def _string(self, kind: str = "") -> str | None:
        """The string that comes next, None where something else does."""
        self.at = _SPACE.match(self.text, self.at).end()
        for mark in (QUOTE, ESCAPE):
            if self.text.startswith(mark, self.at):
                begin = self.at + len(mark)
                end = self._string_end(mark, kind, begin)
                if end < 0:
                    raise _Wrong("a string has no end")
                self.at = end + len(mark)
                return self.text[begin:end]
        found = _STRING.match(self.text, self.at)
        if not found:
            if self.text.startswith(('"', "'"), self.at):
                raise _Wrong("a string has no end")
            return None
        self.at = found.end()
        prefix, *inside = (group for group in found.groups() if group is not None)
        if "r" in prefix.lower() or "\\" not in inside[0]:
            return inside[0]
        self._escapes += inside[0].count("\\")
        if self._escapes > MAX_ESCAPES:
            raise _Wrong(f"it has more than {MAX_ESCAPES} backslashes")
        return _ESCAPED.sub(_unescaped, inside[0])

    def _string_end(self, mark: str, kind: str, begin: int) -> int:
        """Returns where a string ends: at the first mark behind which goes on what it stands in,
        else at the first one; -1 without any."""
        ends = _STRING_ENDS.get(kind)
        if ends and (mark, kind) not in self._endless:
            if found := ends[mark].search(self.text, begin):
                return found.start()
            self._endless.add((mark, kind))
        return self.text.find(mark, begin)

    def _require(self, mark: str) -> None:
        if not self.take(mark):
            raise _Wrong(f"there is no {mark!r} where one is needed")


def _number(text: str) -> int | float:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    raise _Wrong("a number is too long, or none")


def _unescaped(found: re.Match) -> str:
    code = found[1]
    if len(code) > 1:
        number = int(code[1:], 16)
        if number < 0x110000 and not 0xD800 <= number < 0xE000:
            return chr(number)
        raise _Wrong("a string has half a surrogate pair")
    return _SIMPLE.get(code, found[0])
