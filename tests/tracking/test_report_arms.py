"""Runs that differ in their seeds are one line and one row with an interval over seeds; what would
settle a difference."""

import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.special import stdtrit
from test_report import _text, _write
from test_report_pages import CONFIG, _figures

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import seeds_figure

from rljax.report.arms import arms_of, averaged, interval, mean_series, paired, seeds_needed
from rljax.report.comparison import write_comparison
from rljax.report.run_folder import read_run

SETTINGS = (("", ""), ("runs/a/scorer", ""), ("", "runs/a/scorer"), ("runs/a/scorer",) * 2)
NAMES = [
    "base",
    "process_model=scorer",
    "critic_model=scorer",
    "process_model=scorer, critic_model=scorer",
]


def sweep(folder, seeds=(0, 1, 2), settings=SETTINGS, steps=10):
    """A folder of runs: setting i rewards 0.1 i + its seed's own level, that of all settings."""
    for i, (dense, critic) in enumerate(settings):
        for seed in seeds:
            fields = {"reward": {"process_model": dense}, "critic_model": critic, "seed": seed}
            rows = [
                (step, {"reward/mean": 0.1 * i + seed + 0.01 * step, "entropy": float(i)})
                for step in range(1, steps + 1)
            ]
            run = folder / f"{i}-{seed}"
            _write(run, rows, config={**CONFIG, **fields, "run_dir": str(run)}, summary={})
    return [read_run(path) for path in sorted(folder.glob("*-*"))]


def test_runs_are_put_together_by_what_they_set(tmp_path):
    runs = sweep(tmp_path)
    arms = arms_of(runs[::-1])
    assert [arm.name for arm in arms] == NAMES[::-1]
    assert all(arm.seeds == (0, 1, 2) for arm in arms)
    assert arms_of(runs[:1]) == arms_of([runs[0], runs[3]]) == []  # one, or two settings
    assert arms_of([*runs, runs[0]]) == []  # twice the same seed: a repetition is no seed
    assert len(arms_of(runs[:4])) == 2


def test_runs_that_have_not_finished_or_come_twice_are_in_no_mean(tmp_path):
    sweep(tmp_path, settings=SETTINGS[:1], seeds=(0, 1, 2, 3, 4))
    (tmp_path / "0-3" / "summary.json").write_text('{"status": "failed"}')
    for seed in (0, 1, 2):
        (tmp_path / f"0-{seed}" / "summary.json").write_text('{"status": "finished"}')
    shutil.copytree(tmp_path / "0-2", tmp_path / "9-again")
    (tmp_path / "9-lost").mkdir()
    (tmp_path / "9-lost" / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 9.0}\n')
    runs = [read_run(path) for path in sorted(tmp_path.iterdir())]
    counted, why = averaged(runs)
    assert [run.folder.name for run in counted] == ["0-0", "0-1", "0-2"]
    assert list(why.values()).count("not finished") == 2 and "seed 2 twice" in why.values()
    assert (
        averaged(runs[3:5])[1] == {}
    )  # none has finished: those that run are compared as they are
    folders = [run.folder for run in runs]
    page = write_comparison(folders, tmp_path / "page.html").read_text()
    table = page.partition("Over seeds")[2].partition("</table>")[0]
    assert "<td>3</td>" in table and "<td>5</td>" not in table
    assert page.count("in no mean over seeds: not finished") == 2 and "no config.json" in page
    differ = page.partition("Settings that differ")[2].partition("</section>")[0]
    assert "seed" in differ and differ.count("<tr>") == 2 and "9-lost" not in differ


def test_arms_whose_short_names_are_equal_are_named_in_full(tmp_path):
    runs = sweep(tmp_path, settings=(("one/scorer", ""), ("two/scorer", "")))
    assert [arm.name for arm in arms_of(runs)] == [
        "reward.process_model=one/scorer",
        "reward.process_model=two/scorer",
    ]


def test_interval_is_students():
    """Of 1, 2, 3: the mean is 2, s = 1, t(0.975, 2) = 4.302653."""
    found = interval([1.0, 2.0, math.nan, 3.0])
    assert found["n"] == 3 and found["value"] == 2.0
    assert found["high"] - 2.0 == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert interval([5.0]) == {"value": 5.0, "n": 1}
    rng, hits = np.random.default_rng(0), 0
    for _ in range(2000):  # of three draws each; a standard error of 0.5 %
        found = interval(rng.normal(1.0, 2.0, 3))
        hits += found["low"] <= 1.0 <= found["high"]
    assert 0.93 <= hits / 2000 <= 0.97


def test_seeds_that_settle_a_difference():
    """d = 1, s = 2: a normal test needs (1.96 + 0.8416)^2 4 = 31.4 seeds, the t test 34; with so
    many 80 % of experiments see it, also where few do."""
    assert seeds_needed([-1.0, 1.0, 3.0]) == 34
    assert seeds_needed([1.0, 1.0]) == 2 and seeds_needed([1.0]) is None
    assert seeds_needed([-1.0, 1.0]) is None  # no difference was measured
    for spread in (0.3, 0.6, 2.0):
        n = seeds_needed([1.0 - spread, 1.0, 1.0 + spread])
        seen = []
        for count in (n - 1, n):
            draws = np.random.default_rng(0).normal(1.0, spread, (8000, count))
            half = stdtrit(count - 1, 0.975) * draws.std(axis=1, ddof=1) / math.sqrt(count)
            seen.append(float(np.mean(np.abs(draws.mean(axis=1)) > half)) if count > 1 else 0.0)
        assert seen[0] < 0.815 and 0.785 < seen[1]


def test_one_line_per_setting_with_its_interval_over_seeds(tmp_path):
    runs = sweep(tmp_path)
    arms = arms_of(runs)
    line = mean_series(arms[1], "reward/mean")
    np.testing.assert_allclose(line.y, [1.1 + 0.01 * step for step in range(1, 11)])
    np.testing.assert_allclose(line.high - line.y, 4.302653 / math.sqrt(3), rtol=1e-6)
    values = {id(run): float(i) for i, run in enumerate(runs)}
    assert paired(arms[1], arms[0], values) == [3.0, 3.0, 3.0]
    page = write_comparison([tmp_path])
    chart = _figures(page.read_text())["reward/mean"]
    assert chart.count("<polyline") == chart.count("<polygon") == 4
    assert all(f"{name} <b>" in chart for name in NAMES)
    text = _text(tmp_path, page)
    assert "Over seeds" in text and "12 runs compared" in text
    # The level of a seed is that of all settings: paired, only the setting is left.
    assert "base 3 1.1 [-1.384, 3.584]" in text
    assert "process_model=scorer 3 1.2 [-1.284, 3.684] +0.1 [+0.1, +0.1] 2" in text


def test_a_step_that_one_seed_lacks_is_no_mean_of_the_others(tmp_path):
    runs = sweep(tmp_path, settings=SETTINGS[:1])
    lines = (runs[2].folder / "metrics.jsonl").read_text().splitlines()[:4]
    (runs[2].folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (arm,) = arms_of([read_run(run.folder) for run in runs])
    assert mean_series(arm, "reward/mean").x.tolist() == [1, 2, 3, 4]
    assert mean_series(arm, "no/such").x.size == 0


@pytest.mark.parametrize("seed", [None, "0", [1], 1.5])
def test_a_seed_that_is_no_number_makes_no_arm(tmp_path, seed):
    runs = sweep(tmp_path, settings=SETTINGS[:2])
    path = runs[0].folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "seed": seed}))
    assert arms_of([read_run(run.folder) for run in runs]) == []
    assert "Over seeds" not in write_comparison([tmp_path]).read_text()


def test_the_figure_of_a_sweep_and_its_numbers(tmp_path, monkeypatch, capsys):
    runs = sweep(tmp_path / "runs")
    for run in runs[:-1]:  # the last one has not finished: it is left out, its setting stays
        (run.folder / "summary.json").write_text('{"status": "finished"}')
    figure = tmp_path / "curves.svg"
    arguments = ["seeds_figure.py", str(tmp_path / "runs"), "--metrics=reward/mean", "--last=2"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--window=5", f"--figure={figure}"])
    seeds_figure.main()
    rows = json.loads(capsys.readouterr().out)
    assert [(row["setting"], row["steps"]) for row in rows] == [
        (name, steps) for steps in (2, "all") for name in NAMES
    ]
    assert rows[0]["value"] == pytest.approx(1.095) and rows[0]["of_seeds"] == [0.095, 1.095, 2.095]
    assert rows[1]["difference"] == {"value": 0.1, "n": 3, "low": 0.1, "high": 0.1}
    assert rows[3]["n"] == 2 and rows[3]["difference"]["n"] == 2
    assert rows[4]["value"] == pytest.approx(1.055)
    drawn = figure.read_text()
    assert drawn.startswith("<?xml") and drawn.count('<g id="FillBetweenPolyCollection_') == 4
