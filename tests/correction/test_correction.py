"""Rollout correction: worked examples, edge cases, and what holds for every component. Tests of the
smoke lane are of one shape and type, so that their operations are compiled once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes, worked_example
from golden_checks.common import response_batch

from rljax.arrays import place
from rljax.batch import NOT_SAMPLED, Batch
from rljax.components import resolve
from rljax.correction import (
    bypass_old_logprobs,
    mismatch_metrics,
    rollout_correction,
    variance_proxy_metrics,
)
from rljax.correction.health import health_warnings
from rljax.correction.ratios import effective_sample_size
from rljax.correction.rejection import STATISTICS
from rljax.errors import InputError
from rljax.learn import token_mean, weighted_loss
from rljax.losses.policy import PolicyOutputs, policy_gradient
from rljax.mesh import make_mesh

SAME_AGE = {"staleness/steps_mean": 0.0}
LEVELS = ("token", "sequence", "geometric")
EXAMPLES = (
    "ris.token.truncate",
    "ris.token.mask",
    "ris.sequence.truncate",
    "ris.sequence.mask",
    "ris.geometric.truncate",
    "ris.geometric.mask",
    "ris.sequence.truncate.noveto",
)
# Every option at work at once, on every level.
EVERYTHING = dict(
    mode="mask",
    upper=3.0,
    lower=0.4,
    veto=0.05,
    batch_normalise=True,
    reject=(("token_k3", None, 0.5), ("seq_max_k2", None, 0.9), ("geometric_ratio", 0.6, 1.6)),
)


SHAPE = (8, 12)  # of every batch: what runs op by op compiles each operation once per shape


def wide(x) -> np.ndarray:
    """x, with zeros below it and to its right."""
    x = np.asarray(x, np.float64)
    return np.pad(x, [(0, n - m) for n, m in zip(SHAPE, x.shape, strict=True)])


def make(old, sampler, mask, dtype=jnp.float32) -> Batch:
    """A batch of SHAPE: the given rows, and padding."""
    return response_batch(wide(mask), dtype, old_logprobs=wide(old), sampler_logprobs=wide(sampler))


def same_weights(got: Batch, want, **tolerance):
    np.testing.assert_allclose(got.weights, wide(want), **tolerance)


def s1(name) -> Batch:
    x = worked_example(name)["inputs"]
    return make(x["old_log_prob"], x["rollout_log_prob"], x["response_mask"])


def random_batch(seed=0, scale=0.5) -> Batch:
    rng = np.random.default_rng(seed)
    rows, columns = SHAPE
    mask = (rng.random((rows, columns)) < 0.8).astype(np.float32)
    mask[1] = 0.0  # a row without policy tokens
    mask[2] = np.eye(columns)[3]  # and one with a single one
    old = -2 * rng.random((rows, columns))
    return make(old, old + scale * rng.standard_normal((rows, columns)), mask)


def close(got: dict, want: dict, **tolerance):
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, err_msg=name, **tolerance)


def test_texts_that_nobody_sampled_are_no_mismatch():
    """A demonstration among the samples: no weight, no rejection, no distance, whatever is written
    where its log-probs would be."""
    batch = random_batch()
    shown = np.zeros(SHAPE, bool)
    shown[5] = True
    marked = batch.replace(
        sampler_logprobs=jnp.where(shown, -9.0, batch.sampler_logprobs),
        policy_version=jnp.where(shown, NOT_SAMPLED, 3).astype(jnp.int32),
    )
    same = batch.replace(
        sampler_logprobs=jnp.where(shown, batch.old_logprobs, marked.sampler_logprobs)
    )
    options = dict(level="token", mode="mask", upper=1.5, reject=EVERYTHING["reject"])
    correct = functools.partial(rollout_correction, **options)
    (ours, metrics), (theirs, want) = correct(marked), correct(same)
    np.testing.assert_array_equal(ours.weights, theirs.weights)
    np.testing.assert_array_equal(ours.weights[5], batch.mask[5])
    np.testing.assert_array_equal(ours.mask[5], batch.mask[5])
    close(metrics, want)
    close(mismatch_metrics(marked), mismatch_metrics(same))
    old = marked.replace(policy_version=jnp.full(SHAPE, 3, jnp.int32))  # it was sampled
    assert np.any(np.asarray(correct(old)[0].weights[5]) != np.asarray(batch.mask[5]))


# -- numbers worked out by hand --------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("name", EXAMPLES)
def test_worked_examples(name):
    example = worked_example(name)
    p = example["params"]
    batch, metrics = rollout_correction(
        s1(name),
        level=p["level"],
        mode=p["mode"],
        upper=p["threshold"],
        lower=p["threshold_lower"],
        veto=p["veto"],
    )
    same_weights(batch, example["outputs"]["weights"], rtol=1e-5, atol=1e-6)
    for key, value in example["outputs"]["metrics"].items():
        assert float(metrics[f"mismatch/{key}"]) == pytest.approx(value, rel=1e-5, abs=1e-6), key
    assert ("mismatch/rollout_is_masked_fraction" in metrics) == (p["mode"] == "mask")
    assert float(metrics["mismatch/rollout_is_max_applied"]) <= np.float32(p["threshold"])
    assert all(key.startswith("mismatch/") for key in metrics)


@pytest.mark.smoke
def test_mismatch_worked_example():
    got = mismatch_metrics(s1("ris.mismatch"))
    for key, value in worked_example("ris.mismatch")["outputs"]["metrics"].items():
        assert float(got[f"mismatch/{key}"]) == pytest.approx(value, rel=1e-5), key


def test_olmorl_weights_are_truncated_token_weights_without_a_veto():
    example = worked_example("olmorl.loss")
    got, _ = rollout_correction(s1("olmorl.loss"), upper=2.0, veto=None)
    same_weights(got, example["outputs"]["weights"], rtol=1e-5, atol=1e-9)


def test_areal_behaviour_weights():
    example = worked_example("ppo.decoupled")
    x = example["inputs"]
    batch = make(x["prox_log_prob"], x["old_log_prob"], x["response_mask"])
    got, _ = rollout_correction(batch, upper=example["params"]["behav_cap"], veto=None)
    same_weights(got, example["outputs"]["behav_weight"], rtol=1e-5)


def test_a_rounded_head_shows_in_the_metrics():
    example = worked_example("fp32_head")
    want = example["outputs"]
    logits = jnp.asarray(example["inputs"]["logits"], jnp.float32)
    rounded = logits.astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_allclose(rounded, want["logits_bf16"], rtol=1e-6)
    exact, coarse = (np.asarray(jax.nn.log_softmax(x))[None] for x in (logits, rounded))
    np.testing.assert_allclose(exact[0], want["logp_fp32"], rtol=1e-5)
    np.testing.assert_allclose(coarse[0], want["logp_bf16_logits"], rtol=1e-5)
    mask = np.ones((1, 4))
    got, off = rollout_correction(make(exact, coarse, mask), upper=2.0)
    same_weights(got, [want["ratio"]], rtol=1e-5)
    on = mismatch_metrics(make(exact, exact, mask))
    assert float(on["mismatch/mismatch_kl"]) == 0.0 == float(on["mismatch/mismatch_k3_kl"])
    assert float(off["mismatch/mismatch_k3_kl"]) > 1e-5
    correlation = "mismatch/probability_correlation"
    assert float(off[correlation]) < float(on[correlation]) == pytest.approx(1.0, abs=1e-6)


# -- edges ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", ["truncate", "mask", "clip"])
def test_weights_are_exactly_one_where_the_two_agree(level, mode):
    batch = random_batch(scale=0.0)
    got, metrics = rollout_correction(batch, level=level, mode=mode, upper=1.001)
    np.testing.assert_array_equal(got.weights, batch.mask)
    assert float(metrics["mismatch/rollout_is_eff_sample_size"]) == pytest.approx(1.0)
    assert float(metrics["mismatch/rollout_is_p50"]) == 1.0
    assert health_warnings({k: float(v) for k, v in metrics.items()}) == []


def test_the_effective_sample_size_does_not_depend_on_the_scale_of_the_weights():
    """(sum w)^2 / (n sum w^2) also where all weights are near e^-18; verl adds 1e-8 to the mean
    that it divides by, and then counts more samples than there are."""
    rng = np.random.default_rng(0)
    mask = np.ones((6, 4))
    sampler = -rng.exponential(1, (6, 4))
    near = rng.normal(0, 0.1, (6, 4))
    for shift in (-1.0, -4.5):  # of every token: e^-4 and e^-18 of a sequence
        batch = make(sampler + near + shift, sampler, mask)
        _, metrics = rollout_correction(batch, level="sequence", lower=0.0, upper=2.0, veto=None)
        w = np.exp(near.sum(1))
        found = float(metrics["mismatch/rollout_is_eff_sample_size"])
        assert found == pytest.approx(w.sum() ** 2 / (6 * (w**2).sum()), rel=1e-4)


@pytest.mark.parametrize("level", LEVELS)
def test_a_batch_without_policy_tokens_gives_zeros_and_no_nan(level):
    with jax.debug_nans(True):
        batch = make(np.full((2, 3), -1.0), np.full((2, 3), -2.0), np.zeros((2, 3)))
        got, metrics = rollout_correction(batch, level=level, **EVERYTHING)
        assert not np.asarray(got.weights).any()
        assert all(np.isfinite(float(v)) for v in metrics.values())
        assert float(metrics["mismatch/rollout_is_mean"]) == 0.0


@pytest.mark.smoke
@pytest.mark.parametrize("level", LEVELS)
def test_infinite_and_extreme_log_probs(level):
    inf = np.inf
    old = np.array([[-1.0, -1.0], [-inf, -1.0], [-inf, -1.0], [-1001.0, -1.0], [-1.0, -1.0]])
    sampler = np.array([[-inf, -1.0], [-1.0, -1.0], [-inf, -1.0], [-1.0, -1.0], [-1001.0, -1.0]])
    batch = make(old, sampler, np.ones((5, 2)))
    got, metrics = rollout_correction(batch, level=level, upper=1e9, veto=1e-4)
    big, one = float(np.exp(np.float32(20.0))), 1.0
    token = [[big, one], [0, 0], [one, one], [0, 0], [big, one]]
    whole = [[big, big], [0, 0], [one, one], [0, 0], [big, big]]
    same_weights(got, token if level == "token" else whole, rtol=1e-4)
    assert all(np.isfinite(float(v)) for v in metrics.values())
    unvetoed, _ = rollout_correction(batch, level=level, upper=1e9, veto=None)
    np.testing.assert_allclose(unvetoed.weights[1, 0], np.exp(-20.0), rtol=1e-4)


def test_one_token_has_the_same_weight_on_every_level():
    batch = make([[-1.0, 7.0]], [[-1.3, 7.0]], [[1, 0]])
    weights = [rollout_correction(batch, level=level)[0].weights for level in LEVELS]
    for other in weights:
        np.testing.assert_array_equal(other, weights[0])
    np.testing.assert_allclose(weights[0], wide([[np.exp(0.3), 0.0]]), rtol=1e-5)


@pytest.mark.parametrize("level", lanes(["sequence"], ["token", "geometric"]))
def test_an_empty_row_counts_in_no_per_sequence_metric(level):
    batch = random_batch()
    batch = batch.replace(mask=batch.mask.at[1, 2:7].set(1))
    assert np.asarray(batch.mask).any(axis=1).all()
    got, want = (correct(b, level)[1] for b in (around(batch), batch))
    close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.smoke
def test_the_lower_bound_defaults_to_the_inverse_of_the_upper():
    batch = random_batch()
    got, want = (
        rollout_correction(batch, mode="mask", upper=1.5, lower=x) for x in (None, 1 / 1.5)
    )
    np.testing.assert_array_equal(got[0].weights, want[0].weights)
    weights = np.asarray(got[0].weights)
    assert (weights == 0).any() and weights.max() <= 1.5
    assert weights[weights > 0].min() >= 1 / 1.5
    clipped = np.asarray(rollout_correction(batch, mode="clip", upper=1.5, veto=None)[0].weights)
    live = np.asarray(batch.mask) > 0
    assert clipped[live].min() == pytest.approx(1 / 1.5) and clipped.max() == pytest.approx(1.5)


@pytest.mark.smoke
def test_off_changes_nothing_and_still_measures():
    batch = random_batch()
    got, metrics = rollout_correction(batch, mode="off")
    assert got.weights is None and "mismatch/rollout_is_mean" in metrics
    np.testing.assert_array_equal(got.mask, batch.mask)
    assert "mismatch/rollout_is_max_applied" not in metrics


def test_what_is_rejected_stays_in_the_denominator_unless_asked():
    batch = random_batch()
    options = dict(mode="off", reject=(("token_ratio", 0.8, 1.25),))
    kept, metrics = rollout_correction(batch, **options)
    left, same = rollout_correction(batch, affects_denominator=True, **options)
    x = np.asarray(batch.old_logprobs - batch.sampler_logprobs)
    want = np.asarray(batch.mask) * ((np.exp(x) >= 0.8) & (np.exp(x) <= 1.25))
    np.testing.assert_array_equal(kept.weights, want)
    np.testing.assert_array_equal(kept.mask, batch.mask)
    np.testing.assert_array_equal(left.mask, want)
    assert left.weights is None and 0 < want.sum() < np.asarray(batch.mask).sum()
    fraction = 1 - want.sum() / np.asarray(batch.mask).sum()
    assert float(metrics["mismatch/rollout_rs_masked_fraction"]) == pytest.approx(fraction)
    assert float(same["mismatch/rollout_rs_masked_fraction"]) == pytest.approx(fraction)
    loss = jnp.ones_like(batch.mask)
    shrunk, _ = weighted_loss(loss, {}, left, token_mean(left))
    whole, _ = weighted_loss(loss, {}, kept, token_mean(kept))
    assert float(shrunk) == pytest.approx(1.0) and float(whole) == pytest.approx(1 - fraction)


def test_an_open_lower_side_of_a_ratio_is_the_inverse_of_the_upper():
    batch = random_batch()
    rejected = [
        rollout_correction(batch, mode="off", reject=(("token_ratio", lower, 1.25),))[0].weights
        for lower in (None, 0.8)
    ]
    np.testing.assert_array_equal(*rejected)
    ratio = np.exp(np.asarray(batch.old_logprobs - batch.sampler_logprobs))
    assert ((np.asarray(batch.mask) > 0) & (ratio < 0.8)).any()


def test_a_veto_as_a_rejection():
    batch = random_batch(scale=1.0)
    veto = np.exp(-1.5)
    got, _ = rollout_correction(batch, veto=float(veto))
    rule = (("seq_max_k1", None, 1.5),)
    want, _ = rollout_correction(batch, veto=None, reject=rule)
    np.testing.assert_array_equal(got.weights, want.weights)
    assert 0 < (np.asarray(got.weights) == 0)[np.asarray(batch.mask) > 0].mean() < 1


def test_batch_normalise_makes_the_mean_one():
    batch = random_batch()
    mask = np.asarray(batch.mask)
    token, _ = rollout_correction(batch, batch_normalise=True, veto=None)
    assert np.asarray(token.weights).sum() / mask.sum() == pytest.approx(1.0, rel=1e-5)
    whole, _ = rollout_correction(batch, level="sequence", batch_normalise=True, veto=None)
    rows = np.asarray(whole.weights).max(axis=1)[mask.any(axis=1)]
    assert rows.mean() == pytest.approx(1.0, rel=1e-5)


def test_quantiles_interpolate_over_the_policy_tokens():
    batch = random_batch()
    _, metrics = rollout_correction(batch, mode="off")
    live = np.asarray(batch.mask) > 0
    w = np.exp(np.asarray(batch.old_logprobs - batch.sampler_logprobs))[live]
    for q in (25, 50, 75, 95, 99):
        got = float(metrics[f"mismatch/rollout_is_p{q}"])
        assert got == pytest.approx(np.quantile(w, q / 100), rel=1e-4)


def test_bypass_takes_the_samplers_log_probs_and_no_weights():
    batch = random_batch()
    corrected, _ = rollout_correction(batch)
    bypassed = bypass_old_logprobs(corrected)
    assert bypassed.weights is None
    np.testing.assert_array_equal(bypassed.old_logprobs, batch.sampler_logprobs)
    again, _ = rollout_correction(bypassed)
    np.testing.assert_array_equal(again.weights, batch.mask)  # nothing is counted twice


def test_effective_sample_size():
    example = worked_example("async.ess")
    weights = jnp.asarray(example["inputs"]["w"])
    ess = effective_sample_size(weights, jnp.ones(4))
    assert float(ess) == pytest.approx(example["outputs"]["ess"], abs=1e-6)
    wider = jnp.concatenate([weights, 9.0 * jnp.ones(2)]), jnp.array([1.0, 1, 1, 1, 0, 0])
    assert float(effective_sample_size(wider[0] * wider[1], wider[1])) == pytest.approx(float(ess))
    # As it is logged: of the trainer's probability over the sampler's, token by token.
    logs = jnp.log(weights)[None]
    batch = make(logs - 3.0, jnp.full((1, 4), -3.0), np.ones((1, 4)))
    logged = mismatch_metrics(batch)["mismatch/eff_sample_size"]
    assert float(logged) == pytest.approx(example["outputs"]["ess"], abs=1e-5)


def test_health_warnings_say_how_old_the_tokens_are():
    low = {"mismatch/eff_sample_size": 0.5}
    (plain,) = health_warnings(low)
    (aged,) = health_warnings({**low, "staleness/steps_mean": 1.5})
    assert aged.startswith(plain) and "1.5 steps old" in aged and "rollouts.ahead" in aged
    # Older weights are another policy, which is no fault.
    apart = {"mismatch/mismatch_kl": 0.3, "mismatch/probability_correlation": 0.9}
    assert len(health_warnings(apart)) == 2 == len(health_warnings({**apart, **SAME_AGE}))
    fine = {"mismatch/eff_sample_size": 0.9, "staleness/steps_mean": 1.5, **apart}
    assert health_warnings(fine) == [] == health_warnings({"staleness/steps_mean": 3.0})


def test_health_warnings_name_metric_value_range_and_remedy():
    healthy = {"mismatch/rollout_is_eff_sample_size": 0.9, "mismatch/rollout_is_mean": 1.0}
    assert health_warnings(healthy) == [] == health_warnings({"loss": 3.0})
    sick = {
        "mismatch/rollout_is_eff_sample_size": 0.4,
        "mismatch/rollout_is_veto_fraction": 0.06,
        "mismatch/rollout_is_catastrophic_token_fraction": 0.02,
        "mismatch/rollout_is_mean": 2.5,
        "mismatch/probability_correlation": 0.98,
        "mismatch/mismatch_kl": float("nan"),
    }
    texts = health_warnings(sick)
    assert len(texts) == len(sick)
    for name, value in sick.items():
        [text] = [t for t in texts if t.startswith(name)]
        assert f"{value:.4g}" in text and " to " in text and len(text.split(": ", 1)[1]) > 20
    # A perturbed sampler is noticed; the same log-probs rounded to bfloat16 are not.
    batch = random_batch()
    rounded = batch.old_logprobs.astype(jnp.bfloat16).astype(jnp.float32)
    fine = rollout_correction(batch.replace(sampler_logprobs=rounded))[1]
    assert health_warnings({k: float(v) for k, v in fine.items()}) == []
    assert health_warnings({k: float(v) for k, v in rollout_correction(batch)[1].items()})


# -- options --------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize(
    "options,match",
    [
        (dict(level="row"), "level"),
        (dict(mode="cut"), "mode"),
        (dict(upper=0.0), "upper"),
        (dict(upper=2.0, lower=3.0), "lower"),
        (dict(upper=0.5), "lower"),
        (dict(veto=0.0), "veto"),
        (dict(reject=("token_k3", None, 0.1)), "triple"),
        (dict(reject=(("token_k4", None, 0.1),)), "seq_max_k3"),
        (dict(reject=(("token_k1", 0.5, 0.1),)), "lower <= upper"),
        (dict(reject=(("token_ratio", None, -1.0),)), "positive"),
        (dict(reject=(("token_k2", None, 0.1), ("token_k2", None, 0.2))), "once"),
    ],
)
def test_bad_options_are_refused(options, match):
    with pytest.raises(InputError, match=match):
        rollout_correction(random_batch(), **options)


def test_a_config_names_it_as_text():
    text = 'rollout_correction(level="geometric", reject=(("token_k3", None, 0.3),), veto=None)'
    component = resolve(text, "rljax.correction")
    batch = random_batch()
    want, _ = rollout_correction(
        batch, level="geometric", reject=(("token_k3", None, 0.3),), veto=None
    )
    np.testing.assert_array_equal(component(batch)[0].weights, want.weights)
    with pytest.raises(InputError, match="truncate"):
        resolve('rollout_correction(mode="cut")', "rljax.correction")


@pytest.mark.smoke
@pytest.mark.parametrize("function", [rollout_correction, mismatch_metrics])
@pytest.mark.parametrize("field", ["old_logprobs", "sampler_logprobs"])
def test_a_missing_field_is_named(function, field):
    batch = random_batch().replace(**{field: None})
    with pytest.raises(InputError, match=f"{function.__name__} needs batch field {field}"):
        function(batch)


def test_missing_fields_of_the_variance_proxies_are_named():
    with pytest.raises(InputError, match="variance_proxy_metrics needs batch field advantages"):
        variance_proxy_metrics(random_batch())


# -- what holds for every component ---------------------------------------------------------------


def op_by_op(batch: Batch, level: str):
    got, metrics = rollout_correction(batch, level=level, **EVERYTHING)
    proxies = variance_proxy_metrics(
        got.replace(advantages=batch.old_logprobs, sum_pi_squared=jnp.exp(batch.sampler_logprobs))
    )
    return got.weights, metrics | proxies


correct = jax.jit(op_by_op, static_argnums=1)  # one program per level and shape, for all tests


def around(batch: Batch) -> Batch:
    """The batch between two empty rows, and with five columns of padding."""
    return jax.tree.map(lambda x: np.pad(x, ((1, 1), (0, 5))), batch)


def agree(got, want, rtol=1e-5):
    np.testing.assert_allclose(got[0], want[0], rtol=rtol, atol=1e-6)
    close(got[1], want[1], rtol=rtol, atol=2e-5)


@pytest.mark.parametrize("level", lanes(["sequence"], ["token", "geometric"]))
def test_garbage_and_padding_change_nothing(level):
    batch = random_batch()
    want = correct(batch, level)
    assert 0 < float(want[1]["mismatch/rollout_rs_masked_fraction"]) < 0.9  # the rules do bite
    dirty = batch.replace(
        old_logprobs=jnp.where(batch.mask > 0, batch.old_logprobs, jnp.nan),
        sampler_logprobs=jnp.where(batch.mask > 0, batch.sampler_logprobs, -jnp.inf),
    )
    agree(correct(dirty, level), want, rtol=0)
    weights, metrics = correct(around(dirty), level)
    weights = np.asarray(weights)
    assert not weights[:, -5:].any() and not weights[[0, -1]].any()
    agree((weights[1:-1, :-5], metrics), want)


@pytest.mark.parametrize("level", lanes(["sequence"], ["token", "geometric"]))
def test_rows_may_come_in_any_order(level):
    batch = random_batch()
    order = np.random.default_rng(3).permutation(batch.rows)
    weights, metrics = correct(batch, level)
    permuted = jax.tree.map(lambda x: np.asarray(x)[order], batch)
    agree(correct(permuted, level), (weights[order], metrics))


@pytest.mark.parametrize("level", lanes(["sequence"], ["token", "geometric"]))
def test_packed_rows_equal_unpacked_ones(level):
    batch = random_batch()
    batch = batch.replace(mask=batch.mask.at[:, 6:].set(0))
    weights, metrics = correct(batch, level)

    def pack(x):
        return wide(x[:, :6].reshape(4, 12))  # two rows after one another

    fields = (pack(x) for x in (batch.old_logprobs, batch.sampler_logprobs, batch.mask))
    packed = make(*fields)
    segments = np.tile(np.repeat([1, 2], 6), (8, 1)).astype(np.int32)
    packed = packed.replace(segment_ids=jnp.asarray(segments))
    got = correct(packed, level)
    agree(got, (pack(weights), metrics))


@pytest.mark.parametrize("level", lanes(["sequence"], ["token", "geometric"]))
def test_jit_and_eight_devices_equal_eager(level):
    batch = random_batch()
    want = op_by_op(batch, level)
    agree(correct(batch, level), want)
    mesh = make_mesh(2, 4, 1)
    spread = place(batch, mesh)
    assert len(spread.mask.sharding.device_set) == 8
    agree(correct(spread, level), want)


@pytest.mark.parametrize("level", lanes(["sequence"], ["token", "geometric"]))
def test_float32_equals_float64(level):
    small = random_batch()
    got = correct(small, level)
    assert got[0].dtype == jnp.float32
    with jax.enable_x64(True):
        want = op_by_op(
            make(small.old_logprobs, small.sampler_logprobs, small.mask, jnp.float64), level
        )
        assert want[0].dtype == jnp.float64
        agree(got, want, rtol=1e-4)


def test_nothing_has_a_gradient():
    batch = random_batch()

    def total(old, sampler):
        b = batch.replace(old_logprobs=old, sampler_logprobs=sampler, advantages=old)
        got, metrics = rollout_correction(b, reject=(("seq_mean_k3", None, 0.5),), veto=None)
        loss, _ = policy_gradient(PolicyOutputs(jnp.ones_like(old), jnp.zeros_like(old)), got)
        value, _ = weighted_loss(loss, {}, got, token_mean(got))
        return value + sum(metrics.values())

    gradients = jax.jit(jax.grad(total, argnums=(0, 1)))
    for gradient in gradients(batch.old_logprobs, batch.sampler_logprobs):
        assert not np.asarray(gradient).any()


@pytest.mark.parametrize("name", STATISTICS)
def test_every_statistic_is_zero_divergence_where_the_two_agree(name):
    same, apart = random_batch(scale=0.0), random_batch(scale=1.0)
    one = 1.0 if name.endswith("ratio") else 0.0
    rule = ((name, one, one),)
    kept, metrics = rollout_correction(same, mode="off", reject=rule)
    np.testing.assert_array_equal(kept.weights, same.mask)
    assert float(metrics[f"mismatch/rollout_rs_{name}_mean"]) == one
    dropped, _ = rollout_correction(apart, mode="off", reject=rule)
    assert not np.asarray(dropped.weights).any()
