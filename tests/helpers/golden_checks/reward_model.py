"""Reward models against TRL and verl's PRIME recipe, and supervised losses against TRL's SFT."""

import jax
import jax.numpy as jnp
import numpy as np

from rljax import learn as update
from rljax.losses import policy, reward_model
from rljax.losses.implicit_reward import (
    group_accuracy,
    implicit_reward_classification,
    implicit_reward_contrast,
)

from .common import Skip, policy_loss, reduced, response_batch
from .preference_rows import interleaved, mean_loss


def bradley_terry(case, dtype):
    x, p = case.inputs, case.params
    scores = interleaved(x["rewards_chosen"], x["rewards_rejected"])
    fields = {}
    if "margin" in x:
        fields["scores"] = interleaved(x["margin"], np.zeros_like(x["margin"]))
    batch = response_batch(np.ones((len(scores), 1)), dtype, **fields)
    options = dict(center=p.get("center_rewards_coefficient", 0.0), margin="margin" in x)

    def total(scores):
        losses, metrics = reward_model.bradley_terry(scores, batch, **options)
        return jnp.mean(losses), metrics

    (loss, found), gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(scores, dtype))
    return {
        "output/loss": loss,
        "grad/rewards_chosen": gradient[::2],
        "grad/rewards_rejected": gradient[1::2],
        "metric/min_reward": jnp.min(found["score_min"]),
        "metric/max_reward": jnp.max(found["score_max"]),
        "metric/mean_reward": jnp.mean(found["score"]),
        "metric/accuracy": jnp.mean(found["accuracy"]),
        "metric/margin": jnp.mean(found["margin"]),
    }


def prm(case, dtype):
    x = case.inputs
    case.params["compute_dtype"] = "float32"  # its loss casts the logits
    labels = [None if label == -100 else float(label) for label in case.outputs["labels"]]
    why = "TRL's separators between steps: ours are what the rows say, in encode_rows"
    out = {"omitted": {"output/input_ids": why, "output/labels": why}}
    mask = np.array([[label is not None for label in labels]])
    if not mask.any():  # no label is left: TRL's loss is NaN, ours 0
        why = "NaN: the mean over no labels, which is 0 here"
        return {"omitted": out["omitted"] | {"output/loss": why, "output/accuracy": why}}
    # Its labels are 1 and 0: a wrong step is -1 here.
    values = np.array([[2 * label - 1 if label is not None else 0.0 for label in labels]])
    batch = response_batch(mask, dtype, process_rewards=values)
    loss, gradient, metrics = reduced(
        reward_model.step_classification,
        jnp.asarray(x["logits"], dtype),
        batch,
        update.token_mean(batch),
    )
    return out | {
        "output/loss": loss,
        "output/accuracy": metrics["accuracy"],
        "grad/logits": gradient,
    }


def prime(case, dtype):
    """The file's token scores are log pi - log ref; its weighted losses are sums, not means."""
    x, p = case.inputs, case.params
    mask, n = np.asarray(x["response_mask"]), p["n_samples"]
    batch = response_batch(
        mask,
        dtype,
        ref_logprobs=np.zeros(mask.shape),
        scores=x["acc"],
        group=np.arange(len(mask)) // n,
    )
    options = {"beta": p["beta"]}
    function = implicit_reward_classification
    if p["loss_type"] == "dpo":
        function = implicit_reward_contrast
        options["weighting"] = {"none": "none", "bon_acc": "labels", "bon_rm": "rewards"}[
            p["bon_mode"]
        ]
    loss, _, gradient, metrics = mean_loss(
        function, x["token_level_scores"], batch, dtype, **options
    )
    scale = 1
    if p["bon_mode"] != "none":
        p["compute_dtype"] = "float32"  # its weights are
        scale = len(mask)
    rank = group_accuracy(metrics["implicit_reward"], batch)
    if "group_accuracy" in metrics:
        rank = metrics["group_accuracy"]
    return {
        "output/loss": scale * loss,
        "output/dpo_acc": jnp.mean(rank),
        "output/dpo_acc_abs": jnp.mean(metrics["accuracy"]),
        "grad/token_level_scores": scale * gradient,
    }


def sft(case, dtype):
    """TRL divides by the labelled tokens, or by a number of them that it is told."""
    x, p = case.inputs, case.params
    batch = response_batch(x["label_mask"], dtype)
    functions = {"nll": policy.negative_log_likelihood, "dft": policy.dynamic_fine_tuning}
    if p["loss_type"] not in functions:
        raise Skip(f"loss type {p['loss_type']}")
    weights = update.token_mean(batch)
    if "num_items_in_batch" in p:
        weights = batch.mask / p["num_items_in_batch"]
    loss, gradient, _ = policy_loss(
        functions[p["loss_type"]], case, dtype, batch, weights, log_prob="per_token_logps"
    )
    return {
        "output/loss": loss,
        "grad/per_token_logps": (gradient, np.asarray(x["label_mask"]) > 0),
    }


CHECKS = {
    "trl/reward_model": bradley_terry,
    "trl/prm": prm,
    "trl/sft": sft,
    "verl/recipe_prime_rm_loss": prime,
}
