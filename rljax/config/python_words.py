"""Fixes for users of rljax from Python: a field that an error names as a flag is worded as an
argument, and a command's help as Python's."""

import contextlib
import re
from collections.abc import Iterator

from rljax.config.names import FIELDS_LISTED
from rljax.config.schema import FIELDS
from rljax.config.texts import value_of_text
from rljax.errors import InputError

_FIELDS = "help(rljax.train) says how fields are given, print(rljax.Config()) lists them"
_QUOTED = r"""'[^']*'|"[^"]*\""""
_WORD = r"""\.\.\.|[^\s'"(),;`]*[^\s'"(),;`.:]"""  # no mark of the sentence around it
_VALUE = rf"(?:{_QUOTED}|(?:{_WORD})(?:,(?:{_WORD}))*(?:\(\S*\))?)"
_FLAG = rf"--config\.[\w.]*\w(?:={_VALUE})?"
_FLAGS = re.compile(rf"{_FLAG}(?:,? {_FLAG})*")
_ONE_FLAG = re.compile(rf"--config\.([\w.]*\w)(?:=({_VALUE}))?")
_OPTION = re.compile(rf"--([a-z]\w*)(?:=({_VALUE}))?")
_BETWEEN = re.compile(rf"(--[a-z]\w*={_VALUE}) (?=--[a-z])")  # of two flags of one command
_FIELD = re.compile(rf"(?<![\w.\-\"'])((?:[a-z]\w*\.)+[a-z]\w*)=({_VALUE})")


@contextlib.contextmanager
def in_python(function: str) -> Iterator[None]:
    """Rewords an InputError raised in the block for callers of `function`, "rljax.train",
    from Python."""
    try:
        yield
    except InputError as error:
        error.args = (python_words(str(error), function),)
        raise


def python_words(text: str, function: str = "rljax.train") -> str:
    """Returns a text with `--config.steps=3` as steps=3,
    `--config.checkpoint.keep=1` as checkpoint={"keep": 1}, other flags as arguments,
    and the help of a command as help(rljax.train)."""
    problem, mark, fix = text.partition("Fix: ")
    return _words(problem, function) + mark + _FIELD.sub(_assignment, _words(fix, function))


def _words(text: str, function: str) -> str:
    text = text.replace(FIELDS_LISTED, _FIELDS).replace("these flags cannot", "these cannot")
    text = text.replace("--help lists the flags", f"help({function}) lists the arguments")
    text = re.sub(r"`?rljax train --help`?", f"help({function})", text)
    text = _FLAGS.sub(lambda m: _arguments(m[0]), text)
    text = re.sub(rf"--config=({_VALUE})", lambda m: f"rljax.train({_literal(m[1])})", text)
    return _OPTION.sub(_option, _BETWEEN.sub(r"\1, ", text))


def _arguments(flags: str) -> str:
    """Returns several flags as keyword arguments: the fields of one section are one dict."""
    sections: dict[str, dict[str, str]] = {}
    for match in _ONE_FLAG.finditer(flags):
        section, _, field = match[1].rpartition(".")
        value = "..." if match[2] is None else _python_value(match[1], match[2])
        sections.setdefault(section, {})[field] = value
    return ", ".join(_argument(section, fields) for section, fields in sections.items())


def argument(field: str, value: str) -> str:
    """Returns a field as an argument of rljax.train: batch={"epochs": 2}."""
    section, _, name = field.rpartition(".")
    return _argument(section, {name: value})


def _argument(section: str, fields: dict[str, str]) -> str:
    if not section:
        return ", ".join(f"{name}={value}" for name, value in fields.items())
    outer, *inner = section.split(".")
    inside = "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"
    for name in reversed(inner):
        inside = f'{{"{name}": {inside}}}'
    return f"{outer}={inside}"


def _assignment(match: re.Match) -> str:
    """Returns a field that a fix names whole with a value, as the dict of its section."""
    if match[1] not in FIELDS:
        return match[0]
    return argument(match[1], _python_value(match[1], match[2]))


def _option(match: re.Match) -> str:
    """Returns another flag as the argument of its name."""
    if match[2] is None:
        return f"{match[1]}=True" if match[1].startswith("trust_") else match[1]
    return f"{match[1]}={_literal(match[2])}"


def _python_value(field: str, text: str) -> str:
    """Returns the text of a flag as Python writes a value of the field's type."""
    if text.strip(".") == "" or text.isupper():  # a placeholder
        return text
    try:
        value = value_of_text(text.strip("'\""), FIELDS[field].kind) if field in FIELDS else None
    except ValueError:
        value = None
    if value is None:
        return _literal(text)
    return '"' + value + '"' if isinstance(value, str) and '"' not in value else repr(value)


def _literal(text: str) -> str:
    if text[:1] in "'\"" or text.isupper() or re.fullmatch(r"-?[\d.]+(e-?\d+)?|\.\.\.", text):
        return text
    return f'"{text}"'
