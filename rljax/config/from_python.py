"""The arguments of `rljax.train` -> a Config.

A field is named as a config file names it, by its dotted name or as a dict of its section, or by
its last part alone where no other field ends in it:

    {"actor_optimizer.lr": 1e-5}    actor_optimizer={"lr": 1e-5}    samples_per_prompt=8

A function stands where a config has the name of one, and a list of dicts where it has a file of
rows; both are written to files, so that the config stays text and the run can go on elsewhere.
"""

import hashlib
import json
import os
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path

from rljax.config.checks import OF_DATA
from rljax.config.declare import kind_name
from rljax.config.flags import load_config_file
from rljax.config.names import FIELDS_LISTED, field_names, unknown_field
from rljax.config.overrides import with_overrides
from rljax.config.own_functions import component_text, write_once
from rljax.config.schema import Config
from rljax.config.texts import kinds
from rljax.errors import InputError
from rljax.tracking.store import is_url

WHERE = "rljax.train"
REWARD = "reward.function"


def config_from(
    config: Config | str, model: object, data: object, reward: object, fields: Mapping
) -> Config:
    """The config of a call: `config`, itself or by the name that --config takes ("" = the
    defaults), with the rest set. None leaves a field as it is. Raises InputError."""
    if not isinstance(config, Config | str | os.PathLike):
        raise InputError(
            f"{WHERE}(config)", value=config,
            rule="a Config, or the name or file of one, such as 'quickstart'",
            fix="name everything else: rljax.train(model=..., data=..., reward=..., steps=...)",
        )  # fmt: skip
    base = config if isinstance(config, Config) else Config()
    if not isinstance(config, Config) and str(config):
        base = load_config_file(str(config))
    given = {"model": model}
    given["data" if isinstance(data, Mapping) else "data.train"] = data
    given["reward" if isinstance(reward, Mapping) else "reward.function"] = reward
    given = {name: value for name, value in given.items() if value is not None}
    found: dict[str, object] = {}
    for name, value in [*_flat(given), *_flat(fields)]:
        if name in found:
            raise InputError(f"{WHERE}: {name} is given twice", fix="remove one")
        found[name] = value
    run_dir = str(found.get("run_dir", base.run_dir))
    folder = Path(run_dir if run_dir and not is_url(run_dir) else "runs") / "inputs"
    written = {name: _as_text(name, value, folder) for name, value in found.items()}
    return with_overrides(base, written, WHERE)


def _flat(fields: Mapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    """(dotted name, value) of fields; a dict is a section."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield _full_name(f"{prefix}{name}"), value


def _full_name(name: str) -> str:
    """The dotted name of a field that is named whole, or by its last part alone."""
    known = field_names(Config)
    if name in known:
        return name
    inside = [field for field in known if field.startswith(f"{name}.")]
    if inside:
        rule = f"a section, of {', '.join(f.rpartition('.')[2] for f in inside[:4])}, ..."
        fix = f'{name}={{"{inside[0].removeprefix(name + ".")}": ...}}'
        raise InputError(f"{WHERE}: {name} is no field", rule=rule, fix=fix)
    ends = [field for field in known if field.endswith(f".{name}")] if "." not in name else []
    if len(ends) == 1:
        return ends[0]
    if ends:
        fix = f'name one of them whole: **{{"{ends[0]}": ...}}'
        raise InputError(f"{WHERE}: {name} is any of {', '.join(ends)}", fix=fix)
    raise InputError(f"{WHERE}: {unknown_field(name, known)}", fix=FIELDS_LISTED)


def _as_text(name: str, value: object, folder: Path) -> object:
    """A value as the config holds it; functions and rows are written to files of `folder`."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a number of NumPy or JAX
    if isinstance(value, os.PathLike):
        return str(value)
    if callable(value):
        return component_text(value, folder, name)
    kind = kinds()[name]
    if name == REWARD and isinstance(value, list | tuple) and len(value):
        # TRL's reward_funcs=[f, g]: their sum.
        texts = [_as_text(name, one, folder) for one in value]
        if not all(isinstance(text, str) and text for text in texts):
            fix = "reward=[f, 'exact_match()']"
            raise InputError(f"{WHERE}: {name}", value=value, rule="functions or texts", fix=fix)
        return f"mixture(rewards=({', '.join(map(repr, texts))},))"
    if isinstance(value, list | tuple):
        if value and all(isinstance(row, Mapping) for row in value):
            return _rows_file(name, value, folder)
        if typing.get_args(kind):
            return tuple(_as_text(name, item, folder) for item in value)
    elif value is None or isinstance(value, str | int | float):
        return value
    rows = ", or a list of dicts, one or more" if name in OF_DATA else ""
    raise InputError(
        f"{WHERE}: {name}", value=value, rule=f"must be {kind_name(kind)}{rows}",
        fix="a list: list(rows) of what gives rows one by one" if rows else
        FIELDS_LISTED,
    )  # fmt: skip


def _rows_file(name: str, rows: list[Mapping], folder: Path) -> str:
    """The .jsonl file of rows; its name has a digest of them."""
    try:
        lines = [json.dumps(dict(row), ensure_ascii=False, allow_nan=False) for row in rows]
        text = "\n".join(lines) + "\n"
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]  # ValueError: half a character
    except (TypeError, ValueError) as error:
        rule = f"rows become a .jsonl file: {error}"
        raise InputError(
            f"{WHERE}: {name}", rule=rule, fix="text, numbers, lists and dicts"
        ) from None
    path = folder / f"{name.rpartition('.')[2]}_{digest}.jsonl"
    write_once(path, text)
    return str(path)
