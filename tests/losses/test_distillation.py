"""Distillation: chunks, memory, garbage, zero probabilities, the top tokens, its minimum."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import compiled, lanes
from explained import unexplained
from golden_checks.common import response_batch
from jax.extend.core import jaxprs_in_params

from rljax.errors import InputError
from rljax.losses import distillation as distill
from rljax.losses.distillation import Readout
from rljax.losses.policy import PolicyOutputs

ROWS, TOKENS, EMBED, VOCAB = 2, 7, 5, 23


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def readouts(seed=0, **options):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape))

    student = Readout(draw(ROWS, TOKENS, EMBED), draw(EMBED, VOCAB), **options)
    return student, Readout(draw(ROWS, TOKENS, 3), draw(3, VOCAB), **options)


def plain(readout, temperature):
    """Log-probs by numpy."""
    z = np.asarray(readout.hidden) @ np.asarray(readout.head) * readout.logit_scale
    if readout.soft_cap:
        z = readout.soft_cap * np.tanh(z / readout.soft_cap)
    z = z / temperature
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def kl(p, q):
    return np.sum(np.exp(p) * (p - q), axis=-1)


@pytest.mark.parametrize("chunk_logits", [1, 200, 1 << 23])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_values_by_numpy_whatever_the_chunks(monkeypatch, chunk_logits, beta):
    monkeypatch.setattr(distill, "CHUNK_LOGITS", chunk_logits)
    student, teacher = readouts(logit_scale=0.7, soft_cap=3.0)
    run = jax.jit(lambda *pair: distill.distillation(*pair, beta=beta, temperature=1.4))
    loss, metrics = run(student, teacher)
    assert unexplained(metrics) == set()
    s, t = plain(student, 1.4), plain(teacher, 1.4)
    m = np.log(beta * np.exp(t) + (1 - beta) * np.exp(s))
    want = {0.0: kl(t, s), 1.0: kl(s, t)}.get(beta, beta * kl(t, m) + (1 - beta) * kl(s, m))
    np.testing.assert_allclose(loss, want, rtol=1e-10)
    np.testing.assert_allclose(metrics["student_entropy"], -np.sum(np.exp(s) * s, -1), rtol=1e-10)
    np.testing.assert_allclose(metrics["teacher_entropy"], -np.sum(np.exp(t) * t, -1), rtol=1e-10)
    same = s.argmax(-1) == t.argmax(-1)
    np.testing.assert_array_equal(metrics["same_first_word"], same)


@pytest.mark.parametrize("top_k", [1, 4, VOCAB])
def test_the_overlap_is_the_share_of_the_likeliest_tokens_of_both(top_k):
    student, teacher = readouts(seed=3)
    _, metrics = distill.distillation(student, teacher, top_k=top_k)
    likeliest = [np.argsort(-plain(one, 1.0))[..., :top_k] for one in (student, teacher)]
    pairs = zip(*(one.reshape(-1, top_k).tolist() for one in likeliest), strict=True)
    want = [len({*one} & {*other}) / top_k for one, other in pairs]
    np.testing.assert_allclose(np.ravel(metrics["top_k_overlap"]), want)
    assert top_k == VOCAB or 0 <= min(want) < 1


def gradients(student, teacher, weights, mask=None, **options):
    def total(s, t):
        loss, _ = distill.distillation(s, t, mask, **options)
        return jnp.sum(jnp.where(weights > 0, weights * loss, 0.0))

    return jax.jit(jax.grad(total, argnums=(0, 1)))(student, teacher)


def test_chunks_and_garbage_change_no_gradient(monkeypatch):
    student, teacher = readouts()
    rng = np.random.default_rng(1)
    mask = jnp.asarray(rng.integers(0, 2, (ROWS, TOKENS)), jnp.float64)
    weights = mask * jnp.asarray(rng.uniform(0.1, 1, mask.shape))
    options = {"beta": 0.4, "temperature": 0.8}
    want, of_teacher = gradients(student, teacher, weights, **options)
    assert float(jnp.abs(want.head).max()) > 1e-3
    assert not np.any(of_teacher.hidden) and not np.any(of_teacher.head)
    monkeypatch.setattr(distill, "CHUNK_LOGITS", 150)
    bad = jnp.where(mask > 0, 0.0, jnp.nan)[..., None]
    dirty = student.at(student.hidden + bad), teacher.at(teacher.hidden + bad)
    got, _ = gradients(*dirty, weights, mask, **options)
    np.testing.assert_allclose(got.head, want.head, rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(got.hidden, want.hidden, rtol=1e-9, atol=1e-14)


def largest_array(jaxpr) -> int:
    """Elements of the largest array that any equation writes, inner programs included."""
    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += [math.prod(v.aval.shape) for v in equation.outvars]
        sizes += [largest_array(inner) for inner in jaxprs_in_params(equation.params)]
    return max(sizes)


def test_no_array_of_all_tokens_times_the_vocabulary(monkeypatch):
    student, teacher = readouts()
    ids = jnp.zeros((ROWS, TOKENS, 2), jnp.int32)

    def programs():
        sums = (
            lambda s: jnp.sum(distill.distillation(s, teacher, top_k=4)[0]),
            lambda s: jnp.sum(distill.distillation(s, teacher, beta=0.0)[0]),
            lambda s: jnp.sum(distill.forward_kl_of_sent_entries(s, jnp.zeros(ids.shape), ids)[0]),
        )
        return [largest_array(jax.make_jaxpr(jax.grad(f))(student).jaxpr) for f in sums]

    whole = ROWS * TOKENS * VOCAB
    assert min(programs()) >= whole  # the check sees one: all tokens fit one chunk
    monkeypatch.setattr(distill, "CHUNK_LOGITS", 1)
    assert max(programs()) <= max(EMBED, 2 * ROWS) * VOCAB < whole / 2


def test_equal_distributions_are_the_minimum():
    student, _ = readouts()
    for beta, top_k in ((0.0, 0), (0.5, 4), (1.0, 0)):
        options = {"beta": beta, "top_k": top_k}
        loss, _ = compiled(distill.distillation)(student, student, **options)
        np.testing.assert_allclose(loss, 0.0, atol=1e-12)
        slope, _ = gradients(student, student, jnp.ones(loss.shape), **options)
        np.testing.assert_allclose(slope.hidden, 0.0, atol=1e-12)


def test_swapping_the_two_swaps_beta():
    s, t = (jax.nn.log_softmax(x.hidden @ x.head) for x in readouts())
    for beta in (0.0, 0.2, 0.5, 1.0):
        one = distill.jsd_terms(s, t, beta=beta)
        other = distill.jsd_terms(t, s, beta=1 - beta)
        np.testing.assert_allclose(one, other, atol=1e-14)


def test_words_of_probability_zero():
    s = jnp.log(jnp.array([0.5, 0.5, 0.0, 0.0]))
    t = jnp.log(jnp.array([0.25, 0.0, 0.75, 0.0]))
    for beta in (0.3, 0.5):

        def f(a):
            return jnp.sum(distill.jsd_terms(a, t, beta=beta))  # noqa: B023

        value, slope = jax.jit(jax.value_and_grad(f))(s)
        p, r = np.exp(s), np.exp(t)
        m = beta * r + (1 - beta) * p

        def half(x):
            return np.sum([a * np.log(a / b) for a, b in zip(x, m, strict=True) if a > 0])  # noqa: B023

        np.testing.assert_allclose(value, beta * half(r) + (1 - beta) * half(p), rtol=1e-9)
        assert np.isfinite(slope).all()
    # The teacher never says what the student never says: nothing to pay for.
    both = jnp.log(jnp.array([0.5, 0.5, 0.0]))
    for beta in (0.0, 1.0):
        assert float(jnp.sum(distill.jsd_terms(both, both, beta=beta))) == 0.0
    assert float(jnp.sum(distill.jsd_terms(s, t, beta=0.0))) > 1e20  # KL(T || S) is infinite


@pytest.mark.parametrize("side", ["student", "teacher"])
@pytest.mark.parametrize("tail", [True, False])
def test_top_words_by_numpy(side, tail):
    student, teacher = readouts(3)
    k = 4
    loss, _ = compiled(distill.distillation)(
        student, teacher, beta=0.0, top_k=k, top_k_of=side, tail=tail, temperature=1.2
    )
    s, t = plain(student, 1.2), plain(teacher, 1.2)
    ids = np.argsort(-(s if side == "student" else t), axis=-1)[..., :k]

    def kept(x):
        p = np.take_along_axis(np.exp(x), ids, -1)
        rest = 1 - p.sum(-1, keepdims=True)
        return np.log(np.concatenate([p, rest], -1) if tail else p / p.sum(-1, keepdims=True))

    np.testing.assert_allclose(loss, kl(kept(t), kept(s)), rtol=1e-9)


def test_all_words_as_top_words_are_the_whole():
    student, teacher = readouts()
    run = compiled(distill.distillation)
    whole, _ = run(student, teacher, beta=0.5)
    for tail in (True, False):
        got, _ = run(student, teacher, beta=0.5, top_k=VOCAB, tail=tail)
        np.testing.assert_allclose(got, whole, atol=1e-5 if tail else 1e-12)


def test_float32_close_to_float64():
    student, teacher = readouts()
    narrow = [jax.tree.map(lambda x: x.astype(jnp.float32), r) for r in (student, teacher)]
    weights = jnp.ones((ROWS, TOKENS))
    for beta in (0.0, 0.5):
        want, got = (
            gradients(*pair, weights, beta=beta)[0] for pair in ((student, teacher), narrow)
        )
        assert got.head.dtype == jnp.float32
        np.testing.assert_allclose(got.head, want.head, atol=2e-5)


def test_sampled_form_has_the_gradient_of_the_reverse_kl_on_average():
    rng = np.random.default_rng(0)
    z, teacher = (
        jnp.asarray(rng.normal(size=4)),
        jax.nn.log_softmax(jnp.asarray(rng.normal(size=4))),
    )
    batch = response_batch(np.ones((1, 4)), ref_logprobs=teacher[None])
    p = jax.nn.softmax(z)

    def average(z):
        logp = jax.nn.log_softmax(z)[None]
        return jnp.sum(p[None] * distill.sampled_reverse_kl(PolicyOutputs(logp, logp), batch)[0])

    @jax.jit
    @jax.grad
    def exact(z):
        return jnp.sum(distill.jsd_terms(jax.nn.log_softmax(z), teacher, beta=1.0))

    np.testing.assert_allclose(jax.jit(jax.grad(average))(z), exact(z), atol=1e-12)
    dirty = batch.replace(
        mask=jnp.array([[1.0, 1, 0, 0]]), ref_logprobs=batch.ref_logprobs.at[0, 2:].set(jnp.nan)
    )
    logp = jnp.array([[-1.0, -2.0, jnp.nan, jnp.nan]])

    def f(x):
        return jnp.sum(distill.sampled_reverse_kl(PolicyOutputs(x, x), dirty)[0])

    assert np.isfinite(jax.grad(f)(logp)).all()


@pytest.mark.parametrize("beta", lanes([0.5], [0.0, 1.0]))
def test_a_student_learns_its_teacher(beta):
    student, teacher = readouts(5)
    weights = jnp.full((ROWS, TOKENS), 1 / (ROWS * TOKENS))

    @jax.jit
    def learn(hidden):
        def step(_, hidden):
            # Under a head of ones the hidden states are the logits.
            free = Readout(hidden, jnp.eye(VOCAB))
            return hidden - 20 * gradients(free, teacher, weights, beta=beta)[0].hidden

        return jax.lax.fori_loop(0, 400, step, hidden)

    start = jnp.zeros((ROWS, TOKENS, VOCAB))
    first, last = (
        float(jnp.mean(distill.distillation(Readout(x, jnp.eye(VOCAB)), teacher, beta=beta)[0]))
        for x in (start, learn(start))
    )
    assert last < 0.05 * first and first > 0.1


def test_bad_options():
    student, teacher = readouts()
    for options, word in (
        ({"beta": 1.5}, "beta"),
        ({"temperature": 0.0}, "temperature"),
        ({"top_k": VOCAB + 1}, "top_k"),
        ({"top_k_of": "both"}, "top_k_of"),
    ):
        with pytest.raises(InputError, match=word):
            distill.distillation(student, teacher, **options)
    with pytest.raises(InputError, match="same vocabulary"):
        distill.distillation(student, Readout(teacher.hidden, teacher.head[:, :-1]))
