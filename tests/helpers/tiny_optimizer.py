"""An optimizer and a schedule from outside the package."""

import jax
import optax

from rljax.learn.matrices import decay_matrices


def halved(learning_rate, weight_decay, *, power):
    """Gradient descent along the gradient's sign times its size to a power."""

    def bend(updates, _):
        return jax.tree.map(lambda g: abs(g) ** power * (g / (abs(g) + 1e-30)), updates)

    return optax.chain(
        optax.stateless(bend),
        decay_matrices(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


def no_optimizer(learning_rate):
    """Forgets to return one."""


def staircase(lr, steps, *, height):
    """lr, divided by height after half of the steps."""
    return optax.piecewise_constant_schedule(lr, {steps // 2: 1 / height})
