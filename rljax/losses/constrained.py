"""The loss of CGPO (arXiv 2409.20370): likelihoods and pairs that its optimizers chose
(rljax.shaping.constrained), of several tasks of a mixture at once.

Axes: B rows, S tokens, L tasks, N examples.
"""

import jax
import jax.numpy as jnp

from rljax import batch as batches
from rljax.batch import Batch
from rljax.contracts import contract
from rljax.losses.policy import PolicyOutputs
from rljax.losses.preference.common import log_ratios
from rljax.metric import Metric

METRICS = {
    "likelihood_loss": Metric("the part of the loss that weighs log-probabilities (cgpo)", "nats"),
    "pair_loss": Metric("the part of the loss that compares pairs (cgpo)", "", "falls"),
}


@contract(
    reads=("advantages", "task", "ref_logprobs"), rows=lambda options: options["rows_per_example"]
)
def constrained_policy_loss(
    policy: PolicyOutputs,
    batch: Batch,
    *,
    scales: jax.Array,
    pair_betas: tuple[float, ...],
    rows_per_example: int = 1,
):
    """scale (sum over rows of -advantage log pi(y) - log sigmoid(beta (Delta_0 - Delta_1))): [N].

    Delta = log pi(y) - log ref(y) of rows 0 and 1 of an example; that term is there for tasks whose
    pair_betas [L] is above 0. `advantages` are weights of log pi, without gradient; scales [L] are
    of the row's `task`. Metrics: both parts of the loss.
    """
    advantages = jax.lax.stop_gradient(batch.advantages)
    by_row = -batches.row_sum(advantages * policy.logprobs, batch)
    likelihood = jnp.sum(by_row.reshape(-1, rows_per_example), axis=1)
    task = batch.task[::rows_per_example]
    scale = jax.lax.stop_gradient(scales)[task]
    parts = {"likelihood_loss": scale * likelihood}
    if any(pair_betas):
        beta = jnp.asarray(pair_betas, likelihood.dtype)[task]
        delta = log_ratios(policy, batch, by="cgpo").reshape(-1, rows_per_example)
        pair = -jax.nn.log_sigmoid(beta * (delta[:, 0] - delta[:, 1]))
        parts["pair_loss"] = scale * jnp.where(beta > 0, pair, 0.0)
    return sum(parts.values()), parts
