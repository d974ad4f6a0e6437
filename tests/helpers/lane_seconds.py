"""Measures where the CPU seconds of the tests go:

PYTHONPATH=tests/helpers LANE_SECONDS=FOLDER python -m pytest -p lane_seconds
python tests/helpers/lane_seconds.py FOLDER

The first command is the lane with a line of JSON for each test, in one file of FOLDER for each
worker. The second prints a table of the files that take longest, in Markdown: CPU seconds, those of
JAX's tracing, lowering and compiling (seconds by the clock, in the process itself), and those of
child processes.
"""

import collections
import json
import os
import resource
import sys
from pathlib import Path

import pytest

PARTS = {  # the ends of names of events of jax.monitoring
    "jaxpr_trace_duration": "trace",
    "jaxpr_to_mlir_module_duration": "lower",
    "backend_compile_duration": "compile",
}
spent = collections.Counter()


def pytest_configure():
    import jax

    def count(event: str, seconds: float, **_):
        if part := PARTS.get(event.rpartition("/")[2]):
            spent[part] += seconds
            spent["programs"] += part == "compile"

    jax.monitoring.register_event_duration_secs_listener(count)


def _used() -> collections.Counter:
    """Returns the seconds that this process and its children have used so far, by part."""
    used = collections.Counter(spent)
    for name, who in (("own", resource.RUSAGE_SELF), ("children", resource.RUSAGE_CHILDREN)):
        usage = resource.getrusage(who)
        used[name] = usage.ru_utime + usage.ru_stime
    return used


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    before = _used()
    yield
    used = _used()
    used.subtract(before)
    line = {"test": item.nodeid} | {name: round(value, 3) for name, value in used.items()}
    folder = Path(os.environ["LANE_SECONDS"])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def main(folder: str, most: int = 25) -> None:
    """Prints the table of the lines in `folder`, with the `most` files that take longest."""
    by_file: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for path in Path(folder).glob("*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            file = line.pop("test").partition("::")[0]
            seconds = line.pop("own") + line["children"]
            by_file[file].update(line, tests=1, seconds=seconds)
    names = ("seconds", "children", "trace", "lower", "compile", "programs", "tests")

    def row(name: str, counts: collections.Counter) -> str:
        return f"| {name} | " + " | ".join(f"{counts[one]:.0f}" for one in names) + " |"

    total = sum(by_file.values(), collections.Counter())
    files = sorted(by_file, key=lambda f: -by_file[f]["seconds"])
    rest = sum((by_file[f] for f in files[most:]), collections.Counter())
    print("| file | CPU s | of children | tracing | lowering | compiling | programs | tests |")
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(row(f.removeprefix("tests/"), by_file[f]) for f in files[:most]))
    print(row(f"{len(files[most:])} further files", rest), row("all", total), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:2])
