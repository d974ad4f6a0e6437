"""The gated delta rule against its recurrence, token by token, in float64."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_rows import groups_of, packed_rows, plain_rows
from sampler_cases import VOCAB, convolving, recurrent, tiny, weights
from test_packed_rows import value_and_gradient, weights_of

from rljax.config import Config
from rljax.errors import InputError
from rljax.models.builtin import decoder
from rljax.models.gated_delta import convolved, delta_rule, latest, runs_of
from rljax.setup.setup import _steps

B, S, H, K, V = 2, 45, 2, 5, 3


@contextlib.contextmanager
def float64():
    with jax.enable_x64(True):
        yield


def inputs(seed: int = 0, tokens: int = S):
    """q, k, v, decay, rate, and the memory before them."""
    draw = np.random.default_rng(seed).normal
    sizes = [(B, tokens, H, K), (B, tokens, H, K), (B, tokens, H, V)]
    q, k, v = (draw(size=size) for size in sizes)
    decay, rate = -np.exp(draw(size=(2, B, tokens, H)))
    return q, k, v, decay, 1 / (1 + np.exp(rate)), draw(size=(B, H, K, V))


def recurrence(q, k, v, decay, rate, runs, memory):
    """The rule as the paper writes it, in NumPy."""

    def unit(x):
        return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)

    q, k, outputs = unit(q) / np.sqrt(K), unit(k), np.zeros(v.shape)
    memory = memory.copy()
    for row in range(q.shape[0]):
        for head in range(q.shape[2]):
            state, run = memory[row, head], 0
            for t in range(q.shape[1]):
                if runs[row, t] != run:
                    state, run = np.zeros_like(state), runs[row, t]
                at = row, t, head
                state = np.exp(decay[at]) * state
                state = state + np.outer(k[at], rate[at] * (v[at] - state.T @ k[at]))
                outputs[at] = state.T @ q[at]
            memory[row, head] = state
    return outputs, memory


RUNS = np.stack([np.repeat([0, 1, 2, 3], [7, 1, 20, 17]), np.repeat([1, 2], [16, 29])])


@pytest.mark.parametrize("chunk", [4, 16, 64])
def test_values_are_those_of_the_recurrence(chunk):
    """Runs end inside of chunks and at their ends, one has a single token, and one goes on behind
    the memory."""
    with float64():
        want, want_memory = recurrence(*inputs()[:5], RUNS, inputs()[5])
        *rows, memory = map(jnp.asarray, inputs())
        got, got_memory = jax.jit(delta_rule, static_argnames="chunk")(
            *rows, jnp.asarray(RUNS), memory, chunk=chunk
        )
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, want, atol=1e-12)
        np.testing.assert_allclose(got_memory, want_memory, atol=1e-12)


def test_gradients_are_those_of_finite_differences():
    with float64():
        *rows, memory = map(jnp.asarray, inputs())
        runs, weight = jnp.asarray(RUNS), jnp.asarray(inputs(1)[2])

        @jax.jit
        def loss(rows, memory):
            output, after = delta_rule(*rows, runs, memory, chunk=16)
            return jnp.sum(output * weight) + jnp.sum(jnp.cos(after))

        gradient = jax.grad(loss, argnums=(0, 1))(rows, memory)
        direction = [jnp.asarray(x) for x in inputs(2)]
        direction = (direction[:5], direction[5])

        def moved(step):
            shifted = jax.tree.map(lambda x, d: x + step * d, (rows, memory), direction)
            return loss(*shifted)

        slope = (moved(1e-6) - moved(-1e-6)) / 2e-6
        products = jax.tree.map(lambda g, d: jnp.sum(g * d), gradient, direction)
        np.testing.assert_allclose(sum(jax.tree.leaves(products)), slope, rtol=1e-7)


def test_equal_keys_do_not_blow_up():
    """Sixty-four equal keys, each written whole: powers of the system's matrix would overflow
    float32's digits, while its solution stays exact."""
    v = jnp.asarray(np.random.default_rng(0).normal(size=(1, 64, 1, V)), jnp.float32)
    q = k = jnp.ones((1, 64, 1, K))
    zeros, ones = jnp.zeros((1, 64, 1)), jnp.ones((1, 64, 1))
    runs, memory = jnp.zeros((1, 64), jnp.int32), jnp.zeros((1, 1, K, V))
    got, _ = delta_rule(q, k, v, zeros, ones, runs, memory)
    np.testing.assert_allclose(got * K**0.5, v, atol=1e-4)  # each token reads what it wrote


def test_reading_in_parts_is_reading_at_once():
    """Chunks of 20 tokens, then one by one, and padding that is not taken."""
    q, k, v, decay, rate, memory = map(jnp.asarray, inputs())
    runs = jnp.zeros((B, S), jnp.int32)
    want, want_memory = delta_rule(q, k, v, decay, rate, runs, memory)
    parts, start = [], 0
    for size in (20, 1, 1, 23):
        part = (x[:, start : start + size] for x in (q, k, v, decay, rate))
        padding = ((0, 0), (0, 3 if size > 1 else 0))
        part = [jnp.pad(x, padding + ((0, 0),) * (x.ndim - 2)) for x in part]
        output, memory = delta_rule(*part, jnp.zeros(part[0].shape[:2], jnp.int32), memory)
        parts.append(output[:, :size])
        start += size
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), want, atol=2e-6)
    np.testing.assert_allclose(memory, want_memory, atol=2e-6)


def test_runs_of_padding_and_of_what_goes_on():
    segments = jnp.array([[0, 0, 1, 1, 0, 2, 2, 0], [3, 3, 3, 3, 3, 1, 1, 1]])
    fresh = runs_of(segments, jnp.array([False, False]))
    np.testing.assert_array_equal(fresh, [[0, 0, 1, 1, 1, 2, 2, 2], [1] * 5 + [2] * 3])
    more = jnp.array([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]])
    goes_on = runs_of(more, jnp.array([True, True, False, False]))
    np.testing.assert_array_equal(goes_on, [[0] * 4, [0] * 4, [1] * 4, [0] * 4])


def test_the_convolution_sees_its_own_run_alone():
    rng = np.random.default_rng(0)
    x, taps = rng.normal(size=(1, 9, 2, 3)), rng.normal(size=(4, 2, 3))
    before = rng.normal(size=(1, 3, 2, 3))
    runs = np.array([[0, 0, 0, 0, 1, 1, 2, 2, 2]])
    want = np.zeros_like(x)
    for t in range(9):
        for back in range(4):
            if t - back < 0 and runs[0, t] == 0:
                want[0, t] += taps[3 - back] * before[0, t - back + 3]
            elif t - back >= 0 and runs[0, t - back] == runs[0, t]:
                want[0, t] += taps[3 - back] * x[0, t - back]
    got = convolved(*(jnp.asarray(a, jnp.float32) for a in (x, taps, before)), jnp.asarray(runs))
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_the_newest_inputs_of_each_row():
    x, before = jnp.arange(10.0).reshape(2, 5, 1, 1), -jnp.arange(1.0, 7.0).reshape(2, 3, 1, 1)
    runs = jnp.zeros((2, 5), jnp.int32)
    got = latest(x, before, runs, jnp.array([0, 4]))[..., 0, 0]
    np.testing.assert_array_equal(got, [[-1, -2, -3], [6, 7, 8]])
    got = latest(x, before, runs + 1, jnp.array([1, 2]))[..., 0, 0]
    np.testing.assert_array_equal(got, [[0, 0, 0], [0, 5, 6]])  # of a sequence that begins


@pytest.mark.parametrize("interval", [-2, 3])
def test_an_interval_without_attention_is_refused(interval):
    with pytest.raises(InputError, match=f"full_attention_interval.*got {interval}"):
        decoder(20, layers=2, full_attention_interval=interval)
    kinds = decoder(20, layers=5, full_attention_interval=3).kinds
    assert [kind.recurrent for kind in kinds] == [True, True, False, True, True]


# Whole sequences of the groups, and gaps, in rows of one block.
WHOLE = [
    [[("whole", 0, 0), ("whole", 0, 1), ("gap", 1), ("whole", 0, 2)]],
    [[("gap", 3), ("whole", 1, 0), ("whole", 1, 1), ("whole", 2, 0)]],
    [[("whole", 2, 1), ("gap", 2), ("whole", 3, 0)]],
]


@pytest.mark.parametrize("make", [recurrent, convolving])
def test_packed_rows_are_plain_ones(make):
    """Outputs and gradients of sequences that share a row; rows that share prompts are refused."""
    model = make()
    params, groups = weights(model), groups_of(np.random.default_rng(0), VOCAB)
    plain, (packed, where) = plain_rows(groups), packed_rows(groups, WHOLE, 32)
    weight = weights_of(plain)
    want = value_and_gradient(model, params, plain, None, weight)
    with pytest.raises(InputError, match="whose prompts are shared.*batch.packing=False"):
        value_and_gradient(model, params, packed, where, weight)
    packed = packed.replace(prefix_ids=None, prefix_blocks=None)
    got = value_and_gradient(model, params, packed, where, weight)
    np.testing.assert_allclose(got[0], want[0], atol=1e-4)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(1e-2, np.abs(b).max()))


def test_a_recurrent_policy_packs_without_shared_prompts():
    """Where a model with attention alone shares them."""
    config = Config()
    config.batch.tokens_per_microbatch = 4096
    rows, how = 64, dict(prompt_tokens=96, samples=8)
    shared = [
        _steps(config, rows, 128, model, 1, **how).packing.shared for model in (tiny(), recurrent())
    ]
    assert shared == [True, False]
