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
    env = resolve(cls, __name__)()
    if not hasattr(env, "reset"):
        raise InputError(
            f"{cls} has no reset",
            rule="a class with reset and step, or tools",
            fix=f"define reset(self, ...) and step(self, reply) in {cls.partition('(')[0]}",
        )
    try:
        observation = awaited(env.reset(**declared(env.reset, row)))
        # Gymnasium's reset returns (observation, info).
        observation = observation[0] if isinstance(observation, tuple) else observation
        prompt, has_step = row.get("prompt", ""), hasattr(env, "step")
        if isinstance(observation, str) or _parts(observation):
            join = with_prompt if has_step or isinstance(prompt, str) else _in_last
            observation = join(prompt, observation)
        return (yield from (_stepped if has_step else _called)(env, observation))
    finally:
        if _closes(env):
            awaited(env.close())


def _parts(observation: object) -> bool:
    """Returns whether what `reset` returned is a list of content parts, not of messages."""
    is_list = isinstance(observation, list) and bool(observation)
    return is_list and all(isinstance(part, Mapping) and "role" not in part for part in observation)


def _in_last(prompt: Sequence[Mapping], observation: str | list) -> list[dict]:
    """TRL's first prompt: the observation at the end of the last message, as it is."""
    *others, last = map(dict, prompt)
    return [*others, {**last, "content": joined_contents(last.get("content") or "", observation)}]


def _closes(env) -> bool:
    """Returns whether the object has a `close` to be called at the end: one that needs arguments
    is a tool."""
    if not hasattr(env, "close"):
        return False
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(env.close).parameters.values()
    return all(p.default is not p.empty or p.kind in optional for p in parameters)


def _stepped(env, observation) -> Generator[object, Reply, float]:
    reply = yield observation
    while True:
        observation, reward, ended, *extra = _taken(env, reply)
        if ended or (len(extra) == 2 and extra[0]):  # terminated, truncated, info
            return reward
        reply = yield Turn(observation, reward=reward)


def _taken(env, reply: Reply) -> tuple:
    """Returns what `step` returned. Raises InputError for what is no step, such as a tool of that
    name."""
    try:
        inspect.signature(env.step).bind(reply)
    except TypeError as error:
        raise _no_step(env, f"step{inspect.signature(env.step)}", str(error)) from None
    result = awaited(env.step(reply))
    if not isinstance(result, tuple | list) or not 3 <= len(result) <= 5:
        raise _no_step(env, result, "it returned something else")
    return tuple(result)


def _no_step(env, value: object, problem: str) -> InputError:
    return InputError(
        f"{type(env).__name__}.step is no step of an environment: {problem}",
        value=value,
        rule="step(reply) returns (observation, reward, ended), or Gymnasium's five values",
        fix="return these, or give a tool that is called step another name",
    )


def _is_method(member: object) -> bool:
    return inspect.isfunction(member) or inspect.ismethod(member)


def _called(env, observation) -> Generator[object, Reply, object]:
    # Members of the class: to inspect those of the object would call its properties.
    names = [name for name, _ in inspect.getmembers(type(env), _is_method)]
    not_tools = ("reset", "get_reward", *(["close"] if _closes(env) else []))
    box = toolbox([getattr(env, n) for n in names if not n.startswith("_") and n not in not_tools])
    reply = yield Opening(observation, tools=box.schemas)
    while reply.calls:
        reply = yield [box.answer(call) for call in reply.calls]
    return awaited(env.get_reward()) if hasattr(env, "get_reward") else None
