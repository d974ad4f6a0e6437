"""Rollout correction, mismatch metrics and bypassed policy losses against verl and TRL."""

import math

import jax.numpy as jnp
import numpy as np

from golden_checks.common import reduced, response_batch, token_weights
from rljax.batch import masked_max, masked_mean, segment_sum
from rljax.correction import mismatch_metrics, rollout_correction, variance_proxy_metrics
from rljax.correction.metrics import chi2_sequence, perplexity_metrics
from rljax.correction.ratios import (
    bounded_exp,
    log_ratio,
    log_weights,
    masked_min,
    segment_mean,
    sequence_share,
)
from rljax.correction.rejection import statistic
from rljax.correction.weights import weight_metrics
from rljax.losses.policy import PolicyOutputs, policy_gradient, ppo_clip

MISMATCH = (
    "kl",
    "k3_kl",
    "chi2_token",
    "chi2_seq",
    "training_ppl",
    "training_log_ppl",
    "rollout_ppl",
    "rollout_log_ppl",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "log_ppl_diff_max",
    "log_ppl_diff_min",
    "ppl_ratio",
)
SPREAD_OF_TOKENS = ("mean", "std", "eff_sample_size")
OF_SEQUENCES = ("seq_mean", "seq_std", "seq_max", "seq_min", "seq_max_deviation")


def _batch(case, dtype, old="old_log_prob", sampler="rollout_log_prob"):
    """The case with columns of padding that hold NaN up to a multiple of 16: few shapes, and no
    recompiling of every operation for each of them."""
    mask = np.asarray(case.inputs["response_mask"])
    width = ((0, 0), (0, -mask.shape[1] % 16))
    padded = {
        name: np.pad(np.asarray(case.inputs[key], np.float64), width, constant_values=np.nan)
        for name, key in {
            "old_logprobs": old,
            "sampler_logprobs": sampler if sampler in case.inputs else old,
        }.items()
    }
    return response_batch(np.pad(mask, width), dtype, **padded)


def _cut(x, case):
    """Without the padding of `_batch`."""
    return x[:, : case.inputs["response_mask"].shape[1]]


# -- the peer's per-sequence numbers count a row without tokens as a sequence whose values are 0.
# Ours never count it. One more column, seen by per-sequence statistics alone, stands for such rows.


def _with_empty_rows(batch, share, *arrays):
    """(mask, share, arrays) with a column more: share 1 and value 0 in rows without tokens."""
    empty = (jnp.sum(batch.mask, axis=1, keepdims=True) == 0).astype(share.dtype)

    def widen(x, column):
        return jnp.concatenate([x, column], axis=1)

    zero = jnp.zeros_like(empty)
    return [widen(batch.mask, zero), widen(share, empty), *(widen(x, zero) for x in arrays)]


def _has_empty_rows(case) -> bool:
    return bool((np.sum(case.inputs["response_mask"], axis=1) == 0).any())


def _mismatch(batch, case, found=None) -> dict:
    """verl's off-policy metrics by its names; found: where the product has computed them."""
    found = found or mismatch_metrics(batch)
    found = {name: found[f"mismatch/mismatch_{name}"] for name in MISMATCH}
    if _has_empty_rows(case):
        share = sequence_share(batch)
        logs = (
            -segment_mean(x, batch, share) for x in (batch.old_logprobs, batch.sampler_logprobs)
        )
        sums = segment_sum(log_ratio(batch, by="check"), batch)
        _, share, training, rollout, sums = _with_empty_rows(batch, share, *logs, sums)
        found |= perplexity_metrics(training, rollout, share)
        found["chi2_seq"] = chi2_sequence(sums, share)
    return found


def _weights_at(batch, level):
    """(w, its mean over each sequence, log w) before bounding, by the product's own helpers."""
    x = log_ratio(batch, by="check")
    log_w = log_weights(x, batch, sequence_share(batch), level)
    w = jnp.where(batch.mask > 0, bounded_exp(log_w), 0.0)
    return w, log_w


def _spread(batch, w, log_w, level, bounds, *, rows: bool | None = None) -> dict:
    """The product's weight metrics, with the peer's empty rows; rows: fractions are of rows."""
    per_sequence = segment_mean(w, batch, sequence_share(batch))
    mask, share, w, per_sequence, log_w = _with_empty_rows(
        batch, sequence_share(batch), w, per_sequence, log_w
    )
    found = weight_metrics(w, per_sequence, log_w, mask, share, level, bounds)
    found["std"] = _std(found["std"], w, mask, bounds)
    rows = level == "sequence" if rows is None else rows
    if level != "token":
        # The peer's extremes (and fractions) are over log w, which is 0 (w = 1) for an empty row.
        some = (share > 0).astype(w.dtype)
        ones = jnp.where(mask > 0, w, some)
        of = weight_metrics(ones, ones, log_w, some, share, "sequence", bounds)
        for key in ("max", "min", *(("ratio_fraction_high", "ratio_fraction_low") if rows else ())):
            found[key] = of[key]
    return found


def _std(ours, values, mask, bounds):
    """Ours, or where it is nearly 0 what the peer's sqrt(E[x^2] - E[x]^2) with N + 1e-8 gives."""
    n = jnp.sum(mask > 0)
    # In float64 always: this difference of squares is noise in float32.
    clamped = jnp.where(mask > 0, jnp.clip(values, *bounds), 0.0).astype(jnp.float64)
    mean, square = (jnp.sum(clamped**k) / (n + 1e-8) for k in (1, 2))
    peer = jnp.sqrt(jnp.maximum(square - mean**2, 0.0))
    return jnp.where(ours > 0.1 * jnp.abs(mean), ours, peer)


def _present(found: dict, case, prefix: str) -> dict:
    """The metrics of the case, from found, by the peer's names; "metric/" in front."""
    out = {}
    for name in case.metrics:
        if name.startswith(prefix) and name.removeprefix(prefix) in found:
            out[f"metric/{name}"] = found[name.removeprefix(prefix)]
    return out


def _product(metrics: dict, kind: str) -> dict:
    """The product's numbers named mismatch/KIND..., without the prefix mismatch/."""
    start = f"mismatch/{kind}"
    return {k.removeprefix("mismatch/"): v for k, v in metrics.items() if k.startswith(start)}


# -- verl PR 3694 ---------------------------------------------------------------------------------


def rollout_is_pr3694(case, dtype) -> dict:
    p = case.params
    batch = _batch(case, dtype)
    upper, level = p["rollout_is_threshold"], p["rollout_is_level"]
    lower = p.get("rollout_is_threshold_lower")
    corrected, metrics = rollout_correction(
        batch,
        level=level,
        mode=p["rollout_is_mode"],
        upper=upper,
        lower=lower,
        veto=p.get("rollout_is_veto_threshold"),
    )
    found = _product(metrics, "rollout_is_")
    bounds = (1 / upper if lower is None else lower, upper)
    numbers = _spread(batch, *_weights_at(batch, level), level, bounds)
    found["rollout_is_std"] = numbers["std"]
    if _has_empty_rows(case):
        found |= {f"rollout_is_{k}": v for k, v in numbers.items()}
        live = jnp.mean((jnp.sum(batch.mask, axis=1) > 0).astype(dtype))
        for name in ("veto_fraction", "seq_masked_fraction"):
            if f"rollout_is_{name}" in found:
                found[f"rollout_is_{name}"] = found[f"rollout_is_{name}"] * live
    found |= {f"mismatch_{k}": v for k, v in _mismatch(batch, case, metrics).items()}
    return {
        "output/rollout_is_weights": _cut(corrected.weights, case),
        **_present(found, case, "mismatch/"),
    }


# -- verl 0.7.0 -----------------------------------------------------------------------------------


def rollout_corr_v070(case, dtype) -> dict:
    p = case.params
    batch = _batch(case, dtype)
    level, upper, veto = (
        p.get("rollout_is"),
        p["rollout_is_threshold"],
        p.get("rollout_token_veto_threshold"),
    )
    rs_level, rs_upper = p.get("rollout_rs"), p.get("rollout_rs_threshold")
    rs_lower = p.get("rollout_rs_threshold_lower")
    reject = ()
    if rs_level:
        reject += ((f"{rs_level}_ratio", rs_lower, rs_upper),)
    if veto is not None and not level:
        reject += (("seq_max_k1", None, -math.log(veto)),)  # a veto without weights
    normalise = bool(p.get("rollout_is_batch_normalize"))
    corrected, metrics = rollout_correction(
        batch,
        level=level or "token",
        mode="truncate" if level else "off",
        upper=upper,
        veto=veto,
        reject=reject,
        affects_denominator=True,
        batch_normalise=normalise,
    )
    found = _product(metrics, "rollout_is_") if level else {}
    if level:
        numbers = _spread(batch, *_weights_at(batch, level), level, (1 / upper, upper))
        found |= {f"rollout_is_{k}": v for k, v in numbers.items()} if _has_empty_rows(case) else {}
        found["rollout_is_std"] = numbers["std"]
    for name in ("veto_fraction", "catastrophic_token_fraction"):
        found[f"rollout_is_{name}"] = metrics[f"mismatch/rollout_is_{name}"]
    if rs_level:
        # The peer reports a rejection by the names of the weights' metrics, whatever its level.
        bounds = (1 / rs_upper if rs_lower is None else rs_lower, rs_upper)
        w_and_log = _weights_at(batch, rs_level)
        numbers = _spread(batch, *w_and_log, rs_level, bounds, rows=rs_level != "token")
        for key in ("masked_fraction", "seq_masked_fraction"):
            numbers[key] = metrics[f"mismatch/rollout_rs_{rs_level}_ratio_{key}"]
        found |= {f"rollout_rs_{k}": v for k, v in numbers.items()}
    if _has_empty_rows(case):
        live = jnp.mean((jnp.sum(batch.mask, axis=1) > 0).astype(dtype))
        found["rollout_is_veto_fraction"] = found["rollout_is_veto_fraction"] * live
        if rs_level:
            found["rollout_rs_seq_masked_fraction"] = found["rollout_rs_seq_masked_fraction"] * live
    out = {"output/modified_response_mask": _cut(corrected.mask, case)}
    if level:
        weights = corrected.weights
        if normalise:
            bounded = jnp.minimum(_weights_at(batch, level)[0], upper)
            weights = weights * metrics["mismatch/rollout_is_batch_norm_factor"]
            weights = weights / _norm_factor(batch, bounded, level)
        out["output/rollout_is_weights"] = _cut(weights, case)
    return out | _present(found | _mismatch(batch, case, metrics), case, "rollout_corr/")


# -- verl main ------------------------------------------------------------------------------------


def _rules(names: str | None, thresholds: str | None) -> tuple:
    """ "token_k1,seq_mean_k3" and "0.5_2.0,0.3" -> rules. k1 bounds are ratios there, nats here."""
    names = list(dict.fromkeys(n.strip() for n in (names or "").split(",") if n.strip()))
    bounds = [t.strip() for t in str(thresholds or "").split(",") if t.strip()]
    bounds = bounds * len(names) if len(bounds) == 1 else bounds
    rules = []
    for name, bound in zip(names, bounds, strict=bool(names)):
        if name.endswith("k1"):
            low, _, high = bound.partition("_")
            low, high = (low, high) if high else (1 / float(low), low)
            # The peer compares k1 = sampler - old with the logs of the bounds.
            rules.append((name, math.log(float(low)), math.log(float(high))))
        else:
            rules.append(("token_binary_kl" if name == "binary_kl" else name, None, float(bound)))
    return tuple(rules)


def _correct(batch, params: dict, case):
    """The product's call for verl's options, and the metrics by verl's names without a prefix."""
    level, threshold = params.get("rollout_is"), str(params.get("rollout_is_threshold") or "2.0")
    low, _, high = threshold.partition("_")
    upper, lower = (float(high), float(low)) if high else (float(low), None)
    mode = ("truncate" if lower is None else "mask") if level else "off"
    rules = _rules(params.get("rollout_rs"), params.get("rollout_rs_threshold"))
    normalise = bool(params.get("rollout_is_batch_normalize"))
    options = dict(level=level or "token", mode=mode, upper=upper, lower=lower, veto=None)
    corrected, metrics = rollout_correction(
        batch, reject=rules, affects_denominator=True, batch_normalise=normalise, **options
    )
    found = _product(metrics, "rollout_rs_") | _mismatch(batch, case, metrics)
    for name, *bounds in rules:
        key = f"rollout_rs_{name}_std"
        found[key] = _std(
            found[key], statistic(name, batch, sequence_share(batch)), batch.mask, bounds
        )
    if rules:
        # Over all rows in the peer, the empty ones too; each statistic's own over the live rows.
        live = jnp.mean((jnp.sum(batch.mask, axis=1) > 0).astype(batch.mask.dtype))
        found["rollout_rs_seq_masked_fraction"] = found["rollout_rs_seq_masked_fraction"] * live
    if level:
        applied = corrected.weights
        if normalise:
            applied = applied * metrics["mismatch/rollout_is_batch_norm_factor"]
        found |= {
            f"rollout_is_{k}": v for k, v in _applied(batch, applied, level, upper, lower).items()
        }
        if normalise:
            factor = metrics["mismatch/rollout_is_batch_norm_factor"]
            found["rollout_is_batch_norm_factor"] = factor
            peer = _norm_factor(batch, applied, level)
            corrected = corrected.replace(weights=corrected.weights * (factor / peer))
        if lower is not None:
            found["rollout_is_oob_ratio"] = metrics["mismatch/rollout_is_masked_fraction"]
    return corrected, {k.replace("token_binary_kl", "binary_kl"): v for k, v in found.items()}


def _norm_factor(batch, applied, level):
    """The mean weight as the peer has it: n + 1e-8 in every mean over tokens."""
    n = jnp.sum(batch.mask, axis=None if level == "token" else 1)
    total = jnp.sum(applied, axis=None if level == "token" else 1)
    return jnp.sum(total / (n + 1e-8)) / jnp.maximum(jnp.sum(n > 0), 1)


def _applied(batch, applied, level, upper, lower) -> dict:
    """verl main: mean, spread and sequences of the bounded weights, fractions before bounding.

    Ours are all before bounding, but for max_applied and min_applied.
    """
    w, log_w = _weights_at(batch, level)
    found = _spread(batch, w, log_w, level, (1 / upper if lower is None else lower, upper))
    bounded = _spread(batch, applied, log_w, level, (0.0, upper))
    # The peer adds 1e-8 to the mean that it divides by, which counts where weights are about e^-20:
    # its effective sample size then exceeds the number of samples. Ours does not depend on scale.
    mean = masked_mean(applied, batch.mask)
    bounded["eff_sample_size"] *= ((mean + 1e-8) / mean) ** 2
    found |= {key: bounded[key] for key in (*SPREAD_OF_TOKENS, *OF_SEQUENCES)}
    if level == "token":
        found["max"], found["min"] = (
            masked_max(applied, batch.mask),
            masked_min(applied, batch.mask),
        )
    return found


def rollout_correction_main(case, dtype) -> dict:
    corrected, found = _correct(_batch(case, dtype), case.params, case)
    out = {"output/modified_response_mask": _cut(corrected.mask, case)}
    if corrected.weights is not None:
        out["output/rollout_is_weights"] = _cut(corrected.weights, case)
    return out | _present(found, case, "rollout_corr/")


def offpolicy_metrics(case, dtype) -> dict:
    # Without sampler log-probs the peer gives the trainer's perplexity alone: the sampler's are
    # replaced by the trainer's, and the rest is not in the file.
    return _present(_mismatch(_batch(case, dtype), case), case, "")


def rollout_debug_metrics(case, dtype) -> dict:
    found = mismatch_metrics(_batch(case, dtype, "old_log_probs", "rollout_log_probs"))
    return {
        "metric/training/rollout_probs_diff_valid": 1.0,
        "metric/training/rollout_actor_probs_pearson_corr": found[
            "mismatch/probability_correlation"
        ],
        **{
            f"metric/training/rollout_probs_diff_{k}": found[f"mismatch/probability_diff_{k}"]
            for k in ("mean", "max", "std")
        },
    }


def variance_proxies(case, dtype) -> dict:
    x = case.inputs
    batch = response_batch(
        x["response_mask"],
        dtype,
        old_logprobs=x["old_log_probs"],
        advantages=x["advantages"],
        sum_pi_squared=x["sum_pi_squared"],
        weights=x.get("rollout_is_weights"),
    )
    found = variance_proxy_metrics(batch, gradient_norm=case.params.get("gradient_norm"))
    return {f"metric/{k}": v for k, v in found.items()}


# -- verl's bypass: old = sampler, and weights and rejection from the policy of this very step -----


def policy_loss_bypass_mode(case, dtype) -> dict:
    p = case.params
    current = jnp.asarray(case.inputs["log_prob"], dtype)
    batch = response_batch(
        case.inputs["response_mask"],
        dtype,
        old_logprobs=case.inputs["old_log_prob"],
        sampler_logprobs=case.inputs["old_log_prob"],
        advantages=case.inputs["advantages"],
    )
    corrected, found = _correct(batch.replace(old_logprobs=current), p, case)
    batch = batch.replace(mask=corrected.mask)
    if p["loss_type"] == "reinforce":
        loss_of = policy_gradient
        batch = batch.replace(weights=corrected.weights)
    else:  # the ratio is the correction: no weights (bypass_old_logprobs)
        clip = dict(clip_low=p["clip_ratio_low"], clip_high=p["clip_ratio_high"])

        def loss_of(policy, b):
            return ppo_clip(policy, b, dual_clip=p["clip_ratio_c"], **clip)

    loss, gradient, metrics = reduced(
        lambda x, b: loss_of(PolicyOutputs(x, jnp.zeros_like(x)), b),
        current,
        batch,
        token_weights(p, batch),
    )
    out = {"output/pg_loss": loss, "grad/log_prob": gradient}
    # policy_gradient has no ratio: the peer logs the mean of old - new beside it all the same.
    kl = masked_mean(batch.old_logprobs - current, batch.mask)
    out["metric/actor/ppo_kl"] = metrics.get("ppo_kl", kl)
    for name in ("pg_clipfrac", "pg_clipfrac_lower"):
        if name in metrics:
            out[f"metric/actor/{name}"] = metrics[name]
    return out | _present(found, case, "rollout_corr/")


# -- TRL ------------------------------------------------------------------------------------------


def grpo_vllm_is_correction(case, dtype) -> dict:
    x, p = case.inputs, case.params
    mask = x["completion_mask"] * x.get("tool_mask", 1)
    # A sampler log-prob of NaN (not recorded) means ratio 1 there; ours has no such value.
    sampler = np.where(
        np.isnan(x["sampling_per_token_logps"]),
        x["old_per_token_logps"],
        x["sampling_per_token_logps"],
    )
    batch = response_batch(
        mask, dtype, old_logprobs=x["old_per_token_logps"], sampler_logprobs=sampler
    )
    level, mode = p["mode"].split("_")
    low, high = p.get("clip_min"), p.get("clip_max")
    mode = "clip" if mode == "truncate" and low is not None else mode
    corrected, metrics = rollout_correction(
        batch,
        level=level,
        mode=mode,
        upper=high or 1e30,
        lower=0.0 if low is None else low,
        veto=None,
    )
    weights, live = corrected.weights, np.asarray(mask) > 0
    # Its mean of |difference| leaves those tokens out.
    known = np.asarray(mask) * ~np.isnan(x["sampling_per_token_logps"])
    share = float(np.sum(mask)) / max(float(np.sum(known)), 1.0)
    if level == "sequence":  # one per row; rows without tokens have ratio 1
        ratio = jnp.max(weights, axis=1, keepdims=True)
        ratio = jnp.where(jnp.any(live, axis=1, keepdims=True), ratio, 1.0)
        over = ratio
    else:  # TRL leaves 1 at masked tokens
        ratio = jnp.where(live, weights, 1.0)
        over = ratio[live]
    logged = "sampling.importance_sampling_ratio"
    return {
        "output/importance_sampling_ratio": ratio,
        "metric/sampling.sampling_logp_difference.mean": metrics["mismatch/abs_logprob_diff_mean"]
        * share,
        "metric/sampling.sampling_logp_difference.max": metrics["mismatch/abs_logprob_diff_max"],
        f"metric/{logged}.min": jnp.min(over),
        f"metric/{logged}.mean": jnp.mean(over),
        f"metric/{logged}.max": jnp.max(over),
    }


CHECKS = {
    "verl/rollout_is_pr3694": rollout_is_pr3694,
    "verl/rollout_corr_v070": rollout_corr_v070,
    "verl/rollout_correction": rollout_correction_main,
    "verl/offpolicy_metrics": offpolicy_metrics,
    "verl/rollout_debug_metrics": rollout_debug_metrics,
    "verl/variance_proxy_metrics": variance_proxies,
    "verl/policy_loss_bypass_mode": policy_loss_bypass_mode,
    "trl/grpo_vllm_is_correction": grpo_vllm_is_correction,
}
