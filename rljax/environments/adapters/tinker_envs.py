"""Environments written for Tinker's cookbook, by the library tinker-cookbook."""

import functools
from collections.abc import AsyncGenerator

from rljax.components import resolve
from rljax.contracts import contract
from rljax.environments.adapters.shared import declared, followed, library
from rljax.environments.contract import Done, Opening, Reply, Turn

# Imported before the first clock starts: it takes seconds.
_library = functools.partial(library, "tinker_cookbook.renderers.base", "tinker", "tinker-cookbook")


@contract(prepare=lambda options: _library)
async def tinker(seed: int, *, env: str, **row) -> AsyncGenerator[object, Reply]:
    """An `Env` or a `MessageEnv` of Tinker's cookbook.

    `env`: a function of yours, called with what it declares of the row's fields, `seed` and
    `renderer`, that returns one. Its renderer here leaves messages as they are and gets the reply
    as a text, so that the policy's own chat template writes them. A history that does not go on
    from what was read before begins another row.
    """
    renderer = _Messages(_library().ParseTermination)
    make = resolve(env, "rljax.environments.adapters")
    environment = make(**declared(make.function, {**row, "seed": seed, "renderer": renderer}))
    # EnvFromMessageEnv would count tokens.
    environment = getattr(environment, "message_env", environment)
    of_messages = hasattr(environment, "add_messages")
    observation = await environment.initial_observation()
    history = observation if of_messages else observation[0]
    reply = yield Opening(history)
    while True:
        message = {"role": "assistant", "content": str(reply)}
        extra = {} if of_messages else {"extra": {"stop_reason": reply.finish}}
        result = await environment.step(message if of_messages else reply, **extra)
        if result.episode_done:
            break
        next_history = result.next_messages if of_messages else result.next_observation
        # Some write the reply under another role ("player").
        added, history = followed(history, next_history), next_history
        goes_on = bool(added) and added[0].get("content") == str(reply)
        reward = float(result.reward)
        next_turn = Turn(added[1:] or None, reward) if goes_on else Opening(history, reward=reward)
        reply = yield next_turn
    yield Done({"score": float(result.reward), **result.metrics})


class _Messages:
    """A renderer without tokens: observations are lists of messages, actions are texts."""

    def __init__(self, ended):
        self.ended, self.tokenizer = ended, self

    def build_generation_prompt(self, messages, **_) -> list:
        return list(messages)

    def get_stop_sequences(self) -> list:
        return []

    def parse_response(self, reply: Reply) -> tuple:
        ended = self.ended.MALFORMED if reply.finish == "length" else self.ended.STOP_SEQUENCE
        return {"role": "assistant", "content": str(reply)}, ended

    def decode(self, reply: Reply, **_) -> str:
        return str(reply)
