"""Keys and values in pages: whose they are, and that a sample is what it is without them: whatever
the size of a page, what is shared, parked, found again, or taken away when pages are short."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import golden, lanes
from explained import meaning
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_cases import prompts, recurrent, rounding, shallow, tiny, weights
from turn_cases import ROOM, assert_fresh, play

from rljax.config import Config
from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models.cache_pages import Pool
from rljax.models.huggingface import load_config, load_params
from rljax.models.model import Model
from rljax.sampler import Decoding, Engine, Sampler, Sampling, generate
from rljax.sampler.memory import slots_bytes
from rljax.sampler.scheduler import Pages
from rljax.tracking import compiles, timing
from rljax.validation import validate

PAGE = 4


# -- whose a page is


@pytest.mark.smoke
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
    tables = sampler._scheduler.tables
    return not tables._owned and not tables.pages.used and (tables._table == tables._none).all()


CASES = [
    # window (-1: a recurrent layer), slots, a page, pages in all (0: enough)
    (0, 3, 4, 0),
    (0, 6, 4, 26),  # too few for 6 slots of 80 tokens: 120
    (4, 3, 5, 16),
    (4, 12, 16, 0),
    (0, 12, 4, 21),  # enough for one
    (0, 1, 80, 1),
    (-1, 3, 5, 0),
    (-1, 9, 4, 26),
]


def with_window(window: int, **changes):
    """A model with a sliding window; of -1 with a recurrent layer."""
    return recurrent(**changes) if window < 0 else tiny(window=window, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("case", lanes(CASES[:1], CASES[1:]))
def test_turns_in_pages_are_those_of_a_fresh_request(case):
    """Held, parked, preempted and read again, on pages that are shared and found again."""
    window, slots, page, pages = case
    model = with_window(window)
    rng = np.random.default_rng(slots)
    engine = engine_of(model, slots, page, pages=pages)
    sampler = Sampler(engine, chunk_tokens=8, parked_tokens=2 * ROOM, prefix_cache_tokens=1)
    turns = play(sampler, weights(model), rng)
    assert emptied(sampler)
    other = Sampler(Engine(model, 9, ROOM, steps=8), chunk_tokens=32)
    assert_fresh(other, weights(model), turns, rounding(model))
    metrics = sampler.page_metrics()
    assert 0 < metrics["pages/fill"] <= 1 and 0 < metrics["pages/occupancy"] <= 1
    if pages:
        assert metrics["pages/preemptions"] + sampler.reread_tokens > 0
    elif not window:
        assert sampler.reread_tokens == 0  # what left its slot kept its pages


def ask(sampler, count=6, n=2, most=30):
    """`count` prompts of n samples each, of very different lengths."""
    tokens, lengths = prompts(count)
    samples = []
    for p in range(count):
        asked = Sampling(max_response_tokens=4 + (most * p) // count)
        ids = range(n * p, n * p + n)
        samples += sampler.submit(tokens[p, : lengths[p]], asked, n=n, request_ids=ids)
    return samples


def assert_equal(ours, theirs, atol=1e-5):
    for one, other in zip(ours, theirs, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and one.id == other.id
        assert one.finish_reason == other.finish_reason
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=atol)


def run(engine, params, **how):
    sampler = Sampler(engine, chunk_tokens=8, key=jax.random.key(1), **how)
    samples = ask(sampler)
    assert len(list(sampler.run(params))) == len(samples)
    return sampler, samples


@pytest.mark.slow
def test_a_full_pool_changes_no_draw():
    model = tiny()
    params = weights(model)
    _, want = run(Engine(model, 5, ROOM, steps=3), params)
    few, samples = run(engine_of(model, 5, pages=13), params)
    enough, others = run(engine_of(model, 5), params)
    assert_equal(samples, want)
    assert_equal(others, want)
    assert emptied(few) and emptied(enough)
    assert few.page_metrics()["pages/preemptions"] > 0 == enough.page_metrics()["pages/preemptions"]
    assert few.page_metrics()["pages/occupancy_max"] == 1.0
    assert enough.page_metrics()["pages/shared"] > 0
    # Requests that fit the slots alone: one of more tokens than the pages hold is refused.
    with pytest.raises(InputError, match="13 pages of 4 tokens"):
        few.submit([5] * 30, Sampling(max_response_tokens=24))
    [last] = few.submit([5] * 30, Sampling(max_response_tokens=23))
    list(few.run(params))
    assert len(last.tokens) == 23


@pytest.mark.slow
def test_a_group_has_the_full_pages_of_its_prompt_once():
    model = shallow()
    sampler = Sampler(engine_of(model, 4, steps=2), chunk_tokens=16)
    sampler.submit(np.arange(2, 13), Sampling(max_response_tokens=3), n=4)
    sampler.step(weights(model))
    pages = sampler._scheduler.tables.pages
    assert (pages.shared, pages.used) == (2, 2 + 4)  # of 10 tokens that were read, and 1 more
    list(sampler.run(weights(model)))
    assert emptied(sampler)


@pytest.mark.slow
def test_a_finished_response_is_found_again():
    """The next request of a conversation reads its new tokens alone, and draws what it would have
    drawn; a paused sample goes on from its pages."""
    model = shallow()
    params = weights(model)
    sampler = Sampler(engine_of(model, 4, steps=2), chunk_tokens=8, prefix_cache_tokens=1)
    [first] = sampler.submit(np.arange(2, 9), Sampling(max_response_tokens=10))
    list(sampler.run(params))
    prompt = [*first.ids.tolist(), 3, 4, 5]
    asked = Sampling(max_response_tokens=8, seed=5)
    [second] = sampler.submit(prompt, asked)
    for _ in range(2):
        sampler.step(params)
    assert (sampler.cache.hits, sampler.cache.reused_tokens) == (1, 16)
    paused = sampler.pause(second)
    assert sampler._scheduler.tables.pages.used == 0
    sampler.resume(paused)
    list(sampler.run(params))
    assert sampler.reread_tokens < PAGE
    other = Sampler(Engine(model, 2, ROOM), chunk_tokens=32)
    [fresh] = other.submit(prompt, asked)
    list(other.run(params))
    assert_equal([second], [fresh])
    sampler.submit(prompt, asked)
    sampler.step(params, version=1)  # other parameters: nothing is found
    assert sampler.cache.hits == 1


@pytest.mark.slow
def test_refilled_slots_take_fewer_steps_than_static_batches():
    """Counted: batches of as many samples, each as long as its longest (rows of the checklist)."""
    model, rng = shallow(), np.random.default_rng(0)
    sampler = Sampler(engine_of(model, 4, steps=2), chunk_tokens=8)
    lengths = np.minimum(rng.geometric(0.1, 32), 60)
    for length in lengths.tolist():
        sampler.submit([2, 3, 4], Sampling(max_response_tokens=length))
    compiles.watch()
    before = compiles.count()
    done = list(sampler.run(weights(model)))
    assert compiles.names(before).count("jit(_generate)") <= 1  # whatever slots hold which pages
    assert sorted(len(one.tokens) for one in done) == sorted(lengths)
    static = lengths.reshape(-1, 4).max(axis=1).sum()
    steps = sampler.slot_steps // 4
    assert lengths.sum() / 4 <= steps < 0.75 * static


@pytest.mark.slow
def test_a_rollout_by_the_hosts_loop_says_how_full_its_pages_were():
    model = tiny()
    tokens, lengths = prompts(4)

    def draw(**how):
        return generate(
            model,
            weights(model),
            tokens,
            lengths,
            jax.random.key(2),
            Sampling(max_response_tokens=9),
            n=2,
            decoding=Decoding(loop="host", slots=3, **how),
        )

    with timing.collect() as timings:
        got = draw(page_tokens=PAGE, pages=9)
    want = draw()
    assert (got.tokens == want.tokens).all()
    np.testing.assert_allclose(got.sampler_logprobs, want.sampler_logprobs, atol=1e-5)
    metrics = timings.decoding_metrics()
    assert 0 < metrics["pages/occupancy"] < metrics["pages/occupancy_max"] <= 1 and all(
        meaning(name) for name in metrics if name.startswith("pages/")
    )
    with pytest.raises(InputError, match="sampler pages: got 4; at least 5"):
        draw(page_tokens=PAGE, pages=4)
    with pytest.raises(InputError, match="loop='host'"):
        Decoding(page_tokens=PAGE)


@pytest.mark.parametrize(
    "how",
    [dict(page_tokens=-1), dict(pages=3), dict(page_tokens=4, pages=-1), dict(page_tokens=1.5)],
)
def test_bad_pages_are_refused_by_name(how):
    with pytest.raises(InputError, match="page"):
        Engine(tiny(), 2, ROOM, **how)
    with pytest.raises(InputError, match="page"):
        Decoding(loop="host", **how)


@pytest.mark.slow
def test_a_fork_writes_its_own_pages():
    """The fork and its source go on as the source would have alone, each on pages of its own."""
    model, params = shallow(), weights(shallow())
    engine = engine_of(model, 3)
    sampler = Sampler(engine, chunk_tokens=8)
    sampler.submit([5, 6, 7, 8, 9], Sampling(max_response_tokens=20))
    sampler.step(params)
    state, first = sampler._scheduler.state, engine.pool.pages_for(ROOM)
    table = np.array(state.table)
    table[0, 2:] = np.arange(2, first)  # two hold the prompt
    table[2] = np.arange(first) + first
    state = engine.with_table(state, table)
    want = engine.generate(params, jax.tree.map(jnp.copy, state), 3)[1]
    forked = engine.fork(state, 0, np.array([2]), np.asarray(state.key)[:1])
    np.testing.assert_array_equal(forked.table, table)
    found = engine.generate(params, forked, 3)[1]
    for slot in (0, 2):
        assert found.ids[:3, slot].tolist() == want.ids[:3, 0].tolist()
        np.testing.assert_allclose(found.logp[:3, slot], want.logp[:3, 0], atol=1e-6)


def test_a_pool_that_does_not_fit_is_refused_before_it_is_allocated():
    with pytest.raises(InputError, match=f"{2**26} pages of 4096 tokens need .* about .* pages"):
        Engine(tiny(), 2, ROOM, page_tokens=4096, pages=2**26)


@pytest.mark.parametrize("kv_dtype", ["", "int8"])
def test_the_bytes_of_a_pool_are_counted_as_they_are_held(kv_dtype):
    engine = engine_of(tiny(window=6), 3, pages=17, kv_dtype=kv_dtype)
    held = jax.tree.leaves(engine.abstract_state().caches)
    size = slots_bytes(engine.model, 3, ROOM, kv_dtype, engine.pool)
    assert size == sum(x.size * x.dtype.itemsize for x in held)
    assert size < slots_bytes(engine.model, 3, ROOM, kv_dtype)


@pytest.mark.parametrize(
    ("page_tokens", "pages", "loop", "problem"),
    [
        (16, 0, "device", "sampler.page_tokens.*sampler.loop='host'"),
        (-1, 0, "host", "sampler.page_tokens"),
        (16, 9, "host", ""),
    ],
)
def test_a_config_says_what_pages_need(page_tokens, pages, loop, problem):
    config = Config()
    config.sampler.page_tokens, config.sampler.pages = page_tokens, pages
    config.sampler.loop = loop
    with pytest.raises(InputError) as error:  # that there is no model, too
        validate(config)
    problems = str(error.value).splitlines()
    said = [line for line in problems if "page" in line]
    assert bool(said) == bool(problem) and all(re.search(problem, line) for line in said)


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 6, -1])
def test_on_eight_devices_too(window):
    """Slots over 4 devices, each with pages of its own, and kv heads over 2."""
    one = with_window(window, vocab_size=32)
    model = dataclasses.replace(one, mesh=make_mesh(2, 2, 2))
    params = jax.device_put(weights(one), model.shardings())
    _, want = run(Engine(one, 8, ROOM, steps=3), weights(one))
    few, samples = run(engine_of(model, 8, pages=4 * 13), params)
    assert_equal(samples, want, rounding(one))
    assert emptied(few) and few.page_metrics()["pages/preemptions"] > 0
    with pytest.raises(InputError, match="at least one for each of the 4"):
        engine_of(model, 8, pages=3)
    with pytest.raises(InputError, match="13 pages of 4 tokens"):
        few.submit([5] * 30, Sampling(max_response_tokens=24))
    sampler = Sampler(engine_of(model, 8, pages=4 * 20), chunk_tokens=8)
    turns = play(sampler, params, np.random.default_rng(0))
    assert emptied(sampler)
    other = Sampler(Engine(one, 9, ROOM, steps=8), chunk_tokens=32)
    assert_fresh(other, weights(one), turns, rounding(one))


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["", "int8"])
@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "gemma2", "qwen2"])
def test_families(name, kv_dtype):
    """Sinks and windows, latents, soft caps; heads that are no whole lanes."""
    folder, mesh = golden("hf", name), make_mesh(1, 1, 1, devices=jax.devices()[:1])
    model = Model(load_config(folder, remat="none"), mesh)
    params = load_params(folder, model)
    _, want = run(Engine(model, 5, ROOM, kv_dtype=kv_dtype, steps=3), params)
    # (What is read again attends to rounded keys and values, of which a draw may be another one.)
    few, samples = run(engine_of(model, 5, pages=0 if kv_dtype else 13, kv_dtype=kv_dtype), params)
    assert_equal(samples, want)
    assert emptied(few) and bool(few.page_metrics()["pages/preemptions"]) == (not kv_dtype)
