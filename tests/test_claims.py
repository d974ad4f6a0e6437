"""docs/claims.md: every claim has a row with a verdict, and what a row cites is there."""

import re

import pytest
from conftest import REPO

from rljax.command.commands import COMMANDS

PAGE = REPO / "docs" / "claims.md"
# The rows of our list of claims, and four rows beside them that say how a claim is looked at.
ROWS = """
000-02 000-04 000-07 000-08 000-17 000-19 000-20 000-25 000-32 000-33 000-34 000-47 000-48 000-49
000-50 000-57 000-78 001-01 001-03 001-05 001-08 001-09 001-12 001-14 001-20 001-21 001-32 001-36
001-38 001-39 001-40 001-44 001-45 001-46 001-48 001-60 001-62 001-65 002-14 002-15 002-16 002-17
002-19 003-42 003-43 003-44 003-80 003-93 003-94 003-95 004-03 004-04 004-05 004-06 004-11 004-13
004-21 004-28 004-32 004-34 004-38 004-41 004-46 004-51 004-53 004-68 004-69 004-70
000-03 000-13 000-37 001-24 001-25 003-28 003-38 003-39 003-46 003-48 004-20 004-35 004-37 004-61
""".split()
VERDICTS = {"holds", "partly", "not shown", "not tried", "reference"}
TESTS = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
FILES = re.compile(r"(?:benchmarks|configs|notebooks|docs|launchers)/[\w/]+\.(?:py|ipynb|md)")
CALLED = re.compile(r"`rljax ([a-z_]+)")


def rows() -> dict[str, list[str]]:
    """{row: [claim and source, what was measured, verdict]}."""
    lines = [line for line in PAGE.read_text().splitlines() if re.match(r"\| \d{3}-\d\d ", line)]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len({row for row, *_ in cells}) == len(cells), "a row stands twice"
    assert all(len(row) == 4 for row in cells)
    return {row: rest for row, *rest in cells}


def test_every_claim_has_a_row():
    assert sorted(rows()) == sorted(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_says_what_was_measured_or_why_nothing_was(row):
    claim, measured, verdict = rows()[row]
    assert claim and measured and verdict in VERDICTS
    if verdict in ("holds", "partly", "not shown"):  # by a test, a command, or another row's
        cites = TESTS.search(measured) or FILES.search(measured) or CALLED.search(measured)
        assert cites or re.search(r"[Tt]he same|same run|row \d{3}-\d\d", measured)
    if verdict == "not tried":
        assert re.search(r"not tried|need|other software", measured)


def test_what_is_cited_exists():
    text = PAGE.read_text()
    cited = TESTS.findall(text)
    assert len(cited) > 40
    for file, name in cited:
        assert re.search(rf"^ *def {name}\(", (REPO / file).read_text(), re.M), f"{file}::{name}"
    for file in FILES.findall(text):
        assert (REPO / file).is_file(), file
    for name in CALLED.findall(text):
        assert name in COMMANDS, name
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (PAGE.parent / link).is_file(), link
    assert set(re.findall(r"\brow (\d{3}-\d\d)", text)) <= set(ROWS)
