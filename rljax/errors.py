"""InputError: the one exception whose message is written for users.

Launchers print an `InputError` as plain text without a traceback; every other exception is a bug
of ours.
"""

import difflib
import inspect
import itertools
import os
import re
import traceback
from collections.abc import Callable, Iterable

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_SHOWN = 200  # characters of a value
_LONGEST_WORD, _LONGEST_TEXT = 1_000, 20_000  # characters: a name may have a million


# What moves the cursor, colours, hides or turns round the text around it, ends lines that it should
# not, or has no bytes in UTF-8.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """The text as any terminal can print it: control characters, of which a response or the name of
    a file may be full, are shown as escapes, not sent. Line breaks and tabs stay."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def _readable(text: str) -> str:
    """The text as any terminal can print it, without its endless parts."""
    text = printable(text)
    cut = re.sub(rf"\S{{{_LONGEST_WORD},}}+", lambda m: f"{m[0][:200]}...{m[0][-50:]}", text)
    return cut if len(cut) <= _LONGEST_TEXT else f"{cut[:_LONGEST_TEXT]}..."


def _beginning(value: object) -> object:
    """A value from JSON without most of what a message would cut off: the repr of a million values
    takes a second in which no other thread runs."""
    if type(value) is str:
        return value[:_SHOWN]
    if type(value) is list:
        return [_beginning(item) for item in value[: _SHOWN // 2]]
    if type(value) is dict:
        return {name: _beginning(value[name]) for name in itertools.islice(value, _SHOWN // 2)}
    return value


class InputError(ValueError):
    """Bad input from the user: says what is wrong, which value, which rule, and how to fix it."""

    exit_code = 2  # of a command that ends by it

    def __init__(self, what: str, *, value: object = None, rule: str = "", fix: str):
        text = what
        if value is not None:
            shown = repr(_beginning(value))
            text += f": got {shown if len(shown) <= _SHOWN else shown[:_SHOWN] + '...'}"
        if rule:
            text += f"; {rule}"
        if fix:  # of a list, on a line of its own; a question keeps its mark
            joint = "\n" if "\n" in text else " " if text.endswith("?") else ". "
            text += f"{joint}Fix: {fix}"
        super().__init__(_readable(text))

    @classmethod
    def of_text(cls, text: str) -> "InputError":
        """The error of a message that is whole: another process's, or one of several problems."""
        return cls.__new__(cls, _readable(text))

    def within(self, location: str) -> "InputError":
        """The same message behind its location, such as "data.jsonl: "."""
        return InputError.of_text(f"{location}{self}")

    def __reduce__(self):  # a copy is made of the text: what went into it may be large
        return self.of_text, self.args

    @property
    def parts(self) -> tuple[str, str]:
        """Returns (the problem, the fix, which may be "")."""
        what, _, fix = str(self).partition("Fix: ")
        return what.rstrip(" .\n"), fix

    def _render_traceback_(self) -> list[str]:
        """Returns the lines that IPython prints of it: a notebook shows the message, as a launcher
        does."""
        return [f"{type(self).__name__}: {self}"]


def location_in(
    error: BaseException, functions: Iterable[Callable], *, innermost: bool = False
) -> str:
    """ " (file:line, in function: text of the line)" of the last frame of the error, or of its
    cause, in a file outside of rljax that defines one of the functions; "" if there is none.

    `innermost`: only where that frame itself raised.
    """
    files = {file for file, _, _ in map(_definition, functions)} - {""}
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    for one in chain[-1:] if innermost else reversed(chain):
        frames = traceback.extract_tb(one.__traceback__)
        own = [frame for frame in frames[-1 if innermost else 0 :] if frame.filename in files]
        if own:
            return f" ({own[-1].filename}:{own[-1].lineno}, in {own[-1].name}: {own[-1].line})"
    return ""


# Errors of JAX by their names -> what mends them: this module imports no JAX.
_OF_TRACING = {
    "TracerBoolConversionError": "choose by jnp.where(condition, a, b), not by `if` or `and`",
    "TracerArrayConversionError": "use jax.numpy in place of numpy",
    "TracerIntegerConversionError": "index with arrays of jax.numpy, not with lists and ranges",
    "ConcretizationTypeError": "keep values in arrays: float(), int() and .item() cannot be called",
    "NonConcreteBooleanIndexError": "select by jnp.where(mask, x, 0.0), not by x[mask]",
}


def mending(error: BaseException) -> str:
    """Returns what mends an exception of a user's function: the name that was meant and those that
    there are, where it says so, else the line to correct."""
    while error.__cause__ is not None:
        error = error.__cause__
    if known := _OF_TRACING.get(type(error).__name__):
        return known
    if isinstance(error, ValueError) and "truth value of an array" in str(error):
        return _OF_TRACING["TracerBoolConversionError"]
    line = "correct that line"
    if isinstance(error, NameError) and error.name:
        return f"import or define {error.name!r}"
    if isinstance(error, AttributeError) and error.name:
        if isinstance(error.obj, dict):
            there = error.name in error.obj
            return f"write [{error.name!r}]" if there else f"read {_named(error.obj)}"
        near = difflib.get_close_matches(error.name.lower(), dir(error.obj), n=1, cutoff=0.5)
        fields = getattr(type(error.obj), "__dataclass_fields__", ())
        fields = getattr(type(error.obj), "_fields", fields)
        meant = f"did you mean {near[0]!r}? " if near else ""
        return f"{meant}The fields are {', '.join(fields)}" if fields else meant.strip() or line
    return line


def _named(names: Iterable[object]) -> str:
    shown = [repr(name) for name in itertools.islice(names, 12)]
    return f"one of {', '.join(shown)}" if shown else "nothing: there is nothing in it"


def location_of(function: Callable) -> str:
    """ " (file:line, def name)" of a function that is defined outside of rljax; else ""."""
    file, line, name = _definition(function)
    return file and f" ({file}:{line}, def {name})"


def _definition(function: Callable) -> tuple[str, int, str]:
    function = inspect.unwrap(function)
    code = function.__code__ if inspect.isfunction(function) else None
    if code is None or code.co_filename.startswith(_PACKAGE):
        return "", 0, ""
    return code.co_filename, code.co_firstlineno, code.co_name
