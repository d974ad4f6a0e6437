"""docs/methods/ppo_details.md and docs/methods/references.md say what is there."""

import ast
import functools
import operator
import re

import pytest
from conftest import REPO

from rljax.components import resolve
from rljax.config import NAMESPACES, Config

_SECTIONS = "|".join(k for k, value in vars(Config()).items() if hasattr(value, "__dict__"))
METHODS = REPO / "docs" / "methods"
DETAILS = (METHODS / "ppo_details.md").read_text()
REFERENCES = (METHODS / "references.md").read_text()
_ARXIV = re.compile(r"(?<![\d.])(?:0[7-9]|1\d|2[0-6])(?:0[1-9]|1[0-2])\.\d{5}(?!\d)")

# The sources of the lecture, in its order.
TWENTY = (
    "Supervised Learning of Behaviors",
    "When Speed Kills Stability",
    "Nature 550",
    "2508.01329",
    "Sutton and Barto",
    "1506.02438",
    "2402.03300",
    "2402.14740",
    "2501.03262",
    "2410.01679",
    "1707.06347",
    "2503.14476",
    "2506.13585",
    "2507.18071",
    "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
    "2510.26788",
    "2505.24298",
    "2509.19128",
    "2510.13786",
    "2503.04697",
)


def names_of(file) -> set[str]:
    """What a module defines at its top level."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        targets = getattr(node, "targets", [])
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    part = page.split(f"\n## {heading}")[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def test_all_details_are_there_and_each_has_an_answer():
    numbers = []
    for heading in (
        "Thirteen core",
        "Nine details of Atari",
        "Nine details of cont",
        "Five detail",
    ):
        rows = rows_of(DETAILS, heading)
        assert all(len(row) == 4 and all(row) for row in rows), heading
        numbers += [int(row[0]) for row in rows]
    assert numbers == list(range(1, 38))
    rows = rows_of(DETAILS, "Twenty details")
    assert [int(row[0]) for row in rows] == list(range(1, 21))
    assert len(rows_of(DETAILS, "Four that")) == 4


def test_each_file_and_function_that_the_details_name_exists():
    places = re.findall(r"`((?:rljax|configs)/[\w/]+\.py)(?::(\w+))?`", DETAILS)
    assert len(places) > 30
    lost = [p for p, name in places if not (REPO / p).exists()]
    lost += [(p, n) for p, n in places if n and n not in names_of(REPO / p)]
    assert lost == []


def test_each_config_field_that_the_details_name_exists():
    fields = re.findall(rf"`((?:{_SECTIONS})\.\w+)\b[^`]*`", DETAILS)
    assert len(set(fields)) > 25
    for field in fields:
        operator.attrgetter(field)(Config())


@functools.cache
def arxiv_numbers(folder: str) -> dict[str, str]:
    """{number: a file that names it} of all sources in a folder."""
    found = {}
    for file in sorted((REPO / folder).rglob("*.py")):
        for number in _ARXIV.findall(file.read_text()):
            found.setdefault(number, str(file.relative_to(REPO)))
    return found


@pytest.mark.parametrize("folder", ["rljax", "configs"])
def test_every_paper_of_the_sources_is_in_the_bibliography(folder):
    listed = set(_ARXIV.findall(REFERENCES))
    named = arxiv_numbers(folder)
    assert len(named) > 30
    assert {n: file for n, file in named.items() if n not in listed} == {}


def test_the_bibliography_lists_no_paper_twice_and_twenty_to_begin_with():
    parts = REFERENCES.split("\n## ")
    tables = "".join(p for p in parts if not p.startswith("Further reading"))
    numbers = _ARXIV.findall(tables)
    assert sorted(set(numbers)) == sorted(numbers)
    assert [int(row[0]) for row in rows_of(REFERENCES, "Twenty")] == list(range(1, 21))
    words = [row[1] for row in rows_of(REFERENCES, "Twenty")]
    for row, sign in zip(words, TWENTY, strict=True):
        assert sign in row, row
    for work in ("Sutton", "Spinning Up", "37 Implementation Details", "Art of Scaling"):
        assert work in REFERENCES.split("\n## Further reading")[1].split("\n## ")[0], work


def test_methods_that_are_not_built_in_say_where_they_would_go():
    rows = rows_of(REFERENCES, "Not built in")
    for name in ("RM-R1", "RL-PLUS", "PACS"):
        (place,) = (where for _, work, where in rows if name in work)
        links = re.findall(r"\]\(([\w./]+\.md)\)", place)
        assert any("extend/" in link for link in links)
        assert all((METHODS / link).is_file() for link in links), name


def test_what_the_bibliography_says_is_here_exists():
    """A part by name after its kind, a preset, or a field of the config."""
    kinds = {
        "loss": ("policy_loss", "preference_loss"),
        "losses": ("policy_loss",),
        "advantage": ("advantage",),
        "reward": ("reward",),
        "dataflow": ("dataflow",),
        "optimizer": ("optimizer",),
        "schedule": ("schedule",),
        "search": ("search",),
        "correction": ("correction",),
    }
    named = re.findall(rf"\b({'|'.join(kinds)}) `(\w+)`", REFERENCES)
    assert len(named) > 40
    for kind, name in named:
        homes = [NAMESPACES[home] for home in kinds[kind]]
        assert any(_resolves(name, home) for home in homes), (kind, name)
    for names in re.findall(r"\bpreset `(\w+)`|\bpresets `(\w+)`, `(\w+)`", REFERENCES):
        assert all((REPO / f"configs/presets/{n}.py").exists() for n in names if n), names
    for field in re.findall(rf"`((?:{_SECTIONS})\.\w+)\b", REFERENCES):
        operator.attrgetter(field)(Config())


def _resolves(name: str, home: str) -> bool:
    try:
        return resolve(name, home) is not None
    except ValueError:
        return False
