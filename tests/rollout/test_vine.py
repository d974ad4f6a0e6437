"""VinePPO: values of states by sampling from them, and what they say of steps and responses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from preset_runs import Shared, preset_config
from role_programs import logprobs

from rljax import setup as build
from rljax.advantages import vineppo
from rljax.arrays import fetch
from rljax.batch import LIMITS, batch_from_rows
from rljax.components import Component
from rljax.config import NAMESPACES
from rljax.errors import InputError
from rljax.plan.programs import programs_of
from rljax.rollout import Landed, make_sample, vine
from rljax.rollout.rules.vine import _calibration
from rljax.rollout.scoring.reward import Reward
from rljax.sampler import Decoding
from rljax.validation import validate

COMPLETIONS, SHAPING = 5, NAMESPACES["shaping"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of the preset's tiny variant as it begins, and prompts."""
    shared = Shared(tmp_path_factory.mktemp("vine"))
    config = preset_config("vineppo")
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 4, 3
    config.batch.sequences_per_optimizer_step = 12
    with shared.run(config) as run:
        run.begin(run.setup.main, jax.device_put(shared.start(0)))
        yield run, run.source.draw(4)
    shared.close()


def rolled(started, decoding=None, shaping=(), **options):
    """The rollout of vine, and the batches that its reward was called with."""
    run, prompts = started
    actor, setup, calls = run.roles["actor"], run.setup, []
    cfg = setup.rollouts.replace(reward_shaping=tuple(Component(x, SHAPING) for x in shaping))
    if decoding is not None:
        actor = dataclasses.replace(actor, decoding=decoding)

    def reward(batch, prompts, early=None):
        calls.append(fetch(batch))
        return run.source.player.reward(batch, prompts)

    options = dict(completions=COMPLETIONS, step_tokens=1) | options
    sample = make_sample(actor, reward, cfg.sampling)
    done = vine(
        prompts,
        jax.random.key(3),
        cfg,
        actor=actor,
        sample=sample,
        tokenizer=setup.tokenizer,
        **options,
    )
    return done, calls


@pytest.fixture(scope="module")
def plain(run):
    """The rollout without options, which changes nothing of the run."""
    return rolled(run)


def states_of(batch):
    return np.argwhere(~np.isnan(np.asarray(batch.values)))


@pytest.mark.slow
def test_each_state_gets_its_completions_and_the_advantages_telescope(run, plain):
    done, _ = plain
    batch = fetch(done.batch)
    tokens = (batch.mask > 0).sum(axis=1)
    assert len(states_of(batch)) == tokens.sum()  # each token is a step here
    assert done.metrics["vine/completions"] == COMPLETIONS * tokens.sum()
    assert done.metrics["vine/states"] == tokens.mean()
    advantages = np.asarray(vineppo(done.batch))
    first = np.argmax(batch.mask > 0, axis=1)
    start = batch.values[np.arange(batch.rows), first]
    np.testing.assert_allclose(advantages.sum(axis=1), batch.scores - start, atol=1e-5)
    few, _ = rolled(run, most_states=1)
    assert few.metrics["vine/completions"] == COMPLETIONS * batch.rows
    np.testing.assert_array_equal(states_of(few.batch)[:, 0], np.arange(batch.rows))


def test_values_are_the_mean_scores_of_real_completions(run, plain):
    """Drawn with the policy behind the very tokens of the response; cut off ones count as said."""
    started, prompts = run
    done, calls = plain
    batch, states = fetch(done.batch), states_of(done.batch)
    rows = jax.tree.map(lambda *x: np.concatenate(x), *calls[1:])
    scored, _ = started.source.player.reward(jax.tree.map(jnp.asarray, rows), prompts)
    raw, limited = np.asarray(scored.scores), np.isin(rows.finish_reason, LIMITS)
    assert limited.any() and not limited.all()
    for unfinished, of_each in (
        (0.0, np.where(limited, 0.0, raw)),
        (None, raw),
        (-1.0, np.where(limited, -1.0, raw)),
    ):
        other, _ = rolled(run, unfinished=unfinished)
        mean = of_each.reshape(-1, COMPLETIONS)[: len(states)].mean(axis=1)
        found = np.asarray(other.batch.values)[tuple(states.T)]
        np.testing.assert_allclose(found, mean, atol=1e-6)
    for i, (row, column) in enumerate(states):
        own = rows.tokens[COMPLETIONS * i : COMPLETIONS * (i + 1)]
        assert (own[:, :column] == batch.tokens[row, :column]).all()
        assert (rows.mask[COMPLETIONS * i, :column] == 0).all()
    share = limited.reshape(-1, COMPLETIONS)[: len(states)].mean()
    np.testing.assert_allclose(done.metrics["vine/unfinished"], share)


@pytest.mark.slow
def test_values_are_shaped_as_the_rewards_of_the_samples(run, plain):
    """And a rule of lengths reads whole responses: of prefix and continuation."""
    raw, calls = plain
    states = states_of(raw.batch)
    rules = "scaled(scale=2.0, shift=-0.5)", "soft_overlong(max_tokens=2, cache_tokens=1)"
    done, _ = rolled(run, shaping=rules)
    rows = jax.tree.map(lambda *x: np.concatenate(x), *calls[1:])
    starts = np.argmax(np.asarray(raw.batch.mask) > 0, axis=1)[states[:, 0]]
    count = COMPLETIONS * len(states)
    tokens = (rows.segment_ids > 0).sum(axis=1)[:count] - np.repeat(starts, COMPLETIONS)
    penalty = np.clip(1.0 - tokens, -1, 0).reshape(-1, COMPLETIONS).mean(axis=1)
    assert len(set(tokens.tolist())) > 1
    plain, shaped = (np.asarray(x.batch.values)[tuple(states.T)] for x in (raw, done))
    np.testing.assert_allclose(shaped, 2 * plain - 1 + penalty, atol=1e-5)
    lengths = (np.asarray(raw.batch.mask) > 0).sum(axis=1)
    outcomes = 2 * np.asarray(raw.batch.scores) - 1 + np.clip(1.0 - lengths, -1, 0)
    bias = (shaped - outcomes[states[:, 0]]).mean()
    np.testing.assert_allclose(done.metrics["vine/bias"], bias, atol=1e-5)


@pytest.mark.parametrize("rule", ["normalised()", "mixed_parts()"])
def test_shaping_by_statistics_of_other_samples_is_refused(rule):
    config = preset_config("vineppo")
    config.algorithm.reward_shaping = ("scaled(scale=2.0)", rule)
    with pytest.raises(InputError, match="over the continuations"):
        validate(config)


def test_in_flight_the_reward_of_continuations_is_the_outcome_alone(run):
    started, prompts = run
    scored = started.source.player.reward
    asked = []

    class Outcome(Reward):
        def outcome_alone(self):
            asked.append("alone")
            return scored

    own = Outcome(None, None, None)
    actor, setup = started.roles["actor"], started.setup
    cfg = setup.rollouts
    n, key = cfg.samples_per_prompt, jax.random.key(3)
    done = make_sample(actor, scored, cfg.sampling)(prompts, key, n=n)
    landed = Landed(prompts, actor, cfg.sampling, n, done)
    vine(
        prompts,
        key,
        cfg,
        actor=actor,
        sample=make_sample(actor, own, cfg.sampling, landed),
        tokenizer=setup.tokenizer,
        completions=COMPLETIONS,
        step_tokens=1,
    )
    assert landed.taken and asked == ["alone"]


def exact_values(started, batch, states):
    """V of each state by enumeration of all that the policy may say: P(the right letter, then the
    end), of a response of three tokens at most."""
    run, prompts = started
    actor, tokenizer = run.roles["actor"], run.setup.tokenizer
    texts, lengths, begins = [], [], []
    for row, column in states:
        record = prompts.records[batch.group[row]]
        start = len(record.token_ids)
        right = [*tokenizer.encode(record.ground_truth), *run.setup.rollouts.sampling.stop_ids]
        said = batch.tokens[row, start:column].tolist()
        whole = [*record.token_ids, *right]
        texts.append(np.pad(whole, (0, batch.tokens.shape[1] - len(whole))))
        lengths.append(len(whole))
        # What was not said right has no right end.
        begins.append(column if right[: len(said)] == said else -1)
    texts = np.array(texts, np.int32)
    ones = np.ones(texts.shape, np.float32)
    found = logprobs(actor, batch_from_rows(texts, np.array(lengths), ones))
    out = [
        float(np.exp(line[begin:end].sum())) if begin >= 0 else 0.0
        for line, begin, end in zip(np.asarray(found), begins, lengths, strict=True)
    ]
    return np.array(out)


@pytest.mark.slow
def test_values_are_those_of_an_enumerated_tree(run):
    """Within 3 standard errors of the exact value, in the mean and state by state."""
    many = 200
    done, _ = rolled(run, completions=many)
    batch, states = fetch(done.batch), states_of(done.batch)
    exact = exact_values(run, batch, states)
    found = batch.values[tuple(states.T)]
    assert exact.max() > 0.05
    error = np.sqrt(exact * (1 - exact) / many)
    assert (np.abs(found - exact) <= 4 * error + 1e-6).all()
    assert np.mean(np.abs(found - exact) <= 3 * error + 1e-6) > 0.97
    assert abs((found - exact).mean()) <= 3 * np.sqrt((error**2).mean() / len(states))


@pytest.mark.slow
def test_samples_are_the_same_with_and_without_the_cache(run, plain):
    one, _ = plain
    paged = Decoding(loop="host", slots=4, page_tokens=4)
    for decoding in (Decoding(loop="host"), Decoding(slots=5), paged):
        other, _ = rolled(run, decoding=decoding)
        np.testing.assert_array_equal(fetch(one.batch.values), fetch(other.batch.values))


def test_calibration_of_values():
    values = np.array([[0.2, 0.8], [0.2, np.nan]])
    states = [(0, 0), (0, 1), (1, 0)]
    out = _calibration(values, states, np.array([1.0, 0.0]))
    np.testing.assert_allclose(out["vine/value"], 0.4)
    np.testing.assert_allclose(out["vine/bias"], (0.2 + 0.8 + 0.2 - 2) / 3)
    np.testing.assert_allclose(out["vine/calibration_error"], (2 * 0.3 + 0.2) / 3)
    assert _calibration(np.full((1, 1), np.nan), [(0, 0)], np.zeros(1)) == {}


@pytest.mark.slow
def test_its_programs_are_planned():
    setup = build.build(preset_config("vineppo"), jax.devices()[:1])
    names = [call.name for call in programs_of(setup, build.abstract_roles(setup))]
    assert names == ["sft", "generate", "branch", "learn"]


@pytest.mark.parametrize(
    "collect",
    ["vine(completions=0)", "vine(most_states=0)", "vine(step_tokens=-1)", "vine(completions=2.5)"],
)
def test_bad_options_are_refused(collect):
    config = preset_config("vineppo")
    config.algorithm.collect = collect
    with pytest.raises(InputError, match="vine"):
        validate(config)
