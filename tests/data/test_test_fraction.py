"""data.test_fraction: a part of a file that no step, demonstration or sample of a run ever sees."""

import json
import random

import jax
import numpy as np
import pytest

import rljax
from rljax.config import Config
from rljax.config.policy_options import EvaluateOptions, RejectionOptions
from rljax.data.offline.rows import load_rows
from rljax.data.online.encoded import load_data
from rljax.data.rows.sources import load_demonstrations, load_prompts
from rljax.data.rows.split import held_out_fraction, prompt_text
from rljax.data.text.tokenizer import CharTokenizer
from rljax.datagen.preferences import sample_comparisons
from rljax.datagen.rejection import rejection_sample
from rljax.errors import InputError
from rljax.evaluation.saved import evaluate_saved
from rljax.policies import load_named_policy
from rljax.validation import validate

CHARS = CharTokenizer("0123456789abcdefghijklmnopqrstuvwxyz: +=?>")
COUNT, FRACTION = 200, 0.25


def said(text, answer):
    return [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


# A row of each form, of question i and draw j.
FORMS = {
    "prompts": lambda i, j: {"prompt": f"q{i}:", "ground_truth": str(j)},
    "examples": lambda i, j: {"messages": said(f"q{i}:", f"a{j}")},
    "completions": lambda i, j: {"prompt": f"q{i}:", "completion": f"a{j}"},
    "texts": lambda i, j: {"text": f"q{i} a{i}"},
    "pairs": lambda i, j: {"chosen": said(f"q{i}:", f"a{j}"), "rejected": said(f"q{i}:", "no")},
    "unpaired": lambda i, j: {"prompt": f"q{i}:", "completion": f"a{j}", "label": bool(j)},
    "trajectories": lambda i, j: {"prompt": f"q{i}:", "completion": f"a{j}", "reward": 1.0},
    "stepwise": lambda i, j: {"prompt": f"q{i}:", "completions": ["a"], "labels": [True]},
}


def write(path, form, order=None, more=0):
    rows = [FORMS[form](i, j) for i in range(COUNT + more) for j in range(2)]
    random.Random(order).shuffle(rows) if order else None
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def load(form, path, split, fraction=FRACTION):
    if form == "prompts":
        return load_prompts(path, split, test_fraction=fraction)
    if form == "texts":
        return load_demonstrations(path, split, test_fraction=fraction)
    kind = "examples" if form == "completions" else form
    return load_rows(path, split, kind, test_fraction=fraction)


@pytest.mark.parametrize("form", FORMS)
def test_a_prompt_is_on_one_side_whatever_stands_around_it(tmp_path, form):
    path = write(tmp_path / "rows.jsonl", form)
    train, test = (load(form, path, split) for split in ("train", "test"))
    assert len(train) + len(test) == 2 * COUNT
    sides = [{prompt_text(record) for record in part} for part in (train, test)]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == COUNT
    assert abs(len(sides[1]) / COUNT - FRACTION) < 0.1
    assert sorted(record["index"] for record in (*train, *test)) == list(range(2 * COUNT))
    other = write(tmp_path / "more.jsonl", form, order=3, more=20)
    for split, side in zip(("train", "test"), sides, strict=True):
        assert side <= {prompt_text(record) for record in load(form, other, split)}
    # A larger share holds what a smaller one does.
    assert sides[1] <= {prompt_text(r) for r in load(form, path, "test", 2 * FRACTION)}


@pytest.mark.slow
def test_a_run_trains_on_one_side_and_evaluates_on_the_other(tmp_path):
    path = write(tmp_path / "rows.jsonl", "completions")
    rows = [json.loads(line) for line in open(path)]
    with_truth = [{**row, "answer": "a"} for row in rows]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, with_truth)))
    config = Config()
    config.data.train, config.data.test_fraction = str(tmp_path / "prompts.jsonl"), FRACTION
    config.sft.steps, config.reward.function = 1, "exact_match()"
    data = load_data(config, CHARS)
    trained = {p.prompt_text for p in data.prompts}
    held = {p.prompt_text for p in data.test_prompts}
    shown = {CHARS.decode(ids[: np.argmax(mask)]) for ids, mask in data.examples}
    assert held and not held & trained and shown == trained
    assert any("test prompts kept" in note for note in data.notes)
    # A task beside it has a test split of its own.
    config.sft.steps, config.data.sources = 0, ("sort_digits()",)
    held = load_data(config, CHARS).test_prompts
    assert {p.source for p in held} == {config.data.train, "sort_digits()"}
    offline = Config(dataflow="sft")
    offline.data.train, offline.data.test_fraction, offline.offline.max_tokens = path, FRACTION, 32
    data = load_data(offline, CHARS, "examples")
    sizes = len(data.prompts), len(data.held_out)
    assert sum(sizes) == 2 * COUNT and sizes[1] > 50


def test_what_says_nothing_is_refused(tmp_path):
    path = write(tmp_path / "rows.jsonl", "prompts")
    assert load_prompts(path, "train", test_fraction=0.0)  # off: all of them
    for more, says in (
        (dict(train=path, test_fraction=1.0), "from 0 .off. to below 1"),
        (dict(train=path, test=path, test_fraction=0.1), "data.test names the held-out rows"),
        (dict(train="sort_digits()", test_fraction=0.1), "no source is a file"),
    ):
        config = Config(model=str(tmp_path))
        for name, value in more.items():
            setattr(config.data, name, value)
        with pytest.raises(InputError, match=says):
            validate(config)
    with pytest.raises(InputError, match="no row is left for testing.*test_fraction=1e-06"):
        load_prompts(path, "test", test_fraction=1e-6)
    config = Config()
    config.data.train, config.data.test_fraction = path, 0.5
    assert held_out_fraction(config, path) == 0.5
    assert held_out_fraction(config, "sort_digits()") == 0 == held_out_fraction(config, "b.jsonl")


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    """(folder of a run, its data, the prompts that it held out)."""
    folder = tmp_path_factory.mktemp("held_out")
    rows = [{"prompt": f"q{i}:", "completion": "a", "answer": "a"} for i in range(40)]
    data = folder / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    CHARS.save(folder / "tokenizer")
    config = Config(
        model="decoder(layers=1, embed=16, mlp=32, heads=2, kv_heads=2, head_dim=8)",
        dataflow="sft",
        steps=1,
        trackers=(),
        run_dir=str(folder / "run"),
        tokenizer=str(folder / "tokenizer"),
    )
    config.data.train, config.data.test_fraction = str(data), FRACTION
    config.data.max_prompt_tokens, config.sampler.max_response_tokens = 8, 2
    config.offline.examples_per_step, config.offline.max_tokens = 8, 8
    config.reward.function, config.reward.workers = "exact_match()", 1
    rljax.train(config, devices=jax.devices()[:1])
    held = {r["prompt"] for r in load_prompts(str(data), "test", test_fraction=FRACTION)}
    return config.run_dir, str(data), held


def prompts_of(file):
    return {json.loads(line)["prompt"] for line in file.read_text().splitlines()}


@pytest.mark.slow
def test_what_a_run_held_out_is_evaluated(held_out, tmp_path):
    run, _, held = held_out
    answers = tmp_path / "answers.jsonl"
    evaluate_saved(EvaluateOptions(run, samples=0, answers=str(answers)))
    assert prompts_of(answers) == held


@pytest.mark.slow
def test_what_a_run_held_out_is_never_sampled_for_training(held_out, tmp_path):
    run, _, held = held_out
    samples = tmp_path / "all.jsonl"
    rejection_sample(
        RejectionOptions(run, str(tmp_path / "best.jsonl"), samples=1, trajectories=str(samples))
    )
    sampled = prompts_of(samples)
    assert sampled and not sampled & held


@pytest.mark.slow
def test_what_a_run_held_out_is_never_compared(held_out):
    run, data, held = held_out
    compared = sample_comparisons(load_named_policy(run), data)
    assert compared and not {row["prompt"] for row in compared} & held


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_longer_conversation_is_on_one_side_however_it_is_read(tmp_path, suffix):
    """As a prompt up to its last answer, as a demonstration, as ShareGPT: by its first turns."""
    turns = [[*said(f"hello {i}", "hi"), *said(f"q{i}", str(i))] for i in range(COUNT)]
    speakers = {"user": "human", "assistant": "gpt"}
    rows = {
        "own": [{"messages": one} for one in turns],
        "sharegpt": [
            {"conversations": [{"from": speakers[m["role"]], "value": m["content"]} for m in one]}
            for one in turns
        ],
    }
    held = []
    for name, some in rows.items():
        path = tmp_path / f"{name}{suffix}"
        path.write_text(json.dumps(some) if suffix == ".json" else "\n".join(map(json.dumps, some)))
        test = load_prompts(str(path), "test", test_fraction=FRACTION)
        shown = load_demonstrations(str(path), "train", test_fraction=FRACTION)
        asked = {record["prompt"][0]["content"] for record in test}
        assert len(test) + len(shown) == COUNT and 20 < len(test) < 80
        assert asked.isdisjoint(record["messages"][0]["content"] for record in shown)
        held.append(asked)
    assert held[0] == held[1]


def test_a_file_is_the_same_however_its_path_is_written(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"q{i}:", "completion": "a", "ground_truth": "a"} for i in range(COUNT)]
    path.write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.jsonl").symlink_to(path)
    config = Config()
    config.data.train, config.data.test_fraction = "rows.jsonl", FRACTION
    config.sft.steps, config.sft.data = 1, "./rows.jsonl"
    config.pretraining.data = str(tmp_path / "link.jsonl")
    assert all(
        held_out_fraction(config, spec) == FRACTION
        for spec in (str(path), config.sft.data, config.pretraining.data)
    )
    assert held_out_fraction(config, str(tmp_path / "other.jsonl")) == 0.0
    config.reward.function = "exact_match()"
    data = load_data(config, CHARS)
    every = [*data.examples, *data.pretraining]
    shown = {CHARS.decode(ids.tolist()) for ids, _ in every}
    asked = [prompt.prompt_text for prompt in data.test_prompts]
    assert every and asked and not [q for q in asked if any(q in text for text in shown)]
