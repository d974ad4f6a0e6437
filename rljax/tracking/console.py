"""The run on your screen: progress, key numbers with their trend, and the latest completions.

On a terminal the `Console` tracker draws in place, from a thread that redraws four times a second,
so that a log call only stores numbers. If the output is no terminal (CI, a log file, a notebook) it
prints one plain line every `every` steps. Completions are untrusted text: they are shown as text,
never as markup, and control characters never reach the terminal.
"""

import atexit
import collections
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import rich.console
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rljax.tracking.charts import duration, short, sparkline
from rljax.tracking.screen import Terminal

# (metric, name in the live table, name in a plain line)
NUMBERS = (
    ("reward/mean", "reward", "reward"),
    ("eval/accuracy", "eval accuracy", "accuracy"),
    ("rewards/accuracies", "right pairs", "right pairs"),
    ("rewards/margins", "margin of pairs", "margin"),
    ("ref_kl/k3", "KL to reference", "kl"),
    ("entropy", "entropy", "entropy"),
    ("response_tokens/mean", "response tokens", "len"),
    ("loss", "loss", "loss"),
    ("grad_norm", "grad norm", "grad"),
    ("tokens_per_s", "tokens/s", "tok/s"),
)
TIMES = (
    ("time/generate_s", "generate"),
    ("time/reward_s", "reward"),
    ("time/learn_s", "learn"),
    ("time/program_s", "program"),
    ("time/rest_s", "rest"),
)
HISTORY = 512  # values of a metric that its trend shows
# Steps from which the time left is extrapolated: those of SFT differ in length.
SPEED_WINDOW = 20
REFRESH_PER_S = 4
SHOWN_WARNINGS = 3
# A plain console names a program that compiles longer than this, once, and what goes on where it
# has printed nothing for that long.
BUSY_S, SILENT_S = 3.0, 20.0
QUIET_S = 10.0  # after which a live display says how long ago the last step was


def one_line(text: object, limit: int) -> str:
    """Returns `text` on one line of at most `limit` characters; its beginning and end are kept."""
    text = "" if text is None else str(text)
    if len(text) > 4 * limit:  # the rest is cut anyway, so it need not be cleaned
        text = text[: 2 * limit] + text[-2 * limit :]
    text = text.replace("\r\n", "\n").replace("\n", "⏎").replace("\t", " ")
    text = "".join(c if c.isprintable() else "·" for c in text)  # no escape codes, no bidi marks
    if len(text) <= limit:
        return text
    head = (limit - 1) * 2 // 3
    return text[:head] + "…" + text[len(text) - (limit - 1 - head) :]


def differing(texts: Sequence[object], limit: int) -> list[str]:
    """Returns the texts on one line each, of at most `limit` characters. Longer ones show the
    part in which they differ, because what a chat template writes around a question is the same
    in all."""
    texts = ["" if text is None else str(text) for text in texts]
    distinct = list(dict.fromkeys(texts))
    begin = end = 0
    if len(distinct) > 1:
        begin = len(os.path.commonprefix(distinct))
        end = len(os.path.commonprefix([text[::-1] for text in distinct]))
    out = []
    for text in texts:
        # At least one character: the common beginning and end may overlap.
        last = max(len(text) - end, begin + 1)
        spare = limit - 2 - (last - begin)
        if len(text) > limit and begin + end and spare > 0:
            first = max(0, min(begin - spare // 2, len(text) - limit + 2))
            part = text[first : first + limit - 2]
            rest = len(text) - first - len(part)
            text = f"{'…' * (first > 0)}{part}{'…' * (rest > 0)}"
        elif len(text) > limit and begin + end:
            text = f"{'…' * (begin > 0)}{text[begin:last]}{'…' * (last < len(text))}"
        out.append(one_line(text, limit))
    return out


def _number(value: object) -> float | None:
    """A metric as a float, None when it is no number (a phase, a mistake)."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


class Waiting:
    """Decides when a plain console prints what a run is doing."""

    def __init__(self, now: float):
        self.printed_s = self.since_s = now
        self.what, self.named = "", set()

    def line(self, what: str, seconds: float, now: float) -> str:
        """Returns the line to print, or "": `what` has gone on for `seconds` of the step at `now`,
        by time.monotonic()."""
        if what != self.what:
            self.what, self.since_s = what, now
        compiles = "compiling " in what and what not in self.named
        if not (compiles and now - self.since_s >= BUSY_S or now - self.printed_s >= SILENT_S):
            return ""
        self.named.add(what)
        return f"{what}, {duration(seconds)} so far"


class Console:
    """Draws the run; a `Tracker`. live=None draws if the output is a terminal."""

    def __init__(
        self,
        total_steps: int,
        *,
        live: bool | None = None,
        every: int = 10,
        console: rich.console.Console | None = None,
        busy: Callable[[], tuple[str, float]] | None = None,
        sft_steps: int = 0,
    ):
        self.sft_steps = sft_steps  # of total_steps; they may end early
        self.total, self.every = max(1, int(total_steps)), max(1, int(every))
        self.console = console or Terminal()
        self.live = self.console.is_terminal if live is None else live
        self.step, self.first_step, self.phase = 0, None, ""
        self.started = time.monotonic()
        self.rows: list[dict] = []
        self.rows_step = None  # the step whose completions a plain console printed last
        self.history: dict[str, collections.deque] = {}
        self.clock: collections.deque = collections.deque(maxlen=SPEED_WINDOW)
        self.lock = threading.Lock()  # the drawing thread reads what log writes
        self.display: Live | None = None
        self.busy, self.closed = busy, threading.Event()
        self.warnings: Callable[[], Sequence[str]] = tuple  # of the run so far, a line each
        self.waiting = Waiting(self.started)

    # --- the tracker ---

    def begin(self) -> None:
        """Shows from now on what goes on before the first step, and between steps."""
        if self.busy is not None:
            threading.Thread(target=self._say_busy, daemon=True).start()

    def show(self) -> None:
        """Draws from now on if the output is a terminal."""
        if self.live:
            self._start()

    def goes_on(self, step: int, total_steps: int) -> None:
        """Shows that a resumed run is at `step` of so many."""
        with self.lock:
            self.step, self.total = step, max(1, total_steps)

    def finished(self) -> None:
        """Fills the bar: no step is left, even if the run ended early."""
        with self.lock:
            self.total = max(1, self.step)

    def _say_busy(self) -> None:
        while not self.closed.wait(1.0):
            if self.display is None:
                activity, seconds = self.busy()
                if line := self.waiting.line(activity, seconds, time.monotonic()):
                    self.say(line)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Stores the metrics of a step, and prints a line of them if it is due."""
        values = {key: number for key, v in metrics.items() if (number := _number(v)) is not None}
        with self.lock:
            first = self.first_step is None
            self.first_step = step if first else self.first_step
            self.step = max(self.step, step)
            self._set_phase(step, metrics, values)
            for key, value in values.items():
                self.history.setdefault(key, collections.deque(maxlen=HISTORY)).append(value)
            if not self.clock or step > self.clock[-1][0]:
                self.clock.append((step, time.monotonic()))
        if self.live:
            self._start()
        elif (
            first
            or step % self.every == 0
            or step >= self.total
            or "eval/accuracy" in values
            or time.monotonic() - self.waiting.printed_s >= SILENT_S
        ):
            self.say(self._plain_line(step, values))

    def samples(self, step: int, rows: Sequence[Mapping]) -> None:
        """Stores the latest completions, and prints two of them now and then."""
        with self.lock:
            self.rows = [dict(row) for row in rows[:8]] or self.rows
        if self.live:
            self._start()
        elif rows and (self.rows_step is None or step - self.rows_step >= 10 * self.every):
            self.rows_step = step
            prompts = differing([row.get("prompt") for row in rows], 80)
            for row, prompt in list(zip(rows, prompts, strict=True))[:2]:
                response = one_line(row.get("response"), 160)
                reward = short(_number(row.get("reward")))
                self.say(f"  sample reward {reward}: {prompt} -> {response}")

    def close(self) -> None:
        """Draws the last state and gives the terminal back; safe to call twice."""
        atexit.unregister(self.close)
        self.closed.set()
        display, self.display = self.display, None
        self.live = False
        if display is not None:
            display.stop()

    # --- drawing ---

    def _start(self) -> None:
        if self.display is not None:
            return
        self.display = Live(
            console=self.console,
            get_renderable=self._render,
            refresh_per_second=REFRESH_PER_S,
            vertical_overflow="crop",
            redirect_stdout=sys.stdout.isatty(),  # a stream sent to a file stays there
            redirect_stderr=sys.stderr.isatty(),
        )
        # An exception that nobody catches must not leave a hidden cursor.
        atexit.register(self.close)
        self.display.start()

    def _set_phase(self, step: int, metrics: Mapping, values: Mapping[str, float]) -> None:
        phase = self.phase
        if isinstance(metrics.get("phase"), str):
            phase = one_line(metrics["phase"], 12)
        elif "phase_rl" in values:
            phase = "rl" if values["phase_rl"] > 0.5 else "sft"
        if phase != self.phase and self.phase:
            # An SFT loss or pace says nothing about RL's: only the evaluations are one trend.
            self.history = {k: v for k, v in self.history.items() if k.startswith("eval/")}
            self.clock.clear()
            if self.phase == "sft":  # it may have ended early
                self.total += min(0, step - 1 - self.sft_steps)
        self.phase = phase

    def _time_left(self) -> float:
        """Seconds, from the pace of the latest steps; NaN while unknown."""
        if len(self.clock) < 2:
            return math.nan
        (step0, time0), (step1, time1) = self.clock[0], self.clock[-1]
        return max(0, self.total - self.step) * (time1 - time0) / (step1 - step0)

    def _shares(self, values: Mapping[str, float]) -> list[tuple[str, float]]:
        pairs = [(name, values.get(key, math.nan)) for key, name in TIMES]
        pairs = [(name, seconds) for name, seconds in pairs if 0 < seconds < math.inf]
        total = sum(seconds for _, seconds in pairs)
        return [(name, seconds / total) for name, seconds in pairs] if total > 0 else []

    def _plain_line(self, step: int, values: Mapping[str, float]) -> str:
        parts = [f"step {step}/{self.total}", *([self.phase] if self.phase else [])]
        numbers = [f"{name} {short(values[key])}" for key, _, name in NUMBERS if key in values]
        fallback = [f"{one_line(k, 40)} {short(v)}" for k, v in list(values.items())[:6]]
        parts += numbers or fallback
        shares = self._shares(values)
        if shares:
            parts.append("time " + " ".join(f"{name} {100 * part:.0f}%" for name, part in shares))
        left_s = self._time_left()
        if math.isfinite(left_s):
            parts.append(f"left {duration(left_s)}")
        return " | ".join(parts)

    def say(self, line: str) -> None:
        """Prints a line with the time of day, above what is drawn."""
        self.waiting.printed_s = time.monotonic()
        encoding = self.console.encoding or "utf-8"
        line = f"{time.strftime('%H:%M:%S')} {line}"
        line = line.encode(encoding, "replace").decode(encoding)  # a C locale must not raise
        self.console.print(Text(line), soft_wrap=True, highlight=False)

    def _render(self) -> RenderableType:
        with self.lock:
            latest = {key: values[-1] for key, values in self.history.items()}
            trends = {key: list(self.history[key]) for key, *_ in NUMBERS if key in self.history}
            rows, left_s = list(self.rows), self._time_left()
        plain, width = self.console.options.ascii_only, max(self.console.width - 4, 20)
        tables = [self._numbers(latest, trends, plain), self._times(latest)]
        halves = Columns(tables, padding=(0, 3))
        waiting = self._waiting()
        parts = [self._progress(math.nan if waiting else left_s), Text(waiting, "yellow"), halves]
        parts += [Text(one_line(f"! {text}", width), "yellow") for text in self._latest_warnings()]
        room = (self.console.height - 22) // 2  # the completions get what the screen has left
        if rows:
            parts.append(Text())
            parts.append(self._completions(rows, max(1, min(4, room)), plain))
        return Panel(Group(*parts), title=Text("rljax"), title_align="left", border_style="dim")

    def _latest_warnings(self) -> list[str]:
        """The last warnings, and how many more there are."""
        texts = list(self.warnings())
        omitted = len(texts) - SHOWN_WARNINGS
        first = [f"{omitted} earlier warnings: see the report"] if omitted > 0 else []
        return first + texts[-SHOWN_WARNINGS:]

    def _waiting(self) -> str:
        """Describes what the run does between two steps when that takes long, such as compiling."""
        if self.closed.is_set():
            return ""
        activity, seconds = self.busy() if self.busy is not None else ("", 0.0)
        if activity and seconds >= BUSY_S:
            return f"{activity}, {duration(seconds)} so far"
        since = time.monotonic() - (self.clock[-1][1] if self.clock else self.started)
        return f"last step {duration(since)} ago" if self.clock and since > QUIET_S else ""

    def _progress(self, left_s: float) -> RenderableType:
        grid = Table.grid(padding=(0, 1), expand=True)
        for ratio in (None, 1, None):
            grid.add_column(ratio=ratio, no_wrap=True)
        goes_on = "" if self.closed.is_set() else f", left {duration(left_s)}"
        grid.add_row(
            Text(f"{self.phase or 'run'} step {self.step}/{self.total}", style="bold"),
            ProgressBar(
                total=self.total,
                completed=min(self.step, self.total),
                complete_style="cyan",
                finished_style="green",
            ),
            Text(duration(time.monotonic() - self.started) + goes_on),
        )
        return grid

    def _numbers(self, latest: Mapping, trends: Mapping, plain: bool) -> Table:
        table = Table(box=None, padding=(0, 1), header_style="dim")
        table.add_column("metric")
        table.add_column("now", justify="right", min_width=8)
        table.add_column("trend", min_width=20, no_wrap=True)
        for key, name, _ in NUMBERS:
            if key in latest:
                style = "" if math.isfinite(latest[key]) else "bold red"
                line = sparkline(trends[key], 20, ascii_only=plain)
                table.add_row(Text(name), Text(short(latest[key]), style), Text(line, "cyan"))
        return table

    def _times(self, latest: Mapping) -> Table:
        table = Table(box=None, padding=(0, 1), header_style="dim")
        shares = self._shares(latest)
        if shares:
            table.add_column("time of a step")
            table.add_column("", justify="right")
            table.add_column("", width=12)
        for name, part in shares:
            bar = ProgressBar(total=1.0, completed=part, width=12, complete_style="cyan")
            table.add_row(Text(name), Text(f"{100 * part:.0f} %"), bar)
        return table

    def _completions(self, rows: Sequence[Mapping], count: int, plain: bool) -> Table:
        """The last `count` of the rows that are shown."""
        table = Table(box=None, padding=(0, 1), header_style="dim", expand=True)
        table.add_column("reward", justify="right", no_wrap=True)
        table.add_column("prompt", ratio=1)
        table.add_column("completion", ratio=2)
        width = max(40, self.console.width - 18)
        prompts = differing([row.get("prompt") for row in rows], 2 * width // 3 - 4)
        for row, prompt in list(zip(rows, prompts, strict=True))[-count:]:
            reward = _number(row.get("reward"))
            status = row.get("status", "ok")
            reward_text = short(reward) if status in ("ok", None) else one_line(status, 8)
            response = one_line(row.get("response"), 4 * width // 3 - 6)  # two lines, as prompts
            if plain:
                prompt, response = (
                    t.encode("ascii", "replace").decode() for t in (prompt, response)
                )
            style = "green" if (reward or 0) > 0 else "red"
            table.add_row(Text(reward_text, style), Text(prompt, "dim"), Text(response))
        return table
