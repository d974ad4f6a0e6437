"""Finds tests that cost much and reach no line of rljax that a cheaper one does not reach:

pip install coverage
export PYTHONPATH=tests/helpers LANE_SECONDS=SECONDS LANE_LINES=LINES
python -m pytest -p lane_seconds -p lane_lines
python tests/helpers/lane_lines.py SECONDS LINES

The first run writes down the lines that each test executes, in one file of LINES for each worker;
the lane takes half again as long. The second prints these tests with their CPU seconds and those of
their child processes, the most expensive first: candidates for the slow lane. Lines are not
assertions, and those of child processes are not seen: whoever moves a test reads it, keeps one for
each contract between rooms, and runs `python tests/breaks.py` before and after.
"""

import collections
import json
import os
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
EXPENSIVE_S = 0.6  # CPU seconds of a test that must reach something of its own


def _coverage(file: str):
    import coverage

    return coverage.Coverage(file, source=[str(REPO / "rljax")], config_file=False)


def pytest_configure(config):
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):
        folder = Path(os.environ["LANE_LINES"])
        folder.mkdir(parents=True, exist_ok=True)
        config.lane_lines = _coverage(str(folder / f"lines.{os.getpid()}"))
        config.lane_lines.start()
        config.lane_lines.switch_context("collection")


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    if hasattr(item.config, "lane_lines"):
        item.config.lane_lines.switch_context(item.nodeid)
    yield


def pytest_unconfigure(config):
    if hasattr(config, "lane_lines"):
        config.lane_lines.stop()
        config.lane_lines.save()


def lines_of_tests(folder: Path) -> dict[str, set[tuple[str, int]]]:
    """Returns {test: (file, line) of rljax that it executes}."""
    import coverage

    found = collections.defaultdict(set)
    for path in folder.glob("lines.*"):
        data = coverage.CoverageData(str(path))
        data.read()
        for file in data.measured_files():
            for line, tests in data.contexts_by_lineno(file).items():
                for test in tests:
                    found[test].add((file, line))
    return found


def needed(lines: dict[str, set], seconds: dict[str, float]) -> set[str]:
    """Returns a set of expensive tests that reach every line which no cheap test reaches, for few
    seconds: again and again the one with the most further lines a second."""
    expensive = {test for test in lines if seconds.get(test, 0) >= EXPENSIVE_S}
    reached = set().union(*(lines[test] for test in lines.keys() - expensive))
    own, taken = {test: lines[test] - reached for test in expensive}, set()
    while own := {test: left for test, left in own.items() if left}:
        best = max(own, key=lambda test: len(own[test]) / seconds[test])
        taken.add(best)
        found = own.pop(best)
        own = {test: left - found for test, left in own.items()}
    return taken


def main(seconds_folder: str, lines_folder: str) -> None:
    """Prints the tests that are not needed: CPU seconds, those of child processes, the name."""
    seconds, children = {}, {}
    for path in Path(seconds_folder).glob("*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            seconds[line["test"]] = line["own"] + line["children"]
            children[line["test"]] = line["children"]
    lines = lines_of_tests(Path(lines_folder))
    kept = needed(lines, seconds)
    rest = [test for test in lines if seconds.get(test, 0) >= EXPENSIVE_S and test not in kept]
    for test in sorted(rest, key=lambda test: -seconds[test]):
        print(f"{seconds[test]:7.1f} {children[test]:6.1f}  {test}")
    print(f"{sum(map(seconds.get, rest)):.0f} of {sum(seconds.values()):.0f} CPU seconds")


if __name__ == "__main__":
    main(*sys.argv[1:3])
