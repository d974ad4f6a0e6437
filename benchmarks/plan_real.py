"""Prints what `rljax plan` says of real models on this machine, and what runs take: bytes of
the process at its peak, and seconds of a step.

python benchmarks/plan_real.py --model=MODEL_FOLDER --model=ANOTHER --out=plan_real.json

Each case is planned by one process and run by another, for STEPS steps of GRPO on sums. Step 1
compiles and the last one is followed by an evaluation: neither counts. `cpu_s` is of the run's
process, beside the plan's, for machines that do other work. Needs transformers, which counts the
tokens of the prompts.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = 4
REWARD = "def short(response, ground_truth):\n    return float(len(response) % 2)\n"
CASES = {
    "recipe": {},
    "longer": {"sampler.max_response_tokens": 48},
    "lora": {"lora.rank": 16},
    "batch": {"batch.samples_per_prompt": 16},
}


def rows(folder: str, path: Path) -> int:
    """Writes prompts, as chat messages where the model has a template -> their most tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    draw, longest = random.Random(0), 0
    with path.open("w") as file:
        for _ in range(256):
            a, b = draw.randrange(10, 100), draw.randrange(10, 100)
            prompt = f"What is {a} + {b}? Reply with the number only."
            if tokenizer.chat_template:
                prompt = [{"role": "user", "content": prompt}]
                text = tokenizer.apply_chat_template(
                    prompt, tokenize=False, add_generation_prompt=True
                )
                count = len(tokenizer(text, add_special_tokens=False)["input_ids"])
            else:
                count = len(tokenizer(prompt)["input_ids"])
            longest = max(longest, count)
            file.write(json.dumps({"prompt": prompt, "ground_truth": str(a + b)}) + "\n")
    return longest


def flags(folder: str, data: Path, prompt_tokens: int, prompts: int, changes: dict) -> list[str]:
    samples = changes.get("batch.samples_per_prompt", 8)
    fields = {
        "model": Path(folder).resolve(),
        "data.train": data,
        "data.test": data,
        "reward.function": "plan_real_reward.short",
        "model_settings.dtype": "float32",
        "algorithm.kl_in_loss": 0,
        "data.max_prompt_tokens": prompt_tokens,
        "sampler.max_response_tokens": 12,
        "batch.prompts_per_step": prompts,
        "batch.samples_per_prompt": samples,
        "evaluate.prompts": 1,
        "batch.sequences_per_optimizer_step": prompts * samples,
        **changes,
    }
    return [f"--config.{name}={value}" for name, value in fields.items()]


def command(*arguments) -> list[str]:
    return [sys.executable, "-m", "rljax", *map(str, arguments)]


def planned(case: list[str], folder: Path, env: dict) -> dict:
    out = folder / "plan.json"
    call = command("plan", "grpo_gsm8k", *case, f"--json={out}")
    subprocess.run(call, env=env, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    plan = json.loads(out.read_text())
    programs = {one["name"]: one["expected_s"] for one in plan["programs"]}
    return {
        "peak_bytes": plan["process_peak_bytes"],
        "process_bytes": plan["process_bytes"],
        "arrays_bytes": plan["total"],
        "step_s": plan["expected_s"],
        "cpu_s": plan["expected_cpu_s"],
        "programs_s": programs,
    }


def measured(case: list[str], folder: Path, env: dict) -> dict:
    """Runs a case, and reads the process's counters as its steps end."""
    run = folder / "run"
    more = (f"--config.steps={STEPS}", f"--config.run_dir={run}")
    begun = time.monotonic()
    with (folder / "out.txt").open("w") as log:
        call = command("train", "grpo_gsm8k", *case, *more)
        process = subprocess.Popen(call, env=env, cwd=folder, stdout=log, stderr=log)
    cpu, peak, tick = {}, 0, os.sysconf("SC_CLK_TCK")
    while process.poll() is None:
        try:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            ended = len((run / "metrics.jsonl").read_text().splitlines())
        except FileNotFoundError:
            ended = 0
        else:
            cpu.setdefault(ended, (int(fields[11]) + int(fields[12])) / tick)
            sizes = [int(line.split()[1]) for line in status if line.startswith("VmHWM")]
            peak = max([peak, *(1024 * size for size in sizes)])
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit((folder / "out.txt").read_text())
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    counted = steps[1 : STEPS - 1]
    parts = {name: [one[f"time/{name}_s"] for one in counted] for name in ("generate", "learn")}
    last = STEPS - 1
    return {
        "peak_bytes": peak,
        "step_s": sum(map(sum, parts.values())) / len(counted),
        "programs_s": {name: sum(each) / len(each) for name, each in parts.items()},
        "cpu_s": (cpu[last] - cpu[1]) / (last - 1) if {1, last} <= set(cpu) else None,
        "cpu_s_to_step_1": cpu.get(1),
        "wall_s": time.monotonic() - begun,
        "positions": [one["positions"] for one in counted if "positions" in one],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", required=True, help="a Hugging Face folder")
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--prompts", type=int, default=8, help="of a step")
    parser.add_argument("--out", default="", help="where the JSON is written, too")
    options = parser.parse_args()
    found = []
    for model in options.model:
        for name in options.case or CASES:
            with tempfile.TemporaryDirectory() as text:
                folder = Path(text)
                (folder / "plan_real_reward.py").write_text(REWARD)
                paths = [str(folder), str(Path(__file__).resolve().parents[1])]
                env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
                longest = rows(model, folder / "rows.jsonl")
                case = flags(model, folder / "rows.jsonl", longest, options.prompts, CASES[name])
                case.append(f"--config.compilation_cache={folder / 'cache'}")
                plan, run = planned(case, folder, env), measured(case, folder, env)
                ratio = {key: plan[key] / run[key] for key in ("peak_bytes", "step_s")}
                if run["cpu_s"]:
                    ratio["step_cpu"] = plan["cpu_s"] / run["cpu_s"]
                found.append(dict(model=model, case=name, planned=plan, measured=run, ratio=ratio))
                print(json.dumps(found[-1]), flush=True)
    if options.out:
        Path(options.out).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
