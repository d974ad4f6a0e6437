"""Seconds of a GRPO step with the reference on the mesh of the actor, and on devices of its own.

    python benchmarks/placement.py [--devices 4] [--reward-s 0 1] [--steps 5]

Prints one JSON object per reward time. Runs on the devices there are, or on so many virtual ones of
the CPU; each lap takes one step of every placement in turn. Medians over the laps, in seconds:

  together  all roles on one mesh of all devices
  half      the same on the first half of the devices
  split     the actor on the first half, the reference on the others
  turns     the actor on the first half; reference and reward model take turns on the others
  apart     as `turns`, with a quarter of the devices for each of the two (from 4 devices on)

`waited` is how long a step waited for the reference after its rewards, `reference` how long its
program runs alone: the difference is hidden behind the reward. `difference` is the largest of a
step's loss, KL to the reference and gradient norm to those of `half`. Virtual devices share the
processors of this machine: what a split costs or saves on chips they cannot show, what it hides
they do.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

REWARD = """
import time

def sleep(response, model_score, *, seconds: float):
    time.sleep(seconds)
    return 0.1 * model_score + response.count("1")
"""
COMPARED = ("loss", "ref_kl/k1", "grad_norm")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--reward-s", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--embed", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    return parser.parse_args()


def config_of(args, folder: Path, seconds: float, groups: tuple[str, ...]):
    from rljax.config import Config

    rows, width = args.prompts * args.samples, args.embed
    config = Config(steps=args.steps + 2, run_dir=str(folder / "run"), placement=groups)
    config.model = (
        f"decoder(layers={args.layers}, embed={width}, mlp={3 * width}, heads={width // 32}, "
        f"kv_heads={width // 32}, head_dim=32)"
    )
    config.data.train, config.data.max_prompt_tokens = "sort_digits(digits=5)", 8
    config.sampler.max_response_tokens = args.max_tokens
    config.batch.prompts_per_step, config.batch.samples_per_prompt = args.prompts, args.samples
    config.batch.sequences_per_optimizer_step, config.batch.packing = rows, False
    config.algorithm.kl_in_loss, config.actor_optimizer.lr = 0.05, 1e-4
    config.reward.function = f"placement_reward.sleep(seconds={seconds})"
    config.reward.model, config.reward.workers = str(folder / "scorer"), 2 * rows
    config.reward.timeout_s, config.reward.memory_gb = seconds + 60.0, 0.0
    config.trackers, config.compilation_cache = (), ""
    return config


def placements(devices: int) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Name -> (how many of the devices, config.placement)."""
    half, quarter = devices // 2, devices // 4
    settings = {
        "together": (devices, ()),
        "half": (half, ()),
        "split": (devices, (f"reference=group(devices={half})",)),
        "turns": (devices, (f"reference+reward_model=group(devices={half})",)),
    }
    if quarter:
        groups = tuple(f"{role}=group(devices={quarter})" for role in ("reference", "reward_model"))
        settings["apart"] = (half + 2 * quarter, groups)
    return settings


def write_scorer(folder: Path, args) -> None:
    """A reward model of half the policy's width, whose head is not zero."""
    import dataclasses

    import jax

    from rljax.mesh import make_mesh
    from rljax.models.builtin import decoder
    from rljax.models.huggingface import save_params
    from rljax.models.model import Model
    from rljax.setup import build

    vocabulary = build(config_of(args, folder, 0.0, ()), jax.devices()[:1]).tokenizer.vocab_size
    sizes = dict(embed=64, mlp=192, heads=2, kv_heads=2, head_dim=32)
    model_config = dataclasses.replace(decoder(vocabulary, layers=args.layers, **sizes), labels=1)
    model = Model(model_config, make_mesh(1, 1, 1, devices=jax.devices()[:1]), "scalar")
    params = jax.tree.map(lambda x: x + 0.1, model.init(jax.random.key(1)))
    save_params(folder / "scorer", model, params, bos_id=None, eos_ids=(1,), pad_id=0)


def alone_s(run, batch) -> float:
    """Seconds of the reference's program with nothing beside it."""
    import jax

    role = run.roles["reference"]
    unscored = batch.replace(ref_logprobs=None)
    jax.block_until_ready(role.filled(unscored).ref_logprobs)
    started = time.perf_counter()
    jax.block_until_ready(role.filled(unscored).ref_logprobs)
    return time.perf_counter() - started


def lap(run) -> dict[str, float]:
    from rljax.tracking.timing import collect

    with collect() as timings:
        started = time.perf_counter()
        metrics = run.step()
        step_s = time.perf_counter() - started
    moves = timings.moves.get("reference", {})
    parts = {name: timings.seconds.get(name, 0.0) for name in ("generate", "reward", "learn")}
    moved = sum(sums["moved_bytes"] for sums in timings.moves.values())
    costs = {"step": step_s, **parts, "waited": moves.get("waited_s", 0.0), "moved_bytes": moved}
    costs["moved"] = sum(sums["moved_s"] for sums in timings.moves.values())
    return {**costs, **{name: float(metrics[name]) for name in COMPARED}}


def measured(args, seconds: float, folder: Path) -> dict:
    import jax

    from rljax.roles.placed import PlacedReference
    from rljax.setup import build, initial_params
    from rljax.training.run import Run

    laps: dict[str, list[dict]] = {}
    alone = {}
    with contextlib.ExitStack() as stack:
        runs = {}
        for name, (devices, groups) in placements(args.devices).items():
            config = config_of(args, folder, seconds, groups)
            (run_folder := folder / f"{name}-{seconds}").mkdir()
            setup = build(config, jax.devices()[:devices])
            run = runs[name] = stack.enter_context(Run(setup, run_folder))
            run.begin(run.phase, initial_params(config, setup.model))
        for _ in range(args.steps + 2):
            for name, run in runs.items():
                laps.setdefault(name, []).append(lap(run))
        for name, run in runs.items():
            if isinstance(run.roles["reference"], PlacedReference):
                batch, _ = run.source.next(args.steps + 2, run.roles)
                alone[name] = alone_s(run, batch)
    result: dict = {"devices": args.devices, "reward_s": seconds, "placements": {}}
    for name, run_laps in laps.items():
        steady = run_laps[2:]  # the first two compile
        row = {
            key: round(statistics.median(lap_of_run[key] for lap_of_run in steady), 5)
            for key in steady[0]
            if key not in COMPARED
        }
        row["difference"] = max(
            abs(lap_of_run[key] - expected[key])
            for lap_of_run, expected in zip(run_laps, laps["half"], strict=True)
            for key in COMPARED
        )
        if name in alone:
            row["reference"] = round(alone[name], 5)
        result["placements"][name] = row
    steps = {name: row["step"] for name, row in result["placements"].items()}
    result["ratios"] = {
        f"{name} / together": round(step / steps["together"], 3) for name, step in steps.items()
    }
    return result


def main() -> None:
    args = parsed()
    flag = f"--xla_force_host_platform_device_count={args.devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    import jax

    if len(jax.devices()) < args.devices or args.devices < 2:
        sys.exit(f"--devices={args.devices}: {len(jax.devices())} are there, and 2 are needed")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "placement_reward.py").write_text(REWARD)
        sys.path.insert(0, name)
        (folder / "scorer").mkdir()
        write_scorer(folder, args)
        for seconds in args.reward_s:
            print(json.dumps(measured(args, seconds, folder)), flush=True)


if __name__ == "__main__":
    main()
