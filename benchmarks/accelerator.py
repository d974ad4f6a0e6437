"""Measures rljax on an accelerator within minutes, the most valuable figures first: prints JSON.

python benchmarks/accelerator.py [--minutes=8] [--json=FILE] [--parts=logprob,step] [--tiny]
python benchmarks/accelerator.py --table=FILE

Needs this checkout, and JAX 0.10 to 0.12 with a GPU or a TPU. Packages that are missing are listed
at the start, with the parts that need them. `--tiny` runs the same on a CPU at sizes that take
seconds. `--table` prints a file of results as a Markdown table.

Each part runs in a process of its own with a time limit, and prints a figure as soon as it is
measured. A part that fails or runs out of time keeps the figures that it has, and the next part
starts. No part starts after --minutes. With --json the file is written after every part. The parts,
in this order:

device     rates of a bfloat16 product and of a copy, which the shares below are of
logprob    the fused log-prob: each implementation's values, gradients, ms, share of the product
attention  cuDNN (or splash) and XLA: the same, and of packed rows
gae        each implementation's values, ms, share of the copy
decode     tokens/s at 0.5B shapes, random weights, and the share of the bandwidth floor
step       whole GRPO steps at 0.5B shapes, and their parts; the learning step's share of the peak;
           peak memory beside what `rljax plan` predicts
in_flight  steps with samples in flight, rollouts.max_staleness=1, over steps without
trl        GRPO steps of TRL at the same shapes, with its transformers generation, if it is there
decode_8b  as decode, at 8B shapes
doctor     what `rljax doctor` finds wrong
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "accelerator_parts.py"
JAX = ((0, 10), (0, 13))  # from, and below


@dataclasses.dataclass(frozen=True)
class Part:
    """A function of accelerator_parts.py. `seconds`: the most that it may take. `needs`: packages
    by name; "rljax" stands for all that it depends on."""

    seconds: int
    needs: tuple[str, ...] = ("jax", "numpy")


PARTS = {
    "device": Part(60),
    "logprob": Part(150),
    "attention": Part(120),
    "gae": Part(60),
    "decode": Part(120, ("rljax",)),
    "step": Part(240, ("rljax",)),
    "in_flight": Part(150, ("rljax",)),
    "trl": Part(150, ("jax", "trl", "torch", "transformers", "datasets")),
    "decode_8b": Part(150, ("rljax",)),
    "doctor": Part(60, ("rljax",)),
}


# -- what is installed


def _version(name: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)


def requirements() -> list[str]:
    """Returns the names of the packages that rljax depends on."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    return [text.split(">")[0].split("=")[0].strip() for text in project["dependencies"]]


def missing(part: Part, versions: dict[str, str | None]) -> list[str]:
    """Returns the packages that `part` needs and this Python does not have."""
    names = [n for need in part.needs for n in (requirements() if need == "rljax" else (need,))]
    return [name for name in names if versions[name] is None]


def packages() -> dict[str, str | None]:
    """Returns {package: version, None where it is missing} of all that a part needs."""
    names = {n for part in PARTS.values() for n in part.needs} - {"rljax"}
    return {name: _version(name) for name in sorted({*requirements(), *names, "jaxlib"})}


def version_problem(versions: dict[str, str | None]) -> str:
    """Returns why nothing can run here; "" if something can."""
    version = versions["jax"]
    if version is None:
        return "JAX is missing. Fix: pip install 'jax[cuda12]' (or jax[tpu])"
    number = tuple(int(part) for part in version.split(".")[:2])
    if not JAX[0] <= number < JAX[1]:
        return f"JAX {version}: this runs with 0.10 to 0.12. Fix: pip install 'jax>=0.10,<0.13'"
    return ""


# -- one part after another


def run_part(name: str, seconds: float, tiny: bool) -> dict:
    """Runs a part; returns {"seconds", "rows": its figures, "failed": why it has no more, or
    None}."""
    paths = [str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), name, *(["--tiny"] if tiny else [])],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    output: dict[str, list[str]] = {"stdout": [], "stderr": []}
    # Daemons: a process that left the group may hold the pipes open.
    readers = [
        threading.Thread(target=lines.extend, args=(pipe,), daemon=True)
        for lines, pipe in zip(output.values(), (process.stdout, process.stderr), strict=True)
    ]
    for reader in readers:
        reader.start()
    failure = None
    try:
        if code := process.wait(seconds):
            failure = f"exit code {code}: {''.join(output['stderr'])[-2000:]}"
    except subprocess.TimeoutExpired:
        failure = f"not done after {seconds:.0f} s"
    with contextlib.suppress(ProcessLookupError):  # with the processes that it has started
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for reader in readers:
        reader.join(10)
    rows = rows_of(output["stdout"])
    if not rows and failure is None:
        failure = f"it said nothing: {''.join(output['stderr'])[-2000:]}"
    return {"seconds": round(time.monotonic() - started, 1), "rows": rows, "failed": failure}


def rows_of(lines: list[str]) -> dict:
    """Returns {row: its figures} of the lines that a part printed."""
    rows = {}
    for line in lines:
        with contextlib.suppress(ValueError):  # what libraries print
            row = json.loads(line)
            rows |= row if isinstance(row, dict) else {}
    return rows


def commit() -> str:
    """Returns the commit of this checkout, "" where git does not know it."""
    git = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    with contextlib.suppress(OSError):
        return subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return ""


def measure(names: list[str], minutes: float, tiny: bool, keep) -> dict:
    """Measures all parts in turn; `keep` is called with the result so far after each."""
    deadline, versions = time.monotonic() + 60 * minutes, packages()
    result = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "minutes": minutes,
        "tiny": tiny,
        "python": sys.version.split()[0],
        "packages": versions,
        "parts": {},
    }
    for name in names:
        seconds_left = deadline - time.monotonic()
        if absent := missing(PARTS[name], versions):
            part = {"skipped": f"missing: pip install {' '.join(absent)}"}
        elif seconds_left < 5:
            part = {"skipped": f"the {minutes:g} minutes were over"}
        else:
            part = run_part(name, min(PARTS[name].seconds, seconds_left), tiny)
        result["parts"][name] = part
        print(f"{name}: {reason(part) or 'done'}", file=sys.stderr, flush=True)
        keep(result)
    return result


def reason(part: dict) -> str:
    """Returns why a part has not all its figures, in a line; "" if it has."""
    lines = (part.get("skipped") or part.get("failed") or "").strip().splitlines()
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    return (errors or lines or [""])[-1]


# -- results as a table


def _figures(value, label="") -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [
            pair
            for key, figure in value.items()
            for pair in _figures(figure, f"{label} {key}".strip())
        ]
    return [(label, f"{value:.4g}" if isinstance(value, float) else value)]


def table(result: dict) -> str:
    """Returns the results as Markdown: a line for each row of each part."""
    device = result["parts"].get("device", {}).get("rows", {}).get("device", {})
    machine = f"{device.get('kind', 'an unknown device')}, jax {result['packages']['jax']}"
    lines = [
        f"`benchmarks/accelerator.py` on {machine}, {result['date']}, commit {result['commit']}",
        "",
    ]
    lines += ["| part | what | figures |", "|---|---|---|"]
    for name, part in result["parts"].items():
        for row, figures in part.get("rows", {}).items():
            text = ", ".join(f"{key} {value}".strip() for key, value in _figures(figures))
            lines.append(f"| {name} | {row} | {text} |")
        if failure := reason(part):
            lines.append(f"| {name} | not measured | {failure} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--tiny", action="store_true", help="on a CPU, at sizes that take seconds")
    parser.add_argument("--table", type=Path, help="print this file of results as Markdown")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return 0
    names = [name for name in options.parts.split(",") if name]
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    versions = packages()
    if problem := version_problem(versions):
        parser.error(problem)
    if absent := {package for name in names for package in missing(PARTS[name], versions)}:
        skipped = [name for name in names if missing(PARTS[name], versions)]
        print(f"left out: {', '.join(skipped)}", file=sys.stderr)
        print(f"they need: pip install {' '.join(sorted(absent))}", file=sys.stderr)

    def keep(result: dict) -> None:
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")

    result = measure(names, options.minutes, options.tiny, keep)
    print(json.dumps(result, indent=1))
    started = [part for part in result["parts"].values() if "failed" in part]
    return 0 if any(part["rows"] for part in started) else 1


if __name__ == "__main__":
    sys.exit(main())
