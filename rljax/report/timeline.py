"""The timeline of a step: when sequences were decoded, samples scored, weights updated. A small
JSON record with times in seconds since the step's start, and its figure.

A record has step, seconds, spans {name: [[begin, end], ...]}, and two curves of points (time, ...):
decoding [[t, sequences]], scoring [[t, samples in scoring, samples scored]].
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rljax.errors import InputError
from rljax.files import read_json
from rljax.report.run_folder import is_number
from rljax.tracking.charts import DIGIT, escaped, short, tick_label, ticks
from rljax.tracking.timing import Timings

FILE = "timeline.json"
MOST_POINTS = 200  # of a curve
TRACKS = ("generate", "reward", "learn")
WIDTH, LEFT, RIGHT, TOP, TRACK, GAP, AXIS = 1080, 92, 12, 6, 44, 10, 20


def scored_while_decoding(timings: Timings) -> float:
    """Returns the seconds in which both a sequence was decoded and a sample was scored."""
    decoding = _union([(a, b) for name, a, b in timings.spans if name == "generate"])
    pairs = itertools.product(_union(timings.scoring), decoding)
    overlaps = [(max(a, c), min(b, d)) for (a, b), (c, d) in pairs if max(a, c) < min(b, d)]
    return sum(b - a for a, b in overlaps)


def _union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    union: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((begin, end))
    return union


def record_of(timings: Timings, step: int, seconds: float) -> dict:
    """Returns the record of a step."""

    def since(t):
        return round(t - timings.begun_s, 4)

    spans: dict[str, list] = {}
    for name, begin, end in timings.spans:
        spans.setdefault(name, []).append([since(begin), since(end)])
    live = [[since(t), count] for t, count in timings.live]
    changes = [(begin, 1, 0) for begin, _ in timings.scoring]
    changes += [(end, -1, 1) for _, end in timings.scoring]
    running, scored, scoring = 0, 0, []
    for t, running_change, done_change in sorted(changes):
        running, scored = running + running_change, scored + done_change
        scoring.append([since(t), running, scored])
    return {
        "step": step,
        "seconds": round(seconds, 4),
        "spans": spans,
        "decoding": _thin(live),
        "scoring": _thin(scoring),
    }


def _thin(points: list) -> list:
    """Returns about MOST_POINTS of them at most, evenly in time of arrival, with the last one."""
    stride = max(1, -(-len(points) // MOST_POINTS))
    return points[::stride] + (points[-1:] if points and (len(points) - 1) % stride else [])


def write(folder: Path, records: Sequence[Mapping]) -> None:
    """Writes the records of a run into its folder."""
    (folder / FILE).write_text(json.dumps(list(records)) + "\n", encoding="utf-8")


def read(folder: Path) -> list[dict]:
    """Returns the records that `write` wrote; none if there is no file, or it was cut short."""
    try:
        records = read_json(folder / FILE)
    except InputError:
        return []
    return [record for record in records if _is_record(record)] if isinstance(records, list) else []


def _is_record(record: object) -> bool:
    """Returns whether a value of the file is what record_of makes."""
    if not isinstance(record, dict) or not isinstance(record.get("spans"), dict):
        return False
    spans = [_are_rows(rows, 2) for rows in record["spans"].values()]
    curves = [_are_rows(record.get("decoding"), 2), _are_rows(record.get("scoring"), 3)]
    return all((*spans, *curves, _are_rows([[record.get("step"), record.get("seconds")]], 2)))


def _are_rows(rows: object, width: int) -> bool:
    """Returns whether they are a list of lists of `width` numbers."""
    return isinstance(rows, list) and all(
        isinstance(row, list)
        and len(row) == width
        and all(is_number(x) and math.isfinite(x) for x in row)
        for row in rows
    )


def figure(record: Mapping) -> str:
    """Returns a <figure>: tracks of decoding, scoring and learning over the seconds of one step."""
    total = max(float(record["seconds"]), 1e-6)

    def x(t):
        return LEFT + min(max(t / total, 0.0), 1.0) * (WIDTH - LEFT - RIGHT)

    decoding = [(t, n) for t, n in record["decoding"]]
    running = [(t, n) for t, n, _ in record["scoring"]]
    scored = [(t, n) for t, _, n in record["scoring"]]
    names = ("decoding", "scoring", "learning")
    body: list[str] = []
    for track, (name, span) in enumerate(zip(names, TRACKS, strict=True)):
        top = TOP + track * (TRACK + GAP)
        body.append(f'<text x="{LEFT - 8}" y="{top + TRACK / 2 + 4}" class="end">{name}</text>')
        for begin, end in record["spans"].get(span, ()):
            box = f'x="{x(begin):.1f}" y="{top}" width="{max(x(end) - x(begin), 1):.1f}"'
            title = f"<title>{span}: {short(begin)} to {short(end)} s</title>"
            body.append(f'<rect class="s{track} bar band" {box} height="{TRACK}">{title}</rect>')
        if name == "decoding":
            body += _curve(decoding, x, top, track, "sequences")
        if name == "scoring":
            body += _curve(running, x, top, track, "in scoring")
            body += _curve(scored, x, top, 3, "scored", filled=False)
    bottom = TOP + 3 * (TRACK + GAP)
    body += _axis(total, x, bottom)
    keys = [("s0", "sequences decoding", decoding), ("s1", "samples in scoring", running)]
    keys += [("s3", "samples scored", scored)]
    legend = "".join(
        f'<span class="key"><i class="{colour}"></i>{label} at most '
        f"<b>{short(_most(curve))}</b></span>"
        for colour, label, curve in keys
        if curve
    )
    title = escaped(f"Step {record['step']}")
    return (
        f'<figure class="wide"><figcaption><span class="name">{title} <span class="dim">'
        f"{short(total)} seconds; shaded: the step waits for it</span></span>"
        f'<span class="keys">{legend}</span></figcaption><svg viewBox="0 0 {WIDTH} '
        f'{bottom + AXIS}" role="img" aria-label="timeline of step {record["step"]}">'
        f"{''.join(body)}</svg></figure>"
    )


def _most(curve: Sequence[tuple[float, float]]) -> float:
    return max(count for _, count in curve)


def _curve(curve, x, top: int, colour: int, label: str, filled: bool = True) -> list[str]:
    """A staircase, as high as its track at its most."""
    if not curve:
        return []
    peak = _most(curve) or 1

    def y(n):
        return top + TRACK * (1 - n / peak)

    steps, previous = [], 0.0
    for t, count in curve:
        steps += [(x(t), y(previous)), (x(t), y(count))]
        previous = count
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in steps)
    title = f"<title>{label}: {short(peak)} at most</title>"
    out = [f'<polyline class="s{colour}" points="{line}">{title}</polyline>']
    if filled:
        corners = f"{steps[0][0]:.1f},{top + TRACK} {line} {steps[-1][0]:.1f},{top + TRACK}"
        out.append(f'<polygon class="s{colour} band bar" points="{corners}"/>')
    return out


def _axis(total: float, x, bottom: int) -> list[str]:
    marks = ticks(0.0, total, 8)
    spacing = marks[1] - marks[0] if len(marks) > 1 else total
    out = [f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>']
    for mark in marks:
        mark_x = f"{x(mark):.1f}"
        out.append(
            f'<line class="axis" x1="{mark_x}" x2="{mark_x}" y1="{bottom}" y2="{bottom + 3}"/>'
        )
        label = tick_label(mark, spacing)
        middle = min(x(mark), WIDTH - DIGIT * len(label) / 2)
        out.append(f'<text x="{middle:.1f}" y="{bottom + 14}" class="mid">{label}</text>')
    end = f'x="{LEFT - 8}" y="{bottom + 14}" class="end dim"'
    return [*out, f"<text {end}>seconds</text>"]
