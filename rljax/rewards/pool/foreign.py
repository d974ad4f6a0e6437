"""Rewards that were written for TRL or for verl, called with what those libraries hand them.

  TRL   def f(completions, prompts=..., <column>=..., **kwargs) -> list of a score for each: called
        once for all samples of a prompt. Every argument is a list, of one length; of a row whose
        prompt is a conversation, prompts and completions are lists of messages.
  verl  def f(data_source, solution_str, ground_truth, extra_info=None) -> score, or a dict with
        "score", of which the numbers are kept: called for each sample

The columns are those of the row: the ground truth also by the names that data sets give it.
"""

import functools
import inspect
import numbers
from collections.abc import Mapping

from rljax.components import Component
from rljax.errors import InputError

_TRL_FIELDS = ("responses", "prompt", "messages", "ground_truth", "data_source", "extra_info")
_VERL_FIELDS = {
    "solution_str": "response",
    "ground_truth": "ground_truth",
    "data_source": "data_source",
    "extra_info": "extra_info",
}
_TRUTHS = ("ground_truth", "answer", "solution")
# What TRL's trainer has and a sample has not.
_OF_TRL_ALONE = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")


@functools.lru_cache(maxsize=1024)
def library_of(component: Component) -> str:
    """ "TRL", "verl", or "" for a reward of rljax's own signature."""
    names = set(component.signature.parameters) - set(component.options)
    if "completions" in names:
        return "TRL"
    return "verl" if "solution_str" in names else ""


def fields_of(component: Component) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields of a sample, or of a group, that such a reward is made of, and those it needs.
    Raises InputError for a parameter that no sample can fill."""
    library, parameters = library_of(component), component.signature.parameters.values()
    required = [
        p.name for p in parameters
        if p.default is p.empty and p.name not in component.options
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]  # fmt: skip
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


def arguments_of(component: Component, sample: Mapping) -> dict:
    """The keyword arguments of a call, from a sample (verl) or from a group (TRL)."""
    parameters = component.signature.parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if library_of(component) == "verl":
        given = {name: sample[field] for name, field in _VERL_FIELDS.items() if field in sample}
    else:
        given = _lists(sample)
    chosen = {
        name: value for name, value in given.items()
        if (takes_all or name in parameters) and name not in component.options
    }  # fmt: skip
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
    """What TRL hands a reward of a group: a list for every name."""
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
    return {**lists, "prompts": prompts, "completions": completions}


def numbers_of(returned: object) -> object:
    """What verl's trainer reads of a dict: the score and other numbers, no texts."""
    if not isinstance(returned, dict):
        return returned
    kept = {k: v for k, v in returned.items() if isinstance(v, numbers.Real)}
    return kept | ({"score": returned["score"]} if "score" in returned else {})
