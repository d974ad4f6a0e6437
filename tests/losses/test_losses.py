"""PPO's loss and the reductions against the worked examples; what is a constant to the losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import worked_example
from golden_checks.common import response_batch

from rljax import learn as update
from rljax.batch import Batch
from rljax.losses import kl, policy, value


def reduced(loss_of, x, batch, reduction):
    """The loss that update.py makes of it, its gradient with respect to x, and the metrics."""

    def total(x):
        selected = update.select_policy_tokens(batch)
        loss, metrics = loss_of(x, selected)
        summed, sums = update.weighted_loss(loss, metrics, selected, reduction(selected))
        return summed, {k: a / jnp.maximum(b, 1) for k, (a, b) in sums.items()}

    (loss, metrics), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(x)
    return loss, gradient, metrics


@pytest.mark.parametrize("name", ["ppo.clip", "ppo.dual_clip", "ppo.clip_higher"])
def test_ppo_clip_worked_examples(name):
    example = worked_example(name)
    inputs, p = example["inputs"], example["params"]
    with jax.enable_x64(True):
        batch = response_batch(
            inputs["response_mask"],
            old_logprobs=inputs["old_log_prob"],
            advantages=inputs["advantages"],
        )
        options = {k: p[k] for k in ("clip_low", "clip_high", "dual_clip")}
        loss, gradient, _ = reduced(
            lambda logp, b: policy.ppo_clip(policy.PolicyOutputs(logp, logp), b, **options),
            jnp.asarray(inputs["log_prob"], jnp.float64),
            batch,
            update.token_mean,
        )
    np.testing.assert_allclose(loss, example["outputs"]["loss"], rtol=1e-5)
    np.testing.assert_allclose(gradient, example["outputs"]["grad"], rtol=1e-4, atol=1e-6)


def test_ratio_is_clamped_where_its_exponential_would_overflow():
    want = worked_example("edge.ratio_clamp")["outputs"]["loss_per_token"]
    with jax.enable_x64(True):
        batch = response_batch([[1, 1]], old_logprobs=[[0.0, 0.0]], advantages=[[-1.0, 1.0]])
        logp = jnp.array([[50.0, -50.0]])
        loss, _ = policy.ppo_clip(policy.PolicyOutputs(logp, logp), batch, dual_clip=None)
    np.testing.assert_allclose(loss[0], want, rtol=1e-5)


def test_reductions_worked_example_with_an_empty_row_and_prompt_mean():
    example = worked_example("conv.agg_modes")
    with jax.enable_x64(True):
        batch = response_batch(example["inputs"]["mask"], group=example["inputs"]["group"])
        loss = jnp.asarray(example["inputs"]["loss"], jnp.float64)
        modes = {
            "token-mean": update.token_mean,
            "seq-mean-token-sum": update.seq_mean_token_sum,
            "seq-mean-token-mean": update.seq_mean_token_mean,
            "seq-mean-token-sum-norm": lambda b: update.seq_mean_token_sum_norm(b, max_tokens=3),
            "token-sum-over-Lmax": lambda b: update.token_sum_norm(b, max_tokens=3),
            "prompt-mean": update.prompt_mean,
        }
        for name, mode in modes.items():
            got = jnp.sum(mode(batch) * jnp.where(batch.mask > 0, loss, 0))
            assert float(got) == pytest.approx(example["outputs"][name], rel=1e-5), name


def test_constants_of_the_batch_get_no_gradient():
    """Old and reference log-probs, advantages, values and weights are data."""
    mask = jnp.ones((2, 3))
    key = jax.random.key(0)
    fields = {
        name: jax.random.normal(jax.random.fold_in(key, i), (2, 3))
        for i, name in enumerate(
            ("old_logprobs", "ref_logprobs", "advantages", "values", "returns", "weights")
        )
    }
    batch = Batch(
        tokens=jnp.zeros((2, 3), jnp.int32),
        segment_ids=jnp.ones((2, 3), jnp.int32),
        positions=jnp.zeros((2, 3), jnp.int32),
        mask=mask,
    )
    logp = jax.random.normal(jax.random.fold_in(key, 9), (2, 3))

    def total(fields):
        b = batch.replace(**fields)
        pg, metrics = policy.ppo_clip(policy.PolicyOutputs(logp, logp), b)
        pg = pg + policy.policy_gradient(policy.PolicyOutputs(logp, logp), b)[0]
        loss, _ = update.weighted_loss(pg, metrics, b, update.token_mean(b))
        loss = loss + jnp.sum(kl.kl_estimate(logp, b.ref_logprobs, "k3"))
        return loss + jnp.sum(value.squared_error(logp, b, clip=None)[0])

    for name, gradient in jax.jit(jax.grad(total))(fields).items():
        assert (np.asarray(gradient) == 0).all(), name
