"""What process rewards of the code task are good for: the labels and the judgement of its reward
model, PPO with and without it, DQO with and without process scores, on three seeds each."""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import REPO
from tiny_run import train_on_one

from rljax.config.flags import config_module
from rljax.config.policy_options import ComparisonOptions, LabelOptions
from rljax.data.rows.sources import load_prompts
from rljax.datagen.saved_labels import label_saved
from rljax.evaluation.process_models import evaluate_scorer
from rljax.experiments.comparison import compare, read_methods
from rljax.rewards.unit_tests.programs import ProgramError, parse_program, run_trace

pytestmark = pytest.mark.slow

PROGRAMS = config_module(str(REPO / "configs" / "prm_programs.py"))
SWEEP = config_module(str(REPO / "configs" / "sweep_prm_programs.py"))


def trained(config, folder: Path) -> Path:
    config.run_dir, config.trackers, config.compilation_cache = str(folder), (), ""
    assert train_on_one(config)["status"] == "finished"
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of configs/prm_programs.py: completer, start, labels and reward model."""
    folder = tmp_path_factory.mktemp("prm")
    for variant in ("completer", "start"):
        trained(PROGRAMS.get_config(variant, str(folder)), folder / variant)
    checkpoints = tuple(f"{folder}/completer@{step}" for step in (60, 70, 80))
    label_saved(
        LabelOptions(
            checkpoints,
            f"{folder}/steps",
            completer=f"{folder}/completer",
            prompts=1000,
            completions=2,
        )
    )
    trained(PROGRAMS.get_config("scorer", str(folder)), folder / "scorer")
    return folder


def right_so_far(lines: list[str], ended: bool, truth: dict) -> list[bool]:
    """Whether every line up to each one leaves what the trace says: what a label claims."""
    trace, out = truth["trace"], []
    for n in range(1, len(lines) + 1):
        try:
            left = run_trace(parse_program("\n".join(lines[:n])), trace[0])
        except ProgramError:
            left = None
        whole = not ended or n < len(lines) or n + 1 == len(trace)  # it does not end too early
        out.append(left == trace[: n + 1] and whole)
    return out


def test_a_completer_that_succeeds_labels_lines_as_they_are(runs):
    given = load_prompts(PROGRAMS.TASK, "train")
    truths = {r["prompt"]: json.loads(r["ground_truth"]) for r in given}
    rows = [json.loads(line) for line in (runs / "steps" / "test.jsonl").read_text().splitlines()]
    agree = [
        (label > 0) == right
        for row in rows
        for label, right in zip(
            row["labels"],
            right_so_far(row["completions"], row["ended"], truths[row["prompt"]]),
            strict=True,
        )
    ]
    assert len(agree) > 2000 and np.mean(agree) > 0.98


def test_the_process_reward_model_judges_lines_of_held_out_prompts(runs):
    found = evaluate_scorer(runs / "scorer" / "reward_model", str(runs / "steps"))["metrics"]
    assert found["lines"] > 2000 and 0.35 < found["positive_fraction"] < 0.65
    assert found["sign_accuracy"] > 0.85 and found["mse"] < 0.4


def test_dense_rewards_and_first_values_together_explore_no_less_than_neither(runs):
    """Seed by seed, over the last 20 steps: the best of four samples, on training prompts, and how
    many pass."""
    scorer, ends = str(runs / "scorer" / "reward_model"), {}
    for name, model in (("neither", ""), ("both", scorer)):
        for seed in SWEEP.SEEDS:
            config = SWEEP.get_config()
            config.model, config.seed = str(runs / "start" / "policy"), seed
            config.reward.process_model = config.critic_model = model
            folder = trained(config, runs / name / str(seed))
            steps = [json.loads(line) for line in (folder / "metrics.jsonl").open()][-20:]
            ends[name, seed] = [
                np.mean([step[metric] for step in steps])
                for metric in ("reward/best_of_k", "reward/part/all_passed")
            ]
    best, passed = np.array(
        [np.subtract(ends["both", seed], ends["neither", seed]) for seed in SWEEP.SEEDS]
    ).T
    assert np.mean(best) > 0.0, best
    assert np.mean(passed) > 0.0, passed


def test_dqo_with_process_scores_is_no_worse_than_with_outcomes_alone(tmp_path):
    module = config_module(str(REPO / "configs" / "compare_process_scores.py"))
    config, methods = module.get_config(), read_methods(module.methods(), "methods()")
    config.compilation_cache = ""
    table = compare(
        config, methods, ComparisonOptions(str(tmp_path), prompts=512, process_samples=8)
    )["table"]
    base, outcome, process = (np.array(row["sampled_of_seeds"]) for row in table)
    assert len(base) == 3 and np.mean(outcome - base) > 0.05, outcome - base
    assert np.mean(process - outcome) > -0.02, process - outcome
