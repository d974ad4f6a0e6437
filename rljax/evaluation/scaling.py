"""How far a recipe will get: the sigmoid of performance over compute, and its fit (ScaleRL, arXiv
2510.13786)."""

from collections.abc import Sequence

import numpy as np

from rljax.errors import InputError


def sigmoid_curve(compute, *, start: float, asymptote: float, midpoint: float, steepness: float):
    """R(C) = start + (asymptote - start) / (1 + (midpoint / C)^steepness)."""
    compute = np.asarray(compute, np.float64)
    return start + (asymptote - start) / (1 + (midpoint / compute) ** steepness)


def fit_sigmoid(
    compute: Sequence[float], performance: Sequence[float], *, start: float, skip: int = 0
) -> dict[str, float]:
    """Least squares of `sigmoid_curve` over asymptote, midpoint and steepness -> those, and r2.

    `start` is the performance before training; the first `skip` points, where the curve is not yet
    a sigmoid, are left out. Compute in any unit: midpoint is in the same.
    """
    from scipy.optimize import least_squares

    x, y = (np.asarray(v, np.float64)[skip:] for v in (compute, performance))
    if x.shape != y.shape or x.size < 4 or (x <= 0).any() or not np.isfinite([x, y]).all():
        raise InputError(
            "fit_sigmoid", value=f"{x.size} and {y.size} points",
            rule="at least 4 pairs after `skip`, compute > 0, all finite",
        )  # fmt: skip

    def unpack(p):  # logarithms keep midpoint and steepness positive
        return dict(asymptote=p[0], midpoint=np.exp(p[1]), steepness=np.exp(p[2]))

    def residual(p):
        return sigmoid_curve(x, start=start, **unpack(p)) - y

    tries = [
        least_squares(residual, [max(y.max(), start + 1e-3), np.log(np.quantile(x, q)), np.log(b)])
        for q in (0.2, 0.5, 0.8)
        for b in (0.5, 1.0, 2.0, 4.0)
    ]
    best = min(tries, key=lambda found: found.cost)
    spread = float(np.sum((y - y.mean()) ** 2))
    r2 = 1 - 2 * best.cost / spread if spread > 0 else 0.0
    return {**{k: float(v) for k, v in unpack(best.x).items()}, "r2": float(r2)}
