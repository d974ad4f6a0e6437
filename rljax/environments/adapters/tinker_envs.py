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
    made = make(**declared(make.function, {**row, "seed": seed, "renderer": renderer}))
    made = getattr(made, "message_env", made)  # EnvFromMessageEnv would count tokens
    of_messages = hasattr(made, "add_messages")
    first = await made.initial_observation()
    history = first if of_messages else first[0]
    reply = yield Opening(history)
    while True:
        said = {"role": "assistant", "content": str(reply)}
        extra = {} if of_messages else {"extra": {"stop_reason": reply.finish}}
        result = await made.step(said if of_messages else reply, **extra)
        if result.episode_done:
            break
        following = result.next_messages if of_messages else result.next_observation
        # Some write the reply under another role ("player").
        new, history = followed(history, following), following
        goes_on = bool(new) and new[0].get("content") == str(reply)
        reward = float(result.reward)
        goes = Turn(new[1:] or None, reward) if goes_on else Opening(history, reward=reward)
        reply = yield goes
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
