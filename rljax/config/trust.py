"""Decides which values of a config may be used when its author is unknown.

A run folder, or a config in JSON or YAML, may come from anybody. These values are used without
`--trust_code`; everything else, new fields and new components included, needs it:

    numbers and booleans    unless their field is declared with `needs_trust`
    texts                   by what the declaration of their field says, in `_rule_of`
    components              if they declare contract(safe=True), and only with options whose
                            annotations are harmless: numbers, choices, PlainText, and other
                            components (rljax.contracts)

A run that the user began on this machine needs no trust either: `vouch` writes a note of the path
and the digest of its config into the user's cache, outside of the folder, and `vouched` looks for
it. Both take the config object that was read, so the config that is checked is the one that is
used.
"""

import functools
import hashlib
import inspect
import json
import os
import re
import sys
import time
import types
import typing
from collections.abc import Callable
from pathlib import Path

from rljax.components import component_texts, is_own_code, names_of, parse_component, resolve
from rljax.config.declare import Spec
from rljax.config.flags import config_file, is_data
from rljax.config.overrides import TFDS, from_dict, kind_of_text, to_dict
from rljax.config.schema import FIELDS, NAMESPACES, Config
from rljax.config.values import texts_of, value_of, with_overrides
from rljax.contracts import Home, PlainText, spec
from rljax.errors import InputError
from rljax.files import read_data
from rljax.runs.jsonl import read_jsonl
from rljax.runs.store import is_url

# A registered data set: no folder, whose classes would be imported, and no namespace of others.
_REGISTERED = re.compile(r"\w+(?:/[\w.-]+)?(?::[\d.*]+)?", re.ASCII)
_NAMED = re.compile(r"[\w+ ]+=(.*)", re.DOTALL)
_TYPES = (bool, int, float, type(None))


# -- values that need trust --


def refuse_own_code(config: Config, where: str, folder: str | os.PathLike = "") -> None:
    """Raises InputError if the config, read from `where`, holds values that need trust. `folder` is
    where it lies: a run may write there and in the working folder, and nowhere else."""
    if untrusted := asks(config, folder):
        if missing := sorted(filter(_is_missing, own_names(config))):
            raise _missing_functions_error(missing, where, folder or os.path.dirname(where))
        raise InputError(
            f"{where} uses code, addresses or places that are not rljax's own",
            value="; ".join(untrusted),
            rule="whoever wrote it could harm this machine by them, so they need your permission",
            fix="look at what is listed; if you trust it, add --trust_code",
        )


def untrained(config: Config) -> Config:
    """Returns the config of a run whose policy is only loaded: it writes nothing and tells no
    service, so the fields for that need no trust."""
    trackers = tuple(text for text in config.trackers if any(map(is_own_code, names_of(text)[0])))
    changes = {"run_dir": "", "profile_port": 0, "trackers": trackers}
    return with_overrides(config, changes, "the config of a run")


def unscored(config: Config) -> Config:
    """Returns the config of a run whose policy only answers: as `untrained`, and without rewards,
    which are not called."""
    scoring = [field for field in FIELDS if field.startswith("reward.")]
    changes = {field: _DEFAULTS[field] for field in (*scoring, "evaluate.reward")}
    return with_overrides(untrained(config), changes, "the config of a run")


def _missing_functions_error(names: list[str], where: str, folder: str | os.PathLike) -> InputError:
    """Returns the error for functions that are not in this working folder: the folder is the
    problem, not the trust in their author."""
    began = _start_folder(folder)
    return InputError(
        f"{where} names functions that are not found here",
        value="; ".join(names),
        rule=f"they are looked for from the working folder, {os.getcwd()}, and on PYTHONPATH"
        + (f"; the run began in {began}" if began else ""),
        fix=f"run the command in {began or 'the folder where the run began'}, or where they are;"
        " those of somebody else need --trust_code there",
    )


def _start_folder(folder: str | os.PathLike) -> str:
    """Returns the working folder in which a run began, as its folder says; "" if it does not."""
    try:
        starts = read_jsonl(Path(folder) / "starts.jsonl")
    except (OSError, InputError, ValueError):
        return ""
    last_start = starts[-1] if starts else {}
    return str(last_start.get("working_folder") or "")


def _is_missing(name: str) -> bool:
    """Returns whether neither a file nor a module of a function is here; nothing is imported."""
    if name.partition(".")[0] in sys.stdlib_module_names:
        return False
    return not os.path.exists(_file_of(name))


def asks(config: Config, folder: str | os.PathLike = "") -> list[str]:
    """Returns the values of the config that need trust, as "field=value"."""
    fields = ((field, value_of(config, field)) for field in _DEFAULTS)
    return sorted(
        f"{field}={value!r}"
        for field, value in fields
        if value != _DEFAULTS[field] and asks_for_trust(field, value, folder)
    )


def asks_for_trust(field: str, value: object, folder: str | os.PathLike = "") -> bool:
    """Returns whether a value of a field needs the user's trust in its author."""
    return value_asks_for_trust(FIELDS.get(field), value, folder)


def value_asks_for_trust(spec: Spec | None, value: object, folder: str | os.PathLike = "") -> bool:
    """Returns whether a value of a field or an option with this declaration needs the user's trust
    in its author; None: without a declaration."""
    if isinstance(value, tuple | list):
        return any(value_asks_for_trust(spec, item, folder) for item in value)
    if isinstance(value, _TYPES):
        return spec is not None and spec.needs_trust and bool(value)
    if not isinstance(value, str):
        return True
    rule = spec and _rule_of(spec)
    return bool(value) and (rule is None or not rule(value, folder))


def _rule_of(spec: Spec) -> Callable[[str, str | os.PathLike], bool] | None:
    """Returns a function (text, folder) that says whether a text of a field needs no trust, by the
    declaration of the field; None where each needs it."""
    if spec.holds == "field":
        return lambda text, folder: text in ("data", *FIELDS)
    home = NAMESPACES.get(spec.component or spec.holds, "")
    if spec.component and (spec.path or spec.component == "data"):
        return functools.partial(_is_harmless_source, home=home)
    if home:
        return functools.partial(_is_harmless_component, home=home, safe=spec.safe)
    if spec.harmless:
        return lambda text, folder: re.fullmatch(spec.harmless, text) is not None
    if spec.is_written:
        return _is_inside
    return (lambda text, folder: not is_url(text)) if spec.path else None


_DEFAULT_CONFIG = Config()
_DEFAULTS = {field: value_of(_DEFAULT_CONFIG, field) for field in FIELDS}


def _is_harmless_component(text: str, folder, home: str, safe: str) -> bool:
    """Returns whether a component, or the one of NAME=component(...), is harmless."""
    named = _NAMED.fullmatch(text)
    return bool(re.fullmatch(safe, text)) or is_harmless(named[1] if named else text, home)


def _is_harmless_source(text: str, folder, home: str) -> bool:
    kind = kind_of_text(text)
    if kind == "tfds" and home == NAMESPACES["data"]:
        name = text.strip().removeprefix(TFDS).strip()
        return _REGISTERED.fullmatch(name) is not None and not os.path.lexists(name)
    # What the hub has is data, and it is asked at the address that this machine is set to.
    return kind in ("file", "hub") or kind == "component" and is_harmless(text, home)


def _is_inside(text: str, folder: str | os.PathLike) -> bool:
    """Returns whether a path that is written lies in the working folder, or in that of the
    config."""
    if is_url(text) or text.startswith("~"):
        return bool(folder) and str(folder).rstrip("/") == text.rstrip("/")
    try:
        real = Path(os.path.realpath(text))
    except ValueError:  # a zero byte
        return False
    homes = [Path(os.path.realpath(path)) for path in (os.curdir, folder or os.curdir)]
    return any(real.is_relative_to(home) for home in homes)


def is_harmless(text: str, home: str) -> bool:
    """Returns whether a component of the module `home` may be named by anyone, with these options.

    A text that is no call, or names a component that does not exist, is harmless unless it names
    code of others somewhere: whoever reads it answers the mistake."""
    try:
        name, options = parse_component(text.strip())
    except InputError:
        return True
    if is_own_code(name):
        return False
    try:
        component = resolve(name, home)
    except InputError:
        return not any(map(is_own_code, names_of(text)[0]))
    if not spec(component.function).safe:
        return False
    parameters = component.signature.parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for option, value in options:
        parameter = parameters.get(option)
        if parameter is None or parameter.kind is parameter.VAR_KEYWORD:  # a number is a mistake
            if takes_any or not isinstance(value, _TYPES):
                return False
        elif not _is_harmless_value(value, parameter.annotation):
            return False
    return True


def _is_harmless_value(value: object, kind: object) -> bool:
    """Returns whether the annotation of an option says that this value only sets it. No annotation,
    and `str`, which may be a path, an address or a command, do not say so."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        homes = [marker.module for marker in inner[1:] if isinstance(marker, Home)]
        if homes and isinstance(value, str):
            return not value or all(is_harmless(value, home) for home in homes)
        return _is_harmless_value(value, inner[0])
    if origin in (typing.Union, types.UnionType):
        return any(_is_harmless_value(value, member) for member in inner)
    if origin is typing.Literal:
        return value in inner
    if origin is tuple and isinstance(value, tuple):
        kinds = inner[:1] * len(value) if inner[1:] == (...,) else inner
        pairs = zip(value, kinds, strict=False)
        return len(kinds) >= len(value) and all(_is_harmless_value(*pair) for pair in pairs)
    if isinstance(value, str):
        return kind is PlainText
    return isinstance(value, _TYPES) and kind in _TYPES and kind is not inspect.Parameter.empty


# -- runs that the user began --


def require_trust(path: str, config: Config, trust_code: bool) -> None:
    """Raises InputError if `config`, as it was read from `path`, asks for trust and has none. One
    in JSON or YAML that is given with --trust_code needs it once."""
    if not is_data(path):
        return  # Python, which has run as it was read
    file = config_file(path)
    if trust_code:
        vouch(config, file)
    elif not vouched(config, file):
        refuse_own_code(config, path, os.path.dirname(file))


def vouch(config: Config, source: str | os.PathLike, folder: str | os.PathLike = "") -> bool:
    """Notes that the user of this machine uses this config from `source`, the path or URL of its
    file, so that it needs no trust again; returns whether it could be noted. `folder`: where the
    files of the run lie, if not beside it."""
    try:
        path = _note_path(config, source, folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{time.strftime('%Y-%m-%d')} {source}\n", encoding="utf-8")
    except (OSError, ValueError):
        return False
    return True


def vouched(config: Config, source: str | os.PathLike, folder: str | os.PathLike = "") -> bool:
    """Returns whether the user has used this very config from this source."""
    try:
        return _note_path(config, source, folder).is_file()
    except (OSError, ValueError):
        return False


def _note_path(config: Config, source: str | os.PathLike, folder: str | os.PathLike) -> Path:
    """Returns the file that vouches for a config. Its name is the digest of the source, of the
    config as it was read, of the files of the functions that it names, and of those that were
    written beside it (rljax.config.own_functions)."""
    inputs = Path(folder or Path(source).parent) / "inputs"
    files = sorted(inputs.glob("*.py")) if inputs.is_dir() else []
    contents = {
        "place": str(source) if is_url(source) else os.path.realpath(source),
        "config": to_dict(from_dict(to_dict(config), "a config")),
        "functions": sorted(map(_file_of, own_names(config))),
        "inputs": [hashlib.sha256(read_data(file)).hexdigest() for file in files],
    }
    text = json.dumps(contents, sort_keys=True)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
    return Path(cache, "rljax", "vouched", digest)


def own_components(config: Config) -> set[str]:
    """Returns the component texts of a config, options included, that name the user's own
    functions."""
    texts = [text for field in _DEFAULTS for text in texts_of(config, field)]
    texts += [match[1] for text in texts if (match := _NAMED.fullmatch(text))]
    components = {component for text in texts for component in component_texts(text)}
    return {text for text in components if is_own_code(parse_component(text)[0])}


def own_names(config: Config) -> set[str]:
    """Returns the user's own functions that the texts of a config name."""
    return {parse_component(text)[0] for text in own_components(config)}


def _file_of(name: str) -> str:
    """Returns the file of "path/file.py:function", or the module that "package.module.function"
    would be imported from; nothing is imported."""
    file, of_a_file, _ = name.rpartition(".py:")
    if of_a_file:
        return os.path.realpath(f"{file}.py")
    root, cwd = name.partition(".")[0], os.getcwd()
    folders = [p for p in sys.path if p and os.path.abspath(p) != cwd]
    paths = [f"{folder}/{root}{suffix}" for folder in (*folders, cwd) for suffix in (".py", "")]
    return next((os.path.realpath(path) for path in paths if os.path.exists(path)), name)
