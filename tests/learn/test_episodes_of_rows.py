"""Episodes of several rows: what is counted, reduced, shaped, filtered and reported counts an
episode once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import compiled
from episode_rows import in_several_rows, joined
from golden_checks.common import response_batch

from rljax import learn
from rljax.batch import FinishReason, of_whole_sequences
from rljax.learn.metrics import batch_metrics
from rljax.shaping import filters, scores


@pytest.fixture(scope="module")
def whole():
    """Eight episodes of one to four turns; groups of 4, 3 and 1; no `episode`."""
    random = np.random.default_rng(0)
    count = np.array([4, 1, 3, 2, 4, 2, 3, 1])
    turn, column = np.arange(12) // 3 + 1, np.arange(12) % 3  # two tokens and an observation
    mask = (turn[None, :] <= count[:, None]) & (column < 2)
    rewards = np.where(mask & (column == 1), random.integers(0, 3, mask.shape) / 2, 0.0)
    rewards[4:7] = mask[4:7] * (np.arange(12) == 1)  # a group of equal scores
    parts = np.stack([rewards.sum(axis=1), random.normal(size=8)], axis=1)
    reasons = [
        FinishReason[name] for name in ("STOP LENGTH STOP TURNS TIME STOP STOP STOP".split())
    ]
    return response_batch(
        mask,
        jnp.float32,
        rewards=rewards,
        step_ids=mask * turn,
        group=[3, 3, 3, 3, 1, 1, 1, 0],
        scores=rewards.sum(axis=1),
        reward_parts=parts,
        finish_reason=reasons,
        advantages=mask * random.normal(size=mask.shape),
    )


def close(got, want):
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-6)


REDUCTIONS = {
    "token_mean": learn.token_mean,
    "seq_mean_token_sum": learn.seq_mean_token_sum,
    "seq_mean_token_mean": learn.seq_mean_token_mean,
    "seq_mean_token_sum_norm": lambda b: learn.seq_mean_token_sum_norm(b, max_tokens=5),
    "prompt_mean": learn.prompt_mean,
    "positive_token_mean": learn.positive_token_mean,
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_weigh_episodes(whole, name):
    split, parts = in_several_rows(whole)
    reduction = compiled(REDUCTIONS[name])
    close(joined(reduction(split), parts), reduction(whole))


def test_metrics_count_episodes(whole):
    split, _ = in_several_rows(whole)
    want, got = (jax.jit(batch_metrics)(b, b) for b in (whole, split))
    assert want["response/truncated_fraction"] == 3 / 8  # by tokens, turns and seconds
    assert want["group/zero_advantage_fraction"] == 1 / 2 and want["group/singletons"] == 1
    del want["prompt_tokens/mean"], got["prompt_tokens/mean"]  # what a row shows but did not choose
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)


RULES = (
    lambda b: scores.soft_overlong(b, max_tokens=6, cache_tokens=4),
    scores.normalised,
    lambda b: scores.mixed_parts(b, weights=(1.0, 0.5)),
)


@pytest.mark.parametrize("rule", RULES)
def test_shaping_changes_the_last_token_of_the_episode(whole, rule):
    split, parts = in_several_rows(whole)
    shape = jax.jit(lambda b: scores.apply_shaping(b, [rule]).rewards * b.mask)
    want = np.asarray(shape(whole))
    assert np.abs(want - np.asarray(whole.rewards)).max() > 0.1
    close(joined(shape(split), parts), want)


@pytest.mark.parametrize(
    "rule", [filters.overlong, filters.live_groups, lambda b: filters.pass_rate(b, high=0.6)]
)
def test_filters_count_episodes(whole, rule):
    split, parts = in_several_rows(whole)
    rule = jax.jit(rule)
    want, got = np.asarray(rule(whole)), np.asarray(rule(split))
    assert 0 < want.sum() < 8
    assert got.tolist() == [want[row] for row, _ in parts]


def test_an_episode_leaves_whole(whole):
    split, parts = in_several_rows(whole)
    keep = jnp.arange(split.rows) != 0
    gone = parts[0][0]
    got = np.asarray(of_whole_sequences(keep, split))
    assert got.tolist() == [float(row != gone) for row, _ in parts]
    assert of_whole_sequences(keep, whole) is keep
