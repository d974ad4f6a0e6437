"""Whole GRPO steps of rljax, TRL and Tunix side by side, on three shapes: prints JSON.

python benchmarks/peers.py --environments=FOLDER [--shapes=ragged,fixed,long]
    [--rounds=3] [--minutes=18]

The shapes are those of grpo_step.py. The same decoder with random float32 weights everywhere, the
same prompts, one optimizer step, AdamW behind a clip, no KL, 32 sequences in a microbatch. Each
system is a process in an environment of its own, which is made in FOLDER where it is missing (pip
installs the versions below), and runs its own trainer: `Run.step`, `GRPOTrainer.train` and
`GRPOLearner.train`. "update" is everything after the responses are there. Steps are taken in turns,
rljax, TRL, Tunix, rljax, ..., after one of each that compiles and warms up, so that the machine's
drift meets all of them alike; a shape has fewer rounds than --rounds where the time would not do,
but at least one. A peer that cannot be installed or fails is reported as such.

A ratio above 1 says that rljax is ahead of the best peer: in response tokens per second, by the
median over rounds, and in the largest resident set of a step.
"""

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from step_shapes import SHAPES, Shape, spread

HERE = Path(__file__).resolve().parent
PACKAGES = {
    "rljax": (),
    "trl": ("torch==2.13.0", "trl==1.16.0", "transformers==5.23.0"),
    "tunix": ("google-tunix==0.1.7", "jax=={jax}", "jaxlib=={jax}"),
}
CLOCKS = ("wall_s", "cpu_s")
PARTS = ("generate", "update", "step")


class Failed(Exception):
    """A system that cannot take part, and why."""


def python_of(system: str, folder: Path) -> str:
    """The interpreter of a system's environment, which is made where it is missing."""
    if not PACKAGES[system]:
        return sys.executable
    python = folder / system / "bin" / "python"
    installed = folder / system / "installed.txt"
    packages = [x.format(jax=version("jax")) for x in PACKAGES[system]]
    if installed.exists() and installed.read_text().split() == packages:
        return str(python)
    try:
        subprocess.run([sys.executable, "-m", "venv", folder / system], check=True)
        command = [python, "-m", "pip", "install", "-q", *packages]
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        message = (getattr(error, "stderr", None) or str(error)).strip()[-1000:]
        raise Failed(f"its environment cannot be made: {message}") from error
    installed.write_text("\n".join(packages))
    return str(python)


class Process:
    """A system that takes steps: a script beside this one, with `options` as its only argument."""

    def __init__(self, script: str, python: str, options: dict, log: Path):
        self.log = log
        paths = [str(HERE), str(HERE.parent)] if python == sys.executable else [str(HERE)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "JAX_PLATFORMS": "cpu",
            # Threads of one system that wait do not disturb the others.
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        command = [python, HERE / script, json.dumps(options)]
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.ready = self._answer()["ready"]

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise Failed(f"its process ended: {self.log.read_text().strip()[-1000:]}")
        return json.loads(line)

    def step(self) -> dict:
        try:
            print("step", file=self.process.stdin, flush=True)
        except OSError:
            pass  # the process has ended, and _answer says why
        return self._answer()

    def end(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def summary(laps: list[dict]) -> dict:
    """The spread of every cost of a system's laps, and of its response tokens per second."""
    figures = {}
    for part in PARTS:
        costs = [lap[part] for lap in laps]
        figures[part] = {name: spread([cost[name] for cost in costs]) for name in costs[0]}
        for clock in CLOCKS:
            rates = [lap["response_tokens"] / lap[part][clock] for lap in laps]
            figures[part][f"response_tokens_per_{clock}"] = spread(rates)
    tokens = [lap["response_tokens"] for lap in laps]
    return {**figures, "response_tokens": spread(tokens), "laps": len(laps)}


def compared(systems: dict[str, dict]) -> dict:
    """Ratios of rljax to the best of the peers that took part, above 1 where rljax is ahead."""
    peers = {
        name: system for name, system in systems.items() if name != "rljax" and "step" in system
    }
    if not peers or "step" not in systems.get("rljax", {}):
        return {}
    ours, figures = systems["rljax"], {}
    for part in PARTS:
        for clock in CLOCKS:
            name = f"response_tokens_per_{clock}"
            rates = {peer: system[part][name]["median"] for peer, system in peers.items()}
            best = max(rates, key=rates.get)
            our_rate, peer_rate = ours[part][name], peers[best][part][name]
            figures[f"{part}_by_{clock}"] = {
                "best_peer": best,
                "ratio": our_rate["median"] / peer_rate["median"],
                "ratio_of_the_extremes": [
                    our_rate["min"] / peer_rate["max"],
                    our_rate["max"] / peer_rate["min"],
                ],
            }
    memory = {peer: system["step"]["peak_mb"]["max"] for peer, system in peers.items()}
    best = min(memory, key=memory.get)
    ratio = memory[best] / ours["step"]["peak_mb"]["max"]
    return {**figures, "peak_memory": {"best_peer": best, "ratio": ratio}}


def progress(shape: Shape, moment: str, system: str, costs: dict) -> None:
    parts = ", ".join(f"{part} {costs[part]['wall_s']:.2f} s" for part in PARTS)
    print(f"{shape.name}, {moment}: {system} {parts}", file=sys.stderr, flush=True)


def measure(
    shape: Shape, rounds: int, pythons: dict[str, str], folder: Path, seconds: float = math.inf
) -> dict:
    """One shape: {"systems": {name: its summary, or why there is none}, "ratios"}. No round but the
    first begins that would end after `seconds`, were it as long as the one before."""
    started = time.monotonic()
    running, laps, results = {}, {}, {}
    for system, python in pythons.items():
        try:
            log = folder / f"{system}_{shape.name}.log"
            fields = dataclasses.asdict(shape)
            process = running[system] = Process(f"peer_{system}.py", python, fields, log)
            first_lap = process.step()
            results[system] = {"versions": process.ready, "first_step": first_lap}
            progress(shape, "first step", system, first_lap)
        except Failed as error:
            running.pop(system, None)
            results[system] = {"failed": str(error)}
    last_start = started
    for number in range(1, rounds + 1):
        round_start = time.monotonic()
        if number > 1 and round_start - started + (round_start - last_start) > seconds:
            break
        last_start = round_start
        for system, process in list(running.items()):
            try:
                laps.setdefault(system, []).append(process.step())
                progress(shape, f"round {number}", system, laps[system][-1])
            except Failed as error:
                del running[system], laps[system]
                results[system]["failed"] = str(error)
    for process in running.values():
        process.end()
    for system, system_laps in laps.items():
        results[system] |= summary(system_laps)
    return {"shape": dataclasses.asdict(shape), "systems": results, "ratios": compared(results)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, required=True, help="a folder")
    parser.add_argument("--shapes", default="ragged,fixed,long")
    parser.add_argument("--rounds", type=int, default=3, help="of a shape, at most")
    parser.add_argument("--minutes", type=float, default=18)
    flags = parser.parse_args()
    folder = flags.environments.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    pythons, missing = {}, {}
    for system in PACKAGES:
        try:
            pythons[system] = python_of(system, folder)
        except Failed as error:
            missing[system] = {"failed": str(error)}
    shapes = [SHAPES[name] for name in flags.shapes.split(",")]
    results, deadline = {}, time.monotonic() + 60 * flags.minutes
    for shapes_left, shape in zip(range(len(shapes), 0, -1), shapes, strict=True):
        share = (deadline - time.monotonic()) / shapes_left
        results[shape.name] = measure(shape, flags.rounds, pythons, folder, share)
    print(json.dumps({**results, "not_installed": missing}, indent=2))


if __name__ == "__main__":
    main()
