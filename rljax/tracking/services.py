"""Trackers of services, by the names in `config.trackers`: tensorboard, wandb, mlflow, swanlab,
trackio. A package is imported only when its tracker is chosen.

Each takes the run folder and the config, and options: `trackers=("wandb(project='mine')",)`.
The id by which a service knows the run lies in the run folder, so that a restart continues the
same stream.
"""

import json
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from rljax.contracts import contract
from rljax.files import read_text
from rljax.runs.jsonl import encoded, plain
from rljax.tracking.packages import require


def _numeric(metrics: Mapping[str, object]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if isinstance(value, int | float)}


def _as_text(row: Mapping) -> str:
    text = json.dumps(encoded(plain(row)), ensure_ascii=False, indent=1)
    return text.encode("utf-8", "replace").decode()


def _as_table(rows: Sequence[Mapping]) -> tuple[list[str], list[list[str]]]:
    """(columns, rows of texts) of example completions."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return columns, [
        ["" if row.get(key) is None else str(row[key]) for key in columns] for row in rows
    ]


class _Id:
    """The id of a run at a service, in `<run_dir>/<service>_id.txt`; "" before the first start."""

    def __init__(self, run_dir: str | os.PathLike, service: str):
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.file = self.run_dir / f"{service}_id.txt"
        self.known = read_text(self.file, 4096).strip() if self.file.exists() else ""

    def keep(self, value: str) -> str:
        if value != self.known:
            self.file.write_text(f"{value}\n")
        return value


class TensorBoardTracker:
    """Event files in `<run_dir>/tensorboard`."""

    def __init__(self, run_dir: str | os.PathLike):
        self.module = require("tensorboard")
        self.folder = Path(run_dir) / "tensorboard"
        self.writer = None

    def _open(self, step: int):
        # Opened at the first step: a resumed run purges what a killed one wrote past it.
        if self.writer is None:
            resumed = self.folder.exists() and any(self.folder.iterdir())
            self.writer = self.module.SummaryWriter(
                str(self.folder), purge_step=step if resumed else None, flush_secs=30
            )
        return self.writer

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of a step as scalars."""
        writer = self._open(step)
        for key, value in _numeric(metrics).items():
            writer.add_scalar(key, value, step)

    def samples(self, step: int, rows: Sequence[Mapping]) -> None:
        """Writes samples of a step as text."""
        writer = self._open(step)
        for index, row in enumerate(rows):
            code = "    " + _as_text(row).replace("\n", "\n    ")  # a code block in its markdown
            writer.add_text(f"samples/{index}", code, step)

    def close(self) -> None:
        """Closes the event file."""
        if self.writer is not None:
            self.writer.close()


class _Service:
    """A tracker of a service whose runs have `log` and `finish`; `table` shows its samples."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics of a step."""
        self.run.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Sequence[Mapping]) -> None:
        """Sends samples of a step as a table or as texts."""
        self.run.log({"samples": self.table(rows)}, step=step)

    def close(self) -> None:
        """Ends the run of the service."""
        self.run.finish()


class WandbTracker(_Service):
    """Weights & Biases. Steps that were sent before a kill are sent again after it; wandb drops
    them, and the values are equal."""

    def __init__(self, run_dir: str | os.PathLike, config: Mapping, project: str):
        self.module = require("wandb")
        stored = _Id(run_dir, "wandb")
        self.run = self.module.init(
            project=os.environ.get("WANDB_PROJECT") or project,
            name=stored.run_dir.resolve().name,
            dir=str(stored.run_dir),
            config=encoded(plain(config)),
            id=stored.known or None,
            resume="allow" if stored.known else None,
        )
        stored.keep(self.run.id)

    def table(self, rows: Sequence[Mapping]):
        """Returns samples as a table of wandb."""
        columns, data = _as_table(rows)
        return self.module.Table(columns=columns, data=data)


class MlflowTracker:
    """An MLflow run at MLFLOW_TRACKING_URI."""

    def __init__(self, run_dir: str | os.PathLike, config: Mapping, experiment: str):
        self.module = require("mlflow")
        stored = _Id(run_dir, "mlflow")
        # Not the global "active run", which may be the user's own.
        self.client = self.module.MlflowClient()
        if stored.known:
            self.run_id = stored.known
            self.client.update_run(self.run_id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or experiment
        known = self.client.get_experiment_by_name(name)
        experiment_id = known.experiment_id if known else self.client.create_experiment(name)
        created = self.client.create_run(experiment_id, run_name=stored.run_dir.resolve().name)
        self.run_id = created.info.run_id
        self.client.log_dict(self.run_id, encoded(plain(config)), "config.json")
        stored.keep(self.run_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics of a step. Characters not allowed in MLflow's names become "_"."""
        for key, value in _numeric(metrics).items():
            name = re.sub(r"[^\w\-. /]", "_", key)  # what MLflow allows: not the @ of pass@4
            self.client.log_metric(self.run_id, name, value, step=step, synchronous=False)

    def samples(self, step: int, rows: Sequence[Mapping]) -> None:
        """Sends samples of a step as samples/STEP.json."""
        data = [encoded(plain(row)) for row in rows]
        self.client.log_dict(self.run_id, {"step": step, "rows": data}, f"samples/{step}.json")

    def close(self) -> None:
        """Sends what waits and ends the run of MLflow."""
        self.module.flush_async_logging()
        self.client.set_terminated(self.run_id)


class SwanlabTracker(_Service):
    """A SwanLab run; the files of its offline and local modes lie in `<run_dir>/swanlog`."""

    def __init__(self, run_dir: str | os.PathLike, config: Mapping, project: str):
        self.module = require("swanlab")
        stored = _Id(run_dir, "swanlab")
        run_id = stored.known or uuid.uuid4().hex[:21]  # as long as its own
        self.run = self.module.init(
            project=os.environ.get("SWANLAB_PROJECT") or project,
            name=stored.run_dir.resolve().name,
            log_dir=str(stored.run_dir / "swanlog"),
            config=encoded(plain(config)),
            id=run_id,
            resume="allow",
        )
        stored.keep(run_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics of a step that are numbers."""
        super().log(step, _numeric(metrics))

    def table(self, rows: Sequence[Mapping]) -> list:
        """Returns samples as texts of SwanLab."""
        return [self.module.Text(_as_text(row)) for row in rows]


class TrackioTracker(_Service):
    """A Trackio run in TRACKIO_DIR, or in a Space with TRACKIO_SPACE_ID. A restart finds it by its
    name, so the name has a random part."""

    def __init__(self, run_dir: str | os.PathLike, config: Mapping, project: str):
        self.module = require("trackio")
        stored = _Id(run_dir, "trackio")
        name = stored.known or f"{stored.run_dir.resolve().name}-{uuid.uuid4().hex[:8]}"
        self.run = self.module.init(
            project=project, name=name, config=encoded(plain(config)), resume="allow", embed=False
        )
        stored.keep(name)

    def table(self, rows: Sequence[Mapping]):
        """Returns samples as a table of Trackio."""
        columns, data = _as_table(rows)
        return self.module.Table(data=[dict(zip(columns, row, strict=True)) for row in data])


# --- what `config.trackers` names ---


@contract(safe=True)
def tensorboard(run_dir: str | os.PathLike, config: Mapping) -> TensorBoardTracker:
    """Writes event files into the folder `tensorboard` of the run."""
    return TensorBoardTracker(run_dir)


@contract()
def wandb(run_dir: str | os.PathLike, config: Mapping, *, project: str = "rljax") -> WandbTracker:
    """Logs to Weights & Biases; its own WANDB_MODE, WANDB_PROJECT and WANDB_ENTITY
    take precedence."""
    return WandbTracker(run_dir, config, project)


@contract()
def mlflow(
    run_dir: str | os.PathLike, config: Mapping, *, experiment: str = "rljax"
) -> MlflowTracker:
    """Logs to the MLflow of MLFLOW_TRACKING_URI; MLFLOW_EXPERIMENT_NAME takes precedence."""
    return MlflowTracker(run_dir, config, experiment)


@contract()
def swanlab(
    run_dir: str | os.PathLike, config: Mapping, *, project: str = "rljax"
) -> SwanlabTracker:
    """Logs to SwanLab; its own SWANLAB_MODE, SWANLAB_PROJECT and SWANLAB_API_KEY
    take precedence."""
    return SwanlabTracker(run_dir, config, project)


@contract()
def trackio(
    run_dir: str | os.PathLike, config: Mapping, *, project: str = "rljax"
) -> TrackioTracker:
    """Logs to Trackio, on this machine in TRACKIO_DIR or to a Space."""
    return TrackioTracker(run_dir, config, project)
