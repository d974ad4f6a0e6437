"""Logs a run's numbers with one call: jsonl files (always), console, tensorboard, wandb, mlflow.

The `Tracker` protocol, its implementations, and `Tracking`, which fans out to them. Training
outranks tracking: a tracker that fails while the run goes on warns and is switched off, it never
stops a step. In a run of several processes only the first one opens a tracking.

The run folder gets `metrics.jsonl` {"step": 3, "reward/mean": 0.5, ...} and `samples.jsonl`
{"step": 3, "prompt": ..., "response": ..., "reward": ...}, one JSON object a line; with an
environment also `episodes.jsonl` (rljax.tracking.episodes).
"""

import difflib
import importlib
import json
import logging
import os
import re
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rljax.errors import InputError
from rljax.tracking.jsonl import JsonlTracker, encoded, plain

LOG = logging.getLogger("rljax.tracking.trackers")
NAMES = ("console", "tensorboard", "wandb", "mlflow")
FAILURES_UNTIL_OFF = 3


class Tracker(Protocol):
    """Anything that takes metrics and example completions."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def samples(self, step: int, rows: Sequence[Mapping]) -> None: ...

    def close(self) -> None: ...


# --- services: their packages are imported only when they are chosen ---


def _require(package: str, extra: str) -> types.ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise InputError(
            f"tracking {extra!r} needs the package {package!r}",
            rule=str(error),
            fix=f"pip install 'rljax[{extra}]', or remove {extra!r} from the config's trackers",
        ) from error


def _numeric(metrics: Mapping[str, object]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if isinstance(value, int | float)}


class TensorBoardTracker:
    """Event files in `<run_dir>/tensorboard`."""

    def __init__(self, run_dir: str | os.PathLike):
        self.module = _require("tensorboardX", "tensorboard")
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
        writer = self._open(step)
        for key, value in _numeric(metrics).items():
            writer.add_scalar(key, value, step)

    def samples(self, step: int, rows: Sequence[Mapping]) -> None:
        writer = self._open(step)
        for index, row in enumerate(rows):
            text = json.dumps(encoded(plain(row)), ensure_ascii=False, indent=1)
            code = "    " + text.replace("\n", "\n    ")  # indented = a code block in its markdown
            writer.add_text(f"samples/{index}", code.encode("utf-8", "replace").decode(), step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


class WandbTracker:
    """A Weights & Biases run; its own WANDB_MODE=offline, WANDB_PROJECT and WANDB_ENTITY hold.

    The run id lies in `<run_dir>/wandb_id.txt`, so a resumed run continues the same wandb run.
    Steps sent before a kill are sent again after it; wandb drops them, and the values are equal.
    """

    def __init__(self, run_dir: str | os.PathLike, config: Mapping, *, project: str = "rljax"):
        self.module = _require("wandb", "wandb")
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        id_file = run_dir / "wandb_id.txt"
        known = id_file.read_text().strip() if id_file.exists() else ""
        self.run = self.module.init(
            project=os.environ.get("WANDB_PROJECT", project),
            name=run_dir.resolve().name,
            dir=str(run_dir),
            config=encoded(plain(config)),
            id=known or None,
            resume="allow" if known else None,
        )
        if not known:
            id_file.write_text(self.run.id + "\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Sequence[Mapping]) -> None:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        data = [["" if row.get(key) is None else str(row[key]) for key in columns] for row in rows]
        self.run.log({"samples": self.module.Table(columns=columns, data=data)}, step=step)

    def close(self) -> None:
        self.run.finish()


class MlflowTracker:
    """An MLflow run at MLFLOW_TRACKING_URI; resumed by its id in `<run_dir>/mlflow_id.txt`."""

    def __init__(self, run_dir: str | os.PathLike, config: Mapping, *, experiment: str = "rljax"):
        self.module = _require("mlflow", "mlflow")
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self.client = (
            self.module.MlflowClient()
        )  # not the global "active run", which may be the user's own
        id_file = run_dir / "mlflow_id.txt"
        if id_file.exists():
            self.run_id = id_file.read_text().strip()
            self.client.update_run(self.run_id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", experiment)
        known = self.client.get_experiment_by_name(name)
        place = known.experiment_id if known else self.client.create_experiment(name)
        self.run_id = self.client.create_run(place, run_name=run_dir.resolve().name).info.run_id
        self.client.log_dict(self.run_id, encoded(plain(config)), "config.json")
        id_file.write_text(self.run_id + "\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in _numeric(metrics).items():
            name = re.sub(r"[^\w\-. /]", "_", key)  # what MLflow allows: not the @ of pass@4
            self.client.log_metric(self.run_id, name, value, step=step, synchronous=False)

    def samples(self, step: int, rows: Sequence[Mapping]) -> None:
        data = [encoded(plain(row)) for row in rows]
        self.client.log_dict(self.run_id, {"step": step, "rows": data}, f"samples/{step}.json")

    def close(self) -> None:
        self.module.flush_async_logging()
        self.client.set_terminated(self.run_id)


# --- the fan-out ---


class _Guarded:
    """One tracker whose failures are counted and reported, never raised."""

    def __init__(self, name: str, tracker: Tracker):
        self.name, self.tracker = name, tracker
        self.may_go_off = not isinstance(tracker, JsonlTracker)  # a disk may be full for a while
        self.failures = self.in_a_row = 0
        self.on = True

    def call(self, what: str, action: Callable, *args) -> None:
        try:
            action(*args)
            self.in_a_row = 0
        except Exception as error:  # a third party's network or disk must not cost a training run
            self.failures += 1
            self.in_a_row += 1
            reason = f"{type(error).__name__}: {error}"
            if self.failures == 1:
                LOG.warning("tracker %r failed in %s (%s); run goes on", self.name, what, reason)
            if self.may_go_off and self.on and self.in_a_row >= FAILURES_UNTIL_OFF:
                self.on = False
                LOG.warning("tracker %r is off: %d failures in a row", self.name, self.in_a_row)


class Tracking:
    """Every tracker of a run as one: `log`, `samples`, `close`, and offsets for exact resume."""

    def __init__(self, jsonl: JsonlTracker, others: Mapping[str, Tracker]):
        self._jsonl = jsonl
        everyone = {"jsonl": jsonl, **others}
        self._guarded = [_Guarded(name, tracker) for name, tracker in everyone.items()]
        self._dropped: set[str] = set()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one row of metrics: scalars (numpy, device) and text such as the phase."""
        step, row = int(step), self._clean(metrics)
        for guarded in self._guarded:
            if guarded.on:
                guarded.call("log", guarded.tracker.log, step, row)

    def samples(self, step: int, rows: Sequence[Mapping]) -> None:
        """Send example completions: prompt, response, reward, ground_truth, status, phase."""
        step, rows = int(step), [plain(row) for row in rows]
        for guarded in self._guarded:
            if guarded.on:
                guarded.call("samples", guarded.tracker.samples, step, rows)

    def episodes(self, step: int, rows: Sequence[Mapping]) -> None:
        """Write records of episodes (rljax.tracking.episodes) into episodes.jsonl alone."""
        for guarded in self._guarded[:1]:
            guarded.call("episodes", self._jsonl.episodes, int(step), rows)

    def close(self) -> None:
        """Close every tracker, the failed ones too: they may hold files and threads."""
        for guarded in self._guarded:
            guarded.call("close", guarded.tracker.close)

    def offsets(self) -> dict[str, int]:
        """Byte lengths of the jsonl files, synced to disk; stored in the checkpoint."""
        try:
            return self._jsonl.offsets()
        except OSError as error:  # the checkpoint matters more than its log
            LOG.warning("the jsonl files are not synced (%s): a resume will not cut them", error)
            return {}

    def truncate(self, offsets: Mapping[str, int]) -> None:
        """Cuts the jsonl files back to the checkpoint's `offsets` on resume; warns if they
        are shorter."""
        self._jsonl.truncate(offsets)

    def empty(self) -> None:
        """Cuts the jsonl files to nothing: a run that starts anew in a folder."""
        self._jsonl.truncate(dict.fromkeys(self._jsonl.files, 0))

    def lost(self) -> str:
        """What of the jsonl files could not be kept, "" if everything was."""
        return self._jsonl.lost()

    def failures(self) -> dict[str, int]:
        """Failures so far by tracker name."""
        return {guarded.name: guarded.failures for guarded in self._guarded}

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _clean(self, metrics: Mapping[str, float]) -> dict[str, float]:
        row = {}
        for key, value in metrics.items():
            number = plain(value)
            if isinstance(number, int | float) or isinstance(value, str):
                row[str(key)] = number
            elif key not in self._dropped:
                self._dropped.add(key)
                kind = type(value).__name__
                LOG.warning("metric %r is no scalar (%s) and is not logged", key, kind)
        return row


class Silent(Tracking):
    """The tracking of a process that writes nothing: of several hosts the first one does."""

    def __init__(self):
        self._guarded = []
        self._dropped: set[str] = set()

    def offsets(self) -> dict[str, int]:
        return {}

    def truncate(self, offsets: Mapping[str, int]) -> None:
        pass

    def empty(self) -> None:
        pass

    def lost(self) -> str:
        return ""


def _start(name: str, run_dir: Path, config: Mapping) -> Tracker:
    if name == "tensorboard":
        return TensorBoardTracker(run_dir)
    return WandbTracker(run_dir, config) if name == "wandb" else MlflowTracker(run_dir, config)


def open_tracking(
    names: Sequence[str],
    run_dir: str | os.PathLike,
    config: Mapping,
    console: Tracker | None = None,
) -> Tracking:
    """The trackers called `names` besides the jsonl files; `console` is used if it is named."""
    if isinstance(names, str):
        raise InputError("trackers must be a sequence of names", value=names, fix=f"({names!r},)")
    for name in names:
        if name not in NAMES:
            close = difflib.get_close_matches(str(name), NAMES, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            rule = "jsonl files are always written" if name == "jsonl" else ""
            fix = f"{hint}Choose from {', '.join(NAMES)}"
            raise InputError("unknown tracker", value=name, rule=rule, fix=fix)
    run_dir = Path(run_dir)
    jsonl = JsonlTracker(run_dir)
    resumed = jsonl.files["metrics.jsonl"].size() > 0
    others = {"console": console} if "console" in names and console is not None else {}
    for name in dict.fromkeys(names):
        if name == "console":
            continue
        try:
            others[name] = _start(name, run_dir, config)
        except InputError:
            raise
        except Exception as error:
            if not resumed:  # the user is still watching: fail before hours go unrecorded
                raise InputError(
                    f"tracker {name!r} does not start",
                    rule=f"{type(error).__name__}: {error}",
                    fix=f"check login and network (WANDB_MODE=offline needs none) or drop {name!r}",
                ) from error
            LOG.warning("tracker %r does not start again (%s); run goes on without", name, error)
    return Tracking(jsonl, others)
