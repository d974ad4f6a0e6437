"""Environments that are classes: reset and step, or methods that are tools, as TRL has them. Each
method may be async."""

import inspect
from collections.abc import Generator

from rljax.components import resolve
from rljax.contracts import contract
from rljax.environments.adapters.shared import declared, with_prompt
from rljax.environments.awaiting import awaited
from rljax.environments.contract import Opening, Reply, Turn
from rljax.environments.toolbox import toolbox
from rljax.errors import InputError


@contract()
def of_class(*, cls: str, **row) -> Generator[object, Reply, object]:
    """An environment of a class with `reset(**row) -> text or None`, an object for each episode.

    With `step(reply) -> (observation, reward, ended)` (a fourth and fifth value as Gymnasium's
    `step` gives them are understood) every reply is a step. Otherwise the public methods are tools,
    as in TRL: the policy calls them until a reply has no call; what `get_reward()` then returns is
    the outcome, and without that method `reward.function` scores the last turn. What `reset`
    returns is read behind the prompt of the row. Any method may be async. `cls`: its dotted name
    with its options, "my_envs.Counter(start=1)". Raises InputError for a class without `reset`.
    """
    made = resolve(cls, __name__)()
    if not hasattr(made, "reset"):
        raise InputError(
            f"{cls} has no reset",
            rule="a class with reset and step, or tools",
            fix=f"define reset(self, ...) and step(self, reply) in {cls.partition('(')[0]}",
        )
    try:
        first = awaited(made.reset(**declared(made.reset, row)))
        first = first[0] if isinstance(first, tuple) else first  # observation, info
        if isinstance(first, str):
            first = with_prompt(row.get("prompt", ""), first)
        return (yield from (_stepped if hasattr(made, "step") else _called)(made, first))
    finally:
        if hasattr(made, "close"):
            awaited(made.close())


def _stepped(made, observation) -> Generator[object, Reply, float]:
    reply = yield observation
    while True:
        observation, reward, ended, *more = awaited(made.step(reply))
        if ended or (len(more) == 2 and more[0]):  # terminated, truncated, info
            return reward
        reply = yield Turn(observation, reward=reward)


def _called(made, first) -> Generator[object, Reply, object]:
    names = [name for name, _ in inspect.getmembers(made, inspect.ismethod)]
    own = ("reset", "get_reward", "close")
    box = toolbox([getattr(made, n) for n in names if not n.startswith("_") and n not in own])
    reply = yield Opening(first, tools=box.schemas)
    while reply.calls:
        reply = yield [box.answer(call) for call in reply.calls]
    return awaited(made.get_reward()) if hasattr(made, "get_reward") else None
