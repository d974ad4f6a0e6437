"""Run folders in a terminal: curves as charts of text and the newest completions, renewed while the
runs go on. A folder is only read, so a run can be followed on this machine, on another one that
shares the disk, or under a URL, and a finished one looked at.

If the output is no terminal, each new step is a line of plain text.
"""

import dataclasses
import difflib
import fnmatch
import os
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import rich.console
import rich.live
import rich.text

from rljax.report.comparison import names_of, run_folders
from rljax.report.head import check_is_run, title_of
from rljax.report.run_folder import RecordedRun, is_number, read_run
from rljax.runs.mirror import local_copy
from rljax.runs.store import is_url, require_run_folder
from rljax.tracking.charts import short
from rljax.tracking.console import one_line
from rljax.tracking.screen import Terminal

# Metrics that are charted by default, if the runs have them.
CHARTED = ("reward/mean", "eval/accuracy", "loss", "eval/loss", "entropy", "response_tokens/mean")
CHART_ROWS, NARROW, GAP = 6, 36, 2  # lines of a chart; columns that it has at least; between two
LABEL = 8  # columns of the numbers beside a chart
SHOWN = 2  # completions of a run


@dataclasses.dataclass(frozen=True)
class Screen:
    """Size of the screen in characters, and whether it shows only ASCII."""

    width: int
    height: int
    ascii_only: bool = False


def watch(
    folders: Sequence[str | os.PathLike],
    *,
    metrics: Sequence[str] = (),
    every_s: float = 2.0,
    once: bool = False,
    console: rich.console.Console | None = None,
) -> None:
    """Shows the runs until all of them have ended, or `once`. `metrics` are names or patterns of
    the charted metrics. A folder that holds runs, such as a sweep's, stands for those in it, even
    those that begin later. Raises InputError for a folder that does not exist, or without a run."""
    console = console or Terminal(highlight=False)
    for folder in folders:
        require_run_folder(folder)
    for path in run_folders(folders):
        if not is_url(path):
            check_is_run(path, path)
    if once:
        for line in frame(_read(folders), metrics, _screen(console, endless=True)):
            _say(console, line)
    elif console.is_terminal and not console.is_dumb_terminal:
        with rich.live.Live(console=console, auto_refresh=False, transient=False) as live:
            while True:
                runs = _read(folders)
                lines = frame(runs, metrics, _screen(console))
                live.update(rich.text.Text("\n".join(lines), no_wrap=True), refresh=True)
                if all_ended(runs):
                    return
                time.sleep(every_s)
    else:
        for line in new_lines(lambda: _read(folders), metrics, every_s):
            _say(console, line)


def _screen(console: rich.console.Console, *, endless: bool = False) -> Screen:
    ascii_only = not (console.encoding or "").lower().startswith("utf")
    return Screen(console.width, 10**6 if endless else console.height, ascii_only)


def _say(console: rich.console.Console, line: str) -> None:
    console.print(rich.text.Text(line), soft_wrap=True)
    console.file.flush()


def _read(folders: Sequence[str | os.PathLike]) -> dict[str, RecordedRun]:
    """Reads the runs, by their names. A last line that is still being written is not read, and of
    steps that a restart has computed again the later row counts."""
    runs = []
    for path in run_folders(folders):
        with local_copy(path) as folder:
            runs.append(read_run(Path(folder)))
    return dict(zip(names_of(runs), runs, strict=True))


def all_ended(runs: Mapping[str, RecordedRun]) -> bool:
    """Returns whether no process writes any of the folders, and each has begun."""
    return bool(runs) and all(
        run.ended() or (bool(run.starts or run.rows) and not run.running()) for run in runs.values()
    )


# -- a frame: what stands on the screen --


def frame(runs: Mapping[str, RecordedRun], metrics: Sequence[str], screen: Screen) -> list[str]:
    """Returns the lines of one picture, none wider than the screen and no more than it has: a line
    for each run, the charts, and in the remaining room the newest completions."""
    marks = _marks(len(runs), screen.ascii_only)
    lines = [
        one_line(f"{mark} {state(name, run)}", screen.width)
        for mark, (name, run) in zip(marks, runs.items(), strict=True)
    ]
    for line in missing(runs, metrics):
        lines += textwrap.wrap(one_line(line, 3 * screen.width), screen.width)
    for row in _charts(runs, _keys(runs, metrics), marks, screen):
        if len(lines) + len(row) >= screen.height:
            break
        lines += row
    for name, run in runs.items():
        for line in newest(run, screen.width):
            if len(lines) + 1 < screen.height:
                lines.append(line if len(runs) == 1 else one_line(f"{name}: {line}", screen.width))
    if screen.ascii_only:
        lines = [line.encode("ascii", "replace").decode() for line in lines]
    return [line.rstrip() for line in lines]


def state(name: str, run: RecordedRun) -> str:
    """Returns one line about a run: its name, what it trains, and its progress."""
    last, total = run.steps()
    status = run.summary.get("status") if run.ended() else None
    if status is None:
        started = run.rows or run.starts
        status = "running" if run.running() else "not ended" if started else "not begun"
    total_text = f" of {total}" if total else ""
    return f"{name}: {title_of(run)}, step {last}{total_text}, {status}"


def _marks(count: int, ascii_only: bool) -> list[str]:
    if count == 1:
        return ["*" if ascii_only else "•"]
    names = "123456789abcdefghijklmnopqrstuvwxyz"
    return [names[i % len(names)] for i in range(count)]


def _keys(runs: Mapping[str, RecordedRun], metrics: Sequence[str]) -> list[str]:
    """The metrics to chart, in the order in which they were asked for."""
    names = _known(runs)
    keys = [key for pattern in metrics or CHARTED for key in _matching(pattern, names)]
    return list(dict.fromkeys(keys))


def _known(runs: Mapping[str, RecordedRun]) -> list[str]:
    names = dict.fromkeys(key for run in runs.values() for key in run.keys())
    return [name for name in names if name not in ("step", "x")]  # the axis itself


def _matching(pattern: str, names: Sequence[str]) -> list[str]:
    """The metrics that a name or pattern stands for: "reward" for all that begin with reward/,
    where none has that name itself."""
    matching = [key for key in names if fnmatch.fnmatchcase(key, pattern)]
    return matching or [key for key in names if key.startswith(f"{pattern.rstrip('/')}/")]


def missing(runs: Mapping[str, RecordedRun], metrics: Sequence[str]) -> list[str]:
    """Returns a line for each pattern that no metric of the runs matches, with the known names."""
    names, lines = _known(runs), []
    for pattern in metrics if names else ():
        if not _matching(pattern, names):
            similar = [key for key in names if pattern.strip("*/") in key]
            similar = similar or difflib.get_close_matches(pattern, names, n=5, cutoff=0.5) or names
            lines.append(f"no metric matches {pattern!r}; there are {', '.join(similar[:20])}")
    return lines


def _charts(
    runs: Mapping[str, RecordedRun], keys: Sequence[str], marks: Sequence[str], screen: Screen
) -> Iterator[list[str]]:
    """Rows of charts, as many beside each other as fit."""
    columns = max(1, (screen.width + GAP) // (NARROW + GAP))
    columns = min(columns, 3, max(len(keys), 1))
    width = (screen.width - GAP * (columns - 1)) // columns
    for first in range(0, len(keys), columns):
        charts = []
        for key in keys[first : first + columns]:
            lines = [run.columns(key) for run in runs.values()]
            charts.append(text_chart(key, lines, marks, width, screen.ascii_only))
        rows = zip(*charts, strict=True)
        yield [(" " * GAP).join(line.ljust(width) for line in parts) for parts in rows]


def text_chart(
    title: str,
    lines: Sequence[tuple[np.ndarray, np.ndarray]],
    marks: Sequence[str],
    width: int,
    ascii_only: bool = False,
) -> list[str]:
    """Returns a chart of CHART_ROWS + 2 lines of `width` columns: title with the last values, the
    curves `lines`, each (x [N], y [N]), as marks, and the first and last step. A column is the mean
    of the finite values in it."""
    finite = [(x[np.isfinite(y)], y[np.isfinite(y)]) for x, y in lines]
    lasts = " ".join(short(float(y[-1])) for _, y in finite if len(y))
    head = one_line(f"{title}  {lasts}", width)
    bar, corner, dash = ("|", "+", "-") if ascii_only else ("┤", "└", "─")
    room = max(width - LABEL - 1, 1)
    if not any(len(y) for _, y in finite):
        return [head, *[""] * (CHART_ROWS + 1)]
    ends = [edge for x, y in finite if len(x) for edge in (x[0], x[-1])]
    first, last = min(ends), max(ends)
    values = np.clip(np.concatenate([y for _, y in finite]), -1e300, 1e300)
    low, high = float(values.min()), float(values.max())
    cells = [[" "] * room for _ in range(CHART_ROWS)]
    for (x, y), mark in zip(finite, marks, strict=True):
        columns = np.zeros(len(x), int)
        if last > first:
            columns = np.round((x - first) / (last - first) * (room - 1)).astype(int)
        for column in np.unique(columns):
            value = float(np.clip(y[columns == column], -1e300, 1e300).mean())
            share = 0.5 if high <= low else (value / 2 - low / 2) / (high / 2 - low / 2)
            cells[CHART_ROWS - 1 - round(share * (CHART_ROWS - 1))][column] = mark
    labels = [""] * CHART_ROWS
    labels[0], labels[-1] = short(high), short(low)
    if high <= low:
        labels[0], labels[CHART_ROWS // 2], labels[-1] = "", short(low), ""
    rows = zip(labels, cells, strict=True)
    body = [f"{label[:LABEL]:>{LABEL}}{bar}{''.join(row)}" for label, row in rows]
    begin, end = f"{first:g}", f"{last:g}" if last > first else ""
    axis = " " * LABEL + corner + begin + dash * max(room - len(begin) - len(end), 1) + end
    return [head, *(line[:width] for line in (*body, axis))]


def newest(run: RecordedRun, width: int) -> list[str]:
    """Returns the best and the worst of the completions that were recorded last, a line each."""
    steps = [row["step"] for row in run.samples if is_number(row.get("step"))]
    rows = [row for row in run.samples if steps and row.get("step") == steps[-1]]
    rows = [row for row in rows if is_number(row.get("reward"))]
    ranked = sorted(rows, key=lambda row: -row["reward"])
    picks = ranked[:1] + ranked[1:][-(SHOWN - 1) :]
    return [
        one_line(
            f"step {short(row['step'])} reward {short(row['reward'])}: "
            f"{one_line(row.get('prompt'), width // 3)} -> {one_line(row.get('response'), width)}",
            width,
        )
        for row in picks
    ]


# -- lines: where the output is no terminal --


def new_lines(
    read: Callable[[], Mapping[str, RecordedRun]], metrics: Sequence[str], every_s: float
) -> Iterator[str]:
    """Yields a line for each new step, and one for each run that has ended, until all have."""
    last_steps: dict[str, float] = {}
    ended_names: set[str] = set()
    reported: set[str] = set()
    while True:
        runs = read()
        all_over = all_ended(runs)
        for line in missing(runs, metrics):
            if line.partition(";")[0] not in reported:  # the names that there are may become more
                reported.add(line.partition(";")[0])
                yield line
        for name, run in runs.items():
            label = f"{name} " if len(runs) > 1 else ""
            for row in run.rows:
                if row["x"] > last_steps.get(name, -1):
                    last_steps[name] = row["x"]
                    keys = _keys({name: run}, metrics)
                    values = [f"{k} {short(row[k])}" for k in keys if is_number(row.get(k))]
                    yield f"{label}step {short(row['step'])}  {'  '.join(values)}".rstrip()
            if name not in ended_names and (all_over or run.ended()):
                ended_names.add(name)
                yield state(name, run)
        if all_over:
            return
        time.sleep(every_s)
