"""Reads texts as values of config fields, those of --config flags and of YAML, by the types of
the fields."""

import contextlib
import itertools
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping

from rljax.config.declare import EXAMPLES, kind_name, list_items, type_problem
from rljax.config.names import FIELDS_LISTED, unknown_fields
from rljax.config.schema import FIELDS, Config
from rljax.config.values import value_of, with_overrides
from rljax.errors import InputError
from rljax.files import parse_number

_NO_NULL = 'there is no null; "" is an empty text, [] an empty list, 0 is off'


def with_texts(
    config: Config,
    texts: Mapping[str, object],
    where: str,
    prefix: str,
    read: Callable[[object, type], object] | None = None,
) -> Config:
    """Returns the config with {field: text} set. Each text is read by the type of its field with
    `read`, by default as a flag. Raises InputError that lists every unknown field and every text
    that is no such value."""
    values, problems = {}, []
    flag_value = _flags_of(texts.keys() & FIELDS.keys()) if texts and not read else None
    names = unknown_fields((field for field in texts if field not in FIELDS), list(FIELDS), prefix)
    for field, text in texts.items():
        if field not in FIELDS:
            problems += itertools.islice(names, 1)
            continue
        try:
            values[field] = read(text, FIELDS[field].kind) if read else flag_value(field, text)
        except ValueError as error:
            problems.append(f"{prefix}{field}={shown_value(text, read)}: {error}")
    problems += names  # how many more there are
    if problems:
        raise InputError(f"{where}:\n  " + "\n  ".join(problems), fix=FIELDS_LISTED)
    return with_overrides(config, values, where)


def _flags_of(fields: Iterable[str]) -> Callable[[str, str], object]:
    """Returns a function (field, text) that gives the value of --config.FIELD=TEXT: a flag of
    ml_collections.config_flags, which reads a scalar by the type of the field, and tries the value
    on a config. Lists are split here: there they have to be tuples of Python."""
    from absl import flags
    from ml_collections import config_flags

    flag_values, argv = flags.FlagValues(), [f"--config.{field}" for field in fields]
    config_flags.DEFINE_config_dataclass("config", Config(), flag_values=flag_values, sys_argv=argv)

    def value(field: str, text: str) -> object:
        flag, kind = flag_values[f"config.{field}"], FIELDS[field].kind
        _refuse_none(text, kind)
        try:
            flag.parse(value_of_text(text, kind) if typing.get_args(kind) else text)
        except flags.IllegalFlagValueError:
            raise ValueError(_must_be(kind)) from None
        except InputError:  # of the config: a number that is endless, or too large
            raise ValueError(type_problem(flag.value, kind, field)[0]) from None
        return value_of(flag_values["config"].value, field)

    return value


def shown_value(value: object, read: Callable | None) -> str:
    """Returns a value as its file has it. A list or a mapping, which aliases of YAML may make
    endless, is only named as such."""
    if isinstance(value, list | Mapping):
        return "a list" if isinstance(value, list) else "a mapping"
    text = json.dumps(value) if read is value_of_json or value is None else str(value)
    return text if len(text) <= 200 else text[:200] + "..."


def value_of_text(text: object, kind: type):
    """Returns a text as a value of a field's type; a list, which YAML may hold, as a tuple. Raises
    ValueError with the rule for any other text."""
    _refuse_none(text, kind)
    if typing.get_origin(kind) is tuple and isinstance(text, (str, list)):
        (item, _) = typing.get_args(kind)
        parts = text if isinstance(text, list) else list_items(text)
        return tuple(_scalar_of_text(part, item) for part in parts)
    return _scalar_of_text(text, kind)


def _refuse_none(text: object, kind: type) -> None:
    """Raises ValueError for Python's None as the whole of a text or list: it is meant as no value,
    and would be the text "None"."""
    if text == "None" and (kind is str or typing.get_origin(kind) is tuple):
        raise ValueError(_NO_NULL)


def _scalar_of_text(text: object, kind: type):
    if text is None:
        raise ValueError(_NO_NULL)
    if not isinstance(text, str):
        raise ValueError(_must_be(kind))
    if kind is str:
        return text
    truths = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}
    value = truths.get(text.lower()) if kind is bool else parse_number(text, kind)
    if value is None and kind is int and (based := re.fullmatch("0[xo][0-9a-fA-F]{1,20}", text)):
        with contextlib.suppress(ValueError):  # 0x10 and 0o17, as a flag has them; no 0o18
            value = int(based[0], 0)
    if value is None:
        raise ValueError(_must_be(kind))
    if rule := type_problem(value, kind, "")[0]:
        raise ValueError(rule)
    return value


def value_of_json(value: object, kind: type):
    """Returns a value of JSON, which has types, as one of a field's type; a list as a tuple. Raises
    ValueError with the rule for a value of another type."""
    if value is None:
        raise ValueError(_NO_NULL)
    rule = type_problem(value, kind, "")[0]
    if rule:
        raise ValueError(rule if type(value) is kind is int else _must_be(kind))
    return tuple(value) if isinstance(value, list) else value


def _must_be(kind: type) -> str:
    items = typing.get_args(kind)
    example = f"[{EXAMPLES[items[0]]}]" if items else EXAMPLES[kind]
    return f"must be {kind_name(kind)}, such as {example}"
