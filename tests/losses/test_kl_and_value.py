"""KL forms, value losses and the regressions on whole sequences."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import worked_example
from test_policy_examples import run, s1
from test_policy_losses import TOKEN, sample
from tiny_run import tiny_config

from rljax.losses import kl, policy, q_function, value
from rljax.losses.distillation import jsd_terms
from rljax.losses.policy import PolicyOutputs
from rljax.training import train


def test_value_clip():
    example = worked_example("value.clip")
    x, want = example["inputs"], example["outputs"]
    with jax.enable_x64(True):
        fields = {"values": x["old_values"], "returns": x["returns"]}
        fields = {k: jnp.asarray(v, jnp.float64) for k, v in fields.items()}
        batch = s1({"inputs": {"response_mask": x["mask"]}}, **fields)
        v, weights = jnp.asarray(x["values"], jnp.float64), TOKEN(batch)
        for clip, name in ((0.2, "loss"), (None, "loss_no_clip")):
            out, metrics = value.squared_error(v, batch, clip=clip)
            np.testing.assert_allclose(jnp.sum(weights * out), want[name], rtol=1e-6)
            if clip:
                np.testing.assert_allclose(jnp.sum(weights * metrics["vf_clipfrac"]), 0.5)


def test_a_value_inside_the_range_is_never_counted_as_clipped():
    random = np.random.default_rng(0)
    old, new, returns = (jnp.asarray(random.normal(size=(20, 50)), jnp.float32) for _ in range(3))
    with jax.enable_x64(True):
        batch = s1({"inputs": {"response_mask": np.ones((20, 50))}}, values=old, returns=returns)
        _, metrics = value.squared_error(new, batch, clip=10.0)
    assert float(jnp.sum(metrics["vf_clipfrac"])) == 0


def test_kl_estimators_per_token():
    example = worked_example("kl.token")
    want = example["outputs"]
    with jax.enable_x64(True):
        a, b = (
            jnp.asarray(example["inputs"][k], jnp.float64) for k in ("log_prob", "ref_log_prob")
        )
        for name in ("k1", "abs", "k2", "k3", "k3+"):
            out, pull = jax.vjp(lambda x, n=name: kl.kl_estimate(x, b, n), a)
            np.testing.assert_allclose(out, want[name.removesuffix("+")], rtol=1e-5, atol=1e-7)
            key = "grad_" + name.replace("+", "_plus")
            if key in want:
                np.testing.assert_allclose(pull(jnp.ones(3))[0], want[key], rtol=1e-5)


def exact_kl(logits, other_logits):
    """KL(softmax(logits) || softmax(other_logits)): distillation's divergence at beta 1."""
    ours, theirs = (jax.nn.log_softmax(x) for x in (logits, other_logits))
    return jnp.sum(jsd_terms(ours, theirs, beta=1.0), axis=-1)


def test_exact_kl_and_the_expectation_of_each_estimator():
    example = worked_example("kl.categorical")
    want = example["outputs"]
    with jax.enable_x64(True):
        q, p = (jnp.log(jnp.asarray(example["inputs"][k], jnp.float64)) for k in ("q", "p"))
        exact, gradient = jax.jit(jax.value_and_grad(exact_kl))(q, p)
        np.testing.assert_allclose(exact, want["kl"], rtol=1e-6)
        np.testing.assert_allclose(gradient, want["grad_kl_logits"], rtol=1e-5)
        for name in ("k1", "k2", "k3"):
            expected = jnp.sum(jnp.exp(q) * kl.kl_estimate(q, p, name))
            np.testing.assert_allclose(expected, want[f"E_{name}"], rtol=1e-5)

            def sampled(x, n=name):
                return jnp.sum(jnp.exp(q) * kl.kl_estimate(jax.nn.log_softmax(x), p, n))

            got = jax.jit(jax.grad(sampled))(q)
            np.testing.assert_allclose(got, want[f"Egrad_{name}"], rtol=1e-5, atol=1e-9)
        # With the ratio to the sampling policy, k3's expected gradient is that of the KL itself.

        @jax.jit
        @jax.grad
        def corrected(x):
            estimate = kl.importance_corrected_kl(jax.nn.log_softmax(x), p, q, "k3")
            return jnp.sum(jnp.exp(q) * estimate)

        np.testing.assert_allclose(corrected(q), want["grad_kl_logits"], rtol=1e-5)


def test_exact_kl_where_a_word_is_impossible():
    with jax.enable_x64(True):
        p = jnp.asarray([0.0, 0.5, 0.5])
        q = jnp.log(jnp.asarray([0.2, 0.4, 0.4]))
        got, gradient = jax.jit(jax.value_and_grad(exact_kl, 1))(jnp.log(p), q)
        np.testing.assert_allclose(got, np.log(0.5 / 0.4), rtol=1e-12)
        np.testing.assert_allclose(gradient, [0.2, -0.1, -0.1], rtol=1e-9)
        got, gradient = jax.jit(jax.value_and_grad(exact_kl))(jnp.log(p), jnp.log(p))  # in both
        assert got == 0 and (np.asarray(gradient) == 0).all()


def test_kl_of_two_gaussians_by_monte_carlo():
    want = worked_example("kl.gaussian_table")["outputs"]
    x = np.random.default_rng(0).normal(size=1_000_000)
    for mu in (0.1, 1.0):
        row = want[f"mu_{mu}"]
        true = row["true_kl"]
        d = jnp.asarray(((x - mu) ** 2 - x**2) / 2, jnp.float32)  # log q - log p
        for name in ("k1", "k2", "k3"):
            # kl_estimate bounds k3 by 10, which the tail at mu = 1 exceeds
            got = kl._k3(d) if name == "k3" else kl.kl_estimate(d, jnp.zeros_like(d), name)
            got = np.asarray(got, np.float64)
            bias, std = row[name]
            noise = 4 * std / np.sqrt(len(x))
            assert abs(got.mean() / true - 1 - bias) < 0.02 + noise, (mu, name)
            np.testing.assert_allclose(got.std() / true, std, rtol=0.02)


def test_trust_region_check():
    example = worked_example("trpo.check")
    x, want = example["inputs"], example["outputs"]
    with jax.enable_x64(True):
        old, new, adv = (jnp.asarray(x[k], jnp.float64) for k in ("old", "new", "adv"))
        divergence = exact_kl(jnp.log(old), jnp.log(new))
        surrogate = jnp.sum(new * adv)
        np.testing.assert_allclose(divergence, want["kl_old_new"], rtol=1e-5)
        np.testing.assert_allclose(surrogate, want["surrogate_new"], rtol=1e-6)
        accept = (divergence <= example["params"]["delta"]) & (surrogate > jnp.sum(old * adv))
        assert bool(accept) is want["accept"]


def test_kl_in_the_loss_and_in_the_reward():
    loss, reward = worked_example("kl.in_loss"), worked_example("kl.in_reward")
    with jax.enable_x64(True):
        coef = loss["params"]["coef"]

        def k3(p, b):
            return (coef * kl.kl_estimate(p.logprobs, b.ref_logprobs, "k3"), {})

        got = run(loss, k3, TOKEN, s1(loss))
        np.testing.assert_allclose(got[0], loss["outputs"]["scaled"], rtol=1e-5)
        np.testing.assert_allclose(got[1], loss["outputs"]["grad"], rtol=2e-5, atol=1e-10)
        batch = s1(reward)
        last = jnp.argmax(jnp.cumsum(batch.mask, axis=1), axis=1)
        scores = jnp.asarray(reward["inputs"]["score"], jnp.float64)
        batch = batch.replace(rewards=jnp.zeros((4, 4)).at[jnp.arange(4), last].set(scores))
        out = kl.kl_penalised_rewards(batch, coef=reward["params"]["beta"])
        np.testing.assert_allclose(out, reward["outputs"]["token_reward"], rtol=1e-5, atol=1e-9)


def test_regressions_ignore_the_mask_and_train_the_partition_head():
    with jax.enable_x64(True):
        log_z = jnp.asarray([0.1, -0.2, 0.3, 0.0])
        astar_po = functools.partial(q_function.dro_policy, tau=0.5, gradient="exact")
        for loss in (policy.trajectory_balance, astar_po):
            found = []
            for garbage in (0.0, np.nan):
                logp, entropy, batch = sample(garbage=garbage)

                def f(x, z, loss=loss, batch=batch, entropy=entropy):
                    return jnp.sum(loss(PolicyOutputs(x, entropy), batch, z)[0])

                found.append(jax.jit(jax.value_and_grad(f, (0, 1)))(logp, log_z))
            for a, b in zip(*map(jax.tree.leaves, found), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-12)
            head = np.asarray(found[0][1][1])
            assert (head != 0).all() == (loss is policy.trajectory_balance)


def test_the_partition_function_of_a_group_needs_no_head():
    """Without log_z the residuals of a group have mean 0, and one group does not move another."""
    with jax.enable_x64(True):
        logp, entropy, batch = sample()
        batch = batch.replace(group=jnp.asarray([0, 1, 0, 1], jnp.int32))

        @jax.jit
        def run(x, b):
            return policy.trajectory_balance(PolicyOutputs(x, entropy), b, weight_max=1e9)

        count = np.asarray(batch.mask).sum(axis=1)

        def mean(x):
            return np.asarray(jnp.where(batch.mask > 0, x, 0.0)).sum(axis=1) / count

        target = 15.0 * mean(batch.advantages) + mean(batch.ref_logprobs) - mean(logp)
        want = np.empty(4)
        for rows in ([0, 2], [1, 3]):
            want[rows] = target[rows].mean() - target[rows]
        first = (np.arange(4), np.asarray(batch.mask).argmax(axis=1))
        loss, metrics = run(logp, batch)
        assert (np.asarray(loss) == np.where(batch.mask > 0, loss[first][:, None], 0.0)).all()
        loss = loss[first]
        np.testing.assert_allclose(metrics["balance_residual"], np.abs(want), rtol=1e-9)
        np.testing.assert_allclose(loss, metrics["balance_weight"] * want**2, rtol=1e-9)
        moved = run(logp.at[1].add(-0.1), batch)[0][first]
        np.testing.assert_allclose(moved[np.array([0, 2])], loss[np.array([0, 2])], rtol=1e-12)
        assert abs(float(moved[3] - loss[3])) > 1e-6


@pytest.mark.slow
def test_a_policy_loss_that_reads_the_reference_gets_one(tmp_path):
    """Without any KL coefficient: the contract of the loss asks for it."""
    config = tiny_config(
        tmp_path,
        algorithm__policy_loss="trajectory_balance(beta=2.0)",
        algorithm__reduction="seq_mean_token_mean",
    )
    config.steps = 2
    assert config.algorithm.kl_in_loss == config.algorithm.kl_in_reward == 0
    train(config)
    rows = [json.loads(line) for line in open(f"{config.run_dir}/metrics.jsonl")]
    assert rows[-1]["balance_residual"] > 0
