"""A decode step on eight devices says what one device says, whatever the mesh: weights stay where
the trainer holds them, and what is summed over fsdp, tensor and expert are activations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes

from rljax.mesh import make_mesh
from rljax.models import cache
from rljax.models.builtin import decoder
from rljax.models.config import LatentConfig
from rljax.models.experts import ExpertsConfig
from rljax.models.model import Model

VOCAB, STEPS = 24, 2
MESHES = {
    "fsdp=8": dict(fsdp=8),
    "fsdp=2 x tensor=4": dict(fsdp=2, tensor=4),
    "data=2 x tensor=4": dict(data=2, fsdp=1, tensor=4),
    "data=2 x fsdp=2 x expert=2": dict(data=2, fsdp=2, expert=2),
    "fsdp=2 x expert=2 x tensor=2": dict(fsdp=2, expert=2, tensor=2),
}


def config(family: str):
    made = decoder(VOCAB, layers=1, embed=16, mlp=32, heads=4, kv_heads=4, head_dim=8, init_std=0.4)
    if "latent" in family:
        latent = LatentConfig(kv_rank=8, nope_dim=8, rope_dim=4, value_dim=8, q_rank=8)
        made = dataclasses.replace(made, latent=latent, head_dim=4, qk_norm=False)
    if family in ("experts", "latent experts"):
        experts = ExpertsConfig(4, 2, 16, expert_bias=True, router_bias=True, shared_mlp=8)
        kinds = tuple(dataclasses.replace(kind, experts=True) for kind in made.kinds)
        return dataclasses.replace(made, experts=experts, kinds=kinds)
    return made


@functools.cache
def weights(family: str):
    """Random in every entry: biases, too, which start at 0."""
    model = Model(config(family), make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    params = model.init(jax.random.key(1))
    leaves, tree = jax.tree.flatten(params)
    rng, leaves = np.random.default_rng(2), jax.device_get(leaves)
    noise = [x + 0.1 * rng.standard_normal(x.shape, np.float32) for x in leaves]
    return jax.tree.unflatten(tree, noise)


def logits(family: str, rows: int, **sizes) -> np.ndarray:
    """Of STEPS decode steps in empty slots of different lengths: [STEPS, rows, V]."""
    devices = jax.devices() if sizes else jax.devices()[:1]
    model = Model(config(family), make_mesh(**(sizes or dict(fsdp=1)), devices=devices))
    tokens = np.random.default_rng(5).integers(0, VOCAB, (STEPS, rows)).astype(np.int32)

    @jax.jit
    def run(params, tokens):
        unstacked = model.unstack(params)
        caches, out = model.empty_caches(rows, STEPS), []
        for step, token in enumerate(tokens):
            columns = jnp.maximum(step - jnp.arange(rows) % 2, 0)
            z, caches = model.decode_step(unstacked, token, columns, caches)
            out.append(z)
        return jnp.stack(out)

    return np.asarray(run(jax.device_put(weights(family), model.shardings()), tokens))


FAST = [("latent experts", "fsdp=2 x expert=2 x tensor=2")]
SLOW = [("latent", "fsdp=2 x tensor=4"), ("experts", "fsdp=2 x expert=2 x tensor=2")]
SLOW += [("dense", "fsdp=2 x tensor=4"), ("dense", "data=2 x tensor=4"), ("dense", "fsdp=8")]
SLOW += [("latent", "fsdp=8")]
SLOW += [("experts", "data=2 x fsdp=2 x expert=2"), ("experts", "fsdp=2 x tensor=4")]


@pytest.mark.parametrize("case", lanes(FAST, SLOW), ids=" ".join)
def test_a_step_on_a_mesh_says_what_one_device_says(case):
    family, mesh = case
    rows = 3 if "latent" in family else 8  # 3 rows divide by no mesh
    one, eight = logits(family, rows), logits(family, rows, **MESHES[mesh])
    assert np.abs(one).max() > 1  # not a model that says nothing
    np.testing.assert_allclose(eight, one, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("family", ["latent", "dense"])
def test_heads_that_share_or_fill_the_lanes_of_a_tpu_say_the_same(family, monkeypatch):
    plain = logits(family, 3)
    monkeypatch.setattr(cache, "order_for", lambda mesh: "tokens")
    monkeypatch.setattr(cache, "lanes_for", lambda mesh: 128)
    np.testing.assert_allclose(logits(family, 3), plain, atol=2e-5, rtol=2e-5)


PAIRS = lanes(["fsdp=2 x expert=2 x tensor=2"], ["fsdp=2 x tensor=4", "fsdp=8"])


@pytest.mark.parametrize("mesh", PAIRS)
def test_keys_and_values_in_one_array_say_the_same(mesh, monkeypatch):
    """The cache of a TPU, split by rows and kv heads, of which two share 16 lanes where a device
    has two; 3 rows are whole on every device."""
    rows = 3 if mesh == "fsdp=8" else 8
    plain = logits("dense", rows)
    monkeypatch.setattr(cache, "order_for", lambda mesh: "tokens")
    monkeypatch.setattr(cache, "pairs_for", lambda *asked: True)
    monkeypatch.setattr(cache, "lanes_for", lambda mesh: 16)
    np.testing.assert_allclose(logits("dense", rows, **MESHES[mesh]), plain, atol=2e-5, rtol=2e-5)
