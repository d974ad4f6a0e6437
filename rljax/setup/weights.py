"""Weights that a run starts from: those of the policy, and of critics and reward models with
scalar heads."""

import dataclasses
import json
import logging
import os
from collections.abc import Container
from pathlib import Path

from rljax import hosts, hub
from rljax.config import Config, is_path, model_fields
from rljax.config.schema import MODELS
from rljax.config.values import texts_of
from rljax.data.text.tokenizer import Tokenizer
from rljax.errors import InputError
from rljax.files import open_file, read_json_object
from rljax.keys import root_key, stream
from rljax.models.adapters import lora
from rljax.models.config import ModelConfig
from rljax.models.huggingface import load_config, load_params, load_with_report
from rljax.models.huggingface.checkpoint_folder import LoadReport, compare, find_tensors
from rljax.models.huggingface.peft import load_adapter
from rljax.models.huggingface.safetensors_file import read_header
from rljax.models.model import Model
from rljax.runs.folder import is_of_a_model
from rljax.setup.same_ids import differing_ids, tokenizer_of
from rljax.setup.setup import adapter_fields

LOG = logging.getLogger("rljax")
SCORERS = ("reward.model", "reward.cost_model", "reward.process_model")  # fields


def initial_params(
    config: Config,
    model: Model,
    record: Path | None = None,
    *,
    begun: Path | None = None,
    may_differ: bool = False,
) -> dict:
    """Returns the weights that a run starts from: those of the Hugging Face folder, or random ones
    from the seed; with adapters, fresh ones or those of lora.adapter. Raises InputError for files
    that cannot be read or do not fit the model.

    What was loaded (folder, revision, SHA-256 of each file) is written to `record`, if given.
    `begun` is the record of a run whose adapters are put on these weights: other files are an
    InputError, or where they `may_differ` a warning.
    """
    key = root_key(config.seed)
    base_model = dataclasses.replace(model, config=lora.without(model.config))
    if is_path(config.model):
        params, report = load_with_report(config.model, base_model)
        if record and hosts.first():
            record.write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
        if begun and (other := hosts.share(_other_files(begun, report))):
            _refuse_other_base(config.model, begun, other, may_differ)
        if config.lora.rank and config.lora.base == "bfloat16" and "float32" in report.dtypes:
            LOG.warning(
                "lora.base=bfloat16, the default, rounds the frozen weights of %s, which are read "
                "as float32: policy/ has the rounded ones, and adapter/ was trained on them. Fix: "
                "lora.base=float32 keeps them, in twice the memory",
                config.model,
            )
    else:
        params = base_model.init(stream(key, "weights"))
    if model.config.lora is None:
        return params
    params = lora.attach(model, params, stream(key, "adapters"))
    return load_adapter(config.lora.adapter, model, params) if config.lora.adapter else params


def _other_files(record: Path, report: LoadReport) -> list[str]:
    """Returns the names of the loaded files that are not those of the record; [] if it is not
    there, or is no record."""
    try:
        files = read_json_object(record)["files"]
        recorded = {name: file["sha256"] for name, file in files.items()}
    except (InputError, LookupError, TypeError, AttributeError):
        return []
    return sorted(name for name, file in report.files.items() if recorded.get(name) != file.sha256)


def _refuse_other_base(folder: str, record: Path, files: list[str], may_differ: bool) -> None:
    shown = ", ".join(files[:3]) + f" and {len(files) - 3} more" * (len(files) > 3)
    text = f"the weights of {folder} are not those that the adapters of this run were trained on"
    rule = f"{shown}: another SHA-256 than in {record}"
    if not may_differ:
        fix = "put the files of that time back, or go on with these: "
        fix += "--config.checkpoint.allow_changed=model"
        raise InputError(text, rule=rule, fix=fix)
    LOG.warning("%s (%s). Fix: put the files of that time back", text, rule)


def check_weights(config: Config, model: Model) -> None:
    """Raises InputError if a local folder that a run would read weights from has none, has files
    that are cut short, or lacks a tensor of the policy or has one of another shape, or is a
    language model that would score. Only the headers and sizes of files are read. Models on the
    hub are not checked."""
    if config.model and os.path.exists(config.model):
        base_model = dataclasses.replace(model, config=lora.without(model.config))
        compare(hub.model_folder(config.model), base_model)
    for field in (name for name in MODELS if name not in ("model", "tokenizer")):
        for folder in filter(os.path.exists, texts_of(config, field)):
            if field == "lora.adapter":
                file = Path(folder, "adapter_model.safetensors")
                with os.fdopen(open_file(file), "rb") as opened:
                    read_header(opened.fileno(), file)
            else:
                tensors = find_tensors(hub.model_folder(folder))
                if field in SCORERS:
                    _check_score(field, folder, tensors)


def multiplied_in_dtype(path: tuple[str, ...], config: ModelConfig) -> bool:
    """Returns whether the model rounds this weight to its dtype before use. Rounding a frozen copy
    then changes nothing; every other weight (router, norms, a float32 head) stays what the actor
    has: KL to the reference starts at exactly 0."""
    if path in (("head",), ("embedding",)):
        return not config.head_in_float32 or config.head_dtype == config.dtype
    experts = path[0] == "layers" and path[-2:] in (("mlp", "gate"), ("mlp", "up"), ("mlp", "down"))
    return path[-1] == "weight" or experts


STEP_SEPARATOR = "step_separator"  # key of a process reward model's config.json


def step_separator_of(folder: str | Path) -> str:
    """Returns the text between the steps on which the process reward model of a folder was trained:
    that of its config.json, or of the config of the run that the folder is in, else a newline."""
    folder = Path(hub.model_folder(folder))
    separator = read_json_object(folder / "config.json").get(STEP_SEPARATOR)
    run_config = folder.parent / "config.json"
    if separator is None and run_config.is_file() and not is_of_a_model(run_config):
        offline = read_json_object(run_config).get("offline")
        separator = offline.get("step_separator") if isinstance(offline, dict) else None
    return separator if isinstance(separator, str) else "\n"


def _check_score(
    field: str, folder: str, tensors: Container[str], *, starts_head: bool = False
) -> None:
    """Raises InputError for the tensors of a language model where a reward model is read; where
    training starts the head at zero, it is a warning."""
    if "score.weight" in tensors:
        return
    text, rule = f"{field}={folder} is a language model", "it has no score.weight"
    fix = "give the folder of a reward model, such as reward_model/ of a run's folder"
    if not starts_head:
        rule += ", which gives the score of a reward model"
        raise InputError(text, rule=rule, fix=fix)
    if hosts.first():
        LOG.warning("%s (%s): its scores start at 0. Fix, if they should not: %s", text, rule, fix)


def load_scalar(
    field: str, folder: str, wanted: ModelConfig, mesh, *, starts_head: bool = False
) -> tuple[Model, dict]:
    """Loads a reward model as one with a single label: of two labels (wrong, right) the value is
    the difference of the logits. Raises InputError for a model with more labels, and for a language
    model; with `starts_head`, for models that are trained, that gets a head of zeros."""
    if wanted.labels > 2:
        fix = f"--config.{field}=FOLDER of a model that gives one score"
        raise InputError(f"{field}={folder}", value=wanted.labels, rule="1 or 2 labels", fix=fix)
    tensors = find_tensors(hub.model_folder(folder, hub.WEIGHTS))
    _check_score(field, folder, tensors, starts_head=starts_head)
    params = load_params(folder, Model(wanted, mesh, "scalar"))
    if wanted.labels == 2:
        for name in ("head", "head_bias"):
            if name in params:
                params[name] = params[name][..., 1:] - params[name][..., :1]
    return Model(dataclasses.replace(wanted, labels=1), mesh, "scalar"), params


def scalar_model(
    config: Config, policy: Model, tokenizer: Tokenizer, field: str, folder: str, *, trained: bool
) -> tuple[Model, dict]:
    """Loads an outcome or process reward model of a folder, with the run's adapters if it is to be
    `trained`. Of two labels (wrong, right) the value is the difference of the logits, the log-odds
    of right. Raises InputError for more labels, for a language model, which can only be trained,
    and if it reads other ids than the policy."""
    settings = model_fields(config)
    settings |= adapter_fields(config) if trained else {}
    model_config = reading_same_ids(
        field, folder, load_config(folder, **settings), policy, tokenizer
    )
    base, mesh = lora.without(model_config), policy.mesh
    params = load_scalar(field, folder, base, mesh, starts_head=trained)[1]
    model = Model(dataclasses.replace(model_config, labels=1), policy.mesh, "scalar")
    if model_config.lora:
        key = stream(root_key(config.seed), f"adapters of {field}")
        params = lora.attach(model, params, key)
    return model, params


def reading_same_ids(
    field: str, folder: str, wanted: ModelConfig, policy: Model, tokenizer: Tokenizer
) -> ModelConfig:
    """Returns the config of another folder's model, set to read the ids of the run's tokenizer.
    Raises InputError if they mean something else to it."""
    checked = dataclasses.replace(wanted, known_ids=min(policy.config.ids, wanted.vocab_size))
    if not tokenizer.vocab_size:  # a plan reads no tokenizer
        return checked
    fix, other = "a model with the run's tokenizer: both read the same ids", tokenizer_of(folder)
    if isinstance(other, str):
        if wanted.vocab_size != policy.config.vocab_size:
            problem = f"{field}={folder} has another vocabulary"
            rule = f"the policy's has {policy.config.vocab_size} tokens"
            raise InputError(problem, value=wanted.vocab_size, rule=rule, fix=fix)
        if hosts.first():
            LOG.warning(
                "%s=%s has no tokenizer to compare with the run's (%s): its vocabulary is taken "
                "for the same, as it has the same size",
                field,
                folder,
                other,
            )
    elif difference := differing_ids(tokenizer, other):
        problem = f"{field}={folder} has another tokenizer than the run"
        rule = "it would read the run's ids as other words"
        raise InputError(problem, value=difference, rule=rule, fix=fix)
    elif wanted.vocab_size < tokenizer.vocab_size:
        problem = f"{field}={folder} has another vocabulary"
        rule = f"the run's tokenizer has {tokenizer.vocab_size} ids"
        raise InputError(problem, value=wanted.vocab_size, rule=rule, fix=fix)
    return checked
