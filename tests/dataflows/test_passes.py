"""Forward passes of the learning program: none that nothing reads, and the update is the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes
from jax.extend.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr
from preset_runs import preset_config
from test_programs import COLUMNS, CONFIG, KEY, host_batch, recipe, roles_on

from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.correction import mismatch_metrics
from rljax.dataflows import grpo, ppo, remax
from rljax.dataflows.steps import (
    apply_rollout_correction,
    compute_advantages,
    describe_batch,
    filter_rows,
    shape_rewards,
)
from rljax.learn import Steps
from rljax.learn.packing import Packing
from rljax.mesh import make_mesh
from rljax.roles import KLController, program
from rljax.setup import build
from rljax.setup.role_table import role_names

ONE = make_mesh(1, 1, 1, devices=jax.devices()[:1])
PACKING = Packing(COLUMNS, blocks=4, rows=1, sequences=4, shared=True, mesh=ONE)
TABLE = (CONFIG.vocab_size, CONFIG.embed)  # of the embedding: a forward pass looks it up once


def plain(**fields):
    """GRPO in one optimizer step, nothing but the loss reading old log-probs."""
    off = dict(kl_in_reward=0.0, kl_in_loss=0.0, entropy_coef=0.0)
    return recipe("group_relative", Steps(16, 4)).replace(**{**off, **fields})


@functools.cache
def made() -> dict:
    controller = KLController(jnp.float32(1.0), 0.1, 1e4)
    return {**roles_on(ONE), "kl_controller": controller}


def roles(*names):
    """In buffers of their own: a program donates them."""
    return jax.tree.map(jnp.copy, {name: made()[name] for name in names})


def lookups(jaxpr) -> int:
    here = sum(
        eqn.primitive.name == "gather" and eqn.invars[0].aval.shape == TABLE for eqn in jaxpr.eqns
    )
    return here + sum(
        lookups(inner) for eqn in jaxpr.eqns for inner in jaxprs_in_params(eqn.params)
    )


def passes(page, cfg, given) -> int:
    """Forward passes of the program that is lowered: what jit drops as unread is not in it."""
    positional, static = page.arguments(host_batch(), KEY, cfg, **given)
    whole = page.run.trace(*positional, **static).jaxpr.jaxpr
    return lookups(dce_jaxpr(whole, [True] * len(whole.outvars), instantiate=True)[0])


def sure(batch):
    """A filter of one's own, without a declaration: rows that the policy was sure of are out."""
    return jnp.mean(batch.old_logprobs, axis=1) < -1.0


def rewarded(batch):
    return jnp.sum(batch.rewards, axis=1) > 0


def part(stage, text):
    return resolve(text, NAMESPACES[stage])


GRPO = {
    "the update alone": (1, dict(), ()),
    "in one microbatch": (1, dict(steps=Steps(16, 16)), ()),
    "packed": (1, dict(steps=Steps(16, 4, packing=PACKING)), ()),
    "packed, with a filter": (2, dict(steps=Steps(16, 4, packing=PACKING), filters=(sure,)), ()),
    "an entropy bonus": (1, dict(entropy_coef=0.01), ()),
    "the reference": (2, dict(kl_in_loss=0.1, kl_importance=True), ("reference",)),
    "a filter that reads no log-probs": (1, dict(filters=(rewarded,)), ()),
    "minibatches": (2, dict(steps=Steps(4, 4)), ()),
    "epochs": (2, dict(steps=Steps(16, 4, epochs=2)), ()),
    "a filter": (2, dict(filters=(sure,)), ()),
    "a baseline filter": (2, dict(baseline_filters=(sure,)), ()),
    "a shaping rule": (2, dict(reward_shaping=(sure,)), ()),
    "a reduction": (2, dict(reduction=lambda b: b.mask * jnp.exp(b.old_logprobs)), ()),
    "a correction": (2, dict(correction=part("correction", "rollout_correction()")), ()),
    "KL in the reward": (3, dict(kl_in_reward=0.1), ("reference",)),
    "a KL controller": (3, dict(kl_in_loss=0.1), ("reference", "kl_controller")),
    "the optimal baseline": (3, dict(advantage=part("advantage", "optimal_token_baseline()")), ()),
    "the sampler's own": (1, dict(old_logprobs="sampler", steps=Steps(4, 4)), ()),
}


SLOW = (
    "in one microbatch",
    "packed, with a filter",
    "epochs",
    "a baseline filter",
    "a KL controller",
    "an entropy bonus",
    # What reads old log-probs here reads them as the filter does.
    "a filter that reads no log-probs",
    "a shaping rule",
    "a reduction",
    "the optimal baseline",
)


@pytest.mark.parametrize("case", lanes([name for name in GRPO if name not in SLOW], SLOW))
def test_old_log_probs_have_a_pass_of_their_own_only_where_they_are_read(case):
    count, fields, more = GRPO[case]
    assert passes(grpo, plain(**fields), roles("actor", *more)) == count


def test_other_pages_drop_it_too():
    cfg = plain(advantage=part("advantage", "gae()"))
    both = roles("actor", "critic")
    assert passes(ppo, cfg, both) == 3  # values, the critic's update, the actor's
    assert passes(ppo, cfg.replace(steps=Steps(4, 4)), both) == 4
    assert passes(remax, plain(), roles("actor")) == 1


@pytest.mark.parametrize("field", ["kl_in_loss", "kl_in_reward"])
def test_a_reference_of_coefficient_0_is_not_made(field):
    config = preset_config("grpo")
    for coefficient in (0.0, 0.1):
        config.algorithm.kl_in_loss = config.algorithm.kl_in_reward = 0.0
        setattr(config.algorithm, field, coefficient)
        setup = build(config, jax.devices()[:1])
        assert ("reference" in role_names(setup, setup.main)) == (coefficient > 0)


@program
def with_a_pass(batch, key, cfg, *, actor, reference):
    """GRPO on old log-probs that the batch brings along."""
    batch = batch.replace(ref_logprobs=reference.logprobs(batch, cfg.steps))
    batch, kept, metrics = apply_rollout_correction(batch, cfg)
    batch = compute_advantages(batch, shape_rewards(batch, cfg), cfg)
    metrics |= describe_batch(batch, batch, cfg, actor)
    batch, left = filter_rows(batch, kept, cfg)
    actor, learned = actor.update(batch, cfg.policy_loss, **cfg.update_options())
    return {"actor": actor}, {**metrics, **left, **learned}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "steps"),
    [
        ("ppo_clip()", Steps(16, 4)),
        pytest.param("ppo_clip()", Steps(16, 4, packing=PACKING), marks=pytest.mark.slow),
        pytest.param("gspo()", Steps(16, 16), marks=pytest.mark.slow),
        pytest.param("kl_cov(fraction=0.2)", Steps(16, 4), marks=pytest.mark.slow),
    ],
    ids=["microbatches", "packed", "a sequence's ratio", "whole step"],
)
def test_the_update_is_bitwise_that_with_a_separate_pass(loss, steps):
    """Parameters and every metric; kl_cov needs all rows of the step at once."""
    cfg = plain(
        policy_loss=part("policy_loss", loss), steps=steps, kl_in_loss=0.05, kl_importance=True
    )
    names, batch = ("actor", "reference"), host_batch()
    old = jax.jit(lambda actor, b: actor.logprobs(b, steps))(roles("actor")["actor"], batch)
    given = batch.replace(old_logprobs=old)
    want, metrics = with_a_pass(given, KEY, cfg, **roles(*names))
    got, own = grpo(batch, KEY, cfg, **roles(*names))
    for a, b in zip(*map(jax.tree.leaves, (got["actor"].state, want["actor"].state)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert own.keys() == metrics.keys() and "mismatch/probability_correlation" in own
    for name, value in metrics.items():
        np.testing.assert_array_equal(own[name], value, err_msg=name)
    assert float(own["ppo_kl"]) == 0 and float(own["grad_norm"]) > 0


@pytest.mark.slow
def test_the_mismatch_is_of_all_tokens_also_where_a_correction_rejects_some():
    text = (
        "rollout_correction(mode='off', reject=(('seq_mean_k3', None, 0.2),), "
        "affects_denominator=True)"
    )
    cfg, batch = plain(correction=part("correction", text)), host_batch()
    old = jax.jit(lambda actor, b: actor.logprobs(b, cfg.steps))(roles("actor")["actor"], batch)
    _, got = grpo(batch, KEY, cfg, **roles("actor"))
    want = jax.jit(mismatch_metrics)(batch.replace(old_logprobs=old))
    assert 0 < float(got["filter/kept_fraction"]) < 1
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
