"""Pictures of numbers: short number formats, sparklines, SVG line charts and bars as text.

Pure functions from numbers to strings, for `console.py` and the report. Charts are drawn for a
box of 360 x 190 that scales with the page; colours are CSS classes (s0..s4): the page decides
light or dark.
"""

import dataclasses
import html
import math
import numbers
from collections.abc import Sequence

import numpy as np

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 8, 26
MAX_POINTS = 300  # a chart is narrower than this in pixels
SMOOTH_FROM = 60  # below this many points the raw line is readable by itself


def short(value: object) -> str:
    """A number for people, few characters: 0.4213, 5210, 52.1k, 3.2e-06, nan."""
    if not isinstance(value, numbers.Real):
        return "-"
    value = float(value)
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    for scale, unit, suffix in (
        (1e12, 1e12, "T"),
        (1e9, 1e9, "G"),
        (1e6, 1e6, "M"),
        (1e4, 1e3, "k"),
    ):
        if scale <= size < 1e15:
            return f"{value / unit:.3g}{suffix}"
    if size < 1e4 and value == int(value):
        return str(int(value))
    return f"{value:.4g}" if 1e-3 <= size < 1e4 else f"{value:.1e}"


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"


def duration(seconds: float) -> str:
    """2 d 3 h, 1 h 05 min, 4 min 10 s, 12 s."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    total = round(seconds)
    days, hours, minutes = total // 86400, total // 3600 % 24, total // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {total % 60:02d} s" if minutes else f"{total} s"


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """The finite values as one line of `width` block characters at most; gaps are spaces."""
    blocks = ".:-=+*#@" if ascii_only else "▁▂▃▄▅▆▇█"
    y = np.asarray(values, dtype=np.float64)
    if y.size == 0 or not np.isfinite(y).any():
        return ""
    y = np.clip(y, -1e300, 1e300)  # differences stay finite; nan passes through
    cells = []
    for chunk in np.array_split(y, min(width, y.size)):
        chunk = chunk[np.isfinite(chunk)]
        cells.append(chunk.mean() if chunk.size else math.nan)
    low, high = np.nanmin(cells), np.nanmax(cells)
    if high <= low:
        return "".join(" " if math.isnan(c) else blocks[0] for c in cells)
    scaled = (np.asarray(cells) / 2 - low / 2) / (high / 2 - low / 2) * (len(blocks) - 1)
    return "".join(" " if math.isnan(c) else blocks[round(c)] for c in scaled)


@dataclasses.dataclass(frozen=True)
class Series:
    """One line of a chart; `low` and `high` draw an interval band, `dots` marks every point."""

    name: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    dots: bool = False


@dataclasses.dataclass(frozen=True)
class Span:
    """A shaded part of the x axis, such as the SFT phase."""

    name: str
    start: float
    end: float


def ticks(low: float, high: float, count: int = 4, *, whole: bool = False) -> list[float]:
    """About `count` round numbers inside [low, high]."""
    raw = (high - low) / max(count, 1)
    if raw <= 0 or not math.isfinite(raw):
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.75), 10 * power)
    if whole:
        step = max(1.0, round(step))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [k * step for k in range(first, min(last, first + 20) + 1)]


def tick_label(value: float, step: float) -> str:
    """The label of a tick with just the decimals that tell it from its neighbour."""
    if abs(value) < step * 1e-6:
        return "0"
    if step >= 1 and abs(value) < 1e4 and step == int(step):
        return f"{value:.0f}"
    if 1e-4 <= step < 1 or step < 1e4 and abs(value) < 1e4 and step >= 1e-4:
        digits = max(0, 1 - math.floor(math.log10(step)))
        text = f"{value:.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return short(float(f"{value:.4g}"))


def thin(x: np.ndarray, y: np.ndarray, limit: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most about `limit` points that keep each bucket's extremes, so spikes stay visible."""
    if len(x) <= limit:
        return x, y
    keep = {0, len(x) - 1}
    for bucket in np.array_split(np.arange(len(x)), limit // 2):
        keep |= {int(bucket[np.argmin(y[bucket])]), int(bucket[np.argmax(y[bucket])])}
    index = np.array(sorted(keep))
    return x[index], y[index]


def _smooth(y: np.ndarray) -> np.ndarray:
    """A centred moving average over a thirtieth of the points, NaN where `y` is not finite."""
    half = max(1, len(y) // 60)
    good = np.isfinite(y)
    total = np.concatenate([[0.0], np.cumsum(np.where(good, y, 0.0))])
    count = np.concatenate([[0], np.cumsum(good)])
    at = np.arange(len(y))
    start, stop = np.maximum(0, at - half), np.minimum(len(y), at + half + 1)
    mean = (total[stop] - total[start]) / np.maximum(1, count[stop] - count[start])
    return np.where(good, mean, math.nan)


def _segments(x: np.ndarray, *ys: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    """The runs of points where all of `ys` are finite: a gap in the data is a gap in the line."""
    good = np.logical_and.reduce([np.isfinite(y) for y in (x, *ys)])
    edges = np.flatnonzero(np.diff(good.astype(np.int8))) + 1
    parts = np.split(np.arange(len(x)), edges)
    return [(x[p], *(y[p] for y in ys)) for p in parts if p.size and good[p[0]]]


class _Frame:
    """Maps data to the drawing box."""

    def __init__(self, xs: np.ndarray, ys: np.ndarray, *, from_zero: bool):
        self.x0, self.x1 = (float(xs.min()), float(xs.max())) if xs.size else (0.0, 1.0)
        if self.x1 <= self.x0:
            self.x0, self.x1 = self.x0 - 1, self.x1 + 1
        low, high = (float(ys.min()), float(ys.max())) if ys.size else (0.0, 1.0)
        if from_zero and low >= 0:
            low = 0.0
        pad = (high - low) * 0.06 or abs(high) * 0.1 or 0.5
        self.y0 = low if from_zero and low == 0 else low - pad
        self.y1 = high + pad

    def x(self, value):
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value):
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)

    def points(self, x: np.ndarray, y: np.ndarray) -> str:
        pairs = zip(self.x(x), self.y(y), strict=True)
        return " ".join(f"{a:.1f},{b:.1f}" for a, b in pairs)


def _axes(frame: _Frame, spans: Sequence[Span], unit_x: str) -> list[str]:
    bottom = HEIGHT - BOTTOM
    out = []
    for span in spans:
        left = frame.x(max(span.start, frame.x0))
        width = frame.x(min(span.end, frame.x1)) - left
        if width > 0:
            out.append(
                f'<rect class="span" x="{left:.1f}" y="{TOP}" width="{width:.1f}" '
                f'height="{bottom - TOP}"/><text class="span-name" x="{left + 3:.1f}" '
                f'y="{TOP + 10}">{html.escape(span.name)}</text>'
            )
    marks = ticks(frame.y0, frame.y1, 5)
    step = marks[1] - marks[0] if len(marks) > 1 else abs(marks[0]) or 1.0
    for mark in marks:
        y = frame.y(mark)
        out.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        out.append(
            f'<text x="{LEFT - 5}" y="{y + 3.5:.1f}" class="end">{tick_label(mark, step)}</text>'
        )
    marks = ticks(frame.x0, frame.x1, 4, whole=True)
    step = marks[1] - marks[0] if len(marks) > 1 else 1.0
    out.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    for mark in marks:
        x = frame.x(mark)
        out.append(
            f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 3}"/>'
        )
        if x < WIDTH - RIGHT - 40:  # the axis name stands at the right end
            out.append(
                f'<text x="{x:.1f}" y="{bottom + 14}" class="mid">{tick_label(mark, step)}</text>'
            )
    name = html.escape(unit_x)
    return [*out, f'<text x="{WIDTH - RIGHT}" y="{bottom + 14}" class="end dim">{name}</text>']


def _draw(series: Series, index: int, frame: _Frame) -> list[str]:
    colour, out = f"s{index % 5}", []
    if series.low is not None and series.high is not None:
        for x, low, high in _segments(series.x, series.low, series.high):
            if len(x) == 1:
                x, low, high = x[[0, 0]], low[[0, 0]], high[[0, 0]]
            there, back = frame.points(x, high), frame.points(x[::-1], low[::-1])
            out.append(f'<polygon class="{colour} band" points="{there} {back}"/>')
    smooth = len(series.x) >= SMOOTH_FROM and not series.dots
    lines = [(series.y, "faint"), (_smooth(series.y), "")] if smooth else [(series.y, "")]
    for values, style in lines:
        for x, y in _segments(series.x, values):
            if len(x) == 1:
                out.append(_dot(frame, x[0], y[0], colour, 1.8))
            else:
                points = frame.points(*thin(x, y))
                out.append(f'<polyline class="{colour} {style}" points="{points}"/>')
    finite = np.flatnonzero(np.isfinite(series.y))
    shown = finite if series.dots and len(finite) <= MAX_POINTS else finite[-1:]
    for at in shown:
        out.append(_dot(frame, series.x[at], series.y[at], colour, 2.6))
    return out


def _dot(frame: _Frame, x: float, y: float, colour: str, radius: float) -> str:
    title = f"step {short(float(x))}: {short(float(y))}"
    place = f'cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="{radius}"'
    return f'<circle class="{colour} dot" {place}><title>{title}</title></circle>'


def _clip(values: np.ndarray) -> np.ndarray:
    """Finite values far outside any real metric are clipped, so that ranges do not overflow."""
    return np.where(np.isfinite(values), np.clip(values, -1e300, 1e300), math.nan)


def line_chart(
    title: str,
    unit: str,
    series: Sequence[Series],
    *,
    spans: Sequence[Span] = (),
    unit_x: str = "step",
    from_zero: bool = False,
) -> str:
    """A <figure>: title with unit, legend with each line's last value, and the SVG."""
    drawn = []
    for s in series:
        bounds = [None if b is None else _clip(np.asarray(b, np.float64)) for b in (s.low, s.high)]
        x, y = np.asarray(s.x, np.float64), _clip(np.asarray(s.y, np.float64))
        drawn.append(Series(s.name, x, y, bounds[0], bounds[1], s.dots))
    every = [y for s in drawn for y in (s.y, s.low, s.high) if y is not None]
    ys = np.concatenate(every) if every else np.zeros(0)
    xs = np.concatenate([s.x for s in drawn]) if drawn else np.zeros(0)
    frame = _Frame(xs[np.isfinite(xs)], ys[np.isfinite(ys)], from_zero=from_zero)
    body = _axes(frame, spans, unit_x)
    for index, s in enumerate(drawn):
        body += _draw(s, index, frame)
    keys = []
    for index, s in enumerate(drawn):
        if not s.x.size:  # keeps its colour in the chart of another phase
            continue
        finite = s.y[np.isfinite(s.y)]
        last = short(float(finite[-1])) if finite.size else "no finite value"
        name = html.escape(s.name)
        keys.append(f'<span class="key"><i class="s{index % 5}"></i>{name} <b>{last}</b></span>')
    heading = f'{html.escape(title)} <span class="dim">{html.escape(unit)}</span>'
    label = html.escape(f"{title} {unit}", quote=True)
    return (
        f'<figure><figcaption><span class="name">{heading}</span>'
        f'<span class="keys">{"".join(keys)}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f"{''.join(body)}</svg></figure>"
    )


def share_bar(title: str, parts: Sequence[tuple[str, float]]) -> str:
    """A <figure>: one bar split in proportion to seconds, with a legend of shares and seconds."""
    total = sum(seconds for _, seconds in parts)
    if total <= 0:
        return ""
    left, rects, keys = 0.0, [], []
    for index, (name, seconds) in enumerate(parts):
        if seconds <= 0:  # keeps its colour in the bars of other phases
            continue
        width = 100 * seconds / total
        rects.append(
            f'<rect class="s{index % 5} bar" x="{left:.2f}" width="{width:.2f}" height="8"/>'
        )
        keys.append(
            f'<span class="key"><i class="s{index % 5}"></i>{html.escape(name)} '
            f"<b>{percent(seconds / total, 0)}</b> {duration(seconds)}</span>"
        )
        left += width
    name = html.escape(title, quote=True)
    return (
        f'<figure class="wide"><figcaption><span class="name">{name}</span>'
        f'<span class="keys">{"".join(keys)}</span></figcaption><svg class="shares" '
        f'viewBox="0 0 100 8" preserveAspectRatio="none" role="img" aria-label="{name}">'
        f"{''.join(rects)}</svg></figure>"
    )


# --- the page around the charts ---

CSS = """
:root { color-scheme: light dark; --bg: #fafaf9; --card: #fff; --ink: #1c1917; --dim: #78716c;
  --line: #e7e5e4; --span: #f5f0e6; --s0: #2563eb; --s1: #d97706; --s2: #059669; --s3: #9333ea;
  --s4: #64748b; --good: #15803d; --bad: #b91c1c; }
@media (prefers-color-scheme: dark) { :root { --bg: #171514; --card: #211f1d; --ink: #e7e5e4;
  --dim: #a8a29e; --line: #383432; --span: #2b2722; --s0: #7ab0ff; --s1: #fbbf24; --s2: #4ade80;
  --s3: #c99bff; --s4: #a3b3c9; --good: #4ade80; --bad: #f87171; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 20px 16px 60px; max-width: 1180px; background: var(--bg);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 32px 0 10px; }
p { margin: 4px 0; } .dim { color: var(--dim); } code, pre, .text { font-family: ui-monospace,
  "SF Mono", Menlo, Consolas, monospace; font-size: 12.5px; }
.facts span { display: inline-block; margin-right: 16px; color: var(--dim); }
.facts b, .keys b { color: var(--ink); font-weight: 600; }
.headline { background: var(--card); border: 1px solid var(--line);
  border-left: 5px solid var(--s4); border-radius: 8px; padding: 12px 18px; margin: 18px 0; }
.headline h2 { margin: 0; font-size: 1.35rem; } .headline.good { border-left-color: var(--good); }
.headline.bad { border-left-color: var(--bad); } .good .verdict { color: var(--good); }
.bad .verdict { color: var(--bad); } .interval { font-size: .8em; color: var(--dim);
  font-weight: 400; white-space: nowrap; }
.note { border-left: 3px solid var(--s1); padding-left: 10px; margin: 10px 0; }
.grid { display: grid; gap: 14px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 12px 6px; display: flex; flex-direction: column; justify-content: space-between; }
figure.wide { margin-bottom: 12px; padding-bottom: 12px; } figcaption { font-size: 13px; }
figcaption .name { font-weight: 600; display: block; } figcaption .name .dim { font-weight: 400; }
.keys { display: block; font-size: 12px; color: var(--dim); margin: 2px 0 4px; }
.key { display: inline-block; margin-right: 12px; overflow-wrap: anywhere; }
.key i { display: inline-block; width: 9px; height: 9px; border-radius: 2px; margin-right: 5px; }
svg { width: 100%; height: auto; display: block; } svg.shares { height: 20px; border-radius: 4px; }
svg text { font-size: 10px; fill: var(--dim); }
.end { text-anchor: end; } .mid { text-anchor: middle; } svg .grid { stroke: var(--line); }
svg .axis { stroke: var(--dim); stroke-width: .8; }
svg .span { fill: var(--span); }
svg polyline { fill: none; stroke-width: 1.7; stroke-linejoin: round; }
svg .faint { stroke-width: 1; opacity: .32; } svg .band { opacity: .18; stroke-width: 2; }
.s0 { stroke: var(--s0); } .s1 { stroke: var(--s1); } .s2 { stroke: var(--s2); }
.s3 { stroke: var(--s3); } .s4 { stroke: var(--s4); }
i.s0, .band.s0, .dot.s0, .bar.s0 { fill: var(--s0); background: var(--s0); }
i.s1, .band.s1, .dot.s1, .bar.s1 { fill: var(--s1); background: var(--s1); }
i.s2, .band.s2, .dot.s2, .bar.s2 { fill: var(--s2); background: var(--s2); }
i.s3, .band.s3, .dot.s3, .bar.s3 { fill: var(--s3); background: var(--s3); }
i.s4, .band.s4, .dot.s4, .bar.s4 { fill: var(--s4); background: var(--s4); }
svg .bar, svg .dot { stroke: none; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 14px; }
th, td { text-align: left; padding: 5px 18px 5px 0; border-bottom: 1px solid var(--line);
  white-space: nowrap; } th { font-weight: 600; }
tr:first-child th { color: var(--dim); font-weight: 400; }
.sample { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 8px 12px; margin: 0 0 10px; } .sample .meta { font-size: 13px; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; margin: 4px 0; max-height: 22em;
  overflow: auto; }
.text.prompt { color: var(--dim); max-height: 9em; }
details { margin: 12px 0; } summary { cursor: pointer; font-weight: 600; }
@media (max-width: 560px) { th, td { white-space: normal; padding-right: 10px; } }
pre { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 12px; }
"""
