"""meanings.json of a run folder: the declaration of each metric that the run has logged.

A report reads it, so that it needs neither the modules that declare the metrics nor the user's own,
and says the same on another machine.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path

from rljax.errors import InputError
from rljax.files import read_json_object
from rljax.metric import Metric, declared_metrics, find_metric
from rljax.runs.folder import write_whole
from rljax.runs.jsonl import encoded

FILE = "meanings.json"


class Meanings:
    """A tracker that writes the declarations of metrics when they are first logged; `own` are those
    of the user's functions, and `roles` returns the names that the run's roles put in front."""

    def __init__(
        self, run_dir: str | os.PathLike, own: Mapping, roles: Callable[[], Container[str]] = tuple
    ):
        self.path, self.own, self.roles = Path(run_dir) / FILE, own, roles
        self.seen: set[str] = set()
        try:
            self.known = read_meanings(read_json_object(self.path))  # of a run that goes on
        except InputError:
            self.known = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the declarations of metrics that are logged for the first time."""
        if not (new_names := metrics.keys() - self.seen):
            return
        declared = {**declared_metrics(), **self.own}
        roles = self.roles()
        metrics_found = {name: find_metric(name, declared, roles) for name in sorted(new_names)}
        self.known |= {name: metric for name, metric in metrics_found.items() if metric is not None}
        rows = {name: encoded(_fields(metric)) for name, metric in self.known.items()}
        write_whole(self.path, json.dumps(rows, indent=1) + "\n")
        self.seen |= new_names

    def samples(self, step: int, rows: Sequence[Mapping]) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def _fields(metric: Metric) -> dict:
    """Returns the fields of a metric that are not empty."""
    fields = dataclasses.asdict(metric)
    fields["limits"] = list(metric.limits or ())
    return {name: value for name, value in fields.items() if value}


def read_meanings(rows: Mapping) -> dict[str, Metric]:
    """Returns {name: declaration} of the rows of a meanings.json; rows that are no declaration are
    left out."""
    return {name: metric for name, row in rows.items() if (metric := _metric(row)) is not None}


def _metric(row: object) -> Metric | None:
    """Returns the metric that a row of the file declares, None where it is not one."""
    if not isinstance(row, Mapping) or not isinstance(row.get("meaning"), str):
        return None
    texts = {name: str(row.get(name, "")) for name in ("meaning", "unit", "healthy", "advice")}
    limits = row.get("limits")
    try:
        low, high = map(float, limits) if limits else (None, None)
    except (TypeError, ValueError, OverflowError):
        return None
    return Metric(**texts, limits=None if low is None else (low, high))
