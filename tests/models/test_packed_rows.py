"""Packed rows, whose sequences share their prefixes, against a plain row for each sequence: the
model's outputs about every token and the gradient of every weight, of every family."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes
from packed_rows import groups_of, packed_rows, plain_rows
from test_families import FOLDERS, loaded

from rljax.arrays import place
from rljax.mesh import make_mesh

ALWAYS = "qwen3"  # which every clone has; windows, caps and sinks: test_attention


def positioned(batch, model):
    """The batch with the positions that a model which reads images gives text."""
    if model.config.vision is None:
        return batch
    three = np.repeat(batch.positions[..., None], 3, axis=-1)
    return batch.replace(rope_positions=three)


def outputs(model, params, batch):
    """[B, S, outputs] about every token."""
    if model.head == "scalar":
        return jnp.stack(
            [model.values(params, batch), model.token_scores(params, batch)[..., 0]], -1
        )
    return jnp.stack(model.logprobs(params, batch), -1)


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradient(model, params, batch, where, weights):
    """(outputs at the tokens of plain rows, the gradient of their weighted sum)."""

    def loss(params):
        out = outputs(model, params, batch)
        out = out if where is None else out[where[0], where[1]]
        out = jnp.where(weights != 0, out, 0.0)
        return jnp.sum(out * weights), out

    gradient, out = jax.grad(loss, has_aux=True)(params)
    return out, gradient


def prepared(name):
    """(model, weights of which none is zero, groups, plain rows, packed rows, where)."""
    _, model, params, _ = loaded(name)
    rng = np.random.default_rng(0)

    def moved(x):
        return x + 0.01 * jnp.asarray(rng.normal(size=x.shape), x.dtype)

    groups = groups_of(rng, min(model.config.vocab_size, 100))
    plain, (packed, where) = plain_rows(groups), packed_rows(groups)
    plain, packed = (positioned(batch, model) for batch in (plain, packed))
    return model, jax.tree.map(moved, params), groups, plain, packed, where


def weights_of(plain):
    """A number for each output about each token that something precedes."""
    real = (plain.segment_ids > 0) & (np.arange(plain.tokens.shape[1])[None, :] > 0)
    draw = np.random.default_rng(1).normal(size=(*real.shape, 2))
    return np.float32(np.where(real[..., None], draw, 0))


def assert_same(got, want):
    """Outputs and gradients to 1e-5 of the largest number of each."""
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-5)
    leaves = (jax.tree.leaves_with_path(gradient) for _, gradient in (got, want))
    for (path, a), (_, b) in zip(*leaves, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1e-2, np.abs(b).max()), err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", lanes([ALWAYS], [name for name in sorted(FOLDERS) if name != ALWAYS])
)
def test_a_packed_row_gives_what_plain_rows_give(name):
    model, params, _, plain, packed, where = prepared(name)
    weights = weights_of(plain)
    want = value_and_gradient(model, params, plain, None, weights)
    got = value_and_gradient(model, params, packed, where, weights)
    assert_same(got, want)


@pytest.mark.slow  # attention over such a mesh: test_attention
def test_a_packed_row_over_a_mesh_gives_what_plain_rows_give():
    model, params, _, plain, packed, where = prepared("qwen3")
    weights = weights_of(plain)
    want = value_and_gradient(model, params, plain, None, weights)
    mesh = make_mesh(data=1, fsdp=2, tensor=2, context=2)
    spread = dataclasses.replace(model, mesh=mesh)
    params = jax.device_put(params, spread.shardings())
    got = value_and_gradient(spread, params, place(packed, mesh), where, weights)
    assert_same(got, want)


def test_pieces_see_nothing_of_the_others():
    model, params, groups, plain, packed, where = prepared(ALWAYS)
    weights = weights_of(plain)
    weights[len(groups[0][1]) :] = 0  # the first group alone
    changed = [groups[0], *groups_of(np.random.default_rng(2), 100)[1:]]
    other, _ = packed_rows(changed)
    assert (other.tokens != packed.tokens).any()
    want = value_and_gradient(model, params, packed, where, weights)
    got = value_and_gradient(model, params, other, where, weights)
    jax.tree.map(np.testing.assert_array_equal, got[0], want[0])
    # Rows of the embedding that only the others read get zeros, of either sign.
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6)
    jax.tree.map(close, got[1], want[1])


def test_every_reading_of_a_packed_row_is_about_the_tokens_own_column():
    model, params, _, plain, packed, where = prepared(ALWAYS)
    real = weights_of(plain)[..., 0] != 0

    @jax.jit
    def readings(batch):
        about = *model.greedy(params, batch), model.sum_pi_squared(params, batch)
        return jnp.concatenate([jnp.stack(about, -1), model.readout(params, batch)[0]], -1)

    want, got = readings(plain), readings(packed)[where[0], where[1]]
    np.testing.assert_allclose(got[real], want[real], rtol=1e-5, atol=1e-5)
