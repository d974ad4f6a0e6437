"""A config from a file (Python, JSON, YAML, or the name of one that ships) and from --config flags.

    --config=configs/quickstart.py:tiny      get_config("tiny") of a file
    --config=quickstart                      a config that ships; `rljax configs` lists them
    --config=RUN/config.json                 the config of a run, or of a .yaml file
    --config.batch.epochs=2                  a field
    --config.trackers=console,tensorboard    a tuple; commas inside brackets do not separate

Imports no model code, so that a misspelt flag is answered at once.
"""

import ast
import difflib
import importlib.machinery
import importlib.util
import inspect
import itertools
import json
import os
import traceback
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path

from rljax.config.names import field_names, unknown_field
from rljax.config.overrides import flat_fields, from_dict, with_overrides
from rljax.config.schema import Config
from rljax.errors import InputError
from rljax.files import read_text

_LARGEST = 10**7  # bytes of a config

# -- files --


def shipped_configs() -> dict[str, Path]:
    """{name: file} of the configs that come with the library: "quickstart", "presets/dapo"."""
    package = Path(__file__).resolve().parent.parent
    # Installed from a wheel they lie in the package, in a clone beside it.
    homes = (package / "configs", package.parent / "configs")
    home = next((home for home in homes if (home / "quickstart.py").is_file()), homes[0])
    files = sorted(home.rglob("*.py"), key=lambda file: (len(file.parts), file))
    return {file.relative_to(home).with_suffix("").as_posix(): file for file in files}


def config_file(path: str) -> str:
    """The file that --config names, without its variant: a path, or one of the shipped configs."""
    name = path.partition(":")[0]
    if os.path.isfile(name):
        return name
    shipped = shipped_configs()
    if name in shipped:
        return str(shipped[name])
    stem = name.removeprefix("configs/").removesuffix(".py")
    near = [stem] if stem in shipped else difflib.get_close_matches(stem, shipped, n=1)
    near = near or [other for other in shipped if other.rpartition("/")[2] == stem]
    if os.path.isfile(os.path.join(name, "config.json")):  # a run folder
        near = [os.path.join(name, "config.json")]
    hint = f"did you mean {near[0]}? " if near else ""
    raise InputError(
        "no such config file", value=name,
        fix=f"{hint}A .py, .json or .yaml file, or one that ships (`rljax configs` lists them)",
    )  # fmt: skip


def is_data(path: str) -> bool:
    """Whether the config of a path is data (JSON, YAML), not Python."""
    return path.partition(":")[0].lower().endswith((".json", ".yaml", ".yml"))


def load_config_file(path: str) -> Config:
    """The config of a file; `file.py:text` calls get_config(text). Errors name file and line."""
    name, _, argument = path.partition(":")
    file = config_file(path)
    if is_data(file):
        if argument:
            raise InputError(f"{name} has no variants", value=argument, fix=f"--config={name}")
        return _read_data(file)
    module, unknown = config_module(path), False
    if argument and not inspect.signature(module.get_config).parameters:
        raise InputError(f"{name} has no variants", value=argument, fix=f"--config={name}")
    try:
        config = module.get_config(argument) if argument else module.get_config()
        plain = inspect.signature(module.get_config).parameters.values()
        if argument and all(p.default is not p.empty for p in plain):
            unknown = config == module.get_config()  # the name of a variant that it does not know
    except (Exception, SystemExit) as error:
        raise _failed(f"get_config({argument!r}) failed", file, error) from error
    if unknown:
        raise InputError(
            f"{name} has no variant {argument!r}", rule="it gives the same config as without one",
            fix=f"--config={name}, or a variant that its get_config names",
        )  # fmt: skip
    if not isinstance(config, Config):
        raise InputError(
            f"{name}: get_config() must return rljax.config.Config", value=type(config).__name__
        )
    return config


def config_module(path: str):
    """The module of a config file."""
    file = config_file(path)
    if is_data(file):
        raise InputError("a Python config file is needed here", value=path)
    spec = importlib.util.spec_from_loader(
        "_rljax_config", importlib.machinery.SourceFileLoader("_rljax_config", file)
    )
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _failed("cannot be imported", file, error) from error
    if not callable(vars(module).get("get_config")):
        raise InputError(
            f"{file} has no get_config()",
            fix="define get_config() that returns rljax.config.Config",
        )
    return module


def _failed(what: str, file: str, error: BaseException) -> InputError:
    """The user's config file is at fault: says at which line of it."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    place = f"{file}:{lines[-1]}" if lines else file
    if isinstance(error, InputError):  # a field that is not there, or another file's fault
        return InputError(f"{place}: {error}")
    return InputError(f"{place}: {what}", rule=f"{type(error).__name__}: {error}")


def _read_data(file: str) -> Config:
    """The config of a JSON or YAML file, such as a run's config.json."""
    try:
        text = read_text(file, _LARGEST)
        if file.lower().endswith(".json"):
            return from_dict(_mapping(json.loads(text, object_pairs_hook=_once), file), file)
        return _from_yaml(text, file)
    except InputError as error:
        raise error if file in str(error) else InputError(f"{file}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{file} cannot be read", rule=f"{type(error).__name__}: {error}"
        ) from None


def _mapping(value: object, file: str) -> Mapping:
    if not isinstance(value, Mapping):
        rule = "the fields of a config and their values"
        raise InputError(f"{file} holds no config", value=type(value).__name__, rule=rule)
    return value


def _once(pairs: Sequence[tuple[str, object]]) -> dict:
    """The dict of a JSON or YAML mapping, where a field that stands twice would lose a value."""
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"field {twice!r} stands twice", fix="remove one")
    return out


def _from_yaml(text: str, file: str) -> Config:
    """Scalars are read as those of flags are, by the type of their field: 1e-6 is a number and
    "on" a text."""
    import yaml

    class Loader(yaml.BaseLoader):  # makes texts, lists and dicts alone
        def construct_mapping(self, node, deep=False):
            construct = self.construct_object
            return _once([(construct(key), construct(item, True)) for key, item in node.value])

    Loader.add_constructor(
        "tag:yaml.org,2002:map", lambda loader, node: loader.construct_mapping(node)
    )
    try:
        values = _mapping(yaml.load(text, Loader), file)
    except (yaml.YAMLError, TypeError) as error:
        raise InputError(f"{file} is not YAML", rule=str(error)) from None
    return with_texts(Config(), flat_fields(values), file, "")


# -- flags --


def config_flags(arguments: Sequence[str]) -> tuple[str | None, dict[str, str], list[str]]:
    """(the value of --config, {field: text} of --config.FIELD, all other arguments)."""
    path, fields, others = None, {}, []
    rest = iter(arguments)
    for argument in rest:
        name, equals, text = argument.removeprefix("-").removeprefix("-").partition("=")
        dashed = argument.startswith("-")
        if dashed and name.startswith("noconfig.") and not equals:
            fields[name.removeprefix("noconfig.")] = "false"
        elif dashed and (name == "config" or name.startswith("config.")):
            field = name.removeprefix("config").removeprefix(".")
            if not equals:
                text = "true" if _kinds().get(field) is bool else next(rest, None)
                if text is None:
                    raise InputError(f"--{name} has no value", fix=f"--{name}=VALUE")
            if field:
                fields[field] = text
            else:
                path = text
        else:
            others.append(argument)
            if argument == "--":
                others += rest
    return path, fields, others


def with_texts(config: Config, texts: Mapping[str, object], where: str, prefix: str) -> Config:
    """The config with {field: text} set, each text read by the type of its field. Raises InputError
    that lists every unknown field and every text that is no such value."""
    known, values, problems = _kinds(), {}, []
    for field, text in texts.items():
        if field not in known:
            problems.append(unknown_field(field, field_names(Config), prefix))
            continue
        try:
            values[field] = _value(text, known[field])
        except ValueError as error:
            shown = text[:200] if isinstance(text, str) else f"a {type(text).__name__}"
            problems.append(f"{prefix}{field}={shown}: {error}")
    if problems:
        raise InputError(f"{where}:\n  " + "\n  ".join(problems))
    return with_overrides(config, values, where)


def _kinds(kind: type = Config, prefix: str = "") -> dict[str, type]:
    """{dotted field: its type}."""
    out = {}
    for name, field in kind.__dataclass_fields__.items():
        section = isinstance(field.type, type) and hasattr(field.type, "__dataclass_fields__")
        inside = _kinds(field.type, f"{prefix}{name}.") if section else {prefix + name: field.type}
        out |= inside
    return out


def _value(text: object, kind: type):
    """A text as a value of a field's type; a list, which YAML may hold, as a tuple."""
    if typing.get_origin(kind) is tuple and isinstance(text, (str, list)):
        (item, _) = typing.get_args(kind)
        parts = text if isinstance(text, list) else _parts(text)
        return tuple(_value(part, item) for part in parts)
    if not isinstance(text, str):
        raise ValueError(f"must be {_NAMES.get(kind, 'a list')}")
    if kind is str:
        return text
    truths = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}
    try:
        return truths[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"must be {_NAMES[kind]}") from None


_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _parts(text: str) -> list[str]:
    """The items of a tuple as text: "('a', 'b')" or "a, mixture(x=1, y=2)"."""
    if text[:1] in ("(", "[", "'", '"'):
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            pass
        else:
            items = value if isinstance(value, (tuple, list)) else (value,)
            return [item if isinstance(item, str) else repr(item) for item in items]
    parts = _split(text)
    if len(parts) == 1:
        return [text] if text else []
    parts = [part.strip() for part in parts]
    parts = parts if parts[-1] else parts[:-1]  # one comma more at the end
    if not all(parts):
        raise ValueError("an item is empty; a text with a comma in it is written ('a,b',)")
    return parts


def _split(text: str) -> list[str]:
    """Cuts at the commas that stand outside of brackets and quotes."""
    cuts, depth, quote = [-1], 0, ""
    for i, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote and text[i - 1] != "\\" else quote
        elif letter in "'\"" and depth:
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and depth <= 0:
            cuts.append(i)
    ends = [*cuts, len(text)]
    return [text[begin + 1 : end] for begin, end in itertools.pairwise(ends)]
