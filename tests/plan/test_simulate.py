"""Runs in simulation: what overlap, staleness and more generators buy, and bounds that none of them
breaks. What is counted against a real run: tests/training/test_simulated_runs.py."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.errors import InputError
from rljax.plan import draws
from rljax.plan.simulate import Load, Seconds, simulate

LENGTHS = functools.partial(draws.geometric, mean=33, cap=128)
TOOLS = functools.partial(draws.uniform, low=0.5, high=5.0)
TURNS = functools.partial(draws.geometric, mean=3, cap=8)
SECONDS = Seconds(step_s=0.01, idle_s=0.01, learn_s=1.0)


def a_load(slots: int = 32, **fields) -> Load:
    return Load(8, 8, slots, LENGTHS, **fields)


def test_by_hand():
    """Two groups of one sample in a slot: 3 + 5 steps of 1 s, a dispatch each, learning of 2 s."""
    lengths = iter([3, 5] * 3)
    load = Load(2, 1, 1, lambda rng, count: np.array([next(lengths) for _ in range(count)]))
    how = Seconds(step_s=1.0, idle_s=0.5, learn_s=2.0, dispatch_s=0.25, read_s=0.125)
    outcome = simulate(load, how, 0, 0, steps=3, warm=0)
    assert outcome.step_s == 8 * 1.0 + 2 * 0.25 + 2 * 0.125 + 2.0
    assert outcome.counts == ((2, 8),) * 3 and outcome.live_share == 1.0
    assert outcome.ages == (1.0,) and outcome.learn_share == pytest.approx(2.0 / 10.75)


@pytest.mark.slow
def test_a_generator_more_gives_more_samples_per_second():
    """004-45: devices that sample, twice and four times as many of them, each with its slots, as
    long as learning waits for samples; from there on learning is the limit."""
    rate = {  # (New weights wait for the end of a dispatch, so these are short here.)
        slots: 64 / simulate(a_load(slots, dispatch_steps=4), SECONDS, 2, 2, overlap=True).step_s
        for slots in (4, 8, 16, 32, 128)
    }
    assert rate[8] > 1.8 * rate[4] and rate[16] > 1.8 * rate[8]
    bound = 64 / SECONDS.learn_s
    assert all(max(0.95 * bound, rate[16]) < rate[slots] <= bound for slots in (32, 128))


def test_samples_in_flight_are_faster_than_synchronous_ones():
    """004-69: by less than what keeps all slots live, and no longer where they are."""
    runs = {eta: simulate(a_load(), SECONDS, eta, eta) for eta in (0, 1, 2)}
    assert runs[0].max_age == 0 and runs[2].max_age <= 2
    assert runs[0].step_s > 1.15 * runs[1].step_s
    decode_s = {eta: one.step_s - SECONDS.learn_s for eta, one in runs.items()}
    assert decode_s[0] / decode_s[2] <= 1.02 * runs[2].live_share / runs[0].live_share
    assert runs[2].live_share > 0.9 > runs[1].live_share > runs[0].live_share + 0.1
    tools = dict(turns=TURNS, tools=TOOLS)
    with_tools = [simulate(a_load(**tools), SECONDS, eta, eta).step_s for eta in (0, 1, 2)]
    assert with_tools[0] > 1.3 * with_tools[1] > 1.3 * with_tools[2]


def test_overlap_hides_the_shorter_of_both():
    """One step off-policy: a step takes as long as the longer of sampling and learning, not as both
    together; without staleness it changes nothing."""
    alone = simulate(a_load(), SECONDS, 0, 0)
    assert simulate(a_load(), SECONDS, 0, 0, overlap=True).step_s == pytest.approx(alone.step_s)
    for learn_s in (0.3, 1.0, 3.0):
        how = Seconds(step_s=0.01, idle_s=0.01, learn_s=learn_s)
        one = simulate(a_load(), how, 1, 1, overlap=True)
        both = simulate(a_load(), how, 1, 1).step_s
        decode_s = both - learn_s
        assert max(learn_s, 0.9 * decode_s) <= one.step_s < 0.95 * both
        assert one.max_age == 1


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 4),
    st.data(),
    st.booleans(),
    st.booleans(),
    st.integers(1, 40),
    st.integers(0, 2),
    st.integers(0, 2**31),
)
def test_the_bound_holds_whatever_comes_when(eta, data, overlap, tools, slots, scores, seed):
    """And every step trains P n samples: none waits for ever, none is trained twice (`Tickets`
    raises where one is)."""
    ahead = data.draw(st.integers(0, eta))
    fields = dict(turns=TURNS, tools=TOOLS) if tools else {}
    load = Load(3, 4, slots, LENGTHS, score_dispatches=scores, **fields)
    how = dict(overlap=overlap, steps=6, warm=2, seed=seed)
    one = simulate(load, SECONDS, eta, ahead, **how)
    assert one.max_age <= eta and sum(one.ages) == pytest.approx(1.0)
    assert 0 < one.live_share <= 1 and one.step_s >= SECONDS.learn_s
    assert simulate(load, SECONDS, eta, ahead, **how) == one


def test_draws_have_the_means_that_they_name():
    rng = np.random.default_rng(0)
    for draw, mean in (
        (functools.partial(draws.lognormal, mean=2500, sigma=0.9), 2500),
        (LENGTHS.func, 33),
        (TOOLS, 2.75),
        (functools.partial(draws.fixed, value=7), 7),
    ):
        how = dict(mean=33) if draw is LENGTHS.func else {}
        assert draw(rng, 200_000, **how).mean() == pytest.approx(mean, rel=0.02)
    capped = LENGTHS(rng, 200_000)
    assert capped.max() == 128 and capped.mean() == pytest.approx(
        33 * (1 - (1 - 1 / 33) ** 128), rel=0.02
    )
    for draw, how, words in (
        (draws.lognormal, dict(mean=0, sigma=1), "mean of lognormal"),
        (draws.lognormal, dict(mean=5, sigma=-1), "sigma of lognormal"),
        (draws.geometric, dict(mean=0.5), "mean of geometric"),
        (draws.uniform, dict(low=3, high=2), "high of uniform"),
        (draws.fixed, dict(value=-1), "value of fixed"),
        (draws.geometric, dict(mean=5, cap=0), "cap of geometric"),
    ):
        with pytest.raises(InputError, match=words):
            draw(rng, 3, **how)
