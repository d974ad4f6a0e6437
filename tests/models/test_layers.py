"""Linear maps: products of bfloat16 numbers on one CPU device."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes

from rljax.batch import batch_from_rows
from rljax.mesh import make_mesh
from rljax.models.layers import _summed_wide, bfloat16_product, project_transposed
from rljax.models.model import Model
from rljax.plan.flops import work
from tests.helpers.sampler_cases import tiny

SHAPES = [(1, 8, 5), (2, 3, 4), (64, 16, 1), (7, 13, 17), (128, 64, 96)]


def numbers(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def same(found, wanted):
    """The numbers of two programs agree to the last place of bfloat16 (8 bits) or two."""
    found, wanted = (np.asarray(x, np.float32) for x in (found, wanted))
    np.testing.assert_allclose(found, wanted, rtol=2**-7, atol=2**-7 * np.abs(wanted).max())


@pytest.mark.parametrize("shape", lanes([SHAPES[0], SHAPES[3]], [*SHAPES[1:3], SHAPES[4]]))
def test_a_bfloat16_product_and_its_gradient_are_those_of_the_plain_one(shape):
    n, k, m = shape
    x, w, slope = numbers(n, k), numbers(k, m, seed=1), numbers(n, m, seed=2)

    def loss(product):
        return lambda x, w: jnp.sum(product(x, w).astype(jnp.float32) * slope)

    found = jax.jit(jax.value_and_grad(loss(bfloat16_product), (0, 1)))(x, w)
    wanted = jax.jit(jax.value_and_grad(loss(jnp.matmul), (0, 1)))(x, w)
    jax.tree.map(same, found, wanted)
    same(project_transposed(x[None], w.T)[0], x @ w)


@pytest.mark.slow
def test_a_bfloat16_product_runs_wherever_xla_may_turn_it():
    """A transposition that is folded into such a product makes one that the back end refuses."""
    x, w = numbers(96, 64), numbers(64, 48, seed=1)
    wanted = x @ w
    turned = jax.jit(lambda x, w: _summed_wide(x.T, w, 0).T)(x.T, w)
    same(turned.T, wanted)
    for turn_x in (False, True):
        for turn_w in (False, True):
            for turn_out in (False, True):

                def run(a, b, turned=(turn_x, turn_w, turn_out)):
                    a, b = a.T if turned[0] else a, b.T if turned[1] else b
                    out = bfloat16_product(a, b)
                    return out.T if turned[2] else out

                found = jax.jit(run)(x.T if turn_x else x, w.T if turn_w else w)
                same(found.T if turn_out else found, wanted)
    many = jax.jit(jax.vmap(bfloat16_product, in_axes=(0, None)))(jnp.stack([x, x]), w)
    same(many[1], wanted)
    looped = jax.lax.scan(lambda c, one: (c, jax.checkpoint(bfloat16_product)(x, one)), 0, w[None])
    same(looped[1][0], wanted)


@pytest.mark.slow
def test_the_maps_of_a_bfloat16_model_reach_the_instructions_for_bfloat16():
    """Forwards and backwards, all products with weights take bfloat16 and give float32: only these
    does XLA leave to the processor's own instructions on a CPU."""
    model = dataclasses.replace(tiny(dtype="bfloat16"), mesh=make_mesh(devices=jax.devices()[:1]))
    on_two = dataclasses.replace(model, mesh=make_mesh(devices=jax.devices()[:2]))
    maps = 7 * model.config.layers  # q, k, v, out; gate, up, down
    assert kinds(model)["bfloat16 -> float32"] >= 3 * maps
    assert not kinds(model)["bfloat16 -> bfloat16"]
    assert kinds(on_two)["bfloat16 -> bfloat16"] >= 3 * maps


def kinds(model: Model) -> Counter:
    """How often the model's gradient has products of two matrices, by their dtypes."""
    rows = jnp.ones((2, 8), jnp.int32)
    batch = batch_from_rows(rows, jnp.full((2,), 8), jnp.ones((2, 8)))

    def loss(p):
        return jnp.sum(model.logprobs(p, batch)[0])

    made = work(jax.jit(jax.grad(loss)).trace(model.abstract()).jaxpr, platform="cpu").products
    found = Counter()
    for one, count in made.items():
        if len(one.left) == 2:
            found[f"{one.dtype} -> {one.out_dtype}"] += count
    return found
