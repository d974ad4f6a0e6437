"""What guides/errors.md lists: every InputError of the source, read with ast, and the rules of
config fields, which are declared beside them or which the checks of a config state."""

import ast
import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path

from rljax.config.schema import FIELDS

GAP = "…"  # what is only known where the error is raised
KINDS = {
    *("InputError", "UnknownField", "Unreadable", "HostsLate", "UnknownModel"),
    *("Damaged", "UnfilledFields"),
}


@dataclasses.dataclass(frozen=True, order=True)
class Listed:
    """An error: its first words, its rule and its fix, as far as the source says them."""

    what: str
    rule: str
    fix: str


def listed_errors(package: Path) -> dict[str, list[Listed]]:
    """{room: its errors, sorted}, of every file of a package. Errors without any word of their own,
    such as one that passes on the text of another, are left out."""
    rooms: dict[str, set[Listed]] = {}
    for file in sorted(package.rglob("*.py")):
        room = file.relative_to(package).parts[0].removesuffix(".py")
        rooms.setdefault(room, set()).update(_of_file(file.read_text(encoding="utf-8")))
    rooms.setdefault("config", set()).update(_declared())
    return {room: sorted(errors) for room, errors in rooms.items() if errors}


def _declared() -> list[Listed]:
    """The rules that are declared beside fields of the config."""
    found = []
    for name, spec in FIELDS.items():
        rule = spec.rule or spec.problem(GAP) or spec.problem(math.nan)
        if rule != "must be finite":
            found.append(Listed(name, rule, spec.fix_of(name, GAP)))
    return found


def _of_file(source: str) -> list[Listed]:
    found = []

    def visit(node: ast.AST, scopes: list) -> None:
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
            scopes = [*scopes, node]
        if isinstance(node, ast.Call):  # a name is what it was set to last, as the text goes
            found.extend(_error(node, lambda: _known(scopes, node.lineno)))
        for child in ast.iter_child_nodes(node):
            visit(child, scopes)

    visit(ast.parse(source), [])
    return found


def _known(scopes: list, line: int) -> dict[str, ast.expr]:
    """What the names of scopes, the outermost first, are set to before a line."""
    return {n: v for scope in scopes for at, n, v in _assigned(scope) if at < line}


def _assigned(scope: ast.AST) -> list[tuple[int, str, ast.expr]]:
    """(line, name, what it is set to) in the order of lines, also of `a, b = 1, 2`; of a module
    what it sets at its top level."""
    out = []
    for node in scope.body if isinstance(scope, ast.Module) else ast.walk(scope):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                if isinstance(name, ast.Name):
                    out.append((node.lineno, name.id, value))
    return sorted(out, key=lambda item: item[0])


def _error(node: ast.Call, known: Callable[[], dict[str, ast.expr]]) -> list[Listed]:
    """The error of one call, if it is one and says something; `known` are the names around it."""
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    given = {word.arg: word.value for word in node.keywords if word.arg}
    if name in KINDS and node.args:
        parts = [node.args[0], given.get("rule"), given.get("fix")]
    # Problems.check(ok, field, value, rule, fix), ConfigProblems.check_field(ok, field, rule, fix)
    elif (first := {"check": 3, "check_field": 2}.get(method)) and len(node.args) > first:
        fix = node.args[first + 1] if len(node.args) > first + 1 else given.get("fix")
        parts = [node.args[1], node.args[first], fix]
    else:
        return []
    names = known()
    what, rule, fix = (_text(part, names) if part is not None else "" for part in parts)
    return [Listed(what, rule, fix)] if re.search(r"\w\w", what) else []


def _text(node: ast.expr, known: dict[str, ast.expr], depth: int = 0) -> str:
    """The text of an expression, with a gap for what only a run knows."""

    def again(part):
        return _text(part, known, depth + 1)

    if depth > 8:
        return GAP
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else GAP
    if isinstance(node, ast.JoinedStr):
        text = "".join(again(part) for part in node.values)
    elif isinstance(node, ast.FormattedValue):
        text = again(node.value) if isinstance(node.value, ast.Constant) else GAP
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        text = again(node.left) + again(node.right)
    elif isinstance(node, ast.IfExp):
        text = again(node.body)
    elif isinstance(node, ast.BoolOp):
        text = again(node.values[-1])
    elif isinstance(node, ast.Name) and node.id in known:
        text = again(known[node.id])
    else:
        text = GAP
    return re.sub(f"{GAP}[{GAP}\\s]*{GAP}", GAP, text)
