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
    """Names of the packages that rljax depends on."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    return [text.split(">")[0].split("=")[0].strip() for text in project["dependencies"]]


def missing(part: Part, versions: dict[str, str | None]) -> list[str]:
    """Packages that `part` needs and this Python does not have."""
    names = [n for each in part.needs for n in (requirements() if each == "rljax" else (each,))]
    return [name for name in names if versions[name] is None]


def packages() -> dict[str, str | None]:
    """{package: version, None where it is missing} of all that a part needs."""
    others = {n for part in PARTS.values() for n in part.needs} - {"rljax"}
    return {name: _version(name) for name in sorted({*requirements(), *others, "jaxlib"})}


def refused(versions: dict[str, str | None]) -> str:
    """Returns why nothing can run here; "" if something can."""
    have = versions["jax"]
    if have is None:
        return "JAX is missing. Fix: pip install 'jax[cuda12]' (or jax[tpu])"
    number = tuple(int(x) for x in have.split(".")[:2])
    if not JAX[0] <= number < JAX[1]:
        return f"JAX {have}: this runs with 0.10 to 0.12. Fix: pip install 'jax>=0.10,<0.13'"
    return ""


# -- one part after another


def run_part(name: str, seconds: float, tiny: bool) -> dict:
    """{"seconds", "rows": what the part said, "failed": why it has no more, or None}."""
    paths = [str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), name, *(["--tiny"] if tiny else [])],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    said: dict[str, list[str]] = {"stdout": [], "stderr": []}
    # Daemons: a process that left the group may hold the pipes open.
    readers = [
        threading.Thread(target=lines.extend, args=(pipe,), daemon=True)
        for lines, pipe in zip(said.values(), (process.stdout, process.stderr), strict=True)
    ]
    for reader in readers:
        reader.start()
    failed = None
    try:
        if code := process.wait(seconds):
            failed = f"exit code {code}: {''.join(said['stderr'])[-2000:]}"
    except subprocess.TimeoutExpired:
        failed = f"not done after {seconds:.0f} s"
    with contextlib.suppress(ProcessLookupError):  # with the processes that it has started
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for reader in readers:
        reader.join(10)
    rows = rows_of(said["stdout"])
    if not rows and failed is None:
        failed = f"it said nothing: {''.join(said['stderr'])[-2000:]}"
    return {"seconds": round(time.monotonic() - begun, 1), "rows": rows, "failed": failed}


def rows_of(lines: list[str]) -> dict:
    """{row: its figures} of what a part printed."""
    rows = {}
    for line in lines:
        with contextlib.suppress(ValueError):  # what libraries print
            said = json.loads(line)
            rows |= said if isinstance(said, dict) else {}
    return rows


def commit() -> str:
    """The commit of this checkout, "" where git does not know it."""
    git = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    with contextlib.suppress(OSError):
        return subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return ""


def measure(names: list[str], minutes: float, tiny: bool, keep) -> dict:
    """All parts in turn; `keep` is called with what there is after each."""
    end, versions = time.monotonic() + 60 * minutes, packages()
    out = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "minutes": minutes,
        "tiny": tiny,
        "python": sys.version.split()[0],
        "packages": versions,
        "parts": {},
    }
    for name in names:
        left = end - time.monotonic()
        if lacking := missing(PARTS[name], versions):
            found = {"skipped": f"missing: pip install {' '.join(lacking)}"}
        elif left < 5:
            found = {"skipped": f"the {minutes:g} minutes were over"}
        else:
            found = run_part(name, min(PARTS[name].seconds, left), tiny)
        out["parts"][name] = found
        print(f"{name}: {reason(found) or 'done'}", file=sys.stderr, flush=True)
        keep(out)
    return out


def reason(part: dict) -> str:
    """Why a part has not all its figures, in a line; "" if it has."""
    lines = (part.get("skipped") or part.get("failed") or "").strip().splitlines()
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    return (errors or lines or [""])[-1]


# -- results as a table


def _figures(value, at="") -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [x for key, one in value.items() for x in _figures(one, f"{at} {key}".strip())]
    return [(at, f"{value:.4g}" if isinstance(value, float) else value)]


def table(result: dict) -> str:
    """The results as Markdown: a line for each row of each part."""
    device = result["parts"].get("device", {}).get("rows", {}).get("device", {})
    at = f"{device.get('kind', 'an unknown device')}, jax {result['packages']['jax']}"
    lines = [
        f"`benchmarks/accelerator.py` on {at}, {result['date']}, commit {result['commit']}",
        "",
    ]
    lines += ["| part | what | figures |", "|---|---|---|"]
    for name, part in result["parts"].items():
        for row, figures in part.get("rows", {}).items():
            said = ", ".join(f"{key} {value}".strip() for key, value in _figures(figures))
            lines.append(f"| {name} | {row} | {said} |")
        if why := reason(part):
            lines.append(f"| {name} | not measured | {why} |")
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
    if why := refused(versions):
        parser.error(why)
    if lacking := {n for name in names for n in missing(PARTS[name], versions)}:
        waiting = [name for name in names if missing(PARTS[name], versions)]
        print(f"left out: {', '.join(waiting)}", file=sys.stderr)
        print(f"they need: pip install {' '.join(sorted(lacking))}", file=sys.stderr)

    def keep(result: dict) -> None:
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")

    result = measure(names, options.minutes, options.tiny, keep)
    print(json.dumps(result, indent=1))
    ran = [part for part in result["parts"].values() if "failed" in part]
    return 0 if any(part["rows"] for part in ran) else 1


if __name__ == "__main__":
    sys.exit(main())
