"""The simulation of rljax.plan.simulate against the loop that it stands for. Prints JSON.

python benchmarks/simulate.py [--etas=0,1,2] [--embed=256] [--slots=32] [--prompts=16]
                              [--samples=8] [--steps=12]

Runs of GRPO on one device, the update included, take turns in one process, a step each. All words
are equally likely and one of 33 ends a response: lengths are geometric (mean 33, cap 128), and the
learning rate is 0. What is simulated gets the seconds of the run with eta 0 alone, of a dispatch, a
decode step and learning (rljax.plan.seconds.fitted), and that lengths are geometric, none of the
lengths. Seconds are the process's, of all its threads (cpu), and the wall's (wall).
"""

import argparse
import contextlib
import functools
import json
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from rljax.config import Config
from rljax.plan import draws
from rljax.plan.seconds import fitted
from rljax.plan.simulate import Load, simulate
from rljax.setup import build
from rljax.training.run import Run

WORDS, CAP, FIRST = 33, 128, 4  # steps that fill what is in flight, and compile


def config_of(options: argparse.Namespace, eta: int) -> Config:
    config = Config(dataflow="grpo", steps=10**6, export=False)
    config.model = f"decoder(layers=4, embed={options.embed}, mlp={3 * options.embed}, heads=4, "
    config.model += f"kv_heads=2, head_dim={options.embed // 4}, init_std=1e-4)"
    config.data.train, config.data.max_prompt_tokens = "letter_count(letters=8, kinds=20)", 10
    config.sampler.max_response_tokens, config.sampler.slots = CAP, options.slots
    config.sampler.loop = "host"
    config.batch.prompts_per_step, config.batch.samples_per_prompt = (
        options.prompts,
        options.samples,
    )
    config.batch.sequences_per_optimizer_step = options.prompts * options.samples
    config.batch.tokens_per_microbatch = 4096
    config.rollouts.max_staleness = config.rollouts.ahead = eta
    config.actor_optimizer.lr = 0.0
    config.trackers, config.evaluate.every_steps, config.reward.workers = (), 0, 1
    return config


class Arm:
    """One run; (wall, cpu) seconds of its steps and of their decoding, and its metrics."""

    def __init__(self, options: argparse.Namespace, eta: int, stack: contextlib.ExitStack):
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        config = config_of(options, eta)
        config.run_dir = folder
        self.eta = eta
        self.run = stack.enter_context(Run(build(config, devices=jax.devices()[:1]), Path(folder)))
        self.run.checkpoints.prepare()
        self.run.begin(self.run.phase, self.run.setup.model.init(jax.random.key(1)))
        source = self.run.source
        if source.in_flight is None:  # eta 0 by tickets, which are counted
            source.in_flight = source._flight()
        self.next, source.next = source.next, self._next
        self.decoding, self.steps, self.metrics = [], [], []

    def _next(self, step: int, roles: dict):
        started = clocks()
        batch, metrics = self.next(step, roles)
        self.decoding.append(clocks() - started)
        self.metrics.append({**metrics, "tokens": float(np.asarray(batch.mask).sum())})
        return batch, metrics

    def step(self) -> None:
        started = clocks()
        self.run.step()
        self.steps.append(clocks() - started)

    def column(self, name: str) -> np.ndarray:
        return np.array([row[name] for row in self.metrics[FIRST:]])


def clocks() -> np.ndarray:
    return np.array([time.perf_counter(), time.process_time()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--etas", default="0,1,2")
    for name, value in (("embed", 256), ("slots", 32), ("prompts", 16), ("samples", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    etas = [int(eta) for eta in options.etas.split(",")]
    with contextlib.ExitStack() as stack:
        arms = [Arm(options, eta, stack) for eta in etas]
        for _ in range(FIRST + options.steps):
            for arm in arms:
                arm.step()
    print(json.dumps(report(options, arms), indent=2))


def report(options: argparse.Namespace, arms: list[Arm]) -> dict:
    base, lengths = arms[0], functools.partial(draws.geometric, mean=WORDS, cap=CAP)
    load = Load(options.prompts, options.samples, options.slots, lengths)
    counts = [base.column(name) for name in ("slots/dispatches", "slots/decode_steps")]
    rows = []
    for clock in (0, 1):
        decoding = np.array(base.decoding[FIRST:])[:, clock]
        other_seconds = np.array(base.steps[FIRST:])[:, clock] - decoding
        rows.append(fitted(*counts, decoding, other_seconds))
    table = []
    for arm in arms:
        ours = [
            simulate(load, fitted_seconds, arm.eta, arm.eta, steps=200) for fitted_seconds in rows
        ]
        mean_s = np.mean(arm.steps[FIRST:], axis=0)
        decoded = np.mean(arm.decoding[FIRST:], axis=0)[1]
        table.append(
            {
                "eta": arm.eta,
                "decoding_cpu_s": {
                    "measured": decoded,
                    "simulated": ours[1].step_s - rows[1].learn_s,
                },
                **{
                    f"{name}_s": {
                        "measured": mean_s[i],
                        "simulated": ours[i].step_s,
                        "ratio": ours[i].step_s / mean_s[i],
                    }
                    for i, name in enumerate(("wall", "cpu"))
                },
                "dispatches": [arm.column("slots/dispatches").mean(), ours[0].dispatches],
                "decode_steps": [arm.column("slots/decode_steps").mean(), ours[0].decode_steps],
                "live_share": [live_share(arm), ours[0].live_share],
                "age": [arm.column("staleness/steps_mean").mean(), ours[0].mean_age],
                "tokens": arm.column("tokens").mean(),
            }
        )
    return {
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        **vars(options),
        "seconds": {"wall": vars(rows[0]), "cpu": vars(rows[1])},
        "arms": table,
    }


def live_share(arm: Arm) -> float:
    steps = arm.column("slots/decode_steps")
    return float((arm.column("slots/live_share") * steps).sum() / steps.sum())


if __name__ == "__main__":
    main()
