"""Effects of staleness on learning: the table and the figure of configs/sweep_staleness.py.

python benchmarks/staleness_sweep.py SWEEP_FOLDER [--last=20] [--figure=docs/figures/staleness.svg]

Prints JSON: for every max_staleness, with and without a correction, the mean reward of the last
steps and of all steps with a 95 % bootstrap interval over seeds and steps, that of each seed, the
held-out greedy accuracy of each, and how old the tokens were. A run that has not finished is left
out.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from rljax.experiments.comparison import interval

NAMES = {False: "no weight", True: "token weights, at most 2"}


def read_run(folder: Path) -> dict | None:
    """Rewards [steps] and ages [steps] of a finished run, its seed, and its accuracy."""
    config, summary = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("config", "summary")
    )
    if summary["status"] != "finished":
        return None
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "reward/mean" in row]  # not the supervised ones
    return {
        "arm": (bool(config["algorithm"]["correction"]), config["rollouts"]["max_staleness"]),
        "seed": config["seed"],
        "rewards": [row["reward/mean"] for row in rows],
        "ages": [row.get("staleness/steps_mean", 0.0) for row in rows],
        "oldest": max(row.get("staleness/steps_max", 0.0) for row in rows),
        "accuracy": summary["accuracy_after"]["value"],
        "wall_s": summary["wall_s"],
    }


def row_of(runs: list[dict], last_steps: int) -> dict:
    """One line of the table: the runs of one arm, by seed."""
    rewards = np.array([run["rewards"] for run in runs])
    return {
        "last": interval(rewards[:, -last_steps:]),
        "last_of_seeds": rewards[:, -last_steps:].mean(axis=1).round(3).tolist(),
        "all_steps": interval(rewards),
        "all_of_seeds": rewards.mean(axis=1).round(3).tolist(),
        "accuracy_of_seeds": [run["accuracy"] for run in runs],
        "age_mean": round(float(np.mean([run["ages"] for run in runs])), 2),
        "age_max": max(run["oldest"] for run in runs),
        "wall_s": [round(min(r["wall_s"] for r in runs)), round(max(r["wall_s"] for r in runs))],
    }


def draw(table: dict, last_steps: int, file: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "rljax"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
    columns = {"last": f"last {last_steps} steps", "all_steps": "all steps"}
    for axis, (column, title) in zip(axes, columns.items(), strict=True):
        for weighed, name in NAMES.items():
            arms = sorted(eta for has_weight, eta in table if has_weight == weighed)
            intervals = [table[weighed, eta][column] for eta in arms]
            value, low, high = (
                np.array([interval_fields[key] for interval_fields in intervals])
                for key in ("value", "low", "high")
            )
            positions = np.arange(len(arms)) + (0.12 if weighed else -0.12)
            axis.errorbar(
                positions, value, [value - low, high - value], fmt="o", capsize=3, label=name
            )
        axis.set_xticks(np.arange(len(arms)), [str(eta) for eta in arms])
        axis.set(title=f"mean reward, {title}", xlabel="max_staleness", ylim=(0, 1.02))
    axes[0].legend(loc="lower left")
    figure.savefig(file, metadata={"Date": None} if file.endswith(".svg") else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--last", type=int, default=20)
    parser.add_argument("--figure", default="", help="an .svg or .png of it; needs matplotlib")
    options = parser.parse_args()
    arms: dict[tuple, list[dict]] = {}
    for path in sorted(options.folder.glob("*/summary.json")):
        if run := read_run(path.parent):
            arms.setdefault(run["arm"], []).append(run)
    table = {
        arm: row_of(sorted(runs, key=lambda run: run["seed"]), options.last)
        for arm, runs in sorted(arms.items())
    }
    if options.figure:
        draw(table, options.last, options.figure)
    shown = [{"correction": on, "max_staleness": eta, **row} for (on, eta), row in table.items()]
    print("[\n" + ",\n".join(json.dumps(row) for row in shown) + "\n]")


if __name__ == "__main__":
    main()
