"""Every family on every layout of eight devices: the loss, the gradient and the experts' choices of
one device.

The whole matrix is in the slow lane (pytest -m slow tests/models/test_sharding.py); here a layout
that splits every axis but that of experts, of a model that every clone has. Experts over a mesh:
test_experts; latent attention: test_decode_mesh; windows, caps, sinks and a ring: test_attention
and test_attention_ring.
"""

import dataclasses
import functools
import math
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import lanes
from jax.sharding import NamedSharding, PartitionSpec
from sampler_cases import drawn
from test_families import FOLDERS, loaded

from rljax.arrays import place
from rljax.batch import Batch
from rljax.dataflows.steps import compute_logprobs
from rljax.errors import InputError
from rljax.learn import Steps, token_mean
from rljax.learn.matrices import decayed
from rljax.losses.policy import policy_gradient
from rljax.mesh import BATCH_AXES, embedded, make_mesh
from rljax.models.builtin import decoder
from rljax.models.experts import load_metrics
from rljax.models.huggingface import load_params
from rljax.models.model import Model
from rljax.models.trees import flattened
from rljax.roles import Actor, start_training

MESHES = {
    "fsdp=8": dict(fsdp=8),
    "tensor=2": dict(fsdp=1, tensor=2),
    "data=2,fsdp=2,tensor=2": dict(data=2, fsdp=2, tensor=2),
    "context=2": dict(fsdp=1, context=2),
    "fsdp=2,context=2,tensor=2": dict(fsdp=2, context=2, tensor=2),
    "context=8": dict(fsdp=1, context=8),  # more than the heads: a ring
    "expert=4": dict(fsdp=1, expert=4),
    "fsdp=2,expert=2,tensor=2": dict(fsdp=2, expert=2, tensor=2),
}
FAST = {("qwen3", "fsdp=2,context=2,tensor=2")}
TEXT = [name for name in sorted(FOLDERS) if "_vl" not in name]


def packed_rows(rows: int, columns: int = 32) -> Batch:
    """Rows of two or three sequences and padding, all of other lengths."""
    row, column = np.arange(rows)[:, None], np.arange(columns)[None, :]
    first = 5 + row % 7
    second = first + 9 + row % 4
    end = np.minimum(second + 8, columns - 1 - row % 3)
    segments = 1 + (column >= first) + (column >= second)
    segments = np.where(column < end, segments, 0)
    starts = np.where(segments == 3, second, np.where(segments == 2, first, 0))
    fields = dict(
        tokens=np.random.default_rng(5).integers(3, 300, (rows, columns)),
        segment_ids=segments,
        positions=np.where(segments > 0, column - starts, 0),
    )
    mask = (segments > 0) & (column - starts > 0)
    fields = {name: jnp.asarray(x, jnp.int32) for name, x in fields.items()}
    return Batch(**fields, mask=jnp.asarray(mask, jnp.float32))


def loss_and_gradient(model, params, batch):
    """Mean negative log-prob, also of a scalar head; its gradient; what the experts did."""

    def loss(params, batch):
        if model.head == "scalar":
            return jnp.sum(batch.mask * model.values(params, batch) ** 2), {}
        logprobs, _, load = model.read(params, batch)
        return -jnp.sum(batch.mask * logprobs) / jnp.sum(batch.mask), load

    (value, load), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch)
    return float(value), jax.device_get(gradient), jax.device_get(load)


@functools.cache
def on_one_device(name: str):
    _, model, params, _ = loaded(name)
    return loss_and_gradient(model, params, packed_rows(8))


def cases():
    for name in TEXT:
        for mesh in MESHES:
            if "expert" in mesh and not loaded_experts(name):
                continue
            slow = () if (name, mesh) in FAST else pytest.mark.slow
            yield pytest.param(name, mesh, marks=slow)


@functools.cache
def loaded_experts(name: str) -> bool:
    return "experts" in (FOLDERS[name] / "config.json").read_text()


@pytest.mark.parametrize(("name", "mesh"), list(cases()))
def test_loss_and_gradient_of_one_device(name, mesh):
    sizes = MESHES[mesh]
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    folder, plain, _, _ = loaded(name)
    model = Model(plain.config, make_mesh(**sizes, devices=devices), plain.head)
    params = load_params(folder, model)
    spread = [x for x in jax.tree.leaves(params) if not x.sharding.is_fully_replicated]
    assert spread or set(sizes) <= {"fsdp", "context"} and sizes.get("fsdp", 1) == 1
    value, gradient, load = loss_and_gradient(model, params, place(packed_rows(8), model.mesh))
    want_value, want_gradient, want_load = on_one_device(name)
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    want = flattened(want_gradient)
    top = max(np.abs(x).max() for x in want.values())
    for path, x in flattened(gradient).items():
        np.testing.assert_allclose(x, want[path], atol=2e-5 * top, err_msg=str(path))
    assert bool(load) == loaded_experts(name)
    if load:  # the very same choices, and no token dropped
        np.testing.assert_array_equal(load["tokens"], want_load["tokens"])
        kept = np.sum(packed_rows(8).segment_ids > 0) * plain.config.experts.per_token
        np.testing.assert_array_equal(np.sum(load["tokens"], axis=-1), kept)


@pytest.mark.slow
def test_the_load_of_experts_is_that_of_all_tokens_however_the_rows_are_split():
    sizes = dict(layers=1, embed=16, mlp=16, heads=2, kv_heads=2, head_dim=8)
    config = decoder(300, **sizes, experts=4, experts_per_token=2)
    model = Model(config, make_mesh(devices=jax.devices()[:1]))
    params, batch, optimizer = drawn(model), packed_rows(8), optax.sgd(0.1)
    actor = Actor(start_training(model, params, optimizer), model, optimizer, 1.0)
    want = load_metrics(jax.jit(model.read)(params, batch)[2])
    _, got = jax.jit(actor.logprobs_and_load, static_argnums=1)(batch, 2)
    assert {"expert_load_max", "router_entropy", "load_balance_loss"} <= set(got)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)
    assert got["expert_load_max"] > 1 > got["expert_load_min"]
    # The stage that every online dataflow begins with hands them on.
    cfg = SimpleNamespace(
        steps=Steps(rows=8, microbatch_rows=4),
        old_logprobs="recomputed",
        advantage=lambda batch: batch,
    )
    _, seen = compute_logprobs(batch, cfg, actor=actor)
    np.testing.assert_allclose(seen["expert_load_max"], want["expert_load_max"], rtol=1e-5)
    # So does an update whose own forward pass gives the old log-probs.
    options = dict(steps=cfg.steps, reduction=token_mean, on_policy=lambda batch: {})
    _, seen = jax.jit(lambda actor, b: actor.update(b, policy_gradient, **options))(
        actor, batch.replace(advantages=batch.mask)
    )
    for name, value in want.items():
        np.testing.assert_allclose(seen[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "sizes",
    [dict(data=2, fsdp=2, tensor=2), dict(data=2, fsdp=4), dict(fsdp=2, expert=2, context=2)],
)
def test_no_activations_are_replicated_to_look_tokens_up(sizes, capfd):
    """XLA says so, on the error output, where it finds no other way."""
    mesh = make_mesh(**sizes)

    def place(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes))
        )

    table = place((64, 32), jnp.float32, "tensor", "fsdp")
    weight = place((32, 32), jnp.float32, "fsdp", "tensor")
    tokens = place((16, 8), jnp.int32, BATCH_AXES, "context")

    def loss(table, weight, tokens):
        x = embedded(lambda ids: jnp.take(table, ids, axis=0), tokens, mesh)
        return jnp.sum(jnp.tanh(x @ weight))

    gradient = jax.jit(jax.grad(loss, (0, 1)), out_shardings=(table.sharding, weight.sharding))
    gradient.lower(table, weight, tokens).compile()
    assert "rematerialization" not in capfd.readouterr().err


@pytest.mark.slow
def test_weight_decay_leaves_norms_biases_sinks_and_corrections_alone():
    for name in ("gpt_oss", "deepseek_v3", "qwen2"):
        params = loaded(name)[2]
        mask = flattened(decayed(params))
        for path, x in flattened(params).items():
            layers = path[0] == "layers"
            vector = x.ndim - layers < 2 or path[-1] == "bias" or path[-1].endswith("_bias")
            assert mask[path] != vector, (name, path)


@pytest.mark.slow
@pytest.mark.parametrize("name", lanes(["gpt_oss"], ["qwen3", "deepseek_v3"]))
def test_packed_sequences_are_what_they_are_alone(name):
    _, model, params, _ = loaded(name)
    batch = packed_rows(3)
    packed = jax.jit(model.logprobs)(params, batch)[0]
    for row in range(3):
        for segment in (1, 2, 3):
            at = np.flatnonzero(np.asarray(batch.segment_ids[row]) == segment)
            tokens = jnp.zeros((1, batch.tokens.shape[1]), jnp.int32)
            tokens = tokens.at[0, : at.size].set(batch.tokens[row, at])
            here = (jnp.arange(batch.tokens.shape[1]) < at.size).astype(jnp.int32)[None]
            alone = Batch(
                tokens=tokens,
                segment_ids=here,
                positions=jnp.arange(batch.tokens.shape[1])[None] * here,
                mask=here.astype(jnp.float32),
            )
            want = jax.jit(model.logprobs)(params, alone)[0][0, 1 : at.size]
            np.testing.assert_allclose(packed[row, at[1:]], want, atol=2e-5)


def test_experts_that_do_not_divide_are_refused_with_the_fix():
    mesh = make_mesh(fsdp=1, expert=3, devices=jax.devices()[:3])
    folder, plain, _, _ = loaded("mixtral")
    with pytest.raises(InputError, match="mesh.expert=3.*divisors of"):
        load_params(folder, dataclasses.replace(plain, mesh=mesh))


def training_jaxpr(remat: str, **sizes) -> str:
    """The gradient of log-probs in bfloat16, traced: three layers with embed 64 and mlp 96."""
    config = decoder(256, layers=3, embed=64, mlp=96, heads=2, kv_heads=2, head_dim=16)
    config = dataclasses.replace(config, dtype="bfloat16", remat=remat)
    model = Model(config, make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())]))

    def total(params, batch):
        return jnp.sum(model.logprobs(params, batch)[0])

    return str(jax.make_jaxpr(jax.grad(total))(model.abstract(), packed_rows(8)))


@pytest.mark.parametrize("remat", ["none", "dots"])
def test_weights_are_gathered_over_fsdp_for_each_product_and_not_kept(remat):
    gather = r"bf16\[64,96\]\S* = sharding_constraint"
    split = training_jaxpr(remat, fsdp=4, tensor=2)
    # gate and up, forward and again backward, and their gradients
    assert len(re.findall(gather, split)) >= 4
    assert "PartitionSpec(None, 'tensor')" in split or "P(None, 'tensor')" in split
    assert "bf16[3,64,96]" not in split  # nothing gathered is kept of all layers
    assert not re.findall(gather, training_jaxpr(remat, fsdp=1, tensor=2))


@pytest.mark.parametrize("rows", lanes([7], [1]))
def test_a_verb_answers_in_order_for_rows_that_the_devices_do_not_divide(rows):
    """Log-probs of 1 and 7 rows on eight devices are those of one device, row by row."""
    config = decoder(300, layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16)
    weights = jax.device_get(
        Model(config, make_mesh(devices=jax.devices()[:1])).init(jax.random.key(1))
    )

    def logprobs(mesh):
        model, optimizer = Model(config, mesh), optax.sgd(1.0)
        params = jax.tree.map(jax.device_put, weights, model.shardings())
        actor = Actor(start_training(model, params, optimizer), model, optimizer)
        batch = place(packed_rows(rows), mesh)
        return np.asarray(jax.jit(lambda actor, batch: actor.logprobs(batch))(actor, batch))

    one, several = logprobs(make_mesh(devices=jax.devices()[:1])), logprobs(make_mesh(data=8))
    assert one.shape == (rows, 32) and len({row.tobytes() for row in one}) == rows
    np.testing.assert_allclose(several, one, atol=2e-6)
