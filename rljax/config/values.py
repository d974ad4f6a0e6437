"""Values of a config by the dotted names of their fields, and the fields of a ConfigDict
of ml_collections.

ml_collections is imported only to write a config as a ConfigDict; a ConfigDict that is read was
made by a Python file or program, which imported it.
"""

import copy
import dataclasses
import functools
import inspect
import itertools
import os
import sys
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

from rljax.config.declare import type_problem
from rljax.config.names import FIELDS_LISTED, Settings, field_names, unknown_fields
from rljax.config.own_functions import component_text
from rljax.errors import InputError
from rljax.runs.store import is_url

_MOST_LEVELS = 4  # of sections in each other: a ConfigDict may hold itself


def value_of(config: Settings, name: str):
    """Returns the value of a dotted field; for "" the config itself."""
    for part in filter(None, name.split(".")):
        config = getattr(config, part)
    return config


def texts_of(config: Settings, name: str) -> tuple[str, ...]:
    """Returns the texts of a field that holds one or several, without the empty ones; () of a
    number."""
    value = value_of(config, name)
    items = value if isinstance(value, tuple | list) else (value,)
    return tuple(text for text in items if isinstance(text, str) and text)


def flat_fields(value: Mapping, kind: type[Settings], prefix: str = "") -> dict[str, object]:
    """Returns {dotted name: value}. Sections of the config are taken apart, and one level of
    unknown mappings, so that other frameworks' fields are recognised. Raises InputError for a field
    that stands twice."""
    flat: dict[str, object] = {}
    for name, item in value.items():
        field = kind.__dataclass_fields__.get(name) if isinstance(name, str) else None
        fields = {f"{prefix}{name}": item}
        if isinstance(item, Mapping) and field is not None and dataclasses.is_dataclass(field.type):
            fields = flat_fields(item, field.type, f"{prefix}{name}.")
        elif isinstance(item, Mapping) and field is None and item:
            fields = {f"{prefix}{name}.{inner}": None for inner in itertools.islice(item, 20)}
        if repeated := flat.keys() & fields.keys():
            raise InputError(f"field {min(repeated)!r} stands twice", fix="remove one")
        flat |= fields
    return flat


def with_overrides(config: Settings, overrides: Mapping[str, object], where: str):
    """Returns a copy with {dotted field: value} set. Raises InputError that lists every unknown
    field; `validate` checks types, and lists every problem at once."""
    names = dict.fromkeys(field_names(config))
    unknown = (str(name) for name in overrides if name not in names)
    if problems := list(unknown_fields(unknown, list(names))):
        text = f"{where} has unknown fields:\n  " + "\n  ".join(problems)
        raise InputError(text, fix=FIELDS_LISTED)
    changed = copy.deepcopy(config)
    for name, value in overrides.items():
        section, _, field = name.rpartition(".")
        value_of(changed, section).set_unchecked(field, value)
    return changed


def wrong_types(config: Settings, prefix: str = "") -> Iterator[tuple[str, object, str, str]]:
    """Yields (dotted field, value, rule, fix) of every value that is not of its field's type."""
    for name, field in type(config).__dataclass_fields__.items():
        value = getattr(config, name)
        rule, fix = type_problem(value, field.type, prefix + name)
        if rule:
            yield prefix + name, value, rule, fix
        elif isinstance(value, Settings):
            yield from wrong_types(value, f"{prefix}{name}.")


def is_config_dict(value: object) -> bool:
    """Returns whether a value is an ml_collections.ConfigDict, or a frozen one."""
    library = sys.modules.get("ml_collections")  # without it nobody has made one
    return library is not None and isinstance(value, library.ConfigDict)


def of_config_dict(values, config: Settings, where: str, later: Container[str]):
    """Returns a copy of `config` with the fields of a ConfigDict set. Raises InputError that names
    every unknown field, every value of a wrong type, and every required placeholder that is not set
    and not among the fields that are set `later`."""
    unset: list[str] = []
    flat = flat_fields(_resolved(values, where, unset), type(config))
    if unset := [name for name in unset if name not in later]:
        problem = f"{where}: required placeholders are not set: {', '.join(unset)}"
        raise InputError(problem, fix=f"config.{unset[0]} = ..., or --config.{unset[0]}=VALUE")
    run_dir = flat.get("run_dir")
    local = isinstance(run_dir, str) and run_dir and not is_url(run_dir)
    folder = Path(os.path.expanduser(run_dir) if local else "runs") / "inputs"
    texts = {name: _with_texts(name, value, folder) for name, value in flat.items()}
    read = with_overrides(config, texts, where)
    if problems := [
        f"{name}={value!r:.200}: {rule}. Fix: {fix}" for name, value, rule, fix in wrong_types(read)
    ]:
        raise InputError.of_text(f"{where} has values of wrong types:\n  " + "\n  ".join(problems))
    return read


def _resolved(values, where: str, unset: list[str], prefix: str = "", level: int = 0) -> dict:
    """Returns the dict of a ConfigDict, and adds the required placeholders without a value to
    `unset`. References have the values that they refer to; None, such as a placeholder that is not
    set, leaves the default of its field."""
    library, values_read = sys.modules["ml_collections"], {}
    try:
        names = list(values)  # in their order, which names of several types have not
    except TypeError as error:
        rule, fix = f"names of fields are texts: {error}", "name each field by its text"
        raise InputError(f"{where}: {prefix or 'names'}", rule=rule, fix=fix) from None
    for name in names:
        try:
            value = values[name]
            if isinstance(value, list | tuple):
                refs = library.FieldReference
                value = tuple(item.get() if isinstance(item, refs) else item for item in value)
        except library.config_dict.RequiredValueError:
            unset.append(f"{prefix}{name}")
            continue
        except Exception as error:  # of a function that a reference applies
            problem, rule = f"{where}: {prefix}{name}", f"{type(error).__name__}: {error}"
            raise InputError(problem, rule=rule, fix="correct what it refers to") from error
        if isinstance(value, library.ConfigDict):
            section, deeper = f"{prefix}{name}.", level < _MOST_LEVELS
            value = _resolved(value, where, unset, section, level + 1) if deeper else {}
        if value is not None:
            values_read[name] = value
    return values_read


def _with_texts(name: str, value: object, folder: Path) -> object:
    """Returns the value with the texts of functions for the functions in it."""
    if isinstance(value, tuple):
        return tuple(_with_texts(name, item, folder) for item in value)
    function = inspect.isroutine(value) or isinstance(value, functools.partial)
    tracker = name == "trackers" and inspect.isclass(value)
    return component_text(value, folder, name) if function or tracker else value
