"""Learning-rate schedules, named in a config: (lr, steps, options) -> a function of the step.

`lr` is the peak, `steps` the optimizer steps after warm-up; later ones keep the last value. A
schedule names those of the two that it reads. Warm-up comes before, whatever the schedule
(rljax.learn.optimizers).
"""

from typing import Literal

import jax.numpy as jnp
import optax

from rljax.contracts import AboveZero, NotNegative, Share, contract
from rljax.errors import InputError


@contract(safe=True)
def constant(lr: float) -> optax.Schedule:
    """lr at every step."""
    return optax.constant_schedule(lr)


@contract(safe=True)
def linear(lr: float, steps: int, *, final: NotNegative = 0.0) -> optax.Schedule:
    """From lr to final x lr on a line.

    Raises InputError unless 0 <= final <= 1. `steps` counts optimizer steps.
    """
    _check_final(final)
    return optax.linear_schedule(lr, final * lr, steps)


@contract(safe=True)
def cosine(
    lr: float, steps: int, *, final: NotNegative = 0.0, cycles: AboveZero = 0.5
) -> optax.Schedule:
    """final x lr + (1 - final) lr (1 + cos(2 pi cycles t)) / 2, t from 0 to 1 (arXiv 1608.03983);
    half a cycle ends at final x lr.

    Raises InputError unless 0 <= final <= 1 and cycles > 0. `steps` counts optimizer steps.
    """
    _check_final(final)
    if cycles <= 0:
        raise InputError(
            "option 'cycles' of cosine",
            value=cycles,
            fix="cosine(cycles=0.5), or another number above 0",
        )

    def at(step):
        step = jnp.minimum(step, steps)
        falling = 0.5 * (1 + jnp.cos(2 * cycles * jnp.pi * step / steps))
        return lr * ((1 - final) * falling + final)

    return at


@contract(safe=True)
def wsd(
    lr: float,
    steps: int,
    *,
    decay: Share = 0.1,
    final: NotNegative = 0.0,
    shape: Literal["linear", "cosine"] = "linear",
) -> optax.Schedule:
    """Warm-up, stable, decay (arXiv 2404.06395): lr, and over the last `decay` of the steps a
    `shape` down to final x lr.

    Raises InputError unless 0 < decay <= 1 and 0 <= final <= 1. `steps` counts optimizer steps.
    """
    if not 0 < decay <= 1:
        raise InputError(
            "option 'decay' of wsd",
            value=decay,
            rule="above 0, at most 1",
            fix="wsd(decay=0.1), or another share",
        )
    stable = int(steps * (1 - decay))
    fall = {"linear": linear, "cosine": cosine}[shape](lr, steps - stable, final=final)
    return optax.join_schedules([constant(lr), fall], [stable])


def _check_final(final: float) -> None:
    if not 0 <= final <= 1:
        raise InputError(
            "option 'final' of a schedule",
            value=final,
            rule="from 0 to 1, of lr",
            fix="final=0.1, or another share of the learning rate",
        )
