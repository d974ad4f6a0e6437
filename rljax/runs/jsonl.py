"""metrics.jsonl, samples.jsonl and episodes.jsonl of a run folder: rows as strict JSON lines,
written and read.

Strict JSON has no NaN, so non-finite numbers are the strings "nan", "inf", "-inf", which
`read_jsonl` (and any `float(...)`) turns back into numbers.
"""

import io
import json
import logging
import math
import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rljax.errors import InputError
from rljax.files import parse_json, raw_lines
from rljax.runs.folder import is_open_at
from rljax.runs.store import Store, is_url, local_path

LOG = logging.getLogger("rljax.tracking.trackers")
FILES = ("metrics.jsonl", "samples.jsonl")
EPISODES = "episodes.jsonl"  # of runs with an environment: there from its first row on
TEXT_FIELDS = frozenset(  # "inf" is text here
    "prompt response ground_truth status phase observation text pieces seat finish message".split()
)
NON_FINITE = frozenset({"nan", "inf", "-inf"})


# --- values: device scalars and numpy scalars become plain numbers once, for all trackers ---


def plain(value: object) -> object:
    """Returns `value` as JSON data (floats may be non-finite); values of other types
    become text."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, numbers.Integral):
        return int(value)
    try:
        return float(value)  # numpy and jax scalars, 0-d arrays
    except (TypeError, ValueError, OverflowError):
        return str(value)


def encoded(value: object) -> object:
    """Returns JSON data with the non-finite floats as the strings "nan", "inf" and "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {key: encoded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [encoded(item) for item in value]
    return value


def _decode(value: object, key: str = "") -> object:
    if isinstance(value, str):
        return float(value) if value in NON_FINITE and key not in TEXT_FIELDS else value
    if isinstance(value, dict):
        return {name: _decode(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_decode(item, key) for item in value]
    return value


def read_jsonl(path: str | os.PathLike) -> list[dict]:
    """Returns the rows of a jsonl file, which may be a URL. A last line that a kill has torn is
    left out. Raises FileNotFoundError if there is no file."""
    rows = []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = _decode(parse_json(line, "", mends=True))
        except InputError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif line[-1:] == b"\n":  # a torn last line is expected, one in the middle is damage
            LOG.warning("%s line %d is not a JSON object and was left out", path, number)
    return rows


def _lines(path: str | os.PathLike) -> Iterable[bytes]:
    """The lines of a file, with their ends. Raises FileNotFoundError where there is none."""
    if is_url(path):
        folder, _, name = str(path).rpartition("/")
        return io.BytesIO(Store(folder).read(name))
    path = local_path(path)
    path.lstat()
    return raw_lines(path)


# --- jsonl ---


class _JsonlFile:
    """An append-only file of JSON lines. Each line is written whole or not at all."""

    def __init__(self, path: Path):
        self.path = path
        self.lost = ""  # a text about rows that could not be kept
        self._open()

    def _open(self) -> None:
        path = self.path
        self.file = open(path, "ab", buffering=0)
        with open(path, "rb") as reader:
            reader.seek(max(0, self.size() - 1))
            if reader.read() not in (b"", b"\n"):  # a kill tore the last line: nothing may join it
                self.file.truncate(path.read_bytes().rfind(b"\n") + 1)

    def write(self, row: Mapping) -> None:
        # backslashreplace makes a lone surrogate its own JSON escape: any text survives
        text = json.dumps(encoded(row), ensure_ascii=False, allow_nan=False) + "\n"
        data = text.encode("utf-8", errors="backslashreplace")
        self._reopen_if_gone()
        start = self.size()
        try:
            if self.file.write(data) != len(data):
                raise OSError(f"short write to {self.path}: is the disk full?")
        except OSError as error:
            self.lost = self.lost or f"rows of {self.path} were not written: {error}"
            self.file.truncate(start)
            raise

    def _reopen_if_gone(self) -> None:
        """Opens a new file for the next rows, if somebody has removed or replaced this one."""
        if is_open_at(self.file.fileno(), self.path):
            return
        if not self.lost:
            self.lost = f"{self.path} was removed or replaced while it was written"
            LOG.warning("%s: rows are missing", self.lost)
        old_file = self.file
        self._open()
        old_file.close()

    def size(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def sync(self) -> int:
        os.fsync(self.file.fileno())
        return self.size()


class JsonlTracker:
    """The jsonl files of a run. When a call returns, its lines have been handed to the operating
    system. Raises InputError if the run folder cannot be written."""

    def __init__(self, run_dir: str | os.PathLike):
        self.run_dir = run_dir = Path(run_dir)
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            names = [*FILES, *([EPISODES] if (run_dir / EPISODES).exists() else [])]
            self.files = {name: _JsonlFile(run_dir / name) for name in names}
        except OSError as error:
            raise InputError(
                "the run folder cannot be written",
                value=str(run_dir),
                rule=str(error),
                fix="choose another run folder or free the disk",
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends the metrics of a step to metrics.jsonl."""
        self.files["metrics.jsonl"].write({"step": int(step), **plain(metrics)})

    def samples(self, step: int, rows: Sequence[Mapping]) -> None:
        """Appends samples of a step to samples.jsonl."""
        for row in rows:
            self.files["samples.jsonl"].write({"step": int(step), **plain(row)})

    def episodes(self, step: int, rows: Sequence[Mapping]) -> None:
        """Appends episodes of a step to episodes.jsonl."""
        for row in rows:
            if EPISODES not in self.files:
                self.files[EPISODES] = _JsonlFile(self.run_dir / EPISODES)
            self.files[EPISODES].write({"step": int(step), **plain(row)})

    def offsets(self) -> dict[str, int]:
        """Returns the bytes of each file, synced to disk, for a checkpoint."""
        return {EPISODES: 0} | {name: file.sync() for name, file in self.files.items()}

    def lost(self) -> str:
        """Returns a text about rows that were lost, "" if none were."""
        for file in self.files.values():
            if not file.lost and not is_open_at(file.file.fileno(), file.path):
                file.lost = f"{file.path} was removed or replaced while it was written"
        return "; ".join(file.lost for file in self.files.values() if file.lost)

    def truncate(self, offsets: Mapping[str, int]) -> None:
        """Cuts the files back to a checkpoint's `offsets`, so that those of a resumed run equal
        those of an uninterrupted one."""
        for name, file in self.files.items():
            target, size = offsets.get(name), file.size()
            if target is None or size == target:
                continue
            if size > target:
                file.file.truncate(target)
            else:  # never stretched: that would fill the hole with zero bytes
                expected = f"had {target} when the checkpoint was saved"
                file.lost = f"{file.path} has {size} bytes, {expected}"
                LOG.warning("%s: rows are missing", file.lost)

    def close(self) -> None:
        """Closes the files."""
        for file in self.files.values():
            file.file.close()
