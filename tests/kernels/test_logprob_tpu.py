"""kernels.logprob on TPU, run by Pallas' interpreter on the CPU: values and gradients of the Mosaic
kernels equal float64, on odd shapes and extreme logits. What a TPU's compiler says of them:
test_tpu_kernels.py."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes
from jax.experimental.pallas import tpu as pltpu

from rljax.errors import InputError
from rljax.kernels.logprob import pallas_tpu, tpu_blocks
from rljax.kernels.logprob.options import LogprobOptions
from rljax.kernels.logprob.tpu_blocks import Sizes

HIGHEST = jax.lax.Precision.HIGHEST
SCALE = 1 / 0.7
COARSE = 6e-3  # of the largest: gradients are multiplied in one pass, of bfloat16


@functools.partial(jax.jit, static_argnames="options")
def run(hidden, head, targets, scale, weights, *, options):
    """All statistics and both gradients, as one program."""
    found = pallas_tpu.forward(hidden, head, targets, scale, options, interpret=True)
    gradients = pallas_tpu.backward(
        *(hidden, head, targets, scale, found.top, found.log_sum, *weights, options), interpret=True
    )
    return found, gradients


def expect(hidden, head, targets, scale, weights, options):
    """The same in float64, by the formulas: top, log_sum, target, expected, best; gradients."""
    h, w = (np.asarray(x, np.float64) for x in (hidden, head))
    w = w.T if options.vocab_first else w
    x, c = h @ w, options.soft_cap
    z = (c * np.tanh(x / c) if c else x) * scale
    top = z.max(axis=1)
    log_sum = np.log(np.exp(z - top[:, None]).sum(axis=1))
    q = (z - top[:, None]) - log_sum[:, None]
    p = np.exp(q)
    onehot = np.asarray(targets)[:, None] == np.arange(z.shape[1])
    a, b, g = (np.asarray(v, np.float64)[:, None] for v in weights)
    dz = (a * onehot + p * (b + g * q)) * scale * ((1 - np.tanh(x / c) ** 2) if c else 1)
    dw = h.T @ dz
    values = (
        top,
        log_sum,
        np.where(onehot, z - top[:, None], 0).sum(axis=1),
        (p * (z - top[:, None])).sum(axis=1),
        z.argmax(axis=1),
    )
    return values, (dz @ w.T, dw.T if options.vocab_first else dw)


def problem(n, depth, vocab, dtype, options, seed=0):
    """Logits of standard deviation 1; targets from before the first token to past the last, many of
    them equal."""
    rng = np.random.default_rng(seed)
    shape = (vocab, depth) if options.vocab_first else (depth, vocab)
    hidden = jnp.asarray(rng.normal(size=(n, depth)), dtype)
    head = jnp.asarray(rng.normal(size=shape) / np.sqrt(depth), dtype)
    targets = rng.choice([-1, 0, vocab // 2, vocab - 1, vocab, vocab + 9], n)
    weights = [jnp.asarray(rng.normal(size=n), jnp.float32) for _ in range(3)]
    return hidden, head, jnp.asarray(targets, jnp.int32), weights


def assert_close(got, want, tolerance, name=""):
    """Relative to the largest of `want`."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    np.testing.assert_allclose(
        got, want, rtol=0, atol=tolerance * max(np.abs(want).max(), 1e-30), err_msg=name
    )


def assert_equal(got, want, tolerances):
    (found, gradients), (values, want_gradients) = got, want
    names = ("top", "log_sum", "target", "expected", "best")
    for name, x, y in zip(names, found, values, strict=True):
        if x is not None:
            assert_close(x, y, tolerances[0] if name != "best" else 0, name)
    for name, x, y in zip(("hidden", "head"), gradients, want_gradients, strict=True):
        assert_close(x, y, tolerances[1], name)


# N, D, V, options: one tile and several, with and without a tail, on each axis
SHAPES = {
    "one row": (1, 9, 257, LogprobOptions(precision=HIGHEST)),
    "seven rows, slices of D": (
        *(7, 300, 257),
        LogprobOptions(vocab_first=True, soft_cap=5.0, greedy=True, precision=HIGHEST),
    ),
    "tiles with tails": (129, 40, 1300, LogprobOptions(greedy=True, precision=HIGHEST)),
    "small vocabulary": (
        33,
        128,
        100,
        LogprobOptions(vocab_first=True, entropy=False, precision=HIGHEST),
    ),
    "many rows": (2500, 24, 513, LogprobOptions(vocab_first=True, soft_cap=3.0, precision=HIGHEST)),
    "no tail": (256, 16, 1024, LogprobOptions(greedy=True, precision=HIGHEST)),
}


@pytest.mark.parametrize(
    "name", lanes(list(SHAPES)[1:3], [n for n in SHAPES if n not in list(SHAPES)[1:3]])
)
def test_float32_equals_float64(name):
    n, depth, vocab, options = SHAPES[name]
    hidden, head, targets, weights = problem(n, depth, vocab, jnp.float32, options)
    if not options.entropy:
        weights[2] = jnp.zeros(n)
    got = run(hidden, head, targets, SCALE, weights, options=options)
    assert got[0].expected is None or options.entropy
    assert (got[0].best is not None) == options.greedy
    want = expect(hidden, head, targets, SCALE, weights, options)
    assert_equal(got, want, (1e-6, COARSE))
    if name == "one row":  # the scale is a number of the run, not of the program
        compiled = run._cache_size()
        got = run(hidden, head, targets, 2.0, weights, options=options)
        assert_equal(got, expect(hidden, head, targets, 2.0, weights, options), (1e-6, COARSE))
        assert run._cache_size() == compiled


@pytest.mark.parametrize("vocab_first", lanes([False], [True]))
def test_bfloat16_equals_float64(vocab_first):
    options = LogprobOptions(vocab_first=vocab_first, greedy=True)
    hidden, head, targets, weights = problem(129, 72, 257, jnp.bfloat16, options)
    got = run(hidden, head, targets, SCALE, weights, options=options)
    assert [x.dtype for x in got[1]] == [jnp.bfloat16, jnp.float32]
    # Products of bfloat16 are exact in float32: only the gradients are rounded.
    assert_equal(got, expect(hidden, head, targets, SCALE, weights, options), (1e-6, COARSE))


@pytest.mark.parametrize(
    ("hidden_dtype", "head_dtype", "cores"),
    [
        ("bfloat16", "float32", 2),
        ("float32", "bfloat16", 1),
        pytest.param("bfloat16", "float32", 1, marks=pytest.mark.slow),
    ],
)
def test_of_one_float32_input_every_bit_counts(hidden_dtype, head_dtype, cores):
    """Three passes, exact up to the order of float32 sums; on one core one kernel makes both
    gradients, on two there are two."""
    options = LogprobOptions(vocab_first=True, precision=HIGHEST, cores=cores)
    hidden, head, targets, weights = problem(300, 40, 700, jnp.float32, options)
    hidden, head = hidden.astype(hidden_dtype), head.astype(head_dtype)
    inputs = hidden, head, targets, SCALE, weights
    assert_equal(run(*inputs, options=options), expect(*inputs, options), (1e-6, COARSE))
    text = str(jax.make_jaxpr(functools.partial(run, options=options))(*inputs))
    names = re.findall(r"name=token_logprobs_(\w+)", text)
    backward = ["gradients"] if cores == 1 else ["hidden_gradient", "head_gradient"]
    assert names == ["forward", *backward]
    # The MXU's passes: 3 for logits, 1 for a gradient.
    passes = [int(n) // (2 * 300 * 40 * 700) for n in re.findall(r"mxu_flops\W+(\d+)", text)]
    assert passes == ([3, 5] if cores == 1 else [3, 4, 4])


def test_a_frozen_head_takes_the_kernel_of_one_gradient():
    options = LogprobOptions(frozen_head=True)
    *arrays, weights = problem(129, 40, 257, jnp.bfloat16, options)
    text = str(jax.make_jaxpr(functools.partial(run, options=options))(*arrays, SCALE, weights))
    assert "token_logprobs_hidden_gradient" in text and "token_logprobs_gradients" not in text


def test_extreme_and_infinite_logits():
    """Whole numbers, so that float32 holds the logits, up to 1e4, and their differences exactly;
    and tokens whose logit overflows to -inf."""
    options = LogprobOptions(greedy=True, precision=HIGHEST)
    rng = np.random.default_rng(3)
    n, vocab = 20, 257
    hidden = np.concatenate([np.ones((n, 1)), rng.integers(-12, 13, (n, 6))], axis=1)
    head = rng.integers(-140, 141, (7, vocab)).astype(np.float64)
    # Equal largest logits of row 0, two of them in one lane: the first wins.
    head[:, [4, 70, 132]] = 140 * np.sign(hidden[0])[:, None]
    head[0, 5::9] = -1e25  # times 1e25: -inf
    hidden[:, 0] = np.where(np.arange(n) % 2, 1e25, 1.0)  # every other row has such tokens
    head[0, 0:5] = head[0, 6] = 0.0
    targets = jnp.asarray(rng.choice([0, 4, 70, 6], n), jnp.int32)
    keep = np.arange(vocab) % 9 == 5
    head[0, ~keep] = 0.0  # the rest of the logits are finite in all rows
    hidden, head = jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32)
    weights = [jnp.asarray(rng.normal(size=n), jnp.float32) for _ in range(3)]
    got = run(hidden, head, targets, 1.0, weights, options=options)
    with np.errstate(over="ignore"):
        want = expect(hidden, head, targets, 1.0, weights, options)
    assert 5e3 < np.abs(want[0][0]).max() and int(got[0].best[0]) == 4
    (found, gradients), (values, want_gradients) = got, want
    for x, y in zip(found, values, strict=True):
        assert_close(x, y, 1e-6)
    # Without the axis of D that is made of 1e25: each is compared by its own size.
    assert all(np.isfinite(x).all() for x in gradients)
    assert_close(gradients[0][:, 1:], want_gradients[0][:, 1:], COARSE, "hidden")
    assert_close(gradients[1][1:], want_gradients[1][1:], COARSE, "head")


def test_a_row_without_any_token():
    """As in a shard whose tokens are all padding: no mass, and nothing that is NaN."""
    options = LogprobOptions(precision=HIGHEST)
    hidden = jnp.asarray([[1e25, 1.0], [1.0, 1.0]], jnp.float32)
    head = jnp.full((2, 200), -1e25, jnp.float32).at[1].set(jnp.arange(200.0) / 100)
    weights = [jnp.zeros(2)] * 3
    found, gradients = run(hidden, head, jnp.asarray([3, 3]), 1.0, weights, options=options)
    assert found.top[0] == 0 and found.log_sum[0] == -np.inf and found.expected[0] == 0
    assert found.target[0] == -np.inf


@pytest.mark.slow
def test_memory_that_nobody_wrote_reaches_nothing():
    """The interpreter that follows a TPU's memories and copies, each of them NaN at first."""
    options = LogprobOptions(greedy=True, precision=HIGHEST)
    hidden, head, targets, weights = problem(150, 24, 300, jnp.float32, options)
    memory = pltpu.InterpretParams(uninitialized_memory="nan")
    inputs = hidden, head, targets, jnp.float32(SCALE)
    found = pallas_tpu.forward(*inputs, options, interpret=memory)
    gradients = pallas_tpu.backward(
        *(*inputs, found.top, found.log_sum, *weights, options), interpret=memory
    )
    want = expect(hidden, head, targets, SCALE, weights, options)
    assert_equal((found, gradients), want, (1e-6, COARSE))


# -- sizes of tiles


@pytest.mark.parametrize("vmem", [16 * 2**20, 64 * 2**20])
def test_tiles_fit_and_cover_any_shape(vmem):
    budget = vmem * 13 // 16
    kernels = (
        (tpu_blocks.forward_bytes, "rows"),
        (tpu_blocks.hidden_bytes, "rows"),
        (tpu_blocks.head_bytes, "vocab"),
    )
    for held, stays in kernels:
        for n in (1, 7, 16, 129, 1000, 8192, 100_003):
            for depth in (9, 576, 2880, 4096, 8192, 16384):
                for vocab in (1, 257, 50257, 256_000):
                    for size in (Sizes(2, 2), Sizes(2, 4), Sizes(4, 4)):
                        shape = n, depth, vocab
                        blocks = tpu_blocks.choose_blocks(held, stays, shape, size, budget)
                        if depth * max(size) <= vmem // 2**10:  # 4096 in float32 in the smallest
                            assert held(blocks, depth, size) <= budget
                        assert blocks.rows % 16 == 0 and blocks.vocab % 128 == 0
                        # No block is larger than the padded array.
                        assert blocks.rows < n + 16 and blocks.vocab <= max(vocab, 128)
                        if n > 256:
                            assert blocks.rows <= -(-n // 2) + 127  # two cores share the rows


def test_small_memory_gives_the_same_result(monkeypatch):
    options = LogprobOptions(greedy=True, precision=HIGHEST)
    hidden, head, targets, weights = problem(129, 40, 700, jnp.float32, options)
    monkeypatch.setattr(pallas_tpu, "_budget", lambda: 250_000)
    tiles = tpu_blocks.choose_blocks(
        tpu_blocks.hidden_bytes, "rows", (129, 40, 700), Sizes(4, 4), 250_000
    )
    assert tiles.rows < 128 and tiles.vocab < 512
    got = run(hidden, head, targets, SCALE, weights, options=options)
    assert_equal(got, expect(hidden, head, targets, SCALE, weights, options), (1e-6, COARSE))


def test_float16_is_refused_by_the_kernel():
    """Where nothing is asked for, such rows go the way of XLA (dispatch), and no TPU has a model
    that computes in float16 (rljax.mesh.check_products)."""
    options = LogprobOptions()
    hidden, head, targets, _ = problem(8, 16, 32, jnp.float16, options)
    with pytest.raises(InputError, match="bfloat16 or float32"):
        pallas_tpu.forward(hidden, head, targets, SCALE, options, interpret=True)
