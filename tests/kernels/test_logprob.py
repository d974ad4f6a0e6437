"""kernels.logprob: every implementation says what float64 says, in value and gradient, whatever the
shape; none keeps an array of rows times vocabulary; the platform chooses."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import compiled, golden_cases, lanes

from rljax.errors import InputError
from rljax.kernels.logprob import pallas_gpu, reference, token_logprobs, xla
from rljax.kernels.logprob.options import LogprobOptions, head_product, logits

HIGHEST = jax.lax.Precision.HIGHEST
INTERPRETED = {
    "forward": functools.partial(pallas_gpu.forward, interpret=True),
    "backward": functools.partial(pallas_gpu.backward, interpret=True),
}
IMPLS = {"reference": vars(reference), "xla": vars(xla), "pallas_gpu": INTERPRETED}
# N, D, V, soft cap, vocabulary first
SHAPES = [(1, 9, 257, 0.0, False), (7, 70, 5, 3.0, True), (129, 33, 257, 3.0, False)]


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles both ways, the last of each begun early."""
    monkeypatch.setattr(xla, "ROWS", 40)  # of 129 four times 33
    monkeypatch.setattr(xla, "VOCAB", 100)
    monkeypatch.setattr(pallas_gpu, "R", 32)
    monkeypatch.setattr(pallas_gpu, "W", 32)
    monkeypatch.setattr(pallas_gpu, "SPLIT", 128)
    monkeypatch.setattr(pallas_gpu, "GRADIENT_BYTES", 129 * 4 * 96)


def data(n, d, v, vocab_first=False, dtype=np.float32, scale=1.0):
    rng = np.random.default_rng(v)
    hidden, head = rng.normal(size=(n, d)) * scale, rng.normal(size=(d, v))
    targets = rng.integers(0, v, n)
    targets[n // 2 :] = targets[n // 2]  # repeated
    head = head.T if vocab_first else head
    return jnp.asarray(hidden, dtype), jnp.asarray(head, dtype), jnp.asarray(targets, jnp.int32)


def cotangents(n):
    return np.random.default_rng(n).normal(size=(3, n))


def float64_answer(hidden, head, targets, temperature, soft_cap, vocab_first, weights):
    """(log-prob, entropy, logsumexp), gradients of their weighted sum; by JAX's own softmax."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (hidden, head)]
        targets, weights = np.asarray(targets), np.asarray(weights)
        return jax.device_get(
            _float64(*wide, targets, np.float64(temperature), weights, soft_cap, vocab_first)
        )


@functools.partial(jax.jit, static_argnums=(5, 6))  # one program for each shape, for all tests
def _float64(hidden, head, targets, temperature, weights, soft_cap, vocab_first):
    def total(hidden, head):
        z = hidden @ (head.T if vocab_first else head)
        z = (soft_cap * jnp.tanh(z / soft_cap) if soft_cap else z) / temperature
        logp = jax.nn.log_softmax(z)
        entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
        found = logp[jnp.arange(len(z)), targets], entropy, jax.nn.logsumexp(z, axis=-1)
        return sum(jnp.sum(w * x) for w, x in zip(weights, found, strict=True)), found

    (_, found), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(hidden, head)
    return found, gradients


def answer(impl, hidden, head, targets, temperature, options, weights):
    """The same from an implementation's own two functions. Called with `small_tiles` alone, which
    its programs keep."""
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    scale = np.asarray(1 / temperature, dtype)
    return _answer(impl, hidden, head, targets, scale, options, np.asarray(weights, dtype))


@functools.partial(jax.jit, static_argnums=(0, 5))
def _answer(impl, hidden, head, targets, scale, options, weights):
    found = IMPLS[impl]["forward"](hidden, head, targets, scale, options)
    logp, entropy = found.target - found.log_sum, found.log_sum - found.expected
    a, g_entropy, g_lse = weights
    b, c = g_lse - a - entropy * g_entropy, -g_entropy
    row = targets, scale, found.top, found.log_sum, a, b, c
    gradients = IMPLS[impl]["backward"](hidden, head, *row, options)
    return (logp, entropy, found.top + found.log_sum), gradients, found


plain_logits = jax.jit(logits, static_argnums=(2, 3))


def close(got, want, tolerance):
    """Relative to the largest number of an array."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(
            np.asarray(g, np.float64), w, rtol=0, atol=tolerance * np.max(np.abs(w))
        )


QUICK = [(impl, SHAPES[2]) for impl in IMPLS]
QUICK += [("xla", SHAPES[1]), ("pallas_gpu", SHAPES[1])]
REST = [(i, s) for i in IMPLS for s in SHAPES if (i, s) not in QUICK]


@pytest.mark.parametrize(("impl", "shape"), [*QUICK, *(slow(*case) for case in REST)], ids=str)
def test_values_and_gradients_are_those_of_float64(impl, shape, small_tiles):
    n, d, v, soft_cap, vocab_first = shape
    hidden, head, targets = data(n, d, v, vocab_first)
    weights = cotangents(n)
    want = float64_answer(hidden, head, targets, 0.7, soft_cap, vocab_first, weights)
    options = LogprobOptions(soft_cap, vocab_first, greedy=True, precision=HIGHEST)
    *got, found = answer(impl, hidden, head, targets, 0.7, options, weights)
    close(got, want, 3e-6)
    z = np.asarray(plain_logits(hidden, head, 1.0, options))
    np.testing.assert_array_equal(found.best, z.argmax(-1))


def test_float64_stays_float64(small_tiles):
    with jax.enable_x64(True):
        hidden, head, targets = data(129, 9, 257, dtype=np.float64)
        want = float64_answer(hidden, head, targets, 0.7, 0.0, False, weights := cotangents(129))
        got = answer("xla", hidden, head, targets, 0.7, LogprobOptions(), weights)[:2]
        assert got[1][0].dtype == jnp.float64
        close(got, want, 1e-12)


@pytest.mark.parametrize(
    ("impl", "dtype"),
    [
        ("xla", jnp.float16),
        ("pallas_gpu", jnp.bfloat16),
        slow("reference", jnp.float16),
        slow("reference", jnp.bfloat16),
        slow("xla", jnp.bfloat16),
        slow("pallas_gpu", jnp.float16),
    ],
)
def test_pairs_of_two_bytes_lose_what_their_own_rounding_loses(impl, dtype, small_tiles):
    hidden, head, targets = data(7, 33, 257, dtype=dtype, scale=0.3)
    weights = cotangents(7)
    want = float64_answer(hidden, head, targets, 1.0, 0.0, False, weights)
    (values, gradients, _) = answer(impl, hidden, head, targets, 1.0, LogprobOptions(), weights)
    close(values, want[0], 1e-6)  # products of such numbers are exact, sums are float32
    assert [x.dtype for x in gradients] == [dtype, jnp.float32]  # rounded by the api, once
    close(gradients, want[1], 2e-2 if dtype == jnp.bfloat16 else 3e-3)


@pytest.mark.parametrize("impl", lanes(["xla", "pallas_gpu"], ["reference"]))
def test_extreme_logits_and_words_of_probability_zero(impl, small_tiles):
    """Logits of +-1e4, whole tiles of -inf; nothing becomes NaN."""
    hidden, head, targets = (np.array(x) for x in data(7, 9, 257))
    hidden[:3] *= 1e4 / 3
    hidden[:, 0], head[0, :130] = 10.0, -3e38  # 10 x -3e38 is -inf in float32
    targets = jnp.asarray(np.maximum(targets, 130))
    hidden, head, weights = jnp.asarray(hidden), jnp.asarray(head), cotangents(7)
    assert np.isneginf(np.asarray(plain_logits(hidden, head, 1.0, LogprobOptions()))[:, :130]).all()
    want = float64_answer(hidden, head, targets, 1.0, 0.0, False, weights)
    got = answer(impl, hidden, head, targets, 1.0, LogprobOptions(precision=HIGHEST), weights)[:2]
    # A logit of 1e4 is known to 1e-3 in float32.
    close([x[3:] for x in got[0]], [x[3:] for x in want[0]], 3e-6)
    close([got[0], got[1][1]], [want[0], want[1][1]], 2e-3)
    assert np.isfinite(np.asarray(got[1][0])).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_a_target_in_another_shard_is_none_of_these_tokens(impl, small_tiles):
    hidden, head, targets = data(7, 9, 257)
    elsewhere = targets.at[:3].set(jnp.asarray([-1, 257, 100000]))
    options, weights = LogprobOptions(precision=HIGHEST), cotangents(7)
    values, gradients, found = answer(impl, hidden, head, elsewhere, 1.0, options, weights)
    assert (np.asarray(found.target)[:3] == 0).all()
    weights[0, :3] = 0  # of a token that is elsewhere, only the softmax is left
    want = float64_answer(hidden, head, targets, 1.0, 0.0, False, weights)
    weights[2, :3] -= cotangents(7)[0, :3]
    want = want[0], float64_answer(hidden, head, targets, 1.0, 0.0, False, weights)[1]
    close([values[1:], values[0][3:], gradients], [want[0][1:], want[0][0][3:], want[1]], 3e-6)


# -- the public function


def by_api(hidden, head, targets, **options):
    """Values, and gradients of a sum that bends each."""

    def total(hidden, head):
        found = token_logprobs(hidden, head, targets, **options)
        return sum(w * jnp.sum(jnp.sin(x)) for w, x in zip((1, 0.3, -0.2), found[:3])), found  # noqa: B905

    run = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))
    (_, found), gradients = run(hidden, head)
    return found, gradients


@pytest.mark.parametrize("shape", lanes([(2, 1, 4)], [(1,), (3, 13)]))
def test_any_leading_axes_by_any_name(shape, small_tiles):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        hidden = jnp.asarray(rng.normal(size=(*shape, 9)))
        head = jnp.asarray(rng.normal(size=(9, 257)))
        targets = jnp.asarray(rng.integers(0, 257, shape), jnp.int32)
        how = dict(temperature=0.7, soft_cap=4.0, with_greedy=True)
        want = by_api(hidden, head, targets, impl="reference", **how)
        found, (of_hidden, of_head) = by_api(hidden, head.T, targets, vocab_first=True, **how)
        close((found, (of_hidden, of_head.T)), want, 1e-12)
        assert all(x.shape == shape for x in found)


def test_what_is_not_asked_for_is_not_there():
    arrays = data(4, 9, 31)
    run = compiled(token_logprobs)
    without, whole = run(*arrays, with_entropy=False, impl="xla"), run(*arrays, impl="xla")
    assert without[1] is None and len(whole) == 3
    np.testing.assert_array_equal(without[0], whole[0])
    np.testing.assert_array_equal(without[2], whole[2])


def test_greedy_is_the_first_of_equals():
    head = jnp.asarray([[0.0, 1.0, 1.0, 0.5]])

    run = compiled(token_logprobs)
    said = run(jnp.ones((4, 1)), head, jnp.arange(4), with_greedy=True, impl="xla")[3]
    assert said.tolist() == [0, 1, 0, 0]


def test_wrong_input_is_named():
    hidden, head, targets = data(4, 9, 31)
    with pytest.raises(InputError, match="impl"):
        token_logprobs(hidden, head, targets, impl="triton")
    with pytest.raises(InputError, match=r"\[V, D\]"):
        token_logprobs(hidden, head, targets, vocab_first=True)
    for shape in ((31,), (4, 1)):  # of a token, of a row
        with pytest.raises(InputError, match="temperature"):
            token_logprobs(hidden, head, targets, temperature=jnp.ones(shape))
    found = token_logprobs(hidden, head, targets.at[1].set(31), impl="xla")[0]
    assert np.isnan(found[1]) and np.isfinite(np.asarray(found)[[0, 2, 3]]).all()


@pytest.mark.parametrize("impl", [None, "xla"])
def test_no_rows_have_no_log_probs_and_no_gradient(impl):
    hidden, head, targets = data(1, 9, 3000)
    hidden, targets = hidden[:0], targets[:0]
    found, (of_hidden, of_head) = by_api(hidden, head, targets, with_greedy=True, impl=impl)
    assert all(x.shape == (0,) for x in (*found, targets)) and of_hidden.shape == (0, 9)
    assert of_head.shape == head.shape and not np.any(of_head)


def test_it_composes_with_scan_remat_and_a_traced_temperature():
    hidden, head, targets = data(12, 9, 31)

    @jax.jit
    def total(hidden, head, temperature, impl):
        def one(carry, part):
            found = token_logprobs(*part[:1], head, part[1], temperature=temperature, impl="xla")
            return carry + jnp.sum(found[0]) + 0.1 * jnp.sum(found[1]), None

        parts = hidden.reshape(3, 4, 9), targets.reshape(3, 4)
        return jax.lax.scan(jax.checkpoint(one), 0.0, parts)[0]

    got = jax.grad(total, (0, 1))(hidden, head, 0.7, None)
    weights = np.stack([np.ones(12), np.full(12, 0.1), np.zeros(12)])
    close(got, float64_answer(hidden, head, targets, 0.7, 0.0, False, weights)[1], 3e-6)


def test_the_sampler_reads_the_same_head():
    """Sampled from cap(hidden head): its log-softmax at a temperature is what is trained on."""
    rng = np.random.default_rng(3)
    bf16 = "bfloat16"
    kinds = ((jnp.float32, True), (jnp.bfloat16, True), (jnp.bfloat16, False), (jnp.float16, True))
    rounded = (
        (jnp.float32, True, bf16),
        (jnp.bfloat16, True, bf16),
        (jnp.float16, True, "float16"),
    )
    for dtype, float32_head, *head_dtype in (*kinds, *rounded):
        hidden = jnp.asarray(rng.normal(size=(2, 5, 16)), dtype)
        head = jnp.asarray(rng.normal(size=(31, 16)), jnp.float32)
        targets = jnp.asarray(rng.integers(0, 31, (2, 5)), jnp.int32)
        how = dict(soft_cap=3.0, vocab_first=True)
        h, w, precision = head_product(hidden, head, float32_head, *head_dtype)
        # The head keeps its 24 bits but where it is rounded; logits are float32 in every case.
        assert (w.dtype == jnp.float32) == (float32_head and not head_dtype)
        sampled = jax.nn.log_softmax(
            logits(h, w, 1.0, LogprobOptions(**how, precision=precision)) / 0.7
        )
        want = jnp.take_along_axis(sampled, targets[..., None], axis=-1)[..., 0]
        got = token_logprobs(
            hidden,
            head,
            targets,
            temperature=0.7,
            float32_head=float32_head,
            impl="xla",
            **how,
            head_dtype="".join(head_dtype),
        )
        assert got[0].dtype == jnp.float32
        np.testing.assert_allclose(got[0], want, atol=1e-6)


def test_logprob_and_entropy_equal_verl():
    _, cases = golden_cases("verl", "logits_logprob_entropy.npz")
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
            run = jax.jit(lambda *arrays: token_logprobs(*arrays)[:2])
            logp, entropy = run(logits, eye, jnp.asarray(labels, jnp.int32))
            for name, got in (("log_probs", logp), ("entropy", entropy)):
                want = case.outputs[name]
                np.testing.assert_allclose(got, want, rtol=1e-7, atol=1e-9, err_msg=case.label)
            checked += 1
    assert checked


# -- what is compiled


def gradient_of(rows, embed, vocab, dtype=jnp.float32, **options):
    """The gradient's program, traced for arrays of these sizes."""
    of = jax.ShapeDtypeStruct

    def f(h, w, y):
        return sum(map(jnp.sum, token_logprobs(h, w, y, **options)))

    arrays = of((rows, embed), dtype), of((embed, vocab), dtype), of((rows,), jnp.int32)
    return jax.jit(jax.grad(f, argnums=(0, 1))).trace(*arrays)


def test_no_array_of_rows_times_words_is_ever_built():
    """The compiled gradient's temporaries are under a tenth of the plain form's."""
    rows, embed, vocab = 4096, 32, 8192

    def temporaries(impl):
        compiled = gradient_of(rows, embed, vocab, impl=impl).lower().compile()
        return compiled.memory_analysis().temp_size_in_bytes

    plain = temporaries("reference")
    assert plain >= rows * vocab * 4
    assert temporaries("xla") < 0.1 * 2 * rows * vocab * 4


def a_gpu_in_name():
    """JAX 0.12 lowers Triton for a GPU that is at least named."""
    if not hasattr(jax.sharding, "AbstractDevice"):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def test_each_of_several_has_its_own_temperature_under_vmap():
    hidden, head, targets = data(12, 9, 31)
    parts, temperatures = (hidden.reshape(3, 4, 9), targets.reshape(3, 4)), jnp.array([0.5, 1, 2])

    def total(hidden, targets, temperature):
        return jnp.sum(token_logprobs(hidden, head, targets, temperature=temperature)[0])

    run = jax.jit(jax.vmap(jax.value_and_grad(total)))
    values, gradients = run(*parts, temperatures)
    for i, temperature in enumerate(temperatures):
        one = jax.jit(jax.value_and_grad(total))(parts[0][i], parts[1][i], temperature)
        close((values[i], gradients[i]), jax.tree.map(np.asarray, one), 1e-6)
    # A number in front of the scalar that the TPU's kernels are handed is refused in some shapes.
    text = run.trace(*parts, temperatures).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in text


@pytest.mark.parametrize("dtype", lanes([jnp.bfloat16], [jnp.float32]))
def test_the_platform_that_is_lowered_for_chooses(dtype):
    tpu, triton = calls = "tpu_custom_call", "__gpu$xla.gpu.triton"
    wanted = [("cpu", None, []), ("tpu", None, [tpu]), ("cuda", None, [])]
    for platform, impl, found in [*wanted, ("cuda", "pallas_gpu", [triton])]:
        with a_gpu_in_name() if impl else contextlib.nullcontext():
            traced = gradient_of(33, 70, 257, dtype, impl=impl)
            text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert [x for x in calls if x in text] == found, platform


@pytest.mark.parametrize("vocab_first", lanes([True], [False]))
def test_temporaries_grow_with_neither_the_tokens_nor_the_vocabulary(vocab_first):
    """Of the pass and of its gradient: tiles, beside what has the size of an input."""

    def temporaries(rows: int, vocab: int) -> int:
        sizes = (vocab, 32) if vocab_first else (32, vocab)
        hidden, head, targets = jnp.ones((rows, 32)), jnp.ones(sizes), jnp.zeros(rows, jnp.int32)

        def loss(hidden, head):
            logp, entropy, _ = token_logprobs(hidden, head, targets, vocab_first=vocab_first)
            return jnp.sum(logp + entropy)

        program = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, head).compile()
        inputs = hidden.nbytes + head.nbytes + 16 * targets.nbytes
        return program.memory_analysis().temp_size_in_bytes - 2 * inputs

    tile = 4 * xla.ROWS * xla.VOCAB
    for rows, vocab in ((1024, 8192), (8192, 8192), (1024, 65536), (8192, 65536)):
        assert temporaries(rows, vocab) < 5 * tile < 4 * 8192 * 65536 / 40
