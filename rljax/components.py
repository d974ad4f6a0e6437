"""Components named as text -> functions: `"ppo_clip(clip_high=0.28)"`,
`"my.module.my_loss(width=0.1)"` or `"path/to/file.py:my_loss(width=0.1)"`.

The text is a call. A bare name is looked up in the stage's own module (the module is the
namespace), a dotted name is imported, and a name behind a path is a function of that file. Options
are keyword literals, checked against the function's signature (the signature is the schema).
Nothing is registered. This file imports no model code.
"""

import ast
import copy
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import linecache
import math
import operator
import os
import re
import sys
import sysconfig
import traceback
import types
import typing
import zlib
from collections.abc import Callable

from rljax.errors import InputError
from rljax.suggest import near_names


@dataclasses.dataclass(frozen=True)
class Range:
    """The range of a number: `low` and `high` are included, `above` and `below` are not. Stands in
    the annotation of an option, `clip_low: Annotated[float, Range(low=0)] = 0.2`."""

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None

    def problem(self, value: float) -> str:
        """Returns why a number is out of range, "" if it is not."""
        bounds = (
            (">=", self.low, operator.ge),
            ("<=", self.high, operator.le),
            (">", self.above, operator.gt),
            ("<", self.below, operator.lt),
        )
        bounds = [bound for bound in bounds if bound[1] is not None]
        if math.isfinite(value) and all(holds(value, bound) for _, bound, holds in bounds):
            return ""
        limits = " and ".join(f"{sign} {bound}" for sign, bound, _ in bounds)
        return f"must be {limits or 'finite'}"


# White space is taken whole (*+): texts come from strangers, and one that is nothing else would be
# tried at every place of it.
_OF_A_FILE = re.compile(r"\s*+([^()'\"]+\.py):(.*)", re.DOTALL)
_ENTRY_POINT = re.compile(r"\s*+([A-Za-z_][\w.]*):([A-Za-z_]\w*\s*+(?:\(.*\))?)\s*+", re.DOTALL)
_WHOLE_FILE = re.compile(r"\s*+([^()'\"]+\.py)\s*+:?\s*+(\(.*\))?\s*+", re.DOTALL)


@functools.lru_cache(maxsize=4096)
def parse_component(text: str) -> tuple[str, tuple[tuple[str, object], ...]]:
    """Reads `"a.b(x=1)"` as ("a.b", (("x", 1),)), and `"a/b.py:c"` as ("a/b.py:c", ()); a bare name
    means no options. Raises InputError for what is no call with keyword options."""
    form = (
        'write it as "name(option=value)", "package.module.function(option=value)" or '
        '"path/to/file.py:function(option=value)"; without options the brackets may be left out'
    )
    if whole_file := _WHOLE_FILE.fullmatch(text):
        raise _needs_a_function(whole_file[1])
    file_match = _OF_A_FILE.fullmatch(text)
    written = file_match[2] if file_match else text
    try:
        node = ast.parse(written.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if entry_point := _ENTRY_POINT.fullmatch(text):
            problem = "a component has a colon between module and function"
            rule = "only the path of a .py file has one"
            fix = f"write {entry_point[1]}.{entry_point[2]}"
            raise InputError(problem, value=text, rule=rule, fix=fix) from None
        if ".py:" in text.partition("(")[2]:
            problem = "a component in a file whose path has brackets"
            rule = "brackets begin the options"
            fix = "rename the folder, or put a link without brackets in its place"
            raise InputError(problem, value=text, rule=rule, fix=fix) from None
        problem = "a component is not a valid call"
        rule = error.msg if isinstance(error, SyntaxError) else str(error)
        raise InputError(problem, value=text, rule=rule, fix=form) from None
    call = node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])
    parts, target = [], call.func
    while isinstance(target, ast.Attribute):
        parts.append(target.attr)
        target = target.value
    if not isinstance(target, ast.Name):
        raise InputError("a component must start with a name", value=text, fix=form)
    name = ".".join([target.id, *reversed(parts)])
    name = f"{file_match[1]}:{name}" if file_match else name
    if call.args:
        problem = f"component {name!r} has positional options"
        raise InputError(problem, value=text, rule="options are keywords", fix=form)
    options = []
    for keyword in call.keywords:
        if keyword.arg is None:
            problem = f"component {name!r} uses **"
            raise InputError(problem, value=text, rule="options are keywords", fix=form)
        try:
            value = ast.literal_eval(keyword.value)
            hash(value)
        except (ValueError, TypeError, RecursionError):
            raise InputError(
                f"option {keyword.arg!r} of component {name!r} is not a literal",
                value=ast.unparse(keyword.value),
                rule="options are numbers, strings, booleans, None or tuples of them",
                fix=f"write the value itself, such as {keyword.arg}=0.5, {keyword.arg}=True or "
                f"{keyword.arg}='text'",
            ) from None
        if keyword.arg in dict(options):
            problem = f"component {name!r} sets option {keyword.arg!r} twice"
            raise InputError(problem, value=text, fix=f"leave one {keyword.arg}= out")
        options.append((keyword.arg, value))
    return name, tuple(options)


# Modules that a component of a config may name and that had another name before: runs that were
# written then go on.
_RULES = ("against", "baseline_response", "collect", "greedy", "special_token", "turn_tree", "vine")
_MOVED = {
    "rljax.data.tasks": "rljax.tasks",
    "rljax.environments.adapters.gymnasium_lanes": "rljax.environments.adapters.gymnasium_vectors",
    "rljax.rollout.searched": "rljax.rollout.rules.search",
    **{f"rljax.rollout.{name}": f"rljax.rollout.rules.{name}" for name in _RULES},
}


def _is_public_function(name: str, value: object, home: str) -> bool:
    """Returns whether `value` is a function that `home` or a submodule defines, not imports."""
    is_local = inspect.isfunction(value) and f"{value.__module__}.".startswith(f"{home}.")
    return is_local and not name.startswith("_")


def _import(name: str, home: str) -> Callable:
    """The function called `name`: of a file, imported if dotted, else of the `home` module."""
    if _OF_A_FILE.fullmatch(name):
        return _of_file(name)
    if "." not in name:
        module = importlib.import_module(home)
        names = [n for n, f in vars(module).items() if _is_public_function(n, f, home)]
        if name not in names:
            close = near_names(name, names, 3)
            close = close or [candidate for candidate in names if name.startswith(f"{candidate}_")]
            hint = f"did you mean {' or '.join(close)}? " if close else ""
            raise InputError(
                f"{home} has no {name!r}",
                fix=f"{hint}Use one of its functions, or a dotted name of your own, "
                f"such as 'my_module.{name}'",
            )
        return getattr(module, name)
    module_name, _, attribute = name.rpartition(".")
    for old, new in _MOVED.items():
        if f"{module_name}.".startswith(f"{old}."):
            module_name = new + module_name.removeprefix(old)
    use_working_folder()
    if _is_a_librarys(module_name):
        raise _not_a_component(f"component {name!r}", module_name)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
        parent, _, class_name = module_name.rpartition(".")
        if parent in sys.modules and inspect.isclass(_attribute(sys.modules[parent], class_name)):
            raise InputError(
                f"component {name!r} belongs to the class {class_name!r}",
                rule="a component is a function of a module",
                fix=f"write a function in {parent!r} that calls it",
            ) from error
        if missing and f"{module_name}.".startswith(f"{missing}."):
            problem = f"component {name!r} cannot be imported"
            fix = f"put {module_name!r} on PYTHONPATH or in the working folder"
            raise InputError(problem, rule=str(error), fix=fix) from error
        raise fails_at_import(f"component {name!r}", error) from error
    return _function_of(module, attribute, f"module {module_name!r}")


def use_working_folder() -> None:
    """Lets modules of the working folder be imported: only now, because it may be a stranger's, and
    last of all, so that a tokenizers.py in it hides no library."""
    if "" not in sys.path and os.getcwd() not in map(os.path.abspath, sys.path):
        sys.path.append("")


def names_file(text: str) -> bool:
    """Returns whether a text is "path/to/file.py:function", with or without options."""
    return _OF_A_FILE.fullmatch(text) is not None


def names_of(text: str) -> tuple[list[str], set[str]]:
    """Returns the functions that a component text names, and the names of its options, those in its
    options' texts included; none for a text that is no component."""
    components = [parse_component(part) for part in component_texts(text)]
    return [name for name, _ in components], {
        key for _, options in components for key, _ in options
    }


def component_texts(text: str) -> list[str]:
    """Returns a component text and those in its options; none for a text that is no component."""
    try:
        _, options = parse_component(text.strip())
    except InputError:
        return []
    texts, pending = [text.strip()], [value for _, value in options]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            texts += component_texts(value)
        elif isinstance(value, tuple):
            pending += value
    return texts


def is_own_code(name: str) -> bool:
    """Returns whether a component's name is that of a user's own function: dotted, or of a file."""
    return "." in name


# Libraries beside rljax: none of their functions is a component, and some run what they are told.
_LIBRARIES = set(
    """
    absl flax grain jax jaxlib jinja2 mlflow numpy orbax pip pyarrow pytest rich safetensors
    scipy setuptools starlette swanlab tensorboardX tokenizers torch trackio transformers
    uvicorn wandb yaml
    """.split()
)


def _is_a_librarys(module_name: str) -> bool:
    """Returns whether a module is of Python's standard library or of a library that has no
    components."""
    root = module_name.partition(".")[0]
    return root in sys.stdlib_module_names or root in _LIBRARIES


def _not_a_component(subject: str, module_name: str) -> InputError:
    hidden = f"{module_name.partition('.')[0]}.py"
    fix = "name a function of rljax, or of a module of yours with a name of its own"
    if os.path.isfile(hidden):
        fix = f"{hidden} of the working folder is hidden by a library of that name: rename it"
    rule = "functions such as os.system never run from a config"
    return InputError(f"{subject} is Python's own, or a library's", rule=rule, fix=fix)


def _of_file(name: str) -> Callable:
    """The function of "path/to/file.py:function". A file is run once in a process."""
    path, _, attribute = name.rpartition(":")
    if not os.path.isfile(path):
        raise _no_file(name, path)
    full_path = os.path.abspath(path)
    module_name = f"file_{zlib.crc32(full_path.encode()):08x}"
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, full_path)
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[module_name]
            raise fails_at_import(f"component {name!r}", error) from error
    return _function_of(module, attribute, f"file {path!r}")


def _no_file(name: str, path: str) -> InputError:
    folder, file = os.path.split(path)
    files = (
        [entry.name for entry in os.scandir(folder or ".")] if os.path.isdir(folder or ".") else []
    )
    close = near_names(file, [entry for entry in files if entry.endswith(".py")], 1)
    rule = f"a path is absolute or starts at the working folder, {os.getcwd()}"
    fix = f"did you mean {os.path.join(folder, close[0])!r}?" if close else "correct the path"
    return InputError(f"component {name!r}: there is no file {path!r}", rule=rule, fix=fix)


def _needs_a_function(path: str) -> InputError:
    """The error of a component that names a Python file alone. The file is read, and not run."""
    if not os.path.isfile(path):
        return _no_file(path, path)
    names = _functions_in(path)
    return InputError(
        f"component {path!r} is a file, and a function of it is needed",
        rule=f"it defines {', '.join(names)}" if names else "it defines none",
        fix=f"{path}:{names[0]}" if names else f"define one, and name it {path}:my_function",
    )


def _functions_in(path: str) -> list[str]:
    """The public functions at the top of a Python file; [] where it has none or is not readable."""
    linecache.checkcache(path)
    try:
        body = ast.parse("".join(linecache.getlines(path))).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = [node.name for node in body if isinstance(node, functions)]
    return [name for name in names if not name.startswith("_")][:8]


# Packages that are called otherwise than what they are imported by.
_PACKAGES = {
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python",
    "Crypto": "pycryptodome",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "fitz": "pymupdf",
    "PIL": "pillow",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
_PATHS = sysconfig.get_paths()
_INSTALLED = (
    os.path.dirname(__file__),
    *(_PATHS[name] for name in ("stdlib", "purelib", "platlib")),
)


def fails_at_import(what: str, error: BaseException) -> InputError:
    """Returns the error of a user's module that raises when it is imported."""
    location, fix = location_and_fix(error)
    if isinstance(error, InputError):
        return error.within(f"{what}: its module fails at import ({location}): ")
    rule = f"{type(error).__name__}: {error} ({location})"
    return InputError(f"{what}: its module fails at import", rule=rule, fix=fix)


def location_and_fix(error: BaseException) -> tuple[str, str]:
    """Returns "file:line" and the fix of an error that a user's module raised: the last line of a
    file that is neither Python's, nor a library's, nor ours."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    user_frames = [frame for frame in frames if not frame[0].startswith(("<frozen", *_INSTALLED))]
    file, line = (user_frames or frames or [("", 0)])[-1]
    if isinstance(error, SyntaxError):
        file, line = error.filename or file, error.lineno or line
    fix = f"correct line {line} of {file}"
    if isinstance(error, SystemExit):
        fix = "move what the file does when it is run below `if __name__ == '__main__':`"
    elif "circular import" in str(error):
        fix = f"move the import of line {line} of {file} into the function that uses it, or what "
        fix += "both files need into a third one"
    elif "relative import" in str(error):
        fix = f"write the whole name of the module in line {line} of {file}, without a leading dot"
    elif isinstance(error, ModuleNotFoundError) and error.name:
        root, folder = error.name.partition(".")[0], os.path.dirname(os.path.abspath(file))
        fix = f"pip install {_PACKAGES.get(root, root)}"
        if any(os.path.exists(f"{folder}/{root}{end}") for end in (".py", "/")):
            fix = f"put {folder} on PYTHONPATH: {root} lies there"
        elif root in sys.modules or importlib.util.find_spec(root) is not None:
            fix = f"correct line {line} of {file}: {root} has no part of that name"
    elif isinstance(error, ImportError) and error.name in sys.modules:
        match = re.match(r"cannot import name '(\w+)'", str(error))
        names = vars(sys.modules[error.name])
        close = near_names(match[1], list(names), 1) if match else []
        fix += f": did you mean {close[0]!r}?" if close else f": {error.name} has no such name"
    elif isinstance(error, NameError) and error.name:
        fix = f"import or define {error.name!r} above line {line} of {file}"
    return f"{file}:{line}", fix


def _attribute(module: types.ModuleType, name: str) -> object:
    """Returns what a module has under a name, also where its `__getattr__` loads it; nothing of
    what every module has, such as `__class__`."""
    if name in vars(module) or hasattr(type(module), name):
        return vars(module).get(name)
    return getattr(module, name, None)


def _function_of(module: types.ModuleType, attribute: str, owner: str) -> Callable:
    try:
        function = _attribute(module, attribute)
    except (Exception, SystemExit) as error:  # what loads it fails
        raise fails_at_import(f"{owner}: {attribute!r}", error) from error
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    # A decorator's wrapper was written in one module and says another: either may be the user's.
    homes = {getattr(inner, "__module__", None) or ""}
    if inspect.isfunction(inner):
        homes.add(inner.__globals__.get("__name__", ""))
    if isinstance(inner, types.BuiltinFunctionType) or all(map(_is_a_librarys, homes)):
        raise _not_a_component(f"{owner}: {attribute!r}", module.__name__)
    if not callable(function):
        if attribute in vars(module) or function is not None:
            raise InputError(
                f"{owner}: {attribute!r} is no function", value=function, fix="name a function"
            )
        close = near_names(attribute, dir(module), 1)
        names = _functions_in(getattr(module, "__file__", None) or "")
        rule = f"it defines {', '.join(names)}" if names else ""
        fix = f"did you mean {close[0]!r}?" if close else f"define {attribute} in it"
        fix = f"name one of these, or {fix}" if names and not close else fix
        hidden = f"{module.__name__.partition('.')[0]}.py"
        if os.path.isfile(hidden) and os.path.abspath(hidden) != vars(module).get("__file__"):
            fix = f"{hidden} of the working folder is hidden by a library of that name: rename it"
        raise InputError(f"{owner} has no function {attribute!r}", rule=rule, fix=fix)
    return function


def plain_kind(kind: object) -> object:
    """Returns the type that an annotation stands for, as an error shows it: without ranges and what
    a text names. Annotated[float, Range(low=0)] | None -> float | None."""
    kind = getattr(kind, "__supertype__", kind)
    if typing.get_origin(kind) is typing.Annotated:
        return kind.__origin__
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(plain_kind, typing.get_args(kind)))]  # noqa: UP007
    return kind


def _fits(value: object, kind: object) -> bool:
    """Returns whether a literal is of an annotated type; one that is no plain type fits."""
    kind = plain_kind(kind)
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, k) for k in typing.get_args(kind))
    if origin is typing.Literal:
        return any(value == v and type(value) is type(v) for v in typing.get_args(kind))
    if kind is None or kind is type(None):
        return value is None
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind in (int, str, bool):
        return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if tuple in (kind, origin):
        element = _element_of(kind)
        return isinstance(value, tuple) and all(_fits(item, element) for item in value)
    return True


def _element_of(kind: object) -> object:
    """Returns the type of the elements of tuple[X, ...]; object of another tuple."""
    elements = typing.get_args(kind)
    return elements[0] if len(elements) == 2 and elements[1] is ... else object


def ranges_of(kind: object) -> list[Range]:
    """Returns the ranges in an annotation, such as Annotated[float, Range(low=0)] | None."""
    if typing.get_origin(kind) is typing.Annotated:
        return [item for item in kind.__metadata__ if isinstance(item, Range)]
    return [bounds for inner in typing.get_args(kind) for bounds in ranges_of(inner)]


_EXAMPLES = {bool: "True", int: "1", float: "0.5", str: "'text'", tuple: "(1, 2)"}


def signature_of(function: Callable) -> inspect.Signature:
    """Returns the signature with annotations as what they name, also where the module keeps them as
    texts (`from __future__ import annotations`)."""
    try:
        return inspect.signature(function, eval_str=True)
    except (NameError, AttributeError, SyntaxError):  # a name that type checkers alone import
        return inspect.signature(function)


def _shown_signature(signature: inspect.Signature) -> inspect.Signature:
    """The signature as an error shows it: with types, without ranges."""
    plain = [p.replace(annotation=plain_kind(p.annotation)) for p in signature.parameters.values()]
    return signature.replace(parameters=plain)


def _check_option(
    component: str, option: str, value: object, kind: object, default: object
) -> None:
    """Raises InputError unless a value fits the annotation of its option: type and range."""
    if _fits(value, kind):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        for bounds in ranges_of(kind) if number else ():
            if rule := bounds.problem(value):
                usual = "" if default is inspect.Parameter.empty else f", such as {default!r}"
                fix = f"a number in that range{usual}"
                subject = f"option {option!r} of {component}"
                raise InputError(subject, value=value, rule=rule, fix=fix)
        return
    rule, example = _kind_and_example(plain_kind(kind), value)
    fix = f"{option}={example}, or another such value"
    raise InputError(f"option {option!r} of {component}", value=value, rule=rule, fix=fix)


def _kind_and_example(kind: object, value: object) -> tuple[str, str]:
    """Returns the rule for values of a type, and one that fits it: of a tuple with `value` as its
    element where that fits, as if its comma had been forgotten."""
    if typing.get_origin(kind) is typing.Literal:
        choices = list(map(repr, typing.get_args(kind)))
        return f"it is one of {', '.join(choices)}", choices[0]
    inner = (kind, *typing.get_args(kind))
    tuples = [k for k in inner if tuple in (k, typing.get_origin(k))]
    element = plain_kind(_element_of(tuples[0])) if tuples else object
    if element is not object:
        example = repr(value) if _fits(value, element) else _EXAMPLES.get(element, "None")
        name = getattr(element, "__name__", str(element).replace("typing.", ""))
        return f"must be a tuple of {name}, with a comma behind each", f"({example},)"
    name = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
    kinds = [*inner, typing.get_origin(kind)]
    return f"must be {name}", next((x for base, x in _EXAMPLES.items() if base in kinds), "None")


class Component:
    """A function with its options bound, equal and hashed by its text, so that it can be a static
    jit argument."""

    def __init__(self, text: str, home: str):
        self.text = text.strip()
        self.home = home
        self.name, options = parse_component(self.text)
        self.options = dict(options)
        self.function = _import(self.name, home)
        try:
            self.signature = signature = signature_of(self.function)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{self.name} has no signature", rule=str(error), fix="wrap it in a function"
            ) from None
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        unknown = [] if takes_any else [o for o in self.options if o not in signature.parameters]
        if unknown:
            close = near_names(unknown[0], list(signature.parameters), 1)
            rule = f"its signature is {self.name}{_shown_signature(signature)}"
            fix = f"did you mean {close[0]!r}?" if close else "remove it"
            raise InputError(f"{self.name} has no option {unknown[0]!r}", rule=rule, fix=fix)
        self.parameters = tuple(signature.parameters)
        self.positional = tuple(  # what its stage hands it
            name
            for name, p in signature.parameters.items()
            if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty
        )
        for option, value in self.options.items():
            if option in signature.parameters:
                parameter = signature.parameters[option]
                _check_option(self.name, option, value, parameter.annotation, parameter.default)

    @property
    def short_name(self) -> str:
        """Name of the function itself, without module or file."""
        return re.split(r"[.:]", self.name)[-1]

    def defaults(self) -> dict[str, object]:
        """Returns {option: default} of the options that have one."""
        parameters = self.signature.parameters.items()
        return {name: p.default for name, p in parameters if p.default is not p.empty}

    def numbers(self) -> dict[str, float]:
        """Returns {option: number} of the options that may be any number, without those that are 0.
        An option of whole numbers is none; without an annotation the value says of which kind it
        is."""
        out = {}
        for name, value in {**self.defaults(), **self.options}.items():
            parameter = self.signature.parameters.get(name)
            kind = inspect.Parameter.empty if parameter is None else parameter.annotation
            kind = type(value) if kind is inspect.Parameter.empty else plain_kind(kind)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and value and float in (kind, *typing.get_args(kind)):
                out[name] = float(value)
        return out

    def with_options(self, options: dict[str, object]) -> "Component":
        """Returns the component with other values of these options, unchecked. It equals this one:
        its text is the same."""
        changed = copy.copy(self)
        changed.options = {**self.options, **options}
        return changed

    def __call__(self, *args, **kwargs):
        return self.function(*args, **{**kwargs, **self.options})

    def __eq__(self, other):
        return isinstance(other, Component) and (self.text, self.home) == (other.text, other.home)

    def __hash__(self):
        return hash((self.text, self.home))

    def __repr__(self):
        return f"Component({self.text!r})"


def resolve(text: str, home: str) -> Component:
    """Returns the component that `text` names; bare names are looked up in module `home`. Raises
    InputError for a name that is unknown, a module that cannot be imported, and options that the
    function lacks or that do not fit."""
    if not isinstance(text, str):
        raise InputError("a component is text", value=text, fix='write "name(option=value)"')
    return Component(text, home)
