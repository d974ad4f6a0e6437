"""Reward models: their metrics on held-out pairs, by hand, and a model that is trained on pairs and
then rewards a policy."""

import json
import math

import numpy as np
import pytest
from tiny_run import train_on_one

from rljax.config import Config
from rljax.data.text.tokenizer import CharTokenizer
from rljax.errors import InputError
from rljax.evaluation.reward_models import pair_report
from rljax.tasks import first_letter


def test_a_report_by_hand():
    #          right, longer   wrong, shorter  tie, equal  right, longer
    scores = [2.0, 1.0, 0.0, 3.0, 1.0, 1.0, 5.0, 0.0]
    lengths = [4, 2, 1, 3, 2, 2, 9, 8]
    found = pair_report(scores, lengths, bins=2)
    assert found["accuracy"] == pytest.approx((1 + 0 + 0.5 + 1) / 4)
    assert found["margin/mean"] == pytest.approx((1 - 3 + 0 + 5) / 4)
    assert found["margin/std"] == pytest.approx(np.std([1, -3, 0, 5]))
    assert found["score/mean"] == pytest.approx(np.mean(scores))
    assert found["score/std"] == pytest.approx(np.std(scores))
    assert found["accuracy/chosen_longer"] == 1 and found["share/chosen_longer"] == 0.5
    assert found["accuracy/chosen_shorter"] == 0 and found["share/chosen_shorter"] == 0.25
    assert found["accuracy/equal_length"] == 0.5
    assert found["favours_longer"] == 1  # of the three with a favourite, it is always the longer

    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    # Bins [0.5, 0.75): margins 1 and 0; [0.75, 1]: -3 and 5.
    low, high = [sigmoid(1), 0.5], [sigmoid(3), sigmoid(5)]
    error = 0.5 * abs(0.75 - np.mean(low)) + 0.5 * abs(0.5 - np.mean(high))
    assert found["calibration_error"] == pytest.approx(error)
    assert found["reliability/0.50-0.75/accuracy"] == 0.75
    assert found["reliability/0.75-1.00/confidence"] == pytest.approx(np.mean(high))


def test_pairs_that_are_filling_are_left_out():
    scores, lengths = [1.0, 0.0, math.nan, math.nan], [2, 1, 0, 0]
    found = pair_report(scores, lengths, [True, False])
    assert found == pair_report(scores[:2], lengths[:2]) and found["accuracy"] == 1
    assert pair_report(scores, lengths, [False, False]) == {}
    with pytest.raises(InputError, match="finite"):
        pair_report(scores, lengths)
    with pytest.raises(InputError, match="in turns"):
        pair_report(scores[:3], lengths[:3])


def test_labels_drawn_from_the_model_are_calibrated():
    """Labels with the probability that the scores say: the error goes to 0; doubled scores are
    over-confident. Margins of 1000 do not overflow."""
    rng = np.random.default_rng(0)
    margin = rng.normal(size=20_000) * 1.5
    won = rng.random(20_000) < 1 / (1 + np.exp(-margin))
    signed = np.where(won, margin, -margin)

    def both(m):
        return np.stack([m, np.zeros_like(m)], axis=1).reshape(-1)

    lengths = np.ones(40_000)
    assert pair_report(both(signed), lengths, bins=10)["calibration_error"] < 0.015
    assert pair_report(both(3 * signed), lengths, bins=10)["calibration_error"] > 0.08
    sure = pair_report(both(np.full(10, 1000.0)), lengths[:20])
    assert sure["calibration_error"] == pytest.approx(0.0)


MODEL = "decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16, init_std=0.1)"
TASK = "first_letter(letters=3, kinds=4)"


def write_pairs(folder) -> None:
    """The first letter of the prompt against another; held out are the prompts of the test split,
    where half of the rejected answers have a letter more."""
    task = first_letter(letters=3, kinds=4)
    CharTokenizer(task.alphabet).save(folder / "tokenizer")
    for split, records in (("train", task.train), ("test", task.test)):
        rows = [
            {
                "prompt": r["prompt"],
                "chosen": r["ground_truth"],
                "rejected": x if split == "train" or i % 2 else x + x,
            }
            for r in records
            for i, x in enumerate(c for c in "abcd" if c != r["ground_truth"])
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def base_config(folder, name: str, **fields) -> Config:
    config = Config(model=MODEL, tokenizer=str(folder / "tokenizer"), run_dir=str(folder / name))
    config.trackers, config.compilation_cache = (), ""
    config.model_settings.remat, config.checkpoint.every_steps = "none", 0
    config.critic_optimizer.lr = config.actor_optimizer.lr = 1e-2
    for key, value in fields.items():
        setattr(config, key, value)
    return config


def reward_model_run(folder, seed: int) -> dict:
    config = base_config(folder, "rm", dataflow="reward_model()", steps=150, seed=seed)
    config.data.train = config.data.test = str(folder / "{split}.jsonl")
    config.offline.examples_per_step, config.offline.max_tokens = 48, 12
    config.algorithm.reward_loss = "bradley_terry(center=0.01)"
    config.critic_optimizer.lr = 5e-3
    return train_on_one(config)


def ppo_run(folder, seed: int) -> list[dict]:
    config = base_config(folder, "ppo", dataflow="ppo()", steps=40, seed=seed, export=False)
    config.data.train, config.data.max_prompt_tokens = TASK, 4
    config.sampler.max_response_tokens = 2
    config.sft.steps, config.sft.sequences_per_step, config.sft.optimizer.lr = 5, 48, 5e-3
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 16, 8
    config.batch.sequences_per_optimizer_step = 128
    config.algorithm.advantage = "gae()"
    config.actor_optimizer.lr = config.critic_optimizer.lr = 3e-3
    config.reward.model = str(folder / "rm" / "reward_model")
    config.reward.workers, config.evaluate.prompts = 1, 16
    train_on_one(config)
    rows = [json.loads(line) for line in (folder / "ppo" / "metrics.jsonl").open()]
    return [row for row in rows if row["phase"] == "rl"]


def learns(folder, seed: int) -> dict:
    write_pairs(folder)
    summary = reward_model_run(folder, seed)
    found = summary["eval_after"]
    assert found["eval/accuracy"] > 0.9, found
    assert summary["eval_before"]["eval/accuracy"] < 0.8
    return found


@pytest.mark.slow
def test_a_reward_model_learns_and_its_report_is_logged(tmp_path):
    found = learns(tmp_path, 0)
    assert {
        "eval/calibration_error",
        "eval/score/std",
        "eval/accuracy/chosen_shorter",
        "eval/accuracy/equal_length",
        "eval/favours_longer",
    } <= found.keys()
    assert found["eval/margin/mean"] == pytest.approx(found["eval/margin"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_its_folder_then_rewards_ppo(tmp_path, seed):
    found = learns(tmp_path, seed)
    rewards = [row["reward/mean"] for row in ppo_run(tmp_path, seed)]
    # In standard deviations of the model's own scores on held-out answers.
    rise = np.mean(rewards[-5:]) - np.mean(rewards[:2])
    assert rise > 0.5 * found["eval/score/std"], (rise, found["eval/score/std"])
