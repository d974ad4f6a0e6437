"""What train(config) returns: the run, as a notebook goes on with it."""

import dataclasses
from pathlib import Path, PosixPath

import pyarrow as pa

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
        """The exported model, a Hugging Face folder; None if the run exports none."""
        folders = (self._at(name) for name in ("policy", "reward_model"))
        return next((folder for folder in folders if is_folder(folder)), None)

    def _repr_html_(self) -> str:
        return inline(self.folder)

    def _at(self, name: str) -> Path | str:
        return f"{self.folder}/{name}" if isinstance(self.folder, str) else self.folder / name
