"""The machine: limits of a process, folders that rljax writes, disk, shared memory, locale."""

import locale
import resource
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from rljax.config.schema import Config
from rljax.doctor.finding import Finding, broken, fine, why_not_written
from rljax.runs.units import human_bytes

_GB = 10**9
# Name, limit, the least that a run needs, its unit, the flag of ulimit and a value that does.
_LIMITS = (
    ("open_files_limit", resource.RLIMIT_NOFILE, 1024, "open files", "-n 65536"),
    ("process_limit", resource.RLIMIT_NPROC, 512, "processes and threads", "-u unlimited"),
    ("memory_limit", resource.RLIMIT_AS, 64 * _GB, "bytes of address space", "-v unlimited"),
)
_SHARED_MEMORY = Path("/dev/shm")
_SMALLEST_SHARED_MEMORY = 10**9


def machine(env: Mapping[str, str], disk_gb: float, run: str) -> Iterator[Finding]:
    yield from _limits()
    yield from _text(env)
    yield from _folders(env)
    yield from _disk(env, disk_gb, run)


def _limits() -> Iterator[Finding]:
    for name, limit, least, unit, flag in _LIMITS:
        soft, hard = resource.getrlimit(limit)
        if soft == resource.RLIM_INFINITY or soft >= least:
            continue
        allowed = hard == resource.RLIM_INFINITY or hard >= least
        who = "" if allowed else ", which an administrator has to allow (limits.conf, docker run)"
        yield broken(
            name,
            f"a process may have {soft} {unit}, and a run may need {least}",
            f"ulimit {flag}{who}",
        )


def _text(env: Mapping[str, str]) -> Iterator[Finding]:
    names = {"files": locale.getpreferredencoding(False), "file names": sys.getfilesystemencoding()}
    names["standard output"] = sys.stdout.encoding or "utf-8"
    wrong = {
        what: name
        for what, name in names.items()
        if name.lower().replace("-", "") not in ("utf8", "utf8sig")
    }
    if wrong:
        what, name = next(iter(wrong.items()))
        yield broken(
            "locale_not_utf8",
            f"the encoding of {what} is {name}: texts with other letters end the process",
            "export LC_ALL=C.UTF-8, and unset PYTHONIOENCODING and PYTHONUTF8",
        )


def _folders(env: Mapping[str, str]) -> Iterator[Finding]:
    home = Path("~").expanduser()
    if reason := why_not_written(home):
        yield broken(
            "home_unwritable",
            f"the home folder {home} cannot be written: {reason}",
            "export HOME=A_FOLDER_OF_YOURS: caches of programs and models lie there",
        )
    cache = Path(Config().compilation_cache).expanduser()
    if reason := why_not_written(cache):
        yield broken(
            "compilation_cache_unwritable",
            f"{cache} cannot be written: {reason}",
            "--config.compilation_cache=A_FOLDER_OF_YOURS; else every start compiles anew",
        )
    elif cache.is_dir() and cache.stat().st_mode & stat.S_IWOTH:
        yield broken(
            "compilation_cache_open",
            f"{cache} can be written by anybody, and what lies there is run as programs",
            f"chmod go-w {cache}",
        )
    else:
        size = f"{sum(1 for _ in cache.iterdir())} files" if cache.is_dir() else "empty"
        yield fine("compilation_cache", f"{cache}: {size}")


def _disk(env: Mapping[str, str], disk_gb: float, run: str) -> Iterator[Finding]:
    folders = {"the run folder": Path(run or "runs"), "the home folder": Path("~").expanduser()}
    if env.get("HF_HOME"):
        folders["HF_HOME"] = Path(env["HF_HOME"]).expanduser()
    for what, path in folders.items():
        there = next((p for p in (path.absolute(), *path.absolute().parents) if p.is_dir()), None)
        if there is None:
            continue
        free = shutil.disk_usage(there).free
        if free < disk_gb * _GB:
            yield broken(
                "disk_full",
                f"{human_bytes(free)} are free for {what} ({there}), less than {disk_gb:g} GB",
                "free the disk, or use another one (run_dir, HF_HOME, compilation_cache)",
            )
        else:
            yield fine("disk", f"{human_bytes(free)} free for {what}")
    if _SHARED_MEMORY.is_dir():
        total = shutil.disk_usage(_SHARED_MEMORY).total
        if total < _SMALLEST_SHARED_MEMORY:
            yield broken(
                "shared_memory_small",
                f"{_SHARED_MEMORY} has {human_bytes(total)}: several GPUs "
                "of a machine exchange arrays by it",
                f"docker run --shm-size=8g, or mount -o remount,size=8g {_SHARED_MEMORY}",
            )
