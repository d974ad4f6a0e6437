"""Estimators against worked examples and brute force; what intervals promise; the flags."""

import dataclasses
import itertools
import json
import math

import jax
import numpy as np
import pytest
from conftest import worked_example
from tiny_data import write_gsm8k_parquet
from tiny_gsm8k import write_model

import rljax
from rljax.config import Config
from rljax.config.declare import check_options, whole_numbers
from rljax.config.policy_options import EvaluateOptions, LabelOptions, RejectionOptions
from rljax.datagen.rejection import rejection_sample
from rljax.datagen.saved_labels import label_saved
from rljax.errors import InputError
from rljax.evaluation.lengths import by_length
from rljax.evaluation.policy import (
    GAIN,
    SHARE,
    Answers,
    best_of_k,
    bootstrap,
    final_answer,
    majority,
    majority_at_k,
    pass_at_k,
    sampled_metrics,
)
from rljax.evaluation.saved import evaluate_saved
from rljax.policies import Completion, load_policy


@pytest.mark.smoke
def test_pass_at_k_worked_example():
    example = worked_example("metric.pass_at_k")
    n, c, ks = example["inputs"]["n"], example["inputs"]["c"], example["params"]["k"]
    table = [[pass_at_k(a, b, k) for k in ks] for a, b in zip(n, c, strict=True)]
    np.testing.assert_allclose(table, example["outputs"]["table"], atol=1e-6)


def test_best_of_k_worked_example():
    example = worked_example("metric.best_of_k")
    scores, ks = example["inputs"]["scores"], example["params"]["k"]
    best = [best_of_k(scores, k) for k in ks]
    np.testing.assert_allclose(best, example["outputs"]["best"], atol=1e-6)
    worst = [-best_of_k([-s for s in scores], k) for k in ks]
    np.testing.assert_allclose(worst, example["outputs"]["worst"], atol=1e-6)


def test_majority_worked_example():
    example = worked_example("metric.maj")
    answers, truth = example["inputs"]["answers"], example["inputs"]["truth"]
    assert majority(answers) == example["outputs"]["vote"]
    right = [answer == truth for answer in answers]
    assert majority_at_k(answers, right, len(answers)) == example["outputs"]["correct"]


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_estimators_are_the_mean_over_all_subsets(n):
    rng = np.random.default_rng(n)
    scores = [float(s) for s in rng.integers(0, 4, n) / 4]
    right = [s >= 0.5 for s in scores]
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(range(n), k))
        any_right = np.mean([any(right[i] for i in s) for s in subsets])
        assert pass_at_k(n, sum(right), k) == pytest.approx(any_right, abs=1e-12)
        best = np.mean([max(scores[i] for i in s) for s in subsets])
        assert best_of_k(scores, k) == pytest.approx(best, abs=1e-12)


def test_estimators_stay_exact_for_many_samples():
    exact = 1 - math.comb(9990, 500) / math.comb(10_000, 500)
    assert pass_at_k(10_000, 10, 500) == pytest.approx(exact, rel=1e-9)
    assert best_of_k([0.0] * 9990 + [1.0] * 10, 500) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("k", [0, 3, -1])
def test_k_outside_the_samples(k):
    with pytest.raises(InputError, match=r"pass@k: got .*1 <= k <= 2"):
        pass_at_k(2, 1, k)
    with pytest.raises(InputError, match=r"best-of-k: got .*1 <= k <= 2"):
        best_of_k([0.0, 1.0], k)
    with pytest.raises(InputError, match=r"maj@k: got .*1 <= k <= 2"):
        majority_at_k(["a", "b"], [True, False], k)


def test_best_of_k_refuses_nan():
    with pytest.raises(InputError, match="NaN"):
        best_of_k([1.0, math.nan], 1)


def test_majority_at_k_votes_in_disjoint_runs():
    answers = ["4", "5", "5", None, "7", None]
    right = [True, False, False, False, True, True]
    assert majority_at_k(answers, right, 1) == pytest.approx(2 / 6)  # None has no vote
    assert majority_at_k(answers, right, 3) == pytest.approx(1 / 2)  # 5 is wrong, 7 is right
    assert majority_at_k(answers, right, 4) == 0.0  # the rest of two is no run of four
    assert majority([None, None]) is None


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{12} is it", "12"),
        ("2 + 2\n#### 1,024.", "1024"),
        ("  42\n", "42"),
        ("", None),
        (r"\boxed{}", None),
        (r"\boxed{3} so <answer>\frac{1}{2}</answer>", r"\frac{1}{2}"),
        (r"<answer>that is \boxed{12}</answer> done", "12"),
        ("<answer>B. Paris</answer>", "B"),
    ],
)
def test_final_answer(response, answer):
    assert final_answer(response) == answer


def test_a_failed_reward_is_left_out():
    nan = math.nan
    scores = np.array([[1.0, 0.0, nan, nan], [0.0, 0.0, 1.0, 1.0], [nan, nan, nan, nan]])
    answers = [["a", "b", "c", "c"], ["x", "y", "z", "z"], ["q"] * 4]
    found = sampled_metrics(scores, answers, ks=(1, 2, 4))
    assert found["mean@4"]["value"] == pytest.approx(0.5) and found["mean@4"]["n"] == 2
    assert found["pass@2"]["value"] == pytest.approx((1.0 + pass_at_k(4, 2, 2)) / 2)
    assert found["best_of@2"]["n"] == 2
    assert found["maj@4"] == {
        "value": 1.0,
        "low": pytest.approx(0.2065, abs=1e-4),
        "high": 1.0,
        "n": 1,
    }


@pytest.mark.smoke
def test_bootstrap():
    found = bootstrap([0.0, 1.0, 1.0, math.nan])
    assert found["value"] == pytest.approx(2 / 3) and found["n"] == 3
    assert 0 <= found["low"] <= found["value"] <= found["high"] <= 1
    assert bootstrap([0.5] * 9) == {"value": 0.5, "low": 0.5, "high": 0.5, "n": 9}
    assert bootstrap([0.0, 1.0] * 5) == bootstrap([0.0, 1.0] * 5)
    for nothing in ([], [math.nan]):
        with pytest.raises(InputError, match="no values"):
            bootstrap(nothing)


@pytest.mark.parametrize("n, z_of_n", [(1, 0.7935), (16, 0.1936), (100, 0.0370), (512, 0.00745)])
def test_all_right_or_all_wrong_has_wilsons_interval(n, z_of_n):
    """scipy: binomtest(0, n).proportion_ci(method="wilson"), and of its mirror image."""
    width = pytest.approx(z_of_n, abs=1e-4)
    for value in (0.0, 1.0):
        found = bootstrap([value] * n + [math.nan], within=SHARE)
        assert found["value"] == value and found["high"] - found["low"] == width
        assert {found["low"], found["high"]} & {value}
    found = bootstrap([0.0] * n, within=GAIN)  # a difference of two
    assert found["high"] == -found["low"] == width
    assert bootstrap([1.0] * n, within=GAIN)["low"] == pytest.approx(1 - z_of_n, abs=1e-4)
    weighted = bootstrap([1.0] * n, weights=[2.0] * n, within=SHARE)
    assert weighted == pytest.approx(bootstrap([1.0] * n, within=SHARE))
    assert bootstrap([0.25] * n, within=SHARE)["low"] == 0.25  # no share of yes and no
    assert bootstrap([3.0] * n)["high"] == 3.0  # turns: no share at all


def test_every_share_of_an_evaluation_has_an_interval_that_says_how_few_there_are():
    scores, texts = np.ones((5, 4)), [["a"] * 4] * 5
    found = sampled_metrics(scores, texts, ks=(1, 4))
    shares = [found[name] for name in ("mean@4", "pass@1", "pass@4", "maj@4")]
    assert all(share["low"] < 0.6 and share["high"] == 1.0 for share in shares)
    assert found["best_of@4"]["low"] == 1.0  # rewards have no bounds


def test_bootstrap_interval_covers_as_often_as_it_says():
    """95 % of the intervals hold the truth; 400 experiments have a standard error of 1.1 %."""
    rng = np.random.default_rng(0)
    hits = 0
    for seed in range(400):
        values = rng.random(100) < 0.3
        found = bootstrap(values.astype(float), resamples=400, seed=seed)
        hits += found["low"] <= 0.3 <= found["high"]
    assert 0.91 <= hits / 400 <= 0.98


# -- by the length of responses --


def sampled(*lengths_and_rewards) -> list[Completion]:
    return [
        Completion(0, "", (1,) * length, (), "stop", reward)
        for length, reward in lengths_and_rewards
    ]


def test_pass_rates_and_lengths_are_of_the_drawn_responses_else_of_the_greedy_ones():
    nan = math.nan
    greedy = sampled((3, 1.0), (5, 0.0), (7, nan))
    drawn = sampled((2, 1.0), (4, 0.0), (6, nan), (9, 1.0), (1, nan), (1, nan))
    answers = Answers(greedy, drawn, 2)
    np.testing.assert_array_equal(answers.pass_rates(1.0), [0.5, 1.0, nan])
    np.testing.assert_array_equal(answers.tokens(), [3.0, 7.5, 1.0])
    np.testing.assert_array_equal(Answers(greedy, [], 0).pass_rates(1.0), [1.0, 0.0, nan])
    np.testing.assert_array_equal(Answers(greedy, [], 0).tokens(), [3.0, 5.0, 7.0])
    assert Answers(greedy, drawn, 2).pass_rates(0.0)[0] == 1.0


def test_every_prompt_is_in_one_bucket_and_a_bound_is_in_the_lower_one():
    values, tokens = np.array([1.0, 0.0, 0.25, 1.0, math.nan]), np.array([0, 10, 10.5, 20, 500.0])
    found = by_length("pass@1", values, tokens, (20, 10))
    assert {k: (v["value"], v["n"]) for k, v in found.items()} == {
        "pass@1/tokens<=10": (0.5, 2),
        "pass@1/10<tokens<=20": (0.625, 2),
    }  # nothing is known of the one above 20
    assert by_length("x", values, tokens, ()) == {}
    (one,) = by_length("x", values, tokens, (1000,)).items()
    assert one[0] == "x/tokens<=1000" and one[1]["n"] == 4


LETTERS = "first_letter(letters=3, kinds=3, test=6)"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of a task: one that was trained to answer it, one that hardly was."""
    folder = tmp_path_factory.mktemp("runs")
    for name, steps in (("trained", 60), ("begun", 1)):
        config = Config(
            model="decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16)",
            dataflow="sft",
            steps=steps,
            trackers=(),
            run_dir=str(folder / name),
        )
        config.model_settings.remat = "none"
        config.data.train = LETTERS
        config.data.max_prompt_tokens, config.sampler.max_response_tokens = 4, 6
        config.offline.examples_per_step, config.offline.max_tokens = 32, 8
        config.reward.function, config.reward.workers = "exact_match()", 1
        config.actor_optimizer.lr = 1e-2
        rljax.train(config)
    return folder


@pytest.mark.slow
def test_two_policies_are_compared_prompt_by_prompt(runs, tmp_path):
    options = EvaluateOptions(
        str(runs / "trained"),
        against=f"{runs / 'begun'}@1",
        samples=4,
        ks=(1,),
        length_buckets=(2,),
        prompts=6,
    )
    result = evaluate_saved(options)
    ours, theirs = result["metrics"], result["against"]["metrics"]
    gain = result["difference"]["pass@1"]
    assert ours["pass@1"]["value"] > 0.9 and gain["value"] > 0.5 and gain["low"] > 0
    assert gain["value"] == pytest.approx(ours["pass@1"]["value"] - theirs["pass@1"]["value"])
    parts = {k: v for k, v in result["difference"].items() if "/" in k}
    assert sum(v["n"] for v in parts.values()) == 6
    for name, part in parts.items():  # one bucket of a prompt for both: that of the other's length
        assert part["value"] == pytest.approx(ours[name]["value"] - theirs[name]["value"])
    assert result["against"]["step"] == 1 and result["step"] == 60
    same = evaluate_saved(dataclasses.replace(options, against=options.checkpoint))
    assert set(x["value"] for x in same["difference"].values()) == {0.0}
    # Alone, a policy's own lengths count: its answers are a letter and the end token.
    alone = evaluate_saved(dataclasses.replace(options, against=""))
    assert alone["metrics"]["pass@1/tokens<=2"]["n"] == 6 and "difference" not in alone


# -- the launcher --


def test_flags_are_checked_at_once():
    options = EvaluateOptions(
        "",
        step="newest",
        samples=4,
        ks=(0, 4, 8),
        length_buckets=(0,),
        prompts=0,
        temperature=0.0,
        seed=-1,
    )
    with pytest.raises(InputError) as error:
        check_options(options)
    lines = str(error.value).splitlines()
    flags = ["--checkpoint=", "--k=0:", "--k=8:", "--length_buckets=0:", "--prompts=0"]
    flags += ["--temperature=0.0", "--step=newest", "--seed=-1", "Fix:"]
    for line, flag in zip(lines[1:], flags, strict=True):
        assert line.strip().startswith(flag)
    for samples in (None, 0, 1, 3, 16):  # what nobody has set is not refused
        check_options(options := EvaluateOptions("x", samples=samples))
    assert [options.ks_of(n) for n in (0, 1, 3, 16)] == [(), (1,), (1,), (1, 4, 8)]
    assert EvaluateOptions("x", ks=(2,)).ks_of(4) == (2,)
    assert whole_numbers("4,1, 4", "k") == (1, 4)
    with pytest.raises(InputError, match="--k: got '1,x'"):
        whole_numbers("1,x", "k")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    write_gsm8k_parquet(folder / "test.parquet", 3)
    return write_model(folder / "qwen3", "qwen3")


def test_a_model_folder_needs_data_and_reward(model):
    with pytest.raises(InputError, match="Fix: set --data and --reward"):
        evaluate_saved(EvaluateOptions(str(model)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(data="nope.parquet"), "nope.parquet does not exist"),
        (dict(reward="gsm9k()"), "did you mean gsm8k"),
        (dict(max_response_tokens=500), "the model's context is 256 tokens"),
        (dict(max_prompt_tokens=3), "no prompt is left: all 3 are longer than 3 tokens"),
    ],
)
def test_what_is_wrong_is_named(model, options, says):
    data = str(model.parent / "test.parquet")
    options = {"data": data, "reward": "gsm8k()", "max_response_tokens": 4, **options}
    with pytest.raises(InputError, match=says):
        evaluate_saved(EvaluateOptions(str(model), **options))


def test_prompts_need_an_answer_only_where_the_reward_reads_one(model, tmp_path):
    """Of evaluations, of samples and of labelled lines: prompts without one are read, and are too
    long."""
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "what is two and two?"}\n' * 3)
    given = dict(data=str(data), max_prompt_tokens=3, max_response_tokens=4)

    def evaluated(**reward):
        evaluate_saved(EvaluateOptions(str(model), **given, **reward))

    def sampled(**reward):
        rejection_sample(RejectionOptions(str(model), str(tmp_path / "x.jsonl"), **given, **reward))

    def labelled(**reward):
        label_saved(LabelOptions((str(model),), str(tmp_path / "labels"), **given, **reward))

    for command in (evaluated, sampled, labelled):
        with pytest.raises(InputError, match="no prompt is left: all 3"):
            command(reward="light_rewards.begins_even")
        with pytest.raises(InputError, match="lacks the column 'ground_truth'"):
            command(reward="gsm8k()")


def test_folders_that_hold_no_policy(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        load_policy(tmp_path / "none")
    with pytest.raises(InputError, match="config.json does not exist"):
        load_policy(tmp_path)
    (tmp_path / "config.json").write_text('{"a": 1}')
    with pytest.raises(InputError, match="neither a run's nor a Hugging Face model's"):
        load_policy(tmp_path)
    (tmp_path / "config.json").write_text('{"dataflow": "grpo", "stps": 1}')
    with pytest.raises(InputError, match="stps: no such field; did you mean steps"):
        load_policy(tmp_path)
    (tmp_path / "config.json").write_text('{"dataflow": "grpo", "steps": 1}')
    with pytest.raises(InputError, match="holds no checkpoint"):
        load_policy(tmp_path)
    assert not (tmp_path / "checkpoints").exists()  # nothing is written into a run's folder


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_json(model, tmp_path, rljax_command):
    flags = [
        f"--checkpoint={model}",
        f"--data={model.parent / 'test.parquet'}",
        "--reward=gsm8k(method='flexible', format_score=0.5)",
        "--samples=2",
        "--k=1,2",
        "--max_response_tokens=4",
        f"--against={model}",
        "--length_buckets=3,1",
        f"--compilation_cache={jax.config.jax_compilation_cache_dir}",
        f"--out={tmp_path / 'new' / 'out.json'}",
    ]
    code, out, err = rljax_command("evaluate", *flags)
    assert code == 0, err[-2000:]
    result = json.loads((tmp_path / "new" / "out.json").read_text())
    for name in ("greedy_accuracy", "mean@2", "pass@1", "pass@2", "best_of@2", "maj@2"):
        assert name in out
        value = result["metrics"][name]
        assert value["n"] == 3 and value["low"] <= value["value"] <= value["high"]
    assert result["metrics"]["extraction_failed_fraction"] in (0, 1 / 3, 2 / 3, 1)
    assert "extraction_failed_fraction" in out
    assert result["prompts"]["kept"] == 3 and result["step"] is None
    assert out.count("pass@1/tokens>3") == 3  # of each policy, and of the difference
    # Of three differences that are all 0.
    expected = {"value": 0.0, "low": -0.5615, "high": 0.5615, "n": 3}
    assert result["difference"]["pass@1"] == pytest.approx(expected, abs=1e-4)

    code, _, err = rljax_command("evaluate", f"--checkpoint={model}/nope", "--k=9")
    assert code == 2 and err.startswith("error: these flags cannot be used")
    assert "Traceback" not in err and "--k=9" in err
