"""10^5 tokens while parameters change at every dispatch, and from another thread at random times:
each token is what the version that it names draws, as numpy recomputes it from the whole log."""

import functools
import random
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes
from sampler_cases import EOS, NEW, ROOM, forward, prompts, shallow, uniforms, weights

from rljax.sampler import Engine, Sampler, Sampling
from rljax.sampler.inputs import request_key
from rljax.serving.worker import Ticket, Worker

TOKENS, LENGTHS = prompts(count=64, seed=4)
ASKED = Sampling(max_response_tokens=NEW, stop_ids=(EOS,))
SLOTS = 64
# How many tokens are drawn.
MANY = [1_000, *(pytest.param(n, marks=pytest.mark.slow) for n in (3_000, 100_000))]


@functools.cache
def engine_of() -> Engine:
    return Engine(shallow(), SLOTS, ROOM, steps=3)


@jax.jit
def _between(one, other, version):
    share = jax.random.uniform(jax.random.fold_in(jax.random.key(8), version))
    return jax.tree.map(lambda a, b: a + share * (b - a), one, other)


def parameters(model, version: int):
    """Other parameters for every version, in buffers of their own."""
    return _between(weights(model, 3), weights(model, 4), version)


def submitted(sampler, number: int) -> list:
    at = number % len(LENGTHS)
    return sampler.submit(TOKENS[at, : LENGTHS[at]], ASKED, n=4)


def decoded(count: int, params_of, *, keep_cache: bool) -> list:
    """Samples of `count` tokens or more, other parameters at every dispatch; those of the dispatch
    before are gone then, so that whoever held on to them fails."""
    sampler, samples, version, last = Sampler(engine_of(), chunk_tokens=8), [], 0, None
    while sum(len(sample.tokens) for sample in samples) < count or sampler.pending:
        drawn = sum(len(sample.tokens) for sample in samples[-8 * SLOTS :])
        if len(samples) * NEW < 4 * count and sampler.pending < 2 * SLOTS and drawn < count:
            if sum(len(sample.tokens) for sample in samples) < count:
                samples += submitted(sampler, len(samples) // 4)
                continue
        version += 1
        params = params_of(version)
        sampler.step(params, version=version, keep_cache=keep_cache)
        jax.tree.map(lambda x: x.delete(), last)
        last = params
    return samples


def assert_drawn_by_their_versions(model, params_of, rows) -> int:
    """`rows`: (prompt, tokens, versions, key) each. How many tokens lay within rounding of the
    border between two; fails where one is another token than its version draws."""
    by_version: dict[int, list] = {}
    for prompt, tokens, versions, key in rows:
        ids = [*prompt, *tokens]
        for version in np.unique(versions):
            places = len(prompt) + np.flatnonzero(np.asarray(versions) == version)
            by_version.setdefault(int(version), []).append((ids, places, key))
    close = 0
    for version, some in by_version.items():
        params = params_of(version)
        for first in range(0, len(some), SLOTS):
            part = some[first : first + SLOTS]
            padding = [[0]] * (SLOTS - len(part))
            logits = forward(model, params, [ids for ids, _, _ in part] + padding)
            for (ids, places, key), scores in zip(part, logits, strict=False):
                x = scores[places - 1]
                probs = np.exp(x - x.max(axis=-1, keepdims=True))
                sums = np.cumsum(probs / probs.sum(axis=-1, keepdims=True), axis=-1)
                u = np.asarray(uniforms(key, jnp.arange(ROOM)), np.float64)[places, None]
                low, exact, high = ((sums <= u + d).sum(axis=-1) for d in (-1e-5, 0, 1e-5))
                chosen = np.asarray(ids)[places]
                assert ((low <= chosen) & (chosen <= high)).all(), (version, ids, places)
                close += int((low != high).sum())
                assert (chosen == exact)[low == high].all()
    return close


@pytest.mark.slow
@pytest.mark.parametrize("count", MANY)
def test_read_again_every_token_is_that_of_its_version(count):
    engine = engine_of()
    params_of = functools.partial(parameters, engine.model)
    samples = decoded(count, params_of, keep_cache=False)
    rows = [(s.prompt, s.tokens, s.versions, s.key) for s in samples]
    assert sum(len(s.tokens) for s in samples) >= count
    assert sum(len(set(s.versions)) > 1 for s in samples) > len(samples) // 3
    close = assert_drawn_by_their_versions(engine.model, params_of, rows)
    assert close < 2e-3 * count

    def wrong(version):
        return params_of(version + 1)

    with pytest.raises(AssertionError):  # the comparison sees weights of the next version
        assert_drawn_by_their_versions(engine.model, wrong, rows[:200])


@pytest.mark.slow
@pytest.mark.parametrize("count", MANY)
@pytest.mark.parametrize("keep_cache", lanes([True], [False]))
def test_versions_with_equal_weights_draw_equal_tokens(count, keep_cache):
    """Whatever is kept or read again; and each token names the dispatch that drew it."""
    model = engine_of().model

    def copied(version):
        return jax.tree.map(jnp.copy, weights(model))

    samples = decoded(count, copied, keep_cache=keep_cache)
    sampler = Sampler(engine_of(), chunk_tokens=8)
    others = [one for i in range(len(samples) // 4) for one in submitted(sampler, i)]
    list(sampler.run(weights(model)))
    for sample, other in zip(samples, others, strict=True):
        assert sample.tokens.tolist() == other.tokens.tolist()
        assert (np.diff(sample.versions) >= 0).all() and sample.versions[0] > 0


class _Row:
    """What a ticket is told of one sample."""

    def __init__(self, worker: Worker, number: int):
        at = number % len(LENGTHS)
        self.prompt, self.tokens, self.versions = TOKENS[at, : LENGTHS[at]], [], []
        self.key, self.ended = np.asarray(request_key(jax.random.key(number), 0)), threading.Event()
        asked = Sampling(max_response_tokens=NEW, stop_ids=(EOS,), seed=number)
        worker.submit(Ticket(self.told), [(self.prompt.tolist(), asked)], 1).result()

    def told(self, chunk) -> None:
        self.tokens += chunk.tokens
        self.versions += [chunk.version] * len(chunk.tokens)
        if chunk.finish_reason is not None:
            self.ended.set()


@pytest.mark.slow
@pytest.mark.parametrize("count", MANY)
def test_a_server_whose_parameters_another_thread_swaps_at_random_times(count):
    """With what was read read again: every token, as the client is told it, is the version's that
    the client is told."""
    model, chance, over = engine_of().model, random.Random(5), threading.Event()
    sampler = Sampler(engine_of(), chunk_tokens=8)
    worker = Worker(sampler, parameters(model, 0), max_waiting=10**6)
    swaps = []

    def swap():
        while not over.wait(chance.expovariate(200.0)):
            version = len(swaps) + 1
            swaps.append(worker.swap(parameters(model, version), version, keep_cache=False))

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        rows: list[_Row] = []
        while sum(len(row.tokens) for row in rows) < count:
            rows += [_Row(worker, len(rows) + i) for i in range(SLOTS)]
            rows[-SLOTS].ended.wait(60)
        assert all(row.ended.wait(120) for row in rows)
    finally:
        over.set()
        swapping.join()
        worker.close()
    assert len(swaps) > 10 and len({v for row in rows for v in row.versions}) > 10
    told = [(row.prompt, row.tokens, row.versions, row.key) for row in rows]
    params_of = functools.partial(parameters, model)
    assert assert_drawn_by_their_versions(model, params_of, told) < 2e-3 * count


def test_new_weights_read_all_samples_again_by_a_few_programs(monkeypatch):
    """64 samples: three calls, not 64."""
    engine, calls = engine_of(), []
    extend = Engine.extend
    monkeypatch.setattr(Engine, "extend", lambda *a, **k: calls.append(1) or extend(*a, **k))
    sampler = Sampler(engine, chunk_tokens=ROOM)
    asked = Sampling(max_response_tokens=NEW)  # no stop
    sampler.submit(TOKENS[1, : LENGTHS[1]], asked, n=SLOTS)
    sampler.step(parameters(engine.model, 1), version=1)
    del calls[:]
    sampler.step(parameters(engine.model, 2), version=2, keep_cache=False)
    assert sampler.pending == SLOTS and sampler.reread_tokens >= SLOTS * LENGTHS[1]
    assert 1 <= len(calls) <= 3
