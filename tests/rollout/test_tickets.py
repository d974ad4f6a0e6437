"""Tickets: no group is trained too late, lost or trained twice, whatever comes when."""

import random

import pytest
from conftest import worked_example
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.errors import InputError
from rljax.rollout.flight.tickets import Tickets


def play(groups: int, eta: int, ahead: int, seed: int, steps: int = 30, beside: float = 0.0):
    """A random run: how long groups take and which are dropped is drawn; every now and then it is
    resumed. With chance `beside` what comes next finds a step still learning, and so the weights
    of that step. Returns (tickets, [(step, ticket, the step at which it was admitted)])."""
    chance = random.Random(seed)
    tickets, trained, waited = Tickets(groups, eta, ahead), [], 0
    slow, dead = chance.choice((0.02, 0.3, 0.9)), chance.choice((0.0, 0.1, 0.5))
    begun = {}
    weights = 0  # the step whose weights draw now
    while tickets.step < steps:
        if chance.random() >= beside:
            tickets.renew()
            weights = tickets.step
        while tickets.room > 0:
            begun[tickets.admit()] = weights
        for ticket in list(tickets.open):
            if ticket not in tickets.complete and chance.random() < slow:
                tickets.completed(ticket)
                if chance.random() < dead:
                    tickets.drop(ticket)
        assert tickets.room >= 0
        chosen = tickets.ready() if weights == tickets.step else None
        waited = 0 if chosen else waited + 1
        assert waited < 5000, "waits for ever"
        if chosen:
            trained += [(tickets.step, ticket, begun[ticket]) for ticket in chosen]
            tickets.train(chosen, failed=chance.random() < 0.1)
        if chance.random() < 0.1:
            complete, tickets = tickets.complete, resumed(tickets)
            for ticket in complete:
                tickets.completed(ticket)
            weights = tickets.step
    return tickets, trained


def resumed(tickets: Tickets) -> Tickets:
    new = Tickets(tickets.groups_per_step, tickets.max_staleness, tickets.ahead)
    new.set_state(tickets.get_state())
    return new


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), st.integers(0, 5), st.data())
def test_no_group_is_too_old_lost_or_trained_twice(groups, eta, data):
    ahead, beside = data.draw(st.integers(0, eta)), data.draw(st.sampled_from((0.0, 0.5, 0.95)))
    seed = data.draw(st.integers(0, 2**32 - 1))
    tickets, trained = play(groups, eta, ahead, seed, beside=beside)
    tickets.check()
    assert all(0 <= step - begun <= eta for step, _, begun in trained)
    numbers = [ticket for _, ticket, _ in trained]
    assert len(set(numbers)) == len(numbers)
    if ahead == eta:  # the order of the data, whatever the clock
        assert numbers == sorted(numbers)


@pytest.mark.smoke
def test_the_bound_is_reached():
    for eta in (1, 2, 4):
        found = [step - begun for step, _, begun in play(3, eta, eta, 5)[1]]
        assert max(found) == eta
        found = [step - begun for seed in range(8) for step, _, begun in play(3, eta, 0, seed)[1]]
        assert max(found) <= eta


def test_without_staleness_every_step_samples_anew():
    tickets, trained = play(4, 0, 0, 3)
    assert all(step == begun for step, _, begun in trained)


def test_capacity_is_that_of_areal_where_nothing_is_dropped():
    """With as many slots as may run at once."""
    example = worked_example("areal.capacity")
    for case, capacity in zip(
        example["inputs"]["cases"], example["outputs"]["capacity"], strict=True
    ):
        eta, version, batch, most, accepted, running = case
        tickets = Tickets(batch, eta, eta, version, accepted + running, accepted)
        tickets.open = dict.fromkeys(range(accepted, accepted + running), version)
        assert min(tickets.room, most - running) == capacity


def test_bad_bounds_are_refused_by_name():
    for how, words in (
        (dict(max_staleness=-1), "max_staleness"),
        (dict(max_staleness=2, ahead=3), "rollouts.ahead"),
        (dict(max_staleness=2, ahead=-1), "rollouts.ahead"),
    ):
        with pytest.raises(InputError, match=words):
            Tickets(4, **how)
