"""Batch: axes are checked, missing fields are named, statistics ignore what the mask hides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import golden_cases, worked_example

from rljax import batch as batches
from rljax.batch import Batch, batch_from_rows
from rljax.errors import InputError


def make(rows=3, columns=5, **fields):
    lengths = jnp.array([5, 3, 4])[:rows]
    mask = (jnp.arange(columns)[None] < lengths[:, None]) & (jnp.arange(columns)[None] >= 1)
    return batch_from_rows(
        jnp.ones((rows, columns), jnp.int32), lengths, mask.astype(jnp.float32), **fields
    )


def test_wrong_axes_and_dtypes_are_refused_by_name():
    batch = make()
    with pytest.raises(InputError, match="rewards has the wrong number of axes.*B, S"):
        batch.replace(rewards=jnp.zeros(3))
    with pytest.raises(InputError, match="values disagrees about axis S"):
        batch.replace(values=jnp.zeros((3, 6)))
    with pytest.raises(InputError, match="rewards has the wrong dtype"):
        batch.replace(rewards=jnp.zeros((3, 5), jnp.int32))
    with pytest.raises(InputError, match="rewards has the wrong dtype.*float16.*it is float32"):
        batch.replace(rewards=jnp.zeros((3, 5), jnp.float16))
    with pytest.raises(InputError, match="did you mean 'rewards'"):
        batch.replace(reward=jnp.zeros((3, 5)))


def test_axes_are_checked_while_tracing():
    with pytest.raises(InputError, match="advantages disagrees about axis B"):
        jax.jit(lambda b: b.replace(advantages=jnp.zeros((2, 5))))(make())


def test_require_names_the_missing_field_the_stage_and_what_there_is():
    with pytest.raises(InputError, match="ppo_clip needs batch field old_logprobs.*has tokens"):
        make().require("tokens", "old_logprobs", by="ppo_clip")


def test_masked_statistics_equal_verl():
    _, cases = golden_cases("verl", "masked_stats.npz")
    with jax.enable_x64(True):
        for case in cases:
            if case.edge and "nan" not in case.label:
                continue
            x = jnp.asarray(case.inputs["values"], jnp.float64)
            mask = jnp.asarray(case.inputs["mask"], jnp.float64)
            want = case.outputs
            if not np.isfinite(want["masked_whiten"]).all():
                continue
            keep = case.inputs["mask"] > 0
            got = batches.masked_mean(x, mask)
            np.testing.assert_allclose(got, want["masked_mean"], rtol=1e-9)
            got = batches.masked_variance(x, mask, ddof=1)
            np.testing.assert_allclose(got, want["masked_var_unbiased"], rtol=1e-9)
            got = np.asarray(batches.whiten(x, mask))
            np.testing.assert_allclose(got[keep], want["masked_whiten"][keep], rtol=1e-7, atol=1e-9)


def test_whiten_of_one_token_is_zero():
    mask = jnp.array([[1.0, 0.0]])
    assert (np.asarray(batches.whiten(jnp.array([[3.0, jnp.nan]]), mask)) == 0).all()


@pytest.mark.smoke
def test_segment_statistics_of_a_packed_row_equal_those_of_its_sequences():
    example = worked_example("sft.packing")["inputs"]
    ids = jnp.array([example["segment_ids"]], jnp.int32)
    mask = jnp.array([example["response_mask"]], jnp.float32)
    logp = jnp.array([example["token_logp"]], jnp.float32)
    positions = jnp.array([worked_example("sft.packing")["outputs"]["positions"]], jnp.int32)
    batch = Batch(tokens=ids, segment_ids=ids, positions=positions, mask=mask).check()
    np.testing.assert_allclose(batches.segment_sum(logp, batch)[0, :3], -1.5, rtol=1e-6)
    np.testing.assert_allclose(batches.segment_sum(logp, batch)[0, 3:5], -0.2, rtol=1e-6)
    assert float(batches.segment_count(batch)) == pytest.approx(2.0)


@pytest.mark.smoke
def test_next_policy_token_skips_tool_tokens_and_stops_at_segments():
    batch = Batch(
        tokens=jnp.zeros((1, 6), jnp.int32),
        segment_ids=jnp.array([[1, 1, 1, 1, 2, 2]]),
        positions=jnp.array([[0, 1, 2, 3, 0, 1]]),
        mask=jnp.array([[1.0, 0.0, 0.0, 1.0, 1.0, 1.0]]),
    )
    x = jnp.array([[1.0, jnp.nan, jnp.nan, 4.0, 5.0, 6.0]])
    got = np.asarray(batches.next_policy_token(x, batch))
    np.testing.assert_array_equal(got[0, [0, 3, 4, 5]], [4.0, 0.0, 6.0, 0.0])


def test_the_sampler_drew_tokens_from_what_its_rules_kept():
    """Of a top-k that keeps half of the mass each token was twice as likely as the model says."""
    drawn = jnp.full((3, 5), jnp.log(0.2))
    batch = make(sampler_logprobs=drawn)
    np.testing.assert_array_equal(batches.behaviour_logprobs(batch, by="a test"), drawn)
    batch = batch.replace(sampler_log_kept=jnp.full((3, 5), jnp.log(0.5)))
    got = batches.behaviour_logprobs(batch, by="a test")
    np.testing.assert_allclose(np.exp(got), 0.4, rtol=1e-6)


def test_last_token_is_the_last_policy_token_not_the_last_column():
    batch = make().replace(mask=jnp.array([[0.0, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 0, 1, 0]]))
    np.testing.assert_array_equal(
        batches.last_token(batch), [[0, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 1, 0]]
    )
