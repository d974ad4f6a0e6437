"""Host overhead of a GRPO step on several hosts: everything but programs. Prints JSON.

python benchmarks/hosts.py [--hosts=4] [--devices=1] [--steps=8] [--prompts=16] [--samples=8]

Processes on this machine, connected by loopback, run one config: a decoder of 2 layers (embed 96)
on sort_digits, rewards in a process of each host. The steps after the first four are profiled on
every host; a program runs from the first to the last moment at which any thread executes one, so
that waiting for another host inside a collective counts as program, and waiting for its scores as
overhead. Then the same step in one process with the devices of one host.
"""

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WARM = 4  # steps before those that are measured
_PROGRAM = "ThunkExecutor::Execute"  # of the CPU's runtime
_MODULES = "XLA Modules"  # the line of a TPU's or GPU's plane


def config_of(folder: str, steps: int, prompts: int, samples: int):
    from rljax.config import Config

    config = Config(dataflow="grpo", steps=WARM + steps, run_dir=folder, export=False)
    config.model = "decoder(layers=2, embed=96, mlp=288, heads=3, kv_heads=3, head_dim=32)"
    config.data.train, config.data.max_prompt_tokens = "sort_digits(digits=5)", 8
    config.sampler.max_response_tokens = 7
    config.batch.prompts_per_step, config.batch.samples_per_prompt = prompts, samples
    config.batch.sequences_per_optimizer_step = prompts * samples
    config.reward.function, config.reward.workers = "sequence_match(partial=0.5)", 1
    config.evaluate.prompts, config.checkpoint.every_steps = 8, 0
    config.trackers, config.compilation_cache, config.report_every_minutes = (), "", 0.0
    config.profile_steps, config.profile_hosts = (WARM + 1, WARM + steps), -1
    return config


def union_s(spans: list[tuple[float, float]]) -> float:
    """Returns the seconds that are in any of the spans (start, end) of nanoseconds."""
    total, covered = 0.0, -1.0
    for start, end in sorted(spans):
        total += max(end - max(start, covered), 0.0)
        covered = max(covered, end)
    return total / 1e9


def read_profile(path: Path) -> list[dict]:
    """Returns the seconds of every profiled step of a host, and those in which a program ran."""
    import jax

    steps, programs = [], []
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                span = event.start_ns, event.start_ns + event.duration_ns
                if event.name == "train":
                    steps.append(span)
                elif line.name == _MODULES or event.name.startswith(_PROGRAM):
                    programs.append(span)
    rows = []
    for start, end in sorted(steps):
        inside = [(max(a, start), min(b, end)) for a, b in programs if b > start and a < end]
        rows.append({"step_s": (end - start) / 1e9, "programs_s": union_s(inside)})
    return rows


def spread(values: list[float]) -> dict:
    low, *_, high = sorted(values) if len(values) > 1 else values * 2
    return {"median": statistics.median(values), "least": low, "most": high}


def summary(steps: list[dict]) -> dict:
    """Returns figures of the steps of one host, or of all."""
    overhead = [step["step_s"] - step["programs_s"] for step in steps]
    return {
        "steps": len(steps),
        "step_s": spread([step["step_s"] for step in steps]),
        "programs_s": spread([step["programs_s"] for step in steps]),
        "overhead_s": spread(overhead),
        "overhead_share": sum(overhead) / sum(step["step_s"] for step in steps),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def measure(hosts: int, devices: int, flags) -> dict:
    """Measures one run on `hosts` processes of `devices` devices each."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        processes = []
        for k in range(hosts):
            env = {n: v for n, v in os.environ.items() if not n.startswith("RLJAX_")}
            env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
            if hosts > 1:
                env |= {"RLJAX_COORDINATOR": f"127.0.0.1:{port}", "RLJAX_HOSTS": str(hosts)}
                env["RLJAX_HOST"] = str(k)
            sizes = [str(n) for n in (flags.steps, flags.prompts, flags.samples)]
            command = [sys.executable, __file__, "--run", f"{folder}/run", *sizes]
            process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
            stack.callback(process.kill)  # nothing, once it has ended
            processes.append(process)
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"exit codes of the hosts: {codes}")
        profiles = [read_profile(path) for path in sorted(Path(folder).rglob("*.xplane.pb"))]
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][WARM:]
    assert len(profiles) == hosts and all(len(steps) == flags.steps for steps in profiles), profiles
    parts = [
        name
        for name in rows[0]
        if name in ("time/generate_s", "time/reward_s", "time/learn_s", "time/rest_s")
    ]
    return {
        "hosts": hosts,
        "devices_of_each": devices,
        "all_hosts": summary([step for steps in profiles for step in steps]),
        "each_host": [summary(steps)["overhead_s"] for steps in profiles],
        "parts_of_the_first_host": {n: spread([row[n] for row in rows]) for n in parts},
    }


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        from rljax import train

        train(config_of(sys.argv[2], *map(int, sys.argv[3:6])))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--devices", type=int, default=1, help="of each host")
    parser.add_argument("--steps", type=int, default=8, help="that are measured")
    parser.add_argument("--prompts", type=int, default=16, help="of a step")
    parser.add_argument("--samples", type=int, default=8, help="of a prompt")
    flags = parser.parse_args()
    import jax

    several = measure(flags.hosts, flags.devices, flags)
    single = measure(1, flags.devices, flags)
    result = {
        "jax": jax.__version__,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "machine": platform.machine(),
        "several_hosts": several,
        "one_host": single,
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
