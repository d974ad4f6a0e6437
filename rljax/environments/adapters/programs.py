"""Any program that speaks OpenAI's API as an environment: the policy is its model."""

import asyncio
import json
import os
import shlex
from collections.abc import AsyncGenerator, Mapping

from rljax.contracts import contract
from rljax.environments.adapters.endpoint import Endpoint, Request
from rljax.environments.adapters.guard import Guarded
from rljax.environments.adapters.shared import followed
from rljax.environments.contract import Done, Opening, Reply, Turn
from rljax.errors import InputError
from rljax.files import parse_json


@contract(repeatable=False, on_limit=None)
async def program(
    seed: int, sample_seed: int, *, command: str, failed: float | None = None, **row
) -> AsyncGenerator[object, Reply]:
    """An agent: a program that asks OPENAI_BASE_URL for chat completions, which the policy writes.

    `command` is started for each episode, without a shell, and is killed with it. On its stdin is
    one line of JSON: the row's fields, seed and sample_seed. A request whose messages go on from
    the last one's is appended to the log; any other begins another row (environment.max_rows). Its
    stop strings and limits of tokens are obeyed, its model, temperature, top_p, top_k, min_p and
    seed are the run's, and what an episode cannot do (n, logprobs, response_format, a call that is
    forced, ...) is refused by its name, with status 400. With tool_choice "none" the tools stay in
    the prompt, and calls are text. The outcome is the last line of its stdout, a number or an
    object of numbers with "score"; where that is neither, `reward.function` scores the last turn. A
    program that ends with another status than 0 is worth `failed`; None makes it a failed episode.
    Raises RuntimeError in a failed episode, also for a program that never asks.
    """
    line = json.dumps({**row, "seed": seed, "sample_seed": sample_seed}, default=str)
    async with Endpoint() as endpoint:
        variables = {
            "OPENAI_BASE_URL": endpoint.url,
            "OPENAI_API_KEY": "none",
            "no_proxy": "127.0.0.1",
        }
        async with Guarded(shlex.split(command), {**os.environ, **variables}, line) as agent:
            log = Log()
            while (request := await first_of(endpoint, agent.ended)) is not None:
                reply = yield log.read(request)
                log.messages.append(request.answer(reply))
    status, output, complaint = agent.ended.result()
    if status != 0 and failed is not None:
        yield Done(failed)
    elif status != 0 or not log.messages:
        detail = "asked nothing and " if not log.messages else ""
        raise RuntimeError(f"the program {detail}ended with status {status}: {complaint[-2000:]}")
    else:
        yield Done(_outcome(output))


class Log:
    """Tokens that the policy has read and written in the present row."""

    def __init__(self):
        self.messages: list[dict] = []
        self.tools: list[dict] = []

    def read(self, request: Request) -> Turn | Opening:
        """Returns what the policy reads next for a request: the new messages, or, if they do not
        continue the last request, a whole new row."""
        added = followed(self.messages, request.messages) if self.messages else None
        goes_on = bool(added) and all(message["role"] != "assistant" for message in added)
        same_tools = request.tools == self.tools
        self.messages, self.tools = list(request.messages), request.tools
        limits = dict(stop=request.stop, max_tokens=request.max_tokens)
        if goes_on and same_tools:
            return Turn(added, **limits)
        return Opening(request.messages, tools=request.tools, **limits)


async def first_of(endpoint: Endpoint, ended: asyncio.Future) -> Request | None:
    """The next request; None if the agent ends without one."""
    request = asyncio.ensure_future(endpoint.requests.get())
    await asyncio.wait([request, ended], return_when=asyncio.FIRST_COMPLETED)
    if request.done():
        return request.result()
    request.cancel()
    return None


def _outcome(output: str) -> float | Mapping | None:
    lines = output.strip().split("\n")
    try:
        outcome = parse_json(lines[-1], "outcome") if lines else None
    except InputError:
        return None
    if isinstance(outcome, Mapping):
        return outcome if "score" in outcome else None
    return outcome if isinstance(outcome, int | float) else None
