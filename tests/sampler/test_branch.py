"""Samples that go on behind a part of another one's response: whatever was kept of that, and
whatever the slots, neighbours and pages, each is what the same prefix submitted anew draws."""

import dataclasses

import jax
import numpy as np
import pytest
from conftest import lanes
from sampler_cases import recurrent, shallow, tiny, weights
from test_sampler_families import family

from rljax.batch import FinishReason
from rljax.errors import InputError
from rljax.models.config import LatentConfig, LayerKind
from rljax.sampler import Engine, Sampler, Sampling
from rljax.sampler.inputs import branch_keys
from rljax.sampler.sample import Sample

ROOM = 40
ASKED = Sampling(max_response_tokens=12)
PROMPTS = ([3, 4, 5, 6, 7, 8, 9], [11], [12, 13, 14])
PLACES = (7, 0, 3, 11)


@pytest.fixture
def tokens_read(monkeypatch):
    """How many tokens each call of the engine reads, by verb."""
    read = []

    def spy(name, counted):
        verb = getattr(Engine, name)

        def call(self, *args, **kwargs):
            read.append(counted(*args))
            return verb(self, *args, **kwargs)

        monkeypatch.setattr(Engine, name, call)

    spy("prefill", lambda params, tokens, lengths, *_: int(np.sum(lengths)))
    spy("append", lambda params, prefix, tokens, counts: int(np.sum(counts)))
    spy("extend", lambda params, state, slots, tokens, counts, *_: int(np.sum(counts)))
    return read


def finished(sampler, params):
    while sampler.pending:
        sampler.step(params)


def sources(sampler, params, prompts=PROMPTS, asked=ASKED, **how):
    samples = [sampler.submit(p, asked, request_ids=[i], **how)[0] for i, p in enumerate(prompts)]
    finished(sampler, params)
    return samples


def assert_anew(engine, params, source, children, places, n, *, decode=None, atol=2e-5):
    """The children are what their prefixes, submitted to another sampler, draw with their keys."""
    other = Sampler(engine, key=jax.random.key(9), chunk_tokens=32, decode=decode)
    start, again = len(source.prompt), []
    for child, at in zip(children, np.repeat(places, n), strict=True):
        assert child.branched == at
        assert child.ids[: start + at].tolist() == source.ids[: start + at].tolist()
        left = dataclasses.replace(ASKED, max_response_tokens=ASKED.max_response_tokens - at)
        again += other.submit(child.ids[: start + at], left, keys=[child.key])
    list(other.run(params))
    for child, fresh, at in zip(children, again, np.repeat(places, n), strict=True):
        assert child.tokens[at:].tolist() == fresh.tokens.tolist(), at
        assert child.finish_reason == fresh.finish_reason
        for name in ("logprobs", "log_kept", "entropy"):
            new, old = getattr(child, name), getattr(source, name)
            np.testing.assert_array_equal(new[:at], old[:at])
            np.testing.assert_allclose(new[at:], getattr(fresh, name), atol=atol)
        np.testing.assert_array_equal(child.chosen[:at], source.chosen[:at])
        np.testing.assert_array_equal(child.versions[:at], source.versions[:at])


def few(model):
    """The engine of "kept" below: equal ones share their programs."""
    return Engine(model, 3, ROOM, steps=3)


KEPT = {
    "held": (dict(slots=20), dict(), dict(hold=True)),
    "kept": (dict(slots=3), dict(), dict(keep=True)),
    "parked": (dict(slots=3), dict(parked_tokens=3 * ROOM), dict(hold=True)),
    "held, pages": (dict(slots=20, page_tokens=4), dict(), dict(hold=True)),
    "parked, pages": (dict(slots=2, page_tokens=4), dict(), dict(hold=True)),
}


@pytest.mark.parametrize("kept", lanes([*KEPT][:2], [*KEPT][2:]))
@pytest.mark.parametrize("window", [0, pytest.param(32, marks=pytest.mark.slow)])
def test_a_branch_is_its_prefix_submitted_anew_and_reads_nothing(kept, window, tokens_read):
    """Test 15. Continuations at several places of several samples, admitted in one step where there
    are slots for all; no token of a prefix is read again."""
    model, n = tiny(window=window) if window else shallow(), 2
    if window and kept == "parked, pages":
        pytest.skip("a ring stays with its slot, and what was read of it is lost with that")
    size, options, how = KEPT[kept]
    params, engine = weights(model), Engine(model, tokens=ROOM, steps=3, **size)
    sampler = Sampler(engine, chunk_tokens=8, **options)
    first = sources(sampler, params, **how)
    before = [sample.ids.tolist() for sample in first]
    tokens_read.clear()
    children = [sampler.branch(sample, PLACES, n) for sample in first]
    begun = len(sampler.step(params))
    assert begun == min(engine.slots - sampler.held, 24)
    finished(sampler, params)
    # (A prompt of one token has nothing that was read: there the prefix is empty.)
    assert sum(tokens_read) == 0 and sampler.reread_tokens == 0
    assert [sample.ids.tolist() for sample in first] == before
    plain = few(model)
    for sample, some in zip(first, children, strict=True):
        assert_anew(plain, params, sample, some, PLACES, n)
        assert len({tuple(child.tokens[3:]) for child in some[4:6]}) == 2


@pytest.mark.parametrize("places", [(11, 5), (5,)])
@pytest.mark.parametrize("kind", [pytest.param("ring", marks=pytest.mark.slow), "recurrent"])
def test_a_window_that_went_round_and_a_state_are_read_again(kind, places):
    """Only where the ring has lost what a place needs; each place then by itself."""
    model = recurrent() if kind == "recurrent" else shallow(kinds=(LayerKind(window=4),))
    params, engine = weights(model), Engine(model, 12, ROOM, steps=3)
    sampler = Sampler(engine, chunk_tokens=8)
    [source] = sources(sampler, params, PROMPTS[:1], hold=True)
    children = sampler.branch(source, places, 2)
    assert sampler.reread_tokens == sum(len(source.prompt) + at - 1 for at in places)
    at_the_end = sampler.branch(source, 12, sampling=ASKED)  # the ring is as this needs it
    assert sampler.reread_tokens == sum(len(source.prompt) + at - 1 for at in places)
    finished(sampler, params)
    assert_anew(engine, params, source, children, places, 2)
    assert_anew_turn(engine, params, source, at_the_end, 12)


def assert_anew_turn(engine, params, source, children, at, asked=ASKED, decode=None):
    other = Sampler(engine, chunk_tokens=32, decode=decode)
    prompt = source.ids[: len(source.prompt) + at]
    again = [other.submit(prompt, asked, keys=[child.key])[0] for child in children]
    list(other.run(params))
    for child, fresh in zip(children, again, strict=True):
        assert child.tokens[at:].tolist() == fresh.tokens.tolist()
        assert child.chosen[at:].tolist() == fresh.chosen.tolist()
        assert child.finish_reason == fresh.finish_reason


LATENT = dict(latent=LatentConfig(16, 4, 4, 4), family="deepseek_v3", qk_norm=False)
FURTHER = ["deepseek_v3", "gemma2", "gpt_oss", "qwen3_moe"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["latent", *FURTHER])
def test_branches_of_families(name):
    """A latent cache; windows that went round, sinks, experts."""
    model = shallow(**LATENT) if name == "latent" else family(name)[1]
    params = weights(model) if name == "latent" else family(name)[2]
    engine = Engine(model, 8, ROOM, steps=7)
    sampler = Sampler(engine, chunk_tokens=8)
    [source] = sources(sampler, params, PROMPTS[:1], hold=True)
    children = sampler.branch(source, (4, 9), 3)
    assert (sampler.reread_tokens == 0) == engine.can_go_back(source.size - 1)
    finished(sampler, params)
    assert_anew(engine, params, source, children, (4, 9), 3, atol=1e-4)


@pytest.mark.slow
def test_branches_behind_rounded_keys_and_values_are_those_of_one_cache():
    """Where the cache rounds, a branch goes on over what its source wrote: kept or held, in slots
    or in pages."""
    model = shallow()
    params, told = weights(model), []
    for size, options, how in KEPT.values():
        sampler = Sampler(Engine(model, tokens=ROOM, kv_dtype="int8", **size), **options)
        [source] = sources(sampler, params, PROMPTS[:1], **how)
        children = sampler.branch(source, (3, 8), 2)
        finished(sampler, params)
        told.append([child.tokens.tolist() for child in children])
    assert all(one == told[0] for one in told)


@pytest.mark.slow
def test_pages_are_shared_and_a_kept_sample_lacks_its_last_page(tokens_read):
    model = shallow()
    params, engine = weights(model), Engine(model, 20, ROOM, steps=3, page_tokens=4)
    sampler = Sampler(engine, chunk_tokens=8)
    [source] = sources(sampler, params, PROMPTS[:1], keep=True)  # 18 tokens were read: 4 pages
    tokens_read.clear()
    children = sampler.branch(source, (11, 9, 2), 3)
    sampler.step(params)
    # The longest needs 17 tokens; the sixteen in full pages are not read again.
    assert sum(tokens_read) == 2 and sampler.reread_tokens == 1
    # Of those that have not ended: the two full pages of nine tokens.
    assert sampler._scheduler.tables.pages.shared == 2
    finished(sampler, params)
    assert_anew(few(model), params, source, children, (11, 9, 2), 3)


def test_new_parameters_read_the_prefix_of_a_kept_sample_again():
    """What another version has read is gone; the records of the prefix stay."""
    model = shallow()
    old, new = weights(model, 3), weights(model, 4)
    for when in ("before", "after"):
        sampler = Sampler(few(model), chunk_tokens=8)
        [source] = sources(sampler, old, PROMPTS[:1], keep=True)
        if when == "before":
            children = sampler.branch(source, 5, 2)
        else:
            list(sampler.submit([5], ASKED))
            sampler.step(new, version=1)
            children = sampler.branch(source, 5, 2)
            assert sampler.reread_tokens == len(source.prompt) + 4
        while sampler.pending:
            sampler.step(new, version=1)
        assert all(c.versions.tolist() == [0] * 5 + [1] * 7 for c in children)
        assert_anew(few(model), new, source, children, (5,), 2)


@pytest.mark.slow
def test_branches_of_branches_and_of_samples_that_are_gone():
    """A sample that was neither kept nor held is read again, once, whatever the places."""
    model = shallow()
    params, engine = weights(model), Engine(model, 8, ROOM, steps=5)
    sampler = Sampler(engine, chunk_tokens=32)
    [source] = sources(sampler, params, PROMPTS[:1])
    first = sampler.branch(source, (2, 6), 1, hold=True)
    assert sampler.reread_tokens == len(source.prompt) + 5
    finished(sampler, params)
    second = sampler.branch(first[0], 9, 2)
    assert sampler.reread_tokens == len(source.prompt) + 5
    finished(sampler, params)
    assert_anew(engine, params, first[0], second, (9,), 2)
    # The same requests through another sampler, from their states.
    other = Sampler(Engine(model, 2, ROOM), chunk_tokens=4)
    same = Sample.from_state(source.get_state(), source.sampling)
    assert_same(other.branch(same, (2, 6), 1), first, other, params)
    waiting = [sampler.branch(first[0], 9, 2), sampler.branch(first[1], 7, 1)]
    states = [Sample.from_state(c.get_state(), c.sampling) for some in waiting for c in some]
    other.restore(states)
    finished(sampler, params)
    assert_same(states, waiting[0] + waiting[1], other, params)


def assert_same(samples, others, sampler, params):
    finished(sampler, params)
    for one, two in zip(samples, others, strict=True):
        assert one.tokens.tolist() == two.tokens.tolist() and one.branched == two.branched


def decode(ids) -> str:
    return "".join("_abcdefghijklmnopqrstuvwxyz01"[i] for i in ids)


@pytest.mark.slow
def test_stop_strings_and_thinking_go_on_where_the_sample_was():
    """A stop string may begin in the prefix. The thinking budget is that of the sample, counted
    from the beginning of the response; a phrase that was begun is forced to its end."""
    model = shallow()
    params = weights(model)
    asked = dataclasses.replace(
        ASKED, thinking_tokens=(2, 9), end_of_thinking_ids=(7,), interrupt_ids=(9, 8, 7)
    )
    engine = Engine(model, 40, ROOM, steps=4, forcing_tokens=8)
    sampler = Sampler(engine, chunk_tokens=8, decode=decode)
    samples = sampler.submit([3, 4, 5], asked, n=8, hold=True)
    finished(sampler, params)
    begins = {s: int(np.argmin(s.chosen)) for s in samples if not s.chosen.all()}
    assert len(begins) > 3
    for source, begin in begins.items():
        forced = [*range(begin, min(begin + 3, len(source.tokens)))]
        places = [p for p in range(begin - 1, begin + 3) if 0 <= p < len(source.tokens)]
        children = sampler.branch(source, places, 2)
        finished(sampler, params)
        for child in children:
            assert child.interrupted == (~child.chosen).sum()
            if child.branched >= begin:
                cut = min(len(child.tokens), len(source.tokens))
                assert (~child.chosen[:cut]).nonzero()[0].tolist() == [f for f in forced if f < cut]
                assert child.finish_reason in (FinishReason.LENGTH, FinishReason.INTERRUPT)
    [source] = sampler.submit([3, 4, 5], ASKED, hold=True)
    finished(sampler, params)
    ends = decode(source.tokens[4:6])
    stopping = dataclasses.replace(ASKED, stop_strings=(ends,))
    [stopped] = sampler.submit([3, 4, 5], stopping, request_ids=[source.id], hold=True)
    finished(sampler, params)
    assert stopped.finish_reason == FinishReason.STOP and len(stopped.tokens) == 6
    children = sampler.branch(stopped, 5, 30)
    finished(sampler, params)
    again = [child for child in children if child.tokens[5] == stopped.tokens[5]]
    assert all((len(c.tokens) == 6) == (ends in decode(c.tokens[:6])) for c in children)
    assert all(c.finish_reason == FinishReason.STOP for c in again)


@pytest.mark.slow
def test_a_branch_may_begin_a_turn_of_its_own():
    """Behind a reply, say, in the log of an episode: limits and stop strings begin there."""
    model, turn = shallow(), dataclasses.replace(ASKED, max_response_tokens=5)
    params, engine = weights(model), Engine(model, 20, ROOM, steps=3)
    sampler = Sampler(engine, chunk_tokens=8)
    [source] = sources(sampler, params, PROMPTS[:1], turn, hold=True)
    sampler.deliver([(source, [20, 21], turn)])
    finished(sampler, params)
    assert len(source.tokens) == 12
    children = sampler.branch(source, 7, 3, sampling=turn, hold=True)
    finished(sampler, params)
    assert sampler.reread_tokens == 0 and sampler.held == 4
    assert_anew_turn(engine, params, source, children, 7, turn)
    assert all(c.chosen.tolist() == [True] * 5 + [False] * 2 + [True] * 5 for c in children)
    sampler.deliver([(child, [22], turn) for child in children])
    finished(sampler, params)
    assert all(len(child.tokens) == 18 for child in children)


def test_keys_of_branches_are_their_own():
    key = np.array([[1, 2]], np.uint32)
    many = np.asarray(branch_keys(np.repeat(key, 5, 0), np.arange(5), 4)).reshape(-1, 2)
    assert len({tuple(one) for one in many.tolist()}) == 20
    one = np.asarray(branch_keys(key, np.array([3]), 9))[0, :4]
    np.testing.assert_array_equal(one, many.reshape(5, 4, 2)[3])


@pytest.mark.parametrize(
    "how, problem",
    [
        (dict(at=12), "branch at"),
        (dict(at=-1), "branch at"),
        (dict(at=[3, 99]), "branch at"),
        (dict(at=[]), "branch at"),
        (dict(at=1.5), "branch at"),
        (dict(at=True), "branch at"),
        (dict(at=3, n=0), "n of a branch"),
        (dict(at=3, n=1.5), "n of a branch"),
        (dict(at=3, keep=True, hold=True), "keep and hold"),
        (dict(at=3, n=2, request_ids=[1]), "request_ids"),
        (dict(at=13, sampling=ASKED), "branch at"),
        (dict(at=12, sampling=dataclasses.replace(ASKED, max_response_tokens=30)), "fit a slot"),
    ],
)
def test_bad_branches_are_refused(how, problem):
    sampler = refusing()
    with pytest.raises(InputError, match=problem):
        sampler.branch(sampler.source, **how)
    assert sampler.pending == 0


_KNOWN = []


def refusing():
    """A sampler with one held sample of 12 tokens."""
    if not _KNOWN:
        model = shallow()
        sampler = Sampler(few(model), chunk_tokens=8)
        [sampler.source] = sources(sampler, weights(model), PROMPTS[:1], hold=True)
        _KNOWN.append(sampler)
    return _KNOWN[0]


def test_a_sample_that_is_not_finished_cannot_branch():
    sampler = Sampler(Engine(shallow(), 2, ROOM))
    [sample] = sampler.submit([3], ASKED)
    with pytest.raises(InputError, match="finished"):
        sampler.branch(sample, 0)
