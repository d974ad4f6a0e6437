"""Sweeps that end once a question about two settings is answered."""

import json
from pathlib import Path

import numpy as np
import pytest

from rljax.config import Config
from rljax.errors import InputError
from rljax.experiments.sweep import make_members
from rljax.experiments.until import question_of, run_until
from rljax.report.arms import LEVEL, always_valid, always_valid_half


def members_of(folder, seeds: int):
    config = Config(model="decoder(layers=1)")
    config.data.train = "sort_digits()"
    listed = [{"actor_optimizer.lr": 0.01}, {"actor_optimizer.lr": 0.001}]
    return make_members(config, listed, Path(folder), "x.py", seeds=range(seeds))


def runner(gains):
    """Ends members at once: the first setting is better by gains[seed]."""

    def run(members):
        for member in members:
            better = member.overrides["actor_optimizer.lr"] == 0.01
            value = 0.5 + gains[member.config.seed] * better
            member.folder.mkdir(parents=True, exist_ok=True)
            summary = {"status": "finished", "accuracy_after": {"value": value}}
            (member.folder / "summary.json").write_text(json.dumps(summary))
            yield member, 0

    return run


def test_a_sweep_ends_when_the_question_is_answered(tmp_path, capsys):
    gains = 0.1 + 0.02 * np.random.default_rng(0).standard_normal(20)
    members = members_of(tmp_path / "yes", 20)
    question = question_of("lr=0.01 better than lr=0.001 by 0.02", members)
    taken = [member.config.seed for member, _ in run_until(question, members, runner(gains), 1)]
    lines = capsys.readouterr().out.splitlines()
    assert len(taken) == 2 * len(lines) < 2 * 12 and "not known" in lines[0]
    assert f"holds, {np.mean(gains[: len(lines)]):.3f}" in lines[-1]
    assert f"over {len(lines)} seeds" in lines[-1] and question.answer(members).known

    question = question_of("lr=0.001 better than lr=0.01", members)
    assert "does not hold" in question.answer(members).text
    question = question_of(f"lr=0.01 better than lr=0.001 by {np.mean(gains):.4f}", members)
    assert "not known" in question.answer(members).text


def test_machines_that_share_a_sweep_ask_the_runs_of_all(tmp_path, capsys):
    gains = np.tile([0.05, -0.03], 4)[:3]
    members = members_of(tmp_path, 3)
    shares = [members[0::2], members[1::2]]  # of no seed does one machine run both settings
    question = question_of("lr=0.01 better than lr=0.001", members)
    for share in shares:
        list(run_until(question, share, runner(gains), 1, members))
    first, *_, last = capsys.readouterr().out.splitlines()
    assert "no seed has finished with both" in first and "over 3 seeds" in last


def test_an_open_question_says_how_many_seeds_would_settle_it(tmp_path, capsys):
    gains = np.tile([0.05, -0.03], 4)  # mean 0.01, deviation 0.04
    members = members_of(tmp_path, 8)
    question = question_of("lr=0.01 better than lr=0.001", members)
    assert len(list(run_until(question, members, runner(gains), 4))) == 16
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and "over 4 seeds, too few for an interval" in lines[0]
    assert "0.010 [-0.054, 0.074] over 8 seeds; about" in lines[1]
    more = int(lines[1].partition("; about ")[2].partition(" more")[0])
    halves = [always_valid_half(8 + more - short, 0.04) for short in (0, 1)]
    assert halves[0] < 0.01 <= halves[1]


def test_the_interval_holds_at_every_number_of_seeds_together():
    values = np.random.default_rng(1).standard_normal((2000, 100))
    n = np.arange(1, 101)
    mean = np.cumsum(values, axis=1) / n
    deviation = np.sqrt(np.maximum(np.cumsum(values**2, axis=1) / n - mean**2, 0))
    half = np.array([always_valid_half(k, 1.0) for k in n])
    usable = np.isfinite(half)
    left = np.abs(mean[:, usable]) > half[usable] * deviation[:, usable]
    assert 0.005 < left.any(axis=1).mean() < 1 - LEVEL  # (a t interval is left by a third of them)
    one = always_valid(values[0])
    assert one["high"] - one["value"] == pytest.approx(half[-1] * deviation[0, -1])
    # The mean at the border has the e-value at which it is left.
    x, border = values[0], one["high"]
    total, squares = (x - border).sum(), ((x - border) ** 2).sum()
    e_value = np.sqrt(1 / 101) * (101 * squares / (101 * squares - total**2)) ** 50
    assert e_value == pytest.approx(1 / (1 - LEVEL))


@pytest.mark.parametrize(
    "text",
    [
        "lr=0.01",
        "lr=0.01 better than lr=0.5",
        "lr=0.01 better than lr=0.01",
        "lr=0.01 better than lr=0.001 by 0.0.2",
        "is it good?",
    ],
)
def test_what_is_no_question_about_two_settings_is_refused(tmp_path, text):
    with pytest.raises(InputError, match="--until.*lr=0.001, lr=0.01.*Fix: --until='lr="):
        question_of(text, members_of(tmp_path, 3))


@pytest.mark.parametrize("by, expected", [("0.02", 0.02), (".5", 0.5), ("-1", -1.0), ("2.", 2.0)])
def test_the_bound_of_a_question_is_a_number(tmp_path, by, expected):
    members = members_of(tmp_path, 2)
    assert question_of(f"lr=0.01 better than lr=0.001 by {by}", members).by == expected


def test_one_setting_or_one_seed_answers_nothing(tmp_path):
    alike = [m for m in members_of(tmp_path, 3) if m.overrides["actor_optimizer.lr"] == 0.01]
    with pytest.raises(InputError, match="two settings.*has one, lr=0.01"):
        question_of("lr=0.01 better than lr=0.01", alike)
    with pytest.raises(InputError, match="several seeds.*--seeds=32"):
        question_of("lr=0.01 better than lr=0.001", members_of(tmp_path, 1))
