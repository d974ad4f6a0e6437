"""Configs as data: dictionaries, changed fields, fingerprints, and sizes that follow."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from rljax.components import names_file, names_of
from rljax.config.schema import FIELDS, BatchConfig, Config
from rljax.config.values import flat_fields, is_config_dict, value_of, with_overrides
from rljax.errors import InputError
from rljax.files import DATA_FILES, OTHER_FILES
from rljax.gguf import is_gguf
from rljax.hub.names import is_hub
from rljax.runs.store import is_url

TFDS = "tfds:"


def kind_of_text(spec: str) -> str:
    """Returns what the text of a data or model field names: "tfds", a repository of the "hub", a
    "url", a "file" or folder here, or a "component", which is a function. All code that reads such
    a field, or decides whether it may be trusted, asks this function, so that none runs what
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
    is_file = "/" in spec or "\\" in spec or Path(spec).suffix in (*DATA_FILES, *OTHER_FILES)
    is_file |= is_gguf(spec)
    if "(" in spec:
        is_file = os.path.exists(spec) and not names_of(spec)[0]
    return "file" if is_file or ("(" not in spec and os.path.exists(spec)) else "component"


def is_path(spec: str) -> bool:
    """Returns whether a text names data or a folder rather than a component."""
    return kind_of_text(spec) != "component"


def to_dict(config: Config) -> dict:
    """Returns the resolved config, ready for JSON."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_dict(value: Mapping, where: str) -> Config:
    """Returns the Config that `to_dict` wrote: an absent field has its default. Raises InputError
    for unknown fields; validate() checks types."""
    return with_overrides(Config(), flat_fields(value, Config), where)


def as_config(config: object, where: str) -> Config:
    """Returns the Config of a Config or of an ml_collections.ConfigDict. Raises InputError
    for others."""
    if is_config_dict(config):
        return Config.from_config_dict(config, f"{where}: the ConfigDict")
    if isinstance(config, Config):
        return config
    rule = "a config is a rljax.config.Config or an ml_collections.ConfigDict"
    problem = f"{where}: this is no config"
    raise InputError(problem, value=type(config).__name__, rule=rule, fix="build one")


def changed_fields(config: Config) -> dict[str, object]:
    """Returns {dotted field: value} of all that differs from the defaults."""
    default = Config()
    values = {name: value_of(config, name) for name in FIELDS}
    return {name: value for name, value in values.items() if value != value_of(default, name)}


def fingerprints(config: Config) -> dict[str, str]:
    """Returns {dotted field: digest of its value} of all fields that change the numbers of
    a run."""
    digests = {}
    for name, spec in FIELDS.items():
        if not spec.may_change:
            text = json.dumps(value_of(config, name))
            digests[name] = hashlib.sha256(text.encode()).hexdigest()[:16]
    # Where the reference's log-probs are kept changes nothing; whether they are, changes the roles.
    digests["offline.reference_logprobs"] = str(bool(config.offline.reference_logprobs))
    return digests


def row_tokens(config: Config) -> int:
    """Returns the columns of a row, in tokens: prompt and response, or a whole episode."""
    prompt, response = config.data.max_prompt_tokens, config.sampler.max_response_tokens
    environment = config.environment
    if not environment.function:
        return prompt + response
    between = (environment.max_turns - 1) * (environment.max_reply_tokens + response)
    return environment.max_tokens or prompt + response + between


def model_fields(config: Config) -> dict:
    """Returns the fields of ModelConfig that a config sets, whatever the family of its models."""
    settings = config.model_settings
    tokens = max(row_tokens(config), config.offline.max_tokens, config.pretraining.max_tokens)
    return {**dataclasses.asdict(settings), "rope_tokens": tokens}


def microbatch_tokens(config: Config) -> int:
    """Returns batch.tokens_per_microbatch; its default if it is 0, which leaves it to a plan."""
    return config.batch.tokens_per_microbatch or BatchConfig.tokens_per_microbatch


def microbatch_rows(config: Config, rows: int, row_tokens: int, shards: int = 1) -> int:
    """Returns the most rows that divide `rows`, are a multiple of `shards`, and hold <=
    microbatch_tokens; `shards` rows if even those are more."""
    most_rows = max(microbatch_tokens(config) // row_tokens, shards)
    return next((r for r in splits(rows, shards) if r <= most_rows), rows)


def splits(rows: int, shards: int) -> list[int]:
    """Returns the numbers of rows that a microbatch may have, in descending order: divisors of
    `rows`, multiples of `shards`."""
    parts = rows // shards if rows % shards == 0 else 0
    return [rows // n for n in range(1, parts + 1) if parts % n == 0]
