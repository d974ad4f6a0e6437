"""Calls rewards that were written for another library with the arguments that it gives.

  TRL   def f(completions, prompts=..., <column>=..., **kwargs) -> list of a score for each: called
        once for all samples of a prompt. Every argument is a list, of one length; of a row whose
        prompt is a conversation, prompts and completions are lists of messages. completion_ids,
        log_extra and log_metric are handed over; trainer_state, which a worker does not know, is
        an error where it is read. None or NaN abstains.
  verl  def f(data_source, solution_str, ground_truth, extra_info=None) -> score, or a dict with
        "score", of which the finite numbers are kept: called for each sample. Of its
        BatchRewardManager, f(data_sources, solution_strs, ground_truths, extra_infos): called once
        for all samples of a prompt, returns a list of such
  OpenRLHF   def f(queries, prompts, labels, **kwargs) -> a score for each, or {"rewards": of each,
        "scores": of each, "extra_logs": {name: of each, or one number}}: called once for all
        samples of a prompt. Prompts are texts as the policy read them, queries are prompt and
        response.
  verifiers  def f(completion, answer, prompt=..., <column>=..., **kwargs) -> score: called for each
        sample. Of a conversation, prompt and completion are lists of messages. `info` is the row's
        column of that name or else its extra_info; `state` holds what the sample has of it.

The columns are those of the row, with the values that it holds: a list, an object or a number is
one. The ground truth is handed over by all names that data sets give it. The entries of extra_info
are columns, too, but for those that have the name of another column or of the ground truth: these
are in `extra_info` alone.
"""

import functools
import inspect
import math
import numbers
from collections.abc import Mapping, Sequence

from rljax.answer_columns import PLAIN_ANSWERS
from rljax.components import Component
from rljax.contracts import MOST_REWARD
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
_LISTS_OF_VERL = {
    "solution_strs": "responses",
    "ground_truths": "ground_truth",
    "data_sources": "data_source",
    "extra_infos": "extra_info",
}
_LISTS_OF_OPENRLHF = {"queries": "responses", "prompts": "prompt", "labels": "ground_truth"}
# Objects of a library's trainer or rubric that a sample does not have.
_OF_A_TRAINER = {"TRL": ("trainer_state", "environments"), "verifiers": ("parser", "judge")}
VERL_BATCH, OPENRLHF = "verl's BatchRewardManager", "OpenRLHF"
# {library: {parameter: the field that fills it}}; the others take any column of the row.
_PARAMETERS = {"verl": _VERL_FIELDS, VERL_BATCH: _LISTS_OF_VERL, OPENRLHF: _LISTS_OF_OPENRLHF}
# Libraries whose rewards are called once for all samples of a prompt.
OF_GROUPS = ("TRL", VERL_BATCH, OPENRLHF)


class GroundTruth(str):
    """The text of a ground truth that knows what its row holds: what rewards of TRL's and verl's
    signature are handed, while ours compare with the text.

    `columns` is {name of the column: its value}, and `value` the ground truth in it. `hidden` are
    the entries of extra_info whose names stand for another value.
    """

    columns: dict
    value: object
    hidden: tuple[str, ...]

    def __new__(cls, text: str, columns: dict | None = None, value: object = None):
        truth = super().__new__(cls, text)
        truth.columns, truth.value = columns or {}, text if value is None else value
        truth.hidden = ()
        return truth

    def beside(self, row: Mapping, extra_info: Mapping) -> "GroundTruth":
        """The ground truth of a row that also knows those of its columns that an entry of
        extra_info has the name of, and which entries have another value."""
        names = {*PLAIN_ANSWERS, *extra_info} - {"extra_info"}
        columns = {n: row[n] for n in row if n in names and row[n] is not None}
        truth = GroundTruth(str(self), columns | self.columns, self.value)
        handed = columns_of({"ground_truth": truth, "extra_info": dict(extra_info)})
        truth.hidden = tuple(n for n in extra_info if handed[n] != extra_info[n])
        return truth


def columns_of(sample: Mapping) -> dict:
    """Returns the columns of a sample's row by their names. An entry of extra_info is one where
    neither a column nor the ground truth has its name."""
    extra, truth = sample.get("extra_info"), sample.get("ground_truth")
    truths = dict.fromkeys(PLAIN_ANSWERS, _held(truth)) if "ground_truth" in sample else {}
    columns = {"data_source": sample["data_source"]} if "data_source" in sample else {}
    columns |= truths
    if isinstance(extra, dict):
        columns |= {"extra_info": extra} | extra
    if truth is not None and not (isinstance(truth, str) and not truth):  # there is one
        columns |= truths
    return columns | (truth.columns if isinstance(truth, GroundTruth) else {})


def takes_column(component: Component, name: str) -> bool:
    """Returns whether a reward has TRL's or verifiers' signature and is handed the column."""
    parameters = component.signature.parameters
    is_named = name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return (
        library_of(component) in ("TRL", "verifiers") and is_named and name not in component.options
    )


def _held(truth: object) -> object:
    """Returns the ground truth as a row holds it; of a worked solution the answer alone."""
    value = truth.value if isinstance(truth, GroundTruth) else truth
    return str(truth) if isinstance(value, str) else value


@functools.lru_cache(maxsize=1024)
def library_of(component: Component) -> str:
    """Returns the name of the library that the reward's signature is of; "" if it is ours."""
    parameters = component.signature.parameters
    names = set(parameters) - set(component.options)
    if names & {"completions", "completion_ids"}:
        return "TRL"
    if "solution_str" in names:
        return "verl"
    libraries = {"solution_strs": VERL_BATCH, "queries": OPENRLHF, "completion": "verifiers"}
    required = [n for n in libraries if n in names and parameters[n].default is parameters[n].empty]
    return libraries[required[0]] if required else ""


def fields_of(component: Component) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns (fields of a sample, or of a group, that such a reward reads; fields that it
    requires). Raises InputError for a parameter that no sample can fill."""
    library, parameters = library_of(component), component.signature.parameters.values()
    required = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.name not in component.options
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    field_of, unknown = _PARAMETERS.get(library), _OF_A_TRAINER.get(library, ())
    wrong = [n for n in required if n in unknown or field_of is not None and n not in field_of]
    if wrong:
        name, lacking = component.function.__name__, wrong[0]
        problem = f"reward {component.name!r} has the signature of {library} and needs {lacking!r}"
        if field_of is not None:
            raise InputError(
                problem,
                rule=f"of its arguments there are {', '.join(field_of)}",
                fix=f"give it a default, or bind it: '{component.name}({lacking}=...)'",
            )
        raise InputError(
            problem,
            rule=f"what a trainer of {library} itself holds is not handed to a reward",
            fix="give it a default, or call it in a reward of your own: "
            f"def my_reward(response, ground_truth): return {name}(..., {lacking}=...)",
        )
    if field_of is not None:
        return tuple(field_of.values()), tuple(field_of[name] for name in required)
    if library == "verifiers":
        fields = ("response", *(n for n in _TRL_FIELDS if n not in ("responses", "token_ids")))
        compared = {"ground_truth", "answer"} & set(required)
        return fields, ("response", *(["ground_truth"] if compared else []))
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
    """Values that a reward of TRL's logs about its samples: finite numbers become parts, log/NAME;
    others, and texts, are printed for the file of the workers' prints."""

    def __init__(self, count: int):
        self.parts: list[dict[str, float]] = [{} for _ in range(count)]

    def extra(self, column: str, values: Sequence) -> None:
        """Records a value for each sample (TRL's log_extra)."""
        for parts, value in zip(self.parts, values, strict=True):
            number = _finite(value)
            if number is None:
                print(f"{column}: {_plain(value)}")
            else:
                parts[f"log/{column}"] = number

    def metric(self, name: str, value: float) -> None:
        """Records a number for all samples (TRL's log_metric)."""
        self.extra(name, [value] * len(self.parts))

    def rewards_in(self, returned: object) -> object:
        """Returns the rewards that a reward of OpenRLHF's returned, and records what it logs beside
        them. Raises TypeError for a dict without "rewards"."""
        if not isinstance(returned, dict):
            return returned
        if "rewards" not in returned:
            raise TypeError(f"the reward returned a dict without 'rewards': {sorted(returned)}")
        logs = {"scores": returned.get("scores"), **(returned.get("extra_logs") or {})}
        for name, values in logs.items():
            if isinstance(values, numbers.Real) or getattr(values, "shape", None) == ():
                self.metric(name, values)
            elif values is not None:
                self.extra(name, values)
        return returned["rewards"]

    def scores(self, returned: Sequence) -> list:
        """Returns the scores as TRL reads them (None or NaN abstains), with the logged parts."""
        values = map(_plain, returned)

        def abstains(x):
            return x is None or isinstance(x, float) and math.isnan(x)

        return [
            None if abstains(x) else {"score": x, **parts} if parts else x
            for x, parts in zip(values, self.parts, strict=True)
        ]


def _plain(value: object) -> object:
    """Returns the number that an array or a tensor of one element holds, and any
    other value as it is."""
    is_single = math.prod(getattr(value, "shape", None) or ()) == 1
    return value.item() if is_single and callable(getattr(value, "item", None)) else value


def _finite(value: object) -> float | None:
    """Returns the finite number that a value is, also as an array of one element; else None."""
    value = _plain(value)
    try:
        number = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:
        return None
    return number if abs(number) <= MOST_REWARD else None


def arguments_of(component: Component, sample: Mapping, logged: Logged | None = None) -> dict:
    """The keyword arguments of a call, from a sample or, for a library of OF_GROUPS, from a group.
    Raises InputError if the row lacks a column that a parameter without a default needs."""
    parameters = component.signature.parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    library = library_of(component)
    if library in (VERL_BATCH, OPENRLHF):
        available = _known_lists(library, sample)
    elif library == "verifiers":
        available = _of_verifiers(sample)
    elif library == "verl":
        available = {name: sample[field] for name, field in _VERL_FIELDS.items() if field in sample}
        if "ground_truth" in available:
            available["ground_truth"] = _held(available["ground_truth"])
    else:
        available = _lists(sample)
        available |= {"log_extra": logged.extra, "log_metric": logged.metric}
        available["trainer_state"] = _NotHanded("trainer_state")
    chosen = {
        name: value
        for name, value in available.items()
        if (takes_all or name in parameters) and name not in component.options
    }
    for name, parameter in parameters.items():
        is_plain = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if is_plain and parameter.default is parameter.empty and name not in component.options:
            if name not in chosen:
                raise InputError(
                    f"reward {component.name!r} needs the column {name!r}, which this row lacks",
                    value=sorted(available),
                    fix=f"add {name!r} to the data, or give the parameter a default",
                )
    return chosen


def _lists(group: Mapping) -> dict[str, list]:
    """Returns the arguments that TRL hands a reward of a group: a list for every name."""
    responses, messages = group["responses"], group.get("messages")
    lists = {str(name): [value] * len(responses) for name, value in columns_of(group).items()}
    if messages:
        prompts = [[dict(message) for message in messages] for _ in responses]
        completions = [[{"role": "assistant", "content": text}] for text in responses]
    else:
        prompts, completions = [group.get("prompt")] * len(responses), list(responses)
    if "token_ids" in group:
        lists["completion_ids"] = [[int(i) for i in ids] for ids in group["token_ids"]]
    return {**lists, "prompts": prompts, "completions": completions}


def _known_lists(library: str, group: Mapping) -> dict[str, list]:
    """Returns the arguments that verl hands a reward of a batch, or OpenRLHF."""
    count = len(group["responses"])
    columns = {name: [group[name]] * count for name in ("prompt", "data_source") if name in group}
    columns |= {"extra_info": [group.get("extra_info")] * count, "responses": group["responses"]}
    if "ground_truth" in group:
        columns["ground_truth"] = [_held(group["ground_truth"])] * count
    arguments = {n: list(columns[f]) for n, f in _PARAMETERS[library].items() if f in columns}
    if library == OPENRLHF:
        pairs = zip(arguments["prompts"], arguments["queries"], strict=True)
        arguments["queries"] = [f"{prompt}{response}" for prompt, response in pairs]
    return arguments


def _of_verifiers(sample: Mapping) -> dict:
    """Returns the arguments that a rubric of verifiers hands a reward."""
    group = {name: value for name, value in sample.items() if name != "token_ids"}
    lists = _lists({**group, "responses": [sample["response"]]})
    arguments = {name: values[0] for name, values in lists.items()}
    arguments |= {"prompt": arguments.pop("prompts"), "completion": arguments.pop("completions")}
    arguments = {"info": sample.get("extra_info") or {}, "task": "default"} | arguments
    names = ("prompt", "completion", "answer", "info", "task")
    return {"state": {name: arguments[name] for name in names if name in arguments}} | arguments


def results_of(component: Component, returned: Sequence, logged: Logged) -> Sequence:
    """Returns what a reward of a group returned as ours do: a score, or a dict, of each sample."""
    library = library_of(component)
    if library == VERL_BATCH:
        return [numbers_of(value) for value in returned]
    if library == OPENRLHF:
        scores = zip(map(_plain, returned), logged.parts, strict=True)
        return [{"score": x, **parts} for x, parts in scores]
    return logged.scores(returned) if library == "TRL" else returned


def numbers_of(returned: object) -> object:
    """Returns the score of what was returned, and the finite numbers beside it: other libraries
    only log these, so another number, or an array, is printed and costs no sample; texts are left
    out."""
    returned = _plain(returned)
    if not isinstance(returned, dict):
        return returned
    result = {}
    for name, value in returned.items():
        value = _plain(value)
        if name == "score":
            result[name] = value
        elif (number := _finite(value)) is not None:
            result[name] = number
        elif isinstance(value, numbers.Real) or hasattr(value, "shape"):
            print(f"{name}: {value}")
    return result
