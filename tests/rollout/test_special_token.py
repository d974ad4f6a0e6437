"""Responses that are sampled anew from their weakest token, each from a place of its own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import worked_example
from preset_runs import Shared, preset_config
from role_programs import logprobs, values

from rljax import setup as build
from rljax.arrays import fetch
from rljax.errors import InputError
from rljax.plan.programs import programs_of
from rljax.rollout import make_sample, smallest_advantage, special_token
from rljax.sampler import Decoding
from rljax.shaping.scores import apply_shaping, response_tokens, soft_overlong
from rljax.validation import validate


def test_the_worked_example():
    example = worked_example("special_token")
    advantages, mask = (np.array(example["inputs"][name], np.float32) for name in ("adv", "mask"))
    columns, smallest = smallest_advantage(advantages, mask)
    assert columns.tolist() == example["outputs"]["pos"]
    assert columns.tolist() == example["outputs"]["kept_prefix_len"]
    np.testing.assert_allclose(smallest, [-0.2, -0.3])
    none = smallest_advantage(advantages, np.zeros_like(mask))[1]
    assert np.isinf(none).all()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of the preset's tiny variant as it begins, with a critic that has learned something,
    and prompts."""
    shared = Shared(tmp_path_factory.mktemp("special"))
    config = preset_config("special_token")
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 4, 6
    config.batch.sequences_per_optimizer_step = 24
    with shared.run(config) as run:
        run.begin(run.setup.main, build.initial_params(config, run.setup.model))
        critic = run.roles["critic"]
        head = np.random.default_rng(0).normal(size=critic.state.params["head"].shape)
        params = {**critic.state.params, "head": jnp.asarray(head, jnp.float32)}
        state = dataclasses.replace(critic.state, params=params)
        run.roles["critic"] = dataclasses.replace(critic, state=state)
        yield run, run.source.draw(4)
    shared.close()


def weakest_at(tokens):
    """An advantage that is smallest, -1, at a column that the tokens of a row choose."""

    def advantage(batch):
        width = batch.tokens.shape[1]
        inside = batch.mask > 0
        first = jnp.argmax(inside, axis=1)
        count = jnp.sum(inside, axis=1)
        chosen = first + (batch.tokens[:, 0] + tokens) % jnp.maximum(count, 1)
        return jnp.where(jnp.arange(width)[None, :] == chosen[:, None], -1.0, 1.0)

    return advantage


def rolled(started, advantage=None, decoding=None, failing=(), **options):
    run, prompts = started
    actor, critic = run.roles["actor"], run.roles["critic"]
    if decoding is not None:
        actor = dataclasses.replace(actor, decoding=decoding)
    cfg, calls = run.setup.rollouts, []
    if advantage is not None:
        cfg = cfg.replace(advantage=advantage)

    def reward(batch, prompts, early=None):
        out, report = run.source.player.reward(batch, prompts)
        if len(calls) in failing:
            bad = np.arange(batch.rows) == failing[len(calls)]
            alone = np.where(bad, len(prompts.records) + np.arange(batch.rows), out.group)
            mask = jnp.where(bad[:, None], 0.0, out.mask)
            out = out.replace(mask=mask, group=jnp.asarray(alone, jnp.int32))
        calls.append((fetch(batch), fetch(out)))
        return out, report

    sample = make_sample(actor, reward, cfg.sampling)
    done = special_token(
        prompts, jax.random.key(4), cfg, actor=actor, critic=critic, sample=sample, **options
    )
    return done, calls


def rounds_of(batch, rounds, prompts=4):
    """The rows of each round: [rounds] batches."""

    def part(x, i):
        x = np.asarray(x).reshape(prompts, rounds, -1, *x.shape[1:])[:, i]
        return x.reshape(-1, *x.shape[2:])

    return [jax.tree.map(lambda x, i=i: part(x, i), fetch(batch)) for i in range(rounds)]


@pytest.mark.slow
@pytest.mark.parametrize("train_prefix", [False, True])
def test_rows_go_on_from_places_of_their_own(run, train_prefix):
    """Ragged prefixes: each row keeps all before its weakest token, and draws that anew; prefix
    tokens are masked unless they are to be trained."""
    advantage = weakest_at(1)
    done, calls = rolled(run, advantage, train_prefix=train_prefix, max_rounds=3)
    first, second, third = rounds_of(done.batch, 3)
    assert first.tokens.shape[0] == 8 and done.batch.rows == 24
    np.testing.assert_array_equal(done.batch.group, np.repeat(np.arange(4), 6))
    kept = set()
    whole = first.mask
    for before, after in ((first, second), (second, third)):
        columns, _ = smallest_advantage(advantage(before.replace(mask=whole)), whole)
        for row, column in enumerate(np.asarray(columns)):
            kept.add(int(column))
            np.testing.assert_array_equal(after.tokens[row, :column], before.tokens[row, :column])
            ours, theirs = (x.sampler_logprobs[row, :column] for x in (after, before))
            np.testing.assert_array_equal(ours, theirs)
            size = (after.segment_ids[row] > 0).sum()
            new = (np.arange(after.mask.shape[1]) >= column) & (
                np.arange(after.mask.shape[1]) < size
            )
            full = np.where(new, 1.0, np.where(np.arange(len(new)) < column, whole[row], 0.0))
            np.testing.assert_array_equal(after.mask[row], full if train_prefix else new)
            assert after.rewards[row, size - 1] == after.scores[row]
            whole = np.where(np.arange(len(whole))[:, None] == row, full, whole)
    assert len(kept) > 1  # ragged
    assert done.metrics["special_token/rounds"] == 3 and len(done.report.rows) == 24
    np.testing.assert_allclose(
        done.metrics["special_token/gain"],
        np.concatenate([second.scores - first.scores, third.scores - second.scores]).mean(),
        atol=1e-6,
    )


@pytest.mark.slow
@pytest.mark.parametrize("train_prefix", [False, True])
def test_shaping_by_length_counts_the_tokens_that_a_row_kept(run, train_prefix):
    done, _ = rolled(run, weakest_at(1), train_prefix=train_prefix, max_rounds=3)
    batch = fetch(done.batch)
    prompts = np.array([len(record.token_ids) for record in run[1].records])
    lengths = (batch.segment_ids > 0).sum(axis=1) - np.repeat(prompts, 6)
    assert train_prefix or (lengths > (batch.mask > 0).sum(axis=1)).any()
    np.testing.assert_array_equal(jax.jit(response_tokens)(batch), lengths)
    rule = functools.partial(soft_overlong, max_tokens=3, cache_tokens=2)
    shaped = jax.jit(lambda batch: apply_shaping(batch, [rule]).rewards)(batch)
    shaped = np.asarray(shaped).sum(axis=1)
    want = batch.rewards.sum(axis=1) + np.clip((1 - lengths) / 2, -1, 0)
    np.testing.assert_allclose(shaped, want, atol=1e-6)


@pytest.mark.slow
def test_new_tokens_have_the_policys_log_probs_of_the_whole_row(run):
    done, _ = rolled(run, weakest_at(0))
    batch = done.batch
    found = np.asarray(logprobs(run[0].roles["actor"], batch))
    keep = np.asarray(batch.mask) > 0
    np.testing.assert_allclose(found[keep], np.asarray(batch.sampler_logprobs)[keep], atol=1e-4)


@pytest.mark.slow
def test_the_advantages_are_those_of_the_config_with_the_critics_values(run):
    """And rows at or above tau are not sampled anew: their places stay empty."""
    started, _ = run
    done, calls = rolled(run)
    first = calls[0][1]
    batch = jax.tree.map(jnp.asarray, first)
    valued = batch.replace(values=values(started.roles["critic"], batch))
    advantages, _ = jax.jit(started.setup.algorithm.advantage)(valued)
    columns, smallest = smallest_advantage(np.asarray(advantages), np.asarray(batch.mask))
    tau = float(np.median(smallest))
    done, calls = rolled(run, tau=tau)
    going = np.asarray(smallest) < tau
    assert 0 < going.sum() < len(going)
    second = rounds_of(done.batch, 2)[1]
    np.testing.assert_array_equal((second.mask > 0).any(axis=1), going)
    assert (second.group[~going] >= 4).all() and len(set(second.group[~going])) == (~going).sum()
    for row in np.flatnonzero(going):
        assert np.argmax(second.mask[row] > 0) == columns[row]
    assert len(done.report.rows) == len(going) + going.sum()
    none, calls = rolled(run, tau=-1e9)
    assert len(calls) == 1 and none.metrics["special_token/rounds"] == 1
    assert not np.asarray(rounds_of(none.batch, 2)[1].mask).any()


@pytest.mark.slow
def test_samples_are_the_same_with_and_without_the_cache(run):
    one, _ = rolled(run, weakest_at(2), max_rounds=3)
    paged = Decoding(loop="host", slots=4, page_tokens=4)
    for decoding in (Decoding(loop="host"), paged):
        other, _ = rolled(run, weakest_at(2), decoding, max_rounds=3)
        np.testing.assert_array_equal(fetch(one.batch.tokens), fetch(other.batch.tokens))


def test_a_row_whose_reward_failed_is_not_sampled_anew(run):
    done, calls = rolled(run, weakest_at(0), failing={0: 2, 1: 5}, max_rounds=3)
    rounds = rounds_of(done.batch, 3)
    live = np.stack([(one.mask > 0).any(axis=1) for one in rounds])
    assert not live[:, 2].any() and live[0, 5] and not live[1:, 5].any()
    assert live.sum() == 24 - 3 - 2
    groups = np.stack([one.group for one in rounds])
    assert (groups[~live] >= 4).all() and (groups[live] < 4).all()


def test_its_programs_are_planned():
    setup = build.build(preset_config("special_token"), jax.devices()[:1])
    names = [call.name for call in programs_of(setup, build.abstract_roles(setup))]
    assert names == ["sft", "generate", "values", "branch", "learn"]


@pytest.mark.parametrize("rounds", ["0", "3", "1.5", "True"])
def test_rounds_share_the_rows_of_a_prompt(rounds):
    config = preset_config("special_token")
    config.algorithm.collect = f"special_token(max_rounds={rounds})"
    with pytest.raises(InputError, match="max_rounds"):
        validate(config)
