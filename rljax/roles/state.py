"""Small roles that hold what outlives a step: an adaptive KL coefficient, a running baseline."""

import dataclasses

import jax
import jax.numpy as jnp

from rljax.roles.role import Role, static_field


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KLController(Role):
    """Scales the KL coefficients so that the KL stays near `target` (arXiv 1909.08593).

    scale <- scale (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon), n sequences. The coefficient
    in use is the config's times `state`, which starts at 1.
    """

    state: jax.Array
    target: float = static_field()
    horizon: float = static_field()

    def update(self, kl: jax.Array, n) -> "KLController":
        error = jnp.clip(kl / self.target - 1, -0.2, 0.2)
        return dataclasses.replace(self, state=self.state * (1 + error * n / self.horizon))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Baseline(Role):
    """The running mean of the batches' mean scores: REINFORCE's baseline. state: [2], the decayed
    sum and its decayed weight, so that the first steps are not biased towards 0."""

    state: jax.Array

    @property
    def value(self) -> jax.Array:
        return self.state[0] / jnp.maximum(self.state[1], 1e-8)

    def update(self, mean: jax.Array, decay: float) -> "Baseline":
        seen = jnp.stack([mean.astype(self.state.dtype), jnp.ones((), self.state.dtype)])
        return dataclasses.replace(self, state=decay * self.state + (1 - decay) * seen)
