"""The speed of the repository over its commits: a line of JSON for each measurement, and a figure.

python benchmarks/history.py [TREE ...] [--rounds=1] [--repeats=3] [--response=64]
    [--file=benchmarks/history.jsonl] [--figure=docs/figures/history.svg]
python benchmarks/history.py --draw

A TREE is a folder with a commit checked out (default: this one); several take turns, `--rounds`
times. Of each, benchmarks/grpo_step.py as it stands there runs a whole GRPO step and its parts,
with that tree's rljax. A line of --file has the commit and its date, when and on what it was
measured, the load before and after, and for "generate", "learn", "logprobs" and "step" the spread
of CPU seconds, and `cost`, by which commits are compared.

cost is CPU seconds times the matmul rate, GFLOP per CPU second, that the same process read between
the laps: how many GFLOP of plain float32 products the machine would have done meanwhile. So a slow
or busy machine makes both larger and smaller, and lines of several machines can be set side by
side; what a part costs in memory traffic is not taken out by it. --figure shows the median of the
lines of each commit, and the least and the greatest. It needs matplotlib.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
PARTS = ("generate", "learn", "logprobs", "step")


def git(tree: Path, *arguments: str) -> str:
    result = subprocess.run(["git", "-C", str(tree), *arguments], capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"history: git {' '.join(arguments)} in {tree}: {result.stderr.strip()}")
    return result.stdout.strip()


def commit_of(tree: Path) -> dict:
    """Returns the commit of a tree, and whether its code differs from it."""
    changed = git(tree, "status", "--porcelain", "--untracked-files=no", "--", "rljax")
    commit, date = git(tree, "log", "-1", "--format=%h %cI").split()
    return {"commit": commit, "commit_date": date, "changed": bool(changed)}


def parts_of(result: dict) -> dict:
    """Returns {part: CPU seconds and cost} of the result of benchmarks/grpo_step.py."""
    rate = result["matmul_gflop_per_cpu_s"]["median"]
    parts = {}
    for part in PARTS:
        seconds = result[part]["cpu_s"]
        parts[part] = {
            "cpu_s": {name: round(value, 3) for name, value in seconds.items()},
            "cost": round(seconds["median"] * rate, 1),
        }
    return parts


def measured(tree: Path, response: int, repeats: int) -> dict:
    """Measures a tree; returns a line of the history."""
    before = os.getloadavg()[0]
    command = [sys.executable, "benchmarks/grpo_step.py"]
    command += [f"--response={response}", f"--repeats={repeats}"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    process = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if process.returncode:
        sys.exit(f"history: {' '.join(command)} in {tree} failed:\n{process.stderr[-2000:]}")
    result = json.loads(process.stdout)
    return {
        **commit_of(tree),
        "measured": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"benchmarks/grpo_step.py --response={response} --repeats={repeats}",
        "python": ".".join(map(str, sys.version_info[:3])),
        "jax": result["jax"],
        "device": result["device"],
        "cores": os.cpu_count(),
        "load": [round(before, 1), round(os.getloadavg()[0], 1)],
        "matmul_gflop_per_cpu_s": round(result["matmul_gflop_per_cpu_s"]["median"], 1),
        "parts": parts_of(result),
    }


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def costs(lines: list[dict]) -> list[dict]:
    """Returns {"commit", "commit_date", part: costs} for each commit and command, oldest first."""
    by_commit: dict[tuple, dict] = {}
    for line in lines:
        key = (line["commit_date"], line["commit"], line["command"])
        names = {name: line[name] for name in ("commit", "commit_date", "command")}
        row = by_commit.setdefault(key, {**names, **{part: [] for part in PARTS}})
        for part in PARTS:
            row[part].append(line["parts"][part]["cost"])
    return [by_commit[key] for key in sorted(by_commit)]


def draw(lines: list[dict], file: str) -> None:
    """Draws the cost of each part over the commits of the newest command."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "rljax"
    from matplotlib import pyplot

    points = [point for point in costs(lines) if point["command"] == lines[-1]["command"]]
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    positions = range(len(points))
    for part in PARTS:
        middle = [statistics.median(point[part]) for point in points]
        low = [m - min(point[part]) for m, point in zip(middle, points, strict=True)]
        high = [max(point[part]) - m for m, point in zip(middle, points, strict=True)]
        axes.errorbar(positions, middle, yerr=(low, high), marker="o", capsize=3, label=part)
    labels = [f"{point['commit']}\n{point['commit_date'][:10]}" for point in points]
    axes.set_xticks(list(positions), labels)
    axes.set_ylim(bottom=0)
    axes.set(ylabel="GFLOP of plain products", title=f"{lines[-1]['command']}: less is faster")
    axes.legend(frameon=False)
    figure.savefig(file, metadata={"Date": None} if file.endswith(".svg") else None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trees", nargs="*", type=Path, default=[HERE], metavar="TREE")
    parser.add_argument("--rounds", type=int, default=1, help="turns of all trees")
    parser.add_argument("--repeats", type=int, default=3, help="steps that are measured")
    parser.add_argument("--response", type=int, default=64, help="tokens")
    parser.add_argument("--file", type=Path, default=HERE / "benchmarks" / "history.jsonl")
    parser.add_argument("--figure", default=str(HERE / "docs" / "figures" / "history.svg"))
    parser.add_argument("--draw", action="store_true", help="the figure of --file, nothing else")
    flags = parser.parse_args()
    for _ in range(0 if flags.draw else flags.rounds):
        for tree in flags.trees:
            line = json.dumps(measured(tree.resolve(), flags.response, flags.repeats))
            with flags.file.open("a") as file:
                file.write(line + "\n")
            print(line, flush=True)
    if not (lines := read(flags.file)):
        sys.exit(f"history: {flags.file} has no line yet: leave out --draw")
    draw(lines, flags.figure)


if __name__ == "__main__":
    main()
