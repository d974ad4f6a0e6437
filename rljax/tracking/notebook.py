"""The run in a notebook: one output that renews itself, with the curves of the reward and the
accuracy, key numbers and the latest completions.

It is HTML without a script, drawn from a thread once a second; nothing piles up in the notebook's
file. Completions are untrusted text: they are escaped.
"""

import contextvars
import importlib
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping

import numpy as np

from rljax.tracking.charts import Series, duration, escaped, line_chart, short
from rljax.tracking.console import NUMBERS, Console, one_line

REFRESH_S = 1.0
CHARTS = (
    ("reward/mean", "Reward", "mean of a step's completions"),
    ("eval/accuracy", "Evaluation accuracy", "share of held-out prompts"),
    ("loss", "Loss", ""),
)
MOST_CHARTS, MOST_ROWS, NOTES = 2, 4, 3
# Colours are the page's own or see-through, so that light and dark notebooks both read well.
CSS = """
.rljax { font: 13px/1.45 system-ui, sans-serif; max-width: 860px; }
.rljax .dim { opacity: .65; } .rljax progress { width: 100%; height: 8px; accent-color: #2563eb; }
.rljax .charts { display: flex; flex-wrap: wrap; gap: 14px; margin: 6px 0; }
.rljax figure { margin: 0; flex: 1 1 320px; max-width: 420px; }
.rljax figcaption .name { font-weight: 600; } .rljax .keys { display: block; font-size: 12px; }
.rljax .key i { display: none; } .rljax svg { width: 100%; height: auto; display: block; }
.rljax svg text { font-size: 10px; fill: currentColor; opacity: .7; }
.rljax .end { text-anchor: end; } .rljax .mid { text-anchor: middle; }
.rljax svg .grid { stroke: currentColor; opacity: .15; }
.rljax svg .axis { stroke: currentColor; opacity: .6; }
.rljax svg polyline { fill: none; stroke-width: 1.7; } .rljax svg .faint { opacity: .32; }
.rljax .s0 { stroke: #2563eb; } .rljax .dot.s0, .rljax .band.s0 { fill: #2563eb; }
.rljax svg .dot { stroke: none; } .rljax svg .hover { fill: transparent; }
.rljax table { border-collapse: collapse; font: inherit; } .rljax td, .rljax th { text-align: left;
  padding: 2px 12px 2px 0; vertical-align: top; overflow-wrap: anywhere; white-space: normal; }
.rljax th { font-weight: 600; }
"""


def in_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook: Jupyter's, Colab's, Kaggle's."""
    if "ipykernel.zmqshell" not in sys.modules:
        return False
    shell = importlib.import_module("IPython").get_ipython()
    return isinstance(shell, sys.modules["ipykernel.zmqshell"].ZMQInteractiveShell)


def make_console(
    total_steps: int, sft_steps: int, busy: Callable[[], tuple[str, float]]
) -> Console:
    """Returns the console of a run for a notebook, a terminal or a log. `sft_steps`: of the total,
    which may end early."""
    kind = NotebookConsole if in_notebook() else Console
    return kind(total_steps, sft_steps=sft_steps, busy=busy)


class NotebookConsole(Console):
    """Draws the run in the output of a notebook's cell; a `Tracker`."""

    def __init__(
        self, total_steps: int, *, busy: Callable[[], tuple[str, float]], sft_steps: int = 0
    ):
        super().__init__(total_steps, live=True, busy=busy, sft_steps=sft_steps)
        self.curves: dict[str, dict[int, float]] = {key: {} for key, *_ in CHARTS}
        self.notes: list[str] = []
        self.drawing: threading.Thread | None = None
        self.handle = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Stores the metrics of a step, and the points of the curves."""
        with self.lock:
            for key, curve in self.curves.items():
                if isinstance(metrics.get(key), int | float):
                    curve[step] = float(metrics[key])
        super().log(step, metrics)

    def begin(self) -> None:
        """Draws from now on."""
        self.show()  # what goes on is a part of the output

    def say(self, line: str) -> None:
        """Shows a line with the time of day under the curves."""
        with self.lock:
            self.notes = [*self.notes, f"{time.strftime('%H:%M:%S')} {line}"][-NOTES:]

    def close(self) -> None:
        """Draws the last state; safe to call twice."""
        self.closed.set()
        if self.drawing is not None:
            self.drawing.join()
            self.drawing = None
            self.handle.update(self._page(ended=True))

    def _start(self) -> None:
        if self.drawing is not None or self.closed.is_set():
            return
        display = importlib.import_module("IPython.display").display
        self.handle = display(self._page(), display_id=True)
        # In the context of the cell, by which the kernel knows where the output belongs.
        context = contextvars.copy_context()
        self.drawing = threading.Thread(target=context.run, args=(self._draw,), daemon=True)
        self.drawing.start()

    def _draw(self) -> None:
        while not self.closed.wait(REFRESH_S):
            self.handle.update(self._page())

    def _page(self, *, ended: bool = False) -> object:
        return importlib.import_module("IPython.display").HTML(self.html(ended=ended))

    def html(self, *, ended: bool = False) -> str:
        """Returns the HTML that the cell shows."""
        with self.lock:
            latest = {key: values[-1] for key, values in self.history.items()}
            curves = {key: dict(curve) for key, curve in self.curves.items() if curve}
            rows, notes, left_s = list(self.rows), list(self.notes), self._time_left()
        seconds = duration(time.monotonic() - self.started)
        goes_on = self._waiting() or (f"left {duration(left_s)}" if math.isfinite(left_s) else "")
        head = [f"<b>{escaped(self.phase or 'run')} step {self.step}/{self.total}</b>", seconds]
        head += [escaped(goes_on)] if goes_on and not ended else []
        numbers = [
            f'<span class="dim">{escaped(name)}</span> {short(latest[key])}'
            for key, name, _ in NUMBERS
            if key in latest
        ]
        notes += [f"! {text}" for text in self._latest_warnings()]
        note_html = "".join(f'<div class="dim">{escaped(one_line(n, 300))}</div>' for n in notes)
        return (
            f'<style>{CSS}</style><div class="rljax"><div>{" · ".join(head)}</div>'
            f'<progress value="{min(self.step, self.total)}" max="{self.total}"></progress>'
            f'<div class="charts">{"".join(_charts(curves))}</div>'
            f"<div>{' · '.join(numbers)}</div>{_table(rows)}{note_html}</div>"
        )


def _charts(curves: Mapping[str, Mapping[int, float]]) -> list[str]:
    figures = [
        line_chart(title, unit, [Series(title, *_axes(curves[key]), dots=len(curves[key]) < 40)])
        for key, title, unit in CHARTS
        if key in curves
    ]
    return figures[:MOST_CHARTS]


def _axes(curve: Mapping[int, float]) -> tuple[np.ndarray, np.ndarray]:
    steps = sorted(curve)
    return np.array(steps, float), np.array([curve[step] for step in steps])


def _table(rows: list[Mapping]) -> str:
    if not rows:
        return ""
    lines = []
    for i in np.unique(np.linspace(0, len(rows) - 1, MOST_ROWS).round().astype(int)):
        row = rows[i]
        status = row.get("status", "ok")
        scored = status in ("ok", None)
        cells = (
            short(row.get("reward")) if scored else one_line(status, 12),
            one_line(row.get("prompt"), 120),
            one_line(row.get("response"), 240),
        )
        lines.append("".join(f"<td>{escaped(cell)}</td>" for cell in cells))
    head = "<tr><th>reward</th><th>prompt</th><th>completion</th></tr>"
    return f"<table>{head}{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
