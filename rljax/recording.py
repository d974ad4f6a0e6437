"""Programs noted instead of run: how a plan learns what a dataflow would call, from its own page.

What lives here: the list. Who notes: rljax.roles.program, rljax.sampler.generate. Who reads:
rljax.plan.programs.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

_CALLS: contextvars.ContextVar[list | None] = contextvars.ContextVar("calls", default=None)


@dataclasses.dataclass(frozen=True)
class Call:
    """A jitted function and its arguments. `turns`: of the loops that end when the data say so, at
    most."""

    name: str
    function: Any
    arguments: tuple
    turns: int = 1


@contextlib.contextmanager
def recording() -> Iterator[list[Call]]:
    """Inside of it programs that would be called are listed, in order, and nothing is computed: a
    learning phase returns the roles that it was given, decoding a batch of zeros."""
    token = _CALLS.set([])
    try:
        yield _CALLS.get()
    finally:
        _CALLS.reset(token)


def calls() -> list[Call] | None:
    """The list of the `recording` at hand; None outside of any."""
    return _CALLS.get()
