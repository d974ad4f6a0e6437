"""Every policy loss: one row of a table buys the common suite."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import compiled, lanes
from explained import meaning
from namespaces import public_functions, unwrapped

from rljax import learn as update
from rljax.batch import NOT_SAMPLED, Batch
from rljax.contracts import spec
from rljax.errors import InputError
from rljax.losses import policy
from rljax.losses.policy import PolicyOutputs

TOKEN, SEQUENCE = update.token_mean, update.seq_mean_token_mean
P = functools.partial
# name: (loss, reduction, fields it cannot do without). Options that make every branch count.
LOSSES = {
    "negative_log_likelihood": (policy.negative_log_likelihood, TOKEN, ()),
    "dynamic_fine_tuning": (policy.dynamic_fine_tuning, TOKEN, ()),
    "chord_phi": (policy.chord_phi, TOKEN, ()),
    "policy_gradient": (policy.policy_gradient, TOKEN, ("advantages",)),
    "gpg": (policy.gpg, TOKEN, ("advantages",)),
    "ppo_clip": (policy.ppo_clip, TOKEN, ("advantages", "old_logprobs")),
    "ppo_clip_near": (
        P(policy.ppo_clip, max_sequence_kl=0.05),
        TOKEN,
        ("advantages", "old_logprobs", "sampler_logprobs"),
    ),
    "decoupled_ppo": (
        P(policy.decoupled_ppo, weight_max=1.2),
        TOKEN,
        ("advantages", "old_logprobs", "sampler_logprobs"),
    ),
    "luffy": (policy.luffy, TOKEN, ("advantages", "old_logprobs", "policy_version")),
    "cispo": (policy.cispo, TOKEN, ("advantages", "old_logprobs")),
    "cispo_sampler": (
        P(policy.cispo, ratio_max=1.5, behaviour="sampler"),
        TOKEN,
        ("advantages", "sampler_logprobs"),
    ),
    "cispo_sequence": (
        P(policy.cispo, clip_low=0.1, level="sequence"),
        TOKEN,
        ("advantages", "old_logprobs"),
    ),
    "sapo": (policy.sapo, SEQUENCE, ("advantages", "old_logprobs")),
    "dppo_tv": (policy.dppo_tv, TOKEN, ("advantages", "old_logprobs")),
    "dppo_kl": (policy.dppo_kl, TOKEN, ("advantages", "old_logprobs")),
    "dro": (policy.dro, TOKEN, ("advantages", "old_logprobs")),
    "fipo": (
        P(policy.fipo, half_life=1.5, weight_low=0.3, weight_high=0.4, dual_clip=1.6),
        TOKEN,
        ("advantages", "old_logprobs"),
    ),
    "topr": (policy.topr, update.seq_mean_token_sum, ("advantages", "sampler_logprobs")),
    "topr_token": (
        P(policy.topr, level="token", behaviour="old"),
        TOKEN,
        ("advantages", "old_logprobs"),
    ),
    "gspo": (P(policy.gspo, clip_low=0.1, clip_high=0.1), SEQUENCE, ("advantages", "old_logprobs")),
    "gspo_product": (
        P(policy.gspo, clip_low=0.2, clip_high=0.2, length_normalized=False),
        SEQUENCE,
        ("advantages", "old_logprobs"),
    ),
    "gspo_token": (
        P(policy.gspo_token, clip_low=0.1, clip_high=0.1),
        SEQUENCE,
        ("advantages", "old_logprobs"),
    ),
    "gmpo": (policy.gmpo, SEQUENCE, ("advantages", "old_logprobs")),
    "vespo": (policy.vespo, TOKEN, ("advantages", "old_logprobs")),
    "gvpo": (policy.gvpo, SEQUENCE, ("advantages", "old_logprobs", "group")),
    "real": (policy.real, SEQUENCE, ("advantages", "old_logprobs", "group")),
    "trajectory_balance": (
        P(policy.trajectory_balance, beta=0.5),
        SEQUENCE,
        ("advantages", "old_logprobs", "ref_logprobs", "group"),
    ),
    "clip_cov": (
        P(policy.clip_cov, cov_low=0.01, fraction=0.2),
        TOKEN,
        ("advantages", "old_logprobs"),
    ),
    "kl_cov": (P(policy.kl_cov, fraction=0.2), TOKEN, ("advantages", "old_logprobs")),
    "m2po": (P(policy.m2po, threshold=0.1), TOKEN, ("advantages", "sampler_logprobs")),
    "m2po_all": (
        P(policy.m2po, threshold=0.1, tokens="all", behaviour="old"),
        TOKEN,
        ("advantages", "old_logprobs"),
    ),
    "ppo_high_entropy": (
        P(policy.ppo_high_entropy, fraction=0.4),
        TOKEN,
        ("advantages", "old_logprobs"),
    ),
}
FLOATS = ("sampler_logprobs", "old_logprobs", "ref_logprobs", "advantages", "rewards", "weights")
# Losses of a token alone are alike; the others look at a sequence, a group or the whole step.
BEYOND_TOKENS = (
    "ppo_clip",
    "luffy",
    "cispo_sequence",
    "sapo",
    "gspo",
    "gspo_token",
    "gmpo",
    "vespo",
    "gvpo",
    "fipo",
    "topr",
    "real",
    "trajectory_balance",
    "clip_cov",
    "kl_cov",
    "m2po",
    "ppo_high_entropy",
)


def of_each_kind(names, quick=BEYOND_TOKENS):
    fast = [name for name in names if name in quick]
    return pytest.mark.parametrize("name", lanes(fast, [n for n in names if n not in fast]))


every_loss = pytest.mark.parametrize("name", LOSSES)
MASK = np.array(
    [[0, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1, 0], [0, 0, 1, 1, 0, 0], [0, 1, 0, 1, 1, 1]], np.float64
)


def sample(dtype=jnp.float64, on_policy=False, garbage=0.0, mask=MASK):
    """(log-probs, entropy, batch): four rows with a tool reply in row 1 and row 3, ragged."""
    random = np.random.default_rng(3)
    logp = random.normal(-1.2, 0.6, MASK.shape).clip(max=-0.05)
    draw = {n: logp + random.normal(0, 0.4, MASK.shape) for n in FLOATS}
    draw["advantages"] = random.normal(0, 1, (4, 1)) * np.ones(MASK.shape)
    draw["weights"] = random.uniform(0.4, 1.9, MASK.shape)
    if on_policy:
        draw |= {"old_logprobs": logp, "sampler_logprobs": logp, "weights": np.ones(MASK.shape)}
    entropy = random.uniform(0, 3, MASK.shape)

    def under(x):
        return jnp.asarray(np.where(mask > 0, x, garbage), dtype)

    last = MASK.shape[1] - 1 - np.argmax(MASK[:, ::-1] > 0, axis=1)
    valid = np.arange(MASK.shape[1])[None, :] <= last[:, None]
    batch = Batch(
        tokens=jnp.asarray(random.integers(3, 9, MASK.shape) * valid, jnp.int32),
        segment_ids=jnp.asarray(valid, jnp.int32),
        positions=jnp.asarray(np.arange(MASK.shape[1])[None, :] * valid, jnp.int32),
        mask=jnp.asarray(mask, dtype),
        group=jnp.asarray([0, 1, 0, 1], jnp.int32),
        policy_version=jnp.asarray(
            np.where(np.arange(4) == 2, NOT_SAMPLED, 0)[:, None] * MASK, jnp.int32
        ),
        **{n: under(x) for n, x in draw.items()},
    ).check()
    return under(logp), under(entropy), batch


def test_every_loss_has_a_row_and_declares_what_it_reads():
    rows = {unwrapped(loss) for loss, _, _ in LOSSES.values()}
    assert [f.__name__ for f in public_functions(policy) if f not in rows] == []
    for name, (loss, _, fields) in LOSSES.items():
        assert set(spec(loss).reads) == set(fields), name


def total(name, logp, entropy, constants, batch, weights=None):
    """(what update.py makes of it, metrics)."""
    (loss, reduction, _), batch = LOSSES[name], dataclasses.replace(batch, **constants)
    out, metrics = loss(PolicyOutputs(logp, entropy), batch)
    for key, metric in metrics.items():
        assert metric.shape in (batch.mask.shape, batch.mask.shape[:1]), key
        assert meaning(key) is not None, f"{key}: no module declares it"
    weights = reduction(batch) if weights is None else weights
    corrected = not spec(loss).applies_weights
    return update.weighted_loss(out, metrics, batch, weights, corrected=corrected)


op_by_op = jax.value_and_grad(total, (1,), has_aux=True)
# One program per loss and shape, for all tests: every operation by itself is compiled for every
# shape, too, and there are more of them.
as_one_program = jax.jit(jax.value_and_grad(total, (1, 2, 3), has_aux=True), static_argnums=0)


def differentiate(name, logp, entropy, batch, weights=None, how=as_one_program):
    """((loss, metrics), gradients by the log-probs, the entropy and each of FLOATS)."""
    constants = {n: batch.__dict__[n] for n in FLOATS if batch.__dict__[n] is not None}
    return how(name, logp, entropy, constants, batch, weights)


def evaluate(*arguments, **options):
    """(loss, gradient, metrics) as numpy arrays."""
    (loss, sums), (gradient, *_) = differentiate(*arguments, **options)
    return np.asarray(loss), np.asarray(gradient), jax.tree.map(np.asarray, sums)


def same(a, b, rtol=1e-9, metrics=True):
    np.testing.assert_allclose(a[0], b[0], rtol=rtol, atol=1e-12)
    np.testing.assert_allclose(a[1], b[1], rtol=rtol, atol=1e-12 if rtol < 1e-6 else 1e-6)
    for key in a[2] if metrics else ():
        np.testing.assert_allclose(a[2][key], b[2][key], rtol=1e-5, atol=1e-6, err_msg=key)


@pytest.mark.smoke
@every_loss
def test_garbage_under_the_mask_changes_nothing(name):
    with jax.enable_x64(True):
        clean, dirty = evaluate(name, *sample()), evaluate(name, *sample(garbage=np.nan))
        assert np.isfinite(dirty[1]).all() and np.abs(dirty[1]).max() > 0
        assert (dirty[1][MASK == 0] == 0).all()
        same(dirty, clean)


@of_each_kind(LOSSES, ("ppo_clip", "gspo", "gvpo", "clip_cov"))
def test_columns_of_padding_change_nothing(name):
    with jax.enable_x64(True):
        before = evaluate(name, *sample())
        logp, entropy, batch = sample()

        def wider(x):
            return np.pad(x, ((0, 0), (0, 2))) if x.ndim == 2 else x

        loss, gradient, metrics = evaluate(name, *jax.tree.map(wider, (logp, entropy, batch)))
        same((loss, gradient[:, :-2], metrics), before)
        assert (gradient[:, -2:] == 0).all()


@every_loss
def test_rows_permute(name):
    with jax.enable_x64(True):
        before, order = evaluate(name, *sample()), np.array([2, 0, 3, 1])
        permuted = jax.tree.map(lambda x: np.asarray(x)[order], sample())
        loss, gradient, metrics = evaluate(name, *permuted)
        same((loss, gradient, metrics), (before[0], before[1][order], before[2]))


@of_each_kind(
    [n for n, r in LOSSES.items() if not spec(r[0]).whole_step], ("ppo_clip", "gspo", "vespo")
)
def test_a_split_into_uneven_microbatches_is_the_same(name):
    with jax.enable_x64(True):
        whole, everything = evaluate(name, *sample()), sample()
        weights = LOSSES[name][1](everything[2])
        loss, gradient = 0.0, np.zeros(MASK.shape)
        for rows in map(np.array, ([3], [2, 0, 1])):
            some = jax.tree.map(lambda x, r=rows: np.asarray(x)[r], (*everything, weights))
            part = evaluate(name, *some)
            loss, gradient[rows] = loss + part[0], part[1]
        same((loss, gradient), whole, metrics=False)


@of_each_kind(
    sorted(set(LOSSES) - {"gvpo", "real", "trajectory_balance"}),
    ("ppo_clip", "cispo_sequence", "gspo", "gmpo", "clip_cov"),
)
def test_packed_rows_equal_unpacked_ones(name):
    """Not of losses that compare rows of a group: a row has one group."""
    with jax.enable_x64(True):
        logp, entropy, batch = sample()

        def pack(x):
            return x.reshape(2, 12)

        fields = {
            f.name: pack(v)
            for f in dataclasses.fields(batch)
            if (v := batch.__dict__[f.name]) is not None and v.ndim == 2
        }
        second = jnp.arange(12)[None, :] >= 6
        fields["segment_ids"] = jnp.where(
            fields["segment_ids"] > 0, fields["segment_ids"] + second, 0
        )
        packed = evaluate(name, pack(logp), pack(entropy), Batch(**fields).check())
        same(
            (packed[0], packed[1].reshape(4, 6)), evaluate(name, logp, entropy, batch), 1e-9, False
        )


# Op by op, as one debugs.
@of_each_kind(LOSSES, ("gspo",))
def test_jit_equals_eager(name):
    with jax.enable_x64(True):
        same(evaluate(name, *sample()), evaluate(name, *sample(), how=op_by_op))


@of_each_kind(LOSSES, ("ppo_clip", "gspo", "trajectory_balance", "kl_cov"))
def test_float32_equals_the_float64_oracle(name):
    with jax.enable_x64(True):
        narrow, wide = evaluate(name, *sample(jnp.float32)), evaluate(name, *sample())
        assert narrow[0].dtype == np.float32 and narrow[1].dtype == np.float32
        np.testing.assert_allclose(narrow[0], wide[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(narrow[1], wide[1], rtol=1e-5, atol=1e-5 * np.abs(wide[1]).max())


@every_loss
def test_a_missing_field_is_named(name):
    loss, _, needs = LOSSES[name]
    with jax.enable_x64(True):
        logp, entropy, batch = sample()
        for field in needs:
            with pytest.raises(InputError, match=f"needs batch field.*{field}"):
                loss(PolicyOutputs(logp, entropy), dataclasses.replace(batch, **{field: None}))


@every_loss
def test_constants_get_no_gradient(name):
    """Old, sampler and reference log-probs, advantages, weights and entropy are data (N 11)."""
    with jax.enable_x64(True):
        _, (_, *pulled) = differentiate(name, *sample())
        assert pulled[1].keys() == set(FLOATS)
        for path, gradient in jax.tree.leaves_with_path(pulled):
            assert (np.asarray(gradient) == 0).all(), path


def test_what_the_policy_would_hardly_sample_any_more_is_not_pushed_down_further():
    """A row of two tokens each: the sampler's mean log-prob is above the policy's, below it, above
    it with a positive advantage."""
    logp = jnp.full((3, 2), -1.0)
    ones = jnp.ones((3, 2))
    batch = Batch(
        tokens=jnp.zeros((3, 2), jnp.int32),
        segment_ids=jnp.ones((3, 2), jnp.int32),
        positions=jnp.tile(jnp.arange(2), (3, 1)),
        mask=ones,
        advantages=jnp.array([[-1.0], [-1.0], [1.0]]) * ones,
        old_logprobs=logp,
        sampler_logprobs=logp + jnp.array([[0.0, 0.6], [0.0, -0.6], [0.0, 0.6]]),
    ).check()
    outputs = PolicyOutputs(logp, jnp.zeros_like(logp))
    loss, metrics = compiled(policy.ppo_clip)(outputs, batch, max_sequence_kl=0.2)
    kept = np.array([[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
    np.testing.assert_array_equal(metrics["sequence_keep"], kept)
    np.testing.assert_allclose(loss, -kept * np.asarray(batch.advantages), rtol=1e-6)


@every_loss
def test_an_empty_batch_gives_zero(name):
    with jax.enable_x64(True):
        loss, gradient, _ = evaluate(name, *sample(garbage=np.nan, mask=0 * MASK))
        assert loss == 0 and (gradient == 0).all()


@pytest.mark.smoke
@every_loss
def test_the_first_step_on_policy_is_the_policy_gradient(name):
    """At pi = pi_old every ratio loss has D1's gradient, under its own reduction (N 4)."""
    loss, reduction, _ = LOSSES[name]
    with jax.enable_x64(True):
        logp, entropy, batch = sample(on_policy=True)
        same_as = "policy_gradient"
        if name == "negative_log_likelihood":
            batch = batch.replace(advantages=jnp.ones_like(logp))
        if name == "dynamic_fine_tuning":
            batch = batch.replace(advantages=jnp.exp(logp))
        if name == "chord_phi":
            batch = batch.replace(advantages=jnp.exp(logp) * (1 - jnp.exp(logp)))
        if name == "trajectory_balance":  # the residual is beta (mean A - A) where pi = ref
            batch = batch.replace(ref_logprobs=logp)
            count = batch.mask.sum(axis=1, keepdims=True)
            mean = batch.advantages.sum(axis=1, keepdims=True) / count
            centred = 0.5 * (mean - mean[np.array([2, 3, 0, 1])])
            want = -2 * 0.5 * centred * batch.mask / count / 4
        elif name == "gvpo":  # the residual is A itself: n / (n - 1) beta A at each token
            want = -batch.advantages * 2 * 0.1 * batch.mask / 4
        elif name == "real":
            # Of rows 0 and 2 one is right, one wrong: 1 / tau / (1 + 1) each. 1 and 3 are alike.
            count = batch.mask.sum(axis=1, keepdims=True)
            want = -jnp.sign(batch.advantages) / 0.5 / 2 * batch.mask / count / 2
            want = want * (batch.group == 0)[:, None]
        else:
            # As one action, a response has the gradient of its sum.
            whole = update.seq_mean_token_sum if name == "gspo_product" else reduction
            weights = whole(batch)
            want = evaluate(same_as, logp, entropy, batch, weights)[1]
        if name == "luffy":  # row 2 is a demonstration: gamma pi / (pi + gamma)^2, gamma 0.1
            p = jnp.exp(logp[2])
            want = jnp.asarray(want).at[2].multiply(0.1 * p / (p + 0.1) ** 2)
        _, got, metrics = evaluate(name, logp, entropy, batch)
        taken = np.abs(got) > 0 if name in ("clip_cov", "ppo_high_entropy") else MASK > 0
        assert taken.any()
        np.testing.assert_allclose(got[taken], np.asarray(want)[taken], rtol=1e-9)
        assert (got[~taken] == 0).all()
        if "pg_clipfrac" in metrics:
            assert metrics["pg_clipfrac"][0] == 0
