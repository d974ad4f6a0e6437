"""Checks of reductions, KL in the reward and its controller, shaping, and log-probs from logits."""

import jax
import jax.numpy as jnp
import numpy as np

from golden_checks.common import Skip, response_batch, token_weights
from rljax.batch import last_token, row_scores, segment_count
from rljax.dataflows.steps import mean_sequence_kl
from rljax.kernels.logprob import token_logprobs
from rljax.losses.kl import kl_penalised_rewards
from rljax.roles import KLController
from rljax.shaping import scores as shaping


def agg_loss(case, dtype):
    if case.edge:
        raise Skip("all-masked batches are NaN upstream and 0 here")
    batch = response_batch(case.inputs["loss_mask"], dtype)
    loss = jnp.asarray(case.inputs["loss_mat"], dtype)
    weights = token_weights(case.params, batch)

    def total(x):
        return jnp.sum(weights * jnp.where(batch.mask > 0, x, 0.0))

    value, gradient = jax.value_and_grad(total)(loss)
    return {"output/loss": value, "grad/loss_mat": gradient}


ESTIMATORS = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3"}


def controller(case, scale=1.0):
    """verl's controller holds the coefficient itself; ours its ratio to the first one."""
    p = case.params
    if p["type"] == "fixed":
        return None
    return KLController(jnp.asarray(scale, jnp.float64), p["target_kl"], p["horizon"])


def apply_kl_penalty(case, dtype):
    x, p = case.inputs, case.params
    batch = response_batch(
        x["response_mask"],
        dtype,
        rewards=x["token_level_scores"],
        old_logprobs=x["old_log_probs"],
        ref_logprobs=x["ref_log_prob"],
    )
    estimator = ESTIMATORS[p["kl_penalty"]]
    rewards = kl_penalised_rewards(batch, coef=p["kl_coef"], estimator=estimator)
    # verl's controller sees the estimator of the penalty, over all rows; ours k1, over the rows
    # that have tokens.
    per_token = kl_penalised_rewards(
        batch.replace(rewards=jnp.zeros_like(batch.mask)), coef=-1.0, estimator=estimator
    )
    tokens = jnp.sum(batch.mask, axis=1)
    per_row = jnp.sum(per_token, axis=1) / jnp.maximum(tokens, 1e-8)
    kl = jnp.mean(per_row)
    if estimator == "k1":
        ours = mean_sequence_kl(batch) * segment_count(batch) / batch.rows
        np.testing.assert_allclose(ours, kl, rtol=1e-4, atol=1e-6)
    role = controller(case)
    after = p["kl_coef"] * (1.0 if role is None else role.update(kl, batch.rows).state)
    return {
        "output/token_level_rewards": (rewards, np.asarray(x["response_mask"]) > 0),
        "output/kl_coef_after_update": after,
        "metric/actor/reward_kl_penalty": kl,
        "metric/actor/reward_kl_penalty_coeff": p["kl_coef"],
    }


def kl_controller(case, dtype):
    role, values = controller(case), [1.0]
    for kl, n in zip(case.inputs["current_kl"], case.inputs["n_steps"], strict=True):
        role = None if role is None else role.update(jnp.asarray(kl), int(n))
        values.append(1.0 if role is None else float(role.state))
    return {"output/values": np.array(values) * case.params["kl_coef"]}


def _lengths(lengths, dtype, scores=None):
    lengths = np.asarray(lengths)
    mask = np.arange(lengths.max())[None] < lengths[:, None]
    scores = np.zeros(len(lengths)) if scores is None else scores
    batch = response_batch(mask, dtype, rewards=np.zeros(mask.shape), scores=scores)
    return batch.replace(rewards=last_token(batch) * jnp.asarray(scores, dtype)[:, None])


def dapo_overlong_reward(case, dtype):
    x, p = case.inputs, case.params
    batch = _lengths(x["response_lengths"], dtype, x["scores"])
    shaped = row_scores(batch)
    if p["enable"]:
        # verl has no floor: the generation limit is its floor (table O).
        shaped = shaping.soft_overlong(
            batch,
            max_tokens=p["max_resp_len"],
            cache_tokens=p["overlong_buffer_len"],
            penalty=p["penalty_factor"],
            floor=False,
        )
    out = {"output/reward": shaped, "output/reward_tensor": last_token(batch) * shaped[:, None]}
    added = shaped - jnp.asarray(x["scores"], dtype)
    out["output/overlong_reward"] = added if p["enable"] else np.zeros(0)
    return out


def trl_rewards(case, dtype):
    p = case.params
    if p["kind"] != "soft_overlong_punishment":
        return {"omitted": {"output/rewards": "a reward of texts, not of these rooms"}}
    batch = _lengths(case.inputs["completion_lengths"], dtype)
    found = shaping.soft_overlong(
        batch, max_tokens=p["max_completion_len"], cache_tokens=p["soft_punish_cache"]
    )
    return {"output/rewards": found}


def logits_logprob_entropy(case, dtype):
    logits = jnp.asarray(case.inputs["logits"], dtype)
    labels = jnp.asarray(case.inputs["labels"], jnp.int32)
    batch = response_batch(case.inputs["response_mask"], dtype)
    weights = token_weights(case.params, batch)
    head = jnp.eye(logits.shape[-1], dtype=dtype)  # logits as hidden states

    def statistics(z):
        return token_logprobs(z, head, labels)[:2]

    def entropy_loss(z):
        return jnp.sum(weights * jnp.where(batch.mask > 0, statistics(z)[1], 0.0))

    logp, entropy = statistics(logits)
    return {
        "output/log_probs": logp,
        "output/entropy": entropy,
        "output/entropy_loss": entropy_loss(logits),
        "grad/logits_of_logprob_sum": jax.grad(lambda z: jnp.sum(statistics(z)[0]))(logits),
        "grad/logits_of_entropy_sum": jax.grad(lambda z: jnp.sum(statistics(z)[1]))(logits),
        "grad/logits_of_entropy_loss": jax.grad(entropy_loss)(logits),
    }


CHECKS = {
    "verl/agg_loss": agg_loss,
    "verl/apply_kl_penalty": apply_kl_penalty,
    "verl/kl_controller": kl_controller,
    "verl/dapo_overlong_reward": dapo_overlong_reward,
    "trl/rewards": trl_rewards,
    "verl/logits_logprob_entropy": logits_logprob_entropy,
}
