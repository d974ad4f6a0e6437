"""REINFORCE: no critic and no groups; the baseline is the running mean of the scores (Williams
1992). With advantage="reinforce_plus_plus()" the baseline is the batch itself (arXiv 2501.03262).
"""

import dataclasses

import jax.numpy as jnp

from rljax.batch import masked_mean
from rljax.contracts import Share, contract
from rljax.dataflows.grpo import grpo
from rljax.metric import Metric
from rljax.roles import program

METRICS = {
    "baseline": Metric(
        "running mean of the scores that is subtracted", "score", "follows reward/mean"
    )
}


@contract(safe=True, reads=("rewards", "scores", "group"), fills=("values",))
@program
def reinforce(
    batch,
    key,
    cfg,
    *,
    actor,
    baseline,
    reference=None,
    kl_controller=None,
    entropy_controller=None,
    teacher=None,
    decay: Share = 0.9,
):
    """`decay` is that of the running mean, per step; 0 = the mean of the previous batch."""
    # The mean of earlier steps only: a baseline that has seen the sample is biased.
    values = jnp.where(batch.mask > 0, baseline.value, 0.0).astype(jnp.float32)
    roles, metrics = grpo.page(
        batch.replace(values=values),
        key,
        cfg,
        actor=actor,
        reference=reference,
        kl_controller=kl_controller,
        entropy_controller=entropy_controller,
        teacher=teacher,
    )
    scored = jnp.any(batch.mask > 0, axis=1)
    updated = baseline.update(masked_mean(batch.scores, scored), decay)
    # A step whose rewards all failed says nothing of the mean.
    state = jnp.where(jnp.any(scored), updated.state, baseline.state)
    roles["baseline"] = dataclasses.replace(baseline, state=state)
    return roles, {**metrics, "baseline": baseline.value}
