"""Every request with its own rules, in one batch of slots: each token is the one that a slow
reference in numpy draws, and what is refused is refused when it is asked."""

import dataclasses

import jax
import numpy as np
import pytest
from sampler_cases import (
    NEW,
    ROOM,
    VOCAB,
    could_draw,
    forward,
    kept_by_sorting,
    prompts,
    recurrent,
    shallow,
    tiny,
    uniforms,
    weights,
)

from rljax.batch import FinishReason
from rljax.errors import InputError
from rljax.sampler import Decoding, Engine, Sampler, Sampling, generate, memory
from rljax.sampler.memory import check_memory, plan, slots_bytes, slots_that_fit
from rljax.tracking import compiles

TOKENS, LENGTHS = prompts(seed=1)


@pytest.fixture(scope="module")
def model():
    return shallow()


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, 7, ROOM, steps=5)


def random_rules(rng) -> Sampling:
    """Each rule is asked for about every third time, all in any combination."""

    def some(values, off):
        return values[rng.integers(len(values))] if rng.random() < 0.35 else off

    ids = rng.permutation(VOCAB)
    bias = tuple((int(w), float(b)) for w, b in zip(ids[:6], rng.normal(0, 3, 6), strict=True))
    return Sampling(
        temperature=some([0.0, 0.3, 0.7, 1.7], 1.0),
        top_k=some([1, 2, 5, 100], 0),
        top_p=some([0.1, 0.5, 0.9, 0.999], 1.0),
        min_p=some([0.01, 0.2, 1.0], 0.0),
        max_response_tokens=int(rng.integers(1, NEW + 1)),
        stop_ids=tuple(int(w) for w in ids[: rng.integers(0, 17)]) if rng.random() < 0.3 else (),
        logit_bias=some([bias, bias[:1]], ()),
        allowed_ids=some([tuple(int(w) for w in ids[:9]), (int(ids[0]),)], ()),
        seed=some([0, 7, 2**32 - 1], None),
    )


def check(sample, model, logits) -> None:
    """The tokens, log-probs, kept masses and the end of one sample, against sorting."""
    asked, start = sample.sampling, len(sample.prompt)
    # A temperature below 1 multiplies the rounding of float32 logits.
    near = 2e-5 / min(1.0, asked.temperature or 1.0)
    places = start + np.arange(len(sample.tokens))
    for t, u in enumerate(np.asarray(uniforms(sample.key, places), np.float64)):
        probs, logp = kept_by_sorting(logits[start + t - 1], asked)
        token = sample.tokens[t]
        assert token in could_draw(probs, u), (asked, t)
        assert abs(sample.logprobs[t] - logp[token]) < near, (asked, t)
        draw = sample.logprobs[t] - sample.log_kept[t]
        assert abs(draw - np.log(probs[token])) < 5e-5, (asked, t)
        assert abs(sample.entropy[t] + np.sum(np.exp(logp) * logp)) < 5e-5, (asked, t)
    stops = [t for t, token in enumerate(sample.tokens) if token in asked.stop_ids]
    if sample.finish_reason == FinishReason.STOP:
        assert stops == [len(sample.tokens) - 1]
    else:
        assert sample.finish_reason == FinishReason.LENGTH
        assert not stops and len(sample.tokens) == asked.max_response_tokens


@pytest.mark.slow
@pytest.mark.parametrize("trial", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2))])
def test_each_request_has_its_own_rules_and_none_compiles(model, engine, trial):
    rng, params = np.random.default_rng(trial), weights(model)
    sampler = Sampler(engine, key=jax.random.key(trial), chunk_tokens=4, prefix_cache_tokens=60)

    def ask(count):
        asked = []
        for _ in range(count):
            p, one = rng.integers(len(LENGTHS)), random_rules(rng)
            asked += sampler.submit(TOKENS[p, : LENGTHS[p]], one, n=int(rng.integers(1, 4)))
        return asked

    ask(40)
    list(sampler.run(params))  # every program, in any order of arrival
    compiles.watch()
    before, asked = compiles.count(), ask(150)
    found = list(sampler.run(params))
    assert compiles.count() == before, compiles.names(before)
    assert {id(sample) for sample in found} == {id(sample) for sample in asked}
    logits = forward(model, params, [sample.ids for sample in found])
    for sample, each in zip(found, logits, strict=True):
        check(sample, model, each)
    seen = [s for s in found if s.finish_reason == FinishReason.STOP]
    assert len(seen) > 10 and len({s.sampling for s in found}) > 100


@pytest.mark.slow
def test_whole_batches_may_have_more_stop_ids_than_a_slot(model):
    key, most = jax.random.key(0), tuple(range(2, VOCAB))
    asked = Sampling(max_response_tokens=NEW, stop_ids=most)
    batch = generate(model, weights(model), TOKENS[:2], LENGTHS[:2], key, asked, n=8)
    for row, end in enumerate(np.asarray(batch.segment_ids.sum(axis=1))):
        stops = np.isin(batch.tokens[row, LENGTHS[row // 8] : end], most)
        assert not stops[:-1].any()
        assert stops[-1] == (batch.finish_reason[row] == FinishReason.STOP)
    assert (np.asarray(batch.finish_reason) == FinishReason.STOP).sum() > 12


BAD = {
    "empty": ([], {}, {}, "prompt.*at least one token"),
    "long": ([3] * (ROOM - 3), dict(max_response_tokens=4), {}, "do not fit a slot.*fix|at most"),
    "id": ([3, VOCAB], {}, {}, f"prompt: got {VOCAB}"),
    "below": ([3, -1], {}, {}, "prompt: got -1"),
    "huge": ([3, 2**40], {}, {}, "prompt: got"),
    "text": ([3.5], {}, {}, "prompt.*integers"),
    "nested": ([[3]], {}, {}, "prompt"),
    "n": ([3], {}, dict(n=0), "samples per prompt: got 0"),
    "stop": ([3], dict(stop_ids=(VOCAB,)), {}, "stop_ids: got 29"),
    "stop below": ([3], dict(stop_ids=(-1,)), {}, "stop_ids: got -1"),
    "stops": ([3], dict(stop_ids=tuple(range(17))), {}, "stop_ids: got 17; at most 16"),
    "bias": ([3], dict(logit_bias=((99, 1.0),)), {}, "logit_bias: got 99"),
    "allowed": ([3], dict(allowed_ids=(2, 30)), {}, "allowed_ids: got 30"),
    "strings": ([3], dict(stop_strings=("a",)), {}, "tokenizer"),
    "ids": ([3], {}, dict(n=2, request_ids=[1]), "request_ids"),
    "thinking": (
        [3],
        dict(thinking_tokens=(1, 2), interrupt_ids=(3,), end_of_thinking_ids=(4,)),
        {},
        "no room for interruptions",
    ),
}


@pytest.mark.smoke
def test_what_cannot_be_served_is_refused_and_the_others_go_on(model, engine):
    params, asked = weights(model), Sampling(max_response_tokens=4)
    sampler = Sampler(engine, chunk_tokens=4)
    good = sampler.submit([3, 4, 5], asked, n=3)
    sampler.step(params)
    for name, (prompt, rules, how, pattern) in BAD.items():
        with pytest.raises(InputError, match=pattern):
            sampler.submit(prompt, dataclasses.replace(asked, **rules), **how)
            pytest.fail(name)
    good += sampler.submit([3, 4, 5], asked, request_ids=[3])
    list(sampler.run(params))
    assert all(len(sample.tokens) == 4 for sample in good)
    with pytest.raises(InputError, match="not in the sampler"):
        sampler.abort(good[0])


@pytest.mark.parametrize(
    ("rules", "pattern"),
    [
        (dict(temperature=1e-30), "temperature"),
        (dict(min_p=1.5), "min_p"),
        (dict(stop_strings=("",)), "stop_strings"),
        (dict(logit_bias=((3, 1.0), (3, 2.0))), "each token once"),
        (dict(logit_bias=((3, float("nan")),)), "logit_bias"),
        (dict(logit_bias=tuple((i, 1.0) for i in range(305))), "at most 304"),
        (dict(seed=-1), "seed"),
        (dict(thinking_tokens=(5,), interrupt_ids=(3,), end_of_thinking_ids=(4,)), "low, high"),
        (dict(thinking_tokens=(5, 2), interrupt_ids=(3,), end_of_thinking_ids=(4,)), "low, high"),
        (dict(thinking_tokens=(1, 2), end_of_thinking_ids=(4,)), "interrupt_ids"),
        (dict(thinking_tokens=(1, 2), interrupt_ids=(4,)), "end_of_thinking_ids"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rules, pattern):
    with pytest.raises(InputError, match=pattern):
        Sampling(**rules)


def test_whole_batches_refuse_the_same(model):
    params, asked = weights(model), Sampling(max_response_tokens=4)
    key = jax.random.key(0)
    rows, lengths = np.array([[3, 4], [5, 0]]), np.array([2, 1])
    for prompts_, sizes, how, pattern in (
        (rows + 26, lengths, {}, "prompt: got 29"),
        (rows - 5, lengths, {}, "prompt: got -2"),
        (rows, np.array([2, 0]), {}, "prompt lengths"),
        (rows, np.array([3, 1]), {}, "prompt lengths"),
        (rows, np.array([2]), {}, "prompts and lengths"),
        (rows[:0], lengths[:0], {}, "prompts and lengths"),
        (rows, lengths, dict(n=0), "samples per prompt"),
        (rows, lengths, dict(decoding=Decoding(kv_dtype="int4")), "kv_dtype: got 'int4'; one of"),
    ):
        with pytest.raises(InputError, match=pattern):
            generate(model, params, prompts_, sizes, key, asked, **how)
    for wrong in (dict(slots=-1), dict(loop="hosts")):
        with pytest.raises(InputError, match=f"sampler {next(iter(wrong))}"):
            Decoding(**wrong)
    # Garbage behind a prompt's end is nobody's business.
    dirty = np.array([[3, 4], [5, 999]])
    clean = generate(model, params, rows, lengths, key, asked)
    np.testing.assert_array_equal(
        generate(model, params, dirty, lengths, key, asked).tokens[:, :2], rows
    )
    assert clean.rows == 2


def test_slots_are_half_of_the_rows_until_they_fit_into_an_eighth_of_the_memory(model, monkeypatch):
    """As many as the devices share evenly; the machine alone decides, not what runs beside."""
    devices = model.mesh.size
    rows = 12 * devices

    def needs(slots):
        return 8 * devices * slots_bytes(model, slots, 10)

    cases = [(None, rows), (needs(rows), rows), (needs(rows) - 1, rows // 2), (1, 3 * devices)]
    for capacity, slots in cases:
        monkeypatch.setattr(memory, "device_capacity", lambda _, found=capacity: found)
        assert slots_that_fit(model, rows, 10) == slots
    assert slots_that_fit(model, 7 * devices, 10) == 7 * devices  # no half of them


def test_slots_that_cannot_fit_are_refused_with_numbers():
    model = tiny()
    with pytest.raises(InputError, match=r"[GT]B per device.*GB left.*at most \d+ slots") as found:
        Engine(model, 2**30, 2048)
    fit = int(str(found.value).split("at most ")[1].split(" slots")[0])
    check_memory(model, fit // 2, 2048)
    # 2 layers of keys and values, 2 heads of 8, float32; int8 with one float32 scale per head.
    assert slots_bytes(model, 3, 10) == 3 * 10 * 2 * 2 * 2 * 8 * 4
    assert slots_bytes(model, 3, 10, "int8") == 3 * 10 * 2 * 2 * 2 * (8 + 4)
    windowed = tiny(window=4)
    assert slots_bytes(windowed, 3, 10) == 3 * (10 + 4) * 2 * 2 * 8 * 4
    state = jax.eval_shape(lambda: windowed.empty_caches(3, 10, "int8"))
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert held == slots_bytes(windowed, 3, 10, "int8")
    # The state of a layer: 4 heads of 8 x 6, and 3 inputs of queries, keys and values.
    nets = recurrent()
    state_numbers = 4 * 8 * 6 + 3 * (2 * 8 + 2 * 8 + 4 * 6)
    assert slots_bytes(nets, 3, 10) == 3 * 4 * (10 * 2 * 2 * 8 + state_numbers)
    state = jax.eval_shape(lambda: nets.empty_caches(3, 10))
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert held == slots_bytes(nets, 3, 10)
    assert "3 slots of 10 tokens need" in plan(model, 3, 10)
    for how in (dict(slots=0), dict(tokens=0), dict(steps=0), dict(kv_dtype="float8")):
        with pytest.raises(InputError, match=next(iter(how))):
            Engine(**dict(dict(model=model, slots=1, tokens=8), **how))
    with pytest.raises(InputError, match="columns of prompts"):
        Engine(model, 2, 4).prefill(weights(model), np.ones((1, 5), np.int32), np.array([5]))
    for how in (dict(chunk_tokens=0), dict(prefill_rows=0)):
        with pytest.raises(InputError, match=next(iter(how))):
            Sampler(Engine(model, 2, 4), **how)


@pytest.mark.slow
def test_logits_that_are_not_finite_end_their_request_alone():
    """One token's embedding is NaN: a request that reads it ends; its slot's next is unharmed, and
    so is who gets its pages."""
    model, poison = tiny(window=3), VOCAB - 1
    params = dict(weights(model))
    params["embedding"] = params["embedding"].at[poison].set(np.nan)
    clean = tuple(range(poison))
    asked = Sampling(max_response_tokens=8, allowed_ids=clean)
    drawn = dataclasses.replace(asked, allowed_ids=(), logit_bias=((poison, 4.0),))
    rng = np.random.default_rng(0)
    lines = [rng.integers(2, poison, rng.integers(1, 12)).tolist() for _ in range(24)]
    bad = set(range(0, 24, 3))
    for i in bad:
        lines[i] = [*lines[i][: len(lines[i]) // 2], poison, *lines[i][len(lines[i]) // 2 :]][:12]
    # A beginning shared with a poisoned prompt is fit to start from.
    lines[4] = [*lines[3][: lines[3].index(poison)], 5, 6, 7][:11]
    want = Sampler(Engine(model, 24, ROOM), key=jax.random.key(1))
    for i, line in enumerate(lines):
        want.submit([5 if token == poison else token for token in line], asked, request_ids=[i])
    want = {s.id: s for s in want.run(weights(model))}
    paged = dict(page_tokens=4, pages=14)
    for pages, how in (
        ({}, dict(chunk_tokens=16, prefill_rows=4)),
        ({}, dict(chunk_tokens=3)),
        (paged, dict(chunk_tokens=3)),
    ):
        sampler = Sampler(
            Engine(model, 3, ROOM, steps=3, **pages),
            key=jax.random.key(1),
            prefix_cache_tokens=200,
            **how,
        )
        for i, line in enumerate(lines):
            sampler.submit(line, asked, request_ids=[i])
            if i % 4 == 0:  # these draw it, sooner or later, in mid-response
                sampler.submit(line, drawn, request_ids=[100 + i])
        aborted = 0
        for sample in sampler.run(params):
            if sample.id % 100 in bad or sample.finish_reason == FinishReason.ABORT:
                assert sample.id % 100 in bad or poison in sample.tokens, sample.id
                assert sample.finish_reason == FinishReason.ABORT and "finite" in sample.error
                assert np.isfinite(sample.logprobs).all()
                aborted += sample.id >= 100 and sample.id % 100 not in bad
            elif sample.id < 100:
                assert sample.tokens.tolist() == want[sample.id].tokens.tolist(), sample.id
                np.testing.assert_allclose(sample.logprobs, want[sample.id].logprobs, atol=1e-5)
        assert aborted
    _poisoned_batch(model, params, lines, bad, dataclasses.replace(drawn, logit_bias=()))


def _poisoned_batch(model, params, lines, bad, asked):
    tokens = np.zeros((24, 12), np.int32)
    for i, line in enumerate(lines):
        tokens[i, : len(line)] = line
    lengths = np.array([len(line) for line in lines])
    how = (tokens, lengths, jax.random.key(1), asked)
    whole, few = (
        jax.device_get(generate(model, params, *how, decoding=Decoding(slots=s))) for s in (0, 2)
    )
    np.testing.assert_array_equal(whole.tokens, few.tokens)
    np.testing.assert_array_equal(whole.finish_reason, few.finish_reason)
    aborted = whole.finish_reason == FinishReason.ABORT
    assert aborted[list(bad)].all() and not aborted.all()


@pytest.mark.parametrize(
    "rules, pattern",
    [
        (dict(logit_bias=((5, 3e38),)), "logit_bias"),
        (dict(temperature=1e39), "temperature"),
        (dict(seed=2**32), "seed"),
        (dict(top_k=2**31), "top_k"),
        (dict(max_response_tokens=2.5), "max_response_tokens"),
        (dict(thinking_tokens=(0, 2**31 - 1), interrupt_ids=(4,), end_of_thinking_ids=(3,)), "low"),
        (dict(stop_strings=tuple(f"{i}." for i in range(65))), "stop_strings"),
    ],
)
def test_numbers_that_arrays_cannot_hold_are_refused(rules, pattern):
    with pytest.raises(InputError, match=pattern):
        Sampling(**rules)


def test_what_does_not_fit_a_slot_is_refused_before_it_is_written(model):
    params, engine = weights(model), Engine(model, 2, 12, steps=2)
    sampler = Sampler(engine, chunk_tokens=4)
    with pytest.raises(InputError, match="request_ids"):
        sampler.submit([3], Sampling(max_response_tokens=2), request_ids=[2**40])
    with pytest.raises(InputError, match="one list of token ids"):
        sampler.submit([[1, 2], [3]], Sampling(max_response_tokens=2))
    sampler.submit([3, 4, 5, 6, 7, 8], Sampling(max_response_tokens=5))
    for _ in range(2):  # the prompt is two chunks
        sampler.step(params)
    tokens = np.full((1, 8), 3, np.int32)
    with pytest.raises(InputError, match="tokens behind a slot"):
        engine.extend(params, sampler._scheduler.state, np.array([0]), tokens, np.array([8]))
