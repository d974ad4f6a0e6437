"""FIPO, TOPR, LUFFY, M2PO and REAL against their published formulas: loops in torch's float64,
whose autograd gives the gradients, on random rows with tool replies, empty rows and groups of any
size; and the limits in which each is a known loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_checks.common import response_batch

from rljax import learn as update
from rljax.batch import NOT_SAMPLED
from rljax.losses import policy
from rljax.losses.policy import PolicyOutputs

torch = pytest.importorskip("torch")
TOKEN, SEQUENCE, SUM = update.token_mean, update.seq_mean_token_mean, update.seq_mean_token_sum


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def random_case(seed, spread=0.5):
    """(log-probs, batch): 14 rows of 9 columns, groups of 1 to 5 in any order, some rows without
    tokens, a group of advantages 0, one of right rows alone, NaN at mask 0."""
    random = np.random.default_rng(seed)
    group = random.permutation(np.repeat([4, 1, 9, 3, 7], [5, 4, 2, 2, 1]))
    shape = (len(group), 9)
    mask = random.integers(0, 4, shape) > 0
    mask[random.integers(0, len(group), 2)] = False
    signs = random.choice([-1.0, 1.0], len(group))
    signs = np.where(group == 9, 0.0, np.where(group == 3, 1.0, signs))
    logp = random.normal(-1.5, 0.6, shape)
    advantages = (signs * random.uniform(0.3, 2, len(group)))[:, None] * np.ones(shape)
    others = {n: logp + random.normal(0, spread, shape) for n in ("old", "sampler")}
    fields = dict(
        old_logprobs=others["old"], sampler_logprobs=others["sampler"], advantages=advantages
    )
    fields = {n: np.where(mask, x, np.nan) for n, x in fields.items()}
    return np.where(mask, logp, np.nan), response_batch(mask, group=group, **fields)


@functools.cache
def program(loss, options, reduction):
    def total(logp, batch):
        out, metrics = loss(PolicyOutputs(logp, jnp.zeros_like(logp)), batch, **dict(options))
        return update.weighted_loss(out, metrics, batch, reduction(batch))

    return jax.jit(jax.value_and_grad(total, has_aux=True))


def ours(loss, logp, batch, reduction, **options):
    """(loss, gradient, means of the metrics)."""
    function = program(loss, tuple(options.items()), reduction)
    (value, sums), gradient = jax.device_get(function(jnp.asarray(logp), batch))
    return value, gradient, {n: a / max(b, 1) for n, (a, b) in sums.items()}


def rows_of(logp, batch, old="old"):
    """A torch leaf, and for each row its policy tokens as (log pi, log pi_old, A, group)."""
    x = torch.tensor(np.nan_to_num(logp), dtype=torch.float64, requires_grad=True)
    before = torch.tensor(np.nan_to_num(np.asarray(getattr(batch, f"{old}_logprobs"))))
    advantages = torch.tensor(np.nan_to_num(np.asarray(batch.advantages)))
    at = [np.flatnonzero(m) for m in np.asarray(batch.mask)]
    rows = [
        (x[b, t], before[b, t], advantages[b, t], int(batch.group[b])) for b, t in enumerate(at)
    ]
    return x, rows


def check(loss, theirs, logp, batch, reduction, old="old", **options):
    x, rows = rows_of(logp, batch, old)
    want = theirs(rows)
    want.backward()
    value, gradient, metrics = ours(loss, logp, batch, reduction, **options)
    np.testing.assert_allclose(value, want.item(), rtol=1e-10)
    np.testing.assert_allclose(gradient, x.grad.numpy(), rtol=1e-9, atol=1e-13)
    assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0
    return metrics


def token_count(rows):
    return sum(len(logp) for logp, *_ in rows)


# -- FIPO


def published_fipo(
    rows, clip_low, clip_high, dual_clip, half_life, weight_low, weight_high, safe_ratio
):
    total = torch.zeros((), dtype=torch.float64)
    for logp, old, advantages, _ in rows:
        shift = (logp - old).detach()
        for t in range(len(logp)):
            future = torch.zeros((), dtype=torch.float64)
            for k in range(t, len(logp)):
                if dual_clip is None or shift[k].exp() <= dual_clip:
                    future += 2 ** (-(k - t) / half_life) * shift[k]
            f = future.exp().clamp(1 - weight_low, 1 + weight_high)
            if safe_ratio is not None and advantages[t] < 0 and shift[t].exp() > safe_ratio:
                f = f.clamp(max=1.0)
            a, ratio = advantages[t] * f, (logp[t] - old[t]).exp()
            loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - clip_low, 1 + clip_high))
            if dual_clip is not None and a < 0:
                loss = torch.minimum(loss, -a * dual_clip)
            total = total + loss
    return total / token_count(rows)


FIPO = dict(
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=10.0,
    half_life=32.0,
    weight_low=0.0,
    weight_high=0.2,
    safe_ratio=10.0,
)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        dict(weight_low=0.2, half_life=2.0, dual_clip=1.5, safe_ratio=1.2),
        dict(weight_low=1.0, weight_high=9.0, half_life=0.7, dual_clip=None, safe_ratio=None),
        dict(weight_low=0.5, weight_high=0.5, half_life=8.0, dual_clip=2.0, safe_ratio=None),
    ],
)
def test_fipo_is_the_published_formula(changed):
    options = FIPO | changed
    for seed in range(3):
        logp, batch = random_case(seed)
        metrics = check(
            policy.fipo, lambda rows: published_fipo(rows, **options), logp, batch, TOKEN, **options
        )
        assert (metrics["fipo_skipped"] > 0) == (options["dual_clip"] in (1.5, 2.0))


def test_fipo_defaults_are_those_of_the_script_for_32b():
    logp, batch = random_case(7)
    assert (
        ours(policy.fipo, logp, batch, TOKEN)[0] == ours(policy.fipo, logp, batch, TOKEN, **FIPO)[0]
    )


def test_fipo_without_a_range_is_ppo():
    logp, batch = random_case(3)
    clip = dict(clip_low=0.2, clip_high=0.28, dual_clip=10.0)
    value, gradient, _ = ours(policy.fipo, logp, batch, TOKEN, weight_high=0.0)
    want = ours(policy.ppo_clip, logp, batch, TOKEN, **clip)
    np.testing.assert_allclose(value, want[0], rtol=1e-12)
    np.testing.assert_allclose(gradient, want[1], rtol=1e-12)


def test_fipo_of_packed_and_of_long_sequences_looks_at_its_own_tokens():
    """A half-life far below a token leaves the token's own ratio, cut to the range."""
    logp, batch = random_case(5)
    metrics = ours(
        policy.fipo, logp, batch, TOKEN, half_life=0.01, weight_low=0.5, weight_high=0.5
    )[2]
    ratio = np.exp(logp - np.asarray(batch.old_logprobs))[np.asarray(batch.mask) > 0]
    np.testing.assert_allclose(metrics["fipo_weight"], ratio.clip(0.5, 1.5).mean(), rtol=1e-9)
    assert metrics["fipo_weight_bounded"] == np.mean((ratio < 0.5) | (ratio > 1.5))


# -- TOPR


def published_topr(rows, level):
    total, live = torch.zeros((), dtype=torch.float64), 0
    for logp, old, advantages, _ in rows:
        live += len(logp) > 0
        ratio = (logp - old).detach().exp()
        if level == "sequence":
            ratio = ratio.prod() * torch.ones_like(ratio)
        w = torch.where(advantages < 0, ratio.clamp(0, 1), torch.ones_like(ratio))
        total = total - (w * advantages * logp).sum()
    return total / live


@pytest.mark.parametrize("level", ["sequence", "token"])
@pytest.mark.parametrize("old", ["sampler", "old"])
def test_topr_is_the_published_formula(level, old):
    for seed in range(3):
        logp, batch = random_case(seed)
        options = dict(level=level, behaviour=old)
        check(
            policy.topr, lambda rows: published_topr(rows, level), logp, batch, SUM, old, **options
        )


def test_topr_learns_good_samples_as_supervised_ones_and_forgets_bad_ones_that_are_gone():
    logp, batch = random_case(2)
    good = batch.replace(advantages=jnp.abs(batch.advantages))
    got, want = (ours(f, logp, good, SUM)[1] for f in (policy.topr, policy.policy_gradient))
    np.testing.assert_allclose(got, want, rtol=1e-12)
    bad = batch.replace(advantages=-jnp.abs(batch.advantages))
    assert np.abs(ours(policy.topr, logp, bad, SUM)[1]).max() > 0.01
    gone = ours(policy.topr, logp - 40.0, bad, SUM)[1]
    assert np.abs(gone).max() < 1e-12
    # One that has become likelier is pushed down as on policy, not harder.
    likelier = ours(policy.topr, logp + 40.0, bad, SUM)[1]
    np.testing.assert_allclose(likelier, ours(policy.policy_gradient, logp, bad, SUM)[1])


# -- LUFFY


def published_luffy(rows, gamma, clip_low, clip_high):
    total, count = torch.zeros((), dtype=torch.float64), token_count(rows)
    for number, (logp, old, advantages, _) in enumerate(rows):
        if number % 3 == 0:  # a demonstration
            total = total - (advantages * logp.exp() / (logp.exp() + gamma)).sum()
            continue
        ratio = (logp - old).exp()
        clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
        total = total + torch.maximum(-advantages * ratio, -advantages * clipped).sum()
    return total / count


def test_luffy_is_the_published_formula():
    for seed in range(3):
        logp, batch = random_case(seed)
        shown = (np.arange(batch.rows) % 3 == 0)[:, None] & (np.asarray(batch.mask) > 0)
        batch = batch.replace(policy_version=jnp.where(shown, NOT_SAMPLED, 5).astype(jnp.int32))
        # What a demonstration's sampler and old log-probs are said to be changes nothing.
        batch = batch.replace(old_logprobs=jnp.where(shown, -3.0, batch.old_logprobs))
        options = dict(gamma=0.1, clip_low=0.3, clip_high=0.2)
        theirs = functools.partial(published_luffy, **options)
        metrics = check(policy.luffy, theirs, logp, batch, TOKEN, **options)
        p = np.exp(np.where(shown, logp, -np.inf))
        want = (p / (p + 0.1)).sum() / np.sum(np.asarray(batch.mask) > 0)
        np.testing.assert_allclose(metrics["demonstration_weight"], want, rtol=1e-9)


# -- M2PO


def published_m2po(rows, threshold, tokens):
    """Algorithm 1 of the paper, and its objective over all tokens."""
    every = [
        (x, o, a) for logp, old, adv, _ in rows for x, o, a in zip(logp, old, adv, strict=True)
    ]
    squares = [float((x - o).detach() ** 2) for x, o, _ in every]
    region = [
        i
        for i, (x, o, a) in enumerate(every)
        if tokens == "all" or (a > 0 and x > o) or (a < 0 and x < o)
    ]
    masked = set()
    while region and np.mean([squares[i] for i in region]) > threshold:
        worst = max(region, key=lambda i: squares[i])
        masked.add(worst)
        region.remove(worst)
    kept = [-a * (x - o).exp() for i, (x, o, a) in enumerate(every) if i not in masked]
    return sum(kept) / len(every), len(masked) / len(every)


@pytest.mark.parametrize("tokens", ["trust_region", "all"])
@pytest.mark.parametrize("threshold", [0.004, 0.04, 0.15, 10.0])
def test_m2po_is_algorithm_1_of_the_paper(tokens, threshold):
    for seed in range(3):
        logp, batch = random_case(seed)
        shares = []

        def theirs(rows, shares=shares):
            loss, share = published_m2po(rows, threshold, tokens)
            shares.append(share)
            return loss

        options = dict(threshold=threshold, tokens=tokens)
        metrics = check(policy.m2po, theirs, logp, batch, TOKEN, "sampler", **options)
        np.testing.assert_allclose(metrics["second_moment_masked"], shares[0], rtol=1e-12)
        assert (shares[0] > 0) == (threshold < 1)


def test_m2po_without_a_bound_is_the_weighted_policy_gradient_and_with_0_has_no_outward_push():
    logp, batch = random_case(6)
    free = ours(policy.m2po, logp, batch, TOKEN, threshold=1e9)
    unclipped = dict(clip_low=1.0, clip_high=1e9, dual_clip=None)
    want = ours(
        policy.ppo_clip,
        logp,
        batch.replace(old_logprobs=batch.sampler_logprobs),
        TOKEN,
        **unclipped,
    )
    np.testing.assert_allclose(free[1], want[1], rtol=1e-12)
    none = ours(policy.m2po, logp, batch, TOKEN, threshold=0.0)[1]
    away = logp - np.asarray(batch.sampler_logprobs)
    assert (none[np.asarray(batch.advantages) * away > 0] == 0).all() and np.abs(none).max() > 0


def test_m2po_masks_equals_alike():
    """Four tokens a step up of 0.3, one of 0.1: the mean of all is above 0.04, and so it is with
    any of the four."""
    logp = np.array([[0.3, 0.3, 0.1], [0.3, 0.3, 0.0]]) - 2
    old = np.full((2, 3), -2.0)
    batch = response_batch(
        [[1, 1, 1], [1, 1, 0]], advantages=np.ones((2, 3)), sampler_logprobs=old, group=[0, 0]
    )
    gradient = ours(policy.m2po, logp, batch, TOKEN, threshold=0.04)[1]
    np.testing.assert_array_equal(gradient != 0, [[False, False, True], [False] * 3])
    gradient = ours(policy.m2po, logp, batch, TOKEN, threshold=0.08)[1]
    np.testing.assert_array_equal(gradient != 0, [[True] * 3, [True, True, False]])


# -- REAL


def published_real(rows, tau):
    """The sum over questions with both labels, divided by all questions that have tokens."""
    losses, groups = torch.zeros((), dtype=torch.float64), {}
    for logp, old, advantages, group in rows:
        if len(logp):
            groups.setdefault(group, []).append(((logp - old).mean() / tau, advantages[0]))
    for samples in groups.values():
        right = [s for s, a in samples if a > 0]
        wrong = [s for s, a in samples if a < 0]
        if right and wrong:
            losses = losses + torch.log(1 + sum(torch.exp(-s) for s in right))
            losses = losses + torch.log(1 + sum(torch.exp(s) for s in wrong))
    return losses / len(groups)


@pytest.mark.parametrize("tau", [0.05, 0.5, 3.0])
def test_real_is_the_published_formula(tau):
    for seed in range(4):
        logp, batch = random_case(seed)
        metrics = check(
            policy.real, lambda rows: published_real(rows, tau), logp, batch, SEQUENCE, tau=tau
        )
        assert 0 < metrics["real_groups"] < 1


def test_real_far_from_the_old_policy_has_bounded_gradients():
    logp, batch = random_case(1)
    for shift in (-3e3, 3e3):
        value, gradient, _ = ours(policy.real, logp + shift, batch, SEQUENCE, tau=0.5)
        assert np.isfinite(value) and np.isfinite(gradient).all()
        assert 0.01 < np.abs(gradient).sum() <= 2 * 1 / 0.5  # of each class 1 / tau


def test_real_at_a_large_tau_is_the_policy_gradient_of_its_labels():
    """tau times the loss: each right row has the advantage 1 / (1 + right rows), as on policy."""
    logp, batch = random_case(0)
    group = np.asarray(batch.group)
    live = np.asarray(batch.mask).any(axis=1)
    sign = np.sign(np.nan_to_num(np.asarray(batch.advantages)).sum(axis=1))
    rights, wrongs = (
        np.array([np.sum((group == g) & (sign == s)) for g in group]) for s in (1, -1)
    )
    a = np.where(sign > 0, 1 / (1 + rights), -1 / (1 + wrongs)) * (sign != 0)
    a = np.where((rights > 0) & (wrongs > 0), a, 0.0)
    per_row = a / np.maximum(np.asarray(batch.mask).sum(axis=1), 1) / len(set(group[live]))
    got = ours(policy.real, logp, batch, SEQUENCE, tau=1e7)[1] * 1e7
    np.testing.assert_allclose(got, -per_row[:, None] * np.asarray(batch.mask), atol=1e-6)
    assert np.abs(per_row).max() > 0


def test_real_reads_the_sign_of_the_advantage_alone():
    logp, batch = random_case(2)
    want = ours(policy.real, logp, batch, SEQUENCE)
    got = ours(
        policy.real, logp, batch.replace(advantages=jnp.sign(batch.advantages) * 0.1), SEQUENCE
    )
    np.testing.assert_array_equal(got[1], want[1])
