"""Losses, KL and advantages against numbers that verl and the worked examples produced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Compiled, golden_cases, worked_example
from golden_checks.common import response_batch

from rljax import advantages as op_by_op
from rljax import learn as update
from rljax.batch import Batch
from rljax.errors import InputError
from rljax.losses import kl, policy, value

advantages = Compiled(op_by_op)
REDUCTIONS = {
    "token-mean": lambda p: update.token_mean,
    "seq-mean-token-sum": lambda p: update.seq_mean_token_sum,
    "seq-mean-token-mean": lambda p: update.seq_mean_token_mean,
    "seq-mean-token-sum-norm": lambda p: (
        lambda b: update.seq_mean_token_sum_norm(
            b, max_tokens=p.get("loss_scale_factor", b.mask.shape[1])
        )
    ),
}


def reduced(loss_of, x, batch, reduction):
    """The loss that update.py makes of it, its gradient with respect to x, and the metrics."""

    def total(x):
        selected = update.select_policy_tokens(batch)
        loss, metrics = loss_of(x, selected)
        summed, sums = update.weighted_loss(loss, metrics, selected, reduction(selected))
        return summed, {k: a / jnp.maximum(b, 1) for k, (a, b) in sums.items()}

    (loss, metrics), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(x)
    return loss, gradient, metrics


def local_normaliser(case) -> bool:
    """verl can be told a global batch; these cases keep its own rows as the whole batch."""
    p = case.params
    known = p.get("loss_agg_mode", "token-mean") in REDUCTIONS and p["compute_dtype"] == "float64"
    return known and p["precision"] == "float64" and not {"global_batch_size", "dp_size"} & set(p)


@pytest.mark.parametrize("name", ["ppo.clip", "ppo.dual_clip", "ppo.clip_higher"])
def test_ppo_clip_worked_examples(name):
    example = worked_example(name)
    inputs, p = example["inputs"], example["params"]
    with jax.enable_x64(True):
        batch = response_batch(
            inputs["response_mask"], old_logprobs=inputs["old_log_prob"],
            advantages=inputs["advantages"],
        )  # fmt: skip
        options = {k: p[k] for k in ("clip_low", "clip_high", "dual_clip")}
        loss, gradient, _ = reduced(
            lambda logp, b: policy.ppo_clip(policy.Policy(logp, logp), b, **options),
            jnp.asarray(inputs["log_prob"], jnp.float64), batch, update.token_mean,
        )  # fmt: skip
    np.testing.assert_allclose(loss, example["outputs"]["loss"], rtol=1e-5)
    np.testing.assert_allclose(gradient, example["outputs"]["grad"], rtol=1e-4, atol=1e-6)


def test_ratio_is_clamped_where_its_exponential_would_overflow():
    want = worked_example("edge.ratio_clamp")["outputs"]["loss_per_token"]
    with jax.enable_x64(True):
        batch = response_batch([[1, 1]], old_logprobs=[[0.0, 0.0]], advantages=[[-1.0, 1.0]])
        logp = jnp.array([[50.0, -50.0]])
        loss, _ = policy.ppo_clip(policy.Policy(logp, logp), batch, dual_clip=None)
    np.testing.assert_allclose(loss[0], want, rtol=1e-5)


def test_reductions_equal_verl_in_value_and_gradient():
    _, cases = golden_cases("verl", "agg_loss.npz")
    checked = 0
    with jax.enable_x64(True):
        for case in cases:
            if case.edge or not local_normaliser(case):
                continue
            batch = response_batch(case.inputs["loss_mask"])
            mode = REDUCTIONS[case.params["loss_agg_mode"]](case.params)
            loss, gradient, _ = reduced(
                lambda x, b: (x, {}), jnp.asarray(case.inputs["loss_mat"], jnp.float64), batch, mode
            )
            np.testing.assert_allclose(loss, case.outputs["loss"], rtol=1e-7, err_msg=case.label)
            want = case.grads["loss_mat"]
            np.testing.assert_allclose(gradient, want, rtol=1e-7, atol=1e-14, err_msg=case.label)
            checked += 1
    assert checked >= 2


def test_reductions_worked_example_with_an_empty_row_and_prompt_mean():
    example = worked_example("conv.agg_modes")
    with jax.enable_x64(True):
        batch = response_batch(example["inputs"]["mask"], group=example["inputs"]["group"])
        loss = jnp.asarray(example["inputs"]["loss"], jnp.float64)
        modes = {
            "token-mean": update.token_mean,
            "seq-mean-token-sum": update.seq_mean_token_sum,
            "seq-mean-token-mean": update.seq_mean_token_mean,
            "seq-mean-token-sum-norm": lambda b: update.seq_mean_token_sum_norm(b, max_tokens=3),
            "token-sum-over-Lmax": lambda b: update.token_sum_norm(b, max_tokens=3),
            "prompt-mean": update.prompt_mean,
        }
        for name, mode in modes.items():
            got = jnp.sum(mode(batch) * jnp.where(batch.mask > 0, loss, 0))
            assert float(got) == pytest.approx(example["outputs"][name], rel=1e-5), name


def test_kl_in_reward_equals_verl():
    _, cases = golden_cases("verl", "apply_kl_penalty.npz")
    names = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3"}
    checked = 0
    with jax.enable_x64(True):
        for case in cases:
            if case.params["kl_penalty"] not in names or case.edge:
                continue
            x = case.inputs
            batch = response_batch(
                x["response_mask"], rewards=x["token_level_scores"],
                old_logprobs=x["old_log_probs"], ref_logprobs=x["ref_log_prob"],
            )  # fmt: skip
            got = kl.kl_penalised_rewards(
                batch, coef=case.params["kl_coef"], estimator=names[case.params["kl_penalty"]]
            )
            keep = x["response_mask"] > 0
            want = case.outputs["token_level_rewards"]
            np.testing.assert_allclose(np.asarray(got)[keep], want[keep], rtol=1e-9, atol=1e-12)
            checked += 1
    assert checked >= 4


def test_gae_equals_verl():
    _, cases = golden_cases("verl", "adv_gae.npz")
    with jax.enable_x64(True):
        for case in cases:
            x, p = case.inputs, case.params
            batch = response_batch(
                x["response_mask"], rewards=x["token_level_rewards"], values=x["values"]
            )
            keep = x["response_mask"] > 0
            for whiten, name in ((True, "advantages"), (False, "advantages_raw")):
                got, returns = advantages.gae(batch, gamma=p["gamma"], lam=p["lam"], whiten=whiten)
                want = case.outputs[name]
                np.testing.assert_allclose(
                    np.asarray(got)[keep], want[keep], rtol=1e-7, atol=1e-9, err_msg=case.label
                )
                assert (np.asarray(got)[~keep] == 0).all()
            want = case.outputs["returns"]
            np.testing.assert_allclose(np.asarray(returns)[keep], want[keep], rtol=1e-8, atol=1e-9)


def test_gae_skips_a_tool_reply():
    example = worked_example("gae.observation_gap")
    with jax.enable_x64(True):
        x = example["inputs"]
        batch = response_batch(x["mask"], rewards=x["rewards"], values=x["values"])
        got, returns = advantages.gae(batch, gamma=1.0, lam=0.95, whiten=False)
    np.testing.assert_allclose(got, example["outputs"]["adv"], rtol=1e-5, atol=1e-6)
    keep = np.asarray(x["mask"]) > 0
    np.testing.assert_allclose(
        np.asarray(returns)[keep], np.asarray(example["outputs"]["ret"])[keep], rtol=1e-5
    )


def test_group_relative_equals_verl_but_for_groups_of_one():
    _, cases = golden_cases("verl", "adv_grpo.npz")
    with jax.enable_x64(True):
        for case in cases:
            if case.edge:
                continue
            x, p = case.inputs, case.params
            batch = response_batch(
                x["response_mask"], group=x["index"], rewards=x["token_level_rewards"]
            )
            std = "sample" if p["norm_adv_by_std_in_grpo"] else "none"
            got = np.asarray(advantages.group_relative(batch, std=std, eps=p.get("epsilon", 1e-6)))
            ids, counts = np.unique(x["index"], return_counts=True)
            alone = np.isin(x["index"], ids[counts == 1])
            # An empty response has no token to carry a score here; verl reads one from under the
            # mask.
            empty = x["response_mask"].sum(axis=1) == 0
            skip = alone | np.isin(x["index"], x["index"][empty])
            keep = (x["response_mask"] > 0) & ~skip[:, None]
            want = case.outputs["advantages"]
            np.testing.assert_allclose(
                got[keep], want[keep], rtol=1e-7, atol=1e-9, err_msg=case.label
            )
            assert (got[alone] == 0).all()  # ours: a group of one teaches nothing (ALGORITHMS C6)


def test_group_relative_worked_example_all_equal_and_singleton():
    example = worked_example("adv.group_basic")
    rewards = example["inputs"]["rewards"]
    with jax.enable_x64(True):
        batch = response_batch(
            np.ones((9, 1)), group=example["inputs"]["group"], rewards=np.array(rewards)[:, None]
        )
        for std, name in (("sample", "grpo_std_unbiased"), ("population", "grpo_std_biased")):
            got = np.asarray(advantages.group_relative(batch, std=std))[:, 0]
            np.testing.assert_allclose(got[:8], example["outputs"][name][:8], rtol=1e-5, atol=1e-6)
            assert got[8] == 0 and (got[4:8] == 0).all()
    with pytest.raises(InputError, match="sample.*population.*none"):
        advantages.group_relative(batch, std="biased")


def test_constants_of_the_batch_get_no_gradient():
    """Old and reference log-probs, advantages, values and weights are data (ALGORITHMS N 11)."""
    mask = jnp.ones((2, 3))
    key = jax.random.key(0)
    fields = {
        name: jax.random.normal(jax.random.fold_in(key, i), (2, 3))
        for i, name in enumerate(
            ("old_logprobs", "ref_logprobs", "advantages", "values", "returns", "weights")
        )
    }
    batch = Batch(
        tokens=jnp.zeros((2, 3), jnp.int32), segment_ids=jnp.ones((2, 3), jnp.int32),
        positions=jnp.zeros((2, 3), jnp.int32), mask=mask,
    )  # fmt: skip
    logp = jax.random.normal(jax.random.fold_in(key, 9), (2, 3))

    def total(fields):
        b = batch.replace(**fields)
        pg, metrics = policy.ppo_clip(policy.Policy(logp, logp), b)
        pg = pg + policy.policy_gradient(policy.Policy(logp, logp), b)[0]
        loss, _ = update.weighted_loss(pg, metrics, b, update.token_mean(b))
        loss = loss + jnp.sum(kl.kl_estimate(logp, b.ref_logprobs, "k3"))
        return loss + jnp.sum(value.squared_error(logp, b, clip=None)[0])

    for name, gradient in jax.jit(jax.grad(total))(fields).items():
        assert (np.asarray(gradient) == 0).all(), name
