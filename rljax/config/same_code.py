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
    """The error that says which part of a copy is not as in its original."""


def reduced(value: object) -> tuple | str | None:
    """Returns the parts of which pickle would make the value: (function, arguments, state, ...), or
    the name by which it is imported; None if pickle cannot do so."""
    try:
        special = copyreg.dispatch_table.get(type(value))
        parts = special(value) if special else value.__reduce_ex__(2)
    except Exception:
        return None
    return parts if isinstance(parts, str) else (*parts, *[None] * (5 - len(parts)))


def check_same(original: object, copy: object, name: str) -> None:
    """Checks that a copy is the same as its original. Raises Different with the first difference
    otherwise, also where something cannot be compared."""
    try:
        _Comparison().compare(original, copy, name)
    except RecursionError:
        raise Different(f"{name} reads what is nested too deeply") from None


class _Comparison:
    """One comparison. A mutable object that occurs several times must have one copy, too."""

    def __init__(self):
        self.copies: dict[int, object] = {}  # id of an original -> its copy
        self.originals: dict[int, object] = {}  # id of a copy -> its original
        self.alive: list = []  # an id belongs to one object for as long as this one lives

    def compare(self, original: object, copy: object, path: str) -> None:
        """Raises Different if two objects are not the same; `path` leads to them from the
        function."""
        if original is copy:
            return
        if original is Different or copy is Different:  # it is missing
            raise _different(original, copy, path)
        if type(original) is not type(copy) and not (_is_class(original) and _is_class(copy)):
            if type(original).__name__ != type(copy).__name__:
                raise _different(original, copy, path)
            self.compare(type(original), type(copy), type(original).__name__)
        if type(original) in PLAIN:
            if repr(original) != repr(copy):
                raise _different(original, copy, path)
        elif isinstance(original, types.CodeType):
            self.code(original, copy, path)
        elif type(original) in (tuple, frozenset):
            self.items(original, copy, path)
        elif self.is_new(original, copy, path):
            self.parts(original, copy, path)

    def is_new(self, original: object, copy: object, path: str) -> bool:
        """Returns whether two objects have not been compared yet."""
        if self.copies.get(id(original), Different) is copy:
            return False
        if id(original) in self.copies or id(copy) in self.originals:
            if _is_mutable(original):
                raise Different(f"{path} is one object with another name's in one of the two only")
            return True
        self.copies[id(original)], self.originals[id(copy)] = copy, original
        self.alive += [original, copy]
        return True

    def parts(self, original: object, copy: object, path: str) -> None:
        """Compares the parts of two objects of one type."""
        if isinstance(original, types.FunctionType):
            self.function(original, copy, path)
        elif _is_class(original):
            self.a_class(original, copy, path)
        elif isinstance(original, staticmethod | classmethod):
            self.compare(original.__func__, copy.__func__, path)
        elif type(original) is property:
            for part in ("fget", "fset", "fdel"):
                self.compare(getattr(original, part), getattr(copy, part), path)
        elif isinstance(original, types.CellType):
            self.items(_content(original), _content(copy), path)
        elif type(original) in (list, set):
            self.items(original, copy, path)
        elif type(original) in (dict, types.MappingProxyType, collections.OrderedDict):
            self.items(original, copy, f"a key of {path}")
            for key, value, copied in zip(original, original.values(), copy.values(), strict=True):
                self.compare(value, copied, f"{path}[{_shown(key)}]")
        elif _is_wrapper(original):
            self.attributes(vars(original), vars(copy), path)
        elif type(original).__name__ not in _LOCKS:
            self.pickled(original, copy, path)

    def pickled(self, original: object, copy: object, path: str) -> None:
        """Compares two objects as pickle takes them apart."""
        parts = reduced(original), reduced(copy)
        if not all(isinstance(part, tuple) for part in parts):
            raise Different(f"{path} is a {type(original).__name__}, which cannot be compared")
        for pair in zip(*parts, strict=True):
            if all(hasattr(part, "__next__") for part in pair):
                pair = map(tuple, pair)
            self.compare(*pair, path)

    def function(self, original: types.FunctionType, copy: types.FunctionType, path: str) -> None:
        """Compares code, defaults, attributes, closures, and what the code reads of its module."""
        self.compare(original.__name__, copy.__name__, f"{path}.__name__")
        self.code(original.__code__, copy.__code__, path)
        self.attributes(
            _defaults(original), _defaults(copy), f"an argument of {path}", "the default of"
        )
        self.attributes(_annotations(original), _annotations(copy), f"{path}.__annotations__")
        self.attributes(vars(original), vars(copy), path)
        closures = original.__closure__ or (), copy.__closure__ or ()
        for name, *cells in zip(original.__code__.co_freevars, *closures, strict=True):
            self.compare(*cells, name)
        modules = original.__globals__, copy.__globals__
        for name in sorted(_reads(original.__code__)) if modules[0] is not modules[1] else ():
            values = (
                module.get(name, function.__builtins__.get(name, Different))
                for module, function in zip(modules, (original, copy), strict=True)
            )
            self.compare(*values, name)

    def code(self, original: types.CodeType, copy: types.CodeType, path: str) -> None:
        """Compares two codes, but not where they stand."""
        same_parts = all(getattr(original, part) == getattr(copy, part) for part in _CODE)
        flags = {code.co_flags & ~_CO_NESTED for code in (original, copy)}
        constants = [
            [_OUTER.sub("", x) if isinstance(x, str) else x for x in code.co_consts]
            for code in (original, copy)
        ]
        changed = Different(f"the source of {path} is that of other code by now")
        if not same_parts or len(flags) > 1:
            raise changed
        try:
            self.items(*constants, path)
        except Different:
            raise changed from None

    def a_class(self, original: type, copy: type, path: str) -> None:
        """Compares names, bases, metaclass, annotations and attributes."""
        for part in ("__name__", "__qualname__"):
            self.compare(getattr(original, part), getattr(copy, part), f"{path}.{part}")
        self.compare(type(original), type(copy), f"type({path})")
        self.items(original.__bases__, copy.__bases__, f"{path}.__bases__")
        self.attributes(_annotations(original), _annotations(copy), f"{path}.__annotations__")
        self.attributes(vars(original), vars(copy), path)

    def attributes(self, original: Mapping, copy: Mapping, path: str, label: str = "") -> None:
        """Compares two mappings of names, in any order of the names."""
        for name in sorted({*original, *copy} - _OF_THE_PLACE):
            attribute = f"{label} {name}, {path}," if label else f"{path}.{name}"
            self.compare(original.get(name, Different), copy.get(name, Different), attribute)

    def items(self, original: Iterable, copy: Iterable, path: str) -> None:
        """Compares two sequences, or two sets."""
        unordered = isinstance(original, set | frozenset)
        items = [sorted(x, key=repr) if unordered else list(x) for x in (original, copy)]
        if len(items[0]) != len(items[1]):
            raise _different(*items, path)
        for pair in zip(*items, strict=True):
            self.compare(*pair, path)


def _different(original: object, copy: object, path: str) -> Different:
    if original is Different:
        return Different(f"{path} is only in its source")
    if copy is Different:
        return Different(f"{path} was set outside of its source")
    return Different(f"{path} is {_shown(original)}, and {_shown(copy)} by its source")


def _shown(value: object) -> str:
    is_plain = type(value) in (*PLAIN, list, tuple, dict, set, frozenset)
    text = repr(value) if is_plain else f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def _is_class(value: object) -> bool:
    return isinstance(value, type)


def _is_wrapper(value: object) -> bool:
    """Returns whether a value is the result of a decorator in C: a jitted or cached function."""
    return "__wrapped__" in getattr(value, "__dict__", ()) and type(value) is not types.MethodType


def _is_mutable(value: object) -> bool:
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
    """Returns the defaults of arguments by their names."""
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
    """Returns the names of its module that a code reads, also in functions and classes within
    it."""
    steps = list(dis.get_instructions(code))
    stored = {step.argval for step in steps if step.opname == "STORE_NAME"} | {"__name__"}
    read = {step.argval for step in steps if step.opname == "LOAD_GLOBAL"}
    of_classes = ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
    read |= {step.argval for step in steps if step.opname in of_classes} - stored
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return read.union(*map(_reads, inner))
