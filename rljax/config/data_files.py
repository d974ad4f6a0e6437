"""Configs as data: JSON and YAML files, read and written.

    steps: 20                       a field; a section is a mapping, or a dotted name
    actor_optimizer: {lr: 1e-6}
    sweep:                          what sweep() yields in a Python file: `rljax sweep my.yaml`
      - seed: 0
      - {seed: 1, actor_optimizer.lr: 3e-6}

`pipeline:` has the stages of `rljax pipeline` in the same way. Nothing in such a file is run:
scalars are texts, read by the types of the fields as those of flags are. So 1e-6 is a number, and
"no" a text, whatever YAML itself makes of them.
"""

from collections.abc import Mapping

from rljax.config.names import FIELDS_LISTED
from rljax.config.overrides import to_dict
from rljax.config.schema import FIELDS, Config
from rljax.config.texts import shown_value, value_of_json, value_of_text, with_texts
from rljax.config.values import flat_fields
from rljax.errors import InputError
from rljax.files import (
    MOST_VALUES,
    once,
    parse_json,
    parse_number,
    parse_yaml,
    read_text,
    yaml_text,
)

LISTS = ("sweep", "pipeline")  # beside the fields of a config
_LARGEST = 10**7  # bytes of a file
_CORE = "tag:yaml.org,2002:"
_TAGS = {_CORE + name for name in ("str", "int", "float", "bool", "null", "seq", "map")}


def read_config(file: str) -> Config:
    """Returns the config of a JSON or YAML file, such as a run's config.json. A field that is
    absent has its default. Raises InputError that lists every unknown field and wrong type."""
    values = {name: value for name, value in _read(file).items() if name not in LISTS}
    try:
        read = value_of_json if _is_json(file) else value_of_text
        return with_texts(Config(), flat_fields(values, Config), file, "", read)
    except InputError as error:
        raise error if file in str(error) else error.within(f"{file}: ") from None


def read_entries(file: str, name: str, default: list[dict] | None = None) -> list[dict]:
    """Returns the list `sweep` or `pipeline` of a JSON or YAML file; `default` without one. Fields
    of the config have their types; other names, such as options of a stage's command, have the
    scalars of JSON. Raises InputError if it is no list of mappings, or if there is neither."""
    entries = _read(file).get(name, default)
    if entries is None:
        fix = f"write {name}: and behind it a list of fields and their values, an entry for each"
        raise InputError(f"{file} has no {name}", fix=fix)
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        rule = "a list of mappings of fields and their values"
        fix = f"write {name}: and below it lines such as - {{seed: 1}}"
        raise InputError(f"{file}: {name}", value=entries, rule=rule, fix=fix)
    return [
        _entry(entry, f"{file}: {name}[{i}]", _is_json(file)) for i, entry in enumerate(entries)
    ]


def to_yaml(values: Config | Mapping) -> str:
    """Returns a config, or some of its fields, as YAML that `read_config` reads to the
    same values."""
    return yaml_text(to_dict(values) if isinstance(values, Config) else dict(values))


def _is_json(file: str) -> bool:
    return file.lower().endswith(".json")


def _entry(values: Mapping, location: str, typed: bool) -> dict:
    """Returns a member of a sweep, or a stage of a pipeline. Raises InputError that lists every
    value that cannot be read."""
    fields, problems = {}, []
    read = value_of_json if typed else value_of_text
    trains = values.get("command", "train") == "train"
    for name, value in (flat_fields(values, Config) if trains else values).items():
        try:
            if trains and name in FIELDS:
                fields[name] = read(value, FIELDS[name].kind)
            elif typed:
                fields[name] = tuple(value) if isinstance(value, list) else value
            else:
                fields[name] = _scalar(value)
        except ValueError as error:
            problems.append(f"{name}={shown_value(value, read)}: {error}")
    if problems:
        raise InputError(f"{location}:\n  " + "\n  ".join(problems), fix=FIELDS_LISTED)
    return fields


def _scalar(value: object) -> object:
    """Returns a text of YAML as JSON would have it: true, false, a number, else the text."""
    if isinstance(value, list):
        return tuple(map(_scalar, value))
    if not isinstance(value, str):
        return value
    if value in ("true", "false"):
        return value == "true"
    number = parse_number(value, int)
    number = parse_number(value, float) if number is None else number
    return value if number is None else number


# -- reading --


def _read(file: str) -> Mapping:
    """Returns the mapping of a file. In YAML every scalar is a text, or None where it is null."""
    text = read_text(file, _LARGEST)
    try:
        values = parse_json(text, file, unique=True) if _is_json(file) else _yaml(text, file)
    except InputError as error:
        problem, fix = error.parts
        raise InputError(problem, fix="; ".join(filter(None, (fix, _example(file))))) from None
    if not isinstance(values, Mapping):
        kinds = {list: "a list", str: "a text", type(None): "nothing"}
        found_kind = kinds.get(type(values), "a number")
        rule = f"it holds {found_kind}, not fields of a config and their values"
        raise InputError(f"{file} is no config", rule=rule, fix=_example(file))
    return values


def _example(file: str) -> str:
    kind = "json" if _is_json(file) else "yaml"
    return f"`rljax config show quickstart --{kind}` prints a file as it has to be"


def _yaml(text: str, file: str) -> object:
    import yaml

    class Loader(yaml.BaseLoader):  # makes texts, lists and dicts alone
        copied = 0  # fields, by merge keys

        def construct_object(self, node, deep=False):
            if node.tag not in _TAGS:
                location = f"{file}: line {node.start_mark.line + 1}"
                fix = "remove the tag: a config holds texts, numbers, lists and mappings"
                raise InputError(f"{location} has a tag of YAML", value=node.tag, fix=fix)
            return super().construct_object(node, deep)

        def construct_scalar(self, node):
            value = super().construct_scalar(node)
            return None if node.style is None and value.lower() in ("null", "~") else value

        def construct_mapping(self, node, deep=False):
            construct, pairs, merged = self.construct_object, [], {}
            for key, item in node.value:
                value = construct(item, True)
                if key.value != "<<" or key.style is not None:
                    pairs.append((construct(key), value))
                    continue
                # YAML's merge key: own fields win, then those of the first of several mappings.
                for mapping in value if isinstance(value, list) else [value]:
                    if not isinstance(mapping, Mapping):
                        location = f"{file}: line {key.start_mark.line + 1}"
                        fix = "<<: *ANCHOR of a mapping"
                        raise InputError(f"{location}: << merges mappings", value=mapping, fix=fix)
                    self.copied += len(mapping)
                    if self.copied > MOST_VALUES:
                        raise ValueError(f"merge keys copy more than {MOST_VALUES} fields")
                    merged = {**mapping, **merged}
            return {**merged, **once(pairs, file)}

    Loader.add_constructor(f"{_CORE}map", lambda loader, node: loader.construct_mapping(node))
    return parse_yaml(text, file, Loader)
