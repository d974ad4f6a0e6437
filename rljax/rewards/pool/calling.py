"""Calls one reward on one sample or on a group: the fields that it reads, the rewards that it
names, the checks before the first sample. Imports nothing heavy."""

import asyncio
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args, get_origin

from rljax.components import Component, resolve, signature_of
from rljax.contracts import MOST_REWARD, component_in, spec
from rljax.errors import InputError, location_in, location_of
from rljax.rewards.pool.foreign import (
    OF_GROUPS,
    OPENRLHF,
    Logged,
    arguments_of,
    fields_of,
    library_of,
    numbers_of,
    results_of,
)

HOME = "rljax.rewards"
FIELDS = (
    "response",
    "ground_truth",
    "prompt",
    "data_source",
    "extra_info",
    "num_tokens",
    "finish_reason",
    "model_score",
    "conversation",
    "turns",
    "calls",
)
# Field that differs between the samples of a group -> its list, as a reward of the group names it.
OF_EACH = {
    "response": "responses",
    "num_tokens": "num_tokens",
    "finish_reason": "finish_reasons",
    "model_score": "model_scores",
    "token_ids": "token_ids",
}
OF_A_GROUP = tuple(OF_EACH.get(name, name) for name in FIELDS)
# Fields of a sample that no reward of rljax's own signature is handed. `group_scores` are those of
# rewards that compare samples, where a reward of one sample names them.
PRIVATE = ("group", "messages", "token_ids", "group_scores")
OWN_LIMIT_MARGIN_S = 1.5
_MESSAGE_CHARS = 500


# The annotation of an option that names another reward, or of a tuple of such: what that one wants
# is handed on, so the reward takes it as `**sample` and calls `call_reward`.
RewardText = component_in(HOME)

# Functions that are called as a member of a reward begins: see `watch`.
_watchers: list[Callable[[Component], None]] = []

# (the fields that a reward declares, None for all of them: `**kwargs`; those without a default)
Fields = tuple[tuple[str, ...] | None, tuple[str, ...]]
Outcome = tuple[str, float, dict[str, float], str]  # status, value, parts, message


class Abstained(Exception):
    """The error by which a reward that returned None leaves a sample to the others."""


@functools.lru_cache(maxsize=1024)
def compares_samples(component: Component) -> bool:
    """Returns whether one call takes all samples of a prompt: the reward declares `responses`, and
    no option binds it, or it has a signature of OF_GROUPS."""
    names = signature_of(component.function).parameters
    declares = "responses" in names and "responses" not in component.options
    return declares or library_of(component) in OF_GROUPS


@functools.lru_cache(maxsize=1024)
def is_group_reward(component: Component) -> bool:
    """Returns whether the reward is called with all samples of a prompt at once: it compares them,
    or one that it names does."""
    return compares_samples(component) or any(map(is_group_reward, members(component)))


def wanted_fields(component: Component) -> Fields:
    """Returns the fields of a sample, or of a group, that the reward is handed, and those that it
    requires.

    A reward of `**kwargs` that names other rewards (`RewardText`) is handed what those want. Raises
    InputError for a reward that no sample can satisfy, also among them, and for an option outside a
    `Literal[...]`.
    """
    grouped = compares_samples(component)
    available = OF_A_GROUP if grouped else FIELDS
    if library_of(component):
        return fields_of(component)
    names, required, takes_all = [], [], False
    for name, parameter in signature_of(component.function).parameters.items():
        takes_all |= parameter.kind is parameter.VAR_KEYWORD
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if name in component.options:
            _check_literal(component, name, parameter.annotation)
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise InputError(
                f"reward {component.name!r} takes {name!r} by position only",
                rule="a reward is called with keywords",
                fix="remove the '/' from its signature",
            )
        names.append(name)
        if parameter.default is parameter.empty or (grouped and name == "responses"):
            required.append(name)
    if grouped:
        _check_of_a_group(component, names)
    unknown = [name for name in required if name not in available]
    if unknown:
        raise InputError(
            f"reward {component.name!r} needs {unknown[0]!r}, which no "
            + ("group has" if grouped else "sample has"),
            rule=f"the fields of a {'group' if grouped else 'sample'} are {', '.join(available)}",
            fix=f"rename it, give it a default, or bind it: '{component.name}({unknown[0]}=...)';"
            " or call the function in a reward of these fields",
        )
    others = members(component)
    are_groups = [is_group_reward(member) for member in others]
    if grouped and any(are_groups):
        raise InputError(
            f"reward {component.name!r} names {others[are_groups.index(True)].name!r}",
            rule="both compare the samples of a prompt, and this one asks a reward of each alone",
            fix="add the two up in a mixture",
        )
    inner = [wanted_fields(member)[0] for member in others]
    if takes_all and not any(are_groups) and (not inner or None in inner):
        return None, tuple(required)
    if any(are_groups):  # asked of a group, whose fields have the names of lists
        names, required = ([OF_EACH.get(n, n) for n in part] for part in (names, required))
        everything = (*OF_A_GROUP, "messages", "token_ids")
        inner = [
            everything
            if fields is None
            else fields
            if is_group
            else [OF_EACH.get(n, n) for n in fields]
            for fields, is_group in zip(inner, are_groups, strict=True)
        ]
        names.append("responses")
    names += [name for fields in inner for name in fields if name not in component.options]
    return tuple(dict.fromkeys(names)), tuple(required)


def reads_model(component: Component) -> bool:
    """Returns whether the reward, or one that it names, reads the score of a reward model."""
    names = wanted_fields(component)[0] or ()
    return "model_score" in names or "model_scores" in names


def members(component: Component) -> list[Component]:
    """The rewards that the options of this one name, "" being none. Raises InputError as `resolve`
    does."""
    texts = []
    for name, parameter in signature_of(component.function).parameters.items():
        value = component.options.get(name, parameter.default)
        if value is not parameter.empty:
            texts += _texts(parameter.annotation, value)
    return [resolve(text, HOME) for text in dict.fromkeys(texts) if text]


def _texts(annotation: object, value: object) -> list[str]:
    """Returns the values that an annotation such as tuple[tuple[str, RewardText], ...]
    declares to be rewards."""
    if annotation == RewardText:
        return [value]
    inner = get_args(annotation)
    if get_origin(annotation) is not tuple or not isinstance(value, tuple):
        return []
    kinds = inner[:1] * len(value) if inner[1:] == (...,) else inner
    pairs = zip(kinds, value, strict=False)
    return [text for kind, item in pairs for text in _texts(kind, item)]


def asks_nobody(component: Component) -> bool:
    """Returns whether the reward needs no server and no model, as far as rljax can know: a user's
    own reward may need one."""
    others = members(component)
    if not others and component.function.__module__.startswith(f"{HOME}."):
        return scores_when_late(component)
    return all(asks_nobody(member) for member in others)


def prepare(component: Component) -> dict[str, str]:
    """Calls what a reward or an environment declares by contract(prepare=...), and does so for the
    rewards that it names: what is slow once is over before the first clock starts. Returns the
    facts, by name, that these calls returned."""
    declared = spec(component)
    if declared.probed:
        _probe_options(component)
    notes = declared.prepare() if declared.prepare is not None else None
    notes = notes if isinstance(notes, dict) else {}
    return notes | {k: v for member in members(component) for k, v in prepare(member).items()}


def _probe_options(component: Component) -> None:
    """Calls a reward that is cheap on a made-up sample. Raises its InputError about its options, so
    that no run starts in which every reward would fail."""
    sample = {name: "x" for name in FIELDS} | {"num_tokens": 1, "finish_reason": "stop"}
    sample["model_score"] = 0.0
    sample["extra_info"] = {"target_tokens": 1, "schema": "true"}
    if members(component):
        return  # they are asked by themselves, and may be slow
    try:
        call_reward(component, sample)
    except InputError:
        raise
    except Exception:
        return  # the sample may be none for this reward


def _check_of_a_group(component: Component, names: Sequence[str]) -> None:
    """Raises InputError for a reward that reads both a sample and a group."""
    for field, plural in OF_EACH.items():
        if field in names and field != plural:
            raise InputError(
                f"reward {component.name!r} declares 'responses' and {field!r}",
                rule="with 'responses' it is called once for all samples of a prompt",
                fix=f"remove {field!r} and read {plural!r}, a list; or remove 'responses'",
            )


def _check_literal(component: Component, name: str, annotation: object) -> None:
    value = component.options[name]
    if get_origin(annotation) is Literal and value not in get_args(annotation):
        raise InputError(
            f"option {name!r} of reward {component.name!r}",
            value=value,
            fix=f"write {name}= one of {', '.join(map(repr, get_args(annotation)))}",
        )


def check_own_limit(component: Component, timeout_s: float) -> None:
    """Checks that a reward with a limit of its own, total_timeout_s, ends before the pool ends it;
    also the rewards that it names.

    Raises InputError otherwise: a program that uses up its time has a score, a sample that the pool
    kills has none.
    """
    for member in members(component):
        check_own_limit(member, timeout_s)
    parameter = signature_of(component.function).parameters.get("total_timeout_s")
    if parameter is None:
        return
    limit_s = component.options.get("total_timeout_s", parameter.default)
    if isinstance(limit_s, int | float) and limit_s + OWN_LIMIT_MARGIN_S > timeout_s:
        raise InputError(
            f"reward {component.name!r}: total_timeout_s",
            value=limit_s,
            rule=f"the pool kills a sample after reward.timeout_s={timeout_s}, and starting and "
            f"ending programs takes up to {OWN_LIMIT_MARGIN_S} s of that",
            fix=f"set reward.timeout_s to {limit_s + OWN_LIMIT_MARGIN_S} or more, or lower "
            "total_timeout_s",
        )


def watch(begun: Callable[[Component], None]) -> None:
    """Registers `begun(component)`: it is called before each call of a reward that names no other,
    also of one that another reward calls."""
    _watchers.append(begun)


@functools.lru_cache(maxsize=1024)
def scores_when_late(component: Component) -> bool:
    """Returns whether a sample over the limits of this reward has a score: it declares
    `on_timeout`."""
    return spec(component).on_timeout is not None


def late_score(component: Component, sample: Mapping) -> tuple[float, dict[str, float]] | None:
    """Returns (value, named parts) of a sample on which the reward passed a limit of time or
    memory, as its contract's `on_timeout` declares; None if the sample has no score.

    Raises InputError if `on_timeout` is neither a number nor a dict of numbers with "score".
    """
    returned = spec(component).on_timeout
    returned = returned(sample) if callable(returned) else returned
    if returned is None:
        return None
    try:
        return _value_and_parts(component, returned)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"reward {component.name!r} declares on_timeout",
            value=returned,
            rule=str(error),
            fix="a number, or a dict of numbers with 'score', as the reward returns",
        ) from None


@functools.lru_cache(maxsize=1024)
def _names_others(component: Component) -> bool:
    return bool(members(component))


def call_reward(
    component: Component, sample: Mapping, fields: Fields | None = None
) -> tuple[float, dict[str, float]]:
    """The reward of one sample -> (value, named parts); `parts["score"] == value` always.

    Raises Abstained if the reward returned None, InputError if the sample lacks a field, TypeError
    or ValueError if the reward returned anything but a finite number or a dict of finite numbers
    that contains "score", and whatever the reward raises. `fields`: what `wanted_fields` said, to
    save the inspection on every call. One of TRL's signature takes a sample without siblings as a
    group of one.
    """
    if compares_samples(component):
        return _of_siblings(component, sample)
    if _watchers and not _names_others(component):
        _begin(component)
    returned = _asked(component, _chosen(component, sample, fields))
    returned = numbers_of(returned) if library_of(component) else returned
    return _value_and_parts(component, returned)


def _of_siblings(component: Component, sample: Mapping) -> tuple[float, dict[str, float]]:
    """Scores one sample, whose siblings are known, by a reward that compares samples."""
    if "group_scores" in sample:
        scores, index = sample["group_scores"]
        return _value_and_parts(component, scores.of(component)[index])
    if library_of(component) not in OF_GROUPS:
        raise InputError(
            f"reward {component.name!r} compares the samples of a prompt",
            value="one sample",
            rule="it declares 'responses' and is asked of a whole group",
            fix="score a group (rljax.rewards.pool.worker.call_group), "
            "or use a reward of one response",
        )
    return _value_and_parts(component, _of_group(component, group_fields([sample]))[0])


def _begin(component: Component) -> None:
    for watcher in _watchers:
        watcher(component)


def _asked(component: Component, arguments: dict) -> object:
    """Calls the reward and returns its result; waits for an async one."""
    returned = component(**arguments)
    return asyncio.run(_awaited(returned)) if inspect.isawaitable(returned) else returned


async def _awaited(returned):
    return await returned


def call_group(
    component: Component,
    group: Mapping,
    fields: Fields | None = None,
    failed: Callable[[Mapping, Exception], Outcome] | None = None,
) -> list[Outcome]:
    """Calls the reward on G samples of one prompt (`group_fields`). Returns G outcomes; if
    the reward of a sample raises, or returns what `call_reward` refuses, its outcome comes
    from `failed`.

    Raises like `call_reward` if the group has no rewards at all: nothing of length G was returned.
    """
    if not compares_samples(component):  # it names one that does
        samples = GroupScores(group).samples()
        return [call_sample(component, sample, failed=failed) for sample in samples]
    return [_outcome_of(component, value) for value in _of_group(component, group, fields)]


def call_sample(
    component: Component,
    sample: Mapping,
    fields: Fields | None = None,
    failed: Callable[[Mapping, Exception], Outcome] | None = None,
) -> Outcome:
    """The outcome of one sample, whatever its reward raises."""
    try:
        return ("ok", *call_reward(component, sample, fields), "")
    except Abstained as error:
        return "abstained", math.nan, {}, str(error)
    except Exception as error:
        if failed is not None:
            return failed(sample, error)
        return failed_outcome(describe_failure(component, error))


def _of_group(component: Component, group: Mapping, fields: Fields | None = None) -> Sequence:
    """Returns the value of each sample by a reward that compares samples."""
    count, logged = len(group["responses"]), Logged(len(group["responses"]))
    returned = _asked(component, _chosen(component, group, fields, logged))
    returned = logged.rewards_in(returned) if library_of(component) == OPENRLHF else returned
    unordered = isinstance(returned, dict | set | frozenset | str | bytes)
    if unordered or not hasattr(returned, "__len__"):
        raise TypeError(
            f"the reward of a group returned {_shown(returned)}: no list of {count} scores"
        )
    if len(returned) != count:
        raise ValueError(f"the reward returned {len(returned)} scores for {count} responses")
    return results_of(component, returned, logged)


class GroupScores:
    """The samples of a group, with the scores of rewards that compare them: each of these is called
    once, when the first sample needs it."""

    def __init__(self, group: Mapping):
        self.group = group
        self._of: dict[Component, Sequence | Exception] = {}

    def samples(self) -> list[dict]:
        """The samples one by one, each with these scores."""
        singular = {plural: field for field, plural in OF_EACH.items()}
        shared = {name: value for name, value in self.group.items() if name not in singular}
        lists = {singular[name]: values for name, values in self.group.items() if name in singular}
        return [
            {
                **shared,
                **{name: values[i] for name, values in lists.items()},
                "group_scores": (self, i),
            }
            for i in range(len(self.group["responses"]))
        ]

    def of(self, component: Component) -> Sequence:
        """Returns the reward's value of each sample. Raises what it raised."""
        if component not in self._of:
            _begin(component)
            try:
                self._of[component] = _of_group(component, self.group)
            except Exception as error:
                self._of[component] = error
        scores = self._of[component]
        if isinstance(scores, Exception):
            raise scores
        return scores


def _outcome_of(component: Component, returned: object) -> Outcome:
    try:
        return ("ok", *_value_and_parts(component, returned), "")
    except Abstained as error:
        return "abstained", math.nan, {}, str(error)
    except Exception as error:
        return failed_outcome(describe_failure(component, error))


def failed_outcome(message: str) -> Outcome:
    """The outcome of a sample without a score, for this reason."""
    return "error", math.nan, {}, message


def late_outcome(component: Component, sample: Mapping, message: str) -> Outcome:
    """The outcome of a sample that passed a limit: its score where the reward declares one."""
    try:
        late = late_score(component, sample)
    except Exception as error:  # a declaration that reads what this sample lacks
        return failed_outcome(f"{message}; on_timeout: {describe(error)}")
    return failed_outcome(message) if late is None else ("over limit", *late, message)


def group_fields(samples: Sequence[Mapping]) -> dict:
    """The fields of a reward of a group, for the samples of one prompt: lists of what differs, and
    the first sample's prompt, ground_truth, data_source and extra_info."""
    shared = {name: value for name, value in samples[0].items() if name not in OF_EACH}
    lists = {
        plural: [sample[field] for sample in samples]
        for field, plural in OF_EACH.items()
        if all(field in sample for sample in samples)
    }
    return shared | lists


def _chosen(
    component: Component, sample: Mapping, fields: Fields | None, logged: Logged | None = None
) -> dict:
    """Returns the fields of a sample or of a group that the reward is handed."""
    if not compares_samples(component) and is_group_reward(component):
        # It hands a sample on, with all that those it names may want.
        parameters = signature_of(component.function).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        names = sample.keys() - component.options.keys()
        return {n: sample[n] for n in names if takes_all or n in parameters}
    names, required = fields or wanted_fields(component)
    for name in required:
        if name not in sample:
            raise missing_field(component, name, sample)
    if library_of(component):
        return arguments_of(component, sample, logged)
    left_out = {*component.options, *PRIVATE}
    if names is None:
        return {name: value for name, value in sample.items() if name not in left_out}
    return {name: sample[name] for name in names if name in sample}


class Scored(float):
    """A score with parts beside it, for a reward that is also called as a plain function:
    Scored(1.0, {"format/extracted": 1.0})."""

    def __new__(cls, value: float, parts: Mapping[str, float]):
        scored = super().__new__(cls, value)
        scored.parts = dict(parts)
        return scored


def _value_and_parts(component: Component, returned: object) -> tuple[float, dict[str, float]]:
    if returned is None or isinstance(returned, dict) and returned.get("score", 0) is None:
        location = location_of(component.function)
        raise Abstained(f"the reward returned None for this response{location}")
    if isinstance(returned, Exception):
        raise returned
    if isinstance(returned, Scored):
        returned = {"score": float(returned), **returned.parts}
    parts = returned if isinstance(returned, dict) else {"score": returned}
    if "score" not in parts:
        raise ValueError(f"the reward returned a dict without 'score': {_shown(list(parts))}")
    checked = {str(name): _finite(name, value) for name, value in parts.items()}
    return checked["score"], checked


def missing_field(component: Component, name: str, sample: Mapping) -> InputError:
    """The error for a sample that lacks a field which its reward requires."""
    return InputError(
        f"reward {component.name!r} needs {name!r}, which this sample lacks",
        value=sorted(map(str, sample)),
        fix=f"add {name!r} to the data, or give the parameter a default",
    )


def _finite(name: object, value: object) -> float:
    if getattr(value, "shape", None) == ():  # an array of one number, of JAX or of torch
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(
            f"the reward returned {_shown(value)} ({type(value).__name__}) as {name!r}: no number"
        )
    number = float(value)
    if not abs(number) <= MOST_REWARD:
        rule = f"not a finite number of at most {MOST_REWARD:g}"
        raise ValueError(f"the reward returned {number} as {name!r}, {rule}")
    return number


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."


def describe(error: BaseException) -> str:
    """An exception as one short line, even if its own text raises."""
    try:
        return f"{type(error).__name__}: {error}"[:_MESSAGE_CHARS]
    except BaseException:
        return type(error).__name__


def describe_failure(component: Component, error: BaseException) -> str:
    """The exception of a call as one line, with its last location in a file of the user's own;
    where what was returned is no score, the location of the reward."""
    functions = [member.function for member in (component, *members(component))]
    location = location_in(error, functions) or next(filter(None, map(location_of, functions)), "")
    return f"{describe(error)}{location}"
