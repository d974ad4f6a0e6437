"""Runs a test function or method as pytest and unittest do, inside the process of the tests.

Parameters and fixtures, setups and teardowns, and classes of unittest. Needs neither pytest nor
files. Which cases there are is found outside, by `rljax.rewards.unit_tests.code_cases`.
"""

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping

_TAKEN_OUT = ("skip", "xfail")


def run_case(names: Mapping[str, object], path: str, *always: str) -> None:
    """Runs the test at `path`, "test_f" or "TestClass.test_f", of the namespace `names`, for each
    set of its parameters. `always` names the fixtures that every test uses. Raises what the test
    raises, and LookupError if there is nothing to run."""
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners[1:], names[owners[0]]) if owners else None
    if owners and "unittest" in sys.modules:  # else it extends no class of it
        import unittest

        if issubclass(owner, unittest.TestCase):
            return _run_unittest(unittest, owner, name)
    function = getattr(owner, name) if owners else names[name]
    sets = list(_parameter_sets(owner, function))
    if not sets:
        raise LookupError(f"{path} has no set of parameters")
    for parameters in sets:
        with contextlib.ExitStack() as ends:
            instance = owner() if owners else None
            _set_up(names, owner, instance, function, ends)
            bound = getattr(instance, name) if owners else function
            _Fixtures(names, instance, dict(parameters), ends).call(bound, always)


def _run_unittest(unittest, owner: type, name: str) -> None:
    methods = unittest.defaultTestLoader.getTestCaseNames(owner)
    if name not in methods:  # a decorator has put several in its place
        methods = [method for method in methods if method.startswith(name)]
    else:
        methods = [name]
    if not methods:
        raise LookupError(f"{owner.__name__} has no test {name}")
    unittest.TestSuite(map(owner, methods)).debug()


def _parameter_sets(*marked: object) -> Iterator[dict]:
    """Yields the arguments of each run, by the parametrize marks of a class and of a function."""
    marks = [
        m for item in marked for m in getattr(item, "pytestmark", ()) if m.name == "parametrize"
    ]
    for rows in itertools.product(*map(_rows, marks)):
        yield {name: value for row in rows for name, value in row.items()}


def _rows(mark) -> Iterator[dict]:
    options = dict(zip(("argnames", "argvalues"), mark.args, strict=False)) | mark.kwargs
    names, single = options["argnames"], False
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",") if name.strip()]
        single = len(names) == 1
    for row in options["argvalues"]:
        if type(row).__name__ == "ParameterSet":  # pytest.param(...)
            if any(getattr(m, "name", "") in _TAKEN_OUT for m in row.marks):
                continue
            row = row.values
        elif single:
            row = (row,)
        yield dict(zip(names, row, strict=True))


def _set_up(names, owner, instance, function, ends: contextlib.ExitStack) -> None:
    """Calls the functions and methods that pytest calls around a test by their names."""
    places = [(names.get, "module", None), *([] if owner else [(names.get, "function", function)])]
    if owner:
        places += [
            (lambda name: getattr(owner, name, None), "class", owner),
            (lambda name: getattr(instance, name, None), "method", function),
        ]
    for find, kind, argument in places:
        if before := find(f"setup_{kind}"):
            _with_or_without(before, argument)
        if after := find(f"teardown_{kind}"):
            ends.callback(_with_or_without, after, argument)


def _with_or_without(function: Callable, argument: object) -> None:
    function(*[argument] * bool(inspect.signature(function).parameters))


class _Fixtures:
    """The values of one run, each made once, by the fixtures of a class and of a module."""

    def __init__(self, names, instance, values: dict, ends: contextlib.ExitStack):
        self.names, self.instance, self.values, self.ends = names, instance, values, ends

    def call(self, function: Callable, always: tuple[str, ...] = ()) -> object:
        for name in (*always, *_used(function)):
            self.value(name)
        parameters = inspect.signature(function).parameters.values()
        needed = [p.name for p in parameters if p.default is p.empty or p.name in self.values]
        result = function(**{name: self.value(name) for name in needed})
        if inspect.iscoroutine(result):
            import asyncio  # its import takes longer than most tests

            return asyncio.run(result)
        return result

    def value(self, name: str) -> object:
        if name not in self.values:
            result = self.call(getattr(self.instance, name, None) or self.names[name])
            if inspect.isgenerator(result):
                generator, result = result, next(result)
                self.ends.callback(next, generator, None)
            self.values[name] = result
        return self.values[name]


def _used(function: Callable) -> list[str]:
    marks = getattr(function, "pytestmark", ())
    return [name for mark in marks if mark.name == "usefixtures" for name in mark.args]
