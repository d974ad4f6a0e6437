"""A model that tensor=8 does not divide, from its first draw to its export: every step of a run
gives what one device gives, and what is kept has the model's own shapes."""

import dataclasses
import filecmp

import jax
import numpy as np
import pytest
import test_programs
from conftest import lanes
from sampler_cases import EOS, prompts
from test_programs import KEY, STEPS, assert_close, host_batch, recipe

from rljax.arrays import place
from rljax.config import OptimizerConfig
from rljax.dataflows.ppo import ppo
from rljax.learn.optimizers import make_optimizer
from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.config import LoraConfig
from rljax.models.huggingface import load_params, save_params
from rljax.models.model import Model
from rljax.roles import RewardModel, start_training
from rljax.sampler import Decoding, Engine, Layout, Sampler, Sampling, generate

VOCAB = 29
CONFIG = decoder(
    VOCAB,
    layers=2,
    embed=16,
    mlp=30,
    heads=14,
    kv_heads=2,
    head_dim=8,
    init_std=0.4,
    tie_embeddings=True,
)
UNTIED = dataclasses.replace(CONFIG, tie_embeddings=False, heads=6, kv_heads=3, embed=18)
TOKENS, LENGTHS = prompts(8, 5, vocab=VOCAB)
ASKED = Sampling(max_response_tokens=6, stop_ids=(EOS,), top_p=0.9)


def model_on(config=CONFIG, **sizes) -> Model:
    devices = jax.devices() if sizes else jax.devices()[:1]
    return Model(config, make_mesh(**(sizes or dict(fsdp=1)), devices=devices))


def draw(model: Model, seed: int = 3):
    return model.init(jax.random.key(seed))


WIDE = dict(fsdp=1, tensor=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [CONFIG, pytest.param(UNTIED, marks=pytest.mark.slow)], ids=["tied", "untied"]
)
def test_weights_are_drawn_saved_and_loaded_as_on_one_device(config, tmp_path):
    one, eight = model_on(config), model_on(config, **WIDE)
    params, spread = draw(one), draw(eight)
    assert_close(jax.device_get(spread), jax.device_get(params), atol=0)
    for name, model, weights in (("one", one, params), ("eight", eight, spread)):
        save_params(tmp_path / name, model, weights)
    same = filecmp.cmp(*(tmp_path / name / "model.safetensors" for name in ("one", "eight")))
    assert same  # the files are equal byte by byte
    for sizes in (WIDE, dict(fsdp=2, tensor=4), dict(fsdp=8), dict(fsdp=4, tensor=2)):
        loaded = load_params(tmp_path / "eight", model_on(config, **sizes))
        for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("base", ["float32", "nf4"])
def test_adapters_are_drawn_as_on_one_device(base):
    config = dataclasses.replace(CONFIG, lora=LoraConfig(rank=2, base=base))
    each = [jax.tree.leaves(draw(model_on(config, **sizes))) for sizes in ({}, WIDE)]
    for a, b in zip(*each, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("layout", lanes(["its own"], ["of training"]))
@pytest.mark.parametrize("weights", lanes(["as they are"], ["int8"]))
def test_sampling_draws_the_tokens_of_one_device(weights, layout):
    """The device's loop, in the layout of training and in one of its own."""
    one = model_on()
    decoding = Decoding(weight_dtype="int8") if weights == "int8" else Decoding()
    want = generate(one, draw(one), TOKENS, LENGTHS, KEY, ASKED, n=2, decoding=decoding)
    model = model_on(**WIDE) if layout == "of training" else model_on(fsdp=8)
    if layout == "its own":
        decoding = dataclasses.replace(decoding, layout=Layout(data=1, tensor=8))
    got = generate(model, draw(model), TOKENS, LENGTHS, KEY, ASKED, n=2, decoding=decoding)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.sampler_logprobs, want.sampler_logprobs, atol=2e-5)
    assert got.tokens.max() < VOCAB


@pytest.mark.slow
def test_slots_that_are_refilled_draw_the_tokens_of_one_device():
    """The host's loop: chunks of prompts, a queue, pages."""
    said = []
    for sizes in ({}, WIDE):
        model = model_on(**sizes)
        sampler = Sampler(Engine(model, 3, 16, steps=3, page_tokens=4), chunk_tokens=4)
        params = draw(model)
        for row, length in zip(TOKENS, LENGTHS, strict=True):
            sampler.submit(row[:length].tolist(), ASKED)
        said.append({s.id: s.tokens.tolist() for s in sampler.run(params)})
    assert said[0] == said[1] and len(said[0]) == len(TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("sizes", [WIDE, dict(fsdp=2, tensor=4)], ids=str)
def test_a_ppo_step_gives_the_parameters_of_one_device(optimizer, sizes, monkeypatch):
    """Actor, critic and reference, two epochs of two optimizer steps of two microbatches, clipped
    by the global norm, with weight decay; the norms and shares of clipped ratios, too."""
    settings = OptimizerConfig(name=optimizer, lr=1e-2, clip_norm=0.1, weight_decay=0.1)
    monkeypatch.setattr(test_programs, "CONFIG", dataclasses.replace(CONFIG, vocab_size=16 + 1))
    monkeypatch.setattr(test_programs, "OPTIMIZER", make_optimizer(settings, 0))
    found: list = []
    for mesh in (model_on().mesh, model_on(**sizes).mesh):
        batch = place(jax.device_get(host_batch()), mesh)
        roles = test_programs.roles_on(mesh)
        roles, metrics = ppo(batch, KEY, recipe("gae(lam=0.95)", STEPS), **roles)
        weights = {k: roles[k].state.params for k in roles}
        found.append(jax.device_get((weights, metrics)))
    (want, want_metrics), (got, metrics) = found
    assert_close(got, want, atol=3e-5)
    for name, value in want_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-3, atol=2e-4, err_msg=name)


@pytest.mark.slow
def test_a_reward_model_says_what_it_says_on_one_device():
    scores = []
    for sizes in ({}, WIDE):
        model = dataclasses.replace(model_on(**sizes), head="scalar")
        params = draw(model)
        params["head"] += 0.1  # it starts at 0
        optimizer = make_optimizer(OptimizerConfig(), 0)
        judge = RewardModel(start_training(model, params, optimizer), model, optimizer)
        batch = place(jax.device_get(host_batch()), model.mesh)
        scores.append(np.asarray(jax.jit(RewardModel.scores)(judge, batch)))
    assert np.abs(scores[0]).max() > 0.01
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-5)
