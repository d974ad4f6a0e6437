"""Pictures of numbers: short number formats, sparklines, SVG line charts and bars as text.

Pure functions from numbers to strings, for `console.py` and the report. Charts are drawn for a
box of 360 x 190 that scales with the page; colours are CSS classes (s0..s4): the page
(rljax.report.style) decides light or dark.
"""

import dataclasses
import html
import math
import numbers
from collections.abc import Sequence

import numpy as np

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 30, 10, 8, 26  # LEFT at least: labels may need more
DIGIT = 6.2  # width of a character of a tick's label, in the widest of the page's fonts
MAX_POINTS = 300  # a chart is narrower than this in pixels
SMOOTH_FROM = 60  # below this many points the raw line is readable by itself
NOISY = 0.25  # share of the points at which a series turns, from which on an average helps
HOVERED = 40  # points at most that say their values under the pointer
COLOURS, DASHES = 5, ("", "6 3", "2 2")  # a line's look: a colour, then another dash


def escaped(value: object) -> str:
    """Returns a value as text of a page, in an element or in quotes of an attribute. Values from
    files reach a page through this function alone."""
    return html.escape(str(value), quote=True)


def short(value: object) -> str:
    """Returns a number for people in few characters: 0.4213, 5210, 52.1k, 3.2e-06, nan."""
    if not isinstance(value, numbers.Real):
        return "-"
    value = float(value)
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    for unit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if max(unit, 1e4) <= size < 1e15:
            return f"{value / unit:.3g}{suffix}"
    if size < 1e4 and value == int(value):
        return str(int(value))
    return f"{value:.4g}" if 1e-3 <= size < 1e4 else f"{value:.1e}"


def percent(value: float, digits: int = 1) -> str:
    """Returns a share of 1 as text in percent: "42.1 %"."""
    return f"{100 * value:.{digits}f} %"


def duration(seconds: float) -> str:
    """Returns seconds as text: 2 d 3 h, 1 h 05 min, 4 min 10 s, 12 s."""
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
    """Returns the finite values as a line of `width` block characters at most; gaps are spaces."""
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
    """One line of a chart; `low` and `high` draw an interval band, `dots` marks every point.
    `title` is shown when the pointer is over its name."""

    name: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    dots: bool = False
    title: str = ""
    last: float | None = None  # value in the legend; None: y of the largest x


@dataclasses.dataclass(frozen=True)
class Span:
    """A shaded part of the x axis, such as the SFT phase."""

    name: str
    start: float
    end: float


def ticks(low: float, high: float, count: int = 4, *, whole: bool = False) -> list[float]:
    """Returns about `count` round numbers inside [low, high]."""
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
    """Returns the label of a tick with just the decimals that tell it from its neighbour."""
    if abs(value) < step * 1e-6:
        return "0"
    if step >= 1 and abs(value) < 1e4 and step == int(step):
        return f"{value:.0f}"
    if 1e-4 <= step < 1 or step < 1e4 and abs(value) < 1e4 and step >= 1e-4:
        digits = max(0, 1 - math.floor(math.log10(step)))
        text = f"{value:.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    if abs(value) >= 1e4 and step >= 0.004 * abs(value):
        return short(float(f"{value:.4g}"))
    texts = (f"{value:.{digits}e}" for digits in range(1, 6))
    return next((text for text in texts if abs(float(text) - value) < 0.01 * step), f"{value:.5e}")


def thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most about MAX_POINTS of the N points x [N], y [N]. The extremes of each bucket
    are kept, so that spikes stay visible."""
    if len(x) <= MAX_POINTS:
        return x, y
    keep = {0, len(x) - 1}
    for bucket in np.array_split(np.arange(len(x)), MAX_POINTS // 2):
        keep |= {int(bucket[np.argmin(y[bucket])]), int(bucket[np.argmax(y[bucket])])}
    index = np.array(sorted(keep))
    return x[index], y[index]


def _smooth(y: np.ndarray) -> np.ndarray:
    """A centred moving average over a thirtieth of the points, NaN where `y` is not finite."""
    half = max(1, len(y) // 60)
    finite = np.isfinite(y)
    total = np.concatenate([[0.0], np.cumsum(np.where(finite, y, 0.0))])
    count = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(y))
    start, stop = np.maximum(0, index - half), np.minimum(len(y), index + half + 1)
    mean = (total[stop] - total[start]) / np.maximum(1, count[stop] - count[start])
    return np.where(finite, mean, math.nan)


def _segments(x: np.ndarray, *ys: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    """The runs of points where all of `ys` are finite: a gap in the data is a gap in the line."""
    finite = np.logical_and.reduce([np.isfinite(y) for y in (x, *ys)])
    edges = np.flatnonzero(np.diff(finite.astype(np.int8))) + 1
    parts = np.split(np.arange(len(x)), edges)
    return [(x[p], *(y[p] for y in ys)) for p in parts if p.size and finite[p[0]]]


class _Frame:
    """Maps data to the drawing box; the labels of the y axis stand left of `left`."""

    def __init__(self, xs: np.ndarray, ys: np.ndarray, *, from_zero: bool):
        self.x0, self.x1 = (float(xs.min()), float(xs.max())) if xs.size else (0.0, 1.0)
        if self.x1 <= self.x0:
            self.x0, self.x1 = self.x0 - 1, self.x1 + 1
        low, high = (float(ys.min()), float(ys.max())) if ys.size else (0.0, 1.0)
        if high - low <= 1e-4 * max(abs(low), abs(high)):  # labels of four digits could not tell
            middle = low / 2 + high / 2
            low, high = middle - 0.05 * abs(middle), middle + 0.05 * abs(middle)
        if from_zero and low >= 0:
            low = 0.0
        pad = (high - low) * 0.06 or 0.5
        self.y0 = low if from_zero and low == 0 else low - pad
        self.y1 = high + pad
        marks = ticks(self.y0, self.y1, 5)
        step = marks[1] - marks[0] if len(marks) > 1 else abs(marks[0]) or 1.0
        self.labels = [(mark, tick_label(mark, step)) for mark in marks]
        self.left = max(LEFT, 8 + DIGIT * max(len(text) for _, text in self.labels))

    def x(self, value):
        width = self.x1 - self.x0 or 1.0  # of numbers that floats cannot tell apart
        return self.left + (value - self.x0) / width * (WIDTH - self.left - RIGHT)

    def y(self, value):
        height = self.y1 - self.y0 or 1.0
        return HEIGHT - BOTTOM - (value - self.y0) / height * (HEIGHT - TOP - BOTTOM)

    def points(self, x: np.ndarray, y: np.ndarray) -> str:
        pairs = zip(self.x(x), self.y(y), strict=True)
        return " ".join(f"{a:.1f},{b:.1f}" for a, b in pairs)


def _shaded(frame: _Frame, spans: Sequence[Span]) -> tuple[list[str], list[str]]:
    """Boxes of the spans, and their names: inside the box, or right of a box that is too narrow."""
    boxes, names = [], []
    for span in spans:
        left = frame.x(max(span.start, frame.x0))
        width = frame.x(min(span.end, frame.x1)) - left
        if width > 0:
            inside = width > DIGIT * len(span.name) + 8
            attributes = f'x="{left + (4 if inside else width + 3):.1f}" y="{TOP + 11}"'
            boxes.append(
                f'<rect class="span" x="{left:.1f}" y="{TOP}" width="{width:.1f}" '
                f'height="{HEIGHT - BOTTOM - TOP}"/>'
            )
            names.append(f'<text class="span-name" {attributes}>{escaped(span.name)}</text>')
    return boxes, names


def _axes(frame: _Frame, unit_x: str, whole: bool) -> list[str]:
    """Grid, ticks and labels; those of x are whole numbers if all its values are. The name of the x
    axis stands left of it, under the labels of y, where no tick is."""
    bottom, left, right = HEIGHT - BOTTOM, frame.left, WIDTH - RIGHT
    out = []
    for mark, text in frame.labels:
        y = frame.y(mark)
        out.append(f'<line class="grid" x1="{left:.1f}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text x="{left - 5:.1f}" y="{y + 3.5:.1f}" class="end">{text}</text>')
    marks = ticks(frame.x0, frame.x1, 4, whole=whole)
    step = marks[1] - marks[0] if len(marks) > 1 else 1.0
    out.append(f'<line class="axis" x1="{left:.1f}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    for mark in marks:
        x, text = frame.x(mark), tick_label(mark, step)
        half = DIGIT * len(text) / 2
        middle = min(max(x, left + half), WIDTH - half)  # neither on the name nor cut off
        out.append(
            f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 3}"/>'
            f'<text x="{middle:.1f}" y="{bottom + 14}" class="mid">{text}</text>'
        )
    name = escaped(unit_x)
    return [*out, f'<text x="{left - 5:.1f}" y="{bottom + 14}" class="end dim">{name}</text>']


def _reversals(y: np.ndarray) -> float:
    """The share of the points at which the finite values change from rising to falling or back."""
    change = np.sign(np.diff(y[np.isfinite(y)]))
    change = change[change != 0]
    return float(np.sum(change[1:] != change[:-1])) / max(len(y), 1)


def _look(index: int) -> tuple[str, str]:
    """(class, attributes) of a line: its colour, and a dash for those after the first colours."""
    dash = DASHES[index // COLOURS % len(DASHES)]
    return f"s{index % COLOURS}", f' stroke-dasharray="{dash}"' if dash else ""


def _draw(series: Series, index: int, frame: _Frame, many: bool) -> list[str]:
    (colour, dash), out = _look(index), []
    if series.low is not None and series.high is not None:
        for x, low, high in _segments(series.x, series.low, series.high):
            if len(x) == 1:
                x, low, high = x[[0, 0]], low[[0, 0]], high[[0, 0]]
            upper, lower = frame.points(x, high), frame.points(x[::-1], low[::-1])
            out.append(f'<polygon class="{colour} band" points="{upper} {lower}"/>')
    smooth = len(series.x) >= SMOOTH_FROM and not series.dots and _reversals(series.y) > NOISY
    lines = [(_smooth(series.y) if smooth else series.y, "")]
    if smooth and not many:
        lines.insert(0, (series.y, "faint"))
    for values, style in lines:
        for x, y in _segments(series.x, values):
            if len(x) == 1:
                out.append(_dot(frame, x[0], y[0], colour, 1.8))
            else:
                points = frame.points(*thin(x, y))
                out.append(f'<polyline class="{colour} {style}"{dash} points="{points}"/>')
    finite = np.flatnonzero(np.isfinite(series.y))
    dots = finite if series.dots and len(finite) <= MAX_POINTS else finite[-1:]
    for point in dots:
        out.append(_dot(frame, series.x[point], series.y[point], colour, 2.6))
    return out


def _dot(frame: _Frame, x: float, y: float, colour: str, radius: float) -> str:
    attributes = f'cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="{radius}"'
    return f'<circle class="{colour} dot" {attributes}/>'


def _hover(series: Sequence[Series], frame: _Frame, unit_x: str) -> list[str]:
    """Columns over the chart that show, under the pointer, the values of the lines at one x."""
    finite = [(s, np.isfinite(s.x) & np.isfinite(s.y)) for s in series]
    xs = np.unique(np.concatenate([s.x[mask] for s, mask in finite])) if finite else np.zeros(0)
    if not xs.size:
        return []
    if len(xs) > HOVERED:
        xs = xs[np.unique(np.linspace(0, len(xs) - 1, HOVERED).round().astype(int))]
    edges = np.concatenate([[frame.left], frame.x((xs[1:] + xs[:-1]) / 2), [WIDTH - RIGHT]])
    values = [dict(zip(s.x[mask], s.y[mask], strict=True)) for s, mask in finite]
    out = []
    for x, left, right in zip(xs, edges, edges[1:], strict=False):
        lines = [f"{unit_x} {short(float(x))}"]
        pairs = zip(series, values, strict=True)
        lines += [f"{s.name} {short(float(points[x]))}" for s, points in pairs if x in points]
        title = escaped("\n".join(lines))
        out.append(
            f'<rect class="hover" x="{left:.1f}" y="{TOP}" width="{max(right - left, 0):.1f}" '
            f'height="{HEIGHT - BOTTOM - TOP}"><title>{title}</title></rect>'
        )
    return out


def _clip(values: np.ndarray) -> np.ndarray:
    """Clips finite values far outside any real metric, so that ranges do not overflow."""
    return np.where(np.isfinite(values), np.clip(values, -1e300, 1e300), math.nan)


def line_chart(
    title: str,
    unit: str,
    series: Sequence[Series],
    *,
    spans: Sequence[Span] = (),
    unit_x: str = "step",
    from_zero: bool = False,
    note: str = "",
    many: bool = False,
) -> str:
    """Returns a <figure>: title with unit, `note` (HTML), legend with each line's last value,
    and the SVG. Of `many` lines only the averages are drawn, and the page names them once for
    all charts."""
    drawn = []
    for s in series:
        bounds = [None if b is None else _clip(np.asarray(b, np.float64)) for b in (s.low, s.high)]
        x, y = np.asarray(s.x, np.float64), _clip(np.asarray(s.y, np.float64))
        drawn.append(dataclasses.replace(s, x=x, y=y, low=bounds[0], high=bounds[1]))
    curves = [y for s in drawn for y in (s.y, s.low, s.high) if y is not None]
    ys = np.concatenate(curves) if curves else np.zeros(0)
    xs = np.concatenate([s.x for s in drawn]) if drawn else np.zeros(0)
    xs = xs[np.isfinite(xs)]
    frame = _Frame(xs, ys[np.isfinite(ys)], from_zero=from_zero)
    boxes, names = _shaded(frame, spans)
    body = [*boxes, *_axes(frame, unit_x, whole=bool(np.all(xs == np.round(xs))))]
    for index, s in enumerate(drawn):
        body += _draw(s, index, frame, many)
    body += [*names, *_hover(drawn, frame, unit_x)]
    keys = "" if many else "".join(_key(s, index) for index, s in enumerate(drawn))
    heading = f'{escaped(title)} <span class="dim">{escaped(unit)}</span>'
    label = escaped(f"{title} {unit}")
    return (
        f'<figure><figcaption><span class="name">{heading}</span>{note}'
        f'<span class="keys">{keys}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f"{''.join(body)}</svg></figure>"
    )


def _key(s: Series, index: int) -> str:
    """The line of a legend; "" for a series without values, which keeps its colour in the chart of
    another phase."""
    if not s.x.size:
        return ""
    finite = s.y[np.isfinite(s.y)] if s.last is None else np.array([s.last])
    last = short(float(finite[-1])) if finite.size else "no finite value"
    title = f' title="{escaped(s.title)}"' if s.title else ""
    return f'<span class="key"{title}>{legend(index)}{escaped(s.name)} <b>{last}</b></span>'


def legend(index: int) -> str:
    """Returns a sample of a line's look."""
    colour, dash = _look(index)
    if not dash:
        return f'<i class="{colour}"></i>'
    line = f'<line class="{colour}" x2="18" y1="2" y2="2"{dash}/>'
    return f'<svg class="dash" viewBox="0 0 18 4">{line}</svg>'


def share_bar(title: str, parts: Sequence[tuple[str, float]]) -> str:
    """Returns a <figure>: a bar split in proportion to seconds, with shares and seconds."""
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
            f'<span class="key"><i class="s{index % 5}"></i>{escaped(name)} '
            f"<b>{percent(seconds / total, 0)}</b> {duration(seconds)}</span>"
        )
        left += width
    name = escaped(title)
    return (
        f'<figure class="wide"><figcaption><span class="name">{name}</span>'
        f'<span class="keys">{"".join(keys)}</span></figcaption><svg class="shares" '
        f'viewBox="0 0 100 8" preserveAspectRatio="none" role="img" aria-label="{name}">'
        f"{''.join(rects)}</svg></figure>"
    )
