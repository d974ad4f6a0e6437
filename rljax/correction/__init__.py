"""Rollout correction: the sampler that wrote the tokens is not exactly the policy being trained.

Importance weights and rejection (weights, rejection), metrics of both and of the mismatch itself
(metrics); a run warns of those outside of their limits (health). rljax.learn multiplies a loss by
`batch.weights`.

With x = old - sampler log-probs on policy tokens, every quantity here is a function of x that is
0 where the two programs agree: weights are then exactly 1. Nothing has a gradient. A sequence is a
segment, so packed and unpacked rows give the same numbers. Axes: B rows, S tokens in a row.
"""

from rljax.correction.metrics import mismatch_metrics, variance_proxy_metrics
from rljax.correction.weights import bypass_old_logprobs, rollout_correction

__all__ = [
    "bypass_old_logprobs",
    "mismatch_metrics",
    "rollout_correction",
    "variance_proxy_metrics",
]
