"""Result of train(config): the run, as a notebook goes on with it; or raises where a signal has
stopped it."""

import dataclasses
from pathlib import Path, PosixPath

import pyarrow as pa

from rljax import hosts
from rljax.report.inline import framed_report, inline
from rljax.tracking.jsonl import read_jsonl
from rljax.tracking.store import is_folder


class _ReportPath(PosixPath):
    """The path of a report, which a notebook shows as the page: `run.report`."""

    def _repr_html_(self) -> str:
        return framed_report(self)

    def __call__(self) -> "_ReportPath":
        return self  # run.report() shows the page, too


class _ReportURL(str):
    """The URL of a report, which a notebook shows as the page."""

    def _repr_html_(self) -> str:
        return framed_report(self)

    def __call__(self) -> "_ReportURL":
        return self


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A run that has ended, in its folder (or URL); `summary` is what summary.json holds. As the
    last line of a notebook's cell it shows its curves and completions, `run.report` the page."""

    folder: Path | str
    summary: dict

    @property
    def metrics(self) -> pa.Table:
        """The rows of metrics.jsonl: a column for each metric, null in rows without it.
        `run.metrics["reward/mean"]`, `run.metrics.to_pandas()`."""
        rows = read_jsonl(self._at("metrics.jsonl"))
        names = dict.fromkeys(name for row in rows for name in row)
        return pa.table({name: [row.get(name) for row in rows] for name in names})

    @property
    def report(self) -> Path | str:
        """report.html, which a notebook shows."""
        place = self._at("report.html")
        return _ReportURL(place) if isinstance(place, str) else _ReportPath(place)

    @property
    def policy(self) -> Path | str | None:
        """The exported model, a Hugging Face folder; None if the run exports none, and of a run
        that was stopped: what lies there is of an earlier end."""
        if str(self.summary.get("status")).startswith("stopped"):
            return None
        folders = (self._at(name) for name in ("policy", "reward_model"))
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
        said = f"{status}; the same call goes on from there"
        super().__init__(f"{status}, when {signal} had arrived" if signal else said)
        self.signal = signal or status.removeprefix("stopped by ").partition(" at step ")[0]
        by_notice = "stopped by SIGTERM on", "stopped by the cloud's notice"
        self.run, self.code = run, hosts.STOPPED if status.startswith(by_notice) else 3
