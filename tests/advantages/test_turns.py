"""Advantages of turns: an enumerated game that the policy may end, failed siblings, and batches of
several turns."""

import functools
import itertools

import jax
import numpy as np
import pytest
from conftest import Compiled, lanes
from golden_checks.common import response_batch

from rljax import advantages as op_by_op
from rljax.batch import FinishReason

advantages = Compiled(op_by_op)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


# -- a game of two turns: stop, or go on by one of two ways, each of which has two replies

FIRST = np.array([0.3, -0.2, 0.4])  # logits: stop, left, right
SECOND = np.array([[0.5, -0.1], [-0.3, 0.2]])  # of the replies behind left and right
PAID_FIRST = np.array([0.3, 0.5, 0.1])
PAID_SECOND = np.array([[1.0, 0.2], [0.6, 0.4]])
# (first choice, second choice or None)
OUTCOMES = [(0, None)] + [(way, reply) for way in (1, 2) for reply in (0, 1)]


def softmax(x):
    return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)


P_FIRST, P_SECOND = softmax(FIRST), softmax(SECOND)


def chance(outcome) -> float:
    first, second = outcome
    return P_FIRST[first] * (1.0 if second is None else P_SECOND[first - 1, second])


def score_functions(outcome) -> np.ndarray:
    """The gradient of the log-probability of each turn with respect to all logits: [2, 7]."""
    first, second = outcome
    out = np.zeros((2, 7))
    out[0, :3] = np.eye(3)[first] - P_FIRST
    if second is not None:
        at = 3 + 2 * (first - 1)
        out[1, at : at + 2] = np.eye(2)[second] - P_SECOND[first - 1]
    return out


def true_gradient() -> np.ndarray:
    """The gradient of the expected return: [7]."""
    total = np.zeros(7)
    for outcome in OUTCOMES:
        first, second = outcome
        paid = PAID_FIRST[first] + (0 if second is None else PAID_SECOND[first - 1, second])
        total += chance(outcome) * paid * score_functions(outcome).sum(axis=0)
    return total


@functools.cache
def every_group(n: int):
    """All groups of n siblings as one batch (a token, an observation, two tokens), the chance of
    each group, and the score functions of each row."""
    groups = list(itertools.product(OUTCOMES, repeat=n))
    rows = [outcome for group in groups for outcome in group]
    went = np.array([second is not None for _, second in rows])
    mask = np.stack([np.ones(len(rows)), np.zeros(len(rows)), went, went], axis=1)
    rewards = np.zeros(mask.shape)
    rewards[:, 0] = [PAID_FIRST[first] for first, _ in rows]
    rewards[:, 3] = [0 if b is None else PAID_SECOND[a - 1, b] for a, b in rows]
    steps = mask * np.array([1, 0, 2, 2])
    group = np.repeat(np.arange(len(groups)), n)
    chances = np.array([np.prod([chance(outcome) for outcome in group]) for group in groups])
    assert abs(chances.sum() - 1) < 1e-12
    scores = np.stack([score_functions(outcome) for outcome in rows])
    return dict(mask=mask, rewards=rewards, step_ids=steps, group=group), chances, scores


def expected_gradient(advantage, n: int, **options) -> np.ndarray:
    """The expectation over all groups of the mean over siblings of sum_k A_k grad log pi_k: [7]."""
    fields, chances, scores = every_group(n)
    got = np.asarray(advantage(response_batch(**fields), **options))
    assert (got[:, 2] == got[:, 3]).all()  # one number for a turn
    of_turns = got[:, [0, 2]]
    return np.einsum("r,rk,rkp->p", np.repeat(chances, n) / n, of_turns, scores)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("n", lanes([2], [4]))
def test_leave_one_out_of_turns_has_the_true_gradient(n):
    want = true_gradient()
    assert np.abs(want).min() > 0.003
    got = expected_gradient(advantages.turn_leave_one_out, n)
    np.testing.assert_allclose(got, want, atol=1e-12)
    # So has leave-one-out of whole returns; the turns have less variance.
    np.testing.assert_allclose(expected_gradient(advantages.rloo, n), want, atol=1e-12)


def biased(n: int, alone: bool) -> np.ndarray:
    """The advantages of the first choice that turn_group expects, in closed form: [3].

    The first turn is compared with all n: (n - 1) / n of what it pays. The second one is compared
    with the m siblings that went on: what is left is how much better its way pays than the mean
    way, times 1 - E[1/m]; the mean itself is lost, but where nobody else went on.
    """
    go = 1 - P_FIRST[0]
    of_way = np.sum(P_SECOND * PAID_SECOND, axis=1)
    mean = P_FIRST[1:] @ of_way / go
    kept = 1 - (1 - (1 - go) ** n) / (n * go)
    second = kept * (of_way - mean)
    if alone:
        second = second + (1 - go) ** (n - 1) * of_way
    return (n - 1) / n * PAID_FIRST + np.array([0, *second])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("singleton", ["zero", "raw"])
@pytest.mark.parametrize("n", lanes([2], [4]))
def test_centring_each_turn_is_biased_by_what_going_on_pays(n, singleton):
    """verl#7244: E[R] of the turns behind it is missing at the decision to go on."""
    got = expected_gradient(advantages.turn_group, n, std="none", singleton=singleton)[:3]
    value = biased(n, singleton == "raw")
    np.testing.assert_allclose(got, P_FIRST * (value - P_FIRST @ value), atol=1e-12)
    # The true advantage of going on over stopping, and what is left of it.
    go = 1 - P_FIRST[0]
    of_way = np.sum(P_SECOND * PAID_SECOND, axis=1)
    truth = P_FIRST[1:] @ (PAID_FIRST[1:] + of_way) / go - PAID_FIRST[0]
    left = P_FIRST[1:] @ value[1:] / go - value[0]
    missing = P_FIRST[1:] @ of_way / go
    if singleton == "zero":
        paid = P_FIRST[1:] @ PAID_FIRST[1:] / go - PAID_FIRST[0]
        assert left == pytest.approx((n - 1) / n * paid)  # nothing of the second turn
        assert truth - paid == pytest.approx(missing)
    assert left < 0.5 * truth
    leave_one_out = expected_gradient(advantages.turn_leave_one_out, n)
    # The derivative with respect to the logit of stopping is the decision to go on.
    assert got[0] / leave_one_out[0] == pytest.approx(left / truth)


# -- several turns, and failed siblings


@pytest.mark.usefixtures("x64")
def test_time_in_turns():
    """gamma and lambda count at the step from turn to turn, across the observation."""
    batch = response_batch(
        [[0, 1, 1, 0, 1, 1]],
        rewards=[[9, 0, 1, 9, 0, 2]],
        values=[[9, 0.1, 0.2, 9, 0.3, 0.4]],
        step_ids=[[0, 1, 1, 0, 2, 2]],
    )
    got, returns = advantages.gae(batch, gamma=0.5, lam=0.5, whiten=False, time="turn")
    np.testing.assert_allclose(got, [[0, 1.475, 1.375, 0, 1.7, 1.6]], rtol=1e-6)
    np.testing.assert_allclose(returns, [[0, 1.575, 1.575, 0, 2.0, 2.0]], rtol=1e-6)
    by_token, _ = advantages.gae(batch, gamma=0.5, lam=0.5, whiten=False)
    assert by_token[0, 1] < 0.5  # three steps away from the end instead of one


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["reinforce", "reinforce_plus_plus", "remax", "gae", "vapo_gae"])
def test_a_reward_of_a_later_turn_reaches_the_first(name):
    """Observations between turns neither end a return nor discount it (verl PR 6376, miles PR
    1827)."""
    fields = dict(rewards=[[0, 0, 0, 0, 0, 1.0], [0, 0.0, 0, 0, 0, 0]], values=np.zeros((2, 6)))
    fields["step_ids"] = mask = np.array([[1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0]])
    options = dict(gamma=0.5) | ({"alpha": 1.0} if name == "vapo_gae" else {})
    got = getattr(advantages, name)(response_batch(mask, **fields), **options)
    got = np.asarray(got[0] if isinstance(got, tuple) else got)
    if name in ("reinforce", "remax"):
        np.testing.assert_allclose(got[0], [0.125, 0.25, 0, 0, 0.5, 1.0])
    assert (got[0, :2] > got[1, :2]).all() and (got[:, 2:4] == 0).all()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.TURNS, FinishReason.TIME])
def test_every_limit_truncates(reason):
    """The value behind the last token of what a limit ended is not 0."""
    batch = response_batch(
        np.ones((2, 2)),
        rewards=np.zeros((2, 2)),
        values=np.full((2, 2), 0.5),
        group=[0, 0],
        finish_reason=[reason, FinishReason.STOP],
    )
    got, _ = advantages.gae(batch, whiten=False, bootstrap_truncated=True)
    np.testing.assert_allclose(got, [[0, 0], [-0.5, -0.5]])
    scored = batch.replace(rewards=batch.rewards.at[1, 1].set(1.0))
    got = advantages.group_relative(scored, exclude_truncated=True, singleton="raw")
    np.testing.assert_allclose(got, [[0, 0], [1, 1]])


OF_GROUPS = {
    "group_relative": {},
    "rloo": {},
    "opo": {},
    "gpg": {},
    "best_of_group": {},
    "batch_normalised": {},
    "reinforce_plus_plus_baseline": {},
    "prime": {},
    "gdpo": {},
    "gigpo": {},
    "group_process": {},
    "turn_leave_one_out": dict(gamma=0.9),
    "turn_group": {},
}
FAILED = ("group_relative", "opo", "prime", "gdpo", "gigpo", "turn_leave_one_out")


def episodes(seed: int = 0):
    """Five episodes of a prompt and three of another, of one to four turns with replies between
    them; a reward at the last token of each turn."""
    random = np.random.default_rng(seed)
    count = [4, 1, 3, 2, 4, 2, 3, 1]
    turn, column = np.arange(12) // 3 + 1, np.arange(12) % 3  # two tokens and a reply
    mask = (turn[None, :] <= np.array(count)[:, None]) & (column < 2)
    rewards = mask * (column == 1) * random.normal(size=mask.shape)
    return dict(
        mask=mask,
        rewards=rewards,
        step_ids=mask * turn,
        group=[0] * 5 + [1] * 3,
        state_ids=mask * random.integers(1, 3, mask.shape),
        scores=rewards.sum(axis=1),
        process_rewards=mask * random.normal(size=mask.shape),
        reward_parts=random.normal(size=(8, 2)),
    )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", lanes(FAILED, [name for name in OF_GROUPS if name not in FAILED]))
def test_failed_siblings_leave_a_smaller_group(name):
    """Any subset of siblings failed (mask 0, groups of their own): the others get what they get in
    the group that is left."""
    fields, function = episodes(), functools.partial(getattr(advantages, name), **OF_GROUPS[name])
    for failed in itertools.chain.from_iterable(
        itertools.combinations(range(5), k) for k in range(1, 5)
    ):
        keep = ~np.isin(np.arange(8), failed)
        group = np.where(keep, fields["group"], 100 + np.arange(8))
        masked = {**fields, "mask": fields["mask"] * keep[:, None], "group": group}
        got = np.asarray(function(response_batch(**masked)))
        assert (got[~keep] == 0).all()
        # The smaller groups, filled up to eight rows by padding that is nobody's sibling.
        rows = np.concatenate([np.flatnonzero(keep), np.flatnonzero(~keep)])
        alone = np.arange(8) >= keep.sum()
        small = {k: np.asarray(v)[rows] for k, v in fields.items()}
        small["mask"] = small["mask"] * ~alone[:, None]
        small["group"] = np.where(alone, 50 + np.arange(8), small["group"])
        small["rewards"], small["scores"] = small["rewards"] * ~alone[:, None], small["scores"] * 0
        want = np.asarray(function(response_batch(**small)))
        np.testing.assert_allclose(got[keep], want[: keep.sum()], atol=1e-9)
