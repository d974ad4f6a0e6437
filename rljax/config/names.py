"""Names of config fields: the base class that refuses all others, and what to say of those."""

import dataclasses
import difflib
import os
from collections.abc import Iterable, Sequence

from rljax.errors import InputError

# Names by which users of other frameworks know what is spelled otherwise here.
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
    "kl_coef": "algorithm.kl_in_loss or algorithm.kl_in_reward",
    "use_kl_in_reward": "algorithm.kl_in_reward (0 = off)",
    "entropy_coeff": "algorithm.entropy_coef",
    "learning_rate": "lr of an optimizer, such as actor_optimizer.lr",
}

# The fix of errors about fields.
FIELDS_LISTED = "`rljax train --help` lists the fields, their types and defaults"


class UnknownField(InputError, AttributeError):
    """A config has no such field. An AttributeError too, which is what hasattr and copy expect."""


def _with_home(value: object) -> object:
    """The value with the user's folder for "~/", which no shell puts behind an equals sign."""
    if isinstance(value, tuple | list):
        return type(value)(map(_with_home, value))
    home = isinstance(value, str) and value.startswith("~/")
    return os.path.expanduser(value) if home else value


class Settings:
    """Base of the config's dataclasses: a name that is no field is refused where it is written."""

    def __new__(cls, *_, **fields):
        for name in fields:
            cls._check(name)
        return super().__new__(cls)

    def __setattr__(self, name: str, value: object) -> None:
        self._check(name)
        object.__setattr__(self, name, _with_home(value))

    def __getattr__(self, name: str):  # called for what is no field and no method
        if name.startswith("_"):  # a protocol that is asked for: copy, pickle, a notebook's display
            raise AttributeError(name)
        self._check(name)
        raise AttributeError(name)

    @classmethod
    def _check(cls, name: str) -> None:
        if name not in cls.__dataclass_fields__:
            known = [*cls.__dataclass_fields__, *field_names(cls)]
            what = unknown_field(name, dict.fromkeys(known), cls.__name__ + ".")
            raise UnknownField(what, fix=FIELDS_LISTED)


def field_names(config, prefix: str = "") -> list[str]:
    """Dotted names of all fields of a config or its class: ["model", ..., "batch.epochs", ...]."""
    names = []
    for field in dataclasses.fields(config):
        name, kind = prefix + field.name, field.type
        names += field_names(kind, name + ".") if dataclasses.is_dataclass(kind) else [name]
    return names


def nearest_fields(name: str, known: Sequence[str]) -> list[str]:
    """The fields that a name is likely to mean: those whose last part is the same or begins with
    it, else the one that it most resembles."""
    last = {field: field.rpartition(".")[2] for field in known}
    wanted = name.rpartition(".")[2]
    same = [field for field in known if last[field] == wanted]
    same = same or [field for field in known if last[field].startswith(f"{wanted}_")]
    if same:
        return same[:4]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return close
    parts = difflib.get_close_matches(wanted, [*last.values()], n=1, cutoff=0.7)
    return [field for field in known if last[field] in parts][:4]


def unknown_field(name: str, known: Iterable[str], prefix: str = "") -> str:
    """What to say of a name that is no field: what replaces it, its fields where it is a section,
    or the field it resembles."""
    replaced = _ELSEWHERE.get(name.rpartition(".")[2])
    if replaced:
        return f"{prefix}{name}: no such field; use {replaced}"
    known = list(known)
    inside = next((field for field in known if field.startswith(f"{name}.")), "")
    if inside:
        return (
            f"{prefix}{name}: a section has no value of its own; set its fields: {prefix}{inside}"
        )
    near = " or ".join(prefix + field for field in nearest_fields(name, known))
    return f"{prefix}{name}: no such field" + (f"; did you mean {near}?" if near else "")
