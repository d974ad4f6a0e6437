"""Turns a Python function into the text by which a config names it.

A config holds text, and other processes score samples. So a function of an importable module is
named by that module. A function that lives in a notebook or in the running script is written to a
file: its source, and what it reads there: imports, other functions and classes of the same place,
and values that can be written as literals. The file's name has a digest of its text, so another
version of the function is another component, in this process and to a resumed run.
"""

import ast
import builtins
import contextlib
import functools
import hashlib
import importlib.util
import inspect
import linecache
import os
import re
import symtable
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

from rljax.errors import InputError

# The name of a config file's module, which no process imports by it.
CONFIG_MODULE = "_rljax_config"


def component_text(function: Callable, folder: Path, what: str = "function") -> str:
    """Returns the component text of a function, such as "my_rewards.f", or "FOLDER/f_1a2b3c4d.py:f"
    for which a file is written; the options of a functools.partial become those of the text.

    Raises InputError if other processes could not have the function.
    """
    options = {}
    while isinstance(function, functools.partial):
        options = {**function.keywords, **options}
        if function.args:
            rule = "options are keywords"
            raise InputError(
                f"{what}: a partial with positional arguments",
                rule=rule,
                fix="give the options by name: functools.partial(f, option=value)",
            )
        function = function.func
    if not (inspect.isfunction(function) or what == "trackers" and inspect.isclass(function)):
        fix = "write a function: def my_function(...): ..."
        raise InputError(f"{what} is no plain function", value=function, fix=fix)
    for name, value in options.items():
        if not _is_literal(value):
            rule = "options are numbers, strings, booleans, None or tuples of them"
            raise InputError(
                f"{what}: option {name!r} of a partial",
                value=value,
                rule=rule,
                fix="pass a literal, or write a function that sets the option itself",
            )
    text = f"{function.__module__}.{function.__name__}"
    home = function.__globals__ if inspect.isfunction(function) else {}
    if function.__module__ == CONFIG_MODULE and home.get(function.__name__) is function:
        text = f"{home['__file__']}:{function.__name__}"
    elif not _is_importable(function):
        carried = _Carried(what).text(function)
        digest = hashlib.sha256(carried.encode()).hexdigest()[:8]
        path = folder / f"{function.__name__}_{digest}.py"
        write_once(path, carried)
        text = f"{path}:{function.__name__}"
    listed = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"{text}({listed})" if listed else text


def write_once(path: Path, text: str) -> None:
    """Writes a file whose name holds the digest of its content, at once; a file that exists is left
    alone. Raises InputError if it cannot be written."""
    if path.is_file():
        return
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with not_written(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)


@contextlib.contextmanager
def not_written(path: Path) -> Iterator[None]:
    """Raises InputError if a file for an argument of the run cannot be written within the block."""
    try:
        yield
    except OSError as error:
        raise InputError(
            "what the run was given cannot be written",
            value=str(path),
            rule=str(error),
            fix="set run_dir to a folder that can be written",
        ) from None


def _is_literal(value: object) -> bool:
    """Returns whether Python reads the value back from its repr."""
    try:
        again = ast.literal_eval(repr(value))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return type(again) is type(value) and again == value


def _is_importable(value: object) -> bool:
    """Returns whether another process finds this very function or class by its module and name."""
    name, module = value.__name__, value.__module__
    if module in (None, "__main__", CONFIG_MODULE) or module not in sys.modules:
        return False
    if name != value.__qualname__:
        return False
    if vars(sys.modules[module]).get(name) is not value:
        return False
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a module without a spec: it was made by hand
        return False


class _Carried:
    """Collects what a function needs in a file of its own, what is read before what reads it."""

    def __init__(self, what: str):
        self.what = what
        self.known: set[str] = set()  # names that the file has, or is about to have
        self.imports: dict[str, None] = {}
        self.pieces: list[str] = []

    def text(self, function: Callable) -> str:
        """The file."""
        self._add_source(function)
        head = f'"""{function.__name__}, as it was when the run began, and what it reads."""'
        return "\n\n\n".join([f"{head}\n\n" + "\n".join(self.imports), *self.pieces]) + "\n"

    def _add_source(self, value: types.FunctionType | type) -> None:
        """A function or class of the notebook, after what it reads."""
        source = self._source_of(value)
        self.known.add(value.__name__)
        home = vars(sys.modules.get(value.__module__, builtins))
        if inspect.isfunction(value):
            written = inspect.unwrap(value)  # behind a decorator
            home = written.__globals__
            if outer := ", ".join(set(written.__code__.co_freevars) - {"__class__"}):
                raise self._refused(
                    f"{value.__name__} reads {outer} of the function around it",
                    "write it by itself and make that an option with a default, which "
                    f"functools.partial({value.__name__}, ...) sets",
                )
        for read in sorted(_globals_of(source) - self.known):
            if read in home:
                self._add(read, home[read], source)
            elif not hasattr(builtins, read):
                raise self._refused(
                    f"{value.__name__} reads {read}, which is not defined", f"define {read} first"
                )
        self.pieces.append(source)

    def _add(self, name: str, value: object, source: str) -> None:
        """Adds what `name` stands for where the function was written."""
        self.known.add(name)
        own = inspect.isfunction(value) or inspect.isclass(value)
        if isinstance(value, types.ModuleType) and value.__name__ != "__main__":
            self._import_module(name, value, source)
        elif own and not _is_importable(value):
            if name == value.__name__ or value.__name__ not in self.known:
                self._add_source(value)
            if name != value.__name__:
                self.pieces.append(f"{name} = {value.__name__}")
        elif own or isinstance(value, types.BuiltinFunctionType) and _is_importable(value):
            same = "" if name == value.__name__ else f" as {name}"
            self.imports[f"from {value.__module__} import {value.__name__}{same}"] = None
        elif vars(typing).get(name) is value:
            self.imports[f"from typing import {name}"] = None
        elif isinstance(value, re.Pattern):
            self.imports["import re"] = None
            self.pieces.append(f"{name} = re.compile({value.pattern!r}, {value.flags})")
        elif _is_literal(value):
            self.pieces.append(f"{name} = {value!r}")
        else:
            raise self._refused(
                f"it reads {name}, a {type(value).__name__}",
                f"make {name} inside a function that it calls, or write both to a file, "
                f"my_{self.what.rpartition('.')[2]}.py, and import the function from there",
            )

    def _import_module(self, name: str, module: types.ModuleType, source: str) -> None:
        """`import module as name`, and those of its modules that the source reads through it."""
        whole = module.__name__
        self.imports[f"import {whole}" + ("" if name == whole else f" as {name}")] = None
        for node in ast.walk(ast.parse(source)):
            parts, inner = [], node
            while isinstance(inner, ast.Attribute):
                parts, inner = [inner.attr, *parts], inner.value
            if isinstance(inner, ast.Name) and inner.id == name and parts:
                names = [".".join([whole, *parts[:n]]) for n in range(1, len(parts) + 1)]
                self.imports |= {f"import {n}": None for n in names if n in sys.modules}

    def _source_of(self, value: types.FunctionType | type) -> str:
        source = _class_source(value) if inspect.isclass(value) else _function_source(value)
        if not source:
            why = "it is a lambda, or was made at run time"
            if inspect.isclass(value):
                why = "in a notebook it is found by the methods of the class, and this one has none"
            raise self._refused(
                f"the source of {value.__name__} is not known: {why}",
                "write it with def in a cell, or in a file that is imported",
            )
        return source

    def _refused(self, why: str, fix: str) -> InputError:
        rule = "what runs it are other processes, to which the function is carried by its source"
        return InputError(f"{self.what}: {why}", rule=rule, fix=fix)


def _function_source(function: types.FunctionType) -> str:
    """Its `def` with the decorators; "" for a lambda, or where there is no source."""
    try:
        source = textwrap.dedent(inspect.getsource(function)).rstrip()
        (node,) = ast.parse(source).body
    except (SyntaxError, ValueError):  # within an `if`, beside a text that begins further left
        code = inspect.unwrap(function).__code__
        kinds = ast.FunctionDef, ast.AsyncFunctionDef
        nodes = _defined(code.co_filename, function.__name__, kinds)
        at = [node for node in nodes if _first_line(node) == code.co_firstlineno]
        return _written(code.co_filename, at[0]) if at else ""
    except (OSError, TypeError):
        return ""
    defined = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return source if defined and node.name == function.__name__ else ""


def _class_source(kind: type) -> str:
    """Its `class` with the decorators: where its methods were written, which `inspect` cannot find
    in a notebook; of a class without methods the last one of that name in its file; else ""."""
    for method in filter(inspect.isfunction, vars(kind).values()):
        code = method.__code__
        for node in _defined(code.co_filename, kind.__name__, (ast.ClassDef,)):
            if _first_line(node) <= code.co_firstlineno <= node.end_lineno:
                return _written(code.co_filename, node)
    try:
        path = inspect.getsourcefile(kind)
    except (OSError, TypeError):  # of a notebook
        return ""
    nodes = _defined(path, kind.__name__, (ast.ClassDef,))
    return _written(path, nodes[-1]) if nodes else ""


def _defined(path: str | None, name: str, kinds: tuple) -> list:
    """The definitions of a name anywhere in a file, in order."""
    try:
        tree = ast.parse("".join(linecache.getlines(path or "")))
    except (SyntaxError, ValueError):
        return []
    found = [node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == name]
    return sorted(found, key=lambda node: node.lineno)


def _first_line(node) -> int:
    """The line of a definition, or of its first decorator."""
    return min([node.lineno, *(one.lineno for one in node.decorator_list)])


def _written(path: str, node) -> str:
    """A definition as it was written; one further right as Python writes it, since a text of
    several lines in it cannot be moved."""
    lines = linecache.getlines(path)[_first_line(node) - 1 : node.end_lineno]
    return ast.unparse(node) if node.col_offset else "".join(lines).rstrip()


def _globals_of(source: str) -> set[str]:
    """The names that a definition reads of the module around it: in its body, its decorators, its
    defaults and its annotations."""
    found, tables = set(), [symtable.symtable(source, "<source>", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        outermost = table.get_type() == "module"
        for symbol in table.get_symbols():
            read = symbol.is_referenced() and not symbol.is_assigned()
            if symbol.is_global() and not outermost or outermost and read:
                found.add(symbol.get_name())
    return found
