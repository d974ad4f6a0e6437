"""Compares a function or class with a copy of it that was made from its source: code, defaults,
closures, attributes, and the values that the code reads, however deep."""

import collections
import copyreg
import dis
import inspect
import re
import types
from collections.abc import Iterable, Mapping, Sequence

PLAIN = (bool, bytes, complex, float, int, str, type(None), type(...), type(NotImplemented))
_CODE = (
    *("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_exceptiontable"),
    *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount"),
)
_CO_NESTED = 0x10  # the flag of a function that was defined within another
_OUTER = re.compile(r"[\w.<>]*<locals>\.(?=\w+$)")  # of the qualified name of an inner class
# Attributes that say where something was made, or that are compared by themselves.
_OF_THE_PLACE = {
    *("__dict__", "__weakref__", "__module__", "__qualname__", "__annotations__", "_jit_info"),
    *("__firstlineno__", "__static_attributes__", "_abc_impl", "__slotnames__"),
    *("__annotate__", "__annotate_func__", "__annotations_cache__"),
}
_LOCKS = ("lock", "RLock")  # of threads: another one is as good


class Different(Exception):
    """The error that says what of a copy is not as it was given."""


def reduced(value: object) -> tuple | str | None:
    """Returns the parts of which pickle would make the value: (function, arguments, state, ...), or
    the name by which it is imported; None if it has none."""
    try:
        special = copyreg.dispatch_table.get(type(value))
        parts = special(value) if special else value.__reduce_ex__(2)
    except Exception:
        return None
    return parts if isinstance(parts, str) else (*parts, *[None] * (5 - len(parts)))


def check_same(given: object, copy: object, name: str) -> None:
    """Checks that a copy is what was given. Raises Different with the first difference otherwise,
    also where something cannot be compared."""
    try:
        _Comparison().compare(given, copy, name)
    except RecursionError:
        raise Different(f"{name} reads what is nested too deeply") from None


class _Comparison:
    """One comparison. What can be changed and is one object of those given is one copy, too."""

    def __init__(self):
        self.copies: dict[int, object] = {}  # id of what was given -> its copy
        self.givens: dict[int, object] = {}  # and back
        self.alive: list = []  # an id is one object's for as long as it lives

    def compare(self, given: object, copy: object, at: str) -> None:
        """Raises Different if two objects are not the same; `at` names them."""
        if given is copy:
            return
        if given is Different or copy is Different:  # it is missing
            raise _different(given, copy, at)
        if type(given) is not type(copy) and not (_is_class(given) and _is_class(copy)):
            if type(given).__name__ != type(copy).__name__:
                raise _different(given, copy, at)
            self.compare(type(given), type(copy), type(given).__name__)
        if type(given) in PLAIN:
            if repr(given) != repr(copy):
                raise _different(given, copy, at)
        elif isinstance(given, types.CodeType):
            self.code(given, copy, at)
        elif type(given) in (tuple, frozenset):
            self.items(given, copy, at)
        elif self.is_new(given, copy, at):
            self.parts(given, copy, at)

    def is_new(self, given: object, copy: object, at: str) -> bool:
        """Returns whether two objects have not been compared yet."""
        if self.copies.get(id(given), Different) is copy:
            return False
        if id(given) in self.copies or id(copy) in self.givens:
            if _can_change(given):
                raise Different(f"{at} is one object with another name's in one of the two only")
            return True
        self.copies[id(given)], self.givens[id(copy)] = copy, given
        self.alive += [given, copy]
        return True

    def parts(self, given: object, copy: object, at: str) -> None:
        """Compares the parts of two objects of one type."""
        if isinstance(given, types.FunctionType):
            self.function(given, copy, at)
        elif _is_class(given):
            self.a_class(given, copy, at)
        elif isinstance(given, staticmethod | classmethod):
            self.compare(given.__func__, copy.__func__, at)
        elif type(given) is property:
            for part in ("fget", "fset", "fdel"):
                self.compare(getattr(given, part), getattr(copy, part), at)
        elif isinstance(given, types.CellType):
            self.items(_content(given), _content(copy), at)
        elif type(given) in (list, set):
            self.items(given, copy, at)
        elif type(given) in (dict, types.MappingProxyType, collections.OrderedDict):
            self.items(given, copy, f"a key of {at}")
            for key, value, other in zip(given, given.values(), copy.values(), strict=True):
                self.compare(value, other, f"{at}[{_said(key)}]")
        elif _is_wrapper(given):
            self.attributes(vars(given), vars(copy), at)
        elif type(given).__name__ not in _LOCKS:
            self.pickled(given, copy, at)

    def pickled(self, given: object, copy: object, at: str) -> None:
        """Compares two objects as pickle takes them apart."""
        parts = reduced(given), reduced(copy)
        if not all(isinstance(one, tuple) for one in parts):
            raise Different(f"{at} is a {type(given).__name__}, which cannot be compared")
        for one, other in zip(*parts, strict=True):
            iterators = hasattr(one, "__next__") and hasattr(other, "__next__")
            self.compare(*((tuple(one), tuple(other)) if iterators else (one, other)), at)

    def function(self, given: types.FunctionType, copy: types.FunctionType, at: str) -> None:
        """Compares code, defaults, attributes, closures, and what the code reads of its module."""
        self.compare(given.__name__, copy.__name__, f"{at}.__name__")
        self.code(given.__code__, copy.__code__, at)
        self.attributes(_defaults(given), _defaults(copy), f"an argument of {at}", "the default of")
        self.attributes(_annotations(given), _annotations(copy), f"{at}.__annotations__")
        self.attributes(vars(given), vars(copy), at)
        closures = given.__closure__ or (), copy.__closure__ or ()
        for name, one, other in zip(given.__code__.co_freevars, *closures, strict=True):
            self.compare(one, other, name)
        modules = given.__globals__, copy.__globals__
        for name in sorted(_reads(given.__code__)) if modules[0] is not modules[1] else ():
            here, there = (
                one.get(name, function.__builtins__.get(name, Different))
                for one, function in zip(modules, (given, copy), strict=True)
            )
            self.compare(here, there, name)

    def code(self, given: types.CodeType, copy: types.CodeType, at: str) -> None:
        """Compares two codes, but not where they stand."""
        same = all(getattr(given, part) == getattr(copy, part) for part in _CODE)
        flags = {code.co_flags & ~_CO_NESTED for code in (given, copy)}
        constants = [
            [_OUTER.sub("", x) if isinstance(x, str) else x for x in code.co_consts]
            for code in (given, copy)
        ]
        changed = Different(f"the source of {at} is that of other code by now")
        if not same or len(flags) > 1:
            raise changed
        try:
            self.items(*constants, at)
        except Different:
            raise changed from None

    def a_class(self, given: type, copy: type, at: str) -> None:
        """Compares names, bases, metaclass, annotations and attributes."""
        for part in ("__name__", "__qualname__"):
            self.compare(getattr(given, part), getattr(copy, part), f"{at}.{part}")
        self.compare(type(given), type(copy), f"type({at})")
        self.items(given.__bases__, copy.__bases__, f"{at}.__bases__")
        self.attributes(_annotations(given), _annotations(copy), f"{at}.__annotations__")
        self.attributes(vars(given), vars(copy), at)

    def attributes(self, given: Mapping, copy: Mapping, at: str, label: str = "") -> None:
        """Compares what has names, in any order of the names."""
        for name in sorted({*given, *copy} - _OF_THE_PLACE):
            where = f"{label} {name}, {at}," if label else f"{at}.{name}"
            self.compare(given.get(name, Different), copy.get(name, Different), where)

    def items(self, given: Iterable, copy: Iterable, at: str) -> None:
        """Compares two sequences, or two sets."""
        unordered = isinstance(given, set | frozenset)
        here, there = (sorted(x, key=repr) if unordered else list(x) for x in (given, copy))
        if len(here) != len(there):
            raise _different(here, there, at)
        for one, other in zip(here, there, strict=True):
            self.compare(one, other, at)


def _different(given: object, copy: object, at: str) -> Different:
    if given is Different:
        return Different(f"{at} is only in its source")
    if copy is Different:
        return Different(f"{at} was set outside of its source")
    return Different(f"{at} is {_said(given)}, and {_said(copy)} by its source")


def _said(value: object) -> str:
    plain = type(value) in (*PLAIN, list, tuple, dict, set, frozenset)
    text = repr(value) if plain else f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def _is_class(value: object) -> bool:
    return isinstance(value, type)


def _is_wrapper(value: object) -> bool:
    """Returns whether a value is what a decorator in C has made of a function: jitted, cached."""
    return "__wrapped__" in getattr(value, "__dict__", ()) and type(value) is not types.MethodType


def _can_change(value: object) -> bool:
    """Returns whether a change of the value is seen by all that hold it."""
    if isinstance(value, list | dict | set | types.FunctionType | type | types.CellType):
        return True
    parts = reduced(value)
    return isinstance(parts, tuple) and any(part is not None for part in parts[2:])


def _content(cell: types.CellType) -> Sequence:
    try:
        return (cell.cell_contents,)
    except ValueError:  # it is empty
        return ()


def _defaults(function: types.FunctionType) -> dict[str, object]:
    """The defaults of arguments by their names."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    return dict(zip(names[len(names) - len(values) :], values, strict=False)) | (
        function.__kwdefaults__ or {}
    )


def _annotations(value: object) -> Mapping:
    try:
        return inspect.get_annotations(value)
    except NameError:  # of names that are not defined, which newer versions of Python read late
        return {}


def _reads(code: types.CodeType) -> set[str]:
    """The names of its module that a code reads, also in functions and classes within it."""
    steps = list(dis.get_instructions(code))
    stored = {step.argval for step in steps if step.opname == "STORE_NAME"} | {"__name__"}
    read = {step.argval for step in steps if step.opname == "LOAD_GLOBAL"}
    of_classes = ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
    read |= {step.argval for step in steps if step.opname in of_classes} - stored
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return read.union(*map(_reads, inner))
