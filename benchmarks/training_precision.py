"""Effects of the precision of a run: the tiny variants of presets in each precision, over seeds.

python benchmarks/training_precision.py [--presets=presets/grpo,presets/ppo,offline/sft] [--seeds=3]

Prints one line of JSON a preset and precision: the means over seeds of the final metrics with 95 %
intervals (Student's t), the mismatch between the sampler's and the trainer's log-probs, mean over
the steps, and what was skipped. The differences to float32 are of equal seeds.
"""  # noqa: E501

import argparse
import json
import tempfile
from pathlib import Path

import jax
import numpy as np

from rljax.config.flags import load_config_file
from rljax.report.arms import interval
from rljax.training import train

REPO = Path(__file__).resolve().parents[1]
PRECISIONS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 weights, rounded stochastically": {"dtype": "bfloat16", "weight_dtype": "bfloat16"},
    "float16, loss scaling": {"dtype": "float16"},
}
LAST = 10  # steps that a final reward or loss is the mean of
MISMATCH = ("abs_logprob_diff_mean", "abs_logprob_diff_p99", "mismatch_k3_kl")


def measured(preset: str, precision: str, seed: int) -> dict[str, float]:
    """Returns the final metrics of a run."""
    config = load_config_file(str(REPO / "configs" / f"{preset}.py") + ":tiny")
    for name, value in PRECISIONS[precision].items():
        setattr(config.model_settings, name, value)
    config.seed, config.trackers, config.export = seed, (), False
    config.checkpoint.every_steps = config.samples_every_steps = 10**6
    with tempfile.TemporaryDirectory() as folder:
        config.run_dir = f"{folder}/run"
        train(config, devices=jax.devices()[:1])
        text = (Path(config.run_dir) / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]

    def values_of(name, start):
        return [float(row[name]) for row in rows[start:] if name in row]

    metrics = {}
    for name in ("reward/mean", "loss"):
        if values := values_of(name, -LAST):
            metrics[name] = float(np.mean(values))
    for name in ("eval/accuracy", "eval/loss"):
        if values := values_of(name, 0):
            metrics[name] = values[-1]
    for name in MISMATCH:
        if values := values_of(f"mismatch/{name}", 0):
            metrics[f"mismatch/{name}"] = float(np.mean(values))
    counts = ("skipped_steps", "overflow_steps", "critic/overflow_steps")
    return metrics | {name: float(sum(values_of(name, 0))) for name in counts if values_of(name, 0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", default="presets/grpo,presets/ppo,offline/sft")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    for preset in args.presets.split(","):
        base = {}
        for precision in PRECISIONS:
            runs = [measured(preset, precision, seed) for seed in range(args.seeds)]
            base = base or dict(enumerate(runs))
            row = {"preset": preset, "precision": precision}
            for name in runs[0]:
                row[name] = interval([run[name] for run in runs])
                if name in base[0] and precision != "float32":
                    differences = [run[name] - base[seed][name] for seed, run in enumerate(runs)]
                    row[f"{name} - float32"] = interval(differences)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
