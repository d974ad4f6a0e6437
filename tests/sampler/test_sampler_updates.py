"""Parameters that change while samples decode: each token is what the version it names would have
drawn, over old keys and values or new ones; and the sampler keeps no parameter."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes
from sampler_cases import (
    EOS,
    NEW,
    ROOM,
    convolving,
    could_draw,
    forward,
    kept_by_sorting,
    prompts,
    recurrent,
    ring,
    rounding,
    tiny,
    uniforms,
    weights,
)

from rljax.batch import FinishReason
from rljax.sampler import Engine, Sampler, Sampling

TOKENS, LENGTHS = prompts(seed=4)
ASKED = Sampling(max_response_tokens=NEW, stop_ids=(EOS,))


MODELS = {"ring": ring(4), "window": tiny(window=4), "recurrent": recurrent()}
MODELS["convolving"] = convolving()


@pytest.fixture(scope="module", params=lanes(["ring"], ["window", "recurrent", "convolving"]))
def engine(request):
    return Engine(MODELS[request.param], 5, ROOM, steps=3)


def serve(engine, rng, versions, *, keep_cache, **how):
    """Random requests, pauses, aborts and updates: samples, and of each where it was paused, and
    under which version: {id: [(tokens, version)]}."""
    sampler = Sampler(engine, key=jax.random.key(1), chunk_tokens=3, **how)
    samples, paused, stops, version, step = [], [], {}, 0, 0
    waiting = list(rng.permutation(8))
    while waiting or paused or sampler.pending:
        if waiting and rng.random() < 0.5:
            p = waiting.pop()
            samples += sampler.submit(TOKENS[p, : LENGTHS[p]], ASKED, n=int(rng.integers(1, 4)))
        for sample in [s for s in sampler._scheduler.slots if s is not None]:
            if rng.random() < 0.15:
                stops.setdefault(sample.id, []).append((len(sample.tokens), version))
                paused.append(sampler.pause(sample))
        while paused and rng.random() < 0.4:
            sampler.resume(paused.pop(rng.integers(len(paused))))
        if rng.random() < 0.1 and sampler.pending:
            left = [s for s in samples if s.finish_reason is None]
            left = [s for s in left if all(s is not one.sample for one in paused)]
            sampler.abort(left[rng.integers(len(left))])
        if rng.random() < 0.4:
            version += 1
        step += 1
        sampler.step(versions[version % len(versions)], version=version, keep_cache=keep_cache)
    assert version > 3
    return samples, stops


def assert_drawn(sample, t, logits, limit: float = 2e-5) -> None:
    place = len(sample.prompt) + t
    probs, logp = kept_by_sorting(logits, sample.sampling)
    u = float(uniforms(sample.key, np.array([place]))[0])
    assert sample.tokens[t] in could_draw(probs, u), (sample.id, t)
    assert abs(sample.logprobs[t] - logp[sample.tokens[t]]) < limit, (sample.id, t)


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["window"], indirect=True)
@pytest.mark.parametrize("seed", SEEDS)
def test_read_again_each_token_is_that_of_the_version_it_names(engine, seed):
    versions = [weights(engine.model, key) for key in (3, 4, 5)]
    samples, _ = serve(engine, np.random.default_rng(seed), versions, keep_cache=False)
    logits = [forward(engine.model, one, [s.ids for s in samples]) for one in versions]
    mixed = 0
    for i, sample in enumerate(samples):
        assert len(sample.versions) == len(sample.tokens)
        assert sample.versions.tolist() == sorted(sample.versions)
        mixed += len(set(sample.versions)) > 1
        for t, version in enumerate(sample.versions):
            expected = logits[version % 3][i][len(sample.prompt) + t - 1]
            assert_drawn(sample, t, expected, rounding(engine.model))
    assert mixed > 3
    reasons = {sample.finish_reason for sample in samples}
    assert FinishReason.LENGTH in reasons
    assert FinishReason.ABORT in reasons or seed == 1  # which stops no sample


def _alone(model, versions, sample, read_again):
    """One sequence by itself, its schedule of versions given: the logits of each of its tokens.
    `read_again`: before which tokens all so far is read by that token's version."""
    caches, out, ids, start = None, [], sample.ids, len(sample.prompt)
    for t, version in enumerate(sample.versions):
        params = versions[version % len(versions)]
        if t == 0 or t in read_again:
            caches = _empty(model)
            for at in range(start + t - 1):
                _, caches = _read(model, params, caches, ids[at], at)
        at = start + t - 1
        logits, caches = _read(model, params, caches, ids[at], at)
        out.append(np.asarray(logits, np.float64))
    return out


def _empty(model):
    return jax.jit(model.empty_caches, static_argnums=(0, 1))(1, ROOM)


def _read(model, params, caches, token, at):
    return _step(model, params, caches, jnp.asarray([token]), jnp.asarray([at]))


def _step_of(model, params, caches, token, at):
    logits, caches = model.decode_step(model.unstack(params), token, at, caches)
    return logits[0], caches


_step = jax.jit(_step_of, static_argnums=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_with_the_cache_kept_each_token_is_that_of_its_schedule(engine, seed):
    """Against the sequence decoded alone, each of its tokens read once by the version that drew the
    next one; a pause across an update reads all of it again."""
    model = engine.model
    versions = [weights(model, key) for key in (3, 4, 5)]
    # A cache of prefixes must not hand on what several versions have read.
    how = dict(keep_cache=True, prefix_cache_tokens=200)
    samples, stops = serve(engine, np.random.default_rng(seed), versions, **how)
    mixed = stale = 0
    for sample in samples:
        again = {
            count
            for count, version in stops.get(sample.id, [])
            if count < len(sample.versions) and sample.versions[count] != version
        }
        logits = _alone(model, versions, sample, again)
        for t in range(len(sample.tokens)):
            assert_drawn(sample, t, logits[t], rounding(model))
        if len(set(sample.versions)) > 1:
            mixed += 1
            last = versions[sample.versions[-1] % 3]
            fresh = forward(model, last, [sample.ids])[0][len(sample.ids) - 2]
            stale += np.abs(fresh - logits[-1]).max() > 0.1
    assert mixed > 3 and stale > 1  # old keys and values do make a difference


def test_what_several_versions_read_is_not_offered_to_others(engine):
    params, other = weights(engine.model, 3), weights(engine.model, 4)
    asked = dataclasses.replace(ASKED, stop_ids=())
    sampler = Sampler(engine, chunk_tokens=16, prefix_cache_tokens=200)
    sample = sampler.submit([3, 4, 5, 6], asked, keep=True)[0]
    sampler.step(params, version=0)
    sampler.step(other, version=1)
    sampler.resume(sampler.pause(sample))
    sampler.step(other, version=1)
    assert len(set(sample.versions)) == 2
    fresh = sampler.submit(sample.ids, dataclasses.replace(asked, max_response_tokens=1))[0]
    list(sampler.run(other, version=1))
    logits = forward(engine.model, other, [fresh.ids])[0]
    assert_drawn(fresh, 0, logits[len(fresh.prompt) - 1])


@pytest.mark.slow
def test_no_parameter_is_copied_or_kept(engine):
    """A trainer may donate what the last step used; nothing of its size outlives a step."""
    model = engine.model
    params = jax.tree.map(lambda x: x + 0, weights(model))
    sampler = Sampler(engine, chunk_tokens=3, prefix_cache_tokens=50)
    lines = [sampler.submit(TOKENS[p, : LENGTHS[p]], ASKED, n=2) for p in range(8)]
    leaves = jax.tree.leaves(params)
    shapes = {x.shape for x in leaves} | {x.shape[1:] for x in leaves}
    places = [x.unsafe_buffer_pointer() for x in leaves]

    def held():
        gc.collect()
        return sum(x.shape in shapes and x.size > 200 for x in jax.live_arrays())

    sampler.step(params, version=0)
    before = held()
    sampler.step(params, version=0)
    assert held() == before
    assert [x.unsafe_buffer_pointer() for x in leaves] == places

    # (A view of a buffer on the host would keep it from being donated.)
    def seen(p):
        return jax.device_get(jax.tree.map(jnp.copy, p))

    move = jax.jit(lambda p: jax.tree.map(lambda x: x * 1.05, p), donate_argnums=0)
    version, expect = 0, {0: seen(params)}
    while sampler.pending:
        params = move(params)  # the buffers of the last step are gone
        version += 1
        expect[version] = seen(params)
        sampler.step(params, version=version, keep_cache=False)
        assert all(x.is_deleted() for x in leaves)
        leaves = jax.tree.leaves(params)
    assert held() == before
    samples = [sample for group in lines for sample in group]
    for v in sorted({v for s in samples for v in s.versions})[:6]:
        logits = forward(model, expect[v], [s.ids for s in samples])
        for sample, each in zip(samples, logits, strict=True):
            for t in [t for t, of in enumerate(sample.versions) if of == v]:
                assert_drawn(sample, t, each[len(sample.prompt) + t - 1], rounding(model))
