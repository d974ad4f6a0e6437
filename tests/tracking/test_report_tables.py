"""Blocks of a report: accuracy by difficulty and source, expected against obtained, completions of
a prompt side by side, and what holds of every page's HTML."""

import html.parser
import json
import math
import re

import pytest

from rljax.report.comparison import write_comparison
from rljax.report.kinds import kinds_of
from rljax.report.page import write_report
from rljax.report.run_folder import read_run
from rljax.report.samples import of_prompts
from rljax.report.targets import TARGETS, config_of, differences, targets_of

EVIL = "<script>alert(1)</script><img src=http://evil.example/x>"


def made(
    folder,
    *,
    seed=0,
    model="decoder(layers=1)",
    data="sort_digits()",
    config="vapo:tiny",
    scores=(0.25, 0.5),
    **fields,
):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps(
            {
                "dataflow": "ppo",
                "model": model,
                "seed": seed,
                "steps": 2,
                "sft": {"steps": 0},
                "data": {"train": data, "test": ""},
                **fields,
            }
        )
    )
    rows = []
    for step, score in enumerate(scores):
        row = {"step": step, "phase": "rl", "reward/mean": score, EVIL: 1.0}
        for key, shift in (
            ("accuracy", 0.0),
            ("difficulty/hard", -0.125),
            ("difficulty/easy", 0.2),
            ("difficulty/medium", 0.0),
            ("pass@4", 0.25),
        ):
            value = score + shift
            row |= {
                f"eval/{key}": value,
                f"eval/{key}_low": value - 0.05,
                f"eval/{key}_high": value + 0.05,
            }
        rows.append(row)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = [
        {
            "step": 1,
            "prompt": f"p{EVIL}",
            "response": f"r{i}{EVIL}",
            "reward": reward,
            "prompt_mean": 0.4,
            "ground_truth": EVIL,
            "status": "ok",
            "phase": "rl",
        }
        for i, reward in enumerate((1.0, 0.5, -1.0))
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    command = f"python -m rljax train --config=configs/presets/{config} --config.seed={seed}"
    (folder / "starts.jsonl").write_text(json.dumps({"time": 1.0, "command": command}) + "\n")
    return folder


def texts(page: str) -> str:
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page)))


def test_easy_medium_hard_overall_before_and_after(tmp_path):
    page = texts(write_report(made(tmp_path / "a")).read_text())
    at = page.index("Accuracy by difficulty", page.index("Accuracy by difficulty") - 1)
    assert "easy medium hard overall" in page[at : at + 200]
    assert "first 45.0 % [40.0, 50.0] 25.0 % [20.0, 30.0] 12.5 % [7.5, 17.5] 25.0 %" in page
    assert "last 70.0 % [65.0, 75.0] 50.0 % [45.0, 55.0] 37.5 % [32.5, 42.5] 50.0 %" in page


def test_difficulties_stand_in_the_order_of_their_numbers(tmp_path):
    folder = made(tmp_path / "a")
    row = {f"eval/difficulty/level {i}": 0.5 for i in (10, 2, 1)}
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, **row}) + "\n")
    assert kinds_of([read_run(folder)], "difficulty") == ["level 1", "level 2", "level 10"]


def test_several_runs_are_averaged_with_an_interval_over_them(tmp_path):
    folders = [
        made(tmp_path / f"{i}", seed=i, scores=(0.25, last))
        for i, last in enumerate((0.4, 0.5, 0.6))
    ]
    page = texts(write_comparison(folders, tmp_path / "out.html").read_text())
    half = 4.302652729749462 * 0.1 / math.sqrt(3)  # Student's t, two degrees of freedom
    bounds = f"[{100 * (0.5 - half):.1f}, {100 * (0.5 + half):.1f}]"
    row = page[page.index("base (n = 3)") :][:120]
    assert row.startswith("base (n = 3) 70.0 % ") and f"50.0 % {bounds}" in row
    assert "Expected and obtained" in page and f"base: 50.0 % {bounds}" in page
    # Of none of them a summary says that the evaluation came after the last step.
    assert f"{bounds} at the last evaluation, which is not after the last step" in page


def test_the_config_is_read_from_the_command(tmp_path):
    run = read_run(made(tmp_path / "a"))
    for command, name in {
        "rljax train vapo --config.steps=2": "vapo",
        "rljax train --config configs/ppo_gsm8k.py --config.model='a b'": "ppo_gsm8k",
        "python my_script.py": "",
        "rljax train --config.steps=2": "",
        "rljax 'torn": "",
        "rljax compare --out=x": "compare_offline",
    }.items():
        run.starts[-1]["command"] = command
        assert config_of(run) == name, command


@pytest.mark.parametrize(
    "model, data, words",
    [
        ("decoder(layers=1)", "sort_digits()", "the model is decoder, not Qwen2.5-0.5B-Instruct"),
        ("/models/Qwen2.5-0.5B", "data/gsm8k/test.parquet", "not Qwen2.5-0.5B-Instruct"),
        ("/models/Qwen2.5-0.5B-Instruct", "math.jsonl", "the data is math.jsonl, not GSM8K"),
        ("/models/Qwen2.5-0.5B-Instruct", "hf://datasets/openai/gsm8k", ""),
    ],
)
def test_a_setting_is_the_same_only_with_the_published_model_and_data(tmp_path, model, data, words):
    run = read_run(made(tmp_path / "a", model=model, data=data, config="ppo_gsm8k.py"))
    (target,) = targets_of(run)
    assert target.value == 56.7
    found = differences(run, target)
    assert words in found and bool(found) == bool(words)
    page = texts(write_report(run.folder).read_text())
    said = f"not comparable: {words}" if words.startswith("the ") else words
    assert "56.7 % 50.0 % [45.0, 55.0]" in page and (said or "yes: same model and data") in page


def test_published_numbers_are_stored_with_their_sources():
    values = {target.value for target in TARGETS if target.configs == ("vapo",)}
    assert values == {60.4, 86.7, 55.0, 77.3, 70.0}
    dqo = [t.value for t in TARGETS if t.what.startswith("DQO,") and "Qwen2-7B" in t.model]
    assert dqo == [87.26, 84.69, 51.72, 50.18]
    gemma = [t.value for t in TARGETS if t.what.startswith("DQO,") and "Gemma" in t.model]
    assert gemma == [63.91, 64.06, 24.90, 24.68]
    both = {t.benchmark: t.value for t in TARGETS if t.what.startswith("ValueInit and")}
    assert (both["LiveCodeBench overall"], both["in-house overall"]) == (29.8, 35.8)
    assert all(target.source and 0 < target.value < 100 for target in TARGETS)


def test_a_run_of_another_config_has_no_expected_numbers(tmp_path):
    page = write_report(made(tmp_path / "a", config="grpo.py")).read_text()
    assert "Expected and obtained" not in page


def test_best_mean_and_worst_of_a_prompt_stand_side_by_side():
    def rows(prompt, rewards, **fields):
        return [
            {"step": 1, "prompt": prompt, "response": f"{prompt}{r:g}", "reward": r, **fields}
            for r in rewards
        ]

    samples = rows("a", (0.0, 0.25, 1.0)) + rows("b", (0.0, 5.0, 1.0, 2.0)) + rows("c", (1.0, 1.0))
    found = texts(of_prompts(samples, 2))
    assert re.findall(r"\b[abc]\d[\d.]*", found) == ["b5", "b2", "b0", "a1", "a0.25", "a0"]
    assert "nearest to the mean, 2: reward 2" in found and "c1" not in found
    assert re.findall(r"\b[ab]\d\S*", texts(of_prompts(samples, 1))) == ["b5", "b2", "b0"]
    told = texts(of_prompts(rows("a", (0.0, 1.0), prompt_mean=0.1), 1))
    assert "nearest to the mean, 0.1: reward 0 " in told
    assert of_prompts(rows("c", (1.0, 1.0)), 3) == ""
    failed = rows("a", (1.0,)) + [{**rows("a", (0.0,))[0], "status": "timeout"}]
    assert of_prompts(failed, 3) == ""


@pytest.mark.parametrize("kind", ["run", "comparison"])
def test_a_page_has_both_schemes_fits_a_phone_and_asks_nobody(tmp_path, kind):
    folders = [made(tmp_path / f"{i}{EVIL[:8]}", seed=i) for i in range(2)]
    page = (
        write_report(folders[0])
        if kind == "run"
        else write_comparison(folders, tmp_path / "out.html")
    ).read_text()
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert "color-scheme: light dark" in page and "@media (prefers-color-scheme: dark)" in page

    class Reader(html.parser.HTMLParser):
        def __init__(self):
            super().__init__()
            self.tags, self.targets, self.tables = set(), [], 0

        def handle_starttag(self, tag, attributes):
            self.tags.add(tag)
            self.targets += [
                value
                for name, value in attributes
                if name in ("src", "href", "data", "action", "srcset")
            ]

    reader = Reader()
    reader.feed(page)
    assert not reader.tags & {"script", "img", "link", "iframe", "object", "embed", "base"}
    assert all(not re.match(r"\w+:|//", target or "") for target in reader.targets)
    assert "@import" not in page and not re.search(r"url\(", page)
    assert "<script" not in page and html.escape(EVIL) in page  # what was logged is text
    # A table is as wide as it likes within a box that scrolls, so the page never does.
    assert all(
        page[: m.start()].endswith('<div class="scroll">') or 'class="origin"' in m[0]
        for m in re.finditer(r"<table[^>]*>", page)
    )
