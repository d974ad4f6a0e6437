"""A layer of LFM2 against its formula, token by token, and the model over packed rows."""

import types

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from sampler_cases import convolving, drawn

from rljax.batch import Batch
from rljax.models.gated_delta import State
from rljax.models.short_convolution import ShortConvolution

D, TAPS = 16, 4


def layer() -> ShortConvolution:
    return ShortConvolution(nnx.Rngs(0), convolving().config)


def call(runs, taken) -> types.SimpleNamespace:
    return types.SimpleNamespace(prefix=None, runs=jnp.array(runs), taken=jnp.array(taken) > 0)


def tokens(count: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (2, count, D))


def formula(module, x, runs, before) -> np.ndarray:
    """The outputs of one row [S, D], in NumPy; `before` [taps - 1, D] are the inputs before it."""
    maps = (module.input_gate, module.output_gate, module.x)
    b, c, x = [np.asarray(x @ linear.weight[...]) for linear in maps]
    inputs, weight = np.concatenate([before, b * x]), np.asarray(module.conv.weight[...])
    of_input = [0] * (TAPS - 1) + list(runs)
    out = np.zeros((len(runs), D))
    for t, run in enumerate(runs):
        for i in range(TAPS):
            if of_input[t + i] == run:
                out[t] += weight[i] * inputs[t + i]
    return c * out


def test_outputs_are_those_of_the_formula():
    """Run 0 goes on behind what was read before, the others begin anew."""
    module, x = layer(), tokens(9)
    before = jax.random.normal(jax.random.key(1), (2, TAPS - 1, D))
    runs = [[0, 0, 0, 1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 2, 2, 2]]
    state, read = State(None, (before,)), call(runs, np.ones((2, 9)))
    got, after = module.attend(module.project(x), read, state)
    for row in range(2):
        want = formula(module, np.asarray(x[row]), runs[row], np.asarray(before[row]))
        np.testing.assert_allclose(got[row], want, atol=1e-6)
    inputs = module.project(x)[0]
    np.testing.assert_allclose(after.recent[0], inputs[:, -TAPS + 1 :], atol=1e-6)


def test_reading_in_parts_is_reading_at_once():
    """Parts of several tokens, of one, and of padding behind some."""
    module, x = layer(), tokens(12)
    want, want_state = module.attend(module.project(x), call(np.zeros((2, 12), int), x[..., 0] < 9))
    parts, state, start = [], None, 0
    for size in (2, 1, 1, 8):
        part = jnp.pad(x[:, start : start + size], ((0, 0), (0, 3), (0, 0)), constant_values=7.0)
        taken = np.arange(size + 3)[None, :] < np.full((2, 1), size)
        runs = np.zeros((2, size + 3), int)
        output, state = module.attend(module.project(part), call(runs, taken), state)
        parts.append(output[:, :size])
        start += size
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), want, atol=1e-6)
    np.testing.assert_allclose(state.recent[0], want_state.recent[0], atol=1e-6)


def test_sequences_of_a_row_do_not_see_each_other():
    model = convolving()
    params, rng = drawn(model), np.random.default_rng(0)
    ids, lengths = rng.integers(2, 29, 12), [5, 1, 6]

    def batch(rows, segments, positions) -> Batch:
        rows, segments, positions = (jnp.array(x, jnp.int32) for x in (rows, segments, positions))
        return Batch(rows, segments, positions, (segments > 0).astype(jnp.float32))

    segments = np.repeat([1, 2, 3], lengths)
    positions = np.concatenate([np.arange(n) for n in lengths])
    logits = jax.jit(model.logits)
    packed = np.asarray(logits(params, batch([ids], [segments], [positions])))[0]
    for name, length in enumerate(lengths, start=1):
        alone = np.zeros((1, 12), int)
        alone[0, :length] = ids[segments == name]
        real, places = np.arange(12) < length, np.minimum(np.arange(12), length - 1)
        got = np.asarray(logits(params, batch(alone, [real], [places])))[0, :length]
        np.testing.assert_allclose(packed[segments == name], got, atol=1e-5)
