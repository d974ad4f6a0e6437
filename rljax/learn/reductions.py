"""Reductions: batch -> the weight of every token in the mean of the loss: [B, S].

A reduction is computed once over the rows of one optimizer step, all devices together, before
microbatching. The step's loss is sum(weights * loss), which is linear in the rows, so that
microbatches, packing and sharding give the same gradient by construction.

In the formulas B+ = sequences with a policy token, n = policy tokens of a sequence, N = all policy
tokens. A sequence is a segment, or the rows of one episode.
"""

import jax
import jax.numpy as jnp

from rljax import batch as batches
from rljax.batch import Batch
from rljax.contracts import contract
from rljax.errors import InputError


def _positive(name: str, max_tokens: int) -> int:
    if max_tokens < 1:
        raise InputError(
            f"{name}(max_tokens)",
            value=max_tokens,
            fix=f"{name}(max_tokens=1024), or another number of 1 or more",
        )
    return max_tokens


@contract(safe=True)
def token_mean(batch: Batch) -> jax.Array:
    """Every policy token weighs 1/N.

    Returns [B, S].
    """
    return batch.mask / jnp.maximum(jnp.sum(batch.mask), 1)


@contract(safe=True)
def seq_mean_token_sum(batch: Batch) -> jax.Array:
    """Every policy token weighs 1/B+.

    Returns [B, S].
    """
    return batch.mask / jnp.maximum(batches.sequence_count(batch), 1)


@contract(safe=True)
def seq_mean_token_mean(batch: Batch) -> jax.Array:
    """Every policy token weighs 1/(B+ n).

    Returns [B, S].
    """
    return seq_mean_token_sum(batch) / jnp.maximum(batches.sequence_tokens(batch), 1)


@contract(safe=True)
def seq_mean_token_sum_norm(batch: Batch, *, max_tokens: int) -> jax.Array:
    """Every policy token weighs 1/(B+ max_tokens): Dr. GRPO's constant.

    Returns [B, S]. Raises InputError if `max_tokens` is below 1.
    """
    return seq_mean_token_sum(batch) / _positive("seq_mean_token_sum_norm", max_tokens)


@contract(safe=True)
def token_sum_norm(batch: Batch, *, max_tokens: int) -> jax.Array:
    """Every policy token weighs 1/max_tokens: grows with the batch.

    Returns [B, S]. Raises InputError if `max_tokens` is below 1.
    """
    return batch.mask / _positive("token_sum_norm", max_tokens)


@contract(safe=True, reads=("group",))
def prompt_mean(batch: Batch) -> jax.Array:
    """Every policy token weighs 1/(prompts x policy tokens of its group): ScaleRL; unpacked.

    Returns [B, S].
    """
    batch.require("group", by="prompt_mean")
    tokens = jnp.sum(batch.mask, axis=1)
    same_group = (batch.group[:, None] == batch.group[None, :]).astype(batch.mask.dtype)
    group_tokens = same_group @ tokens
    # A row holds a share tokens / group_tokens of its group; the shares add up to the live groups.
    groups = jnp.sum(tokens / jnp.maximum(group_tokens, 1))
    return batch.mask / jnp.maximum(group_tokens, 1)[:, None] / jnp.maximum(groups, 1)


@contract(safe=True, reads=("scores",))
def positive_token_mean(batch: Batch, *, correct_at: float = 1.0) -> jax.Array:
    """Every policy token of a correct row (score >= correct_at) weighs 1 / their number, others 0
    (VAPO's positive-example loss).

    Returns [B, S].
    """
    batch.require("scores", by="positive_token_mean")
    correct = batch.mask * (batch.scores >= correct_at).astype(batch.mask.dtype)[:, None]
    return correct / jnp.maximum(jnp.sum(correct), 1)
