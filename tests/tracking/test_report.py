"""The report: claims only what intervals support, escapes everything, survives every run folder."""

import html.parser
import json
import math
import re
import urllib.parse

import numpy as np
import pytest
from explained import declared

from rljax.errors import InputError
from rljax.metric import Metric
from rljax.report.page import write_report
from rljax.report.run_folder import Estimate, change_in_words, difference, estimate, read_run
from rljax.report.samples import best_and_worst
from rljax.tracking import charts
from rljax.tracking.meanings import Meanings
from rljax.tracking.trackers import open_tracking


class Checker(html.parser.HTMLParser):
    """Fails on unbalanced tags, scripts, event handlers, and anything loaded from elsewhere."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.open, self.text = folder, [], []

    def handle_starttag(self, tag, attributes):
        assert tag not in {"script", "link", "iframe", "img", "object", "form"}, tag
        for name, value in attributes:
            assert not name.startswith("on") and name != "src", (tag, name, value)
            if name == "href":  # of the run's own files, beside the page
                assert tag == "a" and (self.folder / urllib.parse.unquote(value)).exists(), value
                assert ":" not in value and not value.startswith(("/", "#")), value
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag
        self.text += [" "] if tag in {"th", "td"} else []

    def handle_data(self, data):
        if self.open[-1:] not in (["style"], ["title"]):
            self.text.append(data)


def _text(folder, page=None):
    """The visible text of the folder's report, or of another page, after checking it."""
    page = (page or write_report(folder)).read_text(encoding="utf-8")
    assert "http://" not in page and "https://" not in page and "url(" not in page
    assert not re.search(r'(points|cx|cy|x|y|width)="[^"]*(nan|inf)', page)
    checker = Checker(folder)
    checker.feed(page)
    checker.close()
    assert not checker.open
    return " ".join("".join(checker.text).split())


def _write(folder, rows=(), samples=(), **files):
    declared()  # loads the modules that declare metrics
    with open_tracking([], folder, {}, meanings=Meanings(folder, {})) as tracking:
        for step, row in rows:
            tracking.log(step, row)
        for step, row in samples:
            tracking.samples(step, [row])
    for name, data in files.items():
        (folder / f"{name}.json").write_text(json.dumps(data))
    return folder


def _sample(reward, **other):
    return {"prompt": "p", "response": f"r{reward}", "reward": reward, "status": "ok", **other}


def _rows(sft=20, rl=100):
    random = np.random.default_rng(0)
    for step in range(1, sft + 1):
        yield step, {"phase_rl": 0, "loss": 2 - step / 20, "time/learn_s": 1.0, "grad_norm": 1.0}
    for step in range(sft + 1, sft + rl + 1):
        row = {
            "phase_rl": 1,
            "reward/mean": random.normal(0.5, 0.1),
            "loss": random.normal(0, 0.01),
            "entropy": 1.0,
            "ref_kl/k3": 1e-3,
            "time/generate_s": 3.0,
            "time/learn_s": 1.0,
            "odd/metric": 4.0,
            "grad_norm": math.nan if step == 60 else 0.5,
        }
        if step % 20 == 0:
            row |= {"eval/accuracy": 0.5, "eval/accuracy_low": 0.4, "eval/accuracy_high": 0.6}
        yield step, row


# --- what may be claimed ---


def _wilson(count, n, z=1.959964):
    p = count / n
    middle, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Estimate(p, (middle - spread) / (1 + z * z / n), (middle + spread) / (1 + z * z / n), n)


@pytest.mark.parametrize(
    "after, before, low, high",
    [  # Newcombe 1998, Statistics in Medicine 17, table II, method 10
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((6, 7), (2, 7), 0.0582, 0.8062),
        ((5, 56), (0, 29), -0.0381, 0.1926),
        ((0, 10), (0, 20), -0.1611, 0.2775),
    ],
)
def test_difference_interval_equals_the_published_one(after, before, low, high):
    change = difference(_wilson(*before), _wilson(*after))
    assert (change.low, change.high) == (
        pytest.approx(low, abs=6e-5),
        pytest.approx(high, abs=6e-5),
    )


@pytest.mark.parametrize(
    "low, high, word",
    [
        (0.01, 0.2, "improved"),
        (-0.2, -0.01, "fell"),
        (-0.01, 0.2, "no significant change"),
        (0.0, 0.2, "no significant change"),
        (-0.2, 0.0, "no significant change"),
        (None, None, "no significant change"),
    ],
)
def test_verdict(low, high, word):
    assert change_in_words(Estimate(0.0, low, high)) == word


@pytest.mark.parametrize(
    "data",
    [
        {"value": 0.5, "low": math.nan, "high": 0.6},
        {"value": 0.5, "low": 0.6, "high": 0.4},
        {"value": 0.5, "low": "0.4", "high": None},
        {"value": 0.5},
        0.5,
    ],
)
def test_a_broken_interval_is_no_interval(data):
    assert estimate(data).low is None
    change = difference(estimate(data), Estimate(0.9, 0.89, 0.91))
    assert change_in_words(change) == "no significant change"


def _interval(value, half):
    return {"value": value, "low": value - half, "high": value + half, "n": 200}


@pytest.mark.parametrize(
    "summary",
    [
        {"accuracy_before": _interval(0.5, 0.07), "accuracy_after": _interval(0.56, 0.07)},
        {"accuracy_before": 0.1, "accuracy_after": 0.9},
        {"accuracy_before": _interval(0.1, 0.01), "accuracy_after": 0.9},
        {
            "accuracy_before": _interval(0.1, 0.01),
            "accuracy_after": _interval(0.9, 0.01),
            "difference": {"value": 0.8, "low": -0.1, "high": 0.9},
        },
    ],
)
def test_never_says_improved_when_the_interval_crosses_zero(tmp_path, summary):
    text = _text(_write(tmp_path / "run", _rows(), summary=summary)).lower()
    assert "no significant change" in text
    assert "improved" not in text and "fell" not in text


def test_headline_states_both_values_with_intervals(tmp_path):
    summary = {
        "accuracy_before": {"value": 0.302, "low": 0.263, "high": 0.343, "n": 500},
        "accuracy_after": {"value": 0.618, "low": 0.575, "high": 0.66, "n": 500},
        "wall_s": 5021.3,
    }
    text = _text(_write(tmp_path / "up", _rows(), summary=summary, config={"name": "my run"}))
    assert "Accuracy 30.2 % [26.3, 34.3] → 61.8 % [57.5, 66.0]" in text
    assert "Accuracy improved after RL on 500 problems" in text and "1 h 23 min" in text
    assert text.startswith("my run")
    swapped = {
        "accuracy_before": summary["accuracy_after"],
        "accuracy_after": summary["accuracy_before"],
    }
    down = _text(_write(tmp_path / "down", _rows(), summary=swapped))
    assert "Accuracy fell after RL" in down and "improved" not in down


def test_a_run_that_was_stopped_has_no_evaluation_of_its_end(tmp_path):
    summary = {"accuracy_before": _interval(0.3, 0.02), "accuracy_after": None}
    text = _text(_write(tmp_path / "run", _rows(), summary=summary))
    assert "No evaluation after the last step of RL" in text and "30.0" not in text


def test_the_order_is_headline_completions_charts_and_the_facts_are_after_the_headline(tmp_path):
    summary = {"accuracy_before": _interval(0.3, 0.02), "accuracy_after": _interval(0.6, 0.02)}
    config = {"model": "decoder(layers=2)", "dataflow": "grpo"}
    folder = _write(
        tmp_path, _rows(), [(5, _sample(1.0)), (5, _sample(0.0))], summary=summary, config=config
    )
    text = _text(folder)
    places = [
        text.index(part)
        for part in (
            "Accuracy 30.0",
            "model decoder",
            "Best completions",
            "Does it learn?",
            "What the metrics",
        )
    ]
    assert places == sorted(places)
    assert "Before and after" not in text  # the headline says it
    summary |= {"win_rate_before": 0.4, "win_rate_after": 0.5}
    both = _text(_write(tmp_path / "both", _rows(), summary=summary))
    assert "Before and after" in both and "win rate" in both


def test_flat_charts_are_folded_and_named_with_their_value(tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        (
            i,
            {
                "phase": "rl",
                "reward/mean": 0.25,
                "entropy": 1.0 / i,
                "pg_clipfrac": 0.0,
                "ppo_kl": 1e-14 * rng.normal(),
                "lr": 1e-6,
                "loss": 1e-6 * rng.normal(),
                "response/truncated_fraction": 1.0,
                "grad_norm": 1.0 + 1e-3 * (i == 7),
            },
        )
        for i in range(1, 21)
    ]
    _write(tmp_path, rows)
    page = write_report(tmp_path).read_text()
    folds = re.findall(r"<summary>(Flat: [^<]*)</summary>(.*?)</details>", page, re.S)
    assert [title for title, _ in folds] == [
        "Flat: KL of the update 0, Clipped 0, Truncated 1",
        "Flat: Learning rate 1.0e-06",
    ]
    assert [inside.count("<figure>") for _, inside in folds] == [3, 1]  # none is lost
    shown = re.sub(r"<details>.*?</details>", "", page, flags=re.S)
    for title in ("Reward", "Entropy", "Loss", "Gradient norm"):  # a flat reward is looked for
        assert f'class="name">{title} ' in shown, title
    short = _write(tmp_path / "short", rows[:2])
    assert "Flat: " not in write_report(short).read_text()


def test_what_ended_outside_of_its_healthy_range_is_listed_under_the_headline(tmp_path):
    sft = [(i, {"phase": "sft", "token_accuracy": 0.1, "positions_filled": 0.2}) for i in (1, 2)]
    rows = [
        (
            i,
            {
                "phase": "rl",
                "reward/mean": 0.5,
                "reward/std": 0.4,
                "ppo_k3": 0.5 / i,
                "response/truncated_fraction": i / 6,
                "my/metric": 9.0,
                "mismatch/probability_correlation": 0.1,
            },
        )
        for i in range(3, 7)
    ]
    _write(tmp_path, [*sft, *rows])
    page = write_report(tmp_path).read_text()
    listed = re.search(r'<section class="outside">(.*?)</section>', page)[1]
    found = re.findall(r"<code>([^<]*)</code> <b>([^<]*)</b>", listed)
    assert dict(found) == {
        "ppo_k3": "0.08333",
        "response/truncated_fraction": "1",
        "mismatch/probability_correlation": "0.1",
    }
    assert (
        page.index('class="headline') < page.index('class="outside"') < page.index("Does it learn?")
    )
    # The charts mark the same, and what was outside at the end of its own phase.
    assert page.count('<b class="unhealthy">Outside') == 3 + 1
    healthy = _write(tmp_path / "healthy", [(1, {"reward/mean": 0.5, "ppo_k3": 0.01})])
    assert "outside" not in _text(healthy).lower()


@pytest.mark.parametrize(
    "healthy, inside, outside",
    [
        ("below 0.1; more: a higher limit", (0.0, 0.1), (0.11, 1.0, math.inf)),
        ("above 0, or nothing is learned", (0.01, 5.0), (0.0, -1.0)),
        ("above -10", (-9.0, 0.0), (-10.0, -11.0)),
        ("0.3 to 0.7, or weigh the kinds", (0.3, 0.5, 0.7), (0.2, 0.8)),
        ("0", (0.0,), (1.0, -1.0)),
        ("0; more: filters leave nothing", (0.0,), (3.0,)),
        ("below 1 % of the samples", (0.0, 50.0), ()),  # a share of what it does not say
        ("below 0.1 with a KL term; above 1 it is another model", (0.0, 0.5, 2.0), ()),
        ("at most rollouts.ahead steps of groups", (0.0, 1e9), ()),
        ("below a third of slots/live", (1e9,), ()),
        ("1 is fully on-policy", (8.0,), ()),
        ("rises", (-1.0, 1.0), ()),
        ("", (1.0,), ()),
    ],
)
def test_a_text_of_what_is_healthy_is_read_as_a_range_where_it_is_one(healthy, inside, outside):
    known = Metric("", "", healthy)
    assert [known.outside(value) for value in inside] == [False] * len(inside)
    assert [known.outside(value) for value in outside] == [True] * len(outside)
    assert not known.outside(math.nan)


@pytest.mark.parametrize(
    "phases, config, name",
    [
        (["sft"], {"dataflow": "sft"}, "SFT"),
        (["preference"], {"algorithm": {"preference_loss": "dpo(beta=0.1)"}}, "DPO"),
        (["preference"], {}, "preference"),
        (["sft", "process_reward_model"], {}, "process reward model"),
        (["sft", "rl"], {"dataflow": "grpo"}, "RL"),
    ],
)
def test_the_report_names_the_training_that_ran(tmp_path, phases, config, name):
    rows = [(step, {"phase": phase, "loss": 1.0}) for step, phase in enumerate(phases, start=1)]
    summary = {"accuracy_before": _interval(0.3, 0.02), "accuracy_after": _interval(0.6, 0.02)}
    text = _text(_write(tmp_path / "run", rows, summary=summary, config=config))
    assert f"Accuracy improved after {name} on 200" in text
    without = _text(_write(tmp_path / "without", rows, config=config))
    assert f"No evaluation before and after {name}So no" in without
    assert name == "RL" or not re.search(r"\bRL\b", text + without)


def test_what_an_evaluation_logs_is_charted_together(tmp_path):
    row = {"eval/accuracy": 0.5, "eval/accuracy_low": 0.4, "eval/accuracy_high": 0.6}
    row |= {"eval/source/gsm8k": 0.7, "eval/source/math": 0.3, "eval/loss": 1.25}
    _write(tmp_path, [(step, {"phase": "rl", **row}) for step in (1, 2)])
    page = write_report(tmp_path).read_text(encoding="utf-8")
    chart = next(part for part in page.split("<figure") if "Evaluation accuracy" in part)
    assert all(name in chart for name in ("eval/accuracy", "eval/source/gsm8k", "eval/source/math"))
    assert "eval/loss" in next(part for part in page.split("<figure") if "Held-out loss" in part)
    assert "All other metrics" not in page


def test_a_recorded_paired_difference_is_used(tmp_path):
    summary = {
        "accuracy_before": _interval(0.50, 0.07),
        "accuracy_after": _interval(0.56, 0.07),
        "difference": {"value": 0.06, "low": 0.02, "high": 0.10},
    }
    assert "difference +6.0 points [+2.0, +10.0]" in _text(_write(tmp_path, summary=summary))


# --- every run folder ---


def test_empty_and_missing_folders(tmp_path):
    with pytest.raises(InputError, match="no run has begun in this folder"):
        write_report(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "has not logged a step yet" in _text(tmp_path)
    with pytest.raises(InputError, match="no such run folder"):
        write_report(tmp_path / "nowhere")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match="no run has begun.*that of a Hugging Face model"):
        write_report(tmp_path / "hf")
    assert [p.name for p in (tmp_path / "hf").iterdir()] == ["config.json"]


def test_killed_run(tmp_path):
    _write(tmp_path, _rows(), [(110, _sample(1.0))])
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(tmp_path / name, "ab") as file:
            file.write(b'{"step": 121, "rew')
    (tmp_path / "summary.json").write_text('{"accuracy_before": 0.')
    text = _text(tmp_path)
    assert "No evaluation before and after RL" in text and "Last step: 120" in text
    assert "summary.json could not be read" in text and "reward 1" in text


def test_one_step_and_odd_values(tmp_path):
    row = {
        "loss": math.inf,
        "entropy": 1e308,
        "ppo_kl": -1e308,
        "reward/mean": 0.25,
        "ref_kl/k3": 0,
    }
    text = _text(_write(tmp_path, [(0, row)]))
    assert "reward/mean 0.25" in text and "no finite value" in text


def test_user_written_files_of_odd_shapes(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": "x"}\n{"a": 1}\n{"step": 1, "loss": "nan"}\n[]\n'
        f'{{"step": 1{"0" * 400}}}\n{{"step": 2, "loss": -1{"0" * 400}, "a": 1e999}}\n'
    )
    (tmp_path / "samples.jsonl").write_text('{}\n{"step": 2, "reward": "high"}\n{"step": null}\n')
    (tmp_path / "summary.json").write_text(
        '{"accuracy_before": [], "accuracy_after": "x", "wall_s": []}'
    )
    (tmp_path / "config.json").write_text("[1, 2]")
    assert "No evaluation before and after RL" in _text(tmp_path)


def test_sections_of_a_whole_run(tmp_path):
    samples = [(s, _sample(s / 100, status="timeout" if s == 90 else "ok")) for s in range(30, 120)]
    config = {"model": {"name": "tiny"}, "policy_loss": "ppo_clip(clip_high=0.28)"}
    text = _text(_write(tmp_path, _rows(), samples, config=config))
    for expected in (
        "Loss (SFT)",
        "Loss (RL)",
        "eval/accuracy 0.5",
        "Where the time went (RL)",
        "generate 75 %",
        "All other metrics (1)",
        "odd/metric",
        "Best completions",
        "Worst completions",
        "timeout 1 (1.1 %)",
        "Resolved config",
        "model tiny",
        "grad_norm step 60 not a finite number",
    ):
        assert expected in text, expected


def test_everything_from_a_run_is_escaped(tmp_path):
    evil = "</pre></details><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x00\udc80"
    sample = {"prompt": evil, "response": evil, "reward": 1.0, "ground_truth": evil, "status": "ok"}
    rows = [
        (step, {evil: 1.0, "eval/" + evil: 2.0, f"time/{evil}_s": 1.0, "phase": evil})
        for step in (1, 2)
    ]
    rows += [(3, {"reward/timeout" + evil: 1.0, "phase": "rl"})]
    samples = [(1, sample), (1, {**sample, "status": evil, "response": "x"})]
    summary = {
        f"{evil}_before": 0.1,
        f"{evil}_after": 0.2,
        "device": evil,
        "versions": {evil: evil},
    }
    summary |= {"skipped" + evil: evil}
    _write(tmp_path, rows, samples, summary=summary, config={"name": evil, evil: evil})
    assert "<script>alert(1)</script>" in _text(tmp_path)  # as text; the checker refuses the tag
    assert "<script" not in (tmp_path / "report.html").read_text(encoding="utf-8")


# --- reading ---


def test_rows_of_one_step_are_merged_and_phases_counted_on(tmp_path):
    rows = [(s, {"phase_rl": 0, "loss": s}) for s in (1, 2, 3)]
    rows += [(s, {"phase_rl": 1, "loss": 10 * s}) for s in (1, 2)]
    rows += [(2, {"eval/accuracy": 0.5}), (2, {"loss": 25})]
    run = read_run(_write(tmp_path, rows))
    assert run.columns("loss")[0].tolist() == [1, 2, 3, 4, 5]
    assert run.columns("loss")[1].tolist() == [1, 2, 3, 10, 25]
    assert run.columns("eval/accuracy")[0].tolist() == [5]
    assert run.phases() == ["sft", "rl"]


def test_best_and_worst_are_late_distinct_and_disjoint():
    early = [{**_sample(100.0), "step": 1}]
    late = [{**_sample(r / 10), "step": 90 + r} for r in range(10)] * 2
    failed = [{**_sample(50.0, status="error"), "step": 99}, {**_sample(math.nan), "step": 99}]
    best, worst = best_and_worst(
        early + [{**_sample(0.5), "step": s} for s in range(2, 60)] + late + failed
    )
    assert all(row["step"] > 40 and row["status"] == "ok" for row in best + worst)
    rewards = [row["reward"] for row in best + worst]
    ties, _ = best_and_worst([{**_sample(1.0, prompt=str(s)), "step": s} for s in range(40)])
    assert [row["step"] for row in ties] == [39, 38, 37, 36]  # the latest of equals
    assert best[0]["reward"] == 0.9 and worst[0]["reward"] == 0.0
    assert len(rewards) == len(set(rewards)) == 8
    assert best_and_worst([{**_sample(1.0), "step": 1}]) == ([{**_sample(1.0), "step": 1}], [])


# --- drawing ---


def _series(y, **options):
    return charts.Series("loss", np.arange(len(y)), np.asarray(y, float), **options)


def test_a_gap_in_the_data_is_a_gap_in_the_line():
    svg = charts.line_chart("t", "", [_series([1, 2, math.nan, 2, 1, math.inf, 3])])
    lines = re.findall(r'<polyline[^>]*points="([^"]*)"', svg)
    assert [len(line.split()) for line in lines] == [2, 2]
    assert svg.count("<circle") == 2  # the lone last value, and the mark of the last value


def test_long_series_are_thinned_and_keep_their_spike():
    y = np.zeros(100_000)
    y[54_321] = 7.0
    x, kept = charts.thin(np.arange(len(y)), y)
    assert len(x) <= charts.MAX_POINTS + 2 and kept.max() == 7.0 and 54_321 in x
    assert x[0] == 0 and x[-1] == len(y) - 1 and (np.diff(x) > 0).all()
    assert len(charts.line_chart("t", "", [_series(y)])) < 30_000


def test_points_stay_inside_the_box_and_up_is_up():
    svg = charts.line_chart("t", "", [_series([0, 5, 10])])
    (points,) = re.findall(r'<polyline[^>]*points="([^"]*)"', svg)
    x, y = np.array([p.split(",") for p in points.split()], float).T
    assert (np.diff(x) > 0).all() and (np.diff(y) < 0).all()
    assert x.min() >= charts.LEFT and x.max() <= charts.WIDTH - charts.RIGHT + 0.1
    assert y.min() >= charts.TOP and y.max() <= charts.HEIGHT - charts.BOTTOM


def test_band_is_drawn_around_the_points():
    y = np.array([0.4, 0.5])
    svg = charts.line_chart("t", "", [_series(y, low=y - 0.1, high=y + 0.1, dots=True)])
    (band,) = re.findall(r'<polygon[^>]*points="([^"]*)"', svg)
    edges = np.array([p.split(",") for p in band.split()], float)
    dots = np.array(re.findall(r'cy="([\d.]+)"', svg), float)
    assert len(edges) == 4 and len(dots) == 2
    assert edges[0, 1] < dots[0] < edges[3, 1]


def test_moving_average():
    y = np.array([0.0, 3.0, math.nan, 3.0, 0.0])
    np.testing.assert_allclose(charts._smooth(y), [1.5, 1.5, math.nan, 1.5, 1.5])


@pytest.mark.parametrize(
    "low, high", [(0, 1), (-3e-5, 2e-5), (17, 18.5), (0, 123456), (-1e300, 1e300)]
)
def test_ticks_are_few_inside_and_told_apart(low, high):
    marks = charts.ticks(low, high)
    labels = [charts.tick_label(mark, marks[1] - marks[0]) for mark in marks]
    assert 2 <= len(marks) <= 7 and len(set(labels)) == len(labels)
    assert all(low - 1e-9 <= mark <= high + 1e-9 for mark in marks)
    assert all(len(label) <= 9 for label in labels)


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0"),
        (-0.0, "0"),
        (3, "3"),
        (0.42131, "0.4213"),
        (5210, "5210"),
        (52_100, "52.1k"),
        (3.2e-6, "3.2e-06"),
        (7e9, "7G"),
        (-1.5e6, "-1.5M"),
        (math.nan, "nan"),
        (None, "-"),
        (1e308, "1.0e+308"),
    ],
)
def test_short(value, text):
    assert charts.short(value) == text


def test_sparkline():
    assert charts.sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert charts.sparkline([0, math.nan, 1], 8) == "▁ █"
    assert charts.sparkline([2, 2], 8) == "▁▁" and charts.sparkline([math.nan], 8) == ""
    assert len(charts.sparkline(range(1000), 20)) == 20


def test_dropped_prompts_stand_among_the_faults(tmp_path):
    rows = [(step, {"loss": 1.0, "data/dropped_overlong": 7.0 * step}) for step in (1, 2)]
    assert "data/dropped_overlong 2 steps, 1 to 2 largest value 14" in _text(_write(tmp_path, rows))
