"""Metrics: mismatch against verl and the worked example, and the description of a batch by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import worked_example
from golden_checks.common import response_batch

from rljax.batch import NOT_SAMPLED, FinishReason
from rljax.correction import mismatch_metrics
from rljax.learn.metrics import batch_metrics, sample_metrics


def test_mismatch_worked_example():
    example = worked_example("ris.mismatch")
    with jax.enable_x64(True):
        batch = response_batch(
            example["inputs"]["response_mask"],
            old_logprobs=example["inputs"]["old_log_prob"],
            sampler_logprobs=example["inputs"]["rollout_log_prob"],
        )
        got = jax.jit(mismatch_metrics)(batch)
    for name, value in example["outputs"]["metrics"].items():
        assert float(got[f"mismatch/{name}"]) == pytest.approx(value, rel=1e-5), name


def test_batch_metrics_by_hand():
    mask = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0], [1, 1, 1]], np.float32)
    rewards = np.zeros_like(mask)
    rewards[[0, 1, 2, 4], [1, 0, 2, 2]] = [1.0, 1.0, 0.0, 1.0]
    with jax.enable_x64(True):
        batch = response_batch(
            mask, group=[0, 0, 1, 1, 1], rewards=rewards, advantages=rewards - 0.5
        )
        reasons = jnp.array([0, 0, FinishReason.LENGTH, 0, 0], jnp.int32)
        batch = batch.replace(finish_reason=reasons)
        shaped = batch.replace(rewards=batch.rewards - 0.1)
        got = {k: float(v) for k, v in jax.jit(batch_metrics)(batch, shaped).items()}
    assert got["reward/mean"] == pytest.approx(0.75)
    assert got["shaped_reward/mean"] == pytest.approx(0.75 - 0.1 * 9 / 4)
    assert (got["response_tokens/mean"], got["response_tokens/max"]) == (2.25, 3.0)
    assert got["response/truncated_fraction"] == 0.25
    # Group 0 is all right; group 1 is mixed, its empty row aside.
    assert got["group/zero_advantage_fraction"] == 0.5
    assert (got["group/all_right_fraction"], got["group/all_wrong_fraction"]) == (0.5, 0.0)
    assert got["advantage/mean"] == pytest.approx(float(np.mean((rewards - 0.5)[mask > 0])))


def test_texts_of_the_data_are_not_stale():
    versions = [[4, 4], [NOT_SAMPLED, NOT_SAMPLED]]
    batch = response_batch(
        np.ones((2, 2)), jnp.float32, finish_reason=[0, 0], policy_version=versions
    )
    got = jax.jit(sample_metrics)(batch, 5)
    assert (float(got["staleness/mean"]), float(got["staleness/max"])) == (1.0, 1.0)


def test_the_age_of_what_another_run_sampled_is_not_known():
    """A replayed file has policy_version -1: whether a step or a year lies between, nobody says."""
    fields = dict(finish_reason=[0, 0], policy_version=[[4, 4], [-1, -1]])
    batch = response_batch(np.ones((2, 2)), jnp.float32, **fields)
    got = jax.jit(sample_metrics)(batch, 5)
    assert (float(got["staleness/mean"]), float(got["staleness/max"])) == (1.0, 1.0)
    got = jax.jit(sample_metrics)(batch.replace(policy_version=jnp.full((2, 2), -1)), 5)
    assert np.isnan(got["staleness/mean"]) and np.isnan(got["staleness/max"])  # not logged


@pytest.mark.parametrize(
    ("scores", "correct_at", "right", "wrong"),
    [
        ([0.1] * 4, 1.0, 0.0, 1.0),  # partial scores, all equal: nobody is right
        ([0.1] * 4, 0.1, 1.0, 0.0),
        ([1.0, 2.0, 0.3, 0.0], 1.0, 0.5, 0.5),  # unequal scores on one side
        ([1.0, 0.0, 0.0, 2.0], 1.0, 0.0, 0.0),
    ],
)
def test_groups_are_right_by_the_score_that_counts_as_right(scores, correct_at, right, wrong):
    scores = np.array(scores, np.float32)
    rewards = np.stack([scores, np.full(4, -5.0, np.float32)], axis=1)  # a reward of a turn, too
    batch = response_batch(
        np.ones((4, 2)),
        jnp.float32,
        finish_reason=[0] * 4,
        group=[0, 0, 1, 1],
        rewards=rewards,
        scores=scores,
    )
    got = jax.jit(sample_metrics, static_argnames="correct_at")(batch, correct_at=correct_at)
    shares = (got["group/all_right_fraction"], got["group/all_wrong_fraction"])
    assert tuple(map(float, shares)) == (right, wrong)
    without_scores = batch.replace(scores=None, rewards=rewards * np.array([1, 0], np.float32))
    got = sample_metrics(without_scores, correct_at=correct_at)
    assert float(got["group/all_right_fraction"]) == right


def test_the_prompt_ends_where_the_policy_begins():
    """Neither what an environment said between turns, nor a turn that is not learned from, nor what
    a row continues from another one is a part of the prompt."""
    whole = response_batch([[0, 0, 1, 0, 0, 1]], jnp.float32, finish_reason=[0])

    def tokens(**fields):
        return float(sample_metrics(whole.replace(**fields))["prompt_tokens/mean"])

    turns = np.array([[0, 0, 1, 0, 0, 2]], np.int32)
    bad_first_turn = whole.mask * (turns != 1)
    assert tokens() == 2
    assert tokens(step_ids=turns, mask=bad_first_turn) == 2
    assert tokens(mask=bad_first_turn, kept_tokens=np.array([3], np.int32)) == 2
