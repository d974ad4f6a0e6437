"""Tasksets of Prime Intellect's verifiers (v1), by the library verifiers."""

import asyncio
import itertools
from collections.abc import AsyncGenerator

from rljax.contracts import contract
from rljax.environments.adapters.endpoint import Endpoint
from rljax.environments.adapters.programs import Log, first_of
from rljax.environments.adapters.shared import library
from rljax.environments.contract import Done, Reply


@contract(repeatable=False, prepare=lambda options: _library)
async def verifiers(
    task: int = 0, *, id: str, env: str = "", harness: str = "", runtime: str = "subprocess"
) -> AsyncGenerator[object, Reply]:
    """A task of a taskset of verifiers, played by its own environment and harness, whose model is
    the policy; the outcome is the reward of the trace, its metrics are parts.

    `task`: a field of the row, the task's index in the taskset. `id`, `env`, `harness`, `runtime`:
    as verifiers names them, the last two of its seat "agent"; "" = the taskset's own. The runtime
    "subprocess" runs the harness on this machine. An error of theirs is a failed episode.
    """
    lib, loaders = _library()
    seat = {"runtime": {"type": runtime}, **({"harness": {"id": harness}} if harness else {})}
    config = loaders.resolve_env_config({"id": env, "taskset": {"id": id}, "agent": seat})
    environment = loaders.load_environment(config)
    chosen_task = next(itertools.islice(iter(environment.taskset), task, None))
    async with Endpoint() as endpoint:
        client = lib.EvalClientConfig(base_url=endpoint.url, api_key_var="OPENAI_API_KEY")
        context = lib.ModelContext(model="policy", client=client)

        async def played():
            async with environment.serving():
                return await environment.run_episode(chosen_task, context)

        running, log = asyncio.create_task(played()), Log()
        try:
            while (request := await first_of(endpoint, running)) is not None:
                reply = yield log.read(request)
                log.messages.append(request.answer(reply))
        finally:
            running.cancel()
            await asyncio.wait([running])
    episode = running.result()
    if not episode.ok:
        errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors))
    (trace,) = episode.traces
    yield Done({"score": trace.reward, **trace.metrics})


def _library() -> tuple:
    """Imports the library before the first clock starts: it takes seconds. Returns the parts of it
    that `verifiers` uses."""
    names = ("verifiers.v1", "verifiers.v1.utils.loaders")
    return tuple(library(name, "verifiers", "verifiers") for name in names)
