"""kernels.logprob: the chunked form equals the plain one in value and gradient, whatever the
shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import golden_cases

from rljax.kernels.logprob import api, token_logprobs


def data(shape, words, embed=9, dtype=np.float64, scale=1.0):
    rng = np.random.default_rng(words)
    hidden = jnp.asarray(rng.normal(size=(*shape, embed)) * scale, dtype)
    head = jnp.asarray(rng.normal(size=(embed, words)), dtype)
    return hidden, head, jnp.asarray(rng.integers(0, words, shape), jnp.int32)


@pytest.mark.parametrize("shape, words", [((1,), 257), ((7,), 31), ((3, 13), 257), ((2, 1), 5)])
def test_chunked_equals_plain_in_value_and_gradient(shape, words, monkeypatch):
    monkeypatch.setattr(api, "CHUNK_LOGITS", 4 * words)  # several chunks, with a ragged tail
    with jax.enable_x64(True):
        hidden, head, targets = data(shape, words)

        def total(impl):
            def f(hidden, head):
                out = token_logprobs(hidden, head, targets, temperature=0.7, impl=impl)
                weights = (1.0, 0.3, -0.2)
                return sum(w * jnp.sum(jnp.sin(x)) for w, x in zip(weights, out, strict=True)), out

            return jax.value_and_grad(f, argnums=(0, 1), has_aux=True)(hidden, head)

        (_, values), gradients = total("xla")
        (_, want_values), want_gradients = total("reference")
    for got, want in zip((*values, *gradients), (*want_values, *want_gradients), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


def test_extreme_logits_stay_finite_in_value_and_gradient():
    hidden, head, targets = data((4,), 11, dtype=np.float32, scale=1e4)
    for impl in ("xla", "reference"):
        f = lambda h, i=impl: jnp.sum(token_logprobs(h, head, targets, impl=i)[0])  # noqa: E731
        value, gradient = jax.value_and_grad(f)(hidden)
        assert np.isfinite(value) and np.isfinite(gradient).all()


def test_logprob_and_entropy_equal_verl():
    _, cases = golden_cases("public", "verl", "logits_logprob_entropy.npz")
    checked = 0
    with jax.enable_x64(True):
        for case in cases:
            if case.edge or case.params["precision"] != "float64":
                continue
            logits = jnp.asarray(case.inputs["logits"], jnp.float64)
            labels = next(
                v for k, v in case.inputs.items() if k in ("labels", "targets", "input_ids")
            )
            eye = jnp.eye(logits.shape[-1], dtype=jnp.float64)
            logp, entropy, _ = token_logprobs(logits, eye, jnp.asarray(labels, jnp.int32))
            for name, got in (("log_probs", logp), ("entropy", entropy)):
                want = case.outputs[name]
                np.testing.assert_allclose(got, want, rtol=1e-7, atol=1e-9, err_msg=case.label)
            checked += 1
    assert checked


def test_no_array_of_rows_times_words_is_ever_built():
    """The compiled gradient's temporaries stay far under [N, V] float32."""
    rows, embed, words = 4096, 32, 8192
    hidden = jax.ShapeDtypeStruct((rows, embed), jnp.float32)
    head = jax.ShapeDtypeStruct((embed, words), jnp.float32)
    targets = jax.ShapeDtypeStruct((rows,), jnp.int32)

    def temporaries(impl):
        f = lambda h, w, y: jnp.sum(token_logprobs(h, w, y, impl=impl)[0])  # noqa: E731
        compiled = jax.jit(jax.grad(f, argnums=(0, 1))).lower(hidden, head, targets).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    full = rows * words * 4
    assert temporaries("reference") >= full
    # One chunk of logits, its probabilities and its gradient.
    assert temporaries("xla") <= 4 * api.CHUNK_LOGITS * 4 + 4 * embed * words * 4
