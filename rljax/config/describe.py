"""The config as text for --help: every field with its default, its type and its help."""

import dataclasses
import textwrap
import types
import typing
from collections.abc import Iterable


def is_about(words: Iterable[str], *texts: str) -> bool:
    """Returns whether every one of the words stands in one of the texts, in upper or lower case."""
    return all(any(word.lower() in text.lower() for text in texts) for word in words)


def config_help(config, width: int, words: Iterable[str] = (), prefix: str = "") -> list[str]:
    """Returns lines for --help: all fields of a config, section by section; with `words` only those
    whose name or help holds them."""
    lines, sections = [], []
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        help = field.metadata["spec"].help
        if dataclasses.is_dataclass(value):
            summary = " ".join((type(value).__doc__ or "").split())
            if section_lines := config_help(value, width, words, name + "."):
                sections += ["", *textwrap.wrap(f"{name}: {summary}", width), *section_lines]
        elif is_about(words, name, help):
            lines += flag_lines(f"--config.{name}={value_text(value)}", field.type, help, width)
    return [*lines, *sections]


def flag_lines(flag: str, kind: object, text: str, width: int) -> list[str]:
    """Returns the lines of a flag with its default, its type and its help, wrapped to the width."""
    lines = [f"  {flag}  ({type_text(kind)})"]
    indent = dict(initial_indent=" " * 6, subsequent_indent=" " * 6)
    return lines + textwrap.wrap(text, width, break_on_hyphens=False, **indent)  # "log-probs" whole


def type_text(kind: object) -> str:
    """Returns a type as --help writes it: "whole number", "text, ...", "a | b"."""
    if isinstance(kind, types.UnionType):
        return " or ".join(
            type_text(part) for part in typing.get_args(kind) if part is not type(None)
        )
    if typing.get_origin(kind) is typing.Literal:
        return " | ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return f"{type_text(typing.get_args(kind)[0])}, ..."
    return {str: "text", int: "whole number", float: "number", bool: "true | false"}[kind]


def value_text(value: object) -> str:
    """Returns a value as --help writes it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) if value else "()"
    return repr(value) if isinstance(value, str) else str(value).lower()
