"""Random draws of a simulated run: lengths of responses in tokens, turns of an episode,
seconds of a tool.

A draw is a function of (rng, count) that returns positive numbers [count]; `mean` is that without
the cap. It raises InputError for an option that is not above 0.
"""

import math

import numpy as np

from rljax.errors import InputError


def lognormal(rng, count: int, *, mean: float, sigma: float, cap: float = math.inf) -> np.ndarray:
    """Draws exp(N(ln(mean) - sigma^2 / 2, sigma)), at most `cap`: [count].

    Raises InputError for a sigma below 0.
    """
    _check("lognormal", mean=mean, cap=cap)
    if not 0 <= sigma < math.inf:
        fix = "sigma=0.9, or another number of 0 or more"
        raise InputError("sigma of lognormal", value=sigma, rule=">= 0", fix=fix)
    return np.minimum(rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, count), cap)


def geometric(rng, count: int, *, mean: float, cap: float = math.inf) -> np.ndarray:
    """Draws lengths, in tokens, of a policy that stops at every token with a chance of 1 / mean; at
    most `cap`: [count].

    Raises InputError for a mean below 1.
    """
    _check("geometric", mean=mean, cap=cap)
    if mean < 1:
        raise InputError("mean of geometric", value=mean, rule=">= 1", fix="set mean to 1 or more")
    return np.minimum(rng.geometric(1 / mean, count), cap)


def uniform(rng, count: int, *, low: float, high: float) -> np.ndarray:
    """Draws numbers from `low` to `high`, each as likely as the others: [count].

    Raises InputError unless low <= high.
    """
    _check("uniform", low=low, high=high)
    if high < low:
        rule, fix = f"at least low, {low}", f"set high to {low} or more"
        raise InputError("high of uniform", value=high, rule=rule, fix=fix)
    return rng.uniform(low, high, count)


def fixed(rng, count: int, *, value: float) -> np.ndarray:
    """Returns `count` times the same number, `value`: [count]."""
    _check("fixed", value=value)
    return np.full(count, float(value))


def _check(name: str, **positive: float) -> None:
    for option, value in positive.items():
        if not value > 0:
            raise InputError(
                f"{option} of {name}", value=value, fix=f"set {option} to a number above 0"
            )
