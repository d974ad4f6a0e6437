"""Programs per second of the code sandbox, tier by tier: a fork of a warm zygote against a new
interpreter. Prints one JSON object per measurement.

    python benchmarks/code_sandbox.py --seconds 3 --repeats 5

One worker runs one program after another, so programs/s are of one worker. `processor_s` is the
processor time of a program with everything that serves it (this process, zygote, program), so one
core can do 1 / processor_s.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from pathlib import Path

from rljax.errors import InputError
from rljax.rewards.sandbox.process import _idle
from rljax.rewards.sandbox.tiers import TIERS, Process, ProcessLimits, SandboxError, sandbox_tier
from rljax.rewards.unit_tests.code_forms import read_tests
from rljax.rewards.unit_tests.code_run import run_tests

ADD = "a, b = map(int, input().split())\nprint(a + b)"


def spent() -> float:
    """Processor seconds of this process, of its ended children and of those that live."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ended_s = sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, kinds))
    living_ticks = 0
    for pid in descendants(os.getpid())[1:]:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        living_ticks += sum(map(int, fields[11:15]))
    return ended_s + living_ticks / os.sysconf("SC_CLK_TCK")


def drop_zygotes() -> None:
    while _idle:
        _idle.pop().close()


def one_program(tier: str, warm: bool) -> None:
    header = {"mode": "script", "source": ADD}
    with Process(header, ProcessLimits(timeout_s=30.0), tier, stdin="1 2", warm=warm) as process:
        assert process.wait().stdout == b"3\n"


def rate(run, seconds: float) -> tuple[float, float]:
    """(runs per second of wall time, processor seconds per run)."""
    run()
    drop_zygotes()
    run()
    spent_before, started, count = spent(), time.monotonic(), 0
    while time.monotonic() < started + seconds:
        run()
        count += 1
    return count / (time.monotonic() - started), (spent() - spent_before) / count


def private_bytes(pids: list[int]) -> int:
    """Memory that these processes share with nobody."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Private_Clean:", "Private_Dirty:")):
                total += int(line.split()[1]) * 1024
    return total


def descendants(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [parent] + [pid for child in children for pid in descendants(int(child))]


def zygote_bytes(tier: str) -> int:
    drop_zygotes()
    one_program(tier, True)
    return private_bytes(descendants(_idle[0].process.pid))


def measure(name: str, tier: str, run_one, arguments) -> dict:
    runs = [rate(run_one, arguments.seconds) for _ in range(arguments.repeats)]
    row = {"what": name, "tier": tier}
    for index, key in enumerate(("per_s", "processor_s")):
        values = sorted(run[index] for run in runs)
        row[key] = round(statistics.median(values), 5)
        row[f"{key}_range"] = [round(values[0], 5), round(values[-1], 5)]
    row["per_s_per_core"] = round(1 / row["processor_s"], 1)
    if tier == "bubblewrap" and name == "cold":  # bwrap does not wait for what it started
        for key in ("processor_s", "processor_s_range", "per_s_per_core"):
            row[key] = None
    return row | {"load": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    print(
        json.dumps(
            {
                "python": platform.python_version(),
                "kernel": platform.release(),
                "cores": os.cpu_count(),
            }
        )
    )
    for tier in TIERS:
        try:
            one_program(tier, True)
        except SandboxError as error:
            print(json.dumps({"tier": tier, "absent": str(error)}))
            continue
        for warm in (True, False):
            name = "warm" if warm else "cold"

            def run(warm=warm, tier=tier):
                return one_program(tier, warm)

            row = measure(name, tier, run, arguments)
            if warm:
                row["zygote_private_bytes"] = zygote_bytes(tier)
            print(json.dumps(row), flush=True)
    try:
        tier = sandbox_tier()
    except InputError as error:
        sys.exit(str(error))
    program = "def add(a, b): return a + b"
    calls = read_tests(
        {
            "inputs": [[n, n] for n in range(10)],
            "outputs": [2 * n for n in range(10)],
            "fn_name": "add",
        }
    )
    asserts = read_tests([f"assert add({n}, {n}) == {2 * n}" for n in range(10)])
    for name, tests in (("10 tests by call", calls), ("10 asserts", asserts)):

        def run(tests=tests):
            return run_tests(program, tests)

        print(json.dumps(measure(name, tier, run, arguments)), flush=True)


if __name__ == "__main__":
    main()
