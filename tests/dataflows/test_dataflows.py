"""What each dataflow does beyond its loss: baselines, pretraining, redrawing, adaptive KL,
correction."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_checks.common import response_batch
from preset_runs import Shared, preset_config

from rljax import setup as build
from rljax.batch import last_token, row_scores
from rljax.dataflows.algorithm import Algorithm
from rljax.dataflows.grpo import grpo
from rljax.dataflows.pf_ppo import redraw_in_groups
from rljax.dataflows.steps import (
    compute_advantages,
    filter_baseline_rows,
    mean_sequence_kl,
    shape_rewards,
)
from rljax.roles import Baseline
from rljax.rollout.rules.greedy import with_greedy_baseline
from rljax.shaping.resampling import group_rank_weights
from rljax.training.run import Run


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    runs = Shared(tmp_path_factory.mktemp("dataflows"))
    yield runs
    runs.close()


def started(shared, name, **algorithm):
    config = preset_config(name)
    config.algorithm = dataclasses.replace(config.algorithm, **algorithm)
    run = shared.run(config)
    run.begin(run.setup.main, build.initial_params(config, run.setup.model))
    return run


def numbers(role):
    return [np.asarray(x) for x in jax.tree.leaves(jax.device_get(role.state.params))]


def moved(before, after) -> bool:
    return any((a != b).any() for a, b in zip(before, after, strict=True))


@pytest.mark.slow
def test_vapo_trains_its_critic_alone_first(shared):
    config = preset_config("vapo")
    config.dataflow = "vapo(value_pretraining_steps=30)"
    run = shared.run(config)
    run.begin(run.setup.main, jax.device_put(shared.start(0), run.setup.model.shardings()))
    actor, critic = numbers(run.roles["actor"]), numbers(run.roles["critic"])
    found = [run.step() for _ in range(30)]
    assert not moved(actor, numbers(run.roles["actor"])) and "pg_clipfrac" not in found[0]
    assert moved(critic, numbers(run.roles["critic"]))
    explained = [float(row["explained_variance"]) for row in found]
    assert explained[0] == 0 and np.mean(explained[-8:]) > 0.02, explained  # it starts at V = 0
    after = run.step()
    assert moved(actor, numbers(run.roles["actor"])) and "pg_clipfrac" in after


@pytest.mark.slow
def test_remax_takes_the_greedy_score_of_the_same_prompt(shared):
    run = started(shared, "remax")
    metrics = run.step()
    assert 0 <= metrics["remax/greedy_reward"] <= 1
    mesh = run.setup.model.mesh
    batch = response_batch(
        np.ones((6, 2)), jnp.float32, group=[0, 0, 1, 1, 2, 9], scores=[1, 0, 1, 0, 1, 0]
    )
    batch = jax.device_put(batch, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    greedy = response_batch(
        [[1, 1], [1, 1], [0, 0]], jnp.float32, group=[0, 1, 2], scores=[0.25, 1.0, 0.0]
    )
    greedy = greedy.replace(rewards=last_token(greedy) * greedy.scores[:, None])
    scores, known = np.asarray(row_scores(greedy)), np.asarray(greedy.mask).any(axis=1)
    made = with_greedy_baseline(batch, scores, known)
    np.testing.assert_allclose(made.values[:4, 0], [0.25, 0.25, 1, 1])
    # The greedy reward of prompt 2 failed: its row is masked, not compared with a made-up 0.
    np.testing.assert_allclose(made.mask[:, 0], [1, 1, 1, 1, 0, 1])


@pytest.mark.slow
def test_remax_shapes_the_greedy_score_like_the_others(shared):
    """Ten more for every sample and for the baseline alike: advantages stay within the scores."""
    run = started(shared, "remax", reward_shaping=("toy.ten_more()",))
    batch, metrics = run.source.next(0, run.roles)
    cfg = run.setup.algorithm.replace(kl_in_reward=0.0)  # the scores alone

    @jax.jit
    def advantages(batch):
        return compute_advantages(batch, shape_rewards(batch, cfg), cfg).advantages

    mean = np.mean(np.asarray(advantages(batch))[np.asarray(batch.mask) > 0])
    assert abs(mean) < 2 and metrics["remax/greedy_reward"] <= 1


@pytest.mark.slow
def test_pf_ppo_redraws_within_the_prompt(shared):
    scores, group = [0.1, 0.9, 0.5, 0.2, 0.3, 0.4], [0, 0, 0, 1, 1, 1]
    batch = response_batch(np.ones((6, 2)), jnp.float32, group=group, scores=scores)
    best = redraw_in_groups(jax.random.key(0), batch, "bon")
    np.testing.assert_array_equal(best, [1, 1, 1, 5, 5, 5])
    redraw = jax.vmap(lambda key: redraw_in_groups(key, batch, "bw"))
    draws = np.asarray(jax.jit(redraw)(jax.random.split(jax.random.key(0), 300)))
    assert set(np.unique(draws[:, :3])) == {0, 1} and set(np.unique(draws[:, 3:])) == {3, 5}
    assert (draws[:, :3] == 1).mean() == pytest.approx(0.5, abs=0.06)
    weights = group_rank_weights(batch.scores, batch.group, kind="br")
    np.testing.assert_allclose(weights, [0.25, 0.5, 0.25, 0.25, 0.25, 0.5])


@pytest.mark.slow
def test_pf_ppo_over_the_whole_batch_learns_from_the_redrawn_rows(shared):
    config = preset_config("pf_ppo")
    config.dataflow = "pf_ppo(scope='batch', method='max_min')"
    run = shared.run(config)
    run.begin(run.setup.main, jax.device_put(shared.start(0), run.setup.model.shardings()))
    before = numbers(run.roles["actor"])
    assert np.isfinite(run.step()["loss"]) and moved(before, numbers(run.roles["actor"]))


@pytest.mark.slow
def test_the_running_mean_is_the_baseline_of_reinforce(shared):
    run = started(shared, "reinforce")
    first = run.step()
    assert first["baseline"] == 0 and first["advantage/max"] == pytest.approx(1)
    second = run.step()
    assert second["baseline"] == pytest.approx(first["reward/mean"], rel=1e-5)
    assert second["advantage/max"] == pytest.approx(1 - first["reward/mean"], rel=1e-4)
    role = Baseline(jnp.zeros(2))
    for x in (1.0, 0.0, 0.5):
        role = role.update(jnp.float32(x), 0.9)
    want = (0.1 * 0.81 * 1 + 0.1 * 0.5) / (0.1 * (0.81 + 0.9 + 1))
    assert float(role.value) == pytest.approx(want, rel=1e-5)


@pytest.mark.slow
def test_the_kl_coefficient_adapts_and_is_checkpointed(shared):
    run = started(shared, "ppo", kl_in_reward=0.05, kl_target=0.5, kl_horizon=1000.0)
    first = run.step()
    # At the start KL is 0, far below the target: the error is clipped at -0.2.
    want = 1 - 0.2 * 128 / 1000
    assert first["kl_controller/scale"] == pytest.approx(want, rel=1e-5)
    kl = run.step()
    error = np.clip(kl["kl_controller/kl"] / 0.5 - 1, -0.2, 0.2)
    assert kl["kl_controller/scale"] == pytest.approx(want * (1 + error * 128 / 1000), rel=1e-5)
    arrays = build.role_arrays(run.roles)
    assert float(arrays["kl_controller"]) == pytest.approx(kl["kl_controller/scale"])
    again = build.with_arrays(run.roles, {**arrays, "kl_controller": jnp.float32(3.0)})
    assert float(again["kl_controller"].state) == 3.0


def test_an_adapted_coefficient_reaches_loss_and_reward(shared):
    run = started(shared, "grpo", kl_target=0.5)
    controller = dataclasses.replace(run.roles["kl_controller"], state=jnp.float32(0.0))
    options = run.setup.algorithm.update_options(controller)
    assert float(options["kl_in_loss"]) == 0.0
    batch = response_batch(
        np.ones((2, 3)),
        jnp.float32,
        rewards=np.zeros((2, 3)),
        old_logprobs=np.full((2, 3), -1.0),
        ref_logprobs=np.full((2, 3), -1.5),
    )
    cfg = run.setup.algorithm.replace(kl_in_reward=0.2)
    half = dataclasses.replace(controller, state=jnp.float32(0.5))
    np.testing.assert_allclose(shape_rewards(batch, cfg, half).rewards, -0.05, rtol=1e-5)
    assert float(mean_sequence_kl(batch)) == pytest.approx(0.5)


@pytest.mark.slow
def test_bypass_takes_the_samplers_log_probs(shared):
    run = started(shared, "grpo", old_logprobs="sampler")
    metrics = run.step()
    assert not any(name.startswith("mismatch/") for name in metrics)  # nothing to compare with
    assert abs(metrics["ppo_kl"]) < 1e-5
    assert (
        isinstance(run.setup.algorithm, Algorithm) and run.setup.algorithm.old_logprobs == "sampler"
    )


@pytest.mark.slow
def test_correction_weighs_the_policy_loss_and_nothing_else(shared):
    """Sampler log-probs off by 0.5: weights e^0.5, capped; KL and entropy are not weighed."""
    run = started(shared, "olmorl", collect="once", entropy_coef=0.1)
    setup, roles = run.setup, run.roles
    prompts = run.source.draw(16)
    batch = roles["actor"].generate(prompts, jax.random.key(3), setup.rollouts.sampling, n=8)
    batch, _ = shared.reward(batch, prompts)
    shifted = batch.replace(sampler_logprobs=batch.sampler_logprobs - 0.5 * batch.mask)

    def copy(role):
        return jax.tree.map(jnp.copy, role)  # programs donate

    rest = dict(reference=None, kl_controller=None)
    losses = {}
    for name, made, cfg in (
        ("as sampled", batch, setup.algorithm),
        ("shifted", shifted, setup.algorithm),
        ("only the loss", shifted, setup.algorithm.replace(entropy_coef=0.0)),
        ("metrics only", shifted, setup.algorithm.replace(correction=None)),
    ):
        given = dict(actor=copy(roles["actor"]), **rest)
        losses[name] = jax.device_get(grpo(made, jax.random.key(0), cfg, **given)[1])
    weight = np.exp(0.5)
    assert losses["shifted"]["mismatch/rollout_is_mean"] == pytest.approx(weight, rel=1e-3)
    assert losses["as sampled"]["mismatch/rollout_is_mean"] == pytest.approx(1, rel=1e-3)
    bonus = losses["shifted"]["loss"] - losses["only the loss"]["loss"]
    assert bonus == pytest.approx(-0.1 * losses["shifted"]["entropy"], rel=1e-3)
    plain = losses["metrics only"]["loss"] - bonus
    assert losses["only the loss"]["loss"] == pytest.approx(weight * plain, rel=1e-3, abs=1e-6)


@pytest.mark.slow
def test_the_correction_is_computed_once_for_all_steps_of_an_update(shared):
    """Its weights are of the policy that sampled: no optimizer step computes them again."""
    run = started(shared, "olmorl", collect="once")
    setup, roles, calls = run.setup, run.roles, []

    def counting(batch):
        jax.debug.callback(lambda _: calls.append(1), jnp.sum(batch.mask))
        return setup.algorithm.correction(batch)

    prompts = run.source.draw(16)
    batch = roles["actor"].generate(prompts, jax.random.key(3), setup.rollouts.sampling, n=8)
    batch, _ = shared.reward(batch, prompts)
    steps = dataclasses.replace(setup.algorithm.steps, epochs=2)
    cfg = setup.algorithm.replace(correction=counting, steps=steps)
    given = dict(actor=roles["actor"], reference=None, kl_controller=None)
    _, metrics = grpo(batch, jax.random.key(0), cfg, **given)
    jax.effects_barrier()
    assert metrics["optimizer_steps"] >= 2 and len(calls) == 1


@pytest.mark.smoke
def test_rows_that_leave_a_group_leave_its_baseline():
    batch = response_batch(
        np.ones((4, 2)), jnp.float32, group=[0, 0, 1, 1], rewards=np.zeros((4, 2))
    )
    batch = batch.replace(rewards=last_token(batch))

    def keep(batch):
        return jnp.array([1.0, 0, 1, 1])

    made = filter_baseline_rows(batch, types.SimpleNamespace(baseline_filters=(keep,)))
    group = np.asarray(made.group)
    assert group[1] not in group[[0, 2, 3]] and (group[[0, 2, 3]] == [0, 1, 1]).all()
    np.testing.assert_array_equal(made.mask[:, 0], [1, 0, 1, 1])


@pytest.mark.slow
def test_a_requested_length_is_learnt(shared, tmp_path):
    """L1-Exact: the prompt asks for 1 to 4 tokens, and the error of the length falls."""
    config = preset_config("grpo")
    config.data.target_tokens, config.data.target_instruction = (1, 4), "{target_tokens}"
    config.data.train = "toy.letters_and_digits"
    config.data.max_prompt_tokens, config.sampler.max_response_tokens = 6, 6
    config.reward.function = "l1_exact(alpha=0.2, correct='toy.anything')"
    config.sft.steps, config.steps = 0, 60
    config.algorithm = dataclasses.replace(config.algorithm, kl_in_loss=0.0)
    with Run(build.build(config, jax.devices()[:1]), tmp_path) as run:
        run.begin(run.setup.main, build.initial_params(run.config, run.setup.model))
        rows = [run.step() for _ in range(config.steps)]
    errors = [float(r["reward/part/length_error"]) for r in rows]
    assert np.mean(errors[:3]) > 1.0 and np.mean(errors[-5:]) < 0.5, errors
    assert {"reward/part/correct", "reward/part/over_budget"} <= rows[0].keys()
