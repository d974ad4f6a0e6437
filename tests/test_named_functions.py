"""Every function that a config can name is called or named by some test: a new one is noticed."""

import ast
import functools
import re

import pytest
from conftest import HERE, REPO

from rljax.config import NAMESPACES
from rljax.config.checks import components_of

CALL = re.compile(r"(?:^|[^\w.])(\w+)\(|^(\w+)$")  # in a text such as "mixture(rewards=('a()',))"


def names(path) -> set[str]:
    """What the code of a file names: imports, attributes, and texts that a config would hold."""
    tree, found = ast.parse(path.read_text()), set()
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in prose:
                found |= {a or b for a, b in CALL.findall(node.value)}
    return found


# What a page or the role table names itself runs in the tests of every page that has it.
DECLARED = [
    *(REPO / "rljax" / "dataflows").glob("*.py"),
    REPO / "rljax" / "setup" / "role_table.py",
]


@functools.cache
def in_tests() -> set[str]:
    return set().union(*(names(path) for path in [*HERE.glob("*/**/*.py"), *DECLARED]))


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_every_function_is_tested(namespace):
    found = components_of(NAMESPACES[namespace])
    assert found
    lacking = [name for name in found if name not in in_tests()]
    assert not lacking, f"no test calls {lacking} of {NAMESPACES[namespace]}"


def test_what_counts_as_a_test(tmp_path):
    (tmp_path / "a.py").write_text(
        '"""gsm8k() is prose."""\n'
        "from rljax.rewards import boxed\n"
        "text = \"mixture(rewards=('dapo()',))\"\n"
        'rewards.choice("a")\n'
        "# judge()\n"
        'name = "exact_match"\n'
    )
    assert names(tmp_path / "a.py") == {"boxed", "mixture", "dapo", "choice", "exact_match", "a"}
