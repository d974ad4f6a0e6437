"""Samples that hold their slots between turns: whatever the slots, neighbours, chunks and parking,
each turn is what a fresh request of the same tokens and key would have drawn."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from conftest import lanes
from sampler_cases import (
    VOCAB,
    convolving,
    forward,
    log_softmax,
    recurrent,
    ring,
    rounding,
    tiny,
    weights,
)
from turn_cases import ASKED, ROOM, assert_fresh, play

from rljax.batch import FinishReason
from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.sampler import Engine, Sampler, Sampling
from rljax.sampler.resume import calls
from rljax.sampler.sample import Sample
from rljax.tracking import compiles

LETTERS = "_abcdefghijklmnopqrstuvwxyz01"
THINK = Sampling(
    max_response_tokens=7,
    thinking_tokens=(1, 4),
    end_of_thinking_ids=(7,),
    interrupt_ids=(9, 7),
    stop_strings=("b", "e", "m", "xy"),
)


def decode(ids) -> str:
    return "".join(LETTERS[i] for i in ids)


GOING_BACK = ["window", "whole", "recurrent", "convolving"]
LANES = lanes(["ring", "recurrent"], ["window", "whole", "convolving"])
MODELS = {"ring": ring(4), "window": tiny(window=4), "whole": tiny(), "recurrent": recurrent()}
MODELS["convolving"] = convolving()


@pytest.fixture(scope="module", params=LANES)
def model(request):
    return MODELS[request.param]


@pytest.mark.parametrize(
    "how", lanes([(3, 0, True), (3, 10 * ROOM, False)], [(12, 0, False), (1, ROOM, None)]), ids=str
)
def test_turns_are_those_of_a_fresh_request(model, how):
    """With a slot for each, and with fewer slots than episodes: parked, or read again."""
    slots, parked, reread = how
    params, rng = weights(model), np.random.default_rng(slots + parked)
    sampler = Sampler(Engine(model, slots, ROOM, steps=3), chunk_tokens=8, parked_tokens=parked)
    turns = play(sampler, params, rng)
    assert reread in (None, sampler.reread_tokens > 0)
    other = Sampler(Engine(model, 9, ROOM, steps=8), chunk_tokens=32)
    assert_fresh(other, params, turns, rounding(model))


def test_a_saved_sample_has_the_limits_of_its_turn():
    own = Sampling(max_response_tokens=3, stop_strings=("b", "xy"))
    state = Sample(5, np.array([1, 2], np.int32), own, np.array([3, 4], np.uint32)).get_state()
    again = Sample.from_state(json.loads(json.dumps(state)), Sampling(stop_strings=("b",)))
    assert again.sampling == own


@pytest.mark.slow
@pytest.mark.parametrize("kind", GOING_BACK)
def test_a_stop_string_sets_the_slot_back_and_each_turn_thinks_anew(kind):
    """Slots go on by 8 tokens at a time; a window that went round and a state are read again."""
    model = MODELS[kind]
    params, engine = weights(model), Engine(model, 12, ROOM, steps=8, forcing_tokens=8)
    sampler = Sampler(engine, chunk_tokens=8, decode=decode)
    turns = play(sampler, params, np.random.default_rng(5), asked=THINK)
    reasons = [turn.reason for turn in turns]
    assert reasons.count(FinishReason.STOP) > 5
    forced = [not turn.sample.chosen[turn.first : turn.end].all() for turn in turns]
    later = [turn.first > 0 for turn in turns]
    assert sum(a and b for a, b in zip(forced, later, strict=True)) > 3
    assert (sampler.reread_tokens > 0) == (kind != "whole")
    assert_fresh(Sampler(engine, chunk_tokens=32, decode=decode), params, turns)


@pytest.mark.slow
def test_new_parameters_read_held_and_parked_samples_again(model):
    """keep_cache=False: each token is what its version says of all tokens before it."""
    versions = [weights(model, seed) for seed in (3, 4, 5)]

    def how(keep, step):
        return dict(params=versions[step // 3 % 3], version=step // 3, keep_cache=keep)

    reread = {}
    for keep in (True, False):
        sampler = Sampler(Engine(model, 6, ROOM, steps=3), chunk_tokens=8, parked_tokens=10 * ROOM)
        turns = play(sampler, None, np.random.default_rng(2), on_step=functools.partial(how, keep))
        reread[keep] = sampler.reread_tokens
    assert reread[True] == 0 < reread[False]
    samples = list(dict.fromkeys(turn.sample for turn in turns))
    logits = [forward(model, one, [s.ids for s in samples], width=ROOM) for one in versions]
    mixed, limit = 0, rounding(model)
    for i, sample in enumerate(samples):
        mixed += len(set(sample.versions[sample.chosen].tolist())) > 1
        for t in np.flatnonzero(sample.chosen):
            said = logits[sample.versions[t] % 3][i][len(sample.prompt) + t - 1]
            assert abs(sample.logprobs[t] - log_softmax(said)[sample.tokens[t]]) < limit
    assert mixed > 5


def finished(sampler, params) -> None:
    while sampler.pending:
        sampler.step(params)


def test_the_highest_request_id_gives_way_to_lower_ones(model):
    """And to any, once nothing else could go on."""
    params = weights(model)
    sampler = Sampler(Engine(model, 3, ROOM, steps=3), chunk_tokens=8, parked_tokens=ROOM)

    def ask(i):
        return sampler.submit([3, 4], ASKED, request_ids=[i], hold=True)[0]

    first = {i: ask(i) for i in (5, 9, 7)}
    finished(sampler, params)
    assert (sampler.held, sampler.parked) == (3, 0)
    low = ask(2)
    sampler.step(params)
    slots = sampler._scheduler.slots
    assert first[9] not in slots and {first[5], first[7]} <= set(slots)
    finished(sampler, params)
    assert (sampler.held, sampler.parked) == (3, 1)
    high = ask(11)
    finished(sampler, params)
    assert first[7] not in sampler._scheduler.slots and high.finish_reason is not None
    dropped = first[7].size - 1  # there was room for one
    sampler.deliver([(first[9], [5], ASKED), (first[7], [5], ASKED)])
    finished(sampler, params)
    assert sampler.reread_tokens == dropped
    for sample in (*first.values(), low):
        sampler.release(sample)
        sampler.release(sample)  # nothing is left to free
    sampler.abort(high)
    assert sampler.held == sampler.parked == 0 and sampler._scheduler.slots == [None] * 3


def test_paused_samples_come_back_together(model):
    """Nine at once, in one step, into other slots than they had."""
    params = weights(model)
    sampler = Sampler(Engine(model, 9, ROOM, steps=8), chunk_tokens=8)
    asked = dataclasses.replace(ASKED, max_response_tokens=12, stop_ids=())
    whole = sampler.submit([5, 6, 7], asked, n=9, request_ids=range(9))
    finished(sampler, params)
    samples = sampler.submit([5, 6, 7], asked, n=9, request_ids=range(9))
    sampler.step(params)
    partials = [sampler.pause(sample) for sample in samples]
    for partial in partials[::2] + partials[1::2]:
        sampler.resume(partial)
    assert len(sampler.step(params)) == 9 and sampler.reread_tokens == 0
    finished(sampler, params)
    assert [s.tokens.tolist() for s in samples] == [s.tokens.tolist() for s in whole]


def test_replies_that_cannot_be_delivered_change_nothing(model):
    params = weights(model)
    sampler = Sampler(Engine(model, 3, ROOM, steps=3), chunk_tokens=8)
    one, other = sampler.submit([3, 4], ASKED, n=2, hold=True)
    [plain] = sampler.submit([3, 4], ASKED)
    with pytest.raises(InputError, match="held, once each"):
        sampler.deliver([(one, [5], ASKED)])
    with pytest.raises(InputError, match="release"):
        sampler.release(one)
    finished(sampler, params)
    stood = one.ids.tolist()
    for bad, pattern in (
        ([(one, [5], ASKED), (plain, [5], ASKED)], "held"),
        ([(one, [5], ASKED), (one, [5], ASKED)], "once each"),
        ([(one, [5], ASKED), (other, [5] * 70, ASKED)], "do not fit a slot"),
        ([(one, [5], ASKED), (other, [VOCAB], ASKED)], "ids from 0"),
        ([(one, [5], ASKED), (other, [5], THINK)], "tokenizer"),
    ):
        with pytest.raises(InputError, match=pattern):
            sampler.deliver(bad)
    assert one.ids.tolist() == stood and sampler.held == 2 and not sampler.pending
    with pytest.raises(InputError, match="keep and hold"):
        sampler.submit([3], ASKED, keep=True, hold=True)
    with pytest.raises(InputError, match="parked_tokens"):
        Sampler(sampler.engine, parked_tokens=-1)


def test_many_replies_are_few_programs(model):
    """256 short ones are one; shapes are few, whatever the lengths."""
    engine = Engine(model, 1024, ROOM)
    assert [(m, s) for m, s, _ in calls([9] * 256, engine)] == [(256, 16)]
    rng, shapes = np.random.default_rng(0), set()
    for count in (1, 5, 60, 300, 1000):
        unread = rng.integers(0, 5000, count).tolist()
        planned = list(calls(unread, Engine(model, 1024, 128)))
        assert sorted(i for _, _, which in planned for i in which) == list(range(count))
        shapes |= {(rows, columns) for rows, columns, which in planned}
    assert shapes <= {(8, 16), (64, 16), (256, 16), (8, 128), (64, 128)}


@pytest.mark.slow
def test_turns_compile_few_programs(model):
    """From the first request on, with replies of any length."""
    engine = Engine(model, 7, ROOM, steps=5)
    compiles.watch()
    before = compiles.count()
    sampler = Sampler(engine, chunk_tokens=8, prefill_rows=10)
    play(sampler, weights(model), np.random.default_rng(3), samples=10)
    assert compiles.count() - before <= 9, compiles.names(before)


@pytest.mark.slow
def test_slots_on_eight_devices_take_replies_as_those_of_one():
    for slots in (8, 5):
        model = dataclasses.replace(tiny(window=4), mesh=make_mesh(8, 1, 1))
        params = model.init(jax.random.key(3))
        how = dict(chunk_tokens=8, parked_tokens=4 * ROOM)
        sampler = Sampler(Engine(model, slots, ROOM, steps=3), **how)
        turns = play(sampler, params, np.random.default_rng(4))
        one = tiny(window=4)
        assert_fresh(Sampler(Engine(one, 9, ROOM, steps=8), chunk_tokens=32), weights(one), turns)
