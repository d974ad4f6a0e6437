"""What the pipelines that ship are there to show, on three seeds, as their commands run them."""

import json
import subprocess
import sys

import numpy as np
import pytest
from conftest import REPO, one_device_environment

from rljax.report.curves import distance, rewards_by_distance
from rljax.report.run_folder import read_run

pytestmark = pytest.mark.slow
SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(config, seed) -> the folder of the finished pipeline, and the metrics of its stages."""
    home = tmp_path_factory.mktemp("claims")

    def run(config: str, seed: int):
        out = home / f"{config.replace(':', '-')}-{seed}"
        command = [sys.executable, "-m", "rljax", "pipeline", f"configs/pipelines/{config}"]
        done = subprocess.run(
            [*command, f"--out={out}", f"--config.seed={seed}"], cwd=REPO, text=True,
            env={**one_device_environment(), "PYTHONPATH": str(REPO)}, capture_output=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        stages = json.loads((out / "lineage.json").read_text())["stages"]
        return out, {stage["stage"]: stage["metrics"] for stage in stages}

    return run


def greedy(metrics: dict) -> float:
    return metrics["greedy_accuracy"]["value"]


def mean_reward(metrics: dict) -> float:
    return metrics["best_of@1"]["value"]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_base_model_answers_nothing_and_sft_and_rl_make_it_answer(finished, seed):
    """Checklist 000-01, 000-02, 001-01: RL by a learned reward model improves on SFT."""
    out, of = finished("post_training.py:tiny", seed)
    base, sft, rl = (greedy(of[f"evaluate_{name}"]) for name in ("base", "sft", "rl"))
    assert base <= 0.05 and rl > 0.9 and rl > sft
    assert of["base"]["accuracy_after"]["value"] <= 0.05  # of the base model itself: stage 0
    (suite,) = json.loads((out / "lineage.json").read_text())["same_prompts"]
    assert suite["difference"]["evaluate_rl"]["low"] > 0
    assert "The same prompts" in (out / "pipeline.html").read_text()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_noisy_reward_model_is_over_optimised(finished, seed):
    """000-08, 001-09: the proxy rises all the way, the true reward falls from its peak."""
    out, _ = finished("proxy_gold.py", seed)
    run = read_run(out / "rl")
    proxy, gold = (run.columns(k)[1] for k in ("reward/mean", "reward/part/letter_quota"))
    of = {name: [x[:20].mean(), x[-20:].mean()] for name, x in (("p", proxy), ("g", gold))}
    assert of["p"][1] - of["p"][0] > 0.3
    assert of["g"][0] - of["g"][1] > 0.1
    kl = np.array(list(distance(run).values()))
    assert kl[-20:].mean() > 2 * kl[:20].mean() > 0
    assert len(rewards_by_distance(run)) == 2


@pytest.mark.parametrize("seed", SEEDS)
def test_rl_finds_the_answer_that_no_demonstration_has(finished, seed):
    """001-03, 004-04: SFT is bounded by its data, and stays so with more of it."""
    _, of = finished("why_rl.py:teacher", seed)
    best = 0.5  # of any demonstration: 2 of 4 letters
    sft, more, rl = (mean_reward(of[f"evaluate_teacher_{s}"]) for s in ("sft", "more_sft", "rl"))
    assert sft < best + 0.05 and more < best + 0.05
    assert rl > 0.9


@pytest.mark.parametrize("seed", SEEDS)
def test_rl_maximises_what_likelihood_does_not(finished, seed):
    """004-04: the demonstrations have the best answer among others; the reward is a count."""
    _, of = finished("why_rl.py:objective", seed)
    sft, more, rl = (mean_reward(of[f"evaluate_objective_{s}"]) for s in ("sft", "more_sft", "rl"))
    assert max(sft, more) < 0.65 and rl > 0.9


@pytest.mark.parametrize("seed", SEEDS)
def test_rl_goes_on_after_sft_has_reached_its_plateau(finished, seed):
    """000-07: as much SFT again changes little; 200 steps of RL add more than 0.1."""
    out, of = finished("why_rl.py:on_distribution", seed)
    accuracy = read_run(out / "on_distribution_sft").columns("eval/accuracy")[1]
    assert abs(accuracy[-1] - accuracy[-4]) < 0.06  # flat over the last 60 steps
    name = "evaluate_on_distribution"
    sft, more, rl = (greedy(of[f"{name}_{s}"]) for s in ("sft", "more_sft", "rl"))
    assert rl > max(sft, more) + 0.1
    assert of["on_distribution_rl"]["rl_steps"] == 200


@pytest.mark.parametrize("seed", SEEDS)
def test_rounds_raise_the_reward(finished, seed):
    """001-42: each round goes on from the last one's policy, with a new reward model."""
    _, of = finished("rounds.py", seed)
    start = of["pairs_1"]["mean_reward_all"]  # true rewards of the SFT policy's samples
    after = [mean_reward(of[f"evaluate_{r}"]) for r in (1, 2)]
    assert after[0] > start + 0.03 and after[1] > after[0]
