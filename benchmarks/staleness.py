"""Gains by staleness on one mesh: useful tokens per second where responses differ in length, where
half of the groups are dead, and where tools sleep. Prints JSON.

python benchmarks/staleness.py [--mode=lengths|dead|tools] [--eta=0,1,2,4] [--model=small]
                               [--slots=32] [--prompts=24] [--samples=8] [--steps=4] [--rounds=5]
                               [--devices=1]

Whole steps of GRPO, the update included, in one process: the arms take turns of so many steps. All
words are equally likely and one of 33 ends a response, so that lengths are geometric (mean 33, cap
128); the learning rate is too small to change that. "device" is eta 0 by the device's loop, the
default of a run; every other arm is the host's loop with `rollouts.max_staleness` = eta and, if
"eta/c" says no other, `rollouts.ahead` = eta. "2/1+reread" reads tokens in flight again,
"1/1+split" samples on half of the devices while the others learn. --devices=2 on a CPU wants
XLA_FLAGS="--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false", a thread
each; arms without "split" share the rows of a step over all of them.

dead: active sampling, and a reward that makes half of the groups dead. tools: episodes of a
geometric number of such turns (mean 4, cap 8; a log of at most 256 tokens), between which a tool
sleeps for 0.05 to 0.5 s.

A useful token is one that a step learns from. tokens_per_slot_step counts, and is the same whatever
else the machine does; ratios are over the arm of eta 0 in the same round.
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from rljax.config import Config
from rljax.rollout.players import responses_in_flight
from rljax.rollout.players.episodes import episodes
from rljax.sampler import Sampler, host_rollout
from rljax.setup import build, initial_params
from rljax.training.run import Run

SIZES = {
    "tiny": dict(layers=2, embed=64, mlp=192, heads=2, kv_heads=2, head_dim=32),
    "small": dict(layers=4, embed=256, mlp=768, heads=4, kv_heads=4, head_dim=64),
    "27m": dict(layers=8, embed=512, mlp=1536, heads=8, kv_heads=4, head_dim=64),
}
PARTS = """
import asyncio, random, zlib
from rljax.environments import Done

async def slow_tool(prompt, sample_seed):
    rng, reply = random.Random(sample_seed), (yield prompt)
    while rng.random() < 0.75 and reply.turns_left:
        await asyncio.sleep(rng.uniform(0.05, 0.5))
        reply = yield "a>"
    yield Done(rng.random())

def half_dead(prompt, num_tokens):
    return 0.0 if zlib.crc32(prompt.encode()) % 2 else num_tokens / 128
"""
COUNTS = ("slot_steps", "live_slot_steps", "dispatches")
counted = dict.fromkeys(COUNTS, 0)  # by all samplers


class Counting(Sampler):
    def step(self, *args, **options):
        before = [getattr(self, name) for name in COUNTS]
        events = super().step(*args, **options)
        for name, value in zip(COUNTS, before, strict=True):
            counted[name] += getattr(self, name) - value
        return events


def config_of(options: argparse.Namespace, parts: Path, name: str) -> Config:
    """The config of an arm."""
    bounds, *flags = name.split("+")
    device = bounds == "device"
    eta, ahead = (0, 0) if device else map(int, (bounds.split("/") * 2)[:2])
    config = Config(dataflow="grpo", steps=1_000_000, export=False)
    sizes = ", ".join(f"{name}={value}" for name, value in SIZES[options.model].items())
    config.model = f"decoder({sizes}, init_std=1e-4)"
    config.model_settings.remat = "none"
    # 31 characters, padding and the end: 33 words.
    config.data.train, config.data.max_prompt_tokens = "letter_count(letters=8, kinds=20)", 10
    config.sampler.max_response_tokens, config.sampler.slots = 128, options.slots
    config.sampler.loop = "device" if device else "host"
    batch = config.batch
    batch.prompts_per_step, batch.samples_per_prompt = options.prompts, options.samples
    batch.sequences_per_optimizer_step = options.prompts * options.samples
    config.reward.function = "soft_overlong(max_tokens=128, cache_tokens=128)"
    config.reward.workers = 1
    config.actor_optimizer.lr, config.actor_optimizer.warmup_steps = 1e-9, 0
    config.evaluate.every_steps = config.checkpoint.every_steps = config.evaluate.prompts = 0
    config.trackers, config.compilation_cache = (), ""
    if options.mode == "dead":
        config.reward.function = f"{parts}:half_dead"
        config.algorithm.collect = "active()"
    if options.mode == "tools":
        config.environment.function, config.environment.workers = f"{parts}:slow_tool", 1
        config.environment.max_turns, config.environment.max_tokens = 8, 256
    config.rollouts.max_staleness, config.rollouts.ahead = eta, ahead if eta else -1
    if "reread" in flags:
        config.rollouts.in_flight_cache = "reread"
    if "split" in flags:
        config.rollouts.sampler_devices = options.devices // 2
    return config


class Arm:
    """A run that goes on between its turns, and the figures of each turn."""

    def __init__(self, name: str, run: Run):
        self.name, self.run, self.rows = name, run, []
        run.checkpoints.prepare()
        run.begin(run.phase, initial_params(run.config, run.setup.model, run.folder / "model.json"))
        self.tokens, self.rollout_s, self.rollout_cpu_s, next_batch = 0, 0.0, 0.0, run.source.next

        def summed(step, roles):
            started, cpu_before = time.perf_counter(), time.process_time()
            batch, metrics = next_batch(step, roles)
            self.tokens += int(np.sum(np.asarray(batch.mask) > 0))
            self.rollout_s += time.perf_counter() - started
            self.rollout_cpu_s += time.process_time() - cpu_before
            return batch, metrics

        run.source.next = summed

    def turn(self, steps: int) -> dict:
        """Takes so many steps; returns their figures."""
        before, stale = dict(counted), []
        self.tokens, self.rollout_s, self.rollout_cpu_s = 0, 0.0, 0.0
        started, cpu_before = time.perf_counter(), time.process_time()
        for _ in range(steps):
            metrics = self.run.step()
            stale.append([metrics.get(f"staleness/steps_{x}", 0.0) for x in ("mean", "max")])
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu_before
        slot_steps, live_slot_steps, dispatches = (counted[name] - before[name] for name in COUNTS)
        tokens = self.tokens
        row = {
            "tokens_per_s": tokens / wall,
            "tokens_per_cpu_s": tokens / cpu,
            "rollout_tokens_per_s": tokens / self.rollout_s,
            "rollout_tokens_per_cpu_s": tokens / self.rollout_cpu_s,
            "step_s": wall / steps,
            "rollout_share": self.rollout_s / wall,
            "staleness_mean": statistics.mean(mean for mean, _ in stale),
            "staleness_max": max(oldest for _, oldest in stale),
        }
        if slot_steps:
            row |= {
                "live_share": live_slot_steps / slot_steps,
                "tokens_per_slot_step": tokens / slot_steps,
                "dispatches_per_step": dispatches / steps,
            }
        return row


def median_and_range(rows: list[dict]) -> dict:
    """Returns {figure: [median, least, most]}."""
    figures = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        figures[name] = [round(statistic(values), 4) for statistic in (statistics.median, min, max)]
    return figures


def speed_ups(rows: list[dict], base: list[dict]) -> dict:
    """Returns the speed-up of each round over the base in the same round."""
    pairs = list(zip(rows, base, strict=True))
    names = [name for name in rows[0] if name.partition("_per_")[0].endswith("tokens")]
    return median_and_range(
        [{name: row[name] / base_row[name] for name in names} for row, base_row in pairs]
    )


def measured(options: argparse.Namespace) -> dict:
    host_rollout.Sampler = responses_in_flight.Sampler = episodes.Sampler = Counting
    with contextlib.ExitStack() as stack:
        folder, arms = Path(stack.enter_context(tempfile.TemporaryDirectory())), {}
        (folder / "parts.py").write_text(PARTS)
        for name in options.eta.split(","):
            config = config_of(options, folder / "parts.py", name)
            run_dir = folder / name.replace("/", "-")
            setup = build(
                dataclasses.replace(config, run_dir=str(run_dir)), jax.devices()[: options.devices]
            )
            arms[name] = Arm(name, stack.enter_context(Run(setup, run_dir)))
        for arm in arms.values():
            arm.turn(arm.run.config.rollouts.max_staleness + 2)
        for _ in range(options.rounds):
            for arm in arms.values():
                arm.rows.append(arm.turn(options.steps))
        base = arms["0"].rows
        return {
            name: median_and_range(arm.rows) | {"over_eta_0": speed_ups(arm.rows, base)}
            for name, arm in arms.items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("lengths", "dead", "tools"), default="lengths")
    parser.add_argument("--eta", default="0,1,2,4")
    parser.add_argument("--model", choices=SIZES, default="small")
    for name, value in dict(slots=32, prompts=24, samples=8, steps=4, rounds=5, devices=1).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    report = {
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        **vars(options),
        "median_least_most": measured(options),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
