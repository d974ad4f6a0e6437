"""The code of the working folder as one file, with the same bytes for the same code."""

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

from rljax.errors import InputError

MOST_BYTES = 100 * 2**20  # sent to every host; what is larger is data, which belongs into a bucket
_LEFT_OUT = ("runs", "__pycache__", ".git", ".venv", "venv", "node_modules")


def code_archive(folder: Path, into: Path) -> str:
    """Writes `into`, a .tar.gz of the folder's files, and returns its SHA-256. In a git checkout
    these are the files that git knows or does not ignore; elsewhere all but runs/, hidden folders
    and environments. Raises InputError for no files, and for more than MOST_BYTES."""
    files = _of_git(folder)
    if files is None:
        files = _of_folder(folder)
    sizes = {name: (folder / name).stat().st_size for name in files if (folder / name).is_file()}
    total = sum(sizes.values())
    if not sizes or total > MOST_BYTES:
        largest = sorted(sizes, key=sizes.get)[-3:][::-1]
        problem = "the code to send"
        rule = f"above nothing, at most {MOST_BYTES // 2**20} MiB"
        fix = f"move data to a bucket or name it in .gitignore: {', '.join(largest)}"
        raise InputError(problem, value=f"{total / 2**20:.0f} MiB in {folder}", rule=rule, fix=fix)
    with into.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as zipped:
        with tarfile.open(fileobj=zipped, mode="w") as tar:
            for name in sorted(sizes):
                tar.addfile(*_entry(folder / name, name))
    return hashlib.sha256(into.read_bytes()).hexdigest()


def _entry(path: Path, name: str) -> tuple[tarfile.TarInfo, io.BytesIO]:
    content = path.read_bytes()
    info = tarfile.TarInfo(name)
    info.size = len(content)
    info.mode = 0o755 if os.access(path, os.X_OK) else 0o644
    return info, io.BytesIO(content)


def _of_git(folder: Path) -> list[str] | None:
    if shutil.which("git") is None:
        return None
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=folder,
        capture_output=True,
        check=False,
    )
    if listing.returncode:
        return None
    return sorted(set(filter(None, listing.stdout.decode().split("\0"))))


def _of_folder(folder: Path) -> list[str]:
    names = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [f for f in folders if f not in _LEFT_OUT and not f.startswith(".")]
        names += [str((Path(parent) / file).relative_to(folder)) for file in files]
    return names
