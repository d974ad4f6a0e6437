"""A loss and an advantage as a user writes them: TOPR (arXiv 2503.14286) and quantile advantages
(QAE, arXiv 2509.22611)."""

import jax
import jax.numpy as jnp

from rljax.advantages.grouping import dense_ids, deviation, group_statistics, on_policy_tokens
from rljax.batch import row_scores, segment_sum
from rljax.contracts import contract


@contract(reads=("advantages", "old_logprobs"))
def topr(policy, batch, *, most: float = 1.0):
    """-w A log pi. w is 1 where A > 0, else the ratio of the whole response, at most `most`."""
    batch.require("advantages", "old_logprobs", by="topr")
    difference = policy.logprobs - batch.old_logprobs
    ratio = jnp.minimum(jnp.exp(segment_sum(difference, batch)), most)
    weight = jax.lax.stop_gradient(jnp.where(batch.advantages > 0, 1.0, ratio))
    return -weight * batch.advantages * policy.logprobs, {"topr_weight": weight}


@contract(reads=("rewards", "group"), compares_samples=True)
def group_quantile(batch, *, quantile: float = 0.4, eps: float = 1e-6):
    """(score - the quantile of its group) / (std of the group + eps), on every policy token."""
    batch.require("rewards", "group", by="group_quantile")
    scores = row_scores(batch)
    siblings = batch.group[:, None] == batch.group[None, :]
    no_higher = jnp.sum(siblings & (scores[None, :] <= scores[:, None]), axis=1)
    reached = no_higher >= quantile * jnp.sum(siblings, axis=1)
    baseline = jnp.min(jnp.where(siblings & reached[None, :], scores[None, :], jnp.inf), axis=1)
    groups = group_statistics(scores, dense_ids(batch.group))
    scaled = (scores - baseline) / (deviation(groups, "sample") + eps)
    return on_policy_tokens(jnp.where(groups.live, scaled, 0.0), batch)
