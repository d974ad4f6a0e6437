"""Draws of several runs in one program: a branch is one for all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from rljax.mesh import RUNS
from rljax.sampler.draw import Rules, sample

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


def branches(jaxpr) -> int:
    """How many branches a program has, those inside of loops and branches counted, too."""
    inner = sum(branches(sub) for eqn in jaxpr.eqns for sub in jaxprs_in_params(eqn.params))
    return inner + sum(eqn.primitive.name == "cond" for eqn in jaxpr.eqns)


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
    alone = branches(jax.make_jaxpr(draw)(*(jax.tree.map(lambda x: x[0], x) for x in given)).jaxpr)
    together = branches(jax.make_jaxpr(jax.vmap(draw, axis_name=RUNS))(*given).jaxpr)
    assert together == alone > 0
    assert branches(jax.make_jaxpr(jax.vmap(draw))(*given).jaxpr) < alone
