"""Notebooks run from top to bottom, and what they compute is what their text says."""

import functools
import json
import os
import tempfile

import numpy as np
import pytest
from conftest import REPO

NOTEBOOKS = sorted((REPO / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(path):
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    assert cells
    assert all(c["outputs"] == [] and c["execution_count"] is None for c in cells)


@functools.cache
def executed(name: str) -> tuple[dict, int]:
    """(what the notebook's `measured` holds at its end, number of figures), in its tiny form."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(REPO / "notebooks" / f"{name}.ipynb", as_version=4)
    dump = "import json\nprint('MEASURED' + json.dumps(measured))"
    notebook.cells.append(nbformat.v4.new_code_cell(dump))
    path = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
    flags = "--xla_backend_optimization_level=0"  # of conftest.py, but its eight devices
    env = {**os.environ, "PYTHONPATH": path, "RLJAX_NOTEBOOK": "tiny", "XLA_FLAGS": flags}
    with tempfile.TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        nbclient.NotebookClient(notebook, timeout=900, resources=place).execute(env=env)
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    figures = sum("image/png" in output.get("data", {}) for output in outputs)
    return json.loads(outputs[-1]["text"].removeprefix("MEASURED")), figures


@pytest.fixture(scope="module")
def claims():
    return executed("rl_claims")


slow = pytest.mark.slow


@slow
def test_every_section_has_a_figure(claims):
    assert claims[1] == 6


@slow
def test_kl_estimators_match_the_table(claims):
    kl = claims[0]["kl"]
    assert kl["bias_error"] < 0.02 and kl["std_error"] < 0.02
    # exp(-d) - 1 + d > 10 has a share of the second moment that the clamp takes away.
    assert -0.13 < kl["clamped_std_error"] < -0.08 and -0.02 < kl["clamped_bias"] < -0.005


@slow
def test_baselines_lower_the_variance(claims):
    noise = claims[0]["noise"]
    assert noise["constant mean"] < 0.5 * noise["none"]
    for name in ("rloo", "group_relative", "opo", "optimal token baseline"):
        assert noise[name] < 0.5 * noise["constant mean"], name
    # They differ by the factor (n - 1) / n, which noise / signal does not see; or not at all.
    assert noise["rloo"] == pytest.approx(noise["group_relative, std none"], rel=1e-3)
    assert noise["opo"] == pytest.approx(noise["group_relative, std none"], rel=1e-3)


@slow
def test_cispo_has_gradients_where_ppo_has_none(claims):
    found = claims[0]["cispo"]
    assert found["tokens"] == 13 and found["ppo_zero"] == [2, 7, 11] and found["cispo_zero"] == []
    # -weight A / 13 with the ratios 1.82, 0.61 and 1.35 clipped to [0.8, 1.28].
    want = [-1.28 / 13, 0.8 * 1.5 / 13, -1.28 * 0.8 / 13]
    np.testing.assert_allclose(found["cispo_where_ppo_zero"], want, rtol=1e-5)


@slow
def test_dead_groups_shrink_the_batch_and_dynamic_sampling_fills_it(claims):
    groups = claims[0]["groups"]
    assert groups["plain"][0] > 0.7 and groups["plain"][-1] < 0.4
    assert groups["live_groups"] == groups["plain"]
    np.testing.assert_allclose(groups["live_groups_weight"], 1.0, atol=1e-5)
    assert groups["dynamic"] == [1.0] * 10
    assert groups["cost"][-1] > 1.5 * groups["cost"][0]


@slow
@pytest.mark.parametrize("perturbation", ["3-bit weights", "temperature 1.5"])
def test_a_perturbed_sampler_needs_the_correction(claims, perturbation):
    def of(name, key, perturbation=perturbation, advantage="reinforce"):
        return np.array(claims[0]["sampler"][f"{advantage} | {name} | {perturbation}"][key])

    # Seed by seed: the reward falls without the correction and does not fall with it.
    assert (of("no correction", "final") < of("no correction", "begin") - 0.05).all()
    for name in ("token, truncate", "token, mask", "sequence, truncate"):
        assert (of(name, "final") > of("no correction", "final") + 0.08).all(), name
        assert (of(name, "final") > of(name, "begin") - 0.03).all(), name
    exact = of("no correction", "final", "exact").mean()
    assert of("token, truncate", "final").mean() > exact - 0.05
    # What the text says about a mean per prompt: no collapse, corrected or not.
    for name in ("no correction", "token, truncate"):
        final = of(name, "final", advantage="group_relative")
        assert (final > of(name, "begin", advantage="group_relative") - 0.03).all(), name


@slow
@pytest.mark.parametrize("advantage", ["reinforce", "group_relative"])
def test_staleness_16_needs_the_correction(claims, advantage):
    stale = claims[0]["staleness"]
    plain = np.mean(stale[f"{advantage} | no correction"]["final"], axis=1)
    weighed = np.mean(stale[f"{advantage} | token, truncate"]["final"], axis=1)
    assert (np.diff(stale[f"{advantage} | no correction"]["ess"]) < 0).all()
    assert plain[5] < plain[0] - 0.03 and plain[5] < plain[4] - 0.03
    assert plain[1:5].min() > plain[0] - 0.04  # a few versions are harmless
    assert weighed[5] > plain[5] + 0.03 and weighed[5] > weighed[0] - 0.04


def rose(change: dict) -> bool:
    """Whether an interval of a difference lies above 0."""
    return 0 < change["low"] <= change["value"] <= change["high"]


@slow
def test_first_run_raises_the_accuracy():
    measured, figures = executed("first_run")
    assert figures == 2 and rose(measured["difference"])
    assert measured["last_reward"] > measured["first_reward"] + 0.2
    (first, last), (before, after) = measured["seeds"]["mean"], measured["seeds"]["half"]
    assert last - after > first + before + 0.3 and before > 0
    assert 0 <= measured["slow"]["low"] <= measured["slow"]["high"] <= 1


@slow
def test_ppo_trains_actor_and_critic():
    """Row 000-79: the reward rises, the critic's loss falls, what it explains rises from little."""
    measured, figures = executed("ppo")
    assert figures == 1 and measured["gae_error"] < 1e-6 and rose(measured["difference"])
    assert measured["reward"][1] > measured["reward"][0] + 0.15
    assert measured["value_loss"][1] < 0.5 * measured["value_loss"][0]
    assert measured["explained_variance"][1] > max(measured["explained_variance"][0] + 0.3, 0.5)


@slow
def test_inside_a_step():
    measured, figures = executed("inside")
    assert figures == 1 and measured["mismatch"] < 1e-5
    np.testing.assert_allclose(measured["gradient"], [-0.5, -0.9, -1.0, -1.1, 0.0], atol=1e-5)
    assert measured["reward"][1] > measured["reward"][0] + 0.25


@slow
def test_your_reward_is_hacked_and_mended():
    measured, figures = executed("your_reward")
    statuses = {"b": "ok", "abcde": "ok", "c": "ok", "raise": "error", "hang": "timeout"}
    assert figures == 1 and measured["statuses"] == statuses
    assert measured["judged"] == [0.9, 0.2]
    hacked, mended = measured["hacked"], measured["mended"]
    assert hacked["reward"] > hacked["after"]["value"] + 0.2  # the reward is content, the rule not
    assert mended["after"]["low"] > hacked["after"]["high"]
    assert any("first_is_right" in name for name in measured["parts"])
    assert any("is_short" in name for name in measured["parts"])


@slow
def test_preferences_are_learned_four_ways():
    measured, figures = executed("preferences")
    assert figures == 2
    assert measured["margins"][1] > measured["margins"][0] + 0.5
    assert measured["rejected"][1] < measured["rejected"][0]
    assert measured["scorer"]["accuracy"] > 0.8 and 0 <= measured["scorer"]["calibration"] < 0.5
    assert measured["dpo"][1] >= measured["dpo"][0]
    assert measured["online"][1] > measured["online"][0] + 0.1


@slow
def test_the_small_model_goes_on_after_a_disconnect():
    measured, figures = executed("small_model_gsm8k")
    assert figures == 1 and measured["plan"] and rose(measured["difference"])
    assert measured["steps"] == list(range(1, 41)) and measured["starts"] == 2
    after = measured["after"]
    assert f"[{100 * after['low']:.4g}, {100 * after['high']:.4g}]" in measured["card"]
    assert "improved" in measured["card"]


@slow
def test_the_real_models_notebook_runs_on_a_stand_in():
    measured, figures = executed("real_model")
    assert figures == 1 and len(measured["reward"]) == 2
    assert measured["before"]["n"] == measured["after"]["n"] == measured["difference"]["n"] == 8
    assert len(measured["answers"]) == 5 and measured["same"] is None


@pytest.mark.hosts
def test_a_pod_of_four_hosts_goes_on_bitwise_after_a_kill():
    measured, figures = executed("pod")
    whole, killed, resumed = measured["codes"]
    assert figures == 1 and whole == resumed == 0 and killed != 0
    assert any("host 2" in line for line in measured["lost"])
    assert measured["weights"] and measured["equal"] and measured["rewards_equal"]
    assert measured["steps"] == 12 and measured["plan"] == 0
