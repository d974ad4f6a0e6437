"""Samplers of several runs in one program: branches and loops are one for all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes
from jax.extend.core import jaxprs_in_params

from rljax.mesh import RUNS, make_mesh
from rljax.models.builtin import decoder
from rljax.models.model import Model
from rljax.sampler.draw import Rules, sample
from rljax.sampler.whole_batch import Shape, rollout

RUN_COUNT, ROWS, VOCAB = 3, 2, 11


def rules_of(top_k: int) -> Rules:
    """Of all runs: temperature 0.7, the last run alone with this top_k."""
    shape = (RUN_COUNT, ROWS)
    cut = jnp.zeros(shape, jnp.int32).at[-1].set(top_k)
    stop = jnp.full((*shape, 1), -1, jnp.int32)
    return Rules(jnp.full(shape, 0.7), cut, jnp.ones(shape), jnp.zeros(shape), stop)


def inputs():
    logits = jax.random.normal(jax.random.key(0), (RUN_COUNT, ROWS, VOCAB))
    keys = jax.random.key_data(jax.random.split(jax.random.key(1), (RUN_COUNT, ROWS)))
    return logits, keys


def draw(logits, keys, rules):
    return sample(logits, keys, jnp.arange(ROWS), rules)


def operations(function, *arrays) -> list:
    """The operations of a program, also those inside of loops and branches."""

    def walked(jaxpr):
        for equation in jaxpr.eqns:
            yield equation
            for inner in jaxprs_in_params(equation.params):
                yield from walked(inner)

    return [*walked(jax.make_jaxpr(function)(*arrays).jaxpr)]


def branches(function, *arrays) -> int:
    return sum(one.primitive.name == "cond" for one in operations(function, *arrays))


def conditions(function, *arrays) -> set[tuple]:
    """The shapes of the conditions of all loops."""
    loops = [one for one in operations(function, *arrays) if one.primitive.name == "while"]
    return {loop.params["cond_jaxpr"].out_avals[0].shape for loop in loops}


@pytest.mark.parametrize("top_k", [0, 2])
def test_a_run_draws_what_it_draws_by_itself(top_k):
    logits, keys, rules = *inputs(), rules_of(top_k)
    together = jax.jit(jax.vmap(draw, axis_name=RUNS))(logits, keys, rules)
    alone = jax.jit(draw)
    for i in range(RUN_COUNT):
        one = alone(logits[i], keys[i], jax.tree.map(lambda x, i=i: x[i], rules))
        jax.tree.map(lambda x, y, i=i: np.testing.assert_allclose(x[i], y, 1e-6), together, one)


def test_a_branch_stays_one():
    """By a condition of each run, vmap would take every branch."""
    given = (*inputs(), rules_of(2))
    alone = branches(draw, *jax.tree.map(lambda x: x[0], given))
    assert branches(jax.vmap(draw, axis_name=RUNS), *given) == alone > 0
    assert branches(jax.vmap(draw), *given) < alone


# Slots that are refilled, and all rows at once.
@pytest.mark.parametrize("slots", lanes([ROWS], [2 * ROWS]))
def test_a_loop_has_one_condition(slots):
    """By a condition of each run, XLA would choose between the old and the new value of all that a
    loop carries, caches too, in each round."""
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    sizes = dict(layers=1, embed=8, mlp=8, heads=1, kv_heads=1, head_dim=8)
    model, shape = Model(decoder(VOCAB, **sizes), mesh), Shape(2, slots, 4, "float32")
    prompts, lengths = jnp.zeros((ROWS, 3), jnp.int32), jnp.full(ROWS, 3, jnp.int32)

    def sampled(params, key, rules):
        by_row = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), rules)
        fixed = (jnp.int32(0), None, None, None)
        return rollout(model, shape, params, prompts, lengths, key, by_row, *fixed)

    of_all = (model.abstract(), jax.ShapeDtypeStruct((2,), jnp.uint32))
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((RUN_COUNT, *x.shape), x.dtype), of_all)
    given = (*stacked, rules_of(0))
    assert conditions(jax.vmap(sampled, axis_name=RUNS), *given) == {()}
    assert conditions(jax.vmap(sampled), *given) == {(RUN_COUNT,)}
