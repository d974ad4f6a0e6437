"""The run folder. It is made, checked and locked before a run begins, so that one process writes
it, and folders that cannot be written are reported before anything is trained."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rljax.errors import InputError
from rljax.files import parse_json, read_json_object
from rljax.runs.units import human_bytes

LOG = logging.getLogger("rljax")
LOCK = ".lock"
HEARTBEAT_S = 10.0
LOOK_S = 1.0  # between two looks at whether a heart beats
STALE_S = 60.0  # without a heartbeat: the holder on another host is dead
DYING_S = 10.0  # a killed process keeps its lock until its memory is returned
# What a run writes into its folder.
FILES = (
    "config.json",
    "data.json",
    "hub.json",
    "model.json",
    "metrics.jsonl",
    "samples.jsonl",
    "summary.json",
    "meanings.json",
    "timeline.json",
    "report.html",
    "starts.jsonl",
    "rewards.log",
)
FOLDERS = ("checkpoints", "policy", "reward_model", "adapter", "tensorboard", "profile", "bad")


def is_of_a_model(path: Path) -> bool:
    """Returns whether a file is the config.json of a Hugging Face model."""
    try:
        saved = read_json_object(path)
    except InputError:  # said where it is read
        return False
    return "dataflow" not in saved and not saved.keys().isdisjoint(("model_type", "architectures"))


def make_folder(path: str | Path) -> Path:
    """Makes the run folder if it is not there. Raises InputError if it cannot be made or written,
    or if something else has the name of a file of the run."""
    folder = Path(path)
    try:
        str(folder).encode()  # the libraries that write checkpoints take UTF-8 only
        folder.mkdir(parents=True, exist_ok=True)
        try_to_write(folder)
    except (OSError, ValueError) as error:  # ValueError: a zero byte, or no UTF-8
        raise _unwritable("the run folder", folder, error) from error
    for name in FILES:
        _check_kind(folder / name, stat.S_ISREG, "file")
    for name in FOLDERS:
        if _check_kind(folder / name, stat.S_ISDIR, "folder"):
            try:
                try_to_write(folder / name)
            except OSError as error:
                raise _unwritable(f"{name}/ of the run folder", folder / name, error) from error
    return folder


@contextlib.contextmanager
def removed_if_empty(folder: Path) -> Iterator[None]:
    """Removes, after a failure in the block, the folder and those above it that did not exist
    before it, if nothing was written into them."""
    new_folders = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError, ValueError):  # a folder that holds a file stays
            for path in (
                sorted(folder.rglob("*"), reverse=True) if new_folders and folder.is_dir() else []
            ):
                if path.is_dir():
                    path.rmdir()
                elif path.is_file() and path.stat().st_size == 0:
                    path.unlink()
            for path in new_folders:
                path.rmdir()
        raise


def try_to_write(folder: Path) -> None:
    """Writes a temporary file into the folder. Raises OSError if that cannot be done."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(4096))
        file.flush()


def require_writable(folder: str | Path) -> None:
    """Raises InputError if nothing can be written into a folder that exists: before hours of work
    whose result would be lost."""
    try:
        try_to_write(Path(folder))
    except OSError as error:
        raise InputError(
            f"nothing can be written into {folder}",
            rule=str(error.strerror or error),
            fix="name a folder of yours, on a disk with room",
        ) from None


def _unwritable(subject: str, path: Path, error: Exception) -> InputError:
    fix = "another run_dir, or free its disk and its permissions"
    reason = disk_fault(error) or str(error)
    if isinstance(error, FileExistsError):
        reason = "what has that name is no folder"
    return InputError(f"{subject} cannot be written", value=str(path), rule=reason, fix=fix)


def disk_fault(error: BaseException) -> str:
    """Returns the system's message of a write that failed, whichever library made it; "" if the
    error is not the system's."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    code = re.search(r"os[ _]error(?:_code=')?[ ']*(\d+)", str(error), re.IGNORECASE)
    return os.strerror(int(code[1])) if code else ""


def not_written(what: str, folder: Path, error: BaseException, fix: str) -> InputError:
    """Returns the error of a write that failed while a run went on, with what is left of
    the disk."""
    reason = disk_fault(error) or str(error).partition("\n")[0][:200]
    available = free_bytes(folder)
    rule = f"{reason}; {human_bytes(available)} free there" if available is not None else reason
    return InputError(f"{what} could not be written", value=str(folder), rule=rule, fix=fix)


def is_full_disk(error: OSError) -> bool:
    """Returns whether a disk is full, or takes no more of a file, or nothing at all."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


def concerns(folder: Path, error: OSError) -> bool:
    """Returns whether the error is one of the disk, or of a file of the run folder."""
    if is_full_disk(error) or error.errno == errno.EIO:
        return True
    filename = error.filename if isinstance(error.filename, str) else ""
    return bool(filename) and Path(filename).absolute().is_relative_to(folder.absolute())


def write_whole(path: Path, text: str) -> None:
    """Writes a small file in one piece: if the disk is full the old file stays."""
    draft = path.with_name(f".{path.name}.writing")
    try:
        draft.write_text(text)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_export(folder: Path) -> Iterator[None]:
    """Removes what a failed export leaves of a model folder, unless an older whole model
    is there."""
    try:
        yield
    except BaseException:
        unfinished = list(folder.glob(".*.saving"))
        if unfinished and (folder / "config.json").exists():
            for path in unfinished:
                path.unlink(missing_ok=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def exported_steps(summary: Mapping) -> dict[str, int] | None:
    """Returns {folder: step of the weights in it} of the models that a run has exported, by its
    summary.json; None if that does not say so: it is missing, or of an earlier version."""
    exported = summary.get("exported")
    return dict(exported) if isinstance(exported, Mapping) else None


def lacks_export(summary: Mapping, names: Iterable[str]) -> bool:
    """Returns whether a run ended without the export of one of the folders `names`: its config
    did not ask for it then, and a folder of that name is of an earlier end."""
    exported = exported_steps(summary)
    return exported is not None and any(exported.get(x) != summary.get("steps") for x in names)


def free_bytes(folder: Path) -> int | None:
    """Returns the bytes that can be written into a folder; None if its file system does not say."""
    try:
        disk = shutil.disk_usage(folder)
    except OSError:
        return None
    return disk.free if disk.total else None


def _check_kind(path: Path, kind, name: str) -> bool:
    """Returns whether `path` exists. Raises InputError if it is anything but a `name` that can be
    written."""
    if not os.path.lexists(path):
        return False
    try:
        right = kind(path.stat().st_mode)
    except OSError:  # a link to nothing, or to itself
        right = False
    if not right or not os.access(path, os.W_OK):
        raise InputError(
            f"a run writes the {name} {path.name} into its folder",
            value=str(path),
            rule="it cannot be written" if right else f"what has that name is no {name}",
            fix="move it away, or choose another run_dir",
        )
    return True


# -- one process at a time


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the run folder for this process. Raises InputError that names the process that holds
    it; a process that is dead loses it.

    A process of this kernel is dead if its lock (flock) is gone and no process has its id and its
    start time; a process of another host, if its heartbeat has stopped for STALE_S seconds, for
    which this waits.
    """
    path = folder / LOCK
    try:
        file = _taken(path)
    except OSError as error:
        raise _unwritable("the lock of the run folder", path, error) from error
    ended = threading.Event()
    beat = threading.Thread(target=_beat, args=(file, ended), daemon=True)
    beat.start()
    try:
        yield
    finally:
        ended.set()
        beat.join()
        if is_open_at(file, path):
            path.unlink()
        os.close(file)


def is_locked(folder: Path) -> bool:
    """Returns whether a process writes the run folder now: it has the lock, or, on another host, a
    heartbeat."""
    try:
        file = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        holder = _holder(file)
        return is_running(holder) or _beats_elsewhere(file, folder, holder)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks, or one that cannot be written
        return time.time() - os.fstat(file).st_mtime < STALE_S
    finally:
        os.close(file)


def _beat(file: int, ended: threading.Event) -> None:
    while not ended.wait(HEARTBEAT_S):
        with contextlib.suppress(OSError):  # a full disk must not end the run by this
            os.utime(file)


def _taken(path: Path) -> int:
    """The descriptor of the lock file, locked and with this process as its holder."""
    deadline, last_beat = time.monotonic() + DYING_S, None
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(0, "it is no regular file")
            unlocked, holder = _try_lock(file), _holder(file)
            if holder and is_running(holder):
                raise held(path.parent, holder)
            beats = holder and _beats_elsewhere(file, path.parent, holder)
            beat = os.fstat(file).st_mtime_ns, holder
            if beats and last_beat not in (None, beat):  # its heartbeat has changed meanwhile
                raise held(path.parent, holder)
            if beats and last_beat is None:
                last_beat, deadline = beat, time.monotonic() + STALE_S + DYING_S
                holder_name = f"process {holder['pid']} on host {holder.get('host')}"
                text = "%s was written by %s: waiting whether it still is (%.0f s at most)"
                LOG.warning(text, path.parent, holder_name, STALE_S)
            if not beats and unlocked and is_open_at(file, path):
                os.ftruncate(file, 0)
                os.pwrite(file, json.dumps(describe_process()).encode(), 0)
                os.utime(file)
                return file
        except BaseException:
            os.close(file)
            raise
        if (beats or not unlocked) and time.monotonic() > deadline:
            raise held(path.parent, holder)
        os.close(file)
        time.sleep(LOOK_S if beats else 0.1)  # its holder is about to end, or to write its name


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: the holder's name must do
        pass
    return True


def is_open_at(file: int, path: Path) -> bool:
    """Returns whether `path` is still the open file, and has not been removed or replaced."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


def describe_process() -> dict:
    """Returns the record of this process that its lock holds."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "started": _start_time(pid),
        "boot": _boot(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _holder(file: int) -> dict:
    """Reads the holder's record from the lock file; {} if it says nothing."""
    try:
        holder = parse_json(os.pread(file, 4096, 0), LOCK)
    except InputError:
        return {}
    return holder if isinstance(holder, dict) and isinstance(holder.get("pid"), int) else {}


def _boot() -> str:
    """The running kernel: equal for all containers of a host, another after it has rebooted."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _start_time(pid: int) -> str:
    """Returns the start time of a process in ticks of the kernel; "" if there is none, or it is a
    zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, ValueError, IndexError):
        return ""


def is_running(holder: dict) -> bool:
    """Returns whether the holder is a process that this one can see. An id may have been given
    anew, but not together with its start time."""
    same_boot = holder.get("boot") == _boot()
    return same_boot and _start_time(holder["pid"]) == holder.get("started") != ""


def _beats_elsewhere(file: int, folder: Path, holder: dict) -> bool:
    """Returns whether the holder, of another host, has had a heartbeat within STALE_S; both times
    are of the file system's own clock."""
    if holder.get("boot") == _boot():
        return False
    with tempfile.TemporaryFile(dir=folder) as probe:
        return os.fstat(probe.fileno()).st_mtime - os.fstat(file).st_mtime < STALE_S


def held(folder: str | Path, holder: dict) -> InputError:
    """Returns the error that names who holds a run folder."""
    holder_name = (
        f"process {holder.get('pid', '(unknown)')} on host {holder.get('host', '(unknown)')}"
    )
    fix = "wait until it ends, end it, or choose another run_dir"
    if holder.get("boot") != _boot():
        fix += f"; if it is dead, start again {STALE_S:.0f} s after its last sign of life"
    return InputError(
        f"another run writes into {folder}",
        value=f"{holder_name}, since {holder.get('since', '(unknown)')}",
        rule="one run at a time has a run folder",
        fix=fix,
    )
