"""Configs as data: dotted fields, overrides, dictionaries, fingerprints, and sizes that follow."""

import copy
import dataclasses
import difflib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from rljax.config.schema import Config
from rljax.errors import InputError


def is_path(spec: str) -> bool:
    """Whether a text names a file or folder rather than a component."""
    if ".py:" in spec.partition("(")[0]:  # a function of a file: rljax.components
        return False
    named = "/" in spec or "\\" in spec or Path(spec).suffix in (".parquet", ".jsonl", ".json")
    from_tfds = spec.startswith("tfds:")
    return from_tfds or os.path.exists(spec) or ("(" not in spec and named)


def field_names(config, prefix: str = "") -> list[str]:
    """Dotted names of all fields: ["model", ..., "batch.epochs", ...]."""
    names = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = prefix + field.name
        names += field_names(value, name + ".") if dataclasses.is_dataclass(value) else [name]
    return names


def nearest_field(name: str) -> str:
    """The field that a misspelt name most resembles, "" if none does."""
    close = difflib.get_close_matches(name, field_names(Config()), n=1, cutoff=0.5)
    return close[0] if close else ""


# Names by which verl's users know what is spelled otherwise here.
_ELSEWHERE = {
    "tis_imp_ratio_cap": "algorithm.correction=\"rollout_correction(level='token', upper=CAP, "
    'veto=None)"',
    "rollout_is": "algorithm.correction=\"rollout_correction(...)\", mode='off': metrics only",
    "rollout_is_threshold": 'algorithm.correction="rollout_correction(upper=...)"',
    "rollout_is_threshold_lower": 'algorithm.correction="rollout_correction(lower=...)"',
    "rollout_is_level": 'algorithm.correction="rollout_correction(level=...)"',
    "rollout_is_mode": 'algorithm.correction="rollout_correction(mode=...)"',
    "rollout_is_veto_threshold": 'algorithm.correction="rollout_correction(veto=...)"',
    "calculate_log_probs": "nothing: the sampler always records its log-probs",
    "adv_estimator": "algorithm.advantage",
    "loss_agg_mode": "algorithm.reduction",
    "ppo_mini_batch_size": "batch.sequences_per_optimizer_step (sequences, not prompts)",
    "use_kl_loss": "algorithm.kl_in_loss (0 = off)",
    "kl_loss_coef": "algorithm.kl_in_loss",
    "use_kl_in_reward": "algorithm.kl_in_reward (0 = off)",
    "entropy_coeff": "algorithm.entropy_coef",
}


def unknown_field(name: str, prefix: str = "") -> str:
    """What to say of a name that is no field: what replaces it, or the field it resembles."""
    replaced = _ELSEWHERE.get(name.rpartition(".")[2])
    if replaced:
        return f"{prefix}{name}: no such field; use {replaced}"
    near = nearest_field(name)
    return f"{prefix}{name}: no such field" + (f"; did you mean {prefix}{near}?" if near else "")


def _check_known(names: Iterable[str], where: str) -> None:
    known = set(field_names(Config()))
    problems = [unknown_field(str(name)) for name in names if name not in known]
    if problems:
        raise InputError(f"{where} has unknown fields:\n  " + "\n  ".join(problems))


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


def _flat(value: Mapping, prefix: str = "") -> dict[str, object]:
    out: dict[str, object] = {}
    for name, item in value.items():
        nested = isinstance(item, Mapping) and item
        out |= _flat(item, f"{prefix}{name}.") if nested else {f"{prefix}{name}": item}
    return out


def from_dict(value: Mapping, where: str) -> Config:
    """The Config that `to_dict` wrote: what is absent has its default; types are for validate()."""
    flat = {k: tuple(v) if isinstance(v, list) else v for k, v in _flat(value).items()}
    return with_overrides(Config(), flat, where)


# Where the run's files go and how it is watched changes no number of it.
_NOT_OF_THE_RUN = (
    "run_dir",
    "trackers",
    "checkpoint.every_steps",
    "checkpoint.keep",
    "checkpoint.allow_changed",
    "checkpoint.best_metric",
    "samples_every_steps",
    "report_every_minutes",
    "reward.workers",
    "compilation_cache",
    "export",
    "offline.reference_logprobs",
)


def fingerprints(config: Config) -> dict[str, str]:
    """{dotted field: digest of its value} of all fields that change the run's numbers."""
    out = {}
    for name in field_names(config):
        if name not in _NOT_OF_THE_RUN:
            value = config
            for part in name.split("."):
                value = getattr(value, part)
            out[name] = hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
    # Where the reference's log-probs are kept changes nothing; whether they are, changes the roles.
    out["offline.reference_logprobs"] = str(bool(config.offline.reference_logprobs))
    return out


def row_tokens(config: Config) -> int:
    """Columns of a row: prompt and response."""
    return config.data.max_prompt_tokens + config.sampler.max_response_tokens


def microbatch_rows(config: Config, rows: int, row_tokens: int, shards: int = 1) -> int:
    """The most rows that divide `rows`, are a multiple of `shards`, and hold <=
    tokens_per_microbatch."""
    most = max(config.batch.tokens_per_microbatch // row_tokens, shards)
    fitting = [r for r in range(shards, min(rows, most) + 1, shards) if rows % r == 0]
    return fitting[-1] if fitting else rows
