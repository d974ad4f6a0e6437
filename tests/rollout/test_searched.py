"""Rollouts by tree search: samples that are scored and trained, by PPO and by expert iteration."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from preset_runs import Shared, preset_config

from rljax import setup as build
from rljax.arrays import fetch, place
from rljax.batch import FinishReason
from rljax.config import with_overrides
from rljax.data.online.prompts import PromptRecord, Prompts
from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models.huggingface import save_params
from rljax.models.model import Model
from rljax.plan.programs import programs_of
from rljax.rollout.players.searched import scored_by
from rljax.sampler import generate
from rljax.search import Search, Value, beam
from rljax.setup import abstract_roles, initial_params
from rljax.shaping.scores import scaled
from rljax.validation import validate


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    runs = Shared(tmp_path_factory.mktemp("searched"))
    yield runs
    runs.close()


def searching(dataflow: str):
    config = preset_config("expert_iteration")
    config.dataflow = dataflow
    config.batch.prompts_per_step = config.batch.sequences_per_optimizer_step = 16
    return config


@pytest.mark.slow
@pytest.mark.parametrize(
    "dataflow", [pytest.param("ppo", marks=pytest.mark.slow), "expert_iteration"]
)
def test_what_a_search_finds_is_scored_and_trained_by_one_program(shared, dataflow):
    config = searching(dataflow)
    with shared.run(config) as run:
        params = jax.device_put(shared.start(0), run.setup.model.shardings())
        run.begin(run.setup.main, params)
        before = fetch(run.roles["actor"].state.params)
        batch, _ = run.source.next(0, run.roles)
        mask = np.asarray(batch.mask) > 0
        shares = np.asarray(batch.target_probs).sum(axis=-1)
        np.testing.assert_allclose(shares[mask], 1.0, atol=1e-5)
        # At the last token the search's value is what it found behind it; scores are the reward's.
        assert set(np.unique(batch.scores)) <= {0.0, 1.0} and mask.any(axis=1).all()
        assert np.abs(np.asarray(batch.search_values)[mask]).max() > 0
        metrics = run.step()
        assert metrics["grad_norm"] > 0 and metrics["critic/grad_norm"] > 0
        after = fetch(run.roles["actor"].state.params)
    changed = jax.tree.map(lambda a, b: bool(np.any(a != b)), before, after)
    assert any(jax.tree.leaves(changed))


@pytest.mark.slow
def test_the_tokens_of_the_best_leaf_are_learned_without_a_critic(shared):
    """targets='tokens': the loss is the mean of - log pi of what the search chose."""
    config = searching("expert_iteration(targets='tokens')")
    config.algorithm.collect = "search(method=\"mcts(simulations=4, width=3, answer='best_leaf')\")"
    config.algorithm.advantage, config.actor_optimizer.lr = "group_relative()", 0.0
    validate(config)
    with pytest.raises(InputError, match="needs a critic"):
        validate(with_overrides(config, {"algorithm.advantage": "gae()"}, "test"))
    with shared.run(config) as run:
        start = jax.device_get(initial_params(config, run.setup.model))
        run.begin(run.setup.main, jax.device_put(start, run.setup.model.shardings()))
        assert "critic" not in run.roles
        batches, draw = [], run.source.next

        def drawn(*args):
            made = draw(*args)
            batches.append(fetch(made[0]))  # a step may reuse the arrays
            return made

        run.source.next = drawn
        metrics, model = run.step(), run.setup.model
        batch = place(batches[0], model.mesh)
        params = jax.device_put(start, model.shardings())
        logprobs, mask = fetch((jax.jit(model.logprobs)(params, batch)[0], batch.mask))
    want = -(logprobs * mask).sum() / mask.sum()
    assert float(metrics["loss"]) == pytest.approx(float(want), rel=1e-4)


@pytest.mark.slow
def test_the_plan_has_the_programs_of_the_search(shared):
    with shared.run(searching("expert_iteration")) as run:
        names = [call.name for call in programs_of(run.setup, abstract_roles(run.setup))]
    wanted = {"search: read prompts", "search: look at leaves", "search: move roots", "learn"}
    assert wanted <= set(names)


def test_what_is_backed_up_is_shaped_as_what_the_critic_learns():
    """A reward of the number of tokens, which fails for prompt 1."""
    records = tuple(PromptRecord("", np.array([5], np.int32), "", "", {}, i) for i in range(2))
    prompts = Prompts(np.full((2, 1), 5, np.int32), np.ones(2, np.int32), records)

    def reward(batch, asked):
        fine = jnp.array([record.index == 0 for record in asked.records], jnp.float32)
        scores, mask = batch.mask.sum(axis=1), batch.mask * fine[:, None]
        return batch.replace(scores=scores, rewards=mask, mask=mask), None

    mesh = make_mesh(devices=jax.devices()[:1])
    rules = (functools.partial(scaled, scale=3.0, shift=1.0),)
    asked = [0, 1, 2, 3], [([7] * k, int(FinishReason.STOP)) for k in (1, 2, 3, 4)]
    plain, shaped = (scored_by(reward, prompts, 2, mesh, r)(*asked) for r in ((), rules))
    np.testing.assert_array_equal(plain, [1, 2, np.nan, np.nan])
    np.testing.assert_array_equal(shaped, [6, 9, np.nan, np.nan])


@pytest.mark.slow
def test_the_best_of_n_samples_are_trained_in_slots_that_do_not_divide_the_rows(shared):
    config = searching("ppo")
    config.algorithm.collect = "search(method='best_of_n(samples=2)')"
    config.sampler.slots = 24
    with shared.run(config) as run:
        run.begin(run.setup.main, initial_params(config, run.setup.model))
        metrics = run.step()
    assert metrics["grad_norm"] > 0 and "search/value" not in metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    "rollout", [pytest.param("critic_search", marks=pytest.mark.slow), "guided_search"]
)
def test_beams_follow_the_value_model_that_the_rollout_names(shared, tmp_path, rollout):
    config = searching("ppo")
    config.algorithm.collect = f"{rollout}(method='beam(beams=2, width=3)')"
    config.batch.prompts_per_step = config.batch.sequences_per_optimizer_step = 8
    model = build.build(config, jax.devices()[:1]).model
    scorer = Model(dataclasses.replace(model.config, labels=1), model.mesh, "scalar")
    params = scorer.init(jax.random.key(2))
    params["head"] = jax.random.normal(jax.random.key(3), params["head"].shape)
    if rollout == "guided_search":
        save_params(tmp_path, scorer, params, eos_ids=(1,), pad_id=0)
        config.roles = (f"guide=value_model(folder={str(tmp_path)!r})",)
    with shared.run(config) as run:
        start = jax.device_put(shared.start(0), model.shardings())
        run.begin(run.setup.main, start)
        if rollout == "critic_search":
            critic = run.roles["critic"]
            run.roles["critic"] = dataclasses.replace(
                critic, state=dataclasses.replace(critic.state, params=params)
            )
        batch, _ = run.source.next(0, run.roles)
        batch, actor = fetch(batch), run.roles["actor"]
        starts = np.argmax(batch.mask > 0, axis=1)
        prompts = [row[:n] for row, n in zip(batch.tokens, starts, strict=True)]
        asked = np.zeros((len(prompts), config.data.max_prompt_tokens), np.int32)
        for i, ids in enumerate(prompts):
            asked[i, : len(ids)] = ids
        reads = "critic" if rollout == "critic_search" else "outcome"
        search = Search(functools.partial(beam, beams=2, width=3), Value(scorer, params, reads))
        want = fetch(
            generate(
                actor.model,
                actor.state.params,
                asked,
                starts,
                jax.random.key(5),
                run.setup.rollouts.sampling,
                search=search,
            )
        )
    np.testing.assert_array_equal(batch.tokens, want.tokens)
    np.testing.assert_array_equal(batch.mask, want.mask)
