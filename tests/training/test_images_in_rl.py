"""Prompts with images through the whole loop: sampled from and learnt from by GRPO, on the tiny
models of the golden folders. Runs from a config, SFT among them: test_image_runs.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import golden, lanes

from rljax.batch import last_token
from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.data.images.rows import prompt_images
from rljax.data.online.prompts import Prompts
from rljax.dataflows.algorithm import Algorithm
from rljax.dataflows.grpo import grpo
from rljax.learn import Steps
from rljax.mesh import make_mesh
from rljax.models.huggingface import load_config, load_params
from rljax.models.model import Model
from rljax.models.trees import flattened
from rljax.roles import Actor, start_training
from rljax.sampler import Sampling

LR = 3e-3


@pytest.fixture(scope="module", params=lanes(["qwen2_5_vl"], ["qwen3_vl"]))
def scene(request):
    """(model, weights, prompts): an image of 2 x 2 tokens, one of 1 x 2, and none."""
    folder = golden("hf", request.param)
    mesh = make_mesh(devices=jax.devices()[:1])
    model = Model(load_config(folder, remat="none"), mesh)
    vision = model.config.vision
    i, start, end = vision.image_token_id, vision.start_token_id, vision.end_token_id
    rows = [[5, start, i, i, i, i, end, 9, 11], [7, 8, start, i, i, end, 10], [20, 21, 22]]
    tokens = np.zeros((3, 10), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    lengths = np.array([len(ids) for ids in rows])
    grids = np.array([[1, 4, 4], [1, 2, 4]])
    pixels = np.random.default_rng(0).normal(size=(24, vision.patch_values)).astype(np.float32)
    images = prompt_images(tokens, lengths, pixels, grids, vision)
    prompts = Prompts(tokens, lengths, tuple({} for _ in rows), images=images)
    return model, load_params(folder, model), prompts


def actor_of(model, params):
    optimizer = optax.adam(LR)
    return Actor(
        start_training(model, jax.tree.map(jnp.copy, params), optimizer), model, optimizer, 1.0
    )


@pytest.fixture(scope="module")
def sampled(scene):
    model, params, prompts = scene
    how = Sampling(max_response_tokens=6, stop_ids=(2,))
    return actor_of(model, params).generate(prompts, jax.random.key(0), how, n=4)


@pytest.mark.slow
def test_the_sampler_and_the_trainer_see_the_same_images(scene, sampled):
    model, params, prompts = scene
    logprobs = jax.jit(model.logprobs)(params, sampled)[0]
    keep = np.asarray(sampled.mask) > 0
    np.testing.assert_allclose(logprobs[keep], sampled.sampler_logprobs[keep], atol=1e-5)
    # Without the images, or with another, the same tokens are other words.
    rows = np.arange(8)  # of the two prompts that have one
    other = dataclasses.replace(sampled, pixels=sampled.pixels[::-1])
    moved = np.abs(jax.jit(model.logprobs)(params, other)[0] - logprobs)
    assert moved[rows][keep[rows]].max() > 0.01
    # Positions of an image count rows and columns, and the response goes on after its end.
    for row, length in enumerate(np.repeat(prompts.lengths, 4)):
        want = length + prompts.images["shift"][row // 4]
        np.testing.assert_array_equal(sampled.rope_positions[row, length], [want] * 3)


def test_tokens_of_images_are_never_trained(scene, sampled):
    model, params, prompts = scene
    token = model.config.vision.image_token_id
    in_prompt = np.arange(16)[None, :] < np.repeat(prompts.lengths, 4)[:, None]
    image = (np.asarray(sampled.tokens) == token) & in_prompt
    assert image.sum() == 4 * 6 and not np.any(np.asarray(sampled.mask)[image])
    # This random model says the image's id at times: then it is a word like any other.
    said = np.any((np.asarray(sampled.tokens) == token) & ~in_prompt, axis=1)
    mask = jnp.asarray(np.where(said[:, None], 0, sampled.mask))

    def loss(params, batch):
        return jnp.sum(mask * model.logprobs(params, batch)[0])

    # The embedding of the image token is replaced by the image, and is no target.
    gradient = jax.jit(jax.grad(loss))(params, sampled)
    assert np.any(mask) and not np.any(gradient["embedding"][token])
    tower = [x for path, x in flattened(gradient).items() if path[0] == "vision"]
    assert all(np.any(x) for x in tower if x.ndim > 2)  # the image does teach the tower


def recipe(**fields):
    def part(stage, text):
        return resolve(text, NAMESPACES[stage])

    return Algorithm(
        samples_per_prompt=4,
        advantage=part("advantage", "group_relative()"),
        policy_loss=part("policy_loss", "ppo_clip()"),
        value_loss=part("value_loss", "squared_error()"),
        reduction=part("reduction", "token_mean()"),
        steps=Steps(rows=12, microbatch_rows=6),
        **fields,
    )


@pytest.mark.slow
def test_grpo_raises_the_reward_of_answers_about_images(scene):
    """The reward is 1 where the answer's first word is below 160 for the first image, and above for
    the second: only the image and its text tell them apart."""
    model, params, prompts = scene
    actor, how, means = actor_of(model, params), Sampling(max_response_tokens=2), []
    for step in range(25):
        batch = actor.generate(prompts, jax.random.key(step), how, n=4)
        first = np.asarray(batch.tokens)[np.arange(12), np.repeat(prompts.lengths, 4)]
        score = np.where(np.repeat([True, False, True], 4), first < 160, first >= 160)
        score = jnp.asarray(score, jnp.float32)
        rewards = last_token(batch) * score[:, None]
        batch = batch.replace(rewards=rewards, scores=score)
        new, metrics = grpo(batch, jax.random.key(0), recipe(), actor=actor)
        actor, means = new["actor"], [*means, float(score.mean())]
    assert np.mean(means[:4]) < 0.75 < 0.9 < np.mean(means[-5:]), means
    assert np.isfinite(metrics["loss"]) and metrics["mismatch/mismatch_k3_kl"] < 1e-6
