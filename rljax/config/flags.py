"""A config from a file (Python, JSON, YAML, or the name of one that ships) and from --config flags.

    --config=configs/quickstart.py:tiny      get_config("tiny") of a file
    --config=quickstart                      a config that ships; `rljax configs` lists them
    --config=RUN                             the config of a run, or a .json or .yaml file
    --config.batch.epochs=2                  a field
    --config.trackers=console,tensorboard    a tuple; commas inside brackets do not separate

Imports no model code, so that a misspelt flag is answered at once.
"""

import importlib.machinery
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Container, Sequence
from pathlib import Path

from rljax.components import location_and_fix, use_working_folder
from rljax.config.data_files import read_config, read_entries
from rljax.config.names import (
    FIELDS_LISTED_IN_PYTHON,
    elsewhere_text,
    field_names,
    nearest_fields,
    unknown_field,
)
from rljax.config.own_functions import CONFIG_MODULE
from rljax.config.schema import FIELDS, Config
from rljax.config.values import is_config_dict
from rljax.errors import InputError
from rljax.suggest import elsewhere, near_names, plain

# -- files --


def shipped_configs() -> dict[str, Path]:
    """Returns {name: file} of the configs that come with the library:
    "quickstart", "presets/dapo"."""
    package = Path(__file__).resolve().parent.parent
    # Installed from a wheel they lie in the package, in a clone beside it.
    folders = (package / "configs", package.parent / "configs")
    folder = next(
        (folder for folder in folders if (folder / "quickstart.py").is_file()), folders[0]
    )
    files = sorted(folder.rglob("*.py"), key=lambda file: (len(file.parts), file))
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}


_LOCKED = re.compile(r'Key "(.+?)" does not exist and cannot be added')  # a locked ConfigDict
_FLAG = re.compile(r"--?(?P<no>no)?config\.(?P<field>[^=]+)")
_DATA = (".json", ".yaml", ".yml")


def split_config(path: str) -> tuple[str, str]:
    """Returns (file, folder or name of a config, its variant): of "my.py:tiny" ("my.py", "tiny").
    If the whole name exists as a path it has no variant, whatever colons it holds."""
    if os.path.lexists(path):
        return path, ""
    name, _, variant = path.partition(":")
    return name, variant


def config_file(path: str) -> str:
    """Returns the file that --config names, without its variant: a path, one of the shipped
    configs, or the config.json of a run folder. Raises InputError if there is none, or it is no
    .py, .json or .yaml file."""
    name = split_config(path)[0]
    if os.path.isfile(name):
        if not name.lower().endswith((".py", *_DATA)):
            raise InputError(
                "this file is no config",
                value=name,
                rule="a config is Python (.py), JSON or YAML, or a run folder",
                fix=f"of a file of rows: `rljax inspect {name} --model=MODEL`, or "
                f"--config.data.train={name}",
            )
        return name
    if os.path.isfile(os.path.join(name, "config.json")):  # a run folder
        return os.path.join(name, "config.json")
    shipped = shipped_configs()
    if name in shipped:
        return str(shipped[name])
    stem = name.removeprefix("configs/").removesuffix(".py")
    similar = [stem] if stem in shipped else near_names(stem, shipped, 1)
    similar = similar or [config for config in shipped if config.rpartition("/")[2] == stem]
    hint = f"did you mean {similar[0]}? " if similar else ""
    raise InputError(
        "no such config file",
        value=name,
        fix=f"{hint}A .py, .json or .yaml file, a run folder, or one that ships (`rljax configs` "
        "lists them)",
    )


def is_shipped(path: str) -> bool:
    """Returns whether --config names a Python file that comes with the library."""
    file = os.path.realpath(config_file(path))
    return file in map(os.path.realpath, shipped_configs().values())


def shipped_config(path: str) -> Config | None:
    """Returns the config of a path that ships, whose values nobody has set; None for a file of the
    user's own."""
    return load_config_file(path) if path and is_shipped(path) else None


def is_data(path: str) -> bool:
    """Returns whether the config of a path is data (JSON, YAML, a run folder), not Python."""
    name = split_config(path)[0]
    return name.lower().endswith(_DATA) or os.path.isdir(name)


def load_config_file(path: str, later: Container[str] = ()) -> Config:
    """Returns the config of a file; `file.py:text` calls get_config(text). The required
    placeholders of a ConfigDict that are set `later`, by flags, need no value. Raises InputError,
    with file and line, if it cannot be loaded."""
    name, argument = split_config(path)
    file = config_file(path)
    if is_data(file):
        if argument:
            raise InputError(f"{name} has no variants", value=argument, fix=f"--config={name}")
        return read_config(file)
    module, unknown = config_module(path), False
    parameters = inspect.signature(module.get_config).parameters.values()
    defaults = [p.default for p in parameters if p.kind is not p.VAR_POSITIONAL]
    if argument and not parameters:
        raise InputError(f"{name} has no variants", value=argument, fix=f"--config={name}")
    needs_argument = inspect.Parameter.empty in defaults
    if needs_argument and not argument:
        fix = f"--config={name}:VARIANT"
        raise InputError(f"{name}: get_config() has a parameter without a default", fix=fix)
    try:
        config = module.get_config(argument) if argument else module.get_config()
        if argument and not needs_argument and argument not in map(str, defaults):
            unknown = config == module.get_config()  # the name of a variant that it does not know
    except (Exception, SystemExit) as error:
        raise _failed(f"get_config({argument!r}) failed", file, error) from error
    if unknown:
        raise InputError(
            f"{name} has no variant {argument!r}",
            rule="it gives the same config as without one",
            fix=f"--config={name}, or a variant that its get_config names",
        )
    if is_config_dict(config):
        location = f"{name}: the ConfigDict of get_config()"
        return Config.from_config_dict(config, location, later=later)
    if not isinstance(config, Config):
        raise InputError(
            f"{name}: get_config() must return rljax.config.Config or ml_collections.ConfigDict",
            value=type(config).__name__,
            fix="build it by `config = Config()`, set its fields, and `return config`",
        )
    return config


def config_module(path: str):
    """Returns the module of a Python config file, which it runs. Raises InputError for a file of
    data, and for one that fails or has no get_config()."""
    file = config_file(path)
    if is_data(file):
        fix = "`rljax configs` lists those that ship"
        raise InputError("a Python config file is needed here", value=path, fix=fix)
    use_working_folder()
    spec = importlib.util.spec_from_loader(
        CONFIG_MODULE, importlib.machinery.SourceFileLoader(CONFIG_MODULE, file)
    )
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(CONFIG_MODULE)
    sys.modules[CONFIG_MODULE] = module  # where its dataclasses look for their own names
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(CONFIG_MODULE)
        if before is not None:
            sys.modules[CONFIG_MODULE] = before
        raise _failed("cannot be imported", file, error) from error
    if not callable(vars(module).get("get_config")):
        raise InputError(
            f"{file} has no get_config()",
            fix="define get_config() that returns rljax.config.Config",
        )
    return module


def listed(
    path: str, name: str, fix: str, variant: str = "", default: list[dict] | None = None
) -> object:
    """Returns what the function `name` of a Python config file yields, given the variant if it
    takes one; for JSON and YAML the list of that name: mappings of fields and options. Without one
    it returns `default`, or raises InputError if that is None."""
    file = config_file(path)
    if is_data(file):
        return read_entries(file, name, default)
    make = vars(config_module(path)).get(name)
    if make is None and default is not None:
        return default
    if not callable(make):
        raise InputError(f"{path.partition(':')[0]} has no {name}()", fix=fix)
    return make(variant) if inspect.signature(make).parameters else make()


def load_named_config(path: str, trusted: bool) -> Config:
    """Returns the config that a member of a sweep or a stage names. Raises InputError for a Python
    file, other than one that ships, unless `trusted`: a file of data runs no code of its author."""
    if not (trusted or is_data(path) or is_shipped(path)):
        raise InputError(
            "config names a Python file",
            value=path,
            fix="look at it, then --trust_code",
            rule="a file of data runs no Python of others",
        )
    return load_config_file(path)


def _failed(problem: str, file: str, error: BaseException) -> InputError:
    """Returns the error for a fault in the user's config file, with the line of the file."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    location = f"{file}:{lines[-1]}" if lines else file
    if isinstance(error, InputError):  # a field that is not there, or another file's fault
        return error.within(f"{location}: ")
    if type(error).__name__ == "RequiredValueError":
        fix = "set it before; leave .lock() out, which reads it, where a flag sets it"
        return InputError(f"{location}: a required placeholder has no value", fix=fix)
    if locked_key := _LOCKED.search(str(error)):
        problem = unknown_field(locked_key[1], field_names(Config))
        return InputError(f"{location}: {problem}", fix=FIELDS_LISTED_IN_PYTHON)
    fix = location_and_fix(error)[1]
    return InputError(f"{location}: {problem}", rule=f"{type(error).__name__}: {error}", fix=fix)


# -- flags --


def config_flags(arguments: Sequence[str]) -> tuple[str | None, dict[str, str], list[str]]:
    """Returns (the value of --config, {field: text} of --config.FIELD, all other arguments), in any
    order, as absl reads flags. rljax.config.texts reads the texts. Raises InputError for a flag
    without a value or given twice."""
    from absl import flags

    own_args = arguments[: list(arguments).index("--")] if "--" in arguments else arguments
    matches = list(filter(None, map(_FLAG.match, own_args)))
    switches = {name for name, spec in FIELDS.items() if spec.kind is bool}
    switches |= {match["field"] for match in matches if match["no"]}
    flag_values = flags.FlagValues()
    for field in dict.fromkeys(["", *(match["field"] for match in matches)]):
        name = f"config.{field}" if field else "config"
        flags.DEFINE_multi_string(name, [], "", flag_values=flag_values)
        flag_values[name].boolean = field in switches
    try:
        remaining = flag_values(["", *arguments], known_only=True)[1:]
    except flags.Error as error:  # "Missing value for flag --config.steps"
        name = str(error).rpartition(" ")[2].lstrip("-")
        raise InputError(f"--{name} has no value", fix=f"--{name}=VALUE") from None
    except ValueError as error:  # "--noconfig.export=1 does not take an argument"
        raise InputError(str(error), fix="--config.FIELD=VALUE") from None
    flag_texts = {name: texts for name, texts in flag_values.flag_values_dict().items() if texts}
    if repeated := [name for name, texts in flag_texts.items() if len(texts) > 1]:
        raise InputError(
            f"--{repeated[0]} is given twice", value=flag_texts[repeated[0]], fix="remove one"
        )
    (path,) = flag_texts.pop("config", [None])
    texts = {name.removeprefix("config."): text for name, (text,) in flag_texts.items()}
    field_order = [match["field"] for match in matches if match["field"] in texts]
    return path, {field: texts[field] for field in field_order}, remaining


def config_flag(flag: str) -> str:
    """Returns the answer to a flag that no command has, if it is a field of the config, or the name
    of one elsewhere: "fields of the config are written --config.steps=VALUE. "."""
    fields = field_names(Config)
    if text := elsewhere(flag):
        return f"use {elsewhere_text(text, '--config.')}. "
    similar = [flag] if flag in fields else nearest_fields(plain(flag), fields)
    written = " or ".join(f"--config.{field}=VALUE" for field in similar)
    return f"fields of the config are written {written}. " if similar else ""
