"""The settings of a sweep over several seeds: their curves with intervals, and how they differ.

python benchmarks/seeds_figure.py SWEEP_FOLDER --metrics=reward/mean,reward/best_of_k \\
    [--last=20] [--window=5] [--figure=docs/figures/process_rewards.svg]

Prints JSON: for every metric and setting (runs that differ in their seeds alone) the mean of the
last steps and of all steps with Student's 95 % interval over seeds, that of each seed, the
difference to the first setting seed by seed, and how many seeds would settle it. A curve is the
mean over seeds of means over `window` steps; its band is the same interval.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from rljax.report.arms import Arm, arms_of, interval, paired, seeds_needed
from rljax.report.comparison import run_folders
from rljax.report.run_folder import RecordedRun, read_run


def mean_of(run: RecordedRun, metric: str, last_steps: int | None) -> float:
    """The mean of a metric over its last steps, None for all."""
    values = run.columns(metric)[1]
    return float(np.mean(values if last_steps is None else values[-last_steps:]))


def row_of(arm: Arm, base: Arm, metric: str, last_steps: int | None) -> dict:
    values = {
        id(run): mean_of(run, metric, last_steps)
        for compared_arm in (arm, base)
        for run in compared_arm.runs
    }
    arm_values = [values[id(run)] for run in arm.runs]
    row = {
        "steps": last_steps or "all",
        **_short(interval(arm_values)),
        "of_seeds": [round(x, 3) for x in arm_values],
    }
    if arm is base:
        return row
    gains = paired(arm, base, values)
    return {**row, "difference": _short(interval(gains)), "seeds_needed": seeds_needed(gains)}


def _short(interval_fields: dict) -> dict:
    return {name: round(value, 4) for name, value in interval_fields.items()}


def curve(arm: Arm, metric: str, window: int) -> tuple[np.ndarray, list[dict]]:
    """(the middle step of each window, the interval over seeds of its mean)."""
    columns = [run.columns(metric) for run in arm.runs]
    count = min(len(x) for x, _ in columns) // window * window
    steps = columns[0][0][:count].reshape(-1, window).mean(axis=1)
    means = np.stack([y[:count].reshape(-1, window).mean(axis=1) for _, y in columns])
    return steps, [interval(means[:, i]) for i in range(means.shape[1])]


def draw(arms: list[Arm], metrics: list[str], window: int, file: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "rljax"
    from matplotlib import pyplot

    size = (4 * len(metrics), 3 + 0.25 * len(arms))
    figure, axes = pyplot.subplots(
        1, len(metrics), figsize=size, layout="constrained", squeeze=False
    )
    for axis, metric in zip(axes[0], metrics, strict=True):
        for arm in arms:
            steps, intervals = curve(arm, metric, window)
            value, low, high = (
                np.array([interval_fields.get(key, np.nan) for interval_fields in intervals])
                for key in ("value", "low", "high")
            )
            (line,) = axis.plot(steps, value, label=arm.name)
            axis.fill_between(steps, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        axis.set(title=metric, xlabel="step")
    # Below, as names of settings are longer than a panel is wide.
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center")
    figure.savefig(file, metadata={"Date": None} if file.endswith(".svg") else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--metrics", default="reward/mean,reward/best_of_k")
    parser.add_argument("--last", type=int, default=20)
    parser.add_argument("--window", type=int, default=5)
    parser.add_argument("--figure", default="", help="an .svg or .png of it; needs matplotlib")
    options = parser.parse_args()
    runs = [read_run(Path(folder)) for folder in run_folders([options.folder])]
    arms = arms_of([run for run in runs if run.summary.get("status") == "finished"])
    if not arms:
        parser.error(f"{options.folder} holds no two finished runs that differ in the seed alone")
    metrics = options.metrics.split(",")
    if options.figure:
        draw(arms, metrics, options.window, options.figure)
    rows = [
        {"metric": metric, "setting": arm.name, **row_of(arm, arms[0], metric, last_steps)}
        for metric in metrics
        for last_steps in (options.last, None)
        for arm in arms
    ]
    print("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]")


if __name__ == "__main__":
    main()
