"""Reads a run folder: its rows in order, and which changes its evaluations support. Metrics,
samples, episodes, summary and config may each be missing or cut short. A change is "improved" or
"fell" only where the 95 % interval of the difference excludes zero.
"""

import dataclasses
import functools
import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from rljax.errors import InputError
from rljax.files import read_json
from rljax.metric import Metric
from rljax.report.run_warnings import EQUAL_REWARDS, IN_A_ROW, fault_lines
from rljax.report.starts import read_starts
from rljax.runs.folder import is_locked
from rljax.runs.jsonl import read_jsonl
from rljax.tracking.meanings import FILE as MEANINGS
from rljax.tracking.meanings import read_meanings

MOST_FAILED = 0.01  # of the rewards of a step: above it there is a warning


def rows_by_step(rows: Iterable[Mapping]) -> dict[float, list[Mapping]]:
    """Returns {step: its rows}, without those whose step is no number."""
    steps: dict[float, list[Mapping]] = {}
    for row in rows:
        if is_number(row.get("step")) and math.isfinite(row["step"]):
            steps.setdefault(row["step"], []).append(row)
    return steps


def is_number(value: object) -> bool:
    """Returns whether a value of a JSON file is a number that a float can hold."""
    return isinstance(value, float) or isinstance(value, int) and abs(value) < 2**1000


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """The content of a run folder: a row per step, with "x" (steps counted through) and "phase"."""

    folder: Path
    rows: list[dict]
    samples: list[dict]
    summary: dict
    config: dict
    notes: list[str]
    starts: list[dict] = dataclasses.field(default_factory=list)  # rljax.report.starts
    episodes: list[dict] = dataclasses.field(default_factory=list)  # rljax.tracking.episodes
    data: dict = dataclasses.field(default_factory=dict)  # rljax.data.rows.show.data_page
    meanings: dict[str, Metric] = dataclasses.field(default_factory=dict)  # of what it has logged

    @functools.cached_property
    def _numbers(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The indices of the rows with a metric, and its values there, of all in one pass."""
        columns: dict[str, tuple[list, list]] = {}
        for index, row in enumerate(self.rows):
            for key, value in row.items():
                if is_number(value):
                    indices, values = columns.setdefault(key, ([], []))
                    indices.append(index)
                    values.append(value)
        return {k: (np.array(rows, int), np.array(y, float)) for k, (rows, y) in columns.items()}

    @functools.cached_property
    def _steps_and_phases(self) -> tuple[np.ndarray, np.ndarray]:
        phases = np.array([row["phase"] for row in self.rows], object)
        return np.array([row["x"] for row in self.rows], float), phases

    def columns(self, key: str, phase: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns (steps [N], values [N]) of a metric, in one phase or in all."""
        if key not in self._numbers:
            return np.zeros(0), np.zeros(0)
        indices, values = self._numbers[key]
        steps, phases = self._steps_and_phases
        selection = slice(None) if phase is None else phases[indices] == phase
        return steps[indices][selection], values[selection]

    def keys(self) -> list[str]:
        """Returns the names of the metrics that are numbers."""
        return list(self._numbers)

    def phases(self) -> list[str]:
        """Returns the names of the phases, in their order."""
        return list(dict.fromkeys(r["phase"] for r in self.rows if r["phase"]))

    @property
    def latest_start(self) -> dict:
        """Line of the last start; {} if none is recorded."""
        return self.starts[-1] if self.starts else {}

    def ended(self) -> bool:
        """Returns whether the last start came to an end that wrote a summary."""
        started = self.latest_start.get("time")
        return bool(self.summary) and self.summary.get("started") in (None, started)

    def running(self) -> bool:
        """Returns whether a process still writes the folder."""
        return not self.ended() and is_locked(self.folder)

    def steps(self) -> tuple[int, int | None]:
        """Returns the last step that was logged, and the step that the run ends at, None if it is
        not known."""
        last, sft = int(self.rows[-1]["step"]) if self.rows else 0, self.config.get("sft")
        rl_steps = self.config.get("steps")
        first = sft.get("steps") if isinstance(sft, Mapping) else 0
        if not (is_number(rl_steps) and is_number(first)):
            return last, None
        if self.rows and self.rows[-1]["phase"] != "sft":  # it may have ended early
            first = max((row["step"] for row in self.rows if row["phase"] == "sft"), default=0)
        return last, int(first + rl_steps)

    def devices(self) -> int:
        """Returns the number of devices that it runs on; 0 if nothing says so."""
        device = self.summary.get("device") or self.latest_start.get("device")
        match = re.match(r"(\d+) x ", str(device))
        return int(match[1]) if match else 0

    def trained(self) -> str:
        """Returns the name of the training between the two evaluations, that of the last phase; RL
        if the rows name no phase."""
        name, algorithm = (self.phases() or ["rl"])[-1], self.config.get("algorithm")
        if name == "preference" and isinstance(algorithm, Mapping):  # one dataflow of many losses
            name = str(algorithm.get("preference_loss", name)).partition("(")[0]
        return name.upper() if len(name) <= 5 else name.replace("_", " ")


def _phase(row: Mapping, previous: str) -> str:
    if isinstance(row.get("phase"), str) and row["phase"].lower() != "eval":
        return row["phase"].lower()
    if is_number(row.get("phase_rl")):
        return "rl" if row["phase_rl"] > 0.5 else "sft"
    return previous


def _merge(rows: Sequence[Mapping]) -> list[dict]:
    """One row per phase and step, later values winning.

    A phase that counts its steps anew goes on after the last step of the phase before.
    """
    merged: dict[tuple[str, float], dict] = {}
    phase, offset, last = "", 0, -math.inf
    for row in rows:
        if not is_number(row.get("step")) or not math.isfinite(row["step"]):
            continue
        current = _phase(row, phase)
        if current != phase and phase and row["step"] + offset < last:
            offset = last
        phase = current
        x = row["step"] + offset
        last = max(last, x)
        logged = {k: v for k, v in row.items() if is_number(v) or isinstance(v, str)}
        merged.setdefault((phase, x), {}).update({**logged, "x": x, "phase": phase})
    return sorted(merged.values(), key=lambda row: row["x"])


def _read_rows(path: Path, notes: list[str]) -> list[dict]:
    try:
        return read_jsonl(path)
    except FileNotFoundError:
        return []
    except (OSError, InputError) as error:
        notes.append(f"{path.name} could not be read: {error}")
        return []


def _read_json(path: Path, notes: list[str]) -> dict:
    if not os.path.lexists(path):
        return {}
    try:
        data = read_json(path, mends=True)
    except InputError as error:
        notes.append(f"{path.name} could not be read: {error}")
        return {}
    return data if isinstance(data, dict) else {}


def read_run(folder: Path) -> RecordedRun:
    """Returns the content of a run folder; a file that cannot be read becomes a note."""
    notes: list[str] = []
    rows = _merge(_read_rows(folder / "metrics.jsonl", notes))
    run = RecordedRun(
        folder,
        rows,
        samples=_read_rows(folder / "samples.jsonl", notes),
        summary=_read_json(folder / "summary.json", notes),
        config=_read_json(folder / "config.json", notes),
        notes=notes,
        starts=read_starts(folder),
        episodes=_read_rows(folder / "episodes.jsonl", notes),
        data=_read_json(folder / "data.json", notes),
        meanings=read_meanings(_read_json(folder / MEANINGS, notes)),
    )
    if (rows or run.starts) and not run.ended():
        notes.insert(0, _unfinished(run))
    notes += reward_warnings(rows)
    notes += [note for note in _warnings(run) if note not in notes]
    return run


def _warnings(run: RecordedRun) -> list[str]:
    """Returns the warnings that a run has begun with, and those of the faults that it has counted,
    except for those that `reward_warnings` finds in its rows."""
    texts = run.summary.get("warnings", run.latest_start.get("warnings"))
    faults, last = run.summary.get("faults"), run.summary.get("fault_steps")
    steps = run.summary.get("steps")
    counts = {
        name: value
        for name, value in (faults.items() if isinstance(faults, Mapping) else ())
        if is_number(value) and name != EQUAL_REWARDS and not name.startswith("reward/")
    }
    last = last if isinstance(last, Mapping) and is_number(steps) else {}
    last = {name: step for name, step in last.items() if isinstance(step, int)}
    texts = [text for text in texts if isinstance(text, str)] if isinstance(texts, list) else []
    return [f"Warning: {text}." for text in (*texts, *fault_lines(counts, last, steps))]


def moment(seconds: float) -> str:
    """Returns a time, in seconds since 1970, as a date in the zone of this computer."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "at an unknown time"


def _unfinished(run: RecordedRun) -> str:
    """Describes a run whose last start has written no summary."""
    last, total = run.steps()
    progress = f"{last} of {total}" if total else f"{last}"
    if run.running():
        return f"Still running: step {progress}, as of {moment(time.time())}."
    try:
        progress += f", at {moment((run.folder / 'metrics.jsonl').stat().st_mtime)}"
    except OSError:
        pass
    state = "stopped without an end"
    if not run.starts:  # then nothing says whether it had a lock
        state = "has no summary: it still runs or was stopped"
    resume = "The command that started it goes on from its last checkpoint."
    return f"This run {state}. Last step: {progress}. {resume}"


def equal_rewards(steps: int, row: Mapping) -> str:
    """Returns the warning about `steps` steps in a row whose rewards are all equal; `row` has the
    metrics of the last one."""
    if row.get("reward/all_equal"):
        value = next((v for k, v in sorted(row.items()) if k.startswith("reward/source/")), None)
        number = f", {value:g}" if is_number(value) else ""
        problem = f"all rewards of {steps} steps in a row are one number{number}"
    else:
        problem = f"for {steps} steps in a row the rewards of every prompt's samples are all equal"
    return (
        f"{problem}: nothing is learned from them. Likely causes: responses are not in the format "
        "that the reward reads (look at samples.jsonl), a reward that does not fit the data, "
        "responses cut off by sampler.max_response_tokens, or prompts that are too hard or too easy"
    )


def reward_warnings(rows: Sequence[Mapping]) -> list[str]:
    """Returns warnings about the rewards: failures above MOST_FAILED, and steps in a row whose
    rewards are all equal."""
    notes, failing, steps, worst = [], [], 0, (0, None)
    for row in rows:
        numbers = {name: value for name, value in row.items() if is_number(value)}
        failed = sum(numbers.get(f"reward/{kind}", 0.0) for kind in ("errors", "timeouts"))
        if failed > MOST_FAILED * (numbers.get("batch/completions") or 1.0):
            failing.append((row["step"], failed))
        if "reward/all_equal" in row:
            equal = row["reward/all_equal"] or row.get("reward/equal_groups", 0.0) == 1.0
            steps = steps + 1 if equal else 0
            worst = max(worst, (steps, row), key=lambda pair: pair[0])
    if failing:
        step, count = max(failing, key=lambda pair: pair[1])
        notes.append(
            f"Rewards failed and were masked out: more than {100 * MOST_FAILED:g} % of them in "
            f"{len(failing)} steps, {count:.0f} at step {step:.0f}."
        )
    if worst[0] >= IN_A_ROW:
        text = equal_rewards(worst[0], worst[1])
        notes.append(f"Step {worst[1]['step']:.0f}: {text}.")
    return notes


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval; the bounds are None if no valid interval was recorded."""

    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None


def estimate(data: object) -> Estimate | None:
    """Returns `{"value", "low", "high", "n"}` or a bare number as an `Estimate`."""
    fields = data if isinstance(data, Mapping) else {"value": data}
    value, low, high, n = (fields.get(key) for key in ("value", "low", "high", "n"))
    if not is_number(value) or not math.isfinite(value):
        return None
    valid = is_number(low) and is_number(high) and -math.inf < low <= value <= high < math.inf
    count = int(n) if is_number(n) and math.isfinite(n) else None
    return Estimate(value, low, high, count) if valid else Estimate(value, n=count)


def difference(before: Estimate, after: Estimate, recorded: object = None) -> Estimate:
    """Returns after - before: the recorded (paired) difference, else one from the two intervals as
    if independent.

    low = d - √((a - a_low)² + (b_high - b)²), high likewise (Newcombe 1998, method 10).
    """
    paired = estimate(recorded)
    if paired is not None and paired.low is not None:
        return paired
    d = after.value - before.value
    if before.low is None or after.low is None:
        return Estimate(d)
    low = d - math.hypot(after.value - after.low, before.high - before.value)
    high = d + math.hypot(after.high - after.value, before.value - before.low)
    return Estimate(d, low, high)


def change_in_words(change: Estimate) -> str:
    """Returns "improved" or "fell" only if the interval of the difference excludes zero."""
    if change.low is not None and change.low > 0:
        return "improved"
    if change.high is not None and change.high < 0:
        return "fell"
    return "no significant change"


def pairs(summary: Mapping) -> list[tuple[str, Estimate, Estimate, Estimate]]:
    """Returns (name, before, after, difference) of every `<name>_before` with `<name>_after`."""
    out = []
    for key in summary:
        name = key.removesuffix("_before")
        before, after = estimate(summary[key]), estimate(summary.get(f"{name}_after"))
        if name == key or before is None or after is None:
            continue
        recorded = summary.get("difference" if name == "accuracy" else f"{name}_difference")
        out.append((name, before, after, difference(before, after, recorded)))
    return sorted(out, key=lambda pair: pair[0] != "accuracy")
