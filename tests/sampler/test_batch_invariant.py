"""The batch-invariant mode: the sampler's log-probs are the trainer's bit by bit, in every loop and
any packing, for every family; it is refused where that was not shown."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import golden, lanes
from packed_rows import groups_of, packed_rows, plain_rows
from sampler_cases import tiny, weights
from test_sampler_families import FAMILIES, differences, family, first_layer
from tiny_run import tiny_config, train_on_one

from rljax.batch import Batch
from rljax.errors import InputError
from rljax.kernels.row_tiles import in_tiles
from rljax.mesh import make_mesh
from rljax.models.huggingface import load_config
from rljax.models.model import Model
from rljax.sampler import Decoding
from rljax.validation import validate

TEXT = [name for name in FAMILIES if not name.endswith("_vl")]


def exact(model: Model) -> Model:
    config = dataclasses.replace(model.config, batch_invariant=True)
    return dataclasses.replace(model, config=config)


@functools.partial(jax.jit, static_argnums=0)
def logprobs(model, params, batch):
    return model.logprobs(params, batch, 0.7)[0]


@functools.partial(jax.jit, static_argnums=0)
def gradient(model, params, batch):
    """(The gradient of the mean of squared log-probs, the log-probs of that pass.)"""

    def loss(params):
        logp = model.logprobs(params, batch, 0.7)[0]
        return jnp.mean(batch.mask * logp**2), logp

    return jax.grad(loss, has_aux=True)(params)


@pytest.mark.parametrize("name", lanes(["a layer of gpt_oss"], ["gpt_oss", *TEXT]))
def test_the_sampler_is_the_trainer_bit_by_bit(name):
    """Sinks, windows, experts, latents, soft caps: prompts of 1 to 14 tokens, read whole and in
    chunks, from the prefix cache, in slots that are refilled."""
    if name.startswith("a layer"):
        plain, params = first_layer("gpt_oss")
    else:
        _, plain, params = family(name)
    for found in differences(exact(plain), params):
        assert not found.any(), np.abs(found).max()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", *TEXT])
def test_packing_and_neighbours_change_no_bit(name):
    _, plain, params = family(name)
    model, rng = exact(plain), np.random.default_rng(0)
    groups = groups_of(rng, min(plain.config.vocab_size, 100))
    alone, (packed, where) = plain_rows(groups), packed_rows(groups)
    want = np.asarray(logprobs(model, params, alone))
    keep = (np.asarray(alone.segment_ids) > 0) & (np.arange(want.shape[1]) > 0)
    got = np.asarray(logprobs(model, params, packed))[where[0], where[1]]
    assert np.array_equal(got[keep], want[keep])
    three = jax.tree.map(lambda x: x[2:5], alone)
    assert np.array_equal(
        np.asarray(logprobs(model, params, three))[keep[2:5]], want[2:5][keep[2:5]]
    )
    # The pass that a gradient is taken of says the same; the gradient is the ordinary one's.
    of_exact, inside = gradient(model, params, packed)
    assert np.array_equal(np.asarray(inside)[where[0], where[1]][keep], want[keep])
    for ours, theirs in zip(
        *(jax.tree.leaves(g) for g in (of_exact, gradient(plain, params, packed)[0])), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * float(jnp.abs(theirs).max()) + 1e-7)


@pytest.mark.slow
def test_without_it_bits_differ():
    """The comparison above can fail: it does for the ordinary model."""
    plain, params = first_layer("gpt_oss")
    assert any(found.any() for found in differences(plain, params, host=False))


@pytest.mark.slow
def test_long_rows_cross_blocks_of_keys():
    """150 tokens, in which a window of 70 begins and ends inside of blocks of 64, against the same
    tokens behind another segment of 37."""
    model = exact(tiny(window=70))
    params, rng = weights(model), np.random.default_rng(0)
    tokens = rng.integers(2, 29, 187).astype(np.int32)
    segments = np.repeat([1, 2], [37, 150]).astype(np.int32)
    positions = np.concatenate([np.arange(37), np.arange(150)]).astype(np.int32)

    def row(part):
        ones = np.ones((1, len(tokens[part])), np.float32)
        return Batch(tokens[None, part], segments[None, part], positions[None, part], ones)

    together = np.asarray(logprobs(model, params, row(slice(0, 187))))
    alone = np.asarray(logprobs(model, params, row(slice(37, 187))))
    assert np.array_equal(together[0, 38:], alone[0, 1:])
    ordinary = logprobs(tiny(window=70), params, row(slice(37, 187)))
    np.testing.assert_allclose(alone, ordinary, atol=1e-4)


@pytest.mark.parametrize("shape", [(16, 48), (64, 172), (37, 300)])
def test_a_row_in_tiles_does_not_see_its_neighbours(shape):
    """The same row at every place of a tile, beside other rows, and alone."""
    rng = np.random.default_rng(0)

    def draw(*size):
        return rng.normal(size=size).astype(np.float32)

    matrix, row = draw(*shape), draw(shape[0])
    multiply = jax.jit(functools.partial(in_tiles, True, lambda w, x: x @ w, axes=1))
    want = np.asarray(multiply(matrix, row[None]))[0]
    np.testing.assert_allclose(want, row @ matrix, rtol=1e-4, atol=1e-4)
    for place in range(35):
        rows = 10 * draw(35, shape[0])
        rows[place] = row
        assert np.array_equal(np.asarray(multiply(matrix, rows))[place], want), place


@pytest.mark.slow
def test_a_packed_run_has_no_mismatch(tmp_path):
    """GRPO with packing, after a supervised step, with refilled slots: every mismatch is 0."""
    config = tiny_config(
        tmp_path / "run",
        model_settings__batch_invariant=True,
        steps=2,
        sft__steps=1,
        sampler__slots=6,
        sampler__temperature=0.9,
        evaluate__every_steps=0,
        algorithm__correction="rollout_correction(mode='truncate')",
    )
    assert config.batch.packing
    train_on_one(config)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "mismatch/mismatch_kl" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["batch/completions"] == 16
        for name in ("mismatch_kl", "mismatch_k3_kl", "mismatch_chi2_token", "mismatch_chi2_seq"):
            assert row[f"mismatch/{name}"] == 0.0, name
        for name in ("probability_diff_max", "abs_logprob_diff_mean", "abs_logprob_diff_max"):
            assert row[f"mismatch/{name}"] == 0.0, name
        for name in ("rollout_is_min", "rollout_is_max", "mismatch_ppl_ratio"):
            assert row[f"mismatch/{name}"] == 1.0, name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_settings__dtype", "bfloat16"),
        ("model_settings__head_in_float32", False),
        ("model_settings__head_dtype", "bfloat16"),
        ("sampler__dtype", "bfloat16"),
        ("sampler__head_in_float32", "off"),
        ("sampler__kv_dtype", "int8"),
        ("sampler__weight_dtype", "bfloat16"),
    ],
)
def test_narrower_numbers_are_refused(tmp_path, name, value):
    how = {"model_settings__batch_invariant": True, name: value}
    with pytest.raises(InputError, match=name.replace("__", ".")) as error:
        validate(tiny_config(tmp_path / "run", **how))
    assert "batch_invariant" in str(error.value)


def test_where_it_was_not_shown_it_is_refused():
    plain = tiny()
    with pytest.raises(InputError, match="8 cpu devices"):
        Model(exact(plain).config, make_mesh(1, 8, 1))
    with pytest.raises(InputError, match="bfloat16"):
        exact(plain).in_dtype("bfloat16")
    with pytest.raises(InputError, match="kv_dtype.*bfloat16"):
        jax.eval_shape(lambda: exact(plain).empty_caches(2, 8, "bfloat16"))
    with pytest.raises(InputError, match="sampler.weight_dtype: got 'int8'"):
        Decoding(weight_dtype="int8").of(exact(plain))
    with pytest.raises(InputError, match="text alone"):
        exact(Model(load_config(golden("hf", "qwen2_5_vl"), remat="none"), plain.mesh))
