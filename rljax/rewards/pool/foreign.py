"""Calls rewards that were written for TRL or for verl with the arguments that those libraries give.

  TRL   def f(completions, prompts=..., <column>=..., **kwargs) -> list of a score for each: called
        once for all samples of a prompt. Every argument is a list, of one length; of a row whose
        prompt is a conversation, prompts and completions are lists of messages. completion_ids,
        log_extra and log_metric are handed over; trainer_state, which a worker does not know, is
        an error where it is read. None or NaN abstains.
  verl  def f(data_source, solution_str, ground_truth, extra_info=None) -> score, or a dict with
        "score", of which the numbers are kept: called for each sample

The columns are those of the row: the ground truth also by the names that data sets give it.
"""

import functools
import inspect
import math
import numbers
from collections.abc import Mapping, Sequence

from rljax.components import Component
from rljax.errors import InputError

_TRL_FIELDS = (
    *("responses", "token_ids", "prompt", "messages"),
    *("ground_truth", "data_source", "extra_info"),
)
_VERL_FIELDS = {
    "solution_str": "response",
    "ground_truth": "ground_truth",
    "data_source": "data_source",
    "extra_info": "extra_info",
}
_TRUTHS = ("ground_truth", "answer", "solution")
# What TRL's trainer has and a sample has not.
_OF_TRL_ALONE = ("trainer_state", "environments")


@functools.lru_cache(maxsize=1024)
def library_of(component: Component) -> str:
    """Returns "TRL" or "verl" if the reward has that library's signature, else ""."""
    names = set(component.signature.parameters) - set(component.options)
    if names & {"completions", "completion_ids"}:
        return "TRL"
    return "verl" if "solution_str" in names else ""


def fields_of(component: Component) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(fields of a sample, or of a group, that such a reward reads; fields that it requires).
    Raises InputError for a parameter that no sample can fill."""
    library, parameters = library_of(component), component.signature.parameters.values()
    required = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.name not in component.options
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    known = _VERL_FIELDS if library == "verl" else None
    wrong = [n for n in required if n in _OF_TRL_ALONE or known is not None and n not in known]
    if wrong:
        raise InputError(
            f"reward {component.name!r} has the signature of {library} and needs {wrong[0]!r}",
            rule="of verl's arguments there are data_source, solution_str, ground_truth, extra_info"
            if known
            else "what TRL's trainer itself holds is not handed to a reward",
            fix=f"give it a default, or bind it: '{component.name}({wrong[0]}=...)'",
        )
    if known is not None:
        return tuple(known.values()), tuple(known[name] for name in required)
    return _TRL_FIELDS, ("responses", *(n for n in ("ground_truth",) if n in required))


class _NotHanded:
    """Stands for what TRL's trainer hands to a reward and a worker does not have: a reward that
    looks at it fails, instead of going on as if there were nothing to see."""

    def __init__(self, name: str):
        object.__setattr__(self, "name", name)

    def __getattribute__(self, attribute: str):
        if attribute.startswith("__"):
            return object.__getattribute__(self, attribute)
        name = object.__getattribute__(self, "name")
        raise InputError(
            f"the reward reads {name}.{attribute}",
            rule="a reward runs in a worker, apart from the run, and knows no step of it",
            fix="remove what depends on the step, or let a schedule do it",
        )


class Logged:
    """Values that a reward of TRL's logs about its samples: numbers become parts, log/NAME; texts
    are printed for the file of the workers' prints."""

    def __init__(self, count: int):
        self.parts: list[dict[str, float]] = [{} for _ in range(count)]

    def extra(self, column: str, values: Sequence) -> None:
        """Records a value for each sample (TRL's log_extra)."""
        for parts, value in zip(self.parts, values, strict=True):
            value = _plain(value)
            if isinstance(value, numbers.Real) and math.isfinite(value):
                parts[f"log/{column}"] = float(value)
            else:
                print(f"{column}: {value}")

    def metric(self, name: str, value: float) -> None:
        """Records a number for all samples (TRL's log_metric)."""
        for parts in self.parts:
            parts[f"log/{name}"] = float(value)

    def scores(self, returned: Sequence) -> list:
        """Returns the scores as TRL reads them (None or NaN abstains), with the logged parts."""
        plain = map(_plain, returned)

        def abstains(x):
            return x is None or isinstance(x, float) and math.isnan(x)

        return [
            None if abstains(x) else {"score": x, **parts} if parts else x
            for x, parts in zip(plain, self.parts, strict=True)
        ]


def _plain(value: object) -> object:
    """The number that an array or a tensor of one element holds; another value as it is."""
    return value.item() if callable(getattr(value, "item", None)) else value


def arguments_of(component: Component, sample: Mapping, logged: Logged | None = None) -> dict:
    """The keyword arguments of a call, from a sample (verl) or from a group (TRL). Raises
    InputError if the row lacks a column that a parameter without a default needs."""
    parameters = component.signature.parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if library_of(component) == "verl":
        given = {name: sample[field] for name, field in _VERL_FIELDS.items() if field in sample}
    else:
        given = _lists(sample)
        given |= {"log_extra": logged.extra, "log_metric": logged.metric}
        given["trainer_state"] = _NotHanded("trainer_state")
    chosen = {
        name: value
        for name, value in given.items()
        if (takes_all or name in parameters) and name not in component.options
    }
    for name, parameter in parameters.items():
        plain = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if plain and parameter.default is parameter.empty and name not in component.options:
            if name not in chosen:
                raise InputError(
                    f"reward {component.name!r} needs the column {name!r}, which this row lacks",
                    value=sorted(given),
                    fix=f"add {name!r} to the data, or give the parameter a default",
                )
    return chosen


def _lists(group: Mapping) -> dict[str, list]:
    """Returns the arguments that TRL hands a reward of a group: a list for every name."""
    responses, messages = group["responses"], group.get("messages")
    extra = group.get("extra_info")
    columns = (
        {name: group.get("ground_truth") for name in _TRUTHS} if "ground_truth" in group else {}
    )
    columns |= {"data_source": group["data_source"]} if "data_source" in group else {}
    columns |= extra if isinstance(extra, dict) else {}
    lists = {str(name): [value] * len(responses) for name, value in columns.items()}
    if messages:
        prompts = [[dict(message) for message in messages] for _ in responses]
        completions = [[{"role": "assistant", "content": text}] for text in responses]
    else:
        prompts, completions = [group.get("prompt")] * len(responses), list(responses)
    if "token_ids" in group:
        lists["completion_ids"] = [[int(i) for i in ids] for ids in group["token_ids"]]
    return {**lists, "prompts": prompts, "completions": completions}


def numbers_of(returned: object) -> object:
    """Returns the entries of a dict that verl's trainer reads: the score and other numbers, no
    texts."""
    if not isinstance(returned, dict):
        return returned
    kept = {k: v for k, v in returned.items() if isinstance(v, numbers.Real)}
    return kept | ({"score": returned["score"]} if "score" in returned else {})
