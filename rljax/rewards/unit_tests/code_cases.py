"""Finds what asserts in Python source of unit tests, and what a runner of tests would call in it.

A definition that nothing calls tests nothing. Test functions and classes are therefore found by the
names that pytest and unittest go by, and each gets a line that runs it; that line is carried out by
`rljax.rewards.sandbox.cases`. What asserts nothing is part of the test behind it.
"""

import ast
import builtins
import importlib.machinery
import re
import symtable
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rljax.errors import InputError

RUN_CASE = "__run_case__"  # the name in the tests of what runs a case
# Modules that stand for the program in tests that import from it (KodCode: from solution import f).
PROGRAM_MODULES = frozenset(
    ("solution", "main", "__main__", "program", "submission", "your_module", "my_module")
)

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Calls that raise by themselves, by the end of their name.
_ASSERTION = re.compile(r"assert\w*|fail|raises\w*|warns|_?exit|quit|exec")
_SETUPS = ("setup_module", "teardown_module", "setup_function", "teardown_function")
# Marks of cases that their author takes out.
_LEFT_OUT = ("skip", "xfail", "expectedFailure")


@dataclass
class _Uses:
    """The effect of a piece of source: whether it asserts by itself, the names that it calls, and
    all names in its calls."""

    asserts: bool = False
    called: set[str] = field(default_factory=set)
    named: set[str] = field(default_factory=set)


def _uses(nodes: Iterable[ast.AST]) -> _Uses:
    """Reads nodes without the bodies of the functions that they only define."""
    uses = _Uses()
    stack = [(node, False) for node in nodes]
    while stack:
        node, in_call = stack.pop()
        children: Iterable[ast.AST] = ast.iter_child_nodes(node)
        if isinstance(node, ast.Assert):
            # assert (f(1) == 2, "why") is true, whatever f returns.
            uses.asserts |= not isinstance(node.test, ast.Tuple) and not _is_true(node.test)
        elif isinstance(node, ast.Raise):
            uses.asserts = True
        elif isinstance(node, ast.Call):
            in_call = True
            uses.asserts |= bool(_ASSERTION.fullmatch(_last_name(node)))
            if isinstance(node.func, ast.Name):
                uses.called.add(node.func.id)
        elif isinstance(node, ast.Name | ast.Attribute) and in_call:
            uses.named.add(_last_name(node))
        elif isinstance(node, Function):
            defaults = [*node.args.defaults, *(d for d in node.args.kw_defaults if d)]
            children = [*node.decorator_list, *defaults]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            children = ()
        stack += [(child, in_call) for child in children]
    return uses


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and bool(node.value)


def _last_name(node: ast.AST) -> str:
    """Returns the last part of a dotted name; for a call, that of the function that is called."""
    node = node.func if isinstance(node, ast.Call) else node
    return getattr(node, "attr", getattr(node, "id", ""))


class Definitions:
    """The names that tests define, and which of them assert when they are used. `uses` has what
    each name does, `mentioned` the names in all calls, `fixtures` the functions that `prepare` has
    seen to be fixtures, with whether each is used without being asked for."""

    def __init__(self, body: Sequence[ast.stmt]):
        self.classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
        self.uses: dict[str, list[_Uses]] = defaultdict(list)
        self.fixtures: dict[Function, bool] = {}
        self.mentioned = _uses(body).named
        for node in ast.walk(ast.Module(list(body), [])):
            if isinstance(node, Function):
                self.uses[node.name].append(_uses(node.body))
                self.mentioned |= self.uses[node.name][-1].named
            elif isinstance(node, ast.ClassDef):
                # A runner that a class of unittest is handed to raises nothing.
                methods = {n.name for n in node.body if isinstance(n, Function)}
                methods = set() if self.is_test_case(node) else methods
                bases = {_last_name(base) for base in node.bases}
                self.uses[node.name].append(_Uses(named=methods | bases))
            elif isinstance(node, ast.Assign | ast.For | ast.comprehension | ast.NamedExpr):
                self._hold(node)
        users = defaultdict(list)
        for name, uses in self.uses.items():
            for used in {used for use in uses for used in use.named}:
                users[used].append(name)
        self._asserting: set[str] = set()
        stack = [name for name, uses in self.uses.items() if any(use.asserts for use in uses)]
        while stack:
            name = stack.pop()
            if name not in self._asserting:
                self._asserting.add(name)
                stack += users[name]

    def _hold(self, node: ast.AST) -> None:
        """Records that a variable asserts where it is used if its value does:
        `for t in (a, b): t()`."""
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        value = node.value if isinstance(node, ast.Assign | ast.NamedExpr) else node.iter
        names = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
        for target in targets:
            for name in ast.walk(target):
                if isinstance(name, ast.Name):
                    self.uses[name.id].append(_Uses(named=names))

    def assert_in(self, nodes: Iterable[ast.AST]) -> bool:
        """Returns whether something is asserted when the nodes run."""
        uses = _uses(nodes)
        return uses.asserts or not uses.named.isdisjoint(self._asserting)

    def called_by(self, nodes: Iterable[ast.AST]) -> set[str]:
        """Returns the names that are called when the nodes run, also by functions defined here."""
        names: set[str] = set()
        stack = list(_uses(nodes).called)
        while stack:
            name = stack.pop()
            if name not in names:
                names.add(name)
                stack += [called for uses in self.uses.get(name, ()) for called in uses.called]
        return names

    def uncalled(self, body: Sequence[ast.stmt], called: set[str]) -> list[str]:
        """Returns the functions of a body that assert, except for those that are `called`."""
        functions = (node.name for node in body if isinstance(node, Function))
        return [name for name in functions if name in self._asserting - called]

    def is_test_case(self, node: ast.ClassDef) -> bool:
        """Returns whether a class extends unittest.TestCase."""
        return any(_last_name(b).endswith("TestCase") for c in self.line(node) for b in c.bases)

    def line(self, node: ast.ClassDef) -> Iterator[ast.ClassDef]:
        """Yields a class and the classes defined here that it extends."""
        names, stack = set(), [node]
        while stack:
            current = stack.pop(0)
            if current.name not in names:
                names.add(current.name)
                yield current
                bases = map(_last_name, current.bases)
                stack += [self.classes[name] for name in bases if name in self.classes]


# -- what a runner does with the source


class _Prepared(ast.NodeTransformer):
    """Source as the line that runs a case needs it: fixtures are plain functions, and nothing
    starts a runner, which would look for files."""

    def __init__(self, known: Definitions):
        self.known, self.changed = known, False

    def _without_runner(self, node: ast.stmt) -> ast.stmt:
        if not _starts_a_runner(node):
            return node
        self.changed = True
        return ast.copy_location(ast.Pass(), node)

    visit_Expr = visit_Assign = visit_Raise = visit_Return = _without_runner

    def visit_FunctionDef(self, node: Function) -> ast.stmt:
        fixture_marks = [d for d in node.decorator_list if _last_name(d) == "fixture"]
        if fixture_marks:
            self.changed = True
            self.known.fixtures[node] = _is_autouse(node, fixture_marks)
            node.decorator_list = [d for d in node.decorator_list if d not in fixture_marks]
        return self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Visits statements alone: expressions may be nested deeper than calls."""
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            if isinstance(inner := getattr(node, name, None), list):
                inner[:] = map(self.visit, inner)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        if not node.level:
            return node
        self.changed = True
        if node.module:  # from .solution import f
            return ast.copy_location(ast.ImportFrom(node.module, node.names, 0), node)
        return ast.copy_location(ast.Import(node.names), node)


def _is_autouse(node: Function, decorators: Sequence[ast.expr]) -> bool:
    options = {k.arg: k.value for d in decorators for k in getattr(d, "keywords", ())}
    if unknown := {"params", "name"} & options.keys():
        raise _cannot_run(node.name, f"it is a fixture with {min(unknown)}=")
    if isinstance(node, ast.AsyncFunctionDef):
        raise _cannot_run(node.name, "it is an async fixture")
    return _is_true(options.get("autouse", ast.Constant(False)))


def _starts_a_runner(node: ast.AST) -> bool:
    return any(
        isinstance(n, ast.Call)
        and isinstance(n.func, ast.Attribute)
        and n.func.attr == "main"
        and getattr(n.func.value, "id", "") in ("unittest", "pytest")
        for n in ast.walk(node)
    )


def _is_main_block(node: ast.stmt) -> bool:
    if not (isinstance(node, ast.If) and isinstance(node.test, ast.Compare)):
        return False
    sides = [node.test.left, *node.test.comparators]
    return {"__name__", "__main__"} == {getattr(s, "id", getattr(s, "value", "")) for s in sides}


def prepare(body: Sequence[ast.stmt], known: Definitions) -> tuple[list[ast.stmt], bool]:
    """The statements as they are run, and whether that differs from what was given. A block for
    __main__ runs where it asserts; one that starts a runner is left out: its tests are the cases.
    Raises InputError for a fixture that cannot be run."""
    statements, changed = [], False
    for node in body:
        if _is_main_block(node):
            changed = True
            runs = known.assert_in(node.body) and not any(map(_starts_a_runner, node.body))
            statements += node.body if runs else []
        else:
            statements.append(node)
    transformer = _Prepared(known)
    statements = [transformer.visit(node) for node in statements]
    return statements, changed or transformer.changed


# -- cases


@dataclass(frozen=True)
class Case:
    """A test function or method: its definition with the line that runs it, and whether it asserts
    something."""

    source: str
    asserts: bool


def cases_in(
    setup: Sequence[ast.stmt], body: Sequence[ast.stmt], known: Definitions, called: set[str]
) -> list[Case]:
    """The test functions and classes of prepared statements behind a `setup`, but for functions
    that are `called` anyway. Raises InputError for one that cannot be run."""
    fixtures = _fixtures([*setup, *body], known)
    cases = []
    for node in body:
        if isinstance(node, Function) and node.name.startswith("test"):
            if node not in known.fixtures and node.name not in called:
                cases += _function_case(node, known, fixtures)
        elif isinstance(node, ast.ClassDef):
            cases += _class_cases(node, node, node.name, known, fixtures)
    return cases


def _fixtures(body: Sequence[ast.stmt], definitions: Definitions) -> dict[str, bool]:
    return {node.name: definitions.fixtures[node] for node in body if node in definitions.fixtures}


def _function_case(
    node: Function, definitions: Definitions, fixtures: dict[str, bool]
) -> list[Case]:
    if _is_left_out(node):
        return []
    required, missing = _parameters(node, node.decorator_list, fixtures)
    if missing and node.name in definitions.mentioned:
        return []  # a helper of tests
    if missing:
        raise _cannot_run(node.name, f"nothing here gives its argument {missing!r}")
    harness = required or node.decorator_list or any(fixtures.values())
    call = f"{node.name}()"
    if harness or any(name in definitions.uses for name in _SETUPS):
        call = _run_line(node.name, fixtures)
    elif isinstance(node, ast.AsyncFunctionDef):
        call = f"import asyncio\nasyncio.run({call})"
    return [Case(f"{ast.unparse(node)}\n{call}", definitions.assert_in(node.body))]


def _class_cases(
    outer: ast.ClassDef,
    node: ast.ClassDef,
    path: str,
    definitions: Definitions,
    fixtures: dict[str, bool],
) -> list[Case]:
    is_unittest = definitions.is_test_case(node)
    if not (is_unittest or node.name.startswith("Test")) or _is_left_out(node):
        return []
    methods: dict[str, Function] = {}
    module_fixtures = fixtures
    for ancestor in definitions.line(node):
        fixtures = fixtures | _fixtures(ancestor.body, definitions)
        for method in ancestor.body:
            if isinstance(method, Function):
                methods.setdefault(method.name, method)
    cases, source = [], ast.unparse(outer)
    for name, method in methods.items():
        if not name.startswith("test") or method in definitions.fixtures or _is_left_out(method):
            continue
        if not is_unittest:
            if "__init__" in methods:
                raise _cannot_run(path, "its class has an __init__")
            static = any(_last_name(d) == "staticmethod" for d in method.decorator_list)
            marks = [*node.decorator_list, *method.decorator_list]
            _, missing = _parameters(method, marks, fixtures, skipped=0 if static else 1)
            if missing and name in definitions.mentioned:
                continue
            if missing:
                raise _cannot_run(f"{path}.{name}", f"nothing here gives its argument {missing!r}")
        line = _run_line(f"{path}.{name}", {} if is_unittest else fixtures)
        cases.append(Case(f"{source}\n{line}", definitions.assert_in(method.body)))
    for inner in node.body:
        if isinstance(inner, ast.ClassDef) and not is_unittest:
            inside = _class_cases(
                outer, inner, f"{path}.{inner.name}", definitions, module_fixtures
            )
            if inside and fixtures != module_fixtures:
                raise _cannot_run(path, "it has fixtures and a class in it")
            cases += inside
    return cases


def _run_line(path: str, fixtures: dict[str, bool]) -> str:
    always = [name for name, autouse in fixtures.items() if autouse]
    return f"{RUN_CASE}({', '.join(map(repr, [path, *always]))})"


def _is_left_out(node: Function | ast.ClassDef) -> bool:
    return any(_last_name(d) in _LEFT_OUT for d in node.decorator_list)


def _parameters(
    node: Function, decorators: Sequence[ast.expr], fixtures: dict[str, bool], skipped: int = 0
) -> tuple[list[str], str]:
    """Returns the names that a test asks for, and one of them that nothing provides, else ""."""
    available, any_name = set(fixtures), False
    names: list[str] = []
    for decorator in decorators:
        kind = _last_name(decorator)
        if kind == "given":  # hypothesis hands a function its arguments
            any_name = True
        elif kind == "usefixtures" and isinstance(decorator, ast.Call):
            names += [arg.value for arg in decorator.args if isinstance(arg, ast.Constant)]
        elif kind == "parametrize" and isinstance(decorator, ast.Call):
            options = {k.arg: k.value for k in decorator.keywords}
            if "indirect" in options:
                raise _cannot_run(node.name, "its parametrize has indirect=")
            argnames = decorator.args[0] if decorator.args else options.get("argnames")
            try:
                argnames = ast.literal_eval(argnames)
                argnames = argnames.split(",") if isinstance(argnames, str) else argnames
                available |= {name.strip() for name in argnames}
            except (ValueError, TypeError, AttributeError):
                any_name = True  # names that the tests work out
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = positional[: len(positional) - len(arguments.defaults)][skipped:]
    required += [
        a for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if not d
    ]
    names += [argument.arg for argument in required]
    return names, next((name for name in names if name not in available and not any_name), "")


def _cannot_run(name: str, why: str) -> InputError:
    return InputError(
        f"the unit test {name!r} cannot be run",
        rule=f"{why}; tests are asserts, functions and methods test_..., whose arguments are of a "
        "parametrize or of fixtures beside them, and check(candidate) with an entry_point",
        fix="write it as asserts, or as a function without arguments",
    )


# -- names and modules


def names_of(sources: Sequence[str], function: str) -> tuple[list[str], list[str]]:
    """The names that tests take from the program, used but not their own nor Python's, and the
    modules that stand for it.

    If there is no such name the tested function hides one of Python's, as MBPP's `sum`: then it is
    the first that a test calls.
    """
    used, defined, imported, called = {}, {RUN_CASE: None}, {}, []
    modules: dict[str, None] = {}
    for source in sources:
        _global_names(symtable.symtable(source, "tests.py", "exec"), used, defined)
        nodes = list(ast.walk(ast.parse(source)))
        aliases = set()
        for node, module, names in _imports(nodes):
            if not _is_the_program(module, names, function):
                continue
            modules[module] = None
            if isinstance(node, ast.ImportFrom):
                imported |= dict.fromkeys(name for name in names if name != "*")
            else:
                aliases |= {a.asname or a.name for a in node.names if a.name == module}
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called.append(node.func.id)
            elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in aliases:
                imported[node.attr] = None
    names = [n for n in used if n not in defined and not hasattr(builtins, n)]
    names = list(dict.fromkeys([*names, *imported]))
    if function and (names or called):
        names = list(dict.fromkeys([*names, function]))
    return names or called[:1], list(modules)


def _global_names(table: symtable.SymbolTable, used: dict, defined: dict) -> None:
    """Adds the names that a scope and those in it read from the module, and those that they set
    there."""
    stack = [table]
    while stack:
        scope = stack.pop()
        stack += scope.get_children()
        for symbol in scope.get_symbols():
            is_module_name = scope.get_type() == "module" or symbol.is_global()
            if is_module_name and (symbol.is_assigned() or symbol.is_imported()):
                defined[symbol.get_name()] = None
            elif is_module_name and symbol.is_referenced():
                used[symbol.get_name()] = None


def _imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.stmt, str, list[str]]]:
    """Yields (statement, module, names taken from it) of each import."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            yield node, node.module or "", [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from ((node, alias.name, []) for alias in node.names)


def _is_the_program(module: str, names: Sequence[str], function: str) -> bool:
    if not PROGRAM_MODULES.isdisjoint(module.split(".")):
        return True
    return function in names and not _is_installed(module.partition(".")[0], None)


def _is_installed(root: str, path: Sequence[str] | None) -> bool:
    """Returns whether there is a module or package of that name. Nothing is imported."""
    if root in sys.stdlib_module_names:
        return True
    return importlib.machinery.PathFinder.find_spec(root, path) is not None


def check_imports(sources: Sequence[str], function: str, path: Sequence[str]) -> None:
    """Raises InputError if tests import what is not installed on `path`: they would fail every
    program. What stands in a `try` may be missing."""
    nodes: list[ast.AST] = []
    stack: list[ast.AST] = [ast.parse(source) for source in sources]
    while stack:
        node = stack.pop()
        if not isinstance(node, ast.Try):
            nodes.append(node)
            stack += ast.iter_child_nodes(node)
    for _, module, names in _imports(nodes):
        root = module.partition(".")[0]
        if not (_is_the_program(module, names, function) or _is_installed(root, path)):
            raise InputError(
                f"unit tests import {module!r}, which is not installed",
                rule="they would fail every program",
                fix=f"pip install {root}; if it stands for the program, write `from solution "
                "import ...`",
            )
