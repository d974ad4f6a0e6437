"""Tables of the held-out accuracy by difficulty and by source: easy, medium, hard, overall. For one
run before and after, for several runs the mean with an interval over them."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rljax.files import is_whole_number
from rljax.report.arms import interval
from rljax.report.estimates import shares, shown, table
from rljax.report.run_folder import Estimate, RecordedRun, estimate
from rljax.tracking.charts import escaped

TITLES = {"difficulty": "Accuracy by difficulty", "source": "Accuracy by source"}
OVERALL = "eval/accuracy"
_ORDER = {name: rank for rank, name in enumerate(("easy", "medium", "hard"))}


def kinds_of(runs: Sequence[RecordedRun], kind: str) -> list[str]:
    """Returns the names of the difficulties or sources that the runs log: easy, medium and hard
    first, else in order, "level 2" before "level 10"."""
    start = f"eval/{kind}/"
    keys = {key for run in runs for key in run.keys() if key.startswith(start)}
    bounds = {f"{key}{end}" for key in keys for end in ("_low", "_high")}
    names = [key.removeprefix(start) for key in keys - bounds]
    return sorted(names, key=lambda name: (_ORDER.get(name.lower(), 3), _natural(name)))


def _natural(name: str) -> list:
    return [
        (0, int(part), "") if is_whole_number(part) else (1, 0, part)
        for part in re.split(r"(\d+)", name)
    ]


def of_a_run(run: RecordedRun) -> str:
    """Returns the tables of a run: its first and last evaluation, with intervals over prompts."""
    places = {"first": 0, "last": -1}
    rows = [(name, functools.partial(value_at, run, at=at)) for name, at in places.items()]
    return _tables([run], rows, "", "Intervals are 95 %, over prompts.")


def of_runs(groups: Mapping[str, Sequence[RecordedRun]]) -> str:
    """Returns the tables of several runs at their last evaluation: the mean of the runs of each
    group with Student's 95 % interval over them; for a single run its interval over prompts."""
    runs = [run for group in groups.values() for run in group]
    rows = [
        (f"{name} (n = {len(group)})", functools.partial(_mean, group))
        for name, group in groups.items()
    ]
    note = "Means over n runs with 95 % intervals: over runs, or of a single run over prompts."
    return _tables(runs, rows, ", last evaluation", note)


def _tables(
    runs: Sequence[RecordedRun],
    rows: Sequence[tuple[str, Callable[[str], Estimate | None]]],
    when: str,
    note: str,
) -> str:
    out = []
    for kind, title in TITLES.items():
        names = kinds_of(runs, kind)
        keys = [*(f"eval/{kind}/{name}" for name in names), OVERALL]
        cells = [
            (escaped(label), *(_cell(value_of(key)) for key in keys)) for label, value_of in rows
        ]
        if names:
            out.append(table(f"{title}{when}", ("", *names, "overall"), cells, note))
    return "".join(out)


def _cell(value: Estimate | None) -> str:
    return "-" if value is None else shown(value, shares(value))


def value_at(run: RecordedRun, key: str, at: int) -> Estimate | None:
    """Returns the first or last value of a metric with the interval that was logged beside it."""
    ends = {
        name: run.columns(f"{key}{end}")[1]
        for name, end in (("value", ""), ("low", "_low"), ("high", "_high"))
    }
    numbers = {name: float(values[at]) for name, values in ends.items() if len(values)}
    return estimate(numbers)


def _mean(runs: Sequence[RecordedRun], key: str) -> Estimate | None:
    if len(runs) == 1:
        return value_at(runs[0], key, -1)
    last_values = [values[-1] for run in runs if len(values := run.columns(key)[1])]
    return estimate(interval([float(v) for v in last_values if np.isfinite(v)]))
