"""Prompts with images in the host's loop: the draws of the device's loop, whatever the order, the
pages and the chunks; images are part of what a cached beginning is known by."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from conftest import lanes

from rljax.data.images.rows import prompt_images
from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models.builtin import decoder, vision_decoder
from rljax.models.model import Model
from rljax.sampler import Decoding, Engine, Sampler, Sampling, generate
from rljax.sampler.prompt_images import of_prompt

COLUMNS, RESPONSE, SAMPLES = 14, 6, 3
SAMPLING = Sampling(max_response_tokens=RESPONSE)


@functools.cache
def scene():
    """(model, weights, prompts, lengths, images): one image of 2 x 2 tokens, none, two of 1 x 2,
    and the tokens of the first with another image."""
    config = vision_decoder(
        40,
        layers=1,
        embed=32,
        mlp=32,
        heads=2,
        kv_heads=2,
        head_dim=16,
        patch_size=2,
        vision_layers=1,
        vision_embed=32,
        vision_mlp=32,
        vision_heads=2,
        init_std=0.3,
    )
    model = Model(config, make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    vision = config.vision
    i, start, end = vision.image_token_id, vision.start_token_id, vision.end_token_id
    first = [15, start, i, i, i, i, end, 19, 21]
    rows = [first, [20, 21, 22], [17, start, i, i, end, 25, start, i, i, end, 9, 8, 7], first]
    grids = np.array([[1, 4, 4], [1, 2, 4], [1, 2, 4], [1, 4, 4]])
    tokens = np.zeros((4, COLUMNS), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    lengths = np.array([len(ids) for ids in rows], np.int32)
    rng = np.random.default_rng(1)
    pixels = rng.normal(size=(int(grids.prod(axis=1).sum()), vision.patch_values))
    images = prompt_images(tokens, lengths, pixels.astype(np.float32), grids, vision)
    return model, model.init(jax.random.key(2)), tokens, lengths, images


@functools.cache
def by_device():
    model, params, tokens, lengths, images = scene()
    key = jax.random.key(5)
    return generate(model, params, tokens, lengths, key, SAMPLING, n=SAMPLES, images=images)


def assert_same(batch, other):
    for field in dataclasses.fields(batch):
        one, two = (getattr(b, field.name) for b in (batch, other))
        assert (one is None) == (two is None), field.name
        if one is not None:
            np.testing.assert_allclose(one, two, atol=2e-5, err_msg=field.name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", lanes([{"slots": 6, "page_tokens": 4, "pages": 12}], [{}, {"slots": 5}]), ids=str
)
def test_the_hosts_loop_draws_what_the_devices_loop_draws(how):
    model, params, tokens, lengths, images = scene()
    key, decoding = jax.random.key(5), Decoding(loop="host", **how)
    batch = generate(
        model, params, tokens, lengths, key, SAMPLING, n=SAMPLES, images=images, decoding=decoding
    )
    assert_same(batch, by_device())


def of_device(row: int) -> list[list[int]]:
    """The responses of the device's loop to prompt `row`."""
    batch, lengths = by_device(), scene()[3]
    rows = range(row * SAMPLES, (row + 1) * SAMPLES)
    ends = (np.asarray(batch.segment_ids) > 0).sum(axis=1)
    return [np.asarray(batch.tokens)[r, lengths[row] : ends[r]].tolist() for r in rows]


def asked(sampler: Sampler, row: int, **options):
    """The samples of prompt `row`, with the draws of the device's loop."""
    _, _, tokens, lengths, images = scene()
    ids, size = range(row * SAMPLES, (row + 1) * SAMPLES), int(lengths[row])
    own = of_prompt(images, row, size)
    how = dict(n=SAMPLES, request_ids=ids, images=own) | options
    return sampler.submit(tokens[row, :size], SAMPLING, **how)


def made(chunk_tokens: int = 4, slots: int = 12, **options) -> Sampler:
    paged = {name: options.pop(name) for name in ("page_tokens", "pages") if name in options}
    engine = Engine(scene()[0], slots, COLUMNS + RESPONSE, steps=2, **paged)
    return Sampler(engine, key=jax.random.key(5), chunk_tokens=chunk_tokens, **options)


@pytest.mark.parametrize(
    "how", lanes([{"chunk_tokens": 4}], [{"chunk_tokens": 6, "page_tokens": 2}]), ids=str
)
def test_a_cached_beginning_is_known_by_its_images(how):
    """Prompts 0 and 3 have the same tokens. What a prefix cache or a page holds of one is not the
    other's; chunks end inside of an image, with it, or behind it."""
    params, sampler = scene()[1], made(prefix_cache_tokens=200, **how)
    for row in (0, 3, 0, 2):
        samples = asked(sampler, row)
        list(sampler.run(params))
        assert [sample.tokens.tolist() for sample in samples] == of_device(row), row
    assert of_device(0) != of_device(3)


@pytest.mark.slow
def test_what_is_lost_is_read_again_with_its_images():
    """Other parameters, a pause, and a slot that is given up, at places inside of the responses."""
    params, sampler = scene()[1], made()
    samples = asked(sampler, 2)
    sampler.step(params, version=1)
    sampler.step(params, version=2, keep_cache=False)
    assert sampler.reread_tokens > 0
    partial = sampler.pause(samples[1])
    sampler.step(params, version=3, keep_cache=False)
    samples[1] = sampler.resume(partial)
    list(sampler.run(params, version=4))
    assert [sample.tokens.tolist() for sample in samples] == of_device(2)


@pytest.mark.slow
def test_preempted_samples_are_read_again_with_their_images():
    params = scene()[1]
    sampler = made(page_tokens=2, pages=22)
    samples = [sample for row in (0, 2, 3) for sample in asked(sampler, row)]
    list(sampler.run(params))
    assert sampler.page_metrics()["pages/preemptions"] > 0
    found = [sample.tokens.tolist() for sample in samples]
    assert found == of_device(0) + of_device(2) + of_device(3)


def test_a_drawn_image_token_is_an_ordinary_one():
    """It has no feature when the response is read again."""
    model, params, tokens, lengths, images = scene()
    token = model.config.vision.image_token_id
    sampling = dataclasses.replace(SAMPLING, logit_bias=((token, 1e4),))
    found = []
    for versions in ((1, 1, 1), (1, 2, 3)):
        sampler = made()
        own = of_prompt(images, 0, int(lengths[0]))
        (sample,) = sampler.submit(tokens[0, : lengths[0]], sampling, images=own)
        for version in versions:
            sampler.step(params, version=version, keep_cache=False)
        list(sampler.run(params, version=versions[-1]))
        assert (sampler.reread_tokens > 0) == (versions[-1] > 1)
        found.append(sample)
    assert found[1].tokens.tolist() == [token] * RESPONSE
    np.testing.assert_allclose(found[0].logprobs, found[1].logprobs, atol=2e-5)


def test_what_is_wrong_with_images_is_refused():
    sampler = made()
    images = scene()[4]
    with pytest.raises(InputError, match="tokens of images"):
        asked(sampler, 1, images=of_prompt(images, 0, 3))
    with pytest.raises(InputError, match="arrays of a prompt's images"):
        asked(sampler, 0, images=of_prompt(images, 0, 4))
    model = Model(decoder(40, layers=1, embed=16, heads=2, kv_heads=2), scene()[0].mesh)
    text = Sampler(Engine(model, 2, COLUMNS + RESPONSE))
    with pytest.raises(InputError, match="without a vision tower"):
        asked(text, 0)
    (sample, *_) = asked(sampler, 0, hold=True)
    list(sampler.run(scene()[1]))
    with pytest.raises(InputError, match="branches of samples with images"):
        sampler.branch(sample, 1)
