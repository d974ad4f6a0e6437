"""What the pipelines that ship are there to show, as their commands run them."""

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
            [*command, f"--out={out}", f"--config.seed={seed}"],
            cwd=REPO,
            text=True,
            env={**one_device_environment(), "PYTHONPATH": str(REPO)},
            capture_output=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        stages = json.loads((out / "lineage.json").read_text())["stages"]
        return out, {stage["stage"]: stage["metrics"] for stage in stages}

    return run


def mean_reward(metrics: dict) -> float:
    return metrics["best_of@1"]["value"]


def greedy(metrics: dict) -> float:
    return metrics["greedy_accuracy"]["value"]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_base_model_answers_nothing_and_sft_and_rl_make_it_answer(finished, seed):
    """000-01, 000-02, 001-01: RL by a reward model of labels improves on SFT."""
    out, of = finished("post_training.py:tiny", seed)
    base, sft, rl = (greedy(of[f"evaluate_{name}"]) for name in ("base", "sft", "rl"))
    assert base <= 0.05 and rl > 0.9 and rl > sft + 0.1
    (suite,) = json.loads((out / "lineage.json").read_text())["same_prompts"]
    assert suite["difference"]["evaluate_rl"]["low"] > 0
    assert "The same prompts" in (out / "pipeline.html").read_text()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_noisy_reward_model_is_over_optimised(finished, seed):
    """000-08, 001-09: the true reward rises, and falls from its peak while the proxy still
    rises."""
    out, _ = finished("proxy_gold.py", seed)
    run = read_run(out / "rl")
    proxy, gold = (run.columns(k)[1] for k in ("reward/mean", "reward/part/gold"))
    smooth = np.convolve(gold, np.ones(5) / 5, "valid")  # moving means of 5 steps
    assert smooth.max() > gold[:3].mean() + 0.2 and smooth.max() > smooth[-1] + 0.3
    at = int(smooth.argmax())  # the steps of the peak: at to at + 4
    assert proxy[-10:].mean() > proxy[at : at + 5].mean() + 0.1
    kl = np.array(list(distance(run).values()))
    assert kl[-10:].mean() > 2 * kl[:5].mean() > 0
    assert len(rewards_by_distance(run)) == 2


@pytest.mark.parametrize("seed", SEEDS)
def test_rl_finds_the_answer_that_no_demonstration_has(finished, seed):
    """001-03, 004-04: SFT is bounded by its data, and stays so with more of it. 000-07: 200 steps
    of RL go on from its plateau."""
    _, of = finished("why_rl.py:teacher", seed)
    best = 0.5  # of any demonstration: 2 of 4 letters
    sft, more, rl = (mean_reward(of[f"evaluate_teacher_{s}"]) for s in ("sft", "more_sft", "rl"))
    assert sft < best + 0.05 and more < best + 0.05
    assert more < sft + 0.05  # the plateau: 200 further steps of SFT add nothing
    assert rl > 0.85 and rl > max(sft, more) + 0.1
    assert of["teacher_rl"]["last_step"]["step"] == 200


@pytest.mark.parametrize("seed", SEEDS)
def test_rl_maximises_what_likelihood_does_not(finished, seed):
    """004-04: the demonstrations have the best answer among others; the reward is a count."""
    _, of = finished("why_rl.py:objective", seed)
    sft, more, rl = (mean_reward(of[f"evaluate_objective_{s}"]) for s in ("sft", "more_sft", "rl"))
    assert max(sft, more) < 0.65 and rl > 0.9


@pytest.mark.parametrize("seed", SEEDS)
def test_rounds_raise_the_reward(finished, seed):
    """001-42: each round goes on from the last one's policy, with a new reward model."""
    out, of = finished("rounds.py", seed)
    before, first, second = (of[f"evaluate_{r}"]["best_of@1"] for r in (0, 1, 2))
    assert second["low"] > before["high"]  # 95 % intervals
    assert second["value"] > first["value"] > before["value"] - 0.01
    stages = json.loads((out / "lineage.json").read_text())["stages"]
    assert {"dpo_1", "scorer_2", "dpo_2"} < {stage["stage"] for stage in stages}
