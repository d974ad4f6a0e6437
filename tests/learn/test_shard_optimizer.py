"""ZeRO-1: moments split over data, weights whole: the same steps, and an eighth of the moments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes
from test_optimizers import CONFIG, gradient_of, per_device
from tiny_run import flat_bytes

from rljax.checkpoint.checkpoint import Checkpoints
from rljax.config import OptimizerConfig
from rljax.learn.optimizers import make_optimizer
from rljax.learn.state import DataParallel, optimizer_step
from rljax.mesh import make_mesh
from rljax.models.model import Model
from rljax.plan.memory import split_bytes
from rljax.roles import start_training, training_layout
from rljax.roles.layout import step_layout
from rljax.setup.held import held_bytes

SPLIT = DataParallel(moments=True)
MESHES = {"data=8": dict(data=8, fsdp=1), "data=2,fsdp=2,tensor=2": dict(data=2, fsdp=2, tensor=2)}


def on(sizes: dict) -> Model:
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return Model(CONFIG, make_mesh(**sizes, devices=devices))


@pytest.fixture(scope="module")
def weights():
    return jax.device_get(on(dict(data=1, fsdp=1)).init(jax.random.key(0)))


def begun(model, optimizer, weights, spread, **how):
    params = jax.device_put(weights, model.shardings())
    return start_training(model, params, optimizer, spread=spread, **how)


def stepped(model, optimizer, state, steps=2):
    """The state after some steps, where programs keep it."""
    layout = step_layout(model, state)

    def step(state):
        gradient = gradient_of(state.params, state.step.astype(jnp.float32))
        return optimizer_step(state, gradient, jnp.ones(()), optimizer, layout=layout)[0]

    step = jax.jit(step, out_shardings=jax.tree.map(lambda x: x.sharding, state))
    for _ in range(steps):
        state = step(state)
    return state


@pytest.mark.parametrize("mesh", lanes(["data=8"], ["data=2,fsdp=2,tensor=2"]))
@pytest.mark.parametrize("name", lanes(["adamw"], ["adafactor(min_dim_size_to_factor=16)", "muon"]))
def test_a_step_with_split_moments_is_the_step_of_whole_ones(name, mesh, weights):
    optimizer = make_optimizer(OptimizerConfig(name=name, lr=1e-2, weight_decay=0.1), 6)
    model = on(MESHES[mesh])
    whole = begun(model, optimizer, weights, DataParallel())
    split = begun(model, optimizer, weights, SPLIT)
    data = MESHES[mesh]["data"]
    # A device holds its share of the moments, and as much of the weights as before.
    assert per_device(split.params) == per_device(whole.params)
    assert per_device(split.opt_state) <= per_device(whole.opt_state) / data * 1.1 + 1000
    assert per_device(split.opt_state) == held_bytes(
        training_layout(model, optimizer, spread=SPLIT).opt_state
    )
    want, got = stepped(model, optimizer, whole), stepped(model, optimizer, split)
    for a, b, start in zip(*map(jax.tree.leaves, (got.params, want.params, weights)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert np.max(np.abs(b - start)) > 1e-5
    for one, like in zip(*map(jax.tree.leaves, (got, split)), strict=True):
        assert one.sharding.is_equivalent_to(like.sharding, one.ndim)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_formula_of_each_stage_is_what_the_devices_hold(stage, weights):
    sizes = dict(data=1, fsdp=8) if stage == 3 else dict(data=8, fsdp=1)
    model, optimizer = on(sizes), make_optimizer(OptimizerConfig(), 0)
    state = begun(model, optimizer, weights, DataParallel(moments=stage == 1))
    count = sum(x.size for x in jax.tree.leaves(weights))
    want = split_bytes(count, 8, stage, weight_bytes=4, gradient_bytes=0, optimizer_bytes=8)
    assert per_device((state.params, state.opt_state)) == pytest.approx(want, rel=0.1)


@pytest.mark.slow
def test_a_checkpoint_goes_from_one_layout_to_the_other(weights, tmp_path):
    optimizer = make_optimizer(OptimizerConfig(lr=1e-2), 6)
    spread = Model(CONFIG, make_mesh(data=4, fsdp=2))
    alone = on(dict(data=1, fsdp=1))
    split = stepped(spread, optimizer, begun(spread, optimizer, weights, SPLIT))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, split, {})
    for model, how in (
        (spread, DataParallel()),
        (alone, DataParallel()),
        (on(MESHES["data=8"]), SPLIT),
    ):
        fresh = begun(model, optimizer, weights, how)
        back = checkpoints.read_arrays(2, fresh)
        assert flat_bytes(jax.device_get(back)) == flat_bytes(jax.device_get(split))
        for one, like in zip(*map(jax.tree.leaves, (back, fresh)), strict=True):
            assert one.sharding.is_equivalent_to(like.sharding, one.ndim)


@pytest.mark.slow
def test_split_moments_may_wait_on_the_host(weights):
    optimizer, model = make_optimizer(OptimizerConfig(lr=1e-2), 6), on(MESHES["data=8"])
    here = stepped(model, optimizer, begun(model, optimizer, weights, SPLIT))
    waiting = begun(model, optimizer, weights, SPLIT, optimizer_on_host=True)
    there = stepped(model, optimizer, waiting)
    moments = [x for x in jax.tree.leaves(there.opt_state) if x.ndim]
    assert {x.sharding.memory_kind for x in moments} == {"pinned_host"}
    for a, b in zip(*map(jax.tree.leaves, (there.params, here.params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
