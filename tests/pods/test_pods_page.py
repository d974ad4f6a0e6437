"""docs/pods: the exit codes that a page calls worth a restart are those that are restarted."""

import re

from conftest import REPO

from rljax.pods.supervise import RESTARTS

PAGE = (REPO / "docs" / "pods" / "preemption.md").read_text(encoding="utf-8")


def test_exit_codes_are_those_that_are_started_again():
    rows = re.findall(r"^\| ([\d, ]+) \|.*\| (yes|no)\b.*\|$", PAGE, re.MULTILINE)
    codes = {int(code): word for row, word in rows for code in row.split(",")}
    assert {code for code, word in codes.items() if word == "yes"} == set(RESTARTS)
