"""Small roles that hold what outlives a step: an adaptive KL coefficient, a running baseline.

What lives here: their state and its update. They are pytrees like every role (rljax.roles), so that
checkpoints hold them.
"""

import dataclasses

import jax
import jax.numpy as jnp


def _static():
    return dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KLController:
    """Scales the KL coefficients so that the KL stays near `target` (arXiv 1909.08593).

    scale <- scale (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon), n sequences. The coefficient
    in use is the config's times `state`, which starts at 1.
    """

    state: jax.Array
    target: float = _static()
    horizon: float = _static()

    def update(self, kl: jax.Array, n) -> "KLController":
        error = jnp.clip(kl / self.target - 1, -0.2, 0.2)
        return dataclasses.replace(self, state=self.state * (1 + error * n / self.horizon))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Baseline:
    """The running mean of the batches' mean scores: REINFORCE's baseline. state: [2], the decayed
    sum and its decayed weight, so that the first steps are not biased towards 0."""

    state: jax.Array

    @property
    def value(self) -> jax.Array:
        return self.state[0] / jnp.maximum(self.state[1], 1e-8)

    def update(self, mean: jax.Array, decay: float) -> "Baseline":
        seen = jnp.stack([mean.astype(self.state.dtype), jnp.ones((), self.state.dtype)])
        return dataclasses.replace(self, state=decay * self.state + (1 - decay) * seen)
