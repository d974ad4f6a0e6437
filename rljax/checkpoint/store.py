"""Checkpoints under a URL. The manifest, which is put last, commits a step: a step without one does
not exist, and the files of a killed save are passed over and removed at the next one."""

import contextlib
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
        """URL of the checkpoints."""
        return self.store.url

    def _store(self, step: int) -> Store:
        return Store(self.at(step))

    def at(self, step: int, name: str = "") -> str:
        """Returns the URL of a checkpoint, or of a file in it."""
        return "/".join(filter(None, [self.store.url, f"{step:08d}", name]))

    def prepare(self) -> None:
        """Removes saves that were killed half-way."""
        for step in self.left_over():
            self.remove(step)

    def _folders(self) -> list[int]:
        return [int(name) for name in self.store.folders() if STEP.fullmatch(name)]

    def steps(self) -> list[int]:
        """Returns the steps that have a manifest, oldest first."""
        return sorted(step for step in self._folders() if self._store(step).exists(MANIFEST))

    def left_over(self) -> list[int]:
        """Returns the saves that never became complete, oldest first."""
        return sorted(set(self._folders()) - set(self.steps()))

    def check_room(self, needed: int) -> None:
        """Does nothing: a store does not say how much room it has."""

    # -- writing --

    def clear(self, step: int) -> None:
        """Makes room for a save of `step`, on the first host."""
        self.remove(step)

    def begin(self, step: int, arrays) -> Callable[[], dict]:
        """Copies the arrays to host memory; returns a function that writes this host's part of them
        and returns {name: bytes and SHA-256} of its files."""
        parts = snapshot(arrays)
        return lambda: write(self._store(step), parts)

    def commit(self, step: int, files: dict[str, dict], state: str) -> None:
        """Writes everything but the arrays, then the manifest. Called on the first host."""
        store, data = self._store(step), state.encode()
        store.put(STATE, data)
        digest = hashlib.sha256(data).hexdigest()
        files = {**files, STATE: {"bytes": len(data), "sha256": digest}}
        text = json.dumps({"step": step, "files": dict(sorted(files.items()))}, indent=1)
        store.put(MANIFEST, text.encode())

    def abandon(self, step: int) -> None:
        """Removes what is left of a save that failed, if the store allows it."""
        with contextlib.suppress(OSError):
            self.remove(step)

    def remove(self, step: int) -> None:
        """Removes a checkpoint, the manifest first: from then on the step does not exist."""
        store = self._store(step)
        store.remove(MANIFEST)
        store.remove_folder("")

    # -- reading --

    def sizes(self, step: int) -> dict[str, int]:
        """Returns {name: bytes} of the files of a checkpoint except its manifest."""
        sizes = self._store(step).sizes()
        return {name: size for name, size in sizes.items() if name != MANIFEST}

    def read(self, step: int, name: str) -> str:
        """Returns the text of a file."""
        return self._store(step).read(name).decode()

    def read_state(self, step: int) -> str:
        """Returns the text of state.json. Raises Damaged if it is not the one in the manifest."""
        return self._reader(step, only_state=True).read(STATE).decode()

    def altered(self, step: int, name: str, sha256: str) -> str:
        """Compares state.json with its manifest entry; returns the difference, or "". Other files
        are compared when they are read."""
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
        """Returns the arrays of `step` that `like` holds, with its shapes, dtypes and
        shardings. Raises `fits(why)` if they are others, and Damaged for bytes that are not
        those that were saved."""
        return read(self._reader(step), like, fits)

    read_some = read_arrays
