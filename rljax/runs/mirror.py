"""A run folder under a URL. The run writes a local folder, and its changes are put to the store,
with every checkpoint and every minute. A restart fetches it back.

An object store cannot append, so metrics.jsonl grows locally and is put whole.
"""

import contextlib
import logging
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from rljax.runs.folder import LOCK
from rljax.runs.store import Store, is_url, local_path
from rljax.runs.store_lock import as_lock_file

LOG = logging.getLogger("rljax")
EVERY_S = 60.0
MODELS = ("policy", "reward_model", "adapter")  # whole folders, which an export replaces
# Not copied: checkpoints are put by themselves, and wandb keeps its own files.
_ELSEWHERE = ("checkpoints", "wandb")
_LAST = ("summary.json", "report.html")  # put last: they show that all other files are there
_RESUMED = ("tensorboard",)  # folders that a restart goes on with


class Mirror:
    """Keeps the files of `folder` in `store`; `only` names the folders that a host other than the
    first puts."""

    def __init__(self, store: Store, folder: Path, only: tuple[str, ...] = ()):
        self.store, self.folder, self.only = store, folder, only
        self.known: dict[str, tuple | None] = {}  # files in the store: {name: its local signature}
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._renew, daemon=True, name="mirror")

    def fetch(self) -> None:
        """Gets the files that a restart reads or goes on writing."""
        for name in self.store.sizes():
            top, _, below = name.partition("/")
            if name == LOCK or top in _ELSEWHERE:
                continue
            if not below or top in _RESUMED:
                self.store.get_file(name, self.folder / name)
                self.known[name] = _signature(self.folder / name)
            elif top in MODELS:
                self.known[name] = None

    def fetch_from(self, folder: str, start: str) -> None:
        """Gets the files of a folder whose names begin with `start`, which are appended to."""
        for name in self.store.sizes(folder, below=False):
            if name.startswith(start):
                path = f"{folder}/{name}"
                self.store.get_file(path, self.folder / path)
                self.known[path] = _signature(self.folder / path)

    def put(self) -> None:
        """Puts files that have changed, and removes those that are gone. Raises OSError if a
        request fails."""
        with self.lock:
            local = self._files()
            removed = [name for name in self.known if name not in local and self._is_gone(name)]
            for name in removed:
                self.store.remove(name)
                del self.known[name]
            for name in sorted(local, key=lambda name: (name in _LAST, name == _LAST[-1], name)):
                self._put(name, local[name])

    def _is_gone(self, name: str) -> bool:
        top, _, below = name.partition("/")
        # A model's folder that is not here is that of an earlier start.
        return not below or self.known[name] is not None or (self.folder / top).is_dir()

    def _put(self, name: str, signature: tuple) -> None:
        if self.known.get(name) == signature:
            return
        with contextlib.suppress(FileNotFoundError):  # it has been removed since
            if name.endswith(".jsonl"):  # it grows meanwhile
                self.store.put(name, (self.folder / name).read_bytes())
            else:
                self.store.put_file(self.folder / name, name)
            self.known[name] = signature

    def _files(self) -> dict[str, tuple]:
        """{name: size and time} of the files to keep."""
        signatures = {}
        for parent, folders, names in os.walk(self.folder):
            top = os.path.relpath(parent, self.folder)
            folders[:] = [f for f in folders if f[0] != "." and (top != "." or self._keeps(f))]
            for name in names if top != "." or not self.only else []:
                path = Path(parent, name)
                if name[0] == "." or name.endswith(".tmp"):  # a draft
                    continue
                with contextlib.suppress(OSError):
                    if path.is_file():  # a pipe would never end
                        signatures[str(path.relative_to(self.folder))] = _signature(path)
        return signatures

    def _keeps(self, folder: str) -> bool:
        return folder not in _ELSEWHERE and (not self.only or folder in self.only)

    # -- every minute --

    def _renew(self) -> None:
        failing = False
        while not self.ended.wait(EVERY_S):
            try:
                self.put()
                failing = False
            except OSError as error:
                if not failing:
                    LOG.warning("the files of the run are not put: %s; they are tried again", error)
                failing = True

    def __enter__(self) -> "Mirror":
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.ended.set()
        self.thread.join()


def _signature(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


# -- for whoever reads a run folder --


@contextlib.contextmanager
def local_copy(folder: str | os.PathLike, inside: Sequence[str] = ()) -> Iterator[Path]:
    """Yields a folder as a local one. Of a URL it is a copy, for as long as the block lasts, of the
    files in the folder itself and in the folders `inside` it; the last parts of its path are those
    of the URL."""
    if not is_url(folder):
        yield local_path(folder)
        return
    store = Store(str(folder))
    with tempfile.TemporaryDirectory(prefix="rljax-", ignore_cleanup_errors=True) as scratch:
        path = Path(scratch, *filter(None, store.url.partition("://")[2].split("/")))
        path.mkdir(parents=True, exist_ok=True)
        for top in ("", *inside):
            for name in store.sizes(top, below=False):
                store.get_file(f"{top}/{name}".strip("/"), path / top / name)
        as_lock_file(path / LOCK)
        yield path
