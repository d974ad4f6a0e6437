"""Checkpoints in a local folder, which all hosts share. Orbax writes the arrays into a hidden
folder that is renamed when its manifest is written, so that a kill at any moment leaves complete
folders only."""

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
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from rljax import hosts
from rljax.arrays import is_of_one_host, known_to_all, put_whole
from rljax.errors import InputError
from rljax.files import LARGEST_DATA, open_file, read_text
from rljax.runs.folder import free_bytes
from rljax.runs.units import human_bytes

STEP = re.compile("[0-9]{8,18}")  # the name of a checkpoint's folder
MANIFEST, STATE, ARRAYS = "manifest.json", "state.json", "arrays"
# Orbax measures how long it waits by the wall clock, which may be set: by less than a century. What
# it makes in threads it waits for at most 300 s, whatever is said, so folders are made at once. A
# host that stands still or is gone is the matter of rljax.hosts.watchdog.
_SAVE_TIMEOUT_S = 100 * 365 * 86_400
_PROCESS = re.compile(r"ocdbt\.process_(\d+)")  # the folder in which orbax writes for one host
# What the libraries that write the arrays read in a path: orbax globs it, TensorStore turns \ into
# /, and orbax gs:/ into gs://.
_MISREAD = re.compile(r"[][*?\\]|gs:")


class DiskFolder:
    """The checkpoints in `folder`: FOLDER/00000012/..."""

    def __init__(self, folder: Path):
        self.folder = folder

    def at(self, step: int, name: str = "") -> Path:
        """Returns the path of a checkpoint, or of a file in it."""
        return self.folder / f"{step:08d}" / name

    def prepare(self) -> None:
        """Makes the folder and removes saves that were killed half-way. Raises InputError for a
        file with the name of a checkpoint."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.in_the_way():
            raise InputError(
                f"{path} is no folder",
                rule="a run writes the folder of its checkpoint under that name",
                fix="move it away",
            )
        for path in self.folder.iterdir():
            if STEP.fullmatch(path.name.removeprefix(".")) and path.name.startswith("."):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def in_the_way(self) -> list[Path]:
        """Returns what has the name of a checkpoint and is no folder."""
        return sorted(p for p in self.folder.iterdir() if STEP.fullmatch(p.name) and not p.is_dir())

    def steps(self) -> list[int]:
        """Returns the steps that have a folder, oldest first, complete or not."""
        if not self.folder.is_dir():
            return []
        folders = (p for p in self.folder.iterdir() if STEP.fullmatch(p.name) and p.is_dir())
        return sorted(int(p.name) for p in folders)

    def check_room(self, needed: int) -> None:
        """Raises InputError unless the disk has room for two checkpoints of `needed` bytes,
        including those that are there, and for one beside them."""
        stored_bytes = sum(p.stat().st_size for step in self.steps() for p in _files(self.at(step)))
        # Of a folder that is not made yet: of the one that it will be made in.
        folder = next(p for p in (self.folder, *self.folder.absolute().parents) if p.exists())
        free = free_bytes(folder)
        if free is not None and free < max(needed, 2 * needed - stored_bytes):
            raise InputError(
                "the disk has no room for the checkpoints of this run",
                value=f"{human_bytes(free)} free in {self.folder}",
                rule=f"a checkpoint takes {human_bytes(needed)}, and one is written before another "
                "goes",
                fix="free the disk, or choose a run_dir on another one",
            )

    # -- writing --

    def _hidden(self, step: int) -> Path:
        return self.folder / f".{step:08d}"

    def clear(self, step: int) -> None:
        """Makes room for a save of `step`, on the first host."""
        shutil.rmtree(self._hidden(step), ignore_errors=True)
        self._hidden(step).mkdir()

    def begin(self, step: int, arrays) -> Callable[[], dict]:
        """Copies the arrays to host memory; returns a function that writes this host's part of them
        and returns {name: bytes and SHA-256} of its files."""
        muted = contextlib.ExitStack()
        try:
            muted.enter_context(_muted())
            async_options = ocp.options.AsyncOptions(
                timeout_secs=_SAVE_TIMEOUT_S, create_directories_asynchronously=False
            )
            checkpointer = muted.enter_context(
                ocp.StandardCheckpointer(async_options=async_options)
            )
            folder = muted.enter_context(_plainly_named(self._hidden(step)))
            checkpointer.save(folder / ARRAYS, known_to_all(arrays))
        except BaseException:
            muted.__exit__(*sys.exc_info())
            raise

        def written() -> dict[str, dict]:
            with muted:
                checkpointer.wait_until_finished()
            files = (p for p in _files(self._hidden(step)) if _writer(p) == hosts.index())
            return {str(p.relative_to(self._hidden(step))): _facts(p) for p in files}

        return written

    def commit(self, step: int, files: dict[str, dict], state: str) -> None:
        """Writes everything but the arrays, then the manifest, and gives the folder its name.
        Called on the first host."""
        hidden = self._hidden(step)
        (hidden / STATE).write_text(state)
        files = {**files, STATE: _facts(hidden / STATE)}
        text = json.dumps({"step": step, "files": dict(sorted(files.items()))}, indent=1)
        (hidden / MANIFEST).write_text(text)
        _sync(hidden / MANIFEST)
        _sync(hidden)
        # A corrupt folder of the same step, after a fallback.
        shutil.rmtree(self.at(step), ignore_errors=True)
        hidden.rename(self.at(step))
        _sync(self.folder)

    def abandon(self, step: int) -> None:
        """Removes what is left of a save that failed."""
        shutil.rmtree(self._hidden(step), ignore_errors=True)

    def remove(self, step: int) -> None:
        """Removes a checkpoint."""
        shutil.rmtree(self.at(step))

    def left_over(self) -> list[int]:
        """Returns the saves that never became complete: none, as `prepare` has removed them."""
        return []

    # -- reading --

    def sizes(self, step: int) -> dict[str, int]:
        """Returns {name: bytes} of all files in a checkpoint except its manifest."""
        folder = self.at(step)
        return {str(path.relative_to(folder)): path.stat().st_size for path in _files(folder)}

    def read(self, step: int, name: str) -> str:
        """Returns the text of a file."""
        return read_text(self.at(step, name), LARGEST_DATA)

    def read_state(self, step: int) -> str:
        """Returns the text of state.json."""
        return self.read(step, STATE)

    def altered(self, step: int, name: str, sha256: str) -> str:
        """Compares a file with its manifest entry; returns the difference, or ""."""
        if _digest(self.at(step, name)) == sha256:
            return ""
        return f"{self.at(step, name)} has another SHA-256 than when it was saved"

    def read_arrays(self, step: int, like, fits: Callable[[str], InputError]):
        """Returns the arrays of `step`, with the shapes, dtypes and shardings of `like`. Raises
        `fits(why)` if they cannot be read as these."""
        abstract = jax.tree.map(_as_written, like)
        try:
            with (
                _muted(),
                ocp.StandardCheckpointer() as checkpointer,
                _plainly_named(self.at(step)) as folder,
            ):
                arrays = checkpointer.restore(folder / ARRAYS, abstract)
            return jax.tree.map(_as_held, arrays, like)
        except Exception as error:  # whatever the libraries that read it make of it
            raise fits(f"{type(error).__name__}: {str(error)[:500]}") from error

    def read_some(self, step: int, like, fits: Callable[[str], InputError]):
        """Returns the arrays of `step` that `like` holds. Raises `fits(why)` if they cannot
        be read."""
        restore_args = ocp.checkpoint_utils.construct_restore_args(like)
        options = ocp.args.PyTreeRestore(item=like, restore_args=restore_args, partial_restore=True)
        try:
            with (
                ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
                _plainly_named(self.at(step)) as folder,
            ):
                return checkpointer.restore(folder / ARRAYS, options)
        except (ValueError, KeyError, TypeError) as error:
            raise fits(f"{type(error).__name__}: {str(error)[:500]}") from error


@contextlib.contextmanager
def _plainly_named(folder: Path) -> Iterator[Path]:
    """Yields an absolute path of a folder that orbax and TensorStore take as it is: a link to it,
    where its own path has characters that they read as something else."""
    folder = folder.absolute()
    if not _MISREAD.search(str(folder)):
        yield folder
        return
    temporary = tempfile.gettempdir()
    parent = "/tmp" if _MISREAD.search(temporary) else temporary
    with tempfile.TemporaryDirectory(prefix="rljax-", dir=parent) as scratch:
        link = Path(scratch, "folder")
        link.symlink_to(folder, target_is_directory=True)
        yield link


def _as_written(x):
    """Returns an array in the form that orbax is to write. An array of a single host is written as
    one that all hosts read."""
    abstract = ocp.utils.to_shape_dtype_struct(x)
    return np.empty(x.shape, x.dtype) if is_of_one_host(x) else abstract


def _as_held(value, target):
    return put_whole(value, target.sharding) if is_of_one_host(target) else value


def _writer(path: Path) -> int:
    """Returns the host that has written a file: orbax gives each host a folder for its arrays."""
    owners = [int(match[1]) for part in path.parts if (match := _PROCESS.fullmatch(part))]
    return owners[0] if owners else 0


def _facts(path: Path) -> dict:
    """Returns the manifest's entry of a file, which is on the disk when this returns."""
    entry = {"bytes": path.stat().st_size, "sha256": _digest(path)}
    _sync(path)
    return entry


def _digest(path: Path) -> str:
    with os.fdopen(open_file(path), "rb") as file:  # of a regular file alone: a pipe never ends
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path) -> list[Path]:
    """Returns all files and links in a checkpoint except its manifest."""
    paths = []
    for parent, folders, names in os.walk(folder, onerror=_raise_unless_gone):
        paths += [Path(parent, name) for name in names]
        paths += [path for name in folders if (path := Path(parent, name)).is_symlink()]
    return sorted(path for path in paths if path != folder / MANIFEST)


def _raise_unless_gone(error: OSError) -> None:
    """Raises the error of a folder that cannot be listed, unless the folder is gone."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _sync(path: Path) -> None:
    """Flush a file or folder to the disk, so that the rename is not seen before its contents."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _muted():
    """Keeps orbax's threads from printing, each with a traceback, an exception that is raised here
    anyway."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    were_disabled, report = [logger.disabled for logger in loggers], sys.unraisablehook
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
        for logger, disabled in zip(loggers, were_disabled, strict=True):
            logger.disabled = disabled


def _report_unless_late(report, unraisable) -> None:
    """Reports an exception that nobody handles, except the one with which an array ends that
    TensorStore still writes after another has failed: it comes in a thread of its own and perhaps
    when the save is over."""
    if str(unraisable.exc_value) != "Event loop is closed":
        report(unraisable)
