"""The functions of a namespace that a config can name, for tables that hold a row for each."""

import functools
import inspect
from collections.abc import Callable
from types import ModuleType


def public_functions(module: ModuleType) -> list[Callable]:
    """The public functions that `module` or its submodules define and that it shows."""
    home = f"{module.__name__}."
    return [
        value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and f"{value.__module__}.".startswith(home)
        and not name.startswith("_")
    ]


def unwrapped(function: Callable) -> Callable:
    """The function under partials and wrappers."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function)
