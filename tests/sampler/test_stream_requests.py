"""Requests that share ids or cannot be served leave the others in the sampler alone."""

import jax
import pytest

from rljax.batch import FinishReason
from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.model import Model
from rljax.sampler import Engine, Sampler, Sampling


@pytest.fixture(scope="module")
def served():
    config = decoder(13, layers=1, embed=16, mlp=32, heads=4, kv_heads=2, head_dim=8, init_std=0.5)
    model = Model(config, make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    return Engine(model, 2, 24, steps=2), model.init(jax.random.key(3))


def test_samples_of_one_seed_are_told_apart(served):
    """A seed numbers its samples from 0, so that several requests have the same ids."""
    engine, params = served
    sampler = Sampler(engine, chunk_tokens=4)
    asked = Sampling(max_response_tokens=8, seed=1)
    samples = [sampler.submit([3, 4, 5 + i], asked)[0] for i in range(4)]
    sampler.step(params)
    sampler.abort(samples[1])  # in a slot
    sampler.abort(samples[3])  # waiting
    finished = list(sampler.run(params))
    assert [s.finish_reason for s in samples] == [
        FinishReason.LENGTH,
        FinishReason.ABORT,
        FinishReason.LENGTH,
        FinishReason.ABORT,
    ]
    assert {id(s) for s in finished} == {id(samples[0]), id(samples[2])}


def test_more_stop_ids_than_an_engine_has_room_for_are_refused_alone(served):
    engine, params = served
    sampler = Sampler(engine, chunk_tokens=4)
    sampler.submit([3, 4], Sampling(max_response_tokens=4))
    with pytest.raises(InputError, match="stop_ids: got 17; at most 16"):
        sampler.submit([3, 4], Sampling(max_response_tokens=4, stop_ids=(1,) * 17))
    assert [len(s.tokens) for s in sampler.run(params)] == [4]
