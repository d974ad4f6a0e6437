"""Policy losses, KL and value losses against verl; against TRL in policy_trl.py."""

import jax
import jax.numpy as jnp
import numpy as np

from rljax import learn as update
from rljax.batch import masked_mean
from rljax.losses import kl, policy, value
from rljax.losses.policy import PolicyOutputs, common, selection, sequences

from . import policy_trl
from .common import reduced, response_batch, token_weights

# -- verl --


def verl_batch(case, dtype):
    """advantages, old_log_prob, rollout_log_prob, rollout_is_weights, ref_log_prob -> Batch."""
    x = case.inputs
    return response_batch(
        x["response_mask"],
        dtype,
        advantages=x.get("advantages"),
        old_logprobs=x.get("old_log_prob"),
        ref_logprobs=x.get("ref_log_prob"),
        sampler_logprobs=x.get("rollout_log_prob"),
        weights=x.get("rollout_is_weights"),
    )


def clips(p, dual=True):
    options = {"clip_low": p["clip_ratio_low"], "clip_high": p["clip_ratio_high"]}
    return options | ({"dual_clip": p.get("clip_ratio_c")} if dual else {})


def zero(policy_, batch, **_):
    return jnp.zeros_like(batch.mask)


def with_metrics(loss, **extra):
    """A loss whose metrics are taken, or computed by a function, under verl's names."""

    def run(policy_, batch, **options):
        out, metrics = loss(policy_, batch, **options)
        named = {
            k: f(policy_, batch, **options) if callable(f) else metrics[f] for k, f in extra.items()
        }
        return out, {f"actor/{k}": v for k, v in named.items()}

    return run


def without_kl_clamp(policy_, batch, **_):
    """verl reports |log ratio| for KL-Cov."""
    return jnp.abs(common.log_difference(policy_, batch, by="check"))


def sampler_kl(policy_, batch, **_):
    return -common.log_ratio(policy_, batch, by="check", behaviour="sampler")


def verl_clip_cov(policy_, batch, **options):
    """verl's permutation was replaced by the identity: the first k eligible in row-major order.

    It does not clamp the log-ratio before exp; ours does, at +-20.
    """
    order = jnp.arange(batch.mask.size, dtype=jnp.uint32).reshape(batch.mask.shape)
    difference = common.log_difference(policy_, batch, by="check")
    loss, metrics, eligible = selection._clip_cov(policy_, batch, difference, order, **options)
    return loss, metrics | {"eligible": eligible}


def verl_gmpo(policy_, batch, **options):
    """verl adds 1e-8 to the tokens of a row, and keeps tokens of weight 0, as 1e-10, in the mean.

    Ours drops them: one zero among T tokens would otherwise give (1e-10)^(1/T), almost 1 (D8).
    """
    tokens = jnp.sum(batch.mask, axis=1, keepdims=True) + 1e-8
    weights = jnp.ones_like(batch.mask) if batch.weights is None else batch.weights
    mean = jnp.sum(jnp.log(weights + 1e-10) * batch.mask, axis=1, keepdims=True) / tokens
    return sequences._gmpo(
        policy_, batch, included=batch.mask > 0, tokens=tokens, weight=jnp.exp(mean), **options
    )


def outside(sign):
    """verl counts every log-ratio outside the range by the sign of A; ours, those that are cut."""

    def share(policy_, batch, *, clip_low, clip_high):
        difference = common.log_difference(policy_, batch, by="check")
        beyond = (difference < -clip_low) | (difference > clip_high)
        return common.indicator((sign * batch.advantages > 0) & beyond, batch)

    return share


def verl_kl_cov(policy_, batch, **options):
    """verl does not clamp the log-ratio before exp; ours does, at +-20."""
    difference = common.log_difference(policy_, batch, by="check")
    return selection._kl_cov(policy_, batch, difference, **options)


CLIPPED = {"pg_clipfrac": "pg_clipfrac", "ppo_kl": "ppo_kl"}
NO_LOWER = CLIPPED | {"pg_clipfrac_lower": zero}
DPPO = CLIPPED | {"pg_clipfrac_lower": "pg_truncfrac"}
# name: (loss, options of the parameters, the aggregation that verl hard-codes)
VERL = {
    "vanilla": (
        with_metrics(policy.ppo_clip, **CLIPPED, pg_clipfrac_lower="pg_clipfrac_lower"),
        clips,
        None,
    ),
    "cispo": (with_metrics(policy.cispo, **NO_LOWER), lambda p: clips(p, dual=False), None),
    "gspo": (
        with_metrics(policy.gspo_token, **NO_LOWER),
        lambda p: clips(p, dual=False),
        "seq-mean-token-mean",
    ),
    "gpg": (with_metrics(policy.gpg), lambda p: {}, None),
    "reinforce": (with_metrics(policy.policy_gradient, ppo_kl=sampler_kl), lambda p: {}, None),
    "sapo": (
        with_metrics(policy.sapo, pg_clipfrac=zero, pg_clipfrac_lower=zero, ppo_kl="ppo_kl"),
        lambda p: {"tau_positive": p["tau_pos"], "tau_negative": p["tau_neg"]},
        "seq-mean-token-mean",
    ),
    "dppo_tv": (
        with_metrics(policy.dppo_tv, **DPPO),
        lambda p: clips(p, dual=False) | {"ratio_max": p["clip_ratio_c"]},
        None,
    ),
    "dppo_kl": (
        with_metrics(policy.dppo_kl, **DPPO),
        lambda p: clips(p, dual=False) | {"ratio_max": p["clip_ratio_c"]},
        None,
    ),
    "dro": (with_metrics(policy.dro, ppo_kl="ppo_kl"), lambda p: {"beta": p["dro_beta"]}, None),
    "clip_cov": (
        with_metrics(verl_clip_cov, pg_clipfrac="cov_clipfrac", ppo_kl="ppo_kl"),
        lambda p: (
            clips(p, dual=False)
            | {
                "cov_low": p["clip_cov_lb"],
                "cov_high": p["clip_cov_ub"],
                "fraction": p["clip_cov_ratio"],
            }
        ),
        None,
    ),
    "kl_cov": (
        with_metrics(verl_kl_cov, ppo_kl=without_kl_clamp),
        lambda p: {"fraction": p["kl_cov_ratio"], "kl_coef": p["ppo_kl_coef"]},
        None,
    ),
    "geo_mean": (
        with_metrics(
            verl_gmpo, pg_clipfrac=outside(1), pg_clipfrac_lower=outside(-1), ppo_kl="ppo_kl"
        ),
        lambda p: clips(p, dual=False),
        "all-rows",
    ),
}


def verl_weights(p, batch, mode):
    """token_weights, and verl's geo_mean: the plain mean over all rows, empty ones too."""
    if mode == "all-rows":
        n = jnp.maximum(jnp.sum(batch.mask, axis=1, keepdims=True), 1)
        return batch.mask / n / batch.rows
    return token_weights(p, batch, mode)


def verl_policy_loss(name):
    loss, options_of, mode = VERL[name]

    def check(case, dtype):
        batch = verl_batch(case, dtype)
        weights = verl_weights(case.params, batch, mode)
        logp = jnp.asarray(case.inputs["log_prob"], dtype)
        options = options_of(case.params)
        total, gradient, metrics = reduced(
            lambda x, b: loss(PolicyOutputs(x, x), b, **options),
            logp,
            batch,
            weights,
            corrected=name != "geo_mean",
        )
        out = {"output/pg_loss": total, "grad/log_prob": gradient}
        if "n_candidates" in case.outputs:
            clean = update.select_policy_tokens(batch)
            _, found = verl_clip_cov(PolicyOutputs(logp, logp), clean, **options)
            out["output/n_candidates"] = jnp.sum(found["eligible"])
        return out | {f"metric/{k}": v for k, v in metrics.items()}

    return check


ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def estimator(name: str) -> str:
    kind = name.removesuffix("+")
    return ESTIMATORS.get(kind, kind) + ("+" if name.endswith("+") else "")


def verl_composite(case, dtype):
    """pg - entropy_coeff H + kl_loss_coef KL, micro-batch by micro-batch, by the global counts."""
    p = {k: v for k, v in case.params.items() if k != "micro_splits"}
    loss, options_of, mode = VERL[p["loss_mode"]]
    whole = verl_batch(case, dtype)
    inputs = [jnp.asarray(case.inputs[k], dtype) for k in ("log_prob", "entropy")]
    out, totals, gradients, start = {}, [], [], 0
    for i, rows in enumerate(np.atleast_1d(case.params["micro_splits"])):
        part = slice(start, start := start + int(rows))
        batch = jax.tree.map(lambda x, part=part: x[part], whole)
        configured = token_weights(p, batch)
        terms = {}

        def run(logp, entropy, batch=batch, configured=configured, terms=terms):
            def total(x, weights, metrics):
                return update.weighted_loss(x, metrics, update.select_policy_tokens(batch), weights)

            value_, metrics = loss(PolicyOutputs(logp, entropy), batch, **options_of(p))
            weights = token_weights(p, batch, mode) if mode else configured
            pg, sums = total(value_, weights, metrics)
            h, _ = total(entropy, configured, {})
            terms |= {k: a / jnp.maximum(b, 1) for k, (a, b) in sums.items()}
            terms |= {"actor/pg_loss": pg, "actor/entropy_loss": h}
            result = pg - p["entropy_coeff"] * h
            if p["use_kl_loss"]:
                d = kl.kl_estimate(logp, batch.ref_logprobs, estimator(p["kl_loss_type"]))
                divergence, _ = total(d, configured, {})
                terms |= {"kl_loss": divergence, "kl_coef": p["kl_loss_coef"]}
                result = result + p["kl_loss_coef"] * divergence
            return result, dict(terms)

        (result, found), pulled = jax.value_and_grad(run, argnums=(0, 1), has_aux=True)(
            inputs[0][part], inputs[1][part]
        )
        totals.append(result)
        gradients.append(pulled)
        names = {k for k in found if f"micro{i}/{k}" in case.metrics}
        out |= {f"metric/micro{i}/{k}": found[k] for k in names}
    out |= {"output/loss_per_micro_batch": jnp.stack(totals), "output/loss_total": sum(totals)}
    for j, name in enumerate(("log_prob", "entropy")):
        if name in case.grads:
            out[f"grad/{name}"] = jnp.concatenate([g[j] for g in gradients])
    return out


def verl_kl(case, dtype):
    logp, ref = (jnp.asarray(case.inputs[k], dtype) for k in ("logprob", "ref_logprob"))
    got, pull = jax.vjp(
        lambda x: kl.kl_estimate(x, ref, estimator(case.params["kl_penalty"])), logp
    )
    out = {"output/kl": got}
    return out | ({"grad/logprob": pull(jnp.ones_like(got))[0]} if "logprob" in case.grads else {})


def verl_value(case, dtype):
    x, p = case.inputs, case.params
    batch = response_batch(x["response_mask"], dtype, returns=x["returns"], values=x["values"])
    loss, gradient, metrics = reduced(
        lambda v, b: value.squared_error(v, b, clip=p["cliprange_value"]),
        jnp.asarray(x["vpreds"], dtype),
        batch,
        token_weights(p, batch),
    )
    tokens = np.sum(x["response_mask"])
    clipped = jnp.round(metrics["vf_clipfrac"].astype(jnp.float64) * tokens)
    return {
        "output/vf_loss": loss,
        # verl's masked mean adds 1e-8 to the count
        "output/vf_clipfrac": clipped / (tokens + 1e-8),
        "grad/vpreds": gradient,
    }


def verl_gvpo(case, dtype):
    """verl sums over rows and divides by n - 1; ours is the mean over rows, times n / (n - 1)."""
    x, p = case.inputs, case.params
    batch = response_batch(
        x["response_mask"],
        dtype,
        advantages=x["advantages"],
        old_logprobs=x["old_log_prob"],
        group=x["uid"],
    )
    weights = update.seq_mean_token_mean(batch) * (batch.rows / p["n"])
    loss, gradient, _ = reduced(
        lambda x, b: policy.gvpo(PolicyOutputs(x, x), b, beta=p["beta"]),
        jnp.asarray(x["log_prob"], dtype),
        batch,
        weights,
    )
    return {"output/loss": loss, "grad/log_prob": gradient}


def verl_flowrl(case, dtype):
    x = case.inputs
    batch = response_batch(
        x["response_mask"],
        dtype,
        advantages=x["reward"],
        old_logprobs=x["old_log_prob"],
        ref_logprobs=x["ref_log_prob"],
    )
    clean, mask = update.select_policy_tokens(batch), batch.mask
    options = {"beta": case.params["beta"], "weight_max": 10.0}
    count = jnp.sum(mask, axis=1) + 1e-8  # verl's masked mean; ours divides by max(n, 1)

    def total(logp, log_z):
        both = sequences.balance(
            PolicyOutputs(logp, logp), clean, log_z[:, 0], **options, count=count
        )
        return jnp.mean(both[0]), both[1]

    logp, log_z = (jnp.asarray(x[k], dtype) for k in ("log_prob", "log_z"))
    (loss, metrics), (g, gz) = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(logp, log_z)

    def mean(v):
        return masked_mean(jnp.asarray(v, dtype), mask)

    found = {
        "log_prob": mean(x["log_prob"]),
        "old_log_prob": mean(x["old_log_prob"]),
        "ref_log_prob": mean(x["ref_log_prob"]),
        "log_z": jnp.mean(log_z),
        "log_reward": mean(x["reward"]),
        "final_loss": loss,
        "importance_weight": jnp.mean(metrics["balance_weight"]),
        "ppo_kl": mean(x["old_log_prob"] - x["log_prob"]),
        "ref_kl": mean(x["ref_log_prob"] - x["log_prob"]),
    }
    out = {"output/loss": loss, "grad/log_prob": g, "grad/log_z": gz}
    return out | {f"metric/actor/{k}": v for k, v in found.items()}


CHECKS = {f"verl/policy_loss_{name}": verl_policy_loss(name) for name in VERL} | {
    "verl/ppo_loss_composite": verl_composite,
    "verl/kl_penalty": verl_kl,
    "verl/value_loss": verl_value,
    "verl/recipe_gvpo_loss": verl_gvpo,
    "verl/recipe_flowrl_loss": verl_flowrl,
    **policy_trl.CHECKS,
}
