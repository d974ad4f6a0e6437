"""A reward model's score as one of the rewards of a mixture: sums, parts, failures, configs."""

import dataclasses
import sys

import jax
import numpy as np
import pytest
from rollout_cases import ASKED, Letters, asked_prompts, policy
from sampler_cases import shallow
from tiny_run import tiny_config

from rljax.components import resolve
from rljax.errors import InputError
from rljax.models.model import Model
from rljax.rewards.pool.calling import HOME, reads_model
from rljax.rewards.pool.pool import RewardPool
from rljax.rollout import ModelScorer, Reward, make_sample
from rljax.validation import validate

REWARDS = """
def without_d(response):
    if "d" in response:
        raise ValueError("there is a d")
    return 1.0

def gated(response, model_score):
    return model_score if len(response) % 2 else -1.0

def best(responses, model_scores):
    return [float(score == max(model_scores)) for score in model_scores]
"""
MIXED = "mixture(rewards=('length_under(max_tokens=9)', 'reward_model()'), weights=(0.5, -2.0))"


@pytest.fixture(scope="module", autouse=True)
def rewards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "model_rewards.py").write_text(REWARDS)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    sys.modules.pop("model_rewards", None)


@pytest.fixture(scope="module")
def sampled():
    """(actor, prompts, scorer, batch, the scores of its rows by the model alone)."""
    model, prompts = shallow(), asked_prompts()
    actor = policy(model)
    scalar = Model(dataclasses.replace(model.config, labels=1), model.mesh, "scalar")
    rng, params = np.random.default_rng(7), scalar.init(jax.random.key(7))
    # A new head is zero: its scores are made to differ.
    params = jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape).astype(x.dtype), params)
    scorer = ModelScorer(scalar, params, rows=3)
    batch = actor.generate(prompts, jax.random.key(4), ASKED, n=3)
    alone, report = Reward(scorer, Letters, model.mesh)(batch, prompts)
    scores = np.asarray(alone.scores, np.float64)
    assert len({*scores}) == 12 and [r.score.value for r in report.rows] == scores.tolist()
    return actor, prompts, scorer, batch, scores


def scored(sampled, text, scorer=None, prompts=None):
    actor, plain, own, batch, _ = sampled
    with RewardPool(text, workers=2) as pool:
        reward = Reward(pool, Letters, actor.model.mesh, model=scorer or own)
        return reward(batch, prompts or plain)


@pytest.mark.slow
def test_the_score_is_the_weighted_sum_with_a_metric_per_part(sampled):
    of_model = sampled[-1]
    got, report = scored(sampled, MIXED)
    short = [float(row.sample["num_tokens"] <= 9) for row in report.rows]
    assert {0.0, 1.0} == {*short}
    want = 0.5 * np.array(short) - 2.0 * of_model
    np.testing.assert_array_equal(np.asarray(got.scores), want.astype(np.float32))
    np.testing.assert_array_equal(  # in the order of the parts' names, for gdpo
        np.asarray(got.reward_parts), np.stack([short, of_model], axis=1).astype(np.float32)
    )
    metrics = report.metrics()
    assert metrics["reward/part/reward_model"] == pytest.approx(of_model.mean())
    assert metrics["reward/part/length_under"] == pytest.approx(np.mean(short))
    assert metrics["reward/source/toy"] == pytest.approx(want.mean())


@pytest.mark.slow
def test_a_failure_of_either_masks_the_row(sampled):
    actor, prompts, scorer, batch, _ = sampled
    text = "mixture(rewards=('model_rewards.without_d', 'reward_model()'))"

    _, report = scored(sampled, "model_rewards.gated")
    of_text = ["d" in row.sample["response"] for row in report.rows]
    lost = of_text.index(False)

    class OneIsNaN(ModelScorer):
        def score(self, batch):
            found = super().score(batch)
            found[lost] = dataclasses.replace(found[lost], value=np.nan)
            return found

    got, report = scored(sampled, text, OneIsNaN(scorer.model, scorer.params, 3))
    failed = [i == lost or has for i, has in enumerate(of_text)]
    assert any(of_text) and not all(failed)
    assert [row.score.status != "ok" for row in report.rows] == failed
    np.testing.assert_array_equal(np.asarray(got.mask).any(axis=1), ~np.array(failed))
    assert "the reward model says nan" in report.rows[lost].score.message
    # Where the source of a row has a reward of text, the model has no say.
    pairs = zip(prompts.records, "abab", strict=True)
    records = [dataclasses.replace(record, data_source=name) for record, name in pairs]
    mixed = dataclasses.replace(prompts, records=tuple(records))
    text = "by_source(sources=(('a', 'length_under(max_tokens=9)'), ('b', 'reward_model()')))"
    broken = jax.tree.map(lambda x: x * np.nan, scorer.params)
    _, report = scored(sampled, text, ModelScorer(scorer.model, broken, 3), mixed)
    statuses = [(row.record.data_source, row.score.status) for row in report.rows]
    assert set(statuses) == {("a", "ok"), ("b", "error")}


@pytest.mark.slow
def test_functions_of_ones_own_read_the_score(sampled):
    *_, of_model = sampled
    got, report = scored(sampled, "model_rewards.gated")
    odd = [len(row.sample["response"]) % 2 == 1 for row in report.rows]
    np.testing.assert_array_equal(
        np.asarray(got.scores), np.where(odd, of_model, -1.0).astype("f4")
    )
    got, _ = scored(sampled, "model_rewards.best")
    by_group = of_model.reshape(-1, 3)
    want = (by_group == by_group.max(axis=1, keepdims=True)).astype("f4").reshape(-1)
    np.testing.assert_array_equal(np.asarray(got.scores), want)


def test_a_whole_batch_is_scored_at_once(sampled):
    """The model needs the batch, so nothing begins early; what evaluation asks for has it, too."""
    actor, prompts, scorer, batch, of_model = sampled
    with RewardPool(MIXED, workers=1) as pool:
        reward = Reward(pool, Letters, actor.model.mesh, model=scorer)
        assert reward.start_early(prompts, 3) is None and reward.outcome_alone() is reward
        one, _ = make_sample(actor, reward, ASKED)(prompts, jax.random.key(4), n=3)
        np.testing.assert_array_equal(one.scores, reward(batch, prompts)[0].scores)
    assert reads_model(resolve(MIXED, HOME)) and not reads_model(resolve("gsm8k()", HOME))


def test_what_a_config_may_say(tmp_path):
    def problems(**reward):
        config = tiny_config(tmp_path)
        for name, value in reward.items():
            setattr(config.reward, name, value)
        try:
            validate(config)
        except InputError as error:
            return str(error)
        return ""

    folder = str(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert problems(model=folder, function=MIXED) == ""
    assert problems(model=folder, function="") == ""
    assert problems(model=folder, function="model_rewards.gated") == ""
    assert "reward.model is ''" in problems(function=MIXED)
    assert "does not read its score" in problems(model=folder, function="exact_match()")
