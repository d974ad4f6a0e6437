"""Rows of files larger than memory, read as they are drawn (`data.stream`).

The order is endless and a function of the index alone: each epoch holds every row once, the blocks
of all files in an order of its own, and the rows of a window of neighbouring blocks shuffled
together. Only one window is in memory.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rljax.data.online.stream import Stream
from rljax.errors import InputError
from rljax.files import open_file, parse_row, raw_lines, read_lines

BLOCK_ROWS = 1024  # of a .jsonl file; of a .parquet file a block is a row group, or a part of one
WINDOW_ROWS = 16_384  # a window is as many blocks as have these, or these bytes; one at least
WINDOW_BYTES = 2**28
BLOCK_BYTES = 2**26  # that a part of a large row group has at most, uncompressed
KINDS = (".jsonl", ".parquet")


class StoredRows(Stream):
    """The rows of .jsonl or .parquet files as a stream: item `index` is row `number(index)` of all.

    Of a .jsonl file the offsets of its blocks are found first, in one pass that keeps no text.
    `names`: what errors call the files, where that is not their paths.
    """

    def __init__(self, paths: Sequence[Path], names: Sequence[str] = ()):
        self.names = [str(name) for name in names or paths]
        for path, name in zip(paths, self.names, strict=True):
            if path.suffix not in KINDS:
                raise InputError(
                    f"{name} cannot be read as it is drawn",
                    rule=f"data.stream reads {' and '.join(KINDS)}",
                    fix="data.stream=False, or write the file as one of these",
                )
        files = [(_Lines if path.suffix == ".jsonl" else _RowGroups)(path) for path in paths]
        self._blocks = [(file, block) for file in files for block in range(len(file.counts))]
        self.counts = np.array([count for file in files for count in file.counts], np.int64)
        self.rows = int(self.counts.sum())
        if not self.rows:
            raise InputError(
                f"{', '.join(self.names[:3])} has no rows", fix="check the file and the split"
            )
        bytes_of_row = max(sum(file.bytes for file in files) // self.rows, 1)
        self._window_rows = min(WINDOW_ROWS, WINDOW_BYTES // bytes_of_row)
        self._starts = np.concatenate([[0], np.cumsum(self.counts)])
        self._file_ends = np.cumsum([sum(file.counts) for file in files])
        self.convert = None  # (row, index) -> the row in our columns
        self._epoch, self._order, self._window = None, None, None
        super().__init__(self._row, rows=self.rows)

    def number(self, index: int) -> int:
        """The number in the files one after the other, from 0, of item `index`."""
        block, row = self._block_row(*self._locate(index))
        return int(self._starts[block]) + row

    def location(self, index: int) -> str:
        """The file and the row there of item `index`, as errors name them."""
        number = self.number(index)
        file = int(np.searchsorted(self._file_ends, number, side="right"))
        return f"{self.names[file]}: row {number - int(self._file_ends[file - 1]) * (file > 0)}"

    def some(self) -> list[dict]:
        """The rows of the first block, as the file has them."""
        file, number = self._blocks[0]
        return [row for row in file.read(number) if isinstance(row, dict)]

    def _row(self, index: int) -> dict:
        window, offset = self._locate(index)
        if self._window is None or self._window[0] != (self._epoch[0], window):
            self._window = None  # before the next one is read
            read = {}
            for block in sorted(self._epoch[1][window]):  # parts of a row group in one pass
                file, number = self._blocks[block]
                read[block] = file.read(number)
            self._window = (self._epoch[0], window), read
        block, number = self._block_row(window, offset)
        row = self._window[1][block][number]
        if not isinstance(row, dict):
            raise InputError(
                f"{self.location(index)} is not an object",
                value=row,
                fix='each row is one JSON object such as {"prompt": ..., "ground_truth": ...}',
            )
        return self.convert(row, index) if self.convert else row

    def _locate(self, index: int) -> tuple[int, int]:
        """(the window of the epoch of item `index`, its offset there)."""
        epoch, offset = divmod(index, self.rows)
        if self._epoch is None or self._epoch[0] != epoch:
            windows, sizes = [[]], [0]
            for block in _shuffled(len(self.counts), epoch, 0).tolist():
                if sizes[-1] >= self._window_rows:
                    windows.append([])
                    sizes.append(0)
                windows[-1].append(block)
                sizes[-1] += int(self.counts[block])
            self._epoch = epoch, windows, np.concatenate([[0], np.cumsum(sizes)])
            self._order = None
        ends = self._epoch[2]
        window = int(np.searchsorted(ends, offset, side="right")) - 1
        return window, offset - int(ends[window])

    def _block_row(self, window: int, offset: int) -> tuple[int, int]:
        """(block, row of it) at an offset of a window."""
        epoch, windows, ends = self._epoch
        if self._order is None or self._order[0] != window:
            size = int(ends[window + 1] - ends[window])
            self._order = window, _shuffled(size, epoch, 1 + window)
        at = int(self._order[1][offset])
        for block in windows[window]:
            if at < self.counts[block]:
                return block, at
            at -= int(self.counts[block])
        raise AssertionError("an offset lies in its window")


def _shuffled(count: int, epoch: int, which: int) -> np.ndarray:
    """An order of `count` numbers: raw bits, whose stream numpy keeps the same in every version."""
    bits = np.random.Philox(np.random.SeedSequence([epoch, which]))
    return np.argsort(bits.random_raw(count), kind="stable")


class _Lines:
    """Blocks of a .jsonl file; blank lines are no rows."""

    def __init__(self, path: Path):
        self.path, self.counts, self._at = path, [], []
        offset, filled = 0, BLOCK_ROWS
        for number, data in enumerate(raw_lines(path)):
            if not _is_blank(data, offset == 0):
                if filled == BLOCK_ROWS:
                    self._at.append((offset, number))
                    self.counts.append(0)
                    filled = 0
                filled += 1
                self.counts[-1] += 1
            offset += len(data)
        self.bytes = offset

    def read(self, block: int) -> list[dict]:
        offset, before = self._at[block]
        rows = []
        for number, line in read_lines(self.path, offset=offset):
            if line.strip():
                rows.append(parse_row(line, self.path, before + number))
            if len(rows) == self.counts[block]:
                return rows
        raise InputError(f"{self.path} has become shorter", fix="keep the file while it is read")


def _is_blank(line: bytes, first: bool) -> bool:
    """Returns whether read_lines has nothing but blanks of it, of which Unicode has more than
    ASCII."""
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
                meta = pyarrow.parquet.read_metadata(file)
        except InputError:
            raise
        except Exception as error:  # truncated, foreign: the library has a class for each
            raise _unreadable(path, error) from None
        self._parts, self.counts, self.bytes = [], [], 0  # (row group, number of the part there)
        self._part_rows = {}
        for group in range(meta.num_row_groups):
            about = meta.row_group(group)
            self.bytes += about.total_byte_size
            parts = max(-(-about.total_byte_size // BLOCK_BYTES), 1)
            size = self._part_rows[group] = max(-(-about.num_rows // parts), 1)
            for number, start in enumerate(range(0, about.num_rows, size)):
                self._parts.append((group, number))
                self.counts.append(min(size, about.num_rows - start))
        self._pass = None  # (row group, number of the next part, the parts)

    def read(self, block: int) -> list[dict]:
        group, number = self._parts[block]
        try:
            if self._pass is None or self._pass[0] != group or self._pass[1] > number:
                self._pass = group, 0, self._read_parts(group)
            _, at, parts = self._pass
            for _ in range(at, number):
                next(parts)
            rows = next(parts).to_pylist()
            self._pass = group, number + 1, parts
        except Exception as error:
            self._pass = None
            raise _unreadable(self.path, error) from None
        if len(rows) != self.counts[block]:
            raise InputError(f"{self.path} has changed", fix="keep the file while it is read")
        return rows

    def _read_parts(self, group: int):
        import pyarrow.parquet

        # Page by page: what is read ahead would be the whole row group.
        how = dict(buffer_size=2**20, pre_buffer=False)
        with (
            os.fdopen(open_file(self.path), "rb") as stream,
            pyarrow.parquet.ParquetFile(stream, **how) as file,
        ):
            yield from file.iter_batches(self._part_rows[group], row_groups=[group])


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(
        f"{path} is not a readable parquet file",
        rule=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
        fix="copy or write it again; a half-copied file lacks its footer",
    )
