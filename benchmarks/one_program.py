"""Steps of the quickstart's GRPO one at a time, and several in one program: prints JSON.

python benchmarks/one_program.py [--steps=20] [--laps=5] [--embed=64] [--rows=512]
    [--topology=v5e:2x4] [--together=8] [--seeds=8 [--config=NAME]]

Both runs have the same seed and take the same steps; `same` says whether their losses are equal to
rounding, `bitwise` whether they are equal. Laps of both take turns, after a first one that
compiles. Seconds are of the clock, of this process ("cpu_s"), and of this process and the workers
of the reward together ("all_cpu_s").

With --topology the program is compiled for TPUs that need not be there, and nothing is run: bytes
of a chip, its collectives, and the compiler's count of FLOPs and bytes, in which a loop's body
(the steps, the tokens of a response) counts once.

With --together a step of a run by itself is compared with one of so many runs in one program;
"ratio" says how many times less seconds it takes there. With --topology that program is compiled.

With --seeds whole runs are compared: `rljax sweep` of a config (the quickstart) with so many seeds,
one after the other, and with --together. Seconds are those of the commands, from start to end, with
an empty cache of compiled programs that the runs of a sweep share; `accuracy` is that of each seed.
"""

import argparse
import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server to ask about chips

import jax
import numpy as np

from rljax.config import Config
from rljax.config.flags import load_config_file
from rljax.plan.chips import topology_devices
from rljax.setup import abstract_roles, build, initial_params
from rljax.training.loop import one_step
from rljax.training.program_steps import ProgramSteps
from rljax.training.run import Run
from rljax.training.sources import make_source
from rljax.training.together import JointProgram, lower_together

CLOCKS = ("wall_s", "cpu_s", "all_cpu_s")


def make_config(program_steps: int, embed: int, rows: int, folder: str) -> Config:
    """The quickstart's RL phase."""
    config = load_config_file("quickstart")
    config.sft.steps, config.steps = 0, 10**6
    config.evaluate.every_steps = config.checkpoint.every_steps = 0
    config.run_dir, config.export, config.compilation_cache = folder, False, ""
    config.model = config.model.replace("embed=64, mlp=192", f"embed={embed}, mlp={3 * embed}")
    config.batch.prompts_per_step = rows // config.batch.samples_per_prompt
    config.batch.sequences_per_optimizer_step = rows
    config.program_steps = program_steps
    return config


def make_run(*sizes) -> Run:
    """A run of `make_config` before its first step."""
    config = make_config(*sizes)
    run = Run(build(config), Path(config.run_dir))
    run.begin(run.phase, initial_params(config, run.setup.model))
    return run


def processor_s(children: list[int]) -> float:
    """CPU seconds of this process and of processes that it has started and that still run."""
    total, tick = time.process_time(), os.sysconf("SC_CLK_TCK")
    for child in children:
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / tick
    return total


def descendants() -> list[int]:
    """The processes that this one has started, and theirs."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # it has ended
            continue
        parents[int(stat.parent.name)] = int(text.rpartition(")")[2].split()[1])
    processes, pending = [], [os.getpid()]
    while pending:
        parent = pending.pop()
        children = [child for child, above in parents.items() if above == parent]
        pending += children
        processes += children
    return processes


def clocks(children: list[int]) -> tuple[float, float, float]:
    """Seconds of CLOCKS now."""
    return time.monotonic(), time.process_time(), processor_s(children)


def lap(*runs: Run, steps: int) -> tuple[list[float], list[float]]:
    """Takes steps of runs, of several in one program. Returns their losses, and seconds of a step
    of a run by CLOCKS."""
    children = descendants()
    started = clocks(children)
    if len(runs) > 1:
        numbered = dict(enumerate(runs))
        JointProgram(numbered, len(runs)).take_next(numbered)
    losses = [float(one_step(run)["loss"]) for run in runs for _ in range(steps)]
    ended = clocks(children)
    count = steps * len(runs)
    return losses, [(b - a) / count for a, b in zip(started, ended, strict=True)]


def compared_laps(names: Sequence[str], groups: Sequence[Sequence[Run]], options) -> dict:
    """Laps of two groups of runs, in turns behind a first one that compiles: medians of the seconds
    of a step of a run, and how many times less the second group takes."""
    seconds: dict[str, list] = {name: [] for name in names}
    losses: dict[str, list] = {name: [] for name in names}
    for number in range(options.laps + 1):
        for name, runs in zip(names, groups, strict=True):
            lap_losses, lap_seconds = lap(*runs, steps=options.steps)
            losses[name] += lap_losses[: options.steps]
            if number:
                seconds[name].append(lap_seconds)
    figures = {"device": jax.devices()[0].device_kind, **vars(options)}
    first_name, second_name = names
    figures["same"] = bool(
        np.allclose(losses[first_name], losses[second_name], rtol=1e-4, atol=1e-6)
    )
    figures["bitwise"] = losses[first_name] == losses[second_name]
    for index, clock in enumerate(CLOCKS):
        times = {name: np.array(rows)[:, index] for name, rows in seconds.items()}
        ratios = times[first_name] / times[second_name]
        figures[clock] = {name: round(float(np.median(x)), 5) for name, x in times.items()}
        spread = [round(float(x), 2) for x in (ratios.min(), ratios.max())]
        figures[clock] |= {"ratio": round(float(np.median(ratios)), 2), "ratio_spread": spread}
    return figures


def compiled(config: Config, topology: str, count: int) -> dict:
    """The program of a config, or that of `count` runs of it, compiled for a topology."""
    devices, _ = topology_devices(topology)
    config.mesh.data = len(devices)
    setup = build(config, devices)
    source = make_source(setup, setup.main, None, jax.random.key(0))
    programs = ProgramSteps(setup, setup.main, source, jax.random.key(0))
    started = time.monotonic()
    roles = abstract_roles(setup)
    lowered = lower_together(programs, roles, count) if count else programs.lower(roles)
    program = lowered.compile()
    memory, cost = program.memory_analysis(), program.cost_analysis()
    held_bytes = (
        memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    )
    return {
        "topology": topology,
        "runs": count or 1,
        "steps": config.program_steps,
        "rows": config.batch.prompts_per_step * config.batch.samples_per_prompt,
        "held_bytes": held_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "gflops": round(cost["flops"] / 1e9, 3),
        "gbytes": round(cost["bytes accessed"] / 1e9, 3),
        "collectives": {
            name: len(re.findall(rf"= \S+ {name}(?:-start)?\(", program.as_text()))
            for name in ("all-reduce", "all-gather", "reduce-scatter", "collective-permute")
        },
        "compile_s": round(time.monotonic() - started, 1),
    }


def sweep(config: str, seeds: int, steps: int, folder: str, *flags: str) -> dict:
    """Seconds and accuracies of a sweep of a config over seeds."""
    command = [sys.executable, "-m", "rljax", "sweep", config, f"--seeds={seeds}", *flags]
    command += [f"--out={folder}", f"--config.compilation_cache={folder}/programs"]
    command += [f"--config.program_steps={steps}", f"--config.steps={2 * steps}"]
    command += ["--config.checkpoint.every_steps=0", "--config.trackers="]
    started, cpu_before = time.monotonic(), sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = json.loads((Path(folder) / "sweep.json").read_text())
    return {
        "wall_s": round(time.monotonic() - started, 1),
        "cpu_s": round(sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - cpu_before, 1),
        "accuracy": [row["accuracy_after"]["value"] for row in rows],
    }


def compared_sweeps(config: str, seeds: int, steps: int) -> dict:
    """A sweep of one run after the other, and one whose runs are trained together."""
    with (
        tempfile.TemporaryDirectory() as apart_folder,
        tempfile.TemporaryDirectory() as together_folder,
    ):
        figures = {
            "apart": sweep(config, seeds, steps, apart_folder),
            "together": sweep(config, seeds, steps, together_folder, "--together"),
        }
    for clock in ("wall_s", "cpu_s"):
        figures[f"{clock}_ratio"] = round(figures["apart"][clock] / figures["together"][clock], 2)
    fields = {"config": config, "seeds": seeds, "steps": 2 * steps}
    return {"device": jax.devices()[0].device_kind, **fields, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="of a program, and of a lap")
    parser.add_argument("--laps", type=int, default=5)
    parser.add_argument("--embed", type=int, default=64)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--topology", default="", help="compile for TPUs, such as v5e:2x4")
    parser.add_argument("--together", type=int, default=0, help="so many runs in one program")
    parser.add_argument("--seeds", type=int, default=0, help="compare sweeps over so many seeds")
    parser.add_argument("--config", default="quickstart", help="of the sweeps")
    options = parser.parse_args()
    if options.seeds:
        print(json.dumps(compared_sweeps(options.config, options.seeds, options.steps), indent=1))
        return
    sizes = (options.embed, options.rows)
    if options.topology:
        config = make_config(options.steps, *sizes, "")
        print(json.dumps(compiled(config, options.topology, options.together), indent=1))
        return
    with contextlib.ExitStack() as stack:

        def new_run(program_steps: int) -> Run:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            return stack.enter_context(make_run(program_steps, *sizes, folder))

        if options.together:
            names = ("alone", "together")
            groups = (
                [new_run(options.steps)],
                [new_run(options.steps) for _ in range(options.together)],
            )
        else:
            names, groups = ("host", "program"), ([new_run(1)], [new_run(options.steps)])
        print(json.dumps(compared_laps(names, groups, options), indent=1))


if __name__ == "__main__":
    main()
