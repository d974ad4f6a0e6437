"""Waits for what a user's coroutine returns, from code that is synchronous."""

import asyncio
import functools
import inspect
import os
import threading
from collections.abc import Awaitable


def awaited(value: object) -> object:
    """Returns the result of a value that is awaitable, and any other value as it is.

    All coroutines of a process run on one event loop, in a thread of its own: a session that
    `reset` opens is still that of the next call, also where the caller runs in a loop itself.
    Raises what the coroutine raises.
    """
    if not inspect.isawaitable(value):
        return value
    future = asyncio.run_coroutine_threadsafe(_outcome(value), _loop(os.getpid()))
    try:
        result, error = future.result()
    except BaseException:  # the caller was stopped
        future.cancel()
        raise
    if error is not None:
        raise error
    return result


async def _outcome(value: Awaitable) -> tuple[object, BaseException | None]:
    """Returns (the result, None), or (None, the exception): a SystemExit that left the coroutine
    would end the loop."""
    try:
        return await value, None
    except BaseException as error:
        return None, error


@functools.cache
def _loop(process_id: int) -> asyncio.AbstractEventLoop:
    """The event loop of a process; a fork has none of its parent's threads."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"tools of {process_id}", daemon=True).start()
    return loop
