"""Several runs on one page: their curves over one another, their final numbers, and the fields of
their configs that differ. Runs that differ only in their seeds are drawn as one line, their mean.
The page does not claim which is better: intervals stand beside the numbers."""

import contextlib
import dataclasses
import fnmatch
import functools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rljax.errors import InputError
from rljax.files import require_replaceable
from rljax.report.arms import Arm, arms_of, averaged, interval, mean_series, paired, seeds_needed
from rljax.report.curves import (
    GROUPS,
    MAX_OTHER,
    NOT_CHARTED,
    matches,
    repeats,
    series_of,
    what_it_means,
)
from rljax.report.estimates import shares, shown, table
from rljax.report.head import listing, title_of
from rljax.report.kinds import of_runs
from rljax.report.page import put_back, write_page, write_report
from rljax.report.run_folder import RecordedRun, estimate, is_number, read_run
from rljax.report.style import link
from rljax.report.targets import expected
from rljax.runs.mirror import local_copy
from rljax.runs.store import Store, is_url, require_run_folder
from rljax.tracking.charts import duration, escaped, legend, line_chart, short

OF_A_RUN = ("config.json", "metrics.jsonl", "summary.json", "starts.jsonl")
LAST_PART = 0.1  # of the steps, that a noisy metric's final number is the mean of
NUMBERS = (  # of the last part of the steps
    "reward/mean",
    "reward/best_of_k",
    "eval/loss",
    "loss",
    "entropy",
    "ref_kl/k3",
    "response_tokens/mean",
    "response/truncated_fraction",
    "tokens_per_s",
)
OVER_ALL = ("reward/mean", "reward/best_of_k")  # of arms, also the mean over all steps
NOT_COMPARED = ("run_dir",)
PAGE = "comparison.html"
FEW = 5  # runs, up to which every chart names them


def run_folders(folders: Sequence[str | os.PathLike]) -> list[Path | str]:
    """Returns the folders of runs; a folder that holds no run itself, such as a sweep's, is
    replaced by those of the runs in it."""
    out = []
    for folder in folders:
        if is_url(folder):
            store = Store(str(folder))
            names = [name for name in store.folders() if store.exists(f"{name}/config.json")]
            runs, is_run = [store.at(name) for name in names], any(map(store.exists, OF_A_RUN))
        else:
            folder = Path(folder)
            runs = sorted(path.parent for path in folder.glob("*/config.json"))
            is_run = any((folder / name).exists() for name in OF_A_RUN)
        out += [folder] if is_run or not runs else runs
    return out


def write_pages(
    folders: Sequence[str | os.PathLike], out: str | os.PathLike | None = None
) -> Path | str:
    """Writes the report of one run, or the comparison of several, and returns its path. Raises
    InputError for a folder without a run, and if the page cannot be written."""
    try:
        paths = run_folders(folders)
        if out is None and list(map(Path, paths)) == list(map(Path, folders[:1])):
            return write_report(folders[0])
        return write_comparison(folders, out)
    except OSError as error:
        problem = "the page cannot be written"
        rule = str(error.strerror or error)
        fix = "make room or give it permissions; --out=FILE writes the page of runs elsewhere"
        raise InputError(problem, value=error.filename, rule=rule, fix=fix) from error


def write_comparison(
    folders: Sequence[str | os.PathLike], out: str | os.PathLike | None = None
) -> Path | str:
    """Writes one page about all runs and returns its path: `out`, else comparison.html in the only
    folder that is named, else in the working folder. Raises InputError for no folders, and for one
    that does not exist."""
    if out is not None:
        require_replaceable(out)
    paths = run_folders(folders)
    if not paths:
        raise InputError("nothing to compare", fix="name the folders of two runs, or of a sweep")
    for path in paths:
        require_run_folder(path)
    home = folders[0] if len(folders) == 1 else "."
    with contextlib.ExitStack() as copies:
        runs = [read_run(copies.enter_context(local_copy(path))) for path in paths]
        folder = copies.enter_context(local_copy(home)) if out is None else home
        path = Path(folder, PAGE) if out is None else Path(out)
        title = f"{len(runs)} run{'s' if len(runs) > 1 else ''} compared"
        names = names_of(runs)
        linked = path if not any(map(is_url, (home, *paths))) else None
        included, left_out = averaged(runs)
        arms = arms_of(included)
        groups = {arm.name: arm.runs for arm in arms} or dict(zip(names, zip(runs), strict=True))
        body = (
            f"<h1>{title}</h1>{_legend(runs, names, linked, arms, left_out)}{_of_arms(arms)}"
            f"{of_runs(groups)}{expected(groups)}{_numbers(runs, names)}"
            f"{_differences(runs, names)}{_curves(runs, names, arms)}"
        )
        page = write_page(path, title, body)
        return page if out is not None else put_back(page, home)


def names_of(runs: Sequence[RecordedRun]) -> list[str]:
    """Returns the folders' names, with as many folders above them as tell them apart."""
    paths = [run.folder.resolve().parts for run in runs]
    for depth in range(1, max(map(len, paths)) + 1):
        names = [str(Path(*parts[-depth:])) for parts in paths]
        if len(set(names)) == len(names):
            break
    return names


def _legend(
    runs: Sequence[RecordedRun],
    names: Sequence[str],
    path: Path | None,
    arms: Sequence[Arm],
    left_out: Mapping[int, str],
) -> str:
    """A line per run: its look in the charts, or that of its arm, its report, what it trained, how
    it ended, and why it is in no mean over seeds, where there are any. `path` is that of the page,
    None where there is no way from it to the reports."""
    rows, looks = [], {id(run): i for i, arm in enumerate(arms) for run in arm.runs}
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        report, shown_name = run.folder / "report.html", escaped(name)
        if path is not None and report.is_file():
            target = os.path.relpath(report.resolve(), path.parent.resolve())
            shown_name = link(target, shown_name)
        status = run.summary.get("status") if run.ended() else None
        state = status or ("still running" if run.running() else "not ended")
        last, total = run.steps()
        cells = [title_of(run), state, f"{last} of {total}" if total else last]
        look = legend(looks.get(id(run), index)) if not arms or id(run) in looks else ""
        if arms and id(run) in left_out:
            cells.append(f"in no mean over seeds: {left_out[id(run)]}")
        rows.append((f"{look} {shown_name}", *(escaped(str(cell)) for cell in cells)))
    return table("", ("run", "trained", "status", "steps"), rows)


def _mean(run: RecordedRun, key: str, part: float = LAST_PART) -> float:
    """Mean of a metric over the last part of the steps; its last value if it is measured only now
    and then."""
    values = run.columns(key)[1]
    values = values[np.isfinite(values)]
    if not len(values):
        return math.nan
    count = 1 if key.startswith("eval/") else max(1, int(len(values) * part))
    return float(values[-count:].mean())


def _of_arms(arms: Sequence[Arm]) -> str:
    """The table of means over seeds, and of differences to the first arm on the same seeds."""
    if not arms:
        return ""
    measures = {
        "accuracy after": _accuracy_after,
        **{key: functools.partial(_mean, key=key) for key in NUMBERS if key != "tokens_per_s"},
        **{f"{key}, all steps": functools.partial(_mean, key=key, part=1.0) for key in OVER_ALL},
    }
    first, rows = arms[0], []
    for title, measure in measures.items():
        values = {id(run): measure(run) for arm in arms for run in arm.runs}
        if all(math.isnan(value) for value in values.values()):
            continue
        for i, arm in enumerate(arms):
            bounds = interval([values[id(run)] for run in arm.runs])
            cells = [f"{legend(i)} {escaped(arm.name)}", bounds["n"], _interval_text(bounds)]
            if arm is not first:
                gains = paired(arm, first, values)
                seeds = seeds_needed(gains)
                cells += [_interval_text(interval(gains), signed=True), seeds or "-"]
            else:
                cells += ["", ""]
            head = f'<th rowspan="{len(arms)}">{escaped(title)}</th>' if not i else ""
            rows.append(f"<tr>{head}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    gain = f"difference to {first.name}"
    titles = ("metric", "setting", "seeds", "mean", gain, "seeds to settle it")
    head = "".join(f"<th>{escaped(title)}</th>" for title in titles)
    note = (
        '<p class="dim">Student\'s 95 % intervals over seeds; differences are taken seed by seed. '
        "The last column: how many seeds would tell the difference from 0 in 4 of 5 experiments, "
        "were it and its spread as measured.</p>"
    )
    return (
        f'<section><h2>Over seeds</h2>{note}<div class="scroll"><table><tr>{head}</tr>'
        f"{''.join(rows)}</table></div></section>"
    )


def _accuracy_after(run: RecordedRun) -> float:
    accuracy = estimate(run.summary.get("accuracy_after"))
    return math.nan if accuracy is None else accuracy.value


def _interval_text(recorded: Mapping, *, signed: bool = False) -> str:
    value = estimate(recorded)
    return "-" if value is None else shown(value, False, signed=signed)


def _numbers(runs: Sequence[RecordedRun], names: Sequence[str]) -> str:
    """The table of final numbers; columns that no run has are left out."""
    columns: dict[str, list[str]] = {}
    for title in ("accuracy_before", "accuracy_after", "difference"):
        estimates, gain = [estimate(run.summary.get(title)) for run in runs], title == "difference"
        columns[title.replace("_", " ")] = [
            "-" if e is None else shown(e, shares(e) or gain, signed=gain) for e in estimates
        ]
    for key in NUMBERS:
        means = [_mean(run, key) for run in runs]
        columns[key] = ["-" if math.isnan(mean) else escaped(short(mean)) for mean in means]
    walls = [run.summary.get("wall_s") for run in runs]
    columns["time"] = [duration(wall) if is_number(wall) else "-" for wall in walls]
    columns["device hours"] = [
        short(wall * run.devices() / 3600) if is_number(wall) and run.devices() else "-"
        for wall, run in zip(walls, runs, strict=True)
    ]
    columns = {title: cells for title, cells in columns.items() if set(cells) != {"-"}}
    if not columns:
        return ""
    rows = list(zip(map(escaped, names), *columns.values(), strict=True))
    note = (
        "Intervals are 95 %: runs whose intervals overlap may differ by chance. "
        f"Metrics are means over the last {100 * LAST_PART:.0f} % of the steps."
    )
    return table("Final numbers", ("run", *columns), rows, note)


def _differences(runs: Sequence[RecordedRun], names: Sequence[str]) -> str:
    """The fields of the configs that are not the same in all runs that have one."""
    names = [name for name, run in zip(names, runs, strict=True) if run.config]
    configs = [listing(run.config) for run in runs if run.config]
    fields = dict.fromkeys(field for config in configs for field in config)
    rows = []
    for field in fields:
        values = [config.get(field, "-") for config in configs]
        if field in NOT_COMPARED or all(value == values[0] for value in values):
            continue
        rows.append((escaped(field), *(escaped(str(value)) for value in values)))
    none = "<section><h2>Settings that differ</h2><p>None.</p></section>"
    return table("Settings that differ", ("", *names), rows) or none


def _curves(runs: Sequence[RecordedRun], names: Sequence[str], arms: Sequence[Arm]) -> str:
    """A chart for each metric that several runs have, in the order of a report."""
    keys = dict.fromkeys(key for run in runs for key in run.keys())
    free = [key for key in keys if not matches(key, NOT_CHARTED)]
    free = [key for key in free if not all(repeats(run, key) for run in runs)]
    out, used = [], set()
    for name, charts in GROUPS.items():
        patterns = [p for chart in charts if not chart.folded for p in chart.patterns]
        group = [k for p in patterns for k in free if fnmatch.fnmatchcase(k, p) and k not in used]
        group = list(dict.fromkeys(group))
        used |= set(group)
        if group:
            grid = "".join(_chart(runs, names, arms, key) for key in group)
            out.append(f'<section><h2>{escaped(name)}</h2><div class="grid">{grid}</div></section>')
    remaining = [key for key in free if key not in used]
    if remaining:
        grid = "".join(_chart(runs, names, arms, key) for key in remaining[:MAX_OTHER])
        out.append(
            f"<details><summary>Other metrics ({len(remaining[:MAX_OTHER])} of {len(remaining)})"
            f'</summary><div class="grid">{grid}</div></details>'
        )
    return "".join(out)


def _chart(runs: Sequence[RecordedRun], names: Sequence[str], arms: Sequence[Arm], key: str) -> str:
    lines = [mean_series(arm, key) for arm in arms]
    for run, name in () if arms else zip(runs, names, strict=True):
        lines.append(dataclasses.replace(series_of(run, key), name=name, title=""))
    if len(lines) > FEW:
        lines = [dataclasses.replace(line, low=None, high=None) for line in lines]
    meaning = next((run.meanings[key] for run in runs if key in run.meanings), None)
    unit, note = meaning.unit if meaning else "", what_it_means(meaning)
    return line_chart(key, unit, lines, note=note, many=len(lines) > FEW)
