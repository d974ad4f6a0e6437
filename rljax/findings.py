"""What a run folder says: its rows in order, and which changes its evaluations support.

What lives here: reading metrics, samples, summary and config (each may be missing or cut short),
and the rule for claiming a change: "improved" or "fell" only where the 95 % interval of the
difference excludes zero. What does not: HTML (`report.py`) and drawing (`charts.py`).
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rljax.tracking import read_jsonl


def is_number(value: object) -> bool:
    return isinstance(value, int | float)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run folder as read: one row per step, with "x" (steps counted through) and "phase"."""

    folder: Path
    rows: list[dict]
    samples: list[dict]
    summary: dict
    config: dict
    notes: list[str]

    def columns(self, key: str, phase: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        rows = [r for r in self.rows if is_number(r.get(key)) and phase in (None, r["phase"])]
        return np.array([r["x"] for r in rows], float), np.array([r[key] for r in rows], float)

    def keys(self) -> list[str]:
        return list(dict.fromkeys(k for r in self.rows for k, v in r.items() if is_number(v)))

    def phases(self) -> list[str]:
        return list(dict.fromkeys(r["phase"] for r in self.rows if r["phase"]))


def _phase(row: Mapping, before: str) -> str:
    if isinstance(row.get("phase"), str) and row["phase"].lower() != "eval":
        return row["phase"].lower()
    if is_number(row.get("phase_rl")):
        return "rl" if row["phase_rl"] > 0.5 else "sft"
    return before


def _merge(rows: Sequence[Mapping]) -> list[dict]:
    """One row per phase and step, later values winning.

    A phase that counts its steps anew goes on after the last step of the phase before.
    """
    merged: dict[tuple[str, float], dict] = {}
    phase, offset, last = "", 0, -math.inf
    for row in rows:
        if not is_number(row.get("step")) or not math.isfinite(row["step"]):
            continue
        now = _phase(row, phase)
        if now != phase and phase and row["step"] + offset < last:
            offset = last
        phase = now
        x = row["step"] + offset
        last = max(last, x)
        merged.setdefault((phase, x), {}).update({**row, "x": x, "phase": phase})
    return sorted(merged.values(), key=lambda row: row["x"])


def _read_rows(path: Path, notes: list[str]) -> list[dict]:
    try:
        return read_jsonl(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(f"{path.name} could not be read: {error}")
        return []


def _read_json(path: Path, notes: list[str]) -> dict:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} could not be read: {error}")
        return {}
    return data if isinstance(data, dict) else {}


def read_run(folder: Path) -> Run:
    """Everything that a run folder holds; what cannot be read becomes a note."""
    notes: list[str] = []
    rows = _merge(_read_rows(folder / "metrics.jsonl", notes))
    samples = _read_rows(folder / "samples.jsonl", notes)
    summary = _read_json(folder / "summary.json", notes)
    config = _read_json(folder / "config.json", notes)
    if rows and not summary:
        last = rows[-1]["step"]
        notes.append(f"This run has no summary: it still runs or was stopped. Last step: {last}.")
    return Run(folder, rows, samples, summary, config, notes)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval; the bounds are None where no valid interval was recorded."""

    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None


def estimate(data: object) -> Estimate | None:
    """`{"value", "low", "high", "n"}` or a bare number as an `Estimate`."""
    fields = data if isinstance(data, Mapping) else {"value": data}
    value, low, high, n = (fields.get(key) for key in ("value", "low", "high", "n"))
    if not is_number(value) or not math.isfinite(value):
        return None
    valid = is_number(low) and is_number(high) and -math.inf < low <= value <= high < math.inf
    count = int(n) if is_number(n) and math.isfinite(n) else None
    return Estimate(value, low, high, count) if valid else Estimate(value, n=count)


def difference(before: Estimate, after: Estimate, recorded: object = None) -> Estimate:
    """after - before: the recorded (paired) one, else from the two intervals as if independent.

    low = d - √((a - a_low)² + (b_high - b)²), high likewise (Newcombe 1998, method 10).
    """
    known = estimate(recorded)
    if known is not None and known.low is not None:
        return known
    d = after.value - before.value
    if before.low is None or after.low is None:
        return Estimate(d)
    low = d - math.hypot(after.value - after.low, before.high - before.value)
    high = d + math.hypot(after.high - after.value, before.value - before.low)
    return Estimate(d, low, high)


def verdict(change: Estimate) -> str:
    """ "improved" or "fell" only where the interval of the difference excludes zero."""
    if change.low is not None and change.low > 0:
        return "improved"
    if change.high is not None and change.high < 0:
        return "fell"
    return "no significant change"


def pairs(summary: Mapping) -> list[tuple[str, Estimate, Estimate, Estimate]]:
    """(name, before, after, difference) of every `<name>_before` with its `<name>_after`."""
    out = []
    for key in summary:
        name = key.removesuffix("_before")
        before, after = estimate(summary[key]), estimate(summary.get(f"{name}_after"))
        if name == key or before is None or after is None:
            continue
        recorded = summary.get("difference" if name == "accuracy" else f"{name}_difference")
        out.append((name, before, after, difference(before, after, recorded)))
    return sorted(out, key=lambda pair: pair[0] != "accuracy")
