"""GAE, discounted sums and the next token: every implementation against a loop in float64 and
verl's vectors, gradients, rows over several devices, the choice by platform."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import golden_cases, lanes
from jax.sharding import NamedSharding, PartitionSpec

from rljax.errors import InputError
from rljax.kernels.gae import api, discounted_sum, gae, next_chosen, pallas_gpu, pallas_tpu, xla
from rljax.kernels.gae import reference as plain
from rljax.mesh import make_mesh, row_sharding

NAMES = ("gae", "discounted_sum", "next_chosen")


def interpreted(module):
    functions = {n: functools.partial(vars(module)[n], interpret=True) for n in NAMES}
    return types.SimpleNamespace(**functions)


IMPLEMENTATIONS = {
    "reference": plain,
    "scan": types.SimpleNamespace(
        gae=xla.scan_gae, discounted_sum=xla.scan_sum, next_chosen=xla.gathered_next
    ),
    "doubled": types.SimpleNamespace(
        gae=xla.doubled_gae, discounted_sum=xla.doubled_sum, next_chosen=xla.doubled_next
    ),
    "pallas_tpu": interpreted(pallas_tpu),
    "pallas_gpu": interpreted(pallas_gpu),
}


def loop(rewards, values, mask, ids, gamma, lam):
    """(A, A + V, sum of rewards discounted by lam, V at the next token), in float64, by hand."""
    rows, tokens = mask.shape
    ids = np.zeros(mask.shape) if ids is None else ids
    lam, gamma = np.broadcast_to(lam, mask.shape), gamma[:, 0]
    out = np.zeros((4, rows, tokens))
    for b in range(rows):
        after = None  # the next chosen token of the row
        for t in reversed(range(tokens)):
            linked = after is not None and ids[b, after] == ids[b, t]
            following = values[b, after] if linked else 0.0
            out[3, b, t] = following
            if not mask[b, t] > 0:
                continue
            advantage = rewards[b, t] + gamma[b] * following - values[b, t]
            total = rewards[b, t]
            if linked:
                advantage += gamma[b] * lam[b, t] * out[0, b, after]
                total += lam[b, t] * out[2, b, after]
            out[:3, b, t] = advantage, advantage + values[b, t], total
            after = t
    return out


def problem(rows, tokens, *, packed, per_token, seed=0):
    """Arrays with holes, and NaN wherever mask is 0. Packed: runs of segments in even rows, ids in
    any order in odd ones."""
    rng = np.random.default_rng(seed)
    mask = (rng.random((rows, tokens)) < 0.6).astype(np.float32)
    if rows > 2:
        mask[2] = 0.0  # a row without tokens
    ids = None
    if packed:
        ids = rng.integers(0, 3, mask.shape).astype(np.int32)
        ids[::2] = np.sort(ids[::2], axis=1)

    def garbage(x):
        return np.where(mask > 0, x, np.nan).astype(np.float32)

    rewards, values = (garbage(rng.normal(size=mask.shape)) for _ in range(2))
    gamma = rng.uniform(0.8, 1.0, (rows, 1)).astype(np.float32)
    lam = rng.uniform(0.0, 1.0, (rows, tokens if per_token else 1)).astype(np.float32)
    return rewards, values, mask, ids, gamma, garbage(lam) if per_token else lam


@functools.cache
def program(name):
    """All three functions of an implementation as one program."""
    run = IMPLEMENTATIONS[name]

    def all_of(rewards, values, mask, ids, gamma, lam):
        total = run.discounted_sum(rewards, lam, mask, ids)
        return (
            *run.gae(rewards, values, mask, ids, gamma, lam),
            total,
            run.next_chosen(values, mask, ids),
        )

    return jax.jit(all_of)


def check(name, arguments):
    want = loop(*arguments)
    for got, exact in zip(program(name)(*arguments), want, strict=True):
        assert got.dtype == jnp.float32 and got.shape == exact.shape
        largest = max(1.0, np.abs(exact).max())
        np.testing.assert_allclose(np.asarray(got), exact, rtol=0, atol=1e-6 * largest)


SHAPES = [(1, 1), (3, 5), (9, 129), (3, 300), (9, 1300)]
FAST = [("reference", (9, 129)), ("scan", (9, 129)), ("doubled", (9, 129))]
FAST += [("pallas_tpu", (3, 5)), ("pallas_tpu", (9, 1300)), ("pallas_gpu", (9, 129))]
SLOW = [(n, s) for n in IMPLEMENTATIONS for s in SHAPES if (n, s) not in FAST]


# The smallest of them meets whole rows, below.
@pytest.mark.parametrize("name,shape", [case for case in FAST if case != ("pallas_tpu", (3, 5))])
def test_packed_rows_with_holes_and_lambda_per_token(name, shape):
    check(name, problem(*shape, packed=True, per_token=True))
    rewards, values, mask, ids, gamma, lam = problem(*shape, packed=True, per_token=True, seed=1)
    for g, number in ((0.0, 0.5), (1.0, 0.0), (1.0, 1.0), (0.99, 0.95)):
        lam = np.full_like(lam, number)
        check(name, (rewards, values, mask, ids, np.full_like(gamma, g), lam))


@pytest.mark.slow
@pytest.mark.parametrize("name,shape", [*SLOW, ("pallas_tpu", (3, 5))])
def test_packed_rows_of_every_shape(name, shape):
    test_packed_rows_with_holes_and_lambda_per_token(name, shape)


@pytest.mark.smoke
@pytest.mark.parametrize("name,shape", FAST[1:4])
def test_whole_rows_and_lambda_per_row(name, shape):
    check(name, problem(*shape, packed=False, per_token=False))


@pytest.mark.slow
@pytest.mark.parametrize("name,shape", SLOW + FAST[4:])
def test_whole_rows_of_every_shape(name, shape):
    for packed, per_token in ((False, False), (True, False), (False, True)):
        check(name, problem(*shape, packed=packed, per_token=per_token))


def verl_batch(cases):
    """verl's cases as one problem [rows of all cases, longest], with gamma and lambda per row."""
    longest = max(case.inputs["response_mask"].shape[1] for case in cases)

    def wide(x):
        return np.pad(
            np.asarray(x, np.float64),
            ((0, 0), (0, longest - np.shape(x)[1])),
            constant_values=np.nan,
        )

    def rows(kind, key):
        return np.concatenate([wide(vars(c)[kind][key]) for c in cases])

    mask = np.nan_to_num(rows("inputs", "response_mask"))

    def column(key):
        return np.concatenate(
            [np.full((len(c.inputs["response_mask"]), 1), float(c.params[key])) for c in cases]
        )

    given = (rows("inputs", "token_level_rewards"), rows("inputs", "values"), mask, None)
    wanted = (rows("outputs", "advantages_raw"), rows("outputs", "returns"))
    return (*given, column("gamma"), column("lam")), wanted


@pytest.mark.parametrize(
    "name", lanes(["scan", "doubled"], ["reference", "pallas_tpu", "pallas_gpu"])
)
def test_verls_vectors(name):
    arguments, wanted = verl_batch(list(golden_cases("verl", "adv_gae.npz")[1]))
    mask = arguments[2] > 0
    narrow = [None if a is None else a.astype(np.float32) for a in arguments]
    for got, want in zip(jax.jit(IMPLEMENTATIONS[name].gae)(*narrow), wanted, strict=True):
        largest = np.abs(want[mask]).max()
        np.testing.assert_allclose(np.asarray(got)[mask], want[mask], rtol=0, atol=1e-6 * largest)
        assert (np.asarray(got)[~mask] == 0).all()
    if name in ("reference", "scan", "doubled"):
        with jax.enable_x64(True):
            exact = jax.jit(IMPLEMENTATIONS[name].gae)(*arguments)
            for got, want in zip(exact, wanted, strict=True):
                np.testing.assert_allclose(np.asarray(got)[mask], want[mask], rtol=1e-9, atol=1e-9)


# -- gradients


@pytest.mark.parametrize("impl", lanes(["xla"], ["reference"]))
@pytest.mark.parametrize("per_token", [True, False])
def test_gradients_of_a_discounted_sum(impl, per_token):
    """Against differences of the loop; NaN at mask 0 reaches neither gradient."""
    x, values, mask, ids, _, decay = problem(4, 9, packed=True, per_token=per_token)
    weights = np.random.default_rng(5).normal(size=(2, *mask.shape))
    one = np.ones((4, 1))

    def exact(x, decay):
        out = loop(x, values, mask, ids, one, decay)
        return np.sum(weights[0] * out[2] ** 2)

    def ours(x, decay):
        decay = decay if per_token else decay[:, 0]
        y = discounted_sum(x, decay, mask, ids, impl=impl)
        return jnp.sum(weights[0] * y**2)

    with jax.enable_x64(True):
        point = [jnp.asarray(a, jnp.float64) for a in (x, decay)]
        gradients = jax.jit(jax.grad(ours, argnums=(0, 1)))(*point)
    for k, gradient in enumerate(gradients):
        want = np.zeros(gradient.shape)
        for at in np.ndindex(*want.shape):
            if np.isnan(point[k][at]):
                continue
            sides = []
            for step in (1e-5, -1e-5):
                moved = [np.array(p) for p in point]
                moved[k][at] += step
                sides.append(exact(*moved))
            want[at] = (sides[0] - sides[1]) / 2e-5
        np.testing.assert_allclose(gradient, want, rtol=1e-6, atol=1e-7)


def test_gradients_of_the_next_token():
    x, _, mask, ids, _, _ = problem(4, 9, packed=True, per_token=False)
    weights = np.random.default_rng(5).normal(size=mask.shape).astype(np.float32)
    got = jax.jit(jax.grad(lambda x: jnp.sum(weights * next_chosen(x, mask, ids))))(x)
    # Linear in x: the gradient at a token is what its own unit brings.
    for b, t in np.ndindex(*mask.shape):
        unit = np.zeros_like(x)
        unit[b, t] = 1.0
        want = np.sum(weights * loop(unit, unit, mask, ids, np.ones((4, 1)), np.ones((4, 1)))[3])
        np.testing.assert_allclose(got[b, t], want, rtol=1e-5, atol=1e-6)


def test_gae_is_a_constant():
    rewards, values, mask, ids, gamma, lam = problem(2, 6, packed=True, per_token=False)
    rewards, values = np.nan_to_num(rewards), np.nan_to_num(values)

    def total(rewards, values, lam):
        found = gae(rewards, values, mask, gamma=gamma[:, 0], lam=lam, segment_ids=ids)
        return sum(jnp.sum(x**2) for x in found)

    gradients = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(rewards, values, lam[:, 0])
    assert all((g == 0).all() for g in gradients)


# -- which implementation, and where


def lowered(platform, dtype=jnp.float32, impl="auto"):
    x = jax.ShapeDtypeStruct((12, 300), dtype)

    def run(rewards, values, mask):
        def total(x):
            return jnp.sum(discounted_sum(x, 0.9, mask, impl=impl) ** 2)

        advantages, _ = gae(rewards, values, mask, gamma=0.9, lam=0.95, impl=impl)
        return advantages, jax.grad(total)(rewards)

    return jax.jit(run).trace(x, x, x).lower(lowering_platforms=(platform,)).as_text()


def test_the_platform_of_the_program_chooses():
    """Not that of the host, which is a CPU here."""
    # GAE, the sum, and in its gradient the sum from the left and the token before.
    assert lowered("tpu").count("custom_call @tpu_custom_call") in (3, 4)  # equal calls may merge
    assert "tpu_custom_call" not in lowered("tpu", impl="xla")
    for platform in ("cpu", "cuda"):
        assert "tpu_custom_call" not in lowered(platform) and "triton" not in lowered(platform)
    with jax.enable_x64(True):
        assert "tpu_custom_call" not in lowered("tpu", jnp.float64)


def test_the_triton_kernel_lowers_for_cuda():
    try:
        text = lowered("cuda", impl="pallas_gpu")
    except RuntimeError as error:
        pytest.skip(f"this JAX lowers Triton kernels beside a GPU only: {error}")
    assert "triton" in text


@pytest.fixture(scope="module")
def eight():
    return make_mesh(2, 2, 2)


def test_rows_over_eight_devices_move_nothing(eight):
    arguments = problem(8, 140, packed=True, per_token=True)
    kernel = IMPLEMENTATIONS["pallas_tpu"].gae
    program = jax.jit(functools.partial(api.over_rows, kernel))
    # The mesh is known by one array alone.
    placed = [jax.device_put(a, row_sharding(eight)) for a in arguments[:-1]] + [arguments[-1]]
    want = loop(*arguments)[:2]
    for got, exact in zip(program(*placed), want, strict=True):
        assert got.sharding.is_equivalent_to(row_sharding(eight), 2)
        np.testing.assert_allclose(got, exact, rtol=0, atol=1e-5)
    placed[-1] = jax.device_put(arguments[-1], row_sharding(eight))
    text = program.lower(*placed).compile().as_text()
    assert not any(word in text for word in ("all-gather", "all-to-all", "collective-permute"))


def test_rows_that_do_not_divide_are_whole_on_every_device(eight):
    arguments = problem(3, 20, packed=False, per_token=False)
    whole = NamedSharding(eight, PartitionSpec())
    placed = [None if a is None else jax.device_put(a, whole) for a in arguments]
    kernel = IMPLEMENTATIONS["pallas_tpu"].discounted_sum
    x, _, mask, ids, _, decay = placed
    got = jax.jit(functools.partial(api.over_rows, kernel))(x, decay, mask, ids)
    np.testing.assert_allclose(got, loop(*arguments)[2], rtol=0, atol=1e-5)


def test_inside_the_callers_own_shard_map(eight):
    rewards, values, mask, _, _, _ = problem(8, 9, packed=False, per_token=False)
    run = functools.partial(gae, gamma=0.9, lam=0.95)
    rows = PartitionSpec(("data", "fsdp"))
    mapped = jax.shard_map(run, mesh=eight, in_specs=rows, out_specs=rows)
    for got, want in zip(
        jax.jit(mapped)(rewards, values, mask), run(rewards, values, mask), strict=True
    ):
        np.testing.assert_array_equal(got, want)


# -- what is let in


def test_numbers_integers_and_booleans_are_taken():
    rewards, values, mask, ids, _, _ = problem(4, 9, packed=True, per_token=False)
    lam = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    want = loop(rewards, values, mask, ids, np.full((4, 1), 0.9), lam[:, None])
    got = gae(rewards, values, mask > 0, gamma=0.9, lam=lam, segment_ids=ids)
    np.testing.assert_allclose(got, want[:2], rtol=0, atol=1e-6)
    x = np.arange(36, dtype=np.int32).reshape(4, 9)
    after = next_chosen(x, mask, ids)
    assert after.dtype == jnp.int32
    np.testing.assert_array_equal(after, loop(x, x, mask, ids, np.ones((4, 1)), lam[:, None])[3])


@pytest.mark.parametrize("shape", lanes([(0, 5)], [(3, 0)]))
def test_nothing_gives_nothing(shape):
    x = np.zeros(shape, np.float32)
    found = gae(x, x, x, gamma=0.9, lam=0.95)
    found += discounted_sum(x, 0.9, x), next_chosen(x, x)
    found += (jax.grad(lambda x: jnp.sum(discounted_sum(x, 0.9, x)))(x),)
    assert [y.shape for y in found] == [shape] * 5


@pytest.mark.parametrize(
    "what,change",
    [
        ("values", dict(values=np.zeros((2, 4)))),
        ("mask", dict(mask=np.zeros((3, 3)))),
        ("axes", dict(rewards=np.zeros(3), values=np.zeros(3))),
        ("lam", dict(lam=np.zeros(4))),
        ("gamma", dict(gamma=np.zeros((2, 3)))),
        ("impl", dict(impl="pallas")),
        ("segment_ids", dict(segment_ids=np.zeros((2, 1), np.int32))),
    ],
)
def test_bad_arguments_are_named(what, change):
    zeros = np.zeros((2, 3), np.float32)
    given = dict(rewards=zeros, values=zeros, mask=zeros, gamma=1.0, lam=1.0) | change
    with pytest.raises(InputError, match=what):
        gae(given.pop("rewards"), given.pop("values"), given.pop("mask"), **given)
