"""The host loop at its edges: stop strings, chunks against windows, beginnings that are shared,
forks, tool tokens, samples that pause, finish and go on, forced phrases."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes
from sampler_cases import (
    EOS,
    LONGEST,
    NEW,
    ROOM,
    VOCAB,
    assert_same,
    forward,
    log_softmax,
    prompts,
    recurrent,
    ring,
    shallow,
    tiny,
    weights,
)
from tokenizers import decoders

from rljax.batch import FinishReason
from rljax.data.text.ends import text_before_stop
from rljax.errors import InputError
from rljax.models import cache
from rljax.sampler import Decoding, Engine, Sampler, Sampling, generate, scheduler
from rljax.sampler.stop_strings import find_stop

ASKED = Sampling(max_response_tokens=NEW, stop_ids=(EOS,))


MODELS = {
    "ring": functools.partial(ring, 4),
    "window": functools.partial(tiny, window=4),
    "whole": tiny,
    "recurrent": recurrent,
}


@pytest.fixture(scope="module", params=lanes(["ring"], ["window", "whole", "recurrent"]))
def engine(request):
    return Engine(MODELS[request.param](), 5, ROOM, steps=4)


@pytest.fixture(scope="module")
def params(engine):
    return weights(engine.model)


def assert_read_right(sample, model, params):
    """Its log-probs are those of one forward pass over all of its tokens."""
    logits = forward(model, params, [sample.ids])[0]
    start = len(sample.prompt)
    for t, (token, logp, chosen) in enumerate(
        zip(sample.tokens, sample.logprobs, sample.chosen, strict=True)
    ):
        want = log_softmax(logits[start + t - 1])[token] if chosen else 0.0
        assert abs(logp - want) < 2e-5, (t, logp, want)


# -- stop strings


def random_tokenizer(rng, vocab=VOCAB):
    """Ids -> text through bytes: tokens of one to four bytes of a text in which characters take up
    to four, so that a character or a stop string begins and ends anywhere."""
    text = "".join(rng.choice(list("aab é漢🙂."), 40)).encode()
    cuts = [(i, i + int(rng.integers(1, 5))) for i in rng.integers(0, len(text) - 4, vocab)]
    pieces = [text[a:b] for a, b in cuts]
    return lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace")


def random_stops(rng, decode):
    """Strings that do occur: pieces of what random ids say, one inside another at times."""
    text = decode(rng.integers(0, VOCAB, 60)).replace("\ufffd", "")
    stops = []
    while len(stops) < 3:
        at, size = rng.integers(0, len(text) - 6), rng.integers(1, 6)
        stops += [text[at : at + size]] if text[at : at + size] else []
    return tuple(dict.fromkeys([*stops, stops[0][:1] + stops[1]]))


def first_stop(ids, stops, decode):
    """One token after the other."""
    for count in range(1, len(ids) + 1):
        if any(stop in decode(ids[:count]) for stop in stops):
            return count
    return None


def lossy_case(rng):
    """(decode, 240 ids): any bytes, of which many are no text."""
    return random_tokenizer(rng), rng.integers(0, VOCAB, 240).tolist()


def fallback_case(rng):
    """(decode, ids) of a text whose rare characters are a token for each byte, which the decoder
    takes together as far as they follow each other: one that fits nowhere spoils them all."""
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    names = {c: [f"<0x{byte:02X}>" for byte in c.encode()] for c in "é漢🙂\n"} | {
        c: [c] for c in "ab."
    }
    tokens = [name for c in rng.choice(list(names), 120).tolist() for name in names[c]]
    return lambda ids: decoder.decode([tokens[i] for i in ids]), list(range(len(tokens)))


def test_the_first_token_that_completes_a_stop_string_is_found():
    rng, found = np.random.default_rng(0), []
    for _ in range(400):
        decode = random_tokenizer(rng)
        stops, ids = random_stops(rng, decode), rng.integers(0, VOCAB, rng.integers(1, 40)).tolist()
        want = first_stop(ids, stops, decode)
        assert find_stop(ids, stops, decode) == want
        free = int(rng.integers(0, want or len(ids) + 1))
        assert find_stop(ids, stops, decode, free) == want
        if want is not None:
            text = text_before_stop(decode(ids[:want]), stops)
            assert not any(stop in text for stop in stops) and decode(ids).startswith(text)
        found.append(want)
    assert 50 < sum(want is None for want in found) < 350
    assert sum(want is not None and want > 3 for want in found) > 50


@pytest.mark.parametrize("case", [lossy_case, fallback_case])
def test_a_stop_string_is_found_in_the_last_tokens_of_a_long_response(case):
    """As the stream looks for it: some tokens more at a time, and few of the others decoded."""
    rng, late, reads = np.random.default_rng(1), 0, np.zeros(25)
    for _ in range(60):
        decode, ids = case(rng)
        at, place = int(rng.integers(40, len(ids) - 40)), 0

        def counted(ids, decode=decode):
            reads[place] += len(ids)  # noqa: B023
            return decode(ids)

        text = decode(ids[at : at + 24]).strip("\ufffd")
        stops = (text[:9], text[2:11], "never")
        want, found = first_stop(ids, stops, decode), None
        for place in range(25):
            free = 8 * place
            if found is None:
                found = find_stop(ids[: free + 8], stops, counted, free)
            find_stop(ids[: free + 8], ("never",), counted, free)
        assert found == (want if want and want <= 200 else None)
        late += found is not None and found > 60
    assert reads[-5:].sum() < 1.5 * reads[5:10].sum()
    assert late > 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", lanes([0], [1, 2]))
def test_both_loops_cut_where_the_string_is_complete(engine, params, seed):
    rng = np.random.default_rng(seed)
    decode = random_tokenizer(rng)
    tokens, lengths = prompts()
    key, rows = jax.random.key(0), np.repeat(np.arange(8), 2)
    model, free = engine.model, dataclasses.replace(ASKED, seed=seed)
    plain = jax.device_get(generate(model, params, tokens, lengths, key, free, n=2))
    said = [plain.tokens[row, lengths[p] : lengths[p] + 9].tolist() for row, p in enumerate(rows)]
    # Pieces of what the longest rows say, the last of them short: it is in many rows.
    texts = sorted((decode(ids).replace("\ufffd", "") for ids in said), key=len)[-4:][::-1]
    stops = [*(text[3:7] for text in texts), texts[0][5:7]]
    asked = dataclasses.replace(free, stop_strings=tuple(stop for stop in stops if stop))
    cut = generate(
        model, params, tokens, lengths, key, asked, n=2, decoding=Decoding(decode=decode)
    )
    cut = jax.device_get(cut)
    sampler = Sampler(engine, key=jax.random.key(seed), chunk_tokens=4, decode=decode)
    for p in rng.permutation(8):
        one = dataclasses.replace(asked, seed=None)
        sampler.submit(tokens[p, : lengths[p]], one, n=2, request_ids=[2 * p, 2 * p + 1])
    ends = set()
    for sample in sampler.run(params):
        start, end = lengths[rows[sample.id]], (plain.segment_ids[sample.id] > 0).sum()
        ids = plain.tokens[sample.id, start:end].tolist()
        count = first_stop(ids, asked.stop_strings, decode)
        assert sample.tokens.tolist() == ids[:count]
        assert len(sample.logprobs) == len(sample.versions) == len(sample.tokens) == sample.drawn
        if count is not None:
            assert sample.finish_reason == FinishReason.STOP
            ends.add(count)
        assert_same(sample, cut, np.repeat(lengths, 2))
    assert ends
    behind = np.arange(cut.tokens.shape[1]) >= (cut.segment_ids > 0).sum(axis=1)[:, None]
    for name in ("tokens", "positions", "mask", "sampler_logprobs", "entropy", "policy_version"):
        assert not getattr(cut, name)[behind].any(), name


@pytest.mark.slow
def test_a_sample_that_a_string_ended_goes_on_behind_a_tools_reply(engine, params):
    """The stop string that ended a turn does not end the next, nor does one that the tool says."""

    def decode(ids):
        return "".join("_abcdefghijklmnopqrstuvwxyz01"[i] for i in ids)

    letters = "bcdefghij"
    asked = Sampling(max_response_tokens=NEW, stop_strings=tuple(letters))
    sampler = Sampler(engine, chunk_tokens=4, decode=decode, prefix_cache_tokens=100)
    samples = sampler.submit([3, 4, 5], asked, n=6, keep=True)
    list(sampler.run(params))
    turns, tool = 0, [2, 3, 15]
    for sample in samples:
        left = NEW - sample.drawn
        if sample.finish_reason != FinishReason.STOP or left < 1:
            continue
        assert decode(sample.tokens)[-1] in letters
        first = len(sample.tokens)
        assert sampler.resume(sample.partial, tool) is sample
        list(sampler.run(params))
        later = decode(sample.tokens[first + 3 :])
        assert sample.tokens[first : first + 3].tolist() == tool
        assert not set(later[:-1]) & set(letters)
        stopped = sample.finish_reason == FinishReason.STOP
        assert later[-1] in letters if stopped else len(later) == left
        assert sample.chosen.tolist() == [True] * first + [False] * 3 + [True] * len(later)
        assert_read_right(sample, engine.model, params)
        turns += len(later) > 1
    assert turns > 1


# -- caches at their edges


KINDS = [
    (window, order, kv_dtype)
    for window in (0, 4)
    for order, kv_dtype in itertools.product(("heads", "tokens", "pairs"), ("", "int8"))
    if order != "pairs" or not kv_dtype
]
FEW = [(4, "pairs", "")]


@pytest.mark.parametrize(
    ("window", "order", "kv_dtype"),
    [pytest.param(*kind, marks=[] if kind in FEW else pytest.mark.slow) for kind in KINDS],
)
def test_any_way_of_reading_gives_one_cache(monkeypatch, order, kv_dtype, window):
    """Chunks of any size, also longer than the window, against one token after the other, in the
    layout of either platform: what later tokens see is the same."""
    monkeypatch.setattr(cache, "order_for", lambda mesh: "heads" if order == "heads" else "tokens")
    monkeypatch.setattr(cache, "pairs_for", lambda *asked: order == "pairs")
    model = tiny(window=window)
    params = weights(model)
    rng = np.random.default_rng(window)
    line, total = jnp.asarray(rng.integers(2, VOCAB, (3, 15)), jnp.int32), np.array([15, 9, 4])

    @jax.jit
    def read(caches, chunk, at, counts):
        return model.extend(model.unstack(params), chunk, at, counts, caches)

    next_ = jax.jit(lambda caches: model.decode_step(model.unstack(params), token, total, caches))
    empty = jax.jit(model.empty_caches, static_argnums=(0, 1, 2))
    token = jnp.array([3, 4, 5])
    found = []
    for chunk in (1, 3, 7) if window else (1, 15):  # each width is a program
        caches, at = empty(3, 20, kv_dtype), np.zeros(3, np.int32)
        while (at < total).any():
            counts = np.clip(total - at, 0, chunk)
            columns = np.minimum(at[:, None] + np.arange(chunk), 14)
            caches = read(caches, np.take_along_axis(line, columns, 1), at, counts)
            at = at + counts
        found.append(next_(caches)[0])
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=1e-5)
    rows = [[*np.asarray(line[i, :n]), token[i]] for i, n in enumerate(total)]
    full = np.stack([each[-1] for each in forward(model, params, rows)])
    np.testing.assert_allclose(found[0], full, atol=0.2 if kv_dtype else 1e-5)


def test_shared_beginnings_are_read_once_and_change_nothing(engine, params):
    """Prompts that share any number of tokens with one that was read, windows gone round or not."""
    rng = np.random.default_rng(5)
    asked = Sampling(max_response_tokens=4)
    stem = rng.integers(2, VOCAB, LONGEST).tolist()
    lines = [
        stem[:k] + rng.integers(2, VOCAB, LONGEST - k).tolist()[:more]
        for k in range(1, LONGEST)
        for more in (0, 1, 3)
    ]
    for chunk, rows, room in ((16, 4, 10_000), (16, 1, 60), (3, 4, 10_000)):
        sampler = Sampler(engine, chunk_tokens=chunk, prefill_rows=rows, prefix_cache_tokens=room)
        sampler.submit(stem, asked)
        sampler.submit(stem[:3] + stem[2:7], asked)
        list(sampler.run(params))
        for i in rng.permutation(len(lines)):
            sample = sampler.submit(lines[i], asked)[0]
            if rng.random() < 0.6:
                list(sampler.run(params))
                assert_read_right(sample, engine.model, params)
        for sample in sampler.run(params):
            assert_read_right(sample, engine.model, params)
        assert sampler.cache.hits > 4 and sampler.cache.reused_tokens > 30
        assert 0 < sampler.cache.held_tokens <= room
        if len(engine.model.config.kinds) != 1:  # a ring alone has room for more tokens than it has
            assert sum(len(one.tokens) for one in sampler.cache._kept.values()) <= room
        # Other parameters: nothing of it is good.
        hits = sampler.cache.hits
        sampler.submit(stem, asked)
        other = weights(engine.model, 4)
        for sample in sampler.run(other, version=1):
            assert_read_right(sample, engine.model, other)
        assert sampler.cache.hits == hits


def test_a_ring_that_has_just_gone_round_is_not_cut(engine, params):
    """A prompt of one token more than the window was read: its first token is gone."""
    asked = Sampling(max_response_tokens=2)
    sampler = Sampler(engine, chunk_tokens=16, prefill_rows=4, prefix_cache_tokens=100)
    for line in ([3, 4, 5, 6, 7], [9, 9]):
        sampler.submit(line, asked)
    list(sampler.run(params))
    sample = sampler.submit([3, 4, 5, 9], asked)[0]
    list(sampler.run(params))
    assert_read_right(sample, engine.model, params)


def test_engine_verbs(engine, params):
    """Extract and insert are a round trip; a fork goes on as its source would; tool tokens are read
    as if they had stood there from the start."""
    sampler = Sampler(engine, chunk_tokens=5)
    line = prompts(seed=2)[0][1]
    sample = sampler.submit(line, dataclasses.replace(ASKED, stop_ids=()))[0]
    while not len(sample.tokens):
        sampler.step(params)

    def tokens(state, steps):
        return jax.device_get(engine.generate(params, jax.tree.map(jnp.copy, state), steps)[1])

    state = sampler._scheduler.state
    want = tokens(state, 4)

    def at(found, slot):
        return (found.ids[:4, slot].tolist(), found.logp[:4, slot])

    prefix = engine.extract(state, np.array([0]))
    assert int(prefix.length[0]) == len(sample.ids) - 1 and prefix.token[0] == sample.tokens[-1]
    keys = np.asarray(state.key)
    forked = engine.fork(jax.tree.map(jnp.copy, state), 0, np.array([2, 4, 9]), keys[[0, 1, 0]])
    found = tokens(forked, 4)
    assert at(found, 2)[0] == at(found, 0)[0] == at(want, 0)[0]
    np.testing.assert_array_equal(at(found, 2)[1], at(want, 0)[1])
    assert at(found, 4)[0] != at(want, 0)[0] and not found.valid[:, 3].any()
    # Tool tokens onto the slots, more than a window and one alone.
    more = np.array([[7, 8, 9, 10, 11], [12, 0, 0, 0, 0]], np.int32)
    extended = engine.extend(params, forked, np.array([0, 4]), more, np.array([5, 1]))
    found = tokens(extended, 1)
    for slot, reply in ((0, [7, 8, 9, 10, 11]), (4, [12])):
        logits = forward(engine.model, params, [[*sample.ids, *reply]])[0][-1]
        want = log_softmax(logits)[found.ids[0, slot]]
        assert abs(found.logp[0, slot] - want) < 2e-5
    released = engine.release(extended, np.array([0, 2, 4, 77]))
    assert not np.asarray(released.live).any()


# -- samples that pause, finish and go on


def test_one_partial_resumes_twice(engine, params):
    """Each time from where it stood: alone the same draws, behind other tokens another sample."""
    asked = dataclasses.replace(ASKED, stop_ids=())
    sampler = Sampler(engine, chunk_tokens=4)
    whole = sampler.submit([5, 6, 7], asked, request_ids=[0])[0]
    list(sampler.run(params))
    sample = sampler.submit([5, 6, 7], asked, request_ids=[0])[0]
    sampler.step(params)
    partial = sampler.pause(sample)
    stood = len(sample.tokens)
    first = sampler.resume(partial)
    second = sampler.resume(partial)
    third = sampler.resume(partial, [9, 9, 9], dataclasses.replace(asked, max_response_tokens=3))
    list(sampler.run(params))
    assert first is sample and second is not sample
    assert first.tokens.tolist() == second.tokens.tolist() == whole.tokens.tolist()
    assert third.tokens[: stood + 3].tolist() == [*whole.tokens[:stood], 9, 9, 9]
    assert len(third.tokens) == stood + 6
    for one in (first, second, third):
        assert one.finish_reason == FinishReason.LENGTH
        assert_read_right(one, engine.model, params)


@pytest.mark.parametrize("chunk", [2, 16])
def test_turns_with_a_tool(engine, params, chunk):
    """keep: a finished sample goes on behind a reply without being read again."""
    asked = Sampling(max_response_tokens=3)
    sampler = Sampler(engine, chunk_tokens=chunk, prefix_cache_tokens=50)
    samples = sampler.submit([5, 6, 7], asked, n=7, keep=True)
    replies = [[8], [9, 10, 11, 12, 13], [14, 15]]
    for turn in range(4):
        list(sampler.run(params))
        assert all(sample.partial.prefix is not None for sample in samples)
        if turn < 3:
            for sample in samples:
                sampler.resume(sample.partial, replies[turn], asked)
    for sample in samples:
        assert len(sample.tokens) == 12 + 8
        assert_read_right(sample, engine.model, params)
    assert len({tuple(sample.tokens) for sample in samples}) == 7


@pytest.mark.slow
def test_aborts_leave_the_others_alone(engine, params):
    sampler = Sampler(engine, chunk_tokens=3)
    lines, lengths = prompts(seed=3)
    samples = [sampler.submit(lines[p, : lengths[p]], ASKED, n=2) for p in range(8)]
    samples = [sample for group in samples for sample in group]
    rng, gone = np.random.default_rng(0), []
    while sampler.pending:
        left = [s for s in samples if s.finish_reason is None]
        if len(gone) < 7:
            gone.append(sampler.abort(left[rng.integers(len(left))]))
        sampler.step(params)
    want = generate(engine.model, params, lines, lengths, jax.random.key(0), ASKED, n=2)
    for sample in samples:
        if sample in gone:
            assert sample.finish_reason == FinishReason.ABORT and sample.error
        else:
            assert_same(sample, jax.device_get(want), np.repeat(lengths, 2))


# -- requests that share ids or cannot be served


def test_samples_of_one_seed_are_told_apart(engine, params):
    """A seed numbers its samples from 0, so that several requests have the same ids."""
    sampler = Sampler(engine, chunk_tokens=4)
    asked = Sampling(max_response_tokens=8, seed=1)
    samples = [sampler.submit([3, 4, 5 + i], asked)[0] for i in range(7)]
    sampler.step(params)
    gone = (1, 6)  # in a slot, and waiting for one
    assert [samples[i] in sampler._scheduler.slots for i in gone] == [True, False]
    for i in gone:
        sampler.abort(samples[i])
    finished = list(sampler.run(params))
    assert [s.finish_reason for s in samples] == [
        FinishReason.ABORT if i in gone else FinishReason.LENGTH for i in range(7)
    ]
    assert {id(s) for s in finished} == {id(s) for i, s in enumerate(samples) if i not in gone}


def test_more_stop_ids_than_an_engine_has_room_for_are_refused_alone(engine, params):
    sampler = Sampler(engine, chunk_tokens=4)
    sampler.submit([3, 4], Sampling(max_response_tokens=4))
    with pytest.raises(InputError, match="stop_ids: got 17; at most 16"):
        sampler.submit([3, 4], Sampling(max_response_tokens=4, stop_ids=(1,) * 17))
    assert [len(s.tokens) for s in sampler.run(params)] == [4]


# -- forced phrases


@pytest.mark.slow
def test_interruptions_are_those_of_the_device_loop(params, engine):
    """Paused anywhere, also within the phrase, and resumed."""
    asked = dataclasses.replace(
        ASKED, thinking_tokens=(0, 6), end_of_thinking_ids=(7, 8), interrupt_ids=(9, 10, 7, 8)
    )
    tokens, lengths = prompts()
    whole = jax.device_get(
        generate(engine.model, params, tokens, lengths, jax.random.key(0), asked, n=2)
    )
    forced = (whole.mask == 0) & (np.arange(ROOM) >= np.repeat(lengths, 2)[:, None])
    forced &= whole.segment_ids > 0
    begins = np.argmax(forced, axis=1) - np.repeat(lengths, 2)
    assert (forced.sum(axis=1) == 4).sum() > 4 and len(set(begins.tolist())) > 3
    one = Engine(engine.model, 5, ROOM, steps=3, forcing_tokens=8)
    rng, inside = np.random.default_rng(0), 0
    sampler = Sampler(one, key=jax.random.key(0), chunk_tokens=4)
    samples = []
    for p in rng.permutation(8):
        samples += sampler.submit(
            tokens[p, : lengths[p]], asked, n=2, request_ids=[2 * p, 2 * p + 1]
        )
    plain = sampler.submit([3, 4], ASKED)[0]
    while sampler.pending:
        sampler.step(params)
        for sample in [s for s in sampler._scheduler.slots if s is not None]:
            if rng.random() < 0.5:
                inside += 0 < sample.interrupted < 4
                sampler.resume(sampler.pause(sample))
    assert inside > 1
    for sample in samples:
        assert_same(sample, whole, np.repeat(lengths, 2))
    assert all(plain.chosen)


@pytest.mark.slow
def test_the_prefix_cache_holds_no_more_than_it_says():
    """What is kept is counted with the room that it takes, not with the tokens in it."""
    import gc

    model = tiny()
    params = weights(model)
    sampler = Sampler(Engine(model, 2, 64, steps=4), chunk_tokens=8, prefix_cache_tokens=200)
    before = 0
    for i in range(12):
        sampler.submit([2 + i, 3, 4, 5], Sampling(max_response_tokens=2))
        list(sampler.run(params))
        assert sampler.cache.held_tokens <= 200
        gc.collect()
        held = sum(x.nbytes for x in jax.live_arrays())
        before = held if i == 5 else before
    assert held <= before


@pytest.mark.slow
def test_another_turn_thinks_anew():
    """Limits that come with `resume` count from there: the phrase is forced again."""
    model = shallow()
    params = weights(model)
    think = dict(thinking_tokens=(2, 2), end_of_thinking_ids=(3,), interrupt_ids=(4, 5))
    sampler = Sampler(Engine(model, 2, 60, steps=4, forcing_tokens=8), chunk_tokens=8)
    first = Sampling(max_response_tokens=6, **think)
    [sample] = sampler.submit([6, 7, 8], first, keep=True)
    list(sampler.run(params))
    turns = [(sample.tokens.tolist(), sample.chosen.tolist())]
    sampler.resume(sample.partial, [9, 9], Sampling(max_response_tokens=8, **think))
    list(sampler.run(params))
    turns.append((sample.tokens[8:].tolist(), sample.chosen[8:].tolist()))
    for tokens, chosen in turns:
        if 3 not in tokens[:2]:
            assert tokens[2:4] == [4, 5] and chosen[2:4] == [False, False]


def test_prompts_with_slots_are_read_in_one_step_and_long_ones_between_few(
    engine, params, monkeypatch
):
    """Three short prompts with room for two in a pass, and one of three chunks beside them: what
    each draws is what it draws alone."""
    monkeypatch.setattr(scheduler, "STEPS_BETWEEN_CHUNKS", 2)  # of the 4 of a dispatch
    limit, alone = Sampling(max_response_tokens=NEW, seed=3), []
    texts = [[5, 6], [7, 8, 9], [10], [3 + i % 9 for i in range(LONGEST)]]
    for text in texts:
        sampler = Sampler(engine, chunk_tokens=4, prefill_rows=2)
        [sample] = sampler.submit(text, limit)
        alone += [one.tokens.tolist() for one in sampler.run(params)]
    sampler = Sampler(engine, chunk_tokens=4, prefill_rows=2)
    *short, long = [sampler.submit(text, limit)[0] for text in texts]
    drawn = []
    while not long.drawn:
        sampler.step(params)
        drawn.append([sample.drawn for sample in short])
    assert drawn == [[2] * 3, [4] * 3, [8] * 3]
    list(sampler.run(params))
    assert [sample.tokens.tolist() for sample in [*short, long]] == alone


@pytest.mark.slow
def test_rows_are_placed_one_after_the_other_as_all_at_once(engine):
    """Of pairs of which some are dropped; a prefix has fewer columns than a slot."""
    if engine.model.config.recurrent:
        pytest.skip("a state has no columns, and no order in which one device writes it")
    blank = engine.model.empty_caches(5, ROOM)[0]
    old = jax.tree.map(lambda x: jnp.ones_like(x), blank)
    rows = jax.tree.map(lambda x: 2 + jnp.arange(x.size).reshape(x.shape).astype(x.dtype), blank)
    rows = jax.tree.map(lambda x: x[:3, :, :3], rows)
    slots, source = jnp.array([5, 3, 0, 7, 1]), jnp.array([0, 2, 0, 1, 2])
    both = [cache.write_rows(old, rows, slots, source, alone=alone) for alone in (False, True)]
    for a, b in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(b[4], 1)
