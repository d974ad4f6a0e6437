"""Names of config fields: the base class that refuses all other names, and the answers to those."""

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Sequence

from rljax.config.declare import cast, type_problem
from rljax.errors import InputError
from rljax.suggest import elsewhere, near_elsewhere, near_names

MOST_PROBLEMS = 20  # that an error lists: near names of a hundred thousand would take a minute
_LONGEST_NAME = 100  # characters, above which no near name is looked for

# The fix of errors about fields.
FIELDS_LISTED_IN_PYTHON = "print(rljax.Config()) lists the fields and their defaults"
FIELDS_LISTED = "`rljax train --help` lists the fields, their types and defaults"


# The last part of a field -> another field of a run that samples, which people often mean by it.
OFTEN_MEANT = {
    "samples": "batch.samples_per_prompt",
    "prompts": "batch.prompts_per_step",
    "max_tokens": "sampler.max_response_tokens",
    "context": "data.max_prompt_tokens",
    "weights": "reward.function",
    "turns": "environment.max_turns",
    "timeout_s": "environment.turn_timeout_s",
}


class UnknownField(InputError, AttributeError):
    """An error for a name that is no field of the config. It is an AttributeError, too, which
    hasattr and copy expect."""


# A path that begins with a variable: $HOME/runs, ${HOME}/runs, and OmegaConf's ${oc.env:HOME}/runs.
_VARIABLE = re.compile(r"\$(\{[^{}/]+\}|[A-Za-z_]\w*)(/|$)")


def _with_home(value: object) -> object:
    """Returns the value with the user's folder for "~/", which no shell puts behind an equals
    sign."""
    if isinstance(value, tuple | list):
        return type(value)(map(_with_home, value))
    home = isinstance(value, str) and value.startswith("~/")
    return os.path.expanduser(value) if home else value


class Settings:
    """Base of the config's dataclasses, which are locked and typed as a ConfigDict is: a name that
    is no field, and a value of another type, are refused where they are written."""

    def __new__(cls, *_, **fields):
        for name in fields:
            cls._check(name)
        return super().__new__(cls)

    def __setattr__(self, name: str, value: object) -> None:
        self._check(name)
        rule, fix = type_problem(value, self.__dataclass_fields__[name].type, name)
        if rule:
            subject = f"{type(self).__name__}.{name}" + "=None" * (value is None)
            raise InputError(subject, value=value, rule=rule, fix=fix)
        self.set_unchecked(name, value)

    def set_unchecked(self, name: str, value: object) -> None:
        """Sets a field to a value whose type is checked later, by `validate`. Raises InputError for
        a path that begins with a variable of the environment."""
        value = _with_home(value)
        if isinstance(value, str) and _VARIABLE.match(value):
            raise InputError(
                f"{type(self).__name__}.{name}",
                value=value,
                rule="variables of the environment are not expanded here",
                fix="write the path, or ~/ for your own folder; a shell expands $NAME in a flag",
            )
        value = cast(value, self.__dataclass_fields__[name].type)
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str):  # called for what is no field and no method
        if name.startswith("_"):  # a protocol that is asked for: copy, pickle, a notebook's display
            raise AttributeError(name)
        self._check(name)
        raise AttributeError(name)

    @classmethod
    def _check(cls, name: str) -> None:
        if name not in cls.__dataclass_fields__:
            names = [*cls.__dataclass_fields__, *field_names(cls)]
            answer = unknown_field(name, dict.fromkeys(names), cls.__name__ + ".")
            raise UnknownField(answer, fix=FIELDS_LISTED_IN_PYTHON)


def field_names(config, prefix: str = "") -> list[str]:
    """Returns the dotted names of all fields of a config or its class: ["model", ...,
    "batch.epochs", ...]."""
    names = []
    for field in dataclasses.fields(config):
        name, kind = prefix + field.name, field.type
        names += field_names(kind, name + ".") if dataclasses.is_dataclass(kind) else [name]
    return names


def nearest_fields(name: str, fields: Sequence[str]) -> list[str]:
    """Returns the fields that a name is likely to mean: those whose last part is the same, else
    those whose last part it misspells or begins; if there are any in its section, only these. None
    if it resembles none."""
    last_parts = {field: field.rpartition(".")[2] for field in fields}
    section, _, last_part = name.rpartition(".")
    matching = [field for field in fields if last_parts[field] == last_part]
    matching = [f for f in fields if matching and f == OFTEN_MEANT.get(last_part)] + matching
    near_parts = near_names(last_part, last_parts.values(), 1) if not matching else []
    begins = [field for field in fields if last_parts[field].startswith(f"{last_part}_")]
    matching = matching or begins * (not near_parts or near_parts[0].startswith(f"{last_part}_"))
    matching = matching or [field for field in fields if last_parts[field] in near_parts]
    inside = [field for field in matching if field.rpartition(".")[0] == section]
    return (inside or matching)[:4]


def elsewhere_text(text: str, prefix: str = "") -> str:
    """Returns a text of the tables of rljax.suggest with `prefix` before its fields, such
    as --config."""
    preset = "--config=" if prefix.startswith("--") else ""
    return re.sub("`([^`]+)`", lambda m: f"`{_written(m[1], prefix, preset)}`", text)


def _written(target: str, prefix: str, preset: str) -> str:
    return (preset if target.startswith("presets/") else prefix) + target


def unknown_fields(names: Iterable[str], known: Sequence[str], prefix: str = "") -> Iterator[str]:
    """Yields the answers to names that are no fields: to each of the first MOST_PROBLEMS, then the
    number of the others."""
    unlisted = 0
    for number, name in enumerate(names):
        if number < MOST_PROBLEMS:
            yield unknown_field(name, known, prefix)
        else:
            unlisted += 1
    if unlisted:
        yield f"and {unlisted} more names that are no fields"


def unknown_field(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns the answer to a name that is no field: its name here if another trainer has it, its
    fields if it is a section, or the field that it resembles."""
    if len(name) > _LONGEST_NAME:
        return f"{prefix}{name[:_LONGEST_NAME]}...: no such field"
    known, text = list(known), elsewhere(name)
    inside = next((field for field in known if field.startswith(f"{name}.")), "")
    if inside:
        return (
            f"{prefix}{name}: a section has no value of its own; set its fields: {prefix}{inside}"
        )
    fields = [] if text else nearest_fields(name, known)
    if not text and not fields:
        text = near_elsewhere(name)
    if text:
        return f"{prefix}{name}: no such field; use {elsewhere_text(text, prefix)}".replace(
            "; use nothing: ", "; nothing stands for it: "
        )
    near = " or ".join(prefix + field for field in fields)
    return f"{prefix}{name}: no such field" + (f"; did you mean {near}?" if near else "")
