"""Samples that hold their slots between turns: whatever the slots, neighbours, chunks and parking,
each turn is what a fresh request of the same tokens and key would have drawn."""

import dataclasses

import numpy as np
import pytest
from sampler_cases import EOS, VOCAB, tiny, weights

from rljax.sampler import Engine, Sampler, Sampling

ROOM = 80
LETTERS = "_abcdefghijklmnopqrstuvwxyz01"
ASKED = Sampling(max_response_tokens=6, stop_ids=(EOS,))


def decode(ids) -> str:
    return "".join(LETTERS[i] for i in ids)


@pytest.fixture(
    scope="module", params=[4, pytest.param(0, marks=pytest.mark.slow)], ids=["window", "whole"]
)
def model(request):
    return tiny(window=request.param)


def turns_of(sample) -> list[tuple[int, int]]:
    """(first, end) of each run of chosen tokens of the response."""
    chosen = np.concatenate([[False], sample.chosen, [False]])
    edges = np.flatnonzero(chosen[1:] != chosen[:-1])
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def play(sampler, params, rng, *, samples: int, turns: int, asked=ASKED, on_step=None) -> list:
    """Random episodes: `turns` turns of each request; replies come late, of 0 to 23 tokens."""
    made, owed = [], {}
    for i in rng.permutation(samples).tolist():
        prompt = rng.integers(2, VOCAB, rng.integers(1, 9))
        made += sampler.submit(prompt, asked, request_ids=[i], hold=True)
    left, steps = {sample: turns - 1 for sample in made}, 0
    while sampler.pending or owed:
        for event in sampler.step(params, **(on_step(steps) if on_step else {})):
            if event.sample.finish_reason is not None:
                owed[event.sample] = int(rng.integers(0, 4))
        steps += 1
        replies = []
        for sample in [s for s, wait in owed.items() if wait <= steps % 4]:
            del owed[sample]
            if not left[sample]:
                sampler.release(sample)
                continue
            left[sample] -= 1
            more = rng.integers(2, VOCAB, rng.integers(0, 24) if rng.random() < 0.3 else 3)
            limit = int(rng.integers(1, 8))
            reply = dataclasses.replace(asked, max_response_tokens=limit)
            replies.append((sample, more.tolist(), reply))
        sampler.deliver(replies)
        assert steps < 1000
    assert sampler.held == sampler.parked == sampler.pending == 0
    return made


def assert_fresh(sampler, params, samples) -> None:
    """Each turn again, as a request whose prompt is all that came before it."""
    again = []
    for sample in samples:
        for first, end in turns_of(sample):
            prompt = sample.ids[: len(sample.prompt) + first]
            alone = dataclasses.replace(ASKED, max_response_tokens=end - first)
            again += [(sample, first, end, *sampler.submit(prompt, alone, request_ids=[sample.id]))]
    list(sampler.run(params))
    for sample, first, end, fresh in again:
        assert fresh.tokens.tolist() == sample.tokens[first:end].tolist(), (sample.id, first)
        for name in ("logprobs", "log_kept", "entropy"):
            ours, theirs = getattr(sample, name)[first:end], getattr(fresh, name)
            np.testing.assert_allclose(ours, theirs, atol=2e-5, err_msg=f"{sample.id} {name}")


@pytest.mark.parametrize(
    "slots, parked, reread",
    [(12, 0, False), (3, 0, True), (3, 10 * ROOM, False), (1, ROOM, None)],
)
def test_turns_are_those_of_a_fresh_request(model, slots, parked, reread):
    """With a slot for each, and with fewer slots than episodes: parked, or read again."""
    params, rng = weights(model), np.random.default_rng(slots + parked)
    sampler = Sampler(Engine(model, slots, ROOM, steps=3), chunk_tokens=8, parked_tokens=parked)
    samples = play(sampler, params, rng, samples=10, turns=3)
    assert reread in (None, sampler.reread_tokens > 0)
    other = Sampler(Engine(model, 9, ROOM, steps=8), chunk_tokens=32)
    assert all(1 <= len(turns_of(sample)) <= 3 for sample in samples)
    assert_fresh(other, params, samples)
