"""What the formulas promise, on problems that can be enumerated: the policy-gradient theorem,
returns of k steps, the variance of a baseline, importance sampling, and what a clip is for."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import compiled, lanes
from golden_checks.common import response_batch

from rljax.advantages import group_relative, rloo
from rljax.batch import Batch
from rljax.correction import rollout_correction
from rljax.kernels.gae import gae
from rljax.learn import seq_mean_token_mean, seq_mean_token_sum_norm, token_mean
from rljax.learn.metrics import sample_metrics
from rljax.losses.policy import PolicyOutputs, policy_gradient, ppo_clip

random = np.random.default_rng


def one_token_each(logprobs, **fields) -> Batch:
    """Rows of a prompt's token and one that the policy chose; [R] fields stand at the latter."""
    rows = len(logprobs)
    spread = {n: jnp.stack([jnp.zeros(rows), jnp.asarray(x)], axis=1) for n, x in fields.items()}
    return Batch(
        tokens=jnp.ones((rows, 2), jnp.int32),
        segment_ids=jnp.ones((rows, 2), jnp.int32),
        positions=jnp.tile(jnp.arange(2, dtype=jnp.int32), (rows, 1)),
        mask=jnp.tile(jnp.array([0.0, 1.0]), (rows, 1)),
        **spread,
    )


def at_token(x):
    return jnp.stack([jnp.zeros_like(x), x], axis=1)


@pytest.mark.parametrize("actions", lanes([3], [7]))
@pytest.mark.parametrize("baseline", [0.0, 1.7])
def test_the_score_function_estimate_is_the_gradient_of_the_expected_reward(actions, baseline):
    """Of a bandit with all actions enumerated: sum over a of pi(a) grad(loss of a) against central
    differences of J(theta) = sum pi(a) r(a), with any baseline."""
    rng = random(actions)
    theta, reward = rng.normal(0, 1, actions), rng.normal(0, 1, actions)

    def expected(theta):
        return np.sum(np.exp(theta) * reward) / np.sum(np.exp(theta))

    def estimate(theta):
        logprobs = jax.nn.log_softmax(theta)
        batch = one_token_each(logprobs, advantages=reward - baseline)
        loss, _ = policy_gradient(PolicyOutputs(at_token(logprobs), None), batch)
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(logprobs)) * loss[:, 1])

    with jax.enable_x64(True):
        got = -np.asarray(jax.jit(jax.grad(estimate))(jnp.asarray(theta)))
    step = 1e-6 * np.eye(actions)
    wanted = [(expected(theta + d) - expected(theta - d)) / 2e-6 for d in step]
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.97, 0.0), (0.9, 1.0)])
def test_gae_is_the_weighted_sum_of_td_errors_and_of_k_step_advantages(gamma, lam):
    """A = sum (gamma lam)^l delta; the k-step advantage is the k-step return less V, and the sum of
    the first k discounted TD errors; and GAE is their mean with weights (1 - lam) lam^(k - 1)."""
    rng, steps = random(5), 9
    reward, value = rng.normal(0, 1, steps), rng.normal(0, 1, steps)
    with jax.enable_x64(True):
        got, returns = gae(reward[None], value[None], np.ones((1, steps)), gamma=gamma, lam=lam)
    after = np.append(value[1:], 0.0)
    delta = reward + gamma * after - value
    for t in range(steps):
        left = steps - t
        k_step = []
        for k in range(1, left + 1):
            k_return = sum(gamma**j * reward[t + j] for j in range(k)) + gamma**k * after[t + k - 1]
            k_step.append(sum(gamma**j * delta[t + j] for j in range(k)))
            assert k_step[-1] == pytest.approx(k_return - value[t])
        weights = [(1 - lam) * lam ** (k - 1) for k in range(1, left)] + [lam ** (left - 1)]
        by_definition = sum((gamma * lam) ** j * delta[t + j] for j in range(left))
        np.testing.assert_allclose(got[0, t], by_definition, rtol=1e-9)
        np.testing.assert_allclose(got[0, t], np.dot(weights, k_step), rtol=1e-9)
        np.testing.assert_allclose(returns[0, t], by_definition + value[t], rtol=1e-9)


def test_of_all_baselines_tried_the_true_value_has_the_lowest_variance():
    """A random tree of two actions and four steps, all paths enumerated: the variance of the Monte
    Carlo advantage (gamma = lam = 1) around each baseline of the state."""
    rng, steps = random(11), 4
    for _ in range(5):
        chance = {p: rng.uniform(0.1, 0.9) for n in range(steps) for p in np.ndindex(*[2] * n)}
        reward = {p: rng.normal() for n in range(1, steps + 1) for p in np.ndindex(*[2] * n)}

        def value(state, chance=chance, reward=reward):
            if len(state) == steps:
                return 0.0
            ways = (((0,), 1 - chance[state]), ((1,), chance[state]))
            return sum(p * (reward[state + a] + value(state + a)) for a, p in ways)

        paths = list(itertools.product((0, 1), repeat=steps))
        of_path = [
            np.prod([chance[p[:t]] if p[t] else 1 - chance[p[:t]] for t in range(steps)])
            for p in paths
        ]
        rewards = np.array([[reward[p[: t + 1]] for t in range(steps)] for p in paths])
        true = np.array([[value(p[:t]) for t in range(steps)] for p in paths])
        noise = {p: rng.normal(0, 0.3) for p in chance}
        wrong = np.array([[noise[p[:t]] for t in range(steps)] for p in paths])
        tried = {"true": true, "none": 0 * true, "the start's": 0 * true + true[0, 0]}
        tried |= {f"{c} x true": c * true for c in (0.5, 0.9, 1.1, 2.0)}
        tried |= {"true and noise": true + wrong, "noise": wrong}
        spread = {}
        for name, baseline in tried.items():
            with jax.enable_x64(True):
                got, _ = gae(rewards, baseline, np.ones_like(rewards), gamma=1.0, lam=1.0)
            spread[name] = np.sum(np.array(of_path)[:, None] * np.asarray(got) ** 2)
        assert min(spread, key=spread.get) == "true", spread


def test_importance_weights_give_means_under_the_other_policy():
    """E over beta of (ratio f) = E over theta of f, by the weights that training uses, on a
    categorical."""
    rng, actions = random(2), 6
    ours, theirs = (np.log(rng.dirichlet(np.ones(actions) * 3)) for _ in range(2))
    f = rng.normal(0, 1, actions)
    with jax.enable_x64(True):
        batch = one_token_each(ours, old_logprobs=ours, sampler_logprobs=theirs)
        correct = compiled(rollout_correction)
        corrected, _ = correct(batch, mode="truncate", level="token", upper=1e6)
    ratio = np.asarray(corrected.weights[:, 1])
    assert ratio.max() > 1.3 and ratio.min() < 0.7
    np.testing.assert_allclose(ratio, np.exp(ours - theirs), rtol=1e-9)
    np.testing.assert_allclose(np.sum(np.exp(theirs) * ratio * f), np.sum(np.exp(ours) * f))


def test_a_ratio_that_nothing_bounds_blows_the_loss_up_and_a_clip_keeps_it():
    """The same batch, one token of which has become e^15 times as likely."""
    logprobs = jnp.array([-1.0, -0.5, -2.0, -0.1])
    old, clip = logprobs - jnp.array([0.05, -0.1, 0.0, 15.0]), compiled(ppo_clip)
    for advantage, bounded in ((1.0, True), (-1.0, False)):
        batch = one_token_each(logprobs, old_logprobs=old, advantages=jnp.full(4, advantage))
        policy = PolicyOutputs(at_token(logprobs), None)
        clipped, _ = clip(policy, batch, dual_clip=None)
        both, _ = clip(policy, batch, dual_clip=3.0)
        free, _ = clip(policy, batch, clip_low=1.0, clip_high=1e9, dual_clip=None)
        assert float(jnp.abs(free).max()) == pytest.approx(np.exp(15.0), rel=1e-4)
        # PPO's own clip bounds gains alone; a loss that grows is bounded by the dual clip.
        assert float(jnp.abs(clipped).max()) == (
            pytest.approx(1.2) if bounded else pytest.approx(np.exp(15.0), rel=1e-4)
        )
        assert float(jnp.abs(both).max()) <= 3.0


def test_the_correlation_of_reward_and_length_is_pearsons():
    rng, rows, width = random(4), 12, 9
    lengths = rng.integers(1, 8, rows)
    column = np.arange(width)[None, :]
    mask = ((column > 0) & (column <= lengths[:, None])).astype(np.float32)
    rewards = np.zeros((rows, width), np.float32)
    scores = 0.3 * lengths + rng.normal(0, 1, rows)
    rewards[np.arange(rows), lengths] = scores
    batch = Batch(
        tokens=jnp.ones((rows, width), jnp.int32),
        segment_ids=jnp.asarray(column <= lengths[:, None], jnp.int32),
        positions=jnp.asarray(column * (column <= lengths[:, None]), jnp.int32),
        mask=jnp.asarray(mask),
        rewards=jnp.asarray(rewards),
        group=jnp.asarray(np.arange(rows) // 4, jnp.int32),
        finish_reason=jnp.zeros(rows, jnp.int32),
    )
    described = jax.jit(sample_metrics)
    got = described(batch)["reward/length_correlation"]
    assert float(got) == pytest.approx(np.corrcoef(scores, lengths)[0, 1], rel=1e-4)
    flat = batch.replace(rewards=jnp.where(batch.rewards != 0, 1.0, 0.0))
    assert float(described(flat)["reward/length_correlation"]) == 0.0


# -- groups: baselines, deviations, lengths


def rewarded(rewards, lengths=None) -> Batch:
    """One group of responses, each with its reward at its last token."""
    lengths = np.ones(len(rewards), int) if lengths is None else np.asarray(lengths)
    column = np.arange(lengths.max())
    mask = column < lengths[:, None]
    last = column == lengths[:, None] - 1
    return response_batch(mask, group=np.zeros(len(rewards)), rewards=last * rewards[:, None])


def gradient(batch: Batch, reduction) -> np.ndarray:
    """d loss / d log-prob of every token, [R, S], of the policy gradient under a reduction."""

    def loss(logprobs):
        return jnp.sum(reduction(batch) * policy_gradient(PolicyOutputs(logprobs, None), batch)[0])

    return np.asarray(jax.jit(jax.grad(loss))(jnp.zeros(batch.mask.shape)))


@pytest.mark.parametrize("k", lanes([2, 4], [3, 8]))
def test_the_mean_of_the_others_is_the_mean_of_all_up_to_a_factor(k):
    """r - mean of the k - 1 others = k / (k - 1) (r - mean of all k)."""
    with jax.enable_x64(True):
        batch = rewarded(random(k).normal(size=k))
        others, centred = compiled(rloo)(batch), compiled(group_relative)(batch, std="none")
        np.testing.assert_allclose(centred, (k - 1) / k * others, rtol=1e-12)


@pytest.mark.parametrize("seed", lanes([0], [1, 2]))
def test_rloo_raises_samples_above_the_average_and_lowers_those_below(seed):
    """The loss falls where the log-prob of a sample above the mean rises, or of one below falls."""
    with jax.enable_x64(True):
        rewards = random(seed).normal(size=8)
        batch = rewarded(rewards, random(seed).integers(1, 6, 8))
        batch = batch.replace(advantages=rloo(batch))
        slope = gradient(batch, token_mean)
    above = np.sign(rewards - rewards.mean())[:, None] * np.asarray(batch.mask)
    np.testing.assert_array_equal(np.sign(-slope), above)


def test_with_its_reward_at_the_end_a_response_is_one_action():
    """The gradient of RLOO is that of the log-prob of the whole response: it is the same at all of
    its tokens, -(r - mean of the others) each, over the number of tokens in the batch."""
    with jax.enable_x64(True):
        rewards, lengths = random(0).normal(size=4), np.array([1, 5, 3, 2])
        batch = rewarded(rewards, lengths)
        slope = gradient(batch.replace(advantages=rloo(batch)), token_mean)
        others = (rewards.sum() - rewards) / 3
        want = -(rewards - others)[:, None] * np.asarray(batch.mask) / lengths.sum()
    np.testing.assert_allclose(slope, want, rtol=1e-12)


def test_a_mean_over_each_length_favours_tokens_of_short_responses():
    """Dr. GRPO, arXiv 2503.20783: of equal advantages a token counts 1 / (rows x its response's
    length) under the mean over each length, and the same everywhere under the mean over tokens or
    over a constant."""
    lengths = np.array([2, 4, 6, 8])
    with jax.enable_x64(True):
        batch = rewarded(np.ones(4), lengths)
        batch = batch.replace(advantages=jnp.asarray(batch.mask))
        by_length = gradient(batch, seq_mean_token_mean)[:, 0]
        np.testing.assert_allclose(by_length, -1 / (4 * lengths), rtol=1e-12)
        constant = functools.partial(seq_mean_token_sum_norm, max_tokens=8)
        for reduction in (token_mean, constant):
            of_token = gradient(batch, reduction)[:, 0]
            np.testing.assert_allclose(of_token, of_token[0], rtol=1e-12)


def test_dividing_by_the_deviation_favours_prompts_that_are_very_hard_or_very_easy():
    """Dr. GRPO: the push of a prompt of 8 samples, the sum of the sizes of its advantages. Against
    one that half of the samples solve, one that a single sample solves has 0.44 of the push without
    the deviation, and 0.66 with it."""

    def push(right, std):
        rewards = (np.arange(8) < right).astype(float)
        return float(jnp.abs(group_relative(rewarded(rewards), std=std, eps=0.0)).sum())

    with jax.enable_x64(True):
        plain, divided = (push(1, std) / push(4, std) for std in ("none", "sample"))
        assert push(1, "none") == pytest.approx(1.75) and push(4, "none") == pytest.approx(4.0)
    assert plain == pytest.approx(0.4375) and divided == pytest.approx(0.6614, abs=1e-4)
