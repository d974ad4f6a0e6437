"""Checkpoints under a URL. The manifest, which is put last, is the commit: a step without one does
not exist, and what a killed save has left is passed over and removed at the next one.
"""

import hashlib
import json
from collections.abc import Callable, Mapping

from rljax.checkpoint.disk import MANIFEST, STATE, STEP
from rljax.checkpoint.pieces import RESTORE, Damaged, Reader, read, snapshot, write
from rljax.errors import InputError
from rljax.files import json_object
from rljax.runs.store import Store


class StoreFolder:
    """The checkpoints below a URL: URL/00000012/...

    Of the arrays, `sizes` are compared when a step is chosen, and SHA-256 as each piece is read.
    """

    def __init__(self, url: str):
        self.store = Store(url)

    @property
    def folder(self) -> str:
        return self.store.url

    def _store(self, step: int) -> Store:
        return Store(self.at(step))

    def at(self, step: int, name: str = "") -> str:
        """The URL of a checkpoint, or of a file in it."""
        return "/".join(filter(None, [self.store.url, f"{step:08d}", name]))

    def prepare(self) -> None:
        """Removes saves that were killed half-way."""
        for step in self.left_over():
            self.remove(step)

    def _folders(self) -> list[int]:
        return [int(name) for name in self.store.folders() if STEP.fullmatch(name)]

    def steps(self) -> list[int]:
        """Steps that have a manifest, oldest first."""
        there = [step for step in self._folders() if self._store(step).exists(MANIFEST)]
        return sorted(there)

    def left_over(self) -> list[int]:
        """Saves that never became whole."""
        return sorted(set(self._folders()) - set(self.steps()))

    def check_room(self, needed: int) -> None:
        """A store does not say how much room it has."""

    # -- writing --

    def clear(self, step: int) -> None:
        """Makes room for a save of `step`, on the first host."""
        self.remove(step)

    def begin(self, step: int, arrays) -> Callable[[], dict]:
        """Copies the arrays to host memory -> what writes this host's part of them and returns
        {name: bytes and SHA-256} of its files."""
        parts = snapshot(arrays)
        return lambda: write(self._store(step), parts)

    def commit(self, step: int, files: dict[str, dict], state: str) -> None:
        """Writes what is no array, and the manifest. On the first host."""
        store, data = self._store(step), state.encode()
        store.put(STATE, data)
        digest = hashlib.sha256(data).hexdigest()
        files = {**files, STATE: {"bytes": len(data), "sha256": digest}}
        text = json.dumps({"step": step, "files": dict(sorted(files.items()))}, indent=1)
        store.put(MANIFEST, text.encode())

    def abandon(self, step: int) -> None:
        """Removes what a save that failed has left, if the store lets it."""
        try:
            self.remove(step)
        except OSError:
            pass

    def remove(self, step: int) -> None:
        """The manifest first: from then on the step does not exist."""
        store = self._store(step)
        store.remove(MANIFEST)
        store.remove_folder("")

    # -- reading --

    def sizes(self, step: int) -> dict[str, int]:
        """{name: bytes} of the files of a checkpoint, but for its manifest."""
        sizes = self._store(step).sizes()
        return {name: size for name, size in sizes.items() if name != MANIFEST}

    def read(self, step: int, name: str) -> str:
        """The text of a file."""
        return self._store(step).read(name).decode()

    def read_state(self, step: int) -> str:
        """The text of state.json, as the manifest knows it."""
        return self._reader(step, only_state=True).read(STATE).decode()

    def altered(self, step: int, name: str, sha256: str) -> str:
        """Compares a small file with its manifest entry -> the difference, or ""."""
        if name != STATE:
            return ""
        data = self._store(step).read(name)
        if hashlib.sha256(data).hexdigest() == sha256:
            return ""
        return f"{self.at(step, name)} has another SHA-256 than when it was saved"

    def _reader(self, step: int, *, only_state: bool = False) -> Reader:
        try:
            manifest = json_object(self.read(step, MANIFEST), self.at(step, MANIFEST))
            files: Mapping = manifest["files"]
            if only_state:
                files = {STATE: files[STATE]}
            return Reader(self._store(step), files)
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, Damaged):
                raise
            raise Damaged(
                f"{self.at(step, MANIFEST)} is not readable ({error})", fix=RESTORE
            ) from None

    def read_arrays(self, step: int, like, fits: Callable[[str], InputError]):
        """The arrays of `step` that `like` holds, with its shapes, dtypes and shardings."""
        return read(self._reader(step), like, fits)

    read_some = read_arrays
