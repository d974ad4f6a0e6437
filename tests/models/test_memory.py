"""Rematerialisation and memory of the hosts: what is kept, where it lies, and equal numbers."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import golden, lanes
from jax.sharding import NamedSharding, PartitionSpec
from tiny_run import checkpoint_bytes, flat_bytes, metrics_rows, newest_step, tiny_config

from rljax.batch import batch_from_rows
from rljax.errors import InputError
from rljax.learn import state as train_state
from rljax.mesh import check_host_memory, in_device_memory, make_mesh
from rljax.models.builtin import decoder
from rljax.models.huggingface import load_config, load_params
from rljax.models.model import Model
from rljax.models.remat import POLICIES
from rljax.roles import start_training, training_layout
from rljax.setup import build as build_setup
from rljax.setup import role_arrays
from rljax.training import train
from rljax.training.run import Run
from rljax.validation import validate


def kinds(tree) -> set[str]:
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


# -- rematerialisation


@pytest.fixture(scope="module", params=lanes(["qwen3"], ["qwen3_moe"]))
def family(request):
    folder = golden("hf", request.param)
    model = Model(load_config(folder, remat="none"), make_mesh(2, 2, 1, devices=jax.devices()[:4]))
    tokens = jax.random.randint(jax.random.key(0), (4, 12), 0, model.config.vocab_size)
    batch = batch_from_rows(tokens, jnp.array([12, 9, 5, 12]), jnp.ones((4, 12), jnp.float32))
    return model, load_params(folder, model), batch


def with_remat(model: Model, policy: str) -> Model:
    return dataclasses.replace(model, config=dataclasses.replace(model.config, remat=policy))


def gradient_of(model: Model, batch):
    """A loss whose value depends on every position."""

    def loss(params):
        return jnp.sum(model.logprobs(params, batch)[0] * batch.mask) / 40

    return jax.value_and_grad(loss)


@pytest.mark.slow
def test_no_policy_changes_loss_or_gradient(family):
    model, params, batch = family
    want = jax.jit(gradient_of(model, batch))(params)
    scale = max(float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(want[1]))
    for policy in POLICIES[1:]:
        got = jax.jit(gradient_of(with_remat(model, policy), batch))(params)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * scale, err_msg=policy)


def recomputed_products(model: Model, params, batch) -> dict[str, int]:
    """How many matrix products of each kind the forward and backward pass write down: a layer's
    body is written once, whatever the depth."""
    text = str(jax.make_jaxpr(gradient_of(model, batch))(params))
    return {
        "products": len(re.findall(r"\bdot_general\[", text)),
        "softmaxes": len(re.findall(r"= exp ", text)),
        "scans": len(re.findall(r"\bscan\[", text)),
        "to_host": len(re.findall(r"<host>\[", text)),
    }


def test_what_each_policy_computes_again(family):
    model, params, batch = family
    if model.config.experts:
        pytest.skip("the products of experts are the business of rljax.models.experts")
    count = {p: recomputed_products(with_remat(model, p), params, batch) for p in POLICIES}
    products = {p: count[p]["products"] for p in POLICIES}
    # A layer has 7 products with weights (q k v o gate up down) and 2 of attention (scores, out).
    # The last of a layer, down, feeds nothing that the backward pass reads.
    assert products["full"] == products["offload"] == products["none"] + 8
    # The output of attention and the sums of its softmax are kept; the backward pass of attention
    # computes the scores again in any case.
    assert products["attention"] == products["full"] - 2
    assert products["dots"] == products["none"]
    assert len({c["scans"] for c in count.values()}) == 1
    hosts = {p: c["to_host"] > 0 for p, c in count.items()}
    assert hosts == {p: p == "offload" for p in POLICIES}


@pytest.mark.slow
def test_without_a_policy_a_layer_keeps_its_products_and_little_else():
    """What the backward pass needs: the input of a layer, the products with weights but the last,
    the output of attention. Kept: at most a tenth more."""
    config = decoder(50, layers=1, embed=64, mlp=192, heads=4, kv_heads=2, head_dim=16)
    model = Model(config, make_mesh(1, 1, 1, devices=jax.devices()[:1]), "scalar")
    rows, tokens = 19, 53  # no weight has a multiple of so many numbers
    ids = jnp.ones((rows, tokens), jnp.int32)
    batch = batch_from_rows(ids, jnp.full((rows,), tokens), jnp.ones((rows, tokens)))

    def backward(policy):
        def values(params):
            return with_remat(model, policy).values(params, batch)

        return jax.eval_shape(lambda params: jax.vjp(values, params)[1], model.abstract())

    def per_token(policy):
        leaves = [leaf.size for leaf in jax.tree.leaves(backward(policy))]
        return sum(size for size in leaves if size % (rows * tokens) == 0) / (rows * tokens)

    layer = 64 + 64 + 2 * 32 + 64 + 64 + 2 * 192
    around = per_token("full") - 64  # the final norm, the head, the positions
    assert layer <= per_token("none") - around <= 1.1 * layer


# -- memory of the hosts


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


@pytest.fixture(scope="module")
def toy():
    """Params, a linear model, and rows on a mesh of 8."""
    mesh = make_mesh()
    layout = NamedSharding(mesh, PartitionSpec("fsdp"))
    params = {"w": jax.device_put(jnp.linspace(-1.0, 1.0, 64).reshape(16, 4), layout)}
    return params, layout


@pytest.mark.parametrize("jitted", lanes([True], [False]))
@pytest.mark.parametrize("gradient", [0.5, jnp.nan])
def test_a_step_fetches_the_moments_and_sends_them_back(toy, jitted, gradient):
    params, layout = toy
    state = train_state.new_train_state(params, OPTIMIZER)
    host = layout.with_memory_kind("pinned_host")

    def send(x):
        return jax.device_put(x, host) if x.ndim else x

    waiting = dataclasses.replace(state, opt_state=jax.tree.map(send, state.opt_state))
    gradients = jax.tree.map(lambda w: gradient * jnp.ones_like(w), params)

    def step(s):
        return train_state.optimizer_step(s, gradients, jnp.ones(()), OPTIMIZER)[0]

    step = jax.jit(step) if jitted else step
    got, want = waiting, state
    for _ in range(2):
        got, want = step(got), step(want)
    moments = [x for x in jax.tree.leaves(got.opt_state) if x.ndim]
    assert len(moments) == 2 and kinds(moments) == {"pinned_host"}
    assert kinds(got.params) == kinds(want.opt_state) == {"device"}
    assert flat_bytes(got) == flat_bytes(want)
    moved = float(jnp.max(jnp.abs(got.params["w"] - params["w"])))
    assert (moved > 1e-3) == bool(jnp.isfinite(gradient)) and int(got.skipped) in (0, 2)


def test_fetching_touches_only_what_waits(toy):
    params, layout = toy
    host = jax.device_put(params["w"], layout.with_memory_kind("pinned_host"))
    fetched = in_device_memory({"a": params["w"], "b": host})
    assert fetched["a"] is params["w"] and kinds(fetched) == {"device"}
    np.testing.assert_array_equal(fetched["b"], params["w"])
    assert fetched["b"].sharding.is_equivalent_to(layout, 2)


def test_the_layout_of_training_is_what_start_training_makes(family):
    model, params, _ = family
    for on_host in (False, True):
        want = training_layout(model, OPTIMIZER, optimizer_on_host=on_host)
        made = start_training(model, params, OPTIMIZER, optimizer_on_host=on_host)
        for x, like in zip(jax.tree.leaves(made), jax.tree.leaves(want), strict=True):
            assert (x.shape, x.dtype) == (like.shape, like.dtype)
            assert x.sharding.is_equivalent_to(like.sharding, x.ndim)
            assert x.sharding.memory_kind == like.sharding.memory_kind
        moments = [x for x in jax.tree.leaves(made.opt_state) if x.ndim]
        assert kinds(moments) == {"pinned_host" if on_host else "device"}


def test_devices_without_such_memory_are_refused():
    class Bare:
        platform = "bare"

        def addressable_memories(self):
            return [jax.devices()[0].default_memory()]

    mesh = make_mesh()
    check_host_memory(mesh, "memory.optimizer_on_host")
    bare = type("BareMesh", (), {"devices": np.array([Bare()])})()
    with pytest.raises(
        InputError, match="memory.optimizer_on_host needs pinned_host.*bare.*device"
    ):
        check_host_memory(bare, "memory.optimizer_on_host")


ON_HOST = dict(memory__optimizer_on_host=True, memory__reference_on_host=True)


def short_run(folder, **fields):
    return tiny_config(
        folder,
        steps=2,
        sft__steps=2,
        algorithm__kl_in_loss=0.05,
        evaluate__every_steps=0,
        evaluate__prompts=4,
        checkpoint__every_steps=1,
        checkpoint__keep=9,
        **fields,
    )


def places(roles) -> dict[str, set[str]]:
    state = roles["actor"].state
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    held = {"moments": moments, "reference": roles["reference"].params, "actor": state.params}
    return {name: kinds(arrays) for name, arrays in held.items()}


@pytest.mark.slow
def test_a_run_with_memory_on_the_host_is_the_run_without(tmp_path):
    """Both phases on 8 devices, to rounding (the update is fused otherwise); and a resume, bitwise,
    in which everything lies where it lay."""
    off, on = tmp_path / "off", tmp_path / "on"
    train(short_run(off))
    train(short_run(on, **ON_HOST))
    last = newest_step(off)
    got, want = (checkpoint_bytes(folder, last) for folder in (on, off))
    assert got.keys() == want.keys() and len(got) > 40
    for name, (dtype, shape, data) in got.items():
        assert (dtype, shape) == want[name][:2]
        arrays = (np.frombuffer(x, dtype) for x in (data, want[name][2]))
        np.testing.assert_allclose(*arrays, rtol=1e-4, atol=1e-6, err_msg=name)
    rows, wanted_rows = (
        [(r["step"], r["loss"], r["grad_norm"]) for r in metrics_rows(folder)]
        for folder in (on, off)
    )
    assert len(rows) == 4
    for row, wanted_row in zip(rows, wanted_rows, strict=True):
        assert row == pytest.approx(wanted_row, rel=1e-4, abs=1e-6)
    wanted = {"moments": {"pinned_host"}, "reference": {"pinned_host"}, "actor": {"device"}}
    with Run(build_setup(short_run(on, **ON_HOST)), on) as run:
        run.load(last)
        assert places(run.roles) == wanted
        end = flat_bytes(role_arrays(run.roles))
        run.load(last - 1)
        assert flat_bytes(role_arrays(run.roles)) != end
        donated = [x for x in jax.tree.leaves(run.roles["actor"].state.opt_state) if x.ndim]
        run.step()
        assert all(x.is_deleted() for x in donated)
        assert places(run.roles) == wanted
        assert flat_bytes(role_arrays(run.roles)) == end


def test_a_setting_that_does_nothing_is_warned_about(tmp_path):
    config = tiny_config(tmp_path, memory__reference_on_host=True)
    assert [w for w in validate(config) if "memory.reference_on_host does nothing" in w]
    config.algorithm.kl_in_loss = 0.05
    assert not [w for w in validate(config) if "memory" in w]
