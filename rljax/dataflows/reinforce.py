"""REINFORCE: no critic and no groups; the baseline is the running mean of the scores (Williams
1992). With advantage="reinforce_plus_plus()" the baseline is the batch itself (arXiv 2501.03262).
"""

import dataclasses

import jax.numpy as jnp

from rljax.batch import masked_mean
from rljax.dataflows.grpo import learn


def reinforce(
    prompts, key, cfg, *, actor, reward, baseline, reference=None, kl_controller=None,
    decay: float = 0.9,
):  # fmt: skip
    """`decay` is that of the running mean, per step; 0 = the mean of the previous batch."""
    batch, prompts, counts = cfg.collect(prompts, key, cfg, actor=actor, reward=reward)
    # The mean of earlier steps only: a baseline that has seen the sample is biased.
    values = jnp.where(batch.mask > 0, baseline.value, 0.0)
    batch = batch.replace(values=values.astype(jnp.float32))
    roles = dict(actor=actor, reference=reference, kl_controller=kl_controller)
    new, metrics = learn(batch, cfg, **roles)
    scored = jnp.any(batch.mask > 0, axis=1)
    moved = baseline.update(masked_mean(batch.scores, scored), decay)
    # A step whose rewards all failed says nothing of the mean.
    state = jnp.where(jnp.any(scored), moved.state, baseline.state)
    new["baseline"] = dataclasses.replace(baseline, state=state)
    return new, {**metrics, **counts, "baseline": baseline.value}
