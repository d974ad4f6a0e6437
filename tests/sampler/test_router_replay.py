"""Router replay: the experts that the sampler chose are recorded and taken again in training."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import golden, lanes
from sampler_cases import drawn
from test_sampler_families import first_layer
from tiny_run import tiny_config

from rljax.batch import Batch, batch_from_rows
from rljax.errors import InputError
from rljax.learn import Steps, token_mean
from rljax.learn.packing import Packing
from rljax.losses.policy import ppo_clip
from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.experts import ExpertsConfig, route
from rljax.models.huggingface import load_config, load_params
from rljax.models.model import Model
from rljax.roles import Actor, start_training
from rljax.sampler import Decoding, Sampling, branch, generate
from rljax.validation import validate

LENGTHS = np.array([5, 3, 4, 5])
SAMPLING = Sampling(max_response_tokens=6)


LAYER = "a layer of mixtral"


def model_of(family="mixtral", mesh=None):
    if family == LAYER:
        return first_layer("mixtral")
    folder = golden("hf", family)
    mesh = mesh or make_mesh(devices=jax.devices()[:1])
    model = Model(load_config(folder, remat="none"), mesh)
    return model, load_params(folder, model)


def sampled(model, params, seed=0, n=2, **decoding) -> Batch:
    prompts = np.random.default_rng(7).integers(3, 300, (4, 5)).astype(np.int32)
    how = dict(n=n, decoding=Decoding(record_routes=True, **decoding))
    return generate(model, params, prompts, LENGTHS, jax.random.key(seed), SAMPLING, **how)


def own_routes(model, params, batch) -> np.ndarray:
    """The experts that a pass over whole rows chooses: [B, S, E, k]."""
    prompts = batch.replace(routes=None, mask=jnp.zeros_like(batch.mask))
    read = jax.jit(lambda p, b: model.prefill_routed(p, b, b.tokens.shape[1])[1])
    return np.asarray(read(params, prompts))


def read_by_the_sampler(batch) -> np.ndarray:
    """All tokens of a row but its last one, which is drawn and never read: [B, S] bool."""
    inside = np.asarray(batch.segment_ids) > 0
    return inside & np.pad(inside[:, 1:], ((0, 0), (0, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("slots", lanes([3], [0]))
@pytest.mark.parametrize(
    "family", lanes([LAYER], ["mixtral", "deepseek_v3", "gpt_oss", "qwen3_moe"])
)
def test_every_token_that_was_read_has_its_experts(family, slots):
    """In float32 they are those of a pass over whole rows, whichever slot decoded them."""
    model, params = model_of(family)
    batch = sampled(model, params, slots=slots)
    layers = sum(kind.experts for kind in model.config.kinds)
    assert batch.routes.shape == (*batch.tokens.shape, layers, model.config.experts.per_token)
    assert batch.routes.dtype == jnp.int8
    got, want, read = (
        np.asarray(batch.routes),
        own_routes(model, params, batch),
        read_by_the_sampler(batch),
    )
    np.testing.assert_array_equal(np.sort(got[read]), np.sort(want[read]))
    assert (got[~read] == -1).all()
    off = generate(
        model, params, np.asarray(batch.tokens)[::2, :5], LENGTHS, jax.random.key(0), SAMPLING, n=2
    )
    assert off.routes is None
    np.testing.assert_array_equal(off.tokens, batch.tokens)  # recording changes no draw


@pytest.mark.slow
def test_branches_keep_the_routes_of_their_rows():
    model, params = model_of()
    batch = sampled(model, params, n=1)
    key, how = jax.random.key(0), Decoding(record_routes=True)
    out = branch(model, params, batch, [2], [2], LENGTHS, key, SAMPLING, n=2, decoding=how)
    want, read = own_routes(model, params, out), read_by_the_sampler(out)
    np.testing.assert_array_equal(np.sort(np.asarray(out.routes)[read]), np.sort(want[read]))


def test_weights_and_gradient_are_those_of_the_recorded_experts():
    """By hand: the router's scores over the recorded experts alone."""
    config = ExpertsConfig(6, 2, 8)
    logits = jnp.asarray([[3.0, 2.0, 1.0, 0.0, -1.0, 0.5], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]])
    routes = jnp.asarray([[4, 0], [-1, -1]], jnp.int8)
    chosen = jax.jit(lambda logits: route(logits, None, config, routes))
    ids, weights = jax.device_get(chosen(logits))
    np.testing.assert_array_equal(ids, [[4, 0], [5, 4]])
    two = np.exp([-1.0, 3.0])
    np.testing.assert_allclose(weights[0], two / two.sum(), rtol=1e-6)
    gradient = jax.jit(jax.grad(lambda x: chosen(x)[1][0, 0]))(logits)
    assert (np.asarray(gradient[0]) != 0).tolist() == [True, False, False, False, True, False]


def scrambled(batch, count: int) -> Batch:
    """The batch with other routes, so that it matters who reads them."""
    return batch.replace(routes=jnp.where(batch.routes >= 0, (batch.routes + 1) % count, -1))


@pytest.mark.slow
@pytest.mark.parametrize("how", lanes(["packed"], ["microbatches"]))
def test_every_pass_of_training_reads_them(how):
    """Log-probs and updates, however rows are cut and packed; off-policy epochs, too."""
    model, params = model_of()
    count = model.config.experts.count
    batch = scrambled(sampled(model, params), count)
    packing = Packing(8, 4, 1, 4, True, model.mesh) if how == "packed" else None
    steps = Steps(4, 2, epochs=2, packing=packing)
    actor = Actor(start_training(model, params, optax.sgd(0.1)), model, optax.sgd(0.1))
    logprobs = jax.jit(lambda actor, b, steps: actor.logprobs(b, steps), static_argnums=2)
    keep = np.asarray(batch.mask) > 0
    whole, cut = (np.asarray(logprobs(actor, batch, s))[keep] for s in (None, steps))
    np.testing.assert_allclose(cut, whole, atol=1e-4)
    plain = np.asarray(logprobs(actor, batch.replace(routes=None), None))[keep]
    assert np.abs(plain - whole).max() > 0.01
    old = batch.replace(
        old_logprobs=logprobs(actor, batch, None),
        advantages=jnp.cos(jnp.arange(batch.tokens.size, dtype=jnp.float32)).reshape(
            batch.tokens.shape
        ),
    )
    update = jax.jit(
        lambda actor, b, steps: actor.update(b, ppo_clip, steps=steps, reduction=token_mean),
        static_argnums=2,
    )
    after, metrics = update(actor, old, steps)
    want, _ = update(actor, old, Steps(4, 4, epochs=2))
    for a, b in zip(
        jax.tree.leaves(after.state.params), jax.tree.leaves(want.state.params), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-4)
    first = update(actor, old, Steps(8, 8))[1]
    assert float(first["ppo_k3"]) < 1e-8  # the step before any change has ratio 1
    moved = (
        after.state.params["layers"]["0"]["mlp"]["router"] - params["layers"]["0"]["mlp"]["router"]
    )
    assert float(jnp.abs(moved).max()) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_it_brings_sampler_and_trainer_nearer(kind):
    """Three seeds: mean |log-prob of the trainer - the sampler's| with and without the routes, and
    tokens that a layer sends elsewhere."""
    model, params = model_of("qwen3_moe")
    how = dict(dtype="bfloat16") if kind == "bfloat16" else dict(weight_dtype="int8")
    logprobs = jax.jit(lambda p, b: model.logprobs(p, b)[0])
    with_it, without = [], []
    for seed in range(3):
        batch = sampled(model, params, seed=seed, n=16, **how)
        keep = np.asarray(batch.mask) > 0

        def gap(b):
            return np.abs(logprobs(params, b) - b.sampler_logprobs)[keep].mean()  # noqa: B023

        with_it.append(gap(batch))
        without.append(gap(batch.replace(routes=None)))
    print(kind, "with", with_it, "without", without)
    assert np.mean(with_it) < np.mean(without)


def recorded(config) -> Batch:
    """Four rows with routes by chance."""
    rng, lengths = np.random.default_rng(7), LENGTHS + 3
    tokens = rng.integers(3, 300, (4, 8)).astype(np.int32)
    batch = batch_from_rows(jnp.asarray(tokens), jnp.asarray(lengths), jnp.ones(tokens.shape))
    kinds, chosen = sum(kind.experts for kind in config.kinds), config.experts.per_token
    routes = rng.permuted(np.tile(np.arange(config.experts.count), (4, 8, kinds, 1)), axis=-1)
    return batch.replace(routes=jnp.asarray(routes[..., :chosen], jnp.int8))


@pytest.mark.slow
def test_models_of_other_sizes_and_other_heads_choose_their_own():
    """The model itself takes what was recorded."""
    model, params = first_layer("mixtral")
    batch = recorded(model.config)
    read = jax.jit(lambda b: model.logprobs(params, b)[0])
    plain = read(batch.replace(routes=None))
    assert np.abs(read(batch) - plain)[np.asarray(batch.mask) > 0].max() > 0.01
    sizes = dict(layers=1, embed=16, mlp=16, heads=2, kv_heads=2, head_dim=8, init_std=0.5)
    critic = dataclasses.replace(model, head="scalar")
    others = [
        dataclasses.replace(model, config=decoder(400, **sizes, **how))
        for how in ({}, dict(experts=4, experts_per_token=3))
    ]
    for other in (critic, *others):
        weights = drawn(other)

        @jax.jit
        def with_and_without(params, batch, model=other):
            return [
                model.hidden_and_load(params, one)[0] for one in (batch, batch.replace(routes=None))
            ]

        np.testing.assert_array_equal(*with_and_without(weights, batch))


@pytest.mark.slow
def test_on_a_mesh():
    model, params = model_of("mixtral", make_mesh(data=2, fsdp=1, expert=2, tensor=2))
    batch = jax.device_get(sampled(model, params))
    alone, weights = model_of()
    want, read = own_routes(alone, weights, batch), read_by_the_sampler(batch)
    same = (np.sort(batch.routes[read]) == np.sort(want[read])).mean()
    assert same > 0.99  # sums of another order may move a choice
    batch = scrambled(batch, model.config.experts.count)
    keep = np.asarray(batch.mask) > 0
    got, want = (jax.jit(m.logprobs)(p, batch)[0] for m, p in ((model, params), (alone, weights)))
    np.testing.assert_allclose(np.asarray(got)[keep], np.asarray(want)[keep], atol=1e-3)


def test_what_cannot_record_is_refused(tmp_path):
    for field in (
        {"sampler__loop": "host"},
        {"rollouts__max_staleness": 1},
        {"sampler__draft_tokens": 2},
    ):
        with pytest.raises(InputError, match="sampler.router_replay.*device's loop"):
            validate(tiny_config(tmp_path, sampler__router_replay=True, **field))
    with pytest.raises(InputError, match="router_replay"):
        Decoding(record_routes=True, loop="host")
    model = model_of()[0]
    dense = dataclasses.replace(
        model, config=dataclasses.replace(model.config, experts=None, kinds=())
    )
    with pytest.raises(InputError, match="router_replay.*has none"):
        sampled(dense, dense.init(jax.random.key(0)))
