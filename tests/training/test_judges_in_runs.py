"""Judges and rubrics in a run: a model on the mesh as the judge, rubrics in checkpoints, counts of
failures by kind, and what a config may ask for."""

import json
import math
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from judge_server import completion, serving
from tiny_run import assert_same_run, metrics_rows, saved_state, tiny_config, train_on_one
from tiny_tokenizer import write_tokenizer

from rljax.batch import Batch, batch_from_rows
from rljax.components import resolve
from rljax.config import NAMESPACES, Config
from rljax.config.service_options import ServeOptions
from rljax.contracts import contract
from rljax.data.online.prompts import PromptRecord, Prompts
from rljax.data.text.tokenizer import CharTokenizer, load_tokenizer
from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models.huggingface import load_config, load_params, save_params
from rljax.models.model import Model
from rljax.policies import load_policy
from rljax.rewards.judges.endpoint import EndpointError, chat
from rljax.rewards.judges.judges import JUDGE_TEMPLATE, message
from rljax.rewards.pool.pool import RewardPool
from rljax.rollout import MeshJudge, Reward
from rljax.rollout.scoring.report import error_kind
from rljax.serving.saved import make_worker
from rljax.setup import abstract_scorers, text_scorer
from rljax.setup.abstract import abstract_setup
from rljax.training import train
from rljax.validation import validate

SAMPLES = [
    {
        "prompt": f"question {i}",
        "response": "an answer " * (1 + 9 * (i % 2)),
        "ground_truth": "42",
        "extra_info": {"rubrics": ["is short", {"title": "lies", "weight": -1.0}][: 1 + i % 2]},
    }
    for i in range(5)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A chat model of random weights whose words are far from equally likely."""
    path = write_tokenizer(tmp_path_factory.mktemp("judge"))
    words = len(json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]) + 8
    text = "decoder(layers=1, embed=16, mlp=32, heads=2, kv_heads=2, head_dim=8, init_std=0.5)"
    model = Model(resolve(text, NAMESPACES["model"])(words), make_mesh(devices=jax.devices()[:1]))
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
    ones = np.ones_like(ids)
    positions = np.arange(ids.shape[1], dtype=np.int32)[None]
    batch = Batch(ids, ones, positions, ones.astype(np.float32))
    logits = np.asarray(jax.jit(model.logits)(params, batch), np.float64)[0, -1]
    logits = logits[: tokenizer.vocab_size]  # no other id is ever drawn
    words = [tokenizer.encode(grade)[0] for grade in grades]
    p = np.exp(logits[words] - logits[words].max())
    everything = np.exp(logits - logits.max()).sum()
    mass = np.exp(logits[words] - logits.max()).sum() / everything
    return float((p / p.sum()) @ np.linspace(0, 1, len(grades))), float(mass)


@pytest.mark.slow
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
        assert score.parts["judge/grade_mass"] == pytest.approx(mass, rel=1e-3)
    assert np.std([s.value for s in found]) > 1e-3
    # Neither its neighbours nor the padding change a verdict.
    assert judge.score(SAMPLES[1:2])[0].value == pytest.approx(found[1].value, abs=1e-5)
    assert judge.score([]) == []


@pytest.mark.slow
def test_a_model_on_the_mesh_judges_rubrics(folder):
    judge = scorer(folder, "rubric(normalise=False, template='{rubric} of {response}? {answer}')")
    found = judge.score([*SAMPLES, {**SAMPLES[0], "extra_info": {}}])
    assert found[-1].status == "error" and "no rubrics" in found[-1].message
    for i, score in enumerate(found[:-1]):
        parts = score.parts
        count = 1 + i % 2
        assert ("rubric/1" in parts) == (count == 2) and "rubric/2" not in parts
        want = parts["rubric/0"] - (parts["rubric/1"] if count == 2 else 0.0)
        assert score.value == pytest.approx(want) and 0 < parts["judge/grade_mass"] < 1
        words = json.dumps(SAMPLES[i]["response"])
        text = f'"is short" of {words}? Answer with one of 0, 1, 2 and nothing else.'
        want, _ = by_hand(folder, [{"role": "user", "content": text}], "012")
        assert parts["rubric/0"] == pytest.approx(want, abs=1e-4)


@contract(reads="answer", asks="mesh", rubrics=True)
def of_rubrics(
    response, prompt, extra_info, *, template="{rubric} of {response}? {answer}", scale=2.0
):
    """A reward of one's own for the judge on the mesh: the mean of the verdicts."""


def test_a_reward_of_ones_own_is_judged_by_rubrics(folder):
    own = scorer(folder, "test_judges_in_runs.of_rubrics()").score(SAMPLES[:2])
    ours = scorer(folder, "rubric(template='{rubric} of {response}? {answer}')").score(SAMPLES[:2])
    assert [s.parts for s in own] == [s.parts for s in ours] and "rubric/1" in own[1].parts


def test_grades_are_words_of_one_token_each(folder):
    words = scorer(folder, "judge()", judge_grades=("a", "b")).score(SAMPLES[:1])
    turned = scorer(folder, "judge()", judge_grades=("b", "a")).score(SAMPLES[:1])
    assert 0 < words[0].value < 1 and words[0].value != pytest.approx(turned[0].value)
    for text, fields in (
        ("judge()", {}),
        ("judge(scale=2.5)", {}),
        ("judge()", {"judge_grades": ("yes", "no")}),
    ):
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


@pytest.mark.slow
def test_our_own_server_is_such_an_endpoint(folder):
    pytest.importorskip("uvicorn")
    from rljax.serving.app import in_background, make_app

    policy = load_policy(folder)
    worker = make_worker(policy, ServeOptions(str(folder), slots=2, tokens=96, steps=4))
    end = policy.tokenizer.eos_ids[0]
    with in_background(make_app(worker, policy.tokenizer, "tiny")) as address:

        def ask(**body):
            return chat(
                [{"role": "user", "content": "42?"}],
                base_url=f"{address}/v1",
                model="tiny",
                body=json.dumps({"max_tokens": 4, **body}),
                timeout_s=120.0,
            )

        assert ask(logit_bias={str(end): 100}) == ""  # it ends at once
        with pytest.raises(EndpointError, match="verdict: the answer was cut at max_tokens"):
            ask(logit_bias={str(end): -100})
        with pytest.raises(EndpointError, match="rejected: HTTP 400.*response_format"):
            ask(response_format={"type": "json_object"})
        text = f"judge(base_url='{address}/v1', model='other', timeout_s=60.0"
        with RewardPool(f"{text})", workers=1, timeout_s=70.0) as pool:
            (score,) = pool.score(SAMPLES[:1])
        assert score.message.endswith("structured=False asks without a schema")
        with RewardPool(f"{text}, structured=False)", workers=1, timeout_s=70.0) as pool:
            (score,) = pool.score(SAMPLES[:1])
        assert error_kind(score.message) == "rejected" and "only 'tiny' is served" in score.message
    worker.close()


def test_the_plan_counts_the_judge(folder, tmp_path):
    config = tiny_config(tmp_path, reward__function="judge(scale=2)")
    config.reward.judge_model = str(folder)
    found = abstract_scorers(abstract_setup(config))
    weights = load_params(str(folder), Model(load_config(str(folder)), make_mesh()))
    assert list(found) == ["judge weights"]
    assert jax.tree.map(jnp.shape, found["judge weights"]) == jax.tree.map(jnp.shape, weights)


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
    return {"score": score, **{f"rubric/{k}": v for k, v in enumerate(values)}}

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


TEXT = "evolving_rubrics(generator='rubric_parts.generator', cap=3)"


@pytest.mark.slow
def test_a_run_that_is_stopped_has_the_same_rubrics(parts, tmp_path):
    def config(name, steps=4):
        return tiny_config(
            tmp_path / name,
            steps=steps,
            sft__steps=0,
            evaluate__every_steps=2,
            data__train="first_letter(letters=2, kinds=4, test=4)",
            sampler__max_response_tokens=3,
            batch__prompts_per_step=8,
            batch__samples_per_prompt=2,
            reward__function="rubric_parts.by_rubric",
            reward__rubrics=TEXT,
            checkpoint__allow_changed=("steps",),
        )

    train_on_one(config("whole"))
    train_on_one(config("half", steps=2))
    train_on_one(config("half"))
    rows = metrics_rows(tmp_path / "whole")
    assert rows[-1]["rubric/active"] > 0 and rows[-1]["rubric/inactive"] > 0
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    compiles = [json.loads(line)["compiles"] for line in lines]
    assert compiles[1] == compiles[3]  # more rubrics are no other program
    states = [saved_state(tmp_path / name, 4)["rubrics"] for name in ("whole", "half")]
    assert states[0] == states[1] and len(states[0]["prompts"]) > 3
    assert any(len(p["active"]) == 3 and p["visits"] > 1 for p in states[0]["prompts"].values())
    assert rows[-1]["reward/errors"] == rows[-1]["reward/errors/RuntimeError"] > 0
    assert_same_run(tmp_path / "half", tmp_path / "whole")


LETTERS = CharTokenizer("0123456789>")


def rollouts(responses: list[list[str]]) -> tuple[Batch, Prompts]:
    """A batch of these responses to prompts 0, 1, ..., each of which has one persistent rubric."""
    said = [(g, r) for g, group in enumerate(responses) for r in group]
    records = [
        PromptRecord(
            f"{g}>",
            np.asarray(LETTERS.encode(f"{g}>"), np.int32),
            "",
            "d",
            {"rubrics": [{"description": "fixed"}], "kept": g},
            g,
            prompt_id=g,
        )
        for g in range(len(responses))
    ]
    rows = [LETTERS.encode(f"{g}>{r}") for g, r in said]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    mask = np.zeros(tokens.shape, np.float32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], mask[i, 2 : len(row)] = row, 1
    batch = batch_from_rows(
        jnp.asarray(tokens),
        jnp.asarray([len(r) for r in rows], jnp.int32),
        jnp.asarray(mask),
        group=jnp.asarray([g for g, _ in said], jnp.int32),
        finish_reason=jnp.zeros((len(rows),), jnp.int32),
    )
    return batch, Prompts.from_records(records, length=2)


def by_letter(request, n):
    """The verdict is the first digit of the response, modulo 3; 7 is none, 8 is a broken server."""
    text = request["messages"][0]["content"]
    digit = int(text.partition('Response: "')[2][0])
    if digit == 8:
        return 503, {}, {}
    return 200, {}, completion("?" if digit == 7 else json.dumps({"score": digit % 3}))


@pytest.mark.slow
def test_the_reward_of_a_step_has_rubrics_and_counts_failures_by_kind(parts):
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    with serving(by_letter) as server:
        text = f"rubric(base_url={server.base_url!r}, model='m', attempts=1)"
        pool = RewardPool(text, workers=2)
        reward = Reward(pool, LETTERS, mesh, rubrics=resolve(TEXT, NAMESPACES["rubrics"])(1))
        try:
            batch, prompts = rollouts([["0", "1", "22"], ["7", "8", "1"]])
            found, report = reward(batch, prompts)
            assert len(server.requests) == 6
            assert found.reward_parts is None  # the parts are other ones at each step
            assert np.asarray(found.scores).tolist() == [0.0, 0.5, 1.0, 0.0, 0.0, 0.5]
            assert np.asarray(found.mask).sum(axis=1).tolist() == [1, 1, 2, 0, 0, 1]
            counts = report.metrics() | reward.learn(report)
            assert counts["reward/errors"] == 2 and counts["reward/timeouts"] == 0
            assert counts["reward/errors/verdict"] == counts["reward/errors/server_error"] == 1
            assert counts["reward/part/rubric/persistent"] == pytest.approx(0.5)
            assert counts["rubric/judge_failure_rate"] == pytest.approx(1 / 3)
            assert counts["rubric/active"] == 2 and counts["rubric/added"] == 4
            # Evaluation, and a report that is not learned from, evolve nothing.
            state = json.dumps(reward.rubrics.get_state())
            reward.outcome_alone()(batch, prompts)
            assert len(server.requests) == 12
            reward(batch, prompts)
            assert len(server.requests) == 12 + 4 * 3 + 2  # three rubrics each; a failure ends it
            assert json.dumps(reward.rubrics.get_state()) == state
            _, report = reward(batch, prompts)
            # Every rubric of prompt 0 told its responses apart; of prompt 1 one response is left.
            counts = report.metrics() | reward.learn(report)
            assert counts["rubric/std"] == pytest.approx(np.std([0, 0.5, 1]))
            assert counts["reward/part/rubric/negative"] == pytest.approx(0.5)
            assert counts["rubric/active"] == 3 and counts["rubric/inactive"] == 1
        finally:
            reward.close()
    assert reward.rubrics._pool is None


def test_rows_without_rubrics_are_found_before_a_model_loads(tmp_path):
    rows = [{"prompt": "ab>", "ground_truth": "a", "extra_info": {"rubrics": ["short"]}}] * 2
    rows = [*rows, {"prompt": "ba>", "ground_truth": "b", "extra_info": {"rubrics": []}}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = tiny_config(
        tmp_path / "run",
        data__train=str(tmp_path / "rows.jsonl"),
        sft__steps=0,
        tokenizer=str(write_tokenizer(tmp_path / "tokenizer")),
        data__max_prompt_tokens=16,
        reward__function=f"rubric({ASKS})",
    )
    with pytest.raises(InputError, match="row 2 of .* cannot be judged by rubrics"):
        train(config)


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
        ({"function": "judge(base_url='h:80/v1', model='m')"}, "base_url is no address"),
        ({"function": "sandbox_fusion(url='localhost:8080')"}, "url is no address"),
        ({"function": f"judge({ASKS}, timeout_s=10)"}, "the pool would kill judge"),
        ({"function": f"rubric({ASKS}, bad_verdict='no')"}, "one of 'error', 'zero'"),
        ({"judge_model": "no/such/folder", "function": "judge()"}, "is not a folder"),
        ({"judge_model": "."}, "answers for judge(...) and rubric(...)"),
        ({"judge_model": ".", "function": "judge()", "model": "."}, "takes its place"),
        ({"judge_model": ".", "function": "judge()", "judge_grades": ("1",)}, "two or more"),
        ({"judge_model": ".", "function": "judge()", "judge_grades": ("1", "1")}, "different"),
        (
            {"rubrics": "evolving_rubrics(generator='rubric_generators.two_by_visit')"},
            "no rubric reaches",
        ),
        ({"rubrics": "evolving_rubrics()", "function": f"rubric({ASKS})"}, "generator"),
        (
            {"rubrics": "evolving_rubrics(generator='nope')", "function": f"rubric({ASKS})"},
            "has no 'nope'",
        ),
        (
            {"rubrics": "evolving_rubrics(generator='judges.half')", "function": f"rubric({ASKS})"},
            "generator(prompt, responses, rubrics)",
        ),
        ({"rubrics": "evolving(cap=1)", "function": f"rubric({ASKS})"}, "did you mean"),
        (
            {
                "rubrics": "evolving_rubrics(generator='rubric_generators.two_by_visit', cap=-1)",
                "function": f"rubric({ASKS})",
            },
            "cap must be >= 0",
        ),
    ],
)
def test_what_a_config_may_not_ask(fields, says):
    with pytest.raises(InputError) as found:
        validate(config(**fields))
    assert says in str(found.value)


def test_what_a_config_may_ask(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")  # the folder of a judge
    validate(config(function=f"judge({ASKS})"))
    validate(config(function=f"judge({ASKS}, timeout_s=60)", timeout_s=61.0))
    validate(config(function="judge(scale=2)", judge_model="."))
    generator = "evolving_rubrics(generator='rubric_generators.two_by_visit')"
    validate(config(function=f"rubric({ASKS})", rubrics=generator))
    validate(config(function="rubric()", judge_model=".", rubrics=generator))
