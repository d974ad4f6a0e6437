"""Files under a URL (gs://, s3://, anything fsspec knows): whole files are put, read, listed
and removed.

An object store has no append and no rename, and a put is seen whole or not at all. Other failures
of a request are handled here: it is tried again, and the size of a file that was put is checked. A
request that fails however often it is tried raises StoreError, an OSError.
"""

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from rljax.errors import InputError

# Seconds before each further try of a request. A service that is down for longer fails a save.
PAUSES_S = (0.1, 0.5, 2.0, 8.0, 20.0)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_GCS, _S3 = "gcsfs>=2024.6", "s3fs>=2024.6"
_NEEDS = {"gs": _GCS, "gcs": _GCS, "s3": _S3, "s3a": _S3}  # what pip installs for a scheme
_NO_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_FINAL = (*_NO_FILE, PermissionError, NotImplementedError)  # what another try does not mend


class StoreError(OSError):
    """An error of a request that failed however often it was tried."""


def is_url(path: str | os.PathLike) -> bool:
    """Returns whether a path names a folder that only fsspec can reach; file:// is a local
    folder."""
    match = _SCHEME.match(str(path))
    return bool(match) and match[1].lower() not in ("file", "local")


def local_path(path: str | os.PathLike) -> Path:
    """Returns the path of a local folder, without file://."""
    match = _SCHEME.match(str(path))
    return Path(str(path)[match.end() :]) if match else Path(path)


def is_folder(path: str | os.PathLike) -> bool:
    """Returns whether a folder exists; a folder under a URL exists if a file is in it."""
    return bool(Store(str(path)).sizes()) if is_url(path) else local_path(path).is_dir()


def require_run_folder(path: str | os.PathLike) -> None:
    """Raises InputError for a folder that does not exist."""
    if not is_folder(path):
        raise InputError("no such run folder", value=str(path), fix="name a folder of a run")


class Store:
    """The files under one URL. Names are relative to it, parts joined by "/". Raises InputError if
    the package of its file system is not installed."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.files, self.root = _opened(self.url)

    def __str__(self) -> str:
        return self.url

    def at(self, name: str) -> str:
        """Returns the URL of a file, for messages."""
        return f"{self.url}/{name}" if name else self.url

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def read(self, name: str) -> bytes:
        """Returns the bytes of a file. Raises FileNotFoundError if there is none."""
        return self._tried("read", name, lambda: self.files.cat_file(self._path(name)))

    def put(self, name: str, data: bytes) -> None:
        """Writes a whole file, and checks that all of it has arrived."""

        def write() -> None:
            self.files.pipe_file(self._path(name), data)
            self._check_size(name, len(data))

        self._tried("written", name, write)

    def put_file(self, path: Path, name: str) -> None:
        """Writes a copy of a local file, which may be large."""

        def write() -> None:
            size = path.stat().st_size
            self.files.put_file(str(path), self._path(name))
            self._check_size(name, size)

        self._tried("written", name, write)

    def get_file(self, name: str, path: Path) -> None:
        """Writes a local copy of a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._tried("read", name, lambda: self.files.get_file(self._path(name), str(path)))

    def _check_size(self, name: str, size: int) -> None:
        self.files.invalidate_cache()
        stored = self.files.info(self._path(name))["size"]
        if stored != size:
            raise StoreError(f"{stored} of {size} bytes have arrived")

    def sizes(self, folder: str = "", *, below: bool = True) -> dict[str, int]:
        """Returns {name: bytes} of the files of a folder, and of those `below` it; names are
        relative to the folder."""
        sizes = {}
        for entry in self._inside(folder):
            name = entry["name"].rstrip("/").rpartition("/")[2]
            if entry["type"] == "file":
                sizes[name] = int(entry["size"] or 0)
            elif below:
                inner = self.sizes(f"{folder}/{name}".strip("/"))
                sizes |= {f"{name}/{file}": size for file, size in inner.items()}
        return sizes

    def folders(self, folder: str = "") -> list[str]:
        """Returns the names of the folders in a folder, sorted."""

        folders = (entry for entry in self._inside(folder) if entry["type"] != "file")
        return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in folders)

    def _inside(self, folder: str) -> list[dict]:
        """Lists fsspec's entries of the files and folders in a folder. By `ls`: its `find` and
        `walk` take a folder that could not be listed for an empty one."""
        top = self._path(folder)

        def list_folder() -> list:
            self.files.invalidate_cache()
            try:
                return self.files.ls(top, detail=True)
            except FileNotFoundError:
                return []

        entries = self._tried("listed", folder, list_folder)
        # Some services keep an empty file under the name of a folder itself.
        return [
            entry
            for entry in entries
            if entry["name"].strip("/") != top.strip("/")
            and (entry["type"] != "file" or entry["name"][-1] != "/")
        ]

    def exists(self, name: str) -> bool:
        """Returns whether there is a file of that name. It does not call fsspec's `isfile`, which
        takes every failure of the request for no file."""

        def look_up() -> bool:
            self.files.invalidate_cache()
            try:
                return self.files.info(self._path(name))["type"] == "file"
            except _NO_FILE:
                return False

        return self._tried("looked at", name, look_up)

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""

        def remove_file() -> None:
            with contextlib.suppress(FileNotFoundError):
                self.files.rm_file(self._path(name))

        self._tried("removed", name, remove_file)

    def remove_folder(self, folder: str) -> None:
        """Removes all files below a folder."""

        def remove_files() -> None:
            self.files.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                self.files.rm(self._path(folder), recursive=True)

        self._tried("removed", folder, remove_files)

    def _tried(self, action_name: str, name: str, action: Callable):
        """Returns the result of a request, which is tried again as long as that may help."""
        for pause in (*PAUSES_S, None):
            try:
                return action()
            except _FINAL as error:
                raise type(error)(f"{self.at(name)} could not be {action_name}: {error}") from None
            except Exception as error:  # of whichever library reaches the service
                if pause is None or not _may_help(error):
                    reason = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
                    text = f"{self.at(name)} could not be {action_name}: {reason}"
                    raise StoreError(text) from error
            time.sleep(pause)


def _may_help(error: Exception) -> bool:
    """Returns whether another try can mend an error: not one of missing rights, whatever its
    class."""
    message = f"{type(error).__name__} {error}".lower()
    hopeless = ("forbidden", "credential", "access denied", "unauthorized", "anonymous caller")
    return not any(word in message for word in hopeless)


def _opened(url: str):
    """(file system, path) of a URL."""
    import fsspec  # only where a URL is used

    scheme = _SCHEME.match(url)[1]
    try:
        return _file_system(url)
    except ImportError as error:
        package = _NEEDS.get(scheme.lower())
        install = f"pip install '{package}'" if package else "install the package that it names"
        raise InputError(
            f"{scheme}:// needs a package that is not installed",
            value=url,
            rule=str(error),
            fix=install,
        ) from None
    except Exception as error:
        scheme_known = scheme in fsspec.available_protocols()
        raise InputError(
            "the URL cannot be used"
            if scheme_known
            else f"no file system is known for {scheme}://",
            value=url,
            rule=f"{type(error).__name__}: {error}"[:300],
            fix="gs://, s3://, or a file system of fsspec",
        ) from None


@functools.lru_cache(maxsize=64)
def _file_system(url: str):
    import fsspec

    files, root = fsspec.core.url_to_fs(url)
    return files, root.rstrip("/")
