"""Environments that are classes: reset and step, or methods that are tools, as TRL has them. Each
method may be async."""

import inspect
from collections.abc import Generator, Mapping, Sequence

from rljax.components import resolve
from rljax.contracts import contract
from rljax.environments.adapters.shared import declared, joined_contents, with_prompt
from rljax.environments.awaiting import awaited
from rljax.environments.contract import Opening, Reply, Turn
from rljax.environments.toolbox import toolbox
from rljax.errors import InputError


@contract()
def of_class(*, cls: str, **row) -> Generator[object, Reply, object]:
    """An environment of a class with `reset(**row) -> text or None`, an object for each episode.

    With `step(reply) -> (observation, reward, ended)` (a fourth and fifth value as Gymnasium's
    `step` gives them are understood) every reply is a step. Otherwise the public methods are tools,
    as in TRL, static ones too: the policy calls them until a reply has no call; what `get_reward()`
    then returns is the outcome, and without that method `reward.function` scores the last turn. A
    `close()` that needs no arguments is no tool; it is called at the end. Any method may be async.

    What `reset` returns is read behind the prompt of the row: with an empty line between, but a
    class of tools has it, a text or a list of content parts, at the end of a conversation's last
    message as it is, as in TRL. `cls`: its dotted name with its options,
    "my_envs.Counter(start=1)". Raises InputError for a class without `reset`, and for a `step` that
    returns something else.
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
        prompt, steps = row.get("prompt", ""), hasattr(made, "step")
        if isinstance(first, str) or _parts(first):
            behind = with_prompt if steps or isinstance(prompt, str) else _in_last
            first = behind(prompt, first)
        return (yield from (_stepped if steps else _called)(made, first))
    finally:
        if _closes(made):
            awaited(made.close())


def _parts(first: object) -> bool:
    """Returns whether what `reset` returned is a list of content parts, not of messages."""
    listed = isinstance(first, list) and bool(first)
    return listed and all(isinstance(one, Mapping) and "role" not in one for one in first)


def _in_last(prompt: Sequence[Mapping], seen: str | list) -> list[dict]:
    """TRL's first prompt: the observation at the end of the last message, as it is."""
    *others, last = map(dict, prompt)
    return [*others, {**last, "content": joined_contents(last.get("content") or "", seen)}]


def _closes(made) -> bool:
    """Returns whether the object has a `close` to be called at the end: one that needs arguments
    is a tool."""
    if not hasattr(made, "close"):
        return False
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(made.close).parameters.values()
    return all(p.default is not p.empty or p.kind in optional for p in parameters)


def _stepped(made, observation) -> Generator[object, Reply, float]:
    reply = yield observation
    while True:
        observation, reward, ended, *more = _taken(made, reply)
        if ended or (len(more) == 2 and more[0]):  # terminated, truncated, info
            return reward
        reply = yield Turn(observation, reward=reward)


def _taken(made, reply: Reply) -> tuple:
    """Returns what `step` returned. Raises InputError for what is no step, such as a tool of that
    name."""
    try:
        inspect.signature(made.step).bind(reply)
    except TypeError as error:
        raise _no_step(made, f"step{inspect.signature(made.step)}", str(error)) from None
    taken = awaited(made.step(reply))
    if not isinstance(taken, tuple | list) or not 3 <= len(taken) <= 5:
        raise _no_step(made, taken, "it returned something else")
    return tuple(taken)


def _no_step(made, value: object, why: str) -> InputError:
    return InputError(
        f"{type(made).__name__}.step is no step of an environment: {why}",
        value=value,
        rule="step(reply) returns (observation, reward, ended), or Gymnasium's five values",
        fix="return these, or give a tool that is called step another name",
    )


def _is_method(member: object) -> bool:
    return inspect.isfunction(member) or inspect.ismethod(member)


def _called(made, first) -> Generator[object, Reply, object]:
    # Of the class: members of the object are looked at by calling its properties.
    names = [name for name, _ in inspect.getmembers(type(made), _is_method)]
    own = ("reset", "get_reward", *(["close"] if _closes(made) else []))
    box = toolbox([getattr(made, n) for n in names if not n.startswith("_") and n not in own])
    reply = yield Opening(first, tools=box.schemas)
    while reply.calls:
        reply = yield [box.answer(call) for call in reply.calls]
    return awaited(made.get_reward()) if hasattr(made, "get_reward") else None
