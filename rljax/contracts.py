"""Contracts: what a function that a config names reads, fills, and how it wants its rows.

A loss, an advantage, a reduction, a filter, a shaping rule, a rollout and a dataflow declare this
once, beside their definition; validation, the update and the planner read it with `spec`.

    @contract(reads=("ref_logprobs",), rows=2, whole_step=lambda options: options["wpo_weighting"])
    def dpo(policy, batch, *, beta=0.1, wpo_weighting=False): ...

A value may be a function of the options of the call. A function without a declaration has the
defaults, so that a user's own function needs none.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable

from rljax.components import Component


@dataclasses.dataclass(frozen=True)
class Contract:
    """The declaration of one function, with its options applied. Field names are those of Batch."""

    reads: tuple[str, ...] = ()  # batch fields that must be filled before the call
    fills: tuple[str, ...] = ()  # batch fields that it fills, or returns values for
    rows: int = 1  # consecutive rows that are one example: 2 for a pair
    # Losses.
    whole_step: bool = False  # statistics run over all rows of the optimizer step
    applies_weights: bool = False  # multiplies by the rollout correction, batch.weights, itself
    reads_greedy: bool = False  # reads whether a token is the most likely one (Policy.greedy)
    per_token: bool = False  # a reward loss of scores [B, S] instead of [B]
    labels: int = 1  # logits of a reward model's head that a reward loss reads
    scores_of_samples: bool = False  # batch.scores is made of the policy's samples, not of a file
    reduction: str = ""  # the reduction that its paper uses
    # Advantages.
    compares_samples: bool = False  # relative to the other samples of the prompt
    token_rewards: bool = False  # it matters at which token a reward stands
    # Dataflows and rollouts.
    data: str = "rollouts"  # what a dataflow learns from: rljax.data.kinds
    rollout: str = ""  # the rollout around algorithm.collect that a dataflow needs
    needs_groups: bool = False  # a rollout that selects groups by unequal scores

    def __post_init__(self):
        for name in ("reads", "fills"):
            if isinstance(getattr(self, name), str):
                raise TypeError(f"contract({name}=...) is a tuple of names: ({name!r},)")


_NAMES = {field.name for field in dataclasses.fields(Contract)}


def contract(**declared) -> Callable:
    """Declares the contract of a function; see the fields of Contract."""
    unknown = declared.keys() - _NAMES
    if unknown:
        raise TypeError(f"contract has no {sorted(unknown)}; its names are {sorted(_NAMES)}")

    def declare(function: Callable) -> Callable:
        function.contract = declared
        return function

    return declare


def spec(function: Callable | Component) -> Contract:
    """The contract of a function, a component or a functools.partial, for the options it has."""
    options: dict = {}
    while not inspect.isfunction(function):
        if isinstance(function, Component):
            options = {**function.options, **options}
            function = function.function
        elif isinstance(function, functools.partial):
            options = {**function.keywords, **options}
            function = function.func
        else:  # any other callable: a jitted function, an object with __call__
            return Contract(**_resolved(vars(function).get("contract", {}), options))
    declared = vars(function).get("contract", {})
    if any(callable(value) for value in declared.values()):
        parameters = inspect.signature(function).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        options = {**defaults, **options}
    return Contract(**_resolved(declared, options))


def _resolved(declared: dict, options: dict) -> dict:
    return {k: value(options) if callable(value) else value for k, value in declared.items()}
