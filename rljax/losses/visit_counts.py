"""The loss of expert iteration by search: cross-entropy to the shares of visits (AlphaZero, arXiv
1712.01815; expert iteration, arXiv 1705.08439). Axes: B rows, S tokens, M children."""

import jax
import jax.numpy as jnp

from rljax.batch import Batch
from rljax.contracts import contract
from rljax.losses.policy.common import PolicyOutputs
from rljax.metric import Metric

METRICS = {
    "visits_entropy": Metric(
        "how evenly a search spread its simulations over the next tokens",
        "nats per token",
        "falls, as search and policy agree",
    ),
    "visits_kl": Metric(
        "KL of the policy from the shares of the visits", "nats per token", "falls"
    ),
}


@contract(reads=("target_ids", "target_probs"), reads_targets=True)
def visit_cross_entropy(policy: PolicyOutputs, batch: Batch):
    """- sum_k p_k log pi(target_ids_k), with p = target_probs, unreduced: [B, S].

    Raises InputError where the batch lacks target_ids or target_probs.
    """
    batch.require("target_ids", "target_probs", by="visit_cross_entropy")
    # A token that was never visited has no weight, whatever stands there.
    weighed = (batch.mask > 0)[..., None] & (batch.target_probs > 0)
    probs = jax.lax.stop_gradient(jnp.where(weighed, batch.target_probs, 0.0))
    logprobs = jnp.where(weighed, policy.targets, 0.0)
    loss = -jnp.sum(probs * logprobs, axis=-1)
    entropy = -jnp.sum(probs * jnp.log(jnp.where(probs > 0, probs, 1.0)), axis=-1)
    return loss, {"visits_entropy": entropy, "visits_kl": loss - entropy}
