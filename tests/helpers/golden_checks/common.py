"""What the checks share: a batch of responses alone, the reductions by verl's names, loss and
gradient."""

import jax
import jax.numpy as jnp
import numpy as np

from rljax import learn as update
from rljax.batch import Batch
from rljax.contracts import spec
from rljax.losses.policy import PolicyOutputs


class Skip(Exception):
    """This case is not compared; the text says why."""


INTEGERS = ("group", "finish_reason", "policy_version", "step_ids", "state_ids")


def response_batch(mask, dtype=jnp.float64, **fields) -> Batch:
    """A batch of responses alone (the golden files have no prompts): mask [B, T], fields as in
    Batch."""

    def array(x, dtype):  # what numpy can convert compiles nothing
        return jnp.asarray(x if isinstance(x, jax.Array) else np.asarray(x, dtype), dtype)

    mask = array(mask, dtype)
    fields = {
        k: array(v, jnp.int32 if k in INTEGERS else dtype)
        for k, v in fields.items()
        if v is not None
    }
    return Batch(
        tokens=array(np.zeros(mask.shape), jnp.int32),
        segment_ids=array(np.ones(mask.shape), jnp.int32),
        positions=array(np.tile(np.arange(mask.shape[1]), (mask.shape[0], 1)), jnp.int32),
        mask=mask,
        **fields,
    )


def token_weights(params: dict, batch: Batch, mode: str | None = None) -> jax.Array:
    """verl's agg_loss as weights [B, S].

    Ours where the batch is the whole optimizer step. verl can be told the size of a larger batch
    (batch_num_tokens, global_batch_size, dp_size: its rows are then one shard of it), and adds 1e-8
    to the tokens of
    a row: both are reproduced here.
    """
    mode = mode or params.get("loss_agg_mode", "token-mean")
    mask, shards = batch.mask, params.get("dp_size") or 1
    tokens = params.get("batch_num_tokens") or jnp.maximum(jnp.sum(mask), 1)
    n = jnp.sum(mask, axis=1, keepdims=True)
    rows = params.get("global_batch_size") or jnp.maximum(jnp.sum(n > 0), 1)
    width = params.get("loss_scale_factor") or mask.shape[1]
    whole = not {"batch_num_tokens", "global_batch_size"} & {k for k, v in params.items() if v}
    if mode == "token-mean":
        return update.token_mean(batch) * shards if whole else mask / tokens * shards
    if mode == "token-sum":
        return update.token_sum_norm(batch, max_tokens=1) * shards
    if mode == "seq-mean-token-sum":
        return update.seq_mean_token_sum(batch) * shards if whole else mask / rows * shards
    if mode == "seq-mean-token-sum-norm":
        ours = update.seq_mean_token_sum_norm(batch, max_tokens=width) * shards
        return ours if whole else mask / rows / width * shards
    if mode == "seq-mean-token-mean":
        ours = update.seq_mean_token_mean(batch) * shards if whole else mask / n / rows * shards
        return jnp.where(n > 0, ours * n / (n + 1e-8), 0.0)  # verl's 1e-8
    raise KeyError(mode)


def reduced(loss_of, x, batch: Batch, weights, corrected=True):
    """loss_of(x, batch) -> (loss, metrics): what update.py makes of it: (loss, d loss / d x,
    metrics)."""

    def total(x):
        selected = update.select_policy_tokens(batch)
        loss, metrics = loss_of(x, selected)
        summed, sums = update.weighted_loss(loss, metrics, selected, weights, corrected=corrected)
        return summed, {k: a / jnp.maximum(b, 1) for k, (a, b) in sums.items()}

    (loss, metrics), gradient = jax.value_and_grad(total, has_aux=True)(x)
    return loss, gradient, metrics


def policy_loss(function, case, dtype, batch: Batch, weights, log_prob="log_prob", **options):
    """Loss, gradient with respect to the log-probs, and metrics of a policy loss."""
    logp = jnp.asarray(case.inputs[log_prob], dtype)
    return reduced(
        lambda x, b: function(PolicyOutputs(x, jnp.zeros_like(x)), b, **options),
        logp,
        batch,
        weights,
        corrected=not spec(function).applies_weights,
    )
