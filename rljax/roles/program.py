"""`program`: a dataflow as one jitted function."""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator

import jax

from rljax.errors import InputError
from rljax.roles.role import Role, is_role

_check_returned: contextvars.ContextVar[Callable] = contextvars.ContextVar(
    "check", default=lambda *_: None
)


@contextlib.contextmanager
def checking_returned(check: Callable[[object, dict], None]) -> Iterator[None]:
    """Calls check(returned, roles) with what each dataflow returns whose program is traced within,
    before the program reads it."""
    token = _check_returned.set(check)
    try:
        yield
    finally:
        _check_returned.reset(token)


def program(function: Callable | None = None, *, donates: tuple[str, ...] = ()) -> Callable:
    """Jits a dataflow: (batch, key, cfg, *, roles..., options) -> ({role: new role}, metrics).

    `cfg` and the options are static. Trained roles, and those named by `donates`, are donated and
    keep their layout; the others are only read, and so is what a role shares with others (the base
    under adapters). Metrics stay on the devices: fetch them where they are logged. A call raises
    InputError if the dataflow returns a role that it was not given to train.

    `.page` is the function itself, to be called inside another program; `.run` and `.arguments`
    are the jitted function and what it is called with, for a planner.
    """
    if function is None:
        return functools.partial(program, donates=donates)

    def run(own, batch, key, shared, read, *, cfg, options):
        roles = {name: role.joined(shared[name]) for name, role in own.items()}
        returned = function(batch, key, cfg, **roles, **read, **dict(options))
        _check_returned.get()(returned, {**roles, **read})
        new_roles, metrics = returned
        new_roles = {name: role for name, role in new_roles.items() if role is not None}
        if lost := sorted(new_roles.keys() - roles.keys()):
            raise InputError(
                f"{function.__name__} returns {', '.join(lost)}, which it was not given to train",
                rule=f"it may return {', '.join(sorted(roles)) or 'no role'}",
                fix="@program(donates=(...)) names further roles that a dataflow renews",
            )
        # A role that the dataflow did not return is handed back as it was: it was donated, too.
        return {k: role.split()[0].pinned() for k, role in {**roles, **new_roles}.items()}, metrics

    run.__name__ = function.__name__  # what profiles and counts of compiles call it
    run = jax.jit(run, static_argnames=("cfg", "options"), donate_argnames="own")

    def arguments(batch, key, cfg, **inputs):
        """Returns the positional and keyword arguments of `run`."""
        roles = {name: x for name, x in inputs.items() if is_role(x)}
        options = {name: x for name, x in inputs.items() if name not in roles}
        trained = {
            name: role
            for name, role in roles.items()
            if isinstance(role, Role) and (role.trained or name in donates)
        }
        halves = {name: role.split() for name, role in trained.items()}
        own = {name: half for name, (half, _) in halves.items()}
        shared = {name: half for name, (_, half) in halves.items()}
        read = {name: role for name, role in roles.items() if name not in trained}
        static = dict(cfg=cfg, options=tuple(sorted(options.items())))
        return (own, batch, key, shared, read), static

    @functools.wraps(function)
    def call(batch, key, cfg, **inputs):
        positional, static = arguments(batch, key, cfg, **inputs)
        new_roles, metrics = run(*positional, **static)
        shared = positional[3]
        return {name: role.joined(shared[name]) for name, role in new_roles.items()}, metrics

    call.page, call.run, call.arguments = function, run, arguments
    call.__signature__ = inspect.signature(function)
    return call
