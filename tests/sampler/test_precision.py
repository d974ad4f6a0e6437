"""What narrower numbers in decoding cost: log-probs of the sampler against the trainer's, within
the limits at which a run warns, and the warnings themselves."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes
from sampler_cases import prompts
from test_sampler_families import FAMILIES, family, first_layer

from rljax.correction import rollout_correction
from rljax.correction.health import LARGEST_DIFFERENCE, health_warnings
from rljax.sampler import Decoding, Sampling, generate

ASKED = Sampling(max_response_tokens=24)
LAYER = "a layer of qwen3"


@functools.cache
def samples(name, decoding: Decoding, **of_model):
    """Samples of a family's golden model, scored by its trainer: 8 prompts, 4 responses to each."""
    model, params = first_layer("qwen3") if name == LAYER else family(name)[1:]
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, **of_model))
    tokens, lengths = prompts(8, 14, seed=2, vocab=min(300, model.config.vocab_size))
    key = jax.random.key(0)
    batch = generate(model, params, tokens, lengths, key, ASKED, n=4, decoding=decoding)
    logprobs = jax.jit(lambda params, batch: model.logprobs(params, batch)[0])
    return batch.replace(old_logprobs=logprobs(params, batch))


@functools.cache
def program(level):
    return jax.jit(functools.partial(rollout_correction, level=level))


def metrics_of(batch, level="token") -> dict:
    return {k: float(v) for k, v in program(level)(batch)[1].items()}


CASES = [
    ("weight_dtype", "int8", "int8"),
    ("weight_dtype", "bfloat16", "bfloat16"),
    ("kv_dtype", "int8", "int8"),
    ("kv_dtype", "bfloat16", "bfloat16"),
    ("dtype", "bfloat16", "bfloat16"),
    ("weight_dtype", "float16", "float16"),
    ("kv_dtype", "float16", "float16"),
    ("dtype", "float16", "float16"),
]
# Choices of experts flip between two types of products: the 99th percentile is theirs alone.
FLIPPING = ("deepseek_v3", "mixtral", "qwen3_moe", "gpt_oss")
FAST = [(LAYER, CASES[0])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "field", "value", "numbers"),
    [
        pytest.param(name, *case, marks=[] if (name, case) in FAST else pytest.mark.slow)
        for name in [LAYER, "gpt_oss", *FAMILIES]
        for case in CASES
    ],
)
def test_narrow_numbers_stay_within_the_limits_of_their_type(name, field, value, numbers):
    """Below the limits that a run with these numbers warns at (docs/guides/mismatch.md has what
    families showed), and above those of float32: a run that claims float32 would warn.
    float16 may stay below them, too."""
    metrics = metrics_of(samples(name, Decoding(**{field: value})))
    for key, largest in LARGEST_DIFFERENCE.items():
        if name not in FLIPPING or key == "abs_logprob_diff_mean":
            assert metrics[f"mismatch/{key}"] < largest[numbers], key
    if name not in FLIPPING:
        assert health_warnings(metrics, numbers) == []
    beyond = tuple(f"mismatch/{key} " for key in LARGEST_DIFFERENCE)  # the mean alone is enough
    texts = health_warnings(metrics, "float32")
    assert numbers == "float16" or any(text.startswith(beyond) for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize("both", lanes([False], [True]))
def test_float16_has_a_fraction_of_the_mismatch_of_bfloat16(both):
    """Of sampler and trainer in one dtype, and of a sampler beside a float32 trainer (arXiv
    2510.26788): three bits more are a difference of about an eighth."""

    def mean(dtype):
        how = {"dtype": dtype} if both else {}
        batch = samples(LAYER, Decoding(dtype=dtype), **how)
        return metrics_of(batch)["mismatch/abs_logprob_diff_mean"]

    assert 0 < mean("float16") < mean("bfloat16") / 4


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_bfloat16_against_float32_is_inside_the_health_ranges(level):
    """ESS above 80 %, veto below 5 %, mean near 1, and no warning; another policy's log-probs
    leave them."""
    batch = samples(LAYER, Decoding(dtype="bfloat16"))
    metrics = metrics_of(batch, level=level)
    assert 0.8 < metrics["mismatch/rollout_is_eff_sample_size"] < 1
    assert metrics["mismatch/rollout_is_veto_fraction"] < 0.05
    assert abs(metrics["mismatch/rollout_is_mean"] - 1) < 0.05
    assert health_warnings(metrics, "bfloat16") == []
    noise = 2 * np.random.default_rng(0).normal(size=batch.tokens.shape).astype(np.float32)
    other = batch.replace(old_logprobs=batch.old_logprobs + noise)
    texts = health_warnings(metrics_of(other, level=level), "bfloat16")
    names = {text.split()[0].removeprefix("mismatch/") for text in texts}
    assert {"rollout_is_eff_sample_size", "rollout_is_mean", "abs_logprob_diff_p99"} <= names


def test_the_99th_percentile_is_numpys():
    batch = samples(LAYER, Decoding(dtype="bfloat16"))
    keep = np.asarray(batch.mask) > 0
    size = np.abs(np.asarray(batch.old_logprobs - batch.sampler_logprobs))[keep]
    want = np.quantile(size, 0.99)
    garbage = batch.replace(old_logprobs=jnp.where(batch.mask > 0, batch.old_logprobs, jnp.nan))
    for one in (batch, garbage):
        got = metrics_of(one)["mismatch/abs_logprob_diff_p99"]
        np.testing.assert_allclose(got, want, rtol=1e-5)
