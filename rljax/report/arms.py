"""Runs that differ only in their seeds form one arm of an experiment: its mean over seeds, with an
interval, and the differences of arms on the same seeds.

Intervals are Student's t over seeds, 95 %. They say what another set of seeds might give.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from rljax.report.head import listing
from rljax.report.run_folder import RecordedRun
from rljax.tracking.charts import Series

_MIXED = 1.0  # c of always_valid_half: 1 / the variance of the effects that it mixes
OWN = ("run_dir", "seed")  # fields of the config that runs of one arm differ in
LEVEL, POWER = 0.95, 0.8


@dataclasses.dataclass(frozen=True)
class Arm:
    """The runs of one setting, each with another seed, in the order of the seeds."""

    name: str
    seeds: tuple[int, ...]
    runs: tuple[RecordedRun, ...]


def averaged(runs: Sequence[RecordedRun]) -> tuple[list[RecordedRun], dict[int, str]]:
    """Returns the runs that means over seeds are taken of, and {id(run): why it is left out} of the
    others: the last steps of a run that has not finished are not those of runs that have."""
    left_out = {id(run): "no config.json" for run in runs if not run.config}
    settings: dict[str, list[RecordedRun]] = {}
    for run in runs:
        if run.config:
            settings.setdefault(_setting(listing(run.config)), []).append(run)
    for group in settings.values():
        finished = [run for run in group if _finished(run)]
        if finished:
            left_out |= {id(run): "not finished" for run in group if not _finished(run)}
        seeds = set()
        for run in sorted(finished or group, key=lambda run: -run.steps()[0]):
            if (seed := repr(listing(run.config).get("seed"))) in seeds:
                left_out[id(run)] = f"seed {seed} twice"
            seeds.add(seed)
    return [run for run in runs if id(run) not in left_out], left_out


def _finished(run: RecordedRun) -> bool:
    return run.ended() and run.summary.get("status", "finished") == "finished"


def _setting(fields: Mapping[str, object]) -> str:
    return repr(sorted((name, value) for name, value in fields.items() if name not in OWN))


def arms_of(runs: Sequence[RecordedRun]) -> list[Arm]:
    """Returns the arms, in the order of their first runs; [] if no two runs differ only in their
    seeds, or two have equal seeds, too."""
    fields = [listing(run.config) for run in runs]
    groups: dict[str, list[int]] = {}
    for i, config in enumerate(fields):
        groups.setdefault(_setting(config), []).append(i)
    seeds = [config.get("seed") for config in fields]
    members = list(groups.values())
    repeated = any(len(group) > 1 for group in members)
    if not repeated or not all(isinstance(seed, int) for seed in seeds):
        return []
    if any(len({seeds[i] for i in group}) < len(group) for group in members):
        return []
    members = [sorted(group, key=lambda i: seeds[i]) for group in members]
    names = _names([fields[group[0]] for group in members])
    return [
        Arm(name, tuple(seeds[i] for i in group), tuple(runs[i] for i in group))
        for name, group in zip(names, members, strict=True)
    ]


def _names(configs: Sequence[Mapping]) -> list[str]:
    """Returns what each arm sets, of the fields in which arms differ: "lr=1e-05,
    critic_model=scorer"; of paths the last part, and nothing of fields that are empty."""
    fields = [
        name
        for name in dict.fromkeys(name for config in configs for name in config)
        if name not in OWN and len({repr(config.get(name)) for config in configs}) > 1
    ]

    def label(config: Mapping, full: bool) -> str:
        parts = []
        for field in fields:
            value = str(config.get(field, ""))
            if value:
                last = value if full else value.rstrip("/").rpartition("/")[2]
                parts.append(f"{field if full else field.rpartition('.')[2]}={last}")
        return ", ".join(parts) or "base"

    short = [label(config, False) for config in configs]
    return short if len(set(short)) == len(short) else [label(config, True) for config in configs]


def _finite(values: Sequence[float]) -> np.ndarray:
    finite = np.asarray(values, np.float64)
    return finite[np.isfinite(finite)]


def interval(values: Sequence[float]) -> dict:
    """Returns the mean of values, one per seed, as {"value", "n"}, and with two or more "low" and
    "high" of its t interval."""
    finite = _finite(values)
    n = len(finite)
    out = {"value": float(finite.mean()) if n else math.nan, "n": n}
    if n > 1:
        from scipy.special import stdtrit  # 0.4 s that the start of a run does not need

        half = float(stdtrit(n - 1, (1 + LEVEL) / 2) * finite.std(ddof=1) / math.sqrt(n))
        out |= {"low": out["value"] - half, "high": out["value"] + half}
    return out


def always_valid_half(n: int, deviation: float) -> float:
    """Returns half the width of an interval for the mean of n values with this standard deviation
    (of n, not n - 1), which holds at every n together with probability LEVEL: looking after each
    seed, and stopping at any of them, is allowed. Infinite for a few values.

    The mean m is in it while the e-value sqrt(c / (n + c)) ((n + c) V / ((n + c) V - S^2))^(n / 2)
    is below 1 / (1 - LEVEL), where S and V are the sums of x - m and of (x - m)^2, and c = 1:
    a t test mixed over effects. (Wang and Ramdas 2023, arXiv 2310.03722, for Gaussian values.)
    """
    total = n + _MIXED
    ratio = (math.sqrt(total / _MIXED) / (1 - LEVEL)) ** (2 / n)
    room = total - ratio * _MIXED
    return deviation * math.sqrt((ratio - 1) * total / room) if room > 0 else math.inf


def always_valid(values: Sequence[float]) -> dict:
    """Returns the mean of values, one per seed, as `interval`; bounds of `always_valid_half`."""
    numbers = np.asarray(values, np.float64)
    mean, half = float(numbers.mean()), always_valid_half(len(numbers), float(numbers.std()))
    return {"value": mean, "n": len(numbers), "low": mean - half, "high": mean + half}


def seeds_needed(differences: Sequence[float]) -> int | None:
    """Returns the number of seeds that tell the mean of paired differences from 0 with 80 % power,
    if mean and spread are as measured: the least n at which the t test of the intervals has it
    (noncentral t). None if there is no such number."""
    finite = _finite(differences)
    if len(finite) < 2 or finite.mean() == 0:
        return None
    from scipy.special import ndtri

    size = abs(finite.mean()) / max(finite.std(ddof=1), 1e-300)  # in standard deviations
    z = float(ndtri((1 + LEVEL) / 2) + ndtri(POWER))
    smallest = max(2, math.floor((z / size) ** 2))  # of a normal test, which needs fewer
    enough = (n for n in range(smallest, smallest + 100) if _power(size, n) >= POWER)
    return next(enough, smallest)


def _power(size: float, n: int) -> float:
    """The power of the two-sided t test of n paired differences of a mean of `size` deviations."""
    from scipy.special import nctdtr, stdtrit

    bound, shift = stdtrit(n - 1, (1 + LEVEL) / 2), size * math.sqrt(n)
    if shift > 30:
        return 1.0
    return float(1 - nctdtr(n - 1, shift, bound) + nctdtr(n - 1, shift, -bound))


def mean_series(arm: Arm, key: str) -> Series:
    """Returns the mean over seeds of a metric at each step that all have, with its interval."""
    columns = [dict(zip(*run.columns(key), strict=True)) for run in arm.runs]
    x = sorted(set.intersection(*(set(column) for column in columns)))
    intervals = [interval([column[step] for column in columns]) for step in x]
    mean, low, high = (
        np.array([bounds.get(name, math.nan) for bounds in intervals], float)
        for name in ("value", "low", "high")
    )
    band = (low, high) if len(arm.runs) > 1 else (None, None)
    return Series(arm.name, np.array(x, float), mean, *band, dots=key.startswith("eval/"))


def paired(arm: Arm, other: Arm, values: Mapping[int, float]) -> list[float]:
    """Returns arm - other on the seeds that both have; `values` has a number for each run,
    by id(run)."""
    other_runs = dict(zip(other.seeds, other.runs, strict=True))
    return [
        values[id(run)] - values[id(other_runs[seed])]
        for seed, run in zip(arm.seeds, arm.runs, strict=True)
        if seed in other_runs
    ]
