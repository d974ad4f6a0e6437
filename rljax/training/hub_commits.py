"""The repositories of the hub that a config names, as commits. The first host asks once, so that
all hosts and every resume read the same files."""

import re
from pathlib import Path

from rljax import hosts, hub
from rljax.config import Config, field_names, value_of, with_overrides
from rljax.config.schema import MODELS
from rljax.config.values import texts_of
from rljax.errors import InputError
from rljax.files import read_json_object

COMMITS = "hub.json"  # in a run folder: {path as the config names it: path with the commit}


def with_commits(config: Config, folder: Path) -> tuple[Config, dict[str, str]]:
    """Returns (the config with a commit in every hf:// path, {path as the config named it: path
    with the commit}). A run that goes on keeps the commits in its folder. Raises InputError for a
    repository that cannot be found."""
    names = _asked(config)
    if not names:
        return config, {}
    commits = hosts.share(_commits(names, folder) if hosts.first() else None)
    changes = {}
    for field in field_names(Config):
        old = value_of(config, field)
        new = _put(old, commits, is_model=field in MODELS)
        if new != old:
            changes[field] = new
    return with_overrides(config, changes, "the hub"), commits


def _asked(config: Config) -> list[str]:
    """Every text of the config that names a repository, in a fixed order."""
    names = []
    for field in field_names(Config):
        for text in texts_of(config, field):
            names += hub.names_in(text)
            if field in MODELS and not hub.is_hub(text) and hub.model_name(text):
                names.append(text)
    return list(dict.fromkeys(names))


def _commits(names: list[str], folder: Path) -> dict[str, str]:
    try:
        saved = read_json_object(folder / COMMITS)
    except InputError:  # the run begins
        saved = {}
    saved_commits = {text: saved[text] for text in names if isinstance(saved.get(text), str)}
    return {text: saved_commits.get(text) or hub.pinned(text) for text in names}


def _put(value: object, commits: dict[str, str], *, is_model: bool) -> object:
    if isinstance(value, tuple | list):
        return tuple(_put(item, commits, is_model=is_model) for item in value)
    if not isinstance(value, str):
        return value
    if is_model and value in commits:
        return commits[value]
    for text in sorted(hub.names_in(value), key=len, reverse=True):
        value = re.sub(re.escape(text) + r"(?![^\s'\"(),])", lambda _, t=text: commits[t], value)
    return value
