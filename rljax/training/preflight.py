"""Checks before a run of several hosts begins that they have the same config, code, models and
data, and see the same run folder. With one process there is nothing to check."""

import importlib.util
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from rljax import hosts
from rljax.components import is_own_code, names_of
from rljax.config import Config, changed_fields, field_names, is_path
from rljax.config.schema import MODELS
from rljax.config.values import texts_of
from rljax.errors import InputError
from rljax.hosts import preflight
from rljax.runs.folder import make_folder
from rljax.setup import Setup

SHARED_S = 60.0  # as long as a network disk may keep what it knew of a folder
TOKEN = "token"
OF_HOSTS = "hosts"  # the folder of a run in which each host may write


def check_same_start(config: Config) -> None:
    """Raises InputError on every host if versions, code, config, models or devices differ."""
    if hosts.count() == 1:
        return
    settings = {f"config.{name}": repr(value) for name, value in changed_fields(config).items()}
    settings |= dict(_modules(config)) | dict(_folders(config))
    preflight.require_same(preflight.of_this_host() | settings)
    # Only now: the devices of hosts with several versions of JAX would not find each other.
    preflight.require_same(preflight.devices_of_this_host())


def check_same_data(setup: Setup) -> None:
    """Raises InputError on every host if the rows or the tokenizer differ."""
    if hosts.count() > 1:
        preflight.require_same({"data": setup.data.digest[:16]})


def _modules(config: Config) -> Iterator[tuple[str, str]]:
    """(module, digest) of the user's own code that the config names."""
    for field in field_names(config):
        for text in texts_of(config, field):
            if is_path(text):
                continue
            for name in names_of(text.partition("=")[2] if field == "roles" else text)[0]:
                if is_own_code(name) and not name.startswith("rljax."):
                    yield _module(name)


def _module(name: str) -> tuple[str, str]:
    file, of_a_file, _ = name.rpartition(".py:")
    if of_a_file:
        return f"file {file}.py", preflight.digest([Path(f"{file}.py")])
    module = name.rpartition(".")[0]
    try:
        origin = importlib.util.find_spec(module).origin
        return f"module {module}", preflight.digest([Path(origin)])
    except Exception as error:  # whatever the user's package does when it is imported
        return f"module {module}", type(error).__name__


def _folders(config: Config) -> Iterator[tuple[str, str]]:
    """(field, digest) of what the model folders of the config say of themselves, and of the sizes
    of their weights."""
    for field in MODELS:
        for folder in filter(is_path, texts_of(config, field)):
            files = sorted(Path(folder).glob("*.json"))
            weights = [p for p in Path(folder).glob("*") if p.suffix in (".safetensors", ".gguf")]
            weights += [Path(folder)] if os.path.isfile(folder) else []
            size = sum(path.stat().st_size for path in weights)
            yield f"{field} {folder}", f"{preflight.digest(files)} {size} bytes"


def shared_folder(path: Path) -> Path:
    """Returns the run folder, which the first host makes. Raises InputError, on every host, if one
    of them does not see what the first one writes into it."""
    if hosts.count() == 1:
        return make_folder(path)
    token, file = "", path / OF_HOSTS / TOKEN
    if hosts.first():
        make_folder(path)
        token = secrets.token_hex(8)
        file.parent.mkdir(exist_ok=True)
        file.write_text(token)
    token = hosts.share(token)
    visible = hosts.gather(_appears(file, token))
    if hosts.first():
        file.unlink(missing_ok=True)
    blind = [name for name, sees in zip(hosts.names(), visible, strict=True) if not sees]
    if blind:
        raise InputError(
            f"run_dir={path} is not the same folder on {', '.join(blind)}",
            rule=f"what {hosts.names()[0]} wrote into it was not there after {SHARED_S:g} s",
            fix="a folder on a disk that all hosts mount, at the same path",
        )
    return path


def _appears(file: Path, token: str) -> bool:
    deadline = time.monotonic() + SHARED_S
    while True:
        try:
            if file.read_text() == token:
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
