"""Every rule that a config names reaches the learning program: none is read and then dropped."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_checks.common import response_batch
from preset_runs import Shared, preset_config

from rljax.batch import FinishReason, last_token, row_scores
from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.dataflows.algorithm import Algorithm
from rljax.dataflows.grpo import grpo
from rljax.dataflows.pf_ppo import weights_of_scored
from rljax.dataflows.steps import prepare_batch
from rljax.learn import Steps
from rljax.mesh import make_mesh
from rljax.rollout.rules.greedy import with_greedy_baseline
from rljax.setup import build
from rljax.setup.dry_run import dry_run
from rljax.shaping.scores import apply_shaping

ACTOR = types.SimpleNamespace(state=types.SimpleNamespace(step=jnp.int32(3)))


def part(stage, text):
    return resolve(text, NAMESPACES[stage])


def recipe(**fields) -> Algorithm:
    base = dict(
        samples_per_prompt=2,
        advantage=part("advantage", "group_relative(std='none')"),
        policy_loss=part("policy_loss", "ppo_clip()"),
        value_loss=part("value_loss", "squared_error()"),
        reduction=part("reduction", "token_mean()"),
        steps=Steps(rows=6, microbatch_rows=6),
    )
    return Algorithm(**{**base, **fields})


@pytest.fixture
def batch():
    """Three groups of two; row 1 was cut off, group 1 is dead, group 2 is live."""
    lengths = np.array([2, 3, 1, 2, 3, 2])
    mask = np.arange(3)[None] < lengths[:, None]
    made = response_batch(
        mask,
        jnp.float32,
        scores=[1, 0, 1, 1, 0, 1],
        group=[0, 0, 1, 1, 2, 2],
        old_logprobs=np.where(mask, -1.0, np.nan),
        ref_logprobs=np.where(mask, -1.5, np.nan),
        sampler_logprobs=np.where(mask, -1.25, np.nan),
        rewards=np.zeros(mask.shape),
        finish_reason=[0, FinishReason.LENGTH, 0, 0, 0, 0],
        policy_version=np.full(mask.shape, 1),
    )
    return made.replace(rewards=last_token(made) * made.scores[:, None])


def row_advantages(batch):
    return np.asarray(jnp.max(jnp.abs(batch.advantages), axis=1) * jnp.sign(batch.advantages[:, 0]))


def prepared(batch, cfg, *, actor):
    """prepare_batch as one program: op by op, every operation would compile by itself."""
    return jax.jit(lambda batch: prepare_batch(batch, cfg, actor=actor))(batch)


def live_rows(batch):
    return np.asarray(jnp.any(batch.mask > 0, axis=1)).astype(int).tolist()


@pytest.mark.slow
def test_a_filter_takes_rows_out_of_the_loss_only(batch):
    plain, metrics, _ = prepared(batch, recipe(), actor=ACTOR)
    np.testing.assert_allclose(row_advantages(plain), [0.5, -0.5, 0, 0, -0.5, 0.5])
    assert live_rows(plain) == [1] * 6 and float(metrics["filter/kept_fraction"]) == 1
    assert float(metrics["staleness/mean"]) == 2
    cut = recipe(filters=(part("filter", "overlong()"), part("filter", "live_groups()")))
    kept, metrics, _ = prepared(batch, cut, actor=ACTOR)
    assert live_rows(kept) == [1, 0, 0, 0, 1, 1]
    np.testing.assert_allclose(row_advantages(kept)[[0, 4]], [0.5, -0.5])
    assert float(metrics["filter/kept_fraction"]) == 0.5


def test_a_baseline_filter_takes_them_out_of_the_baseline_and_hides_nothing(batch):
    cut = recipe(baseline_filters=(part("filter", "overlong()"),))
    kept, metrics, _ = prepared(batch, cut, actor=ACTOR)
    assert live_rows(kept) == [1, 0, 1, 1, 1, 1]
    assert row_advantages(kept)[0] == 0  # its only sibling is gone: a group of one
    assert float(metrics["response/truncated_fraction"]) == pytest.approx(1 / 6)
    assert float(metrics["reward/mean"]) == pytest.approx(4 / 6)


def test_rejected_tokens_leave_the_loss_and_not_the_baseline(batch):
    spoilt = batch.replace(sampler_logprobs=batch.sampler_logprobs.at[0, 1].set(-6.0))
    text = "rollout_correction(mode='{}', veto=None, affects_denominator=True{})"
    reject = ", reject=(('token_ratio', None, 4.0),)"
    kept, metrics, _ = prepared(
        spoilt, recipe(correction=part("correction", text.format("truncate", reject))), actor=ACTOR
    )
    # The outcome reward sat on the rejected token: the group's baseline still counts it.
    np.testing.assert_allclose(row_advantages(kept)[:2], [0.5, -0.5])
    np.testing.assert_array_equal(kept.mask[0], [1, 0, 0])
    np.testing.assert_allclose(kept.weights[1], np.exp(0.25), rtol=1e-5)
    assert "mismatch/rollout_is_mean" in metrics


@pytest.mark.slow
def test_any_number_of_weights_of_parts_passes_the_dry_run(tmp_path):
    """Only the running reward knows its parts."""
    config = preset_config("grpo")
    for count in (1, 2, 3):
        weights = (0.5,) * count
        for fields in (
            dict(reward_shaping=(f"mixed_parts(weights={weights})",)),
            dict(advantage=f"gdpo(weights={weights})"),
        ):
            config.algorithm = dataclasses.replace(preset_config("grpo").algorithm, **fields)
            dry_run(built := build(config, jax.devices()[:1]), built.main)


@pytest.mark.smoke
def test_shaping_comes_in_order_and_before_the_kl_penalty(batch):
    rules = (
        part("shaping", "scaled(scale=2.0, shift=-0.5)"),
        part("shaping", "soft_overlong(max_tokens=3, cache_tokens=1)"),
    )
    shaped = apply_shaping(batch, rules)
    np.testing.assert_allclose(jnp.sum(shaped.rewards, axis=1), [1, -2, 1, 1, -2, 1])
    np.testing.assert_array_equal(shaped.scores, batch.scores)  # groups are judged by these
    for estimator, each in (("k1", 0.5), ("k2", 0.125)):
        options = dict(kl_in_reward=0.1, kl_reward_estimator=estimator, reward_shaping=rules)
        _, metrics, _ = prepared(batch, recipe(**options), actor=ACTOR)
        want = np.mean(np.array([1, -2, 1, 1, -2, 1]) - 0.1 * each * np.array([2, 3, 1, 2, 3, 2]))
        assert float(metrics["shaped_reward/mean"]) == pytest.approx(want, rel=1e-5)
        assert float(metrics["reward/mean"]) == pytest.approx(4 / 6)


@pytest.mark.slow
def test_the_greedy_score_is_shaped_like_the_sampled_one(batch):
    """A greedy response that is as wrong as the sampled one leaves no advantage (C5)."""
    mesh = make_mesh(devices=jax.devices()[:1])
    batch = jax.device_put(batch, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    cfg = recipe(
        reward_shaping=(part("shaping", "scaled(scale=2.0, shift=-0.5)"),),
        advantage=part("advantage", "remax()"),
    )
    greedy = jax.tree.map(lambda x: x[jnp.array([1, 2, 4])], batch)  # scores 0, 1, 0
    scores = np.asarray(row_scores(apply_shaping(greedy, cfg.reward_shaping)))
    with_values = with_greedy_baseline(batch, scores, np.ones(3, bool))
    made, _, _ = prepared(with_values, cfg, actor=ACTOR)
    np.testing.assert_allclose(row_advantages(made), [2, 0, 0, 0, 0, 2])


def test_a_failed_row_is_never_redrawn(batch):
    failed = batch.replace(mask=batch.mask.at[3].set(0), scores=batch.scores.at[3].set(0) - 2)
    for method in ("pow", "max_min", "max_random"):
        weights = np.asarray(weights_of_scored(failed, method, 2.0))
        assert weights[3] == 0 and (weights[[0, 1, 2, 4, 5]] > 0).all()


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """A scored batch, the recipe and the actor of a tiny run."""
    runs = Shared(tmp_path_factory.mktemp("stages"))
    config = preset_config("grpo")
    run = runs.run(config)
    run.begin(run.setup.main, jax.device_put(runs.start(0), run.setup.model.shardings()))
    prompts = run.source.draw(16)
    sampled = run.roles["actor"].generate(
        prompts, jax.random.key(0), run.setup.rollouts.sampling, n=8
    )
    yield run, runs.reward(sampled, prompts)[0]
    runs.close()


def learnt(step, **fields):
    run, batch = step
    copied = jax.tree.map(jnp.copy, {k: run.roles[k] for k in ("actor", "reference")})
    cfg = run.setup.algorithm.replace(**fields)
    return grpo(batch, jax.random.key(0), cfg, **copied)


@pytest.mark.slow
def test_the_options_of_the_update_change_it(step):
    two = Steps(rows=64, microbatch_rows=64, epochs=2)
    _, plain = learnt(step, steps=two)
    assert plain["optimizer_steps"] == 4 and "trust_region_stopped_steps" not in plain
    new, held = learnt(step, steps=two, trust_region=1e-7)
    assert held["trust_region_stopped_steps"] == 3 and int(new["actor"].state.step) == 1
    _, nll = learnt(step, steps=two, positive_nll=1.0)
    assert nll["loss"] > plain["loss"] + 0.1
    # A reference elsewhere, and a second step off the sampling policy: the ratio matters.
    far = step[1]
    run, _ = step
    moved = jax.tree.map(lambda x: x * 1.5, run.roles["reference"].params)
    run.roles["reference"] = type(run.roles["reference"])(
        moved, run.roles["reference"].model, run.roles["reference"].temperature
    )
    _, once = learnt((run, far), steps=two, kl_in_loss=1.0)
    _, corrected = learnt((run, far), steps=two, kl_in_loss=1.0, kl_importance=True)
    assert once["kl_loss"] > 0.01 and once["loss"] != corrected["loss"]
