"""Environments that are OpenEnv servers, by the library openenv-core."""

import json
from collections.abc import AsyncGenerator

from rljax.components import resolve
from rljax.contracts import contract
from rljax.environments.adapters.shared import library, with_prompt
from rljax.environments.contract import Done, Reply, Turn


@contract(repeatable=False, prepare=lambda options: _library)
async def openenv(
    seed: int,
    prompt: object = "",
    *,
    url: str,
    field: str = "message",
    act: str = "",
    render: str = "",
    timeout_s: float = 8.0,
) -> AsyncGenerator[Turn | Done, Reply]:
    """An environment of an OpenEnv server, one session for each episode; it is asked for as many
    as there are episodes, so start it with max_concurrent_envs above its default of 1.

    The answer of a reply, without its reasoning, is the text `field` of the action; or what
    `act(reply) -> dict` makes of the reply is the action. `render`: a function observation -> text;
    "" = the observation as JSON. The first one is read behind the prompt of the row.
    """
    client = _library().GenericEnvClient
    home = "rljax.environments.adapters"
    action_of = resolve(act, home) if act else lambda reply: {field: reply.answer}
    show = resolve(render, home) if render else _as_json
    async with client(url, message_timeout_s=timeout_s) as env:
        result = await env.reset(seed=seed)
        text = show(result.observation)
        reply = yield Turn(with_prompt(prompt, text), state=text)
        while not (result := await env.step(action_of(reply))).done:
            text = show(result.observation)
            reply = yield Turn(text, reward=float(result.reward or 0.0), state=text)
    yield Done(float(result.reward or 0.0))


def _library():
    """Returns the library, imported before the first clock starts: it takes seconds."""
    return library("openenv.core", "openenv", "openenv-core")


def _as_json(observation: dict) -> str:
    return json.dumps(observation, ensure_ascii=False, default=str)
