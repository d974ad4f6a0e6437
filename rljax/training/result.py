"""The result of train(config): the run for further use in a notebook, or an exception if a signal
has stopped it."""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PosixPath

import numpy as np
import pyarrow as pa

from rljax import hosts
from rljax.report.inline import framed_report, inline
from rljax.runs.folder import lacks_export
from rljax.runs.jsonl import read_jsonl
from rljax.runs.store import is_folder


class _Report:
    """A report, which a notebook shows as the page: `run.report`, or `run.report()`."""

    def _repr_html_(self) -> str:
        return framed_report(self)

    def __call__(self):
        return self


class _ReportPath(_Report, PosixPath):
    pass


class _ReportURL(_Report, str):
    pass


class Metrics(Mapping):
    """The rows of metrics.jsonl as arrays [N] over the N logged steps: float64, NaN at a step
    without the metric; an array of objects for texts such as the phase. `metrics.to_pandas()` is a
    DataFrame, `metrics.to_pylist()` the rows."""

    def __init__(self, rows: Sequence[Mapping]):
        self._rows = list(rows)
        self._names = dict.fromkeys(name for row in self._rows for name in row)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            close = difflib.get_close_matches(str(name), self._names, n=3)
            raise KeyError(
                f"no metric {name!r}; " + (f"near: {close}" if close else f"there are {[*self]}")
            )
        values = [row.get(name) for row in self._rows]
        if any(isinstance(value, str) for value in values):
            return np.array(values, object)
        return np.array([np.nan if value is None else value for value in values], np.float64)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<{len(self)} metrics of {len(self._rows)} steps: {', '.join(self)}>"

    def to_pylist(self) -> list[dict]:
        """Returns the rows, each with the metrics that its step has."""
        return [dict(row) for row in self._rows]

    def to_pandas(self):
        """Returns a pandas.DataFrame with a column for each metric; needs pandas."""
        return pa.table({name: [row.get(name) for row in self._rows] for name in self}).to_pandas()


@dataclasses.dataclass(frozen=True, repr=False)
class TrainedRun:
    """A run that has ended, in its folder (or URL); `summary` is the content of summary.json.
    As the last line of a notebook's cell it shows its curves and completions, and `run.report`
    the page."""

    folder: Path | str
    summary: dict

    def __repr__(self) -> str:
        accuracy = [self.summary.get(f"accuracy_{when}") for when in ("before", "after")]
        values = [f"{a['value']:.3f}" for a in accuracy if isinstance(a, Mapping)]
        gain = f", accuracy {' -> '.join(values)}" if len(values) == 2 else ""
        outcome = f"{self.summary.get('status')}, step {self.summary.get('steps')}{gain}"
        return f"<run {str(self.folder)!r}: {outcome}>"

    @property
    def metrics(self) -> "Metrics":
        """The metrics of every step: run.metrics["reward/mean"] is an array."""
        return Metrics(read_jsonl(self._at("metrics.jsonl")))

    @property
    def report(self) -> Path | str:
        """Path or URL of report.html, which a notebook shows."""
        report = self._at("report.html")
        return _ReportURL(report) if isinstance(report, str) else _ReportPath(report)

    @property
    def policy(self) -> Path | str | None:
        """Path or URL of the exported model, a Hugging Face folder. None if this end of the run
        exported none: a folder that lies there is of an earlier end."""
        if str(self.summary.get("status")).startswith("stopped"):
            return None
        names = ("policy", "reward_model")
        folders = (self._at(name) for name in names if not lacks_export(self.summary, [name]))
        return next((folder for folder in folders if is_folder(folder)), None)

    def _repr_html_(self) -> str:
        return inline(self.folder)

    def _at(self, name: str) -> Path | str:
        return f"{self.folder}/{name}" if isinstance(self.folder, str) else self.folder / name


class RunStopped(SystemExit):
    """A signal, or a notice of the cloud, has stopped a run: it has saved what the same call goes
    on from, and exported nothing. `run` is the run so far, `signal` what stopped it.

    A script that does not catch it ends with `code`: 3, or on several hosts 143 after a SIGTERM or
    a notice. `except Exception` lets it pass: no retry may take it for a fault. Where the signal
    came too late to stop the run, its status is "finished", and what follows is not begun, either.
    """

    def __init__(self, run: TrainedRun, signal: str = ""):
        status = run.summary["status"]
        message = f"{status}; the same call goes on from there"
        super().__init__(f"{status}, when {signal} had arrived" if signal else message)
        self.signal = signal or status.removeprefix("stopped by ").partition(" at step ")[0]
        by_notice = "stopped by SIGTERM on", "stopped by the cloud's notice"
        self.run, self.code = run, hosts.STOPPED if status.startswith(by_notice) else 3
