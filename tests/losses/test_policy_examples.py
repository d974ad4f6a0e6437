"""The worked examples of the policy losses, and what the common suite does not say of some."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import worked_example
from test_policy_losses import MASK, SEQUENCE, TOKEN, P, evaluate, same, sample

from rljax import advantages
from rljax import learn as update
from rljax.batch import Batch
from rljax.losses import kl, policy
from rljax.losses.policy import PolicyOutputs, common, selection


def s1(example, **fields) -> Batch:
    """The shared batch of these examples."""
    x = example["inputs"]
    names = {
        "old_logprobs": "old_log_prob",
        "sampler_logprobs": "rollout_log_prob",
        "ref_logprobs": "ref_log_prob",
        "advantages": "advantages",
    }
    found = {k: jnp.asarray(x[v], jnp.float64) for k, v in names.items() if v in x}
    mask = jnp.asarray(x["response_mask"], jnp.float64)
    if "group" in x:
        found["group"] = jnp.asarray(x["group"], jnp.int32)
    return Batch(
        tokens=jnp.zeros(mask.shape, jnp.int32),
        segment_ids=jnp.ones(mask.shape, jnp.int32),
        positions=jnp.zeros(mask.shape, jnp.int32),
        mask=mask,
        **{**found, **fields},
    )


def run(example, loss, reduction, batch, corrected=True):
    """(loss, gradient, unreduced loss, sums of metrics) of a worked example."""
    logp = jnp.asarray(example["inputs"]["log_prob"], jnp.float64)

    def f(x, batch):
        batch = update.select_policy_tokens(batch)
        out, metrics = loss(PolicyOutputs(x, x), batch)
        summed, sums = update.weighted_loss(
            out, metrics, batch, reduction(batch), corrected=corrected
        )
        means = {k: a / jnp.maximum(b, 1) for k, (a, b) in sums.items()}
        return summed, (jnp.where(batch.mask > 0, out, 0.0), means)

    found = jax.jit(jax.value_and_grad(f, has_aux=True))(logp, batch)
    (value_, (out, metrics)), gradient = jax.device_get(found)
    return value_, gradient, out, metrics


def per_sequence(x):
    return np.asarray(x)[:, 0]


CLIP2 = {"clip_low": 0.2, "clip_high": 0.2}
EXAMPLES = {
    "pg.reinforce": (policy.policy_gradient, TOKEN),
    "ppo.clip": (P(policy.ppo_clip, **CLIP2, dual_clip=None), TOKEN),
    "ppo.dual_clip": (P(policy.ppo_clip, **CLIP2, dual_clip=3.0), TOKEN),
    "ppo.clip_higher": (P(policy.ppo_clip, clip_low=0.2, clip_high=0.28, dual_clip=10.0), TOKEN),
    "cispo.two_sided": (P(policy.cispo, clip_low=0.2, clip_high=0.28), TOKEN),
    "cispo.upper_only": (P(policy.cispo, ratio_max=2.0), TOKEN),
    "gspo.seq": (policy.gspo, SEQUENCE),
    "gspo.seq_wide": (P(policy.gspo, **CLIP2), SEQUENCE),
    "gspo.token": (P(policy.gspo_token, **CLIP2), SEQUENCE),
    "gmpo": (policy.gmpo, SEQUENCE),
    "kl_cov": (P(policy.kl_cov, fraction=0.2, kl_coef=1.0), TOKEN),
}
METRICS = {
    "clipfrac": "pg_clipfrac",
    "clipfrac_dual": "pg_clipfrac_lower",
    "ppo_kl": "ppo_kl",
    "k3_kl": "ppo_k3",
    "clipfrac_token": "pg_clipfrac",
    "clipfrac_seq": "pg_clipfrac_seq",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_worked_example(name):
    example, (loss, reduction) = worked_example(name), EXAMPLES[name]
    want = example["outputs"]
    with jax.enable_x64(True):
        got, gradient, out, metrics = run(example, loss, reduction, s1(example))
    np.testing.assert_allclose(got, want["loss"], rtol=1e-5)
    np.testing.assert_allclose(gradient, want["grad"], rtol=2e-5, atol=1e-6)
    if "per_token" in want:
        np.testing.assert_allclose(out, want["per_token"], rtol=2e-5, atol=1e-6)
    if "per_seq" in want:
        np.testing.assert_allclose(per_sequence(out), want["per_seq"], rtol=2e-5)
    for theirs, ours in METRICS.items():
        if theirs in want and ours in metrics:
            np.testing.assert_allclose(metrics[ours], want[theirs], rtol=1e-5, atol=1e-6)


def test_ppo_under_every_reduction():
    example = worked_example("ppo.agg")
    modes = {
        "token-mean": TOKEN,
        "seq-mean-token-sum": update.seq_mean_token_sum,
        "seq-mean-token-mean": SEQUENCE,
        "seq-mean-token-sum-norm": P(update.seq_mean_token_sum_norm, max_tokens=4),
    }
    with jax.enable_x64(True):
        for name, mode in modes.items():
            got = run(example, P(policy.ppo_clip, **CLIP2, dual_clip=None), mode, s1(example))[0]
            np.testing.assert_allclose(got, example["outputs"][name], rtol=1e-5)


def test_upper_and_lower_clips_are_told_apart():
    example = worked_example("ppo.clip")
    with jax.enable_x64(True):
        metrics = run(example, P(policy.ppo_clip, **CLIP2), TOKEN, s1(example))[3]
    # Row 0 and row 3 leave above with A > 0, row 2 below with A < 0.
    np.testing.assert_allclose(metrics["pg_clipfrac_upper"], 2 / 13, rtol=1e-6)
    np.testing.assert_allclose(metrics["pg_clipfrac_under"], 1 / 13, rtol=1e-6)


def test_clip_cov_covariance_and_eligible_tokens():
    example = worked_example("clip_cov.cov")
    want = example["outputs"]

    @jax.jit
    def clipped(logp, batch):
        batch, chosen = update.select_policy_tokens(batch), PolicyOutputs(logp, logp)
        difference = common.log_ratio(chosen, batch, by="test")
        bounds = {"cov_low": 0.1, "cov_high": 1.0, "fraction": 0.2}
        order = jnp.zeros(batch.mask.shape)
        return selection._clip_cov(chosen, batch, difference, order, **CLIP2, **bounds)[1:]

    with jax.enable_x64(True):
        logp = jnp.asarray(example["inputs"]["log_prob"], jnp.float64)
        metrics, eligible = clipped(logp, s1(example))
    np.testing.assert_allclose(metrics["cov"], want["cov"], rtol=1e-5)
    np.testing.assert_array_equal(eligible, want["eligible"])
    np.testing.assert_array_equal(metrics["pg_clipfrac"], want["ppo_clipped"])
    # k = floor(0.2 * 13) = 2 by lower flat index
    assert np.flatnonzero(metrics["cov_clipfrac"]).tolist() == [0, 1]


def test_clip_cov_draws_k_tokens_evenly_and_by_its_seed_and_version():
    with jax.enable_x64(True):
        logp, entropy, batch = sample()

        def draw(seed, b=batch):
            return selection._ranks(selection._shuffle(b, seed), b.mask > 0) < 3

        drawn = np.asarray(jax.jit(jax.vmap(draw))(jnp.arange(4000)))
        assert (drawn.sum(axis=1) == 3).all() and (drawn[:, MASK.reshape(-1) == 0] == 0).all()
        share = drawn.mean(axis=0)[MASK.reshape(-1) > 0]
        assert np.abs(share - 3 / MASK.sum()).max() < 0.03
        newer = batch.replace(policy_version=jnp.full(MASK.shape, 7, jnp.int32))
        orders = [np.asarray(selection._shuffle(b, 0)) for b in (batch, newer)]
        assert (orders[0] != orders[1]).any()
        clipped = jax.jit(policy.clip_cov)
        one, again = (clipped(PolicyOutputs(logp, entropy), batch)[0] for _ in range(2))
        np.testing.assert_array_equal(one, again)


def test_high_entropy_tokens_are_those_above_the_quantile():
    with jax.enable_x64(True):
        logp, entropy, batch = sample()
        keep = np.asarray(selection.high_entropy(PolicyOutputs(logp, entropy), batch, 0.4))
        values = np.asarray(entropy)[MASK > 0]
        np.testing.assert_array_equal(keep[MASK > 0], values >= np.quantile(values, 0.6))
        assert (keep[MASK == 0] == 0).all()


def test_gspo_and_its_token_form_agree_where_the_advantage_is_constant():
    with jax.enable_x64(True):
        logp, entropy, batch = sample()
        batch = batch.replace(weights=None)  # they differ from token to token
        one, two = (evaluate(n, logp, entropy, batch) for n in ("gspo", "gspo_token"))
        same(one, two)


def test_gmpo_leaves_out_tokens_of_weight_zero_and_silences_vetoed_sequences():
    with jax.enable_x64(True):
        logp, entropy, batch = sample()
        first = np.where(np.arange(6)[None, :] == 1, 0.0, 1.0) * MASK
        first[2] = 0
        weighted = batch.replace(weights=jnp.asarray(first))
        loss, gradient, _ = evaluate("gmpo", logp, entropy, weighted)
        shorter = batch.replace(mask=jnp.asarray(first), weights=None)
        # The same as if those tokens were masked, but that row 2 still counts as a sequence.
        other = evaluate("gmpo", logp, entropy, shorter)
        np.testing.assert_allclose(loss, other[0] * 3 / 4, rtol=1e-9)
        np.testing.assert_allclose(gradient, other[1] * 3 / 4, rtol=1e-9)
        assert (gradient[2] == 0).all()


def test_gmpo_of_the_top_entropy_tokens_leaves_the_others_out_of_the_geometric_mean_alone():
    with jax.enable_x64(True):
        logp, entropy, batch = sample()
        batch = batch.replace(weights=None)
        entropy = jnp.where(jnp.arange(len(MASK))[:, None] == 1, 0.0, entropy + 1)  # row 1: none
        found = policy.gmpo(PolicyOutputs(logp, entropy), batch, fraction=0.4)[0]
        chosen = np.asarray(selection.high_entropy(PolicyOutputs(logp, entropy), batch, 0.4)) > 0
        assert chosen[0].any() and not chosen[1].any()
        for row, of in enumerate(chosen):
            a = np.asarray(batch.advantages)[row]
            d = np.asarray(logp - batch.old_logprobs)[row]
            d = np.where(a > 0, np.minimum(d, 0.4), np.maximum(d, -0.4))
            ratio = np.exp(d[of].mean()) if of.any() else 1.0  # an empty product
            live = MASK[row] > 0
            expected = -a[live].mean() * ratio if live.any() else 0.0
            np.testing.assert_allclose(np.asarray(found)[row][live], expected, rtol=1e-9)


def test_decoupled_ppo():
    """The example's behaviour policy is its old one; the proximal one is what we call old."""
    example = worked_example("ppo.decoupled")
    with jax.enable_x64(True):
        x = {k: jnp.asarray(v, jnp.float64) for k, v in example["inputs"].items()}
        batch = s1(example, sampler_logprobs=x["old_log_prob"], old_logprobs=x["prox_log_prob"])
        loss, gradient, _, _ = run(example, policy.decoupled_ppo, TOKEN, batch)
        keep = update.select_policy_tokens(batch)
        weight = policy.decoupled_ppo(PolicyOutputs(x["log_prob"], x["log_prob"]), keep)[1]
    want = example["outputs"]
    np.testing.assert_allclose(loss, want["loss"], rtol=1e-5)
    np.testing.assert_allclose(gradient, want["grad"], rtol=2e-5, atol=1e-6)
    kept = weight["behaviour_weight"] * batch.mask
    np.testing.assert_allclose(kept, want["behav_weight"], rtol=1e-5, atol=1e-6)


def test_scalerl():
    example = worked_example("scalerl.loss")
    want = example["outputs"]
    with jax.enable_x64(True):
        adv = jnp.asarray(want["adv"], jnp.float64)[:, None] * jnp.ones((4, 4))
        loss, gradient, _, _ = run(
            example,
            P(policy.cispo, ratio_max=4.0, behaviour="sampler"),
            update.prompt_mean,
            s1(example, advantages=adv),
        )
    np.testing.assert_allclose(loss, want["loss"], rtol=1e-5)
    np.testing.assert_allclose(gradient, want["grad"], rtol=2e-5, atol=1e-6)


def test_olmorl():
    example = worked_example("olmorl.loss")
    with jax.enable_x64(True):
        batch = update.select_policy_tokens(s1(example))
        weights = jnp.minimum(jnp.exp(batch.old_logprobs - batch.sampler_logprobs), 2.0)
        np.testing.assert_allclose(
            weights * batch.mask, example["outputs"]["weights"], rtol=1e-5, atol=1e-9
        )
        loss, gradient, _, _ = run(
            example,
            P(policy.ppo_clip, clip_low=0.2, clip_high=0.272, dual_clip=None),
            TOKEN,
            s1(example, weights=weights),
        )
    np.testing.assert_allclose(loss, example["outputs"]["loss"], rtol=1e-5)
    np.testing.assert_allclose(gradient, example["outputs"]["grad"], rtol=2e-5, atol=1e-6)


def test_rollout_weights_on_ppo_and_on_gmpo():
    weights = worked_example("ris.token.truncate")["outputs"]["weights"]
    ppo, gmpo = worked_example("ris.applied_ppo"), worked_example("ris.applied_gmpo")
    with jax.enable_x64(True):
        weights = jnp.asarray(weights, jnp.float64)
        got = run(ppo, P(policy.ppo_clip, **CLIP2), TOKEN, s1(ppo, weights=weights))
        np.testing.assert_allclose(got[0], ppo["outputs"]["loss"], rtol=1e-5)
        np.testing.assert_allclose(got[1], ppo["outputs"]["grad"], rtol=2e-5, atol=1e-6)
        # The vetoed row weighs 0 here and 1e-10 there.
        batch = s1(gmpo, weights=weights)
        got = run(gmpo, policy.gmpo, SEQUENCE, batch, corrected=False)
        np.testing.assert_allclose(got[0], gmpo["outputs"]["loss"], rtol=1e-5)
        assert (np.asarray(got[1])[3] == 0).all()


RECIPES = {
    "recipe.grpo_full": (P(policy.ppo_clip, **CLIP2, dual_clip=None), SEQUENCE, 0.04, "sample"),
    "recipe.dr_grpo_full": (
        P(policy.ppo_clip, **CLIP2, dual_clip=None),
        P(update.seq_mean_token_sum_norm, max_tokens=4),
        0.0,
        "none",
    ),
    "recipe.dapo_full": (P(policy.ppo_clip, clip_low=0.2, clip_high=0.28), TOKEN, 0.0, "sample"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name):
    loss, reduction, coef, std = RECIPES[name]
    example = worked_example(name)
    want = example["outputs"]
    with jax.enable_x64(True):
        batch = s1(example)
        scores = jnp.asarray(want.get("shaped_reward", example["inputs"]["rewards"]), jnp.float64)
        last = jnp.argmax(jnp.cumsum(batch.mask, axis=1), axis=1)
        rewards = jnp.zeros((4, 4)).at[jnp.arange(4), last].set(scores)
        batch = batch.replace(rewards=rewards)
        batch = batch.replace(advantages=advantages.group_relative(batch, std=std, eps=1e-6))

        def both(policy_, batch):
            out, _ = loss(policy_, batch)
            d = kl.kl_estimate(policy_.logprobs, batch.ref_logprobs, "k3") if coef else 0.0
            return out + coef * d, {}

        got = run(example, both, reduction, batch)
        pg = run(example, loss, reduction, batch)[0]
    np.testing.assert_allclose(per_sequence(batch.advantages), want["adv"], rtol=1e-6)
    np.testing.assert_allclose(pg, want["pg_loss"], rtol=1e-5)
    np.testing.assert_allclose(got[0], want["loss"], rtol=1e-5)
    np.testing.assert_allclose(got[1], want["grad"], rtol=2e-5, atol=1e-6)


def test_the_likelihood_of_positive_examples_is_a_reduction():
    """VAPO: the loss is the ordinary NLL, averaged over the tokens of correct rows."""
    example = worked_example("vapo.nll")
    with jax.enable_x64(True):
        scores = jnp.asarray(example["inputs"]["correct"], jnp.float64)
        reduction = P(update.positive_token_mean, correct_at=1.0)
        got = run(example, policy.negative_log_likelihood, reduction, s1(example, scores=scores))[0]
    np.testing.assert_allclose(got, example["outputs"]["nll"], rtol=1e-6)
