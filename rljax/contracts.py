"""Contracts: what a function that a config names reads, fills, and how it wants its rows.

A loss, an advantage, a reduction, a filter, a shaping rule, a rollout and a dataflow declare this
once, beside their definition; validation, the update and the planner read it with `spec`.

    @contract(reads=("ref_logprobs",), rows=2, whole_step=lambda options: options["kind"] == "aot")
    def pairwise(policy, batch, *, beta=0.1, kind="sigmoid"): ...

A value, but for `check`, may be a function of the options of the call, defaults included. A
function without a declaration has the defaults of Contract, so that a user's own function needs
none. Where the default is None, a function that does not declare the value gets the benefit of the
doubt.

A function of a response, such as a reward, may declare reads="answer". Then it is handed what
stands behind the reasoning (rljax.reasoning), whoever calls it:

    @contract(reads="answer")
    def my_reward(response, ground_truth): ...
"""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping

from rljax.components import Component, Range
from rljax.errors import InputError, location_of
from rljax.metric import Metric
from rljax.reasoning import cut_reasoning

# Annotations of options: a number that a config gives is refused outside of the range.
AboveZero = typing.Annotated[float, Range(above=0)]
NotNegative = typing.Annotated[float, Range(low=0)]
AtLeastOne = typing.Annotated[float, Range(low=1)]
Share = typing.Annotated[float, Range(low=0, high=1)]
Count = typing.Annotated[int, Range(low=0)]
# The largest size of a reward: advantages are computed in float32, and square it.
MOST_REWARD = 1e15

# The parameters of a reward, a judge or an extractor that are responses.
_RESPONSES = ("response", "responses", "completions", "solution_str", "first", "second")


def is_zero(number) -> bool:
    """Returns whether a number is known to be 0. One in which the runs of a program differ is
    traced, and switches nothing off."""
    return isinstance(number, int | float) and number == 0


@dataclasses.dataclass(frozen=True)
class Contract:
    """The declaration of one function, with its options applied. Field names are those of Batch."""

    # A config of an unknown author may name it: with options of harmless types it starts no
    # process, imports nothing, and reaches no network and no file (rljax.config.trust).
    safe: bool = False
    # Batch fields that must be filled before the call, beside tokens, segment_ids, positions and
    # mask. What a function reads only where it is there (batch.weights) does not belong here.
    # Of a function of a response: "response", all of it, or "answer", what follows the reasoning.
    reads: tuple[str, ...] | str = ()
    # Batch fields that it fills, or returns values for. None: not declared, it may fill any.
    fills: tuple[str, ...] | None = None
    rows: int = 1  # consecutive rows that are one example: 2 for a pair
    # Losses.
    whole_step: bool = False  # statistics run over all rows of the optimizer step
    applies_weights: bool = False  # multiplies by the rollout correction, batch.weights, itself
    reads_greedy: bool = False  # reads whether a token is the most likely one (Policy.greedy)
    per_token: bool = False  # a reward loss of scores [B, S] instead of [B]
    corrects_mismatch: bool = False  # weighs by the sampler's log-probs, as a correction does
    labels: int = 1  # logits of a reward model's head that a reward loss reads
    squash: str = "none"  # of a score, by whoever asks the reward model: "tanh" if it fits tanh(s)
    scores_of_samples: bool = False  # batch.scores is made of the policy's samples, not of a file
    reduction: str = ""  # the reduction that its paper uses
    # Advantages.
    compares_samples: bool = False  # relative to the other samples of the prompt
    token_rewards: bool | None = None  # whether it matters at which token a reward stands
    reads_targets: bool = False  # reads log pi of batch.target_ids (Policy.targets)
    # Dataflows and rollouts.
    targets: int = 0  # M of batch.target_ids, which a rollout or a method of search fills
    nodes: int = 0  # of a tree that a method of search evaluates by a value model
    data: str = "rollouts"  # what a dataflow learns from: rljax.data.kinds
    rollout: str = ""  # the rollout around algorithm.collect that a dataflow needs
    # A dataflow whose baselines compare samples that one version of the policy must have drawn.
    one_version: bool = False
    needs_groups: bool = False  # a rollout that selects groups by unequal scores
    # The metrics that it makes, by name: meaning, unit and healthy range, for the report of a run.
    # A function of rljax has them in the METRICS of its module.
    metrics: Mapping[str, Metric] = dataclasses.field(default_factory=dict, hash=False)
    continues: bool = False  # a rollout whose samples go on from within others of the same step
    searches: bool = False  # a rollout that chooses responses by search, together, to their ends
    opponent: bool = False  # a rollout half of whose samples are those of an opponent
    rounds: bool = False  # a rollout that draws samples by the scores of those before
    every_row: bool = False  # a rollout whose batch has every sample that it scores
    tree: object = None  # the TurnTree of the episodes that a rollout plays
    # In flight, a rollout whose dead groups are replaced as they end, before it is called: how many
    # steps' groups may be dropped for one step, and what then: "error", or "fill", which hands it
    # dead ones. None: it is handed every group.
    drops_dead: tuple[float, str] | None = None
    # Rewards: what one counts as having returned for a sample that passes its limits of time or
    # memory; or a function of that sample. None: the sample is masked, because what it asks (a
    # server, a model) may be slow by itself.
    on_timeout: object = None
    # Rewards: whom one asks. "server": the one at its option url. "mesh": reward.judge_model, or an
    # endpoint by its options base_url, model and timeout_s; its options are those of judge().
    asks: str = ""
    rubrics: bool | None = None  # whether a reward reads the rubrics of a prompt
    # Rewards, environments: what a worker calls first, as lambda options: lambda: f(options). It
    # refuses options by InputError, loads what is slow, or returns facts of the run by name.
    prepare: Callable[[], object] | None = None
    # Rewards that are cheap and refuse their options by InputError: a worker first asks one of a
    # made-up sample, so that a run does not start in which each of its scores would fail.
    probed: bool = False
    # What takes part in a program of several steps (Config.program_steps). Rewards: the DeviceForm
    # (rljax.rewards.on_device), or its name, "package.module.form". Rollouts: whether it may be
    # traced, as it neither fetches arrays nor reads prompts.records.
    on_device: object = None
    # Placement: makes a mesh of the first of the devices that are free, by its option devices.
    places: bool = False
    # Update rules: a step changes every weight by about the learning rate, whatever the gradient.
    steps_of_one_size: bool = False
    # Rewards: what `ground_truth` is: an "answer", which a right response gives, or a
    # "specification", by which one is checked (unit tests, a pattern).
    truth: str = "answer"
    compares_batch: bool = False  # a shaping rule that reads statistics of the other rows
    # An advantage, a rollout or a dataflow that takes each row for a whole sample, where an episode
    # may have several.
    single_rows: bool = False
    # check(config, options) raises InputError where the options that a config gives do not fit it.
    check: Callable[[object, dict], None] | None = None
    # Tasks: what a run says at its start of the rows that they give; "" = nothing.
    caution: str = ""
    # Environments.
    seats: tuple[str, ...] = ("",)  # who plays; a row each
    repeatable: bool = True  # whether the same replies lead to the same observations
    # The outcome of an episode that a limit (turns, tokens, seconds, calls) ends, beside the
    # rewards of its turns; None: reward.function scores its last turn.
    on_limit: float | None = 0.0

    def __post_init__(self):
        for name in ("reads", "fills", "seats"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, value := tuple(value))
            of_response = name == "reads" and value in ("answer", "response")
            if not (of_response or _are_names(value) or name == "fills" and value is None):
                example = (value,) if isinstance(value, str) else ("rewards",)
                raise TypeError(f"contract({name}={value!r}) is a tuple of names: {example!r}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in (int, str) and not isinstance(value, field.type):
                kind = "a whole number" if field.type is int else "a text"
                raise TypeError(f"contract({field.name}={value!r}) is {kind}")
        named = isinstance(self.metrics, Mapping) and _are_names(tuple(self.metrics))
        if not named or not all(isinstance(metric, Metric) for metric in self.metrics.values()):
            raise TypeError(
                f"contract(metrics={self.metrics!r}) is of metrics: "
                "{'my_ratio': rljax.metric.Metric('its meaning')}"
            )


def _are_names(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) for name in value)


# -- annotations of options --


@dataclasses.dataclass(frozen=True)
class Home:
    """The module in which the bare name of a component is looked up."""

    module: str


def component_in(home: str) -> typing.Any:
    """Returns the annotation of an option that names a component of the module `home`."""
    return typing.Annotated[str, Home(home)]


# A text that is only compared, shown or sampled.
PlainText = typing.NewType("PlainText", str)
# True allows something that may harm the machine, so a config of an unknown author may not set it.
Permission = typing.NewType("Permission", bool)


# -- declaring and reading --

_NAMES = {field.name for field in dataclasses.fields(Contract)}


def contract(**declared) -> Callable:
    """Declares the contract of a function; see the fields of Contract. Raises TypeError for another
    field, and for `reads` of a response in a tuple."""
    if isinstance(reads := declared.get("reads"), tuple) and {"answer", "response"} & {*reads}:
        raise TypeError(f"contract(reads={reads!r}) of a response is a text: 'answer', 'response'")
    unknown = declared.keys() - _NAMES
    if unknown:
        raise TypeError(f"contract has no {sorted(unknown)}; its names are {sorted(_NAMES)}")

    def declare(function: Callable) -> Callable:
        function.contract = declared
        reads = declared.get("reads")
        return _reading(function, reads) if reads == "answer" or callable(reads) else function

    return declare


def _reading(function: Callable, reads: str | Callable[[dict], object]) -> Callable:
    """Returns the function, called with the answers of responses if it reads the answer. A function
    of a batch, whose fields depend on its options, is returned as it is."""
    parameters = inspect.signature(function).parameters.values()
    takes_response = any(p.name in _RESPONSES for p in parameters)
    if not takes_response and (
        callable(reads) or all(p.kind is not p.VAR_KEYWORD for p in parameters)
    ):
        if callable(reads):
            return function
        raise TypeError(f"contract(reads='answer') is of a function of one of {_RESPONSES}")
    order = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

    @functools.wraps(function)
    def reading(*args, **kwargs):
        if (reads({**defaults, **kwargs}) if callable(reads) else reads) == "answer":
            responses = [i for i, name in enumerate(order) if name in _RESPONSES]
            args = [cut_reasoning(x) if i in responses else x for i, x in enumerate(args)]
            kwargs = {n: cut_reasoning(x) if n in _RESPONSES else x for n, x in kwargs.items()}
        return function(*args, **kwargs)

    return reading


def spec(function: Callable | Component) -> Contract:
    """Returns the contract of a function for the options that it has: a component's and a partial's
    own, and its defaults. What wraps a function (jax.jit, functools.wraps) has that function's.
    Raises InputError for a declared value that is not of its field."""
    options: dict = {}
    while "contract" not in _attributes(function):
        if isinstance(function, Component):
            options = {**function.options, **options}
            function = function.function
        elif isinstance(function, functools.partial):
            options = {**function.keywords, **options}
            function = function.func
        elif "__wrapped__" in _attributes(function):
            function = function.__wrapped__
        else:
            return Contract()
    declared = _attributes(function)["contract"]
    if any(callable(value) for value in declared.values()):
        parameters = inspect.signature(function).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        options = {**defaults, **options}
    applied = {k: v(options) if callable(v) and k != "check" else v for k, v in declared.items()}
    try:
        return Contract(**applied)
    except TypeError as error:
        raise InputError(
            f"@contract of {function.__name__!r} in module {function.__module__!r}",
            rule=f"{error}{location_of(function)}",
            fix="correct that value in the decorator",
        ) from None


def _attributes(function: Callable) -> dict:
    try:
        return vars(function)
    except TypeError:  # a builtin function, an object with slots
        return {}
