"""Policy losses against TRL's trainers; policy.py takes this table over."""

import jax
import jax.numpy as jnp
import numpy as np

from rljax import learn as update
from rljax.batch import masked_mean, segment_count
from rljax.losses import kl, policy, q_function, value
from rljax.losses.policy import PolicyOutputs, common, selection

from .common import reduced, response_batch


def trl_batch(case, dtype, names, mask="completion_mask"):
    """(batch, log-probs, entropies); a missing old log-prob is the present one, as in TRL."""
    x = case.inputs
    mask = np.asarray(x[mask], np.float64)
    if "tool_mask" in x:
        mask = mask * x["tool_mask"]

    def wide(v):
        return np.broadcast_to(v if v.ndim == 2 else v[:, None], mask.shape)

    fields = {field: wide(x[name]) for field, name in names.items() if name in x}
    logp = x["per_token_logps"]
    fields.setdefault("old_logprobs", logp)
    fields.setdefault("sampler_logprobs", fields["old_logprobs"])
    batch = response_batch(mask, dtype, **fields)
    entropy = jnp.asarray(x.get("entropies", np.zeros_like(logp)), dtype)
    return batch, jnp.asarray(logp, dtype), entropy


NAMES = {
    "advantages": "advantages",
    "old_logprobs": "old_per_token_logps",
    "ref_logprobs": "ref_per_token_logps",
    "sampler_logprobs": "sampling_per_token_logps",
}


def trl_weights(p, batch, loss_type):
    """TRL's normalisers: rows without a token count, and the step's tokens are given."""
    mask, rows = batch.mask, batch.rows
    steps = p.get("gradient_accumulation_steps", 1)
    n = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
    # Where every row has a token: seq_mean_token_mean, seq_mean_token_sum(_norm), token_mean.
    scale = jnp.maximum(segment_count(batch), 1) / rows / steps
    if loss_type in ("grpo", "sapo", "gmpo"):
        return update.seq_mean_token_mean(batch) * scale
    if loss_type == "bnpo":
        return update.token_mean(batch) / steps
    if loss_type == "dr_grpo":
        width = p["max_completion_length"]
        return update.seq_mean_token_sum_norm(batch, max_tokens=width) * scale
    if loss_type == "luspo":  # LUSPO = gspo under this reduction
        return update.seq_mean_token_sum(batch) * scale
    if loss_type == "rloo":
        return mask / n / rows
    per_generation = p.get("steps_per_generation", 1)
    return mask / (p["num_items_in_batch"] * steps / per_generation)


def trl_core(p, x, batch):
    """(loss, its ratio's level): the product's function for a TRL loss type."""
    kind, level = p["loss_type"], p["importance_sampling_level"]
    off_policy, fraction = p.get("off_policy_mask_threshold"), p.get("top_entropy_quantile", 1.0)
    if kind == "cispo":
        return policy.cispo, {"ratio_max": p["epsilon_high"], "level": level}
    if kind == "sapo":
        taus = (p["sapo_temperature_pos"], p["sapo_temperature_neg"])
        return policy.sapo, {"tau_positive": taus[0], "tau_negative": taus[1], "level": level}
    if kind == "vespo":
        return policy.vespo, {
            "k_positive": p["vespo_k_pos"],
            "lam_positive": p["vespo_lambda_pos"],
            "k_negative": p["vespo_k_neg"],
            "lam_negative": p["vespo_lambda_neg"],
        }
    # TRL's delta caps the ratio of the unclipped term: the dual clip.
    options = {
        "clip_low": p["epsilon"],
        "clip_high": p["epsilon_high"],
        "dual_clip": p.get("delta"),
    }
    if level == "token" and fraction < 1:
        return policy.ppo_high_entropy, options | {"fraction": fraction}
    options["max_sequence_kl"] = off_policy
    return (policy.gspo if level == "sequence" else policy.ppo_clip), options


def trl_unclamped_k3(logp, ref):
    """k3; ours clamps the result at 10, TRL does not."""
    return kl._k3(logp - ref)


def trl_total(policy_, batch, p, loss, options, use_weights):
    """Loss per token with TRL's masks, weights and KL, and what its metrics need."""
    by, level = "check", p.get("importance_sampling_level", "token")
    core, metrics = loss(policy_, batch, **options)
    if p.get("off_policy_mask_threshold") and "sequence_keep" not in metrics:
        limit = p["off_policy_mask_threshold"]
        core = core * common.keep_near_sequences(policy_, batch, limit, by=by)
    chosen = batch.mask
    if p.get("top_entropy_quantile", 1.0) < 1:
        chosen = selection.high_entropy(policy_, batch, p["top_entropy_quantile"])
        core = core * chosen
    if use_weights:
        core = core * batch.weights
    if p.get("beta"):
        if level == "token" and p.get("use_bias_correction_kl"):
            corrected = kl.importance_corrected_kl(
                policy_.logprobs, batch.ref_logprobs, batch.old_logprobs
            )
            raw = trl_unclamped_k3(policy_.logprobs, batch.ref_logprobs)
            ratio = jnp.exp(policy_.logprobs - batch.old_logprobs)
            d = jnp.where(raw < 10, corrected, ratio * raw)
        else:
            raw = d = trl_unclamped_k3(policy_.logprobs, batch.ref_logprobs)
            if p.get("use_bias_correction_kl"):
                difference = common.log_difference(policy_, batch, by=by)
                d = common.ratio_at(level, difference, batch) * d
        core = core + p["beta"] * jnp.where(batch.mask > 0, d, 0.0)
        metrics = metrics | {"kl": d}
    return core, metrics, chosen


def trl_mean(x, batch, by_sequence):
    """TRL's mean of a metric: over tokens, or over all rows where a ratio is one of the row."""
    n = jnp.maximum(jnp.sum(batch.mask, 1), 1)
    per_row = jnp.sum(x * batch.mask, 1) / n
    return jnp.mean(per_row) if by_sequence else masked_mean(x, batch.mask)


def trl_clip_metrics(metrics, batch, by_sequence=False):
    """TRL's clip_ratio.*, and extremes of the rows' means, of rows with tokens."""
    n = jnp.sum(batch.mask, 1)

    def rows(x):
        return jnp.sum(x * batch.mask, 1) / jnp.maximum(n, 1)

    def mean(x):
        return trl_mean(x, batch, by_sequence)

    low, high = metrics["pg_clipfrac_under"], metrics["pg_clipfrac_upper"]
    counts = (n > 0) | by_sequence
    return {
        "clip_ratio.low_mean": mean(low),
        "clip_ratio.high_mean": mean(high),
        "clip_ratio.region_mean": mean(low + high),
        "clip_ratio.low_min": jnp.min(rows(low), where=counts, initial=1.0),
        "clip_ratio.high_max": jnp.max(rows(high), where=counts, initial=0.0),
    }


def trl_run(case, dtype, p, batch, inputs, loss, options, weights, use_weights=False):
    """Loss, gradients and metrics of a GRPO-like TRL trainer."""
    clean = update.select_policy_tokens(batch)

    def total(logp, entropy):
        policy_ = PolicyOutputs(logp, entropy)
        per_token, metrics, chosen = trl_total(policy_, clean, p, loss, options, use_weights)
        pg = jnp.sum(jnp.where(batch.mask > 0, weights * per_token, 0.0))
        # The bonus is the mean over the chosen tokens, divided by the accumulation steps alone.
        bonus = p.get("entropy_coef", 0.0) * masked_mean(entropy, chosen)
        result = pg - bonus / p.get("gradient_accumulation_steps", 1)
        return result, metrics | {"policy_loss": pg}

    (result, metrics), pulled = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(*inputs)
    out = {"output/loss": result, "grad/per_token_logps": pulled[0]}
    if "entropies" in case.grads:
        out["grad/entropies"] = pulled[1]
    found = {"entropy": masked_mean(inputs[1], batch.mask), "policy_loss": metrics["policy_loss"]}
    # The loss is logged before it is divided by the accumulation steps, but where these belong to
    # the normaliser.
    if p.get("loss_type") not in ("cispo", "dapo", "vespo"):
        found["policy_loss"] *= p.get("gradient_accumulation_steps", 1)
    found["entropy_coef"] = p.get("entropy_coef", 0.0)
    if "kl" in metrics:
        found["kl"] = masked_mean(metrics["kl"], batch.mask)
    if "phi" in metrics:
        empty = jnp.sum(batch.mask, axis=1) == 0  # a row without tokens has weight 1 there
        found["vespo.phi_seq_mean"] = jnp.mean(jnp.where(empty, 1.0, metrics["phi"]))
    by_sequence = p.get("importance_sampling_level") == "sequence"
    if "pg_clipfrac_upper" in metrics:
        found |= trl_clip_metrics(metrics, batch, by_sequence)
    elif p.get("loss_type") == "cispo":
        cut = metrics["pg_clipfrac"] * (clean.advantages > 0)
        found["cispo_clip_ratio"] = trl_mean(cut, batch, by_sequence)
    return out | {f"metric/{k}": v for k, v in found.items() if k in case.metrics}


def trl_grpo(case, dtype):
    p, x = case.params, case.inputs
    batch, *inputs = trl_batch(case, dtype, NAMES)
    loss, options = trl_core(p, x, batch)
    weights, use_weights = trl_weights(p, batch, p["loss_type"]), False
    if p["use_is_ratio"]:
        ratio = jnp.asarray(x["importance_sampling_ratio"], dtype)
        use_weights = p["loss_type"] != "vespo"
        if not use_weights:
            # TRL sums the log weights of a row, be they one number, or one per column, masked ones
            # too; ours sums those of the policy tokens: spread the row's sum over them.
            logs = jnp.clip(jnp.log(ratio), np.log(1e-8), 20.0)
            count = jnp.maximum(jnp.sum(batch.mask, axis=1, keepdims=True), 1)
            ratio = jnp.exp(jnp.sum(logs, axis=1, keepdims=True) / count)
        batch = batch.replace(weights=jnp.broadcast_to(ratio, batch.mask.shape))
    return trl_run(case, dtype, p, batch, inputs, loss, options, weights, use_weights)


def trl_gspo_token(case, dtype):
    p = case.params
    batch, *inputs = trl_batch(case, dtype, NAMES)
    options = {"clip_low": p["epsilon"], "clip_high": p["epsilon_high"]}
    weights = trl_weights(p, batch, p["loss_type"])
    return trl_run(case, dtype, p, batch, inputs, policy.gspo_token, options, weights)


def trl_gmpo(case, dtype):
    p = {k: v for k, v in case.params.items() if k != "top_entropy_quantile"}
    batch, *inputs = trl_batch(case, dtype, NAMES)
    options = {"clip_low": p["epsilon_low"], "clip_high": p["epsilon_high"]}
    options["fraction"] = case.params.get("top_entropy_quantile", 1.0)
    weights = trl_weights(p, batch, "gmpo")
    out = trl_run(case, dtype, p, batch, inputs, policy.gmpo, options, weights)
    # A row without a token has ratio 1 and a loss of -A there, and none here.
    empty = jnp.sum(batch.mask, axis=1) == 0
    constant = -jnp.sum(jnp.asarray(case.inputs["advantages"], dtype), where=empty) / batch.rows
    out["output/loss"] += constant / p.get("gradient_accumulation_steps", 1)
    return out


def trl_rloo(case, dtype):
    """PPO with the response as one action; the file holds the sum of the old log-probs."""
    p, x = case.params, case.inputs
    batch, *inputs = trl_batch(case, dtype, {"advantages": "advantages"})
    spread = jnp.asarray(x["old_logps"], dtype)[:, None] / jnp.maximum(
        jnp.sum(batch.mask, axis=1, keepdims=True), 1
    )
    batch = batch.replace(old_logprobs=jnp.broadcast_to(spread, batch.mask.shape))
    options = {"clip_low": p["epsilon"], "clip_high": p["epsilon_high"]}
    options["length_normalized"] = False
    out = trl_run(
        case, dtype, p, batch, inputs, policy.gspo, options, trl_weights(p, batch, "rloo")
    )
    _, metrics = policy.gspo(PolicyOutputs(*inputs), batch, **options)
    found = trl_clip_metrics(metrics, batch, by_sequence=True)
    return out | {f"metric/{k}": v for k, v in found.items()}


def trl_ppo(case, dtype):
    p, x = case.params, case.inputs
    batch = response_batch(
        ~np.asarray(x["padding_mask"], bool),
        dtype,
        advantages=x["advantages"],
        old_logprobs=x["old_logprobs"],
    )
    critic = response_batch(
        ~np.asarray(x["padding_mask_p1"], bool), dtype, values=x["old_values"], returns=x["returns"]
    )
    clip = {"clip_low": p["cliprange"], "clip_high": p["cliprange"], "dual_clip": None}
    pg, g, found = reduced(
        lambda v, b: policy.ppo_clip(PolicyOutputs(v, v), b, **clip),
        jnp.asarray(x["new_logprobs"], dtype),
        batch,
        update.token_mean(batch),
    )
    vf, gv, found_v = reduced(
        lambda v, b: value.squared_error(v, b, clip=p["cliprange_value"]),
        jnp.asarray(x["vpred"], dtype),
        critic,
        update.token_mean(critic),
    )
    return {
        "output/pg_loss": pg,
        "output/vf_loss": vf,
        "output/loss": pg + p["vf_coef"] * vf,
        "output/pg_clipfrac": found["pg_clipfrac"],
        "output/vf_clipfrac": found_v["vf_clipfrac"],
        "grad/new_logprobs": g,
        "grad/vpred": gv,  # of vf_loss alone
    }


def trl_masks(case, dtype):
    """The off-policy sequence mask, and VESPO's weight with and without a rollout correction."""
    p, x = case.params, case.inputs
    batch = response_batch(
        x["mask"],
        dtype,
        sampler_logprobs=x["sampling_per_token_logps"],
        advantages=np.broadcast_to(x["advantages"], x["mask"].shape),
    )
    logp = jnp.asarray(x["per_token_logps"], dtype)
    policy_ = PolicyOutputs(logp, logp)
    keep = common.keep_near_sequences(policy_, batch, p["off_policy_threshold"], by="check")
    batch = batch.replace(old_logprobs=batch.sampler_logprobs)
    logs = jnp.clip(jnp.log(jnp.asarray(x["importance_sampling_ratio"], dtype)), np.log(1e-8), 20.0)
    # TRL sums the log weights of masked columns too; ours those of the policy tokens.
    n = jnp.maximum(jnp.sum(batch.mask, axis=1, keepdims=True), 1)
    weights = jnp.exp(jnp.sum(logs, axis=1, keepdims=True) / n)
    corrected = batch.replace(weights=jnp.broadcast_to(weights, batch.mask.shape))
    _, plain = policy.vespo(policy_, batch)
    _, both = policy.vespo(
        policy_,
        corrected,
        k_positive=p["k_pos"],
        lam_positive=p["lambda_pos"],
        k_negative=p["k_neg"],
        lam_negative=p["lambda_neg"],
    )
    first = jnp.argmax(batch.mask, axis=1)
    return {
        "output/off_policy_mask": keep[jnp.arange(batch.rows), first][:, None],
        "output/vespo_phi_default_no_is": plain["phi"][:, None],
        "output/vespo_phi_with_is": both["phi"][:, None],
    }


def trl_a2po(case, dtype):
    p, x = case.params, case.inputs
    one = np.ones((len(x["logps"]), 1))
    batch = response_batch(
        one, dtype, ref_logprobs=x["ref_logps"][:, None], rewards=x["rewards"][:, None]
    )
    v_star = jnp.asarray(x["v_star"], dtype)

    def loss(logps):
        policy_ = PolicyOutputs(logps[:, None], logps[:, None])
        # A*PO is least squares on the optimal advantage: twice DRO's loss, with V* as its value.
        per_row, metrics = q_function.dro_policy(
            policy_, batch, v_star, tau=p["beta2"], gradient="exact"
        )
        return 2 * jnp.mean(per_row), metrics

    (out, found), g = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(x["logps"], dtype))
    return {
        "output/loss": out,
        "grad/logps": g,
        "metric/implicit_reward": p["beta2"] * jnp.mean(found["ref_kl_sequence"]),
        "metric/advantage": jnp.mean(found["dro_reward"] - found["dro_value"]),
    }


CHECKS = {
    "trl/grpo_loss": trl_grpo,
    "trl/gspo_token_loss": trl_gspo_token,
    "trl/gmpo_loss": trl_gmpo,
    "trl/rloo_loss": trl_rloo,
    "trl/ppo_loss": trl_ppo,
    "trl/grpo_off_policy_mask_and_vespo_weights": trl_masks,
    "trl/a2po": trl_a2po,
}
