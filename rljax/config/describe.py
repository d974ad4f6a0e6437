"""The config as text for --help: every field with its default, its type and what it is for."""

import dataclasses
import textwrap
import types
import typing
from collections.abc import Iterable


def is_about(words: Iterable[str], *texts: str) -> bool:
    """Returns whether every one of the words stands in one of the texts, in letters of any case."""
    return all(any(word.lower() in text.lower() for text in texts) for word in words)


def config_help(config, width: int, words: Iterable[str] = (), prefix: str = "") -> list[str]:
    """Lines for --help: all fields of a config, a section after the other; with `words` those whose
    name or help holds them."""
    lines, sections = [], []
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        help = field.metadata["spec"].help
        if dataclasses.is_dataclass(value):
            about = " ".join((type(value).__doc__ or "").split())
            if inside := config_help(value, width, words, name + "."):
                sections += ["", *textwrap.wrap(f"{name}: {about}", width), *inside]
        elif is_about(words, name, help):
            lines += flag_lines(f"--config.{name}={value_text(value)}", field.type, help, width)
    return [*lines, *sections]


def flag_lines(flag: str, kind: object, text: str, width: int) -> list[str]:
    """A flag with its default, its type and what it is for, wrapped to the width."""
    out = [f"  {flag}  ({type_text(kind)})"]
    return out + textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)


def type_text(kind: object) -> str:
    if isinstance(kind, types.UnionType):
        return " or ".join(type_text(k) for k in typing.get_args(kind) if k is not type(None))
    if typing.get_origin(kind) is typing.Literal:
        return " | ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return f"{type_text(typing.get_args(kind)[0])}, ..."
    return {str: "text", int: "whole number", float: "number", bool: "true | false"}[kind]


def value_text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) if value else "()"
    return repr(value) if isinstance(value, str) else str(value).lower()
