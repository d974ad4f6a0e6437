"""Configs as data: dotted fields, overrides, dictionaries, fingerprints, and sizes that follow."""

import copy
import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from rljax.components import names_file, names_of
from rljax.config.names import FIELDS_LISTED, field_names, unknown_fields
from rljax.config.schema import FIELDS, BatchConfig, Config
from rljax.errors import InputError
from rljax.files import DATA_FILES, OTHER_FILES
from rljax.gguf import is_gguf
from rljax.hub.names import is_hub
from rljax.runs.store import is_url

TFDS = "tfds:"


def kind_of_text(spec: str) -> str:
    """Returns what the text of a data or model field names: "tfds", a repository of the "hub", an
    "url", a "file" or folder here, or a "component", which is a function. Whoever reads such a
    field, or says whether it may be trusted, asks this function, so that none of them runs what
    another took for data."""
    spec = spec.strip()
    if spec.startswith(TFDS):
        return "tfds"
    if is_hub(spec):
        return "hub"
    if is_url(spec):
        return "url"
    if names_file(spec):  # "file.py:function", whatever its ending looks like
        return "component"
    looks = "/" in spec or "\\" in spec or Path(spec).suffix in (*DATA_FILES, *OTHER_FILES)
    looks |= is_gguf(spec)
    if "(" in spec:
        looks = os.path.exists(spec) and not names_of(spec)[0]
    return "file" if looks or ("(" not in spec and os.path.exists(spec)) else "component"


def is_path(spec: str) -> bool:
    """Returns whether a text names data or a folder rather than a component."""
    return kind_of_text(spec) != "component"


def value_of(config: Config, name: str):
    """The value of a dotted field; of "" the config itself."""
    for part in filter(None, name.split(".")):
        config = getattr(config, part)
    return config


def _check_known(names: Iterable[str], where: str) -> None:
    known = dict.fromkeys(field_names(Config))
    strange = (str(name) for name in names if name not in known)
    if problems := list(unknown_fields(strange, list(known))):
        text = f"{where} has unknown fields:\n  " + "\n  ".join(problems)
        raise InputError(text, fix=FIELDS_LISTED)


def with_overrides(config: Config, overrides: Mapping[str, object], where: str) -> Config:
    """A copy with {dotted field: value} set. Raises InputError that lists every unknown field."""
    _check_known(overrides, where)
    out = copy.deepcopy(config)
    for name, value in overrides.items():
        node, *path = out, *name.split(".")
        for part in path[:-1]:
            node = getattr(node, part)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if whole and abs(value) < 2**53 and isinstance(getattr(node, path[-1]), float):
            value = float(value)  # the command line and JSON write 1 as 1.0
        setattr(node, path[-1], value)
    return out


def to_dict(config: Config) -> dict:
    """The resolved config, JSON-ready."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def flat_fields(value: Mapping, kind: type = Config, prefix: str = "") -> dict[str, object]:
    """{dotted name: value}. Only what the config has as a section is taken apart, and one level of
    what it has not, so that other frameworks' fields are recognised."""
    out: dict[str, object] = {}
    for name, item in value.items():
        field = kind.__dataclass_fields__.get(name) if isinstance(name, str) else None
        inside = {f"{prefix}{name}": item}
        if isinstance(item, Mapping) and field is not None and dataclasses.is_dataclass(field.type):
            inside = flat_fields(item, field.type, f"{prefix}{name}.")
        elif isinstance(item, Mapping) and field is None and item:
            inside = {f"{prefix}{name}.{inner}": None for inner in itertools.islice(item, 20)}
        if twice := out.keys() & inside.keys():
            raise InputError(f"field {min(twice)!r} stands twice", fix="remove one")
        out |= inside
    return out


def from_dict(value: Mapping, where: str) -> Config:
    """The Config that `to_dict` wrote: what is absent has its default; types are for validate()."""
    flat = {k: tuple(v) if isinstance(v, list) else v for k, v in flat_fields(value).items()}
    return with_overrides(Config(), flat, where)


def changed_fields(config: Config) -> dict[str, object]:
    """{dotted field: value} of all that differs from the defaults."""
    default = Config()
    values = {
        name: (value_of(config, name), value_of(default, name)) for name in field_names(Config)
    }
    return {name: value for name, (value, usual) in values.items() if value != usual}


def fingerprints(config: Config) -> dict[str, str]:
    """{dotted field: digest of its value} of all fields that change the run's numbers."""
    out = {}
    for name, spec in FIELDS.items():
        if not spec.may_change:
            text = json.dumps(value_of(config, name))
            out[name] = hashlib.sha256(text.encode()).hexdigest()[:16]
    # Where the reference's log-probs are kept changes nothing; whether they are, changes the roles.
    out["offline.reference_logprobs"] = str(bool(config.offline.reference_logprobs))
    return out


def row_tokens(config: Config) -> int:
    """Columns of a row: prompt and response, or a whole episode."""
    prompt, response = config.data.max_prompt_tokens, config.sampler.max_response_tokens
    environment = config.environment
    if not environment.function:
        return prompt + response
    between = (environment.max_turns - 1) * (environment.max_reply_tokens + response)
    return environment.max_tokens or prompt + response + between


def model_fields(config: Config) -> dict:
    """The fields of ModelConfig that a run says, whatever the family of its models."""
    settings = config.model_settings
    tokens = max(row_tokens(config), config.offline.max_tokens, config.pretraining.max_tokens)
    return {**dataclasses.asdict(settings), "rope_tokens": tokens}


def microbatch_tokens(config: Config) -> int:
    """batch.tokens_per_microbatch; its default where 0 leaves it to a plan, and none is asked."""
    return config.batch.tokens_per_microbatch or BatchConfig.tokens_per_microbatch


def microbatch_rows(config: Config, rows: int, row_tokens: int, shards: int = 1) -> int:
    """The most rows that divide `rows`, are a multiple of `shards`, and hold <= microbatch_tokens;
    `shards` rows where even those are more."""
    most = max(microbatch_tokens(config) // row_tokens, shards)
    return next((r for r in splits(rows, shards) if r <= most), rows)


def splits(rows: int, shards: int) -> list[int]:
    """The rows that a microbatch may have, most first: divisors of `rows`, multiples of
    `shards`."""
    parts = rows // shards if rows % shards == 0 else 0
    return [rows // n for n in range(1, parts + 1) if parts % n == 0]
