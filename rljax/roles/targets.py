"""Log-probs of several given tokens at each position, for losses that read batch.target_ids."""

import functools

import jax.numpy as jnp

from rljax.batch import Batch
from rljax.kernels.logprob import token_logprobs
from rljax.models.model import Model


def target_logprobs(model: Model, params, batch: Batch, temperature=1.0, hidden=None):
    """Returns log pi of the tokens [B, S], the entropy of each choice [B, S], None, and log pi of
    batch.target_ids [B, S, M]: the fields of rljax.losses.policy.PolicyOutputs. The vocabulary is
    read once for each of the M targets, and nothing of its size is kept."""
    batch.require("target_ids", by="target_logprobs")
    hidden, head = model.readout(params, batch, hidden)
    config = model.config
    logprobs_of = functools.partial(
        token_logprobs,
        hidden,
        head,
        temperature=temperature,
        soft_cap=config.final_soft_cap,
        vocab_first=config.tie_embeddings,
        float32_head=config.head_in_float32,
        head_dtype=config.head_dtype,
        mesh=model.mesh,
    )
    logprobs, entropy, _ = logprobs_of(batch.tokens)
    of_targets = [
        logprobs_of(batch.target_ids[..., k], with_entropy=False)[0]
        for k in range(batch.target_ids.shape[-1])
    ]
    is_first = (jnp.arange(batch.tokens.shape[1]) == 0) & (batch.previous is None)

    def zero(x):
        return jnp.where(is_first, 0.0, x)

    return zero(logprobs), zero(entropy), None, jnp.stack([zero(x) for x in of_targets], axis=-1)
