"""Small roles that hold what outlives a step: an adaptive KL coefficient, running baselines."""

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SeatBaseline(Role):
    """The running mean of the returns of each seat of the environment: the baseline of self-play
    (SPIRAL, arXiv 2506.24119), where siblings of a zero-sum game say nothing of each other. state:
    [seats, 2], the decayed sum and its decayed weight of each."""

    state: jax.Array

    @property
    def values(self) -> jax.Array:
        """[seats]; 0 for a seat that has not been scored yet."""
        return self.state[:, 0] / jnp.maximum(self.state[:, 1], 1e-8)

    def update(self, means: jax.Array, scored: jax.Array, decay: float) -> "SeatBaseline":
        """After a step with these mean returns [seats]; a seat that was not `scored` keeps its."""
        seen = jnp.stack([means, jnp.ones_like(means)], axis=1).astype(self.state.dtype)
        moved = decay * self.state + (1 - decay) * seen
        return dataclasses.replace(self, state=jnp.where(scored[:, None], moved, self.state))
