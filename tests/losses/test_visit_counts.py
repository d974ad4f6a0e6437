"""The loss of expert iteration against its definition, its gradient, and packed rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_programs import COLUMNS, host_batch, roles_on

from rljax.learn import Steps, token_mean
from rljax.learn.packing import Packing
from rljax.losses.policy.common import PolicyOutputs
from rljax.losses.visit_counts import visit_cross_entropy
from rljax.mesh import make_mesh
from rljax.roles.targets import target_logprobs

ONE = make_mesh(1, 1, 1, devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def searched():
    """A batch with three targets at each policy token, one of them never visited, and garbage
    elsewhere."""
    batch, rng = host_batch(), np.random.default_rng(4)
    ids = rng.permuted(np.tile(np.arange(16), (*batch.tokens.shape, 1)), axis=-1)[..., :3]
    counts = rng.integers(1, 9, ids.shape).astype(np.float32)
    counts[..., 2] = 0
    probs = counts / counts.sum(-1, keepdims=True)
    outside = np.argwhere(np.asarray(batch.mask) == 0)
    probs[tuple(outside[::2].T)], probs[tuple(outside[1::2].T)] = np.nan, 9.0
    return batch.replace(target_ids=jnp.asarray(ids, jnp.int32), target_probs=jnp.asarray(probs))


def test_it_is_the_cross_entropy_to_the_shares_of_the_visits(searched):
    model, params = roles_on(ONE)["actor"].model, roles_on(ONE)["actor"].state.params
    found = jax.jit(lambda params, batch: target_logprobs(model, params, batch, temperature=0.7))
    policy = PolicyOutputs(*found(params, searched))
    logits = np.asarray(jax.jit(model.logits)(params, searched), np.float64) / 0.7
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    loss, metrics = jax.jit(visit_cross_entropy)(policy, searched)
    for b, t in np.argwhere(np.asarray(searched.mask) > 0):
        p, ids = np.asarray(searched.target_probs)[b, t, :2], np.asarray(searched.target_ids)[b, t]
        before = logp[b, t - 1]  # the state in which the token was chosen
        np.testing.assert_allclose(policy.targets[b, t], before[ids], atol=2e-5)
        assert float(loss[b, t]) == pytest.approx(-(p * before[ids[:2]]).sum(), abs=2e-5)
        entropy = -(p * np.log(p)).sum()
        assert float(metrics["visits_entropy"][b, t]) == pytest.approx(entropy, abs=1e-5)
        assert float(metrics["visits_kl"][b, t]) > -1e-5
    assert not np.asarray(loss)[np.asarray(searched.mask) == 0].any()


def test_its_gradient_is_minus_the_shares(searched):
    shape = searched.target_ids.shape

    def total(targets):
        zeros = jnp.zeros(shape[:2])
        return jnp.sum(visit_cross_entropy(PolicyOutputs(zeros, zeros, None, targets), searched)[0])

    found = jax.grad(total)(jnp.full(shape, -1.0))
    live = np.asarray(searched.mask)[..., None] > 0
    np.testing.assert_allclose(found, np.where(live, -np.asarray(searched.target_probs), 0.0))


@pytest.mark.slow
def test_packed_rows_take_the_same_step(searched):
    packing = Packing(COLUMNS, blocks=4, rows=1, sequences=4, shared=True, mesh=ONE)
    after = []
    for steps in (Steps(16, 16), Steps(16, 4, packing=packing)):
        actor = dataclasses.replace(roles_on(ONE)["actor"])
        new, _ = actor.update(searched, visit_cross_entropy, steps=steps, reduction=token_mean)
        after.append(jax.device_get(new.state.params))
    start = jax.device_get(roles_on(ONE)["actor"].state.params)
    moved = [
        np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (after[0], start)), strict=True)
    ]
    assert max(moved) > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), *after)
