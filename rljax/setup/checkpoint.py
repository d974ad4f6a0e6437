"""Checkpoints: roles, optimizer state, data position, PRNG, trackers' offsets: one atomic folder
per step.

Arrays are written by orbax; `state.json` holds everything that is not an array. `manifest.json`
holds a SHA-256 of every file and is written last, into a hidden folder that is then renamed, so
that a kill at any moment leaves whole folders only.
"""

import contextlib
import functools
import gc
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import traceback
import warnings
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from rljax.components import resolve
from rljax.config import NAMESPACES, Config, fingerprints
from rljax.errors import InputError
from rljax.files import LARGEST_DATA, open_file, parse_json, read_text
from rljax.tracking.charts import human_bytes
from rljax.tracking.folder import free_bytes, not_written

_STEP = re.compile("[0-9]{8,18}")  # the name of a checkpoint's folder
MANIFEST, STATE, ARRAYS = "manifest.json", "state.json", "arrays"


def _digest(path: Path) -> str:
    with os.fdopen(open_file(path), "rb") as file:  # of a regular file alone: a pipe never ends
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path) -> list[Path]:
    """Everything in a checkpoint that is no folder, but for its manifest."""
    found = (p for p in folder.rglob("*") if p.is_symlink() or not p.is_dir())
    return sorted(p for p in found if p != folder / MANIFEST)


def _read_json(path: Path) -> object:
    return parse_json(read_text(path, LARGEST_DATA), str(path))


@contextlib.contextmanager
def _muted():
    """Keeps orbax's threads from printing, each with a traceback, an exception that is raised here
    anyway."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    before, report = [logger.disabled for logger in loggers], sys.unraisablehook
    try:
        sys.unraisablehook = functools.partial(_report_unless_late, report)
        for logger in loggers:
            logger.disabled = True
        yield
        sys.unraisablehook = report
    except (OSError, ValueError) as error:
        traceback.clear_frames(error.__traceback__)
        gc.collect()  # asyncio logs a task that nobody waits for when it is collected
        raise error.with_traceback(None) from None
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def _report_unless_late(report, unraisable) -> None:
    """An array that TensorStore still writes when another has failed ends with this error, in a
    thread of its own and perhaps when the save is over."""
    if str(unraisable.exc_value) != "Event loop is closed":
        report(unraisable)


def _sync(path: Path) -> None:
    """Flush a file or folder to the disk, so that the rename is not seen before its contents."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Checkpoints:
    """The checkpoints of one run: `folder/00000012/...`. `keep` newest are kept, and the best."""

    def __init__(self, folder: str | Path, *, keep: int = 2, best_metric: str = ""):
        self.folder, self.keep, self.best_metric = Path(folder), keep, best_metric
        self.whole: int | None = None  # the newest step that is known to be whole

    def prepare(self) -> None:
        """Makes the folder and removes saves that were killed half-way. For the run alone: another
        reader would remove a save in progress."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if _STEP.fullmatch(path.name) and not path.is_dir():
                raise InputError(
                    f"{path} is no folder",
                    rule="a run writes the folder of its checkpoint under that name",
                    fix="move it away",
                )
            if _STEP.fullmatch(path.name.removeprefix(".")) and path.name.startswith("."):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def steps(self) -> list[int]:
        """Steps that have a folder, oldest first; whole or not."""
        if not self.folder.is_dir():
            return []
        folders = (p for p in self.folder.iterdir() if _STEP.fullmatch(p.name) and p.is_dir())
        return sorted(int(p.name) for p in folders)

    def path(self, step: int) -> Path:
        return self.folder / f"{step:08d}"

    def check_room(self, needed: int) -> None:
        """Raises InputError unless the disk has room for two checkpoints of `needed` bytes, those
        that are there among them, and for one beside them."""
        there = sum(p.stat().st_size for step in self.steps() for p in _files(self.path(step)))
        free = free_bytes(self.folder)
        if free is not None and free < max(needed, 2 * needed - there):
            raise InputError(
                "the disk has no room for the checkpoints of this run",
                value=f"{human_bytes(free)} free in {self.folder}",
                rule=f"a checkpoint takes {human_bytes(needed)}, and one is written before another "
                "goes",
                fix="free the disk, or choose a run_dir on another one",
            )

    def save(self, step: int, arrays, state: dict) -> Path:
        """Write everything of `step`; `state` is JSON. Returns the folder once it is complete on
        disk. Nothing is left of a save that fails."""
        target, hidden = self.path(step), self.folder / f".{step:08d}"
        fault = None
        try:
            shutil.rmtree(hidden, ignore_errors=True)
            hidden.mkdir()
            with _muted():
                self._write(hidden, step, arrays, state)
            # A corrupt folder of the same step, after a fallback.
            shutil.rmtree(target, ignore_errors=True)
            hidden.rename(target)
            _sync(self.folder)
        except (OSError, ValueError) as error:  # ValueError: TensorStore's
            last = "there is none" if self.whole is None else f"that of step {self.whole}"
            fix = f"make room or give it permissions; the same command goes on from {last}"
            what = f"the checkpoint of step {step}"
            fault = not_written(what, self.folder, error, fix)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
        if fault is not None:
            raise fault
        self.whole = step
        self._prune(step)
        return target

    def _write(self, hidden: Path, step: int, arrays, state: dict) -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save((hidden / ARRAYS).absolute(), arrays)
        (hidden / STATE).write_text(json.dumps({"step": step, **state}, indent=1))
        files = {}
        for path in _files(hidden):
            files[str(path.relative_to(hidden))] = {
                "bytes": path.stat().st_size,
                "sha256": _digest(path),
            }
            _sync(path)
        (hidden / MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=1))
        _sync(hidden / MANIFEST)
        _sync(hidden)

    def _prune(self, newest: int) -> None:
        """What is newer than the newest was damaged and passed over: it must not count as kept."""
        steps = self.steps()
        kept = set([step for step in steps if step <= newest][-self.keep :])
        best = self.best()
        if best is not None and best <= newest:
            kept.add(best)
        for step in steps:
            if step not in kept:
                try:
                    shutil.rmtree(self.path(step))
                except OSError as error:  # the new one is whole
                    warnings.warn(f"checkpoint of step {step} stays: {error}", stacklevel=2)

    def best(self) -> int | None:
        """The step whose state has the highest `best_metric` ("-name": the lowest); ties go to the
        earlier one."""
        if not self.best_metric:
            return None
        scored, name = [], self.best_metric.removeprefix("-")
        sign = -1.0 if self.best_metric.startswith("-") else 1.0
        for step in self.steps():
            try:
                value = self.read_state(step)["metrics"][name]
                scored.append((sign * float(value), -step))
            except (OSError, ValueError, KeyError, TypeError):
                continue  # not measured at that step, or damaged: never the best
        return -max(scored)[1] if scored else None

    def damage(self, step: int) -> str:
        """What is wrong with a checkpoint ("" if nothing): the first file that is missing or
        altered."""
        folder = self.path(step)
        try:
            manifest = _read_json(folder / MANIFEST)
            if manifest["step"] != step:
                return f"{folder / MANIFEST} is that of step {manifest['step']}"
            listed = manifest["files"]
            if STATE not in listed or not any(name.startswith(ARRAYS) for name in listed):
                return f"{folder / MANIFEST} does not list the files of a checkpoint"
            found = {str(path.relative_to(folder)) for path in _files(folder)}
            for name in sorted(listed.keys() - found):
                return f"{folder / name} is missing"
            for name in sorted(found - listed.keys()):
                return f"{folder / name} is not in the manifest"
            for name, facts in listed.items():
                path = folder / name
                size = path.stat().st_size
                if size != facts["bytes"]:
                    return f"{path} has {size} bytes instead of {facts['bytes']}"
                if _digest(path) != facts["sha256"]:
                    return f"{path} has another SHA-256 than when it was saved"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{folder / MANIFEST} is not readable ({error})"
        return self._wrong_state(step)

    def _wrong_state(self, step: int) -> str:
        """What is wrong with state.json, whatever its hash says: it must be that of `step`."""
        path = self.path(step) / STATE
        try:
            state = _read_json(path)
            own = {state["step"]} if "step" in state else set()  # older ones: in progress alone
            if "progress" in state or not own:
                own.add(sum(state["progress"]["taken"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{path} is not the state of a run ({type(error).__name__}: {error})"
        return "" if own == {step} else f"{path} is that of step {' and '.join(map(str, own))}"

    def latest(self) -> int | None:
        """The newest whole checkpoint, None if there is none at all; says which damaged ones it
        passes over."""
        steps = self.steps()
        for step in reversed(steps):
            problem = self.damage(step)
            if not problem:
                self.whole = step
                return step
            warnings.warn(
                f"checkpoint of step {step} is damaged: {problem}; trying the one before",
                stacklevel=2,
            )
        if steps:
            raise InputError(
                f"{self.folder}: all {len(steps)} checkpoints are damaged",
                value=self.damage(steps[-1]),
                fix="start a new run_dir, or copy the checkpoint from a backup",
            )
        return None

    def read_state(self, step: int) -> dict:
        return _read_json(self.path(step) / STATE)

    def read_arrays(self, step: int, like):
        """The arrays of `step`, with the shapes, dtypes and shardings of `like`."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        path = (self.path(step) / ARRAYS).absolute()
        try:
            with _muted(), ocp.StandardCheckpointer() as checkpointer:
                return checkpointer.restore(path, abstract)
        except Exception as error:  # whatever the libraries that read it make of it
            raise InputError(
                f"{path} does not fit the model and optimizer of this config",
                rule=f"{type(error).__name__}: {str(error)[:500]}",
                fix="restore the settings that the checkpoint was made with",
            ) from error


def check_fingerprints(
    saved: dict[str, str], now: dict[str, str], allowed: tuple[str, ...]
) -> None:
    """Refuse to go on with another config or other data, unless the change is allowed by name.

    A field that the checkpoint's version of the code did not have was at its default then.
    """
    saved = {**fingerprints(Config()), **saved}
    changed = sorted(k for k in saved.keys() | now.keys() if saved.get(k) != now.get(k))
    refused = [name for name in changed if name not in allowed]
    if refused:
        rule = "a resumed run continues the same experiment"
        if refused == ["steps"]:
            rule = "the learning rate, data.final_weights or evaluate.patience depends on it, so "
            rule += "the steps that were trained are not those of a run of this length"
        raise InputError(
            "this run's checkpoint was made with other settings",
            value=refused,
            rule=rule,
            fix="restore them, use a new run_dir, or allow them: "
            f"--config.checkpoint.allow_changed={','.join(changed)}",
        )


def reads_steps(config: Config) -> bool:
    """Whether the first steps of a run may differ with the number of all: a schedule, a mixture or
    a role of the user's own is spread over it, or an evaluation at the end counts for patience."""
    optimizers = (config.actor_optimizer, config.critic_optimizer)
    schedules = [resolve(one.schedule, NAMESPACES["schedule"]) for one in optimizers]
    spread = any("steps" in schedule.parameters for schedule in schedules)
    return bool(spread or config.data.final_weights or config.roles or config.evaluate.patience)
