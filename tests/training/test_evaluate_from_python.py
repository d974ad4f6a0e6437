"""rljax.evaluate of a run that train returned and of folders, and the run as a program holds it."""

import json
import shutil
import types

import jax
import numpy as np
import pytest
from light_rewards import always_right, digits_in_order
from tiny_run import tiny_config

import rljax
from rljax.config import Config, DataConfig, RewardConfig
from rljax.config.policy_options import EvaluateOptions
from rljax.config.python_words import in_python
from rljax.errors import InputError
from rljax.evaluation.saved import data_and_reward

FIELDS = dict(
    steps=2,
    evaluate__every_steps=0,
    model="decoder(layers=1, embed=48, mlp=96, heads=3, kv_heads=3, head_dim=16)",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a function of the user's as its reward, evaluated at its end alone."""
    config = tiny_config(tmp_path_factory.mktemp("run"), **FIELDS)
    return rljax.train(config, reward=digits_in_order, devices=jax.devices()[:1], correct_at=0.3)


@pytest.mark.slow
def test_a_run_is_evaluated_as_it_was_at_its_end(run, tmp_path):
    found = rljax.evaluate(run, samples=0)
    assert found["metrics"]["greedy_accuracy"] == run.summary["accuracy_after"]
    assert found["prompts"]["kept"] == 16 and "mean@8" not in found["metrics"]
    moved = shutil.copytree(run.folder, tmp_path / "moved")  # no run that began here
    with pytest.raises(InputError, match="trust_code=True") as error:
        rljax.evaluate(moved, samples=0)
    assert "--" not in str(error.value).partition("Fix: ")[2]
    again = rljax.evaluate(str(run.folder), samples=2, trust_code=True, prompts=3)["metrics"]
    assert again["greedy_accuracy"]["n"] == 3 and {"mean@2", "pass@1"} <= again.keys()
    assert "pass@4" not in again


@pytest.mark.slow
def test_rows_and_a_function_are_taken_and_nothing_is_left(run):
    before = {path for path in run.folder.rglob("*")}
    rows = [{"prompt": "31542>", "ground_truth": "12345"}] * 3
    found = rljax.evaluate(run, always_right, data=iter(rows), samples=0)
    assert found["metrics"]["greedy_accuracy"]["value"] == 1.0 and found["prompts"]["kept"] == 3
    assert {path for path in run.folder.rglob("*")} == before


def test_a_run_that_held_out_nothing_is_told_which_arguments_name_rows(tmp_path):
    config = Config(
        model="decoder(layers=1)",
        data=DataConfig(str(tmp_path / "rows.jsonl")),
        reward=RewardConfig("exact_match(ignore_case=True)"),
    )
    folder = tmp_path / "run"
    policy = types.SimpleNamespace(config=config, step=3)
    with pytest.raises(InputError) as error, in_python("rljax.evaluate"):
        data_and_reward(EvaluateOptions(str(folder)), policy)
    fix = str(error.value).partition("Fix: ")[2]
    assert fix == ('set data, such as data="rows.parquet", reward="exact_match(ignore_case=True)"')
    config.reward.function = "mixture(rewards=('exact_match()', \"boxed()\"))"
    with pytest.raises(InputError, match="such as --data=rows.parquet$"):  # no shell reads it
        data_and_reward(EvaluateOptions(str(folder)), policy)


@pytest.mark.slow
@pytest.mark.parametrize(
    "what, options, says",
    [
        (3, {}, ("got 'int'", "Fix: rljax.evaluate(run)")),
        ("no/such/folder", {}, ("no such folder",)),
        (None, {"sampels": 3}, ("takes no sampels", "did you mean samples")),
        (None, {"samples": 2, "ks": (4,)}, ("k=4: each is between 1 and samples=2",)),
        (None, {"samples": 0, "temperature": -1.0}, ("temperature=-1.0", "help(rljax.evaluate)")),
        (None, {"samples": 0, "step": "best"}, ('Fix: step="latest"',)),
        (None, {"data": [1]}, ("rljax.evaluate: data.train: row 1 is no dict",)),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_pythons_words(run, what, options, says):
    with pytest.raises(InputError, match="Fix: ") as error:
        rljax.evaluate(run if what is None else what, **options)
    assert all(text in str(error.value) for text in says), str(error.value)
    assert "--" not in str(error.value)


@pytest.mark.slow
def test_metrics_are_arrays_and_the_run_is_one_short_line(run):
    reward, steps, phase = (run.metrics[name] for name in ("reward/mean", "step", "phase"))
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert reward.dtype == np.float64 and steps.tolist() == [row["step"] for row in rows]
    known = [row.get("reward/mean", np.nan) for row in rows]
    np.testing.assert_array_equal(reward, known)
    assert np.isnan(reward[:6]).all() and np.isfinite(reward[6:]).all()
    assert phase.tolist() == ["sft"] * 6 + ["rl"] * 2
    assert list(run.metrics)[0] == "step" and len(run.metrics.to_pylist()) == 8
    with pytest.raises(KeyError, match="reward/mean"):
        run.metrics["reward/maen"]
    assert run.metrics.to_pandas()["reward/mean"].isna().sum() == 6
    accuracy = [run.summary[f"accuracy_{when}"]["value"] for when in ("before", "after")]
    line = f"finished, step 8, accuracy {accuracy[0]:.3f} -> {accuracy[1]:.3f}"
    assert repr(run) == f"<run {str(run.folder)!r}: {line}>" and len(repr(run.metrics)) < 10_000


@pytest.mark.slow
def test_fixes_of_a_run_are_arguments(run):
    config = tiny_config(run.folder, **FIELDS)
    same = dict(reward=digits_in_order, devices=jax.devices()[:1], correct_at=0.3)
    with pytest.raises(InputError, match="Fix: use a new run_dir, or train on: steps=4"):
        rljax.train(config, **same)
    with pytest.raises(InputError, match="checkpoint={\"allow_changed\": .*'actor_optimizer.lr'"):
        rljax.train(config, **same, actor_optimizer={"lr": 1e-2})
    for fields, fix in (({"reward": 3}, "reward=my_function"), ({"steps": "3"}, "write a whole")):
        with pytest.raises(InputError, match=f"Fix: {fix}") as error:
            rljax.train(config, **{**same, **fields})
        assert "--" not in str(error.value)
