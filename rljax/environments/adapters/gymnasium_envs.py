"""Gymnasium's environments by id."""

import functools
from collections.abc import Generator

from rljax.contracts import contract
from rljax.environments.adapters.gymnasium_text import gym, written
from rljax.environments.adapters.shared import with_prompt
from rljax.environments.contract import Reply, Turn


@contract()
def gymnasium(
    seed: int,
    prompt: object = "",
    *,
    id: str,
    options: tuple[tuple[str, object], ...] = (),
    render: str = "",
    act: str = "",
) -> Generator[Turn, Reply, float]:
    """An environment of Gymnasium: each reply is an action, its reward that of the turn.

    `options`: keywords of gymnasium.make, (("is_slippery", False),). The first observation is
    read behind the prompt of the row. `render`: a function (env, observation) ->
    text; "" = what the environment prints (render_mode="ansi"), or the observation. `act`: a
    function (reply, action space) -> action that raises ValueError for a reply that is none; "" =
    the last numbers of the reply's answer. The policy is told why a reply is no action, and acts
    again.
    """
    show, action_of = written(render, act)
    env = _made(id, options)
    try:
        observation = env.reset(seed=seed)[0]
        reply = yield Turn(with_prompt(prompt, show(env, observation)), state=observation)
        while True:
            try:
                action = action_of(reply, env.action_space)
            except ValueError as error:
                reply = yield Turn(f"This is no action: {error}", state=observation)
                continue
            observation, reward, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                return float(reward)
            reply = yield Turn(show(env, observation), reward=float(reward), state=observation)
    finally:
        env.close()


def _made(id: str, options: tuple):
    return gym().make(id, **{**_render_mode(id, options), **dict(options)})


@functools.lru_cache(maxsize=64)
def _render_mode(id: str, options: tuple) -> dict[str, str]:
    """Returns the keyword of gymnasium.make with which the environment prints; {} for one that
    does not print, or takes no such keyword."""
    env = gym().make(id, **dict(options))
    env.close()
    prints = {"render_mode": "ansi"}
    if "ansi" not in env.metadata.get("render_modes", ()):
        return {}
    try:
        gym().make(id, **{**prints, **dict(options)}).close()
    except TypeError:  # its __init__ has no render_mode
        return {}
    return prints
