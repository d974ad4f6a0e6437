"""GRPO on a real model in rljax and TRL, whole steps in turns: prints JSON.

python benchmarks/real.py --model=FOLDER [--steps=12] [--seeds=0,1,2] [--dtypes=float32,bfloat16]
    [--systems=rljax,trl,trl_no_checkpointing] [--prompts=8] [--samples=8]
    [--max_response_tokens=12] [--microbatch=0] [--task=sums] [--reward=FILE.py:FUNCTION]

FOLDER is a Hugging Face folder (config.json, *.safetensors, tokenizer). --task is sums (two numbers
of two digits, as in docs/cookbook/real_model.md) or a .jsonl file of rows with prompt and
ground_truth, which --reward scores: a function of (response, ground_truth). Needs rljax and
trl[quantity of no extras] in one environment, and memory for all systems at once.

Systems: rljax and trl recompute activations in the backward pass, which is the default of both
(model_settings.remat="full", gradient_checkpointing=True); rljax_no_remat and trl_no_checkpointing
keep them.

Why the comparison is fair:
- Both run their own trainer as it is, `Run.step` and `GRPOTrainer.train`, in a process each, on the
  same folder of float32 weights. bfloat16 is mixed precision in both: products in bfloat16, weights
  and optimizer in float32 (model_settings.dtype, bf16=True).
- Both read the same prompts in the same order through the same chat template. Each lap says the
  SHA-256 of its prompts' token ids, and a lap in which they differ is counted in "other_prompts".
- Both draw from the whole distribution at temperature 1, end at the model's end tokens or at the
  same limit, and learn from the end token, too. The number of response tokens is each system's own,
  as its policy draws them: tokens per second are reported beside seconds.
- Both minimise the same formula: token mean over the batch of the clipped ratio (0.2) times
  (reward - mean) / (sample std + 1e-4) of its group, without KL (TRL: loss_type="dapo",
  scale_rewards="group", beta=0). One optimizer step of AdamW (0.9, 0.999, 1e-8, no decay) behind a
  clip of 1, at a constant rate. All sequences at once, or --microbatch of them.
- The same reward function. rljax calls it in a process of its own and TRL in the trainer's, so the
  CPU seconds and the memory of processes below are added to a system's own.
- Steps are taken in turns: one of each system, then the next of each. A system that waits runs
  nothing. Each may use all cores (torch's threads and XLA's are their defaults), and passive
  waiting of OpenMP's threads is set for all.
- Memory is the largest resident set (VmHWM of /proc, begun anew at each lap) for both; torch's
  allocator and XLA's are counted by what they have touched. "start" is before the first step.
- The first step is reported alone: rljax compiles in it, without a cache of compiled programs.

Intervals are 95 % bootstrap intervals that draw seeds, then prompts (rewards) or steps (ratios).
"reward_difference" is rljax - TRL on the same prompts of the same step and seed.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import real_rows
from peers import Failed, Process
from step_shapes import spread

from rljax.experiments.comparison import interval

SYSTEMS = {  # script, and what is kept of the forward pass
    "rljax": ("real_rljax.py", "full"),
    "rljax_no_remat": ("real_rljax.py", "none"),
    "trl": ("real_trl.py", "full"),
    "trl_no_checkpointing": ("real_trl.py", "none"),
}
PARTS = ("generate", "update", "step")


def one_seed(systems: list[str], options: dict, folder: Path) -> dict[str, dict]:
    """{system: {"ready", "start_mb", "laps": of the first step and of all others} or {"failed"}} of
    a seed and a dtype, steps in turns."""
    running, results = {}, {}
    for name in systems:
        script, remat = SYSTEMS[name]
        try:
            running[name] = Process(
                script, sys.executable, {**options, "remat": remat}, folder / f"{name}.log"
            )
            start = resident_mb(running[name].process.pid)
            results[name] = {"ready": running[name].ready, "start_mb": start, "laps": []}
        except Failed as error:
            results[name] = {"failed": str(error)}
    for number in range(options["steps"] + 1):
        for name, process in list(running.items()):
            try:
                lap = process.step()
            except Failed as error:
                del running[name]
                results[name] = {"failed": str(error)}
                continue
            results[name]["laps"].append(lap)
            seconds, reward = lap["step"]["wall_s"], np.mean(lap["rewards"])
            label = f"seed {options['seed']}, {options['dtype']}, step {number + 1}: {name}"
            print(f"{label} {seconds:.1f} s, reward {reward:.3f}", file=sys.stderr, flush=True)
    for process in running.values():
        process.end()
    return results


def resident_mb(pid: int) -> float:
    """The largest resident set of a process so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(x.split()[1]) for x in status.split("\n") if "VmHWM" in x) / 1024


def cost(lap: dict, part: str, name: str) -> float:
    """A cost of a part of a lap; of a whole step with what the processes below spent."""
    value = lap[part][name]
    return value + lap["workers"][name] if part == "step" and name in lap["workers"] else value


def summary(seeds: list[dict]) -> dict:
    """A system over seeds: costs of all steps but the first, of the first, and rewards."""
    first_laps = [run["laps"][0] for run in seeds]
    later_laps = [lap for run in seeds for lap in run["laps"][1:]]
    figures = {"versions": seeds[0]["ready"], "laps": len(later_laps)}
    for part in PARTS:
        figures[part] = {
            name: spread([cost(lap, part, name) for lap in later_laps])
            for name in ("wall_s", "cpu_s", "peak_mb")
        }
    for clock in ("wall_s", "cpu_s"):
        rates = [lap["response_tokens"] / cost(lap, "step", clock) for lap in later_laps]
        figures[f"response_tokens_per_{clock}"] = spread(rates)
    figures["response_tokens"] = spread([lap["response_tokens"] for lap in later_laps])
    figures["prompt_tokens"] = spread([lap["prompt_tokens"] for lap in later_laps])
    for clock in ("wall_s", "cpu_s"):
        figures[f"first_step_{clock}"] = spread([cost(lap, "step", clock) for lap in first_laps])
    figures["peak_mb"] = {
        "start": max(run["start_mb"] for run in seeds),
        "first_step": max(cost(lap, "step", "peak_mb") for lap in first_laps),
        "later_steps": max(cost(lap, "step", "peak_mb") for lap in later_laps),
        "of_which_workers": max(lap["workers"]["peak_mb"] for lap in first_laps + later_laps),
    }
    return {**figures, "reward": [interval(step) for step in rewards(seeds)]}


def rewards(seeds: list[dict]) -> np.ndarray:
    """[steps, seeds, prompts] of the mean rewards."""
    return np.array([[lap["rewards"] for lap in x["laps"]] for x in seeds]).swapaxes(0, 1)


def compared(ours: list[dict], theirs: list[dict]) -> dict:
    """Ratios of a peer's cost to rljax's, of the same step and seed, and differences of rewards."""
    figures = {}
    for name in ("wall_s", "cpu_s", "peak_mb"):
        costs = [
            np.array([[cost(lap, "step", name) for lap in run["laps"][1:]] for run in system])
            for system in (ours, theirs)
        ]
        # Each step's own ratio: both saw the same machine.
        figures[f"{name}_ratio"] = interval(costs[1] / costs[0])
    per_token = [
        np.array(
            [
                [cost(lap, "step", "wall_s") / lap["response_tokens"] for lap in run["laps"][1:]]
                for run in system
            ]
        )
        for system in (ours, theirs)
    ]
    figures["wall_s_per_response_token_ratio"] = interval(per_token[1] / per_token[0])
    pairs = list(zip(ours, theirs, strict=True))
    figures["other_prompts"] = sum(
        a["prompts_sha256"] != b["prompts_sha256"]
        for our_run, their_run in pairs
        for a, b in zip(our_run["laps"], their_run["laps"], strict=True)
    )
    if not figures["other_prompts"]:
        differences = rewards(ours) - rewards(theirs)
        figures["reward_difference"] = [interval(step) for step in differences]
        last_quarter = differences[-max(len(differences) // 4, 1) :].mean(axis=0)
        figures["reward_difference_of_the_last_quarter"] = interval(last_quarter)
    return figures


def measure(flags: argparse.Namespace, options: dict, folder: Path) -> dict:
    """Every dtype: each system's summary, and each peer's ratios to rljax."""
    results = {}
    for dtype in flags.dtypes.split(","):
        systems = flags.systems.split(",")
        runs: dict[str, list[dict]] = {name: [] for name in systems}
        for seed in map(int, flags.seeds.split(",")):
            for name, run in one_seed(
                systems, {**options, "dtype": dtype, "seed": seed}, folder
            ).items():
                runs[name].append(run)
        failed = {
            name: next(run_result["failed"] for run_result in seeds if "failed" in run_result)
            for name, seeds in runs.items()
            if any("failed" in run_result for run_result in seeds)
        }
        complete = {name: seeds for name, seeds in runs.items() if name not in failed}
        base = next(iter(complete), None)
        results[dtype] = {
            "systems": {name: summary(seeds) for name, seeds in complete.items()},
            "failed": failed,
            f"against_{base}": {
                name: compared(complete[base], seeds)
                for name, seeds in complete.items()
                if name != base
            },
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--steps", type=int, default=12, help="after the first")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--systems", default="rljax,trl,trl_no_checkpointing")
    parser.add_argument("--prompts", type=int, default=8, help="of a step")
    parser.add_argument("--samples", type=int, default=8, help="of a prompt")
    parser.add_argument("--max_prompt_tokens", type=int, default=64)
    parser.add_argument("--max_response_tokens", type=int, default=12)
    parser.add_argument("--microbatch", type=int, default=0, help="sequences at once; 0: all")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--task", default="sums", help="sums, or a .jsonl file")
    parser.add_argument("--reward", default=f"{real_rows.__file__}:last_number")
    flags = parser.parse_args()
    names = ("steps", "prompts", "samples", "max_prompt_tokens", "max_response_tokens")
    options = {name: getattr(flags, name) for name in (*names, "microbatch", "lr")}
    options |= {"model": str(Path(flags.model).resolve()), "reward": flags.reward}
    if unknown := set(flags.systems.split(",")) - set(SYSTEMS):
        parser.error(f"--systems: {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}")
    if flags.steps < 1 or (flags.microbatch and flags.prompts * flags.samples % flags.microbatch):
        parser.error("--steps is at least 1, and --microbatch divides --prompts x --samples")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(flags.task).resolve()
        if flags.task == "sums":
            path = Path(folder) / "sums.jsonl"
            real_rows.write_rows(path, real_rows.sums()[0])
        before = os.getloadavg()
        results = measure(flags, {**options, "rows": str(path)}, Path(folder))
        machine = {"cores": os.cpu_count(), "load": [before, os.getloadavg()]}
    print(json.dumps({"given": {**options, "task": flags.task}, "machine": machine, **results}))


if __name__ == "__main__":
    main()
