"""Scoring overlaps decoding: who is told of which row and when, and that no score depends on it."""

import dataclasses
import sys

import jax
import numpy as np
import pytest
from conftest import lanes
from rollout_cases import ASKED, LETTERS, Letters, asked_prompts, policy
from sampler_cases import EOS, VOCAB, prompts, shallow, weights

from rljax.batch import FinishReason
from rljax.mesh import make_mesh
from rljax.models.model import Model
from rljax.report.timeline import scored_while_decoding
from rljax.rewards.pool.pool import RewardPool
from rljax.roles.models import Reference
from rljax.rollout import AgainstOpponent, Reward, make_sample
from rljax.sampler import Decoding, Sampling, generate
from rljax.sampler.whole_batch import DISPATCH_STEPS
from rljax.tracking import timing

REWARDS = """
import time

def score(response, num_tokens, finish_reason, ground_truth, slow=0.0):
    if response.count("d") % 3 == 2:
        raise ValueError("no luck")
    time.sleep(slow)
    stopped = float(finish_reason == "stop")
    return {"score": num_tokens + stopped / 2 + response.count("e"), "stopped": stopped}

def best(responses, num_tokens):
    return [float(n == max(num_tokens)) for n in num_tokens]

def hang_on_long(response):
    time.sleep(600 if len(response) > 1 else 0)
    return 1.0
"""


@pytest.fixture(scope="module", autouse=True)
def rewards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "overlap_rewards.py").write_text(REWARDS)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    sys.modules.pop("overlap_rewards", None)


@pytest.fixture(scope="module")
def model():
    return shallow()


@pytest.fixture(scope="module")
def on_eight(model):
    return Model(model.config, make_mesh(2, 4, 1))


class Heard:
    """What `finished` was told."""

    def __init__(self):
        self.rows = {}

    def __call__(self, row, ids, reason):
        assert row not in self.rows, "told twice"
        self.rows[row] = (ids, reason)


def responses(batch, starts):
    host = jax.device_get(batch)
    ends = (host.segment_ids > 0).sum(axis=1)
    return {
        row: (host.tokens[row, starts[row] : ends[row]].tolist(), int(host.finish_reason[row]))
        for row in range(len(ends))
    }


def same(one, other):
    for (path, a), (_, b) in zip(
        jax.tree_util.tree_leaves_with_path(jax.device_get(one)),
        jax.tree_util.tree_leaves_with_path(jax.device_get(other)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


HOW = {
    "whole": {},
    "slots": {"slots": 8},
    "host": {"loop": "host"},
    "stop strings": {"slots": 8, "asked": {"stop_strings": ("ab", "c")}},
    "interruptions": {
        "asked": dict(thinking_tokens=(2, 9), end_of_thinking_ids=(5,), interrupt_ids=(6, 7, 8))
    },
}


@pytest.mark.parametrize(
    "how", lanes(["host"], ["stop strings", "whole", "slots", "interruptions"])
)
def test_every_row_is_told_once_as_it_will_be_and_changes_nothing(model, how):
    options = dict(HOW[how])
    more = options.pop("asked", {})
    how = Sampling(max_response_tokens=3 * DISPATCH_STEPS, stop_ids=(EOS,), **more)
    decoding = Decoding(decode=Letters.decode, **options)
    tokens, lengths = prompts(4)
    given = (model, weights(model), tokens, lengths, jax.random.key(1), how)
    heard = Heard()
    plain = generate(*given, n=6, decoding=decoding)
    told = generate(*given, n=6, decoding=decoding, finished=heard)
    same(told, plain)
    want = responses(plain, np.repeat(lengths, 6))
    assert heard.rows == want
    assert {FinishReason.STOP, FinishReason.LENGTH} <= {why for _, why in want.values()} or more


@pytest.mark.slow
def test_eight_devices_tell_the_same(model, on_eight):
    tokens, lengths = prompts(8)
    want = None
    for one, slots in ((model, 0), (on_eight, 0), (on_eight, 16)):
        params = (
            jax.device_put(
                weights(model), jax.tree.map(lambda x: x.sharding, one.init(jax.random.key(3)))
            )
            if one is on_eight
            else weights(model)
        )
        heard = Heard()
        batch = generate(
            one,
            params,
            tokens,
            lengths,
            jax.random.key(2),
            ASKED,
            n=4,
            decoding=Decoding(slots=slots),
            finished=heard,
        )
        assert heard.rows == responses(batch, np.repeat(lengths, 4))
        want = want or heard.rows
        assert heard.rows == want


@pytest.mark.slow
def test_rows_that_end_early_are_told_while_others_still_decode(model):
    how = Sampling(max_response_tokens=8 * DISPATCH_STEPS, stop_ids=(EOS,))
    tokens, lengths = prompts(4)
    left = []

    def finished(row, ids, reason):
        left.append(len(ids))

    generate(model, weights(model), tokens, lengths, jax.random.key(1), how, n=6, finished=finished)
    turns = [-(-length // DISPATCH_STEPS) for length in left]
    assert turns == sorted(turns) and turns[0] < turns[-1]


@pytest.mark.slow
def test_a_batch_that_ends_in_its_first_turn_is_one_program(model):
    how = Sampling(max_response_tokens=DISPATCH_STEPS)
    tokens, lengths = prompts(4)
    heard = Heard()
    generate(model, weights(model), tokens, lengths, jax.random.key(1), how, n=2, finished=heard)
    assert heard.rows == {}


CASES = [(loop, f) for loop in ("slots", "host", "whole") for f in ("score", "best")]


@pytest.mark.parametrize("case", lanes(CASES[:1], CASES[1:]), ids=" ".join)
def test_scores_are_those_of_a_whole_batch(model, case):
    how, function = case
    options = HOW[how]
    asked, actor = asked_prompts(), policy(model, **options)
    with RewardPool(f"overlap_rewards.{function}", workers=2) as pool:
        reward = Reward(pool, Letters, model.mesh)
        key = jax.random.key(4)
        plain, report = reward(actor.generate(asked, key, ASKED, n=6), asked)
        with timing.collect() as timings:
            ahead, early = make_sample(actor, reward, ASKED)(asked, key, n=6)
        same(ahead, plain)
        rows, counts = report.examples, report.metrics()
        assert str(early.examples) == str(rows)  # as text: NaN is not equal to itself
        assert str(early.metrics()) == str(counts)
    if function != "best":
        assert counts["reward/errors"] > 0 and {r["status"] for r in rows} == {"ok", "error"}
    decoded = max(end for name, _, end in timings.spans if name == "generate")
    begun = [begin for begin, _ in timings.scoring]
    assert min(begun) < decoded  # before the last token was sampled
    assert 0 < scored_while_decoding(timings) <= timings.seconds["generate"]
    assert len(timings.scoring) == 24 and timings.live[-1][1] == 0


def test_rows_that_are_not_what_was_told_are_scored_anew(model):
    asked, actor = asked_prompts(), policy(model, slots=8)
    with RewardPool("overlap_rewards.score") as pool:
        reward = Reward(pool, Letters, model.mesh)
        batch = actor.generate(asked, jax.random.key(4), ASKED, n=6)
        early = reward.start_early(asked, 6)
        other = actor.generate(asked, jax.random.key(5), ASKED, n=6, finished=early.finished)
        assert responses(batch, [0] * 24) != responses(other, [0] * 24)
        found, _ = reward(batch, asked, early=early)
        same(found, reward(batch, asked)[0])


@pytest.mark.slow
def test_two_samplers_are_told_of_by_the_place_in_their_batch(model):
    asked, actor = asked_prompts(), policy(model)
    other = Reference(weights(model, seed=9), model, 1.0)
    both, heard = AgainstOpponent(actor, other), Heard()
    batch = both.generate(asked, jax.random.key(6), ASKED, n=4, finished=heard)
    want = responses(batch, np.repeat(asked.lengths, 4))
    assert {row: want[row] for row in heard.rows} == heard.rows and len(heard.rows) == 16


def test_a_reward_that_cannot_be_asked_is_an_error_of_the_caller(model):
    asked = asked_prompts()
    asked = dataclasses.replace(asked, records=(asked.records[0], None, *asked.records[2:]))
    with RewardPool("overlap_rewards.score") as pool:
        reward = Reward(pool, Letters, model.mesh)
        with pytest.raises(AttributeError, match="prompt_text"):
            make_sample(policy(model, slots=8), reward, ASKED)(asked, jax.random.key(4), n=6)
        again = asked_prompts()
        make_sample(policy(model, slots=8), reward, ASKED)(again, jax.random.key(4), n=6)


class Interrupted:
    """Samples, and is stopped before its batch is whole."""

    def __init__(self, actor):
        self.actor = actor

    def generate(self, *args, finished, **options):
        self.actor.generate(*args, finished=finished, **options)
        raise KeyboardInterrupt


def test_a_ctrl_c_while_the_pool_works_ahead_drops_what_was_begun(model):
    asked, actor = asked_prompts(), policy(model, slots=8)
    with RewardPool("overlap_rewards.hang_on_long", workers=1, timeout_s=600) as pool:
        reward = Reward(pool, Letters, model.mesh)
        with pytest.raises(KeyboardInterrupt):
            make_sample(Interrupted(actor), reward, ASKED)(asked, jax.random.key(4), n=6)
        assert pool.score([{"response": "a"}])[0].value == 1.0  # behind nobody who hangs


def test_words_are_the_letters_of_this_test():
    assert len(LETTERS) == VOCAB
