"""Losses of reward models, supervised losses, and rows of labelled steps: worked examples, rules.

Values and gradients of other projects are compared in test_golden.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Compiled, worked_example
from golden_checks.common import response_batch
from test_preference_losses import ROWS, close, float64, sample, sums, take  # noqa: F401

from rljax import learn as update
from rljax.errors import InputError
from rljax.losses import implicit_reward as implicit_op_by_op
from rljax.losses import policy
from rljax.losses import reward_model as op_by_op
from rljax.losses.policy import PolicyOutputs

reward_model, implicit_reward = Compiled(op_by_op), Compiled(implicit_op_by_op)


def gradient_of(f):
    """Its gradient as one program."""
    return jax.jit(jax.grad(f))


# -- reward models


def test_worked_example_bradley_terry():
    example = worked_example("rm.bt")
    x, p, want = (example[k] for k in ("inputs", "params", "outputs"))
    scores, batch = sums(x["r_chosen"], x["r_rejected"])
    scores = scores[:, 0]

    def run(batch=batch, **options):
        return reward_model.bradley_terry(scores, batch, **options)

    losses, metrics = run()
    close(losses, np.array(want["per_pair"]), 1e-6)
    assert float(jnp.mean(metrics["accuracy"])) == want["accuracy"]
    assert float(jnp.mean(metrics["margin"])) == pytest.approx(want["mean_margin"])
    assert float(jnp.mean(run(center=p["center_coef"])[0])) == pytest.approx(
        want["loss_with_center"], rel=1e-6
    )
    margins = np.stack([x["margin"], np.zeros(2)], axis=1).ravel() + 7.0  # their difference counts
    far = batch.replace(scores=jnp.asarray(margins))
    assert float(jnp.mean(run(far, margin=True)[0])) == pytest.approx(want["loss_margin"], rel=1e-6)
    close(run(far)[0], np.array(want["per_pair"]), 1e-6)  # off by default
    with pytest.raises(InputError, match="scores"):
        run(batch.replace(scores=None), margin=True)
    pulled = gradient_of(lambda s: jnp.mean(reward_model.bradley_terry(s, batch)[0]))(scores)
    close(pulled[::2], np.array(want["grad_r_chosen"]), 1e-6)
    close(pulled[1::2], np.array(want["grad_r_rejected"]), 1e-6)


def test_worked_example_cost_of_a_labelled_pair():
    example = worked_example("safe_rlhf.cost_loss")
    x, want = example["inputs"], example["outputs"]
    costs = jnp.array([x["c_less_harmful"], x["c_more_harmful"]])  # the safer one comes first
    batch = labelled([x["sign_less"]], [x["sign_more"]])
    loss, metrics = reward_model.cost_preference(costs, batch)
    assert float(loss[0]) == pytest.approx(want["loss"], abs=1e-6)
    assert want["loss"] == pytest.approx(want["pair"] + want["cls_more"] + want["cls_less"])
    assert float(metrics["accuracy"][0]) == float(metrics["sign_accuracy"][0]) == 1
    pulled = gradient_of(lambda c: reward_model.cost_preference(c, batch)[0].sum())(costs)
    less, more = float(costs[0]), float(costs[1])
    order = sigmoid(less - more)
    close(pulled, np.array([order + sigmoid(less), -order - sigmoid(-more)]), 1e-6)


def labelled(safer, harmful):
    """Pairs with these signs, at one of three tokens; what stands behind them is not read."""
    signs = np.stack([safer, harmful], axis=1).reshape(-1, 1).astype(float)
    mask = np.ones_like(signs) * [[1, 1, 0]]
    return response_batch(mask, costs=signs * [[0, 1, 0]] + np.where(mask > 0, 0, np.nan))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_the_cost_of_pairs_with_all_labels():
    """Both safe, one of them, both unsafe: value, gradient and both accuracies by hand."""
    costs = jnp.array([-2.0, -0.5, 0.3, 0.2, 1.5, -0.7])
    safer, harmful = np.array([-1.0, -1.0, 1.0]), np.array([-1.0, 1.0, 1.0])
    batch = labelled(safer, harmful)
    loss, metrics = reward_model.cost_preference(costs, batch)
    low, high = np.asarray(costs[::2]), np.asarray(costs[1::2])
    terms = [high - low, safer * low, harmful * high]
    close(loss, -sum(np.log(sigmoid(t)) for t in terms), 1e-6)
    np.testing.assert_array_equal(metrics["accuracy"], [1, 0, 0])
    np.testing.assert_array_equal(metrics["sign_accuracy"], [1, 0.5, 0.5])
    pulled = gradient_of(lambda c: reward_model.cost_preference(c, batch)[0].sum())(costs)
    order = sigmoid(low - high)
    close(pulled[::2], order - safer * sigmoid(-safer * low), 1e-6)
    close(pulled[1::2], -order - harmful * sigmoid(-harmful * high), 1e-6)
    with pytest.raises(InputError, match="costs"):
        reward_model.cost_preference(costs, batch.replace(costs=None))
    with pytest.raises(InputError, match="one per row"):
        reward_model.cost_preference(costs[:, None], batch)


def test_bradley_terry_ignores_a_shift_and_a_tie_pulls_scores_together():
    scores, (_, batch) = jnp.linspace(-2.0, 3.0, ROWS), sample()
    batch = batch.replace(scores=None)

    def loss(s, **o):
        return reward_model.bradley_terry(s, batch, **o)[0]

    close(loss(scores + 3.0), loss(scores))
    assert not np.allclose(loss(scores + 3.0, center=0.1), loss(scores, center=0.1))
    tie = gradient_of(lambda s: jnp.sum(loss(s, label_smoothing=0.5)))
    assert not np.asarray(tie(jnp.ones(ROWS))).any()
    pulled = np.asarray(tie(scores))
    assert (pulled[::2] < 0).all() and (pulled[1::2] > 0).all()  # rejected stand higher: down
    with pytest.raises(InputError, match="one per row"):
        reward_model.bradley_terry(scores[:, None], batch)


def test_worked_example_step_regression():
    example = worked_example("prm.regression")
    x, want = example["inputs"], example["outputs"]
    scores = jnp.array([[9.0, *x["score"], np.nan]])
    mask = np.array([[0, 1, 1, 1, 1, 1, 0]])
    batch = response_batch(mask, process_rewards=np.array([[np.nan, *x["label"], np.nan]]))

    def total(scores):
        losses, metrics = reward_model.step_regression(scores, batch)
        return jnp.sum(losses * mask) / 5, metrics

    (loss, metrics), pulled = jax.jit(jax.value_and_grad(total, has_aux=True))(scores)
    assert float(loss) == pytest.approx(want["mse"])
    close(pulled, np.array([[0.0, *want["grad_score"], 0.0]]))
    quotient = jnp.sum(metrics["sign_correct"] * mask) / jnp.sum(metrics["non_neutral"] * mask)
    assert float(quotient) == want["sign_accuracy_nonneutral"]
    squashed, _ = reward_model.step_regression(jnp.full((1, 7), 50.0), batch, squash="tanh")
    close(squashed[0, 1:6], (1.0 - np.array(x["label"])) ** 2, 1e-6)


def test_step_classification_is_cross_entropy_at_labelled_tokens():
    logits = jnp.array([[[0.0, 2.0], [np.nan, 0.0], [1.0, -1.0], [3.0, 0.0]]])
    mask = np.array([[1, 0, 1, 1]])
    batch = response_batch(mask, process_rewards=np.array([[1.0, 7.0, 1.0, -1.0]]))
    losses, metrics = reward_model.step_classification(logits, batch)
    close(losses[0, [0, 2, 3]], np.log1p(np.exp([-2.0, 2.0, -3.0])))
    right, counted = metrics["accuracy"]
    assert right[0, [0, 2, 3]].tolist() == [1.0, 0.0, 1.0]
    assert counted[0].tolist() == [True, False, True, True]
    pulled = gradient_of(
        lambda z: jnp.sum(jnp.where(mask > 0, reward_model.step_classification(z, batch)[0], 0.0))
    )(logits)
    assert np.isfinite(pulled).all() and not np.asarray(pulled[0, 1]).any()


def test_step_classification_learns_a_share_as_it_is_and_a_neutral_step_as_neither():
    """Gradients by hand: p(right) less the share of right answers, (1 + label) / 2, whose label
    0 is a tie and counts in no accuracy."""
    logits = jnp.array([[[0.3, 1.3], [2.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, -1.0]]])
    labels = np.array([[0.0, 0.0, 0.0, 0.2, -0.6]])
    batch = response_batch(np.ones((1, 5)), process_rewards=labels)
    loss, metrics = reward_model.step_classification(logits, batch)
    right = sigmoid(np.asarray(logits[..., 1] - logits[..., 0]))
    share = (1 + labels) / 2
    close(loss, -share * np.log(right) - (1 - share) * np.log(1 - right), 1e-6)
    pulled = gradient_of(lambda z: reward_model.step_classification(z, batch)[0].sum())(logits)
    close(pulled[..., 1], right - share, 1e-6)
    close(pulled[..., 0], share - right, 1e-6)
    assert not np.asarray(pulled[0, 2]).any() and pulled[0, 0, 1] > 0 > pulled[0, 1, 1]
    _, sums = update.weighted_loss(loss, metrics, batch, batch.mask)
    assert [float(x) for x in sums["accuracy"]] == [2.0, 2.0]


def test_group_accuracy_counts_pairs_with_different_labels():
    _, batch = sample()
    batch = take(batch, np.arange(6)).replace(
        scores=jnp.array([1.0, -1.0, -1.0, 1.0, 1.0, 1.0]),
        group=jnp.array([4, 4, 4, 9, 9, 9], jnp.int32),
    )
    rewards = jnp.array([0.5, 0.7, 0.1, 3.0, 2.0, 1.0])
    found = implicit_reward.group_accuracy(rewards, batch)
    close(found, np.full(6, 0.5))  # one of two; no pair of the second group differs
    better = implicit_reward.group_accuracy(rewards.at[1].set(0.2), batch)
    close(better, np.array([1.0, 1.0, 1.0, 0.5, 0.5, 0.5]))


def test_dynamic_fine_tuning_has_the_gradient_of_minus_the_probability():
    logps, batch = sample(garbage=np.nan)

    def total(x, f):
        return jnp.sum(f(x) * batch.mask)

    ours = jax.grad(total)(
        logps, lambda x: policy.dynamic_fine_tuning(PolicyOutputs(x, x), batch)[0]
    )
    clean = jnp.where(batch.mask > 0, logps, 0.0)
    close(ours, jax.grad(total)(clean, lambda x: -jnp.exp(x)))


def test_chord_phi_has_the_value_and_the_gradient_of_its_formula():
    """p (1 - p) -log p at each token, the weight constant: by numpy, in float64; exact where p
    rounds to 1, and 0 where it is."""
    logps, batch = sample(garbage=np.nan)
    logps = logps.at[0, 2].set(-1e-12) if batch.mask[0, 2] else logps
    mask = np.asarray(batch.mask) > 0

    def total(x):
        loss, _ = policy.chord_phi(PolicyOutputs(x, x), batch)
        return jnp.sum(loss * batch.mask), loss

    gradient, loss = jax.grad(total, has_aux=True)(logps)
    x = np.where(mask, np.asarray(logps, np.float64), 0.0)
    weight = np.exp(x) * -np.expm1(x)
    close(loss, np.where(mask, -weight * x, 0.0))
    close(gradient, np.where(mask, -weight, 0.0))
    half = jnp.full_like(logps, np.log(0.5))
    heaviest = jax.grad(lambda x: total(x)[0])(half)
    close(heaviest, np.where(mask, -0.25, 0.0))
    assert (np.abs(gradient) <= 0.25).all()
