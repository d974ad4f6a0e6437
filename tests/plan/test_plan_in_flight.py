"""Memory of samples in flight: their slots stay while a run learns and while it evaluates."""

import dataclasses
import re

import pytest
from test_plan import tiny

from rljax.config import with_overrides
from rljax.errors import InputError
from rljax.plan import memory
from rljax.plan.memory import IN_FLIGHT, KV, check_fits, estimate, in_flight_parts
from rljax.sampler.memory import slots_bytes
from rljax.setup import abstract_roles
from rljax.setup.abstract import abstract_setup

FLIGHT = dict(rollouts__max_staleness=2, algorithm__policy_loss="decoupled_ppo()")


def setup_of(**fields):
    return abstract_setup(tiny(evaluate__prompts=8, **fields))


def test_slots_in_flight_are_held_beside_learning():
    plain, flown = (setup_of(**fields) for fields in ({}, FLIGHT))
    before, now = estimate(plain), estimate(flown)
    assert IN_FLIGHT not in before.held and now.held[IN_FLIGHT] == before.generate[KV] > 0
    assert now.learn == before.learn and now.resident == before.resident + now.held[IN_FLIGHT]
    columns = flown.data.prompt_tokens + flown.rollouts.sampling.max_response_tokens
    model = flown.decoding.of(flown.model)
    rows = flown.config.batch.prompts_per_step * flown.config.batch.samples_per_prompt
    assert now.held[IN_FLIGHT] == slots_bytes(model, rows, columns)
    # The greedy responses of an evaluation have slots of their own.
    assert now.generate[KV] == slots_bytes(model, 8, columns)
    assert "keys and values in flight" in now.line()
    # Up to all that has begun: a step's rows, and those of the step ahead.
    most = estimate(setup_of(**FLIGHT, sampler__slots=10**6)).held[IN_FLIGHT]
    assert most == slots_bytes(model, 2 * rows, columns)
    # The compiled plan counts them beside the program that learns.
    (part,) = in_flight_parts(flown, abstract_roles(flown)).values()
    assert part.size == now.held[IN_FLIGHT]
    assert in_flight_parts(plain, abstract_roles(plain)) == {}


def test_more_slots_than_memory_is_refused_with_the_number_that_fits(monkeypatch):
    # With nothing else to save: what is in flight is the most of it.
    small = dict(batch__tokens_per_microbatch=32, model_settings__dtype="bfloat16")
    flown = setup_of(**FLIGHT, **small, model_settings__remat="full")
    needs = estimate(flown)
    have = needs.least - needs.held[IN_FLIGHT] // 4
    monkeypatch.setattr(memory, "available_bytes", lambda setup: have)
    with pytest.raises(InputError, match=r"in flight.*--config.sampler.slots=") as refused:
        check_fits(flown)
    flags = dict(re.findall(r"--config\.([\w.]+)=(\w+)", str(refused.value)))
    changed = with_overrides(flown.config, {"sampler.slots": int(flags["sampler.slots"])}, "test")
    fewer = abstract_setup(changed)
    assert estimate(fewer).held[IN_FLIGHT] < needs.held[IN_FLIGHT]
    without = dataclasses.replace(changed.rollouts, max_staleness=0)
    assert estimate(abstract_setup(dataclasses.replace(changed, rollouts=without))).held.keys() == (
        needs.held.keys() - {IN_FLIGHT}
    )
