"""first_live: the first live groups that are whole fill the step, and what still decodes ends."""

import dataclasses
import sys

import jax
import numpy as np
import pytest
from conftest import lanes
from rollout_cases import Letters, asked_prompts, policy
from sampler_cases import EOS, tiny

from rljax.batch import FinishReason
from rljax.errors import InputError
from rljax.models.model import Model
from rljax.rewards.pool.pool import Pending, RewardPool
from rljax.rollout import ModelScorer, Reward, RolloutConfig, dynamic, first_live, make_sample
from rljax.sampler import Sampling
from rljax.sampler.whole_batch import DISPATCH_STEPS

REWARDS = """
def some_dead(num_tokens, ground_truth):
    return 0.5 if ground_truth in "56" else float(num_tokens)

def by_group(responses, num_tokens, ground_truth):
    return [some_dead(count, ground_truth) for count in num_tokens]

def all_dead(response):
    return 1.0
"""
WANTED, N, LONGEST = 4, 4, 8 * DISPATCH_STEPS
CFG = RolloutConfig(
    prompts_per_step=WANTED,
    samples_per_prompt=N,
    sampling=Sampling(max_response_tokens=LONGEST, stop_ids=(EOS,)),
)
PROMPTS = asked_prompts(8)
KEY = jax.random.key(1)  # one row of group 3 decodes to the limit, the others end by step 100
DEAD, ENDLESS = (5, 6), 3
LOOPS = {"device": {}, "slots": {"slots": 16}, "host": {"loop": "host"}}
each_loop = pytest.mark.parametrize("loop", lanes(["device", "host"], ["slots"]))


@pytest.fixture(scope="module", autouse=True)
def rewards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "live_rewards.py").write_text(REWARDS)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    sys.modules.pop("live_rewards", None)


@pytest.fixture(autouse=True)
def prompt_scores(monkeypatch):
    """Scores are known when they are looked for: what is cut off depends on no process's speed."""
    monkeypatch.setattr(Pending, "done", lambda self: len(self.result()) > 0)


@pytest.fixture(scope="module")
def model():
    return tiny()


class Recorded:
    """A policy that keeps the batch that it sampled, on the host."""

    def __init__(self, role):
        self.role, self.model = role, role.model

    def generate(self, *args, **options):
        batch = self.role.generate(*args, **options)
        self.sampled = jax.device_get(batch)
        ended = (self.sampled.segment_ids > 0).sum(axis=1)
        self.lengths = (ended - np.repeat(PROMPTS.lengths, N)).reshape(-1, N)
        self.aborted = (self.sampled.finish_reason == FinishReason.ABORT).reshape(-1, N)
        return batch


def collected(actor, reward, collect=first_live, **options):
    drawn = []

    def draw(count):
        drawn.append(count)
        return PROMPTS.select(range(WANTED, WANTED + count))

    prompts = PROMPTS.select(range(WANTED))
    sample = make_sample(actor, reward, CFG.sampling)
    done = collect(prompts, KEY, CFG, actor=actor, sample=sample, draw=draw, **options)
    assert drawn == [4]  # of eight prompts that start together
    return done


def used(done) -> list[int]:
    return [int(record.ground_truth) for record in done.prompts.records]


@pytest.fixture(scope="module")
def whole(model):
    """Every row of the eight prompts, decoded to its end."""
    actor = Recorded(policy(model))
    actor.generate(PROMPTS, KEY, CFG.sampling, n=N)
    lengths = actor.lengths
    assert lengths.max() == LONGEST == lengths[ENDLESS].max() and not actor.aborted.any()
    assert np.sum(lengths > 4 * DISPATCH_STEPS) == 1
    return actor


@pytest.mark.slow
@each_loop
def test_the_first_live_groups_are_used_and_what_still_decodes_is_dropped(model, whole, loop):
    actor = Recorded(policy(model, **LOOPS[loop]))
    with RewardPool("live_rewards.some_dead") as pool:
        done = collected(actor, Reward(pool, Letters, model.mesh))
    # It ended early: no row got as far as the longest would have.
    assert actor.lengths.max() < LONGEST and actor.aborted.any()
    assert actor.aborted[ENDLESS].any()
    cut = actor.aborted.any(axis=1)
    taken = used(done)
    assert len(taken) == WANTED and not cut[taken].any() and not {*taken} & {*DEAD}
    # What is used is what it is without an end for the others.
    batch = jax.device_get(done.batch)
    rows = np.concatenate([np.arange(g * N, (g + 1) * N) for g in taken])
    np.testing.assert_array_equal(batch.tokens, whole.sampled.tokens[rows])
    np.testing.assert_array_equal(batch.mask, whole.sampled.mask[rows])
    np.testing.assert_array_equal(batch.group, np.repeat(np.arange(WANTED), N))
    scores = batch.scores.reshape(WANTED, N)
    np.testing.assert_array_equal(scores, whole.lengths[taken])
    assert (scores.min(axis=1) < scores.max(axis=1)).all()
    # Rows that were cut off have no score, and no part in what the reward says.
    assert len(done.report.rows) == actor.aborted.size - actor.aborted.sum()
    assert {row.score.status for row in done.report.rows} == {"ok"}
    dropped = [g for g in range(8) if g not in taken]
    assert done.metrics["collect/discarded_tokens"] == actor.lengths[dropped].sum()
    live = [g for g in range(8) if not cut[g] and g not in DEAD]
    assert done.metrics["collect/live_fraction"] == len(live) / (8 - cut.sum())
    assert done.metrics["collect/generated_groups"] == 8
    assert done.metrics["collect/filled_groups"] == 0


def test_a_group_that_was_cut_off_is_not_compared_within(model):
    actor = Recorded(policy(model))
    with RewardPool("live_rewards.by_group") as pool:
        done = collected(actor, Reward(pool, Letters, model.mesh))
    cut = {int(g) for g in np.flatnonzero(actor.aborted.any(axis=1))}
    assert ENDLESS in cut and not actor.aborted[ENDLESS].all()
    assert {row.group for row in done.report.rows} == {*range(8)} - cut
    assert {row.score.status for row in done.report.rows} == {"ok"}
    assert len(used(done)) == WANTED and not {*used(done)} & (cut | {*DEAD})


@pytest.mark.slow
def test_a_reward_model_waits_for_every_row(model, whole):
    scalar = Model(dataclasses.replace(model.config, labels=1), model.mesh, "scalar")
    rng, params = np.random.default_rng(7), scalar.init(jax.random.key(7))
    params = jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape).astype(x.dtype), params)
    actor = Recorded(policy(model))
    done = collected(actor, Reward(ModelScorer(scalar, params, 4), Letters, model.mesh))
    np.testing.assert_array_equal(actor.sampled.tokens, whole.sampled.tokens)
    assert len(done.report.rows) == 8 * N and used(done) == [0, 1, 2, 3]
    assert done.metrics["collect/discarded_tokens"] == whole.lengths[WANTED:].sum()


@each_loop
def test_decoding_is_asked_also_while_no_row_ends(model, loop):
    """A score may come when nothing but the longest row is left."""
    actor, ends, asked = Recorded(policy(model, **LOOPS[loop])), [], []

    def stop():
        asked.append(len(ends))
        return len(ends) == 8 * N - 1 and asked[-3:] == [len(ends)] * 3

    def finished(row, ids, reason):
        return ends.append(row)

    actor.generate(PROMPTS, KEY, CFG.sampling, n=N, finished=finished, stop=stop)
    assert len(ends) == 8 * N - 1 and actor.aborted.sum() == 1
    assert 4 * DISPATCH_STEPS < actor.lengths.max() < LONGEST


def test_too_few_live_groups_are_an_error_or_filled_up(model):
    actor = Recorded(policy(model))
    with RewardPool("live_rewards.all_dead") as pool:
        reward = Reward(pool, Letters, model.mesh)
        done = collected(actor, reward, if_short="fill")
        assert not actor.aborted.any() and used(done) == [0, 1, 2, 3]
        assert done.metrics["collect/filled_groups"] == WANTED
        with pytest.raises(InputError, match="only 0 of 4 groups are live.*8 all right"):
            collected(actor, reward, if_short="error")


@pytest.mark.parametrize("collect", [first_live, dynamic])
def test_fewer_prompts_than_a_step_needs_are_refused(model, collect):
    with pytest.raises(InputError, match=rf"{collect.__name__}\(oversample\): got 0.5"):
        collected(Recorded(policy(model)), None, collect, oversample=0.5)
