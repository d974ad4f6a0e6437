"""Losses of labelled rows and of games against TRL and verl's recipes, and what pairs share with
them; preference.py takes this table over."""

import jax
import jax.numpy as jnp
import numpy as np

from rljax.losses import preference
from rljax.losses.policy import PolicyOutputs
from rljax.losses.preference import common, games, unpaired

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


def mean_loss(function, x, batch, dtype, **options):
    """(mean, per example, gradient of the mean, metrics) with respect to the log-probs x."""

    def total(x):
        losses, metrics = function(PolicyOutputs(x, jnp.zeros_like(x)), batch, **options)
        return jnp.mean(losses), (losses, metrics)

    (loss, (losses, metrics)), gradient = jax.value_and_grad(total, has_aux=True)(
        jnp.asarray(x, dtype)
    )
    return loss, losses, gradient, metrics


def trl_metrics(metrics, case):
    """TRL's names of the metrics that a case holds."""
    found = {name.replace("/", "."): jnp.mean(value) for name, value in metrics.items()}
    return {f"metric/{k}": found[k] for k in case.metrics if k in found}


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
    return unpaired.mismatched_kl(jnp.asarray(rows, dtype), batch)


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
    policy = PolicyOutputs(jnp.asarray(logps, dtype), jnp.zeros_like(batch.mask))
    rewards = p["beta"] * common.log_ratios(policy, batch, by="check")
    before = (jnp.asarray(x[f"running_{k}_before"], dtype) for k in ("mean", "count"))
    mean, count = unpaired.running_mean(*before, jnp.mean(rewards), batch.rows)
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
        preference.xpo,
        logps,
        batch,
        dtype,
        chosen_is_policy=jnp.asarray(won[:, 0]),
        beta=p["beta"],
        alpha=p["alpha"],
        loss=p["loss_type"],
    )
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
        "output/softmean_rewards": games.soft_mean(batch.scores, p["softmean_beta"]),
        "grad/log_prob": gradient,
    }


CHECKS = {
    "trl/kto": kto,
    "trl/kto_seq_v024": kto_v024,
    "trl/bco": bco,
    "trl/xpo": xpo,
    "trl/nash_md": nash_md,
    "verl/recipe_sppo_loss": sppo_online,
}
