"""Costs of samples: a part of the reward, or what a cost model says; without one a sample fails."""

import dataclasses
import sys

import jax
import numpy as np
import pytest
from rollout_cases import ASKED, Letters, asked_prompts, policy
from sampler_cases import shallow

from rljax.models.model import Model
from rljax.rewards.pool.pool import RewardPool
from rljax.rollout import ModelScorer, Reward

REWARDS = """
def priced(response):
    if "d" in response:
        return {"score": 1.0, "other": 2.0}
    return {"score": 1.0, "cost": float(len(response)) - 2}
"""


@pytest.fixture(scope="module", autouse=True)
def rewards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "priced_rewards.py").write_text(REWARDS)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    sys.modules.pop("priced_rewards", None)


@pytest.fixture(scope="module")
def sampled():
    """(prompts, batch, the cost model)."""
    model, prompts = shallow(), asked_prompts()
    scalar = Model(dataclasses.replace(model.config, labels=1), model.mesh, "scalar")
    rng, params = np.random.default_rng(7), scalar.init(jax.random.key(7))
    params = jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape).astype(x.dtype), params)
    batch = policy(model).generate(prompts, jax.random.key(4), ASKED, n=3)
    return prompts, batch, ModelScorer(scalar, params, 3, "cost_model")


def scored(sampled, text, **options):
    prompts, batch, cost_model = sampled
    with RewardPool(text, workers=1) as pool:
        reward = Reward(pool, Letters, cost_model.model.mesh, **options)
        return reward(batch, prompts)


def at_last(batch) -> np.ndarray:
    """The costs of the rows, which stand at their last policy tokens and nowhere else."""
    costs, mask = np.asarray(batch.costs), np.asarray(batch.mask) > 0
    last = np.where(mask.any(1), mask.shape[1] - 1 - mask[:, ::-1].argmax(1), 0)
    found = costs[np.arange(len(costs)), last]
    assert np.count_nonzero(costs) == np.count_nonzero(found)
    return found


@pytest.mark.slow
def test_the_part_cost_is_the_cost_and_a_sample_without_it_has_failed(sampled):
    batch, report = scored(sampled, "priced_rewards.priced", needs_costs=True)
    texts = [row.sample["response"] for row in report.rows]
    failed = np.array(["d" in text for text in texts])
    assert failed.any() and not failed.all()
    want = np.array([0.0 if lost else len(text) - 2.0 for text, lost in zip(texts, failed)])  # noqa: B905
    np.testing.assert_array_equal(at_last(batch), want)
    np.testing.assert_array_equal(np.asarray(batch.mask).any(axis=1), ~failed)
    assert [row.score.status == "error" for row in report.rows] == failed.tolist()
    message = report.rows[int(failed.argmax())].score.message
    assert "no part 'cost'" in message and "reward.cost_model" in message
    assert report.metrics()["reward/errors"] == failed.sum()


def test_who_reads_no_costs_gets_none_and_fails_nothing(sampled):
    batch, report = scored(sampled, "priced_rewards.priced")
    assert batch.costs is None and report.metrics()["reward/errors"] == 0
    assert Reward(None, None, None, needs_costs=True).outcome_alone().needs_costs is False


@pytest.mark.slow
def test_a_cost_model_says_what_samples_cost(sampled):
    prompts, raw, cost_model = sampled
    want = np.array([score.value for score in cost_model.score(raw)], np.float32)
    options = dict(needs_costs=True, cost_model=cost_model)
    batch, report = scored(sampled, "length_under(max_tokens=9)", **options)
    np.testing.assert_array_equal(at_last(batch), want)
    assert set(np.asarray(batch.scores)) <= {0.0, 1.0}
    assert report.metrics()["reward/part/cost"] == pytest.approx(want.mean(), rel=1e-5)
    broken = jax.tree.map(lambda x: x * np.nan, cost_model.params)
    options["cost_model"] = ModelScorer(cost_model.model, broken, 3, "cost_model")
    batch, report = scored(sampled, "length_under(max_tokens=9)", **options)
    assert not np.asarray(batch.mask).any() and not np.asarray(batch.costs).any()
    assert report.rows[0].score.message == "the cost model says nan"
