"""Weights that are held in bfloat16: unbiased rounding of updates, the same on every device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import lanes
from test_optimizers import CONFIG, gradient_of
from test_shard_optimizer import begun, stepped
from tiny_run import flat_bytes

from rljax.errors import InputError
from rljax.learn.rounding import stochastic_round
from rljax.learn.state import AS_WEIGHTS, DataParallel, new_train_state, optimizer_step
from rljax.mesh import make_mesh
from rljax.models.model import Model
from rljax.roles import start_training, training_layout

HELD = dataclasses.replace(CONFIG, weight_dtype="bfloat16")


def test_rounding_is_unbiased_and_goes_to_a_neighbour():
    """Over 4,096 keys the mean of each number is within five standard errors of it."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=500) * 10.0 ** rng.uniform(-30, 30, 500)
    x = jnp.asarray(x, jnp.float32)
    keys = jax.random.split(jax.random.key(1), 4096)
    rounded = jax.jit(jax.vmap(stochastic_round, (None, 0)))(x, keys)
    assert rounded.dtype == jnp.bfloat16
    rounded = np.asarray(rounded, np.float64)
    bits = np.asarray(x).view(np.uint32)
    below = (bits & 0xFFFF0000).view(np.float32).astype(np.float64)  # nearer to 0
    above = ((bits & 0xFFFF0000) + 0x10000).view(np.float32).astype(np.float64)
    share = (np.asarray(x, np.float64) - below) / (above - below)
    assert ((rounded == below) | (rounded == above)).all()
    error = (np.mean(rounded == above, axis=0) - share) / np.sqrt(share * (1 - share) / 4096)
    assert np.abs(error).max() < 5 and abs(error.mean()) < 0.3


def test_what_bfloat16_holds_stays():
    """So no update, no rounding; and what is not finite stays so."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=100), jnp.bfloat16)
    special = jnp.array([0.0, -0.0, 1.5, jnp.inf, -jnp.inf, jnp.nan], jnp.bfloat16)
    x = jnp.concatenate([x, special])
    for seed in range(5):
        got = stochastic_round(x.astype(jnp.float32), jax.random.key(seed))
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(x, np.float32))


def test_updates_below_the_spacing_of_the_weights_add_up():
    """1e-4 of weights of 1, whose neighbours are 0.004 and 0.008 away: to the nearest nothing would
    ever move."""
    optimizer, gradient = optax.sgd(1e-4), {"w": jnp.ones(4096, jnp.bfloat16)}
    state = new_train_state({"w": jnp.ones(4096, jnp.bfloat16)}, optimizer)
    step = jax.jit(lambda s: optimizer_step(s, gradient, 1.0, optimizer)[0])
    for _ in range(200):
        state = step(state)
    moved = np.asarray(state.params["w"], np.float64) - 1
    # Each step's rounding adds a variance of at most 0.004 x 1e-4.
    assert abs(moved.mean() + 0.02) < 5 * np.sqrt(200 * 0.004 * 1e-4 / 4096)
    assert moved.std() > 1e-3


def test_the_key_and_the_step_decide_the_rounding():
    """So a resumed run rounds as the one that went on; a skipped step draws nothing."""
    optimizer = optax.adamw(1e-3)
    params = {"a": jnp.ones((8, 8), jnp.bfloat16), "b": jnp.ones((8, 8), jnp.bfloat16)}
    gradient = jax.tree.map(jnp.ones_like, params)
    step = jax.jit(lambda s, loss=1.0: optimizer_step(s, gradient, loss, optimizer)[0])

    def run(seed, turns=3, bad=False):
        state = new_train_state(params, optimizer, rounding=jax.random.key(seed))
        state = step(state, jnp.nan) if bad else state
        for _ in range(turns):
            state = step(state)
        return state

    one = run(0)
    assert flat_bytes(one.params) == flat_bytes(run(0).params)
    assert flat_bytes(one.params) == flat_bytes(run(0, bad=True).params)
    assert flat_bytes(one.params) != flat_bytes(run(1).params)
    assert not np.array_equal(one.params["a"], one.params["b"])
    assert {x.dtype for x in jax.tree.leaves(one.opt_state) if x.ndim} == {jnp.dtype("float32")}


SIZES = {"data=8": dict(data=8, fsdp=1), "mixed": dict(data=2, fsdp=2, tensor=2)}


@pytest.mark.slow
@pytest.mark.parametrize("moments", lanes([True], [False]))
@pytest.mark.parametrize("name", lanes(["data=8"], ["mixed"]))
def test_all_replicas_round_alike(name, moments):
    """Whole weights of several devices, split ones, and split moments: the bits of one device."""
    sizes = SIZES[name]
    optimizer = optax.adamw(1e-3)

    def on(sizes, spread=AS_WEIGHTS):
        devices = jax.devices()[: int(np.prod(list(sizes.values())))]
        model = Model(HELD, make_mesh(**sizes, devices=devices))
        weights = Model(HELD, make_mesh(devices=jax.devices()[:1], fsdp=1)).init(jax.random.key(0))
        state = begun(model, optimizer, jax.device_get(weights), spread)
        return stepped(model, optimizer, state).params

    want, got = on(dict(data=1, fsdp=1)), on(sizes, DataParallel(moments=moments))
    assert flat_bytes(got) == flat_bytes(want)
    for x in jax.tree.leaves(got):
        copies = {}
        for shard in x.addressable_shards:
            copies.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        assert all(len(held) == 1 for held in copies.values())


def test_float16_weights_are_not_trained():
    model = Model(dataclasses.replace(HELD, weight_dtype="float16"), make_mesh(1))
    with pytest.raises(InputError, match="model_settings.weight_dtype='float32'"):
        training_layout(model, optax.sgd(1.0))


@pytest.mark.slow
def test_the_layout_of_training_has_the_key_and_the_scale():
    model = Model(
        dataclasses.replace(HELD, dtype="float16"), make_mesh(1, 1, 1, devices=jax.devices()[:1])
    )
    made = start_training(model, model.init(jax.random.key(0)), optax.adam(1e-3))
    want = training_layout(model, optax.adam(1e-3))
    assert sorted(made.precision) == ["loss_scale", "rounding"]
    for one, like in zip(*map(jax.tree.leaves, (made, want)), strict=True):
        assert (one.shape, one.dtype, one.sharding) == (like.shape, like.dtype, like.sharding)
    gradient = gradient_of(made.params, 0.0)
    assert {x.dtype for x in jax.tree.leaves(gradient)} == {jnp.dtype("bfloat16")}
