"""A run inside a notebook's output: the headline, two curves, completions before and after; and the
whole report in a frame."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rljax.report.curves import GROUPS, matches, series_of
from rljax.report.page import headline
from rljax.report.run_folder import RecordedRun, is_number, read_run
from rljax.report.samples import sample
from rljax.report.style import document
from rljax.runs.mirror import local_copy
from rljax.tracking.charts import escaped, line_chart, short

SHOWN = 3  # completions of a step
_FIRST = ("reward/mean", "eval/accuracy", "eval/loss")
_CHARTS = [chart for charts in GROUPS.values() for chart in charts if chart.patterns[0] in _FIRST]


def inline(run_dir: str | os.PathLike) -> str:
    """Returns the HTML of a run folder for the output of a cell."""
    with local_copy(run_dir) as folder:
        run = read_run(folder)
    figures = []
    for chart in _CHARTS:
        keys = [key for key in run.keys() if matches(key, chart.patterns)][: chart.most]
        lines = [series_of(run, key) for key in keys]
        if lines and sum(line.x.size for line in lines) > 1:
            figures.append(line_chart(chart.title, chart.unit, lines, from_zero=chart.from_zero))
    charts = f'<div class="grid">{"".join(figures[:2])}</div>'
    footer = f'<p class="dim">{escaped(str(run_dir))}; the whole page: run.report</p>'
    body = f"{headline(run)}{charts}{_before_and_after(run)}{footer}"
    return frame(document(str(run_dir), body), 560)


def frame(page: str, height: int) -> str:
    """Returns a page in a frame of its own, whose style does not reach the notebook and in which no
    script runs: completions are text of strangers."""
    text = escaped(page)
    style = f"width: 100%; height: {height}px; border: 0"
    return f'<iframe sandbox="allow-same-origin" srcdoc="{text}" style="{style}"></iframe>'


def framed_report(report: Path | str) -> str:
    """Returns the report.html of a run folder or a URL in a frame."""
    folder, _, name = str(report).rpartition("/")
    with local_copy(folder) as copy:
        return frame((Path(copy) / name).read_text(encoding="utf-8"), 720)


def _before_and_after(run: RecordedRun) -> str:
    """The completions of the first and of the last recorded step, side by side."""
    steps = sorted({row["step"] for row in run.samples if is_number(row.get("step"))})
    if len(steps) < 2:
        return ""
    columns = [
        f"<div><h3>Step {short(step)}</h3>{_completions(run.samples, step)}</div>"
        for step in (steps[0], steps[-1])
    ]
    return f'<h2>Completions before and after</h2><div class="siblings">{"".join(columns)}</div>'


def _completions(rows: Sequence[Mapping], step: float) -> str:
    """The best, the middle and the worst completion of a step."""
    scored = [row for row in rows if row.get("step") == step and is_number(row.get("reward"))]
    scored.sort(key=lambda row: -row["reward"])
    picks = sorted({0, len(scored) // 2, len(scored) - 1} & set(range(len(scored))))
    return "".join(sample(scored[i]) for i in picks[:SHOWN])
