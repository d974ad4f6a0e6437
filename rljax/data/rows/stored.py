"""Rows of files larger than memory, read as they are drawn (`data.stream`).

The order is endless and a function of the index alone: each epoch holds every row once, the blocks
of all files in an order of its own, and the rows of a window of neighbouring blocks shuffled
together. Only one window is in memory. The blocks of all files are one grain dataset; the order is
ours, because windows of grain hold a number of rows, not of bytes, and cannot be read from within.
"""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rljax.config.answer_numbers import rows_of_table
from rljax.data.online.stream import Stream, permutation
from rljax.errors import InputError
from rljax.files import how_to_get_data, open_file, parse_row, raw_lines, read_lines

BLOCK_ROWS = 1024  # of a .jsonl file; of a .parquet file a block is a row group, or a part of one
WINDOW_ROWS = 16_384  # a window is as many blocks as have these, or these bytes; one at least
WINDOW_BYTES = 2**28
BLOCK_BYTES = 2**26  # that a part of a large row group has at most, uncompressed
KINDS = (".jsonl", ".parquet")


class StoredRows(Stream):
    """The rows of .jsonl or .parquet files as a stream: item `index` is row `number(index)` of all.

    The offsets of the blocks of a .jsonl file are found first, in one pass that keeps no text.
    `names` are the names of the files in errors, if these are not their paths. Raises InputError
    for files of another kind, that cannot be read, or without rows.
    """

    def __init__(self, paths: Sequence[Path], names: Sequence[str] = ()):
        import grain  # a second, which `--help` need not pay

        self.names = [str(name) for name in names or paths]
        for path, name in zip(paths, self.names, strict=True):
            if path.suffix not in KINDS:
                raise InputError(
                    f"{name} cannot be read as it is drawn",
                    rule=f"data.stream reads {' and '.join(KINDS)}",
                    fix=how_to_get_data(str(path))
                    or "data.stream=False, or write the file as one of these",
                )
        files = [(_Lines if path.suffix == ".jsonl" else _RowGroups)(path) for path in paths]
        blocks = [grain.MapDataset.range(len(file.counts)).map(file.read) for file in files]
        self._blocks = grain.MapDataset.concatenate(blocks)
        self.counts = np.array([count for file in files for count in file.counts], np.int64)
        self.rows = int(self.counts.sum())
        if not self.rows:
            raise InputError(
                f"{', '.join(self.names[:3])} has no rows", fix="check the file and the split"
            )
        bytes_of_row = max(sum(file.bytes for file in files) // self.rows, 1)
        self._window_rows = max(min(WINDOW_ROWS, WINDOW_BYTES // bytes_of_row), 1)
        self._starts = np.concatenate([[0], np.cumsum(self.counts)])  # of blocks, in rows
        self._file_starts = np.cumsum([0, *(sum(file.counts) for file in files)])
        self.convert = None  # (row, index) -> the row in our columns
        self._epoch, self._order, self._window = (None,), (None,), (None,)
        self._lock = threading.RLock()  # of these three and the files: a loader's thread reads rows
        super().__init__(self._row, rows=self.rows)

    def number(self, index: int) -> int:
        """Returns the number of item `index` in all files one after the other, from 0."""
        with self._lock:
            epoch, offset = divmod(index, self.rows)
            if self._epoch[0] != epoch:
                self._epoch = epoch, *self._windows(epoch)
            _, windows, starts = self._epoch
            window = int(np.searchsorted(starts, offset, side="right")) - 1
            if self._order[0] != (epoch, window):
                blocks = windows[window]
                rows = np.concatenate([np.arange(*self._starts[[b, b + 1]]) for b in blocks])
                rows = rows[permutation(len(rows), epoch, 1 + window)]
                self._order = (epoch, window), blocks, rows
            return int(self._order[2][offset - starts[window]])

    def _windows(self, epoch: int) -> tuple[list[np.ndarray], np.ndarray]:
        """Returns (the blocks of each window of an epoch, the first item of each in the epoch)."""
        blocks = permutation(len(self.counts), epoch, 0)
        ends, cuts = np.concatenate([[0], np.cumsum(self.counts[blocks])]), [0]
        while cuts[-1] < len(blocks):
            full = np.searchsorted(ends, ends[cuts[-1]] + self._window_rows)
            cuts.append(min(int(full), len(blocks)))
        return np.split(blocks, cuts[1:-1]), ends[cuts[:-1]]

    def location(self, index: int) -> str:
        """Returns the file of item `index`, and its row there, as errors name them."""
        number = self.number(index)
        file = int(np.searchsorted(self._file_starts, number, side="right")) - 1
        return f"{self.names[file]}: row {number - self._file_starts[file]}"

    def first_block(self) -> list[dict]:
        """Returns the rows of the first block, as the file has them."""
        return [row for row in self._blocks[0] if isinstance(row, dict)]

    def _row(self, index: int) -> dict:
        with self._lock:
            number = self.number(index)
            window, blocks, _ = self._order
            if self._window[0] != window:
                self._window = (None,)  # before the next one is read
                # In their order, because parts of a row group are read in one pass.
                self._window = window, {b: self._blocks[b] for b in sorted(blocks.tolist())}
            block = int(np.searchsorted(self._starts, number, side="right")) - 1
            row = self._window[1][block][number - self._starts[block]]
        if not isinstance(row, dict):
            fix = 'each row is one JSON object such as {"prompt": ..., "ground_truth": ...}'
            raise InputError(f"{self.location(index)} is not an object", value=row, fix=fix)
        return self.convert(row, index) if self.convert else row


class _Lines:
    """Blocks of a .jsonl file; blank lines are no rows."""

    def __init__(self, path: Path):
        self.path, self.counts = path, []
        self._offsets = []  # of each block: (its first byte, number of the lines before it)
        offset, rows_of_block = 0, BLOCK_ROWS
        for number, line in enumerate(raw_lines(path)):
            if not _is_blank(line, offset == 0):
                if rows_of_block == BLOCK_ROWS:
                    self._offsets.append((offset, number))
                    self.counts.append(0)
                    rows_of_block = 0
                rows_of_block += 1
                self.counts[-1] += 1
            offset += len(line)
        self.bytes = offset

    def read(self, block: int) -> list[dict]:
        offset, lines_before = self._offsets[block]
        rows = []
        for number, line in read_lines(self.path, offset=offset):
            if line.strip():
                rows.append(parse_row(line, self.path, lines_before + number))
            if len(rows) == self.counts[block]:
                return rows
        raise InputError(f"{self.path} has become shorter", fix="keep the file while it is read")


def _is_blank(line: bytes, first: bool) -> bool:
    """Returns whether read_lines reads nothing but blanks from the line, of which Unicode has more
    than ASCII. `first` is true of the first line of a file, which may begin with a byte order
    mark."""
    if line.startswith(b"{"):
        return False
    text = line.decode("utf-8", "replace")
    return not (text.removeprefix("\ufeff") if first else text).strip()


class _RowGroups:
    """Row groups of a .parquet file; those that take much memory in parts.

    Writers put a million rows into one. A part is found by decoding what stands before it in its
    row group, once for all parts that are read in their order.
    """

    def __init__(self, path: Path):
        import pyarrow.parquet

        self.path = path
        try:
            with os.fdopen(open_file(path), "rb") as file:
                file_meta = pyarrow.parquet.read_metadata(file)
        except InputError:
            raise
        except Exception as error:  # truncated, foreign: the library has a class for each
            raise _unreadable(path, error) from None
        self._parts, self.counts, self.bytes = [], [], 0  # (row group, number of the part there)
        self._part_rows = {}
        for group in range(file_meta.num_row_groups):
            group_meta = file_meta.row_group(group)
            self.bytes += group_meta.total_byte_size
            parts = max(-(-group_meta.total_byte_size // BLOCK_BYTES), 1)
            size = self._part_rows[group] = max(-(-group_meta.num_rows // parts), 1)
            for number, start in enumerate(range(0, group_meta.num_rows, size)):
                self._parts.append((group, number))
                self.counts.append(min(size, group_meta.num_rows - start))
        self._pass = None  # (row group, number of the next part, the parts)

    def read(self, block: int) -> list[dict]:
        group, number = self._parts[block]
        try:
            if self._pass is None or self._pass[0] != group or self._pass[1] > number:
                self._pass = group, 0, self._read_parts(group)
            _, next_part, parts = self._pass
            for _ in range(next_part, number):
                next(parts)
            rows = rows_of_table(next(parts), str(self.path))
            self._pass = group, number + 1, parts
        except InputError:
            raise
        except Exception as error:
            self._pass = None
            raise _unreadable(self.path, error) from None
        if len(rows) != self.counts[block]:
            raise InputError(f"{self.path} has changed", fix="keep the file while it is read")
        return rows

    def _read_parts(self, group: int):
        import pyarrow.parquet

        # Page by page: reading ahead would read the whole row group.
        options = dict(buffer_size=2**20, pre_buffer=False)
        with (
            os.fdopen(open_file(self.path), "rb") as stream,
            pyarrow.parquet.ParquetFile(stream, **options) as file,
        ):
            yield from file.iter_batches(self._part_rows[group], row_groups=[group])


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(
        f"{path} is not a readable parquet file",
        rule=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
        fix="copy or write it again; a half-copied file lacks its footer",
    )
