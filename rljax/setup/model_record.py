"""model.json of a run folder beside the files of the policy: config.json of every local model, and
the files of those models that no checkpoint holds. A resume compares both."""

import concurrent.futures
import contextlib
import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rljax import hosts, hub
from rljax.config import Config
from rljax.config.schema import MODELS
from rljax.config.values import texts_of
from rljax.errors import InputError
from rljax.files import read_json_object, write_json
from rljax.models.config import ModelConfig
from rljax.models.families import from_hf_config
from rljax.models.huggingface import checkpoint_folder
from rljax.models.huggingface.checkpoint_folder import find_tensors
from rljax.roles import Critic, Role
from rljax.setup.role_table import abstract_roles, own_roles
from rljax.setup.setup import Setup

LOG = logging.getLogger("rljax")
# Of these a checkpoint holds what is trained; `initial_params` records the files of the policy.
_TRAINED = ("model", "critic_model", "lora.adapter")


def record_models(setup: Setup, record: Path) -> None:
    """Writes the config.json of every local model that a run reads, and the files of the frozen
    ones, into its model.json, which `initial_params` may have begun: weights are another model
    under another config."""
    configs, frozen = _model_configs(setup.config), _frozen_models(setup)
    added = {name: x for name, x in (("configs", configs), ("frozen", frozen)) if x}
    if hosts.first() and added:
        previous = read_json_object(record) if record.exists() else {}
        write_json(record, {**previous, **added})


def check_models(setup: Setup, record: Path) -> None:
    """Raises InputError if a model of a run that goes on is another one than in `record`, by its
    config.json, or a frozen one by its weights; of the fields of checkpoint.allow_changed it is a
    warning. A run without the record is not checked."""
    allowed = setup.config.checkpoint.allow_changed
    check_model_configs(setup.config, record, allowed=allowed)
    if recorded := hosts.share(_recorded(record, "frozen")):
        for field, models in _frozen_models(setup).items():
            entries = recorded.get(field)
            for now, then in zip(
                models, entries if isinstance(entries, list) else (), strict=False
            ):
                _compare_files(field, now, then, record, may_differ=field in allowed)


def _compare_files(field: str, now: Mapping, then: object, record: Path, *, may_differ: bool):
    """Raises InputError if a frozen model has other files than in its recorded entry `then`, or
    logs it where they `may_differ`."""
    files, recorded = now["files"], then.get("files") if isinstance(then, Mapping) else None
    if not isinstance(recorded, Mapping):
        return
    changed = sorted(x for x in {*files, *recorded} if files.get(x) != recorded.get(x))
    if not changed:
        return
    shown = ", ".join(changed[:3]) + f" and {len(changed) - 3} more" * (len(changed) > 3)
    text = f"the weights of {field}={now['folder']} are not those with which this run began"
    rule, fix = f"{shown}: another SHA-256 than in {record}", "put the files of that time back"
    if not may_differ:
        fix += f", or go on with these: --config.checkpoint.allow_changed={field}"
        raise InputError(text, rule=rule, fix=fix)
    if hosts.first():
        LOG.warning("%s (%s). Fix: %s", text, rule, fix)


def _recorded(record: Path, name: str) -> dict:
    """Returns an entry of a record; {} if the record is not there, or holds none."""
    try:
        return dict(read_json_object(record)[name])
    except (InputError, LookupError, TypeError, ValueError):
        return {}


# -- weights --


def _frozen_models(setup: Setup) -> dict[str, list[dict]]:
    """Returns {field: [{folder, files: {name: bytes and SHA-256}} of each local model]} of all
    models whose weights a run reads again when it goes on. Of several hosts each reads its share
    of the files."""
    files = {field: [(x, _weight_files(x)) for x in xs] for field, xs in _frozen(setup).items()}
    paths = sorted({path for models in files.values() for _, own in models for path in own})
    mine = [paths[i] for i in hosts.mine(len(paths))]
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        records = list(map(vars, pool.map(checkpoint_folder.record, mine)))
    shares = hosts.gather({str(path): x for path, x in zip(mine, records, strict=True)})
    by_path = {path: x for share in shares for path, x in share.items()}
    return {
        field: [
            {"folder": folder, "files": {path.name: by_path[str(path)] for path in own}}
            for folder, own in models
        ]
        for field, models in files.items()
    }


def _frozen(setup: Setup) -> dict[str, list[str]]:
    """Returns {field: local folders} of the models that no checkpoint holds: those that score or
    teach, a critic's below its adapters, and those of config.roles."""
    config = setup.config
    fields = [name for name in MODELS if name != "tokenizer" and name not in _TRAINED]
    if setup.model.config.lora:
        fields.append("critic_model")
    folders = {field: texts_of(config, field) for field in fields}
    makers = own_roles(config)
    roles = abstract_roles(setup) if makers else {}
    frozen = [makers[name] for name in makers if name in roles and _is_frozen(roles[name])]
    folders["roles"] = tuple(filter(None, (maker.options.get("folder") for maker in frozen)))
    local = {field: list(filter(os.path.exists, texts)) for field, texts in folders.items()}
    return {field: texts for field, texts in local.items() if texts}


def _is_frozen(role: Role) -> bool:
    return not role.checkpointed or isinstance(role, Critic) and bool(role.model.config.lora)


def _weight_files(folder: str) -> list[Path]:
    """Returns the files of a model's weights; [] if whoever reads them says what is wrong."""
    with contextlib.suppress(InputError):
        tensors = find_tensors(hub.model_folder(folder))
        return sorted({file for location in tensors.values() for file in location.files})
    return []


# -- config.json --


def check_model_configs(
    config: Config, record: Path, *, allowed: Sequence[str] = (), fields: Sequence[str] = ()
) -> None:
    """Raises InputError if the config.json of a model makes another ModelConfig than the one in
    `record`, the run's model.json; of the `allowed` fields it is a warning. `fields`: those that
    are compared, () = all. A run without the record is not checked."""
    for field, folder, changes in hosts.share(_other_configs(config, record)):
        if fields and field not in fields:
            continue
        text = f"{folder}/config.json makes another model than when this run began"
        fix = "put back the config.json of that time, which the run's model.json has under configs"
        if field not in allowed:
            fix += f"; or go on with this one: --config.checkpoint.allow_changed={field}"
            rule = "the weights of the run belong to the model of that time"
            raise InputError(text, value=changes, rule=rule, fix=fix)
        LOG.warning("%s: got %r. Fix: %s", text, changes, fix)


def _model_configs(config: Config) -> dict[str, list[dict]]:
    """Returns {field: config.json of each local folder that it names}."""
    configs = {}
    for field in (name for name in MODELS if name != "tokenizer"):
        folders = map(hub.model_folder, filter(os.path.exists, texts_of(config, field)))
        paths = [path for folder in folders if (path := Path(folder, "config.json")).is_file()]
        if paths:
            configs[field] = [read_json_object(path) for path in paths]
    return configs


def _other_configs(config: Config, record: Path) -> list[tuple[str, str, str]]:
    """Returns (field, folder, changed keys) of each model whose config.json makes another
    ModelConfig than the recorded one; [] if the record is not there, or holds none."""
    recorded, others = _recorded(record, "configs"), []
    for field, configs in _model_configs(config).items():
        folders = filter(os.path.exists, texts_of(config, field))
        for folder, now, then in zip(folders, configs, recorded.get(field, ()), strict=False):
            if now != then and _computation(now) != _computation(then):
                changes = [
                    f"{key}={now.get(key)!r}, which was {then.get(key)!r}"
                    for key in sorted({*now, *then})
                    if now.get(key) != then.get(key)
                ]
                others.append((field, folder, "; ".join(changes)))
    return others


def _computation(hf_config: dict) -> ModelConfig:
    """Returns the ModelConfig without the spread of random weights, which loaded ones have not."""
    config = from_hf_config(hf_config)
    vision = config.vision and dataclasses.replace(config.vision, init_std=0.0)
    return dataclasses.replace(config, init_std=0.0, vision=vision)
