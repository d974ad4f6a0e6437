"""pass@1 of prompts by the length of their responses, and how two policies differ on each length.

A bucket holds prompts, by the mean length of their responses, so that the two policies are compared
on the same prompts. Axes: P prompts.
"""

import math
from collections.abc import Sequence

import numpy as np

from rljax.evaluation.policy import SHARE, bootstrap

Bucket = tuple[str, float, float]  # name, lower bound (excluded) and upper bound in tokens


def buckets(bounds: Sequence[int]) -> list[Bucket]:
    """The buckets between `bounds` in tokens: (100, 200) makes tokens<=100, 100<tokens<=200 and
    tokens>200; () makes none."""
    edges = sorted(bounds)
    if not edges:
        return []
    between = [(f"{a}<tokens<={b}", a, b) for a, b in zip(edges, edges[1:], strict=False)]
    last = (f"tokens>{edges[-1]}", edges[-1], math.inf)
    return [(f"tokens<={edges[0]}", -1, edges[0]), *between, last]


def by_length(
    name: str,
    values: np.ndarray,
    tokens: np.ndarray,
    bounds: Sequence[int],
    within: tuple[float, float] = SHARE,
) -> dict[str, dict]:
    """{"NAME/tokens<=100": mean and interval of `values` [P] over the prompts whose `tokens` [P],
    the mean length of their responses, lie in the bucket, ...}. A bucket without a known value is
    left out."""
    out = {}
    for bucket, above, upto in buckets(bounds):
        bucket_values = values[(tokens > above) & (tokens <= upto)]
        if np.any(~np.isnan(bucket_values)):
            out[f"{name}/{bucket}"] = bootstrap(bucket_values, within=within)
    return out
