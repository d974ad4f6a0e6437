"""Judges and rubrics in a run: a model on the mesh as the judge, rubrics in checkpoints, counts of
failures by kind, and what a config may ask for."""

import json
import math
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from judge_server import completion, serving
from tiny_run import assert_same_run, metrics_rows, saved_state, tiny_config
from tiny_tokenizer import write_tokenizer

from rljax.build import text_scorer
from rljax.components import resolve
from rljax.config import HOMES, Config
from rljax.data.tokenizer import load_tokenizer
from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models.huggingface import load_config, load_params, save_params
from rljax.models.model import Model
from rljax.rewards.judges import JUDGE_TEMPLATE, message
from rljax.roles import MeshJudge
from rljax.roles.reward import error_kind
from rljax.train import train
from rljax.validation import validate

SAMPLES = [
    {"prompt": f"question {i}", "response": "an answer " * (1 + 9 * (i % 2)), "ground_truth": "42",
     "extra_info": {"rubrics": ["is short", {"title": "lies", "weight": -1.0}][: 1 + i % 2]}}
    for i in range(5)
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A chat model of random weights whose words are far from equally likely."""
    path = write_tokenizer(tmp_path_factory.mktemp("judge"))
    words = len(json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]) + 8
    text = "decoder(layers=1, embed=16, mlp=32, heads=2, kv_heads=2, head_dim=8, init_std=0.5)"
    model = Model(resolve(text, HOMES["model"])(words), make_mesh())
    save_params(path, model, model.init(jax.random.key(3)), bos_id=None, eos_ids=(1,), pad_id=0)
    return path


def scorer(folder, text, **fields):
    config = Config(model=str(folder))
    config.reward.judge_model, config.batch.tokens_per_microbatch = str(folder), 2048
    for name, value in fields.items():
        setattr(config.reward, name, value)
    return text_scorer(config, text, make_mesh())


def by_hand(folder, messages, grades) -> float:
    """The expected grade from the logits of the whole row, on one device."""
    tokenizer = load_tokenizer(folder)
    model = Model(load_config(str(folder)), make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    params = load_params(str(folder), model)
    ids = np.array([tokenizer.encode_chat(messages)], np.int32)
    from rljax.batch import Batch

    ones = np.ones_like(ids)
    positions = np.arange(ids.shape[1], dtype=np.int32)[None]
    batch = Batch(ids, ones, positions, ones.astype(np.float32))
    logits = np.asarray(jax.jit(model.logits)(params, batch), np.float64)[0, -1]
    words = [tokenizer.encode(grade)[0] for grade in grades]
    p = np.exp(logits[words] - logits[words].max())
    everything = np.exp(logits - logits.max()).sum()
    mass = np.exp(logits[words] - logits.max()).sum() / everything
    return float((p / p.sum()) @ np.linspace(0, 1, len(grades))), float(mass)


def test_a_model_on_the_mesh_judges_by_the_chances_of_its_grades(folder):
    judge = scorer(folder, "judge(scale=2)")
    found = judge.score(SAMPLES)
    assert [s.status for s in found] == ["ok"] * 5
    for sample, score in zip(SAMPLES, found, strict=True):
        values = {k: sample[k] for k in ("prompt", "response", "ground_truth")}
        answer = "Answer with one of 0, 1, 2 and nothing else."
        asked = message(JUDGE_TEMPLATE, answer, "2", values)
        want, mass = by_hand(folder, asked, "012")
        assert score.value == pytest.approx(want, abs=1e-4)
        assert score.parts["grade_mass"] == pytest.approx(mass, rel=1e-3)
    assert np.std([s.value for s in found]) > 1e-3
    # Neither its neighbours nor the padding change a verdict.
    assert judge.score(SAMPLES[1:2])[0].value == pytest.approx(found[1].value, abs=1e-5)
    assert judge.score([]) == []


def test_a_model_on_the_mesh_judges_rubrics(folder):
    judge = scorer(folder, "rubric(normalise=False, template='{rubric} of {response}? {answer}')")
    found = judge.score([*SAMPLES, {**SAMPLES[0], "extra_info": {}}])
    assert found[-1].status == "error" and "no rubrics" in found[-1].message
    for i, score in enumerate(found[:-1]):
        parts = score.parts
        count = 1 + i % 2
        assert ("rubric_1" in parts) == (count == 2) and "rubric_2" not in parts
        want = parts["rubric_0"] - (parts["rubric_1"] if count == 2 else 0.0)
        assert score.value == pytest.approx(want) and 0 < parts["grade_mass"] < 1
        words = json.dumps(SAMPLES[i]["response"])
        text = f'"is short" of {words}? Answer with one of 0, 1, 2 and nothing else.'
        want, _ = by_hand(folder, [{"role": "user", "content": text}], "012")
        assert parts["rubric_0"] == pytest.approx(want, abs=1e-4)


def test_grades_are_words_of_one_token_each(folder):
    words = scorer(folder, "judge()", judge_grades=("a", "b")).score(SAMPLES[:1])
    turned = scorer(folder, "judge()", judge_grades=("b", "a")).score(SAMPLES[:1])
    assert 0 < words[0].value < 1 and words[0].value != pytest.approx(turned[0].value)
    for text, fields in (
        ("judge()", {}), ("judge(scale=2.5)", {}), ("judge()", {"judge_grades": ("yes", "no")}),
    ):  # fmt: skip
        with pytest.raises(InputError, match="grade|scale"):
            scorer(folder, text, **fields)
    assert not isinstance(scorer(folder, "exact_match"), MeshJudge)


def test_what_the_judge_cannot_hold_or_say_is_an_error(folder, tmp_path):
    judge = scorer(folder, "judge(scale=2)")
    limit = judge.model.config.max_tokens
    assert limit < 10**6
    long = {**SAMPLES[0], "response": "\x01\x02" * limit}
    found = judge.score([SAMPLES[0], long, {**SAMPLES[0], "response": "\ud800"}])
    assert [s.status for s in found] == ["ok", "error", "ok"]
    assert f"holds {limit}" in found[1].message and math.isnan(found[1].value)
    judge.params = jax.tree.map(lambda x: x * np.float32(np.nan), judge.params)
    assert [s.status for s in judge.score(SAMPLES)] == ["error"] * 5
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    with pytest.raises(InputError, match="no chat template"):
        scorer(bare, "judge(scale=2)")


# -- runs --

PARTS = """
import zlib

def by_rubric(response, extra_info) -> dict:
    '''A verdict per rubric, some function of the two texts; every seventh response fails.'''
    if not extra_info or not extra_info.get("rubrics"):
        return {"score": float(len(response) % 2)}
    values = [
        zlib.crc32((response + r["description"]).encode()) % 3 / 2 for r in extra_info["rubrics"]
    ]
    if zlib.crc32(response.encode()) % 7 == 0:
        raise RuntimeError("no verdict")
    score = sum(v * r["weight"] for v, r in zip(values, extra_info["rubrics"]))
    return {"score": score, **{f"rubric_{k}": v for k, v in enumerate(values)}}

def generator(prompt, responses, rubrics) -> dict:
    n = len(rubrics)
    return {"positive": [f"new {n} of {prompt}"], "negative": [f"bad {n} {min(responses)}"]}
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    (folder / "rubric_parts.py").write_text(PARTS)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def evolving(run_dir, **fields):
    names = {
        "reward__function": "rubric_parts.by_rubric", "sft__steps": 0, "steps": 4,
        "reward__rubrics": "evolving_rubrics(generator='rubric_parts.generator', cap=3)",
        "data__train": "first_letter(letters=2, kinds=4, test=4)", "sampler__max_response_tokens": 3,
        "batch__prompts_per_step": 8, "batch__samples_per_prompt": 2,
        "evaluate__every_steps": 0,
    }  # fmt: skip
    return tiny_config(run_dir, **{**names, **fields})


@pytest.mark.slow
def test_a_run_that_is_stopped_has_the_same_rubrics(parts, tmp_path, on_one_device):
    train(evolving(tmp_path / "whole"))
    half = evolving(tmp_path / "half")
    train(evolving(tmp_path / "half", steps=2))
    half.checkpoint.allow_changed = ("steps",)
    train(half)
    rows = metrics_rows(tmp_path / "whole")
    assert rows[-1]["rubric/active"] > 0 and rows[-1]["rubric/inactive"] > 0
    states = [saved_state(tmp_path / name, 4)["rubrics"] for name in ("whole", "half")]
    assert states[0] == states[1] and len(states[0]["prompts"]) > 3
    assert any(len(p["active"]) == 3 and p["visits"] > 1 for p in states[0]["prompts"].values())
    assert rows[-1]["reward/errors"] == rows[-1]["reward/errors/RuntimeError"] > 0
    assert_same_run(tmp_path / "half", tmp_path / "whole")


def test_rubrics_are_in_the_checkpoint_and_in_the_metrics(parts, tmp_path, on_one_device):
    """Two steps that visit every prompt twice, and evaluation that evolves nothing."""
    train(evolving(tmp_path, steps=2, checkpoint__every_steps=1, checkpoint__keep=9))
    states = [saved_state(tmp_path, step)["rubrics"]["prompts"] for step in (1, 2)]
    first, second = (metrics_rows(tmp_path)[i] for i in (-2, -1))
    visits = [sum(p["visits"] for p in state.values()) for state in states]
    assert visits == [len(states[0]), visits[1]] and visits[1] > visits[0]
    assert first["rubric/active"] == 2.0 and first["rubric/inactive"] == 0.0
    assert first["rubric/added"] == 2 * len(states[0]) and first["rubric/std"] == 0.0
    assert any("rubric_0" in name for name in second)  # judged by what the first step wrote
    assert second["rubric/judge_failure_rate"] == pytest.approx(
        second["reward/errors"] / second["batch/completions"]
    )
    assert "rubric/active" not in json.dumps(saved_state(tmp_path, 2)["progress"])


def test_a_run_with_a_judge_that_fails_counts_by_kind(tmp_path, on_one_device):
    def answer(request, n):
        found = ((503, {}, {}), (200, {}, completion("?")))[n % 2] if n % 3 == 0 else None
        return found or (200, {}, completion(json.dumps({"score": n % 11})))

    with serving(answer) as server:
        text = f"judge(base_url={server.base_url!r}, model='m', attempts=1)"
        config = tiny_config(tmp_path, reward__function=text, sft__steps=0, steps=1)
        config.evaluate.reward, config.export = "exact_match", False
        train(config)
        row = metrics_rows(tmp_path)[-1]
        assert len(server.requests) == 16
    assert row["reward/errors"] == 6 and row["reward/timeouts"] == 0
    assert row["reward/errors/server_error"] + row["reward/errors/verdict"] == 6
    assert Path(tmp_path / "summary.json").exists()


def test_kinds_of_failure():
    kinds = {
        "EndpointError: rate_limited: HTTP 429": "rate_limited",
        "ValueError: bad: x": "ValueError",
        "RuntimeError": "other",
        "the reward ended its worker process (exit code 3)": "other",
    }
    assert {text: error_kind(text) for text in kinds} == kinds


# -- configs --


def config(**reward) -> Config:
    found = Config(model="decoder(layers=1)")
    found.data.train = "sort_digits(digits=5)"
    for name, value in reward.items():
        setattr(found.reward, name, value)
    return found


ASKS = "base_url='http://127.0.0.1:1/v1', model='m'"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"function": "judge()"}, "has no base_url"),
        ({"function": "rubric(base_url='http://h/v1')"}, "has no model"),
        ({"function": f"judge({ASKS}, timeout_s=10)"}, "the pool would kill judge"),
        ({"function": f"rubric({ASKS}, bad_verdict='no')"}, "one of 'error', 'zero'"),
        ({"judge_model": "no/folder", "function": "judge()"}, "must be a folder"),
        ({"judge_model": "."}, "answers for judge(...) and rubric(...)"),
        ({"judge_model": ".", "function": "judge()", "model": "."}, "takes its place"),
        ({"judge_model": ".", "function": "judge()", "judge_grades": ("1",)}, "two or more"),
        ({"judge_model": ".", "function": "judge()", "judge_grades": ("1", "1")}, "different"),
        ({"rubrics": "evolving_rubrics(generator='rubric_generators.two_by_visit')"},
         "no rubric reaches"),
        ({"rubrics": "evolving_rubrics()", "function": f"rubric({ASKS})"}, "generator"),
        ({"rubrics": "evolving_rubrics(generator='nope')", "function": f"rubric({ASKS})"},
         "has no 'nope'"),
        ({"rubrics": "evolving_rubrics(generator='judges.half')", "function": f"rubric({ASKS})"},
         "generator(prompt, responses, rubrics)"),
        ({"rubrics": "evolving(cap=1)", "function": f"rubric({ASKS})"}, "did you mean"),
        ({"rubrics": "evolving_rubrics(generator='rubric_generators.two_by_visit', cap=-1)",
          "function": f"rubric({ASKS})"}, "cap must be >= 0"),
    ],
)  # fmt: skip
def test_what_a_config_may_not_ask(fields, says):
    with pytest.raises(InputError) as found:
        validate(config(**fields))
    assert says in str(found.value)


def test_what_a_config_may_ask():
    validate(config(function=f"judge({ASKS})"))
    validate(config(function=f"judge({ASKS}, timeout_s=60)", timeout_s=61.0))
    validate(config(function="judge(scale=2)", judge_model="."))
    generator = "evolving_rubrics(generator='rubric_generators.two_by_visit')"
    validate(config(function=f"rubric({ASKS})", rubrics=generator))
    validate(config(function="rubric()", judge_model=".", rubrics=generator))
