"""Makes a Config of the arguments of `rljax.train`.

A field is named as a config file names it, by its dotted name or as a dict of its section, or by
its last part alone if no other field ends in it:

    {"actor_optimizer.lr": 1e-5}    actor_optimizer={"lr": 1e-5}    samples_per_prompt=8

A function stands where a config has the name of one, and rows (rljax.config.python_rows) where
it has a file of them; both are written to files, so that the config stays text and the run can
go on elsewhere.
"""

import contextlib
import hashlib
import os
import typing
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path

from rljax.config.declare import kind_name
from rljax.config.flags import load_config_file
from rljax.config.names import FIELDS_LISTED, MOST_PROBLEMS, OFTEN_MEANT, field_names, unknown_field
from rljax.config.overrides import as_config
from rljax.config.own_functions import component_text, not_written
from rljax.config.python_rows import KINDS, is_columns, is_section, lines_of, splits_of
from rljax.config.schema import DATA, FIELDS, Config
from rljax.config.values import is_config_dict, with_overrides
from rljax.errors import InputError
from rljax.runs.folder import removed_if_empty
from rljax.runs.store import is_url
from rljax.suggest import elsewhere

WHERE = "rljax.train"
REWARD = "reward.function"
_ARGUMENTS = {REWARD: "reward", "data.train": "data"}  # fields that are arguments of their own


def config_from(
    config: Config | str,
    model: object,
    data: object,
    reward: object,
    fields: Mapping,
    unread: Callable[[Config], Container[str]] = lambda config: (),
) -> Config:
    """Returns the config of a call: `config`, itself or by the name that --config takes ("" = the
    defaults), with the rest set. None leaves a field as it is. A last part that several fields have
    means the one that is not among the fields that the config has `unread`. Raises InputError for
    names that are no fields, and values that cannot be written as text or files."""
    if isinstance(config, str | os.PathLike):
        base = load_config_file(str(config)) if str(config) else Config()
    elif isinstance(config, Config) or is_config_dict(config):
        base = as_config(config, WHERE)
    else:
        raise InputError(
            f"{WHERE}(config)",
            value=config,
            rule="a Config, a ConfigDict, or the name or file of one, such as 'quickstart'",
            fix="name everything else: rljax.train(model=..., data=..., reward=..., steps=...)",
        )
    arguments = {"model": model}
    if isinstance(data, Mapping) and not is_section(data):
        data = splits_of(data) or data
    section = is_section(data) or isinstance(data, Mapping) and not is_columns(data)
    arguments["data" if section else "data.train"] = data
    arguments["reward" if isinstance(reward, Mapping) else "reward.function"] = reward
    arguments = {name: value for name, value in arguments.items() if value is not None}
    values: dict[str, object] = {}
    ambiguous = []
    for names, value in [*named(arguments), *named(fields)]:
        if len(names) > 1:
            ambiguous.append((names, value))
        elif names[0] in values:
            raise InputError(f"{WHERE}: {names[0]} is given twice", fix="remove one")
        else:
            values[names[0]] = value
    if ambiguous:
        text_values = {n: v for n, v in values.items() if isinstance(v, str | int | float | tuple)}
        left_out = unread(with_overrides(base, text_values, WHERE))
        for names, value in ambiguous:
            name = _read_field(names, left_out)
            if name in values:
                raise InputError(f"{WHERE}: {name} is given twice", fix="remove one")
            values[name] = value
    run_dir = str(values.get("run_dir", base.run_dir))
    folder = Path(run_dir if run_dir and not is_url(run_dir) else "runs") / "inputs"
    written = {name: as_text(name, value, folder) for name, value in values.items()}
    return with_overrides(base, written, WHERE)


def _read_field(names: list[str], unread: Container[str]) -> str:
    """Returns the one of several fields that the config reads. Raises InputError where there are
    more."""
    last_part = names[-1].rpartition(".")[2]
    if "batch.samples_per_prompt" in unread:  # it does not sample
        names = [name for name in names if name != OFTEN_MEANT.get(last_part)]
    read = [name for name in names if name not in unread] or names
    if len(read) == 1:
        return read[0]
    section, _, field = min(read, key=lambda name: name.count(".")).partition(".")
    fix = f'name one of them whole, such as {section}={{"{field}": ...}}'
    raise InputError(f"{WHERE}: {last_part} is any of {', '.join(read)}", fix=fix)


def named(fields: Mapping) -> list[tuple[list[str], object]]:
    """Returns (the fields that a name may mean, value) of every given value; a dict is a section.
    Raises InputError that answers every name that is no field."""
    fields_of_names, errors = [], []
    for name, value in _leaves(fields):
        try:
            fields_of_names.append((_full_names(name), value))
        except InputError as error:
            errors.append(error)
    if len(errors) > 1:
        shown = [error.parts[0].removeprefix(f"{WHERE}: ") for error in errors[:MOST_PROBLEMS]]
        unlisted = len(errors) - len(shown)
        shown += [f"and {unlisted} more names that are no fields"] * (unlisted > 0)
        listed = "".join(f"\n  {text}" for text in shown)
        raise InputError(f"{WHERE}: these are no arguments:{listed}", fix=FIELDS_LISTED)
    if errors:
        raise errors[0]
    return fields_of_names


def _leaves(fields: Mapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in fields.items():
        if isinstance(value, Mapping) and not (is_columns(value) and _is_of_data(prefix + name)):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _is_of_data(name: str) -> bool:
    """Returns whether a name, whole or the last part of one, is that of a field that holds rows."""
    section = any(field.startswith(f"{name}.") for field in FIELDS)
    return not section and any(f".{field}".endswith(f".{name}") for field in DATA)


def _full_names(name: str) -> list[str]:
    """Returns the dotted names of the fields that a name may be: whole, or their last part alone;
    first the one that is often meant by it, though it is called otherwise."""
    all_fields = field_names(Config)
    if name in all_fields:
        return [name]
    inside = [field for field in all_fields if field.startswith(f"{name}.")]
    if inside:
        rule = f"a section, of {', '.join(f.rpartition('.')[2] for f in inside[:4])}, ..."
        fix = f'{name}={{"{inside[0].removeprefix(name + ".")}": ...}}'
        raise InputError(f"{WHERE}: {name} is no field", rule=rule, fix=fix)
    same_ending = (
        [field for field in all_fields if field.endswith(f".{name}")] if "." not in name else []
    )
    if same_ending and not elsewhere(name):  # `epochs` of others are not batch.epochs
        return [OFTEN_MEANT[name], *same_ending] if name in OFTEN_MEANT else same_ending
    problem = unknown_field(name, all_fields)
    for field, argument in _ARGUMENTS.items():
        problem = problem.replace(f"`{field}`", f"`{argument}=`")
    raise InputError(f"{WHERE}: {problem}", fix=FIELDS_LISTED)


def as_text(
    name: str, value: object, folder: Path, kind: type | None = None, *, where: str = WHERE
) -> object:
    """Returns a value as the config holds it; functions and rows are written to files of `folder`.
    `kind`: the type of an item of a list. Raises InputError that begins with `where`."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a number of NumPy or JAX
    if isinstance(value, os.PathLike):
        return str(value)
    if callable(value):
        return component_text(value, folder, name)
    kind = kind or FIELDS[name].kind
    if name == REWARD and isinstance(value, list | tuple) and len(value):
        # TRL's reward_funcs=[f, g]: their sum.
        texts = [as_text(name, part, folder, where=where) for part in value]
        if not all(isinstance(text, str) and text for text in texts):
            fix = "reward=[f, 'exact_match()']"
            raise InputError(f"{where}: {name}", value=value, rule="functions or texts", fix=fix)
        return f"mixture(rewards=({', '.join(map(repr, texts))},))"
    if name == REWARD and not isinstance(value, str):
        raise InputError(
            f"{where}: {name}",
            value=value,
            rule="must be a function, or the name of one",
            fix="reward=my_function, or reward='exact_match()'",
        )
    items = typing.get_args(kind)
    if name in DATA and not items and isinstance(value, int | float):
        raise InputError(
            f"{where}: {name}",
            value=value,
            rule=f"must be rows ({KINDS}), a file of them, a name of the hub, or a task",
            fix="data=[{'prompt': ..., 'answer': ...}], or data='rows.jsonl'",
        )
    if name in DATA and not items and not isinstance(value, str | int | float | None):
        return _rows_file(name, value, folder, where)
    if items and isinstance(value, list | tuple):
        if name in DATA and value and all(isinstance(row, Mapping) for row in value):
            return (_rows_file(name, value, folder, where),)
        return tuple(as_text(name, item, folder, items[0], where=where) for item in value)
    if value is None or isinstance(value, str | int | float):
        return value
    rows = f", or {KINDS}" if name in DATA else ""
    raise InputError(
        f"{where}: {name}", value=value, rule=f"must be {kind_name(kind)}{rows}", fix=FIELDS_LISTED
    )


def _rows_file(name: str, rows: object, folder: Path, where: str) -> str:
    """Writes rows to a .jsonl file whose name has a digest of them; returns its path."""
    stem, digest = name.rpartition(".")[2], hashlib.sha256()
    draft = folder / f"{stem}.{os.getpid()}.tmp"
    with removed_if_empty(folder), contextlib.ExitStack() as closing:
        closing.callback(draft.unlink, missing_ok=True)
        with not_written(draft):
            folder.mkdir(parents=True, exist_ok=True)
            file = closing.enter_context(draft.open("w", encoding="utf-8"))
        for line in lines_of(rows, f"{where}: {name}"):
            digest.update(line.encode())
            with not_written(draft):
                file.write(line)
        path = folder / f"{stem}_{digest.hexdigest()[:8]}.jsonl"
        with not_written(path):
            file.close()
            os.replace(draft, path)
    return str(path)
