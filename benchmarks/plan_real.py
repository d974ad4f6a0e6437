"""Compares the estimates of `rljax plan` for real models on this machine with runs: bytes of the
process at its peak, and seconds of a step. Prints JSON.

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
    """Writes prompts, as chat messages where the model has a template; returns the tokens of the
    longest."""
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
    file = folder / "plan.json"
    call = command("plan", "grpo_gsm8k", *case, f"--json={file}")
    subprocess.run(call, env=env, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    plan = json.loads(file.read_text())
    programs = {program["name"]: program["expected_s"] for program in plan["programs"]}
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
    run_flags = (f"--config.steps={STEPS}", f"--config.run_dir={run}")
    started = time.monotonic()
    with (folder / "out.txt").open("w") as log:
        call = command("train", "grpo_gsm8k", *case, *run_flags)
        process = subprocess.Popen(call, env=env, cwd=folder, stdout=log, stderr=log)
    cpu, peak, tick = {}, 0, os.sysconf("SC_CLK_TCK")
    while process.poll() is None:
        try:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            steps_done = len((run / "metrics.jsonl").read_text().splitlines())
        except FileNotFoundError:
            steps_done = 0
        else:
            cpu.setdefault(steps_done, (int(fields[11]) + int(fields[12])) / tick)
            sizes = [int(line.split()[1]) for line in status if line.startswith("VmHWM")]
            peak = max([peak, *(1024 * size for size in sizes)])
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit((folder / "out.txt").read_text())
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    counted_rows = steps[1 : STEPS - 1]
    parts = {
        name: [row[f"time/{name}_s"] for row in counted_rows] for name in ("generate", "learn")
    }
    last_step = STEPS - 1
    return {
        "peak_bytes": peak,
        "step_s": sum(map(sum, parts.values())) / len(counted_rows),
        "programs_s": {name: sum(seconds) / len(seconds) for name, seconds in parts.items()},
        "cpu_s": (cpu[last_step] - cpu[1]) / (last_step - 1)
        if {1, last_step} <= set(cpu)
        else None,
        "cpu_s_to_step_1": cpu.get(1),
        "wall_s": time.monotonic() - started,
        "positions": [row["positions"] for row in counted_rows if "positions" in row],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", required=True, help="a Hugging Face folder")
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--prompts", type=int, default=8, help="of a step")
    parser.add_argument("--out", default="", help="where the JSON is written, too")
    options = parser.parse_args()
    results = []
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
                results.append(
                    dict(model=model, case=name, planned=plan, measured=run, ratio=ratio)
                )
                print(json.dumps(results[-1]), flush=True)
    if options.out:
        Path(options.out).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
