"""The config as text for --help: every field with its default, its type and its comment, which is
read from the source of rljax.config.schema and of its parts."""

import ast
import dataclasses
import io
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterable
from pathlib import Path

from rljax.config import model_settings, pretraining_settings, rollout_settings, schema
from rljax.config.schema import Config


def field_comments() -> dict[str, dict[str, str]]:
    """{class: {field: comment}}: the comment lines above a field, and those behind it."""
    out = {}
    for module in (schema, model_settings, pretraining_settings, rollout_settings):
        out |= _comments_of(Path(module.__file__).read_text(encoding="utf-8"))
    return out


def _comments_of(source: str) -> dict[str, dict[str, str]]:
    behind, alone = {}, {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith("# fmt:"):
            lines = alone if token.line.strip() == token.string else behind
            lines[token.start[0]] = token.string.lstrip("# ")
    out = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
            out[node.name] = {one.target.id: _comment(one, behind, alone) for one in fields}
    return out


def _comment(node: ast.AnnAssign, behind: dict[int, str], alone: dict[int, str]) -> str:
    above, line = [], node.lineno - 1
    while line in alone:
        above.insert(0, alone[line])
        line -= 1
    after = [behind[n] for n in range(node.lineno, node.end_lineno + 1) if n in behind]
    return " ".join([*above, *after])


def is_about(words: Iterable[str], *texts: str) -> bool:
    """Returns whether every one of the words stands in one of the texts, in letters of any case."""
    return all(any(word.lower() in text.lower() for text in texts) for word in words)


def config_help(width: int, words: Iterable[str] = ()) -> str:
    """All fields of the config, a section after the other; with `words` those whose name or comment
    holds them."""
    comments = field_comments()
    lines = _section(Config(), "", comments, width, words)
    return "\n".join(lines)


def _section(config, prefix: str, comments: dict, width: int, words: Iterable[str]) -> list[str]:
    lines, sections = [], []
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        comment = comments.get(type(config).__name__, {}).get(field.name, "")
        if dataclasses.is_dataclass(value):
            about = " ".join((type(value).__doc__ or "").split())
            if inside := _section(value, name + ".", comments, width, words):
                sections += ["", *textwrap.wrap(f"{name}: {about}", width), *inside]
        elif is_about(words, name, comment):
            lines += flag_lines(f"--config.{name}={_shown(value)}", field.type, comment, width)
    return [*lines, *sections]


def flag_lines(flag: str, kind: object, text: str, width: int) -> list[str]:
    """A flag with its default, its type and what it is for, wrapped to the width."""
    out = [f"  {flag}  ({_kind(kind)})"]
    return out + textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _kind(kind: object) -> str:
    if isinstance(kind, types.UnionType):
        return " or ".join(_kind(k) for k in typing.get_args(kind) if k is not type(None))
    if typing.get_origin(kind) is typing.Literal:
        return " | ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return f"{_kind(typing.get_args(kind)[0])}, ..."
    return {str: "text", int: "whole number", float: "number", bool: "true | false"}[kind]


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) if value else "()"
    return repr(value) if isinstance(value, str) else str(value).lower()
