"""Worked examples that belong to no room's own test: heads, controllers, bonuses, empty batches,
curves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import compiled, worked_example
from golden_checks.common import reduced, response_batch

from rljax import learn as update
from rljax.errors import InputError
from rljax.evaluation.scaling import fit_sigmoid, sigmoid_curve
from rljax.kernels.logprob import token_logprobs
from rljax.losses import policy
from rljax.losses.implicit_reward import implicit_reward_classification
from rljax.roles import KLController

pytestmark = pytest.mark.smoke
logprobs = compiled(token_logprobs)


def test_logprobs_and_entropy_at_two_temperatures():
    example = worked_example("conv.logp_entropy")
    logits = jnp.asarray(example["inputs"]["logits"], jnp.float32)
    targets = jnp.asarray(example["inputs"]["targets"], jnp.int32)
    head = np.eye(logits.shape[-1], dtype=np.float32)
    targets = targets.reshape(logits.shape[:-1])
    logp, entropy, _ = logprobs(logits, head, targets)
    want = example["outputs"]
    np.testing.assert_allclose(logp, want["log_prob"], atol=1e-5)
    np.testing.assert_allclose(entropy, want["entropy"], atol=1e-5)
    cold = logprobs(logits, head, targets, temperature=example["params"]["temperature"])[0]
    np.testing.assert_allclose(cold, want["log_prob_temp"], atol=1e-5)


def test_supervised_loss_accuracy_and_perplexity():
    example = worked_example("sft.masked_ce")
    x, want = example["inputs"], example["outputs"]
    logits = jnp.asarray(x["logits"], jnp.float32)
    batch = response_batch(x["loss_mask"], jnp.float32)
    targets = jnp.asarray(x["targets"], jnp.int32)

    head = np.eye(logits.shape[-1], dtype=np.float32)

    def loss(logits, impl="xla"):
        found = token_logprobs(logits, head, targets, with_greedy=True, impl=impl)
        now = policy.PolicyOutputs(found[0], found[1], found[3])
        value, metrics = policy.negative_log_likelihood(now, batch)
        return jnp.sum(update.token_mean(batch) * value), (value, metrics["token_accuracy"])

    found = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    for impl in ("xla", "reference"):
        (total, (nll, right)), gradient = jax.device_get(found(logits, impl))
        assert float(total) == pytest.approx(want["loss_token_mean"], abs=1e-6)
        assert float(np.exp(total)) == pytest.approx(want["ppl"], rel=1e-6)
        mask = np.asarray(batch.mask)
        accuracy = np.sum(mask * right) / np.sum(mask)
        assert float(accuracy) == want["token_accuracy"]
        np.testing.assert_allclose(gradient, want["grad_logits"], atol=1e-6)
        keep = np.asarray(x["loss_mask"]) > 0
        np.testing.assert_allclose(nll[keep], np.asarray(want["nll"])[keep], atol=1e-6)


def test_an_implicit_reward_model_is_a_classifier_of_sequences():
    example = worked_example("prime.rm_loss")
    x, want = example["inputs"], example["outputs"]
    q, right = jnp.asarray(x["q"]), jnp.asarray(x["acc"])
    batch = response_batch(x["mask"], jnp.float32).replace(
        ref_logprobs=jnp.zeros_like(q), scores=right
    )

    def loss(q):
        per_row, metrics = implicit_reward_classification(
            policy.PolicyOutputs(q, q), batch, beta=example["params"]["beta"]
        )
        return jnp.mean(per_row), (per_row, metrics["implicit_reward"])

    found = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (total, (per_row, score)), gradient = found(q)
    assert float(total) == pytest.approx(want["loss"], abs=1e-6)
    np.testing.assert_allclose(per_row, want["per_seq"], atol=1e-6)
    np.testing.assert_allclose(score, want["seq_score"], atol=1e-6)
    np.testing.assert_allclose(gradient, want["grad_q"], atol=1e-6)


def test_the_entropy_of_huge_logits_keeps_its_digits():
    """lse - sum p z would lose them: the difference of two numbers near 4e4."""
    logits = jnp.array([[[4e4, 4e4 - 8.0, 4e4 - 9.0]]])
    eye = np.eye(3, dtype=np.float32)
    logp, entropy, _ = jax.device_get(logprobs(logits, eye, np.zeros((1, 1), np.int32)))
    p = np.exp([0.0, -8.0, -9.0])
    p /= p.sum()
    assert float(entropy[0, 0]) == pytest.approx(-(p * np.log(p)).sum(), rel=1e-4)
    assert float(logp[0, 0]) == pytest.approx(np.log(p[0]), rel=1e-4)


def test_adaptive_controller():
    example = worked_example("kl.adaptive")
    p = example["params"]
    for kl, want in zip(example["inputs"]["current_kl"], example["outputs"]["beta"], strict=True):
        role = KLController(jnp.float32(1.0), p["target"], float(p["horizon"]))
        beta = p["beta0"] * role.update(jnp.float32(kl), p["n_steps"]).state
        assert float(beta) == pytest.approx(want, rel=1e-5)


def test_the_total_is_policy_plus_kl_minus_entropy():
    example = worked_example("ppo.entropy_bonus")
    x, p = example["inputs"], example["params"]
    batch = response_batch([[1.0]], jnp.float32)
    objective = update.Objective(
        model=lambda params, b: params,
        terms=lambda out, b: (
            [
                jnp.full((1, 1), x["pg_loss"]) + 0 * out,
                p["kl_coef"] * jnp.full((1, 1), x["kl"]),
                -p["ent_coef"] * jnp.full((1, 1), x["entropy"]),
            ],
            {},
        ),
        reductions=(update.token_mean,) * 3,
        corrected=(True, False, False),
    )
    run = jax.jit(lambda params, batch: update.loss_and_gradient(params, batch, objective, 1)[0])
    loss = run(jnp.zeros((1, 1)), batch)
    assert float(loss) == pytest.approx(example["outputs"]["total"], abs=1e-6)


@pytest.mark.parametrize(
    "reduction",
    [update.token_mean, update.seq_mean_token_sum, update.seq_mean_token_mean],
    ids=lambda f: f.__name__,
)
def test_an_empty_microbatch_is_exactly_zero(reduction):
    example = worked_example("edge.empty_batch")
    x = example["inputs"]
    batch = response_batch(
        x["response_mask"], jnp.float32, old_logprobs=x["old_log_prob"], advantages=x["advantages"]
    )

    @jax.jit
    def run(logp, batch):
        def clipped(logp, batch):
            return policy.ppo_clip(policy.PolicyOutputs(logp, logp), batch)

        return reduced(clipped, logp, batch, reduction(batch))[:2]

    loss, gradient = run(jnp.asarray(x["log_prob"]), batch)
    assert float(loss) == example["outputs"]["loss"]
    np.testing.assert_array_equal(gradient, example["outputs"]["grad"])


def test_scaling_curve_and_its_fit():
    example = worked_example("scalerl.sigmoid")
    p, compute = example["params"], example["inputs"]["C"]
    curve = dict(start=p["R0"], asymptote=p["A"], midpoint=p["C_mid"], steepness=p["B"])
    np.testing.assert_allclose(sigmoid_curve(compute, **curve), example["outputs"]["R"], rtol=1e-5)
    grid = np.geomspace(200, 30_000, 25)
    noise = np.random.default_rng(0).normal(0, 0.004, grid.size)
    found = fit_sigmoid(grid, sigmoid_curve(grid, **curve) + noise, start=p["R0"])
    assert found["asymptote"] == pytest.approx(p["A"], abs=0.01)
    assert found["midpoint"] == pytest.approx(p["C_mid"], rel=0.05)
    assert found["steepness"] == pytest.approx(p["B"], rel=0.1) and found["r2"] > 0.99
    spoilt = sigmoid_curve(grid, **curve)
    spoilt[:3] = 0.5  # what the first steps did is not the curve's
    assert fit_sigmoid(grid, spoilt, start=p["R0"], skip=3)["r2"] > 0.9999
    with pytest.raises(InputError, match="at least 4 pairs"):
        fit_sigmoid([1, 2, 3], [0.1, 0.2, 0.3], start=0.0)
