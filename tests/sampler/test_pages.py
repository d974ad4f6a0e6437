"""Keys and values in pages: whose they are, and that a sample is what it is without them: whatever
the size of a page, what is shared, parked, found again, or taken away when pages are short."""

import dataclasses

import jax
import numpy as np
import pytest
from conftest import lanes
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_cases import EOS, LONGEST, NEW, VOCAB, prompts, tiny, weights
from turn_cases import ASKED, ROOM, assert_fresh, play

from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models.cache_pages import Pool
from rljax.sampler import Engine, Sampler, Sampling
from rljax.sampler.pages import Pages

PAGE = 4


# -- whose a page is


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("tgdn"), st.integers(0, 9), st.integers(0, 30))))
def test_a_page_is_written_by_one_owner_and_none_is_lost(moves):
    """Runs that begin alike, grow, end and are found again, in a pool that is mostly too small."""
    shards, each, page = 2, 7, 3
    pages = Pages(Pool(page, shards * each, shards, None))
    texts = [np.arange(40) % (3 + i % 3) for i in range(10)]
    runs = {}  # which: (shard, pages, how many of them were found)
    for move, which, count in moves:
        shard, tokens = which % shards, texts[which]
        if move == "t" and which not in runs:
            found = pages.find(shard, tokens[:count])
            pages.share(shard, found)
            runs[which] = (shard, found, len(found))
        elif move == "g" and which in runs:
            _, held, _ = runs[which]
            room = pages.room(shard)
            more = pages.take(shard, count % 4)
            assert (more is None) == (room < count % 4)
            held += more or []
        elif move == "d" and which in runs:
            pages.drop(*runs.pop(which)[:2])
        elif move == "n" and which in runs:
            _, held, _ = runs[which]
            if count == 0:
                pages.forget_names()
            pages.name(shard, held, tokens[:count])
        for s in range(shards):
            own = [held for at, held, _ in runs.values() if at == s]
            used = {page for held in own for page in held}
            assert pages.room(s) + len(used) == each
            written = [page for at, held, f in runs.values() if at == s for page in held[f:]]
            assert len(set(written)) == len(written)  # nobody writes what another one does
            assert all(len(set(held)) == len(held) for held in own)
    for shard, held, _ in runs.values():
        pages.drop(shard, held)
    assert pages.used == 0 and [pages.room(s) for s in range(shards)] == [each] * shards


def test_what_is_found_holds_the_same_tokens():
    pages = Pages(Pool(4, 8, 1, None))
    run = pages.take(0, 3)
    tokens = np.arange(11)
    pages.name(0, run, tokens)
    assert pages.find(0, tokens) == run[:2]  # the third is not full
    assert pages.find(0, np.concatenate([tokens[:7], [0, 0]])) == run[:1]
    assert pages.find(0, tokens[4:]) == []
    pages.drop(0, run)
    assert pages.find(0, tokens) == run[:2]  # without an owner, until its room is needed
    assert len(pages.take(0, 7)) == 7 and pages.find(0, tokens) == run[:1]
    pages.forget_names()
    assert pages.find(0, tokens) == [] and pages.room(0) == 1


# -- samples


def engine_of(model, slots, page=PAGE, **how):
    return Engine(model, slots, ROOM, **dict(dict(steps=3, page_tokens=page), **how))


def emptied(sampler) -> bool:
    """Whether nothing that ended has left a page behind."""
    seats = sampler._places.seats
    return not seats._runs and not seats.pages.used and (seats._table == seats._none).all()


CASES = [
    # window, slots, a page, pages in all (0: enough)
    (0, 3, 4, 0),
    (0, 6, 4, 45),  # too few for 6 slots of 80 tokens: 120
    (4, 3, 5, 18),
    (4, 12, 16, 0),
    (0, 12, 4, 21),  # enough for one
    (0, 1, 80, 1),
]


@pytest.mark.parametrize("case", lanes(CASES[:3], CASES[3:]))
def test_turns_in_pages_are_those_of_a_fresh_request(case):
    """Held, parked, preempted and read again, on pages that are shared and found again."""
    window, slots, page, pages = case
    model = tiny(window=window)
    rng = np.random.default_rng(slots)
    engine = engine_of(model, slots, page, pages=pages)
    sampler = Sampler(engine, chunk_tokens=8, parked_tokens=2 * ROOM, prefix_cache_tokens=1)
    turns = play(sampler, weights(model), rng)
    assert emptied(sampler)
    assert_fresh(Sampler(Engine(model, 9, ROOM, steps=8), chunk_tokens=32), weights(model), turns)
    metrics = sampler.page_metrics()
    assert 0 < metrics["pages/fill"] <= 1 and 0 < metrics["pages/occupancy"] <= 1
    short = bool(pages) and slots > 1
    assert (metrics["pages/preemptions"] > 0) == short, metrics
