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
from rljax.losses.policy import Policy
from rljax.losses.preference import common

from .common import response_batch


def interleaved(*parts):
    """K arrays [N, ...] -> [K N, ...], the rows of an example side by side."""
    return np.stack(parts, axis=1).reshape((-1,) + parts[0].shape[1:])


def stacked(x, k=2):
    """[K N, ...] in K blocks, as TRL stacks them -> rows side by side."""
    return interleaved(*np.split(np.asarray(x), k))


def unstacked(x, k=2):
    """The inverse of stacked."""
    return jnp.concatenate([x[i::k] for i in range(k)])


def padded(x, width):
    """Columns of zeros up to a width."""
    return np.pad(x, ((0, 0), (0, width - x.shape[1])))


def mean_loss(function, x, batch, dtype, **options):
    """(mean, per example, gradient of the mean, metrics) with respect to the log-probs x."""

    def total(x):
        losses, metrics = function(Policy(x, jnp.zeros_like(x)), batch, **options)
        return jnp.mean(losses), (losses, metrics)

    (loss, (losses, metrics)), gradient = jax.value_and_grad(total, has_aux=True)(
        jnp.asarray(x, dtype)
    )
    return loss, losses, gradient, metrics


def trl_metrics(metrics, case):
    """TRL's names of the metrics that a case holds."""
    found = {name.replace("/", "."): jnp.mean(value) for name, value in metrics.items()}
    return {f"metric/{k}": found[k] for k in case.metrics if k in found}


DPO_NAMES = {"aot": "aot", "aot_pair": "aot_unpaired", "aot_unpaired": "aot_unpaired"}


def dpo_options(p, names):
    out = {"losses": tuple(names), "beta": p["beta"]}
    smoothing = p.get("label_smoothing", 0.0)
    if "exo_pair" in names:
        smoothing = smoothing or 1e-3
    out["label_smoothing"] = smoothing
    if "discopop_tau" in p:
        out["discopop_tau"] = p["discopop_tau"]
    return out


def run_dpo(x, batch, dtype, options):
    whole = set(options["losses"]) - set(preference.pairwise.PER_PAIR)
    function = preference.dpo_whole_step if whole else preference.dpo
    return mean_loss(function, x, batch, dtype, **options)


def dpo(case, dtype):
    """TRL 1.x, which ignores label smoothing for the plain sigmoid."""
    x, p = case.inputs, case.params
    names = p["loss_type"].split("+")
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
        mean, _ = preference.running_mean(0.0, 0.0, jnp.mean(rewards), 1.0)
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
        losses, metrics = function(Policy(logp, jnp.zeros_like(logp)), batch, **options)
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
        preference.tpo, rows["logits"], ids, batch, 3, dtype,
        beta=p["beta"], loss={"tpo-l": "simpo"}.get(p["loss_type"], p["loss_type"]),
        nll_coef=p["tpo_alpha"], label_smoothing=p["label_smoothing"], gamma=p["tpo_l_gamma"],
    )  # fmt: skip
    gold, pair = jnp.split(gradient, [gradient.shape[0] // 3])
    gradient = jnp.concatenate([pair, gold]) if count == 3 else pair
    omitted = {
        f"metric/{k}": "of logits and of argmax: not of a preference loss"
        for k in ("entropy", "logits.chosen", "logits.rejected", "mean_token_accuracy")
    }
    out = {"output/loss": loss, "grad/logits": gradient, "omitted": omitted}
    return out | trl_metrics(metrics, case)


def labelled_loss(p):
    options = {k: p[k] for k in ("beta", "desirable_weight", "undesirable_weight")}
    if p["loss_type"] == "kto":
        return preference.kto, options
    return lambda policy, batch, kl, **o: preference.apo_zero_unpaired(policy, batch, **o), options


def kl_of(case, dtype):
    """z0 of the mismatched rows; apo_zero_unpaired has none."""
    x = case.inputs
    if case.params["loss_type"] == "apo_zero_unpaired":
        return jnp.zeros((), dtype)
    rows = x["KL_logps"][:, None]
    batch = response_batch(np.ones(rows.shape), dtype, ref_logprobs=x["ref_KL_logps"][:, None])
    return preference.mismatched_kl(jnp.asarray(rows, dtype), batch)


def kto(case, dtype):
    x, p = case.inputs, case.params
    mask, label = np.asarray(x["completion_mask"]), np.asarray(x["label"])
    count = mask.sum(axis=1, keepdims=True)
    # The file holds the reference's sums: spread over the row's tokens.
    reference = np.broadcast_to(x["ref_logps"][:, None] / count, mask.shape)
    batch = response_batch(mask, dtype, ref_logprobs=reference, scores=np.where(label, 1.0, -1.0))
    kl, (function, options) = kl_of(case, dtype), labelled_loss(p)
    loss, losses, gradient, metrics = mean_loss(
        function, x["per_token_logps"], batch, dtype, kl=kl, **options
    )
    first = np.argmax(mask > 0, axis=1)[:, None]
    share = jnp.mean(metrics["desirable"])
    chosen = jnp.mean(metrics["rewards/desirable_part"]) / jnp.maximum(share, 1e-9)
    rejected = jnp.mean(metrics["rewards/undesirable_part"]) / jnp.maximum(1 - share, 1e-9)
    found = {"kl": kl, "rewards/chosen": chosen, "rewards/rejected": rejected}
    found["rewards/margins"] = chosen - rejected
    out = {
        "output/loss": loss,
        "output/losses": losses,
        "output/rewards": metrics["rewards"],
        "grad/per_token_logps": (gradient, mask > 0),
        "grad/logps": jnp.take_along_axis(gradient, first, axis=1)[:, 0],
    }
    return out | trl_metrics(found, case)


def labelled_sums(case, dtype):
    """(batch, log-probs) of desirable rows, then undesirable ones, of one token each."""
    x = case.inputs
    logps = np.concatenate([x["chosen_logps"], x["rejected_logps"]])[:, None]
    reference = np.concatenate([x["ref_chosen_logps"], x["ref_rejected_logps"]])[:, None]
    label = np.arange(len(logps)) < len(x["chosen_logps"])
    scores = np.where(label, 1.0, -1.0)
    return response_batch(np.ones(logps.shape), dtype, ref_logprobs=reference, scores=scores), logps


def labelled_sides(case, gradient, metrics):
    n = len(case.inputs["chosen_logps"])
    return {
        "output/chosen_rewards": metrics["rewards"][:n],
        "output/rejected_rewards": metrics["rewards"][n:],
        "grad/chosen_logps": gradient[:n, 0],
        "grad/rejected_logps": gradient[n:, 0],
    }


def kto_v024(case, dtype):
    batch, logps = labelled_sums(case, dtype)
    kl, (function, options) = kl_of(case, dtype), labelled_loss(case.params)
    loss, losses, gradient, metrics = mean_loss(function, logps, batch, dtype, kl=kl, **options)
    out = {"output/loss": loss, "output/losses": losses}
    if "kl" in case.outputs:
        out["output/kl"] = jnp.reshape(kl, case.outputs["kl"].shape)
    return out | labelled_sides(case, gradient, metrics)


def bco(case, dtype):
    x, p = case.inputs, case.params
    batch, logps = labelled_sums(case, dtype)
    policy = Policy(jnp.asarray(logps, dtype), jnp.zeros_like(batch.mask))
    rewards = p["beta"] * common.log_ratios(policy, batch, by="check")
    before = (jnp.asarray(x[f"running_{k}_before"], dtype) for k in ("mean", "count"))
    mean, count = preference.running_mean(*before, jnp.mean(rewards), batch.rows)
    options = {"beta": p["beta"], "delta": mean}
    if "rejected_desirable_prob" in x:
        unread = np.full(len(x["chosen_logps"]), 0.5)
        probability = np.concatenate([unread, x["rejected_desirable_prob"]])
        options["desirable_probability"] = jnp.asarray(probability, dtype)
        options |= {k: p[k] for k in ("min_density_ratio", "max_density_ratio")}
    loss, losses, gradient, metrics = mean_loss(preference.bco, logps, batch, dtype, **options)
    out = {"output/loss": loss, "output/losses": losses, "output/delta": mean}
    if "running_mean" in case.outputs:
        out |= {"output/running_mean": mean, "output/running_count": count}
    why = "the loss reads the running mean alone; its variance is not kept"
    omitted = {"output/running_std": why, "output/running_var": why}
    return out | labelled_sides(case, gradient, metrics) | {"omitted": omitted}


def xpo(case, dtype):
    x, p = case.inputs, case.params
    won = np.asarray(x["chosen_is_model"])[:, None]

    def rows(ours, theirs):
        return interleaved(np.where(won, ours, theirs), np.where(won, theirs, ours))

    logps = rows(x["model_logps_model_data"], x["model_logps_ref_data"])
    reference = rows(x["ref_logps_model_data"], x["ref_logps_ref_data"])
    batch = response_batch(np.ones(logps.shape), dtype, ref_logprobs=reference)
    loss, _, gradient, metrics = mean_loss(
        preference.xpo, logps, batch, dtype, chosen_is_policy=jnp.asarray(won[:, 0]),
        beta=p["beta"], alpha=p["alpha"], loss=p["loss_type"],
    )  # fmt: skip
    return {
        "output/loss": loss,
        "output/dpo_losses": metrics["dpo_loss"],
        "output/xpo_losses": metrics["exploration"],
        "grad/model_logps_model_data": jnp.where(won, gradient[::2], gradient[1::2]),
        "grad/model_logps_ref_data": jnp.where(won, gradient[1::2], gradient[::2]),
    }


def nash_md(case, dtype):
    x = case.inputs
    logps = x["model_logps"]
    batch = response_batch(
        np.ones(logps.shape), dtype, ref_logprobs=x["ref_logps"], scores=x["probability"]
    )
    loss, _, gradient, metrics = mean_loss(
        preference.nash_md, logps, batch, dtype, beta=case.params["beta"]
    )
    return {
        "output/loss": loss,
        "output/score": metrics["score"],
        "output/kl": metrics["kl"],
        "grad/model_logps": gradient,
    }


def sppo_online(case, dtype):
    """verl's loss takes rewards that its trainer has centred, and the file its inputs as they are:
    the soft mean beside them. The loss is a mean over the rows that have tokens."""
    x, p = case.inputs, case.params
    batch = response_batch(
        x["response_mask"], dtype, old_logprobs=x["old_log_prob"], scores=x["rewards"]
    )
    live = np.asarray(x["response_mask"]).sum(axis=1) > 0
    scale = np.where(live, len(live) / max(live.sum(), 1), 0.0)

    def over_live(policy, batch, **options):
        loss, metrics = preference.sppo_online(policy, batch, **options)
        return loss * scale, metrics

    loss, _, gradient, metrics = mean_loss(over_live, x["log_prob"], batch, dtype, eta=p["eta"])
    return {
        "output/loss": loss,
        "output/log_ratios": metrics["log_ratio"],
        "output/scaled_rewards": metrics["target"],
        "output/softmean_rewards": preference.soft_mean(batch.scores, p["softmean_beta"]),
        "grad/log_prob": gradient,
    }


CHECKS = {
    "trl/dpo": dpo,
    "trl/dpo_seq_v024": dpo_v024,
    "trl/cpo": cpo,
    "trl/cpo_full": cpo_full,
    "trl/orpo": orpo,
    "trl/orpo_odds_ratio": orpo_odds_ratio,
    "trl/tpo": tpo,
    "trl/kto": kto,
    "trl/kto_seq_v024": kto_v024,
    "trl/bco": bco,
    "trl/xpo": xpo,
    "trl/nash_md": nash_md,
    "verl/recipe_sppo_loss": sppo_online,
    "verl/recipe_online_dpo": online_dpo,
}
