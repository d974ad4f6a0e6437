"""Turns a Python function into the text by which a config names it.

A config holds text, and other processes score samples. So a function of an importable module is
named by that module. A function that lives in a notebook or in the running script is written to a
file: its source, and what it reads there: imports, other functions and classes of the same place,
and values that Python text can make again. Then the file is run, and what it defines is compared
with what was given: a difference is an error. The file's name has a digest of its text, so another
version of the function is another component, in this process and to a resumed run.
"""

import __future__

import ast
import builtins
import contextlib
import copy
import enum
import functools
import hashlib
import importlib.util
import inspect
import linecache
import math
import os
import symtable
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path

from rljax.config.same_code import PLAIN, Different, check_same, reduced
from rljax.errors import InputError
from rljax.runs.folder import removed_if_empty

# The name of a config file's module, which no process imports by it.
CONFIG_MODULE = "_rljax_config"


def plain_value(value: object) -> object:
    """Returns a value without types of NumPy or JAX: a number, with the digits that it is shown
    with, and a list or tuple of numbers."""
    if type(value) in (list, tuple) or len(getattr(value, "shape", ())) == 1:
        return (list if isinstance(value, list) else tuple)(map(plain_value, value))
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        number = value.item()
        return float(str(value)) if isinstance(number, float) else number
    return value


def component_text(function: Callable, folder: Path, field: str = "function") -> str:
    """Returns the component text of a function, such as "my_rewards.f", or "FOLDER/f_1a2b3c4d.py:f"
    for which a file is written; the options of a functools.partial become those of the text.

    Raises InputError if other processes could not have the function, or would have another one.
    """
    options = {}
    while isinstance(function, functools.partial):
        keywords = {name: plain_value(value) for name, value in function.keywords.items()}
        options = {**keywords, **options}
        if function.args:
            rule = "options are keywords"
            raise InputError(
                f"{field}: a partial with positional arguments",
                rule=rule,
                fix="give the options by name: functools.partial(f, option=value)",
            )
        function = function.func
    if not (inspect.isfunction(function) or field == "trackers" and inspect.isclass(function)):
        fix = "write a function: def my_function(...): ..."
        raise InputError(f"{field} is no plain function", value=function, fix=fix)
    for name, value in options.items():
        if not _is_literal(value):
            rule = "options are numbers, strings, booleans, None or tuples of them"
            raise InputError(
                f"{field}: option {name!r} of a partial",
                value=value,
                rule=rule,
                fix="pass a literal, or write a function that sets the option itself",
            )
    text = f"{function.__module__}.{function.__name__}"
    module_names = function.__globals__ if inspect.isfunction(function) else {}
    if function.__module__ == CONFIG_MODULE and module_names.get(function.__name__) is function:
        text = f"{module_names['__file__']}:{function.__name__}"
    elif not _is_importable(function):
        text = f"{_file_of(function, folder, field)}:{function.__name__}"
    listed = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"{text}({listed})" if listed else text


def _file_of(function: Callable, folder: Path, field: str) -> Path:
    """Writes the file of a function that no module has, checks that it defines the same function,
    and returns its path."""
    carried = _Carried(field)
    text = carried.text(function)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    path = folder / f"{function.__name__}_{digest}.py"
    with removed_if_empty(folder):
        existed = path.is_file()
        write_once(path, text)
        try:
            carried.check(path, text, function)
        except BaseException:
            if not existed:
                path.unlink()
            raise
    return path


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
    if name != value.__qualname__ or vars(sys.modules.get(module, builtins)).get(name) is not value:
        return False
    written = value.__globals__.get("__name__", module) if inspect.isfunction(value) else module
    return _is_found(module) and _is_found(written)  # not one that a notebook has put there


def _is_found(module: str | None) -> bool:
    """Returns whether another process can import a module."""
    if module in (None, "__main__", "__mp_main__", CONFIG_MODULE) or module not in sys.modules:
        return False
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a module without a spec: it was made by hand
        return False


def _import_origin(name: str, value: object) -> tuple[str, str] | None:
    """Returns (module, name) by which another process imports what a notebook imported as `name`, a
    public module if there is one; None for objects of the notebook itself, and for plain
    values."""
    home = getattr(value, "__module__", None)
    # What pickle has by its name alone; it would copy an array first.
    by_name = None if callable(value) or hasattr(value, "shape") else reduced(value)
    if not (callable(value) or isinstance(by_name, str)):
        return None
    if home in sys.modules and not _is_found(home):
        return None
    if inspect.isfunction(value) and not _is_found(value.__globals__.get("__name__", home)):
        return None
    names = {name, getattr(value, "__name__", None), by_name}
    origins = [
        (any(part.startswith("_") for part in module.split(".")), module != home, module, candidate)
        for module, loaded in list(sys.modules.items())
        for candidate in names
        if isinstance(candidate, str) and getattr(loaded, "__dict__", {}).get(candidate) is value
    ]
    return next((candidate[2:] for candidate in sorted(origins) if _is_found(candidate[2])), None)


class _NoText(Exception):
    """The error of a value that Python text does not make again."""


class _Carried:
    """Collects the text that a function needs in a file of its own, definitions before their
    readers."""

    def __init__(self, field: str):
        self.field = field
        self.known: set[str] = set()  # names that the file has, or is about to have
        self.names: dict[int, str] = {}  # of functions and classes of the notebook, by their ids
        self.aliases: dict[int, list[str]] = {}  # other names of those that are being written
        self.imports: dict[str, None] = {}
        self.pieces: list[str] = []

    def text(self, function: Callable) -> str:
        """Returns the text of the file."""
        self._add_source(function, function.__name__)
        head = f'"""{function.__name__}, as it was when the run began, and what it reads."""'
        imports = sorted(self.imports, key=lambda line: not line.startswith("from __future__"))
        return "\n\n\n".join([f"{head}\n\n" + "\n".join(imports), *self.pieces]) + "\n"

    def check(self, path: Path, text: str, function: Callable) -> None:
        """Runs the file and checks that it defines the same function. Raises InputError if it does
        not."""
        module = types.ModuleType("_rljax_carried")
        module.__file__ = str(path)
        sys.modules[module.__name__] = module  # dataclasses look for it
        name = function.__name__
        try:
            exec(compile(text, str(path), "exec", dont_inherit=True), vars(module))
            check_same(function, vars(module)[name], name)
        except Different as error:
            raise self._refusal(f"{name} is not what its source makes of it: {error}") from None
        except Exception as error:
            problem = (
                f"the source of {name} cannot be run by itself: {type(error).__name__}: {error}"
            )
            raise self._refusal(problem) from error
        finally:
            del sys.modules[module.__name__]

    def _add_source(self, value: Callable, name: str) -> None:
        """Adds a function or class of the notebook under a name, after what it reads."""
        self.known.add(name)
        self.names[id(value)], self.aliases[id(value)] = name, []
        home = _home_of(value)
        node = copy.deepcopy(self._definition(value))
        if not inspect.isclass(value):
            self._set_defaults(node.args, inspect.unwrap(value), home)
        node.name = name
        source = _text_of(node)
        future = home.get("annotations") is __future__.annotations
        if future:
            self.imports["from __future__ import annotations"] = None
        for read in sorted(_globals_of(source) - self.known):
            if read in home:
                self._add(read, home[read], source)
            elif not hasattr(builtins, read) and read in _globals_of(source, future):
                raise self._refusal(
                    f"{value.__name__} reads {read}, which is not defined", f"define {read} first"
                )
        path, inner = name, value
        while inner is not None:  # a definition under another name, and what it is decorated with
            if inner.__name__ != name:
                source += f"\n\n\n{path}.__name__ = {inner.__name__!r}"
            path, inner = f"{path}.__wrapped__", getattr(inner, "__wrapped__", None)
        if inspect.isclass(value) and name != value.__qualname__:
            source += f"\n\n\n{name}.__qualname__ = {value.__qualname__!r}"
        self.pieces += [source, *self.aliases.pop(id(value))]

    def _add_definition(self, name: str, value: Callable) -> None:
        """Adds a function or class of the notebook, which may have had other names before this one,
        or a name that is another's by now."""
        if id(value) not in self.names:
            own_name = value.__name__
            is_free = own_name not in self.known and _home_of(value).get(own_name) is value
            self._add_source(value, own_name if is_free else name)
        if self.names[id(value)] != name:
            alias = f"{name} = {self.names[id(value)]}"
            self.aliases.get(id(value), self.pieces).append(alias)

    def _add(self, name: str, value: object, source: str) -> None:
        """Adds what `name` stands for where the function was written."""
        self.known.add(name)
        if isinstance(value, types.ModuleType) and _is_found(value.__name__):
            self._import_module(name, value, source)
        elif origin := _import_origin(name, value):
            alias = "" if name == origin[1] else f" as {name}"
            self.imports[f"from {origin[0]} import {origin[1]}{alias}"] = None
        elif _is_definition(value):
            self._add_definition(name, value)
        else:
            try:
                self.pieces.append(f"{name} = {self._expression(value)}")
            except (_NoText, RecursionError):
                raise self._refusal(
                    f"it reads {name}, a {type(value).__name__}",
                    f"make {name} inside a function that it calls, or " + self._in_a_module(),
                ) from None

    def _expression(self, value: object) -> str:
        """Returns Python text that makes a value again: a plain one, a container of such, or one
        that pickle makes of such by one call of Python's own or of the notebook. Raises _NoText for
        others."""
        kind = type(value)
        if kind is float and not math.isfinite(value):
            return f"float({str(value)!r})"
        if kind in PLAIN and kind is not complex:
            return repr(value)
        if kind is dict:
            pairs = (f"{self._expression(k)}: {self._expression(v)}" for k, v in value.items())
            return "{" + ", ".join(pairs) + "}"
        if kind in (list, tuple) or kind is set and value:
            items = ", ".join(map(self._expression, value))
            comma = "," * (kind is tuple and len(value) == 1)
            return {list: f"[{items}]", tuple: f"({items}{comma})", set: f"{{{items}}}"}[kind]
        if vars(builtins).get(getattr(value, "__name__", None)) is value:
            return value.__name__
        if origin := _import_origin("", value):
            name = "_".join(["", *origin[0].split("."), origin[1]])
            self.known.add(name)
            self.imports[f"from {origin[0]} import {origin[1]} as {name}"] = None
            return name
        if _is_definition(value):
            self._add_definition(value.__name__, value)
            return self.names[id(value)]
        root = kind.__module__.partition(".")[0]
        of_library = root not in sys.stdlib_module_names and _is_found(kind.__module__)
        if of_library and not isinstance(value, enum.Enum):  # an array, a model
            raise _NoText
        parts = reduced(value)
        if not isinstance(parts, tuple) or any(part is not None for part in parts[2:]):
            raise _NoText
        return f"{self._expression(parts[0])}({', '.join(map(self._expression, parts[1]))})"

    def _import_module(self, name: str, module: types.ModuleType, source: str) -> None:
        """Adds `import module as name`, and imports of its modules that the source reads through
        it."""
        module_name = module.__name__
        alias = "" if name == module_name else f" as {name}"
        self.imports[f"import {module_name}{alias}"] = None
        for node in ast.walk(ast.parse(source)):
            parts, inner = [], node
            while isinstance(inner, ast.Attribute):
                parts, inner = [inner.attr, *parts], inner.value
            if isinstance(inner, ast.Name) and inner.id == name and parts:
                names = [".".join([module_name, *parts[:n]]) for n in range(1, len(parts) + 1)]
                self.imports |= {f"import {n}": None for n in names if n in sys.modules}

    def _set_defaults(self, arguments: ast.arguments, function: Callable, home: dict) -> None:
        """Writes the defaults of a function as they were bound, where their source would make
        others of them, or may: it reads a name."""
        values = function.__defaults__ or ()
        if len(values) == len(arguments.defaults):
            pairs = zip(arguments.defaults, values, strict=True)
            arguments.defaults = [self._default(*pair, home) for pair in pairs]
        values = function.__kwdefaults__ or {}
        named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        arguments.kw_defaults = [
            self._default(node, values[arg.arg], home) if node and arg.arg in values else node
            for arg, node in named
        ]

    def _default(self, node: ast.expr, value: object, home: dict) -> ast.expr:
        if isinstance(node, ast.Name) and home.get(node.id, node) is value:
            return node
        with contextlib.suppress(ValueError, TypeError):
            if repr(ast.literal_eval(node)) == repr(value):
                return node
        try:
            return ast.parse(self._expression(value), mode="eval").body
        except (_NoText, RecursionError):
            return node

    def _definition(self, value: Callable) -> ast.AST:
        node = _class_node(value) if inspect.isclass(value) else _function_node(value)
        if node is None:
            reason = "it is a lambda, was made at run time, or its file has changed"
            if inspect.isclass(value):
                reason = (
                    "in a notebook it is found by the methods of the class, and this one has none"
                )
            raise self._refusal(
                f"the source of {value.__name__} is not known: {reason}",
                "write it with def in a cell, or in a file that is imported",
            )
        outer = [] if inspect.isclass(value) else inspect.unwrap(value).__code__.co_freevars
        if outer := ", ".join(set(outer) - {"__class__"}):
            raise self._refusal(
                f"{value.__name__} reads {outer} of the function around it",
                "write it by itself and make that an option with a default, which "
                f"functools.partial({value.__name__}, ...) sets; or {self._in_a_module()}",
            )
        return node

    def _in_a_module(self) -> str:
        file = f"my_{self.field.rpartition('.')[2]}.py"
        return f"write it and all that it reads to a file, {file}, and import it from there"

    def _refusal(self, problem: str, fix: str = "") -> InputError:
        rule = "what runs it are other processes, to which the function is carried by its source"
        return InputError(f"{self.field}: {problem}", rule=rule, fix=fix or self._in_a_module())


def _is_definition(value: object) -> bool:
    """Returns whether a value is a function, a class, or the result of a function's decorator."""
    return inspect.isclass(value) or inspect.isfunction(inspect.unwrap(value))


def _home_of(value: Callable) -> dict[str, object]:
    """Returns the names of the module, or of the notebook, in which a function or class was
    written."""
    if inspect.isclass(value):
        return vars(sys.modules.get(value.__module__, builtins))
    return inspect.unwrap(value).__globals__


def _function_node(function: Callable) -> ast.AST | None:
    """Returns the `def` of a function, the nearest one to where it was; None for a lambda, or
    without a source."""
    code = inspect.unwrap(function).__code__
    nodes = _defined(code.co_filename, code.co_name, (ast.FunctionDef, ast.AsyncFunctionDef))
    return min(nodes, key=lambda n: abs(_first_line(n) - code.co_firstlineno), default=None)


def _class_node(kind: type) -> ast.AST | None:
    """Returns the `class` statement of a class: the one around its methods, which `inspect` cannot
    find in a notebook; of a class without methods the last one of that name in its file that makes
    this class."""
    for method in vars(kind).values():
        method = getattr(method, "__func__", getattr(method, "fget", method))
        if not inspect.isfunction(method):
            continue
        code = inspect.unwrap(method).__code__
        for node in _defined(code.co_filename, kind.__name__, (ast.ClassDef,)):
            if _first_line(node) <= code.co_firstlineno <= node.end_lineno:
                return node
    try:
        path = inspect.getsourcefile(kind)
    except (OSError, TypeError):  # of a notebook
        return None
    nodes = _defined(path, kind.__name__, (ast.ClassDef,))[::-1]
    matching = (node for node in nodes if len(nodes) > 1 and _makes(node, kind))
    return next(matching, nodes[0] if nodes else None)


def _makes(node: ast.ClassDef, kind: type) -> bool:
    """Returns whether a definition makes this class, and not another one of its name."""
    home = dict(_home_of(kind))
    try:
        exec(compile(ast.Module([node], []), "<source>", "exec", dont_inherit=True), home)
        check_same(kind, home[kind.__name__], kind.__name__)
    except Exception:
        return False
    return True


def _defined(path: str | None, name: str, kinds: tuple) -> list:
    """Returns the definitions of a name anywhere in a file, in order, each with its lines."""
    linecache.checkcache(path)
    lines = linecache.getlines(path or "")
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return []
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == name]
    for node in nodes:
        node.written = "".join(lines[_first_line(node) - 1 : node.end_lineno])
    return sorted(nodes, key=lambda node: node.lineno)


def _first_line(node) -> int:
    """Returns the line of a definition, or of its first decorator."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _text_of(node) -> str:
    """Returns a definition as it was written; as Python writes it where that is another one: it was
    changed, or it stands further right with a text of several lines in it."""
    text = textwrap.dedent(node.written).rstrip()
    with contextlib.suppress(SyntaxError):
        if ast.dump(ast.parse(text)) == ast.dump(ast.Module([node], [])):
            return text
    return ast.unparse(node)


def _globals_of(source: str, future: bool = False) -> set[str]:
    """Returns the names that a definition reads of the module around it: in its body, its
    decorators, its defaults and its annotations; of the last none if they are read in the
    `future`."""
    source = "from __future__ import annotations\n" * future + source
    names, tables = set(), [symtable.symtable(source, "<source>", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        outermost = table.get_type() == "module"
        for symbol in table.get_symbols():
            read = symbol.is_referenced() and not symbol.is_assigned()
            if symbol.is_global() and not outermost or outermost and read:
                names.add(symbol.get_name())
    return names
