"""Preference losses against TRL and verl's recipes.

TRL stacks chosen then rejected rows; ours stand side by side. Where a file holds sums of log-probs
alone, a row has one token that carries the sum. The mean over examples is update's; every row of
these files has tokens, where nothing else is said.
"""

import jax
import jax.numpy as jnp
import numpy as np

from rljax.kernels.logprob import token_logprobs
from rljax.losses import preference
from rljax.losses.policy import PolicyOutputs
from rljax.losses.preference import unpaired

from . import preference_rows
from .common import response_batch
from .preference_rows import interleaved, mean_loss, stacked, trl_metrics, unstacked


def padded(x, width):
    """Columns of zeros up to a width."""
    return np.pad(x, ((0, 0), (0, width - x.shape[1])))


def dpo_options(p, names):
    out = {"losses": tuple(names), "beta": p["beta"]}
    smoothing = p.get("label_smoothing", 0.0)
    if "exo_pair" in names:
        smoothing = smoothing or 1e-3
    out["label_smoothing"] = smoothing
    if "discopop_tau" in p:
        out["discopop_tau"] = p["discopop_tau"]
    return out


def dpo_arguments(p) -> dict:
    """TRL 1.x's arguments as those of our dpo; its plain sigmoid ignores label smoothing."""
    names = p["loss_type"]
    names = names.split("+") if isinstance(names, str) else list(names)
    options = dpo_options(p, names)
    if set(names) & {"sigmoid", "sigmoid_norm"}:
        options["label_smoothing"] = 0.0
    weights = p.get("loss_weights")
    if weights is not None:
        options["loss_weights"] = tuple(float(w) for w in np.atleast_1d(weights))
    options["divergence"] = p.get("f_divergence_type", "reverse_kl")
    options["divergence_alpha"] = p.get("f_alpha_divergence_coef", 0.5)
    options["ld_alpha"] = p.get("ld_alpha", 1.0)
    options["wpo_weighting"] = bool(p.get("use_weighting", False))
    return options


def run_dpo(x, batch, dtype, options):
    return mean_loss(preference.dpo, x, batch, dtype, **options)


def dpo(case, dtype):
    """TRL 1.x."""
    x, options = case.inputs, dpo_arguments(case.params)
    fields = {"ref_logprobs": stacked(x["ref_per_token_logps"])}
    if "log_sum_sq_probs" in x:
        fields["sum_pi_squared"] = np.exp(np.float64(stacked(x["log_sum_sq_probs"])))
    batch = response_batch(stacked(x["completion_mask"]), dtype, **fields)
    logps = stacked(x["per_token_logps"])
    loss, losses, gradient, metrics = run_dpo(logps, batch, dtype, options)
    rows = np.stack(np.split(np.asarray(x["completion_mask"]), 2)) > 0
    first = np.argmax(rows, axis=2)  # d loss / d a sum stands at each of its tokens
    by_side = [jnp.take_along_axis(gradient[i::2], first[i][:, None], 1)[:, 0] for i in (0, 1)]
    out = {
        "output/loss": loss,
        "output/losses": losses,
        "output/chosen_rewards": metrics["rewards/chosen"],
        "output/rejected_rewards": metrics["rewards/rejected"],
        # TRL's is that of a sum over masked columns too, which hold zeros.
        "grad/per_token_logps": (unstacked(gradient), np.asarray(x["completion_mask"]) > 0),
        "grad/chosen_logps": by_side[0],
        "grad/rejected_logps": by_side[1],
    }
    held = {f"output/{k}" for k in case.outputs} | {f"grad/{k}" for k in case.grads}
    return {k: v for k, v in out.items() if k in held} | trl_metrics(metrics, case)


def sums_batch(case, dtype, names, ref=None):
    """Rows of one token that carries a sum: (batch, log-probs [2 N, 1])."""
    x = case.inputs
    logps = interleaved(*(x[n] for n in names))[:, None]
    fields = {} if ref is None else {"ref_logprobs": interleaved(*(x[n] for n in ref))[:, None]}
    return response_batch(np.ones(logps.shape), dtype, **fields), logps


def pair_gradients(gradient, names):
    return {f"grad/{name}": gradient[i :: len(names), 0] for i, name in enumerate(names)}


def dpo_v024(case, dtype):
    """TRL 0.24: cDPO, IPO on sums, BCO's delta, alpha of the f-divergence counted as 1 - ours."""
    p = case.params
    rename = {"ipo": "ipo_sum", "aot_pair": "aot_unpaired"}
    names = [rename.get(n, n) for n in p["loss_type"].split("+")]
    options = dpo_options(p, names)
    options["divergence"] = p.get("f_divergence_type", "reverse_kl")
    options["divergence_alpha"] = 1.0 - p.get("f_alpha_divergence_coef", 1.0)
    names = ("chosen_logps", "rejected_logps")
    ref = ("ref_chosen_logps", "ref_rejected_logps")
    batch, logps = sums_batch(case, dtype, names, ref)
    out, rewards = {}, p["beta"] * (jnp.asarray(logps, dtype) - batch.ref_logprobs)[:, 0]
    if p["reference_free"]:
        batch = batch.replace(ref_logprobs=jnp.zeros_like(batch.ref_logprobs))
    if "running_mean" in case.outputs:
        mean, _ = unpaired.running_mean(0.0, 0.0, jnp.mean(rewards), 1.0)
        options["delta"] = out["output/running_mean"] = mean
    loss, losses, gradient, _ = run_dpo(logps, batch, dtype, options)
    # Its rewards are those against the reference, reference-free losses' too.
    out |= {"output/loss": loss, "output/losses": losses}
    out |= {"output/chosen_rewards": rewards[::2], "output/rejected_rewards": rewards[1::2]}
    return out | pair_gradients(gradient, names)


def online_dpo(case, dtype):
    """verl's recipe: cDPO, and IPO on sums."""
    p = case.params
    sides = ("chosen_logps", "rejected_logps")
    names = tuple(f"policy_{s}" for s in sides)
    batch, logps = sums_batch(case, dtype, names, tuple(f"reference_{s}" for s in sides))
    if p["reference_free"]:
        batch = batch.replace(ref_logprobs=jnp.zeros_like(batch.ref_logprobs))
    kind = {"ipo": "ipo_sum"}.get(p["loss_type"], p["loss_type"])
    options = {"losses": (kind,), "beta": p["beta"], "label_smoothing": p["label_smoothing"]}
    loss, _, gradient, _ = mean_loss(preference.dpo, logps, batch, dtype, **options)
    return {"output/loss": loss} | pair_gradients(gradient, names)


def cpo(case, dtype):
    p, names = case.params, ("chosen_logps", "rejected_logps")
    batch, logps = sums_batch(case, dtype, names)
    options = {k: p[k] for k in ("beta", "label_smoothing", "alpha")}
    if p["loss_type"] == "simpo":
        function, options = preference.simpo, options | {"gamma": p["simpo_gamma"]}
    else:
        function, options = preference.cpo, options | {"loss": p["loss_type"], "nll_coef": 0.0}
    loss, losses, gradient, metrics = mean_loss(function, logps, batch, dtype, **options)
    out = {"output/loss": loss, "output/losses": losses}
    out["output/chosen_rewards"] = metrics["rewards/chosen"]
    out["output/rejected_rewards"] = metrics["rewards/rejected"]
    return out | pair_gradients(gradient, names)


def from_logits(function, logits, ids, batch, k, dtype, **options):
    """mean_loss of the log-probs that logits [B, S, V] give to ids, and d loss / d logits."""
    head = jnp.eye(logits.shape[-1], dtype=dtype)  # logits as hidden states

    def total(logits):
        logp = token_logprobs(logits[:, :-1], head, ids[:, 1:])[0]
        logp = jnp.pad(logp, ((0, 0), (1, 0)))  # x[b, t] describes tokens[b, t]
        losses, metrics = function(PolicyOutputs(logp, jnp.zeros_like(logp)), batch, **options)
        return jnp.mean(losses), metrics

    (loss, metrics), gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(logits, dtype))
    return loss, unstacked(gradient, k), metrics


def logits_batch(case, dtype):
    """TRL's CPO and ORPO inputs: (logits, ids, batch), with prompts, chosen and rejected rows side
    by side."""
    x = case.inputs
    width = x["logits"].shape[1]
    sides = ("chosen", "rejected")
    ids = interleaved(*(padded(x[f"{s}_input_ids"], width) for s in sides))
    valid = interleaved(*(padded(x[f"{s}_attention_mask"], width) for s in sides))
    labelled = interleaved(*(padded(x[f"{s}_labels"] != -100, width) for s in sides))
    labelled = labelled & (valid > 0)
    labelled[:, 0] = False  # nothing predicts a first token
    batch = response_batch(labelled, dtype).replace(segment_ids=jnp.asarray(valid, jnp.int32))
    return stacked(x["logits"]), jnp.asarray(ids, jnp.int32), batch


def reference_free(function, case, dtype, **options):
    logits, ids, batch = logits_batch(case, dtype)
    loss, gradient, metrics = from_logits(function, logits, ids, batch, 2, dtype, **options)
    out = {"output/loss": loss, "output/nll_loss": jnp.mean(metrics["nll"])}
    out |= {f"output/{s}_logps": metrics[f"logps/{s}"] for s in ("chosen", "rejected")}
    found = metrics | {"nll_loss": metrics["nll"]}
    found["log_odds_chosen"] = metrics.get("log_odds")
    out |= trl_metrics({k: v for k, v in found.items() if v is not None}, case)
    omitted = dict.fromkeys(
        (f"metric/logits.{s}" for s in ("chosen", "rejected")),
        "means of logits: no array of words is built in training",
    )
    return out | {"grad/logits": gradient, "omitted": omitted}


def cpo_full(case, dtype):
    p = case.params
    options = {"beta": p["beta"], "loss": p["loss_type"], "gamma": p["simpo_gamma"]}
    options["nll_coef"] = p["cpo_alpha"]
    out = reference_free(preference.cpo, case, dtype, **options)
    if not p["cpo_alpha"]:  # TRL reports 0 where the term is off
        out["output/nll_loss"] = out["metric/nll_loss"] = jnp.zeros(())
    return out


def orpo(case, dtype):
    return reference_free(preference.orpo, case, dtype, beta=case.params["beta"])


def orpo_odds_ratio(case, dtype):
    """The odds-ratio term alone: ORPO whose supervised term runs over nothing but is subtracted."""
    names = ("chosen_logps", "rejected_logps")
    batch, logps = sums_batch(case, dtype, names)

    def term(policy, batch, **options):
        loss, metrics = preference.orpo(policy, batch, **options)
        return loss - metrics["nll"], metrics

    loss, losses, gradient, metrics = mean_loss(
        term, logps, batch, dtype, beta=case.params["beta"], prompt_nll=False
    )
    out = {
        "output/loss": loss,
        "output/losses": -losses,  # TRL's are beta log sigmoid, which it subtracts
        "output/chosen_rewards": metrics["rewards/chosen"],
        "output/rejected_rewards": metrics["rewards/rejected"],
        "output/mean_log_sigmoid_ratio": jnp.mean(metrics["log_odds_ratio"]),
        "output/mean_log_odds": jnp.mean(metrics["log_odds"]),
    }
    return out | pair_gradients(gradient, names)


def tpo(case, dtype):
    """TRL stacks chosen, rejected, gold; without the supervised term it has no gold rows: ours get
    rows of mask 0."""
    x, p = case.inputs, case.params
    parts = {name: np.asarray(x[name]) for name in ("logits", "input_ids", "completion_mask")}
    count = 3 if p["tpo_alpha"] else 2
    sides = {name: np.split(value, count) for name, value in parts.items()}
    rows = {
        name: interleaved(s[2] if count == 3 else np.zeros_like(s[0]), *s[:2])
        for name, s in sides.items()
    }
    batch = response_batch(rows["completion_mask"], dtype)
    ids = jnp.asarray(rows["input_ids"], jnp.int32)
    loss, gradient, metrics = from_logits(
        preference.tpo,
        rows["logits"],
        ids,
        batch,
        3,
        dtype,
        beta=p["beta"],
        loss={"tpo-l": "simpo"}.get(p["loss_type"], p["loss_type"]),
        nll_coef=p["tpo_alpha"],
        label_smoothing=p["label_smoothing"],
        gamma=p["tpo_l_gamma"],
    )
    gold, pair = jnp.split(gradient, [gradient.shape[0] // 3])
    gradient = jnp.concatenate([pair, gold]) if count == 3 else pair
    omitted = {
        f"metric/{k}": "of logits and of argmax: not of a preference loss"
        for k in ("entropy", "logits.chosen", "logits.rejected", "mean_token_accuracy")
    }
    out = {"output/loss": loss, "grad/logits": gradient, "omitted": omitted}
    return out | trl_metrics(metrics, case)


CHECKS = {
    "trl/dpo": dpo,
    "trl/dpo_seq_v024": dpo_v024,
    "trl/cpo": cpo,
    "trl/cpo_full": cpo_full,
    "trl/orpo": orpo,
    "trl/orpo_odds_ratio": orpo_odds_ratio,
    "trl/tpo": tpo,
    **preference_rows.CHECKS,
    "verl/recipe_online_dpo": online_dpo,
}
