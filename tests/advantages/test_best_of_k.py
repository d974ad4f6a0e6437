"""MaxRL, pass@k training and PKPO against their published words: all subsets enumerated in numpy,
the closed forms of scores of 0 and 1, and expectations over all outcomes of a prompt."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Compiled
from golden_checks.common import response_batch

from rljax import advantages as op_by_op
from rljax.advantages.grouping import running_total
from rljax.config import Config
from rljax.errors import InputError
from rljax.validation import validate

advantages = Compiled(op_by_op)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def of_rows(function, scores, group, mask=None, **options):
    """The advantage of each row, from its first policy token; of a row without tokens 0."""
    scores = np.asarray(scores, float)
    mask = np.ones((len(scores), 2)) if mask is None else np.asarray(mask, float)
    first = np.cumsum(mask, axis=1) == 1
    batch = response_batch(
        mask, group=group, rewards=np.where(first & (mask > 0), scores[:, None], 0), scores=scores
    )
    got = np.asarray(function(batch, **options))
    assert (got[mask == 0] == 0).all()
    value = got[np.arange(len(got)), np.argmax(mask > 0, axis=1)]
    np.testing.assert_array_equal(got, np.where(mask > 0, value[:, None], 0))
    return value


def by_groups(of_group, scores, group, mask):
    """of_group(scores of a group) -> its advantages, put together."""
    want = np.zeros(len(scores))
    for g in set(group.tolist()):
        want[group == g] = of_group(np.asarray(scores, float)[group == g])
    return np.where(mask.any(axis=1), want, 0)


def enumerated_pass_at_k(scores, k, eps):
    n = len(scores)
    subsets = list(itertools.combinations(range(n), min(k, n)))
    best = np.array([max(scores[i] for i in s) for s in subsets])
    if best.min() == best.max():
        return np.zeros(n)
    own = [np.mean([b for s, b in zip(subsets, best, strict=True) if i in s]) for i in range(n)]
    return (np.array(own) - best.mean()) / (best.std() + eps)


def enumerated_pkpo(scores, k):
    n = len(scores)
    k = min(k, n)
    gains = [
        [
            max(scores[j] for j in s) - max(scores[j] for j in s if j != i)
            for s in itertools.combinations(range(n), k)
            if i in s
        ]
        for i in range(n)
        if k > 1
    ]
    return k * np.array([np.mean(g) for g in gains]) if gains else np.zeros(n)


def enumerated_maxrl(scores, eps):
    if scores.mean() <= 0 or scores.min() == scores.max():
        return np.zeros(len(scores))
    return (scores - scores.mean()) / (scores.mean() + eps)


def random_case(seed, binary):
    """26 rows in groups of 1 to 7 in any order, ties, rows without tokens and a group of equals."""
    random = np.random.default_rng(seed)
    group = random.permutation(np.repeat([5, -3, 8, 0, 2, 7], [7, 6, 5, 4, 3, 1]))
    scores = random.integers(0, 2 if binary else 5, 26) / (1.0 if binary else 4.0)
    scores[group == 2] = 0.1  # (0.1 + 0.1 + 0.1) / 3 is not 0.1
    mask = random.integers(0, 2, (26, 3)) * (random.random((26, 1)) < 0.85)
    return scores, group, mask


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3, 6, 9])
def test_every_subset_is_counted(k, binary):
    largest = 0.0
    for seed in range(3):
        scores, group, mask = random_case(seed, binary)
        got = of_rows(advantages.pass_at_k, scores, group, mask, k=k, eps=1e-3)
        want = by_groups(lambda r: enumerated_pass_at_k(r, k, 1e-3), scores, group, mask)
        np.testing.assert_allclose(got, want, atol=1e-12)
        assert (got[group == 2] == 0).all() and (got[group == 7] == 0).all()
        largest = max(largest, np.abs(got).max())
        if k > 1:
            got = of_rows(advantages.pkpo, scores, group, mask, k=k)
            want = by_groups(lambda r: enumerated_pkpo(r, k), scores, group, mask)
            np.testing.assert_allclose(got, want, atol=1e-12)
            assert (got[group == 2] == 0).all() and (got >= 0).all()
            assert binary or k > 3 or got.max() > 0.1
    assert (largest > 0.1) == (k < 6)  # later each group is one subset


@pytest.mark.parametrize("wrong", [0, 1, 3, 5, 7, 8])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_the_closed_forms_of_right_and_wrong(k, wrong):
    """Of 8 samples; C(w - 1, k - 1) is that of the authors' code, passk_adv.py."""
    n, right = 8, np.arange(8) >= wrong
    mean = 1 - math.comb(wrong, k) / math.comb(n, k)
    std = math.sqrt(mean * (1 - mean))
    fewer = math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1) if wrong else 0.0
    want = np.where(right, 1 - mean, 1 - mean - fewer) / (std + 1e-6)
    if mean in (0, 1):  # every subset has a right row, or none
        want = np.zeros(n)
    np.testing.assert_allclose(of_rows(advantages.pass_at_k, right, [0] * n, k=k), want, atol=1e-12)
    if k > 1:
        want = right * k * math.comb(wrong, k - 1) / math.comb(n - 1, k - 1) * (wrong > 0)
        np.testing.assert_allclose(of_rows(advantages.pkpo, right, [0] * n, k=k), want, atol=1e-12)


def test_large_groups_keep_their_digits_in_float32():
    random = np.random.default_rng(0)
    scores, k, n = random.normal(size=256), 64, 256
    rank = np.argsort(np.argsort(scores)) + 1
    with jax.enable_x64(False):
        batch = response_batch(np.ones((n, 1)), jnp.float32, rewards=scores[:, None], group=[0] * n)
        got = np.asarray(advantages.pkpo(batch, k=k))[:, 0]
    chance = [math.comb(j - 1, k - 2) / math.comb(n - 1, k - 1) for j in range(1, n + 1)]
    gains = np.maximum(scores[:, None] - np.sort(scores)[None, :], 0)
    np.testing.assert_allclose(got, k * gains @ chance, rtol=2e-5, atol=1e-5)
    assert got[rank < k].max() < 1e-6 and got[rank == n] > 1


def test_limits_are_methods_of_their_own():
    scores, group, mask = random_case(4, binary=False)
    got = of_rows(advantages.pass_at_k, scores, group, mask, k=1)
    want = of_rows(advantages.group_relative, scores, group, mask, std="population")
    np.testing.assert_allclose(got, want, atol=1e-12)
    size = np.array([np.sum(group == g) for g in group])
    got = of_rows(advantages.pkpo, scores, group, mask, k=7)
    best = of_rows(advantages.best_of_group, scores, group, mask)
    np.testing.assert_allclose(got, size * best, atol=1e-12)
    two = np.tile([0.0, 1.0], 3)  # the mean of two samples is a half: REINFORCE, doubled
    got = of_rows(advantages.maxrl, two, np.arange(6) // 2, eps=0.0)
    np.testing.assert_allclose(got, 2 * two - 1, atol=1e-12)


@pytest.mark.parametrize("binary", [True, False])
def test_maxrl_divides_by_the_mean(binary):
    for seed in range(3):
        scores, group, mask = random_case(seed, binary)
        scores = np.where(group == 5, 0.0, scores)  # nobody was right
        scores = np.where(group == -3, scores - 2.0, scores)  # outside of its domain
        for eps in (1e-6, 0.0):
            got = of_rows(advantages.maxrl, scores, group, mask, eps=eps)
            want = by_groups(lambda r, e=eps: enumerated_maxrl(r, e), scores, group, mask)
            np.testing.assert_allclose(got, want, atol=1e-12)
            assert (got[(group == 5) | (group == -3) | (group == 7)] == 0).all()
            assert np.abs(got).max() > 0.1


def expected_gradient(function, n, p, **options):
    """E[mean of A d log P(outcome) / d logit] over all outcomes of n samples that are right with
    probability p."""
    outcomes = np.array(list(itertools.product([0.0, 1.0], repeat=n)))
    group = np.repeat(np.arange(len(outcomes)), n)
    a = of_rows(function, outcomes.reshape(-1), group, **options).reshape(outcomes.shape)
    chance = np.prod(np.where(outcomes > 0, p, 1 - p), axis=1)
    return np.sum(chance * np.mean(a * (outcomes - p), axis=1))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.85])
def test_the_expected_gradient_is_that_of_the_objective(p):
    """d pass@k / d logit = k (1 - p)^(k - 1) p (1 - p)."""

    def of_pass_at(k):
        return k * (1 - p) ** (k - 1) * p * (1 - p)

    for k in (2, 3, 5):
        got = expected_gradient(advantages.pkpo, 5, p, k=k)
        np.testing.assert_allclose(got, of_pass_at(k), rtol=1e-12)
    for n in (2, 3, 6):
        got = expected_gradient(advantages.maxrl, n, p, eps=0.0)
        np.testing.assert_allclose(got, sum(of_pass_at(k) / k for k in range(1, n)), rtol=1e-12)


def test_a_running_total_ends_with_its_group():
    x, ids = np.array([1e9, 1.0, 2.0, 4.0, 1e9, 8.0]), np.array([0, 1, 1, 1, 2, 3], np.int32)
    np.testing.assert_array_equal(running_total(jnp.asarray(x), ids), [1e9, 1, 3, 7, 1e9, 8])
    back = running_total(jnp.asarray(x), ids, reverse=True)
    np.testing.assert_array_equal(back, [1e9, 7, 6, 4, 1e9, 8])


@pytest.mark.parametrize("name, wrong", [("pass_at_k", 0), ("pkpo", 1), ("pkpo", 2.0)])
def test_a_k_that_no_subset_can_have_is_refused(name, wrong):
    batch = response_batch(np.ones((2, 1)), rewards=np.ones((2, 1)), group=[0, 0])
    with pytest.raises(InputError, match=rf"{name}\(k\)"):
        getattr(op_by_op, name)(batch, k=wrong)


def test_a_k_above_the_samples_of_a_prompt_is_refused_before_the_run():
    config = Config()
    config.batch.samples_per_prompt = 8
    for name in ("pass_at_k", "pkpo"):
        config.algorithm.advantage = f"{name}(k=9)"
        with pytest.raises(InputError, match="at most batch.samples_per_prompt, 8"):
            validate(config)
