"""The scaling fit of run folders: planted parameters come back, and more compute is predicted."""

import json

import numpy as np
import pytest
from launching import launch

from rljax.config.run_options import ScalingOptions
from rljax.errors import InputError
from rljax.evaluation.scaling import fit_runs, sigmoid_curve

PLANTED = dict(start=0.1, asymptote=0.72, midpoint=310.0, steepness=1.6)
NOISE = 5e-4


def write_run(folder, *, tokens=1.0, summary=None, **planted):
    """A run of 20 SFT steps and 2,000 RL steps, evaluated at every 25th."""
    folder.mkdir()
    curve, rng = {**PLANTED, **planted}, np.random.default_rng(0)
    rows = [{"step": s, "phase": "sft", "loss": 1.0} for s in range(1, 21)]
    if summary is None:
        rows[-1]["eval/accuracy"] = curve["start"]
    for s in range(1, 2001):
        row = {"step": 20 + s, "phase": "rl", "batch/tokens": tokens}
        if s % 25 == 0:
            value = float(sigmoid_curve(s, **curve))
            row["eval/accuracy"] = value + float(rng.normal(0, NOISE))
        rows.append(row)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    return str(folder)


@pytest.mark.parametrize("steepness", [0.8, 1.6, 3.0])
def test_planted_parameters_are_recovered_within_5_percent(tmp_path, steepness):
    folder = write_run(tmp_path / "run", steepness=steepness)
    fit = fit_runs(ScalingOptions((folder,)))[folder]
    assert fit["points"] == 80 and fit["start"] == PLANTED["start"] and fit["r2"] > 0.99
    for name, value in {**PLANTED, "steepness": steepness}.items():
        assert fit[name] == pytest.approx(value, rel=0.05), name


def test_compute_may_be_any_metric_summed_over_the_steps(tmp_path):
    folder = write_run(tmp_path / "run", tokens=1000.0)
    fit = fit_runs(ScalingOptions((folder,), compute="batch/tokens"))[folder]
    assert fit["midpoint"] == pytest.approx(1000 * PLANTED["midpoint"], rel=0.05)
    assert fit["steepness"] == pytest.approx(PLANTED["steepness"], rel=0.05)


def test_where_the_start_comes_from(tmp_path):
    before = {"accuracy_before": {"value": PLANTED["start"]}}
    folder = write_run(tmp_path / "of_summary", summary=before)
    assert fit_runs(ScalingOptions((folder,)))[folder]["start"] == PLANTED["start"]
    folder = write_run(tmp_path / "nowhere", summary={"status": "finished"})
    with pytest.raises(InputError, match="set --start"):
        fit_runs(ScalingOptions((folder,)))
    assert fit_runs(ScalingOptions((folder,), start=0.1))[folder]["asymptote"] > 0.7


def test_a_run_without_the_metric_is_refused(tmp_path):
    folder = write_run(tmp_path / "run")
    with pytest.raises(InputError, match="no points of eval/loss over step.*eval/accuracy"):
        fit_runs(ScalingOptions((folder,), metric="eval/loss"))
    with pytest.raises(InputError, match="no such run folder"):
        fit_runs(ScalingOptions((str(tmp_path / "none"),)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no run has begun in this folder"):
        fit_runs(ScalingOptions((str(tmp_path / "empty"),)))
    (tmp_path / "empty/config.json").write_text("{}")
    with pytest.raises(InputError, match="has no steps to fit.*name a run that has taken steps"):
        fit_runs(ScalingOptions((str(tmp_path / "empty"),)))


def test_the_launcher(tmp_path):
    runs = [write_run(tmp_path / name, asymptote=a) for name, a in (("low", 0.5), ("high", 0.8))]
    out = tmp_path / "fit.json"
    done = launch("fit_scaling", *runs, "--until=1000", "--to=20000", f"--out={out}")
    assert done.returncode == 0, done.stderr
    fits = json.loads(out.read_text())
    assert json.loads(done.stdout[done.stdout.index("{") :]) == fits
    for folder, asymptote in zip(runs, (0.5, 0.8), strict=True):
        fit = fits[folder]
        assert fit["points"] == fit["later_points"] == 40
        assert fit["later_error"] < 0.01  # the second half follows from the first
        want = float(sigmoid_curve(20_000, **{**PLANTED, "asymptote": asymptote}))
        assert fit["predicted at 20000"] == pytest.approx(want, rel=0.05)
    assert "asymptote" in done.stdout and "later_error" in done.stdout
    done = launch("fit_scaling")
    assert done.returncode == 2 and "RUNS=(): needed" in done.stderr
